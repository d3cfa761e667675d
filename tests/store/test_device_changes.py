"""A device that is not what it was: renamed, grown, shrunk, copied, write-protected, gone in the middle."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import subprocess
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv.testing import Fault, FaultKind, FaultPlan, SimulatedDevice

SIZE_BYTES = 32 << 20
PATIENCE_S = 60
"""Far more than anything here takes: what hangs is told from what is slow."""


def payload(number: int, size_bytes: int = 50_000) -> torch.Tensor:
    return torch.randint(
        0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number)
    )


def tool(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout.strip()


def fill(target: Any, count: int = 20) -> None:
    blockkv.format(target, average_chunk="64KiB")
    with blockkv.open(target) as store:
        store.put_many([(f"k{number}", payload(number)) for number in range(count)], durable=True)


def holds_everything(store: blockkv.Store, count: int = 20) -> bool:
    values = store.get_many([f"k{number}" for number in range(count)])
    return all(torch.equal(value, payload(number)) for number, value in enumerate(values))


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "store"
    with path.open("wb") as file:
        file.truncate(SIZE_BYTES)
    return path


def attach(image: Path, *options: str) -> Path:
    return Path(tool("losetup", "--find", "--show", "--direct-io=on", *options, image))


# -- between two opens -------------------------------------------------------------------------------------


def test_renamed(image: Path) -> None:
    fill(image)
    other = image.rename(image.with_name("elsewhere"))
    with blockkv.open(other) as store:
        assert store.info()["path"] == str(other)
        assert holds_everything(store)


@pytest.mark.requires_root
def test_another_device_number(image: Path) -> None:
    first = attach(image)
    fill(first)
    tool("losetup", "--detach", first)
    placeholder = image.with_name("placeholder")
    placeholder.write_bytes(bytes(1 << 20))
    attach(placeholder)  # takes the number that became free
    second = attach(image)
    assert second != first
    with blockkv.open(second) as store:
        assert holds_everything(store)
    tool("losetup", "--detach", second)
    with blockkv.open(image) as store:  # and as what it is, a file
        assert holds_everything(store)


@pytest.mark.parametrize("more_bytes", [512, 4096, 1 << 20, 40 << 20])
def test_grown(image: Path, more_bytes: int) -> None:
    fill(image)
    with image.open("r+b") as file:
        file.truncate(SIZE_BYTES + more_bytes)
    for turn in range(2):
        with blockkv.open(image) as store:
            info = store.info()
            assert info["device_bytes"] == SIZE_BYTES
            assert info["limits"]["size_bytes"] == SIZE_BYTES + more_bytes
            assert holds_everything(store)
            assert store.put(f"more {turn}", payload(turn), durable=True)
            assert store.check(payload=True).ok
    with image.open("rb") as file:
        file.seek(SIZE_BYTES)
        assert not any(file.read())


@pytest.mark.requires_root
def test_a_loop_device_that_grew_while_open(image: Path) -> None:
    device = attach(image)
    fill(device)
    with blockkv.open(device) as store:
        with image.open("r+b") as file:
            file.truncate(2 * SIZE_BYTES)
        tool("losetup", "--set-capacity", device)
        assert store.put("more", payload(99), durable=True)
        assert holds_everything(store)
    with blockkv.open(device) as store:
        assert store.info()["device_bytes"] == SIZE_BYTES
        assert torch.equal(store.get("more"), payload(99))


@pytest.mark.parametrize("less_bytes", [4096, 1 << 20, 20 << 20, SIZE_BYTES - 4096])
def test_shrunk(image: Path, less_bytes: int) -> None:
    fill(image)
    whole = image.read_bytes()
    with image.open("r+b") as file:
        file.truncate(SIZE_BYTES - less_bytes)
    for read_only in (False, True):
        expected = blockkv.NotFormatted if SIZE_BYTES - less_bytes < 4 << 20 else blockkv.DeviceTooSmall
        with pytest.raises(expected) as raised:
            blockkv.open(image, read_only=read_only)
        if expected is blockkv.DeviceTooSmall:
            assert str(SIZE_BYTES) in str(raised.value)
            assert str(SIZE_BYTES - less_bytes) in str(raised.value)
    assert image.read_bytes() == whole[: SIZE_BYTES - less_bytes]
    image.write_bytes(whole)
    with blockkv.open(image) as store:
        assert holds_everything(store)


def test_a_copy_beside_the_original(image: Path) -> None:
    fill(image)
    copy = Path(shutil.copy(image, image.with_name("copy")))
    before = copy.read_bytes()
    with blockkv.open(image) as store:
        with pytest.raises(blockkv.WrongStore, match="copy"):
            blockkv.open(copy)
        with pytest.raises(blockkv.WrongStore, match=store.info()["uuid"]):
            blockkv.open(copy, read_only=True)
        assert copy.read_bytes() == before
    with blockkv.open(copy) as store:  # alone it is as good as the original
        assert holds_everything(store)


@pytest.mark.requires_root
def test_read_only(image: Path) -> None:
    fill(image)
    device = attach(image, "--read-only")
    before = image.read_bytes()
    with pytest.raises(blockkv.DeviceReadOnly, match="read_only=True"):
        blockkv.open(device)
    with pytest.raises(blockkv.DeviceReadOnly):
        blockkv.format(device, force=True)
    with blockkv.open(device, read_only=True) as store:
        assert holds_everything(store)
        for write in (
            lambda: store.put("new", payload(1)),
            lambda: store.put_many([("new", payload(1))], durable=True),
            lambda: store.submit_put("new", payload(1)).result(PATIENCE_S),
            lambda: store.delete("k1"),
            store.commit,
            store.checkpoint,
        ):
            with pytest.raises(blockkv.StoreReadOnly, match="read-only"):
                write()
        assert len(store) == 20
    assert image.read_bytes() == before


# -- under an open store -----------------------------------------------------------------------------------


def test_a_file_that_is_cut_short(image: Path) -> None:
    """Writes behind the end of a file make it longer again: no error tells that the rest is gone."""
    fill(image)
    store = blockkv.open(image, commit_interval_ms=None)
    with image.open("r+b") as file:
        file.truncate(8 << 20)
    failed = 0
    for number in range(200, 260):
        try:
            store.put(f"k{number}", payload(number), durable=True)
        except (blockkv.StoreReadOnly, blockkv.DeviceError) as error:
            assert "truncated" in str(error)  # noqa: PT017
            failed += 1
    assert failed == 60, "nothing may be acknowledged as durable on a file that lost its end"
    for number in range(20):
        with contextlib.suppress(
            blockkv.DeviceLost
        ):  # what ends before it should is a namespace that went away
            value = store.get(f"k{number}")
            assert value is None or torch.equal(value, payload(number))
    started = time.monotonic()
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()
    assert time.monotonic() - started < PATIENCE_S
    with pytest.raises(blockkv.DeviceTooSmall):
        blockkv.open(image)


@pytest.mark.requires_root
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_loop_device_whose_file_is_cut_short(image: Path, engine: Any) -> None:
    """What the loop device had is gone: reads end with EIO, as they do on a drive that fails."""
    device = attach(image)
    fill(device, 200)
    store = blockkv.open(device, commit_interval_ms=None, engine=engine, evict=False)
    with image.open("r+b") as file:
        file.truncate(6 << 20)
    futures = [store.submit_get(f"k{number}") for number in range(200)]
    puts = [store.submit_put(f"n{number}", payload(number)) for number in range(40)]
    _, pending = wait([*futures, *puts], PATIENCE_S)
    assert not pending
    for number, future in enumerate(futures):
        value = future.result()
        assert value is None or torch.equal(value, payload(number))
    assert sum(future.result() is None for future in futures) > 50
    with contextlib.suppress(blockkv.StoreReadOnly):
        store.close()


@pytest.mark.requires_root
def test_a_device_that_becomes_read_only(image: Path) -> None:
    device = attach(image)
    fill(device)
    store = blockkv.open(device, commit_interval_ms=None)
    tool("blockdev", "--setro", device)
    try:
        for number in range(3):
            with pytest.raises((blockkv.DeviceError, blockkv.StoreReadOnly)):
                store.put(f"new {number}", payload(number), durable=True)
        assert holds_everything(store)
        with contextlib.suppress(blockkv.StoreReadOnly):
            store.close()
    finally:
        tool("blockdev", "--setrw", device)
    with blockkv.open(device) as store:
        assert holds_everything(store)


def busy_device(errno_: int | None) -> SimulatedDevice:
    """A filled device that completes in the background, slowly; with `errno_` all fails after a while."""
    filled = SimulatedDevice(SIZE_BYTES)
    fill(filled)
    faults = [Fault(FaultKind.LATENCY, latency_us=500, fire_count=None)]
    if errno_ is not None:
        faults.append(Fault(FaultKind.ERROR, errno=errno_, skip_count=100, fire_count=None))
    device = SimulatedDevice(SIZE_BYTES, threads=True, plan=FaultPlan(tuple(faults)))
    for unit in filled.written_units():
        device.poke(unit * 4096, filled.peek(unit * 4096, 4096))
    return device


@pytest.mark.parametrize("code", [None, errno.ENODEV, errno.EIO, errno.ETIMEDOUT, errno.ENODATA])
@pytest.mark.parametrize("commit_interval_ms", [None, 2])
def test_gone_in_the_middle(code: int | None, commit_interval_ms: float | None) -> None:
    """Everything in flight ends, with an error or the right bytes, and so does the close."""
    device = busy_device(code)
    store = blockkv.open(device, commit_interval_ms=commit_interval_ms)
    gets, puts = [], []
    for number in range(150):
        gets.append((number % 20, store.submit_get(f"k{number % 20}")))
        puts.append(store.submit_put(f"n{number}", payload(number), durable=number % 5 == 0))
        if code is None and number == 75:
            wait([gets[0][1]], PATIENCE_S)
            device.stop()
    _, pending = wait([*(future for _, future in gets), *puts], PATIENCE_S)
    assert not pending
    outcomes = []
    for number, future in gets:
        error = future.exception()
        if error is None:
            value = future.result()
            outcomes.append("hit" if value is not None else "miss")
            assert value is None or torch.equal(value, payload(number))
        else:
            outcomes.append(type(error).__name__)
    lost = code in (None, errno.ENODEV)
    assert set(outcomes) <= {"hit", "DeviceLost" if lost else "miss"}
    assert len(set(outcomes)) == 2, "the device went away too early or too late for this test"
    for future in puts:
        error = future.exception()
        assert error is None or isinstance(error, (blockkv.DeviceError, blockkv.StoreReadOnly)), error
    assert any(future.exception() is not None for future in puts)
    with pytest.raises((blockkv.DeviceError, blockkv.StoreReadOnly)):
        store.put("late", payload(1), durable=True)
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()
    with pytest.raises(blockkv.StoreClosed):
        store.get("k1")


def test_durable_chunks_are_there_when_it_returns() -> None:
    device = busy_device(None)
    store = blockkv.open(device, commit_interval_ms=None)
    acknowledged = []
    for number in range(100):
        if number == 60:
            device.stop()
        try:
            store.put(f"n{number}", payload(number), durable=True)
            acknowledged.append(number)
        except (blockkv.DeviceError, blockkv.StoreReadOnly):
            pass
    assert len(acknowledged) == 60
    after = device.crash_clone(random.Random(1))
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()
    with blockkv.open(after) as again:
        assert holds_everything(again)
        for number in acknowledged:
            assert torch.equal(again.get(f"n{number}"), payload(number))
