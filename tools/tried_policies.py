"""Eviction policies that were tried against the trace and did not make it into blockkv.

Each is an `Eviction` (`blockkv/catalog/eviction.py`) and stands in the table of `tools/policy_table.py`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence


class Told:
    """Ignores what it is not interested in."""

    def asked(self, digests: Sequence[bytes]) -> None:
        pass

    def used(self, digest: bytes) -> None:
        pass


class RootsLast(Told):
    """LRU, but the chunks of a request count as used last one first: leaves go before roots."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._asked: Sequence[bytes] = ()

    def asked(self, digests: Sequence[bytes]) -> None:
        self._asked = digests
        self._touch()

    def _touch(self) -> None:
        for digest in reversed(self._asked):
            if digest in self._order:
                self._order.move_to_end(digest)

    def inserted(self, digest: bytes) -> None:
        self._order[digest] = None
        if self._asked and digest == self._asked[-1]:
            self._touch()

    def removed(self, digest: bytes) -> None:
        self._order.pop(digest, None)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)


class TwoQueues(Told):
    """Segmented LRU, the essence of 2Q: what was used since it came is protected, up to a share of all."""

    def __init__(self, protected: float = 0.8) -> None:
        self._share = protected
        self._trial: OrderedDict[bytes, None] = OrderedDict()
        self._protected: OrderedDict[bytes, None] = OrderedDict()

    def inserted(self, digest: bytes) -> None:
        self._trial[digest] = None

    def used(self, digest: bytes) -> None:
        if self._trial.pop(digest, 0) is None:
            self._protected[digest] = None
            while len(self._protected) > self._share * (len(self._trial) + len(self._protected)):
                self._trial[self._protected.popitem(last=False)[0]] = None
        elif digest in self._protected:
            self._protected.move_to_end(digest)

    def removed(self, digest: bytes) -> None:
        self._trial.pop(digest, None)
        self._protected.pop(digest, None)

    def victims(self) -> Iterator[bytes]:
        return itertools.chain(self._trial, self._protected)


class LruTwo(Told):
    """LRU-2: whose second last use is longest ago leaves; what was asked for once goes first."""

    def __init__(self) -> None:
        self._now = 0
        self._uses: dict[bytes, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, bytes]] = []
        self._stored: set[bytes] = set()

    def asked(self, digests: Sequence[bytes]) -> None:
        self._now += 1
        for digest in digests:
            self._uses[digest] = (self._uses.get(digest, (0, 0))[1], self._now)
            if digest in self._stored:
                heapq.heappush(self._heap, (*self._uses[digest], digest))

    def inserted(self, digest: bytes) -> None:
        self._stored.add(digest)
        heapq.heappush(self._heap, (*self._uses[digest], digest))

    def removed(self, digest: bytes) -> None:
        self._stored.discard(digest)

    def victims(self) -> Iterator[bytes]:
        while self._heap:
            *uses, digest = heapq.heappop(self._heap)
            if digest in self._stored and self._uses[digest] == tuple(uses):
                yield digest


class Arc(Told):
    """ARC (Megiddo and Modha, FAST'03): recent and frequent, divided by which one's ghost is asked for."""

    def __init__(self) -> None:
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._frequent: OrderedDict[bytes, None] = OrderedDict()
        self._recent_ghost: OrderedDict[bytes, None] = OrderedDict()
        self._frequent_ghost: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0

    def inserted(self, digest: bytes) -> None:
        recent, frequent = len(self._recent_ghost), len(self._frequent_ghost)
        if self._recent_ghost.pop(digest, 0) is None:
            self._target = min(self._count, self._target + max(1, frequent / max(1, recent)))
            self._frequent[digest] = None
        elif self._frequent_ghost.pop(digest, 0) is None:
            self._target = max(0, self._target - max(1, recent / max(1, frequent)))
            self._frequent[digest] = None
        else:
            self._recent[digest] = None

    @property
    def _count(self) -> int:
        return len(self._recent) + len(self._frequent)

    def used(self, digest: bytes) -> None:
        if self._recent.pop(digest, 0) is None:
            self._frequent[digest] = None
        elif digest in self._frequent:
            self._frequent.move_to_end(digest)

    def removed(self, digest: bytes) -> None:
        for queue, ghost in (
            (self._recent, self._recent_ghost),
            (self._frequent, self._frequent_ghost),
        ):
            if queue.pop(digest, 0) is None:
                ghost[digest] = None
                while len(ghost) > self._count:
                    ghost.popitem(last=False)

    def victims(self) -> Iterator[bytes]:
        recent, frequent = list(self._recent), list(self._frequent)
        left = len(recent)
        for digest in recent[:]:
            if left <= self._target and frequent:
                break
            left -= 1
            yield digest
        yield from frequent
        yield from recent[len(recent) - left :]


class TinyLfu(Told):
    """W-TinyLFU (Einziger et al., 2017), exact counts: a newcomer stays if asked for more than the victim."""

    WINDOW = 0.01

    def __init__(self) -> None:
        self._window: OrderedDict[bytes, None] = OrderedDict()
        self._main = TwoQueues()
        self._main_count = 0
        self._asks: Counter[bytes] = Counter()
        self._until_halved = 0

    def asked(self, digests: Sequence[bytes]) -> None:
        self._asks.update(digests)
        self._until_halved -= len(digests)
        if self._until_halved < 0:
            self._asks = Counter({digest: count // 2 for digest, count in self._asks.items() if count > 1})
            self._until_halved = 10 * max(1000, self._main_count)

    def inserted(self, digest: bytes) -> None:
        self._window[digest] = None

    def used(self, digest: bytes) -> None:
        if digest in self._window:
            self._window.move_to_end(digest)
        self._main.used(digest)

    def removed(self, digest: bytes) -> None:
        if self._window.pop(digest, 0) is not None:
            self._main_count -= 1
            self._main.removed(digest)

    def victims(self) -> Iterator[bytes]:
        count = len(self._window) + self._main_count
        while self._main_count < (1 - self.WINDOW) * count:
            self._promote()
        candidates = iter(list(self._main.victims()))
        held = next(candidates, None)
        while held is not None:
            if not self._window:
                yield held
                held = next(candidates, None)
                continue
            newcomer = self._promote()
            if self._asks[newcomer] <= self._asks[held]:
                yield newcomer
            else:
                yield held
                held = next(candidates, None)

    def _promote(self) -> bytes:
        newcomer = self._window.popitem(last=False)[0]
        self._main.inserted(newcomer)
        self._main_count += 1
        return newcomer


class Greedy(Told):
    """Greedy-dual, as GDSF (Cherkasova, 1998) does it: a clock plus `worth(asks, depth)` of a chunk."""

    def __init__(self, worth: Callable[[int, int], float]) -> None:
        self._worth = worth
        self._clock = 0.0
        self._asks: Counter[bytes] = Counter()
        self._depth: dict[bytes, int] = {}
        self._value: dict[bytes, float] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._count = itertools.count()

    def asked(self, digests: Sequence[bytes]) -> None:
        self._asks.update(digests)
        for depth, digest in enumerate(digests):
            self._depth[digest] = depth
            if digest in self._value:
                self.inserted(digest)

    def inserted(self, digest: bytes) -> None:
        self._value[digest] = self._clock + self._worth(self._asks[digest], self._depth[digest])
        heapq.heappush(self._heap, (self._value[digest], next(self._count), digest))

    def removed(self, digest: bytes) -> None:
        self._value.pop(digest, None)

    def victims(self) -> Iterator[bytes]:
        while self._heap:
            value, _, digest = heapq.heappop(self._heap)
            if self._value.get(digest) == value:
                self._clock = value
                yield digest


class ShortTurnsStay(Told):
    """LRU, but what came in a request of `most_new` new chunks and more leaves before all else."""

    def __init__(self, most_new: int = 32) -> None:
        self._most_new = most_new
        self._bulk: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._is_bulk = False

    def asked(self, digests: Sequence[bytes]) -> None:
        new = sum(digest not in self._bulk and digest not in self._kept for digest in digests)
        self._is_bulk = new >= self._most_new

    def inserted(self, digest: bytes) -> None:
        (self._bulk if self._is_bulk else self._kept)[digest] = None

    def used(self, digest: bytes) -> None:
        if self._bulk.pop(digest, 0) is None:
            self._kept[digest] = None
        elif digest in self._kept:
            self._kept.move_to_end(digest)

    def removed(self, digest: bytes) -> None:
        self._bulk.pop(digest, None)
        self._kept.pop(digest, None)

    def victims(self) -> Iterator[bytes]:
        return itertools.chain(self._bulk, self._kept)
