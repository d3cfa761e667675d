"""`blockkv inspect`: every structure on the device prints itself, of a store in use and of a dead image.

Read-only and without a lock; one member of an array at a time. KV cache reveals prompts: payload is shown
only with `--payload`, and of a key only the beginning without `--keys`.

Not here: reading (`blockkv.cli.image`).
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Any

import click

from blockkv.cli.app import cli, command_of, device_argument, key_argument
from blockkv.cli.byte_sizes import size_text
from blockkv.cli.exit_code import ExitCode
from blockkv.cli.image import Contents, Image
from blockkv.cli.output import Output, fields, key_text, lines
from blockkv.device import namespace, nvme_admin
from blockkv.device.namespace import identify
from blockkv.device.placement import places_of
from blockkv.errors import FormatError, InvalidArgument
from blockkv.format import record
from blockkv.format.geometry import UNIT_BYTES, leaf_bytes_for
from blockkv.format.journal import EndReason, page_index
from blockkv.format.record import Operation, PutRecord
from blockkv.format.superblock import Superblock, SuperblockRejected

KEY_SHOWN_CHARS = 24
DUMP_BYTES = 256
DUMP_LINE_BYTES = 16

full_keys = click.option("--keys", "full_keys", is_flag=True, help="Show whole keys, not their beginning.")


@cli.group("inspect")
def inspect() -> None:
    """Show what is on the device: read-only, also of a store in use and of a damaged one."""


def _shown(key: bytes, full: bool) -> str:
    text = key_text(key) if key else "(not recorded)"
    return text if full or len(text) <= KEY_SHOWN_CHARS else text[:KEY_SHOWN_CHARS] + "..."


# -- superblock ----------------------------------------------------------------------------------------


@command_of(inspect, "superblock", examples=["inspect superblock /dev/nvme1n1"])
@device_argument
def superblock(output: Output, store_path: str) -> int:
    """The eight superblock slots, and the fields of the one that counts. Exits 5 when there is none."""
    with Image.open(store_path) as image:
        slots = image.slots()
        found = image.examine_slots()
        chosen: Superblock | None = None
        reason = None
        try:
            chosen = image.superblock()
        except FormatError as error:
            reason = {"type": type(error).__name__, "message": str(error)}
    rows = [
        {
            "slot_index": index,
            "offset_bytes": offset,
            "valid": isinstance(slot, Superblock),
            "generation": slot.generation or None,
            "epoch": slot.epoch if isinstance(slot, Superblock) else None,
            "fault": slot.fault.name if isinstance(slot, SuperblockRejected) else None,
            "message": str(slot) if isinstance(slot, SuperblockRejected) else None,
        }
        for index, ((offset, _), slot) in enumerate(zip(slots, found, strict=True))
    ]
    document: dict[str, Any] = {"slots": rows, "superblock": _superblock_document(chosen), "error": reason}

    def text() -> None:
        lines(
            [
                [
                    str(row["slot_index"]),
                    str(row["offset_bytes"]),
                    str(row["generation"] or "-"),
                    str(row["epoch"] if row["valid"] else "-"),
                    "valid" if row["valid"] else str(row["message"]),
                ]
                for row in rows
            ],
            header=["slot", "offset", "generation", "epoch", "state"],
            right="rrrr",
        )
        click.echo()
        if chosen is None:
            click.echo(reason["message"] if reason else "")
        else:
            fields(list(document["superblock"].items()))

    output.document(document, text)
    return ExitCode.OK if chosen is not None else ExitCode.FORMAT


def _superblock_document(found: Superblock | None) -> dict[str, Any] | None:
    if found is None:
        return None
    document: dict[str, Any] = {"uuid": found.uuid_text}
    for item in dataclasses.fields(found):
        value = getattr(found, item.name)
        if item.name == "geometry":
            document["device_bytes"] = value.device_bytes
            document["lba_bytes"] = value.lba_bytes
            for zone in ("checkpoint_a", "checkpoint_b", "journal", "data"):
                document[f"{zone}_offset_bytes"] = getattr(value, zone).offset_bytes
                document[f"{zone}_size_bytes"] = getattr(value, zone).size_bytes
        elif item.name == "array":
            if found.array is not None:
                document["array_uuid"] = found.array.array_uuid_text
                document["array_member_index"] = found.array.member_index
                document["array_member_count"] = found.array.member_count
                document["array_term"] = found.array.term
                document["array_term_members"] = found.array.term_members
        elif item.name == "encryption":
            if found.encryption is not None:
                slots = enumerate(found.encryption.slots)
                document["ephemeral"] = found.encryption.ephemeral
                document["key_slots"] = {index: slot.kind.name.lower() for index, slot in slots if slot}
                document["header_mac"] = found.encryption.mac.hex()
        elif item.name not in ("uuid", "reserved"):
            document[item.name] = value.hex() if isinstance(value, bytes) else value
    return document


# -- placement -----------------------------------------------------------------------------------------


@command_of(inspect, "placement", examples=["inspect placement /dev/nvme1n1"])
@device_argument
def placement(output: Output, store_path: str) -> int:
    """The placement handles of an NVMe namespace, and what goes where. Exits 1 when there are none.

    Bytes are the drive's own count, of all that writes to it; those of a store by handle are in its `info()`.
    """
    disk = f"/dev/{identify(store_path).disk or ''}"
    if not disk.startswith("/dev/nvme"):
        raise InvalidArgument(f"{store_path} is on no NVMe namespace, and nothing else has placement handles")
    descriptor = os.open(disk, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fdp = nvme_admin.ask_fdp(disk, descriptor)
        lba_bytes = namespace.probe(disk).lba_bytes
    finally:
        os.close(descriptor)
    places = places_of(fdp)
    rows: list[dict[str, Any]] = [
        {
            "identifier": one.identifier,
            "reclaim_unit_handle": one.reclaim_unit_handle,
            "room_bytes": one.room_lbas * lba_bytes,
            "holds": [
                what.name.lower()
                for what, named in (places.identifiers or {}).items()
                if named == one.identifier
            ],
        }
        for one in (fdp.handles if fdp else ())
    ]
    document = {
        "device": disk,
        "used": places.identifiers is not None,
        "reason": places.reason,
        "reclaim_unit_bytes": fdp.reclaim_unit_bytes if fdp else 0,
        "host_bytes": fdp.host_bytes if fdp else 0,
        "media_bytes": fdp.media_bytes if fdp else 0,
        "handles": rows,
    }

    def holds(row: dict[str, Any]) -> str:
        return ", ".join(row["holds"]) or "-"

    def text() -> None:
        if rows:
            lines(
                [
                    [
                        *map(str, (row["identifier"], row["reclaim_unit_handle"], row["room_bytes"])),
                        holds(row),
                    ]
                    for row in rows
                ],
                header=["identifier", "reclaim unit handle", "room", "by passthrough"],
                right="rrr",
            )
            click.echo()
        fields([(name, value) for name, value in document.items() if name != "handles"])

    output.document(document, text)
    return ExitCode.OK if rows else ExitCode.NEGATIVE


# -- journal -------------------------------------------------------------------------------------------


@command_of(inspect, "journal", examples=["inspect journal /dev/nvme1n1 --records --limit 5"])
@device_argument
@click.option("--limit", type=click.IntRange(min=0), default=50, show_default=True, help="Pages to list.")
@click.option("--records", is_flag=True, help="List the records of each page.")
@full_keys
def journal(output: Output, store_path: str, limit: int, records: bool, full_keys: bool) -> int:
    """The journal from the last checkpoint to its end. Exits 1 when pages that were durable are missing."""
    with Image.open(store_path) as image:
        found = image.superblock()
        replay = image.replay(found)
        ring = found.geometry.journal_pages
        pages: list[dict[str, Any]] = []
        counts: Counter[str] = Counter()
        for page in replay:
            kinds = Counter(Operation(view[0]).name for view in page.records)
            counts += kinds
            if len(pages) < limit:
                row = {
                    "sequence": page.sequence,
                    "offset_bytes": found.geometry.journal_offset(page_index(page.sequence, ring)),
                    "epoch": page.epoch,
                    "sealed_sequence": page.sealed_sequence,
                    "records": dict(kinds),
                }
                if records:
                    row["content"] = [_record_document(view[3], full_keys) for view in page.records]
                pages.append(row)
        end = replay.end
    page_count = end.next_sequence - found.replay_from_sequence
    document = {
        "replay_from_sequence": found.replay_from_sequence,
        "epoch_start_sequence": found.epoch_start_sequence,
        "ring_page_count": found.geometry.journal_pages,
        "page_count": page_count,
        "record_counts": dict(counts),
        "end": {
            "reason": end.reason.name,
            "message": end.reason.value,
            "next_sequence": end.next_sequence,
            "sealed_sequence": end.sealed_sequence,
            "fault": end.fault.name if end.fault else None,
            "torn_pages": end.torn_pages,
            "stale_pages": end.stale_pages,
        },
        "pages": pages,
    }

    def text() -> None:
        rows = [
            [str(page[name]) for name in ("sequence", "offset_bytes", "epoch", "sealed_sequence")]
            + [", ".join(f"{count} {name}" for name, count in page["records"].items())]
            for page in pages
        ]
        if not records and rows:
            lines(rows, header=["sequence", "offset", "epoch", "sealed", "records"], right="rrrr")
        elif records:
            for page, row in zip(pages, rows, strict=True):
                click.echo(f"page {row[0]} at {row[1]}, epoch {row[2]}, sealed {row[3]}")
                for entry in page["content"]:
                    click.echo("  " + "  ".join(str(value) for value in entry.values()))
        if page_count > len(pages):
            click.echo(f"... {page_count - len(pages)} more pages (--limit)")
        click.echo(
            f"{page_count} of {found.geometry.journal_pages} pages in use, {sum(counts.values())} records; "
            f"{end.reason.value} at sequence {end.next_sequence}"
            + (f" ({end.fault.name})" if end.fault else "")
        )

    output.document(document, text)
    return ExitCode.NEGATIVE if end.reason is EndReason.DAMAGED else ExitCode.OK


def _record_document(raw: bytes, full: bool) -> dict[str, Any]:
    decoded = record.decode(raw)
    document: dict[str, Any] = {
        "operation": Operation(raw[2]).name,
        "log_sequence": decoded.log_sequence,
    }
    match decoded:
        case PutRecord():
            document["key"] = _shown(decoded.key, full)
            document["payload_bytes"] = decoded.payload_bytes
            document["extents"] = _extents_text(decoded)
        case record.LayoutRecord():
            document["layout_id"] = decoded.layout_id
            document["layout"] = _layout_text(decoded.body)
        case _:
            document["digest"] = decoded.digest.hex()[:KEY_SHOWN_CHARS]
    return document


def _extents_text(chunk: PutRecord) -> str:
    return " ".join(f"{start}+{count}" for start, count in chunk.extents)


def _layout_text(body: bytes | None) -> str:
    from blockkv.catalog.layouts import Layout

    if body is None:
        return "(its LAYOUT record is lost)"
    try:
        return str(Layout.decode(body))
    except ValueError as error:
        return f"(damaged: {error})"


# -- checkpoint ----------------------------------------------------------------------------------------


@command_of(inspect, "checkpoint", examples=["inspect checkpoint /dev/nvme1n1"])
@device_argument
@click.option("--records", is_flag=True, help="List the records.")
@full_keys
def checkpoint(output: Output, store_path: str, records: bool, full_keys: bool) -> int:
    """The current checkpoint. Exits 1 when pages of it are damaged."""
    with Image.open(store_path) as image:
        found = image.superblock()
        reader = image.checkpoint(found)
        counts: Counter[str] = Counter()
        content = []
        for view in reader:
            counts[Operation(view[0]).name] += 1
            if records:
                content.append(_record_document(view[3], full_keys))
    zone = found.checkpoint_zone
    document = {
        "area": "AB"[found.checkpoint_area],
        "offset_bytes": zone.offset_bytes,
        "size_bytes": zone.size_bytes,
        "checkpoint_id": found.checkpoint_id.hex(),
        "page_count": found.checkpoint_page_count,
        "record_count": reader.record_count,
        "record_counts": dict(counts),
        "log_sequence": found.log_sequence,
        "damaged_page_count": reader.damaged_pages,
        "lost_record_count": reader.lost_records,
    }

    def text() -> None:
        fields(list(document.items()))
        for entry in content:
            click.echo("  ".join(str(value) for value in entry.values()))

    output.document({**document, "records": content} if records else document, text)
    return ExitCode.NEGATIVE if reader.damaged_pages else ExitCode.OK


# -- extents -------------------------------------------------------------------------------------------


@command_of(inspect, "extents", examples=["inspect extents /dev/nvme1n1"])
@device_argument
@click.option("--limit", type=click.IntRange(min=0), default=100, show_default=True, help="Lines to list.")
@full_keys
def extents(output: Output, store_path: str, limit: int, full_keys: bool) -> int:
    """The data zone in the order of the device: live extents and free space. Exits 1 on an overlap.

    Units are 4 KiB, counted from the start of the data zone.
    """
    with Image.open(store_path) as image:
        contents = image.contents()
    segments, overlaps = _map(contents, full_keys)
    live = [segment for segment in segments if segment["state"] == "live"]
    free = [segment for segment in segments if segment["state"] == "free"]
    document = {
        "unit_bytes": UNIT_BYTES,
        "data_offset_bytes": contents.superblock.geometry.data.offset_bytes,
        "unit_count": contents.superblock.geometry.data_units,
        "live_unit_count": sum(segment["unit_count"] for segment in live),
        "free_unit_count": sum(segment["unit_count"] for segment in free),
        "chunk_count": len(contents.chunks),
        "extent_count": len(live),
        "largest_free_unit_count": max((segment["unit_count"] for segment in free), default=0),
        "overlaps": overlaps,
        "extents": segments[:limit],
    }

    def text() -> None:
        rows = [
            [str(item["start_unit"]), str(item["unit_count"]), item["state"], item.get("key", "")]
            for item in segments[:limit]
        ]
        if rows:
            lines(rows, header=["start", "units", "state", "key"], right="rr")
        if len(segments) > limit:
            click.echo(f"... {len(segments) - limit} more (--limit)")
        for overlap in overlaps:
            click.echo(f"overlap: {overlap}")
        click.echo(
            f"{document['chunk_count']} chunks in {document['extent_count']} extents: "
            f"{size_text(document['live_unit_count'] * UNIT_BYTES)} live, "
            f"{size_text(document['free_unit_count'] * UNIT_BYTES)} free, "
            f"largest free {size_text(document['largest_free_unit_count'] * UNIT_BYTES)}"
        )

    output.document(document, text)
    return ExitCode.NEGATIVE if overlaps else ExitCode.OK


def _map(contents: Contents, full: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Live and free segments of the data zone in order, and a line for every overlap."""
    live = sorted(
        (start, count, digest) for digest, chunk in contents.chunks.items() for start, count in chunk.extents
    )
    segments: list[dict[str, Any]] = []
    overlaps = []
    position, owner = 0, ""
    for start, count, digest in live:
        key = _shown(contents.keys[digest], full)
        if start > position:
            segments.append({"start_unit": position, "unit_count": start - position, "state": "free"})
        elif start < position:
            overlaps.append(f"units {start} to {min(position, start + count)} belong to {owner} and to {key}")
        segments.append({"start_unit": start, "unit_count": count, "state": "live", "key": key})
        if start + count > position:
            position, owner = start + count, key
    total = contents.superblock.geometry.data_units
    if position < total:
        segments.append({"start_unit": position, "unit_count": total - position, "state": "free"})
    return segments, overlaps


# -- chunk ---------------------------------------------------------------------------------------------


@command_of(inspect, "chunk", examples=["inspect chunk /dev/nvme1n1 my-key"])
@device_argument
@key_argument
@click.option("--payload", "dump", is_flag=True, help="Show the beginning of the payload.")
@click.option(
    "--bytes",
    "dump_bytes",
    type=click.IntRange(min=1),
    default=DUMP_BYTES,
    show_default=True,
    help="How much --payload shows.",
)
def chunk(output: Output, store_path: str, key: str | bytes, dump: bool, dump_bytes: int) -> int:
    """One chunk: its record, where it lies, and whether the bytes there are the ones that were put.

    Exits 1 when the key is not stored or its payload does not verify.
    """
    raw_key = key.encode() if isinstance(key, str) else key
    digest = record.key_digest(raw_key)
    with Image.open(store_path) as image:
        contents = image.contents()
        found = contents.chunks.get(digest)
        damaged, beginning = _verify(image, contents.superblock, found, dump_bytes) if found else ([], b"")
    if found is None:
        output.document(
            {"key": key_text(raw_key), "found": False},
            lambda: output.note(f"blockkv: {key_text(raw_key)}: not stored"),
        )
        return ExitCode.NEGATIVE
    body = contents.layouts.get(found.layout_id)
    root_matches = (
        body is not None
        and not damaged
        and found.root
        == record.root_checksum(digest, found.payload_bytes, record.layout_checksum(body), found.leaves)
    )
    geometry = contents.superblock.geometry
    document: dict[str, Any] = {
        "key": key_text(raw_key),
        "found": True,
        "digest": digest.hex(),
        "log_sequence": found.log_sequence,
        "payload_bytes": found.payload_bytes,
        "layout_id": found.layout_id,
        "layout": _layout_text(body),
        "extents": [
            {"start_unit": start, "unit_count": count, "offset_bytes": geometry.unit_offset(start)}
            for start, count in found.extents
        ],
        "leaf_bytes": leaf_bytes_for(found.payload_bytes),
        "leaf_count": len(found.leaves) // 8,
        "damaged_leaves": damaged,
        "root": found.root.hex(),
        "verified": root_matches,
    }
    if dump:
        document["payload_hex"] = beginning.hex()

    def text() -> None:
        shown = {
            **document,
            "extents": ", ".join(
                f"{item['unit_count']} units at {item['start_unit']} (device offset {item['offset_bytes']})"
                for item in document["extents"]
            ),
        }
        shown.pop("payload_hex", None)
        fields(list(shown.items()))
        if dump:
            for offset in range(0, len(beginning), DUMP_LINE_BYTES):
                part = beginning[offset : offset + DUMP_LINE_BYTES]
                readable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
                click.echo(f"{offset:08x}  {part.hex(' '):<{3 * DUMP_LINE_BYTES}} {readable}")

    output.document(document, text)
    return ExitCode.OK if root_matches else ExitCode.NEGATIVE


def _verify(
    image: Image, superblock: Superblock, found: PutRecord, keep_bytes: int
) -> tuple[list[int], bytes]:
    """Indices of the leaves that are not the bytes that were put, and the first bytes of the payload."""
    from xxhash import xxh3_64

    leaf_bytes = leaf_bytes_for(found.payload_bytes)
    leaf_count = len(found.leaves) // 8
    computed: list[bytes] = []
    state, room_bytes = xxh3_64(), leaf_bytes
    beginning = b""
    for piece in image.payload(superblock, found):
        if len(beginning) < keep_bytes:
            beginning += piece[: keep_bytes - len(beginning)]
        view = memoryview(piece)
        while view:
            state.update(view[:room_bytes])
            taken_bytes = min(room_bytes, len(view))
            view, room_bytes = view[taken_bytes:], room_bytes - taken_bytes
            if room_bytes == 0:
                computed.append(state.digest())
                state, room_bytes = xxh3_64(), leaf_bytes
    if room_bytes < leaf_bytes:
        computed.append(state.digest())
    damaged = [
        index
        for index in range(leaf_count)
        # The digest of xxhash is big-endian, leaves on the device are little-endian.
        if index >= len(computed) or computed[index][::-1] != found.leaves[8 * index : 8 * index + 8]
    ]
    return damaged, beginning
