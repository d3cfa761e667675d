"""Memory that direct I/O reaches without a copy: aligned to 2 MiB, on huge pages, left out of core dumps.

Buffers on 4 KiB pages cost the kernel one segment per page in every request and cap a request at
max_segments pages (`block/blk-settings.c`), so everything blockkv allocates for payload comes from here.
KV cache reveals prompts (arXiv 2508.09442), hence MADV_DONTDUMP.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import operator
import os
import sys
import threading
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blockkv._native import ffi, lib
from blockkv.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["ArenaWatcher", "aligned_memory", "empty", "unwritable", "watch_arenas"]

HUGE_PAGE_BYTES = 2 << 20
"""x86-64 and arm64 (4 KiB granule) PMD size: the unit of transparent huge pages."""

PAGE_BYTES = mmap.PAGESIZE

LARGEST_BYTES = sys.maxsize - 2 * HUGE_PAGE_BYTES
"""That can be asked of mmap(2), with what aligning takes."""


class ArenaWatcher(Protocol):
    """Who wants to know of arenas: long-lived memory for transfers, made by `empty`."""

    def arena_added(self, address: int, size_bytes: int) -> None:
        """There is an arena; until it is removed its memory stays where it is."""

    def arena_removed(self, address: int) -> None:
        """It is about to be unmapped. Called from a finalizer: any thread, between any two operations."""


_lock = threading.RLock()
_arenas: dict[int, int] = {}
"""Size of each arena by address."""
_watchers: weakref.WeakSet[ArenaWatcher] = weakref.WeakSet()


def watch_arenas(watcher: ArenaWatcher) -> None:
    """Tell `watcher`, for as long as it lives, of all arenas there are and will be."""
    with _lock:
        _watchers.add(watcher)
        for address in list(_arenas):
            # Some may end meanwhile: finalizers run on this thread too, whatever it holds.
            if address in _arenas:
                watcher.arena_added(address, _arenas[address])


def aligned_memory(size_bytes: int) -> memoryview:
    """`size_bytes` of zeroed anonymous memory, as a writable byte view that owns it.

    Starts on 2 MiB and is advised onto huge pages when it is at least that long, on 4 KiB otherwise.
    The memory is unmapped when the last view of it is gone.
    """
    if not 1 <= size_bytes <= LARGEST_BYTES:
        raise InvalidArgument(f"cannot allocate {size_bytes} bytes; ask for 1 to {LARGEST_BYTES}")
    if size_bytes < HUGE_PAGE_BYTES:
        region = _map(_round_up(size_bytes, PAGE_BYTES))
        _advise(region, mmap.MADV_DONTDUMP)
        return memoryview(region)[:size_bytes]
    mapped_bytes = _round_up(size_bytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
    region = _map(mapped_bytes)
    _advise(region, mmap.MADV_HUGEPAGE)
    _advise(region, mmap.MADV_DONTDUMP)
    start = -_address_of(region) % HUGE_PAGE_BYTES
    return memoryview(region)[start : start + size_bytes]


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A CPU tensor whose memory can be read and written by the device directly, with no bounce.

    Shape and dtype as for `torch.empty` (dtype defaults to `torch.get_default_dtype()`); contents are
    zero at first. From 2 MiB on, the parts that transfers use are registered with the device as they do,
    where kernel and memlock limit allow. Raises InvalidArgument for a shape without
    elements, and for what is no shape or no dtype.
    """
    import torch

    try:
        dims = tuple(int(operator.index(size)) for size in ((shape,) if isinstance(shape, int) else shape))
    except TypeError:
        raise InvalidArgument(f"shape is {shape!r}; give a number, or several as a tuple") from None
    if not isinstance(dtype, torch.dtype | None):
        raise InvalidArgument(f"dtype is {dtype!r}; give one of torch, or None for its default")
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(dims)
    if count < 1 or any(dim < 0 for dim in dims):
        raise InvalidArgument(f"cannot allocate a tensor of shape {dims}: it has no elements")
    size_bytes = count * dtype.itemsize
    memory = aligned_memory(size_bytes) if size_bytes < HUGE_PAGE_BYTES else _arena(size_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(dims)


def _arena(size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """`aligned_memory` that watchers are told of, and again before it is unmapped."""
    region = aligned_memory(size_bytes)
    memory = (ctypes.c_char * size_bytes).from_buffer(region)
    address = ctypes.addressof(memory)
    with _lock:
        _arenas[address] = size_bytes
        for watcher in list(_watchers):
            watcher.arena_added(address, size_bytes)
    # The finalizer holds the region: it is unmapped after everybody was told, and not before.
    weakref.finalize(memory, _arena_ends, address, region).atexit = False
    return memory


def _arena_ends(address: int, region: memoryview) -> None:
    with _lock:
        del _arenas[address]
        for watcher in list(_watchers):
            watcher.arena_removed(address)


def unwritable(addresses: Sequence[int]) -> list[int]:
    """The positions of those addresses whose memory may not be written to, found out without writing.

    One system call each. The pages are faulted in, as a write would.
    """
    packed = array("Q", addresses)
    count, found = len(packed), []
    view = ffi.from_buffer("uint64_t[]", packed)
    position = 0
    while (position := lib.bkv_first_unwritable(view, position, count)) < count:
        # The kernel is older than 5.14, or this is memory of a device, or it really is read-only.
        if not _mapped_writable(packed[position]):
            found.append(position)
        position += 1
    return found


def _mapped_writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        limits, permissions, *_ = line.split()
        start, end = (int(number, 16) for number in limits.split("-"))
        if start <= address < end:
            return "w" in permissions
    return False


def _map(size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size_bytes} bytes: {error.strerror}") from error


def _advise(region: mmap.mmap, advice: int) -> None:
    # Advice only: a kernel without transparent huge pages answers EINVAL, and slower is still right.
    with contextlib.suppress(OSError):
        region.madvise(advice)


def _address_of(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _forget_lock() -> None:
    # A thread of the parent may have held it at the fork, and there is none here to let it go.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)
