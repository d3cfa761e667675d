"""KV layouts: where a chunk keeps which layer, K or V, token and head, and which bytes a part of it is.

A `KVLayout` says how the payload of a chunk is to be read: one or more dense arrays, one behind the other,
each with axes in an order of its own. A `Part` names ranges along axes, and `ranges` turns it into spans of
payload bytes. Both are plain values without I/O::

    sizes = {"layers": 32, "kv": 2, "heads": 8, "tokens": 256, "dim": 128}
    layout = KVLayout.of("layers kv heads tokens dim", "bfloat16", **sizes)
    layout.ranges(Part(layers=range(4), heads=0))

What models have is arrays with other axes, and needs no rule of its own:

    attention                 layers kv tokens heads dim, in any order
    latent attention (MLA)    layers tokens latent
    quantised                 the values, and an array of scales with the axes that a scale is given for
    sliding window            fewer tokens, numbered as the others: tokens=range(3840, 4096)
    state space               layers state, without tokens
    several of these          `+`: every group is arrays of its own, with the layers that it has
    a shard                   heads=range(8, 16) of a tensor-parallel rank

A part selects along the axes that an array has. An array without an axis is not divided along it: a part of
some tokens has the whole state of a state-space layer, and a latent is both K and V.

Not here: the names, dtypes and shapes that a chunk was put with (`blockkv.catalog.layouts`), reading and
verifying (`blockkv.store`).
"""

from __future__ import annotations

import itertools
import math
import numbers
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from blockkv.catalog.layouts import torch_dtype
from blockkv.errors import InvalidArgument

__all__ = ["WHOLE", "Axis", "KVArray", "KVLayout", "Part", "Selection"]

Numbers: TypeAlias = range | tuple[int, ...]
Chosen: TypeAlias = int | range | None
"""What a part says of an axis: one number, those of a range (of step 1), or, with None, all."""

KV_WORDS: dict[str, Numbers] = {"k": range(1), "v": range(1, 2), "kv": range(2)}
"""K is number 0 of axis kv, V number 1."""


NUMBER_LIMIT = 1 << 62
"""Of what an axis is numbered with: `len` of a longer range fails."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of an array. Its positions have numbers: those of the model, strictly increasing."""

    name: str
    numbers: Numbers

    def __post_init__(self) -> None:
        if not self.numbers:
            raise InvalidArgument(f"axis {self.name!r} is empty; leave its array out")
        if isinstance(self.numbers, range):  # told by its step: it may be too long to be walked
            increasing = self.numbers.step > 0
            if max(self.numbers[0], self.numbers[-1]) >= NUMBER_LIMIT:
                raise InvalidArgument(
                    f"axis {self.name!r} has numbers from {NUMBER_LIMIT} on: {self.numbers}"
                )
        else:
            increasing = all(earlier < later for earlier, later in itertools.pairwise(self.numbers))
        if not increasing:
            raise InvalidArgument(f"the numbers of axis {self.name!r} do not increase: {self.numbers}")

    @property
    def size(self) -> int:
        return len(self.numbers)

    def positions(self, chosen: Chosen) -> range:
        """The positions, side by side, whose numbers are among those chosen; maybe none."""
        if chosen is None:
            return range(self.size)
        wanted = range(chosen, chosen + 1) if isinstance(chosen, int) else chosen
        return range(bisect_left(self.numbers, wanted.start), bisect_left(self.numbers, wanted.stop))


@dataclass(frozen=True, slots=True)
class Part:
    """What is wanted of a chunk: along each axis one number, a range of numbers, or (None) all of it."""

    layers: Chosen = None
    kv: Literal["k", "v"] | None = None
    tokens: Chosen = None
    heads: Chosen = None

    def __post_init__(self) -> None:
        for name in ("layers", "tokens", "heads"):
            chosen = getattr(self, name)
            if isinstance(chosen, range) and (chosen.step != 1 or not chosen):
                raise InvalidArgument(f"{name}={chosen} of a part; use a range of step 1 that is not empty")
            if isinstance(chosen, numbers.Integral) and not isinstance(chosen, bool):
                object.__setattr__(self, name, int(chosen))  # of numpy, too
            elif chosen is not None and not isinstance(chosen, range):
                raise InvalidArgument(f"{name}={chosen!r} of a part; use a number, a range, or None for all")
        if self.kv not in ("k", "v", None):
            raise InvalidArgument(f"kv={self.kv!r} of a part; use 'k', 'v', or None for both")

    def along(self, axis: str) -> Chosen:
        """What it says of an axis; None of those that parts do not know."""
        if axis == "kv":
            return None if self.kv is None else KV_WORDS[self.kv][0]
        chosen: Chosen = getattr(self, axis) if axis in ("layers", "tokens", "heads") else None
        return chosen

    def narrowed(self, axis: str, chosen: int | range) -> Part:
        """The same with one number, or a range of them, along layers, kv, tokens or heads."""
        if axis == "layers":
            return replace(self, layers=chosen)
        if axis == "tokens":
            return replace(self, tokens=chosen)
        if axis == "heads":
            return replace(self, heads=chosen)
        assert axis == "kv", axis
        assert isinstance(chosen, int)
        return replace(self, kv="v" if chosen else "k")


WHOLE = Part()
"""All of a chunk."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a part has of one array: a strided view of the payload."""

    name: str
    dtype: str
    offset_bytes: int
    """Of its first element in the payload."""
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """Of the array: from one position to the next, for each axis."""
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def hull_bytes(self) -> int:
        """From its first byte to behind its last one."""
        steps = zip(self.shape, self.strides_bytes, strict=True)
        return sum((size - 1) * stride for size, stride in steps) + self.item_bytes

    @property
    def span_bytes(self) -> int:
        """How many bytes lie side by side, before anything is merged."""
        span = self.item_bytes
        for size, stride in zip(reversed(self.shape), reversed(self.strides_bytes), strict=True):
            if stride != span:
                break
            span *= size
        return span

    def starts(self) -> Iterator[int]:
        """Where in the payload each span of `span_bytes` begins, in ascending order."""
        span = self.item_bytes
        outer = list(zip(self.shape, self.strides_bytes, strict=True))
        while outer and outer[-1][1] == span:
            span *= outer.pop()[0]
        steps = [range(0, size * stride, stride) for size, stride in outer]
        return (self.offset_bytes + sum(offsets) for offsets in itertools.product(*steps))

    def rows(self) -> Iterator[Selection]:
        """Its parts along the first axis, without that axis. Needs one."""
        for position in range(self.shape[0]):
            yield replace(
                self,
                offset_bytes=self.offset_bytes + position * self.strides_bytes[0],
                shape=self.shape[1:],
                strides_bytes=self.strides_bytes[1:],
            )


@dataclass(frozen=True)
class KVArray:
    """One dense array: `axes`, slowest first, of elements of a torch dtype ("bfloat16")."""

    axes: tuple[Axis, ...]
    dtype: str
    name: str = ""

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if not names or len(set(names)) < len(names) or not all(names):
            raise InvalidArgument(f"the axes of an array need different names, not {names}")
        kv = next((axis for axis in self.axes if axis.name == "kv"), None)
        if kv is not None and not set(kv.numbers) <= {0, 1}:
            raise InvalidArgument(f"axis kv has K as number 0 and V as number 1, not {kv.numbers}")

    @cached_property
    def item_bytes(self) -> int:
        return torch_dtype(self.dtype).itemsize

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @cached_property
    def strides_bytes(self) -> tuple[int, ...]:
        steps = itertools.accumulate(reversed(self.shape[1:]), initial=self.item_bytes, func=int.__mul__)
        return tuple(reversed(list(steps)))

    def select(self, part: Part, offset_bytes: int) -> Selection | None:
        """What `part` has of the array, which begins `offset_bytes` into the payload; None for nothing."""
        chosen = [axis.positions(part.along(axis.name)) for axis in self.axes]
        if not all(chosen):
            return None
        steps = zip(chosen, self.strides_bytes, strict=True)
        offset_bytes += sum(positions.start * stride for positions, stride in steps)
        shape = tuple(map(len, chosen))
        return Selection(self.name, self.dtype, offset_bytes, shape, self.strides_bytes, self.item_bytes)


@dataclass(frozen=True)
class KVLayout:
    """How a payload is to be read: arrays, one behind the other without gaps.

    Several arrays have different names. Nothing of it is stored: whoever reads a part says it again, and a
    chunk with another size, or with tensors of other dtypes, refuses it.
    """

    arrays: tuple[KVArray, ...]

    def __post_init__(self) -> None:
        names = [array.name for array in self.arrays]
        if not names:
            raise InvalidArgument("a KV layout needs an array")
        if len(names) > 1 and (not all(names) or len(set(names)) < len(names)):
            raise InvalidArgument(f"arrays of one KV layout need different names, not {names}")

    @classmethod
    def of(cls, order: str, dtype: str, name: str = "", **axes: int | Numbers | str) -> KVLayout:
        """A layout of one array: its axes in `order`, separated by spaces, slowest first.

        Each axis is given by its size, for the numbers from 0 on, or by its numbers; kv also as "k", "v" or
        "kv". `dtype` is a torch dtype, by its name. Axes beside layers, kv, tokens and heads may have any
        name and are never divided. Raises InvalidArgument.
        """
        if not isinstance(order, str):
            raise InvalidArgument(f"order is {order!r}; give the names of the axes, separated by spaces")
        names = order.split()
        if sorted(names) != sorted(axes):
            raise InvalidArgument(f"order {order!r} and the axes that are given, {sorted(axes)}, differ")
        return cls((KVArray(tuple(Axis(axis, _numbers(axis, axes[axis])) for axis in names), dtype, name),))

    def __add__(self, other: KVLayout) -> KVLayout:
        """The arrays of both in one payload, those of `other` behind."""
        return KVLayout(self.arrays + other.arrays)

    @cached_property
    def payload_bytes(self) -> int:
        return sum(array.size_bytes for array in self.arrays)

    @cached_property
    def offsets_bytes(self) -> tuple[int, ...]:
        """Where in the payload each array begins."""
        return tuple(itertools.accumulate((array.size_bytes for array in self.arrays[:-1]), initial=0))

    def numbers(self, axis: str) -> tuple[int, ...]:
        """The numbers that `axis` has in any array, in ascending order; none where no array has it."""
        found = {
            number
            for array in self.arrays
            for one in array.axes
            if one.name == axis
            for number in one.numbers
        }
        return tuple(sorted(found))

    def selections(self, part: Part) -> tuple[Selection, ...]:
        """What `part` has of each array, without those it has nothing of.

        Raises InvalidArgument where that is all of them.
        """
        found = (
            array.select(part, offset) for array, offset in zip(self.arrays, self.offsets_bytes, strict=True)
        )
        chosen = tuple(one for one in found if one is not None)
        if not chosen:
            raise InvalidArgument(f"{part} names nothing that there is in {self}")
        return chosen

    def ranges(self, part: Part) -> list[tuple[int, int]]:
        """The payload bytes of `part`: (offset, bytes), ascending, merged where they meet."""
        return merged((start, one.span_bytes) for one in self.selections(part) for start in one.starts())

    def __str__(self) -> str:
        parts = []
        for array in self.arrays:
            axes = ", ".join(f"{axis.name} {axis.size}" for axis in array.axes)
            parts.append(f"{array.name + ': ' if array.name else ''}{array.dtype}[{axes}]")
        return f"KVLayout({'; '.join(parts)})"


def merged(spans: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending (offset, bytes) with those made one that touch or overlap."""
    found: list[tuple[int, int]] = []
    for offset, size_bytes in spans:
        if found and offset <= (end := sum(found[-1])):
            found[-1] = (found[-1][0], max(end, offset + size_bytes) - found[-1][0])
        else:
            found.append((offset, size_bytes))
    return found


def _numbers(axis: str, given: int | Numbers | str) -> Numbers:
    if isinstance(given, str):
        if axis != "kv" or given not in KV_WORDS:
            raise InvalidArgument(f"axis {axis} is {given!r}; give its size or its numbers, or kv='k' or 'v'")
        return KV_WORDS[given]
    if isinstance(given, range):
        return given
    if isinstance(given, numbers.Integral):
        return range(int(given))
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(one, numbers.Integral) for one in found):
        raise InvalidArgument(f"axis {axis} is {given!r}; give its size, or its numbers")
    return tuple(map(int, found))
