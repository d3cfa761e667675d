"""Memory that chunks collect in before they are written: buffers that all growing chunks of a store share.

Not here: the engine's staging, through which it moves what is not fit for direct I/O (`native/staging.c`).
"""

from __future__ import annotations

import threading

from blockkv.memory import empty

__all__ = ["BUFFER_BYTES", "Staging"]

BUFFER_BYTES = 256 << 10
"""What is collected before it is written: twice the 128 KiB below which drives and kernel lose speed, half of
what one request may be. With 64 growing chunks the tails take 16 MiB."""
ARENA_BYTES = 2 << 20
"""Staging grows by this: one huge page."""


class Staging:
    """Buffers of BUFFER_BYTES, in memory that is registered with the device as it is used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._arenas: list[object] = []

    def take(self) -> int:
        """The address of a buffer."""
        with self._lock:
            if not self._free:
                import torch

                arena = empty(ARENA_BYTES, torch.uint8)
                self._arenas.append(arena)
                self._free = [
                    arena.data_ptr() + offset for offset in reversed(range(0, ARENA_BYTES, BUFFER_BYTES))
                ]
            return self._free.pop()

    def give(self, buffer: int) -> None:
        """Let others have it."""
        with self._lock:
            self._free.append(buffer)

    @property
    def resident_bytes(self) -> int:
        """Memory of the buffers."""
        return ARENA_BYTES * len(self._arenas)
