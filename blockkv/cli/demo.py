"""`blockkv demo`: what blockkv does, shown on a real model and real traffic."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from blockkv.cli.app import command
from blockkv.cli.bench import case_document
from blockkv.cli.byte_sizes import Size, size_text
from blockkv.cli.exit_code import ExitCode
from blockkv.cli.output import Output
from blockkv.device.base import UNIT_BYTES
from blockkv.device.namespace import probe

if TYPE_CHECKING:
    from blockkv.demo.resume import Progress

SPEED_CHUNK_BYTES = 4 << 20
"""The size of the demo's own KV chunks: 256 tokens of its model."""
SPEED_BATCH_BYTES = 32 << 20
SPEED_BATCH_SHARE = 16
"""At most 1/16 of the device in one call."""
SPEED_PAIRS = 3
SPEED_SECONDS = 0.6
PLAIN_WIDTH = 110
"""Columns of the summary when it does not go to a terminal."""


@command("demo", examples=["demo", "demo /dev/nvme1n1p4 --skip-fio"])
@click.argument("device", type=click.Path(), required=False)
@click.option("--size", "size_bytes", type=Size(), default="512MiB", show_default=True, help="Of the file.")
@click.option("--force", is_flag=True, help="Overwrite what was found on DEVICE. Never what is in use.")
@click.option("--keep", is_flag=True, help="Keep the file.")
@click.option(
    "--chunk-bytes",
    type=Size(),
    default="128KiB",
    show_default=True,
    help="What stands for 512 tokens of the trace.",
)
@click.option(
    "--requests",
    "request_count",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Of the trace.",
)
@click.option("--trace", "trace_path", type=click.Path(), help="Another trace (JSON lines; .gz, .xz).")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=2, max=28000),
    default=5000,
    show_default=True,
    help="Of the book, for the model.",
)
@click.option(
    "--kill-after",
    "kill_after_tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Durable tokens to wait for before the kill.",
)
@click.option(
    "--generate",
    "generate_tokens",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Tokens to generate then.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens in a chunk of the model.",
)
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True, help="Of the model.")
@click.option("--skip-fio", is_flag=True, help="Leave out the comparison with fio.")
def demo(
    output: Output,
    device: str | None,
    size_bytes: int,
    force: bool,
    keep: bool,
    chunk_bytes: int,
    request_count: int,
    trace_path: str | None,
    prompt_tokens: int,
    kill_after_tokens: int,
    generate_tokens: int,
    chunk_tokens: int,
    layers: int,
    skip_fio: bool,
) -> int:
    """Store a model's KV cache, kill the process, go on from what is stored; then replay real traffic.

    Runs on DEVICE (a device, a loop device, a file), which must be empty, or on a file of its own that it
    removes. Takes two to four minutes on two cores.

    \b
    1. speed of puts and gets beside fio, on the same device
    2. a small Llama prefills a book and stores its KV cache in chunks, durably; the process is killed with
       SIGKILL at work; a new one finds the longest stored prefix, restores it and goes on. Every logit is
       compared with a run that was never interrupted, to the last bit
    3. the first 1,000 requests of the Mooncake conversation trace (FAST '25) on a store much smaller than
       what they ask for; every chunk that comes back is checked

    Exits 1 when a logit differs, a durable chunk is missing, or a chunk has wrong content.
    """
    from blockkv.demo.resume import ResumeOptions
    from blockkv.demo.run import DemoOptions, run

    if kill_after_tokens > (prompt_tokens - 1) // chunk_tokens * chunk_tokens:
        raise click.UsageError(
            f"--kill-after {kill_after_tokens} is more than the whole chunks before the last of "
            f"{prompt_tokens} tokens; give a longer --prompt-tokens"
        )
    options = DemoOptions(
        device=device,
        size_bytes=size_bytes,
        force=force,
        keep=keep,
        chunk_bytes=chunk_bytes,
        request_count=request_count,
        trace_path=trace_path,
        resume=ResumeOptions(
            prompt_tokens=prompt_tokens,
            chunk_tokens=chunk_tokens,
            kill_after_tokens=kill_after_tokens // chunk_tokens * chunk_tokens,
            generate_tokens=generate_tokens,
            layers=layers,
        ),
    )

    def measure(path: str, progress: Progress) -> dict[str, Any]:
        if skip_fio:
            return {"skipped": "--skip-fio was given"}
        if shutil.which("fio") is None:
            output.note("blockkv: fio is not installed, so the comparison is left out (apt-get install fio)")
            return {"skipped": "fio is not installed"}
        return _speed(path, progress)

    with _ended_by_sigterm(), output.progress() as advance:
        document = run(options, measure, advance)
    output.document(document, lambda: _print(document))
    return ExitCode.OK if document["ok"] else ExitCode.NEGATIVE


def _speed(path: str, progress: Progress) -> dict[str, Any]:
    from blockkv.bench.compare import CaseResult, Settings, ShapeResult, compare, plan_cases

    # A small device takes smaller batches: what is measured must not fit into one of them.
    share_bytes = probe(path).size_bytes // SPEED_BATCH_SHARE // UNIT_BYTES * UNIT_BYTES
    batch_bytes = min(SPEED_BATCH_BYTES, share_bytes)
    cases = plan_cases(
        chunk_sizes_bytes=[min(SPEED_CHUNK_BYTES, batch_bytes)],
        batch_bytes=batch_bytes,
        verify=[True],
        memory=["huge"],
    )
    done, total = 0, 2 * 3 + len(cases)

    def advance(result: ShapeResult | CaseResult) -> None:
        nonlocal done
        done += 1
        progress("speed beside fio", done, total)

    progress("speed beside fio", 0, total)
    settings = Settings(pairs=SPEED_PAIRS, seconds=SPEED_SECONDS, shape_rounds=1)
    _, results = compare(path, cases, settings, advance, force=True)
    return {result.case.op: case_document(result) for result in results}


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that processes and the file are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"blockkv demo on {document['store'].get('path', '')}", show_header=False)
    table.add_column()
    table.add_column()
    for rows in (
        _speed_rows(document["speed"]),
        _resume_rows(document["resume"]),
        _trace_rows(document["trace"]),
    ):
        for name, value in rows:
            table.add_row(name, value)
        table.add_section()
    verdict = "everything held" if document["ok"] else "SOMETHING DID NOT HOLD"
    table.add_row("verdict", f"{verdict}, {document['seconds']:.0f} s")
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    console.print(table)


def _speed_rows(speed: dict[str, Any]) -> list[tuple[str, str]]:
    if "skipped" in speed:
        return [("speed beside fio", f"left out: {speed['skipped']}")]
    return [
        (
            f"{op}, {size_text(case['chunk_bytes'])} x {case['chunks_per_call']}, verified",
            f"{case['gb_per_s']:.2f} GB/s at {case['cpu_s_per_gb']:.3f} CPU s/GB; "
            f"fio {case['fio_gb_per_s']:.2f} ({case['fio_shape']}); ratio {case['ratio']:.2f}",
        )
        for op, case in sorted(speed.items(), reverse=True)
    ]


def _resume_rows(resume: dict[str, Any]) -> list[tuple[str, str]]:
    steps = resume["compared_steps"]
    verdict = (
        f"identical to the last bit in all {steps} steps"
        if resume["identical"]
        else f"DIFFERENT in {resume['differing_steps']} of {steps} steps"
    )
    return [
        (
            "durable when killed (SIGKILL)",
            f"{resume['durable_tokens_at_kill']} of {resume['prompt_tokens']} tokens, "
            f"{resume['durable_chunks_at_kill']} chunks of {size_text(resume['chunk_bytes'])}",
        ),
        (
            "found by the next process",
            f"{resume['restored_tokens']} tokens, {resume['durable_chunks_lost']} durable chunks lost; "
            f"store open after {1000 * resume['open_after_kill_s']:.0f} ms",
        ),
        (
            "prefill against restore",
            f"{resume['prefill_s']:.2f} s against {resume['restore_s']:.3f} s "
            f"({resume['prefill_over_restore']:.0f} times), {size_text(resume['restored_bytes'])}",
        ),
        (f"logits of {resume['generated_tokens']} more tokens", verdict),
    ]


def _trace_rows(trace: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            f"trace, {trace['request_count']} requests",
            f"{trace['reference_count']} chunks asked for, {trace['distinct_count']} different, "
            f"{size_text(trace['footprint_bytes'])}",
        ),
        (
            "hit rate",
            f"{trace['hit_rate']:.3f} ({trace['infinite_hit_rate']:.3f} if nothing were ever evicted); "
            f"{trace['chunks_evicted']} chunks evicted",
        ),
        (
            "moved",
            f"got {size_text(trace['get_bytes'])} at {trace['get_gb_per_s']:.2f} GB/s, "
            f"put {size_text(trace['put_bytes'])} at {trace['put_gb_per_s']:.2f} GB/s; "
            f"{trace['cpu_s_per_gb']:.3f} CPU s/GB",
        ),
        (
            "content checked",
            f"{trace['hit_count']} chunks, {size_text(trace['checked_bytes'])}: every byte its own"
            + (f"; {trace['failed_get_count']} LOST" if trace["failed_get_count"] else ""),
        ),
    ]
