"""Commands on whole stores: format, grow, info."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

import blockkv
from blockkv.cli.app import (
    StorePath,
    command,
    degraded_option,
    given_unlock,
    open_store,
    store_argument,
)
from blockkv.cli.byte_sizes import Size, size_text
from blockkv.cli.output import Output, fields, lines
from blockkv.device import namespace, occupancy
from blockkv.format.geometry import Geometry, Zone, plan
from blockkv.format.superblock import MAGIC, SUPERBLOCK


@command(
    "format",
    examples=[
        "format /dev/nvme1n1 --average-chunk 2MiB",
        "format kv.img --size 64GiB",
        "format /dev/nvme1n1,/dev/nvme2n1 --dry-run",
    ],
)
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
@click.option(
    "--encrypt",
    metavar="SOURCE",
    help="Encrypt all but the superblocks, to be opened with this: passphrase, passphrase-file:PATH, "
    "key-file:PATH, keyring:DESCRIPTION; or ephemeral, for a cache that nobody can read later.",
)
@click.option("--force", is_flag=True, help="Overwrite what was found on the device. Never what is in use.")
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
def format_store(
    output: Output,
    store_path: StorePath,
    size_bytes: int | None,
    average_chunk_bytes: int,
    journal_bytes: int | None,
    label: str | None,
    encrypt: str | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Make a store on a device, a partition or a file, or one on several of them: an array.

    Refuses a device that is mounted, held, or carries anything (exit code 3), and names the command that
    would clear it.
    """
    paths = [store_path] if isinstance(store_path, str) else store_path
    plans = [(path, _planned(path, size_bytes, average_chunk_bytes, journal_bytes)) for path in paths]
    if not output.as_json and sys.stderr.isatty():
        for path, geometry in plans:
            output.note(
                f"formatting {path}: "
                + ", ".join(f"{n} {size_text(z.size_bytes)}" for n, z in _zones(geometry))
            )
    documents: list[dict[str, Any]] = [
        {"path": path, "zones": _zone_document(geometry)} for path, geometry in plans
    ]
    if dry_run:
        for document, (path, geometry) in zip(documents, plans, strict=True):
            findings = [str(finding) for finding in _in_the_way(path, geometry, force)]
            document.update(formatted=False, overwrites=findings)

        def plan_text() -> None:
            for document, (path, geometry) in zip(documents, plans, strict=True):
                _print_zones(path, geometry)
                for finding in document["overwrites"]:
                    click.echo(f"overwrites: {finding}")

        output.document(_joined({"formatted": False}, documents), plan_text)
        return
    held = [
        [finding.kind for finding in _in_the_way(path, geometry, force)] if encrypt and force else []
        for path, geometry in plans
    ]
    info = blockkv.format(
        store_path,
        size=size_bytes,
        average_chunk=average_chunk_bytes,
        label=label,
        force=force,
        journal=journal_bytes,
        encrypt=encrypt,
    )
    if encrypt and any("blockkv" in kinds for kinds in held):
        output.note(
            "the store that was there is not erased: its chunks can be read until they are overwritten or "
            "discarded. Next time `blockkv wipe` it first"
        )
    for document, facts in zip(documents, info.pop("members", [info]), strict=True):
        document.update(facts, formatted=True)

    def text() -> None:
        for path, geometry in plans:
            _print_zones(path, geometry)
        data_bytes = sum(geometry.data.size_bytes for _, geometry in plans)
        members = f" on {len(plans)} members of an array" if len(plans) > 1 else ""
        encrypted = ", encrypted" if encrypt else ""
        click.echo(f"formatted, {size_text(data_bytes)} for chunks{members}{encrypted}")

    output.document(_joined({**info, "formatted": True}, documents), text)


def _joined(document: dict[str, Any], members: list[dict[str, Any]]) -> dict[str, Any]:
    """What to say of a store: its only device, or an array and its members."""
    return members[0] if len(members) == 1 else {**document, "members": members}


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


@command("grow", examples=["grow /dev/nvme1n1 --dry-run", "grow /dev/nvme1n1"])
@store_argument
@click.option("--dry-run", is_flag=True, help="Show what there is to gain and write nothing.")
def grow(output: Output, store_path: StorePath, dry_run: bool) -> None:
    """Give a store the space of a device that has become larger, in place.

    The store must not be in use. Chunks stay; a crash at any instant leaves the store as it was, or grown.
    Where there is nothing to gain nothing is written, so that it can be repeated at any time. The members of
    an array grow together.

    Exits 0 also when there was nothing to gain; `grown` in --json tells. Refuses a store in use (exit code
    3), a device that shrank or has too little new space (4), and a damaged store (5).
    """
    document = blockkv.grow(store_path, dry_run=dry_run, unlock=given_unlock())
    members = document.get("members", [document])

    def text() -> None:
        for one in members:
            gained = one["data_bytes"] - one["data_bytes_before"]
            now = f"{size_text(one['data_bytes'])} for chunks"
            if not gained:
                click.echo(f"{one['path']}: nothing to gain, {now}")
                continue
            what = "grown" if one["grown"] else "would grow"
            click.echo(f"{one['path']}: {what} by {size_text(gained)}, {now}")

    output.document(document, text)


@command("info", examples=["info /dev/nvme1n1", "info /run/blockkv/kv0/kv.sock --json"])
@store_argument
@degraded_option
def info(output: Output, store_path: StorePath, degraded: bool) -> None:
    """Show a store: identity, zones, space, and how it is accessed.

    Opens it read-only, which a store in use refuses (exit code 3); `inspect superblock` works on one. A
    member of an array, by itself, says which one it is.
    """
    with open_store(store_path, degraded=degraded, read_only=True) as store:
        document = {**store.info(), "stats": store.stats()}
    for device in document.get("members", [document]):
        if "path" in device:
            device["endurance"] = _endurance(device["path"])
    # Counters that never counted say nothing to a reader; a program gets all of them.
    shown = {**document, "stats": {name: value for name, value in document["stats"].items() if value}}
    output.document(document, lambda: fields(_flat(shown)))


def _endurance(path: str) -> dict[str, Any]:
    """What the drive below a device tells of its wear; numbers that it does not tell are None."""
    from blockkv.cli.endurance import days_left, of_device

    found, unknown = of_device(path)
    if found is None:
        return {"unknown": unknown}
    rate = found.bytes_per_day
    return {
        "drive_written_bytes": found.written_bytes,
        "drive_written_bytes_per_day": rate,
        "drive_amplification": found.amplification,
        "used_percent": found.used_percent,
        "power_on_hours": found.power_on_hours,
        "days_left": days_left(found, rate, found.life_bytes),
    }


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in document.items():
        label = f"{prefix}{name}"
        if isinstance(value, dict):
            pairs += _flat(value, f"{label}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                pairs += _flat(item, f"{label}.{index}.")
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name.endswith("_bytes")
            and value >= 1024
        ):
            pairs.append((label, f"{value} ({size_text(value)})"))
        elif value is None and prefix.endswith("endurance."):
            pairs.append((label, "unknown"))
        else:
            pairs.append((label, value))
    return pairs
