"""Devices to measure on: one in memory that is as fast, and as steady, as a given drive, and files on a disk.

The paced device is a loop device over tmpfs, throttled by the blkio controller (cgroup v1) or io.max (cgroup
v2). The device is then the limit, as a drive would be, and what is left of the CPU is real. Throughput and
CPU are comparable; latencies are not: the controller lets bursts through and then waits. Under version 1 it
holds back what a process writes or reads itself, and not what the kernel writes back for it later.

Nothing outlives the process, even one that is killed: the image is unlinked while the loop device holds it,
the loop device detaches itself when the process's descriptor closes, and its partitions go with that.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockkv.errors import BlockKVError, DeviceError

__all__ = ["PacedDevice", "loop_device", "paced_device", "partitions", "write_throughout"]

MEMORY_DIR = Path("/dev/shm")  # noqa: S108 - the point is that it is memory
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_PREFIX = "blockkv-paced."
FILL_BYTES = 8 << 20
ATTACH_ATTEMPTS = 20
REMOVE_ATTEMPTS = 50
ALIGNMENT_BYTES = 1 << 20
SECTOR_BYTES = 512
"""What addpart counts in, whatever the device's logical block size."""
BLKRRPART = 0x125F
"""ioctl of linux/fs.h."""
LOOP_CLR_FD = 0x4C01
"""ioctl of linux/loop.h; on a device that is still open it asks for detaching at the last close."""


@dataclass(frozen=True, slots=True)
class PacedDevice:
    """A throttled loop device. Only processes inside `joined` feel the limits."""

    path: Path
    cgroup: Path
    size_bytes: int
    read_bytes_per_s: int
    write_bytes_per_s: int

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Hold this process, and the children it starts meanwhile, to the device's speed."""
        home = _own_cgroup()
        _move_here(self.cgroup)
        try:
            yield
        finally:
            _move_here(home)


@contextlib.contextmanager
def paced_device(
    size_bytes: int,
    read_bytes_per_s: int,
    write_bytes_per_s: int,
    sector_bytes: int = 4096,
    large_requests: bool = False,
) -> Iterator[PacedDevice]:
    """Make a device of `size_bytes` in memory, every byte written once, held to the given speeds.

    `sector_bytes` is its logical block size, 512 or 4096. Needs root and `losetup`. Raises DeviceError when
    memory is too short or a loop device cannot be had, BlockKVError when no cgroup controller can pace it.

    The throttle counts requests twice that are larger than the device takes whole (1280 KiB) and come through
    io_uring: that tries them without waiting, which is charged, and then again. `large_requests` puts a
    second loop device on top, which splits them first: right for every size, for a little more of the
    kernel's time.
    """
    with (
        loop_device(MEMORY_DIR, size_bytes, sector_bytes) as path,
        _cgroup(path, read_bytes_per_s, write_bytes_per_s) as cgroup,
        contextlib.ExitStack() as stack,
    ):
        if large_requests:
            descriptor, path = _attach_while_open(str(path), sector_bytes)
            stack.callback(os.close, descriptor)
        yield PacedDevice(path, cgroup, size_bytes, read_bytes_per_s, write_bytes_per_s)


@contextlib.contextmanager
def loop_device(directory: Path, size_bytes: int, sector_bytes: int = 4096) -> Iterator[Path]:
    """A loop device over a file in `directory`, every byte written once, direct I/O on.

    Needs root and `losetup`. Raises DeviceError when there is no room or a loop device cannot be had.
    """
    if os.geteuid() != 0:
        raise DeviceError("making a loop device needs root; run as root, or name an existing device")
    free_bytes = shutil.disk_usage(directory).free
    if directory == MEMORY_DIR:
        free_bytes = min(free_bytes, _available_memory_bytes())
    if free_bytes < size_bytes:
        raise DeviceError(f"{directory} has room for {free_bytes} bytes, the device needs {size_bytes}")
    with tempfile.NamedTemporaryFile(prefix="blockkv-paced.", suffix=".img", dir=directory) as image:
        pattern = os.urandom(FILL_BYTES)
        for start in range(0, size_bytes, FILL_BYTES):
            image.write(pattern[: size_bytes - start])
        image.flush()
        os.fsync(image.fileno())
        descriptor, path = _attach_while_open(image.name, sector_bytes)
    try:
        yield path
    finally:
        os.close(descriptor)


def _attach_while_open(image: str, sector_bytes: int) -> tuple[int, Path]:
    """A loop device that detaches itself when the descriptor, and whatever else has it open, is closed."""
    path = _attach(image, sector_bytes)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with path.open("rb") as second:  # from the only opener it would detach at once
        fcntl.ioctl(second, LOOP_CLR_FD)
    return descriptor, path


@contextlib.contextmanager
def partitions(device: Path, sizes_bytes: Sequence[int]) -> Iterator[list[Path]]:
    """Divide `device` for as long as the context lasts: partitions of the given sizes, from 1 MiB on.

    They are told to the kernel alone: nothing is written to the device, and a reboot forgets them. Those of a
    process that was killed go with a loop device made here, and from any other one at the next call. Needs
    root and `addpart`. Raises DeviceError when the device is too small or has a partition table.
    """
    device_bytes = _size_bytes(device)
    _read_partition_table(device)
    starts = list(itertools.accumulate((_aligned(size) for size in sizes_bytes), initial=ALIGNMENT_BYTES))
    if starts[-1] > device_bytes:
        raise DeviceError(f"{device} has {device_bytes} bytes, these partitions need {starts[-1]}")
    made: list[int] = []
    try:
        for number, (start, size) in enumerate(zip(starts, sizes_bytes, strict=False), 1):
            _partition_tool("addpart", device, number, start // SECTOR_BYTES, size // SECTOR_BYTES)
            made.append(number)
        joint = "p" if device.name[-1].isdigit() else ""
        yield [Path(f"{device}{joint}{number}") for number in made]
    finally:
        for number in made:
            _remove_partition(device, number)


def write_throughout(device: Path, size_bytes: int, offset_bytes: int = 0) -> None:
    """Write `size_bytes` from `offset_bytes` on, once: what was discarded a drive reads without touching its
    flash, and a file in memory has to make room for at the next write.

    Raises DeviceError when the device ends before that.
    """
    with mmap.mmap(-1, FILL_BYTES) as pattern:  # aligned, as direct I/O needs it
        pattern.write(os.urandom(FILL_BYTES))
        descriptor = os.open(device, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            for start in range(0, size_bytes, FILL_BYTES):
                with memoryview(pattern)[: size_bytes - start] as piece:
                    os.pwrite(descriptor, piece, offset_bytes + start)
        except OSError as error:
            raise DeviceError(f"{device}: writing {size_bytes} bytes: {error}", error.errno) from error
        finally:
            os.close(descriptor)


def _read_partition_table(device: Path) -> None:
    """Have the kernel forget partitions that no table names. It does not while one of them is in use."""
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.ioctl(descriptor, BLKRRPART)
    finally:
        os.close(descriptor)


def _remove_partition(device: Path, number: int) -> None:
    """A process that was killed may have it open for a moment: the kernel lets go of its requests later."""
    for _ in range(REMOVE_ATTEMPTS):
        with contextlib.suppress(DeviceError):
            return _partition_tool("delpart", device, number)
        time.sleep(0.1)
    return _partition_tool("delpart", device, number)


def _partition_tool(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _size_bytes(device: Path) -> int:
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(descriptor, 0, os.SEEK_END)
    finally:
        os.close(descriptor)


def _attach(image: str, sector_bytes: int) -> Path:
    """Attach the next free loop device. Retries, because others may take the free number first.

    One that scans for partitions also drops those it has when it is detached, whoever made them
    (`__loop_clr_fd`, drivers/block/loop.c).
    """
    options = ["--find", "--show", "--partscan", "--direct-io=on", f"--sector-size={sector_bytes}"]
    command = ["losetup", *options, image]
    for _ in range(ATTACH_ATTEMPTS):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Path(done.stdout.strip())
        time.sleep(0.05)
    raise DeviceError(f"losetup could not attach {image}: {done.stderr.strip()}")


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise BlockKVError("/proc/meminfo has no MemAvailable line")


@contextlib.contextmanager
def _cgroup(device: Path, read_bytes_per_s: int, write_bytes_per_s: int) -> Iterator[Path]:
    """A new cgroup with the limits of Documentation/admin-guide/cgroup-v1/blkio-controller and cgroup-v2."""
    root = CGROUP_ROOT / "blkio"
    is_v1 = root.is_dir()
    if not is_v1:
        root = CGROUP_ROOT
    _remove_leftovers(root)
    cgroup = root / f"{CGROUP_PREFIX}{os.getpid()}"
    try:
        if not is_v1:
            (root / "cgroup.subtree_control").write_text("+io")
        cgroup.mkdir()
        _limit(cgroup, device, read_bytes_per_s, write_bytes_per_s)
        yield cgroup
    except OSError as error:
        if isinstance(error, BlockKVError):
            raise
        raise BlockKVError(f"no cgroup under {root} can pace {device}: {error}") from error
    finally:
        # Processes that were killed a moment ago may still be in it; the next run removes what is left then.
        with contextlib.suppress(OSError):
            cgroup.rmdir()


def _limit(cgroup: Path, device: Path, read_bytes_per_s: int, write_bytes_per_s: int) -> None:
    """Also of requests that wait by now."""
    number = device.stat().st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    if (CGROUP_ROOT / "blkio").is_dir():
        (cgroup / "blkio.throttle.read_bps_device").write_text(f"{name} {read_bytes_per_s}")
        (cgroup / "blkio.throttle.write_bps_device").write_text(f"{name} {write_bytes_per_s}")
    else:
        (cgroup / "io.max").write_text(f"{name} rbps={read_bytes_per_s} wbps={write_bytes_per_s}")


def _remove_leftovers(root: Path) -> None:
    """Remove the empty cgroups of killed processes."""
    for cgroup in root.glob(f"{CGROUP_PREFIX}*"):
        if not Path("/proc", cgroup.name.removeprefix(CGROUP_PREFIX)).exists():
            with contextlib.suppress(OSError):
                cgroup.rmdir()


def _own_cgroup() -> Path:
    """The cgroup this process is in: lines of /proc/self/cgroup are `number:controllers:path`."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    if (CGROUP_ROOT / "blkio").is_dir():
        path = next(path for _, controllers, path in lines if "blkio" in controllers.split(","))
        return CGROUP_ROOT / "blkio" / path.lstrip("/")
    path = next(path for number, _, path in lines if number == "0")
    return CGROUP_ROOT / path.lstrip("/")


def _move_here(cgroup: Path) -> None:
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
