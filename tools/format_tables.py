#!/usr/bin/env python3
"""Bring the tables and hexdumps of docs/format.md up to date with the declarations of the structs.

Everything from `<!-- table: NAME -->` or `<!-- hexdump: NAME -->` to the next `<!-- end -->` is made here:
tables from the declarations in the package, hexdumps from the golden files of the tests. With --check nothing
is written, and the exit status says whether the document is up to date.
"""

from __future__ import annotations

import argparse
import lzma
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from blockkv.format.fields import Field, StructLayout  # noqa: E402
from blockkv.format.key_slots import KEY_SLOT  # noqa: E402
from blockkv.format.page import PAGE_HEADER  # noqa: E402
from blockkv.format.record import DELETE_RECORD, KEY_TAIL_RECORD, LAYOUT_RECORD, PUT_RECORD  # noqa: E402
from blockkv.format.superblock import SUPERBLOCK  # noqa: E402

DOCUMENT = ROOT / "docs" / "format.md"
GOLDEN = ROOT / "tests" / "format" / "golden"
STRUCTS = {
    one.name: one
    for one in (SUPERBLOCK, KEY_SLOT, PAGE_HEADER, PUT_RECORD, DELETE_RECORD, LAYOUT_RECORD, KEY_TAIL_RECORD)
}
MARKED = re.compile(r"(<!-- (table|hexdump): ([^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
BYTES_PER_LINE = 16


def golden(name: str) -> bytes:
    """The content of a golden file."""
    return lzma.decompress((GOLDEN / name).read_bytes())


def dump(data: bytes, start: int, size_bytes: int, what: str) -> list[str]:
    """Lines of a hexdump of one field; `what` stands beside the first."""
    raw = data[start : start + size_bytes]
    if size_bytes > BYTES_PER_LINE and not any(raw):
        return [f"{start:04x}  {'00 ... 00':<{3 * BYTES_PER_LINE}} {what}".rstrip()]
    lines = []
    for offset in range(0, size_bytes, BYTES_PER_LINE):
        row = raw[offset : offset + BYTES_PER_LINE].hex(" ")
        lines.append(
            f"{start + offset:04x}  {row:<{3 * BYTES_PER_LINE}} {what if not offset else ''}".rstrip()
        )
    return lines


def meaning(field: Field, raw: bytes) -> str:
    """The name of a field, with its value where that is easier to read than its bytes."""
    if field.kind.startswith("u"):
        value = int.from_bytes(raw, "little")
        return f"{field.name} = {value}"
    if field.kind == "text" or field.name == "magic":
        return f'{field.name} = "{raw.rstrip(bytes(1)).decode()}"'
    if not any(raw):
        return f"{field.name}, {len(raw)} bytes of zero"
    return field.name


def dump_struct(layout: StructLayout, data: bytes, start: int = 0) -> list[str]:
    """A hexdump of a struct, one field after the other."""
    lines = []
    for field in layout.fields:
        offset = start + layout.offsets[field.name]
        lines += dump(
            data, offset, field.size_bytes, meaning(field, data[offset : offset + field.size_bytes])
        )
    return lines


def dump_superblock() -> list[str]:
    return dump_struct(SUPERBLOCK, golden("superblock-slot-2.v1.xz"))


def dump_page(data: bytes) -> list[str]:
    """A hexdump of a page with its records."""
    lines = dump_struct(PAGE_HEADER, data)
    offset = PAGE_HEADER.size_bytes
    (count_at, body_at) = (PAGE_HEADER.offsets["record_count"], PAGE_HEADER.offsets["body_bytes"])
    for _ in range(int.from_bytes(data[count_at : count_at + 2], "little")):
        lines.append("")
        lines += dump_record(data, offset)
        offset += int.from_bytes(data[offset : offset + 2], "little")
    assert offset == PAGE_HEADER.size_bytes + int.from_bytes(data[body_at : body_at + 2], "little")
    return [*lines, "", *dump(data, offset, len(data) - offset, f"{len(data) - offset} bytes of zero")]


def dump_record(data: bytes, start: int) -> list[str]:
    """A hexdump of the record at `start`."""
    end = start + int.from_bytes(data[start : start + 2], "little")
    layout = {1: PUT_RECORD, 2: DELETE_RECORD, 3: LAYOUT_RECORD, 4: KEY_TAIL_RECORD}[data[start + 2]]
    lines = [f"      {layout.name}", *dump_struct(layout, data, start)]
    offset = start + layout.size_bytes
    if layout is PUT_RECORD:
        for _ in range(data[start + 3]):
            word = int.from_bytes(data[offset : offset + 8], "little")
            lines += dump(data, offset, 8, f"extent: {word >> 40} units from unit {word % (1 << 40)} on")
            offset += 8
        size_at = start + PUT_RECORD.offsets["payload_bytes"]
        payload_bytes = int.from_bytes(data[size_at : size_at + 8], "little")
        assert payload_bytes <= 32 << 20, "the sample has leaves of 128 KiB"
        for _ in range(-(-payload_bytes // (128 << 10))):
            lines += dump(data, offset, 8, "leaf")
            offset += 8
        key_at = start + PUT_RECORD.offsets["key_bytes"]
        key_bytes = int.from_bytes(data[key_at : key_at + 2], "little")
        lines += dump(data, offset, key_bytes, f'key = "{data[offset : offset + key_bytes].decode()}"')
        offset += key_bytes
    elif layout is LAYOUT_RECORD:
        body_bytes = int.from_bytes(data[start + 16 : start + 18], "little")
        lines += dump(data, offset, body_bytes, "description")
        offset += body_bytes
    if offset < end:
        lines += dump(data, offset, end - offset, "padding")
    return lines


DUMPS: dict[str, Callable[[], list[str]]] = {
    "superblock": dump_superblock,
    "journal page": lambda: dump_page(golden("journal-page-9.v1.xz")),
    "checkpoint page": lambda: dump_page(golden("checkpoint-pages.v1.xz")[:4096]),
}


def render(document: str) -> str:
    """The document with its generated parts made anew. Raises KeyError for a part that does not exist."""

    def part(match: re.Match[str]) -> str:
        opening, what, name, closing = match.groups()
        if what == "table":
            return opening + STRUCTS[name].table() + closing
        return opening + "```\n" + "\n".join(DUMPS[name]()) + "\n```\n" + closing

    return MARKED.sub(part, document)


def main() -> int:
    """Update the document, or with --check say whether it needs to be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where the document is outdated"
    )
    check = parser.parse_args().check
    found = DOCUMENT.read_text()
    wanted = render(found)
    if found == wanted:
        return 0
    if check:
        sys.stderr.write(f"{DOCUMENT} is outdated: run {sys.argv[0]}\n")
        return 1
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
