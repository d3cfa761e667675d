"""docs/format.md says what the code does: tables, hexdumps, constants, and a case for every rejection."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from blockkv.format import geometry, journal, page, record, superblock

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "format.md"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("format_tables", ROOT / "tools" / "format_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_and_hexdumps_are_up_to_date() -> None:
    text = DOCUMENT.read_text()
    assert tool().render(text) == text, "run tools/format_tables.py"


def test_every_struct_has_its_table_and_every_golden_file_its_hexdump() -> None:
    text = DOCUMENT.read_text()
    assert set(re.findall(r"<!-- table: (.+) -->", text)) == set(tool().STRUCTS)
    assert set(re.findall(r"<!-- hexdump: (.+) -->", text)) == set(tool().DUMPS)


def test_every_field_says_what_it_is() -> None:
    undocumented = [
        f"{name}.{field.name}"
        for name, one in tool().STRUCTS.items()
        for field in one.fields
        if not field.doc
    ]
    assert undocumented == []


def test_an_outdated_document_is_noticed() -> None:
    text = DOCUMENT.read_text()
    for outdated in (
        text.replace("| 96 | 4 | `lba_bytes`", "| 97 | 4 | `lba_bytes`"),
        text.replace("62 6c 6f", "62 6c 6e"),
    ):
        assert outdated != text
        assert tool().render(outdated) == text


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ("unit, page", f"{page.PAGE_BYTES} bytes"),
        ("run", f"{geometry.RUN_BYTES} bytes, {geometry.RUN_UNITS} units"),
        ("extents of a chunk", f"at most {geometry.MAX_EXTENTS}"),
        ("units in an extent", "at most 2^24 - 32"),
        ("leaves of a chunk", f"at most {geometry.MAX_LEAVES}"),
        ("key", f"1 to {record.MAX_KEY_BYTES} bytes"),
        ("payload of a page", f"{page.PAGE_PAYLOAD_BYTES} bytes"),
        ("journal ring", f"at least {geometry.MIN_JOURNAL_PAGES} pages"),
        ("superblock slots", str(geometry.SLOT_COUNT)),
        ("counters (generations, epochs, sequences)", "below 2^62"),
    ],
)
def test_constants(row: str, value: str) -> None:
    assert f"| {row} | {value} |" in DOCUMENT.read_text()
    assert geometry.MAX_EXTENT_UNITS == (1 << 24) - 32
    assert superblock.COUNTER_LIMIT == 1 << 62


def test_numbers_in_the_text() -> None:
    text = DOCUMENT.read_text()
    assert f"the {journal.PEEK_PAGES} pages after s" in text
    assert f"# On-disk format, version {superblock.FORMAT_VERSION}\n" in text
