"""`blockkv map`: a picture of where the chunks are, how hot they are, and how the space lies in pieces."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import click

from blockkv.cli.app import StorePath, command, degraded_option, open_store, store_argument
from blockkv.cli.byte_sizes import size_text
from blockkv.cli.output import Output, fields
from blockkv.device.base import UNIT_BYTES
from blockkv.errors import InvalidArgument

COLUMNS, ROWS = 64, 16
SHADES = " ░▒▓█"
"""From a cell without chunks to a full one."""
COLOURS = ("blue", "cyan", "green", "yellow", "red")
"""From the fifth that leaves first, or that was put first, to the fifth that leaves last."""


@dataclass(slots=True)
class _Chunk:
    extents: Sequence[tuple[int, int]]
    payload_bytes: int
    log_sequence: int


@dataclass(slots=True)
class _Device:
    """What is known of one device of the store. Chunks are in the order of eviction."""

    path: str
    facts: dict[str, Any]
    chunks: list[_Chunk] = field(default_factory=list)

    @property
    def units(self) -> int:
        return int(self.facts["data_bytes"]) // UNIT_BYTES


@command("map", examples=["map /dev/nvme1n1 --by age --png map.png"])
@store_argument
@degraded_option
@click.option(
    "--by",
    type=click.Choice(["heat", "age"]),
    default="heat",
    show_default=True,
    help="What colours say: who was used last, or who was put last.",
)
@click.option("--png", type=click.Path(dir_okay=False), help="Draw it into this file as well (matplotlib).")
def map_(output: Output, store_path: StorePath, degraded: bool, by: str, png: str | None) -> None:
    """Show the data zone: what is used, how hot it is, and in how many pieces.

    Each cell is an equal part of the data zone; its shade says how much of it chunks have, its colour how hot
    they are in the mean: blue leaves first, red last. Looks at the store while nobody writes to it.
    """
    if png is not None:
        _refuse_without_matplotlib()
    with open_store(store_path, degraded=degraded, read_only=True) as store, output.progress() as advance:
        info = store.info()
        members = [one for one in info.get("members", [info]) if "path" in one]  # not those that are missing
        devices = {one["path"]: _Device(one["path"], one) for one in members}
        only = next(iter(devices.values())) if len(devices) == 1 else None  # an owner's, by whatever path
        keys = list(store.keys())
        for number, key in enumerate(keys):
            found = store.entry(key)
            if found is not None:
                chunk = _Chunk(found.extents, found.payload_bytes, found.log_sequence)
                (only or devices[found.device]).chunks.append(chunk)
            advance("looking at chunks", number, len(keys))
    documents = [_document(device, by) for device in devices.values()]
    if png is not None:
        _draw(documents, by, png)

    def text() -> None:
        for document in documents:
            _print(document)

    output.document({"by": by, "devices": documents}, text)


def _document(device: _Device, by: str) -> dict[str, Any]:
    chunks = device.chunks if by == "heat" else sorted(device.chunks, key=lambda one: one.log_sequence)
    used = [0.0] * (COLUMNS * ROWS)
    warmth = [0.0] * (COLUMNS * ROWS)
    cell_units = device.units / len(used)
    for rank, chunk in enumerate(chunks, 1):
        for start, count in chunk.extents:
            for cell, units in _over(start, count, cell_units):
                used[cell] += units
                warmth[cell] += units * rank / len(chunks)
    extents = sorted(extent for chunk in chunks for extent in chunk.extents)
    gaps = [
        following - (start + count)
        for (start, count), (following, _) in pairwise([(0, 0), *extents, (device.units, 0)])
    ]
    used_units = sum(count for _, count in extents)
    facts = device.facts
    return {
        "path": device.path,
        "device_bytes": facts["device_bytes"],
        "checkpoint_bytes": 2 * facts["checkpoint_area_bytes"],
        "journal_bytes": facts["journal_bytes"],
        "data_bytes": facts["data_bytes"],
        "used_bytes": used_units * UNIT_BYTES,
        "chunks": len(chunks),
        "payload_bytes": sum(chunk.payload_bytes for chunk in chunks),
        "mean_extent_bytes": used_units * UNIT_BYTES / len(extents) if extents else 0.0,
        "chunks_in_pieces": sum(len(chunk.extents) > 1 for chunk in chunks),
        "free_extents": sum(gap > 0 for gap in gaps),
        "largest_free_bytes": max(gaps) * UNIT_BYTES,
        "columns": COLUMNS,
        "used_share": [round(units / cell_units, 4) for units in used],
        by: [round(warm / units, 4) if units else None for warm, units in zip(warmth, used, strict=True)],
    }


def _over(start: int, count: int, cell_units: float) -> list[tuple[int, float]]:
    """The cells that an extent lies in, and how many units of it in each."""
    found = []
    first, last = int(start / cell_units), math.ceil((start + count) / cell_units)
    for cell in range(first, min(last, COLUMNS * ROWS)):
        units = min(start + count, (cell + 1) * cell_units) - max(start, cell * cell_units)
        if units > 0:
            found.append((cell, units))
    return found


def _print(document: dict[str, Any]) -> None:
    by = "heat" if "heat" in document else "age"
    click.echo(f"{document['path']}: {size_text(document['device_bytes'])}")
    cells = [_cell(*one) for one in zip(document["used_share"], document[by], strict=True)]
    for first in range(0, len(cells), COLUMNS):
        click.echo("".join(cells[first : first + COLUMNS]).rstrip())
    cell_bytes = document["data_bytes"] / (COLUMNS * ROWS)
    legend = ("leaves first", "leaves last") if by == "heat" else ("put first", "put last")
    click.echo(
        f"a cell is {size_text(round(cell_bytes))}; "
        + " ".join([legend[0], *(click.style("█", fg=colour) for colour in COLOURS), legend[1]])
    )
    largest = size_text(document["largest_free_bytes"])
    fields(
        [
            ("metadata", size_text(document["checkpoint_bytes"] + document["journal_bytes"])),
            ("data", f"{size_text(document['used_bytes'])} of {size_text(document['data_bytes'])}"),
            ("chunks", f"{document['chunks']}, {document['chunks_in_pieces']} of them in pieces"),
            ("extents", f"{size_text(round(document['mean_extent_bytes']))} in the mean"),
            ("free", f"{document['free_extents']} extents, the largest of {largest}"),
        ]
    )


def _cell(used_share: float, warmth: float | None) -> str:
    shade = SHADES[min(len(SHADES) - 1, math.ceil(used_share * (len(SHADES) - 1)))]
    if warmth is None or not sys.stdout.isatty():
        return shade
    return click.style(shade, fg=COLOURS[min(len(COLOURS) - 1, int(warmth * len(COLOURS)))])


def _refuse_without_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidArgument("--png needs matplotlib; run: pip install 'blockkv[bench]'") from error


def _draw(documents: Sequence[dict[str, Any]], by: str, png: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2 * len(documents)), layout="constrained")
    panels = figure.subplots(len(documents), 1, squeeze=False)
    for document, (panel,) in zip(documents, panels, strict=True):
        shares = document["used_share"]
        warmth = [math.nan if one is None else one for one in document[by]]
        rows = range(0, len(shares), COLUMNS)
        image = panel.imshow(
            [warmth[first : first + COLUMNS] for first in rows],
            alpha=[[min(1.0, 0.15 + share) for share in shares[first : first + COLUMNS]] for first in rows],
            cmap="turbo",
            vmin=0,
            vmax=1,
            aspect="auto",
        )
        figure.colorbar(image, ax=panel, label="leaves last" if by == "heat" else "put last")
        used = f"{size_text(document['used_bytes'])} of {size_text(document['data_bytes'])}"
        panel.set_title(f"{document['path']}: {used}, {document['chunks']} chunks")
        panel.set_xticks([])
        panel.set_yticks([])
    figure.savefig(png, dpi=150)
