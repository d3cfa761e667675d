"""Pages: believed only when whole and the one asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from format_samples import CHECKPOINT_ID, PREDECESSOR, STORE_ID, flipped, page, put, torn, with_checksum
from hypothesis import given
from hypothesis import strategies as st

from blockkv.errors import InvalidArgument
from blockkv.format.page import (
    PAGE_BYTES,
    PAGE_HEADER,
    PAGE_PAYLOAD_BYTES,
    Page,
    PageFault,
    PageKind,
    PageRejected,
    checksum_of,
    decode_page,
    encode_page,
    fill_pages,
)

JOURNAL, CHECKPOINT = PageKind.JOURNAL, PageKind.CHECKPOINT
kinds = pytest.mark.parametrize("kind", list(PageKind), ids=lambda kind: kind.name.lower())


def decode(data: bytes, kind: PageKind = JOURNAL, **changes: Any) -> Page:
    link = PREDECESSOR if kind == JOURNAL else CHECKPOINT_ID
    asked: dict[str, Any] = {"store_id": STORE_ID, "sequence": 9, "link": link, "epoch": 3}
    return decode_page(data, kind=kind, **{**asked, **changes})


def fault_of(data: bytes, kind: PageKind = JOURNAL, **changes: Any) -> PageFault:
    with pytest.raises(PageRejected) as caught:
        decode(data, kind, **changes)
    return caught.value.fault


@kinds
def test_round_trip(kind: PageKind) -> None:
    records = [*put(5), *put(6, b"another")]
    data = page(kind, records=records)
    assert len(data) == PAGE_BYTES
    found = decode(data, kind)
    assert found.body == b"".join(records)
    assert found.record_count == 2
    assert found.sealed_sequence == (8 if kind == JOURNAL else 0)
    assert found.checksum == checksum_of(data) == data[:16]
    assert decode(memoryview(data), kind) == found
    assert decode(data, kind, link=None, epoch=None) == found


@kinds
def test_every_flipped_bit_is_caught(kind: PageKind) -> None:
    data = page(kind)
    believed = [bit for bit in range(8 * PAGE_BYTES) if not _is_torn(flipped(data, bit), kind)]
    assert believed == []


def _is_torn(data: bytes, kind: PageKind) -> bool:
    try:
        decode(data, kind)
    except PageRejected as rejected:
        return rejected.fault is PageFault.TORN
    return False


@kinds
def test_a_torn_page_is_the_old_one_the_new_one_or_nothing(kind: PageKind) -> None:
    """All 256 ways in which the eight sectors of a write can land, over pages of different fill."""
    few, many = put(5), [record for index in range(30) for record in put(index, b"%d" % index)]
    old_link, old_epoch = bytes(16), 2
    for old_records, new_records in [(few, many), (many, few), (many, many[::-1]), (few, few)]:
        old = page(kind, records=old_records, link=old_link, epoch=old_epoch)
        new = page(kind, records=new_records)
        for landed in range(256):
            data = torn(old, new, landed)
            found = set()
            for link, epoch in ((old_link, old_epoch), (decode(new, kind).link, 3)):
                try:
                    found.add(decode(data, kind, link=link, epoch=epoch).body)
                except PageRejected:
                    continue
            expected = {old: {b"".join(old_records)}, new: {b"".join(new_records)}}
            assert found == expected.get(data, set())


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"store_id": bytes(16)}, PageFault.WRONG_STORE),
        ({"kind": CHECKPOINT}, PageFault.WRONG_KIND),
        ({"sequence": 10}, PageFault.WRONG_SEQUENCE),
        ({"link": bytes(16)}, PageFault.WRONG_PREDECESSOR),
        ({"epoch": 4}, PageFault.WRONG_EPOCH),
    ],
)
def test_another_page_than_the_one_asked_for_is_refused(asked: dict[str, Any], fault: PageFault) -> None:
    assert fault_of(page(JOURNAL), **asked) is fault


def test_a_page_of_another_checkpoint_is_refused() -> None:
    assert fault_of(page(CHECKPOINT), CHECKPOINT, link=bytes(16)) is PageFault.WRONG_CHECKPOINT


@pytest.mark.parametrize("length", [0, 1, PAGE_BYTES - 1, PAGE_BYTES + 1])
def test_data_of_another_length_is_torn(length: int) -> None:
    assert fault_of(bytes(length)) is PageFault.TORN


def test_a_blank_page_is_torn() -> None:
    assert fault_of(bytes(PAGE_BYTES)) is PageFault.TORN


@pytest.mark.parametrize(
    ("field", "value"),
    [("body_bytes", PAGE_PAYLOAD_BYTES + 1), ("body_bytes", 0), ("sealed_sequence", 10), ("reserved", 1)],
)
def test_a_forged_header_is_malformed(field: str, value: int) -> None:
    data = bytearray(page(JOURNAL))
    offset = PAGE_HEADER.offsets[field]
    data[offset : offset + 2] = value.to_bytes(2, "little")
    assert fault_of(with_checksum(data)) is PageFault.MALFORMED


@pytest.mark.parametrize("offset", [PAGE_BYTES - 1, PAGE_BYTES - 3000])
def test_forged_padding_is_malformed(offset: int) -> None:
    data = bytearray(page(JOURNAL))
    data[offset] = 1
    assert fault_of(with_checksum(data)) is PageFault.MALFORMED


@kinds
def test_no_two_pages_mean_the_same(kind: PageKind) -> None:
    """Any bit changed under a right checksum is refused, or is a different page that encodes to itself."""
    data = page(kind)
    for bit in range(128, 8 * PAGE_BYTES, 7):
        forged = with_checksum(flipped(data, bit))
        try:
            found = decode(forged, kind, link=None, epoch=None)
        except PageRejected:
            continue
        again = encode_page(
            kind, STORE_ID, found.sequence, found.epoch, found.link, found.sealed_sequence, [found.body]
        )
        count_at = PAGE_HEADER.offsets["record_count"]
        assert again[16:count_at] == forged[16:count_at]
        assert again[count_at + 2 :] == forged[count_at + 2 :]


def test_a_full_page_and_an_empty_one() -> None:
    full = page(JOURNAL, records=[bytes([7]) * 2008, bytes([8]) * 2008])
    assert len(decode(full).body) == PAGE_PAYLOAD_BYTES
    assert decode(page(JOURNAL, records=[])).body == b""
    with pytest.raises(InvalidArgument, match="4017 bytes exceed 4016"):
        page(JOURNAL, records=[bytes(4017)])


@pytest.mark.parametrize(
    "changes",
    [
        {"store_id": bytes(15)},
        {"link": bytes(17)},
        {"sequence": -1},
        {"sealed_sequence": 10},
        {"epoch": 1 << 62},
    ],
)
def test_fields_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        page(JOURNAL, **changes)


@given(st.lists(st.integers(1, 502), max_size=60))
def test_pages_are_filled_in_order_and_at_least_half(sizes: list[int]) -> None:
    records = [bytes([index % 256]) * (8 * size) for index, size in enumerate(sizes)]
    groups = list(fill_pages(records))
    assert [record for group in groups for record in group] == records
    filled = [sum(map(len, group)) for group in groups]
    assert all(0 < used <= PAGE_PAYLOAD_BYTES for used in filled)
    assert all(first + second > PAGE_PAYLOAD_BYTES for first, second in itertools.pairwise(filled))


def test_a_record_larger_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="4024 bytes exceeds 4016"):
        list(fill_pages([bytes(8), bytes(4024)]))


@given(st.binary(max_size=PAGE_BYTES))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    fault_of(data)
    fault_of(data.ljust(PAGE_BYTES, b"\0"))
