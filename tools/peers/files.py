"""Adapters that store a file a chunk on a file system."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peers.base import FilePeer, Setup, Staging, arena, is_direct, sync

DIRECT_FLAGS = os.O_DIRECT | os.O_CLOEXEC
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
AIO_REQUEST_BYTES = 1 << 20
AIO_DEPTH = 32
"""DeepSpeed's defaults for `aio` are 1 MiB and 8 (docs, "Asynchronous I/O"); deeper was never slower."""


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor."""
    return memoryview(tensor.numpy())


def write_all(descriptor: int, data: memoryview) -> None:
    """Write everything at the descriptor's position."""
    while data:
        data = data[os.write(descriptor, data) :]


def read_all(descriptor: int, data: memoryview) -> None:
    """Fill `data` from the descriptor's position. Raises EOFError at the end of the file."""
    while data:
        done_bytes = os.readv(descriptor, [data])
        if not done_bytes:
            raise EOFError(f"{len(data)} bytes are missing at the end of the file")
        data = data[done_bytes:]


class BufferedFiles(FilePeer):
    name = "buffered files"
    what = "write and readinto through the page cache, a thread pool"
    module = "os"
    packages = ("torch",)

    def write(self, path: Path, payload: torch.Tensor) -> None:
        """As any program writes a file."""
        with path.open("wb", buffering=0) as file:
            write_all(file.fileno(), view(payload))

    def read(self, path: Path, out: torch.Tensor) -> torch.Tensor:
        """Straight into `out`."""
        with path.open("rb", buffering=0) as file:
            read_all(file.fileno(), view(out))
        return out


class DirectFiles(FilePeer):
    name = "O_DIRECT files"
    what = "O_DIRECT write and read, a thread pool; unaligned tensors are copied to aligned memory"
    module = "os"
    packages = ("torch",)
    cached = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._local = threading.local()

    def _aligned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or memory of this thread's."""
        if is_direct(tensor):
            return tensor
        if not hasattr(self._local, "memory"):
            padded_bytes = -(-tensor.numel() // 4096) * 4096
            self._local.memory = arena(1, padded_bytes)[0]
        memory: torch.Tensor = self._local.memory
        return memory

    def write(self, path: Path, payload: torch.Tensor) -> None:
        """Whole pages; the file is cut to size afterwards where the payload is not."""
        source = self._aligned(payload)
        if source is not payload:
            source[: payload.numel()].copy_(payload)
        descriptor = os.open(path, NEW_FILE_FLAGS | DIRECT_FLAGS, 0o600)
        try:
            write_all(descriptor, view(source))
            if source.numel() != payload.numel():
                os.ftruncate(descriptor, payload.numel())
        finally:
            os.close(descriptor)

    def read(self, path: Path, out: torch.Tensor) -> torch.Tensor:
        """Whole pages, the last one short."""
        target = self._aligned(out)
        descriptor = os.open(path, os.O_RDONLY | DIRECT_FLAGS)
        try:
            done_bytes = 0
            while done_bytes < out.numel():
                got_bytes = os.preadv(descriptor, [view(target)[done_bytes:]], done_bytes)
                if not got_bytes:
                    raise EOFError(f"{path} ends after {done_bytes} of {out.numel()} bytes")
                done_bytes += got_bytes
        finally:
            os.close(descriptor)
        if target is not out:
            out.copy_(target[: out.numel()])
        return out

    def settle(self) -> None:
        """Nothing is left but what the file system keeps about the files."""
        sync(self.setup.place)

    def forget(self) -> None:
        """Nothing was cached."""


class Safetensors(FilePeer):
    name = "safetensors"
    what = "save_file, and load_file with the bytes copied out of its mapping"
    module = "safetensors.torch"
    packages = ("safetensors",)
    suffix = ".safetensors"

    def write(self, path: Path, payload: torch.Tensor) -> None:
        """One tensor a file."""
        from safetensors.torch import save_file

        save_file({"kv": payload}, path)

    def read(self, path: Path, out: torch.Tensor) -> torch.Tensor:
        """The copy reads the pages: before that nothing was loaded."""
        from safetensors.torch import load_file

        return out.copy_(load_file(path)["kv"])


class TorchSave(FilePeer):
    name = "torch.save"
    what = "torch.save, and torch.load into memory of its own"
    module = "torch"
    packages = ("torch",)
    suffix = ".pt"

    def write(self, path: Path, payload: torch.Tensor) -> None:
        """One tensor a file."""
        torch.save(payload, path)

    def read(self, path: Path, out: torch.Tensor) -> torch.Tensor:
        """A tensor of its own: nothing is copied into `out`."""
        loaded: torch.Tensor = torch.load(path, weights_only=True)
        return loaded


class TorchMmap(TorchSave):
    name = "torch.save, mmap"
    what = "torch.save, and torch.load(mmap=True) with the bytes copied out of its mapping"

    def read(self, path: Path, out: torch.Tensor) -> torch.Tensor:
        """The copy reads the pages: before that nothing was loaded."""
        return out.copy_(torch.load(path, weights_only=True, mmap=True))


class DeepSpeedAio(FilePeer):
    name = "DeepSpeed AIO"
    what = f"aio_handle, O_DIRECT, {AIO_REQUEST_BYTES >> 10} KiB x {AIO_DEPTH}; its own pinned memory"
    prepare = "from deepspeed.ops.op_builder import AsyncIOBuilder as B; B().load(verbose=False)"
    module = "deepspeed.ops.op_builder"
    packages = ("deepspeed", "ninja")
    system_package = "libaio-dev"
    cached = False

    @classmethod
    def missing(cls) -> str:
        """Its extension is compiled when it is first used: what that needs has to be there."""
        reason = super().missing()
        if reason:
            return reason
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return "" if AsyncIOBuilder().is_compatible(verbose=False) else "libaio or a compiler is missing"

    def open(self, payloads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """A handle, and memory as it wants it: what is not aligned it would copy piece by piece."""
        super().open(payloads, outs)
        from deepspeed.ops.op_builder import AsyncIOBuilder

        extension: Any = AsyncIOBuilder().load(verbose=False)
        self._handle = extension.aio_handle(
            AIO_REQUEST_BYTES, AIO_DEPTH, False, True, max(1, self.setup.threads // 2)
        )
        self._staging = Staging(payloads)

    def put(self, chunks: Sequence[int], payloads: Sequence[torch.Tensor], durable: bool) -> None:
        """All files of a batch in flight, then one wait."""
        sources = self._staging.before_put(payloads)
        for chunk, source in zip(chunks, sources, strict=True):
            self._handle.async_pwrite(source, str(self.path(chunk)))
        self._handle.wait()
        if durable:
            for chunk in chunks:
                sync(self.path(chunk))
            sync(self.setup.place)

    def get(self, chunks: Sequence[int], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """All files of a batch in flight, then one wait."""
        targets = self._staging.before_get(outs)
        for chunk, target in zip(chunks, targets, strict=True):
            self._handle.async_pread(target, str(self.path(chunk)))
        self._handle.wait()
        self._staging.after_get(outs)
        return outs

    def write(self, path: Path, payload: torch.Tensor) -> None:
        """One file by itself."""
        self._handle.sync_pwrite(payload, str(path))

    def read(self, path: Path, out: torch.Tensor) -> torch.Tensor:
        """One file by itself."""
        self._handle.sync_pread(out, str(path))
        return out

    def settle(self) -> None:
        """Nothing is left but what the file system keeps about the files."""
        sync(self.setup.place)

    def forget(self) -> None:
        """Nothing was cached."""
