"""A store that grows with its device: nothing is lost, wherever it is cut short, and the space is there."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv.format.geometry import MEBIBYTE, PAGE_BYTES, Geometry, slot_offsets
from blockkv.format.superblock import Superblock, choose
from blockkv.store.log import Log, write_superblock
from blockkv.testing import Crash, Fault, FaultKind, FaultPlan, OperationKind, SimulatedDevice

sys.path.insert(0, str(Path(__file__).parents[1] / "format"))
import independent_decoder

MIB = MEBIBYTE
SIZE_BYTES = 32 * MIB
KEYS = [f"k{number}" for number in range(12)]


def payload(key: str, size_bytes: int = 50_000) -> bytes:
    return random.Random(key).randbytes(size_bytes)


def on_larger(device: SimulatedDevice, size_bytes: int, **options: Any) -> SimulatedDevice:
    """What the device holds, on one of another size."""
    larger = SimulatedDevice(size_bytes, lba_bytes=device.limits.lba_bytes, strict=True, **options)
    for unit in device.written_units():
        larger.poke(unit * PAGE_BYTES, device.peek(unit * PAGE_BYTES, PAGE_BYTES))
    return larger


def superblock_of(device: SimulatedDevice) -> Superblock:
    return choose([device.peek(at, PAGE_BYTES) for at in slot_offsets(device.limits.size_bytes)])


def open_quietly(device: Any, **options: Any) -> blockkv.Store:
    return blockkv.open(device, commit_interval_ms=None, **options)


def fill(device: SimulatedDevice, keys: list[str] = KEYS) -> None:
    """The keys, with a past: deletes, a checkpoint in the middle, and a journal that has to be replayed."""
    with open_quietly(device) as store:
        for key in keys[: len(keys) // 2]:
            store.put(key, payload(key))
        store.put("gone", bytes(100_000))
        store.checkpoint()
        store.delete("gone")
        for key in keys[len(keys) // 2 :]:
            store.put(key, payload(key))
        store.commit()


def holds(store: blockkv.Store, keys: list[str] = KEYS) -> bool:
    found = [store.get(key) for key in keys]
    exact = all(
        value is not None and bytes(value.numpy()) == payload(key)
        for key, value in zip(keys, found, strict=True)
    )
    return exact and set(store.keys()) == set(keys)


def killed(device: SimulatedDevice, keys: list[str] = KEYS, *, odd: bool = False) -> SimulatedDevice:
    """A device after `fill` whose process was killed; `odd`: with the checkpoint in the other area."""
    with contextlib.closing(open_quietly(device)) as store:
        if odd:
            store.checkpoint()
        for key in keys:
            store.put(key, payload(key))
        store.commit()
        return device.crash_clone(random.Random(1), Crash.PROCESS_KILL)


def made(case: str, *, odd: bool = False) -> tuple[SimulatedDevice, int]:
    """A store that is about to grow, and the size it will have.

    "kept": its checkpoint areas stay. "moved": new ones go to the end. "again": they are there already.
    """
    device = SimulatedDevice(SIZE_BYTES, strict=True)
    blockkv.format(device, average_chunk="1MiB" if case == "kept" else "4KiB")
    if case == "again":
        device = on_larger(device, 2 * SIZE_BYTES)
        assert blockkv.grow(device)["grown"]
        device = device.clone()
    size_bytes = device.limits.size_bytes
    return killed(device, odd=odd), 2 * size_bytes + (0 if case == "kept" else 5 * MIB + 3 * PAGE_BYTES)


CASES = pytest.mark.parametrize("case", ["kept", "moved", "again"])


# -- what it is for ----------------------------------------------------------------------------------------


@CASES
def test_the_space_is_there_and_so_is_everything_else(case: str) -> None:
    before, size_bytes = made(case)
    device = on_larger(before, size_bytes)
    with open_quietly(device.clone(), read_only=True) as store:
        info = store.info()
    outcome = blockkv.grow(device)
    assert outcome["grown"]
    assert outcome["data_bytes"] - outcome["data_bytes_before"] == info["growable_bytes"] > size_bytes // 3
    assert (outcome["device_bytes_before"], outcome["device_bytes"]) == (
        before.limits.size_bytes,
        size_bytes,
    )
    areas = outcome["checkpoint_area_bytes"], outcome["checkpoint_area_bytes_before"]
    assert areas[0] == areas[1] if case == "kept" else areas[0] > areas[1]
    found = [superblock_of(device.clone()), superblock_of(before)]
    assert found[0].uuid == found[1].uuid
    assert (found[0].geometry == found[1].geometry) is False
    device = device.clone()
    with open_quietly(device, evict=False) as store:
        assert store.info()["recovery"]["was_clean"]
        assert store.info()["growable_bytes"] == 0
        assert not store.findings
        assert holds(store)
        more = [f"more {number}" for number in range(store.stats()["free_bytes"] // (52 * 1024) - 20)]
        assert len(more) * 50_000 > before.limits.size_bytes, "more than the store had room for"
        for key in more:
            store.put(key, payload(key))
    with open_quietly(device.clone()) as store:
        assert holds(store, KEYS + more)
        assert store.check(payload=True).ok


def test_more_chunks_fit_than_the_old_areas_could_index() -> None:
    device = SimulatedDevice(SIZE_BYTES, strict=True)
    blockkv.format(device, average_chunk="64KiB")
    with open_quietly(device, evict=False) as store:
        with pytest.raises(blockkv.BatchError, match="checkpoint area") as raised:
            store.put_many([(f"{number}", b"x") for number in range(10_000)])
        assert {type(error) for error in raised.value.errors.values()} == {blockkv.StoreFull}
        before = len(store)
    device = on_larger(device, 64 * SIZE_BYTES)
    assert blockkv.grow(device)["grown"]
    device = device.clone()
    with open_quietly(device, evict=False) as store:
        store.put_many([(f"more {number}", b"x") for number in range(before)])
    with open_quietly(device.clone()) as store:
        assert len(store) == 2 * before


def test_nothing_to_gain_writes_nothing() -> None:
    device, size_bytes = made("kept")
    larger = on_larger(device, size_bytes)
    assert blockkv.grow(larger, dry_run=True)["grown"] is False
    assert not any(operation.kind is OperationKind.WRITE for operation in larger.operations())
    assert blockkv.grow(larger)["grown"]
    for same in (larger.clone(), device.clone(), on_larger(device, SIZE_BYTES + MIB - PAGE_BYTES)):
        outcome = blockkv.grow(same)
        assert not outcome["grown"]
        assert outcome["data_bytes"] == outcome["data_bytes_before"]
        assert not any(operation.kind is OperationKind.WRITE for operation in same.operations())


@CASES
def test_who_reads_the_format_alone_reads_what_has_grown(case: str) -> None:
    """As `docs/format.md` has it, and as versions do that cannot grow a store."""
    before, size_bytes = made(case)
    device = on_larger(before, size_bytes)
    blockkv.grow(device)
    image = device.clone().peek(0, size_bytes)
    assert independent_decoder.chunks(image) == {key.encode(): payload(key) for key in KEYS}
    slots = [decoded(image, slot_index) for slot_index in range(8)]
    assert {slot["device_bytes"] for slot in slots} == {size_bytes}, "no slot has the zones of old"


def decoded(image: bytes, slot_index: int) -> dict[str, Any]:
    offset = slot_offsets(len(image))[slot_index]
    return independent_decoder.superblock(image[offset : offset + PAGE_BYTES], slot_index)


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup")
@pytest.mark.parametrize("sector_bytes", [512, 4096])
@pytest.mark.parametrize("average_chunk", ["4KiB", "1MiB"])
def test_real_devices(image_dir: Path, sector_bytes: int, average_chunk: str) -> None:
    image = image_dir / "image"
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    attach = ["losetup", "--find", "--show", "--direct-io=on", f"--sector-size={sector_bytes}", str(image)]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    blockkv.format(device, average_chunk=average_chunk, label="mine")
    sizes = dict.fromkeys(KEYS, 50_000)
    with blockkv.open(device) as store:
        store.put_many([(key, payload(key, size)) for key, size in sizes.items()], durable=True)
    size_bytes = SIZE_BYTES
    for more_bytes in (16 * MIB, 40 * MIB + 4096, 60 * MIB):
        size_bytes += more_bytes
        with image.open("r+b") as file:
            file.truncate(size_bytes)
            file.seek(size_bytes - 3 * MIB)
            file.write(b"\xff" * 3 * MIB)  # what somebody left there
        assert not blockkv.grow(device)["grown"], "the loop device does not know yet"
        subprocess.run(["losetup", "--set-capacity", device], check=True)
        assert blockkv.grow(device)["grown"]
        assert not blockkv.grow(device)["grown"]
        with blockkv.open(device) as store:
            assert store.info()["device_bytes"] == size_bytes
            assert store.info()["label"] == "mine"
            assert store.check(payload=True).ok
            assert not store.findings
            more = {f"{size_bytes} {number}": 4_000_000 for number in range(more_bytes // (5 * MIB))}
            store.put_many([(key, payload(key, size)) for key, size in more.items()], durable=True)
            sizes |= more
        with blockkv.open(device) as store:
            assert set(store.keys()) == set(sizes)
            assert all(bytes(store.get(key).numpy()) == payload(key, size) for key, size in sizes.items())


# -- cut short ---------------------------------------------------------------------------------------------


def grow_watched(device: SimulatedDevice, look: Callable[[SimulatedDevice], None]) -> None:
    """Grow, and call `look` before every write and flush, and at the end."""

    def before_operation(kind: OperationKind) -> None:
        if kind is not OperationKind.READ:
            look(device)

    device.before_operation = before_operation
    blockkv.grow(device)
    device.before_operation = None
    look(device)


def judge(after: SimulatedDevice, old: Geometry, new: Geometry) -> bool:
    """Whatever a crash left: it opens, holds everything, and can grow. Returns whether it had grown."""
    with open_quietly(after.clone(), read_only=True) as store:
        assert holds(store)
        assert store.check(payload=True).ok
    with open_quietly(after) as store:
        geometry = store._state.geometry
        assert geometry in (old, new)
        store.put("new", payload("new"), durable=True)
    after = after.clone()
    assert blockkv.grow(after)["grown"] is (geometry == old)
    after = after.clone()
    with open_quietly(after) as store:
        assert store._state.geometry == new
        assert holds(store, [*KEYS, "new"])
    return geometry == new


@CASES
@pytest.mark.parametrize("odd", [False, True])
def test_a_crash_before_any_operation_leaves_the_old_store_or_the_new(case: str, odd: bool) -> None:
    before, size_bytes = made(case, odd=odd)
    old = superblock_of(before).geometry
    done = on_larger(before, size_bytes)
    blockkv.grow(done)
    new = superblock_of(done.clone()).geometry
    rng = random.Random(7)
    outcomes = []

    def look(device: SimulatedDevice) -> None:
        for crash in Crash:
            outcomes.append(judge(device.crash_clone(rng, crash), old, new))

    grow_watched(on_larger(before, size_bytes), look)
    assert outcomes.count(True) > 15
    assert outcomes.count(False) > 15
    assert outcomes[-2:] == [True, True]


@CASES
def test_several_crashes_in_a_row(case: str) -> None:
    before, size_bytes = made(case)
    old = superblock_of(before).geometry
    done = on_larger(before, size_bytes)
    blockkv.grow(done)
    new = superblock_of(done.clone()).geometry
    for seed in range(12):
        rng = random.Random(seed)
        device = on_larger(before, size_bytes)
        for _ in range(4):
            device.set_plan(FaultPlan.stop(device.operation_count + rng.randrange(10, 110), seed=seed))
            with contextlib.suppress(blockkv.BlockKVError):
                blockkv.grow(device)
            device = device.crash_clone(rng, rng.choice(list(Crash)))
        judge(device, old, new)


@CASES
def test_an_error_at_any_operation_leaves_the_old_store_or_the_new(case: str) -> None:
    before, size_bytes = made(case)
    old = superblock_of(before).geometry
    done = on_larger(before, size_bytes)
    blockkv.grow(done)
    new = superblock_of(done.clone()).geometry
    failures = 0
    for kind in (OperationKind.WRITE, OperationKind.FLUSH):
        for skip_count in range(sum(one.kind is kind for one in done.operations())):
            plan = FaultPlan((Fault(FaultKind.ERROR, on=kind, skip_count=skip_count),), seed=skip_count)
            device = on_larger(before, size_bytes, plan=plan)
            with pytest.raises((blockkv.DeviceError, blockkv.StoreReadOnly)):
                blockkv.grow(device)
            failures += 1
            judge(device.crash_clone(random.Random(skip_count), Crash.PROCESS_KILL), old, new)
    assert failures > 20


@pytest.mark.parametrize("mistake", ["superblock first", "tail not copied", "areas in the old space"])
def test_the_crashes_would_find(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must not be left out of growing."""
    before, size_bytes = made("again")
    done = on_larger(before, size_bytes)
    blockkv.grow(done)
    new = superblock_of(done.clone()).geometry
    if mistake == "superblock first":
        grow = Log.grow

        def grow_hastily(log: Log, geometry: Geometry) -> None:
            early = dataclasses.replace(
                log.superblock, generation=log.superblock.generation + 1, geometry=geometry
            )
            write_superblock(log._device, early)
            log.superblock = early
            grow(log, geometry)

        monkeypatch.setattr(Log, "grow", grow_hastily)
    elif mistake == "tail not copied":
        monkeypatch.setattr(
            Log,
            "grow",
            lambda log, geometry: (setattr(log, "geometry", geometry), log.checkpoint()),
        )
    else:
        active = superblock_of(before).checkpoint_zone
        new = dataclasses.replace(new, checkpoint_a=active, checkpoint_b=active)
        monkeypatch.setattr("blockkv.store.enlarge.grown", lambda *arguments: new)
    rng = random.Random(3)

    def look(device: SimulatedDevice) -> None:
        for _ in range(3):
            with open_quietly(device.crash_clone(rng)) as store:
                assert holds(store)
                assert not store.findings

    with pytest.raises((AssertionError, blockkv.BlockKVError)):
        grow_watched(on_larger(before, size_bytes), look)


@pytest.mark.parametrize("seed", range(6))
def test_a_life_with_growth(seed: int) -> None:
    """Puts, deletes, growth, clean stops, kills and power cuts, in any order."""
    rng = random.Random(seed)
    size_bytes = 16 * MIB
    device = SimulatedDevice(size_bytes, strict=True)
    blockkv.format(device, average_chunk=rng.choice(["4KiB", "64KiB", "1MiB"]))
    stored: dict[str, int] = {}
    growths = 0
    device = device.clone()
    for turn in range(14):
        with contextlib.closing(open_quietly(device, evict=False)) as store:
            assert set(store.keys()) == set(stored)
            assert all(bytes(store.get(key).numpy()) == payload(key, size) for key, size in stored.items())
            for number in range(rng.randrange(12)):
                key, size = f"{turn} {number}", rng.randrange(1, 400_000)
                with contextlib.suppress(blockkv.StoreFull):
                    store.put(key, payload(key, size))
                    stored[key] = size
            for key in rng.sample(sorted(stored), len(stored) // 4):
                store.delete(key)
                del stored[key]
            if rng.random() < 0.5:
                store.checkpoint()
            store.commit()
            crash = rng.choice([None, Crash.POWER_CUT, Crash.PROCESS_KILL])
            after = device.crash_clone(rng, crash) if crash else None
        device = after if after is not None else device.clone()
        if rng.random() < 0.6:
            size_bytes += rng.choice([PAGE_BYTES, MIB, 7 * MIB, 40 * MIB])
            device = on_larger(device, size_bytes)
            with contextlib.suppress(blockkv.DeviceTooSmall):
                growths += blockkv.grow(device)["grown"]
            device = device.clone()
    assert growths
    with open_quietly(device) as store:
        assert set(store.keys()) == set(stored)
        assert store.check(payload=True).ok


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.fixture
def image(image_dir: Path) -> Path:
    """A store in a file that has become twice as large."""
    path = image_dir / "store.img"
    blockkv.format(path, size=SIZE_BYTES)
    with blockkv.open(path) as store:
        store.put_many([(key, payload(key)) for key in KEYS])
    with path.open("r+b") as file:
        file.truncate(2 * SIZE_BYTES)
    return path


def test_a_store_in_use_is_refused(image: Path) -> None:
    with blockkv.open(image) as store:
        with pytest.raises(blockkv.DeviceBusy):
            blockkv.grow(image)
        assert holds(store)
        assert store.info()["growable_bytes"] == SIZE_BYTES
    assert blockkv.grow(image)["grown"]


def refused(path: Path | list[Path], kind: type[Exception], match: str) -> None:
    paths = path if isinstance(path, list) else [path]
    before = [one.read_bytes() for one in paths]
    with pytest.raises(kind, match=match):
        blockkv.grow(path)
    assert [one.read_bytes() for one in paths] == before


def test_a_device_that_shrank_is_refused(image: Path) -> None:
    with image.open("r+b") as file:
        file.truncate(SIZE_BYTES - MIB)
    refused(image, blockkv.DeviceTooSmall, "shrank")


def test_too_little_new_space_is_refused(image_dir: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="64MiB", average_chunk="4KiB")
    with path.open("r+b") as file:
        file.truncate(72 * MIB)
    refused(path, blockkv.DeviceTooSmall, "at least")
    with blockkv.open(path) as store:
        assert store.info()["growable_bytes"] == 0


@pytest.mark.requires_root
def test_a_read_only_device_is_refused(image: Path) -> None:
    attach = ["losetup", "--find", "--show", "--read-only", str(image)]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    with pytest.raises(blockkv.DeviceReadOnly):
        blockkv.grow(device)


@pytest.mark.parametrize("offset", [200, SIZE_BYTES - MIB + 200])
def test_a_damaged_store_is_refused_until_it_is_repaired(image: Path, offset: int) -> None:
    with image.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff")
    refused(image, blockkv.FormatError, "damaged and does not grow: superblock slot .* check --repair")
    with blockkv.open(image) as store:
        store.check(repair=True)
    assert blockkv.grow(image)["grown"]


def test_features_of_a_later_version_are_not_written_to(image: Path) -> None:
    with blockkv.open(image, read_only=True) as store:
        found = store._state.log.superblock
    later = dataclasses.replace(found, generation=found.generation + 1, ro_compat=1 << 40)
    with image.open("r+b") as file:
        for slot_index in (later.generation % 4, 4 + later.generation % 4):
            file.seek(later.geometry.slot_offsets[slot_index])
            file.write(later.encode(slot_index))
    refused(image, blockkv.StoreReadOnly, "upgrade blockkv")


def test_members_of_an_array_grow_together(image_dir: Path) -> None:
    members = [image_dir / f"{number}.img" for number in range(3)]
    blockkv.format(members, size=SIZE_BYTES)
    with blockkv.open(members) as store:
        store.put_many([(key, payload(key)) for key in KEYS])
        data_bytes = store.info()["data_bytes"]
    for member in members[:2]:
        with member.open("r+b") as file:
            file.truncate(2 * SIZE_BYTES)
    refused(members[0], blockkv.WrongStore, "grow together")
    refused(members[:2], blockkv.WrongStore, "grow together")
    outcome = blockkv.grow(members)
    assert outcome["grown"]
    assert [one["grown"] for one in outcome["members"]] == [True, True, False]
    assert not blockkv.grow(members)["grown"]
    with blockkv.open(members) as store:
        assert store.info()["data_bytes"] == data_bytes + 2 * SIZE_BYTES
        assert store.info()["term"] == 1
        assert holds(store)
        assert not store.findings


# -- what else lies at the end of a larger device ----------------------------------------------------------


def test_the_tail_of_another_store_is_not_taken_for_its_own(image: Path, image_dir: Path) -> None:
    """A volume is extended by what another store ended on."""
    for other_bytes in (2 * SIZE_BYTES, 3 * SIZE_BYTES):
        other = image_dir / f"other-{other_bytes}.img"
        blockkv.format(other, size=other_bytes)
        for _ in range(20):
            blockkv.open(other).close()
        with image.open("r+b") as file:
            file.seek(2 * SIZE_BYTES - MIB)
            file.write(other.read_bytes()[-MIB:])
        with blockkv.open(image) as store:
            assert holds(store)
            assert not store.findings
        with blockkv.open(image, read_only=True) as store:
            assert store.check().ok
    assert blockkv.grow(image)["grown"]
    with blockkv.open(image) as store:
        assert holds(store)
        assert store.info()["device_bytes"] == 2 * SIZE_BYTES


def test_an_older_image_of_itself_is_put_back(image: Path) -> None:
    """On a device that the store has grown to since: its tail is still there, and newer."""
    old = image.read_bytes()[:SIZE_BYTES]
    blockkv.grow(image)
    for _ in range(3):
        blockkv.open(image).close()
    with image.open("r+b") as file:
        file.write(old)
    with blockkv.open(image) as store:
        assert store.info()["device_bytes"] == SIZE_BYTES
        assert holds(store)
    assert blockkv.grow(image)["grown"]
    with blockkv.open(image) as store:
        assert holds(store)


def test_the_tail_alone_still_tells_what_has_grown(image: Path) -> None:
    blockkv.grow(image)
    with image.open("r+b") as file:
        file.write(bytes(MIB))
    with blockkv.open(image) as store:
        assert store.info()["device_bytes"] == 2 * SIZE_BYTES
        assert holds(store)


def test_tensors_are_what_they_were(image: Path) -> None:
    tensor = torch.randn(3, 5).half()
    with blockkv.open(image) as store:
        store.put("tensor", {"a": tensor})
    blockkv.grow(image)
    with blockkv.open(image) as store:
        assert torch.equal(store.get("tensor")["a"], tensor)
