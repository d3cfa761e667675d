"""Plain PUT records read in bulk: what reading them one by one accepts too, and the same values."""

from __future__ import annotations

import random
import struct

import pytest
from format_samples import dice_bytes, put

from blockkv.catalog.index import Entry, Index
from blockkv.format import record
from blockkv.format.page import PAGE_BYTES, PAGE_HEADER, PAGE_PAYLOAD_BYTES
from blockkv.format.record import RecordMalformed, RecordView, iterate_records
from blockkv.format.scan import PutTable, scan_puts

DATA_UNITS = 1 << 20
SIZES_BYTES = (1, 4095, 4096, 4097, 131072, 131073, 5 << 20, 32 << 20)


def page(records: list[bytes]) -> bytes:
    body = b"".join(records)
    assert len(body) <= PAGE_PAYLOAD_BYTES
    return (bytes(PAGE_HEADER.size_bytes) + body).ljust(PAGE_BYTES, b"\0")


def full_page(rng: random.Random) -> tuple[bytes, tuple[int, int, int]]:
    """A page of plain PUTs, and start, end and record count of its body."""
    records: list[bytes] = []
    while sum(map(len, records)) < PAGE_PAYLOAD_BYTES * 0.4:
        key = rng.randbytes(rng.randrange(1, 60))
        one = put(rng.randrange(1 << 40), key, rng.choice(SIZES_BYTES), rng.randrange(DATA_UNITS // 2))
        if sum(map(len, records + one)) <= PAGE_PAYLOAD_BYTES:
            records += one
    start = PAGE_HEADER.size_bytes
    return page(records), (start, start + sum(map(len, records)), len(records))


def one_by_one(data: bytes, body: tuple[int, int, int]) -> list[RecordView] | None:
    start, end, count = body
    try:
        return list(iterate_records(data[start:end], count, DATA_UNITS))
    except RecordMalformed:
        return None


def views(table: PutTable) -> list[RecordView]:
    digests = table.digests()
    return [
        (record.Operation.PUT, int(table.log_sequence[row]), digests[row], table.raw(row))
        for row in range(len(table))
    ]


def moved(body: tuple[int, int, int], number: int) -> tuple[int, int, int]:
    return body[0] + number * PAGE_BYTES, body[1] + number * PAGE_BYTES, body[2]


def test_pages_of_plain_puts_are_read_as_one_table() -> None:
    rng = random.Random(1)
    made = [full_page(rng) for _ in range(50)]
    pages = b"".join(data for data, _ in made)
    plain, table = scan_puts(pages, [moved(body, n) for n, (_, body) in enumerate(made)], DATA_UNITS)
    assert plain.all()
    wanted = [view for data, body in made for view in one_by_one(data, body) or []]
    assert views(table) == wanted
    for row, (_, _, digest, raw) in enumerate(wanted):
        entry = Entry(digest, 0, raw)
        assert (entry.layout_id, entry.payload_bytes) == (table.layout_id[row], table.payload_bytes[row])
        assert entry.extents == ((table.start_unit[row], table.units[row]),)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_accepted_in_bulk_is_accepted_one_by_one(seed: int) -> None:
    """Damage of every kind, aimed at the fields; a damaged page never spoils its neighbours."""
    rng = random.Random(seed)
    still_plain = refused = 0
    for _ in range(400):
        made = [full_page(rng) for _ in range(3)]
        data, body = bytearray(made[1][0]), list(made[1][1])
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = body[0] + rng.choice((0, 1, 2, 3, 4, 8, 15, 16, 48, 52, 55, 72, 73, 74, 75, 76, 81, 82, 83))
            at = rng.choice((at, rng.randrange(body[0], body[1]), body[1] - rng.randrange(1, 9)))
            data[at] = rng.choice((0, 1, 2, 255, data[at] ^ 1 << rng.randrange(8)))
        body[1] = rng.choice((body[1], body[1], body[1] - 8))
        body[2] = rng.choice((body[2], body[2], body[2] - 1, body[2] + 1, 0xFFFF))
        damaged = (body[0], body[1], body[2])
        pages = made[0][0] + bytes(data) + made[2][0]
        bodies = [made[0][1], moved(damaged, 1), moved(made[2][1], 2)]
        plain, table = scan_puts(pages, bodies, DATA_UNITS)
        assert plain[0]
        assert plain[2]
        middle = one_by_one(bytes(data), damaged)
        wanted = one_by_one(*made[0]) + (middle if plain[1] else []) + one_by_one(*made[2])  # type: ignore[operator]
        assert views(table) == wanted
        still_plain += int(plain[1])
        refused += middle is None
    assert still_plain > 20
    assert refused > 20


@pytest.mark.parametrize(
    "records",
    [
        [record.encode_delete(7, bytes(32))],
        [record.encode_layout(7, 3, b"J[]")],
        put(7, bytes(4096)),  # its key goes on in a KEY_TAIL record
        record.encode_put(
            7, bytes(32), 8192, 1, bytes(16), [(0, 1), (5, 1)], dice_bytes(1, 8), b"two extents"
        ),
        put(7, b"large", 40 << 20),
        [],
    ],
    ids=["delete", "layout", "long key", "two extents", "over 32 MiB", "nothing"],
)
def test_everything_else_is_left_to_be_read_one_by_one(records: list[bytes]) -> None:
    data = page(records[:1])
    start = PAGE_HEADER.size_bytes
    body = (start, start + len(b"".join(records[:1])), len(records[:1]))
    plain, table = scan_puts(data, [body], DATA_UNITS)
    assert not plain.any()
    assert len(table) == 0
    assert one_by_one(data, body) is not None


def test_a_count_that_cannot_be_costs_no_memory() -> None:
    body = (PAGE_HEADER.size_bytes, PAGE_BYTES, (1 << 31) - 1)
    plain, table = scan_puts(bytes(PAGE_BYTES), [body], DATA_UNITS)
    assert not plain.any()
    assert table.offset_bytes.nbytes == 0


def table_of(chunks: dict[bytes, int]) -> PutTable:
    records = [one for key, sequence in chunks.items() for one in put(sequence, key, 5000, 10 * sequence)]
    start = PAGE_HEADER.size_bytes
    plain, table = scan_puts(
        page(records), [(start, start + sum(map(len, records)), len(records))], DATA_UNITS
    )
    assert plain.all()
    return table


def test_an_index_of_tables_is_an_index_of_entries() -> None:
    """Against one built entry by entry, through the same random history."""
    rng = random.Random(3)
    keys = [struct.pack("<H", number) for number in range(60)]
    digests = [record.key_digest(key) for key in keys]
    quick, plain = Index(), Index()
    for first in (0, 20):
        chunks = {key: 1 + first + number for number, key in enumerate(keys[first : first + 20])}
        quick.load(table_of(chunks))
        for key, sequence in chunks.items():
            plain.insert(Entry(record.key_digest(key), sequence, *put(sequence, key, 5000, 10 * sequence)))
    for step in range(300):
        digest = rng.choice(digests)
        verb = rng.choice(("get", "touch", "remove", "insert", "victims"))
        if verb == "get":
            assert (quick.get(digest) is None) == (plain.get(digest) is None)
        elif verb == "touch":
            quick.touch(digest)
            plain.touch(digest)
        elif verb == "remove":
            quick.remove(digest)
            plain.remove(digest)
        elif verb == "insert" and digest not in quick:
            for index in (quick, plain):
                index.insert(Entry(digest, 100 + step, *put(100 + step, bytes(8), 5000, 10 * step + 5000)))
        elif verb == "victims":
            for index in (quick, plain):
                next(index.victims()).pins = step % 2
        assert len(quick) == len(plain)
        assert quick.record_bytes == plain.record_bytes
        assert quick.payload_bytes == plain.payload_bytes
        assert quick.shapes() == plain.shapes()
        assert sorted(quick.extents().tolist()) == sorted(plain.extents().tolist())
        assert quick.records() == plain.records()
        assert (digest in quick) == (digest in plain)
    assert [(entry.digest, entry.log_sequence) for entry in quick] == [
        (entry.digest, entry.log_sequence) for entry in plain
    ]
    assert [entry.digest for entry in quick.victims()] == [entry.digest for entry in plain.victims()]


def test_of_a_digest_in_two_tables_the_later_record_counts() -> None:
    index = Index()
    index.load(table_of({b"a": 1, b"b": 2, b"c": 3}))
    assert index.get(record.key_digest(b"c")) is not None
    index.load(table_of({b"b": 9, b"c": 8}))
    assert index.remove(record.key_digest(b"c")) is not None
    assert len(index) == 2
    assert sorted(index.extents().tolist()) == [[10, 2], [90, 2]]
    assert index.payload_bytes == 10_000
    found = index.get(record.key_digest(b"b"))
    assert found is not None
    assert found.log_sequence == 9
    assert index.record_bytes == sum(len(raw) for raw in index.records())
