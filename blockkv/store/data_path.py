"""What moving the bytes of chunks needs to know: which ones, where they lie, what they have to be.

Reads and the device's part of writes run on this and on nothing else. In the process that has the store open
it is the store's `State`; in a client of `blockkv serve` it is what the catalog's owner has leased to it.

Invariants
  * a chunk that was acquired stays where it is until `release`;
  * `index` has every chunk that is leased, at the same place until then.

Not here: who may come in and what leaves (`state`), the transfers (`gets`, `puts`, `part_gets`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from blockkv.catalog.index import Acquired, Entry, Index
from blockkv.catalog.layouts import Layout
from blockkv.device.base import Device, Priority
from blockkv.format.geometry import Geometry
from blockkv.store.discards import DEFAULT_BYTES_PER_S
from blockkv.store.keeping import Policies

__all__ = ["DataPath", "Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a store was opened."""

    evict: bool = True
    verify: bool = True
    discard: bool = False
    commit_interval_ms: float | None = 10.0
    max_store_bytes: int = 256 << 20
    discard_bytes_per_s: float = DEFAULT_BYTES_PER_S
    policies: Policies = field(default_factory=Policies)


class DataPath(ABC):
    """A device, and chunks on it that are leased."""

    device: Device
    options: Options
    geometry: Geometry
    index: Index
    lock: threading.RLock
    changing: AbstractContextManager[None]
    """Held round changes of what a crash must find whole; it includes the lock."""
    changed: threading.Condition
    """Of the lock. Notified when writes of a wave are over and when a chunk is no longer read."""
    counters: Counter[str]
    store_bytes: int
    """Payload of puts that the device has got and not finished."""

    @abstractmethod
    def acquire(self, digests: Sequence[bytes], deadline_ns: int = 0) -> tuple[Acquired, list[Layout]]:
        """Find, touch and lease many chunks, with their layouts in the same order. The caller has no lock.

        What would take until after `deadline_ns` (`time.monotonic_ns`; 0: never) is not found.
        """

    @abstractmethod
    def release(self, places: array[int]) -> None:
        """Give leases back, by the places of entries. The caller holds the lock."""

    @abstractmethod
    def confirm_damage(self, priority: Priority, chunks: Sequence[tuple[Entry, Layout]]) -> list[bool]:
        """Which of these leased chunks, that did not verify, are to be dropped. The caller has no lock."""

    @abstractmethod
    def grows(self, digest: bytes) -> bool:
        """Whether this chunk, which is leased, is only the beginning of one that grows."""

    @abstractmethod
    def drop_damaged(self, entry: Entry) -> None:
        """A leased chunk is none any more: see to it that nobody finds it. The caller holds the lock."""
