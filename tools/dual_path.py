#!/usr/bin/env python3
"""Two paths, one, or the page cache: KV tensors with ever less memory.

    tools/dual_path.py --paced                    a throttled device in memory (root)
    tools/dual_path.py /dev/nvme0n1p4 --force     a partition or namespace; EVERYTHING ON IT IS DESTROYED

DUAL-BLADE's workload, scaled: --tensors tensors of --tensor-mib are written; then each of --steps steps
reads all of every tensor, in layer order, and appends --step-kib to it. Each arrangement runs in a process of
its own in a control group with --cap times the bytes of all tensors: files mapped from ext4 on the device,
a store alone, and a store with a memory tier. In turn, --rounds times; medians. The ratio is that of dual to
the better of the other two.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import bench_tool
import click
from bench_tool import DeviceOptions, OutputOptions
from rich.table import Table

from blockkv.bench.memory_group import paced_writeback
from blockkv.bench.two_paths import ARMS, Shape, Timing, measure

CAPS = (1.2, 1.0, 0.8, 0.6, 0.4, 0.2)
ROOM = 1.3
"""Of the device, per byte of tensors: what ext4 and a store need besides."""
LEAST_ROOM_BYTES = 512 << 20

Measured = dict[float, dict[str, list[Timing]]]


def run(
    on: DeviceOptions, shape: Shape, caps: tuple[float, ...], rounds: int
) -> tuple[Measured, dict[str, Any]]:
    """Timings by cap and arrangement, and what is known of the device."""
    found: Measured = {cap: {arm: [] for arm in ARMS} for cap in caps}
    total = len(caps) * len(ARMS) * rounds
    room_bytes = (int(shape.kv_bytes * ROOM) >> 20 << 20) + LEAST_ROOM_BYTES
    with (
        on.target(room_bytes) as target,
        paced_writeback(target.pace) as is_paced,
        bench_tool.progress_bar(total) as bar,
    ):
        done = 0
        for number in range(rounds):
            for cap in caps:
                arms = list(ARMS)
                for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                    bar(f"{arm} at {cap:.0%}", done)
                    limit_bytes = int(cap * shape.kv_bytes)
                    found[cap][arm].append(measure(arm, target.path, shape, limit_bytes, target.pace))
                    done += 1
        return found, {**target.described, "paced_writeback": is_paced}


def rows_of(found: Measured) -> list[dict[str, Any]]:
    """One row a cap: the medians, the ratio round by round, and the parts."""
    rows = []
    for cap, timings in found.items():
        seconds = {arm: [one.total_s for one in list_] for arm, list_ in timings.items()}
        ratios = [
            dual / min(mmap, direct)
            for mmap, direct, dual in zip(seconds["mmap"], seconds["direct"], seconds["dual"], strict=True)
        ]
        row: dict[str, Any] = {"cap_fraction": cap}
        row |= {f"{arm}_s": statistics.median(seconds[arm]) for arm in ARMS}
        row["dual_over_best"] = row["dual_s"] / min(row["mmap_s"], row["direct_s"])
        row["dual_over_best_by_round"] = ratios
        for arm in ARMS:
            row[f"{arm}_prefill_s"] = statistics.median(one.prefill_s for one in timings[arm])
            row[f"{arm}_decode_s"] = statistics.median(one.decode_s for one in timings[arm])
        row["dual_memory_share"] = statistics.median(one.memory_share for one in timings["dual"])
        rows.append(row)
    return rows


def table_of(rows: list[dict[str, Any]], shape: Shape) -> Table:
    """The rows, for the terminal."""
    table = Table(title=f"{shape.tensors} tensors, {shape.kv_bytes / 1e9:.2f} GB in all, seconds")
    for name in ("memory", "mmap", "direct", "dual", "dual / best", "rounds", "dual from memory"):
        table.add_column(name, justify="right")
    for row in rows:
        parts = [
            f"{row[f'{arm}_s']:.2f} ({row[f'{arm}_prefill_s']:.2f} + {row[f'{arm}_decode_s']:.2f})"
            for arm in ARMS
        ]
        table.add_row(
            f"{row['cap_fraction']:.0%}",
            *parts,
            f"{row['dual_over_best']:.2f}",
            bench_tool.spread(row["dual_over_best_by_round"]),
            f"{row['dual_memory_share']:.0%}",
        )
    return table


@bench_tool.benchmark()
@click.option("--tensors", default=64, show_default=True, help="Keys and values of half as many layers.")
@click.option("--tensor-mib", default=16, show_default=True, help="Of each tensor before the first step.")
@click.option("--step-kib", default=256, show_default=True, help="What a step appends to each tensor.")
@click.option("--steps", default=8, show_default=True)
@click.option(
    "--cap", "caps", multiple=True, type=float, default=CAPS, show_default=True, help="Of the bytes of all."
)
@click.option("--rounds", default=3, show_default=True)
def main(
    on: DeviceOptions,
    to: OutputOptions,
    tensors: int,
    tensor_mib: int,
    step_kib: int,
    steps: int,
    caps: tuple[float, ...],
    rounds: int,
) -> None:
    """See the module."""
    shape = Shape(tensors, tensor_mib << 20, step_kib << 10, steps)
    found, device = run(on, shape, caps, rounds)
    rows = rows_of(found)
    to.console().print(table_of(rows, shape))
    to.document({"device": device, "workload": {**asdict(shape), "kv_bytes": shape.kv_bytes}, "caps": rows})

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for arm in ARMS:
            axes.plot(
                [row["cap_fraction"] for row in rows], [row[f"{arm}_s"] for row in rows], "o-", label=arm
            )
        axes.set(xlabel="memory, of the bytes of all tensors", ylabel="seconds", ylim=(0, None))
        axes.invert_xaxis()
        axes.legend()

    to.draw(draw)


if __name__ == "__main__":
    main()
