"""Declarations of on-disk structs: every struct is declared once, and everything else is derived from it.

A `StructLayout` is a list of `Field`s (name, type, and which fault the field defends against). From it come
packing, unpacking, offsets, the size, and the markdown table in docs/format.md. All integers are
little-endian; there is no implicit padding.

Field types
  * ``u8 u16 u32 u64``  unsigned integers
  * ``bytes[n]``        n raw bytes
  * ``text[n]``         at most n bytes of printable UTF-8, padded with zero bytes
  * ``zero[n]``         n bytes that must be zero

Not here: checksums and the meaning of values (the module that declares the struct).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockkv.errors import FormatError, InvalidArgument

__all__ = ["Field", "FieldRejected", "StructLayout"]

_INTEGER_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
_SIZED_TYPE = re.compile(r"(bytes|text|zero)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an on-disk struct."""

    name: str
    type: str
    doc: str

    @property
    def kind(self) -> str:
        """The type without its length: an integer type, ``bytes``, ``text`` or ``zero``."""
        return self.type.partition("[")[0]

    @property
    def struct_code(self) -> str:
        """The format of this field for the standard library's `struct`."""
        if self.type in _INTEGER_CODES:
            return _INTEGER_CODES[self.type]
        match = _SIZED_TYPE.fullmatch(self.type)
        assert match, f"field {self.name}: unknown type {self.type}"
        return f"{match[2]}s"

    @property
    def size_bytes(self) -> int:
        """Bytes it takes in the struct."""
        return struct.calcsize("<" + self.struct_code)


class FieldRejected(FormatError):
    """A field holds what its type does not allow: unprintable text, or a non-zero reserved byte."""

    def __init__(self, field: Field, problem: str) -> None:
        super().__init__(f"field {field.name}: {problem}")
        self.field = field


class StructLayout:
    """An on-disk struct: its fields in order, and what follows from them.

    `size_bytes` is asserted, so that a field added by mistake cannot move its successors silently.
    """

    def __init__(self, name: str, fields: Sequence[Field], *, size_bytes: int) -> None:
        self.name = name
        self.fields = tuple(fields)
        self.struct = struct.Struct("<" + "".join(field.struct_code for field in fields))
        self.size_bytes = self.struct.size
        self._parts = tuple((field, field.name, field.kind, field.size_bytes) for field in self.fields)
        self.offsets: dict[str, int] = {}
        offset = 0
        for field in self.fields:
            assert field.name not in self.offsets, f"{name}: field {field.name} is declared twice"
            self.offsets[field.name] = offset
            offset += field.size_bytes
        assert offset == self.size_bytes == size_bytes, (
            f"{name}: {offset} bytes declared, {size_bytes} expected"
        )

    def pack(self, **values: int | bytes | str) -> bytes:
        """The struct as bytes. ``zero`` fields need no value.

        Raises InvalidArgument when a value does not fit its field.
        """
        packed: list[int | bytes] = []
        for field, name, kind, size_bytes in self._parts:
            if kind == "zero":
                packed.append(b"")
                continue
            value = values.pop(name)
            if isinstance(value, str):
                text = value.encode(errors="replace")  # what cannot be encoded is not printable either
                if len(text) > size_bytes or not (value.isprintable() or not value):
                    raise InvalidArgument(
                        f"{name} {value!r} is not printable text of at most {size_bytes} bytes"
                    )
                value = text
            elif isinstance(value, bytes) and len(value) != size_bytes:
                raise InvalidArgument(f"{name} has {len(value)} bytes instead of {size_bytes}")
            elif isinstance(value, int) and not 0 <= value < 1 << (8 * size_bytes):
                raise InvalidArgument(f"{name} {value} does not fit into {field.type}")
            packed.append(value)
        assert not values, f"{self.name} has no fields {sorted(values)}"
        return self.struct.pack(*packed)

    def unpack_from(self, buffer: bytes | memoryview, offset: int = 0) -> dict[str, Any]:
        """The values by field name; ``text`` as str. Raises FieldRejected; struct.error if short."""
        values: dict[str, Any] = {}
        found = self.struct.unpack_from(buffer, offset)
        for (field, name, kind, _), value in zip(self._parts, found, strict=True):
            if kind == "zero":
                if any(value):
                    raise FieldRejected(field, "reserved bytes are not zero")
            elif kind == "text":
                values[name] = _text_of(field, value)
            else:
                values[name] = value
        return values

    def table(self) -> str:
        """The struct as a markdown table, one line a field."""
        lines = [
            "| offset | bytes | field | type | what it is, and what it defends against |",
            "|---:|---:|---|---|---|",
        ]
        for field in self.fields:
            offset = self.offsets[field.name]
            lines.append(f"| {offset} | {field.size_bytes} | `{field.name}` | {field.type} | {field.doc} |")
        return "\n".join(lines) + "\n"


def _text_of(field: Field, raw: bytes) -> str:
    # Printable only: these strings are shown on terminals and in logs, and an image is hostile input.
    try:
        text = raw.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise FieldRejected(field, f"not UTF-8: {raw!r}") from None
    if text and not text.isprintable():
        raise FieldRejected(field, f"unprintable: {text!r}")
    return text
