#!/usr/bin/env python3
"""What encryption costs: the same puts and gets on a store that is encrypted and on one that is not.

    tools/encryption_bench.py --paced                    a device in memory, held to a drive's speed (root)
    tools/encryption_bench.py /dev/nvme0n1p4 --force     a real one; EVERYTHING ON IT IS DESTROYED

The device is formatted for one kind and for the other, --rounds times in turn. Each time batches of
--batch-mib are put until the store is full, and got for --seconds, verified, with memory on huge pages.

    ratio     encrypted / plain, GB/s, of the runs of one round
    CPU       seconds of this process per GB
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_tool
import click
import torch
from bench_tool import DeviceOptions, OutputOptions
from rich.table import Table

import blockkv

MEBIBYTE = 1 << 20
SECRET = os.urandom(32)
FILL_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Run:
    """Puts or gets on one store."""

    gb_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds, and the smallest and largest ratio."""

    op: str
    chunk_bytes: int
    plain: Run
    encrypted: Run
    ratio: float
    ratio_spread: tuple[float, float]


@bench_tool.benchmark(size_gib=4.0)
@click.option("--chunk-mib", "chunks_mib", multiple=True, type=int, default=[2, 8, 32], show_default=True)
@click.option("--batch-mib", default=64, show_default=True, help="Payload of one call.")
@click.option("--rounds", default=3, show_default=True, help="Of both kinds.")
@click.option("--seconds", default=1.5, show_default=True, help="Of gets, each time.")
def main(
    on: DeviceOptions,
    to: OutputOptions,
    chunks_mib: tuple[int, ...],
    batch_mib: int,
    rounds: int,
    seconds: float,
) -> None:
    """Compare an encrypted store with one that is not on DEVICE, or on one made for it."""
    console = to.console()
    rows: list[Row] = []
    with on.target() as target, bench_tool.progress_bar(len(chunks_mib) * rounds * 2) as advance:
        for chunk_mib in chunks_mib:
            found: dict[bool, list[dict[str, Run]]] = {False: [], True: []}
            for number in range(rounds):
                for encrypted in (False, True) if number % 2 == 0 else (True, False):
                    advance(f"{chunk_mib} MiB, {'encrypted' if encrypted else 'plain'}", 1)
                    found[encrypted].append(
                        measure(target.path, encrypted, chunk_mib * MEBIBYTE, batch_mib * MEBIBYTE, seconds)
                    )
            rows += [row_of(op, chunk_mib * MEBIBYTE, found) for op in ("put", "get")]
        described = target.described
    to.document({"device": described, "rows": [asdict(row) for row in rows]})
    console.print(table_of(rows))
    to.draw(lambda figure: draw(figure, rows))


def measure(
    path: Path, encrypted: bool, chunk_bytes: int, batch_bytes: int, seconds: float
) -> dict[str, Run]:
    """Fill a new store, and read it."""
    secret = SECRET if encrypted else None
    facts = blockkv.format(path, average_chunk=chunk_bytes, force=True, encrypt=secret)
    count = max(1, batch_bytes // chunk_bytes)
    memory = blockkv.empty((count, chunk_bytes), torch.uint8)
    memory.random_(0, 256)
    chunks = list(memory.unbind(0))
    batches = int(facts["data_bytes"] * FILL_SHARE) // (chunk_bytes * count)
    with blockkv.open(path, unlock=secret) as store:

        def put(number: int) -> None:
            for position, chunk in enumerate(chunks):
                chunk[:16].view(torch.int64)[0] = number * count + position
            store.put_many([(f"{number}/{position}", chunk) for position, chunk in enumerate(chunks)])

        def get(number: int) -> None:
            keys = [f"{number % batches}/{position}" for position in range(count)]
            if not all(store.get_many(keys, chunks)):
                raise click.ClickException("a chunk is missing")

        puts = timed(put, chunk_bytes * count, batches, None)
        gets = timed(get, chunk_bytes * count, None, seconds)
    return {"put": puts, "get": gets}


def timed(call: Callable[[int], None], call_bytes: int, calls: int | None, seconds: float | None) -> Run:
    """So many calls, or as many as there is time for."""
    before, begun, number = os.times(), time.perf_counter(), 0
    while number < calls if calls is not None else time.perf_counter() - begun < (seconds or 0):
        call(number)
        number += 1
    wall_s, after = time.perf_counter() - begun, os.times()
    cpu_s = after.user + after.system - before.user - before.system
    return Run(number * call_bytes / wall_s / 1e9, cpu_s / (number * call_bytes / 1e9))


def row_of(op: str, chunk_bytes: int, found: dict[bool, list[dict[str, Run]]]) -> Row:
    """The medians of one operation."""
    plain, encrypted = ([one[op] for one in found[kind]] for kind in (False, True))
    ratios = [ours.gb_per_s / theirs.gb_per_s for ours, theirs in zip(encrypted, plain, strict=True)]
    return Row(
        op,
        chunk_bytes,
        median_of(plain),
        median_of(encrypted),
        statistics.median(ratios),
        (min(ratios), max(ratios)),
    )


def median_of(runs: list[Run]) -> Run:
    """Of each figure."""
    return Run(
        statistics.median(run.gb_per_s for run in runs), statistics.median(run.cpu_s_per_gb for run in runs)
    )


def table_of(rows: list[Row]) -> Table:
    """What is printed."""
    table = Table(title="encrypted beside plain, verified")
    for heading in (
        "",
        "chunk",
        "plain GB/s",
        "encrypted GB/s",
        "ratio",
        "spread",
        "plain CPU",
        "encrypted CPU s/GB",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.op,
            f"{row.chunk_bytes // MEBIBYTE} MiB",
            f"{row.plain.gb_per_s:.2f}",
            f"{row.encrypted.gb_per_s:.2f}",
            f"{row.ratio:.2f}",
            "{:.2f}-{:.2f}".format(*row.ratio_spread),
            f"{row.plain.cpu_s_per_gb:.3f}",
            f"{row.encrypted.cpu_s_per_gb:.3f}",
        )
    return table


def draw(figure: Any, rows: list[Row]) -> None:
    """Bars of both kinds."""
    axes = figure.subplots()
    places = range(len(rows))
    for shift, name in ((-0.2, "plain"), (0.2, "encrypted")):
        speeds = [getattr(row, name).gb_per_s for row in rows]
        axes.bar([place + shift for place in places], speeds, width=0.38, label=name)
    labels = [f"{row.op}\n{row.chunk_bytes // MEBIBYTE} MiB\n{row.ratio:.2f}" for row in rows]
    axes.set_xticks(list(places), labels)
    axes.set_ylabel("GB/s")
    axes.legend()


if __name__ == "__main__":
    main()
