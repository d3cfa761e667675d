"""Zones: where they are placed, and which ones are refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockkv.errors import DeviceTooSmall, FormatError, InvalidArgument
from blockkv.format.geometry import (
    MAX_EXTENT_UNITS,
    MAX_LEAVES,
    MEBIBYTE,
    PAGE_BYTES,
    RUN_BYTES,
    Geometry,
    Zone,
    growable_bytes,
    grown,
    leaf_bytes_for,
    leaf_count,
    pack_extent,
    plan,
    slot_offsets,
    unit_count,
    unpack_extent,
    validate,
)
from blockkv.format.page import PAGE_PAYLOAD_BYTES

GIB = 1 << 30


@given(
    st.integers(7 * MEBIBYTE, 64 << 40),
    st.sampled_from([512, 4096]),
    st.sampled_from([4096, 65536, 1 << 20, 32 << 20]),
    st.sampled_from([None, 6 * PAGE_BYTES, 3 * MEBIBYTE + PAGE_BYTES]),
)
def test_every_plan_is_valid_or_says_what_would_be(
    device_bytes: int, lba_bytes: int, average_chunk_bytes: int, journal_bytes: int | None
) -> None:
    try:
        geometry = plan(device_bytes, lba_bytes, average_chunk_bytes, journal_bytes)
    except DeviceTooSmall as error:
        needed = int(str(error).split()[-2])
        assert needed > device_bytes
        plan(needed, lba_bytes, average_chunk_bytes, journal_bytes)
        return
    validate(geometry)
    zones = [geometry.checkpoint_a, geometry.checkpoint_b, geometry.journal, geometry.data]
    assert zones[0].offset_bytes == MEBIBYTE
    assert all(zone.offset_bytes % MEBIBYTE == 0 for zone in zones)
    for zone, following in itertools.pairwise(zones):
        assert 0 <= following.offset_bytes - zone.end_bytes < MEBIBYTE
    assert geometry.data.end_bytes == geometry.slot_offsets[4]
    assert geometry.slot_offsets[7] + PAGE_BYTES <= device_bytes
    # The checkpoint holds as many records of average chunks as the data zone holds average chunks, also when
    # no two of them share a page (and not twice as much, except for rounding).
    chunks = geometry.data.size_bytes // average_chunk_bytes
    record_bytes = 144 + 8 * leaf_count(average_chunk_bytes)
    assert geometry.checkpoint_pages * PAGE_BYTES >= 2 * chunks * record_bytes
    assert geometry.checkpoint_a.size_bytes <= 2.2 * chunks * record_bytes + 2 * MEBIBYTE


def test_the_journal_is_scaled_to_the_device() -> None:
    assert plan(7 * MEBIBYTE, 512, 1 << 20).journal.size_bytes == MEBIBYTE
    assert plan(100 * MEBIBYTE, 512, 1 << 20).journal.size_bytes == 6 * MEBIBYTE
    assert plan(GIB, 512, 1 << 20).journal.size_bytes == 64 * MEBIBYTE
    assert plan(1 << 44, 4096, 1 << 20).journal.size_bytes == 64 * MEBIBYTE
    assert plan(8 * MEBIBYTE, 512, 1 << 20, 6 * PAGE_BYTES).journal_pages == 6


def test_slots_are_a_quarter_mebibyte_apart_at_both_ends() -> None:
    quarter = 256 * 1024
    tail = 9 * MEBIBYTE
    expected = (
        0,
        quarter,
        2 * quarter,
        3 * quarter,
        tail,
        tail + quarter,
        tail + 2 * quarter,
        tail + 3 * quarter,
    )
    assert slot_offsets(10 * MEBIBYTE) == expected
    assert slot_offsets(11 * MEBIBYTE - 512) == expected


def test_too_small_a_device_is_refused_with_numbers() -> None:
    with pytest.raises(DeviceTooSmall, match=f"device of {6 * MEBIBYTE} bytes .* needs {7 * MEBIBYTE} bytes"):
        plan(6 * MEBIBYTE, 512, 1 << 20)


@pytest.mark.parametrize(
    "arguments",
    [
        (GIB, 513, 1 << 20),
        (GIB, 8192, 1 << 20),
        (GIB, 512, 4095),
        (GIB, 512, 1 << 20, 5 * PAGE_BYTES),
        (GIB, 512, 4096, 99999),
    ],
)
def test_impossible_parameters_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        plan(*arguments)


VALID = plan(64 * MEBIBYTE, 512, 1 << 20)


@pytest.mark.parametrize(
    "changes",
    [
        {"lba_bytes": 0},
        {"lba_bytes": 520},
        {"device_bytes": 0},
        {"device_bytes": VALID.device_bytes - MEBIBYTE},
        {"checkpoint_a": Zone(0, MEBIBYTE)},
        {"checkpoint_a": Zone(MEBIBYTE, 0)},
        {"checkpoint_a": Zone(MEBIBYTE, MEBIBYTE + 512)},
        {"checkpoint_b": Zone(2 * MEBIBYTE, 2 * MEBIBYTE)},
        {"checkpoint_b": VALID.checkpoint_a},
        {"journal": Zone(VALID.journal.offset_bytes, 5 * PAGE_BYTES)},
        {"journal": Zone(VALID.journal.offset_bytes + PAGE_BYTES, 6 * PAGE_BYTES)},
        {"journal": VALID.data},
        {"data": Zone(VALID.data.offset_bytes, VALID.data.size_bytes + RUN_BYTES)},
        {"data": Zone(VALID.data.offset_bytes, VALID.data.size_bytes - PAGE_BYTES)},
        {"data": Zone(VALID.data.offset_bytes, (1 << 64) - 1)},
        {"data": Zone((1 << 64) - MEBIBYTE, MEBIBYTE)},
    ],
)
def test_hostile_zones_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        validate(dataclasses.replace(VALID, **changes))


def test_a_data_zone_that_extents_cannot_address_is_refused() -> None:
    device_bytes = 1 << 54
    data = Zone(64 * MEBIBYTE, (1 << 52) + RUN_BYTES)
    with pytest.raises(FormatError, match="larger than"):
        validate(Geometry(device_bytes, 512, VALID.checkpoint_a, VALID.checkpoint_b, VALID.journal, data))


@given(st.integers(0, (1 << 40) - 1), st.integers(1, MAX_EXTENT_UNITS))
def test_extents_survive_packing(start_unit: int, count_units: int) -> None:
    word = pack_extent(start_unit, count_units)
    assert 0 <= word < 1 << 64
    assert unpack_extent(word) == (start_unit, count_units)


@pytest.mark.parametrize("extent", [(-1, 1), (1 << 40, 1), (0, 0), (0, 1 << 24)])
def test_extents_that_do_not_fit_are_refused(extent: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument):
        pack_extent(*extent)


@pytest.mark.parametrize(
    ("payload_bytes", "leaf_bytes", "leaves"),
    [
        (0, 128 << 10, 0),
        (1, 128 << 10, 1),
        (128 << 10, 128 << 10, 1),
        ((128 << 10) + 1, 128 << 10, 2),
        (32 << 20, 128 << 10, 256),
        ((32 << 20) + 1, 256 << 10, 129),
        (64 << 20, 256 << 10, 256),
        ((64 << 20) + 1, 512 << 10, 129),
        (1 << 40, 4 << 30, 256),
    ],
)
def test_leaves(payload_bytes: int, leaf_bytes: int, leaves: int) -> None:
    assert leaf_bytes_for(payload_bytes) == leaf_bytes
    assert leaf_count(payload_bytes) == leaves


@given(st.integers(1, 1 << 50))
def test_leaves_are_the_fewest_doublings_that_suffice(payload_bytes: int) -> None:
    leaf_bytes = leaf_bytes_for(payload_bytes)
    assert leaf_bytes * MAX_LEAVES >= payload_bytes
    assert leaf_bytes == 128 << 10 or leaf_bytes // 2 * MAX_LEAVES < payload_bytes
    assert unit_count(payload_bytes) * PAGE_BYTES - payload_bytes in range(PAGE_BYTES)


def test_the_largest_record_leaves_room_for_a_key() -> None:
    assert PAGE_PAYLOAD_BYTES == 4016


# -- growing -----------------------------------------------------------------------------------------------


@given(
    st.integers(7 * MEBIBYTE, 8 << 40),
    st.lists(st.integers(1, 4 << 40), min_size=1, max_size=3),
    st.sampled_from([4096, 65536, 1 << 20, 32 << 20]),
)
def test_what_grows_leaves_everything_of_old_alone(
    device_bytes: int, steps: list[int], average_chunk_bytes: int
) -> None:
    try:
        before = plan(device_bytes, 512, average_chunk_bytes)
    except DeviceTooSmall:
        return
    for step in steps:
        device_bytes = before.device_bytes + step
        try:
            after = grown(before, device_bytes, average_chunk_bytes)
        except DeviceTooSmall as error:
            needed = int(str(error).split()[-2])
            assert needed > device_bytes
            with pytest.raises(DeviceTooSmall):
                grown(before, needed - MEBIBYTE, average_chunk_bytes)
            device_bytes = needed
            after = grown(before, device_bytes, average_chunk_bytes)
        assert growable_bytes(before, device_bytes, average_chunk_bytes) == (
            after.data.size_bytes - before.data.size_bytes if after else 0
        )
        if after is None:
            assert device_bytes // MEBIBYTE == before.device_bytes // MEBIBYTE
            continue
        validate(after)
        assert after.device_bytes == device_bytes
        assert (after.journal, after.data.offset_bytes) == (before.journal, before.data.offset_bytes)
        assert after.data.size_bytes > before.data.size_bytes
        old_end = before.slot_offsets[4] + MEBIBYTE
        assert after.slot_offsets[4] >= old_end
        if after.checkpoints != before.checkpoints:
            assert min(area.offset_bytes for area in after.checkpoints) >= old_end
        assert after.checkpoint_pages >= before.checkpoint_pages
        chunks = after.data.size_bytes // average_chunk_bytes
        assert after.checkpoint_pages * PAGE_BYTES >= 2 * chunks * (144 + 8 * leaf_count(average_chunk_bytes))
        before = after


def test_areas_that_are_large_enough_stay_where_they_are() -> None:
    before = plan(64 * MEBIBYTE, 512, 1 << 20)
    after = grown(before, 2 * GIB, 1 << 20)
    assert after is not None
    assert after.checkpoints == before.checkpoints
    assert after.data.end_bytes == 2 * GIB - MEBIBYTE


def test_what_cannot_grow_says_why() -> None:
    journal_last = dataclasses.replace(VALID, journal=VALID.data, data=VALID.journal)
    with pytest.raises(FormatError, match="journal lies behind"):
        grown(journal_last, 2 * VALID.device_bytes, 1 << 20)
    before = plan(GIB, 512, 4096)
    with pytest.raises(DeviceTooSmall, match=f"too few to grow to from {GIB}"):
        grown(before, GIB + 4 * MEBIBYTE, 4096)
    assert growable_bytes(before, GIB + 4 * MEBIBYTE, 4096) == 0
    assert grown(before, GIB + MEBIBYTE - 512, 4096) is None
    assert grown(before, GIB - MEBIBYTE, 4096) is None
    assert grown(plan(GIB, 512, 1 << 20), 2 * GIB, 0) is not None, "an average that nobody made is no crash"
