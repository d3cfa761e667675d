"""`blockkv bench`: puts and gets beside fio, on the same device and in the same minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blockkv.cli.app import command
from blockkv.cli.byte_sizes import Size, size_text
from blockkv.cli.output import Output, lines

if TYPE_CHECKING:
    from blockkv.bench.compare import CaseResult, Memory, Op, ShapeResult


@command("bench", examples=["bench /dev/nvme1n1p4 --chunk 2MiB --op get --force"])
@click.argument("device", type=click.Path())
@click.option(
    "--chunk",
    "chunk_sizes_bytes",
    type=Size(),
    multiple=True,
    default=("2MiB", "8MiB"),
    show_default=True,
    help="Chunk size; may be given several times.",
)
@click.option(
    "--batch", "batch_bytes", type=Size(), default="64MiB", show_default=True, help="Payload of one call."
)
@click.option(
    "--op",
    "ops",
    type=click.Choice(["get", "put"]),
    multiple=True,
    default=("get", "put"),
    help="Only one of both.",
)
@click.option("--no-verify", is_flag=True, help="Gets without checking: what it costs.")
@click.option(
    "--memory",
    type=click.Choice(["huge", "ordinary"]),
    default="huge",
    show_default=True,
    help="Pages of the tensors; fio always gets huge ones.",
)
@click.option("--pairs", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each case.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.05),
    default=1.5,
    show_default=True,
    help="Of one run, in seconds.",
)
@click.option("--force", is_flag=True, help="Overwrite what was found on the device. Never what is in use.")
def bench(
    output: Output,
    device: str,
    chunk_sizes_bytes: tuple[int, ...],
    batch_bytes: int,
    ops: tuple[Op, ...],
    no_verify: bool,
    memory: Memory,
    pairs: int,
    seconds: float,
    force: bool,
) -> None:
    """Measure puts and gets on DEVICE beside the best of three fio shapes. Destroys what is on it.

    fio: io_uring, direct, registered buffers on huge pages, 128 KiB x 32, 512 KiB x 16 and 1 MiB x 8.
    Runs alternate; the ratio is the median over the pairs. CPU is that of the whole process.
    """
    from blockkv.bench.compare import Settings, compare, plan_cases

    settings = Settings(pairs=pairs, seconds=seconds)
    cases = [
        case
        for op in dict.fromkeys(ops)
        for case in plan_cases([op], chunk_sizes_bytes, batch_bytes, [op == "put" or not no_verify], [memory])
    ]
    done = 0
    with output.progress() as advance:

        def progress(result: ShapeResult | CaseResult) -> None:
            nonlocal done
            done += 1
            advance("measuring", done, len(cases) + 3 * len(set(ops)))

        shapes, results = compare(device, cases, settings, progress, force=force)
    document = {
        "device": device,
        "fio": [_shape_document(shape) for shape in shapes],
        "cases": [case_document(result) for result in results],
    }
    output.document(document, lambda: _print(shapes, results))


def _shape_document(result: ShapeResult) -> dict[str, Any]:
    return {
        "op": result.op,
        "request_bytes": result.shape.request_bytes,
        "depth": result.shape.depth,
        "gb_per_s": result.gb_per_s,
        "cpu_s_per_gb": result.cpu_s_per_gb,
        "huge_pages": result.huge_pages,
    }


def case_document(result: CaseResult) -> dict[str, Any]:
    """One case as JSON. Speeds in 10^9 bytes a second."""
    return {
        "op": result.case.op,
        "chunk_bytes": result.case.chunk_bytes,
        "chunks_per_call": result.case.chunks_per_call,
        "verify": result.case.verify,
        "memory": result.case.memory,
        "gb_per_s": result.gb_per_s,
        "fio_gb_per_s": result.fio_gb_per_s,
        "ratio": result.ratio,
        "ratio_spread": list(result.ratio_spread),
        "cpu_s_per_gb": result.cpu_s_per_gb,
        "fio_cpu_s_per_gb": result.fio_cpu_s_per_gb,
        "fio_shape": str(result.fio_shape),
        "pairs": result.pairs,
    }


def _print(shapes: list[ShapeResult], results: list[CaseResult]) -> None:
    lines(
        [
            [item.op, str(item.shape), f"{item.gb_per_s:.2f}", f"{item.cpu_s_per_gb:.3f}",
             "huge" if item.huge_pages else "ordinary"]
            for item in shapes
        ],
        header=["fio", "shape", "GB/s", "CPU s/GB", "pages"],
        right="  rr",
    )  # fmt: skip
    click.echo()
    lines(
        [
            [
                item.case.op,
                f"{size_text(item.case.chunk_bytes)} x {item.case.chunks_per_call}",
                f"{item.gb_per_s:.2f}",
                f"{item.fio_gb_per_s:.2f}",
                f"{item.ratio:.2f}",
                f"{item.ratio_spread[0]:.2f} to {item.ratio_spread[1]:.2f}",
                f"{item.cpu_s_per_gb:.3f}",
                f"{item.fio_cpu_s_per_gb:.3f}",
            ]
            for item in results
        ],
        header=["blockkv", "chunks", "GB/s", "fio GB/s", "ratio", "spread", "CPU s/GB", "fio CPU s/GB"],
        right="  rrrrrr",
    )
