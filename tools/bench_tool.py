"""What the benchmarks under tools/ have in common: the device they run on, JSON, the table, the plot.

Every one takes DEVICE, which is overwritten, or makes one: --paced in memory, held to a drive's speed, or
--disk in a directory on a disk. The table goes to the terminal; with --json one document goes to standard
output and the table to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from blockkv.bench.device import PacedDevice, loop_device, paced_device
from blockkv.errors import BlockKVError

HELP_CHARS = 110
TABLE_CHARS = 124
"""Squeezed into less a table has to be read letter by letter; let the terminal wrap it instead."""


@dataclass(frozen=True, slots=True)
class Target:
    """The device to measure on. What is on it may be overwritten if `force`."""

    path: Path
    force: bool
    pace: PacedDevice | None
    described: dict[str, Any]
    """For the document."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What the command line says of the device."""

    device: str | None
    paced: bool
    disk: str | None
    size_gib: float | None
    read_gb_s: float
    write_gb_s: float
    sector_bytes: int
    force: bool

    @property
    def is_none(self) -> bool:
        """Whether no device is asked for."""
        return not (self.device or self.paced or self.disk)

    @contextlib.contextmanager
    def target(self, least_bytes: int = 0, large_requests: bool = False) -> Iterator[Target]:
        """The device, for as long as the context lasts.

        One that is made has `size_gib`, else `least_bytes`; see `paced_device` for `large_requests`. Raises
        UsageError unless there is just one of DEVICE, --paced and --disk; BlockKVError when none can be made.
        """
        if sum(map(bool, (self.device, self.paced, self.disk))) != 1:
            raise click.UsageError("give one of DEVICE, --paced and --disk DIRECTORY")
        size_bytes = least_bytes if self.size_gib is None else int(self.size_gib * (1 << 30))
        described = {"kernel": platform.release(), "cpu_count": os.cpu_count()}
        if self.device is not None:
            yield Target(Path(self.device), self.force, None, {"path": self.device, **described})
        elif self.disk is not None:
            with loop_device(Path(self.disk), size_bytes, self.sector_bytes) as path:
                made = {"path": str(path), "disk": self.disk, "size_bytes": size_bytes}
                yield Target(path, True, None, {**made, **described})
        else:
            speeds = int(self.read_gb_s * 1e9), int(self.write_gb_s * 1e9)
            made_device = paced_device(size_bytes, *speeds, self.sector_bytes, large_requests)
            with made_device as pace, pace.joined():
                made = {
                    "path": str(pace.path),
                    "size_bytes": size_bytes,
                    "paced_read_gb_per_s": pace.read_bytes_per_s / 1e9,
                    "paced_write_gb_per_s": pace.write_bytes_per_s / 1e9,
                }
                yield Target(pace.path, True, pace, {**made, **described})


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where results go."""

    as_json: bool
    plot: str | None

    def console(self, least_chars: int = TABLE_CHARS) -> Console:
        """For tables and remarks."""
        console = Console(stderr=self.as_json)
        console.width = max(console.width, least_chars)
        return console

    def document(self, document: dict[str, Any]) -> None:
        """Print the JSON, if it is wanted."""
        if self.as_json:
            click.echo(json.dumps(document, indent=2))

    def draw(self, draw: Callable[[Any], None], width_in: float = 9, height_in: float = 5) -> None:
        """Have `draw` draw into a matplotlib figure, and save it, if it is wanted."""
        if self.plot is None:
            return
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=(width_in, height_in), layout="constrained")
        draw(figure)
        figure.savefig(self.plot, dpi=150)
        plt.close(figure)


def benchmark(
    size_gib: float | None = None, read_gb_s: float = 7.0, write_gb_s: float = 4.9
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function of (DeviceOptions, OutputOptions, *its own options).

    The arguments are the defaults of the device that is made; without `size_gib` the tool knows how large it
    has to be. A BlockKVError ends the command with its message; SIGTERM lets go of everything.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(**options: Any) -> None:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            on = DeviceOptions(**{name: options.pop(name) for name in DeviceOptions.__slots__})
            to = OutputOptions(**{name: options.pop(name) for name in OutputOptions.__slots__})
            refuse_plot_without_matplotlib(to)
            try:
                function(on, to, **options)
            except BlockKVError as error:
                raise click.ClickException(str(error)) from error

        for parameter in _parameters(size_gib, read_gb_s, write_gb_s):
            run = parameter(run)
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": HELP_CHARS}
        return click.command(help=_help(function), context_settings=settings)(run)

    return decorate


def _help(function: Callable[..., None]) -> str:
    """The docstring of the tool. What is indented stays as it is: click wants a backspace before that."""
    document = function.__globals__["__doc__"] or ""
    paragraphs = document.strip().split("\n\n")
    return "\n\n".join(f"\b\n{text}" if "\n  " in f"\n{text}" else text for text in paragraphs)


def _parameters(size_gib: float | None, read_gb_s: float, write_gb_s: float) -> list[Any]:
    """Last first, as decorators are applied."""
    shown = {"show_default": True}
    return [
        click.option("--plot", type=click.Path(dir_okay=False), help="Draw the result into this PNG file."),
        click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output."),
        click.option("--force", is_flag=True, help="Destroy what is on DEVICE; never what is in use."),
        click.option(
            "--sector-bytes", default=4096, help="Logical block size of a device that is made.", **shown
        ),
        click.option("--write-gb-s", default=write_gb_s, help="Write speed of the paced device.", **shown),
        click.option("--read-gb-s", default=read_gb_s, help="Read speed of the paced device.", **shown),
        click.option(
            "--size-gib",
            type=float,
            default=size_gib,
            help="Size of a device that is made.",
            show_default=True if size_gib else "what the run needs",
        ),
        click.option(
            "--disk",
            type=click.Path(exists=True, file_okay=False),
            help="Make a loop device over a file in this directory and use that (root).",
        ),
        click.option("--paced", is_flag=True, help="Make a throttled device in memory and use that (root)."),
        click.argument("device", required=False, type=click.Path(exists=True)),
    ]


def refuse_plot_without_matplotlib(to: OutputOptions) -> None:
    """Before the hours, not after them."""
    if to.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise click.ClickException("--plot needs matplotlib; run: pip install matplotlib") from error


@contextlib.contextmanager
def progress_bar(total: float) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, if that is a terminal: call with what is being done and how much is done."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, done: bar.update(task, description=what, completed=done)


def spread(values: list[float]) -> str:
    """Smallest and largest, as the tables show them."""
    return f"{min(values):.2f}-{max(values):.2f}"
