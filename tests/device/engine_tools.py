"""Helpers for tests of the native engine: open one, memory with a known address, plain transfers."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from blockkv.device.base import UNIT_BYTES, Batch, Direction, Priority
from blockkv.device.engine import NativeDevice
from blockkv.device.namespace import probe

MIB = 1 << 20
ENGINES = ("io_uring", "threads")


@contextmanager
def engine_on(path: Path | str, engine: str = "io_uring", **options: int) -> Iterator[NativeDevice]:
    """An open engine, with limits as probed; `size_bytes`, `discard_granularity_bytes` ... replace one."""
    limits = probe(path)
    changed = {name: options.pop(name) for name in list(options) if hasattr(limits, name)}
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    device = NativeDevice(
        descriptor,
        str(path),
        replace(limits, **changed),  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        **options,
    )
    try:
        yield device
    finally:
        device.close()


class Memory:
    """Anonymous memory that starts on a page. Slicing reads and writes bytes; `at(n)` is an address."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size_bytes = size_bytes
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    def at(self, offset: int) -> int:
        return self._base + offset

    def read(self, offset: int, length: int) -> bytes:
        return self.bytes[offset : offset + length]

    def fill(self, data: bytes, offset: int = 0) -> None:
        self.bytes[offset : offset + len(data)] = data


def one_extent(offset: int, payload_bytes: int) -> list[tuple[int, int]]:
    return [(offset, -(-payload_bytes // UNIT_BYTES) * UNIT_BYTES)]


def batch_of(
    direction: Direction,
    transfers: Iterable[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]],
    priority: Priority = Priority.LOAD,
    leaf_bytes: int = 0,
) -> Batch:
    """A batch of (payload bytes, extents, segments)."""
    batch = Batch(direction, priority)
    for payload_bytes, extents, segments in transfers:
        batch.add(payload_bytes, extents, segments, leaf_bytes)
    return batch


def run(device: NativeDevice, batch: Batch) -> list[int]:
    """Submit, wait, and return the result of every transfer."""
    device.submit(batch)
    device.wait(batch)
    return [batch.result(position) for position in range(len(batch))]


def thread_names() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
