"""Reading every chunk in the background, so that damage is found while somebody still has another copy.

One scrub is one pass over the chunks in the order of their log sequence. The cursor, the sequence up to which
the pass has verified, stands in the superblock: after a close or a crash the next scrub goes on from there.
What is put while a pass goes on has a later sequence than everything it began with, and is left to the next
pass, or a busy store would never finish one.

The cursor is written with every superblock that is written anyway, and once a minute while a scrub runs: two
pages and two flushes, against a minute of reading that a kill would cost.

Invariants
  * a chunk that does not verify is dropped as a get would drop it; an error that may pass is no damage;
  * extents are leased for one wave, and no lock is held while it is read;
  * the cursor passes a chunk only together with what its reading made necessary.

Not here: what a damaged chunk is (`verify`), where the cursor is written (`log`).
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blockkv.catalog.index import Entry
from blockkv.catalog.layouts import Layout
from blockkv.device.base import UNIT_BYTES, Priority
from blockkv.errors import BlockKVError, InvalidArgument
from blockkv.logs import logger_for
from blockkv.store.interrupts import interrupts
from blockkv.store.numbers import is_number
from blockkv.store.state import State
from blockkv.store.verify import VERIFY_BYTES, Verifier, is_damage

__all__ = ["DEFAULT_BYTES_PER_S", "Scrub", "ScrubReport", "TokenBucket", "sweep"]

DEFAULT_BYTES_PER_S = 200 << 20
WAVE_BYTES = 8 << 20
"""Read at a time at most, and for as long as that takes nobody can reuse what was deleted meanwhile."""
WAVE_CHUNKS = 1024
WAVE_SHARE = 64
"""And at most this part of the data zone: what is leased is not evicted, and others would be in its place."""
WAVE_S = 0.25
"""A slow scrub reads less at a time, so that it reads evenly and ends promptly."""
SAVE_INTERVAL_S = 60.0
SWEEP_PRIORITY = Priority.STORE
"""The last to be served."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes to do."""


class TokenBucket:
    """A rate: `bytes_per_s` on average, `burst_bytes` at once. What is taken beyond that is owed."""

    def __init__(
        self, bytes_per_s: float, burst_bytes: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._clock = clock
        self._held_bytes = burst_bytes
        self._filled_at = clock()

    def take(self, size_bytes: int) -> float:
        """Spend `size_bytes` now. Returns how many seconds to wait before anything more is spent."""
        now = self._clock()
        filled_bytes = self._held_bytes + (now - self._filled_at) * self._bytes_per_s
        self._held_bytes = min(filled_bytes, self._burst_bytes) - size_bytes
        self._filled_at = now
        return max(0.0, -self._held_bytes / self._bytes_per_s)


def sweep(
    state: State, digests: Sequence[bytes], wave_bytes: int = VERIFY_BYTES, *, drop: bool = True
) -> Iterator[list[tuple[Entry, int]]]:
    """Verify the chunks with these digests that are still there; yield (entry, outcome) for each of a wave.

    With `drop` damaged chunks are dropped. Nothing is leased or locked while a wave is yielded. Raises
    DeviceLost.
    """
    verifier = Verifier(state.device, state.geometry, SWEEP_PRIORITY)
    wave_bytes = min(wave_bytes, state.geometry.data.size_bytes // WAVE_SHARE)
    place = 0
    while place < len(digests):
        live: list[tuple[Entry, Layout]] = []
        room_bytes = wave_bytes
        with state.lock:
            for digest in digests[place : place + WAVE_CHUNKS]:
                entry = state.index.get(digest)
                if entry is not None:
                    room_bytes -= entry.units * UNIT_BYTES
                    if live and room_bytes < 0:
                        break
                    state.lease(entry)
                    live.append((entry, state.layouts[entry.layout_id]))
                place += 1
        outcomes: list[int] = []
        try:
            outcomes = verifier.verify(live)
        finally:
            with state.changing:
                for (entry, _), outcome in zip(live, outcomes, strict=False):  # none where reading raised
                    if drop and is_damage(outcome):
                        state.drop_damaged(entry)
                state.release(array("I", [entry.place for entry, _ in live]))
        yield [(entry, outcome) for (entry, _), outcome in zip(live, outcomes, strict=True)]


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What one scrub did. Counts and keys are of this scrub, not of the pass it went on with."""

    finished: bool
    """Whether the pass came to its end; otherwise the next scrub goes on with it."""
    resumed: bool
    """Whether it went on with a pass that an earlier scrub had begun."""
    chunks: int
    payload_bytes: int
    damaged_keys: tuple[str | bytes, ...]
    """Chunks that did not verify; they were dropped."""
    unread: tuple[tuple[str | bytes, str], ...]
    """(key, error) of chunks that could not be read just now; they are still there."""

    @property
    def ok(self) -> bool:
        return not (self.damaged_keys or self.unread)


class Scrub:
    """One scrub of an open store: goes on with the pass under way, or begins one. `run` carries it out."""

    def __init__(
        self,
        state: State,
        bytes_per_s: float = DEFAULT_BYTES_PER_S,
        progress: Progress | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """`wait` is called with the seconds to let pass, and may return early once `stop` was called."""
        if not (is_number(bytes_per_s) and bytes_per_s > 0):
            raise InvalidArgument(f"a scrub of {bytes_per_s!r} bytes a second would never end")
        self._state = state
        self._progress = progress
        self._clock = clock
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self._wave_bytes = max(UNIT_BYTES, int(min(WAVE_BYTES, bytes_per_s * WAVE_S)))
        self._bucket = TokenBucket(bytes_per_s, self._wave_bytes, clock)
        self._saved_at = clock()

    def stop(self) -> None:
        """End it after the wave that is being read. Any thread."""
        self._stopped.set()

    def run(self) -> ScrubReport:
        """Scrub to the end of the pass, or until `stop`. Raises DeviceLost."""
        state = self._state
        damaged: list[str | bytes] = []
        unread: list[tuple[str | bytes, str]] = []
        chunks = payload_bytes = 0
        with state.lock:
            begun_at = state.log.scrub_sequence
            newest = state.log.newest_log_sequence
            digests, total_bytes = state.index.by_log_sequence(begun_at)
        finished = not self._stopped.is_set()
        for wave in sweep(state, digests if finished else [], self._wave_bytes):
            wave_bytes = sum(entry.payload_bytes for entry, _ in wave)
            with state.lock:
                for entry, outcome in wave:
                    if is_damage(outcome):
                        damaged.append(entry.key)
                    elif outcome:
                        unread.append((entry.key, os.strerror(-outcome)))
                state.counters["scrub_chunks"] += len(wave)
                state.counters["scrub_bytes"] += wave_bytes
                state.counters["scrub_damaged"] += sum(is_damage(outcome) for _, outcome in wave)
                state.counters["scrub_transient_error"] += sum(
                    outcome != 0 and not is_damage(outcome) for _, outcome in wave
                )
                # A key that was deleted and put again meanwhile is further on than where it was found.
                passed = [entry.log_sequence for entry, _ in wave if entry.log_sequence <= newest]
                state.log.scrub_sequence = max(passed, default=state.log.scrub_sequence)
            chunks += len(wave)
            payload_bytes += wave_bytes
            if self._progress is not None:
                self._progress(payload_bytes, total_bytes)
            interrupts.deliver()
            self._save_now_and_then()
            if payload_bytes < total_bytes:
                self._pause(self._bucket.take(wave_bytes))
            if self._stopped.is_set():
                finished = False
                break
        if finished:
            with state.lock:
                state.log.scrub_sequence = 0
                state.counters["scrub_passes"] += 1
                state.scrub_finished_at = time.time()
        return ScrubReport(finished, begun_at > 0, chunks, payload_bytes, tuple(damaged), tuple(unread))

    def _pause(self, duration_s: float) -> None:
        while duration_s > 0 and not self._stopped.is_set():
            self._wait(min(duration_s, WAVE_S))
            duration_s -= WAVE_S
            interrupts.deliver()

    def _save_now_and_then(self) -> None:
        log = self._state.log
        if self._clock() - self._saved_at < SAVE_INTERVAL_S or self._state.read_only_reason or log.failure:
            return
        self._saved_at = self._clock()
        try:
            log.renew_superblock()
        except BlockKVError as error:
            logger_for(self._state.device.path).error("scrub: %s", error)  # reading goes on
