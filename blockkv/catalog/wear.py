"""How much may be written to a device a day, so that it lasts as long as it is to.

A drive is rated for so many bytes over its life (TBW, or drive writes a day for so many years). The budget
is a token bucket: it fills evenly, holds an hour's worth, and is empty when a store is opened, so that
however often that happens no 24 hours take more than a day's budget.

    charged     chunks that are put, in whole units; journal, checkpoints, superblocks; growing chunks
    refused     chunks of a put that the bucket does not hold: they are not stored, and counted
    not refused deletes, growing chunks and metadata: they leave a debt, which puts wait out

Not here: what is worth its write (`admission`); both are asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from blockkv.errors import InvalidArgument

__all__ = ["WriteBudget"]

DAY_S = 86400.0
BURST_SHARE = 24
"""The bucket holds this share of a day's budget, which the rate at which it fills leaves out."""
LEAST_BYTES_PER_DAY = 1 << 30
"""Less than that is a mistake in the unit: a single chunk of a large model is 32 MiB."""


class WriteBudget:
    """Bytes a day. Callers serialise."""

    def __init__(self, bytes_per_day: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, never going back. Raises InvalidArgument below 1 GiB a day."""
        if not isinstance(bytes_per_day, int) or bytes_per_day < LEAST_BYTES_PER_DAY:
            raise InvalidArgument(
                f"write_budget is {bytes_per_day!r}; give bytes a day, at least {LEAST_BYTES_PER_DAY}"
            )
        self.bytes_per_day = bytes_per_day
        self._clock = clock
        self._burst_bytes = bytes_per_day / BURST_SHARE
        self._bytes_per_s = (bytes_per_day - self._burst_bytes) / DAY_S
        self._level_bytes = 0.0
        self._filled_s = clock()

    def left_bytes(self) -> int:
        """What may be written now; below 0 what has been written too much."""
        now_s = self._clock()
        filled_bytes = self._level_bytes + (now_s - self._filled_s) * self._bytes_per_s
        self._level_bytes, self._filled_s = min(self._burst_bytes, filled_bytes), now_s
        return int(self._level_bytes)

    def charge(self, size_bytes: int) -> None:
        """So much has been written, or is about to be."""
        self._level_bytes -= size_bytes

    def admits(self, size_bytes: int) -> bool:
        """Charge a write if the bucket holds it. One that is larger than the bucket takes a full one."""
        if self.left_bytes() < min(size_bytes, int(self._burst_bytes)):
            return False
        self.charge(size_bytes)
        return True

    def shared(self, count: int) -> WriteBudget:
        """A new one for each of `count` devices. Raises InvalidArgument where that is too little."""
        return WriteBudget(self.bytes_per_day // count, self._clock)
