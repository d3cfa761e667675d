"""Checkpoints: a bad page costs its records, and nothing else."""

from __future__ import annotations

import pytest
from format_samples import CHECKPOINT_ID, GEOMETRY, STORE_ID, flipped, put, superblock

from blockkv.errors import InvalidArgument
from blockkv.format.checkpoint import CheckpointReader, pack
from blockkv.format.geometry import PAGE_BYTES
from blockkv.format.page import PageKind, encode_page
from blockkv.format.record import encode_layout, iterate_records
from blockkv.format.superblock import Superblock

RECORDS = [encode_layout(1, 1, b"{}")] + [
    record for number in range(2, 202) for record in put(number, b"chunk-%d" % number)
]
PAGES = list(pack(RECORDS, STORE_ID, CHECKPOINT_ID, 3))


def current(**changes: object) -> Superblock:
    return superblock(
        **{"checkpoint_page_count": len(PAGES), "checkpoint_record_count": len(RECORDS), **changes}
    )


def read(pages: list[bytes], one: Superblock | None = None) -> tuple[list[int], CheckpointReader]:
    reader = CheckpointReader([b"".join(pages)], one or current())
    return [view[1] for view in reader], reader


def test_round_trip() -> None:
    assert 5 < len(PAGES) < 10
    found, reader = read(PAGES)
    assert found == list(range(1, 202))
    assert (reader.record_count, reader.damaged_pages, reader.lost_records) == (len(RECORDS), 0, 0)
    assert [view[3] for view in CheckpointReader(PAGES, current())] == RECORDS


@pytest.mark.parametrize("piece_pages", [1, 2, 3, 100])
def test_the_area_may_come_in_pieces(piece_pages: int) -> None:
    pieces = [b"".join(PAGES[first : first + piece_pages]) for first in range(0, len(PAGES), piece_pages)]
    reader = CheckpointReader(map(memoryview, pieces), current())
    assert len(list(reader)) == len(RECORDS)
    assert reader.damaged_pages == 0


def test_an_empty_checkpoint() -> None:
    assert list(pack([], STORE_ID, CHECKPOINT_ID, 3)) == []
    found, reader = read([], current(checkpoint_page_count=0, checkpoint_record_count=0))
    assert (found, reader.damaged_pages, reader.lost_records) == ([], 0, 0)


def test_what_follows_the_checkpoint_in_its_area_is_not_read() -> None:
    found, reader = read([*PAGES, *PAGES])
    assert len(found) == len(RECORDS)
    assert reader.damaged_pages == 0


def records_of(page: bytes) -> list[int]:
    count, body_bytes = int.from_bytes(page[74:76], "little"), int.from_bytes(page[76:78], "little")
    return [view[1] for view in iterate_records(page[80 : 80 + body_bytes], count, GEOMETRY.data_units)]


def stale(sequence: int) -> bytes:
    return list(pack(RECORDS, STORE_ID, bytes(16), 3))[sequence]


@pytest.mark.parametrize("victim", range(len(PAGES)))
@pytest.mark.parametrize("damage", ["rot", "blank", "stale", "misdirected", "journal", "malformed"])
def test_a_bad_page_costs_its_records(victim: int, damage: str) -> None:
    other = PAGES[(victim + 1) % len(PAGES)]
    malformed = encode_page(PageKind.CHECKPOINT, STORE_ID, victim, 3, CHECKPOINT_ID, 0, [*put(1), b"\1" * 64])
    replacement = {
        "rot": flipped(PAGES[victim], 9999),
        "blank": bytes(PAGE_BYTES),
        "stale": stale(victim),
        "misdirected": other,
        "journal": encode_page(PageKind.JOURNAL, STORE_ID, victim, 3, CHECKPOINT_ID, 0, []),
        "malformed": malformed,
    }[damage]
    found, reader = read([*PAGES[:victim], replacement, *PAGES[victim + 1 :]])
    lost = records_of(PAGES[victim])
    assert found == [number for number in range(1, 202) if number not in lost]
    assert (reader.damaged_pages, reader.lost_records) == (1, len(lost))


def test_missing_pages_are_damaged_pages() -> None:
    found, reader = read(PAGES[:3])
    assert reader.damaged_pages == len(PAGES) - 3
    assert reader.lost_records == len(RECORDS) - len(found) > 0
    found, reader = read([*PAGES[:2], PAGES[2][:-1]])
    assert reader.damaged_pages == len(PAGES) - 2


def test_a_superblock_of_another_checkpoint_or_store_finds_nothing() -> None:
    for changes in ({"checkpoint_id": bytes(16)}, {"uuid": bytes(16)}):
        found, reader = read(PAGES, current(**changes))
        assert found == []
        assert (reader.damaged_pages, reader.lost_records) == (len(PAGES), len(RECORDS))


def test_a_record_larger_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        list(pack([bytes(PAGE_BYTES)], STORE_ID, CHECKPOINT_ID, 3))
