"""Locks of LMCache's keys: each is a pin in the store, and ends by itself when it was forgotten.

LMCache locks what a lookup has found until it is loaded, several times where several requests want it, and
unlocks as often. A request that dies in between would keep chunks for ever.

Invariants
  * there are as many pins of ours as locks;
  * an unlock ends the oldest lock of its key, and nothing where there is none: the lock may have ended by
    itself;
  * a lock ends by itself no sooner than `lock_s` after it was taken, and not before this is called again.

Not here: leases of reads under way; the store has those.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lmcache.v1.distributed.api import ObjectKey

import blockkv
from blockkv.errors import BlockKVError

__all__ = ["Locks"]


@dataclass(frozen=True, slots=True)
class _Lock:
    key: ObjectKey
    chunk: str
    ends_s: float


class Locks:
    """Thread-safe."""

    def __init__(
        self, store: blockkv.Store, lock_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._lock_s = lock_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._locks: OrderedDict[int, _Lock] = OrderedDict()
        """By number, in the order in which they end."""
        self._numbers: dict[ObjectKey, deque[int]] = {}
        self._next = 0
        self.expired = 0
        """Locks that ended by themselves."""

    def __len__(self) -> int:
        """How many keys are locked."""
        return len(self._numbers)

    def lock(self, key: ObjectKey, chunk: str) -> bool:
        """Keep the chunk, which is that of the key; False where there is none. Raises StoreClosed."""
        if not self._store.pin(chunk):
            return False
        with self._mutex:
            number = self._next
            self._next += 1
            self._locks[number] = _Lock(key, chunk, self._clock() + self._lock_s)
            self._numbers.setdefault(key, deque()).append(number)
        return True

    def unlock(self, keys: Iterable[ObjectKey]) -> None:
        """End a lock of each key. Never fails."""
        with self._mutex:
            ended = [self._end(numbers[0]) for key in keys if (numbers := self._numbers.get(key))]
        self._unpin(ended)

    def expire(self) -> None:
        """End the locks whose time is over."""
        now_s = self._clock()
        ended: list[_Lock] = []
        with self._mutex:
            while self._locks:
                oldest = next(iter(self._locks))
                if self._locks[oldest].ends_s > now_s:
                    break
                ended.append(self._end(oldest))
            self.expired += len(ended)
        self._unpin(ended)

    def _end(self, number: int) -> _Lock:
        """With the mutex held; it is the oldest of its key."""
        lock = self._locks.pop(number)
        numbers = self._numbers[lock.key]
        numbers.popleft()
        if not numbers:
            del self._numbers[lock.key]
        return lock

    def _unpin(self, locks: Iterable[_Lock]) -> None:
        for lock in locks:
            try:
                self._store.unpin(lock.chunk)
            except BlockKVError:
                return  # a store that is closed has no pins
