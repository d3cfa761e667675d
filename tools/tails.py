#!/usr/bin/env python3
"""How long a get takes while puts keep the device busy, beside fio doing the same.

    tools/tails.py /dev/nvme0n1p4 --force     a partition or namespace; EVERYTHING ON IT IS DESTROYED
    tools/tails.py --disk /var/tmp            a loop device over a file on that disk (root)

In every round four measurements of --seconds each: gets of one chunk, one after the other, alone and while
another thread puts batches of --batch-mib without a pause; and fio reading as much at a time at depth 1,
alone and while another fio writes 512 KiB x 16. Each side reads in one part of the device and writes in the
rest. Medians over the rounds.

A paced device is of no use here: its throttle lets bursts through and then waits.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_tool
import click
import torch
from bench_tool import DeviceOptions, OutputOptions
from rich.table import Table

import blockkv
from blockkv.bench import fio
from blockkv.bench.device import write_throughout
from blockkv.errors import BlockKVError

WRITER = fio.Shape(512 << 10, 16)
KEPT_SHARE = 0.4
"""Of the data zone: the chunks that gets choose from."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Latencies of reads, and what was written meanwhile."""

    who: str
    """"blockkv" or "fio"."""
    busy: bool
    p50_us: float
    p99_us: float
    p999_us: float
    written_gb_per_s: float
    """While it was busy."""


def of_store(path: Path, chunk_bytes: int, batch_bytes: int, seconds: float) -> tuple[Tail, Tail]:
    """Alone and busy, on a store that is filled for it."""
    with blockkv.open(path) as store:
        for key in list(store.keys()):
            store.delete(key)
        chunk = blockkv.empty(chunk_bytes, torch.uint8)
        chunk.random_(0, 256)
        count = int(store.stats()["data_bytes"] * KEPT_SHARE) // chunk_bytes
        for number in range(count):
            store.put(f"kept {number}", chunk)
            store.pin(f"kept {number}")
        store.commit()
        alone = Tail("blockkv", False, *latencies_us(store, count, chunk, seconds), 0.0)
        with Putting(store, chunk_bytes, batch_bytes) as putting:
            busy = latencies_us(store, count, chunk, seconds)
        return alone, Tail("blockkv", True, *busy, putting.gb_per_s)


def latencies_us(
    store: blockkv.Store, count: int, out: torch.Tensor, seconds: float
) -> tuple[float, float, float]:
    """p50, p99 and p99.9 of gets of chunks chosen at random."""
    dice = random.Random(1)  # noqa: S311 - not for secrets
    end = time.perf_counter() + seconds
    found = []
    while (started := time.perf_counter()) < end:
        if not store.get(f"kept {dice.randrange(count)}", out=out):
            raise BlockKVError("a chunk that was put is missing")
        found.append((time.perf_counter() - started) * 1e6)
    cuts = statistics.quantiles(found, n=1000)
    return cuts[499], cuts[989], cuts[998]


class Putting:
    """Puts batch after batch in a thread of its own while the context lasts; the oldest make room."""

    def __init__(self, store: blockkv.Store, chunk_bytes: int, batch_bytes: int) -> None:
        self._store = store
        count = max(1, batch_bytes // chunk_bytes)
        self._chunks = list(blockkv.empty((count, chunk_bytes), torch.uint8).random_(0, 256).unbind(0))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._bytes = 0
        self.gb_per_s = 0.0

    def __enter__(self) -> Putting:
        self._started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self.gb_per_s = self._bytes / (time.perf_counter() - self._started) / 1e9

    def _run(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            self._store.put_many((f"{number}/{place}", chunk) for place, chunk in enumerate(self._chunks))
            self._bytes += sum(chunk.nbytes for chunk in self._chunks)


def of_fio(path: Path, zone: tuple[int, int], chunk_bytes: int, seconds: float) -> tuple[Tail, Tail]:
    """The same of fio, on the halves of `zone` (offset, bytes)."""
    half = zone[1] // 2 // (4 << 20) * (4 << 20)
    reader = fio.Shape(chunk_bytes, 1)

    def read() -> fio.FioRun:
        return fio.run(path, "read", reader, offset_bytes=zone[0], size_bytes=half, seconds=seconds)

    def write() -> fio.FioRun:
        offset_bytes = zone[0] + half
        # longer at both ends, as long as fio takes to start
        return fio.run(path, "write", WRITER, offset_bytes=offset_bytes, size_bytes=half, seconds=seconds + 4)

    alone = read()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        time.sleep(2)
        busy = read()
        written = writing.result()
    return _tail(alone, False, 0.0), _tail(busy, True, written.gb_per_s)


def _tail(run: fio.FioRun, busy: bool, written: float) -> Tail:
    took = run.latency_us
    return Tail("fio", busy, took["p50"], took["p99"], took["p99.9"], written)


@bench_tool.benchmark(size_gib=4.0)
@click.option("--chunk-mib", default=2, show_default=True, help="Size of what is got.")
@click.option("--batch-mib", default=64, show_default=True, help="Payload of one put_many.")
@click.option("--seconds", default=4.0, show_default=True, help="Length of one measurement.")
@click.option("--rounds", default=3, show_default=True)
def main(
    on: DeviceOptions, to: OutputOptions, chunk_mib: int, batch_mib: int, seconds: float, rounds: int
) -> None:
    """Measure and print."""
    console = to.console()
    tails: list[Tail] = []
    with on.target() as target, bench_tool.progress_bar(rounds) as advance:
        facts = blockkv.format(target.path, force=target.force)
        zone = int(facts["data_offset_bytes"]), int(facts["data_bytes"])
        write_throughout(target.path, zone[1], zone[0])
        for number in range(rounds):
            advance("measuring", number)
            tails += of_store(target.path, chunk_mib << 20, batch_mib << 20, seconds)
            tails += of_fio(target.path, zone, chunk_mib << 20, seconds)
    rows = [median_of([one for one in tails if (one.who, one.busy) == kind]) for kind in KINDS]
    by_kind = dict(zip(KINDS, rows, strict=True))
    ratios = {
        "p99_busy_per_idle": by_kind["blockkv", True].p99_us / by_kind["blockkv", False].p99_us,
        "p99_busy_per_fio": by_kind["blockkv", True].p99_us / by_kind["fio", True].p99_us,
    }
    to.document({"device": target.described, "tails": [asdict(row) for row in rows], **ratios})
    console.print(_table(rows))
    for name, value in ratios.items():
        console.print(f"{name}: {value:.2f}", highlight=False)
    to.draw(lambda figure: _draw(figure, rows))


KINDS = (("blockkv", False), ("blockkv", True), ("fio", False), ("fio", True))


def median_of(tails: list[Tail]) -> Tail:
    """Of each figure."""
    names = ("p50_us", "p99_us", "p999_us", "written_gb_per_s")
    figures = {name: statistics.median(getattr(one, name) for one in tails) for name in names}
    return Tail(tails[0].who, tails[0].busy, **figures)


def _table(rows: list[Tail]) -> Table:
    table = Table(title="latency of reads, microseconds; medians over the rounds")
    for heading in ("who", "device"):
        table.add_column(heading)
    for heading in ("p50", "p99", "p99.9", "written GB/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.who,
            "busy" if row.busy else "idle",
            f"{row.p50_us:.0f}",
            f"{row.p99_us:.0f}",
            f"{row.p999_us:.0f}",
            f"{row.written_gb_per_s:.2f}" if row.busy else "",
        )
    return table


def _draw(figure: Any, rows: list[Tail]) -> None:
    axes = figure.subplots()
    names = [f"{row.who}, {'busy' if row.busy else 'idle'}" for row in rows]
    axes.barh(names, [row.p99_us / 1000 for row in rows], label="p99")
    axes.barh(names, [row.p50_us / 1000 for row in rows], label="p50")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend()


if __name__ == "__main__":
    main()
