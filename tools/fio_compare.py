#!/usr/bin/env python3
"""Throughput and CPU of a store beside fio, on a device or on one made for it.

    tools/fio_compare.py --paced                    a device in memory, held to a drive's speed (root)
    tools/fio_compare.py /dev/nvme0n1p4 --force     a real one; EVERYTHING ON IT IS DESTROYED
    tools/fio_compare.py --paced --stress --hours 8

The table goes to the terminal, with --json one document to standard output. See `blockkv.bench.compare` for
what exactly is measured, and `blockkv.bench.stress` for --stress: fio and the store in turn, every byte
verified on both sides, errors counted, and how their ratio develops. That exits with 1 when there was an
error.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import bench_tool
import click
from bench_tool import DeviceOptions, OutputOptions, Target
from rich.console import Console
from rich.table import Table

from blockkv.bench.compare import CaseResult, Settings, ShapeResult, compare, plan_cases
from blockkv.bench.fio import SHAPES, Shape
from blockkv.bench.stress import Cycle, StressSettings, drift, error_count, stress

PACE_REACHED = 0.97
"""Below this share of the asked speed the CPU, not the paced device, is the limit."""
CYCLES_SHOWN = 24


@bench_tool.benchmark(size_gib=6.0)
@click.option("--op", "ops", multiple=True, type=click.Choice(["get", "put"]), default=["get", "put"])
@click.option("--chunk-mib", multiple=True, type=int, help="Chunk size, repeated for several [2, 8 and 32].")
@click.option("--chunk-kib", multiple=True, type=int, help="The same for small ones.")
@click.option("--batch-mib", default=64, show_default=True, help="Payload of one call.")
@click.option(
    "--calls",
    type=click.Choice(["batch", "futures", "single"]),
    default="batch",
    show_default=True,
    help="All chunks in one call, eight calls in flight, or one call after the other.",
)
@click.option("--fio-shape", multiple=True, metavar="KIBxDEPTH", help="For fio, as in 16x64 [best of three].")
@click.option("--verify", type=click.Choice(["on", "off", "both"]), default="both", show_default=True)
@click.option("--memory", type=click.Choice(["huge", "ordinary", "both"]), default="both", show_default=True)
@click.option("--pairs", default=5, show_default=True, help="Interleaved pairs of fio and store per case.")
@click.option("--seconds", default=1.5, show_default=True, help="Length of one run.")
@click.option("--equal-memory", is_flag=True, help="Deepen fio's queue until its buffers equal one call's.")
@click.option(
    "--stress", "stressing", is_flag=True, help="Instead: both in turn for --hours, every byte verified."
)
@click.option("--hours", default=1.0, show_default=True, help="Length of --stress.")
def main(
    on: DeviceOptions,
    to: OutputOptions,
    ops: tuple[Any, ...],
    chunk_mib: tuple[int, ...],
    chunk_kib: tuple[int, ...],
    batch_mib: int,
    calls: Any,
    fio_shape: tuple[str, ...],
    verify: str,
    memory: str,
    pairs: int,
    seconds: float,
    equal_memory: bool,
    stressing: bool,
    hours: float,
) -> None:
    """Compare a store with fio on DEVICE, which is formatted and overwritten, or on one made for it."""
    if stressing:
        _stress(on, to, StressSettings(hours, batch_bytes=batch_mib << 20))
        return
    console = to.console()
    cases = plan_cases(
        ops=ops,
        chunk_sizes_bytes=[kib << 10 for kib in chunk_kib]
        + [mib << 20 for mib in chunk_mib or (() if chunk_kib else (2, 8, 32))],
        batch_bytes=batch_mib << 20,
        verify={"on": [True], "off": [False], "both": [True, False]}[verify],
        memory=["huge", "ordinary"] if memory == "both" else [memory],  # type: ignore[list-item]
        calls=calls,
    )
    shapes_tried = [_shape(text) for text in fio_shape] or SHAPES
    settings = Settings(pairs, seconds, shapes=shapes_tried, equal_memory=equal_memory)
    with on.target() as target:
        _warn(console, target)
        shapes, results = compare(
            target.path, cases, settings, lambda found: _announce(console, found), force=target.force
        )
        described = _describe(target, shapes)
    to.document(_document(described, shapes, results))
    console.print(_table(results))
    if described.get("pace_reached") is False:
        console.print(
            "fio did not reach the pace: the CPU was the limit. Lower --read-gb-s and --write-gb-s, "
            "or see with --equal-memory what fio does without its buffers in the CPU's cache."
        )
    to.draw(lambda figure: _draw(figure, results), width_in=12, height_in=0.35 * len(results) + 1.5)


def _shape(text: str) -> Shape:
    kib, _, depth = text.partition("x")
    if not (kib.isdecimal() and depth.isdecimal() and int(kib) and int(depth)):
        raise click.UsageError(f"--fio-shape {text!r}: write KiB and depth, as in 512x16")
    return Shape(int(kib) << 10, int(depth))


def _stress(on: DeviceOptions, to: OutputOptions, settings: StressSettings) -> None:
    """Cycles of fio and store; exits with 1 when either found an error."""
    console = to.console()
    with on.target() as target, bench_tool.progress_bar(settings.hours) as advance:
        _warn(console, target)

        def announce(cycle: Cycle) -> None:
            what = f"cycle {cycle.number}, {cycle.errors} errors in it"
            advance(what, min(settings.hours, cycle.elapsed_s / 3600))

        cycles = stress(target.path, settings, announce, force=target.force)
        described = target.described | {"fio": _fio_version()}
    drifts = {
        "put_ratio": drift([cycle.put_ratio for cycle in cycles]),
        "get_ratio": drift([cycle.get_ratio for cycle in cycles]),
    }
    to.document(
        {
            "device": described,
            "settings": dataclasses.asdict(settings),
            "cycles": [
                dataclasses.asdict(cycle)
                | {"put_ratio": cycle.put_ratio, "get_ratio": cycle.get_ratio, "errors": cycle.errors}
                for cycle in cycles
            ],
            "drift": drifts,
            "errors": error_count(cycles),
        }
    )
    console.print(_cycle_table(cycles))
    for name, value in drifts.items():
        shown = "unknown after so few cycles" if value is None else f"{value:.3f}"
        console.print(f"{name}, last quarter per first quarter: {shown}", highlight=False)
    console.print(f"{len(cycles)} cycles, {error_count(cycles)} errors", highlight=False)
    for cycle in cycles:
        for failure in cycle.failures:
            console.print(f"cycle {cycle.number}: {failure}", highlight=False, markup=False)
    to.draw(lambda figure: _draw_cycles(figure, cycles))
    if error_count(cycles):
        sys.exit(1)


def _cycle_table(cycles: list[Cycle]) -> Table:
    """A line a cycle; of many, some evenly spaced, and every one with an error."""
    table = Table(title="fio and blockkv in turn, every byte verified; GB/s")
    for heading in ("cycle", "hours", "put", "fio write", "ratio", "get", "fio read", "ratio", "errors"):
        table.add_column(heading, justify="right", no_wrap=True)
    step = -(-len(cycles) // CYCLES_SHOWN)
    for index, cycle in enumerate(cycles):
        if index % step == 0 or cycle.errors or index == len(cycles) - 1:
            values = (cycle.put_gb_per_s, cycle.fio_write_gb_per_s, cycle.put_ratio)
            values += (cycle.get_gb_per_s, cycle.fio_read_gb_per_s, cycle.get_ratio)
            cells = ["-" if value is None else f"{value:.2f}" for value in values]
            table.add_row(str(cycle.number), f"{cycle.elapsed_s / 3600:.2f}", *cells, str(cycle.errors))
    return table


def _draw_cycles(figure: Any, cycles: list[Cycle]) -> None:
    """Both ratios over time, and where there were errors."""
    axes = figure.subplots()
    hours = [cycle.elapsed_s / 3600 for cycle in cycles]
    for name, ratios in (
        ("put / verified write", [cycle.put_ratio for cycle in cycles]),
        ("get / verified read", [cycle.get_ratio for cycle in cycles]),
    ):
        axes.plot(
            hours, [float("nan") if ratio is None else ratio for ratio in ratios], marker=".", label=name
        )
    for hour, cycle in zip(hours, cycles, strict=True):
        if cycle.errors:
            axes.axvline(hour, color="red", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hours")
    axes.set_ylabel("blockkv / fio; red: errors")
    axes.legend()


def _warn(console: Console, target: Target) -> None:
    if target.pace is None:
        console.print(f"[bold]{target.path} is formatted and overwritten, unless it is refused.[/bold]")


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
    return f"{_size(case.chunk_bytes)} x {case.chunks_per_call}, {checked}, {case.memory} pages"


def _describe(target: Target, shapes: list[ShapeResult]) -> dict[str, Any]:
    described = target.described | {"fio": _fio_version()}
    if target.pace is not None:
        speeds = {"get": target.pace.read_bytes_per_s / 1e9, "put": target.pace.write_bytes_per_s / 1e9}
        described["pace_reached"] = all(
            max(shape.gb_per_s for shape in shapes if shape.op == op) >= PACE_REACHED * speeds[op]
            for op in {shape.op for shape in shapes}
        )
    return described


def _fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


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
            f"{case.chunks_per_call} x {_size(case.chunk_bytes)}"
            + ("" if case.calls == "batch" else f", {case.calls}"),
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


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def _draw(figure: Any, results: list[CaseResult]) -> None:
    """Throughput in relation to fio's with its spread, and the CPU of both."""
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = [f"{result.case.op} {_megabytes(result)}" for result in results]
    ratios = [result.ratio for result in results]
    low = [result.ratio - result.ratio_spread[0] for result in results]
    high = [result.ratio_spread[1] - result.ratio for result in results]
    colours = ["tab:blue" if result.case.op == "get" else "tab:green" for result in results]
    left.barh(names, ratios, xerr=[low, high], color=colours, error_kw={"ecolor": "dimgrey"})
    for position, ratio in enumerate(ratios):
        left.text(0.02, position, f"{ratio:.2f}", color="white", va="center", fontweight="bold")
    left.axvline(1.0, color="black", linewidth=1)
    left.set_xlabel("throughput, fio = 1")
    positions = range(len(results))
    right.barh(
        [position - 0.2 for position in positions],
        [result.cpu_s_per_gb for result in results],
        height=0.4,
        color="tab:orange",
        label="blockkv",
    )
    right.barh(
        [position + 0.2 for position in positions],
        [result.fio_cpu_s_per_gb for result in results],
        height=0.4,
        color="silver",
        label="fio",
    )
    right.set_xlabel("CPU s/GB")
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    left.invert_yaxis()
    left.margins(y=0.01)


if __name__ == "__main__":
    main()
