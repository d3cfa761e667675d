"""Faults of an NVMe drive; `tools/nvme_vm/nvme_vm.py faults` runs this in the guest.

What the driver makes of them: a media error is ENODATA, on reads and on writes. A namespace that went away
reads as nothing and has no space. Under passthrough the engine makes the same of the drive's own answers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/nvme_vm"))

from guest_devices import Control, namespaces

MIB = 1 << 20
CHUNK_BYTES = 200_000
BOUNDED_S = 120.0
"""Far more than anything here takes, however slow the guest; only a hang is longer."""
NVME_IOCTL_ADMIN_CMD = 0xC0484E41
NAMESPACE_ATTACHMENT = 0x15


@pytest.fixture(scope="session")
def control() -> Control:
    return Control(namespaces()[2])


@pytest.fixture
def drive(control: Control) -> Iterator[Path]:
    """A namespace with an empty store; healed afterwards."""
    device = namespaces()[1]
    blockkv.format(device, force=True)
    yield device
    control.say("heal data")


@pytest.fixture(params=["io_uring", "passthrough"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def payload(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (CHUNK_BYTES,), dtype=torch.uint8, generator=generator)


def fill(store: blockkv.Store, count: int) -> None:
    store.put_many([(f"k{number}", payload(number)) for number in range(count)], durable=True)


def exact(store: blockkv.Store, numbers: list[int]) -> bool:
    found = store.get_many([f"k{number}" for number in numbers])
    return all(
        tensor is not None and torch.equal(tensor, payload(number))
        for number, tensor in zip(numbers, found, strict=True)
    )


def place_of(store: blockkv.Store, key: str) -> int:
    info = store.entry(key)
    assert info is not None
    return int(store.info()["data_offset_bytes"]) + info.extents[0][0] * 4096


def test_a_media_error_on_read_is_a_miss(drive: Path, control: Control, engine: Any) -> None:
    with blockkv.open(drive, engine=engine) as store:
        fill(store, 8)
        place = place_of(store, "k3") + 2 * 4096
        control.say(f"fail data read {place} 512")
        descriptor = os.open(drive, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, 4096) as page, pytest.raises(OSError, match="No data available"):
            os.preadv(descriptor, [page], place)
        os.close(descriptor)
        out = torch.full((CHUNK_BYTES,), 7, dtype=torch.uint8)
        outs = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(8)]
        outs[3] = out
        assert store.get_many([f"k{number}" for number in range(8)], outs) == [n != 3 for n in range(8)]
        assert not out.any()
        assert all(torch.equal(outs[number], payload(number)) for number in range(8) if number != 3)
        stats = store.stats()
        assert (stats["get_device_error"], stats["get_checksum_mismatch"]) == (1, 0)
        assert not store.contains("k3")
        # set aside: the new chunk goes elsewhere
        assert store.put("k3", payload(3), durable=True)
        assert exact(store, list(range(8)))
    with blockkv.open(drive) as store:
        assert exact(store, list(range(8)))
        assert int(control.ask("touched data")) > 0


def test_a_media_error_on_a_data_write_fails_that_put(drive: Path, control: Control, engine: Any) -> None:
    with blockkv.open(drive, engine=engine) as store:
        fill(store, 4)
        control.say(f"fail data write {store.info()['data_offset_bytes']} {64 * MIB}")
        for durable in (False, True):
            with pytest.raises(blockkv.DeviceError, match="No data available") as caught:
                store.put("k4", payload(4), durable=durable)
            assert caught.value.errno == errno.ENODATA
        assert not store.contains("k4")
        assert store.stats()["put_device_error"] == 2
        assert exact(store, [0, 1, 2, 3])
        control.say("heal data")
        assert store.put("k4", payload(4), durable=True)
    with blockkv.open(drive) as store:
        assert exact(store, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("fault", ["write 0", "flush 0"])
def test_a_metadata_write_or_flush_that_fails_ends_writing(
    drive: Path, control: Control, fault: str, engine: Any
) -> None:
    store = blockkv.open(drive, engine=engine, commit_interval_ms=None)
    fill(store, 4)
    control.say(f"fail data {fault} {store.info()['data_offset_bytes']}")
    with pytest.raises(blockkv.StoreReadOnly):
        store.put("k4", payload(4), durable=True)
    assert int(control.ask("touched data")) > 0
    control.say("heal data")
    # it stays so: what the failed flush was to cover may be gone
    actions: list[Callable[[], Any]] = [lambda: store.put("x", b"y"), store.commit, store.checkpoint]
    for action in actions:
        with pytest.raises(blockkv.StoreReadOnly):
            action()
    assert exact(store, [0, 1, 2, 3])
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()
    with blockkv.open(drive) as store:
        assert exact(store, [0, 1, 2, 3])
        found = store.get("k4")
        assert found is None or torch.equal(found, payload(4))
        assert store.put("k5", payload(5), durable=True)


def kernel_log() -> str:
    return subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout


class Users:
    """Threads that put and get until told to stop or refused. Their refusals and their findings are kept."""

    def __init__(self, store: blockkv.Store, first: int) -> None:
        self.store = store
        self.acknowledged: list[int] = []
        self.wrong: list[str] = []
        self.misses = 0
        self.refusals: list[BaseException] = []
        self.stop = threading.Event()
        self.under_way = threading.Semaphore(0)
        writers = [threading.Thread(target=self._write, args=(first + 1000 * n,)) for n in range(2)]
        self._threads = [*writers, *(threading.Thread(target=self._read) for _ in range(2))]
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        for _ in range(6):
            assert self.under_way.acquire(timeout=BOUNDED_S)

    def join(self) -> None:
        deadline = time.monotonic() + BOUNDED_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "an operation hangs"

    def _write(self, number: int) -> None:
        while not self.stop.is_set():
            number += 1
            try:
                self.store.put(f"k{number}", payload(number), durable=True)
            except blockkv.BlockKVError as error:
                self.refusals.append(error)
                return
            self.acknowledged.append(number)
            self.under_way.release()

    def _read(self) -> None:
        while not self.stop.is_set():
            try:
                found = self.store.get("k1")
            except blockkv.BlockKVError as error:
                self.refusals.append(error)
                return
            if found is None:
                self.misses += 1
            elif not torch.equal(found, payload(1)):
                self.wrong.append("other bytes")
                return
            self.under_way.release()


def test_a_drive_that_hangs_and_comes_back(drive: Path, control: Control) -> None:
    """The driver aborts, resets the controller and sends the requests again; the store only waits."""
    with blockkv.open(drive) as store:
        fill(store, 4)
        users = Users(store, 10_000)
        began = time.monotonic()
        control.say("silent data 12")
        assert exact(store, [0, 1, 2, 3])
        assert store.put("k4", payload(4), durable=True)
        assert time.monotonic() - began >= 12
        users.stop.set()
        users.join()
        assert (users.wrong, users.refusals, users.misses) == ([], [], 0)
        assert exact(store, users.acknowledged)
        assert store.check(payload=True).ok
        stats = store.stats()
        assert (stats["get_misses"], stats["put_device_error"]) == (0, 0)
    assert "timeout" in kernel_log()
    with blockkv.open(drive) as store:
        assert exact(store, [0, 1, 2, 3, 4, *users.acknowledged])


def use_until_gone(device: Path, engine: Any, take_away: Callable[[], None]) -> list[int]:
    """Take the namespace away under load; everything ends, in the right way. Returns the acknowledged."""
    blockkv.format(device, force=True)
    store = blockkv.open(device, engine=engine)
    fill(store, 4)
    users = Users(store, 10_000)
    gets = [store.submit_get("k2") for _ in range(20)]
    puts = [store.submit_put(f"k{number}", payload(number), durable=True) for number in range(100, 120)]
    take_away()
    wait_for(lambda: not device.exists(), "the driver has not noticed")
    users.join()
    assert not users.wrong
    assert len(users.refusals) == 4
    for error in users.refusals:
        assert isinstance(error, blockkv.DeviceError | blockkv.StoreReadOnly), repr(error)
    for future in (*gets, *puts):
        try:
            found = future.result(BOUNDED_S)
        except blockkv.BlockKVError:
            continue
        # until the driver has noticed, the namespace answers that it does not know the command: a miss
        assert found is True or found is None or torch.equal(found, payload(2))
    acknowledged = [number for number, future in enumerate(puts, 100) if not future.exception()]
    with pytest.raises(blockkv.DeviceLost):
        store.get("k1")
    assert store.stats()["get_device_lost"] > 0
    assert store.stats()["chunks_dropped_damaged"] == 0
    for durable in (False, True):
        with pytest.raises((blockkv.DeviceLost, blockkv.StoreReadOnly)):
            store.put("late", payload(1), durable=durable)
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()
    return [0, 1, 2, 3, *users.acknowledged, *acknowledged]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUNDED_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_detached_namespace_is_lost_and_whole_when_it_returns(engine: Any) -> None:
    device = namespaces("detachable")[1]
    controller = Path("/dev") / Path("/sys/block", device.name, "device").resolve().name

    def attach(selection: int) -> None:
        """NVMe's Namespace Attachment: 0 attaches, 1 detaches. Then the driver looks."""
        controllers = mmap.mmap(-1, 4096)
        identifier = int(Path("/sys/class/nvme", controller.name, "cntlid").read_text())
        controllers[:4] = struct.pack("<HH", 1, identifier)
        address = ctypes.addressof(ctypes.c_char.from_buffer(controllers))
        layout = "<BBHIIIQQIIIIIIIIII"  # struct nvme_passthru_cmd
        command = bytearray(
            struct.pack(
                layout,
                *(NAMESPACE_ATTACHMENT, 0, 0, 1, 0, 0, 0, address, 0, 4096, selection, 0, 0, 0, 0, 0, 0, 0),
            )
        )
        descriptor = os.open(controller, os.O_RDWR)
        assert fcntl.ioctl(descriptor, NVME_IOCTL_ADMIN_CMD, command) == 0, "refused by the controller"
        os.close(descriptor)
        Path("/sys/class/nvme", controller.name, "rescan_controller").write_text("1")

    numbers = use_until_gone(device, engine, lambda: attach(1))
    attach(0)
    wait_for(lambda: bool(namespaces("detachable")), "the namespace did not come back")
    with blockkv.open(namespaces("detachable")[1]) as store:
        assert exact(store, numbers)
        assert store.check(payload=True).ok


def test_a_removed_controller_takes_its_namespaces_along(control: Control, engine: Any) -> None:
    controller = {"io_uring": "removable-1", "passthrough": "removable-2"}[engine]
    device = namespaces(controller)[1]
    use_until_gone(device, engine, lambda: control.say(f"remove {controller}"))
    wait_for(lambda: not namespaces(controller), "the controller is still there")
