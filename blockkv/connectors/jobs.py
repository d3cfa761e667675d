"""Loads and stores in the background, for engines that must not be kept waiting.

::

    jobs = BackgroundJobs(store, load_deadline_s=10)
    jobs.submit_load(7, keys, buffers)          # returns at once
    for outcome in jobs.finished():             # nor does this wait
        outcome.job, outcome.done               # 7, one bool for each key

Invariants
  * a job ends exactly once: it appears in one `finished`, also when it failed, was dropped or is late;
  * memory is the caller's again once its job has ended: from then on nothing here reads or writes it;
  * a load that is late ends at its deadline, also when the device hangs. The device therefore writes to
    memory of ours, and what has arrived and verified is copied. `staged=False` saves that copy, and gives up
    the deadline of what the device has got already;
  * a store ends when its writes have: a chunk must not be written from memory that changes. A deadline drops
    what has not begun.

Not here: which keys are there (ask the store), and what an engine makes of a failure.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import blockkv
from blockkv.errors import BatchError, BlockKVError, InvalidArgument

__all__ = ["BackgroundJobs", "Outcome"]

STAGED_PIECE_BYTES = 8 << 20
"""How much of a job a thread loads at a time where it is copied: one piece is, while another one is read."""
PIECE_BYTES = 32 << 20
"""How much of it where nothing is copied: enough for registered memory and few wake-ups to pay."""
DEFAULT_MAX_STORE_BYTES = 1 << 30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    job: int
    is_load: bool
    done: tuple[bool, ...]
    """For each key: the memory was filled (load); the chunk is in the store now (store)."""
    bytes_moved: int
    """Payload read, or written; chunks that were there already are none."""
    duration_s: float
    reason: str = ""
    """Why not all of it was done; "" for keys that are simply not there."""

    @property
    def all_done(self) -> bool:
        return all(self.done)


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    is_load: bool
    keys: Sequence[str | bytes]
    buffers: Sequence[torch.Tensor]
    deadline_ns: int
    durable: bool
    done: list[bool]
    begun_ns: int = field(default_factory=time.monotonic_ns)
    pieces_left: int = 0
    admitted_bytes: int = 0
    bytes_moved: int = 0
    reason: str = ""
    rewritten: frozenset[str | bytes] = frozenset()
    running: int = 0
    """Pieces that a thread has taken and not finished with."""
    touching: int = 0
    """Of those, the ones that may read or write the caller's memory; while there are any the job goes on."""
    late: bool = False
    ended: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for one in self.buffers)


@dataclass(slots=True, eq=False)
class _Piece:
    job: _Job
    first: int
    last: int
    size_bytes: int
    touches: bool = False


class BackgroundJobs:
    """Carries out loads and stores on threads of its own, loads first. Thread-safe."""

    def __init__(
        self,
        store: blockkv.Store,
        *,
        load_deadline_s: float | None = None,
        store_deadline_s: float | None = None,
        staged: bool = True,
        load_threads: int = 2,
        store_threads: int = 2,
        max_store_bytes: int = DEFAULT_MAX_STORE_BYTES,
        ended: Callable[[Outcome], None] | None = None,
    ) -> None:
        """`ended` is called with the outcome of each job, once, on the thread that ended it and with no lock
        held; `finished` has nothing to tell then. While it takes its time that thread moves no bytes.

        Stores that would make more than `max_store_bytes` wait are dropped. Deadlines count from the
        submission; None: none. Raises InvalidArgument for numbers that make no sense.
        """
        for name, value in (("load_deadline_s", load_deadline_s), ("store_deadline_s", store_deadline_s)):
            if value is not None and not 0 < value <= threading.TIMEOUT_MAX:  # nor is it no number
                raise InvalidArgument(f"{name} is {value}; use seconds above 0, or None")
        if min(load_threads, store_threads) < 1 or max_store_bytes < 1:
            raise InvalidArgument("load_threads, store_threads and max_store_bytes are at least 1")
        self._store = store
        self._deadlines_s = {True: load_deadline_s, False: store_deadline_s}
        self._staged = staged
        self._max_store_bytes = max_store_bytes
        self._ended = ended
        self._lock = threading.Lock()
        self._work = {True: threading.Condition(self._lock), False: threading.Condition(self._lock)}
        self._quiet = threading.Condition(self._lock)
        self._watched = threading.Condition(self._lock)
        self._queues: dict[bool, deque[_Piece]] = {True: deque(), False: deque()}
        self._jobs: dict[int, _Job] = {}
        self._outcomes: list[Outcome] = []
        """Not told yet, by `finished` or by calling `ended`."""
        self._store_bytes = 0
        self._overdue = 0
        self._watching_until_ns = 0
        """When deadlines are looked at next by themselves; 0: not at all."""
        self._closing = False
        self.counters = dict.fromkeys(
            ("loads", "loads_late", "load_misses", "stores", "stores_late", "stores_dropped"), 0
        )
        self._threads = [
            *(self._start(f"blockkv-load-{one}", self._carry_out, True) for one in range(load_threads)),
            *(self._start(f"blockkv-store-{one}", self._carry_out, False) for one in range(store_threads)),
        ]
        self._watch = self._start("blockkv-deadlines", self._watch_deadlines)

    # -- for the engine --------------------------------------------------------------------------------

    def submit_load(self, job: int, keys: Sequence[str | bytes], buffers: Sequence[torch.Tensor]) -> None:
        """Fill `buffers`, contiguous uint8 tensors of the chunks' sizes, one for each key."""
        self._submit(job, True, keys, buffers, durable=False)

    def submit_store(
        self,
        job: int,
        keys: Sequence[str | bytes],
        buffers: Sequence[torch.Tensor],
        *,
        durable: bool = False,
        rewrite: Collection[str | bytes] = (),
    ) -> None:
        """Put the bytes of `buffers`, contiguous uint8 tensors that do not change until the job has ended.

        Keys that are stored already stay as they are, but for those in `rewrite`: what is under them is
        deleted first.
        """
        self._submit(job, False, keys, buffers, durable=durable, rewritten=frozenset(rewrite))

    def finished(self) -> list[Outcome]:
        """The jobs that ended since the last call; none where `ended` is told of them."""
        return self._untold() if self._ended is None else []

    def pending(self) -> int:
        """Jobs that were submitted and have not ended."""
        with self._lock:
            return len(self._jobs)

    @property
    def stalled(self) -> bool:
        """Something is with the device that should have been done by its deadline.

        What is submitted now would most likely be late as well.
        """
        return self._overdue > 0

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every job has ended; their outcomes still wait for `finished`. False: not in time."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._jobs, timeout_s)

    def close(self, timeout_s: float = 30) -> bool:
        """End: what has not begun is dropped, what has is waited for. False when a device did not answer."""
        with self._lock:
            self._closing = True
            for queue in self._queues.values():
                while queue:
                    self._drop(queue.popleft(), "the connector is being closed")
            for condition in (*self._work.values(), self._watched):
                condition.notify_all()
        self._tell()
        until = time.monotonic() + timeout_s
        for thread in (*self._threads, self._watch):
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- inside ----------------------------------------------------------------------------------------

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _submit(
        self,
        number: int,
        is_load: bool,
        keys: Sequence[str | bytes],
        buffers: Sequence[torch.Tensor],
        durable: bool,
        rewritten: frozenset[str | bytes] = frozenset(),
    ) -> None:
        if len(keys) != len(buffers):
            raise InvalidArgument(f"{len(keys)} keys but {len(buffers)} buffers")
        deadline_s = self._deadlines_s[is_load]
        job = _Job(number, is_load, list(keys), list(buffers), 0, durable, [False] * len(keys))
        job.rewritten = rewritten
        job.deadline_ns = job.begun_ns + int(deadline_s * 1e9) if deadline_s is not None else 0
        size_bytes = job.size_bytes
        with self._lock:
            if number in self._jobs:
                raise InvalidArgument(f"job {number} has not ended yet")
            self._jobs[number] = job
            if self._closing:
                job.reason = "the connector is being closed"
            elif not is_load and self._store_bytes and self._store_bytes + size_bytes > self._max_store_bytes:
                job.reason = f"stores of {self._store_bytes} bytes are waiting already"
                self.counters["stores_dropped"] += len(keys)
            else:
                pieces = _pieces(job, STAGED_PIECE_BYTES if is_load and self._staged else PIECE_BYTES)
                job.pieces_left = len(pieces)
                self._queues[is_load].extend(pieces)
                if not is_load:
                    job.admitted_bytes = size_bytes
                    self._store_bytes += size_bytes
                self._work[is_load].notify(len(pieces))
                if job.deadline_ns and not 0 < self._watching_until_ns <= job.deadline_ns:
                    self._watched.notify()  # not for every job: there may be hundreds, which it looks through
            if not job.pieces_left:
                self._end(job)
        self._tell()

    def _carry_out(self, is_load: bool) -> None:
        work = self._work[is_load]
        arena: torch.Tensor | None = None
        while True:
            with self._lock:
                work.wait_for(lambda: self._queues[is_load] or self._closing)
                if not (queue := self._queues[is_load]):
                    return
                piece = queue.popleft()
                piece.job.running += 1
                if not (is_load and self._staged):
                    self._touch(piece)
            try:
                if not is_load:
                    self._store_piece(piece)
                elif self._staged:
                    if arena is None or arena.nbytes < piece.size_bytes:
                        arena = blockkv.empty(max(STAGED_PIECE_BYTES, piece.size_bytes), torch.uint8)
                    self._load_staged(piece, arena)
                else:
                    self._load_direct(piece)
            except BaseException as error:  # whatever it is, the job must end
                log.exception("a background %s failed", "load" if is_load else "store")
                self._piece_ended(piece, [], str(error))
            with self._lock:
                piece.job.running -= 1
                self._overdue -= piece.job.late

    def _load_staged(self, piece: _Piece, arena: torch.Tensor) -> None:
        job, start = piece.job, 0
        staged = []
        for buffer in job.buffers[piece.first : piece.last]:
            staged.append(arena[start : start + buffer.nbytes])
            start += _aligned(buffer.nbytes)
        results, reason = self._get(job.keys[piece.first : piece.last], staged)
        with self._lock:
            if job.late:
                return
            self._touch(piece)
        _copy(
            (buffer, source)
            for buffer, source, landed in zip(
                job.buffers[piece.first : piece.last], staged, results, strict=True
            )
            if landed
        )
        self._piece_ended(piece, results, reason)

    def _load_direct(self, piece: _Piece) -> None:
        job = piece.job
        results, reason = self._get(job.keys[piece.first : piece.last], job.buffers[piece.first : piece.last])
        self._piece_ended(piece, results, reason)

    def _get(self, keys: Sequence[str | bytes], outs: Sequence[torch.Tensor]) -> tuple[list[bool], str]:
        try:
            return self._store.get_many(keys, outs), ""
        except BatchError as error:
            return [one is True for one in error.results], str(error)
        except BlockKVError as error:
            return [False] * len(keys), str(error)

    def _store_piece(self, piece: _Piece) -> None:
        job, reason = piece.job, ""
        keys = job.keys[piece.first : piece.last]
        try:
            for key in keys:
                if key in job.rewritten:
                    self._store.delete(key)
            written = self._store.put_many(
                list(zip(keys, job.buffers[piece.first : piece.last], strict=True)), job.durable
            )
        except BatchError as error:
            written, reason = [one is True for one in error.results], str(error)
        except BlockKVError as error:
            written, reason = [False] * len(keys), str(error)
        moved = sum(
            buffer.nbytes
            for buffer, new in zip(job.buffers[piece.first : piece.last], written, strict=True)
            if new
        )
        try:
            results = [
                new or (key not in job.rewritten and self._store.contains(key))
                for key, new in zip(keys, written, strict=True)
            ]
        except BlockKVError as error:
            results, reason = written, str(error)
        self._piece_ended(piece, results, reason, moved)

    def _piece_ended(
        self, piece: _Piece, results: Sequence[bool], reason: str, moved: int | None = None
    ) -> None:
        job = piece.job
        with self._lock:
            if job.late and not piece.touches:
                return  # the job ended without it
            job.touching -= piece.touches
            for position, result in enumerate(results, piece.first):
                job.done[position] = bool(result)
            if moved is None:
                moved = sum(
                    job.buffers[one].nbytes for one in range(piece.first, piece.last) if job.done[one]
                )
            job.bytes_moved += moved
            job.reason = job.reason or reason
            job.pieces_left -= 1
            if not job.pieces_left:
                self._end(job)
        self._tell()

    def _touch(self, piece: _Piece) -> None:
        """From now on the job waits for this piece; with the lock held."""
        piece.touches = True
        piece.job.touching += 1

    def _drop(self, piece: _Piece, reason: str) -> None:
        """A piece that has not begun, with the lock held."""
        job = piece.job
        job.reason = job.reason or reason
        job.pieces_left -= 1
        if not job.pieces_left:
            self._end(job)

    def _end(self, job: _Job) -> None:
        """With the lock held."""
        job.ended = True
        del self._jobs[job.number]
        kind = "loads" if job.is_load else "stores"
        self.counters[kind] += len(job.keys)
        if job.is_load:
            self.counters["load_misses"] += job.done.count(False)
        else:
            self._store_bytes -= job.admitted_bytes
        duration_s = (time.monotonic_ns() - job.begun_ns) / 1e9
        outcome = Outcome(job.number, job.is_load, tuple(job.done), job.bytes_moved, duration_s, job.reason)
        self._outcomes.append(outcome)
        job.buffers = ()
        self._quiet.notify_all()
        if self._closing:
            self._watched.notify()

    def _untold(self) -> list[Outcome]:
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _tell(self) -> None:
        """Call `ended` for what has ended; without the lock."""
        if self._ended is None:
            return
        for outcome in self._untold():
            try:
                self._ended(outcome)
            except BaseException:  # this thread has work of others to do
                log.exception("whoever waits for a job could not be told that it has ended")

    def _watch_deadlines(self) -> None:
        while True:
            with self._lock:
                if self._closing and not self._jobs:
                    return
                now_ns = time.monotonic_ns()
                due = [job for job in self._jobs.values() if job.deadline_ns and not job.late]
                late = [job for job in due if job.deadline_ns <= now_ns]
                for job in late:
                    self._expire(job)
                if not late:
                    self._watching_until_ns = ahead_ns = min((job.deadline_ns for job in due), default=0)
                    self._watched.wait((ahead_ns - now_ns) / 1e9 if ahead_ns else None)
            self._tell()

    def _expire(self, job: _Job) -> None:
        """End it but for what touches the caller's memory; with the lock held."""
        queue = self._queues[job.is_load]
        self._queues[job.is_load] = deque(piece for piece in queue if piece.job is not job)
        job.late = True
        self._overdue += job.running
        job.pieces_left = job.touching
        job.reason = f"not done within {self._deadlines_s[job.is_load]:g} s"
        self.counters["loads_late" if job.is_load else "stores_late"] += 1
        if not job.pieces_left:
            self._end(job)


def _pieces(job: _Job, most_bytes: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    first, size_bytes = 0, 0
    for position, buffer in enumerate(job.buffers):
        size = _aligned(buffer.nbytes)
        if size_bytes and size_bytes + size > most_bytes:
            pieces.append(_Piece(job, first, position, size_bytes))
            first, size_bytes = position, 0
        size_bytes += size
    if size_bytes:
        pieces.append(_Piece(job, first, len(job.buffers), size_bytes))
    return pieces


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Fill the first of each pair from the second, what lies together at once.

    The GIL is let go, and may be long in coming back where another thread never rests; and it is done on this
    thread, for those that torch would wake go on spinning.
    """
    target = source = size_bytes = 0
    for one, other in pairs:
        if (one.data_ptr(), other.data_ptr()) != (target + size_bytes, source + size_bytes):
            ctypes.memmove(target, source, size_bytes)
            target, source, size_bytes = one.data_ptr(), other.data_ptr(), 0
        size_bytes += one.nbytes
    ctypes.memmove(target, source, size_bytes)


def _aligned(size_bytes: int) -> int:
    return max(4096, (size_bytes + 4095) // 4096 * 4096)
