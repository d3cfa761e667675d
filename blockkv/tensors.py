"""Tensors in, scatter-gather lists out, and back.

A chunk's payload is the concatenation, in order, of its tensors' elements in row-major order. `describe`
turns what a caller puts into memory segments in that order, without copying wherever the pieces are long
enough; `describe_output` does the same for what a caller wants filled.

Not here: names, dtypes and shapes as they are remembered (`blockkv.catalog.layouts`), where bytes go on the
device, checksums (`blockkv.store`, the engine).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockkv.catalog.layouts import TEXT_LIMIT_BYTES, Layout, TensorSpec, torch_dtype
from blockkv.errors import BlockKVError, InvalidArgument, LayoutMismatch
from blockkv.format.record import LAYOUT_BODY_MAX
from blockkv.memory import aligned_memory, unwritable

if TYPE_CHECKING:
    import torch

__all__ = [
    "Described",
    "Occupied",
    "Pieces",
    "Tensors",
    "allocate",
    "describe",
    "describe_many",
    "describe_output",
    "describe_outputs",
    "scatter",
]

Tensors: TypeAlias = (
    "torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor] | bytes | bytearray | memoryview"
)
"""What a chunk can be put from: one tensor, several in order, several by name, or raw bytes (uint8)."""

Segment: TypeAlias = tuple[int, int]
"""(memory address, bytes)"""

Range: TypeAlias = tuple[int, int]
"""(first memory address, end)"""

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
    direct: list[Segment] | None = None
    """Where there are stand-ins, the pieces that are not of one: in the caller's memory."""


@dataclass(slots=True)
class Pieces:
    """Several values ready for transfer, column by column."""

    layouts: Sequence[Layout]
    sizes_bytes: Sequence[int]
    """Payload of each."""
    segments: array[int]
    """Memory address, bytes, memory address, bytes, ... of all, in order."""
    segment_counts: array[int]
    """How many segments each has."""
    keepalive: Sequence[object]
    """One for each; it must outlive the transfer."""
    described: Sequence[Described] = ()
    """Each, unless all of them are tensors that are one piece of memory as they stand."""

    def cut(self, first: int, end: int) -> Pieces:
        """Those from `first` up to `end`."""
        if first == 0 and end == len(self.sizes_bytes):
            return self
        before, within = first, end - first
        if len(self.segments) != 2 * len(self.segment_counts):
            before, within = sum(self.segment_counts[:first]), sum(self.segment_counts[first:end])
        return Pieces(
            self.layouts[first:end],
            self.sizes_bytes[first:end],
            self.segments[2 * before : 2 * (before + within)],
            self.segment_counts[first:end],
            self.keepalive[first:end],
            self.described[first:end],
        )

    def chosen(self, numbers: Sequence[int]) -> Pieces:
        """Some of them, in this order."""
        starts = list(itertools.accumulate(self.segment_counts, initial=0))
        segments = array("Q")
        for number in numbers:
            segments += self.segments[2 * starts[number] : 2 * starts[number + 1]]
        return Pieces(
            [self.layouts[number] for number in numbers],
            [self.sizes_bytes[number] for number in numbers],
            segments,
            array("I", [self.segment_counts[number] for number in numbers]),
            [self.keepalive[number] for number in numbers],
            [self.described[number] for number in numbers] if self.described else (),
        )

    def segments_of(self, number: int) -> list[Segment]:
        """Those of one value."""
        before, count = sum(self.segment_counts[:number]), self.segment_counts[number]
        flat = self.segments[2 * before : 2 * (before + count)]
        return list(zip(flat[::2], flat[1::2], strict=True))

    @classmethod
    def of(cls, described: Sequence[Described]) -> Pieces:
        """Values that were described one by one."""
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(one.segments for one in described))
        return cls(
            [one.layout for one in described],
            [one.payload_bytes for one in described],
            array("Q", flat),
            array("I", [len(one.segments) for one in described]),
            [one.keepalive for one in described],
            described,
        )


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
    `describe_outputs`.
    """
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
    direct: list[Segment] = []
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
        else:
            direct.extend(pieces)
        described.keepalive.append(tensor)
        _extend(described.segments, pieces)
    strided = [tensor for tensor, _ in described.scatter_back or ()]
    if strided:
        described.direct = direct
    if len(direct) + len(strided) > 1 and not Occupied().take(_ranges(direct), strided):
        raise LayoutMismatch("out= tensors overlap in memory; every byte needs one place")
    return described


def scatter(targets: Iterable[tuple[torch.Tensor, torch.Tensor]] | None) -> None:
    """Copy stand-ins to the caller's tensors that they stand for (`Described.scatter_back`)."""
    import torch

    if targets:
        # Else torch refuses some: tensors of inference mode, which each thread is in or not, and autograd's.
        with torch.inference_mode():
            for target, stand_in in targets:
                target.copy_(stand_in)


def describe_many(values: Sequence[Tensors]) -> tuple[Pieces, dict[int, BlockKVError]]:
    """`describe` for many values: those that can be put, in order, and what is wrong with the others."""
    pieces = _plain_pieces(values)
    if pieces is not None:
        return pieces, {}
    described: list[Described] = []
    errors: dict[int, BlockKVError] = {}
    for position, value in enumerate(values):
        try:
            described.append(describe(value))
        except BlockKVError as error:
            errors[position] = error
    return Pieces.of(described), errors


class Occupied:
    """Memory that outputs of one call have taken. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: list[Range] = []
        self._strided: list[torch.Tensor] = []
        """Finely strided ones, which were no nearer to others than from their first byte to their last."""

    def add(self, outputs: Pieces) -> bool:
        """Take the memory of these outputs; False, and none taken, where some is taken."""
        if not outputs.described:
            addresses = outputs.segments[::2]
            return self.take(
                list(zip(addresses, map(operator.add, addresses, outputs.segments[1::2]), strict=True))
            )
        direct: list[Segment] = []
        strided: list[torch.Tensor] = []
        for one in outputs.described:
            direct += one.segments if one.direct is None else one.direct
            strided += [tensor for tensor, _ in one.scatter_back or ()]
        return self.take(_ranges(direct), strided)

    def take(self, ranges: list[Range], strided: Sequence[torch.Tensor] = ()) -> bool:
        """Take these ranges, and the elements of tensors that have none twice."""
        with self._lock:
            joined = _joined(self._ranges + ranges)
            if joined is None:
                return False
            held = [*self._strided, *strided]
            if held and _joined(joined + list(map(_span, held))) is None:
                # One lies between the elements of another, or on them.
                if self._strided:
                    self._ranges = _joined_exactly(self._ranges, self._strided) or []
                self._strided, held = [], []
                joined = _joined_exactly(self._ranges + ranges, strided)
                if joined is None:
                    return False
            self._ranges, self._strided = joined, held
        return True


def _ranges(segments: Sequence[Segment]) -> list[Range]:
    return [(address, address + size_bytes) for address, size_bytes in segments]


def _joined(ranges: list[Range]) -> list[Range] | None:
    """The same memory in ascending order, neighbours as one; None where two overlap."""
    joined: list[Range] = []
    last_end = -1
    for start, end in sorted(ranges):
        if start < last_end:
            return None
        if start == last_end:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
        last_end = end
    return joined


def _span(tensor: torch.Tensor) -> Range:
    """From the first byte of a tensor to its last."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _joined_exactly(ranges: list[Range], strided: Sequence[torch.Tensor]) -> list[Range] | None:
    """`_joined` of these ranges and of every byte of these tensors, of which none has an element twice."""
    found = [np.array(ranges, np.uint64).reshape(-1, 2), *map(_runs, strided)]
    starts, ends = np.concatenate(found).T
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    if np.any(starts[1:] < ends[:-1]):
        return None
    apart = starts[1:] != ends[:-1]
    starts, ends = starts[np.append(True, apart)], ends[np.append(apart, True)]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _runs(tensor: torch.Tensor) -> NDArray[np.uint64]:
    """The memory of a tensor that has no element twice: rows of (first address, end), in no order."""
    item_bytes = tensor.element_size()
    run_items = 1
    starts = np.array([tensor.data_ptr()], np.uint64)
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride == run_items:
            run_items *= size
        elif size > 1:
            steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * item_bytes)
            starts = (starts[:, None] + steps).ravel()
    return np.stack((starts, starts + np.uint64(run_items * item_bytes)), 1)


def describe_outputs(
    values: Sequence[Any], layouts: Sequence[Layout], occupied: Occupied | None
) -> tuple[Pieces, dict[int, BlockKVError]]:
    """`describe_output` for many: those that can be read into, in order, and what is wrong with the others.

    Wrong is also memory that is occupied by one before, and read-only memory where we would copy to it: a
    tensor does not say that it is, and a copy would end the process. Without a copy the device says so.
    """
    pieces = _plain_pieces(values)
    if (
        pieces is not None
        and _all_equal(pieces.layouts, layouts)
        and not (_any_copied(pieces.segments) and unwritable(pieces.segments[::2]))
        and (occupied is None or occupied.add(pieces))
    ):
        return pieces, {}
    errors: dict[int, BlockKVError] = {}
    described: list[Described] = []
    positions: list[int] = []
    for position, (value, layout) in enumerate(zip(values, layouts, strict=True)):
        try:
            described.append(describe_output(value, layout))
            positions.append(position)
        except BlockKVError as error:
            errors[position] = error
    errors |= {positions[number]: read_only_error() for number in _read_only(described)}
    usable = [number for number, position in enumerate(positions) if position not in errors]
    pieces = Pieces.of([described[number] for number in usable])
    if occupied is None or occupied.add(pieces):
        return pieces, errors
    apart: list[Described] = []
    for number in usable:
        if occupied.add(Pieces.of([described[number]])):
            apart.append(described[number])
        else:
            errors[positions[number]] = overlap_error()
    return Pieces.of(apart), errors


def _any_copied(segments: array[int]) -> bool:
    """Whether some are not aligned for direct I/O on every device, and will be copied to."""
    return functools.reduce(operator.or_, segments, 0) % DIRECT_ALIGNMENT_BYTES != 0


def _read_only(outputs: Sequence[Described]) -> set[int]:
    """The positions of outputs in memory that is mapped read-only."""
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


def read_only_error() -> InvalidArgument:
    """For a get whose output cannot be written to."""
    return InvalidArgument("out= is memory that is mapped read-only; give memory that can be written to")


def overlap_error() -> InvalidArgument:
    """For a get of which two outputs share memory."""
    return InvalidArgument(
        "out= overlaps that of another key of the call; every chunk needs memory of its own"
    )


def allocate(layouts: Sequence[Layout]) -> tuple[list[Any], Pieces]:
    """Fresh aligned tensors for each layout, in the form they were put.

    Successive small chunks of one layout share memory, which stays as long as any tensor in it.
    """
    values: list[Any] = []
    segments, counts = array("Q"), array("I")
    keepalive: list[object] = []
    for _, group in itertools.groupby(layouts, key=id):
        alike = list(group)
        offsets, size_bytes = _places(alike[0])
        stride_bytes = _round_up(size_bytes, DIRECT_ALIGNMENT_BYTES)
        at_a_time = max(1, SHARED_BYTES // stride_bytes)
        for first in range(0, len(alike), at_a_time):
            count = len(alike[first : first + at_a_time])
            memory = torch_memory(count * stride_bytes)
            values += _values_in(memory.view(count, stride_bytes), alike[0], offsets)
            pieces = _pieces_of_one(alike[0], memory.data_ptr(), offsets)
            for row in range(count):
                for address, length_bytes in pieces:
                    segments.append(address + row * stride_bytes)
                    segments.append(length_bytes)
            counts.extend([len(pieces)] * count)
            keepalive += [memory] * count
    return values, Pieces(layouts, [layout.payload_bytes for layout in layouts], segments, counts, keepalive)


def bytes_of(value: Any) -> memoryview:
    """The bytes of contiguous CPU memory, a tensor or a bytes-like object. Raises InvalidArgument."""
    if not _is_tensor(value):
        return _byte_view(value)
    if value.device.type != "cpu" or not value.is_contiguous() or not value.nbytes:
        raise InvalidArgument(f"a contiguous CPU tensor is expected, not {value.shape} on {value.device}")
    memory = (ctypes.c_char * value.nbytes).from_address(value.data_ptr())
    memory.keepalive = value  # as long as there is any view of it
    return memoryview(memory).cast("B")


def values_over(payload: memoryview, layout: Layout) -> Any:
    """The tensors of a payload, in their form, in its memory; copies of those that lie unaligned there."""
    content = _tensor_over(payload)
    tensors, start = [], 0
    for spec in layout.specs:
        piece = content[start : start + spec.size_bytes]
        dtype = torch_dtype(spec.dtype)
        if piece.data_ptr() % dtype.itemsize or start % dtype.itemsize:
            piece = piece.clone()
        tensors.append(piece.view(dtype).view(spec.shape))
        start += spec.size_bytes
    if layout.form == "tensor":
        return tensors[0]
    if layout.form == "list":
        return tensors
    return dict(zip([spec.name for spec in layout.specs], tensors, strict=True))


def torch_memory(size_bytes: int) -> torch.Tensor:
    """Aligned memory as uint8."""
    import torch

    return torch.frombuffer(aligned_memory(size_bytes), dtype=torch.uint8)


def _values_in(table: torch.Tensor, layout: Layout, offsets: Sequence[int]) -> list[Any]:
    """The values of a layout, one for each row of bytes, its tensors at `offsets`."""
    columns = [
        table[:, offset : offset + spec.size_bytes]
        .view(torch_dtype(spec.dtype))
        .view(len(table), *spec.shape)
        .unbind(0)
        for spec, offset in zip(layout.specs, offsets, strict=True)
    ]
    if layout.form == "tensor":
        return list(columns[0])
    rows = zip(*columns, strict=True)
    if layout.form == "list":
        return [list(tensors) for tensors in rows]
    names = [spec.name for spec in layout.specs]
    return [dict(zip(names, tensors, strict=True)) for tensors in rows]


def _pieces_of_one(layout: Layout, address: int, offsets: Sequence[int]) -> list[Segment]:
    """The segments of a value whose tensors lie at `offsets`."""
    pieces: list[Segment] = []
    for spec, offset in zip(layout.specs, offsets, strict=True):
        _extend(pieces, [(address + offset, spec.size_bytes)])
    return pieces


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


_KIND = operator.attrgetter("dtype", "shape", "is_cpu", "layout", "is_nested", "is_quantized")


def _plain_pieces(values: Sequence[Any]) -> Pieces | None:
    """Tensors that are each one piece of memory as they stand, or None where one is not.

    Nearly all are. They are looked at all together, which takes a fraction of a look at each.
    """
    import torch

    if set(map(type, values)) != {torch.Tensor}:
        return None
    try:
        kinds = list(map(_KIND, values))
    except RuntimeError:  # nested tensors have no shape
        return None
    layouts: dict[Any, Layout] = {}
    for kind in set(kinds):
        dtype, shape, is_cpu, layout, is_nested, is_quantized = kind
        if not is_cpu or layout is not torch.strided or is_nested or is_quantized or 0 in shape:
            return None
        if dtype.is_complex and any(map(torch.Tensor.is_conj, values)):
            return None
        layouts[kind] = _single_layout(dtype, shape)
    if not all(map(torch.Tensor.is_contiguous, values)) or any(map(torch.Tensor.is_neg, values)):
        return None
    each = [layouts[kind] for kind in kinds]
    sizes_bytes = [layout.payload_bytes for layout in each]
    segments = array("Q", bytes(16 * len(values)))
    segments[::2] = array("Q", map(torch.Tensor.data_ptr, values))
    segments[1::2] = array("Q", sizes_bytes)
    return Pieces(each, sizes_bytes, segments, array("I", [1]) * len(values), values)


def _all_equal(found: Sequence[Layout], wanted: Sequence[Layout]) -> bool:
    """Whether these layouts, a few objects many times over, are the same in turn."""
    pairs = {(id(one), id(other)): (one, other) for one, other in zip(found, wanted, strict=True)}
    return all(one == other for one, other in pairs.values())


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
    except (TypeError, ValueError, BufferError):  # the last two: NumPy's dates, a released view, a closed map
        raise InvalidArgument(
            f"cannot store a {type(value).__name__}; give a torch tensor, several, or a bytes-like object"
        ) from None
    if "O" in view.format:
        raise InvalidArgument("an array of Python objects holds their addresses; store what they contain")
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
