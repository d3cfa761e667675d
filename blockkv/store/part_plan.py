"""What has to be read for a part of a chunk, and where each byte of it goes.

A checksum is known for each leaf, so leaves are read whole: from the one that holds the first byte of a span
of the part to the one that holds its last. Of what is read, the bytes of the part go straight to where the
caller wants them, and the rest of the leaf to memory of ours, scratch. Where the spans of a part are short, a
few hundred bytes of every token for instance, the leaves go to scratch whole, and the part is copied out of
there: a scatter list would cost more.

One plan serves every chunk of a size. No I/O here, and no addresses: those come with `PartRead`
(`blockkv.store.part_gets`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from blockkv.catalog.layouts import Layout, TensorSpec
from blockkv.errors import LayoutMismatch
from blockkv.kv_layout import KVLayout, Part, Selection, merged
from blockkv.tensors import MIN_PIECE_BYTES

__all__ = ["Copy", "LeafSpan", "PartPlan", "Piece", "check_stored", "plan_part"]

OPAQUE_DTYPES = frozenset(("uint8", "int8"))
"""Of chunks that were put as bytes: what they mean only the reader knows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a leaf span, side by side in memory."""

    wanted: bool
    """Whether they are of the part: `offset_bytes` counts in the part, else in scratch."""
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LeafSpan:
    """Whole leaves, side by side in the payload: one transfer."""

    first_leaf: int
    offset_bytes: int
    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A part, or some rows of it, to be copied from scratch: a strided view into contiguous bytes."""

    scratch_offset_bytes: int
    part_offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How to read one part of any chunk of one size."""

    layout: Layout
    """Of what the reader gets: a tensor, or several by name."""
    leaf_spans: tuple[LeafSpan, ...]
    copies: tuple[Copy, ...]
    read_bytes: int
    scratch_bytes: int

    @property
    def part_bytes(self) -> int:
        return self.layout.payload_bytes

    @property
    def copied_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self.copies)


@lru_cache(maxsize=4096)
def plan_part(kv_layout: KVLayout, part: Part, grain_bytes: int) -> PartPlan:
    """The plan for chunks of `kv_layout`. What is read begins on a multiple of `grain_bytes` and ends on one,
    or with the payload: the size of a leaf, or that of a unit where nothing is verified.

    Raises InvalidArgument when the layout has nothing of the part.
    """
    selections = kv_layout.selections(part)
    ranges = merged((start, one.span_bytes) for one in selections for start in one.starts())
    hulls = merged((start - start % grain_bytes, start % grain_bytes + size) for start, size in ranges)
    hulls = merged(
        (start, min(-(-(start + size) // grain_bytes) * grain_bytes, kv_layout.payload_bytes) - start)
        for start, size in hulls
    )
    starts = [start for start, _ in ranges]
    part_offsets = list(itertools.accumulate((size for _, size in ranges), initial=0))
    leaf_spans, staged = [], {}
    scratch_bytes = 0
    for start, size in hulls:
        first, last = bisect_left(starts, start), bisect_left(starts, start + size)
        inside = ranges[first:last]
        if sum(length for _, length in inside) < MIN_PIECE_BYTES * len(inside):
            staged[start] = scratch_bytes
            pieces = [Piece(False, scratch_bytes, size)]
        else:
            pieces = list(_pieces(start, size, inside, part_offsets[first], scratch_bytes))
        scratch_bytes += sum(piece.size_bytes for piece in pieces if not piece.wanted)
        leaf_spans.append(LeafSpan(start // grain_bytes, start, size, tuple(pieces)))
    places = list(itertools.accumulate((one.size_bytes for one in selections), initial=0))
    copies = [
        copy
        for one, place in zip(selections, places, strict=False)
        for copy in _copies(one, place, hulls, staged)
    ]
    return PartPlan(
        _layout_of(kv_layout, selections),
        tuple(leaf_spans),
        tuple(copies),
        sum(size for _, size in hulls),
        scratch_bytes,
    )


def _pieces(
    start: int, size: int, ranges: Sequence[tuple[int, int]], part_offset: int, scratch_offset: int
) -> Iterator[Piece]:
    at = start
    for offset, length in ranges:
        if offset > at:
            yield Piece(False, scratch_offset, offset - at)
            scratch_offset += offset - at
        yield Piece(True, part_offset, length)
        part_offset += length
        at = offset + length
    if at < start + size:
        yield Piece(False, scratch_offset, start + size - at)


def _copies(
    one: Selection, place: int, hulls: Sequence[tuple[int, int]], staged: dict[int, int]
) -> Iterator[Copy]:
    """Copies for what of a selection, which begins `place` bytes into the part, goes through scratch."""
    start, size = hulls[bisect_right(hulls, (one.offset_bytes, 1 << 62)) - 1]
    if one.offset_bytes + one.hull_bytes <= start + size:
        if start in staged:
            from_bytes = staged[start] + one.offset_bytes - start
            yield Copy(from_bytes, place, one.shape, one.strides_bytes, one.item_bytes)
        return
    for number, row in enumerate(one.rows()):
        yield from _copies(row, place + number * row.size_bytes, hulls, staged)


def _layout_of(kv_layout: KVLayout, selections: Sequence[Selection]) -> Layout:
    form = "tensor" if len(kv_layout.arrays) == 1 else "dict"
    specs = tuple(TensorSpec(one.name if form == "dict" else "", one.dtype, one.shape) for one in selections)
    return Layout(form, specs)


@lru_cache(maxsize=4096)
def check_stored(kv_layout: KVLayout, stored: Layout) -> None:
    """Raise LayoutMismatch unless a chunk that was put as `stored` can be read with `kv_layout`.

    Its size must be that, and so must be the dtype of every byte; a chunk of bytes has none. How it was
    divided into tensors does not matter.
    """
    if kv_layout.payload_bytes != stored.payload_bytes:
        raise LayoutMismatch(
            f"layout= is {kv_layout}, of {kv_layout.payload_bytes} bytes; the chunk has "
            f"{stored.payload_bytes}: {stored}"
        )
    arrays = [(end, array.dtype) for end, array in zip(_ends(kv_layout), kv_layout.arrays, strict=True)]
    sizes = itertools.accumulate(spec.size_bytes for spec in stored.specs)
    specs = [(end, spec.dtype) for end, spec in zip(sizes, stored.specs, strict=True)]
    for at in sorted({end for end, _ in arrays + specs}):
        wanted = arrays[bisect_left(arrays, (at, ""))][1]
        found = specs[bisect_left(specs, (at, ""))][1]
        if found != wanted and found not in OPAQUE_DTYPES:
            raise LayoutMismatch(
                f"layout= is {kv_layout}, with {wanted} before byte {at}; the chunk has {found}: {stored}"
            )


def _ends(kv_layout: KVLayout) -> Iterator[int]:
    return itertools.accumulate(array.size_bytes for array in kv_layout.arrays)
