"""How much may be written to a device a day, so that it lasts as long as it is to.

A drive is rated for so many bytes over its life (TBW, or drive writes a day for so many years). The budget
is a token bucket: it fills evenly, holds an hour's worth, and is empty when a store is opened, so that
however often that happens no 24 hours take more than a day's budget.

    charged     chunks that are put, in whole units; journal, checkpoints, superblocks; growing chunks
    refused     chunks of a put that the bucket does not hold: they are not stored, and counted
    not refused deletes, growing chunks and metadata: they leave a debt, which puts wait out while it is open
    given back  what was charged for chunks that were not written in the end

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
MOST_BYTES_PER_DAY = 1 << 60


class WriteBudget:
    """Bytes a day. Callers serialise."""

    def __init__(self, bytes_per_day: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, never going back. Raises InvalidArgument below 1 GiB a day."""
        is_whole = isinstance(bytes_per_day, int)
        if not is_whole or not LEAST_BYTES_PER_DAY <= bytes_per_day <= MOST_BYTES_PER_DAY:
            raise InvalidArgument(
                f"write_budget is {bytes_per_day!r}; give bytes a day, a whole number from "
                f"{LEAST_BYTES_PER_DAY} to {MOST_BYTES_PER_DAY}"
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
        """So much is written, whatever the bucket holds."""
        self.left_bytes()  # what it could not have held is not to pay for this
        self._level_bytes -= size_bytes

    def refund(self, size_bytes: int) -> None:
        """So much was charged and is not written."""
        self._level_bytes = min(self._burst_bytes, self._level_bytes + size_bytes)

    def admits(self, size_bytes: int) -> bool:
        """Charge a write if the bucket holds it; one that is larger than the bucket never fits."""
        if self.left_bytes() < size_bytes:
            return False
        self.charge(size_bytes)
        return True

    def shared(self, count: int) -> WriteBudget:
        """A new one for each of `count` devices. Raises InvalidArgument where that is too little."""
        share = self.bytes_per_day // count
        if share < LEAST_BYTES_PER_DAY:
            raise InvalidArgument(
                f"write_budget is {self.bytes_per_day} bytes a day for {count} devices together; give at "
                f"least {count * LEAST_BYTES_PER_DAY}"
            )
        return WriteBudget(share, self._clock)
