"""Copying from host memory to an accelerator, in the background: with CUDA, and a stand-in without.

A copy is asynchronous: `copy` returns a target and a ticket at once. The source must stay as it is until the
ticket is over, the target may be used after `before_use`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from blockkv.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["Copier", "CudaCopier", "PacedCopier", "Ticket"]


class Ticket(ABC):
    """A copy under way."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the source is free again."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is. May raise what went wrong, when it is over."""

    @abstractmethod
    def before_use(self) -> None:
        """Call it before the target is used, on the thread, and in the CUDA stream, that uses it. Raises what
        went wrong.
        """


class Copier(ABC):
    """A way of copying. Copies are carried out in the order of asking."""

    @abstractmethod
    def prepare(self, memory: torch.Tensor) -> None:
        """`memory` will be copied from again and again, until `forget`."""

    @abstractmethod
    def forget(self, memory: torch.Tensor) -> None:
        """It will not any more; nothing is being copied from it."""

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor | None) -> tuple[torch.Tensor, Ticket]:
        """Start to copy into `target`, or into a new tensor of the same shape."""


class CudaCopier(Copier):
    """Asynchronous copies on a CUDA stream of its own, from memory that is pinned for them.

    Raises InvalidArgument where torch sees no CUDA device.
    """

    def __init__(self, device: str = "cuda") -> None:
        import torch

        if not torch.cuda.is_available():
            raise InvalidArgument(f"torch {torch.__version__} sees no CUDA device; see blockkv.gpu.choose()")
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.unpinned_reason = ""
        """Why memory could not be pinned: copies from it wait for each other, and for the caller."""

    def prepare(self, memory: torch.Tensor) -> None:
        import torch

        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code):
            self.unpinned_reason = f"cudaHostRegister of {memory.nbytes} bytes failed with {int(code)}"

    def forget(self, memory: torch.Tensor) -> None:
        import torch

        self._stream.synchronize()
        if not self.unpinned_reason:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(memory.data_ptr())

    def copy(self, source: torch.Tensor, target: torch.Tensor | None) -> tuple[torch.Tensor, Ticket]:
        import torch

        with torch.cuda.stream(self._stream):
            if target is None:
                target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return target, _CudaTicket(event, target)


class _CudaTicket(Ticket):
    def __init__(self, event: Any, target: torch.Tensor) -> None:
        self._event = event
        self._target = target

    def is_over(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def before_use(self) -> None:
        import torch

        stream = torch.cuda.current_stream(self._target.device)
        stream.wait_event(self._event)
        self._target.record_stream(stream)  # or its memory could be given out anew while that stream uses it


class PacedCopier(Copier):
    """Copies within host memory at a given rate: what there is in place of CUDA on a machine without."""

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise InvalidArgument(f"bytes_per_s is {bytes_per_s}; it must be positive")
        self._bytes_per_s = bytes_per_s
        self._executor = ThreadPoolExecutor(1, "blockkv-paced-copy")
        self._lock = threading.Lock()
        self._free_at = 0.0

    def prepare(self, memory: torch.Tensor) -> None:
        """Nothing to do for memory that is not pinned."""

    def forget(self, memory: torch.Tensor) -> None:
        """Nothing to undo."""

    def copy(self, source: torch.Tensor, target: torch.Tensor | None) -> tuple[torch.Tensor, Ticket]:
        import torch

        into = torch.empty(source.shape, dtype=source.dtype) if target is None else target
        return into, _PacedTicket(self._executor.submit(self._carry_out, source, into))

    def _carry_out(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + source.nbytes / self._bytes_per_s
        target.copy_(source)
        time.sleep(max(0.0, self._free_at - time.monotonic()))


class _PacedTicket(Ticket):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_over(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def before_use(self) -> None:
        self._future.result()
