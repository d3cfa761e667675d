"""The paced device: its speed, its bytes, and that nothing of it is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blockkv.bench.device import paced_device
from blockkv.bench.fio import Shape, run
from blockkv.errors import DeviceError

pytestmark = [pytest.mark.requires_root, pytest.mark.requires_tool("losetup", "fio")]

SIZE_BYTES = 64 << 20
SHAPE = Shape(256 << 10, 8)


def images() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("blockkv-paced.*")}


def is_attached(device: Path) -> bool:
    return Path("/sys/block", device.name, "loop/backing_file").exists()


def test_reads_and_writes_run_at_the_given_speeds() -> None:
    with paced_device(SIZE_BYTES, 400_000_000, 200_000_000) as device, device.joined():
        read = run(device.path, "read", SHAPE, size_bytes=SIZE_BYTES, seconds=1)
        write = run(device.path, "write", SHAPE, size_bytes=SIZE_BYTES, seconds=1)
    assert read.gb_per_s == pytest.approx(0.4, rel=0.15)
    assert write.gb_per_s == pytest.approx(0.2, rel=0.15)


def test_only_processes_that_joined_are_paced() -> None:
    with paced_device(SIZE_BYTES, 50_000_000, 50_000_000) as device:
        free = run(device.path, "read", SHAPE, size_bytes=SIZE_BYTES, seconds=0.5)
    assert free.gb_per_s > 0.1


def test_leaving_goes_back_to_the_cgroup_one_came_from() -> None:
    before = Path("/proc/self/cgroup").read_text()
    with paced_device(SIZE_BYTES, 10**9, 10**9) as device:
        with device.joined():
            inside = Path("/proc/self/cgroup").read_text()
        assert device.cgroup.name in inside
        assert Path("/proc/self/cgroup").read_text() == before


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_is_a_device_with_the_given_sectors_and_written_throughout(sector_bytes: int) -> None:
    with paced_device(SIZE_BYTES, 10**9, 10**9, sector_bytes) as device:
        assert device.path.is_block_device()
        queue = Path("/sys/block", device.path.name, "queue/logical_block_size")
        assert int(queue.read_text()) == sector_bytes
        with device.path.open("rb") as file:
            file.seek(SIZE_BYTES - 4096)
            assert len(set(file.read(4096))) > 200  # random, not zeroes


def test_nothing_is_left_behind() -> None:
    before = images()
    with paced_device(SIZE_BYTES, 10**9, 10**9) as device:
        assert is_attached(device.path)
    assert not device.cgroup.exists()
    assert not is_attached(device.path)
    assert images() <= before


def test_nothing_is_left_behind_by_a_killed_process() -> None:
    script = (
        "import time; from blockkv.bench.device import paced_device\n"
        f"with paced_device({SIZE_BYTES}, 10**9, 10**9) as device:\n"
        "    print(device.path, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        device = Path(process.stdout.readline().strip())
        assert is_attached(device)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_attached(device) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_attached(device)


def test_more_than_there_is_memory_for_is_refused_with_the_numbers() -> None:
    refusal = rf"room for \d+ bytes, the device needs {1 << 50}"
    with pytest.raises(DeviceError, match=refusal), paced_device(1 << 50, 10**9, 10**9):
        pass
