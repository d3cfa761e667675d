"""Layouts: what a chunk's payload is made of, and the numbers that stand for them in the records.

Each distinct layout is written to the device once. It lives as long as a chunk refers to it, and its number
is never given out again, so a record cannot come to mean another layout.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING

from blockkv.errors import InvalidArgument
from blockkv.format.record import MAX_LAYOUT_ID, layout_checksum

if TYPE_CHECKING:
    import torch

TEXT_LIMIT_BYTES = 1 << 16
"""Of a layout before it is deflated. An image is not trusted: a page of it must not inflate to megabytes."""

_MAX_DIMS = 64
"""Of one tensor, in an image; torch itself stops there in most operations."""


ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Of the dtypes that every torch has. Who only needs sizes, as the owner of a catalog, needs no torch."""


@cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    import torch

    # Not getattr for a name from an image: torch imports some of its parts when they are first asked for.
    return {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` ("bfloat16"). Raises InvalidArgument when this torch has none."""
    dtype = _torch_dtypes().get(name)
    if dtype is None:
        import torch

        raise InvalidArgument(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a chunk: its name ("" when unnamed), torch dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its elements, one after the other."""
        item_bytes = ITEM_BYTES.get(self.dtype)
        return math.prod(self.shape) * (item_bytes or torch_dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class Layout:
    """What a chunk's payload is made of. `form` is "tensor", "list" or "dict"."""

    form: str
    specs: tuple[TensorSpec, ...]

    @cached_property
    def payload_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.specs)

    @cached_property
    def body(self) -> bytes:
        """The encoded layout, as a LAYOUT record carries it: a tag byte, then JSON, deflated when long."""
        text = self._text
        return b"J" + text if len(text) < 256 else b"Z" + zlib.compress(text, 9)

    @cached_property
    def text_bytes(self) -> int:
        """Length of the JSON; at most TEXT_LIMIT_BYTES in a store."""
        return len(self._text)

    @property
    def _text(self) -> bytes:
        items = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]
        return json.dumps([self.form, items], separators=(",", ":"), ensure_ascii=False).encode()

    @cached_property
    def digest(self) -> bytes:
        """Binds a chunk's root checksum to its layout: 16 bytes."""
        return layout_checksum(self.body)

    @classmethod
    def decode(cls, body: bytes) -> Layout:
        """Inverse of `body`. Raises ValueError on anything else; never expands beyond TEXT_LIMIT_BYTES."""
        tag, text = body[:1], body[1:]
        if tag == b"Z":
            inflater = zlib.decompressobj()
            try:
                text = inflater.decompress(text, TEXT_LIMIT_BYTES)
            except zlib.error as error:
                raise ValueError(f"layout does not inflate: {error}") from None
            if not inflater.eof:
                raise ValueError(f"layout is cut short or longer than {TEXT_LIMIT_BYTES} bytes")
        elif tag != b"J":
            raise ValueError(f"layout has unknown tag {tag!r}")
        try:
            form, items = json.loads(text)
            specs = tuple(_spec_of(*item) for item in items)
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"layout is not readable: {error}") from None
        if form not in ("tensor", "list", "dict") or not specs or (form == "tensor" and len(specs) != 1):
            raise ValueError(f"layout has form {form!r} with {len(specs)} tensors")
        layout = cls(form, specs)
        if layout.body != body:
            # One layout has one encoding, or two chunks could differ in their checksums' layout alone.
            object.__setattr__(layout, "body", body)
        return layout

    def __str__(self) -> str:
        parts = [f"{s.name + ': ' if s.name else ''}{s.dtype}{list(s.shape)}" for s in self.specs[:4]]
        more = f", ... {len(self.specs)} tensors" if len(self.specs) > 4 else ""
        return f"{self.form}({', '.join(parts)}{more})"


@lru_cache(maxsize=1024)
def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def _spec_of(name: object, dtype: object, shape: object) -> TensorSpec:
    """One tensor of a decoded layout. Raises ValueError."""
    if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
        raise ValueError(f"{[name, dtype, shape]} is not a name, a dtype and a shape")
    if len(shape) > _MAX_DIMS or not all(type(dim) is int and 0 < dim < 1 << 63 for dim in shape):
        raise ValueError(f"a shape of {len(shape)} dimensions, or one of them is empty or impossible")
    # Hostile layouts repeat one tensor thousands of times; so do many good ones.
    return _spec(name, dtype, tuple(shape))


class Layouts:
    """Layouts by number and by encoded body, with the number of chunks that refer to each."""

    def __init__(self, next_id: int = 1) -> None:
        self.next_id = next_id
        self._by_id: dict[int, Layout] = {}
        self._ids: dict[bytes, int] = {}
        self._references: dict[int, int] = {}
        self.body_bytes = 0
        """Sum of the encoded layouts, each with the record round it (at most 32 bytes)."""

    @property
    def exhausted(self) -> bool:
        """Whether the next number could be the last, with a million puts under way."""
        return self.next_id > MAX_LAYOUT_ID - (1 << 20)

    def __getitem__(self, layout_id: int) -> Layout:
        return self._by_id[layout_id]

    def __contains__(self, layout_id: int) -> bool:
        return layout_id in self._by_id

    def __iter__(self) -> Iterator[tuple[int, Layout]]:
        return iter(self._by_id.items())

    def acquire(self, layout: Layout, count: int = 1) -> tuple[int, bool]:
        """The number for `layout` with `count` more references, and whether it is new and must be logged."""
        layout_id = self._ids.get(layout.body)
        if layout_id is not None:
            self._references[layout_id] += count
            return layout_id, False
        layout_id = self.next_id
        self.define(layout_id, layout)
        self._references[layout_id] = count
        return layout_id, True

    def define(self, layout_id: int, layout: Layout) -> None:
        """Enter a layout read from the device, without a reference."""
        self.next_id = max(self.next_id, layout_id + 1)
        self._by_id[layout_id] = layout
        self.body_bytes += len(layout.body) + 32
        self._ids[layout.body] = layout_id
        self._references.setdefault(layout_id, 0)

    def refer(self, layout_id: int, count: int = 1) -> None:
        """`count` more chunks read from the device use `layout_id`."""
        self._references[layout_id] += count

    def release(self, layout_id: int, count: int = 1) -> None:
        """`count` chunks fewer use `layout_id`; an unused layout is forgotten."""
        self._references[layout_id] -= count
        if self._references[layout_id] == 0:
            self._forget(layout_id)

    def forget_unused(self) -> None:
        """Drop what no chunk refers to, after everything was read from the device."""
        for layout_id in [number for number, count in self._references.items() if count == 0]:
            self._forget(layout_id)

    def _forget(self, layout_id: int) -> None:
        layout = self._by_id.pop(layout_id)
        self.body_bytes -= len(layout.body) + 32
        del self._references[layout_id]
        if self._ids.get(layout.body) == layout_id:
            del self._ids[layout.body]
