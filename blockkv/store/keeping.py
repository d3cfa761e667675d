"""What comes into a store, what leaves it, and how long things stay: policies, priorities, expiry, quotas.

A store that was opened without any of them has no `Keeping`, and pays nothing for it; one comes into being
with the first put that has a priority or a time to live. Everything is called with the store's lock held.

Invariants
  * a chunk that is pinned or being read is never evicted, whatever a policy, a priority or a quota says;
  * a policy that raises is done without until the next open, and the change that told it goes on;
  * what has expired is deleted before the next call that looks for a key, and before anything is evicted;
  * nothing here is stored on the device: after a restart chunks have no priority and do not expire, policies
    know the order of last use and no more, and quotas count again what is there.

Not here: what the policies are (`blockkv.catalog.eviction`, `blockkv.catalog.admission`), the log.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from blockkv.catalog import admission as admissions
from blockkv.catalog import eviction as evictions
from blockkv.catalog.admission import Admission
from blockkv.catalog.eviction import Eviction
from blockkv.catalog.index import Index
from blockkv.catalog.wear import WriteBudget
from blockkv.device.base import Placement
from blockkv.errors import InvalidArgument
from blockkv.store.numbers import is_number

__all__ = ["Keeping", "Policies", "Stay", "stay"]

logger = logging.getLogger("blockkv")

REPEAT_S = 5.0
"""A prefix that is looked up again this soon is still the same request: schedulers poll while they queue."""
ANNOUNCED_LIMIT = 1 << 16
"""Chunks that were looked up and neither got nor put since, of which this much is known."""
LONGEST_TTL_S = 10 * 365 * 86400
PRIORITY_LIMIT = 1 << 31
QUOTA_SHARE = 128
"""A family above its quota also loses what fits into 1/128 of it, so that not every put sorts it out anew."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stay:
    """How long the chunks of a put stay: see `Store.put`."""

    ttl_s: float | None = None
    priority: int = 0

    @property
    def placement(self) -> Placement:
        """What the drive is told of them."""
        if self.ttl_s is not None or self.priority < 0:
            return Placement.BRIEF
        return Placement.KEPT if self.priority else Placement.DATA


@dataclass(frozen=True, slots=True)
class Policies:
    """What a store is opened with: see `open_any`. Arrays give one of each to every member."""

    eviction: str | Callable[[], Eviction] = "lru"
    admission: str | Callable[[], Admission] = "all"
    quotas: Mapping[str, int] | None = None
    """Payload bytes by family: by what keys begin with, up to the first slash."""
    write_budget: WriteBudget | None = None

    def __post_init__(self) -> None:
        for what, chosen, floor, known in (
            ("eviction", self.eviction, "lru", evictions.POLICIES),
            ("admission", self.admission, "all", admissions.POLICIES),
        ):
            if isinstance(chosen, str) and chosen != floor and chosen not in known:
                names = ", ".join(map(repr, [floor, *known]))
                raise InvalidArgument(f"{what} is {chosen!r}; use {names}, or a function that makes a policy")
            if not isinstance(chosen, str) and not callable(chosen):
                raise InvalidArgument(f"{what} is a name or a function that makes a policy, not {chosen!r}")
        if not isinstance(self.quotas, Mapping | None):
            raise InvalidArgument(
                f"quotas is {self.quotas!r}; give a mapping of what keys begin with to bytes, or None"
            )
        for family, quota_bytes in (self.quotas or {}).items():
            named = isinstance(family, str) and family and "/" not in family
            if not (named and is_number(quota_bytes) and quota_bytes >= 1):
                raise InvalidArgument(
                    f"the quota {family!r}: {quota_bytes!r} is none; give at least 1 byte, by what the keys "
                    "begin with, up to their first slash"
                )

    def described(self) -> dict[str, object]:
        """For people and JSON: policies by name."""
        names = [
            chosen if isinstance(chosen, str) else getattr(chosen, "__name__", repr(chosen))
            for chosen in (self.eviction, self.admission)
        ]
        budget = self.write_budget
        return {
            "eviction": names[0],
            "admission": names[1],
            "quotas": dict(self.quotas or {}),
            "write_budget_bytes_per_day": budget.bytes_per_day if budget is not None else None,
        }

    def shared(self, count: int) -> Policies:
        """For each of `count` stores that keep them together."""
        quotas = {family: max(1, quota // count) for family, quota in (self.quotas or {}).items()}
        budget = self.write_budget
        return replace(self, quotas=quotas, write_budget=budget.shared(count) if budget is not None else None)

    @property
    def are_default(self) -> bool:
        """Whether who comes in, leaves and stays is what a store does by itself."""
        return self.eviction == "lru" and self.admission == "all" and not self.quotas


def stay(ttl_s: float | None, priority: int) -> Stay | None:
    """What a put is given, None where that is nothing. Raises InvalidArgument."""
    if ttl_s is not None and not (is_number(ttl_s) and 0 < ttl_s <= LONGEST_TTL_S):
        raise InvalidArgument(
            f"ttl_s is {ttl_s!r}; use None, or more than 0 and up to {LONGEST_TTL_S} seconds"
        )
    if not isinstance(priority, int) or not -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT:
        raise InvalidArgument(f"priority is {priority!r}; use a whole number, 0 for the usual one")
    return None if ttl_s is None and not priority else Stay(ttl_s, priority)


class Keeping:
    """Policies, priorities, expiry and quotas of one open store."""

    def __init__(self, index: Index, policies: Policies, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._eviction = _made(policies.eviction, "lru", evictions.POLICIES)
        self._admission = _made(policies.admission, "all", admissions.POLICIES)
        self._quotas = dict(policies.quotas or {})
        self._families: dict[bytes, tuple[str, int]] = {}
        """Family and payload bytes of chunks whose family has a quota."""
        self._used_bytes: Counter[str] = Counter()
        self._priorities: dict[bytes, int] = {}
        """Those other than 0."""
        self._priority_counts: Counter[int] = Counter()
        self._expires_s: dict[bytes, float] = {}
        self._due: list[tuple[float, bytes]] = []
        """A heap; what is not in `_expires_s` with the same time does not count."""
        self._stays: dict[bytes, Stay] = {}
        """Of chunks being put."""
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._asked_s: OrderedDict[bytes, float] = OrderedDict()
        """When a prefix was last looked up, by its last chunk."""
        if self._eviction is not None or self._quotas:
            for entry in index:
                self._enter(entry.digest, _family_of(entry.key), entry.payload_bytes)

    # -- what happens ----------------------------------------------------------------------------------

    def looked_up(self, digests: Sequence[bytes]) -> None:
        """A request wants this prefix. The same one again within `REPEAT_S` is the same request."""
        if not digests or not self._has_policies:
            return
        now = self._clock()
        repeated = now - self._asked_s.get(digests[-1], -REPEAT_S) < REPEAT_S
        self._asked_s[digests[-1]] = now
        self._asked_s.move_to_end(digests[-1])
        while now - next(iter(self._asked_s.values())) > REPEAT_S:
            self._asked_s.popitem(last=False)
        for digest in digests:
            self._announced[digest] = None
            self._announced.move_to_end(digest)
        while len(self._announced) > ANNOUNCED_LIMIT:
            self._announced.popitem(last=False)
        if not repeated:
            self._ask(digests)

    def got(self, digests: Sequence[bytes]) -> None:
        """These chunks were to be read; nobody else says so of those that were not looked up before."""
        if not self._has_policies:
            return
        self._ask_for_unannounced(digests)
        self.used(digests)

    def used(self, digests: Sequence[bytes]) -> None:
        """Those of these chunks that are there have been used."""
        if self._eviction is not None:
            with self._heeding(self._eviction):
                for digest in digests:
                    if digest in self._index:
                        self._eviction.used(digest)

    def admitted(self, digests: Sequence[bytes]) -> list[bool]:
        """Which of these chunks may be put: those that are there, and those that the policy admits."""
        self._ask_for_unannounced(digests)
        policy = self._admission
        if policy is not None:
            with self._heeding(policy):
                return [digest in self._index or policy.admits(digest) for digest in digests]
        return [True] * len(digests)

    def begin_put(self, digests: Sequence[bytes], stay: Stay) -> None:
        """Chunks are on their way that are to stay like this, unless they are there already."""
        self._stays.update(dict.fromkeys(digests, stay))

    def end_put(self, digests: Sequence[bytes]) -> None:
        """They are stored or have failed."""
        for digest in digests:
            self._stays.pop(digest, None)

    def inserted(self, digests: Sequence[bytes], keys: Sequence[str | bytes]) -> None:
        """These chunks are in the index now."""
        for digest, key in zip(digests, keys, strict=True):
            entry = self._index.get(digest) if self._quotas else None
            self._enter(digest, _family_of(key), entry.payload_bytes if entry is not None else 0)
            stay = self._stays.get(digest)
            if stay is None:
                continue
            if stay.ttl_s is not None:
                self._expires_s[digest] = self._clock() + stay.ttl_s
                heapq.heappush(self._due, (self._expires_s[digest], digest))
            if stay.priority:
                self._priorities[digest] = stay.priority
                self._priority_counts[stay.priority] += 1

    def left(self, digests: Sequence[bytes]) -> None:
        """These chunks are in the index no longer."""
        for digest in digests:
            if self._eviction is not None:
                with self._heeding(self._eviction):
                    self._eviction.removed(digest)
            self._expires_s.pop(digest, None)
            priority = self._priorities.pop(digest, 0)
            if priority:
                self._priority_counts[priority] -= 1
            family, payload_bytes = self._families.pop(digest, ("", 0))
            if family:
                self._used_bytes[family] -= payload_bytes

    def _enter(self, digest: bytes, family: str, payload_bytes: int) -> None:
        if self._eviction is not None:
            with self._heeding(self._eviction):
                self._eviction.inserted(digest)
        if family in self._quotas:
            self._families[digest] = family, payload_bytes
            self._used_bytes[family] += payload_bytes

    @property
    def _has_policies(self) -> bool:
        return self._eviction is not None or self._admission is not None

    def _ask_for_unannounced(self, digests: Sequence[bytes]) -> None:
        fresh = [digest for digest in digests if self._announced.pop(digest, 0) is not None]
        if fresh:
            self._ask(fresh)

    def _ask(self, digests: Sequence[bytes]) -> None:
        for policy in (self._eviction, self._admission):
            if policy is not None:
                with self._heeding(policy):
                    policy.asked(digests)

    @contextlib.contextmanager
    def _heeding(self, policy: Eviction | Admission) -> Iterator[None]:
        """Whatever the policy raises ends the policy, and nothing else."""
        try:
            yield
        except Exception:
            logger.exception("a policy raised; until the store is opened again it goes on without %r", policy)
            if policy is self._eviction:
                self._eviction = None
            else:
                self._admission = None

    # -- who leaves ------------------------------------------------------------------------------------

    def expired(self) -> list[bytes]:
        """Chunks whose time is over; not again in the next call."""
        if not self._due or self._due[0][0] > (now := self._clock()):
            return []
        found = []
        while self._due and self._due[0][0] <= now:
            expires_s, digest = heapq.heappop(self._due)
            if self._expires_s.get(digest) == expires_s:
                del self._expires_s[digest]
                found.append(digest)
        return found

    def victims(self, units: int) -> array[int]:
        """Places of chunks that hold `units` together, or all there are, first to leave first.

        The lowest priority leaves first, and within one whom the policy proposes.
        """
        if self._admission is not None:
            with self._heeding(self._admission):
                self._admission.evicting(len(self._index))
        if not self._priorities and self._eviction is None:
            return self._index.first_victims(units)
        found: dict[int, None] = {}
        for priority in self._present_priorities():
            for digest in self._order():
                if self._priorities.get(digest, 0) != priority:
                    continue
                entry = self._index.idle(digest)
                if entry is not None and entry.place not in found:
                    found[entry.place] = None
                    units -= entry.units
                    if units <= 0:
                        return array("I", found)
        return array("I", found)

    def excess(self) -> Iterator[bytes]:
        """Chunks of families above their quota, first to leave first. May be changed after each."""
        for family, quota_bytes in self._quotas.items():
            if self._used_bytes[family] <= quota_bytes:
                continue
            mine = [digest for digest in self._order() if self._families.get(digest, ("", 0))[0] == family]
            # What never fits goes first, or everybody else would leave for it in vain.
            mine.sort(key=lambda one: (self._families[one][1] <= quota_bytes, self._priorities.get(one, 0)))
            floor_bytes = quota_bytes - quota_bytes // QUOTA_SHARE
            for digest in mine:
                if self._index.idle(digest) is None:
                    continue
                left_bytes = self._used_bytes[family] - self._families[digest][1]
                if self._used_bytes[family] <= quota_bytes and left_bytes < floor_bytes:
                    break
                yield digest

    def used_bytes(self) -> dict[str, int]:
        """Payload of each family that has a quota."""
        return {family: self._used_bytes[family] for family in self._quotas}

    def _present_priorities(self) -> list[int]:
        present = {priority for priority, count in self._priority_counts.items() if count}
        if len(self._priorities) < len(self._index):
            present.add(0)
        return sorted(present)

    def _order(self) -> Iterator[bytes]:
        """Whom the policy proposes, and then everybody, the least recently used first."""
        if self._eviction is not None:
            with self._heeding(self._eviction):
                yield from self._eviction.victims()
        yield from self._index.digests()


def _made(chosen: str | Callable[[], T], floor: str, known: Mapping[str, Callable[[], T]]) -> T | None:
    if isinstance(chosen, str):
        return None if chosen == floor else known[chosen]()
    return chosen()


def _family_of(key: str | bytes) -> str:
    text = key if isinstance(key, str) else key.decode(errors="replace")
    return text.partition("/")[0]
