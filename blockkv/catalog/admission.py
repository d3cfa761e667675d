"""What is worth writing: policies that can be plugged into a store, and the ones that come with it.

Half the chunks of real traffic are never asked for again, and every one that is written wears the drive and
pushes something else out. But a chunk that was refused is a miss the next time. Which error hurts more
depends on how much room there is, so `Adaptive` finds out.

Invariant: a policy refuses only puts of chunks that are not stored; a refused put is counted, and returns
False like one of a chunk that is there.

Not here: who leaves (`eviction`). Callers serialise.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["POLICIES", "Adaptive", "Admission", "SecondAsk"]

REMEMBERED_CHUNKS = 1 << 20
"""Chunks whose first request is remembered, about 200 bytes each."""


class Admission(Protocol):
    """What the store tells a policy, and what it asks it. Chunks go by their digests.

    Every method is called with the store's lock held: it must not block, and must not call the store. Of
    a policy that raises the store says so in the log, and goes on without it until the next open.
    """

    def asked(self, digests: Sequence[bytes]) -> None:
        """A request wants this prefix: its chunks in order, from the first on, stored or not.

        Comes from `lookup`; and from a put, for chunks that no request has named yet.
        """

    def admits(self, digest: bytes) -> bool:
        """Whether this chunk, which is not stored, may be."""

    def evicting(self, stored_count: int) -> None:
        """The store is full with so many chunks, and some will leave now."""


class SecondAsk(Admission):
    """A chunk is written when it is asked for the second time, whatever room there is."""

    def __init__(self, remembered_chunks: int = REMEMBERED_CHUNKS) -> None:
        self._asks = _Asks(remembered_chunks)

    def asked(self, digests: Sequence[bytes]) -> None:
        self._asks.add(digests)

    def admits(self, digest: bytes) -> bool:
        return self._asks.grade(digest) == 0

    def evicting(self, stored_count: int) -> None:
        """Nothing: room makes no difference."""


class Adaptive(Admission):
    """Everything is written while there is room; then as much as earns its writes.

    What is asked for a second time is always admitted. Of the rest, what counts is how many new chunks the
    request brought: the fewer, the likelier they are asked for again. For each limit of `LIMITS` on that
    number a model of a least-recently-used store of this store's size runs along, on one chunk in `SAMPLE`,
    and the limit that has the most hits, less `hits_per_write` for every chunk written, is the one in force.
    """

    LIMITS = (0, 2, 8, 32, 128, math.inf)
    SAMPLE = 8
    """Of digests, which are uniform, every eighth goes through the models (miniature simulation, Waldspurger
    et al., ATC'17)."""

    def __init__(self, hits_per_write: float = 0.2, remembered_chunks: int = REMEMBERED_CHUNKS) -> None:
        """`hits_per_write`: how many hits a write must bring."""
        self._hits_per_write = hits_per_write
        self._asks = _Asks(remembered_chunks)
        self._models = {limit: _Model() for limit in self.LIMITS}
        self._limit = math.inf
        self._capacity = 0
        """Of the store, in chunks; 0: it was never full."""
        self._until_aged = 0

    @property
    def limit(self) -> float:
        """New chunks that a request may bring at most for its first ask to be enough, as of now."""
        return self._limit

    def asked(self, digests: Sequence[bytes]) -> None:
        self._asks.add(digests)
        sampled = [digest for digest in digests if digest[0] % self.SAMPLE == 0]
        for limit, model in self._models.items():
            for digest in sampled:
                model.use(digest, self._asks.grade(digest) <= limit, self._capacity // self.SAMPLE)
        self._until_aged -= len(digests)
        if self._capacity and self._until_aged <= 0:
            self._until_aged = self._capacity
            for model in self._models.values():
                model.age()

    def admits(self, digest: bytes) -> bool:
        return self._asks.grade(digest) <= self._limit

    def evicting(self, stored_count: int) -> None:
        self._capacity = max(self.SAMPLE, stored_count)
        self._limit = max(self.LIMITS, key=lambda limit: self._models[limit].earned(self._hits_per_write))


class _Asks:
    """What was asked for, and what speaks for a chunk: 0 if it was asked for before, else how many new chunks
    came with it; without bound for the last chunk of a request, which is asked for again least of all.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._grades: OrderedDict[bytes, float] = OrderedDict()

    def add(self, digests: Sequence[bytes]) -> None:
        new_count = sum(digest not in self._grades for digest in digests)
        for digest in digests:
            self._grades[digest] = 0 if digest in self._grades else new_count
            self._grades.move_to_end(digest)
        if len(digests) > 1 and self._grades[digests[-1]]:
            self._grades[digests[-1]] = math.inf
        while len(self._grades) > self._limit:
            self._grades.popitem(last=False)

    def grade(self, digest: bytes) -> float:
        return self._grades.get(digest, math.inf)


class _Model:
    """A least-recently-used store of digests; its hits and writes count half as much after each `age`."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._hits = self._writes = 0.0

    def use(self, digest: bytes, admitted: bool, capacity: int) -> None:
        """Ask for a chunk; one that is not there is written if it is admitted. A `capacity` of 0 is none."""
        if digest in self._order:
            self._order.move_to_end(digest)
            self._hits += 1
        elif admitted:
            self._order[digest] = None
            self._writes += 1
            while capacity and len(self._order) > capacity:
                self._order.popitem(last=False)

    def age(self) -> None:
        self._hits /= 2
        self._writes /= 2

    def earned(self, hits_per_write: float) -> float:
        return self._hits - hits_per_write * self._writes


POLICIES: dict[str, Callable[[], Admission]] = {"twice": SecondAsk, "adaptive": Adaptive}
"""Policies by name, beyond "all"."""
