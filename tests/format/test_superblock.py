"""Superblock slots: what is believed, what is refused and why, and which of eight is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
from format_samples import GEOMETRY, flipped, superblock, torn, with_checksum
from hypothesis import given
from hypothesis import strategies as st

from blockkv.errors import InvalidArgument, NotFormatted, VersionTooNew
from blockkv.format.geometry import MEBIBYTE, PAGE_BYTES
from blockkv.format.key_slots import KeySlot, KeySlotKind
from blockkv.format.superblock import (
    RESERVED_BYTES,
    SUPERBLOCK,
    Encryption,
    Membership,
    Superblock,
    SuperblockFault,
    SuperblockRejected,
    choose,
    decode,
    examine,
    slots_of,
)

SLOT = 2  # generation 6
FAULT = SuperblockFault


def fault_of(data: bytes, slot_index: int = SLOT) -> SuperblockFault:
    with pytest.raises(SuperblockRejected) as caught:
        decode(data, slot_index)
    return caught.value.fault


MEMBER = Membership(bytes(range(30, 46)), member_count=3, member_index=2, term=7, term_members=0b101)


OPENED_BY = KeySlot(KeySlotKind.PASSPHRASE, b"s" * 32, b"n" * 12, b"w" * 48, 65536, 3, 4)
ENCRYPTION = Encryption((None, OPENED_BY, *[None] * 6), ephemeral=False, mac_key=b"k" * 32)


def forged_encrypted(**values: int | bytes) -> bytes:
    """`forged` for an encrypted store."""
    return forged(superblock(encryption=ENCRYPTION), **values)


def forged_member(**values: int | bytes) -> bytes:
    """`forged` for a member of an array."""
    return forged(superblock(array=MEMBER), **values)


def forged(one: Superblock | None = None, /, **values: int | bytes) -> bytes:
    """A slot with some fields overwritten and a right checksum."""
    data = bytearray((one or superblock()).encode(SLOT))
    for name, value in values.items():
        field = next(field for field in SUPERBLOCK.fields if field.name == name)
        raw = value.to_bytes(field.size_bytes, "little") if isinstance(value, int) else value
        start = SUPERBLOCK.offsets[name]
        data[start : start + len(raw)] = raw
    return with_checksum(data)


def slots(*superblocks: Superblock) -> list[bytes]:
    """The device's eight slots after these were written one after the other."""
    written = [bytes(PAGE_BYTES)] * 8
    for one in superblocks:
        for slot_index in slots_of(one.generation):
            written[slot_index] = one.encode(slot_index)
    return written


def test_round_trip() -> None:
    for slot_index in slots_of(6):
        data = superblock().encode(slot_index)
        assert len(data) == PAGE_BYTES
        assert decode(data, slot_index) == superblock()


@given(
    st.builds(
        superblock,
        generation=st.integers(0, (1 << 62) - 1),
        epoch=st.integers(0, (1 << 62) - 1),
        checkpoint_area=st.integers(0, 1),
        clean=st.booleans(),
        label=st.text("abc é漢", max_size=16),
        holder_pid=st.integers(0, (1 << 32) - 1),
        compat=st.sampled_from([0, 1, 1 << 63]),
    )
)
def test_round_trip_of_any_values(one: Superblock) -> None:
    slot_index = one.generation % 4
    assert decode(one.encode(slot_index), slot_index) == one


def test_a_member_of_an_array_comes_back() -> None:
    one = superblock(array=MEMBER)
    found = decode(one.encode(SLOT), SLOT)
    assert found == one
    assert found.array == MEMBER
    assert int.from_bytes(one.encode(SLOT)[56:64], "little") == 2  # an older version refuses it


def test_how_it_is_encrypted_comes_back() -> None:
    one = superblock(encryption=ENCRYPTION)
    found = decode(one.encode(SLOT), SLOT)
    assert found == one
    assert found.encryption is not None
    assert found.encryption.mac_key == b""
    assert found.unlocked(b"another key" * 3) is None
    unlocked = found.unlocked(b"k" * 32)
    assert unlocked is not None
    assert [unlocked.encode(slot) for slot in slots_of(6)] == [one.encode(slot) for slot in slots_of(6)]
    assert int.from_bytes(one.encode(SLOT)[56:64], "little") == 1  # an older version refuses it


def test_the_code_covers_the_header() -> None:
    """Any byte of it, but for the slot and the checksum, which are not the same in both copies."""
    data = superblock(encryption=ENCRYPTION).encode(SLOT)
    for offset in range(32, PAGE_BYTES):
        try:
            found = decode(with_checksum(flipped(data, 8 * offset)), SLOT)
        except SuperblockRejected:
            continue
        assert found.unlocked(b"k" * 32) is None, offset


def test_everything_that_changes_lies_in_the_first_sector() -> None:
    """A drive that writes 512 bytes whole cannot tear a slot into a mixture of two generations."""
    assert SUPERBLOCK.offsets["key_slots"] == 512
    assert not any(superblock().encode(SLOT)[512:])
    later = dataclasses.replace(MEMBER, term=8, term_members=0b111)
    assert superblock(array=MEMBER).encode(SLOT)[512:] == superblock(array=later).encode(SLOT)[512:]
    first, second = (superblock(encryption=ENCRYPTION, label=label).encode(SLOT) for label in "ab")
    assert first[512:1472] + first[1504:] == second[512:1472] + second[1504:]  # all but the code


def test_every_flipped_bit_is_caught() -> None:
    for generation in (6, 7):
        slot_index = generation % 4
        data = superblock(generation=generation).encode(slot_index)
        for bit in range(8 * PAGE_BYTES):
            try:
                decode(flipped(data, bit), slot_index)
            except SuperblockRejected:
                continue
            pytest.fail(f"bit {bit} flipped unnoticed")


def test_no_two_slots_mean_the_same() -> None:
    """Any bit changed under a right checksum is refused, or is another superblock that encodes to itself."""
    data = superblock().encode(SLOT)
    believed = 0
    for bit in [*range(128, 8 * 512), *range(8 * 512, 8 * PAGE_BYTES, 13)]:
        changed = with_checksum(flipped(data, bit))
        try:
            found = decode(changed, SLOT)
        except SuperblockRejected:
            continue
        assert found != superblock()
        assert found.encode(SLOT) == changed
        believed += 1
    assert believed > 500


def test_a_torn_slot_is_the_old_one_the_new_one_or_nothing() -> None:
    olds = [bytes(PAGE_BYTES), b"\xff" * PAGE_BYTES]
    olds += [one.encode(SLOT) for one in (superblock(generation=2), superblock(label="x"))]
    olds += [superblock(generation=2, compat=1, reserved=b"\1" * RESERVED_BYTES).encode(SLOT)]
    new = superblock(compat=1, reserved=b"\2" * RESERVED_BYTES).encode(SLOT)
    for old in olds:
        for landed in range(256):
            data = torn(old, new, landed)
            try:
                decode(data, SLOT)
            except SuperblockRejected:
                continue
            assert data in (old, new)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", FAULT.UNREADABLE),
        (bytes(PAGE_BYTES - 1), FAULT.UNREADABLE),
        (bytes(PAGE_BYTES), FAULT.BLANK),
        (b"\xeb\x3c\x90MSDOS5.0".ljust(PAGE_BYTES, b"\0"), FAULT.NOT_OURS),
        (flipped(superblock().encode(SLOT), 30_000), FAULT.TORN),
        (superblock().encode(SLOT + 4), FAULT.WRONG_SLOT),
        (forged(slot_index=SLOT, generation=7), FAULT.WRONG_SLOT),
        (forged(version=2), FAULT.VERSION),
        (forged(version=0), FAULT.VERSION),
        (forged(incompat=1 << 63), FAULT.INCOMPAT),
        (forged(page_bytes=512), FAULT.SIZES),
        (forged(run_bytes=4096), FAULT.SIZES),
        (forged(device_bytes=0), FAULT.GEOMETRY),
        (forged(lba_bytes=3), FAULT.GEOMETRY),
        (forged(checkpoint_a_offset_bytes=0), FAULT.GEOMETRY),
        (forged(checkpoint_b_size_bytes=2 * MEBIBYTE), FAULT.GEOMETRY),
        (forged(journal_size_bytes=4096), FAULT.GEOMETRY),
        (forged(data_offset_bytes=(1 << 64) - MEBIBYTE), FAULT.GEOMETRY),
        (forged(data_size_bytes=(1 << 64) - 1), FAULT.GEOMETRY),
        (forged(checkpoint_area=2), FAULT.CHECKPOINT),
        (forged(checkpoint_page_count=GEOMETRY.checkpoint_pages + 1), FAULT.CHECKPOINT),
        (forged(checkpoint_record_count=1 << 40), FAULT.CHECKPOINT),
        (forged(epoch=1 << 62), FAULT.COUNTERS),
        (forged(log_sequence=(1 << 64) - 1), FAULT.COUNTERS),
        (forged(replay_from_sequence=1 << 62), FAULT.COUNTERS),
        (forged(scrub_sequence=1 << 62), FAULT.COUNTERS),
        (forged(replay_from_sequence=0), FAULT.ANCHORS),
        (forged(epoch_start_sequence=9 + GEOMETRY.journal_pages + 1), FAULT.ANCHORS),
        (forged(clean=2), FAULT.FLAGS),
        (forged(label=b"\xff"), FAULT.TEXT),
        (forged(holder_host=b"\x1b]0;owned\x07"), FAULT.TEXT),
        (forged(array_term=1), FAULT.RESERVED),
        (forged(array_term_members=1), FAULT.RESERVED),
        (forged(array_uuid=b"\1"), FAULT.RESERVED),
        (forged(array_member_count=2), FAULT.RESERVED),
        (forged(array_member_index=1), FAULT.RESERVED),
        (forged(incompat=2), FAULT.ARRAY),
        (forged_member(array_member_count=1), FAULT.ARRAY),
        (forged_member(array_member_count=33), FAULT.ARRAY),
        (forged_member(array_member_index=3), FAULT.ARRAY),
        (forged_member(array_term=0), FAULT.ARRAY),
        (forged_member(array_term=1 << 31), FAULT.ARRAY),
        (forged_member(array_term_members=0), FAULT.ARRAY),
        (forged_member(array_term_members=8), FAULT.ARRAY),
        (forged_member(array_uuid=bytes(16)), FAULT.ARRAY),
        (forged_member(incompat=0), FAULT.RESERVED),
        (forged(key_slots=b"\1"), FAULT.RESERVED),
        (forged(header_mac=b"\1"), FAULT.RESERVED),
        (forged(cipher=1), FAULT.RESERVED),
        (forged(ephemeral=1), FAULT.RESERVED),
        (forged(encryption_reserved=b"\1"), FAULT.RESERVED),
        (forged(incompat=1), FAULT.ENCRYPTION),
        (forged_encrypted(incompat=0), FAULT.RESERVED),
        (forged_encrypted(encryption_reserved=b"\1"), FAULT.RESERVED),
        (forged_encrypted(cipher=0), FAULT.ENCRYPTION),
        (forged_encrypted(cipher=2), FAULT.ENCRYPTION),
        (forged_encrypted(ephemeral=1), FAULT.ENCRYPTION),
        (forged_encrypted(ephemeral=2), FAULT.ENCRYPTION),
        (forged_encrypted(key_slots=b"\1"), FAULT.ENCRYPTION),
        (forged_encrypted(key_slots=bytes(960)), FAULT.ENCRYPTION),
        (forged(reserved=b"\1"), FAULT.RESERVED),
    ],
)
def test_every_rejection_has_its_reason(data: bytes, fault: SuperblockFault) -> None:
    assert fault_of(data) is fault


def test_there_is_a_case_above_for_every_reason() -> None:
    marker = test_every_rejection_has_its_reason.pytestmark[0]  # type: ignore[attr-defined]
    assert {fault for _, fault in marker.args[1]} == set(SuperblockFault)


@given(st.binary(max_size=PAGE_BYTES))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    fault_of(data)
    fault_of(with_checksum(data.ljust(PAGE_BYTES, b"\0")))


@given(st.data())
def test_hostile_values_never_crash(data: Any) -> None:
    """Every integer field at its extremes, in any combination, under a right checksum."""
    integers = [field for field in SUPERBLOCK.fields if field.kind.startswith("u")]
    values = {
        field.name: data.draw(
            st.sampled_from([0, 1, 4096, MEBIBYTE, 1 << 31, (1 << 62) - 1, (1 << 64) - 1]), label=field.name
        )
        % (1 << 8 * field.size_bytes)
        for field in data.draw(st.lists(st.sampled_from(integers), unique=True), label="fields")
    }
    data = forged(**values)
    try:
        found = decode(data, SLOT)
    except SuperblockRejected:
        return
    if found.encryption is None:
        assert found.encode(SLOT) == data


@pytest.mark.parametrize(
    "changes",
    [
        {"label": "x" * 65},
        {"label": "é" * 33},
        {"label": "two\nlines"},
        {"uuid": bytes(15)},
        {"epoch": -1},
        {"holder_pid": 1 << 32},
        {"checkpoint_id": b""},
    ],
)
def test_fields_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        superblock(**changes).encode(SLOT)


def test_a_slot_of_another_generation_is_refused() -> None:
    for slot_index in (0, 1, 3, 4, 5, 7, 8, -1):
        with pytest.raises(InvalidArgument):
            superblock().encode(slot_index)


def test_text_for_messages_is_made_to_fit() -> None:
    one = superblock(holder_host="ho\nst" + "é" * 64, namespace_serial="\x07")
    found = decode(one.encode(SLOT), SLOT)
    assert found.holder_host == "ho?st" + "é" * 29
    assert found.namespace_serial == "?"


def test_the_newest_valid_slot_is_chosen() -> None:
    generations = [superblock(generation=generation) for generation in range(1, 8)]
    written = slots(*generations)
    assert choose(written).generation == 7
    for slot_index in slots_of(7):
        written[slot_index] = flipped(written[slot_index], 5000)
    assert choose(written).generation == 6
    written[2] = b""
    assert choose(written) == superblock(generation=6)
    found = examine(written)
    assert [slot.fault for slot in found if isinstance(slot, SuperblockRejected)] == [
        FAULT.UNREADABLE,
        FAULT.TORN,
        FAULT.TORN,
    ]


def test_a_generation_written_to_the_head_only_is_chosen() -> None:
    written = slots(superblock(generation=6))
    written[3] = superblock(generation=7).encode(3)
    assert choose(written).generation == 7


def test_the_head_wins_over_a_tail_of_the_same_generation() -> None:
    written = slots(superblock())
    written[SLOT + 4] = superblock(label="another").encode(SLOT + 4)
    assert choose(written) == superblock()


@pytest.mark.parametrize("slot_index", range(8))
def test_any_one_slot_is_enough(slot_index: int) -> None:
    generation = 4 + slot_index % 4
    only = [b""] * 8
    only[slot_index] = superblock(generation=generation).encode(slot_index)
    assert choose(only).generation == generation


@pytest.mark.parametrize("changes", [{}, {"version": 2}, {"incompat": 4}])
def test_the_head_says_which_store_it_is(changes: dict[str, int]) -> None:
    """At the end of a larger device lies the tail of another store."""
    written = slots(*(superblock(generation=generation) for generation in range(1, 7)))
    stranger = superblock(generation=102, uuid=b"another store 16")
    written[4 + 102 % 4] = forged(stranger, slot_index=4 + 102 % 4, **changes)
    assert choose(written) == superblock(generation=6)
    with pytest.raises(VersionTooNew) if changes else contextlib.nullcontext():
        assert choose([bytes(PAGE_BYTES)] * 4 + written[4:]).generation == 102, "without a head it counts"


def test_no_tail_is_ahead_of_its_head_by_more_than_a_head_can_lose() -> None:
    """A newer tail of the same store, behind an older image that was put back, is not believed."""
    written = slots(*(superblock(generation=generation) for generation in range(1, 7)))
    later = superblock(generation=10)
    written[4 + 10 % 4] = later.encode(4 + 10 % 4)
    assert choose(written) == superblock(generation=6)
    damaged = slots(*(superblock(generation=generation) for generation in range(1, 10)))
    for slot_index in (7 % 4, 8 % 4, 9 % 4):
        damaged[slot_index] = bytes(PAGE_BYTES)
    assert choose(damaged).generation == 9, "with three of four slots gone the tail still tells"


def test_no_valid_slot_is_not_formatted_and_says_why() -> None:
    with pytest.raises(NotFormatted, match="all eight slots are blank"):
        choose([bytes(PAGE_BYTES)] * 8)
    written = [b"", b"\xff" * PAGE_BYTES, forged(lba_bytes=3), *[bytes(PAGE_BYTES)] * 5]
    with pytest.raises(NotFormatted) as caught:
        choose(written)
    for part in ("slot 0 could not be read", "slot 1 holds something else", "slot 2 has impossible zones"):
        assert part in str(caught.value)


@pytest.mark.parametrize("changes", [{"version": 2}, {"incompat": 4}])
def test_a_later_version_is_refused_only_where_it_is_the_newest(changes: dict[str, int]) -> None:
    newer = forged(generation=8, slot_index=0, **changes)
    with pytest.raises(VersionTooNew, match=r"generation 8 .*upgrade blockkv"):
        choose([newer, *slots(superblock())[1:]])
    with pytest.raises(VersionTooNew):
        choose([newer, *[b""] * 7])
    older = forged(generation=4, slot_index=0, **changes)
    assert choose([older, *slots(superblock())[1:]]) == superblock()


def test_a_later_version_is_recognised_by_the_frozen_part_alone() -> None:
    """Whatever a later version puts after the first 80 bytes, it is told from a device without a store."""
    data = forged(version=7)[:80] + b"\xa5" * (PAGE_BYTES - 80)
    assert fault_of(with_checksum(data)) is FAULT.VERSION


def test_unknown_features() -> None:
    feature = superblock(ro_compat=2, reserved=b"\7" * RESERVED_BYTES)
    found = choose(slots(feature))
    assert found.read_only_reason is not None
    assert "ro_compat 0x2" in found.read_only_reason
    assert superblock().read_only_reason is None
    ignored = superblock(compat=1, reserved=b"\7" * RESERVED_BYTES)
    found = choose(slots(ignored))
    assert found.read_only_reason is None
    carried = dataclasses.replace(found, generation=7)
    assert choose(slots(carried)).reserved == b"\7" * RESERVED_BYTES
    assert choose(slots(carried)).compat == 1


def test_the_number_of_slots_is_checked() -> None:
    with pytest.raises(InvalidArgument):
        choose([b""] * 7)


def test_current_zone_and_printed_identity() -> None:
    assert superblock().checkpoint_zone == GEOMETRY.checkpoint_b
    assert superblock(checkpoint_area=0).checkpoint_zone == GEOMETRY.checkpoint_a
    assert superblock().uuid_text == "00010203-0405-0607-0809-0a0b0c0d0e0f"
