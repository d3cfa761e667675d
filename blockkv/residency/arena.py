"""The memory of the tier: parts of it are handed out, and the whole has a bound.

A part of 2 MiB or more is a mapping of its own, on huge pages and left out of core dumps; smaller ones share
slabs. Memory that is given back is kept for the next part of that size, until room is needed or the bound
falls; then it is unmapped, after the device was told (`blockkv.memory`).

What counts is memory that may be resident: whole huge pages, and whole slabs. The kernel charges a page for
when it is touched, so that who compares with its figures needs what is resident already.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockkv.errors import BlockKVError
from blockkv.memory import HUGE_PAGE_BYTES, PAGE_BYTES, empty
from blockkv.space.allocator import Allocator

if TYPE_CHECKING:
    import torch

__all__ = ["Arena", "Part"]

SLAB_BYTES = 2 * HUGE_PAGE_BYTES


@dataclass(slots=True, eq=False)
class Part:
    """Memory of one chunk: `memory` is uint8, and at least as long as was asked for."""

    memory: torch.Tensor
    slab: _Slab | None = None
    start_unit: int = 0
    units: int = 0

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


class _Slab:
    """A mapping that small parts share."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.allocator = Allocator(SLAB_BYTES // PAGE_BYTES)


class Arena:
    """Hands out memory. The caller serialises, and says with each request how much there may be in all."""

    def __init__(self, *, lock_memory: bool = False) -> None:
        """With `lock_memory` it is never swapped, and resident at once."""
        self._lock_memory = lock_memory
        self._slabs: list[_Slab] = []
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._spare_bytes = 0
        self._untouched: dict[int, int] = {}
        """Sizes of mappings, by address, of which some pages were not resident yet when last asked."""
        self.resident_bytes = 0
        """Of everything that is mapped, what may be resident."""

    def take(self, size_bytes: int, limit_bytes: int) -> Part | None:
        """Memory for a chunk, or None where that would exceed `limit_bytes`.

        Raises MemoryError, and BlockKVError where memory cannot be locked.
        """
        if size_bytes >= HUGE_PAGE_BYTES:
            rounded = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            memory = self._map(rounded, limit_bytes)
            return None if memory is None else Part(memory)
        units = -(-size_bytes // PAGE_BYTES)
        for slab in self._slabs:
            part = self._cut(slab, units)
            if part is not None:
                return part
        memory = self._map(SLAB_BYTES, limit_bytes)
        if memory is None:
            return None
        self._slabs.append(_Slab(memory))
        return self._cut(self._slabs[-1], units)

    def give(self, part: Part) -> None:
        """Take memory back. Nobody refers to it any more."""
        slab = part.slab
        if slab is None:
            self._keep(part.memory)
            return
        slab.allocator.release([(part.start_unit, part.units)])
        if slab.allocator.free_units == slab.allocator.data_units:
            self._slabs.remove(slab)
            self._keep(slab.memory)

    def shrink(self, limit_bytes: int) -> None:
        """Unmap memory that is in nobody's hands until the limit is kept, or there is none."""
        for size_bytes in sorted(self._spare, reverse=True):
            while self.resident_bytes > limit_bytes and self._spare[size_bytes]:
                memory = self._spare[size_bytes].pop()
                self._untouched.pop(memory.data_ptr(), None)
                self._spare_bytes -= size_bytes
                self.resident_bytes -= size_bytes
            if not self._spare[size_bytes]:
                del self._spare[size_bytes]

    def touched_bytes(self) -> int:
        """Of `resident_bytes`, what has been resident: mincore(2)."""
        missing_bytes = 0
        for address, size_bytes in list(self._untouched.items()):
            absent_bytes = size_bytes - _resident_bytes(address, size_bytes)
            if not absent_bytes:
                del self._untouched[address]
            missing_bytes += absent_bytes
        return self.resident_bytes - missing_bytes

    @property
    def used_bytes(self) -> int:
        """Of `resident_bytes`, what is in use; slabs count whole."""
        return self.resident_bytes - self._spare_bytes

    def _map(self, size_bytes: int, limit_bytes: int) -> torch.Tensor | None:
        import torch

        if self._spare.get(size_bytes) and self.resident_bytes <= limit_bytes:
            self._spare_bytes -= size_bytes
            return self._spare[size_bytes].pop()
        self.shrink(limit_bytes - size_bytes)
        if self.resident_bytes + size_bytes > limit_bytes:
            return None
        memory = empty(size_bytes, torch.uint8)
        if self._lock_memory:
            _lock(memory)
        self._untouched[memory.data_ptr()] = size_bytes
        self.resident_bytes += size_bytes
        return memory

    def _keep(self, memory: torch.Tensor) -> None:
        self._spare.setdefault(memory.nbytes, []).append(memory)
        self._spare_bytes += memory.nbytes

    def _cut(self, slab: _Slab, units: int) -> Part | None:
        extents = slab.allocator.allocate(units)
        if extents is None:
            return None
        if len(extents) > 1:
            slab.allocator.release(extents)
            return None
        start, count = extents[0]
        memory = slab.memory[start * PAGE_BYTES : (start + count) * PAGE_BYTES]
        return Part(memory, slab, start, count)


def _resident_bytes(address: int, size_bytes: int) -> int:
    """0 where the kernel does not tell: who reckons with it takes less then, not more."""
    pages = bytearray(-(-size_bytes // PAGE_BYTES))
    vector = (ctypes.c_ubyte * len(pages)).from_buffer(pages)
    ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), vector)
    return pages.count(1) * PAGE_BYTES


def _lock(memory: torch.Tensor) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.mlock(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)):
        raise BlockKVError(
            f"{memory.nbytes} bytes of the memory tier cannot be locked (errno {ctypes.get_errno()}); raise "
            "RLIMIT_MEMLOCK (ulimit -l), or do without lock_memory"
        )
