"""What a command says: its result on stdout, everything else on stderr.

With `--json` stdout holds exactly one JSON document, also when the command fails. Progress is shown on a
terminal only. rich is imported when something is drawn with it, not before: start-up stays quick.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from blockkv.errors import BlockKVError, InvalidArgument

PROGRESS_AFTER_S = 0.5
"""Quick commands draw nothing; a bar that flashes up says less than none."""

Advance = Callable[[str, int, int], None]
"""Tells a progress bar (what is going on, done, total); total 0: unknown."""


@contextlib.contextmanager
def standard_output() -> Iterator[BinaryIO]:
    """Stdout for bytes, all of them.

    Where Python does not buffer it (PYTHONUNBUFFERED) a write to a pipe may end halfway and only return so.
    """
    stream: BinaryIO = sys.stdout.buffer
    if not isinstance(stream, io.RawIOBase):
        yield stream
        stream.flush()
        return
    whole = io.BufferedWriter(stream)
    try:
        yield whole
        whole.flush()
    finally:
        with contextlib.suppress(OSError):
            whole.detach()


class Output:
    """The streams of one command. `as_json`: one JSON document instead of text."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, document: Any, text: Callable[[], None]) -> None:
        """The result: `document` as JSON, or whatever `text` prints."""
        if self.as_json:
            click.echo(json.dumps(document, indent=2, default=_plain))
        else:
            text()

    def note(self, message: str) -> None:
        """Something the user may want to know, on stderr."""
        click.echo(message, err=True)

    def error(self, error: BaseException, message: str) -> None:
        """The one line, or the one JSON document, of a command that failed."""
        if self.as_json:
            document = {"error": {"type": type(error).__name__, "message": message}}
            click.echo(json.dumps(document, indent=2))
        else:
            click.echo(f"blockkv: {message}", err=True)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Advance]:
        """A progress bar on stderr, drawn from PROGRESS_AFTER_S on and gone at the end; off a tty a line for
        each new stage.
        """
        begin = time.monotonic()
        if not sys.stderr.isatty():
            yield _lines(begin)
            return
        with contextlib.ExitStack() as stack:
            bar: Any = None
            task: Any = None

            def advance(label: str, done: int, total: int) -> None:
                nonlocal bar, task
                if bar is None:
                    if time.monotonic() - begin < PROGRESS_AFTER_S:
                        return
                    bar = stack.enter_context(_bar())
                    task = bar.add_task(label)
                bar.update(task, description=label, completed=done, total=total or None)

            yield advance

    @contextlib.contextmanager
    def activity(self, label: str) -> Iterator[None]:
        """A sign of life on stderr while something of unknown length goes on; nothing off a tty."""
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(label):
            yield


def _lines(begin: float) -> Advance:
    told = ""

    def advance(label: str, done: int, total: int) -> None:
        nonlocal told
        elapsed_s = time.monotonic() - begin
        if label != told and elapsed_s >= PROGRESS_AFTER_S:
            told = label
            click.echo(f"{elapsed_s:6.1f} s  {label}", err=True)

    return advance


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@contextlib.contextmanager
def private_file(path: str, *, new: bool = False) -> Iterator[BinaryIO]:
    """A file for chunks: nobody else may read one that is made. `new`: it must not exist.

    One that was made here is removed again where it cannot be written to the end, so that it can be tried
    again; not where a store is what failed, because it may hold all that is left. Raises InvalidArgument
    where it must not exist, and for block devices; OSError with the name of the file.
    """
    exists = os.path.lexists(path)
    if Path(path).is_block_device() or (new and exists):
        raise InvalidArgument(f"{path} exists; give the name of a new file, or - and redirect")
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if exists else os.O_EXCL)
    descriptor = os.open(path, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
    except BlockKVError:
        raise
    except BaseException as error:
        if not exists:
            Path(path).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = path
        raise


def _plain(value: Any) -> Any:
    """JSON form of what json does not know: keys and digests as text, anything else as its `str`."""
    if isinstance(value, bytes):
        return key_text(value)
    return str(value)


def key_text(key: str | bytes) -> str:
    """A key as one printable line, in a form that the command line reads back: text, or hex:<digits>."""
    raw = key.encode() if isinstance(key, str) else bytes(key)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return "hex:" + raw.hex()
    # What the command line would not read back as this key is shown in the form that it does.
    return text if text.isprintable() and not text.startswith("hex:") else "hex:" + raw.hex()


def lines(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None, right: str = "") -> None:
    """Print `rows` in aligned columns. `right` has one character a column: "r" aligns to the right."""
    table = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.rjust(width) if right[index : index + 1] == "r" else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def fields(pairs: Sequence[tuple[str, object]]) -> None:
    """Print names and values, one pair a line, values aligned."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        click.echo(f"{name.ljust(width)}  {value}")
