"""GPUDirect Storage through kvikio: parts of chunks from the device into the memory of an accelerator.

kvikio is an optional extra (`pip install blockkv[gpu]`). It imports without CUDA, but then every read fails
for want of libcuda, in its compatibility mode too; in that mode with CUDA it copies through the host by
itself. So it is used where the kernel has nvidia-fs and cuFile says that it works, and nowhere else.

Nothing that is read this way is verified.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from blockkv.errors import DeviceError, InvalidArgument
from blockkv.kv_layout import KVLayout, Part

__all__ = ["read_part", "refusal"]

NVIDIA_FS = Path("/proc/driver/nvidia-fs/stats")
"""There while the kernel module is loaded. Without it kvikio says that it is not in compatibility mode, and
copies through the host all the same."""
UNIT_BYTES = 4096
"""What extents of `ChunkInfo` count in."""


class Source(Protocol):
    """What is needed of a store."""

    def entry(self, key: str | bytes) -> Any:
        """What is known of a chunk: see `Store.entry`."""

    def info(self) -> dict[str, Any]:
        """What the store is: see `Store.info`."""

    def pin(self, key: str | bytes) -> bool:
        """Keep a chunk: see `Store.pin`."""

    def unpin(self, key: str | bytes) -> bool:
        """Let it go again: see `Store.unpin`."""


def refusal() -> str:
    """Why GDS cannot be used; "" where it can."""
    if not NVIDIA_FS.exists():
        return "the kernel module nvidia-fs is not loaded"
    try:
        driver = importlib.import_module("kvikio.cufile_driver")
        defaults = importlib.import_module("kvikio.defaults")
    except (ImportError, OSError, RuntimeError) as error:
        return f"kvikio cannot be imported ({error}); pip install blockkv[gpu]"
    try:
        if defaults.is_compat_mode_preferred():
            return "kvikio is in compatibility mode, which copies through the host"
        if not driver.properties.is_gds_available:
            return "cuFile does not have it for this system"
    except (AttributeError, OSError, RuntimeError) as error:
        return f"kvikio does not say whether it has it ({error})"
    return ""


def read_part(source: Source, key: str | bytes, tensor: Any, *, layout: KVLayout, part: Part) -> bool:
    """Read a part of a chunk of a store on one device into a contiguous CUDA tensor; False for a miss.

    The bytes are not verified. The chunk is pinned meanwhile: do not delete it. Raises InvalidArgument where
    chunk, layout or tensor have another size, DeviceError where not all of it could be read.
    """
    ranges = layout.ranges(part)
    size_bytes = sum(size for _, size in ranges)
    if size_bytes != tensor.nbytes or not tensor.is_contiguous():
        raise InvalidArgument(f"a part of {size_bytes} bytes does not fit into {tensor.nbytes}, side by side")
    if not source.pin(key):
        return False
    try:
        entry = source.entry(key)
        if entry.payload_bytes != layout.payload_bytes:
            raise InvalidArgument(
                f"the chunk has {entry.payload_bytes} bytes, {layout} {layout.payload_bytes}"
            )
        base_bytes = int(source.info()["data_offset_bytes"])
        raw = tensor.reshape(-1).view(importlib.import_module("torch").uint8)
        with importlib.import_module("kvikio").CuFile(entry.device, "r") as file:
            pending, start = [], 0
            for offset, size in _places(entry.extents, base_bytes, ranges):
                pending.append((file.pread(raw[start : start + size], size, offset), offset, size))
                start += size
            for future, offset, size in pending:
                done = future.get()
                if done != size:
                    raise DeviceError(f"{entry.device}: GDS read {done} of {size} bytes at {offset}")
    finally:
        source.unpin(key)
    return True


def _places(
    extents: tuple[tuple[int, int], ...], base_bytes: int, ranges: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Where on the device ranges of a payload lie: (offset, bytes)."""
    found = []
    for start, size in ranges:
        at = 0
        for first_unit, count in extents:
            length = count * UNIT_BYTES
            begin, end = max(start, at), min(start + size, at + length)
            if begin < end:
                found.append((base_bytes + first_unit * UNIT_BYTES + begin - at, end - begin))
            at += length
    return found
