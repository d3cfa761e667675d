"""A memory tier in front of a store: the same methods, and some chunks never leave memory.

::

    put        memory, where the ranker finds someone less deserving to leave, else the store
    get        memory; else the store straight into the caller's memory, and a copy where it deserves one
    leaving    what is not in the store is written to it, if admission takes it; then its memory is free
    budget     asked again every `interval_s`; what does not fit any more leaves, the least deserving first

Not here: which chunks are in memory and who has to leave (`memory_tier`), chunks that grow (`growing`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from blockkv.errors import BatchError, BlockKVError, InvalidArgument, StoreClosed
from blockkv.logs import described, logger_for
from blockkv.residency.budget import Estimate, MemoryBudget
from blockkv.residency.copies import copy_out, gather
from blockkv.residency.growing import TieredGrowingChunk
from blockkv.residency.memory_tier import MemoryTier, Resident
from blockkv.residency.ranker import Candidate, Place, Ranker, check_place, rank_by_layer
from blockkv.store.growing import STORED_ALREADY, check_capacity
from blockkv.store.interrupts import interrupts
from blockkv.store.keys import Key, encode_key
from blockkv.store.state import GROWING
from blockkv.store.store import (
    BELONGS_TO_PARENT,
    ChunkInfo,
    Store,
    StoreFuture,
    due_ns,
    listed,
    several_items,
    several_keys,
)
from blockkv.tensors import Occupied, Tensors, describe

__all__ = ["TieredStore"]

INTERVAL_S = 1.0
PUT_THREADS = 2


class TieredStore:
    """A store with a memory tier. Methods are those of `Store`, and may be called from any thread.

    What differs: a put that is not durable stays in memory until its chunk leaves it, or until `close`, so
    it is lost with the process until then; `commit` makes durable what is in the store. `place` says where a
    chunk belongs (a request, a layer); without it `place_of` is asked, and without that every chunk is a
    group of its own, so that the default ranker is plain recency.
    """

    def __init__(
        self,
        store: Store,
        budget: MemoryBudget | int | None = None,
        *,
        ranker: Ranker = rank_by_layer,
        admit: Callable[[Candidate], bool] | None = None,
        place_of: Callable[[Key], Place] | None = None,
        interval_s: float | None = INTERVAL_S,
        lock_memory: bool = False,
    ) -> None:
        """`budget`: a number of bytes for a fixed one; by default what is really free, followed.

        `admit` is asked when a chunk is to leave memory that is not in the store: False forgets it.
        `interval_s`: how often the budget is asked; None leaves that to `rebind`. `lock_memory`: never
        swapped. `close` closes the store too. Raises InvalidArgument for another budget.
        """
        if not isinstance(budget, MemoryBudget | int | None) or isinstance(budget, bool):
            raise InvalidArgument(f"budget={budget!r}; give a number of bytes, a MemoryBudget, or None")
        if isinstance(budget, int):
            budget = MemoryBudget(budget, follow=False)
        self.store = store
        self._tier = MemoryTier(store, budget or MemoryBudget(), ranker, admit, lock_memory=lock_memory)
        self._place_of = place_of
        self._active_count = 0
        self._inside = threading.local()
        """`count` of operations that this thread is in: closing would wait for itself."""
        self._executor: ThreadPoolExecutor | None = None
        self._closed = ""
        self._process_id = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if interval_s is not None:
            self._thread = threading.Thread(
                target=self._follow_budget, args=(interval_s,), name="blockkv-residency", daemon=True
            )
            self._thread.start()

    # -- writing ---------------------------------------------------------------------------------------

    def put(
        self,
        key: Key,
        tensors: Tensors,
        durable: bool = False,
        *,
        place: Place | None = None,
        droppable: bool = False,
        deadline_s: float | None = None,
    ) -> bool:
        """`Store.put`. With `durable` it is written to the store as well as kept in memory."""
        encoded, described = encode_key(key), describe(tensors)
        if place is not None:
            check_place(place)
        options: dict[str, Any] = {"droppable": droppable, "deadline_s": deadline_s}
        with self._operation():
            resident = self._tier.claim(encoded)
            if resident is not None:
                if durable:
                    self._tier.write_through(resident)
                return False
            try:
                if durable or self.store.contains(key):
                    written = self.store.put(key, tensors, durable, **options)
                    if not written:
                        return False
                candidate = self._tier.candidate_for(
                    encoded, place or self._place(key), described.payload_bytes
                )
                part = self._tier.room(candidate)
                if part is None:
                    return durable or self.store.put(key, tensors, **options)
                gather(described, part.address)
                version = self._tier.version_of(key) if durable else None
                self._tier.enter(key, candidate, part, described.layout, version=version)
                return True
            finally:
                self._tier.give_up(encoded)

    def put_many(
        self,
        items: Mapping[Any, Tensors] | Iterable[tuple[Key, Tensors]],
        durable: bool = False,
        *,
        droppable: bool = False,
        deadline_s: float | None = None,
    ) -> list[bool]:
        """`Store.put_many`: what gets no memory goes to the store in one call, and all with `durable`."""
        pairs = several_items(items)
        options: dict[str, Any] = {"droppable": droppable, "deadline_s": deadline_s}
        results: list[bool] = [False] * len(pairs)
        errors: dict[int, BlockKVError] = {}
        direct: list[int] = []
        for position, (key, tensors) in enumerate(pairs):
            try:
                with self._operation():
                    put = self._put_in_memory(key, tensors, durable)
            except BlockKVError as error:
                errors[position] = error
            else:
                results[position] = bool(put)
                if put is None:
                    direct.append(position)
        try:
            written = self.store.put_many([pairs[position] for position in direct], durable, **options)
        except BatchError as error:
            written = [bool(result) for result in error.results]
            errors |= {direct[number]: one for number, one in error.errors.items()}
        for position, result in zip(direct, written, strict=True):
            results[position] = result
        if errors:
            raise BatchError(results, errors)
        return results

    def _put_in_memory(self, key: Key, tensors: Tensors, durable: bool) -> bool | None:
        """Whether it was put; None where the store is to say so, because there is no room, or `durable`."""
        encoded, described = encode_key(key), describe(tensors)
        resident = self._tier.claim(encoded)
        if resident is not None:
            if durable:
                self._tier.write_through(resident)
            return False
        try:
            if durable or self.store.contains(key):
                return None
            candidate = self._tier.candidate_for(encoded, self._place(key), described.payload_bytes)
            part = self._tier.room(candidate)
            if part is None:
                return None
            gather(described, part.address)
            self._tier.enter(key, candidate, part, described.layout)
            return True
        finally:
            self._tier.give_up(encoded)

    def reserve(self, key: Key, capacity_bytes: int, *, place: Place | None = None) -> TieredGrowingChunk:
        """`Store.reserve`: a chunk that grows in memory, or directly in the store.

        In memory it takes its whole capacity of the budget, and no space in the store until it leaves.
        """
        encoded = encode_key(key)
        check_capacity(capacity_bytes)
        if place is not None:
            check_place(place)
        with self._operation():
            if self._tier.claim(encoded) is not None:
                raise InvalidArgument(STORED_ALREADY)
            try:
                if self.store.contains(key):
                    raise InvalidArgument(STORED_ALREADY)
                candidate = self._tier.candidate_for(encoded, place or self._place(key), capacity_bytes)
                part = self._tier.room(candidate)
                if part is None:
                    direct = self.store.reserve(key, capacity_bytes)
                    self._tier.growing_in_store.add(encoded)
                    return TieredGrowingChunk(self._tier, self._operation, key, capacity_bytes, direct)
                with self._tier.lock:
                    resident = self._tier.enter(key, candidate, part, None)
                    grown = TieredGrowingChunk(self._tier, self._operation, key, capacity_bytes, resident)
                    resident.growing = grown
                return grown
            finally:
                self._tier.give_up(encoded)

    def submit_put(
        self, key: Key, tensors: Tensors, durable: bool = False, **options: Any
    ) -> StoreFuture[bool]:
        """`Store.submit_put`, with the options of `put`."""
        with self._tier.lock:
            self._check_open()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(PUT_THREADS, "blockkv-tier-put")
            future: StoreFuture[bool] = StoreFuture()

            def carry_out() -> None:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(self.put(key, tensors, durable, **options))
                    except BaseException as error:
                        future.set_exception(error)

            self._executor.submit(carry_out)
        return future

    def delete(self, key: Key, durable: bool = False) -> bool:
        """`Store.delete`."""
        encoded = encode_key(key)
        with self._operation(), self._tier.holding(encoded) as resident:
            if resident is not None:
                if not resident.found:
                    raise InvalidArgument(GROWING)
                self._tier.remove(resident)
            deleted = self.store.delete(key, durable)
            return deleted or (resident is not None and not resident.in_store)

    def commit(self) -> None:
        """Make durable what is in the store. What is in memory alone is not."""
        with self._operation():
            self.store.commit()

    # -- reading ---------------------------------------------------------------------------------------

    def get(
        self,
        key: Key,
        out: Any = None,
        *,
        preload: bool = False,
        deadline_s: float | None = None,
        place: Place | None = None,
    ) -> Any:
        """`Store.get`. What was read from the store moves into memory where it deserves that more than
        what would have to leave, and nothing has to be written for it.
        """
        encoded = encode_key(key)
        if place is not None:
            check_place(place)
        with self._operation():
            with self._tier.leased(encoded) as resident:
                if resident is not None:
                    return self._copy_out(resident, out)
            version = self._version(key)
            found = self.store.get(key, out, preload=preload, deadline_s=deadline_s)
            self._take_in(key, version, found if out is None or not found else out, place)
            return found

    def get_many(
        self,
        keys: Iterable[Key],
        outs: Iterable[Any] | None = None,
        *,
        preload: bool = False,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """`Store.get_many`: what is not in memory is read in one call."""
        wanted = several_keys(keys)
        outputs = None if outs is None else listed(outs, "outputs")
        if outputs is not None and len(outputs) != len(wanted):
            raise InvalidArgument(f"{len(wanted)} keys but {len(outputs)} outputs")
        results: list[Any] = [None if outputs is None else False] * len(wanted)
        errors: dict[int, BlockKVError] = {}
        direct: list[int] = []
        occupied = Occupied()
        with self._operation():
            for position, key in enumerate(wanted):
                try:
                    with self._tier.leased(encode_key(key)) as resident:
                        if resident is None:
                            direct.append(position)
                        else:
                            results[position] = self._copy_out(
                                resident, None if outputs is None else outputs[position], occupied
                            )
                except BlockKVError as error:
                    errors[position] = error
            some_outputs = None if outputs is None else [outputs[position] for position in direct]
            some_keys = [wanted[position] for position in direct]
            versions = list(map(self._version, some_keys))
            found, unread = self.store._get(some_keys, some_outputs, preload, due_ns(deadline_s), occupied)
            errors |= {direct[number]: one for number, one in unread.items()}
            for number, position in enumerate(direct):
                results[position] = found[number]
                value = some_outputs[number] if some_outputs is not None and found[number] else found[number]
                self._take_in(wanted[position], versions[number], value, None)
        if errors:
            raise BatchError(results, errors)
        return results

    def submit_get(
        self, key: Key, out: Any = None, *, preload: bool = False, deadline_s: float | None = None
    ) -> StoreFuture[Any]:
        """`Store.submit_get`. From memory it is there when this returns; what is not stays where it is."""
        with self._operation():
            if not self.in_memory(key):
                return self.store.submit_get(key, out, preload=preload, deadline_s=deadline_s)
        future: StoreFuture[Any] = StoreFuture()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self.get(key, out, preload=preload, deadline_s=deadline_s))
        except BlockKVError as error:
            future.set_exception(error)
        return future

    @contextlib.contextmanager
    def borrow(self, key: Key) -> Iterator[Any]:
        """The tensors of a chunk in memory, without a copy; None where it is not in memory.

        They must not be written to, nor used after the context. Meanwhile the chunk stays in memory.
        """
        with self._operation(), self._tier.leased(encode_key(key)) as resident:
            if resident is not None:
                self._tier.count("memory_hits", resident.size_bytes, "memory_hit_bytes")
            yield None if resident is None else resident.value()

    # -- the catalog -----------------------------------------------------------------------------------

    def contains(self, key: Key) -> bool:
        """`Store.contains`."""
        self._check_open()
        return self.in_memory(key) or self.store.contains(key)

    def lookup(self, keys: Iterable[Key]) -> int:
        """`Store.lookup`."""
        length = 0
        for key in several_keys(keys):
            if not self.contains(key):
                break
            length += 1
        return length

    def in_memory(self, key: Key) -> bool:
        """Whether a get would be served from memory."""
        encoded = encode_key(key)
        current = self._tier.is_current(encoded)
        with self._tier.lock:
            resident = self._tier.residents.get(encoded)
            return current and resident is not None and resident.found

    def touch(self, key: Key) -> bool:
        """`Store.touch`."""
        encoded = encode_key(key)
        with self._operation(), self._tier.leased(encoded) as resident:
            return self.store.touch(key) or resident is not None

    def pin(self, key: Key) -> bool:
        """`Store.pin`. A chunk that is in memory stays there."""
        return self._pin(key, 1, self.store.pin)

    def unpin(self, key: Key) -> bool:
        """`Store.unpin`."""
        return self._pin(key, -1, self.store.unpin)

    def _pin(self, key: Key, change: int, elsewhere: Callable[[Key], bool]) -> bool:
        with self._operation(), self._tier.holding(encode_key(key)) as resident:
            current = resident is not None and self._tier.is_current(resident.encoded)
            if current and resident is not None and resident.found and resident.pins + change >= 0:
                resident.pins += change
                return True
            return elsewhere(key)

    def keys(self) -> Iterator[str | bytes]:
        """The keys as of now: those in memory alone, then those of the store."""
        self._check_open()
        with self._tier.lock:
            alone = [one.key for one in self._tier.residents.values() if not one.in_store and one.found]
        return iter([*alone, *self.store.keys()])

    def __len__(self) -> int:
        with self._tier.lock:
            alone = sum(not one.in_store and one.found for one in self._tier.residents.values())
        return alone + len(self.store)

    def __contains__(self, key: Key) -> bool:
        return self.contains(key)

    # -- looking after ---------------------------------------------------------------------------------

    def rebind(self) -> Estimate:
        """Ask for the budget now, and let leave what does not fit. Happens by itself every `interval_s`."""
        with self._operation():
            return self._tier.rebind()

    def stats(self) -> dict[str, Any]:
        """`Store.stats`, and the figures of the tier; see docs/residency.md."""
        return self.store.stats() | self._tier.stats()

    def info(self) -> dict[str, Any]:
        """`Store.info`, and what the budget follows."""
        return self.store.info() | {"memory_budget_reason": self._tier.estimate.reason}

    def close(self) -> None:
        """Write back what admission takes, the most deserving last, and close the store. Idempotent.

        Chunks that grow in memory are lost. Raises as `Store.close` does.
        """
        if getattr(self._inside, "count", 0):
            raise InvalidArgument(
                "close was called from inside an operation of the tier, which it would wait for"
            )
        with interrupts:
            if self._executor is not None and not self._closed:
                self._executor.shutdown()
            with self._tier.lock:
                if self._closed or os.getpid() != self._process_id:
                    return
                self._closed = "the store was closed"
                self._tier.changed.wait_for(lambda: self._active_count == 0)
            self._stop.set()
            if self._thread is not None:
                self._thread.join()
            try:
                self._tier.close()
            finally:
                self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------

    def _place(self, key: Key) -> Place:
        if self._place_of is None:
            return Place(key)
        place = self._place_of(key)
        check_place(place)
        return place

    def _copy_out(self, resident: Resident, out: Any, occupied: Occupied | None = None) -> Any:
        assert resident.layout is not None
        value = copy_out(resident.part.address, resident.layout, out, occupied)
        self._tier.count("memory_hits", resident.size_bytes, "memory_hit_bytes")
        return value

    def _version(self, key: Key) -> ChunkInfo | None:
        """What the store has under a key, before it is read."""
        return self.store.entry(key)

    def _take_in(self, key: Key, version: ChunkInfo | None, value: Any, place: Place | None) -> None:
        """A get read `value` from the store, or missed: keep a copy if it deserves one and is still there."""
        if value is None or value is False or version is None:
            self._tier.count("tier_misses", 0, "")
            return
        self._tier.count("direct_hits", version.payload_bytes, "direct_hit_bytes")
        encoded = encode_key(key)
        if not self._tier.claim_now(encoded):
            return
        try:
            place = place or self._place(key)
            candidate = self._tier.candidate_for(encoded, place, version.payload_bytes)
            part = self._tier.room(candidate, clean_only=True)
            if part is None:
                return
            was = version.device, version.log_sequence
            if self._tier.version_of(key) != was:
                self._tier.give(part)
                return
            gather(describe(value), part.address)
            self._tier.enter(key, candidate, part, version.layout, version=was)
        finally:
            self._tier.give_up(encoded)

    def _follow_budget(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            try:
                self.rebind()
            except StoreClosed:
                return
            except Exception as error:  # also what a ranker or `admit` raises: the next round may go better
                logger_for(self._tier.store._where, error=error).error(
                    "the memory tier: %s", described(error)
                )

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """Hold `close` and signal handlers back while it lasts. Raises StoreClosed."""
        self._check_open()
        with interrupts:
            with self._tier.lock:
                self._check_open()
                self._active_count += 1
            self._inside.count = getattr(self._inside, "count", 0) + 1
            try:
                yield
            finally:
                self._inside.count -= 1
                with self._tier.lock:
                    self._active_count -= 1
                    self._tier.changed.notify_all()

    def _check_open(self) -> None:
        if os.getpid() != self._process_id:
            raise StoreClosed(BELONGS_TO_PARENT)
        if self._closed:
            raise StoreClosed(self._closed)
