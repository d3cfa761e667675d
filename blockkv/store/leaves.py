"""Leaf checksums of a payload whose length is not known yet.

How many bytes a leaf covers follows from the length of the whole payload (`format.geometry.leaf_bytes_for`),
so those of a chunk that grows are kept for every length it may end with: leaves of 128 KiB, which also serve
to verify reads meanwhile, and larger ones up to those of a chunk as long as its capacity.
"""

from __future__ import annotations

import xxhash

from blockkv.device.engine import leaf_checksums
from blockkv.format.geometry import LEAF_BYTES, leaf_bytes_for

__all__ = ["GrowingLeaves"]


class GrowingLeaves:
    """Leaves of what was appended so far. Whole multiples of `step_bytes` are added; the rest is a tail."""

    def __init__(self, capacity_bytes: int, step_bytes: int) -> None:
        """`step_bytes` is a power of two and at least LEAF_BYTES."""
        self._step_bytes = step_bytes
        self._fine = bytearray()
        self._done: dict[int, bytearray] = {}
        self._open: dict[int, xxhash.xxh3_64] = {}
        self._added_bytes = 0
        leaf_bytes = 2 * LEAF_BYTES
        while leaf_bytes <= leaf_bytes_for(capacity_bytes):
            self._done[leaf_bytes], self._open[leaf_bytes] = bytearray(), xxhash.xxh3_64()
            leaf_bytes *= 2

    def add(self, content: memoryview) -> None:
        """Hash the next whole steps into the leaves larger than 128 KiB."""
        smallest_bytes = leaf_bytes_for(self._added_bytes + len(content))
        for first in range(0, len(content), self._step_bytes):
            step = content[first : first + self._step_bytes]
            self._added_bytes += len(step)
            for leaf_bytes, hasher in self._open.items():
                if leaf_bytes < smallest_bytes:
                    continue  # the chunk is too long for them already
                hasher.update(step)
                if self._added_bytes % leaf_bytes == 0:
                    self._done[leaf_bytes] += hasher.intdigest().to_bytes(8, "little")
                    hasher.reset()

    def add_fine(self, leaves: bytes) -> None:
        """Add the leaves of 128 KiB of the next whole steps, computed elsewhere."""
        self._fine += leaves

    def fine(self, start_bytes: int, stop_bytes: int) -> bytes:
        """The leaves of 128 KiB of a range of whole ones."""
        return bytes(self._fine[8 * (start_bytes // LEAF_BYTES) : 8 * (stop_bytes // LEAF_BYTES)])

    def of_all(self, tail: memoryview) -> bytes:
        """The leaves of a chunk that consists of everything added and `tail`, as its record holds them."""
        payload_bytes = self._added_bytes + len(tail)
        leaf_bytes = leaf_bytes_for(payload_bytes)
        if leaf_bytes == LEAF_BYTES:
            return bytes(self._fine) + (leaf_checksums(tail, LEAF_BYTES) if len(tail) else b"")
        leaves = bytes(self._done[leaf_bytes])
        if payload_bytes % leaf_bytes:
            last = self._open[leaf_bytes].copy()
            last.update(tail)
            leaves += last.intdigest().to_bytes(8, "little")
        return leaves
