"""Opening after a clean stop, a kill, a power cut, and damage to metadata."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import blockkv
from blockkv.testing import Crash, FaultPlan, SimulatedDevice, crash_clone


def payload(number: int, size_bytes: int = 50_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def fill(store: blockkv.Store, count: int, durable: bool = True) -> None:
    store.put_many([(f"k{number}", payload(number)) for number in range(count)], durable=durable)


def exact(store: blockkv.Store, numbers: Any) -> bool:
    found = [store.get(f"k{number}") for number in numbers]
    return all(
        tensor is not None and torch.equal(tensor, payload(number))
        for number, tensor in zip(numbers, found, strict=True)
    )


def test_clean_stop_leaves_nothing_to_replay(device: SimulatedDevice, open_on: Any) -> None:
    with open_on(device) as store:
        fill(store, 20)
    store = open_on(device.clone())
    recovery = store.info()["recovery"]
    assert recovery["was_clean"]
    assert recovery["checkpoint_chunks"] == 20
    assert recovery["journal_pages_replayed"] == recovery["chunks_unsealed"] == 0
    assert exact(store, range(20))


def test_kill_loses_nothing_committed(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    fill(store, 20)
    store.delete("k3", durable=True)
    store.put("lazy", b"not committed")
    after = open_on(crash_clone(device, random.Random(1), Crash.PROCESS_KILL))
    assert not after.info()["recovery"]["was_clean"]
    assert exact(after, [0, 1, 2, *range(4, 20)])
    assert not after.contains("k3")
    assert not after.contains("lazy")
    assert after.check(payload=True).ok


def test_power_cut_keeps_every_acknowledged_chunk(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    fill(store, 10)
    store.put_many([(f"k{number}", payload(number)) for number in range(10, 15)])
    for seed in range(20):
        after = open_on(crash_clone(device, random.Random(seed)))
        assert exact(after, range(10))
        assert after.check(payload=True).ok
        after.close()


def test_a_page_that_landed_without_its_payload_promises_nothing(open_on: Any) -> None:
    """The journal page of the last group may survive a power cut that its payload does not."""
    device = SimulatedDevice(64 << 20)
    blockkv.format(device)
    store = open_on(device)
    fill(store, 3)
    # The flush of this group does nothing, so that page and payload are at the mercy of the cut.
    device.set_plan(FaultPlan.lying())
    fill(store, 6)
    dropped = 0
    for seed in range(40):
        after = open_on(crash_clone(device, random.Random(seed)))
        dropped += after.info()["recovery"]["chunks_dropped_unsealed"]
        present = [number for number in range(6) if after.contains(f"k{number}")]
        assert {0, 1, 2} <= set(present)
        assert exact(after, present)
        # What was dropped stays dropped, also when this epoch seals its page.
        after.put("new", b"x", durable=True)
        again = open_on(crash_clone(after._state.device, random.Random(seed)))  # type: ignore[arg-type]
        assert sorted(again.keys()) == sorted([*(f"k{number}" for number in present), "new"])
        assert again.check(payload=True).ok
        after.close()
        again.close()
    assert dropped, "no cut tore a page from its payload; the test shows nothing"


def test_crash_while_recovering_is_repeatable(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    fill(store, 12)
    image = crash_clone(device, random.Random(5))
    for depth in range(1, 40):
        attempt = image.clone(FaultPlan.stop(depth))
        try:
            open_on(attempt).close()
        except blockkv.BlockKVError:
            image = crash_clone(attempt, random.Random(depth))
        else:
            break
    after = open_on(image.clone())
    assert exact(after, range(12))


def test_journal_wraps_many_times(open_on: Any) -> None:
    device = SimulatedDevice(32 << 20, strict=True)
    blockkv.format(device, journal="24KiB")
    store = open_on(device)
    for lap in range(60):
        store.put(f"k{lap}", payload(lap, 5000), durable=True)
        if lap >= 5:
            store.delete(f"k{lap - 5}")
    assert store.stats()["checkpoints_written"] >= 10
    after = open_on(crash_clone(device, random.Random(0)))
    assert set(after.keys()) >= {f"k{lap}" for lap in range(55, 60)}
    assert after.check(payload=True).ok


def test_a_group_larger_than_the_journal(open_on: Any) -> None:
    device = SimulatedDevice(32 << 20, strict=True)
    blockkv.format(device, journal="24KiB", average_chunk="4KiB")
    store = open_on(device)
    store.put_many([(f"k{number}", payload(number, 100)) for number in range(2000)], durable=True)
    after = open_on(crash_clone(device, random.Random(0)))
    assert len(after) == 2000
    assert after.check(payload=True).ok


def test_commits_go_on_during_a_checkpoint(open_on: Any) -> None:
    """A group committed while a checkpoint is written lies behind its anchor, and is not applied twice."""
    device = SimulatedDevice(32 << 20, strict=True)
    blockkv.format(device)
    store = open_on(device)
    fill(store, 10)
    log = store._state.log
    write = log._write_checkpoint

    def interrupted(*arguments: Any) -> Any:
        store.put("during", payload(100), durable=True)
        store.delete("k1", durable=True)
        return write(*arguments)

    store.delete("k0")  # in the snapshot, but in no group yet
    log._write_checkpoint = interrupted  # type: ignore[method-assign]
    log.checkpoint(hold_commits=False)
    del log._write_checkpoint
    for crash in Crash:
        after = open_on(crash_clone(device, random.Random(3), crash))
        assert sorted(after.keys()) == sorted(["during", *(f"k{number}" for number in range(2, 10))])
        assert after.check(payload=True).ok
        after.close()


def test_a_damaged_checkpoint_page_costs_its_records_only(open_on: Any) -> None:
    device = SimulatedDevice(64 << 20)
    blockkv.format(device, average_chunk="4KiB")
    with open_on(device) as store:
        store.put_many([(f"k{number}", payload(number, 1000)) for number in range(1000)])
        layouts = [torch.zeros(number + 1) for number in range(50)]
        store.put_many([(f"l{number}", layout) for number, layout in enumerate(layouts)])
        zone = store._state.geometry.checkpoints[1]
    pages = store._state.log.superblock.checkpoint_page_count
    assert pages > 20
    for page in range(pages):
        image = device.clone()
        image.flip_bit(zone.offset_bytes + page * 4096 + 777, page % 8)
        after = open_on(image)
        recovery = after.info()["recovery"]
        assert recovery["checkpoint_pages_damaged"] == 1
        assert recovery["chunks_dropped_no_layout"] == 0
        assert len(after) >= 1050 - 45
        assert after.check(payload=True).ok
        after.close()
        again = open_on(image.clone())
        assert again.info()["recovery"]["checkpoint_pages_damaged"] == 0
        again.close()


def test_journal_damage_is_told_from_its_end(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    for number in range(10):
        store.put(f"k{number}", payload(number), durable=True)
    journal = store._state.geometry.journal
    first = store._state.log.superblock.replay_from_sequence
    image = device.clone()
    image.flip_bit(journal.offset_bytes + (first + 4) * 4096 + 100, 0)
    after = open_on(image)
    assert after.info()["recovery"]["journal_damaged"]
    assert exact(after, range(4))
    assert len(after) == 4
    assert not open_on(device.clone()).info()["recovery"]["journal_damaged"]


def test_records_that_claim_the_same_units_cannot_stop_an_open(open_on: Any) -> None:
    """A checkpoint page unreadable in one epoch and readable in the next brings stale records back."""
    device = SimulatedDevice(16 << 20)
    blockkv.format(device)
    with open_on(device) as store:
        fill(store, 8)
        # Behind the page of layouts, the one of the chunks.
        offset_bytes = store._state.geometry.checkpoints[1].offset_bytes + 4096
    image = device.clone()
    page = image.peek(offset_bytes, 4096)
    image.poke(offset_bytes, bytes(4096))
    after = open_on(image)
    assert len(after) == 0
    # The open wrote a checkpoint of its own at once, so the stale page can never be read again.
    assert after.stats()["checkpoints_written"] == 1
    after.put_many([(f"n{number}", payload(number)) for number in range(8)], durable=True)
    image.poke(offset_bytes, page)
    again = open_on(crash_clone(image, random.Random(0)))
    assert sorted(again.keys()) == [f"n{number}" for number in range(8)]


def test_metadata_write_failure_ends_writing(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    fill(store, 5)
    device.set_plan(FaultPlan.fail(device.operation_count + 1))  # the data write, then the page
    with pytest.raises(blockkv.StoreReadOnly, match="metadata write failed"):
        store.put("k5", payload(5), durable=True)
    assert exact(store, range(5))
    for action in (lambda: store.put("x", b"y"), store.commit, store.checkpoint):
        with pytest.raises(blockkv.StoreReadOnly):
            action()
    assert store.info()["write_failure"]
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()
    after = open_on(device.clone())
    assert exact(after, range(5))


def test_data_write_failure_is_one_key_s_fault(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    device.set_plan(FaultPlan.fail(device.operation_count))
    with pytest.raises(blockkv.DeviceError):
        store.put("k0", payload(0))
    assert not store.contains("k0")
    assert store.stats()["quarantined_bytes"] > 0
    assert store.put("k0", payload(0), durable=True)
    assert exact(store, [0])
    assert store.check(payload=True).ok


def test_unreadable_chunk_is_a_miss(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    fill(store, 3)
    device.set_plan(FaultPlan.fail(device.operation_count))
    out = torch.full((50_000,), 3, dtype=torch.uint8)
    assert store.get("k1", out=out) is False
    assert not out.any()
    assert store.stats()["get_device_error"] == 1
    assert not store.contains("k1")
    assert exact(store, [0, 2])


def test_device_that_shrank_is_refused(device: SimulatedDevice, open_on: Any) -> None:
    with open_on(device) as store:
        fill(store, 2)
    small = SimulatedDevice(32 << 20)
    for unit in range((32 << 20) // 4096):
        small.poke(unit * 4096, device.clone().peek(unit * 4096, 4096)) if unit < 600 else None
    with pytest.raises(blockkv.DeviceTooSmall, match="shrank"):
        blockkv.open(small)


def test_blank_and_foreign_devices(open_on: Any) -> None:
    with pytest.raises(blockkv.NotFormatted, match=r"^which: no blockkv superblock: .* are blank"):
        blockkv.open(SimulatedDevice(16 << 20, path="which"))
    tiny = SimulatedDevice(1 << 20)
    with pytest.raises(blockkv.NotFormatted):
        blockkv.open(tiny)
    with pytest.raises(blockkv.DeviceTooSmall):
        blockkv.format(tiny)


def test_damage_that_cannot_be_rewritten_stops_the_open(device: SimulatedDevice, open_on: Any) -> None:
    with open_on(device) as store:
        fill(store, 5)
        zone = store._state.geometry.checkpoints[1]
    image = device.clone()
    image.flip_bit(zone.offset_bytes + 200, 1)
    attempt = image.clone()
    opened = open_on(attempt)
    operation_count = attempt.operation_count
    opened.close()
    messages = []
    for number in range(operation_count):
        try:
            opened = blockkv.open(image.clone(FaultPlan.fail(number)), commit_interval_ms=None)
        except blockkv.DeviceError as error:
            messages.append(str(error))
        else:
            opened.close()
    assert any("cannot be rewritten" in message for message in messages)
    assert open_on(image.clone()).check(payload=True).ok
