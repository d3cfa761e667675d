"""Which chunk leaves next: policies that can be plugged into a store, and the ones that come with it.

The index keeps the least recently used order by itself, in C, at no cost per chunk; that is `eviction="lru"`,
the default. Any other policy is an object that the store tells what happens and asks for victims. The same
objects run in `tools/policy_table.py` against a trace.

Invariants
  * a policy only proposes: chunks that are pinned or being read stay, whatever it says, and where it has
    nothing to propose the least recently used chunk leaves;
  * a policy that was never told of a chunk, or not of its end, does no harm.

Not here: what may be written at all (`admission`), priorities, quotas and expiry (`blockkv.store.keeping`).
Callers serialise.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["POLICIES", "Eviction", "Lru", "PrefixAware", "S3Fifo"]


class Eviction(Protocol):
    """What the store tells a policy, and what it asks it. Chunks go by their digests.

    Every method is called with the store's lock held: it must not block, and must not call the store. Of
    a policy that raises the store says so in the log, and goes on without it until the next open.
    """

    def asked(self, digests: Sequence[bytes]) -> None:
        """A request wants this prefix: its chunks in order, from the first on, stored or not."""

    def inserted(self, digest: bytes) -> None:
        """The chunk is stored from now on. At open this is called for every chunk, least recent first."""

    def used(self, digest: bytes) -> None:
        """The chunk was read, or put again, or touched."""

    def removed(self, digest: bytes) -> None:
        """The chunk is stored no longer: evicted, deleted, expired or damaged. Unknown ones are ignored."""

    def victims(self) -> Iterator[bytes]:
        """Stored chunks, first to leave first. The store takes as many as it needs and may pass over some."""


class Lru(Eviction):
    """The chunk used longest ago leaves. What the index does by itself, for comparison."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def asked(self, digests: Sequence[bytes]) -> None:
        """Nothing: being asked for is no use."""

    def inserted(self, digest: bytes) -> None:
        self._order[digest] = None
        self._order.move_to_end(digest)

    def used(self, digest: bytes) -> None:
        if digest in self._order:
            self._order.move_to_end(digest)

    def removed(self, digest: bytes) -> None:
        self._order.pop(digest, None)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)


class S3Fifo(Eviction):
    """S3-FIFO (Yang et al., SOSP'23): a small queue on trial, a main queue, a ghost of what failed the trial.

    A chunk that was used while in the small queue, or comes back while the ghost remembers it, goes to the
    main queue, where each use saves it one round. Queues only give way when the store is full.
    """

    SMALL_SHARE = 0.1
    MOST_USES = 3

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()

    def asked(self, digests: Sequence[bytes]) -> None:
        """Nothing: being asked for is no use."""

    def inserted(self, digest: bytes) -> None:
        queue = self._small
        if digest in self._ghost:
            del self._ghost[digest]
            queue = self._main
        queue[digest] = 0

    def used(self, digest: bytes) -> None:
        for queue in (self._small, self._main):
            if digest in queue:
                queue[digest] = min(self.MOST_USES, queue[digest] + 1)

    def removed(self, digest: bytes) -> None:
        if self._small.pop(digest, None) is not None:
            self._ghost[digest] = None
            while len(self._ghost) > len(self._small) + len(self._main):
                self._ghost.popitem(last=False)
        self._main.pop(digest, None)

    def victims(self) -> Iterator[bytes]:
        """Turns the queues as it goes; what the store passes over is saved one round."""
        total = len(self._small) + len(self._main)
        proposed: set[bytes] = set()
        for _ in range((self.MOST_USES + 2) * total):
            if len(self._small) > self.SMALL_SHARE * total or not self._main:
                digest, uses = self._small.popitem(last=False)
                if uses:
                    self._main[digest] = 0
                    continue
                self._small[digest] = 0
            else:
                digest, uses = self._main.popitem(last=False)
                self._main[digest] = max(0, uses - 1)
                if uses:
                    continue
            if digest not in proposed:
                proposed.add(digest)
                yield digest
        yield from [digest for digest in (*self._small, *self._main) if digest not in proposed]


class PrefixAware(Eviction):
    """Keeps what conversations will ask for again, as far as their past tells.

    Each request for a prefix is a visit. A chunk belongs to the latest visit it was part of, and the chunks
    of a visit leave together, last one first: what is left is still a prefix. A visit *continues* an earlier
    one when it shares more than half of that one's chunks; then the earlier one has paid. How likely that is,
    and how soon, depends on how often the conversation was continued before (turn structure) and on how much
    text the visit brought that was never seen (long pastes are rarely continued). For each such class, and
    each age, the policy counts how many visits were continued and how long it waited for that, and ranks
    visits by the most continuations per second of keeping them that any patience would give (the Gittins
    index). The last chunk of a prefix, which continuing requests share least, is ranked by itself.

    It goes on counting for visits whose chunks have left, or were never admitted: it remembers up to
    `remembered_per_chunk` chunks for each that is stored. Before there is anything to count it assumes what
    the constants below say. Counts are lost when the store is closed. About 0.5 KiB of memory a chunk stored.
    """

    AGES_S = (
        0,
        8,
        16,
        24,
        32,
        48,
        64,
        80,
        100,
        125,
        150,
        200,
        250,
        300,
        400,
        500,
        600,
        800,
        1000,
        1400,
        1800,
    )
    """Bounds of the ages that are counted apart; what is older is one class of them."""
    OLDEST_SPAN_S = 1800.0
    """How long the oldest age is taken to last."""
    TURNS = 5
    SIZES = 9
    CLASSES = TURNS * SIZES
    """Number of earlier turns, up to 4; and the bit length of the number of new chunks, up to 8."""

    ASSUMED_SHARE, ASSUMED_MEDIAN_S, ASSUMED_SIGMA = 0.5, 120.0, 0.8
    """Half of all visits are continued, after a log-normal time: people read, think and type."""
    ASSUMED_TURNS = (0.8, 1.0, 1.3, 1.6, 1.8)
    """How much likelier than the average visit one of so many earlier turns is to be continued."""
    ASSUMED_SIZE_POWER = -0.15
    """The same for new chunks: by 2 to this power for every doubling. All assumptions are rounded from the
    Mooncake conversation trace."""
    ASSUMED_VISITS, ASSUMED_AGE_S, ASSUMED_CLASS_VISITS, ASSUMED_CLASS_S = 50.0, 20000.0, 20.0, 16000.0
    """How many counted visits, or seconds of waiting in an age, weigh as much as what is assumed: of the
    factors above, of the ages, of a class against its factors, and of an age of a class."""

    RANK_EVERY_VISITS = 64
    """How often the classes are ranked anew."""
    FIRST_VICTIMS = 64
    """Visits that are sorted out at first: a round of eviction seldom needs more."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        remembered_per_chunk: float = 8.0,
        assume: bool = True,
    ) -> None:
        """`clock` gives seconds. With `assume=False` turns and sizes are taken to make no difference until
        counts say so.
        """
        self._clock = clock
        self._remembered_per_chunk = remembered_per_chunk
        self._owner: dict[bytes, _Visit] = {}
        self._parent: dict[bytes, bytes] = {}
        """The chunk before it in its prefix, of all that are remembered but first ones."""
        self._followers: dict[bytes, int] = {}
        """How many stored chunks directly follow it, where there are any."""
        self._stored_count = 0
        self._visits: OrderedDict[_Visit, None] = OrderedDict()
        """All that are remembered or hold stored chunks, oldest first."""
        self._free_slots: list[int] = []
        self._times = np.zeros(0)
        self._classes = np.zeros(0, np.int64)
        self._holds = np.zeros(0, np.bool_)
        """Whether the visit in a slot has stored chunks."""
        self._waits = np.zeros(0, np.bool_)
        """Whether nobody has continued it so far."""
        self._is_tip = np.zeros(0, np.bool_)
        self._in_slot: list[_Visit | None] = []
        self._bounds = np.array([*self.AGES_S, math.inf])
        self._spans = np.diff([*self.AGES_S, self.AGES_S[-1] + self.OLDEST_SPAN_S])
        self._continued = np.zeros((self.CLASSES, len(self._spans)))
        self._waited_s = np.zeros((self.CLASSES, len(self._spans)))
        self._tips_continued, self._tips_shared = 2.0, 1.0
        self._assumed_rate = self._assumed_rates()
        shape = (self.TURNS, self.SIZES)
        turns, sizes = np.array(self.ASSUMED_TURNS), 2.0 ** (self.ASSUMED_SIZE_POWER * (np.arange(9) - 3))
        self._assumed_factors = (turns, sizes) if assume else (np.ones(shape[0]), np.ones(shape[1]))
        self._factors = self._assumed_factors
        self._worth = np.zeros((self.CLASSES, len(self._spans)))
        self._visit_count = 0
        self._rank()

    # -- what happens ----------------------------------------------------------------------------------

    def asked(self, digests: Sequence[bytes]) -> None:
        if not digests:
            return
        now, known = self._clock(), 0
        for digest in digests:
            if digest not in self._owner:
                break
            known += 1
        before = self._owner[digests[known - 1]].body if known else None
        if before is not None and 2 * known <= before.length:
            before = None
        turn = 0 if before is None else before.turn + 1
        if before is not None and self._waits[before.slot]:
            self._waits[before.slot] = False
            self._count(int(self._classes[before.slot]), now - before.time_s, continued=True)
            self._tips_continued += 1
            self._tips_shared += known >= before.length
        size = min((len(digests) - known).bit_length(), self.SIZES - 1)
        body = _Visit(turn, len(digests), now)
        visit_class = min(turn, self.TURNS - 1) * self.SIZES + size
        self._add(body, visit_class, waits=True)
        tip = body
        if len(digests) > 1:
            tip = _Visit(turn, len(digests), now, body)
            self._add(tip, visit_class, waits=False)
        for digest in digests[:-1]:
            self._move(digest, body)
        self._move(digests[-1], tip)
        for number in range(max(1, known), len(digests)):
            self._parent[digests[number]] = digests[number - 1]
        self._visit_count += 1
        if self._visit_count % self.RANK_EVERY_VISITS == 0:
            self._rank()
        self._forget(now)

    def inserted(self, digest: bytes) -> None:
        visit = self._owner.get(digest)
        if visit is None:
            self.asked([digest])
            visit = self._owner[digest]
        if digest not in visit.stored:
            visit.stored[digest] = None
            self._stored_count += 1
            self._holds[visit.slot] = True
            self._follow(digest, 1)

    def used(self, digest: bytes) -> None:
        """Nothing: what is read was asked for before, in a request that says more."""

    def removed(self, digest: bytes) -> None:
        visit = self._owner.get(digest)
        if visit is not None and digest in visit.stored:
            del visit.stored[digest]
            self._stored_count -= 1
            self._holds[visit.slot] = bool(visit.stored)
            self._follow(digest, -1)

    def victims(self) -> Iterator[bytes]:
        """Never one that a stored chunk follows, in whatever visit: it would be a prefix no longer."""
        slots = np.flatnonzero(self._holds)
        worth = self._worth_at(slots, self._clock())
        gone: dict[bytes, int] = {}
        held: set[bytes] = set()
        for part in self._sorted_parts(worth, self._times[slots]):
            for number in part:
                for digest in reversed(list(self._at(slots[number]).stored)):
                    free: bytes | None = digest
                    while free is not None and self._followers.get(free, 0) <= gone.get(free, 0):
                        yield free
                        held.discard(free)
                        parent = self._parent.get(free)
                        if parent is not None:
                            gone[parent] = gone.get(parent, 0) + 1
                        free = parent if parent in held else None
                    if free is not None:
                        held.add(free)

    def _worth_at(self, slots: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        worth = self._worth[self._classes[slots], self._age_index(now - self._times[slots])]
        return np.where(self._is_tip[slots], worth * (self._tips_shared / self._tips_continued), worth)

    def _sorted_parts(
        self, worth: NDArray[np.float64], times: NDArray[np.float64]
    ) -> Iterator[NDArray[np.int64]]:
        """Numbers of visits, least worth and then oldest first: a few, and then the rest."""
        if len(worth) <= self.FIRST_VICTIMS:
            yield np.lexsort((times, worth))
            return
        apart = np.argpartition(worth, self.FIRST_VICTIMS)
        for part in (apart[: self.FIRST_VICTIMS], apart[self.FIRST_VICTIMS :]):
            yield part[np.lexsort((times[part], worth[part]))]

    # -- visits ----------------------------------------------------------------------------------------

    def _at(self, slot: int) -> _Visit:
        visit = self._in_slot[slot]
        assert visit is not None
        return visit

    def _add(self, visit: _Visit, visit_class: int, *, waits: bool) -> None:
        if not self._free_slots:
            count = len(self._in_slot)
            more = max(64, count)
            self._free_slots = list(range(count + more - 1, count - 1, -1))
            self._in_slot += [None] * more
            self._times = np.concatenate([self._times, np.zeros(more)])
            self._classes = np.concatenate([self._classes, np.zeros(more, np.int64)])
            self._holds = np.concatenate([self._holds, np.zeros(more, np.bool_)])
            self._waits = np.concatenate([self._waits, np.zeros(more, np.bool_)])
            self._is_tip = np.concatenate([self._is_tip, np.zeros(more, np.bool_)])
        visit.slot = slot = self._free_slots.pop()
        self._in_slot[slot] = visit
        self._times[slot], self._classes[slot] = visit.time_s, visit_class
        self._holds[slot], self._waits[slot], self._is_tip[slot] = False, waits, visit.body is not visit
        self._visits[visit] = None

    def _move(self, digest: bytes, visit: _Visit) -> None:
        """Make a chunk part of a visit, last of its chunks so far."""
        before = self._owner.get(digest)
        self._owner[digest] = visit
        visit.chunks.append(digest)
        if before is not None and digest in before.stored:
            del before.stored[digest]
            self._holds[before.slot] = bool(before.stored)
            visit.stored[digest] = None
            self._holds[visit.slot] = True

    def _follow(self, digest: bytes, change: int) -> None:
        parent = self._parent.get(digest)
        if parent is not None:
            count = self._followers.pop(parent, 0) + change
            if count > 0:
                self._followers[parent] = count

    def _forget(self, now: float) -> None:
        """Forget the oldest visits that hold nothing, while too much is remembered."""
        limit = self._stored_count * (1 + self._remembered_per_chunk) + 1024
        if len(self._owner) <= limit:
            return
        for visit in list(self._visits):
            if len(self._owner) <= limit:
                break
            for digest in visit.chunks:
                if self._owner.get(digest) is visit and digest not in visit.stored:
                    del self._owner[digest]
                    self._parent.pop(digest, None)
            visit.chunks = list(visit.stored)
            if not visit.stored:
                if self._waits[visit.slot]:
                    self._count(int(self._classes[visit.slot]), now - visit.time_s, continued=False)
                del self._visits[visit]
                self._in_slot[visit.slot] = None
                self._waits[visit.slot] = False
                self._free_slots.append(visit.slot)

    # -- what they are worth ---------------------------------------------------------------------------

    def _age_index(self, age_s: NDArray[np.float64] | float) -> NDArray[np.int64]:
        return np.searchsorted(self._bounds, age_s, "right").astype(np.int64) - 1

    def _count(self, visit_class: int, age_s: float, *, continued: bool) -> None:
        age = int(self._age_index(age_s))
        self._waited_s[visit_class, :age] += self._spans[:age]
        self._waited_s[visit_class, age] += min(age_s - self._bounds[age], self._spans[age])
        self._continued[visit_class, age] += continued

    def _assumed_rates(self) -> NDArray[np.float64]:
        """Continuations a second, by age, of a visit that was not continued before."""
        ends = [*self.AGES_S[1:], math.inf]
        left = [1.0] + [
            1
            - self.ASSUMED_SHARE
            * (1 + math.erf(math.log(end / self.ASSUMED_MEDIAN_S) / self.ASSUMED_SIGMA / math.sqrt(2)))
            / 2
            for end in ends
        ]
        rates = [
            -math.log(after / before) / span
            for before, after, span in zip(left, left[1:], self._spans, strict=False)
        ]
        return np.maximum(rates, 1e-7)

    def _rank(self) -> None:
        """Work out `_worth` from what was counted, for every class and age.

        The rate of continuations is that of its age, times a factor of the turn, times one of the size; where
        enough was counted, what was counted of the class, and of the age of the class.
        """
        waited_s = self._waited_s + self._waiting_s()
        by_turn, by_size = self._factors
        assumed_by_turn, assumed_by_size = self._assumed_factors
        continued = self._continued.sum(1).reshape(self.TURNS, self.SIZES)
        both = np.outer(by_turn, by_size).ravel()
        weighted_s = (waited_s * both[:, None]).sum(0)
        for _ in range(2):
            rate = (self._continued.sum(0) + self._assumed_rate * self.ASSUMED_AGE_S) / (
                weighted_s + self.ASSUMED_AGE_S
            )
            expected = (waited_s * rate).sum(1).reshape(self.TURNS, self.SIZES)
            weight = self.ASSUMED_VISITS
            by_turn = (continued.sum(1) + weight * assumed_by_turn) / ((expected * by_size).sum(1) + weight)
            by_size = (continued.sum(0) + weight * assumed_by_size) / (
                (expected * by_turn[:, None]).sum(0) + weight
            )
        self._factors = by_turn, by_size
        both = np.outer(by_turn, by_size).ravel()
        weight = self.ASSUMED_CLASS_VISITS
        both *= (continued.ravel() + weight) / (expected.ravel() * both + weight)
        rates = (self._continued + rate * both[:, None] * self.ASSUMED_CLASS_S) / (
            waited_s + self.ASSUMED_CLASS_S
        )
        self._worth = _most_per_second(rates, self._spans)

    def _waiting_s(self) -> NDArray[np.float64]:
        """Seconds that the visits which still wait have been waiting, by class and age."""
        found = np.zeros_like(self._waited_s)
        slots = np.flatnonzero(self._waits)
        if not len(slots):
            return found
        ages_s, classes = self._clock() - self._times[slots], self._classes[slots]
        for age, (start, span) in enumerate(zip(self._bounds, self._spans, strict=False)):
            inside = np.clip(ages_s - start, 0, span)
            found[:, age] = np.bincount(classes, inside, self.CLASSES)
        return found


class _Visit:
    """One request for a prefix; or, with a `body`, the last chunk of that request."""

    __slots__ = ("body", "chunks", "length", "slot", "stored", "time_s", "turn")

    def __init__(self, turn: int, length: int, time_s: float, body: _Visit | None = None) -> None:
        self.turn = turn
        self.length = length
        """Chunks of the whole prefix."""
        self.time_s = time_s
        self.body = body or self
        self.slot = -1
        self.chunks: list[bytes] = []
        """Its chunks, in order, also those that have gone to later visits since."""
        self.stored: dict[bytes, None] = {}
        """Those that are its own and stored, in order."""


def _most_per_second(rates: NDArray[np.float64], spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Gittins index of every class and age: of all times to stop waiting at, the best ratio of the
    chance of a continuation until then to the time one expects to wait.

    `rates`, of shape (classes, ages), are continuations a second; `spans` how long an age lasts.
    """
    count = rates.shape[1]
    gone = 1 - np.exp(-rates * spans)
    left = np.concatenate([np.ones((len(rates), 1)), np.cumprod(1 - gone, 1)], 1)
    zero = np.zeros((len(rates), 1))
    chance = np.concatenate([zero, np.cumsum(left[:, :-1] * gone, 1)], 1)
    waited_s = np.concatenate([zero, np.cumsum(left[:, :-1] * spans * (1 - gone / 2), 1)], 1)
    return np.stack(
        [
            (
                (chance[:, age + 1 :] - chance[:, age : age + 1])
                / np.maximum(waited_s[:, age + 1 :] - waited_s[:, age : age + 1], 1e-12)
            ).max(1)
            for age in range(count)
        ],
        1,
    )


POLICIES: dict[str, Callable[[], Eviction]] = {"prefix": PrefixAware, "s3fifo": S3Fifo}
"""Policies by name, beyond "lru"."""
