"""A device in memory that is as fast, and as steady, as a given drive.

A loop device over tmpfs, throttled by the blkio controller (cgroup v1) or io.max (cgroup v2). The device is
then the limit, as a drive would be, and what is left of the CPU is real. Throughput and CPU are comparable;
latencies are not: the controller lets bursts through and then waits.

Nothing outlives the process, even one that is killed: the image is unlinked while the loop device holds it,
and the loop device detaches itself when the process's descriptor closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockkv.errors import BlockKVError, DeviceError

__all__ = ["PacedDevice", "paced_device"]

MEMORY_DIR = Path("/dev/shm")  # noqa: S108 - the point is that it is memory
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_PREFIX = "blockkv-paced."
FILL_BYTES = 8 << 20
ATTACH_ATTEMPTS = 20
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
) -> Iterator[PacedDevice]:
    """Make a device of `size_bytes` in memory, every byte written once, held to the given speeds.

    `sector_bytes` is its logical block size, 512 or 4096. Needs root and `losetup`. Raises DeviceError when
    memory is too short or a loop device cannot be had, BlockKVError when no cgroup controller can pace it.
    """
    with (
        _loop_device(size_bytes, sector_bytes) as path,
        _cgroup(path, read_bytes_per_s, write_bytes_per_s) as cgroup,
    ):
        yield PacedDevice(path, cgroup, size_bytes, read_bytes_per_s, write_bytes_per_s)


@contextlib.contextmanager
def _loop_device(size_bytes: int, sector_bytes: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        raise DeviceError("making a loop device needs root; run as root, or name an existing device")
    free_bytes = min(shutil.disk_usage(MEMORY_DIR).free, _available_memory_bytes())
    if free_bytes < size_bytes:
        raise DeviceError(f"{MEMORY_DIR} has room for {free_bytes} bytes, the device needs {size_bytes}")
    with tempfile.NamedTemporaryFile(prefix="blockkv-paced.", suffix=".img", dir=MEMORY_DIR) as image:
        pattern = os.urandom(FILL_BYTES)
        for start in range(0, size_bytes, FILL_BYTES):
            image.write(pattern[: size_bytes - start])
        image.flush()
        path = _attach(image.name, sector_bytes)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with path.open("rb") as second:  # from the only opener it would detach at once
            fcntl.ioctl(second, LOOP_CLR_FD)
    try:
        yield path
    finally:
        os.close(descriptor)


def _attach(image: str, sector_bytes: int) -> Path:
    """Attach the next free loop device. Retries, because others may take the free number first."""
    command = ["losetup", "--find", "--show", "--direct-io=on", f"--sector-size={sector_bytes}", image]
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
    number = device.stat().st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    cgroup = root / f"{CGROUP_PREFIX}{os.getpid()}"
    try:
        if is_v1:
            cgroup.mkdir()
            (cgroup / "blkio.throttle.read_bps_device").write_text(f"{name} {read_bytes_per_s}")
            (cgroup / "blkio.throttle.write_bps_device").write_text(f"{name} {write_bytes_per_s}")
        else:
            (root / "cgroup.subtree_control").write_text("+io")
            cgroup.mkdir()
            (cgroup / "io.max").write_text(f"{name} rbps={read_bytes_per_s} wbps={write_bytes_per_s}")
        yield cgroup
    except OSError as error:
        if isinstance(error, BlockKVError):
            raise
        raise BlockKVError(f"no cgroup under {root} can pace {device}: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            cgroup.rmdir()


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
