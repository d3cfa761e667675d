"""Whole NVMe namespaces of a virtual machine; `tools/nvme_vm/nvme_vm.py suite` runs this in the guest."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import blockkv
from blockkv.device.base import Limits
from blockkv.device.namespace import identify, open_namespace, probe

GIVEN_DEVICES = [Path(name) for name in os.environ["BLOCKKV_TEST_DEVICES"].split(":")]
MIB = 1 << 20
STORE_BYTES = 64 * MIB


def lba_bytes_of(disk: Path) -> int:
    return int(Path("/sys/block", disk.name, "queue/logical_block_size").read_text())


def namespace_of(lba_bytes: int, size_bytes: int) -> Path:
    """The given namespace of that format and size, empty."""
    for disk in GIVEN_DEVICES:
        if lba_bytes_of(disk) == lba_bytes and probe(disk).size_bytes == size_bytes:
            subprocess.run(["blkdiscard", "--force", "--zeroout", disk], check=True, capture_output=True)
            return disk
    raise LookupError(f"no namespace of {size_bytes} bytes with LBAs of {lba_bytes}")


@pytest.fixture(params=[512, 4096])
def lba_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def namespace(lba_bytes: int) -> Iterator[Path]:
    return namespace_of(lba_bytes, STORE_BYTES)


def tensor(number: int, size_bytes: int = 300_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def nvme_commands(disk: Path, kind: str) -> int:
    """Requests the driver has completed: Documentation/block/stat.rst."""
    fields = [int(word) for word in Path("/sys/block", disk.name, "stat").read_text().split()]
    return fields[{"read": 0, "write": 4, "discard": 11, "flush": 15}[kind]]


def test_limits_are_those_of_the_controller(namespace: Path, lba_bytes: int) -> None:
    assert probe(namespace) == Limits(
        size_bytes=STORE_BYTES,
        lba_bytes=lba_bytes,
        memory_alignment_bytes=4,  # NVMe takes whole dwords
        max_transfer_bytes=512 * 1024,  # MDTS 7
        volatile_write_cache=True,
        fua=True,
        discard_granularity_bytes=lba_bytes,
        rotational=False,
        read_only=False,
    )


def test_identity(namespace: Path) -> None:
    identity = identify(namespace)
    assert (identity.kind, identity.disk) == ("namespace", namespace.name)
    assert (identity.serial, identity.model) == ("blockkv-fixed", "QEMU NVMe Ctrl")
    assert identity.nsid == int(Path("/sys/block", namespace.name, "nsid").read_text())
    assert identity.wwid


def test_the_character_device_is_pointed_from_to_the_namespace(namespace: Path) -> None:
    generic = namespace.name.replace("nvme", "ng")
    with pytest.raises(blockkv.DeviceError, match=re.escape("give that")):
        open_namespace(f"/dev/{generic}")


def test_the_kernel_refuses_what_the_limits_forbid(namespace: Path, lba_bytes: int) -> None:
    descriptor, _, limits = open_namespace(namespace)
    with mmap.mmap(-1, MIB) as memory, memoryview(memory) as view:
        try:
            at = limits.memory_alignment_bytes
            assert os.pwritev(descriptor, [view[at : at + lba_bytes]], lba_bytes) == lba_bytes
            for offset, length, address in (
                (lba_bytes // 2, lba_bytes, 0),
                (0, lba_bytes // 2, 0),
                (0, lba_bytes, 1),
            ):
                with pytest.raises(OSError, match="Invalid argument"):
                    os.preadv(descriptor, [view[address : address + length]], offset)
        finally:
            os.close(descriptor)


def test_a_store_lives_on_a_namespace(namespace: Path) -> None:
    blockkv.format(namespace)
    with blockkv.open(namespace, engine="io_uring") as store:
        assert store.info()["engine"] == "io_uring"
        assert store.put_many([(f"k{number}", tensor(number)) for number in range(20)], durable=True)
        store.delete("k3", durable=True)
    with blockkv.open(namespace) as store:
        assert store.info()["recovery"]["was_clean"]
        assert sorted(store.keys()) == sorted(f"k{number}" for number in range(20) if number != 3)
        for number in range(20):
            found = store.get(f"k{number}")
            assert found is None if number == 3 else torch.equal(found, tensor(number))
        assert store.check(payload=True).ok


def test_eviction_under_pressure(namespace: Path) -> None:
    blockkv.format(namespace)
    with blockkv.open(namespace) as store:
        for number in range(120):
            store.put(f"k{number}", tensor(number, MIB))
        assert store.stats()["chunks_evicted"] > 40
        assert torch.equal(store.get("k119"), tensor(119, MIB))
        assert store.check(payload=True).ok
    with blockkv.open(namespace) as store:
        assert store.contains("k119")
        assert not store.contains("k0")


def test_registered_memory_serves_at_any_alignment(namespace: Path, lba_bytes: int) -> None:
    """The kernel takes registered memory by pages; a torch tensor starts 64 bytes into one."""
    blockkv.format(namespace)
    memory = torch.empty(8 * MIB, dtype=torch.uint8)
    first_page = -memory.data_ptr() % 4096
    source = tensor(1, 2 * MIB)
    with blockkv.open(namespace, engine="io_uring") as store:
        store.put("k", source, durable=True)
        with store.register(memory) as registered:
            assert registered
            # the last one goes through staging, which is registered too
            for start, fixed in ((0, True), (lba_bytes, True), (64, False), (4, False), (1, True)):
                out = memory[first_page + start : first_page + start + 2 * MIB]
                before = store.stats()
                assert store.submit_get("k", out=out).result(60), start
                assert torch.equal(out, source)
                after = store.stats()
                assert (after["fixed_requests"] > before["fixed_requests"]) == fixed
                bounced = after["bounced_bytes"] - before["bounced_bytes"]
                assert (bounced > 0) == (start % 4 != 0)
                out.zero_()
                copied = memory[first_page + start : first_page + start + 2 * MIB]
                copied.copy_(source)
                assert store.put(f"from {start}", copied, durable=True)
                assert torch.equal(store.get(f"from {start}"), source)


def test_every_commit_group_is_one_flush_command(namespace: Path) -> None:
    blockkv.format(namespace)
    with blockkv.open(namespace, commit_interval_ms=None) as store:
        store.put("before", tensor(0), durable=True)
        flushes, commands = store.stats()["flushes"], nvme_commands(namespace, "flush")
        for number in range(10):
            store.put_many([(f"k{number}.{part}", tensor(part, 5000)) for part in range(4)], durable=True)
        assert store.stats()["flushes"] - flushes == 10
        assert nvme_commands(namespace, "flush") - commands == 10
        store.put("lazy", tensor(3))
        store.commit()
        store.commit()
        assert nvme_commands(namespace, "flush") - commands == 11


def test_without_a_volatile_cache_no_flush_reaches_the_drive(namespace: Path) -> None:
    blockkv.format(namespace)
    cache = Path("/sys/block", namespace.name, "queue/write_cache")
    cache.write_text("write through")
    try:
        assert not probe(namespace).volatile_write_cache
        commands = nvme_commands(namespace, "flush")
        with blockkv.open(namespace) as store:
            store.put("k", tensor(1), durable=True)
        assert nvme_commands(namespace, "flush") == commands
    finally:
        cache.write_text("write back")


def test_freed_space_is_discarded_when_asked_for(namespace: Path) -> None:
    blockkv.format(namespace)
    with blockkv.open(namespace, discard=True, commit_interval_ms=None) as store:
        store.put("k", tensor(1, MIB), durable=True)
        commands = nvme_commands(namespace, "discard")
        store.delete("k", durable=True)
        assert store.discard_freed() == MIB
        assert store.stats()["discards"] == 1
        assert nvme_commands(namespace, "discard") > commands


def test_a_live_namespace_belongs_to_one_store(namespace: Path) -> None:
    blockkv.format(namespace)
    with blockkv.open(namespace) as store:
        with pytest.raises(blockkv.DeviceBusy):
            blockkv.open(namespace)
        mounted = subprocess.run(["mount", namespace, "/mnt"], capture_output=True, check=False)
        assert mounted.returncode != 0
        store.put("k", b"v", durable=True)
    descriptor = os.open(namespace, os.O_RDWR | os.O_EXCL)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
