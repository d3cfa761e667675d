"""DUAL-BLADE's workload, scaled, on three arrangements: files in the page cache, the drive, both paths.

Tensors, the keys and the values of every layer, are written once (prefill). Then every step reads all that
each has, layer by layer, and appends to it (decoding). Reading ends in one buffer that stands for the
accelerator's memory: whatever arrangement, every byte is copied there.

    mmap      a file a tensor on ext4, mapped, as stock FlexGen does it: the page cache decides
    direct    a growing chunk a tensor; while one is copied the next one is read
    dual      the same behind a memory tier, whose budget is what the control group leaves

Each runs in a process of its own, which joins the control group before it allocates anything for the work.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch

import blockkv
from blockkv.bench.device import PacedDevice
from blockkv.bench.memory_group import join, memory_group
from blockkv.errors import BlockKVError

__all__ = ["ARMS", "Shape", "Timing", "measure"]

SPARE_BYTES = 256 << 20
"""Touched besides what a process may have: others take some of it before that process does."""
PIECE_BYTES = 16 << 20
"""Prefill hands over at most so much at a time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload."""

    tensors: int
    prefill_bytes: int
    step_bytes: int
    steps: int

    @property
    def tensor_bytes(self) -> int:
        """Of one tensor in the end."""
        return self.prefill_bytes + self.steps * self.step_bytes

    @property
    def kv_bytes(self) -> int:
        """Of all in the end."""
        return self.tensors * self.tensor_bytes


@dataclass(frozen=True, slots=True)
class Timing:
    """What one arrangement took."""

    prefill_s: float
    decode_s: float
    memory_share: float = 0.0
    """Of the bytes that were read, those that the tier had in memory."""

    @property
    def total_s(self) -> float:
        """Both."""
        return self.prefill_s + self.decode_s


class Work:
    """What all arrangements share: what is written, and where what is read ends up."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._source = torch.empty(
            max(min(PIECE_BYTES, shape.prefill_bytes), shape.step_bytes), dtype=torch.uint8
        )
        self._source.random_(0, 256)
        self._target = torch.zeros(shape.tensor_bytes, dtype=torch.uint8)

    def prefill(self, tensor: int) -> Iterator[torch.Tensor]:
        """The first rows of a tensor, in pieces."""
        for start in range(0, self.shape.prefill_bytes, PIECE_BYTES):
            piece = self._source[: min(PIECE_BYTES, self.shape.prefill_bytes - start)]
            piece[:2] = torch.tensor([tensor % 256, start // PIECE_BYTES % 256], dtype=torch.uint8)
            yield piece

    def step(self, tensor: int, number: int) -> torch.Tensor:
        """The rows that a step appends."""
        piece = self._source[: self.shape.step_bytes]
        piece[:2] = torch.tensor([tensor % 256, number % 256], dtype=torch.uint8)
        return piece

    def use(self, tensor: int, number: int, rows: torch.Tensor | None) -> None:
        """Copy what was read in a step to the accelerator. Raises BlockKVError where it is something else."""
        length = self.shape.prefill_bytes + number * self.shape.step_bytes
        if rows is None or len(rows) != length:
            raise BlockKVError(f"tensor {tensor} could not be read in step {number}")
        target = self._target[:length]
        target.copy_(rows)
        last = length - self.shape.step_bytes
        if target[0] != tensor % 256 or (number and target[last + 1] != (number - 1) % 256):
            raise BlockKVError(f"tensor {tensor} was read as something else in step {number}")


def mapped(work: Work, directory: Path) -> Timing:
    """Arrangement `mmap`: files of a file system that is mounted at `directory`."""
    shape, maps = work.shape, []
    with contextlib.ExitStack() as stack:
        for tensor in range(shape.tensors):
            descriptor = os.open(directory / str(tensor), os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, descriptor)
            os.posix_fallocate(descriptor, 0, shape.tensor_bytes)
            memory = mmap.mmap(descriptor, shape.tensor_bytes)
            maps.append(torch.frombuffer(memory, dtype=torch.uint8))

        def prefill(tensor: int) -> None:
            start = 0
            for piece in work.prefill(tensor):
                maps[tensor][start : start + len(piece)] = piece
                start += len(piece)

        def step(number: int) -> None:
            end = shape.prefill_bytes + number * shape.step_bytes
            for tensor in range(shape.tensors):
                work.use(tensor, number, maps[tensor][:end])
                maps[tensor][end : end + shape.step_bytes] = work.step(tensor, number)

        return _timed(shape, prefill, step)


Growing: TypeAlias = "blockkv.GrowingChunk | blockkv.residency.TieredGrowingChunk"


def direct(work: Work, device: Path) -> Timing:
    """Arrangement `direct`."""
    with blockkv.open(device) as store:
        return _grown(work, lambda tensor: store.reserve(f"{tensor}", work.shape.tensor_bytes))


def dual(work: Work, device: Path) -> Timing:
    """Arrangement `dual`."""
    buffers = _buffers(work.shape)  # before the tier looks how much memory is left
    with blockkv.TieredStore(blockkv.open(device)) as store:

        def reserve(tensor: int) -> Growing:
            place = blockkv.Place("request", tensor // 2)
            return store.reserve(f"{tensor}", work.shape.tensor_bytes, place=place)

        timing = _grown(work, reserve, buffers)
        stats = store.stats()
        read_bytes = stats["memory_hit_bytes"] + stats["append_read_bytes"]
        share = stats["memory_hit_bytes"] / max(1, read_bytes)
    return Timing(timing.prefill_s, timing.decode_s, share)


def _buffers(shape: Shape) -> list[torch.Tensor]:
    """Two, resident: one is copied from while the other one is read into."""
    return [blockkv.empty(shape.tensor_bytes, torch.uint8).fill_(1) for _ in range(2)]


def _grown(
    work: Work, reserve: Callable[[int], Growing], buffers: list[torch.Tensor] | None = None
) -> Timing:
    shape = work.shape
    chunks: list[Growing] = []
    free = buffers or _buffers(shape)
    with ThreadPoolExecutor(1) as reader:

        def prefill(tensor: int) -> None:
            chunks.append(reserve(tensor))
            for piece in work.prefill(tensor):
                chunks[tensor].append(piece)

        def read(tensor: int, buffer: torch.Tensor) -> torch.Tensor | None:
            rows = buffer[: len(chunks[tensor])]
            return rows if chunks[tensor].read(out=rows) else None

        def step(number: int) -> None:
            waiting = [tensor for tensor in range(shape.tensors) if not _in_memory(chunks[tensor])]
            coming = {}

            def read_ahead() -> None:
                while waiting and free:
                    tensor, buffer = waiting.pop(0), free.pop()
                    coming[tensor] = reader.submit(read, tensor, buffer), buffer

            read_ahead()
            for tensor, chunk in enumerate(chunks):
                if tensor in coming:
                    future, buffer = coming.pop(tensor)
                    work.use(tensor, number, future.result())
                    free.append(buffer)
                    read_ahead()
                else:
                    _use_in_place(work, tensor, number, chunk)
                chunk.append(work.step(tensor, number))

        try:
            return _timed(shape, prefill, step)
        finally:
            for chunk in chunks:
                chunk.abandon()


def _in_memory(chunk: Growing) -> bool:
    return not isinstance(chunk, blockkv.GrowingChunk) and chunk.in_memory


def _use_in_place(work: Work, tensor: int, number: int, chunk: Growing) -> None:
    assert not isinstance(chunk, blockkv.GrowingChunk)
    with chunk.borrow() as rows:
        work.use(tensor, number, rows)


def _timed(shape: Shape, prefill: Callable[[int], None], step: Callable[[int], None]) -> Timing:
    started = time.perf_counter()
    for tensor in range(shape.tensors):
        prefill(tensor)
    filled = time.perf_counter()
    for number in range(shape.steps):
        step(number)
    return Timing(filled - started, time.perf_counter() - filled)


ARMS: dict[str, Callable[[Work, Path], Timing]] = {"mmap": mapped, "direct": direct, "dual": dual}


def measure(arm: str, device: Path, shape: Shape, limit_bytes: int, pace: PacedDevice | None) -> Timing:
    """Run one arrangement in a process that has `limit_bytes` of memory. `device` is overwritten.

    Raises BlockKVError with what it said, or that the kernel killed it.
    """
    with contextlib.ExitStack() as stack:
        if arm == "mmap":
            target = stack.enter_context(_file_system(device))
        else:
            blockkv.format(device, force=True)
            target = device
        group = stack.enter_context(memory_group(limit_bytes, pace))
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        touched_bytes = max(limit_bytes, shape.kv_bytes) + SPARE_BYTES
        process = context.Process(target=_run, args=(arm, target, shape, group, touched_bytes, theirs))
        process.start()
        theirs.close()
        try:
            answer = ours.recv()
        except EOFError:
            answer = None
        process.join()
        if isinstance(answer, Timing):
            return answer
        how = answer or f"it ended with {process.exitcode}; -9 is the kernel's, for want of memory"
        raise BlockKVError(f"{arm} with {limit_bytes} bytes of memory: {how}")


def _run(arm: str, target: Path, shape: Shape, group: Path, touched_bytes: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    result: Timing | str
    try:
        work = Work(shape)
        _ = blockkv.open, blockkv.TieredStore  # what they import is not to count
        # The memory of a virtual machine costs its host a lot when it is touched for the first time, and anew
        # where free pages are reported to the host (mm/page_reporting.c: two seconds after they were freed):
        # 1.4 GiB took 2.9 s then, else 0.4 s. Nobody is to pay for that, nor be spared it by who came before.
        blockkv.empty(touched_bytes, torch.uint8).fill_(1)
        join(group)
        result = ARMS[arm](work, target)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    answer.send(result)


@contextlib.contextmanager
def _file_system(device: Path) -> Iterator[Path]:
    """ext4 on `device`, mounted for as long as the context lasts. Raises BlockKVError."""
    with tempfile.TemporaryDirectory(prefix="blockkv-two-paths.") as directory:
        lazy = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
        _tool(["mkfs.ext4", "-q", "-F", "-E", lazy, str(device)])
        _tool(["mount", "-o", "noatime", str(device), directory])
        try:
            yield Path(directory)
        finally:
            _tool(["umount", directory])


def _tool(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said: Any = getattr(error, "stderr", "") or error
        raise BlockKVError(f"{command[0]}: {str(said).strip()}") from None
