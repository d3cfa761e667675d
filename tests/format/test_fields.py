"""Declared structs: packing, offsets, and what a field refuses."""

from __future__ import annotations

import struct

import pytest

from blockkv.errors import InvalidArgument
from blockkv.format.fields import Field, FieldRejected, StructLayout

SAMPLE = StructLayout(
    "sample",
    [
        Field("magic", "bytes[4]", "what it is"),
        Field("small", "u8", ""),
        Field("wide", "u64", ""),
        Field("name", "text[8]", ""),
        Field("reserved", "zero[3]", ""),
    ],
    size_bytes=24,
)


def test_packing_is_little_endian_without_padding() -> None:
    packed = SAMPLE.pack(magic=b"abcd", small=7, wide=0x0102030405060708, name="né")
    assert packed == b"abcd\x07\x08\x07\x06\x05\x04\x03\x02\x01n\xc3\xa9\0\0\0\0\0\0\0\0"
    assert SAMPLE.unpack_from(b"??" + packed, 2) == {
        "magic": b"abcd",
        "small": 7,
        "wide": 0x0102030405060708,
        "name": "né",
    }
    assert SAMPLE.offsets == {"magic": 0, "small": 4, "wide": 5, "name": 13, "reserved": 21}


@pytest.mark.parametrize(
    "changes",
    [
        {"small": 256},
        {"small": -1},
        {"wide": 1 << 64},
        {"magic": b"abc"},
        {"name": "ninebytes"},
        {"name": "ééééé"},
        {"name": "a\nb"},
        {"name": "\x1b[2J"},
    ],
)
def test_values_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    values: dict[str, object] = {"magic": b"abcd", "small": 7, "wide": 1, "name": "n", **changes}
    with pytest.raises(InvalidArgument):
        SAMPLE.pack(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offset", "byte", "field"),
    [(13, 0xFF, "name"), (13, 0x07, "name"), (14, 0x85, "name"), (21, 1, "reserved"), (23, 0x80, "reserved")],
)
def test_bytes_a_type_does_not_allow_are_rejected(offset: int, byte: int, field: str) -> None:
    packed = bytearray(SAMPLE.pack(magic=b"abcd", small=7, wide=1, name="name"))
    packed[offset] = byte
    with pytest.raises(FieldRejected) as caught:
        SAMPLE.unpack_from(bytes(packed))
    assert caught.value.field.name == field


def test_text_after_its_end_is_rejected() -> None:
    packed = bytearray(SAMPLE.pack(magic=b"abcd", small=7, wide=1, name="n"))
    packed[16] = ord("x")
    with pytest.raises(FieldRejected):
        SAMPLE.unpack_from(bytes(packed))


def test_a_short_buffer_is_an_error() -> None:
    with pytest.raises(struct.error):
        SAMPLE.unpack_from(bytes(23))


def test_a_wrong_declaration_fails_at_import() -> None:
    with pytest.raises(AssertionError, match="3 bytes declared, 4 expected"):
        StructLayout("short", [Field("one", "u16", ""), Field("two", "u8", "")], size_bytes=4)
    with pytest.raises(AssertionError, match="twice"):
        StructLayout("twice", [Field("one", "u8", ""), Field("one", "u8", "")], size_bytes=2)
    with pytest.raises(AssertionError, match="unknown type"):
        StructLayout("unknown", [Field("one", "i32", "")], size_bytes=4)
