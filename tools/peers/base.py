"""What an adapter is, and memory fit for direct I/O.

An adapter stores chunks by number: contiguous uint8 tensors of one size, a batch of them at a time.
Everything it can do beforehand (open, allocate, register memory) happens in `open` and outside the
measurement.

What counts as got: the bytes are in memory that belongs to the caller, `outs` or tensors the peer allocated
itself. A tensor that maps a file is not got until its pages are read.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a peer stores, and how much. `place` is a partition or an empty directory on a file system."""

    place: Path
    chunk_bytes: int
    batch_chunks: int
    chunk_count: int
    """Stored at a time at most; a partition has room for twice as many."""
    threads: int
    """Of peers that need threads to keep a batch in flight."""


class Peer(ABC):
    """One way to keep tensors on a device."""

    name: ClassVar[str]
    what: ClassVar[str]
    """How it is used here, in a line."""
    place: ClassVar[Literal["partition", "directory"]]
    module: ClassVar[str]
    """What has to be importable."""
    packages: ClassVar[tuple[str, ...]]
    """What brings it, as pip requirements; the first one's version is reported."""
    prepare: ClassVar[str] = ""
    """Python that does what takes long the first time, once it is installed."""
    system_package: ClassVar[str] = ""
    """What has to be installed beside that, under Debian's name."""
    durable: ClassVar[bool]
    """Whether a put can be made to survive a loss of power. `put` gets `durable=True` only then."""
    cached: ClassVar[bool] = False
    """Whether it goes through the page cache, so that a get is cold only after `forget`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @classmethod
    def missing(cls) -> str:
        """Why it cannot be used here; "" when it can."""
        try:
            importlib.import_module(cls.module)
        except Exception as error:  # whatever a foreign package raises while it is imported
            return f"{type(error).__name__}: {error}"
        return ""

    @classmethod
    def install(cls) -> str:
        """The command that brings it."""
        system = f"apt-get install {cls.system_package} && " if cls.system_package else ""
        return f"{system}pip install {' '.join(cls.packages)}"

    @abstractmethod
    def open(self, payloads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Get ready. Every put will be of `payloads` and every get into `outs`, in this order."""

    @abstractmethod
    def put(self, chunks: Sequence[int], payloads: Sequence[torch.Tensor], durable: bool) -> None:
        """Store a batch. Returns when the memory may be changed; with `durable`, when it is on media."""

    @abstractmethod
    def get(self, chunks: Sequence[int], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The chunks of a batch, in `outs` or in memory of their own."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every chunk, so that the next put of the same number writes again."""

    def settle(self) -> None:  # noqa: B027  most have nothing left to do
        """Finish what a put left to the system, so that it does not fall into somebody else's time."""

    def forget(self) -> None:  # noqa: B027  most are not cached
        """Drop what was put from the page cache."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


def arena(count: int, chunk_bytes: int) -> list[torch.Tensor]:
    """`count` tensors in memory aligned to, and on, huge pages where there are any."""
    stride = -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, count * stride + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    skip = -address % HUGE_PAGE_BYTES
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    flat.zero_()
    return [flat[skip + index * stride :][:chunk_bytes] for index in range(count)]


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether direct I/O takes this memory as it is, on any device."""
    return tensor.data_ptr() % PAGE_BYTES == 0 and tensor.numel() % PAGE_BYTES == 0


class Staging:
    """Aligned memory for one batch; what is aligned already stays where it is."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._arena = [] if all(map(is_direct, like)) else arena(len(like), like[0].numel())

    def before_put(self, payloads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Memory that holds what `payloads` hold."""
        if not self._arena:
            return payloads
        for staged, payload in zip(self._arena, payloads, strict=False):
            staged.copy_(payload)
        return self._arena[: len(payloads)]

    def before_get(self, outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Memory to read into, in the place of `outs`."""
        return self._arena[: len(outs)] if self._arena else outs

    def after_get(self, outs: Sequence[torch.Tensor]) -> None:
        """Bring what was read into `outs`."""
        for staged, out in zip(self._arena, outs, strict=False):
            out.copy_(staged)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What has to be registered in the place of the caller's memory; empty when that is used itself."""
        return self._arena


class FilePeer(Peer):
    """A file a chunk, on a file system, a batch by a pool of threads."""

    place = "directory"
    durable = True
    cached = True
    suffix: ClassVar[str] = ""

    def open(self, payloads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Start the threads."""
        self._pool = ThreadPoolExecutor(self.setup.threads)

    def path(self, chunk: int) -> Path:
        """The file of a chunk."""
        return self.setup.place / f"{chunk}{self.suffix}"

    def each(self, work: Callable[..., torch.Tensor], *columns: Iterable[object]) -> list[torch.Tensor]:
        """`work` for every row of `columns`, on the threads."""
        return list(self._pool.map(work, *columns))

    def put(self, chunks: Sequence[int], payloads: Sequence[torch.Tensor], durable: bool) -> None:
        """A file each; with `durable` an fsync each, and one of the directory for all."""

        def put_one(chunk: int, payload: torch.Tensor) -> torch.Tensor:
            self.write(self.path(chunk), payload)
            if durable:
                sync(self.path(chunk))
            return payload

        self.each(put_one, chunks, payloads)
        if durable:
            sync(self.setup.place)

    def get(self, chunks: Sequence[int], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Read a file each."""
        return self.each(self.read, [self.path(chunk) for chunk in chunks], outs)

    @abstractmethod
    def write(self, path: Path, payload: torch.Tensor) -> None:
        """Write a new file."""

    @abstractmethod
    def read(self, path: Path, out: torch.Tensor) -> torch.Tensor:
        """Read a whole file, into `out` or into memory of its own."""

    def clear(self) -> None:
        """Remove the files."""
        for path in self.setup.place.iterdir():
            if path.is_file():
                path.unlink()

    def settle(self) -> None:
        """Have everything written back."""
        os.sync()

    def forget(self) -> None:
        """Drop every file from the page cache. Raises OSError when the kernel keeps a page."""
        for path in self.setup.place.iterdir():
            if path.is_file():
                drop_from_cache(path)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


def sync(path: Path) -> None:
    """Fsync a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_cache(path: Path) -> None:
    """Have nothing of a file in the page cache. Raises OSError when something is there all the same."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        for drop in (gc.collect, gc.collect, drop_every_cache):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if not is_cached(descriptor):
                return
            drop()  # a mapping that still lives keeps its pages
        if is_cached(descriptor):
            raise OSError(f"{path} is still in the page cache; a get would not be cold")
    finally:
        os.close(descriptor)


def drop_every_cache() -> None:
    """The whole page cache, where one may (Documentation/admin-guide/sysctl/vm.rst, drop_caches)."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def is_cached(descriptor: int) -> bool:
    """Whether the first, the middle or the last byte of a file can be had without waiting."""
    last = os.fstat(descriptor).st_size - 1
    for offset in (0, last // 2, last):
        with contextlib.suppress(BlockingIOError):
            if os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT):
                return True
    return False
