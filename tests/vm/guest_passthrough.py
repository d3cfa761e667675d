"""NVMe passthrough in a virtual machine; `tools/nvme_vm/nvme_vm.py suite` runs this in the guest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv.device.base import UNIT_BYTES, Direction
from blockkv.device.passthrough import block_device_of

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools/nvme_vm"))

from engine_tools import MIB, Memory, batch_of, engine_on, one_extent, run
from engine_workload import Workload
from guest_devices import namespaces

GIVEN_DEVICES = [Path(name) for name in os.environ["BLOCKKV_TEST_DEVICES"].split(":")]
SIZE_BYTES = 32 * MIB
NOBODY = 65534


def counted_by_the_block_layer(disk: Path) -> dict[str, int]:
    """Requests it has completed: Documentation/block/stat.rst. Passthrough is not among them."""
    fields = [int(word) for word in Path("/sys/block", disk.name, "stat").read_text().split()]
    return {"read": fields[0], "write": fields[4], "discard": fields[11], "flush": fields[15]}


def lba_bytes_of(disk: Path) -> int:
    return int(Path("/sys/block", disk.name, "queue/logical_block_size").read_text())


def size_of(disk: Path) -> int:
    return 512 * int(Path("/sys/block", disk.name, "size").read_text())


def generic_of(disk: Path) -> Path:
    return disk.with_name(disk.name.replace("nvme", "ng"))


@pytest.fixture(params=[512, 4096])
def namespace(request: pytest.FixtureRequest) -> Path:
    """A namespace of zeros with LBAs of that size."""
    (disk,) = (
        disk for disk in GIVEN_DEVICES if lba_bytes_of(disk) == request.param and size_of(disk) == SIZE_BYTES
    )
    subprocess.run(["blkdiscard", "--force", "--zeroout", disk], check=True)
    return disk


either_lba_size = pytest.mark.parametrize("namespace", [4096], indirect=True)
"""Of what does not depend on it."""


def tensor(number: int, size_bytes: int = 300_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def test_random_batches_match_a_copy_in_memory(namespace: Path) -> None:
    """Up to twice what the controller takes in one command, from memory of any alignment."""
    with engine_on(namespace, "passthrough") as device:
        before = counted_by_the_block_layer(namespace)
        workload = Workload(device, seed=1)
        for _ in range(40):
            workload.step()
        workload.compare()
        assert counted_by_the_block_layer(namespace) == before
        counters = device.counters()
        contents = bytes(workload.contents)
    for name in ("bounced_bytes", "direct_bytes", "coalesced_requests", "hashed_bytes"):
        assert counters[name] > 0
    assert counters["short_transfers"] == counters["isolated_requests"] == 0
    with engine_on(namespace, "io_uring") as device:
        assert device.read(0, len(contents)) == contents


def test_commands_are_cut_at_the_limits_of_the_controller(namespace: Path) -> None:
    """MDTS is 512 KiB and a command describes 127 pages; a larger one would be refused."""
    memory = Memory(9 * MIB)
    memory.fill(os.urandom(9 * MIB))
    for start in (0, 512, 64, 1):
        with engine_on(namespace, "passthrough") as device:
            payload = memory.read(start, 8 * MIB)
            extents = one_extent(UNIT_BYTES, 8 * MIB)
            segments = [(memory.at(start), 8 * MIB)]
            assert run(device, batch_of(Direction.WRITE, [(8 * MIB, extents, segments)])) == [0]
            assert device.read(UNIT_BYTES, 8 * MIB) == payload
            assert device.counters()["device_requests"] >= 2 * 16
            assert (device.counters()["bounced_bytes"] > 0) == (start == 1)


def test_registered_memory(namespace: Path) -> None:
    """Linux 6.1 takes it in regions of no more pages than a command has; else the engine goes on without."""
    small, large = Memory(64 * 1024), Memory(4 * MIB)
    small.fill(os.urandom(64 * 1024))
    large.fill(os.urandom(4 * MIB))

    def write_and_read(memory: Memory, length: int) -> None:
        transfer = [(length, one_extent(0, length), [(memory.at(0), length)])]
        written = memory.read(0, length)
        assert run(device, batch_of(Direction.WRITE, transfer)) == [0]
        memory.fill(bytes(length))
        assert run(device, batch_of(Direction.READ, transfer)) == [0]
        assert memory.read(0, length) == written

    with engine_on(namespace, "passthrough") as device:
        handle = device.register(small.at(0), 64 * 1024)
        assert handle >= 0
        write_and_read(small, 64 * 1024)
        counters = device.counters()
        assert (counters["fixed_requests"], counters["device_requests"], counters["resubmitted"]) == (2, 2, 0)
        other = device.register(large.at(0), 4 * MIB)
        write_and_read(large, 4 * MIB)
        assert device.counters()["fixed_requests"] > 2
        write_and_read(small, 64 * 1024)
        device.unregister(other)
        device.unregister(handle)
        write_and_read(large, 4 * MIB)


def test_flush_and_discard_are_commands(namespace: Path) -> None:
    with engine_on(namespace, "passthrough") as device:
        device.write(MIB, b"x" * MIB)
        before = counted_by_the_block_layer(namespace)
        device.flush()
        device.discard(MIB, MIB)
        after = counted_by_the_block_layer(namespace)
        assert (after["flush"] - before["flush"], after["discard"] - before["discard"]) == (1, 1)
        assert device.read(MIB, MIB) == bytes(MIB)
        assert (device.counters()["flushes"], device.counters()["discards"]) == (1, 1)


@either_lba_size
def test_what_others_read_afterwards_is_what_was_written(namespace: Path) -> None:
    """The page cache of the block device does not see the commands."""
    with namespace.open("rb") as reader:
        assert reader.read(4096) == bytes(4096)
        with engine_on(namespace, "passthrough") as device:
            device.write(0, b"y" * 4096)
        reader.seek(0)
        assert reader.read(4096) == b"y" * 4096


def test_a_store_lives_behind_either_name_and_either_engine(namespace: Path) -> None:
    blockkv.format(namespace)
    generic = generic_of(namespace)
    assert block_device_of(generic) == str(namespace)
    ways: list[tuple[Path, dict[str, Any], str]] = [
        (namespace, {"engine": "passthrough"}, "passthrough"),
        (generic, {}, "passthrough"),
        (namespace, {}, "io_uring"),  # which is what "auto" takes
        (generic, {"engine": "passthrough", "discard": True}, "passthrough"),
    ]
    for number, (path, options, engine) in enumerate(ways):
        with blockkv.open(path, **options) as store:
            info = store.info()
            assert (info["path"], info["engine"]) == (str(namespace), engine)
            assert (f"through {generic}" in info["engine_reason"]) == (engine == "passthrough")
            for earlier in range(number):
                assert torch.equal(store.get(f"k{earlier}"), tensor(earlier))
                assert torch.equal(store.get(f"large {earlier}"), tensor(earlier, 3 * MIB))
            assert store.put_many(
                [(f"k{number}", tensor(number)), (f"large {number}", tensor(number, 3 * MIB))], durable=True
            )
            assert store.put(f"gone {number}", tensor(number))
            assert store.delete(f"gone {number}", durable=True)
            assert store.check(payload=True).ok
    with pytest.raises(blockkv.InvalidArgument, match=f"give {namespace}"):
        blockkv.open(generic, engine="io_uring")
    with blockkv.open(generic, read_only=True) as store:
        assert (store.info()["engine"], len(list(store.keys()))) == ("passthrough", 8)


@contextmanager
def mounted(disk: Path) -> Iterator[None]:
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    subprocess.run(["mount", disk, "/mnt"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "/mnt"], check=True)


@either_lba_size
def test_the_block_device_is_held(namespace: Path) -> None:
    blockkv.format(namespace)
    generic = generic_of(namespace)
    with blockkv.open(generic) as store:
        for path in (namespace, generic):
            with pytest.raises(blockkv.DeviceBusy):
                blockkv.open(path)
        with pytest.raises(blockkv.DeviceBusy):
            blockkv.open(generic, read_only=True)
        with pytest.raises(OSError, match="busy"):
            os.open(namespace, os.O_RDWR | os.O_EXCL)
        store.put("k", b"v", durable=True)
    with blockkv.open(namespace), pytest.raises(blockkv.DeviceBusy):
        blockkv.open(generic)
    with mounted(namespace), pytest.raises(blockkv.DeviceBusy, match="mounted on /mnt"):
        blockkv.open(generic)


@either_lba_size
def test_a_partition_is_refused(namespace: Path) -> None:
    subprocess.run(["addpart", namespace, "1", "2048", "16384"], check=True)
    partition = namespace.with_name(f"{namespace.name}p1")
    try:
        blockkv.format(partition)
        with pytest.raises(blockkv.DeviceError, match=f"is a partition of {namespace.name}"):
            blockkv.open(partition, engine="passthrough")
        with blockkv.open(partition) as store:  # nothing is left open or locked
            assert store.info()["engine"] == "io_uring"
    finally:
        subprocess.run(["delpart", namespace, "1"], check=True)


@pytest.mark.parametrize("nsid", [1, 2], ids=["metadata", "protection information"])
def test_formats_with_metadata_are_refused(nsid: int) -> None:
    disk = namespaces("metadata")[nsid]
    for path in (disk, generic_of(disk)):
        with pytest.raises(blockkv.DeviceError, match="8 bytes of metadata beside every LBA"):
            blockkv.open(path, engine="passthrough")
    os.close(os.open(disk, os.O_RDWR | os.O_EXCL))  # nothing is left open


@contextmanager
def as_nobody(*usable: Path) -> Iterator[None]:
    """Without privileges, but with permission on these nodes."""
    modes = [(node, node.stat().st_mode) for node in usable]
    for node in usable:
        node.chmod(0o666)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for node, mode in modes:
            node.chmod(mode)


@either_lba_size
def test_what_is_missing_to_those_who_may_not(namespace: Path) -> None:
    blockkv.format(namespace)
    generic = generic_of(namespace)
    with (
        as_nobody(namespace),
        pytest.raises(blockkv.DeviceError, match=f"{generic} cannot be opened .*read and write permission"),
    ):
        blockkv.open(namespace, engine="passthrough")
    with as_nobody(namespace, generic):
        # Linux 6.2 and later ask the controller what its commands do
        with pytest.raises(blockkv.DeviceError, match="need CAP_SYS_ADMIN before Linux"):
            blockkv.open(generic)
        blockkv.open(namespace).close()
