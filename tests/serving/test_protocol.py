"""Messages: what is encoded is decoded, and nothing else is; the document has them all."""

from __future__ import annotations

import random
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockkv.format.record import DIGEST_BYTES
from blockkv.serving import protocol
from blockkv.serving.protocol import FIELD_KINDS, HEADER, MESSAGES, Malformed, Message, field_kinds

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "B": st.integers(0, 255),
    "I": st.integers(0, 2**32 - 1),
    "Q": st.integers(0, 2**64 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "d": st.floats(allow_nan=False),
    "raw": st.binary(max_size=50),
    "text": st.text(st.characters(codec="utf-8"), max_size=20),
    "U32s": st.lists(st.integers(0, 2**32 - 1), max_size=5).map(lambda found: array("I", found)),
    "U64s": st.lists(st.integers(0, 2**64 - 1), max_size=5).map(lambda found: array("Q", found)),
    "I32s": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(lambda found: array("i", found)),
    "raws": st.lists(st.binary(max_size=10), max_size=5),
    "digests": st.lists(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES), max_size=4),
}


@st.composite
def messages(draw: st.DrawFn) -> Message:
    cls = draw(st.sampled_from(list(MESSAGES.values())))
    return cls(*[draw(VALUES[kind]) for _, kind in field_kinds(cls)])


def decoded(frame: bytes) -> Message:
    size_bytes, kind, zero, _, _ = HEADER.unpack_from(frame)
    assert zero == 0
    assert size_bytes == len(frame) - HEADER.size
    with memoryview(frame) as view:
        return protocol.decode(kind, view[HEADER.size :])


@settings(deadline=None)
@given(messages(), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_what_is_encoded_is_decoded(message: Message, request: int, durable: int) -> None:
    frame = protocol.encode(message, request, durable)
    assert decoded(frame) == message
    assert HEADER.unpack_from(frame)[3:] == (request, durable)
    assert protocol.encode(decoded(frame), request, durable) == frame


@settings(deadline=None)
@given(messages(), st.data())
def test_what_is_cut_or_longer_is_refused(message: Message, data: st.DataObject) -> None:
    body = protocol.encode(message)[HEADER.size :]
    with pytest.raises(Malformed):
        protocol.decode(message.KIND, memoryview(body + b"\0"))
    if body:
        cut = data.draw(st.integers(0, len(body) - 1))
        with pytest.raises(Malformed):
            protocol.decode(message.KIND, memoryview(body[:cut]))


def test_nothing_that_arrives_does_more_than_raise_malformed() -> None:
    rng = random.Random(5)
    accepted = 0
    for _ in range(20_000):
        kind = rng.choice([*MESSAGES, 0, 7, 65535])
        body = rng.randbytes(rng.choice((0, 1, 4, 8, 9, 20, 60)))
        if rng.random() < 0.5:
            body = struct.pack("<I", rng.choice((0, 1, 2, 2**31, 2**32 - 1))) + body
        try:
            protocol.decode(kind, memoryview(body))
            accepted += 1
        except Malformed:
            continue
    assert accepted > 100


def test_a_length_reserves_no_memory() -> None:
    with pytest.raises(Malformed):
        protocol.decode(protocol.Release.KIND, memoryview(struct.pack("<I", 2**32 - 1)))
    with pytest.raises(Malformed):
        protocol.decode(protocol.Hello.KIND, memoryview(struct.pack("<II", 1, 2**32 - 1)))


def test_the_document_has_every_message() -> None:
    text = DOCUMENT.read_text()
    for kind, cls in MESSAGES.items():
        told = ", ".join(f"{name} ({FIELD_KINDS[code]})" for name, code in field_kinds(cls))
        assert f"| {kind} | `{cls.__name__}` | {told or 'none'} |" in text, f"{kind} {cls.__name__}: {told}"
    assert f"version {protocol.VERSION} of the protocol" in text
