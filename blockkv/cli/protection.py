"""Commands on what protects a store: key-slots, wipe."""

from __future__ import annotations

import dataclasses
import shlex
from typing import cast

import click

import blockkv
from blockkv.cli.app import StorePath, cli, command, command_of, device_argument, store_argument
from blockkv.cli.byte_sizes import size_text
from blockkv.cli.exit_code import ExitCode
from blockkv.cli.image import Image
from blockkv.cli.output import Output, lines


@cli.group("key-slots")
def key_slots() -> None:
    """What opens an encrypted store: list, add and remove. Nobody may have it open meanwhile."""


@command_of(key_slots, "list", examples=["key-slots list /dev/nvme1n1"])
@store_argument
def list_slots(output: Output, store_path: StorePath) -> None:
    """The key slots in use. Needs no key."""
    from blockkv.store.key_slot_changes import key_slots as slots_of

    rows = slots_of(store_path)

    def text() -> None:
        lines(
            [
                [
                    row["path"],
                    str(row["slot"]),
                    row["kind"],
                    f"Argon2id, {row['memory_kib']} KiB, {row['passes']} passes, {row['lanes']} lanes"
                    if row["kind"] == "passphrase"
                    else "HKDF-SHA256",
                ]
                for row in rows
            ],
            header=["store", "slot", "opened by", "derived with"],
        )

    output.document(rows, text)


@command_of(key_slots, "add", examples=["--unlock passphrase key-slots add /dev/nvme1n1 key-file:kv0.key"])
@store_argument
@click.argument("new", metavar="SOURCE")
def add_slot(output: Output, store_path: StorePath, new: str) -> None:
    """Let SOURCE open the store as well: passphrase, passphrase-file:PATH, key-file:PATH or
    keyring:DESCRIPTION.

    What opens it now is given with --unlock, before the name of the command.
    """
    from blockkv.store.key_slot_changes import add_key_slot

    used = add_key_slot(store_path, new)
    output.document({"slots": used}, lambda: click.echo(f"added as key slot {', '.join(map(str, used))}"))


@command_of(key_slots, "remove", examples=["--unlock key-file:kv0.key key-slots remove /dev/nvme1n1 0"])
@store_argument
@click.argument("slot", type=click.IntRange(0))
def remove_slot(output: Output, store_path: StorePath, slot: int) -> None:
    """What opened the store by key slot SLOT does not any more.

    What is to open it from now on is given with --unlock, before the name of the command.
    """
    from blockkv.store.key_slot_changes import remove_key_slot

    remove_key_slot(store_path, slot)
    output.document({"removed": slot}, lambda: click.echo(f"key slot {slot} is removed"))


@command(
    "wipe", examples=["wipe /dev/nvme1n1", "wipe /dev/nvme1n1 --uuid 5ee3a5c0-90b4-4a0c-b6a5-9d6f3a6b2f10"]
)
@device_argument
@click.option("--uuid", metavar="UUID", help="Of the store that is there: the consent to make it unreadable.")
@click.option(
    "--method",
    type=click.Choice(["key", "format", "overwrite"]),
    help="Destroy the key, NVMe Format NVM, or zeros over everything (default: the first that is possible).",
)
def wipe(output: Output, store_path: str, uuid: str | None, method: str | None) -> int:
    """Make what STORE holds unreadable for ever, and say how: its key, the drive's own erase, or zeros.

    One device at a time, also of an array. Without --uuid nothing is done; the command to give is shown.
    """
    if uuid is None:
        with Image.open(store_path) as image:
            found = image.superblock()
        what = f"{'encrypted ' if found.encryption else ''}store {found.uuid_text}"
        label = f" ({found.label})" if found.label else ""
        output.error(
            blockkv.OccupiedError(),
            f"{store_path} holds the {what}{label}; to make it unreadable for ever: "
            f"blockkv wipe {shlex.quote(store_path)} --uuid {found.uuid_text}",
        )
        return ExitCode.REFUSED
    from blockkv.store.wipe import Method, wipe_device

    with output.progress() as advance:
        report = wipe_device(
            store_path, uuid, cast(Method | None, method), lambda done, total: advance("wiping", done, total)
        )

    def text() -> None:
        click.echo(f"{report.path}: {report.what}")
        written = f"{size_text(report.overwritten_bytes)} overwritten" if report.overwritten_bytes else ""
        click.echo(", ".join(filter(None, [written, "discarded" if report.discarded else ""])) or "erased")

    output.document(dataclasses.asdict(report), text)
    return ExitCode.OK
