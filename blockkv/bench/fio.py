"""Runs fio (https://fio.readthedocs.io) on a range of a device and reads its report.

Always the strongest settings we know: io_uring, direct I/O, registered buffers and files, buffers on 2 MiB
pages. Huge pages matter most: on 4 KiB pages fio spends twice the CPU and, on devices that limit segments
per request, loses a third of its speed. Where they cannot be had the run says so in `huge_pages`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from blockkv.errors import BlockKVError, DeviceError

__all__ = ["SHAPES", "FioRun", "Shape", "reserved_huge_pages", "run"]

HUGE_PAGE_BYTES = 2 << 20
FIO_SPARE_HUGE_PAGES = 2
"""fio 3.33 asks for one huge page more to align its buffer, and rounds up (`init_iomem`, memory.c)."""
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
POOL_ATTEMPTS = 5
PERCENTILES = ("50.000000", "99.000000", "99.900000")


@dataclass(frozen=True, slots=True)
class Shape:
    """How requests are issued: `depth` of `request_bytes` each in flight."""

    request_bytes: int
    depth: int

    def __str__(self) -> str:
        mebibytes, rest = divmod(self.request_bytes, 1 << 20)
        size = f"{self.request_bytes >> 10} KiB" if rest else f"{mebibytes} MiB"
        return f"{size} x {self.depth}"


SHAPES = (Shape(128 << 10, 32), Shape(512 << 10, 16), Shape(1 << 20, 8))
"""Which is best differs from device to device, so the reference is the best of them."""


@dataclass(frozen=True, slots=True)
class FioRun:
    """What one run of fio found."""

    gb_per_s: float
    cpu_s_per_gb: float
    """User and system time of the process with all its threads, start-up taken off, per 10**9 bytes."""
    moved_bytes: int
    seconds: float
    latency_us: dict[str, float]
    """Completion latency at p50, p99 and p99.9."""
    huge_pages: bool
    verify_errors: int = 0
    """Requests of a verified read whose content is not what fio wrote there."""


def run(
    device: str | Path,
    direction: Literal["read", "write"],
    shape: Shape,
    *,
    offset_bytes: int = 0,
    size_bytes: int,
    seconds: float | None = None,
    total_bytes: int | None = None,
    verify: bool = False,
) -> FioRun:
    """Read or write `[offset_bytes, offset_bytes + size_bytes)` of `device` in sequence, again and again.

    Ends after `seconds` or after `total_bytes`, whichever is given. A write destroys what is there. With
    `verify` a write puts an xxhash into every request, and a read of the same range in the same shape counts
    the requests that are not right. Raises BlockKVError when fio is not installed, DeviceError when fio
    reports an error.
    """
    if (seconds is None) == (total_bytes is None):
        raise BlockKVError("give either seconds or total_bytes")
    place = [f"--filename={device}", f"--offset={offset_bytes}", f"--size={size_bytes}"]
    bound = (
        [f"--io_size={total_bytes}"]
        if seconds is None
        else ["--time_based", f"--runtime={seconds * 1000:.0f}ms"]
    )
    if verify:
        checking = ["--do_verify=0"] if direction == "write" else ["--continue_on_error=verify"]
        bound += ["--verify=xxhash", *checking]
    startup_cpu_s = _startup_cpu_s(str(device), direction, shape, offset_bytes)  # first: it writes, too
    report, cpu_s, huge_pages = _fio(direction, shape, [*place, *bound])
    cpu_s -= startup_cpu_s
    job = report["jobs"][0][direction]
    moved_bytes, duration_s = job["io_bytes"], job["runtime"] / 1000
    percentiles = job["clat_ns"].get("percentile", {})
    return FioRun(
        gb_per_s=moved_bytes / duration_s / 1e9,
        cpu_s_per_gb=max(cpu_s, 0.0) / (moved_bytes / 1e9),
        moved_bytes=moved_bytes,
        seconds=duration_s,
        latency_us={
            f"p{float(name):g}": percentiles[name] / 1000 for name in PERCENTILES if name in percentiles
        },
        huge_pages=huge_pages,
        verify_errors=report["jobs"][0].get("total_err", 0),
    )


@contextlib.contextmanager
def reserved_huge_pages(buffer_bytes: int) -> Iterator[bool]:
    """Have 2 MiB pages for buffers of `buffer_bytes` in the kernel's pool; False where that fails.

    Grows the pool when root and the pages are missing, and sets it back afterwards.
    """
    wanted = _huge_pages_wanted(buffer_bytes)
    free = _free_huge_pages()
    if free >= wanted or not NR_HUGEPAGES.exists():
        yield free >= wanted
        return
    before = _pool_pages()
    enough = _grow_pool(wanted)
    added = _pool_pages() - before
    try:
        yield enough
    finally:
        # what we added and not what was there before: others may have grown or shrunk the pool since
        with contextlib.suppress(OSError):
            NR_HUGEPAGES.write_text(str(max(0, _pool_pages() - added)))


def _huge_pages_wanted(buffer_bytes: int) -> int:
    return -(-buffer_bytes // HUGE_PAGE_BYTES) + FIO_SPARE_HUGE_PAGES


def _grow_pool(wanted_free: int) -> bool:
    """Ask the kernel for pages until `wanted_free` are there. It may need several tries to compact memory."""
    for _ in range(POOL_ATTEMPTS):
        free = _free_huge_pages()
        if free >= wanted_free:
            return True
        try:
            NR_HUGEPAGES.write_text(str(_pool_pages() + wanted_free - free))
        except OSError:  # not root, or a read-only /proc/sys
            return False
    return _free_huge_pages() >= wanted_free


def _pool_pages() -> int:
    return int(NR_HUGEPAGES.read_text())


def _free_huge_pages() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1])
    return 0


@cache
def _startup_cpu_s(device: str, direction: str, shape: Shape, offset_bytes: int) -> float:
    """CPU that fio needs before and after the first request: what is left of a run of one request."""
    size = [f"--filename={device}", f"--offset={offset_bytes}", f"--size={shape.request_bytes}"]
    return min(_fio(direction, shape, size)[1] for _ in range(2))


class _NoHugePages(Exception):
    """Somebody else took the pages, or shrank the pool, between our look and fio's."""


def _fio(direction: str, shape: Shape, arguments: list[str]) -> tuple[dict[str, Any], float, bool]:
    """Run fio: its report, user and system seconds of the process, and whether it had huge pages."""
    for _ in range(POOL_ATTEMPTS):
        with reserved_huge_pages(shape.request_bytes * shape.depth) as reserved:
            if not reserved:
                break
            with contextlib.suppress(_NoHugePages):
                return *_fio_once(direction, shape, True, arguments), True
    return *_fio_once(direction, shape, False, arguments), False


def _fio_once(
    direction: str, shape: Shape, huge_pages: bool, arguments: list[str]
) -> tuple[dict[str, Any], float]:
    if shutil.which("fio") is None:
        raise BlockKVError("fio is not installed; run: apt-get install fio")
    with tempfile.TemporaryDirectory(prefix="blockkv-fio.") as directory:
        output = Path(directory, "report.json")
        command = [
            "fio",
            "--name=blockkv",
            "--thread",
            "--ioengine=io_uring",
            "--direct=1",
            "--registerfiles",
            "--fixedbufs",
            "--allow_file_create=0",
            f"--rw={direction}",
            f"--bs={shape.request_bytes}",
            f"--iodepth={shape.depth}",
            f"--iomem={'shmhuge' if huge_pages else 'mmap'}",
            f"--percentile_list={':'.join(str(float(name)) for name in PERCENTILES)}",
            "--output-format=json",
            f"--output={output}",
            *arguments,
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=directory,
        )
        assert process.stderr is not None
        messages = process.stderr.read().decode(errors="replace").strip()
        # wait4 rather than fio's own figure, which leaves out the kernel's io_uring workers of the process
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if huge_pages and "no huge pages available" in messages:
            raise _NoHugePages
        if process.returncode != 0:
            raise DeviceError(f"fio exited {process.returncode} on {' '.join(arguments)}: {messages}")
        text = output.read_text()
        report: dict[str, Any] = json.loads(text[text.index("{") :])  # it puts remarks in front
    error = report["jobs"][0]["error"]
    if error and error != errno.EILSEQ:  # that is what fio says of content it counts
        raise DeviceError(f"fio on {' '.join(arguments)}: errno {error}", error)
    return report, usage.ru_utime + usage.ru_stime
