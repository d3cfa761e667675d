"""Copies between callers' tensors and the memory of the tier, and tensors over that memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from blockkv.catalog.layouts import Layout, torch_dtype
from blockkv.memory import unwritable
from blockkv.residency.arena import Part
from blockkv.tensors import (
    Described,
    Occupied,
    Pieces,
    allocate,
    describe_output,
    overlap_error,
    read_only_error,
    scatter,
)

if TYPE_CHECKING:
    import torch

__all__ = ["copy_out", "gather", "tensor_at", "tensors_in"]


def gather(described: Described, address: int) -> None:
    """Copy a value to one place."""
    for source, size_bytes in described.segments:
        ctypes.memmove(address, source, size_bytes)
        address += size_bytes


def copy_out(address: int, layout: Layout, out: Any, occupied: Occupied | None = None) -> Any:
    """What `Store.get` returns for a chunk at an address; `occupied` is of the outputs of a longer call."""
    scatter_back: list[tuple[torch.Tensor, torch.Tensor]] = []
    if out is None:
        (value,), pieces = allocate([layout])
        segments = pieces.segments_of(0)
    else:
        described = describe_output(out, layout)
        value, segments, scatter_back = True, described.segments, described.scatter_back or []
        targets = [*(place for place, _ in segments), *(one.data_ptr() for one, _ in scatter_back)]
        if unwritable(targets):
            raise read_only_error()
        if occupied is not None and not occupied.add(Pieces.of([described])):
            raise overlap_error()
    for place, size_bytes in segments:
        ctypes.memmove(place, address, size_bytes)
        address += size_bytes
    scatter(scatter_back)
    return value


def tensor_at(part: Part, offset: int, layout: Layout) -> torch.Tensor:
    """One tensor in the memory of a part."""
    (spec,) = layout.specs
    return part.memory[offset : offset + spec.size_bytes].view(torch_dtype(spec.dtype)).view(spec.shape)


def tensors_in(part: Part, layout: Layout) -> Any:
    """The tensors of a chunk in the memory of a part, in the form they were put."""
    tensors, offset = [], 0
    for spec in layout.specs:
        dtype = torch_dtype(spec.dtype)
        memory = part.memory[offset : offset + spec.size_bytes]
        if offset % dtype.itemsize:
            memory = memory.clone()  # torch reads no dtype from an address that does not suit it
        tensors.append(memory.view(dtype).view(spec.shape))
        offset += spec.size_bytes
    if layout.form == "tensor":
        return tensors[0]
    if layout.form == "dict":
        return {spec.name: tensor for spec, tensor in zip(layout.specs, tensors, strict=True)}
    return tensors
