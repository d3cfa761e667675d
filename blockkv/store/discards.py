"""Telling the device about freed space: late, in large ranges, at a bounded rate, and never about live data.

A drive that knows what holds nothing moves less data about (`docs/performance.md`, "As it ages"). It is in no
hurry to know, and every discard takes time that gets and puts could have::

    delete durable -> its extents are free -> REST_S -> the longest free extents first: withheld from the
    allocator, discarded, given back -> a pause that keeps to the rate -> the next

Invariants
  * only free space is discarded: nothing before its delete is durable, and nothing that was given out again,
    for what is being discarded is withheld from the allocator meanwhile;
  * no lock is held while the device discards;
  * as much space as is withheld stays free, so that a put seldom has to make room because of it.

Only whole runs that held something since they were last discarded are discarded, at least as large as the
device's granularity. What waits when the store is closed waits until it is written and freed once more.
A store without a commit interval has no thread for it: `Store.discard_freed` is all there is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from blockkv.device.base import UNIT_BYTES, Device
from blockkv.errors import BlockKVError
from blockkv.format.geometry import RUN_UNITS, Geometry
from blockkv.logs import logger_for
from blockkv.space.allocator import Allocator, Extent

DEFAULT_BYTES_PER_S = float(2 << 30)
COMMANDS_PER_S = 100
"""At most, however small they are. btrfs issues up to 1000 (fs/btrfs/discard.h, BTRFS_DISCARD_MAX_IOPS)."""
COMMAND_UNITS = (32 << 20) // UNIT_BYTES
"""At most at a time: it is withheld for as long. btrfs has 64 MiB (BTRFS_ASYNC_DISCARD_DEFAULT_MAX_SIZE)."""
REST_S = 1.0
"""How long after space was freed a pass over it begins: what is used again by then is not discarded."""
EXTENTS_AT_A_TIME = 1024
"""Free extents looked up while the lock is held."""


class Discards:
    """Discards what the allocator of one open store has free, on a thread of its own or when asked."""

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        allocator: Allocator,
        lock: threading.RLock,
        changed: threading.Condition,
        counters: Counter[str],
        bytes_per_s: float = DEFAULT_BYTES_PER_S,
    ) -> None:
        """`changed` is a condition of the store's `lock`, for those who lack space."""
        self._device = device
        self._geometry = geometry
        self._allocator = allocator
        self._lock = lock
        self._work = threading.Condition(lock)
        self._changed = changed
        self._counters = counters
        self._bytes_per_s = bytes_per_s
        self._freed = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.enabled = bool(device.limits.discard_granularity_bytes)
        """False where the device does not discard, and once it has failed to."""
        if self.enabled:
            granularity_units = -(-device.limits.discard_granularity_bytes // UNIT_BYTES)
            allocator.remember_freed(-(-granularity_units // RUN_UNITS) * RUN_UNITS)

    def start(self) -> None:
        """Discard in the background from now on."""
        if self.enabled:
            self._thread = threading.Thread(target=self._run, name="blockkv-discard", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the background thread after the command it is waiting for."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wake(self) -> None:
        """There is freed space. The caller holds the lock."""
        if self._thread is not None and not self._freed:
            self._freed = True
            self._work.notify_all()

    def catch_up(self) -> int:
        """Discard what can be discarded, here and now. Returns the bytes."""
        return self._pass(paced=False)

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._stopping or self._freed)
                self._freed = False
            if not self._pause(REST_S):
                return
            self._pass(paced=True)
            if not self.enabled:
                return

    def _pass(self, *, paced: bool) -> int:
        """Discard the freed part of every free extent. Returns the bytes."""
        first = discarded_bytes = 0
        while self.enabled and not self._stopping:
            with self._lock:
                owners = self._allocator.longest_free(first, EXTENTS_AT_A_TIME)
            if not owners:
                break
            first += len(owners)
            for owner in owners:
                while self.enabled and (extent := self._withhold(owner)) is not None:
                    started = time.monotonic()
                    size_bytes = self._discard(extent)
                    discarded_bytes += size_bytes
                    turn_s = max(size_bytes / self._bytes_per_s, 1 / COMMANDS_PER_S)
                    if paced and not self._pause(started + turn_s - time.monotonic()):
                        return discarded_bytes
        return discarded_bytes

    def _withhold(self, owner: int) -> Extent | None:
        with self._lock:
            limit_units = min(COMMAND_UNITS, self._allocator.free_units // 2)
            return self._allocator.withhold(owner, limit_units)

    def _discard(self, extent: Extent) -> int:
        """Discard what was withheld, and give it back. Returns the bytes, 0 after a failure."""
        start, count = extent
        size_bytes = count * UNIT_BYTES
        try:
            self._device.discard(self._geometry.unit_offset(start), size_bytes)
        except BlockKVError as error:
            self.enabled = False
            size_bytes = 0
            logger_for(self._device.path).warning("discards are switched off until the next open: %s", error)
        finally:
            with self._lock:
                self._allocator.give_back(extent)
                self._counters["discarded_bytes"] += size_bytes
                self._counters["discard_failed"] += not size_bytes
                self._changed.notify_all()
        return size_bytes

    def _pause(self, seconds: float) -> bool:
        """Wait so long, or until the end. False at the end."""
        with self._work:
            return not self._work.wait_for(lambda: self._stopping, max(0.0, seconds))
