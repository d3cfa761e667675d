"""`blockkv doctor` on NVMe namespaces, and with io_uring switched off for the whole kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import blockkv
from blockkv.device import nvme_admin
from blockkv.device.namespace import probe

GIVEN_DEVICES = [Path(name) for name in os.environ["BLOCKKV_TEST_DEVICES"].split(":")]
LEAST_BYTES = 32 << 20
IO_URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")


def namespace_of(lba_bytes: int) -> Path:
    for disk in GIVEN_DEVICES:
        found_bytes = int(Path("/sys/block", disk.name, "queue/logical_block_size").read_text())
        if found_bytes == lba_bytes and probe(disk).size_bytes >= LEAST_BYTES:
            subprocess.run(["blkdiscard", "--force", "--zeroout", disk], check=True, capture_output=True)
            return disk
    raise LookupError(f"no namespace with LBAs of {lba_bytes}")


def doctor(*arguments: str | Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the observations by topic."""
    command = [sys.executable, "-m", "blockkv", "doctor", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {one["topic"]: one for one in json.loads(done.stdout)["observations"]}


def test_a_format_of_512_bytes_and_the_better_one() -> None:
    disk = namespace_of(512)
    code, found = doctor(disk)
    assert code == 1
    assert found["LBA format"]["verdict"] == "warning"
    assert "512 bytes; the drive offers 4096 bytes as format" in found["LBA format"]["found"]
    assert "nvme format" in found["LBA format"]["fixes"][0]
    assert found["device"]["found"].startswith(f"{disk}: an NVMe namespace, QEMU NVMe Ctrl")
    assert found["health"]["verdict"] == "good"
    assert "life left: unknown" in found["endurance"]["found"], "QEMU's drive does not wear"
    assert found["write cache"]["found"].endswith("FUA")
    assert found["engine"]["found"].startswith("io_uring")


def test_a_format_of_4096_bytes_is_good() -> None:
    disk = namespace_of(4096)
    code, found = doctor(disk)
    assert (code, found["LBA format"]["verdict"]) == (0, "good")
    blockkv.format(disk, average_chunk="64KiB")
    code, found = doctor(disk)
    assert (code, found["content"]["verdict"]) == (0, "good")
    assert "a blockkv store" in found["content"]["found"]
    with blockkv.open(disk):
        code, found = doctor(disk)
        assert (code, found["in use"]["verdict"]) == (3, "refused")
        assert str(os.getpid()) in found["in use"]["found"]


def test_what_the_drive_says_is_what_it_was_made_with() -> None:
    disk = namespace_of(4096)
    with disk.open("rb") as file:
        drive = nvme_admin.ask(str(disk), file.fileno())
    assert (drive.model, drive.serial) == ("QEMU NVMe Ctrl", "blockkv-fixed")
    assert drive.volatile_write_cache
    assert drive.namespace.lba_bytes == 4096
    assert {one.lba_bytes for one in drive.namespace.formats} == {512, 4096}
    assert drive.health is not None
    assert 0 < drive.health.temperature_c < 100
    assert drive.health.warnings == ()


@pytest.fixture
def io_uring_off() -> Iterator[None]:
    if not IO_URING_DISABLED.exists():  # before Linux 6.6
        yield
        return
    IO_URING_DISABLED.write_text("2")
    yield
    IO_URING_DISABLED.write_text("0")


def test_io_uring_off_by_sysctl(io_uring_off: None) -> None:
    disk = namespace_of(4096)
    code, found = doctor(disk)
    if not IO_URING_DISABLED.exists():
        assert (code, found["io_uring"]["verdict"]) == (0, "good")
        return
    assert code == 1
    assert "sysctl kernel.io_uring_disabled is 2" in found["io_uring"]["found"]
    assert found["io_uring"]["fixes"][0] == "sysctl -w kernel.io_uring_disabled=0"
    assert found["engine"]["found"].startswith("threads")
