"""Commands on whole stores: format, info."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

import blockkv
from blockkv.cli.app import command, store_argument
from blockkv.cli.output import Output, fields, lines
from blockkv.cli.size import Size, size_text
from blockkv.device import namespace, occupancy
from blockkv.format.geometry import Geometry, Zone, plan
from blockkv.format.superblock import MAGIC, SUPERBLOCK


@command("format")
@store_argument
@click.option("--size", "size_bytes", type=Size(), help="Create a regular file of this size.")
@click.option(
    "--average-chunk",
    "average_chunk_bytes",
    type=Size(),
    default="1MiB",
    show_default=True,
    help="Expected chunk size: fixes how many chunks the index can hold.",
)
@click.option("--journal", "journal_bytes", type=Size(), help="Journal size (default: 64MiB, less if small).")
@click.option("--label", help="Name kept in the superblock.")
@click.option("--force", is_flag=True, help="Overwrite what was found on the device. Never what is in use.")
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
def format_store(
    output: Output,
    store_path: str,
    size_bytes: int | None,
    average_chunk_bytes: int,
    journal_bytes: int | None,
    label: str | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Make a store on a device, a partition or a file.

    Refuses a device that is mounted, held, or carries anything (exit code 3), and names the command that
    would clear it.
    """
    geometry = _planned(store_path, size_bytes, average_chunk_bytes, journal_bytes)
    if not output.as_json and sys.stderr.isatty():
        output.note(
            f"formatting {store_path}: "
            + ", ".join(f"{n} {size_text(z.size_bytes)}" for n, z in _zones(geometry))
        )
    document: dict[str, Any] = {"path": store_path, "zones": _zone_document(geometry)}
    if dry_run:
        findings = [str(finding) for finding in _in_the_way(store_path, geometry, force)]

        def plan_text() -> None:
            _print_zones(store_path, geometry)
            for finding in findings:
                click.echo(f"overwrites: {finding}")

        output.document({**document, "formatted": False, "overwrites": findings}, plan_text)
        return
    info = blockkv.format(
        store_path,
        size=size_bytes,
        average_chunk=average_chunk_bytes,
        label=label,
        force=force,
        journal=journal_bytes,
    )
    document.update(info)

    def text() -> None:
        _print_zones(store_path, geometry)
        click.echo(f"formatted, {size_text(geometry.data.size_bytes)} for chunks")

    output.document({**document, "formatted": True}, text)


def _planned(
    path: str, size_bytes: int | None, average_chunk_bytes: int, journal_bytes: int | None
) -> Geometry:
    lba_bytes = 4096
    if size_bytes is None or os.path.exists(path):  # noqa: PTH110
        limits = namespace.probe(path)
        lba_bytes = limits.lba_bytes
        size_bytes = limits.size_bytes or size_bytes or 0
    return plan(size_bytes, lba_bytes, average_chunk_bytes, journal_bytes)


def _in_the_way(path: str, geometry: Geometry, force: bool) -> list[occupancy.Finding]:
    """What `--force` would overwrite. Raises as `blockkv.format` does where it would refuse."""
    if not os.path.exists(path):  # noqa: PTH110
        return []
    magic_offset = SUPERBLOCK.offsets["magic"]
    return occupancy.refuse_if_occupied(
        path, force=force, magic=MAGIC, magic_offsets=[slot + magic_offset for slot in geometry.slot_offsets]
    )


def _zones(geometry: Geometry) -> list[tuple[str, Zone]]:
    return [
        ("checkpoint A", geometry.checkpoint_a),
        ("checkpoint B", geometry.checkpoint_b),
        ("journal", geometry.journal),
        ("data", geometry.data),
    ]


def _zone_document(geometry: Geometry) -> list[dict[str, Any]]:
    return [
        {"name": name, "offset_bytes": zone.offset_bytes, "size_bytes": zone.size_bytes}
        for name, zone in _zones(geometry)
    ]


def _print_zones(path: str, geometry: Geometry) -> None:
    click.echo(f"{path}: {size_text(geometry.device_bytes)}, logical blocks of {geometry.lba_bytes} bytes")
    rows = [[name, str(zone.offset_bytes), size_text(zone.size_bytes)] for name, zone in _zones(geometry)]
    lines(rows, header=["zone", "offset", "size"], right=" rr")


@command("info")
@store_argument
def info(output: Output, store_path: str) -> None:
    """Show a store: identity, zones, space, and how it is accessed.

    Opens it read-only, which a store in use refuses (exit code 3); `inspect superblock` works on one.
    """
    with blockkv.open(store_path, read_only=True) as store:
        document = {**store.info(), "stats": store.stats()}
    # Counters that never counted say nothing to a reader; a program gets all of them.
    shown = {**document, "stats": {name: value for name, value in document["stats"].items() if value}}
    output.document(document, lambda: fields(_flat(shown)))


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in document.items():
        label = f"{prefix}{name}"
        if isinstance(value, dict):
            pairs += _flat(value, f"{label}.")
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name.endswith("_bytes")
            and value >= 1024
        ):
            pairs.append((label, f"{value} ({size_text(value)})"))
        else:
            pairs.append((label, value))
    return pairs
