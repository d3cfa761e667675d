"""Records: round trips, size, and hostile bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from format_samples import dice_bytes, put
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from blockkv.errors import InvalidArgument
from blockkv.format.geometry import MAX_EXTENTS, UNIT_BYTES, leaf_count, pack_extent, unit_count
from blockkv.format.page import PAGE_PAYLOAD_BYTES
from blockkv.format.record import (
    DELETE_RECORD,
    KEY_TAIL_RECORD,
    LAYOUT_BODY_MAX,
    LAYOUT_RECORD,
    MAX_LAYOUT_ID,
    PUT_RECORD,
    DeleteRecord,
    KeyTailRecord,
    LayoutRecord,
    Operation,
    PutRecord,
    RecordMalformed,
    RecordView,
    decode,
    encode_delete,
    encode_layout,
    encode_put,
    extents_of,
    iterate_records,
    key_digest,
    layout_checksum,
    put_bytes_at_most,
    root_checksum,
    root_of,
    summary_of,
)

DATA_UNITS = 1 << 20
DIGEST = key_digest(b"sample")


def checked(records: list[bytes], data_units: int = DATA_UNITS) -> list[RecordView]:
    return list(iterate_records(b"".join(records), len(records), data_units))


def refuse(body: bytes, record_count: int = 1, data_units: int = DATA_UNITS) -> str:
    with pytest.raises(RecordMalformed) as caught:
        list(iterate_records(body, record_count, data_units))
    return str(caught.value)


def refuse_first(body: bytes) -> None:
    """The first record is refused before anything is made of it."""
    with pytest.raises(RecordMalformed):
        next(iterate_records(body, 1, DATA_UNITS))


@st.composite
def puts(draw: Any) -> PutRecord:
    counts = draw(st.lists(st.integers(1, 5000), max_size=MAX_EXTENTS))
    gaps = draw(st.lists(st.integers(0, 100), min_size=len(counts), max_size=len(counts)))
    extents, start = [], 0
    for count, gap in zip(counts, gaps, strict=True):
        extents.append((start + gap, count))
        start += gap + count
    order = draw(st.permutations(extents))
    payload_bytes = sum(counts) * UNIT_BYTES - (draw(st.integers(0, UNIT_BYTES - 1)) if counts else 0)
    key = draw(st.binary(max_size=4096))
    seed = draw(st.integers(0, 1000))
    return PutRecord(
        draw(st.integers(0, (1 << 62) - 1)),
        key_digest(key),
        payload_bytes,
        draw(st.integers(0, (1 << 32) - 1)),
        dice_bytes(seed, 16),
        tuple(order),
        dice_bytes(seed, 8 * leaf_count(payload_bytes)),
        key,
        len(key),
        draw(st.booleans()),
    )


def encode(one: PutRecord) -> list[bytes]:
    return encode_put(
        one.log_sequence,
        one.digest,
        one.payload_bytes,
        one.layout_id,
        one.root,
        one.extents,
        one.leaves,
        one.key,
        one.key_is_text,
    )


@given(puts())
def test_put_round_trip(one: PutRecord) -> None:
    records = encode(one)
    views = checked(records)
    assert [view[0] for view in views] == [Operation.PUT, Operation.KEY_TAIL][: len(records)]
    assert all(view[1:3] == (one.log_sequence, one.digest) for view in views)
    assert [view[3] for view in views] == records
    found = decode(views[0][3])
    assert isinstance(found, PutRecord)
    key = found.key
    if len(views) == 2:
        tail = decode(views[1][3])
        assert isinstance(tail, KeyTailRecord)
        assert len(records[0]) == PAGE_PAYLOAD_BYTES
        key += tail.tail
    assert key == one.key
    assert found == PutRecord(*[getattr(one, name) if name != "key" else found.key for name in one.__slots__])
    raw = views[0][3]
    assert extents_of(raw) == one.extents
    assert summary_of(raw) == (one.layout_id, one.payload_bytes)
    assert root_of(raw) == one.root
    assert all(len(record) % 8 == 0 and len(record) <= PAGE_PAYLOAD_BYTES for record in records)


@given(st.integers(0, (1 << 62) - 1), st.binary(min_size=32, max_size=32))
def test_delete_round_trip(log_sequence: int, digest: bytes) -> None:
    raw = encode_delete(log_sequence, digest)
    assert checked([raw]) == [(Operation.DELETE, log_sequence, digest, raw)]
    assert decode(raw) == DeleteRecord(log_sequence, digest)


@given(st.integers(0, MAX_LAYOUT_ID), st.binary(max_size=LAYOUT_BODY_MAX))
def test_layout_round_trip(layout_id: int, body: bytes) -> None:
    raw = encode_layout(3, layout_id, body)
    assert checked([raw]) == [(Operation.LAYOUT, 3, b"", raw)]
    assert decode(raw) == LayoutRecord(3, layout_id, body)


def test_a_page_of_mixed_records() -> None:
    records = [encode_layout(1, 1, b"{}"), *put(2), encode_delete(3, DIGEST), *put(4, b"k", 0), *put(5)]
    operations = [view[0] for view in checked(records)]
    assert operations == [Operation.LAYOUT, Operation.PUT, Operation.DELETE, Operation.PUT, Operation.PUT]


def test_an_ordinary_chunk_takes_128_bytes() -> None:
    (raw,) = encode_put(1, DIGEST, 128 << 10, 1, bytes(16), [(0, 32)], bytes(8), b"k" * 36)
    assert len(raw) == 128


def test_the_longest_key_with_the_most_extents_and_leaves_fits() -> None:
    key = dice_bytes(1, 4096)
    units = 256 * 32
    extents = [(index * 100, 1) for index in range(MAX_EXTENTS - 1)] + [(20_000, units - MAX_EXTENTS + 1)]
    records = encode_put(1, key_digest(key), units * UNIT_BYTES, 1, bytes(16), extents, bytes(8 * 256), key)
    assert [len(record) for record in records] == [PAGE_PAYLOAD_BYTES, 3792]
    assert len(checked(records)) == 2


@given(puts())
def test_the_size_of_a_put_is_bounded_beforehand(one: PutRecord) -> None:
    if unit_count(one.payload_bytes) < 32 or len(one.extents) <= unit_count(one.payload_bytes) // 32 + 1:
        assert sum(map(len, encode(one))) <= put_bytes_at_most(one.payload_bytes, len(one.key))


def test_checksums_are_what_the_document_says() -> None:
    assert key_digest(b"k") == hashlib.blake2b(b"k", digest_size=32).digest()
    layout, leaves = b'{"dtype": "float16"}', dice_bytes(2, 24)
    content = DIGEST + (300_000).to_bytes(8, "little") + xxh3_128_digest(layout) + leaves
    assert root_checksum(DIGEST, 300_000, layout_checksum(layout), leaves) == xxh3_128_digest(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"extents": [(0, 31)]},
        {"extents": []},
        {"extents": [(0, 1)] * (MAX_EXTENTS + 1)},
        {"extents": [(-1, 32)]},
        {"extents": [(0, 32), (64, 0)]},
        {"leaves": bytes(16)},
        {"leaves": b""},
        {"key": bytes(4097)},
        {"digest": bytes(31)},
        {"root": bytes(17)},
        {"layout_id": 1 << 32},
        {"log_sequence": -1},
        {"log_sequence": 1 << 64},
    ],
)
def test_impossible_puts_are_refused(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "log_sequence": 1,
        "digest": DIGEST,
        "payload_bytes": 128 << 10,
        "layout_id": 1,
        "root": bytes(16),
        "extents": [(0, 32)],
        "leaves": bytes(8),
        "key": b"k",
    }
    encode_put(**values)
    with pytest.raises(InvalidArgument):
        encode_put(**{**values, **changes})


def test_other_impossible_records_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        encode_delete(1, bytes(31))
    with pytest.raises(InvalidArgument, match="3999 bytes exceeds 3998"):
        encode_layout(1, 1, bytes(3999))


# -- hostile bytes -----------------------------------------------------------------------------------------

(ORDINARY,) = encode_put(1, DIGEST, 128 << 10, 1, bytes(16), [(7, 32)], bytes(8), b"k" * 33)
SCATTERED = encode_put(1, DIGEST, 3 * UNIT_BYTES, 1, bytes(16), [(7, 1), (10, 2)], bytes(8), b"k" * 33)[0]
ZERO_LENGTH = encode_put(1, DIGEST, 0, 1, bytes(16), [], b"", b"k" * 33)[0]
TAILED = encode_put(1, DIGEST, 128 << 10, 1, bytes(16), [(7, 32)], bytes(8), bytes(4096))
SAMPLES = [
    ORDINARY,
    SCATTERED,
    ZERO_LENGTH,
    *TAILED,
    encode_delete(9, DIGEST),
    encode_layout(9, 1, b"layout"),
]


def overwritten(raw: bytes, offset: int, size_bytes: int, value: int) -> bytes:
    return raw[:offset] + value.to_bytes(size_bytes, "little") + raw[offset + size_bytes :]


PUT = PUT_RECORD.offsets
EXTENT = PUT_RECORD.size_bytes


@pytest.mark.parametrize(
    ("raw", "offset", "size_bytes", "value"),
    [
        (ORDINARY, PUT["record_bytes"], 2, 0),
        (ORDINARY, PUT["record_bytes"], 2, len(ORDINARY) - 8),
        (ORDINARY, PUT["record_bytes"], 2, len(ORDINARY) + 8),
        (ORDINARY, PUT["record_bytes"], 2, 0xFFFF),
        (ORDINARY, PUT["operation"], 1, 0),
        (ORDINARY, PUT["operation"], 1, 5),
        (ORDINARY, PUT["extent_count"], 1, 0),
        (ORDINARY, PUT["extent_count"], 1, 2),
        (ORDINARY, PUT["extent_count"], 1, MAX_EXTENTS + 1),
        (ORDINARY, PUT["payload_bytes"], 8, 0),
        (ORDINARY, PUT["payload_bytes"], 8, (128 << 10) + 1),
        (ORDINARY, PUT["payload_bytes"], 8, (124 << 10)),
        (ORDINARY, PUT["payload_bytes"], 8, (1 << 64) - 1),
        (ORDINARY, PUT["key_bytes"], 2, 0),
        (ORDINARY, PUT["key_bytes"], 2, 32),
        (ORDINARY, PUT["key_bytes"], 2, 0xFFFF),
        (ORDINARY, PUT["flags"], 1, 2),
        (ORDINARY, PUT["reserved"], 1, 1),
        (ORDINARY, EXTENT, 8, pack_extent(DATA_UNITS - 31, 32)),
        (ORDINARY, EXTENT, 8, pack_extent(0, 33)),
        (ORDINARY, EXTENT, 8, (1 << 64) - 1),
        (ORDINARY, EXTENT, 8, 7),
        (ORDINARY, len(ORDINARY) - 1, 1, 1),
        (SCATTERED, EXTENT, 8, pack_extent(10, 1)),
        (SCATTERED, EXTENT, 8, pack_extent(DATA_UNITS, 1)),
        (SCATTERED, EXTENT, 8, 7),
        (SCATTERED, EXTENT, 8, pack_extent(20, 2)),
        (TAILED[1], KEY_TAIL_RECORD.offsets["tail_bytes"], 2, 0),
        (TAILED[1], KEY_TAIL_RECORD.offsets["tail_bytes"], 2, 4096),
        (TAILED[1], KEY_TAIL_RECORD.offsets["reserved"], 1, 1),
        (SAMPLES[-2], DELETE_RECORD.offsets["reserved"], 1, 1),
        (SAMPLES[-2], DELETE_RECORD.offsets["record_bytes"], 2, 56),
        (SAMPLES[-1], LAYOUT_RECORD.offsets["body_bytes"], 2, 0xFFFF),
        (SAMPLES[-1], LAYOUT_RECORD.offsets["reserved"], 1, 1),
    ],
)
def test_violations_are_malformed(raw: bytes, offset: int, size_bytes: int, value: int) -> None:
    assert len(checked([raw])) == 1
    refuse(overwritten(raw, offset, size_bytes, value))
    refuse(overwritten(raw, offset, size_bytes, value) + encode_delete(9, DIGEST), 2)


@pytest.mark.parametrize("raw", SAMPLES, ids=range(len(SAMPLES)))
def test_a_record_is_no_longer_than_its_fields(raw: bytes) -> None:
    refuse_first(overwritten(raw, 0, 2, len(raw) + 8) + bytes(8))


def test_the_number_of_records_must_fill_the_body() -> None:
    refuse(ORDINARY, 0)
    refuse(ORDINARY, 2)
    refuse(ORDINARY + bytes(8), 1)
    refuse(b"", 1)
    refuse(b"", 65535)
    assert checked([]) == []


@pytest.mark.parametrize("raw", SAMPLES, ids=range(len(SAMPLES)))
def test_a_record_that_is_cut_off_is_malformed(raw: bytes) -> None:
    for length in range(len(raw)):
        refuse_first(raw[:length])


def test_the_data_zone_bounds_extents() -> None:
    for raw, end in ((ORDINARY, 39), (SCATTERED, 12)):
        assert len(checked([raw], end)) == 1
        refuse(raw, data_units=end - 1)
    assert len(checked([ZERO_LENGTH], 0)) == 1


@pytest.mark.parametrize("raw", SAMPLES, ids=range(len(SAMPLES)))
def test_no_two_records_mean_the_same(raw: bytes) -> None:
    """Any bit changed is refused, or gives another record."""
    original = decode(raw)
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            ((_, log_sequence, digest, same),) = iterate_records(bytes(changed), 1, DATA_UNITS)
        except RecordMalformed:
            continue
        assert same == changed
        found = decode(same)
        assert found != original
        assert found.log_sequence == log_sequence
        assert getattr(found, "digest", b"") == digest


@given(st.binary(max_size=PAGE_PAYLOAD_BYTES), st.integers(0, 65535), st.integers(0, 1 << 40))
def test_arbitrary_bytes_never_crash(body: bytes, record_count: int, data_units: int) -> None:
    try:
        views = list(iterate_records(body, record_count, data_units))
    except RecordMalformed:
        return
    assert b"".join(view[3] for view in views) == body


@given(st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=8), st.data())
def test_damaged_records_never_crash(records: list[bytes], data: Any) -> None:
    """Valid records with bytes changed here and there, which reach deeper than arbitrary ones."""
    body = bytearray(b"".join(records))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        views = list(iterate_records(bytes(body), len(records), DATA_UNITS))
    except RecordMalformed:
        return
    for operation, _, _, raw in views:
        found = decode(raw)
        if operation == Operation.PUT:
            assert isinstance(found, PutRecord)
            assert found.extents == extents_of(raw)
            assert sum(count for _, count in found.extents) == unit_count(found.payload_bytes)
            assert all(0 <= start < start + count <= DATA_UNITS for start, count in found.extents)
            assert len(found.leaves) == 8 * leaf_count(found.payload_bytes)
