"""Tensors in, scatter-gather lists out, and back.

A chunk's payload is the concatenation, in order, of its tensors' elements in row-major order. `describe`
turns what a caller puts into memory segments in that order, without copying wherever the pieces are long
enough; `describe_output` does the same for what a caller wants filled.

Not here: names, dtypes and shapes as they are remembered (`blockkv.catalog.layouts`), where bytes go on the
device, checksums (`blockkv.store`, the engine).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from blockkv.catalog.layouts import TEXT_LIMIT_BYTES, Layout, TensorSpec, torch_dtype
from blockkv.errors import InvalidArgument, LayoutMismatch
from blockkv.format.record import LAYOUT_BODY_MAX
from blockkv.memory import aligned_memory, unwritable

if TYPE_CHECKING:
    import torch

__all__ = ["Described", "Tensors", "allocate", "describe", "describe_output", "read_only"]

Tensors: TypeAlias = (
    "torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor] | bytes | bytearray | memoryview"
)
"""What a chunk can be put from: one tensor, several in order, several by name, or raw bytes (uint8)."""

Segment: TypeAlias = tuple[int, int]
"""(memory address, bytes)"""

MIN_PIECE_BYTES = 4096
"""Pieces of a non-contiguous tensor shorter than this are gathered by a copy: below one page per piece
a scatter list costs the kernel more than the copy costs us."""

SHARED_BYTES = 2 << 20
"""Memory that small chunks of one get share: a huge page. Who keeps one of them keeps no more than that."""

DIRECT_ALIGNMENT_BYTES = 4096
"""Start of each chunk in shared memory: what direct I/O asks for on any device."""

TENSOR_ALIGNMENT_BYTES = 64
"""Start of each tensor inside one allocation, as torch's own CPU allocator aligns."""


@dataclass(slots=True)
class Described:
    """A value ready for transfer. `keepalive` must outlive the transfer."""

    layout: Layout
    segments: list[Segment]
    payload_bytes: int
    keepalive: list[object]
    copied_bytes: int = 0
    scatter_back: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """For outputs too finely strided for direct I/O: (caller's tensor, our contiguous stand-in)."""


@lru_cache(maxsize=4096)
def _single_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> Layout:
    return Layout("tensor", (TensorSpec("", str(dtype).removeprefix("torch."), tuple(shape)),))


@lru_cache(maxsize=4096)
def _many_layout(form: str, items: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Layout:
    specs = tuple(TensorSpec(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in items)
    return Layout(form, specs)


def describe(value: Tensors) -> Described:
    """The layout and source segments of a value to put.

    Raises InvalidArgument for anything that is not a dense CPU tensor with at least one element.
    """
    import torch

    if type(value) is torch.Tensor and _is_plain(value):
        layout = _single_layout(value.dtype, value.shape)
        return Described(layout, [(value.data_ptr(), value.nbytes)], value.nbytes, [value])
    form, named = _named_tensors(value)
    layout = _layout_of(form, named)
    if len(layout.body) > LAYOUT_BODY_MAX or layout.text_bytes > TEXT_LIMIT_BYTES:
        raise InvalidArgument(
            f"names and shapes of {len(named)} tensors take {layout.text_bytes} bytes, deflated "
            f"{len(layout.body)}; the limits are {TEXT_LIMIT_BYTES} and {LAYOUT_BODY_MAX}: use shorter names "
            "or several chunks"
        )
    described = Described(layout, [], 0, [])
    for _, tensor in named:
        pieces = _pieces(tensor)
        if pieces is None:
            tensor = tensor.contiguous()
            described.copied_bytes += tensor.nbytes
            pieces = [(tensor.data_ptr(), tensor.nbytes)]
        _extend(described.segments, pieces)
        described.payload_bytes += tensor.nbytes
        described.keepalive.append(tensor)
    return described


def describe_output(value: Any, layout: Layout) -> Described:
    """The target segments of a caller's `out=`, which must match `layout` exactly.

    Raises LayoutMismatch with both layouts, before anything was written. A writable bytes-like object of the
    payload's size fits any layout. Whether a tensor's memory may be written to is another question: see
    `read_only`.
    """
    import torch

    if (
        type(value) is torch.Tensor
        and _is_plain(value)
        and _single_layout(value.dtype, value.shape) == layout
    ):
        return Described(layout, [(value.data_ptr(), value.nbytes)], value.nbytes, [value])
    if not _is_tensor(value) and not isinstance(value, (Mapping, list, tuple)):
        view = _byte_view(value)
        if view.readonly:
            raise LayoutMismatch("out= is read-only memory; give a writable buffer")
        if view.nbytes != layout.payload_bytes:
            raise LayoutMismatch(f"out= has {view.nbytes} bytes, the chunk {layout.payload_bytes}: {layout}")
        tensor = _tensor_over(view)
        return Described(layout, [(tensor.data_ptr(), tensor.nbytes)], tensor.nbytes, [tensor])
    form, named = _named_tensors(value, LayoutMismatch)
    found = _layout_of(form, named)
    if found != layout:
        raise LayoutMismatch(f"out= is {found}, the chunk was stored as {layout}")
    described = Described(layout, [], layout.payload_bytes, [])
    occupied: list[Segment] = []
    for name, tensor in named:
        pieces = _pieces(tensor)
        if pieces is None:
            if _overlaps_itself(tensor):
                raise LayoutMismatch(
                    f"out= tensor {name!r} has overlapping elements (stride {tensor.stride()})"
                )
            stand_in = tensor.new_empty(tensor.shape)
            pieces = [(stand_in.data_ptr(), stand_in.nbytes)]
            described.scatter_back = [*(described.scatter_back or ()), (tensor, stand_in)]
            described.copied_bytes += stand_in.nbytes
            described.keepalive.append(stand_in)
        described.keepalive.append(tensor)
        occupied.extend(pieces)
        _extend(described.segments, pieces)
    if len(occupied) > 1:
        occupied.sort()
        for (start, size), (following, _) in itertools.pairwise(occupied):
            if start + size > following:
                raise LayoutMismatch("out= tensors overlap in memory; every byte needs one place")
    return described


def read_only(outputs: Sequence[Described]) -> set[int]:
    """The positions of outputs in memory that is mapped read-only.

    A tensor does not say so, and a copy to it would end the process.
    """
    owners: list[int] = []
    addresses: list[int] = []
    for position, described in enumerate(outputs):
        for address, _ in described.segments:
            owners.append(position)
            addresses.append(address)
        for tensor, _ in described.scatter_back or ():
            owners.append(position)
            addresses.append(tensor.data_ptr())
    return {owners[index] for index in unwritable(addresses)}


def overlapping(outputs: Sequence[Described]) -> set[int]:
    """The positions of outputs that have memory in common with one before them."""

    def meet(chosen: Iterable[int]) -> bool:
        occupied = sorted(segment for position in chosen for segment in outputs[position].segments)
        return any(start + size > following for (start, size), (following, _) in itertools.pairwise(occupied))

    if not meet(range(len(outputs))):
        return set()
    apart: list[int] = []
    for position in range(len(outputs)):
        if not meet([*apart, position]):
            apart.append(position)
    return set(range(len(outputs))).difference(apart)


def allocate(layouts: Sequence[Layout]) -> list[tuple[Any, Described]]:
    """Fresh aligned tensors for each layout, in the form they were put, and their segments.

    Successive small chunks of one layout share memory, which stays as long as any tensor in it.
    """
    found: list[tuple[Any, Described]] = []
    for _, group in itertools.groupby(layouts, key=id):
        alike = list(group)
        stride_bytes = _round_up(_places(alike[0])[1], DIRECT_ALIGNMENT_BYTES)
        at_a_time = max(1, SHARED_BYTES // stride_bytes)
        for first in range(0, len(alike), at_a_time):
            found += _allocate_alike(alike[0], len(alike[first : first + at_a_time]), stride_bytes)
    return found


def _allocate_alike(layout: Layout, count: int, stride_bytes: int) -> list[tuple[Any, Described]]:
    import torch

    offsets, _ = _places(layout)
    memory = torch.frombuffer(aligned_memory(count * stride_bytes), dtype=torch.uint8)
    table = memory.view(count, stride_bytes)
    columns = [
        table[:, offset : offset + spec.size_bytes]
        .view(torch_dtype(spec.dtype))
        .view(count, *spec.shape)
        .unbind(0)
        for spec, offset in zip(layout.specs, offsets, strict=True)
    ]
    pieces: list[Segment] = []
    for spec, offset in zip(layout.specs, offsets, strict=True):
        _extend(pieces, [(memory.data_ptr() + offset, spec.size_bytes)])
    found: list[tuple[Any, Described]] = []
    for row, tensors in enumerate(zip(*columns, strict=True)):
        segments = [(address + row * stride_bytes, size_bytes) for address, size_bytes in pieces]
        value: Any = list(tensors)
        if layout.form == "tensor":
            value = tensors[0]
        elif layout.form == "dict":
            value = {spec.name: tensor for spec, tensor in zip(layout.specs, tensors, strict=True)}
        found.append((value, Described(layout, segments, layout.payload_bytes, [memory])))
    return found


def _places(layout: Layout) -> tuple[list[int], int]:
    """The offset of each tensor in one allocation, and its size."""
    offsets, total = [], 0
    for spec in layout.specs:
        total = _round_up(total, TENSOR_ALIGNMENT_BYTES)
        offsets.append(total)
        total += spec.size_bytes
    return offsets, total


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one piece of memory as it stands: nearly all are, and need no closer look."""
    import torch

    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.numel() > 0
    )


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _named_tensors(
    value: Any, error: type[InvalidArgument] = InvalidArgument
) -> tuple[str, list[tuple[str, torch.Tensor]]]:
    if _is_tensor(value):
        named = [("", value)]
        form = "tensor"
    elif isinstance(value, Mapping):
        named, form = list(value.items()), "dict"
        if not all(isinstance(name, str) and name for name, _ in named):
            raise error("tensor names must be non-empty strings")
    elif isinstance(value, (list, tuple)):
        named, form = [("", tensor) for tensor in value], "list"
    else:
        named, form = [("", _tensor_over(_byte_view(value)))], "tensor"
    if not named:
        raise error("nothing to transfer: no tensors were given")
    for name, tensor in named:
        _check_tensor(name, tensor, error)
    return form, named


def _check_tensor(name: str, tensor: Any, error: type[InvalidArgument]) -> None:
    import torch

    label = f"tensor {name!r}" if name else "tensor"
    if not isinstance(tensor, torch.Tensor):
        raise error(f"{label} is a {type(tensor).__name__}; give torch tensors or a bytes-like object")
    if tensor.device.type != "cpu":
        raise error(f"{label} is on {tensor.device}; copy it to the CPU first")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise error(f"{label} is sparse, nested or quantized; store its dense parts as separate tensors")
    if tensor.is_conj() or tensor.is_neg():
        raise error(f"{label} is a lazy conjugate or negation; call resolve_conj() or resolve_neg()")
    if tensor.numel() == 0:
        raise error(f"{label} of shape {tuple(tensor.shape)} has no elements; there is nothing to store")


def _layout_of(form: str, named: list[tuple[str, torch.Tensor]]) -> Layout:
    if form == "tensor":
        tensor = named[0][1]
        return _single_layout(tensor.dtype, tuple(tensor.shape))
    return _many_layout(form, tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named))


def _byte_view(value: Any) -> memoryview:
    try:
        view = memoryview(value)
    except TypeError:
        raise InvalidArgument(
            f"cannot store a {type(value).__name__}; give a torch tensor, several, or a bytes-like object"
        ) from None
    if not view.c_contiguous:
        raise InvalidArgument("the bytes-like object is not contiguous")
    if view.nbytes == 0:
        raise InvalidArgument("the bytes-like object is empty; there is nothing to store")
    return view.cast("B")


def _tensor_over(view: memoryview) -> torch.Tensor:
    import warnings

    import torch

    with warnings.catch_warnings():
        # torch warns that it cannot honour a read-only buffer; we only ever read from such a tensor.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def _pieces(tensor: torch.Tensor) -> list[Segment] | None:
    """Contiguous pieces in row-major order, or None where they are too short to be worth a scatter list."""
    if tensor.is_contiguous():
        return [(tensor.data_ptr(), tensor.nbytes)]
    item_bytes = tensor.element_size()
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    run_items = 1
    while dims and dims[-1][1] == run_items:
        run_items *= dims.pop()[0]
    if run_items * item_bytes < MIN_PIECE_BYTES or any(stride <= 0 for _, stride in dims):
        return None
    if dims and _overlaps_itself(tensor):
        return None
    addresses = [tensor.data_ptr()]
    for size, stride in dims:
        step = stride * item_bytes
        addresses = [address + index * step for address in addresses for index in range(size)]
    return [(address, run_items * item_bytes) for address in addresses]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may share memory: some stride does not clear the span of the faster ones."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def _extend(segments: list[Segment], pieces: list[Segment]) -> None:
    """Append `pieces`, merging those that continue the memory of the one before."""
    for address, size_bytes in pieces:
        if segments and sum(segments[-1]) == address:
            segments[-1] = (segments[-1][0], segments[-1][1] + size_bytes)
        else:
            segments.append((address, size_bytes))
