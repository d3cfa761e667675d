"""The memory tier: which chunks are in memory, who has to leave, and what is written then.

Invariants
  * memory that may be resident does not exceed the budget that counts, but for chunks that are pinned,
    borrowed, or cannot go;
  * a chunk is in memory or in the store from its put to its delete, unless admission refused it or the store
    evicted it;
  * of what is in the store a copy in memory counts while the store has that very chunk: what it has evicted,
    or dropped at its time, and what somebody else has deleted or put anew, is not given from memory;
  * memory is given back when nobody reads it any more.

Not here: the methods that users see (`tiered`, `growing`), how much memory there is (`budget`), who deserves
it (`ranker`), the memory itself (`arena`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from blockkv.catalog.layouts import Layout
from blockkv.device.base import UNIT_BYTES
from blockkv.errors import BatchError, BlockKVError, InvalidArgument
from blockkv.logs import logger_for
from blockkv.residency.arena import Arena, Part
from blockkv.residency.budget import Estimate, MemoryBudget
from blockkv.residency.copies import tensors_in
from blockkv.residency.ranker import Candidate, Place, Ranker
from blockkv.store.keys import Key
from blockkv.store.state import GROWING
from blockkv.store.store import Store

__all__ = ["COUNTERS", "MemoryTier", "Resident"]

RANKED_CHUNKS = 512
"""Of the chunks that could leave, those used longest ago are ranked, up to so many: ranks change with every
use, so none are kept."""
ASK_AGAIN_BYTES = 16 << 20
"""The budget is asked again when so much memory has been handed out since. What is kept free, 64 MiB, is to
be enough for as much of the tier, and for what the rest of the process grows by meanwhile."""
WRITE_BACK_BYTES = 64 << 20
"""What is written back in one call when the tier is closed."""

COUNTERS = (
    "memory_hits",
    "memory_hit_bytes",
    "direct_hits",
    "direct_hit_bytes",
    "tier_misses",
    "write_backs",
    "write_back_bytes",
    "write_backs_refused",
    "write_backs_failed",
)


Version: TypeAlias = tuple[str, int]
"""Which of the chunks that a store has had under a key: its device, and the place of its put in the log."""


class Spilling(Protocol):
    """A chunk that grows in memory."""

    def spill(self) -> None:
        """Go on in the store; the memory is not used any more then. Raises StoreFull and the like."""

    def end_with_tier(self) -> None:
        """The tier is closed, and with it the chunk is gone."""


@dataclass(slots=True, eq=False)
class Resident:
    """A chunk in memory."""

    key: Key
    encoded: bytes
    place: Place
    part: Part
    layout: Layout | None
    """None while it grows."""
    size_bytes: int
    last_use: int
    version: Version | None = None
    """What the store has of it; None where it is in memory alone."""
    growing: Spilling | None = None
    pins: int = 0
    leases: int = 0
    leaving: bool = False
    stuck: bool = False
    """Whether there was no room for it in the store when it was to leave."""
    removed: bool = False
    """Whether the tier has forgotten it; its memory goes back with the last lease."""

    @property
    def in_store(self) -> bool:
        """Whether the store had it when it was last asked."""
        return self.version is not None

    def value(self) -> Any:
        """Its tensors, in its own memory."""
        assert self.layout is not None
        return tensors_in(self.part, self.layout)

    @property
    def found(self) -> bool:
        """Whether a get finds it."""
        return self.growing is None


class MemoryTier:
    """Chunks in memory in front of `store`. Methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        budget: MemoryBudget,
        ranker: Ranker,
        admit: Callable[[Candidate], bool] | None,
        *,
        lock_memory: bool,
    ) -> None:
        self.store = store
        self._budget = budget
        self._ranker = ranker
        self._admit = admit
        self._arena = Arena(lock_memory=lock_memory)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when a lease, a claim or a chunk is gone, and when an operation is over."""
        self.residents: OrderedDict[bytes, Resident] = OrderedDict()
        """By key; those used longest ago first."""
        self._claims: set[bytes] = set()
        """Keys that are being put, reserved or taken into memory."""
        self.growing_in_store: set[bytes] = set()
        """Keys under which chunks grow that are not in memory."""
        self._clock = 0
        self._group_use: dict[str | bytes, int] = {}
        """When a chunk of the group was used last, of groups that have chunks in memory."""
        self._group_count: Counter[str | bytes] = Counter()
        self._counters: Counter[str] = Counter()
        self.estimate: Estimate = budget.estimate(0)
        self._handed_out_bytes = 0
        """Since the budget was asked."""

    # -- finding chunks --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def leased(self, encoded: bytes) -> Iterator[Resident | None]:
        """A chunk in memory, used now, whose memory stays while the context lasts; None where it is not."""
        current = self.is_current(encoded)
        with self.lock:
            resident = self.residents.get(encoded) if current else None
            if resident is not None and not resident.found:
                resident = None
            if resident is not None:
                resident.leases += 1
                self.use(resident)
        try:
            if resident is not None and resident.in_store:
                self.store.touch(resident.key)
            yield resident
        finally:
            if resident is not None:
                self.release(resident)

    def version_of(self, key: Key) -> Version | None:
        """What the store has under a key."""
        info = self.store.entry(key)
        return None if info is None else (info.device, info.log_sequence)

    def is_current(self, encoded: bytes) -> bool:
        """Whether what is in memory under a key, if anything, is what the store has too, where that has it.

        What is not is forgotten. A pinned chunk stays, whatever becomes of it in the store.
        """
        with self.lock:
            resident = self.residents.get(encoded)
            version = None if resident is None else resident.version
        if resident is None or version is None or resident.pins or self.version_of(resident.key) == version:
            return True
        with self.lock:
            if self.residents.get(encoded) is resident and not resident.leaving:
                self.remove(resident)
        return False

    def use(self, resident: Resident) -> None:
        """A chunk in memory is used now. Under the lock."""
        self._clock += 1
        self.residents.move_to_end(resident.encoded)
        resident.last_use = self._group_use[resident.place.group] = self._clock

    @contextlib.contextmanager
    def holding(self, encoded: bytes) -> Iterator[Resident | None]:
        """The chunk with this key where it is in memory; it neither comes nor leaves while the context lasts.

        Waits while somebody brings it, or it is leaving.
        """
        with self.lock:
            while True:
                resident = self.residents.get(encoded)
                if encoded not in self._claims and not (resident is not None and resident.leaving):
                    break
                self.changed.wait()
            self._claims.add(encoded)
            leaving = resident is not None
            if resident is not None:
                resident.leaving = True
        try:
            yield resident
        finally:
            with self.lock:
                if leaving and resident is not None:
                    resident.leaving = False
                self.give_up(encoded)

    def claim_now(self, encoded: bytes) -> bool:
        """Take the right to bring a chunk to memory, unless somebody has it or it is there."""
        with self.lock:
            if encoded in self._claims or encoded in self.residents or encoded in self.growing_in_store:
                return False
            self._claims.add(encoded)
            return True

    def claim(self, encoded: bytes) -> Resident | None:
        """The chunk with this key where it is in memory, else the right to bring it there.

        Waits while somebody else has that. Raises InvalidArgument where it is growing.
        """
        self.is_current(encoded)
        with self.lock:
            while encoded in self._claims:
                self.changed.wait()
            resident = self.residents.get(encoded)
            if encoded in self.growing_in_store:
                raise InvalidArgument(GROWING)
            if resident is None:
                self._claims.add(encoded)
            elif not resident.found:
                raise InvalidArgument(GROWING)
            else:
                self.use(resident)
            return resident

    def give_up(self, encoded: bytes) -> None:
        """Let others bring that chunk to memory."""
        with self.lock:
            self._claims.discard(encoded)
            self.changed.notify_all()

    def count(self, name: str, size_bytes: int, of_bytes: str) -> None:
        """Add one to a counter, and bytes to another one where it is named."""
        with self.lock:
            self._counters[name] += 1
            if of_bytes:
                self._counters[of_bytes] += size_bytes

    # -- making room -----------------------------------------------------------------------------------

    def room(self, candidate: Candidate, *, clean_only: bool = False) -> Part | None:
        """Memory for a chunk, for which others may have to leave; None where it deserves none."""
        rank = self._ranker(candidate)
        with self.lock:
            self._ask_again(candidate.size_bytes)
        while True:
            with self.lock:
                limit_bytes = self.estimate.budget_bytes
                part = self._arena.take(candidate.size_bytes, limit_bytes)
                if part is not None:
                    return part
                missing_bytes = candidate.size_bytes - (limit_bytes - self._arena.used_bytes)
                if candidate.size_bytes > limit_bytes:
                    return None
                victims = self.victims(max(1, missing_bytes), rank, clean_only=clean_only)
                for one in victims:
                    one.leaving = True
            if not victims:
                return None
            self.leave(victims)

    def _ask_again(self, size_bytes: int) -> None:
        """Ask for the budget once so much has been handed out that it may have changed much. Under the lock.

        The rest of the process can grow as fast as the tier does: allocators keep what callers have freed.
        """
        self._handed_out_bytes += size_bytes
        if self._handed_out_bytes >= ASK_AGAIN_BYTES:
            self._handed_out_bytes = 0
            self.estimate = self._budget.estimate(self._arena.touched_bytes())

    def victims(self, size_bytes: int, rank: Any, *, clean_only: bool) -> list[Resident]:
        """Who leaves so that `size_bytes` come free, none where that is not to be had. Under the lock.

        With a `rank` only those of a lower one. Of a budget that has fallen, all that can leave.
        """
        idle = (
            one
            for one in self.residents.values()
            if not (one.pins or one.leases or one.leaving or one.stuck) and (one.in_store or not clean_only)
        )
        movable = [
            (self.rank_of(one), number, one)
            for number, one in enumerate(itertools.islice(idle, RANKED_CHUNKS))
        ]
        movable.sort(key=lambda ranked: ranked[:2])
        victims: list[Resident] = []
        found_bytes = 0
        for its_rank, _, one in movable:
            if rank is not None and not its_rank < rank:
                break
            victims.append(one)
            found_bytes += one.part.memory.nbytes
            if found_bytes >= size_bytes:
                return victims
        return victims if rank is None else []

    def leave(self, victims: Sequence[Resident]) -> None:
        """Bring to the store what it is to have, and give the memory back.

        Whatever `admit` raises, they stay then.
        """
        left = False
        try:
            for one in victims:
                growing = one.growing
                if growing is not None:
                    one.stuck = False
                    try:
                        growing.spill()
                    except BlockKVError as error:
                        logger_for(self.store._where).warning("a growing chunk stays in memory: %s", error)
                        one.stuck = True
            # Those that were sealed meanwhile are among them.
            self.write_back([one for one in victims if one.found])
            left = True
        finally:
            with self.lock:
                for one in victims:
                    one.leaving = False
                    # One that goes on growing in the store is not here any more, come what may.
                    if not one.stuck and (left or one.encoded in self.growing_in_store):
                        self.remove(one)
                self.changed.notify_all()

    def write_back(self, residents: Sequence[Resident]) -> None:
        """Put chunks into the store that are not there, if admission takes them."""
        chosen: list[Resident] = []
        for one in residents:
            if one.in_store:
                continue
            with self.lock:
                candidate = self.candidate_of(one)
            if self._admit is None or self._admit(candidate):
                chosen.append(one)
            else:
                self.count("write_backs_refused", 0, "")
        if not chosen:
            return
        failed: dict[int, BlockKVError] = {}
        written = [False] * len(chosen)
        try:
            written = self.store.put_many([(one.key, one.value()) for one in chosen])
        except BatchError as error:
            written, failed = [bool(result) for result in error.results], dict(error.errors)
        except BlockKVError as error:
            failed = dict.fromkeys(range(len(chosen)), error)
        for number, one in enumerate(chosen):
            if number in failed:
                logger_for(self.store._where, chunk_bytes=one.size_bytes).warning(
                    "a chunk of %d bytes is lost: %s", one.size_bytes, failed[number]
                )
                self.count("write_backs_failed", 0, "")
                continue
            one.version = self.version_of(one.key)
            if not written[number] and not one.in_store:
                self.count("write_backs_refused", 0, "")
            else:
                self.count("write_backs", one.size_bytes, "write_back_bytes")

    def write_through(self, resident: Resident) -> None:
        """Make a chunk that is in memory durable."""
        with self.leased(resident.encoded) as leased:
            if leased is None:  # it has just left, and is in the store
                self.store.commit()
                return
            # What the admission policy of the store refuses is not there.
            self.store.put(leased.key, leased.value(), durable=True)
            leased.version = self.version_of(leased.key)

    def enter(
        self,
        key: Key,
        candidate: Candidate,
        part: Part,
        layout: Layout | None,
        *,
        version: Version | None = None,
    ) -> Resident:
        """A chunk is in memory from now on. Its key is claimed, and its memory filled."""
        resident = Resident(
            key,
            candidate.key,
            candidate.place,
            part,
            layout,
            candidate.size_bytes,
            candidate.last_use,
            version,
        )
        with self.lock:
            self.residents[candidate.key] = resident
            self._group_count[candidate.place.group] += 1
        return resident

    def give(self, part: Part) -> None:
        """Give back memory that no chunk has entered."""
        with self.lock:
            self._arena.give(part)
            self._arena.shrink(self.estimate.budget_bytes)

    def remove(self, resident: Resident) -> None:
        """Forget it; its memory is given back when nobody reads it any more."""
        with self.lock:
            if not resident.removed:
                self._forget(resident)

    def _forget(self, resident: Resident) -> None:
        resident.removed = True
        del self.residents[resident.encoded]
        group = resident.place.group
        self._group_count[group] -= 1
        if not self._group_count[group]:
            del self._group_count[group]
            self._group_use.pop(group, None)
        if not resident.leases:
            self._arena.give(resident.part)
            self._arena.shrink(self.estimate.budget_bytes)

    def release(self, resident: Resident) -> None:
        """Take a lease back."""
        with self.lock:
            resident.leases -= 1
            if resident.removed and not resident.leases:
                self._arena.give(resident.part)
                self._arena.shrink(self.estimate.budget_bytes)
            self.changed.notify_all()

    # -- ranks -----------------------------------------------------------------------------------------

    def candidate_for(self, encoded: bytes, place: Place, size_bytes: int) -> Candidate:
        """A chunk that is used now, and not in memory."""
        with self.lock:
            self._clock += 1
            if place.group in self._group_count:
                self._group_use[place.group] = self._clock
            return Candidate(encoded, place, size_bytes, self._clock, self._clock, False)

    def candidate_of(self, resident: Resident) -> Candidate:
        """Under the lock."""
        group_use = max(self._group_use.get(resident.place.group, 0), resident.last_use)
        return Candidate(
            resident.encoded,
            resident.place,
            resident.size_bytes,
            resident.last_use,
            group_use,
            resident.in_store,
        )

    def rank_of(self, resident: Resident) -> Any:
        """How much a chunk deserves its memory. Under the lock."""
        return self._ranker(self.candidate_of(resident))

    def rebind(self) -> Estimate:
        """Ask for the budget, and let leave what does not fit."""
        with self.lock:
            estimate = self._budget.estimate(self._arena.touched_bytes())
            self.estimate = estimate
            for one in self.residents.values():
                one.stuck = False
        while True:
            with self.lock:
                self._arena.shrink(estimate.budget_bytes)
                surplus = self._arena.resident_bytes - estimate.budget_bytes
                victims = self.victims(surplus, None, clean_only=False) if surplus > 0 else []
                for one in victims:
                    one.leaving = True
            if not victims:
                return estimate
            self.leave(victims)

    def write_back_all(self) -> None:
        """Write back what admission takes, the most deserving last."""
        with self.lock:
            waiting = sorted((one for one in self.residents.values() if one.found), key=self.rank_of)
        waiting = self._within_write_budget(waiting)
        while waiting:
            batch, size_bytes = [waiting.pop(0)], 0
            while waiting and size_bytes < WRITE_BACK_BYTES:
                size_bytes += batch[-1].size_bytes
                batch.append(waiting.pop(0))
            self.write_back(batch)

    def _within_write_budget(self, waiting: list[Resident]) -> list[Resident]:
        """Of chunks in this order, the last ones that the write budget of the store holds, if it has one."""
        left_bytes = self.store.stats().get("write_budget_left_bytes")
        if left_bytes is None:
            return waiting
        held = 0
        for one in reversed(waiting):
            if not one.in_store:
                left_bytes -= one.size_bytes + UNIT_BYTES
            if left_bytes < 0:
                break
            held += 1
        if held < len(waiting):
            lost = sum(not one.in_store for one in waiting[: len(waiting) - held])
            logger_for(self.store._where, chunks=lost).warning(
                "%d chunks in memory are lost: the write budget does not hold them", lost
            )
            with self.lock:
                self._counters["write_backs_refused"] += lost
        return waiting[len(waiting) - held :]

    def close(self) -> None:
        """Write back what admission takes, and forget everything. Nothing is under way any more."""
        try:
            self.write_back_all()
        finally:
            with self.lock:
                for resident in list(self.residents.values()):
                    if resident.growing is not None:
                        resident.growing.end_with_tier()
                    self.remove(resident)
                self._arena.shrink(0)

    def stats(self) -> dict[str, Any]:
        """Figures of the tier; see docs/residency.md."""
        with self.lock:
            figures: dict[str, Any] = {name: self._counters[name] for name in COUNTERS}
            figures["memory_budget_bytes"] = self.estimate.budget_bytes
            figures["memory_resident_bytes"] = self._arena.resident_bytes
            figures["memory_chunks"] = len(self.residents)
            figures["memory_bytes"] = sum(one.size_bytes for one in self.residents.values())
            figures["memory_pressure_percent"] = self.estimate.pressure_percent
        return figures
