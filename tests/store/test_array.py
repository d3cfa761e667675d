"""Arrays: one store on several devices, with the API and the promises of one on a single device."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import blockkv
from blockkv.errors import (
    BatchError,
    DeviceBusy,
    DeviceError,
    DeviceLost,
    InvalidArgument,
    LayoutMismatch,
    OccupiedError,
    StoreClosed,
    StoreFull,
    StoreReadOnly,
    WrongStore,
)
from blockkv.format.superblock import MAX_MEMBERS
from blockkv.store import store as store_module
from blockkv.store.array_store import ArrayStore
from blockkv.store.store import open_store
from blockkv.testing import Crash, Fault, FaultKind, FaultPlan, OperationKind, SimulatedDevice, crash_clone

SIZE_BYTES = 32 << 20
PATIENCE_S = 60
LINKED = (
    "__contains__",
    "__enter__",
    "__exit__",
    "closed",
    "extents",
    "get",
    "get_many",
    "is_client",
    "latencies",
    "put",
    "put_many",
    "stream",
    "submit_put",
)
"""What the array has from `Store`, because it only calls what the array has itself."""


def content(number: int, size_bytes: int = 50_000) -> bytes:
    return random.Random(number).randbytes(size_bytes)


def bytes_of(value: Any) -> bytes | None:
    return None if value is None else value.numpy().tobytes()


def simulated(count: int = 3, **options: Any) -> list[SimulatedDevice]:
    devices = [
        SimulatedDevice(SIZE_BYTES, path=f"device-{index}", lba_bytes=(512, 4096)[index % 2], **options)
        for index in range(count)
    ]
    blockkv.format(devices, average_chunk="64KiB")
    return [device.clone() for device in devices]


def open_array(devices: list[Any], **options: Any) -> ArrayStore:
    store = blockkv.open(devices, commit_interval_ms=None, **options)
    assert isinstance(store, ArrayStore)
    return store


def after_a_crash(devices: list[SimulatedDevice], how: Crash = Crash.PROCESS_KILL) -> list[SimulatedDevice]:
    store_module._open_stores.clear()  # what crashed is not closed at exit
    return [crash_clone(device, random.Random(7), how) for device in devices]


def fill(store: blockkv.Store, count: int = 60) -> None:
    store.put_many([(f"k{number}", content(number)) for number in range(count)], durable=True)


def found(store: blockkv.Store, count: int = 60) -> list[int]:
    """Which of the chunks of `fill` are there; they have to be exact."""
    values = store.get_many([f"k{number}" for number in range(count)])
    there = [number for number, value in enumerate(values) if value is not None]
    assert all(bytes_of(values[number]) == content(number) for number in there)
    return there


def test_outputs_of_several_members_may_not_overlap() -> None:
    with open_array(simulated(), evict=False) as store:
        fill(store)
        keys = sorted((f"k{number}" for number in range(60)), key=lambda key: store.entry(key).device)[::25]
        assert len({store.entry(key).device for key in keys}) == 3
        one, other = torch.empty(50_000, dtype=torch.uint8), torch.empty(50_000, dtype=torch.uint8)
        with pytest.raises(BatchError) as caught:
            store.get_many(keys, [one, one, other])
        assert caught.value.results[2] is True
        assert sorted(caught.value.results[:2]) == [False, True]
        (error,) = caught.value.errors.values()
        assert isinstance(error, InvalidArgument)
        assert "overlaps" in str(error)
        filled = keys[caught.value.results.index(True)]
        assert bytes_of(one) == content(int(filled[1:]))
        assert store.get_many(keys, [one, other, torch.empty(50_000, dtype=torch.uint8)]) == [True] * 3


def test_one_device_is_not_two_members(tmp_path: Path) -> None:
    path, link = tmp_path / "store", tmp_path / "link"
    link.symlink_to(path)
    for call in (lambda paths: blockkv.format(paths, size="16MiB"), blockkv.open):
        with pytest.raises(DeviceBusy, match=f"{path} was given twice"):
            call([path, path])
        with pytest.raises(DeviceBusy, match=f"{path} and {link} are the same"):
            call([path, str(link)])
    assert not path.exists()
    (device,) = simulated(1)
    with pytest.raises(DeviceBusy, match="device-0 was given twice"):
        blockkv.open([device, device])


def held_by(store: ArrayStore, index: int) -> list[str]:
    member = next(one for one in store._members if one.index == index)
    return list(map(str, member.store.keys()))


# -- one store ---------------------------------------------------------------------------------------------


def test_an_array_has_every_method_of_a_store() -> None:
    for name, member in vars(blockkv.Store).items():
        if name.startswith("_") and name not in (
            "__len__",
            "__contains__",
            "__enter__",
            "__exit__",
            "__repr__",
        ):
            continue
        assert name in vars(ArrayStore) or name in LINKED, name
        if inspect.isfunction(member) and name in vars(ArrayStore):
            ours, theirs = inspect.signature(getattr(ArrayStore, name)), inspect.signature(member)
            assert [*ours.parameters] == [*theirs.parameters], name
            defaults = [one.default for one in ours.parameters.values()]
            assert defaults == [one.default for one in theirs.parameters.values()], name


def test_calls_with_chunks_come_down_to_what_the_array_has_itself() -> None:
    for name in ("_get", "_put"):
        ours, theirs = getattr(ArrayStore, name), getattr(blockkv.Store, name)
        assert ours is not theirs
        assert inspect.signature(ours) == inspect.signature(theirs)


def test_an_array_is_opened_with_every_option_of_a_store() -> None:
    ours, theirs = inspect.signature(blockkv.open).parameters, inspect.signature(open_store).parameters
    assert {name: one.default for name, one in theirs.items()} == {
        name: one.default for name, one in ours.items() if name != "degraded"
    }


def test_deadlines_and_droppable_puts_reach_the_members() -> None:
    with open_array(simulated()) as store:
        assert store.put("late", b"late", deadline_s=0) is False
        assert store.stats()["put_dropped"] == 1
        assert store.put("in time", b"in time", droppable=True, deadline_s=60)
        assert store.submit_put("later", b"later", droppable=True, deadline_s=60).result()
        assert store.get("in time", deadline_s=0) is None
        assert store.stats()["get_deadline"] == 1
        assert bytes_of(store.get("in time", preload=True, deadline_s=60)) == b"in time"
        assert bytes_of(store.submit_get("in time", preload=True, deadline_s=60).result()) == b"in time"
        with pytest.raises(InvalidArgument):
            store.get_many(["elsewhere"], deadline_s=-1)
        with pytest.raises(InvalidArgument):
            store.submit_get("elsewhere", deadline_s=-1)


@pytest.mark.requires_root
def test_on_loop_devices_with_unlike_lbas(loop_device: Any) -> None:
    devices = [loop_device(SIZE_BYTES, 512), loop_device(SIZE_BYTES, 4096), loop_device(2 * SIZE_BYTES, 512)]
    facts = blockkv.format(devices, average_chunk="64KiB", label="three")
    assert [one["lba_bytes"] for one in facts["members"]] == [512, 4096, 512]
    with blockkv.open(devices) as store:
        fill(store)
        assert found(store) == list(range(60))
        assert store.put_many([(f"k{number}", b"other") for number in range(60)]) == [False] * 60
        assert store.lookup(["k0", "k1", "elsewhere", "k2"]) == 2
        assert "k5" in store
        assert len(store) == len(set(store.keys())) == 60
        tensors = {"k": torch.randn(3, 5), "v": torch.arange(7)}
        assert store.put("mapping", tensors)
        assert all(torch.equal(store.get("mapping")[name], tensors[name]) for name in tensors)
        out = bytearray(50_000)
        assert store.get("k7", out=out)
        assert bytes(out) == content(7)
        assert store.get("elsewhere", out=out) is False
        assert store.pin("k7")
        assert store.entry("k7").pins == 1
        assert store.unpin("k7")
        assert not store.unpin("elsewhere")
        assert store.touch("k7")
        assert store.entry("elsewhere") is None
        assert store.entry("k7").device in map(str, devices)
        assert store.submit_put("later", b"later", durable=True).result()
        assert bytes_of(store.submit_get("later").result()) == b"later"
        assert store.submit_get("elsewhere").result() is None
        memory = blockkv.empty((1 << 20,), dtype=torch.uint8)
        with store.register(memory):
            assert store.put("registered", memory)
        assert store.delete("later", durable=True)
        assert not store.delete("later")
        store.checkpoint()
        assert store.check(payload=True, repair=True).ok
        assert store.scrub(1e12).chunks == 62
        assert store.start_scrub(1e12).result().finished
        assert store.info()["label"] == "three"
        assert store.stats()["chunks"] == 62
        with pytest.raises(LayoutMismatch):
            store.get("k7", out=bytearray(3))
        with pytest.raises(BatchError) as caught:
            store.put_many([("fine", b"x"), ("", b"y"), (3, b"z")])  # type: ignore[list-item]
        assert sorted(caught.value.errors) == [1, 2]
        assert caught.value.results[0] is True
    with pytest.raises(StoreClosed):
        store.get("k7")
    with blockkv.open(devices[::-1], read_only=True) as store:  # in any order
        assert found(store) == list(range(60))
        assert store.get("later") is None
        with pytest.raises(StoreReadOnly):
            store.put("no", b"no")


def test_chunks_are_spread_by_room() -> None:
    devices = [SimulatedDevice(size << 20, path=f"{size}") for size in (32, 32, 64)]
    blockkv.format(devices, average_chunk="64KiB")
    with open_array([device.clone() for device in devices]) as store:
        dice = random.Random(3)
        for _ in range(8):
            store.put_many([(f"{dice.random()}", content(1, dice.randint(1, 60_000))) for _ in range(64)])
        for _ in range(64):
            store.put(f"{dice.random()}", content(1, dice.randint(1, 60_000)))
        shares = [member.store.stats()["payload_bytes"] / member.data_bytes for member in store._members]
        assert max(shares) < 1.03 * min(shares)


def test_gets_do_not_wait_for_a_scrub_of_many_members(image_dir: Path) -> None:
    paths = [image_dir / f"member-{number}" for number in range(MAX_MEMBERS)]
    blockkv.format(paths, size="24MiB")
    with blockkv.open(paths) as store:
        fill(store, 200)
        scrub = store.start_scrub(bytes_per_s=MAX_MEMBERS)
        done: list[object] = []
        others = threading.Thread(target=lambda: done.extend((found(store, 200), store.check().ok)))
        others.start()
        others.join(PATIENCE_S)
        before = list(done)
        store.stop_scrub()
        assert not scrub.result(PATIENCE_S).finished
        others.join()
        assert before == [list(range(200)), True]


def test_a_full_array_evicts_on_all_members() -> None:
    with open_array(simulated()) as store:
        for start in range(0, 4000, 100):
            store.put_many([(f"{number}", content(number)) for number in range(start, start + 100)])
        evicted = [member.store.stats()["chunks_evicted"] for member in store._members]
        assert min(evicted) > 0.9 * max(evicted)
        assert found_last(store, 4000, 300) == 300


def found_last(store: blockkv.Store, end: int, count: int) -> int:
    return sum(store.contains(f"{number}") for number in range(end - count, end))


def test_a_full_member_does_not_refuse_for_the_others() -> None:
    devices = [SimulatedDevice(size << 20, path=f"{size}") for size in (16, 64)]
    blockkv.format(devices, average_chunk="64KiB")
    with open_array([device.clone() for device in devices], evict=False) as store:
        assert store.put("larger than the small one", bytes(20 << 20))
        stored = 0
        with contextlib.suppress(StoreFull):
            for number in range(100):
                store.put(f"{number}", bytes(1 << 20))
                stored += 1
        assert 30 < stored < 60
        assert max(member.room_bytes for member in store._members) < 1 << 20


def test_one_copy_whoever_puts_at_the_same_time() -> None:
    with open_array(simulated(threads=True)) as store:
        keys = [f"k{number}" for number in range(40)]
        written: list[bool] = []
        begin = threading.Barrier(6)

        def put(turn: int) -> None:
            begin.wait()
            order = random.Random(turn).sample(keys, len(keys))
            written.extend(store.put_many([(key, content(turn)) for key in order], durable=turn % 2 == 0))

        threads = [threading.Thread(target=put, args=(turn,)) for turn in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(written) == len(keys) == len(store) == len(set(store.keys()))
        assert store.stats()["put_existing"] == 5 * len(keys)


def test_a_key_twice_in_a_call_is_written_once() -> None:
    with open_array(simulated()) as store:
        assert store.put_many([("same", b"1"), ("other", b"2"), ("same", b"3")]) == [True, True, False]
        assert bytes_of(store.get("same")) == b"1"


def test_a_deleted_key_goes_back_to_its_member_until_that_is_durable() -> None:
    """Two logs have no order: a crash must not keep the put of one and take back the delete of another."""
    devices = simulated()
    store = open_array(devices)
    fill(store, 30)
    for number in range(30):
        holder = store.entry(f"k{number}").device  # type: ignore[union-attr]
        assert store.delete(f"k{number}")
        assert store.put(f"k{number}", b"new", durable=number % 2 == 0)
        assert store.entry(f"k{number}").device == holder  # type: ignore[union-attr]
    with open_array(after_a_crash(devices, Crash.POWER_CUT)) as again:
        assert {bytes_of(again.get(f"k{number}")) for number in range(0, 30, 2)} == {b"new"}
        assert len(again) == len(set(again.keys()))


def test_a_forked_child_is_refused(images: list[Path]) -> None:
    with blockkv.open(images) as store:
        fill(store, 10)
        child = os.fork()
        if not child:
            refused = 0
            for use in (lambda: store.get("k1"), lambda: store.put("k", b"v"), store.commit, store.keys):
                try:
                    use()
                except StoreClosed:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        assert found(store, 10) == list(range(10))


def test_a_scrub_of_all_members_is_interrupted() -> None:
    def ring(number: int, frame: object) -> None:
        raise TimeoutError("rung")

    with open_array(simulated()) as store:
        fill(store)
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(TimeoutError, match="rung"):
                store.scrub(1)  # a byte a second
        finally:
            signal.signal(signal.SIGALRM, before)
        future = store.start_scrub(1)
        with pytest.raises(InvalidArgument, match="under way"):
            store.scrub()
        store.stop_scrub()
        assert not future.result().finished
        assert store.scrub(1e12).finished
        with pytest.raises(InvalidArgument, match="from inside"):
            store.check(payload=True, progress=lambda done, total: store.close())


# -- the wrong devices -------------------------------------------------------------------------------------


@pytest.fixture
def images(image_dir: Path) -> list[Path]:
    paths = [image_dir / name for name in "abc"]
    blockkv.format(paths, size=SIZE_BYTES, average_chunk="64KiB")
    return paths


def test_devices_that_do_not_belong_together(images: list[Path], image_dir: Path) -> None:
    single = image_dir / "single"
    blockkv.format(single, size=SIZE_BYTES)
    others = [image_dir / "d", image_dir / "e"]
    blockkv.format(others, size=SIZE_BYTES)
    copy = image_dir / "copy"
    shutil.copy(images[0], copy)
    for wrong, said in (
        ([*images, single], "no member of an array"),
        ([*images[:2], others[1]], "open each with its own members"),
        ([*images, copy], "one of them is a copy"),
        (images[:2], "2 missing"),
        ([images[1]], "is member 1 of an array of 3"),
        (images[1], "is member 1 of an array of 3"),
    ):
        with pytest.raises(WrongStore, match=said):
            blockkv.open(wrong)  # type: ignore[arg-type]
    with pytest.raises(DeviceError):
        blockkv.open([*images, images[0]])
    with pytest.raises(InvalidArgument):
        blockkv.open([])
    with pytest.raises(DeviceError):
        blockkv.open([*images[:2], image_dir / "nowhere"])
    with blockkv.open(images[1], read_only=True) as one:
        assert one.info()["array"]["member_index"] == 1
    with blockkv.open([single]) as store:
        assert not isinstance(store, ArrayStore)


def test_an_array_of_which_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no member of the array is there"):
        blockkv.open([tmp_path / "a", tmp_path / "b"], degraded=True)


def test_an_open_array_is_refused_to_others(images: list[Path]) -> None:
    with blockkv.open(images) as store:
        with pytest.raises(DeviceError):
            blockkv.open(images[:2], degraded=True)
        assert store.put("k", b"v", durable=True)


def test_nothing_is_formatted_unless_all_can_be(image_dir: Path) -> None:
    new, occupied = image_dir / "new", image_dir / "occupied"
    occupied.write_bytes(b"something." * (1 << 20))
    with pytest.raises(OccupiedError):
        blockkv.format([new, occupied], size=10 << 20, average_chunk="64KiB")
    assert not new.exists()
    assert occupied.read_bytes() == b"something." * (1 << 20)


def test_a_path_that_leads_nowhere_is_a_missing_member(images: list[Path]) -> None:
    with blockkv.open(images) as store:
        fill(store)
    images[2].rename(images[2].with_name("away"))
    with blockkv.open(images, degraded=True, read_only=True) as store:
        assert 30 < len(found(store)) < 50
        assert store.info()["members"][2]["state"] == "missing"
        assert [str(one) for one in store.findings] == ["member 2: is missing"]
        assert not store.check().ok
    images[2].with_name("away").rename(images[2])
    with blockkv.open(images) as store:  # only read meanwhile: everything is there
        assert found(store) == list(range(60))


# -- losing members ----------------------------------------------------------------------------------------


def test_a_lost_member_is_misses_and_the_array_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    devices = simulated()
    store = open_array(devices)
    fill(store)
    there = {key for index in (0, 2) for key in held_by(store, index)}
    devices[1].stop()
    with caplog.at_level(logging.WARNING, "blockkv"):
        assert {f"k{number}" for number in found(store)} == there
    assert sum("lost, with" in message for message in caplog.messages) == 1
    stats = store.stats()
    assert stats["members_lost"] == 1
    assert stats["members_present"] == 2
    assert stats["get_member_lost"] == stats["get_misses"] == 60 - len(there)
    assert len(store) == len(there)
    assert store.submit_get(next(iter(set(map("k{}".format, range(60))) - there))).result() is None
    assert sum(store.put_many([(f"k{number}", b"new") for number in range(60)], durable=True)) == 60 - len(
        there
    )
    store.commit()
    assert store.scrub(1e12).chunks == 60
    assert not store.check().ok
    # the member comes back: what it held is old, whatever became of the keys
    back = after_a_crash(devices, Crash.POWER_CUT)
    with open_array([one.clone() for one in back], read_only=True) as again:
        assert again.info()["members"][1]["state"].startswith("outdated")
        assert len(again) == 60
    with pytest.raises(WrongStore, match="1 missing"):
        open_array([back[0].clone(), back[2].clone()])
    with caplog.at_level(logging.WARNING, "blockkv"), open_array(back) as again:
        assert any("written to without it" in message for message in caplog.messages)
        values = again.get_many([f"k{number}" for number in range(60)])
        for number, value in enumerate(values):
            assert bytes_of(value) == (content(number) if f"k{number}" in there else b"new")
        assert held_by(again, 1) == []
        assert again.check(payload=True).ok
        assert sum(again.put_many([(f"more{number}", content(number)) for number in range(30)])) == 30
        assert held_by(again, 1)


@pytest.mark.parametrize(
    ("on", "skip_count"),
    [(OperationKind.WRITE, 0), (OperationKind.WRITE, 3), (OperationKind.FLUSH, 0)],
)
def test_a_member_lost_in_the_middle_of_puts(on: OperationKind, skip_count: int) -> None:
    """What the call acknowledged is on media of the others, however far it was."""
    devices = simulated()
    store = open_array(devices)
    devices[1].set_plan(FaultPlan((Fault(FaultKind.STOP, on=on, skip_count=skip_count),)))
    fill(store)
    assert devices[1].stopped
    assert found(store) == list(range(60))
    left = after_a_crash(devices, Crash.POWER_CUT)
    with open_array([left[0], left[2]], degraded=True) as again:
        assert found(again) == list(range(60))


def test_a_member_lost_with_gets_in_flight() -> None:
    devices = simulated(threads=True)
    store = open_array(devices)
    fill(store)
    there = {int(key[1:]) for index in (0, 2) for key in held_by(store, index)}
    futures = [store.submit_get(f"k{number}") for number in range(60)]
    devices[1].stop()
    values = [future.result() for future in futures]
    assert all(bytes_of(values[number]) == content(number) for number in there)
    assert all(bytes_of(value) in (None, content(number)) for number, value in enumerate(values))
    assert set(found(store)) == there


def test_changes_that_went_away_with_a_member_are_told_once() -> None:
    devices = simulated()
    store = open_array(devices)
    store.put_many([(f"k{number}", content(number)) for number in range(9)])
    devices[1].stop()
    with pytest.raises(DeviceLost, match="not durable yet"):
        store.commit()
    store.commit()
    store.close()


def test_a_member_that_cannot_be_written_is_still_read() -> None:
    devices = simulated()
    store = open_array(devices)
    fill(store)
    devices[1].set_plan(FaultPlan((Fault(FaultKind.ERROR, on=OperationKind.FLUSH),)))
    mine = held_by(store, 1)
    assert store.delete(mine[0])
    with pytest.raises(StoreReadOnly):
        store.commit()
    assert len(found(store)) == 59
    assert all(store.put_many([(f"new{number}", b"new") for number in range(30)], durable=True))
    assert not any(key.startswith("new") for key in held_by(store, 1))
    assert store.put(mine[1], b"other", durable=True) is False
    with pytest.raises(StoreReadOnly):  # a crash may bring it back: no other bytes for it elsewhere
        store.put(mine[0], b"other")
    with pytest.raises(StoreReadOnly):
        store.delete(mine[1])
    assert store.stats()["members_lost"] == 0
    with pytest.raises(StoreReadOnly):
        store.close()


def test_no_member_left() -> None:
    devices = simulated(2)
    store = open_array(devices)
    fill(store, 10)
    for device in devices:
        device.stop()
    with pytest.raises(DeviceLost):
        store.get_many([f"k{number}" for number in range(10)])
    with pytest.raises(DeviceLost):
        store.put_many([("more", b"more")])
    with pytest.raises(DeviceLost):
        store.get("k1")
    store.close()


def test_both_sides_written_to_by_themselves_are_refused_together() -> None:
    devices = simulated(2)
    sides = [device.clone() for device in devices]
    for device, key in zip(sides, "ab", strict=True):
        with open_array([device], degraded=True) as store:
            store.put(key, b"mine", durable=True)
    again = [device.clone() for device in sides]
    with pytest.raises(WrongStore, match="each without the other"):
        open_array(again)
    kept = sides[0].clone()
    open_array([kept], degraded=True).close()
    with open_array([kept.clone(), sides[1].clone()]) as store:
        assert store.contains("a")
        assert not store.contains("b")


def test_damage_that_brings_a_deleted_key_back_beside_its_successor() -> None:
    devices = simulated(2)
    store = open_array(devices)
    store.put("key", b"old", durable=True)
    holder = held_by(store, 1) == ["key"]
    old = devices[holder].clone()  # as if the delete had never been written
    store.delete("key", durable=True)
    other = store._members[1 - holder]
    assert other.store.put("key", b"new", durable=True)
    given = [old, devices[1 - holder].clone()]
    with open_array([one.clone() for one in given], read_only=True) as again:
        assert again.get("key") is None
        assert not again.contains("key")
        assert len(again) == len(list(again.keys())) == 0
    with open_array(given) as again:
        assert again.get("key") is None
        assert again.put("key", b"newest")
        assert bytes_of(again.get("key")) == b"newest"


# -- a store is a dict --------------------------------------------------------------------------------------


class ArrayMachine(RuleBasedStateMachine):
    """Puts, deletes, losses and returns against a dict per member."""

    keys = st.sampled_from([f"k{number}" for number in range(8)])

    @initialize(count=st.integers(2, 4))
    def begin(self, count: int) -> None:
        self.devices = simulated(count)
        self.store = open_array(self.devices)
        self.model: dict[str, bytes] = {}
        self.number = 0

    @rule(keys=st.lists(keys, min_size=1, max_size=5), durable=st.booleans(), size=st.integers(1, 200_000))
    def put(self, keys: list[str], durable: bool, size: int) -> None:
        self.number += 1
        new = content(self.number, size)
        results = self.store.put_many([(key, new) for key in keys], durable=durable)
        for key, written in zip(keys, results, strict=True):
            assert written == (key not in self.model)
            self.model.setdefault(key, new)

    @rule(key=keys, durable=st.booleans())
    def delete(self, key: str, durable: bool) -> None:
        assert self.store.delete(key, durable) == (self.model.pop(key, None) is not None)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.devices = [device.clone() for device in self.devices]
        self.store = open_array(self.devices)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), key=keys)
    def lose_and_return(self, data: st.DataObject, key: str) -> None:
        self.store.commit()
        index = data.draw(st.sampled_from([one.index for one in self.store._members if len(one.store)]))
        mine = held_by(self.store, index)
        self.devices[index].stop()
        for lost in mine:
            assert self.store.get(lost) is None
            del self.model[lost]
        assert self.store.put(key, b"meanwhile", durable=True) == (key not in self.model)
        self.model.setdefault(key, b"meanwhile")
        self.same()
        self.devices = after_a_crash(self.devices)
        self.store = open_array(self.devices)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        names = [f"k{number}" for number in range(8)]
        assert [bytes_of(value) for value in self.store.get_many(names)] == [
            self.model.get(key) for key in names
        ]
        assert sorted(map(str, self.store.keys())) == sorted(self.model)
        assert len(self.store) == len(self.model)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


ArrayMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestArrayLikeADict = ArrayMachine.TestCase
