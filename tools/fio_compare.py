#!/usr/bin/env python3
"""Throughput and CPU of a store beside fio, on a device or on a paced one in memory.

    tools/fio_compare.py --paced                    a device in memory, held to a drive's speed (root)
    tools/fio_compare.py /dev/nvme0n1p4 --force     a real one; EVERYTHING ON IT IS DESTROYED

The table goes to the terminal, with --json one document to standard output. See `blockkv.bench.compare` for
what exactly is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from blockkv.bench.compare import CaseResult, Settings, ShapeResult, compare, plan_cases
from blockkv.bench.device import PacedDevice, paced_device
from blockkv.errors import BlockKVError

PACE_REACHED = 0.97
"""Below this share of the asked speed the CPU, not the paced device, is the limit."""


TABLE_CHARS = 124
"""Squeezed into less the table has to be read letter by letter; let the terminal wrap it instead."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("device", required=False, type=click.Path(exists=True))
@click.option("--paced", is_flag=True, help="Make a throttled device in memory and use that.")
@click.option("--size-gib", default=6.0, show_default=True, help="Size of the paced device.")
@click.option("--read-gb-s", default=7.0, show_default=True, help="Read speed of the paced device.")
@click.option("--write-gb-s", default=4.9, show_default=True, help="Write speed of the paced device.")
@click.option(
    "--sector-bytes", default=4096, show_default=True, help="Logical block size of the paced device."
)
@click.option("--force", is_flag=True, help="Destroy what is on DEVICE.")
@click.option("--op", "ops", multiple=True, type=click.Choice(["get", "put"]), default=["get", "put"])
@click.option("--chunk-mib", "chunk_mib", multiple=True, type=int, default=[2, 8, 32], show_default=True)
@click.option("--batch-mib", default=64, show_default=True, help="Payload of one call.")
@click.option("--verify", type=click.Choice(["on", "off", "both"]), default="both", show_default=True)
@click.option("--memory", type=click.Choice(["huge", "ordinary", "both"]), default="both", show_default=True)
@click.option("--pairs", default=5, show_default=True, help="Interleaved pairs of fio and store per case.")
@click.option("--seconds", default=1.5, show_default=True, help="Length of one run.")
@click.option("--equal-memory", is_flag=True, help="Deepen fio's queue until its buffers equal one call's.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the ratios into this file (matplotlib).")
def main(
    device: str | None,
    paced: bool,
    size_gib: float,
    read_gb_s: float,
    write_gb_s: float,
    sector_bytes: int,
    force: bool,
    ops: tuple[Any, ...],
    chunk_mib: tuple[int, ...],
    batch_mib: int,
    verify: str,
    memory: str,
    pairs: int,
    seconds: float,
    equal_memory: bool,
    as_json: bool,
    plot: str | None,
) -> None:
    """Compare a store with fio on DEVICE, which is formatted and overwritten, or on a paced one."""
    if paced == (device is not None):
        raise click.UsageError("name a DEVICE, or give --paced, and not both")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(stderr=as_json)
    console.width = max(console.width, TABLE_CHARS)
    cases = plan_cases(
        ops=ops,
        chunk_sizes_bytes=[mib << 20 for mib in chunk_mib],
        batch_bytes=batch_mib << 20,
        verify={"on": [True], "off": [False], "both": [True, False]}[verify],
        memory=["huge", "ordinary"] if memory == "both" else [memory],  # type: ignore[list-item]
    )
    settings = Settings(pairs=pairs, seconds=seconds, equal_memory=equal_memory)
    try:
        with _target(device, paced, size_gib, read_gb_s, write_gb_s, sector_bytes) as (path, pace):
            if pace is None:
                console.print(f"[bold]{path} is formatted and overwritten, unless it is refused.[/bold]")
            may_overwrite = force or pace is not None
            shapes, results = compare(
                path, cases, settings, lambda found: _announce(console, found), force=may_overwrite
            )
            described = _describe(path, pace, shapes)
    except BlockKVError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_document(described, shapes, results), indent=2))
    console.print(_table(results))
    if described.get("pace_reached") is False:
        console.print(
            "fio did not reach the pace: the CPU was the limit. Lower --read-gb-s and --write-gb-s, "
            "or see with --equal-memory what fio does without its buffers in the CPU's cache."
        )
    if plot:
        _plot(results, plot)


@contextlib.contextmanager
def _target(
    device: str | None, paced: bool, size_gib: float, read_gb_s: float, write_gb_s: float, sector_bytes: int
) -> Iterator[tuple[Path, PacedDevice | None]]:
    if not paced:
        assert device is not None
        yield Path(device), None
        return
    size_bytes = int(size_gib * (1 << 30))
    with (
        paced_device(size_bytes, int(read_gb_s * 1e9), int(write_gb_s * 1e9), sector_bytes) as pace,
        pace.joined(),
    ):
        yield pace.path, pace


def _announce(console: Console, found: ShapeResult | CaseResult) -> None:
    if isinstance(found, ShapeResult):
        pages = "" if found.huge_pages else ", on ordinary pages: no huge ones could be had"
        console.print(f"fio {found.op} {found.shape}: {found.gb_per_s:.2f} GB/s{pages}", highlight=False)
    else:
        console.print(
            f"{found.case.op} {_megabytes(found)}: {found.ratio:.3f} of fio, "
            f"{found.cpu_s_per_gb:.4f} CPU s/GB",
            highlight=False,
        )


def _megabytes(result: CaseResult) -> str:
    case = result.case
    checked = "verified" if case.verify else "unverified"
    return f"{case.chunk_bytes >> 20} MiB x {case.chunks_per_call}, {checked}, {case.memory} pages"


def _describe(path: Path, pace: PacedDevice | None, shapes: list[ShapeResult]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "path": str(path),
        "kernel": platform.release(),
        "cpu_count": os.cpu_count(),
        "fio": subprocess.run(
            ["fio", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip(),
    }
    if pace is not None:
        speeds = {"get": pace.read_bytes_per_s / 1e9, "put": pace.write_bytes_per_s / 1e9}
        described |= {
            "size_bytes": pace.size_bytes,
            "paced_read_gb_per_s": speeds["get"],
            "paced_write_gb_per_s": speeds["put"],
            "pace_reached": all(
                max(shape.gb_per_s for shape in shapes if shape.op == op) >= PACE_REACHED * speeds[op]
                for op in {shape.op for shape in shapes}
            ),
        }
    return described


def _document(
    described: dict[str, Any], shapes: list[ShapeResult], results: list[CaseResult]
) -> dict[str, Any]:
    return {
        "device": described,
        "fio_shapes": [dataclasses.asdict(shape) | {"shape": str(shape.shape)} for shape in shapes],
        "cases": [
            dataclasses.asdict(result.case)
            | {name: value for name, value in dataclasses.asdict(result).items() if name != "case"}
            | {"fio_shape": str(result.fio_shape)}
            for result in results
        ],
    }


def _table(results: list[CaseResult]) -> Table:
    table = Table(title="blockkv beside fio, medians; ratio with its smallest and largest value")
    for heading in ("op", "chunks a call", "verified", "memory"):
        table.add_column(heading)
    for heading in ("GB/s", "fio GB/s", "ratio", "spread", "CPU s/GB", "fio CPU s/GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fio shape", no_wrap=True)
    for result in results:
        case = result.case
        table.add_row(
            case.op,
            f"{case.chunks_per_call} x {case.chunk_bytes >> 20} MiB",
            "yes" if case.verify else "no",
            case.memory,
            f"{result.gb_per_s:.2f}",
            f"{result.fio_gb_per_s:.2f}",
            f"{result.ratio:.3f}",
            "{:.3f}-{:.3f}".format(*result.ratio_spread),
            f"{result.cpu_s_per_gb:.4f}",
            f"{result.fio_cpu_s_per_gb:.4f}",
            str(result.fio_shape),
        )
    return table


def _plot(results: list[CaseResult], file: str) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib; run: pip install matplotlib") from error
    figure, axes = plt.subplots(figsize=(9, 0.35 * len(results) + 1.5), layout="constrained")
    names = [f"{result.case.op} {_megabytes(result)}" for result in results]
    ratios = [result.ratio for result in results]
    low = [result.ratio - result.ratio_spread[0] for result in results]
    high = [result.ratio_spread[1] - result.ratio for result in results]
    axes.barh(names, ratios, xerr=[low, high])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("throughput, fio = 1")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
