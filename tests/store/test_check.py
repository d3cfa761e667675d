"""`Store.check`: everything that is wrong is found; a repair drops what cannot be verified, and only that."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from damage import JOURNALED, KEYS, exact, open_copy, payload, sample, slots_of

import blockkv
from blockkv.catalog.index import Index
from blockkv.format import record
from blockkv.format.checkpoint import pack
from blockkv.format.page import PAGE_BYTES, PageKind
from blockkv.format.superblock import Superblock, examine
from blockkv.store.finding import Remedy
from blockkv.testing import (
    Crash,
    Fault,
    FaultKind,
    FaultPlan,
    OperationKind,
    SimulatedDevice,
    crash_clone,
)

MADE = sample()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings about damage are what these tests ask for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def looked_at(
    device: SimulatedDevice, payload: bool = True, plan: FaultPlan | None = None
) -> blockkv.CheckReport:
    """The report of a read-only check of a copy, which must not have changed anything."""
    copy = device.clone(plan)
    with open_copy(copy, read_only=True) as store:
        report = store.check(payload=payload)
    assert {one.kind for one in copy.operations()} <= {OperationKind.READ}
    return report


def repaired(device: SimulatedDevice, payload: bool = True) -> tuple[blockkv.CheckReport, SimulatedDevice]:
    """The report of a repair, and a copy of the device after it."""
    copy = device.clone()
    with open_copy(copy) as store:
        report = store.check(payload=payload, repair=True)
    assert report.repaired
    return report, copy.clone()


def assert_repair_costs(device: SimulatedDevice, lost: set[str]) -> None:
    """A repair leaves everything but `lost`, a sound store, and nothing for another repair."""
    _, after = repaired(device)
    assert looked_at(after).findings == ()
    assert all(isinstance(slot, Superblock) for slot in examine(slots_of(after)))
    again, after = repaired(after)
    assert again.findings == ()
    assert_kept(after, lost)


def assert_kept(device: SimulatedDevice, lost: set[str]) -> None:
    """Everything but `lost` is there, and nothing else."""
    with open_copy(device.clone()) as store:
        assert {str(key) for key in store.keys()} == set(KEYS) - lost  # noqa: SIM118
        assert exact(store, set(KEYS) - lost)


def unreadable(offset: int, code: int) -> Fault:
    """Every read of the page at `offset` is answered with `code`."""
    return Fault(FaultKind.ERROR, on=OperationKind.READ, within=(offset, 4096), fire_count=None, errno=code)


def structures(report: blockkv.CheckReport) -> list[str]:
    return [finding.structure for finding in report.findings]


def test_a_store_that_was_killed_is_sound() -> None:
    report = looked_at(MADE.copy())
    assert report.ok
    assert report.chunks == len(KEYS)
    assert report.payload_checked
    assert_repair_costs(MADE.copy(), set())


# -- superblock slots --------------------------------------------------------------------------------------


def rot(device: SimulatedDevice, offset: int) -> None:
    device.flip_bit(offset + 60, 3)


def blank(device: SimulatedDevice, offset: int) -> None:
    device.poke(offset, bytes(PAGE_BYTES))


def foreign(device: SimulatedDevice, offset: int) -> None:
    device.poke(offset, random.Random(offset).randbytes(PAGE_BYTES))


def misdirected(device: SimulatedDevice, offset: int) -> None:
    other = next(one for one in MADE.slot_offsets if one != offset)
    device.poke(offset, device.peek(other, PAGE_BYTES))


@pytest.mark.parametrize("harm", [rot, blank, foreign, misdirected])
@pytest.mark.parametrize("slot_index", range(8))
def test_a_damaged_slot_is_found_and_written_again(
    slot_index: int, harm: Callable[[SimulatedDevice, int], None]
) -> None:
    device = MADE.copy()
    harm(device, MADE.slot_offsets[slot_index])
    (finding,) = looked_at(device).findings
    assert finding.structure == "superblock slot"
    assert (finding.index, finding.offset_bytes) == (slot_index, MADE.slot_offsets[slot_index])
    assert finding.remedy is Remedy.REWRITE
    assert_repair_costs(device, set())


def test_a_slot_that_cannot_be_read_is_found() -> None:
    device = MADE.copy()
    bad = unreadable(MADE.slot_offsets[5], errno.EIO)
    (finding,) = looked_at(device, plan=FaultPlan((bad,))).findings
    assert (finding.structure, finding.index) == ("superblock slot", 5)


def test_slots_of_another_store_and_lost_writes_are_found() -> None:
    device = MADE.copy()
    head = MADE.superblock.generation % 4
    older = examine(slots_of(device))[(head + 1) % 4]
    assert isinstance(older, Superblock)
    # The head of the generation before last: it was written, and an older one is there.
    victim = (head + 2) % 4
    current = examine(slots_of(device))[victim]
    assert isinstance(current, Superblock)
    stale = dataclasses.replace(current, generation=current.generation - 4)
    device.poke(MADE.slot_offsets[victim], stale.encode(victim))
    stranger = dataclasses.replace(older, uuid=bytes(range(16)))
    device.poke(MADE.slot_offsets[(head + 1) % 4], stranger.encode((head + 1) % 4))
    whats = [finding.what for finding in looked_at(device).findings]
    assert len(whats) == 2
    assert any(f"holds generation {stale.generation}" in what for what in whats)
    assert any("another store" in what for what in whats)
    assert_repair_costs(device, set())


def test_no_crash_leaves_a_slot_that_counts_as_damaged() -> None:
    """Every operation of open, checkpoint and close is cut; stale and blank slots are what crashes leave."""
    young = SimulatedDevice(16 << 20)
    blockkv.format(young)
    stale_count = 0
    for start in (young, MADE.device):
        for number in itertools.count():
            device = start.clone(FaultPlan.stop(number))
            with contextlib.suppress(blockkv.BlockKVError), open_copy(device) as store:
                store.put("new", b"x" * 100, durable=True)
                store.checkpoint()
            if not device.stopped:
                break
            for seed in range(4):
                after = crash_clone(device, random.Random(seed))
                slots = examine(slots_of(after))
                stale_count += any(
                    getattr(slots[index], "generation", 0) > getattr(slots[index + 4], "generation", 0)
                    for index in range(4)
                )
                assert looked_at(after, payload=False).ok
    assert stale_count > 5


def test_a_device_that_grew_keeps_both_copies(image_dir: Any) -> None:
    path = image_dir / "grown.img"
    blockkv.format(path, size="16MiB")
    with blockkv.open(path) as store:
        store.put("k", b"v" * 5000)
    with path.open("r+b") as file:
        file.truncate(24 << 20)
        file.seek(store.info()["generation"] % 4 * 262144)
        file.write(bytes(4096))
    with blockkv.open(path, read_only=True) as store:
        assert bytes(store.get("k").numpy()) == b"v" * 5000
        assert structures(store.check()) == ["superblock slot"]


# -- checkpoint, journal, layouts --------------------------------------------------------------------------


def test_a_damaged_checkpoint_page_costs_the_keys_in_it() -> None:
    for index, offset in enumerate(MADE.checkpoint_pages):
        device = MADE.copy()
        lost = MADE.keys_in(offset, PageKind.CHECKPOINT)
        device.flip_bit(offset + 1000, 1)
        page, total = looked_at(device).findings
        assert (page.structure, page.index, page.offset_bytes) == ("checkpoint page", index, offset)
        assert total.structure == "checkpoint"
        records = int.from_bytes(MADE.device.peek(offset + 74, 2), "little")
        assert records >= len(lost)
        assert total.what.startswith(f"{records} of {MADE.superblock.checkpoint_record_count} records")
        assert_repair_costs(device, lost)


def test_the_idle_checkpoint_area_may_hold_anything() -> None:
    device = MADE.copy()
    device.poke(MADE.idle_area_bytes, random.Random(1).randbytes(4 * PAGE_BYTES))
    assert looked_at(device).ok
    assert_repair_costs(device, set())


def test_a_damaged_journal_page_ends_the_log_there() -> None:
    for number, offset in enumerate(MADE.journal_pages[:-1]):
        device = MADE.copy()
        device.flip_bit(offset + 100, 1)
        finding, *others = looked_at(device).findings
        # With the first page a deletion is lost, of a chunk whose units have been used again since.
        assert {other.key for other in others} <= ({"gone"} if number == 0 else set())
        assert (finding.structure, finding.offset_bytes) == ("journal page", offset)
        assert finding.index == MADE.superblock.replay_from_sequence + number
        _, after = repaired(device)
        assert looked_at(after).findings == ()
        with open_copy(after) as store:
            kept = set(KEYS) - set(JOURNALED[number:])
            assert {str(key) for key in store.keys()} - {"gone"} == kept  # noqa: SIM118
            assert exact(store, kept)


def test_chunks_whose_layout_is_lost_are_named() -> None:
    device = SimulatedDevice(16 << 20)
    blockkv.format(device, average_chunk="4KiB")
    with open_copy(device) as store:
        store.put_many([(f"k{number}", b"x" * 5000) for number in range(100)])
        zone = store._state.geometry.checkpoints[1]
    page_count = store._state.log.superblock.checkpoint_page_count
    assert page_count >= 3
    for index in (0, page_count - 1):
        device.flip_bit(zone.offset_bytes + index * PAGE_BYTES + 500, 0)
    report = looked_at(device)
    assert structures(report)[:3] == ["checkpoint page", "checkpoint page", "checkpoint"]
    named = [finding for finding in report.findings if finding.key is not None]
    assert len(named) >= 10
    assert all("layout" in finding.what and finding.remedy is Remedy.DROP for finding in named)
    assert set(report.damaged_keys) == {finding.key for finding in named}
    _, after = repaired(device)
    assert looked_at(after).findings == ()


# -- records that disagree, payload ------------------------------------------------------------------------


@pytest.mark.parametrize("later", [True, False])
def test_of_two_chunks_with_the_same_units_the_one_that_verifies_stays(later: bool) -> None:
    device = SimulatedDevice(16 << 20)
    blockkv.format(device, average_chunk="4KiB")
    with open_copy(device) as store:
        for key in ("first", "real", "last"):
            store.put(key, payload(key))
        real = store._state.index.get(record.key_digest(b"real"))
        assert real is not None
        entries = list(store._state.index)
        records = [entry.raw for entry in entries]
        layouts = [record.encode_layout(0, number, one.body) for number, one in store._state.layouts]
    forged = record.encode_put(
        real.log_sequence + (100 if later else -1),
        record.key_digest(b"forged"),
        real.payload_bytes,
        real.layout_id,
        bytes(16),
        real.extents,
        real.leaves,
        b"forged",
    )
    found = store._state.log.superblock
    pages = b"".join(pack([*layouts, *records, *forged], found.uuid, found.checkpoint_id, found.epoch))
    device.poke(found.checkpoint_zone.offset_bytes, pages)
    report = looked_at(device)
    (finding,) = [one for one in report.findings if one.key is not None]
    assert (finding.key, finding.remedy) == (b"forged", Remedy.DROP)
    assert "same units" in finding.what
    _, after = repaired(device)
    assert looked_at(after).findings == ()
    with open_copy(after) as store:
        assert sorted(store.keys()) == ["first", "last", "real"]
        assert exact(store, ["first", "last", "real"])


def test_damaged_payload_is_found_where_it_is_and_dropped() -> None:
    device = MADE.copy()
    for key in ("c7", "j5"):  # the last group is not sealed: it is read at open
        device.flip_bit(MADE.places[key] + 700, 5)
    assert structures(looked_at(device, payload=False)) == ["chunk"]
    report = looked_at(device)
    assert set(report.damaged_keys) == {"c7", "j5"}
    assert {finding.offset_bytes for finding in report.findings} == {MADE.places["c7"], MADE.places["j5"]}
    assert_repair_costs(device, {"c7", "j5"})


def test_damage_everywhere_at_once() -> None:
    device = MADE.copy()
    page = MADE.checkpoint_pages[1]
    lost = MADE.keys_in(page, PageKind.CHECKPOINT)
    keys = [key for key in KEYS if key not in lost]
    harmed = {keys[0], keys[-1]}
    device.flip_bit(page + 90, 0)
    for key in harmed:
        device.flip_bit(MADE.places[key], 0)
    for slot_index in (0, 3, 5):
        device.flip_bit(MADE.slot_offsets[slot_index] + 200, 0)
    report = looked_at(device)
    assert set(structures(report)) == {"superblock slot", "checkpoint page", "checkpoint", "chunk"}
    assert set(report.damaged_keys) == harmed
    assert_repair_costs(device, lost | harmed)


def test_without_payload_a_repair_reads_none() -> None:
    device = MADE.copy()
    device.flip_bit(MADE.places["c1"], 0)
    assert looked_at(device, payload=False).ok
    report, after = repaired(device, payload=False)
    assert report.ok
    assert looked_at(after).damaged_keys == ("c1",)


def test_progress_is_told_in_bytes_of_payload() -> None:
    steps: list[tuple[int, int]] = []
    with open_copy(MADE.copy()) as store:
        total_bytes = store.stats()["payload_bytes"]
        store.check(progress=lambda done, total: steps.append((done, total)))
        assert steps == [], "without payload there is nothing to wait for"
        store.check(payload=True, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (total_bytes, total_bytes)
    assert steps == sorted(steps)


def test_an_error_that_may_pass_is_no_damage() -> None:
    place = MADE.places["c3"]
    stuck = unreadable(place, errno.ETIMEDOUT)
    device = MADE.device.clone(FaultPlan((stuck,)))
    with open_copy(device) as store:
        (finding,) = store.check(payload=True, repair=True).findings
        assert (finding.key, finding.remedy) == ("c3", Remedy.KEEP)
        assert store.contains("c3")
        device.set_plan(None)
        assert store.check(payload=True).ok
    assert_repair_costs(device, set())


def test_index_and_free_map_that_disagree_are_reported(
    store: blockkv.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"x" * 10_000)
    monkeypatch.setattr(Index, "payload_bytes", 10_001)
    store._state.allocator.allocate(3)
    report = store.check()
    assert structures(report) == ["free map", "index"]
    assert len(report.problems) == 2
    assert not report.ok


# -- refusals ----------------------------------------------------------------------------------------------


def test_a_device_that_cannot_be_written_is_checked_and_not_repaired() -> None:
    device = MADE.copy()
    device.flip_bit(MADE.places["c7"], 5)
    device.limits = dataclasses.replace(device.limits, read_only=True)
    assert looked_at(device).damaged_keys == ("c7",)
    with pytest.raises(blockkv.DeviceReadOnly):
        open_copy(device.clone())
    store = open_copy(device.clone(), read_only=True)
    with pytest.raises(blockkv.StoreReadOnly, match="read-only"):
        store.check(repair=True)
    assert store.contains("c7"), "a read-only check drops nothing"
    assert store.check(payload=True).damaged_keys == ("c7",)
    store.close()


def test_a_store_open_elsewhere_is_not_repaired(image_dir: Any) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="16MiB")
    with blockkv.open(path), pytest.raises(blockkv.DeviceBusy):
        blockkv.open(path)


# -- faults while it runs ----------------------------------------------------------------------------------


def harmed() -> tuple[SimulatedDevice, set[str]]:
    """A copy with damage in a slot, a checkpoint page and payload, and the keys that cannot be had again."""
    device = MADE.copy()
    page = MADE.checkpoint_pages[1]
    lost = MADE.keys_in(page, PageKind.CHECKPOINT)
    victim = next(key for key in KEYS if key not in lost)
    device.flip_bit(page + 90, 0)
    device.flip_bit(MADE.places[victim], 0)
    device.flip_bit(MADE.slot_offsets[6] + 200, 0)
    return device, lost | {victim}


HARMED, LOST = harmed()

FAULTS = {
    "eio": lambda number: Fault(FaultKind.ERROR, operation=number),
    "timeout": lambda number: Fault(FaultKind.ERROR, operation=number, errno=errno.ETIMEDOUT),
    "short": lambda number: Fault(FaultKind.SHORT, operation=number, done_bytes=512),
    "power cut": lambda number: Fault(FaultKind.STOP, operation=number),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_repair_that_fails_at_any_operation_loses_nothing(fault: str) -> None:
    rng = random.Random(7)
    # Every third operation, and other ones for every fault.
    for number in itertools.count(list(FAULTS).index(fault) % 3, 3):
        device = HARMED.clone(FaultPlan((FAULTS[fault](number),), seed=number))
        with contextlib.suppress(blockkv.BlockKVError), open_copy(device) as store:
            store.check(payload=True, repair=True)
        if number >= device.operation_count:
            break
        crash = rng.choice(list(Crash))
        after = crash_clone(device, rng, crash)
        if number % 5 == 0:
            assert_repair_costs(after, LOST)
        else:
            with open_copy(after.clone(), read_only=True) as store:
                left = set(KEYS) - LOST
                assert left <= {str(key) for key in store.keys()} <= set(KEYS)  # noqa: SIM118
                assert exact(store, left)
    assert number > 60


def test_an_open_that_meets_a_passing_error_loses_nothing() -> None:
    """What cannot be read just now is neither missing nor damaged, wherever it hits the open."""
    raised = 0
    for number in itertools.count():
        device = MADE.device.clone(FaultPlan.fail(number, errno.ETIMEDOUT))
        try:
            open_copy(device).close()
        except blockkv.BlockKVError:
            raised += 1
        assert_kept(device, set())
        if number >= device.operation_count:
            break
    assert raised


@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.ENOMEM, errno.EAGAIN])
@pytest.mark.parametrize("where", ["checkpoint", "journal", "slots"])
def test_metadata_that_cannot_be_read_just_now_ends_the_open(where: str, code: int) -> None:
    newest = MADE.superblock.generation % 4
    places = {
        "checkpoint": [MADE.checkpoint_pages[1]],
        "journal": [MADE.journal_pages[2]],
        "slots": [MADE.slot_offsets[newest], MADE.slot_offsets[newest + 4]],
    }[where]
    stuck = tuple(unreadable(place, code) for place in places)
    device = MADE.device.clone(FaultPlan(stuck))
    for read_only in (True, False):
        with pytest.raises(blockkv.DeviceError):
            open_copy(device, read_only=read_only)
    if where == "slots":  # one copy is enough
        open_copy(device.clone(FaultPlan(stuck[1:]))).close()
    assert looked_at(device).ok
    assert_kept(device, set())


def test_payload_of_the_last_group_that_cannot_be_read_just_now_is_kept() -> None:
    place = MADE.places[JOURNALED[-1]]
    stuck = unreadable(place, errno.ETIMEDOUT)
    (finding,) = looked_at(MADE.device, plan=FaultPlan((stuck,)), payload=False).findings
    assert (finding.key, finding.remedy) == (JOURNALED[-1], Remedy.KEEP)
    device = MADE.device.clone(FaultPlan((stuck,)))
    with open_copy(device) as store:
        assert store.get(JOURNALED[-1]) is None
        device.set_plan(None)
        assert exact(store, KEYS)


def test_a_device_that_went_away_is_no_damage() -> None:
    device = MADE.copy()
    with open_copy(device) as store:
        device.set_plan(FaultPlan((Fault(FaultKind.ERROR, on=OperationKind.READ, errno=errno.ENODEV),)))
        with pytest.raises(blockkv.DeviceLost):
            store.check(payload=True)
        assert exact(store, KEYS)
        assert not store._state.any_leased()


# -- on devices --------------------------------------------------------------------------------------------


def test_repair_of_a_store_on_a_device(block_targets: Any) -> None:
    target = block_targets(32 << 20)
    blockkv.format(target, average_chunk="4KiB")
    contents = {f"k{number}": torch.full((5000,), number, dtype=torch.uint8) for number in range(60)}
    with blockkv.open(target) as store:
        store.put_many(contents.items(), durable=True)
    with blockkv.open(target) as store:
        info = store.entry("k5")
        assert info is not None
        places = [store.info()["data_offset_bytes"] + info.extents[0][0] * 4096]
        places.append(store._state.log.superblock.checkpoint_zone.offset_bytes + PAGE_BYTES + 300)
        store._state.log.renew_superblock(4)
    places.append(3 * 262144 + 20)
    descriptor = os.open(target, os.O_RDWR)
    try:
        for place in places[::2]:
            byte = os.pread(descriptor, 1, place)[0]
            os.pwrite(descriptor, bytes([byte ^ 4]), place)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with blockkv.open(target, read_only=True) as store:
        assert {one.structure for one in store.check(payload=True).findings} == {"superblock slot", "chunk"}
    with blockkv.open(target) as store:
        report = store.check(payload=True, repair=True)
        assert report.damaged_keys == ("k5",)
    with blockkv.open(target, read_only=True) as store:
        assert store.check(payload=True).ok
        for key, value in contents.items():
            found = store.get(key)
            assert found is None if key == "k5" else torch.equal(found, value)
