"""Commands that move chunks: copy, dump, load."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import click

import blockkv
from blockkv.cli.app import StorePath, command, degraded_option, open_store, parse_store, store_argument
from blockkv.cli.byte_sizes import size_text
from blockkv.cli.exit_code import ExitCode
from blockkv.cli.output import Output, private_file, standard_output

if TYPE_CHECKING:
    from blockkv.archive import Moved, Progress


@command("copy", examples=["copy /dev/nvme1n1 /dev/nvme2n1"])
@store_argument
@degraded_option
@click.argument("target")
@click.option("--no-evict", is_flag=True, help="End when the target is full, instead of evicting.")
@click.option(
    "--target-unlock",
    metavar="SOURCE",
    help="What opens TARGET, as for --unlock  [default: what --unlock gives, where it is encrypted]",
)
def copy(
    output: Output,
    store_path: StorePath,
    degraded: bool,
    target: str,
    no_evict: bool,
    target_unlock: str | None,
) -> int:
    """Put the chunks of STORE into TARGET, another store: a larger drive, an array, one with other options.

    TARGET has to be formatted, may hold chunks already, and keeps them. What STORE cannot give, because it is
    damaged or cannot be read, is left out and counted: exit code 1. All of it can be done again.
    """
    from blockkv import archive

    with (
        # not `open_store`: either may be the one that is encrypted
        blockkv.open(store_path, degraded=degraded, read_only=True) as source,
        blockkv.open(parse_store(target), evict=not no_evict, unlock=target_unlock) as store,
    ):
        return _carried_out(output, "copying", lambda told: archive.copy(source, store, progress=told))


@command("dump", examples=["dump /dev/nvme1n1 kv.tar", "dump /dev/nvme1n1 - | zstd > kv.tar.zst"])
@store_argument
@degraded_option
@click.argument("file", type=click.Path(allow_dash=True))
def dump(output: Output, store_path: StorePath, degraded: bool, file: str) -> int:
    """Write the chunks of STORE to a new FILE (- for stdout): a tar archive that `blockkv load` reads.

    Unreadable chunks are left out and counted: exit code 1.
    """
    from blockkv import archive

    if file == "-" and output.as_json:
        raise click.UsageError("--json needs a FILE for the archive: stdout holds the JSON document")
    with open_store(store_path, degraded=degraded, read_only=True) as store:

        def write(told: Progress) -> Moved:
            with _written(file) as opened:
                return archive.dump(store, opened, progress=told)

        return _carried_out(output, "writing", write, silent=file == "-")


@command("load", examples=["load /dev/nvme1n1 kv.tar"])
@store_argument
@degraded_option
@click.argument("file", type=click.Path(allow_dash=True))
def load(output: Output, store_path: StorePath, degraded: bool, file: str) -> int:
    """Put the chunks of FILE (- for stdin), which `blockkv dump` wrote, into STORE. They are durable then.

    Chunks that are damaged in FILE are left out and counted: exit code 1.
    """
    from blockkv import archive

    with _read(file) as opened, open_store(store_path, degraded=degraded) as store:
        return _carried_out(output, "loading", lambda told: archive.load(opened, store, progress=told))


def _carried_out(
    output: Output, doing: str, move: Callable[[Progress], Moved], *, silent: bool = False
) -> int:
    with output.progress() as advance:
        moved = move(lambda done, total: advance(doing, done, total))

    def text() -> None:
        click.echo(f"{moved.chunks} chunks, {size_text(moved.payload_bytes)}", err=silent)
        for count, what in (
            (moved.existing, "were there already"),
            (moved.evicted, "did not fit beside those that were used later, and were evicted again"),
            (moved.no_room, "found no room"),
            (moved.refused, "were not wanted"),
            (moved.lost, "could not be read"),
        ):
            if count:
                click.echo(f"{count} {what}", err=silent)

    output.document(asdict(moved), text)
    # A target that is too small for all, and keeps what was used last, does what it is told.
    return ExitCode.NEGATIVE if moved.no_room or moved.refused or moved.lost else ExitCode.OK


@contextlib.contextmanager
def _written(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        with standard_output() as stream:
            yield stream
    else:
        with private_file(file, new=True) as opened:
            yield opened


@contextlib.contextmanager
def _read(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield cast(BinaryIO, sys.stdin.buffer)
    else:
        with Path(file).open("rb") as opened:
            yield opened
