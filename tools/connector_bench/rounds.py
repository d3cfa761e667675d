"""A connector beside the disk tier that its engine comes with: the same caches, one device, in turn.

The device is divided: a partition for the store, and one with ext4 for files. In each round every
contestant has its turn, in an order that changes: it stores a set of caches, makes sure of it (fsync, or a
durable commit), loads it from the device with nothing of it in the page cache, and loads it again. The
first round is not counted. With a memory limit the same is done once more, by a process that may not use
more than that, page cache included.

A virtual machine may have to get memory from its host when it is touched for the first time, which takes
longer than reading into it. Before what is timed as much memory as a set takes is therefore touched and let
go, for everybody alike, so that this process gets memory that has been used.

CPU is user and system time of the whole process with all threads. What the kernel writes back later for
buffered files is nobody's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_tool import DeviceOptions, OutputOptions
from peer_compare import file_system, keep_mounts_private
from rich.table import Table

import blockkv
from blockkv.bench.device import CGROUP_ROOT, PacedDevice, partitions, write_throughout
from blockkv.bench.memory_group import join, memory_group, paced_writeback

OURS = "blockkv"
OPS = ("store", "store, on media", "load, cold", "load again")
SPARE_BYTES = 256 << 20
"""Of each partition: for metadata, and a set that is deleted while the next is stored."""


class Contestant(Protocol):
    """Someone who keeps a set of caches."""

    name: str

    def store(self) -> None:
        """Keep the set, which is not there."""

    def sync(self) -> None:
        """Make sure that it is on media."""

    def load(self) -> None:
        """Bring all of it back into memory. Raises AssertionError where it is not all there."""

    def check(self) -> None:
        """Compare what was loaded with what was stored, byte by byte."""

    def forget(self) -> None:
        """Remove the set."""

    def drop_page_cache(self) -> None:
        """Leave nothing of it in memory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation on a whole set."""

    gb_per_s: float
    cpu_s_per_gb: float


Samples = dict[str, dict[str, list[Sample]]]
"""Contestant -> operation -> one sample a round."""


def timed(set_bytes: int, *calls: Callable[[], None]) -> Sample:
    """Do it, with the clocks running."""

    def cpu_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    cpu, begin = cpu_s(), time.perf_counter()
    for call in calls:
        call()
    gb = set_bytes / 1e9
    return Sample(gb / (time.perf_counter() - begin), (cpu_s() - cpu) / gb)


def touch_memory(size_bytes: int) -> None:
    """Have so much memory for a moment."""
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for first in range(0, size_bytes, mmap.PAGESIZE):
            memory[first] = 1


def in_turn(contestants: Sequence[Contestant], set_bytes: int, rounds: int) -> Samples:
    """Rounds of them all."""
    samples: Samples = {one.name: {op: [] for op in OPS} for one in contestants}
    for number in range(rounds + 1):
        order = list(contestants) if number % 2 else list(contestants)[::-1]
        for one in order:
            touch_memory(set_bytes)
            begin = time.perf_counter()
            stored = timed(set_bytes, one.store)
            synced = timed(set_bytes, one.sync)
            media = Sample(
                set_bytes / 1e9 / (time.perf_counter() - begin), stored.cpu_s_per_gb + synced.cpu_s_per_gb
            )
            one.drop_page_cache()
            touch_memory(set_bytes)
            cold = timed(set_bytes, one.load)
            one.check()
            again = timed(set_bytes, one.load)
            one.check()
            one.forget()
            if number:
                for op, sample in zip(OPS, (stored, media, cold, again), strict=True):
                    samples[one.name][op].append(sample)
    return samples


@contextlib.contextmanager
def limited(limit_bytes: int, pace: PacedDevice | None) -> Iterator[None]:
    """Have this process in a group with so much memory."""
    is_v1 = (CGROUP_ROOT / "memory").is_dir()
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    home = next(path for _, names, path in lines if ("memory" in names.split(",")) == is_v1)
    with memory_group(limit_bytes, pace) as group:
        join(group)
        try:
            yield
        finally:
            join((CGROUP_ROOT / "memory" if is_v1 else CGROUP_ROOT) / home.lstrip("/"))


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    """A row for each operation and contestant: medians, and the ratio ours / theirs round by round."""
    rows = []
    for op in OPS:
        for name, by_op in samples.items():
            found = by_op[op]
            ratios = [
                mine.gb_per_s / their.gb_per_s for mine, their in zip(samples[OURS][op], found, strict=True)
            ]
            rows.append(
                {
                    "op": op,
                    "name": name,
                    "gb_per_s": statistics.median(one.gb_per_s for one in found),
                    "cpu_s_per_gb": statistics.median(one.cpu_s_per_gb for one in found),
                    "ratio": statistics.median(ratios),
                    "ratio_spread": [min(ratios), max(ratios)],
                }
            )
    return rows


def run(
    on: DeviceOptions,
    to: OutputOptions,
    make: Callable[..., Sequence[Contestant]],
    set_bytes: int,
    rounds: int,
    limit_bytes: int | None,
    facts: dict[str, Any],
    more_partitions: int = 0,
) -> None:
    """Measure and tell. `make` gives the contestants for a partition, a directory and `more_partitions`; the
    first of them is ours.
    """
    part_bytes = 2 * set_bytes + SPARE_BYTES
    phases: dict[str, list[dict[str, Any]]] = {}
    keep_mounts_private()
    count = 2 + more_partitions
    with (
        on.target(count * part_bytes + (4 << 20), large_requests=True) as target,
        paced_writeback(target.pace) as is_paced,
    ):
        blockkv.format(target.path, force=target.force)
        write_throughout(target.path, count * part_bytes)
        with (
            partitions(target.path, [part_bytes] * count) as (own, files, *more),
            file_system(files) as mount,
        ):
            contestants = make(own, mount, *more)
            try:
                phases["as much memory as there is"] = rows_of(in_turn(contestants, set_bytes, rounds))
                if limit_bytes is not None:
                    with limited(limit_bytes, target.pace):
                        found = in_turn(contestants, set_bytes, rounds)
                    phases[f"{limit_bytes / (1 << 20):.0f} MiB of memory"] = rows_of(found)
            finally:
                for one in contestants:
                    close = getattr(one, "close", None)
                    if close is not None:
                        close()
    described = {**target.described, "paced_writeback": is_paced, "load_average": os.getloadavg()}
    to.document({"device": described, "set_bytes": set_bytes, "rounds": rounds, **facts, "phases": phases})
    console = to.console()
    for phase, rows in phases.items():
        table = Table(title=f"{phase}; sets of {set_bytes / (1 << 20):.0f} MiB, medians of {rounds} rounds")
        for name in ("op", "who", "GB/s", "CPU s/GB", "blockkv / it", "spread"):
            table.add_column(name, justify="left" if name in ("op", "who") else "right")
        for row in rows:
            low, high = row["ratio_spread"]
            table.add_row(
                row["op"],
                row["name"],
                f"{row['gb_per_s']:.2f}",
                f"{row['cpu_s_per_gb']:.3f}",
                "" if row["name"] == OURS else f"{row['ratio']:.2f}",
                "" if row["name"] == OURS else f"{low:.2f}-{high:.2f}",
                end_section=row["name"] == list(dict.fromkeys(one["name"] for one in rows))[-1],
            )
        console.print(table)


def drop_files(directory: Path) -> None:
    """Out of the page cache with every file in a directory, once it is written."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def sync_files(directory: Path) -> None:
    """Every file of a directory on media."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
