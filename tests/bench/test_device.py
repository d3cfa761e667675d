"""The paced device: its speed, its bytes, and that nothing of it is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blockkv.bench.device import loop_device, paced_device, partitions, write_throughout
from blockkv.bench.fio import Shape, run
from blockkv.errors import DeviceError

pytestmark = [pytest.mark.requires_root, pytest.mark.requires_tool("losetup", "fio")]

SIZE_BYTES = 64 << 20
SHAPE = Shape(256 << 10, 8)


def images() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("blockkv-paced.*")}


def is_attached(device: Path) -> bool:
    return Path("/sys/block", device.name, "loop/backing_file").exists()


def wait_until_gone(is_there: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while is_there():
        assert time.monotonic() < limit, "it is still there"
        time.sleep(0.05)


def test_reads_and_writes_run_at_the_given_speeds() -> None:
    """Speeds that a machine with other work reaches all the same."""
    with paced_device(SIZE_BYTES, 40_000_000, 20_000_000) as device, device.joined():
        read = run(device.path, "read", SHAPE, size_bytes=SIZE_BYTES, seconds=2)
        write = run(device.path, "write", SHAPE, size_bytes=SIZE_BYTES, seconds=2)
    assert read.gb_per_s == pytest.approx(0.04, rel=0.15)
    assert write.gb_per_s == pytest.approx(0.02, rel=0.15)


def test_large_requests_run_at_the_given_speed_too() -> None:
    large = Shape(4 << 20, 4)
    with paced_device(SIZE_BYTES, 80_000_000, 80_000_000, large_requests=True) as device, device.joined():
        read = run(device.path, "read", large, size_bytes=SIZE_BYTES, seconds=2)
    assert read.gb_per_s == pytest.approx(0.08, rel=0.15)  # half of it, were they charged twice


def test_only_processes_that_joined_are_paced() -> None:
    with paced_device(SIZE_BYTES, 10_000_000, 10_000_000) as device:
        free = run(device.path, "read", SHAPE, size_bytes=SIZE_BYTES, seconds=0.5)
    assert free.gb_per_s > 0.05


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
    wait_until_gone(lambda: is_attached(device))


def test_partitions_of_a_killed_process_go_with_the_device() -> None:
    script = (
        "import time; from pathlib import Path; from blockkv.bench.device import loop_device, partitions\n"
        f"with loop_device(Path('/dev/shm'), {SIZE_BYTES}) as one, partitions(one, [1 << 20]) as made:\n"
        "    print(one, *made, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        device, partition = map(Path, process.stdout.readline().split())
        assert Path("/sys/block", device.name, partition.name).exists()
        process.send_signal(signal.SIGKILL)
    wait_until_gone(lambda: is_attached(device))
    wait_until_gone(Path("/sys/block", device.name, partition.name).exists)  # after the backing file


def test_partitions_without_a_table_make_room_for_others(tmp_path: Path) -> None:
    with loop_device(tmp_path, SIZE_BYTES) as device:
        subprocess.run(["addpart", device, "1", "2048", "2048"], check=True)
        with partitions(device, [2 << 20]) as (only,):
            assert int(Path("/sys/class/block", only.name, "size").read_text()) == 4096


def test_a_device_of_two_layers_leaves_nothing_either() -> None:
    with paced_device(SIZE_BYTES, 10**9, 10**9, large_requests=True) as device:
        below = Path("/sys/block", device.path.name, "loop/backing_file").read_text().strip()
        assert is_attached(Path(below))
    assert not is_attached(device.path)
    assert not is_attached(Path(below))
    assert not device.cgroup.exists()


def test_a_loop_device_over_a_file_on_a_disk(tmp_path: Path) -> None:
    with loop_device(tmp_path, SIZE_BYTES, 512) as device:
        assert is_attached(device)
        assert not list(tmp_path.iterdir())  # unlinked: nothing is left if the process is killed
        with device.open("rb") as file:
            assert len(set(file.read(4096))) > 200
    assert not is_attached(device)


def test_partitions_are_where_they_should_be_and_go_away(tmp_path: Path) -> None:
    mebibyte = 1 << 20
    with loop_device(tmp_path, SIZE_BYTES) as device:
        with partitions(device, [mebibyte + 4096, 2 * mebibyte]) as (first, second):
            second.write_bytes(b"second")
            first.write_bytes(b"first")
            sizes = [int(Path("/sys/class/block", part.name, "size").read_text()) for part in (first, second)]
            assert sizes == [(mebibyte + 4096) // 512, 2 * mebibyte // 512]
        assert not first.exists() or not first.is_block_device()
        with device.open("rb") as file:
            file.seek(mebibyte)
            assert file.read(5) == b"first"
            file.seek(3 * mebibyte)
            assert file.read(6) == b"second"


def test_partitions_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with loop_device(tmp_path, SIZE_BYTES) as device:
        refusal = rf"has {SIZE_BYTES} bytes, these partitions need {SIZE_BYTES + (1 << 20)}"
        with pytest.raises(DeviceError, match=refusal), partitions(device, [SIZE_BYTES]):
            pass


def test_writing_throughout_ends_where_it_is_told(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(12 << 20))
    write_throughout(image, 10 << 20)
    content = image.read_bytes()
    assert len(content) == 12 << 20
    assert content.count(0, 0, 10 << 20) < 10 << 13
    assert content[10 << 20 :] == bytes(2 << 20)


def test_more_than_there_is_memory_for_is_refused_with_the_numbers() -> None:
    refusal = rf"room for \d+ bytes, the device needs {1 << 50}"
    with pytest.raises(DeviceError, match=refusal), paced_device(1 << 50, 10**9, 10**9):
        pass
