"""The index against a plain dictionary, its snapshots, and the PUT records it reads from pages itself."""

from __future__ import annotations

import random
import struct
from array import array
from collections import Counter, OrderedDict

import pytest
from blockkv._native import ffi, lib
from format_samples import dice_bytes, put

from blockkv.catalog.index import Entry, Index, add_put_transfers
from blockkv.device.base import Batch, Direction, Priority
from blockkv.errors import InvalidArgument
from blockkv.format import geometry, page, record
from blockkv.format.page import COUNTER_LIMIT, PAGE_PAYLOAD_BYTES
from blockkv.format.record import RecordMalformed, RecordView, iterate_records

DATA_UNITS = 1 << 20
SIZES_BYTES = (1, 4095, 4096, 4097, 131072, 131073, 5 << 20, 32 << 20, (32 << 20) + 1, 300 << 20)


def test_c_and_python_agree_about_the_put_record() -> None:
    offsets = {name: ffi.offsetof("struct bkv_put", name) for name in record.PUT_RECORD.offsets}
    assert offsets == record.PUT_RECORD.offsets
    assert record.PUT_RECORD.size_bytes == lib.BKV_PUT_BYTES
    assert record.Operation.PUT == lib.BKV_PUT_OPERATION
    assert record.DIGEST_BYTES == lib.BKV_DIGEST_BYTES
    assert record.MAX_KEY_BYTES == lib.BKV_MAX_KEY_BYTES
    assert page.CHECKSUM_BYTES == lib.BKV_ROOT_BYTES
    assert page.PAGE_PAYLOAD_BYTES == lib.BKV_PAGE_PAYLOAD_BYTES
    assert geometry.MAX_EXTENTS == lib.BKV_MAX_EXTENTS
    assert geometry.MAX_LEAVES == lib.BKV_MAX_LEAVES
    assert geometry.LEAF_BYTES == lib.BKV_LEAF_BYTES
    assert geometry.MAX_DATA_UNITS == 1 << lib.BKV_EXTENT_COUNT_SHIFT


@pytest.mark.parametrize("payload_bytes", [*SIZES_BYTES, 1 << 30, (1 << 30) + 1, 1 << 45])
def test_c_and_python_agree_about_leaves(payload_bytes: int) -> None:
    assert lib.bkv_leaf_bytes(payload_bytes) == geometry.leaf_bytes_for(payload_bytes)


# -- records of a page -------------------------------------------------------------------------------------


def random_put(rng: random.Random) -> list[bytes]:
    """A PUT record of one extent or several, with a key that fits or nearly fills the page."""
    key = rng.randbytes(rng.choice((1, 4, 36, rng.randrange(1, 60))))
    payload_bytes = rng.choice(SIZES_BYTES)
    units, start = geometry.unit_count(payload_bytes), rng.randrange(DATA_UNITS // 2)
    pieces = min(units, rng.choice((1, 1, 1, 2, 3)))
    sizes = [1] * (pieces - 1) + [units - pieces + 1]
    rng.shuffle(sizes)
    extents = []
    for size in sizes:
        extents.append((start, size))
        start += size + rng.randrange(5)
    rng.shuffle(extents)
    return record.encode_put(
        rng.randrange(1 << 40),
        record.key_digest(key),
        payload_bytes,
        rng.randrange(9),
        rng.randbytes(16),
        extents,
        rng.randbytes(8 * geometry.leaf_count(payload_bytes)),
        key,
        rng.random() < 0.5,
    )


def random_body(rng: random.Random) -> tuple[bytes, int]:
    records: list[bytes] = []
    while sum(map(len, records)) < PAGE_PAYLOAD_BYTES * 0.4:
        one = random_put(rng)
        if sum(map(len, records + one)) <= PAGE_PAYLOAD_BYTES:
            records += one
    return b"".join(records), len(records)


def one_by_one(body: bytes, count: int) -> list[RecordView] | None:
    try:
        return list(iterate_records(body, count, DATA_UNITS))
    except RecordMalformed:
        return None


def newest_of(views: list[RecordView]) -> dict[bytes, bytes]:
    """Digest to raw record, of one digest the last, in that order."""
    found: dict[bytes, bytes] = {}
    for _, _, digest, raw in views:
        found.pop(digest, None)
        found[digest] = raw
    return found


def contents(index: Index) -> dict[bytes, bytes]:
    return {entry.digest: entry.raw for entry in index}


def test_a_page_of_puts_is_read_as_it_is_one_by_one() -> None:
    rng = random.Random(1)
    index, wanted = Index(), []
    for _ in range(50):
        body, count = random_body(rng)
        assert index.load(body, count, DATA_UNITS)
        wanted += one_by_one(body, count) or []
    assert contents(index) == newest_of(wanted)
    assert list(contents(index)) == list(newest_of(wanted))
    for entry in index:
        decoded = record.decode(entry.raw)
        assert isinstance(decoded, record.PutRecord)
        assert (entry.log_sequence, entry.layout_id, entry.payload_bytes, entry.extents, entry.root) == (
            decoded.log_sequence,
            decoded.layout_id,
            decoded.payload_bytes,
            decoded.extents,
            decoded.root,
        )


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_page_gives_is_accepted_one_by_one(seed: int) -> None:
    """Damage of every kind, aimed at the fields. What is refused leaves nothing behind."""
    rng = random.Random(seed)
    accepted = refused = 0
    for _ in range(500):
        body, count = random_body(rng)
        data = bytearray(body)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.choice((0, 1, 2, 3, 4, 8, 15, 16, 48, 52, 55, 72, 73, 74, 75, 76, 81, 82, 83, 84, 91))
            at = rng.choice((at, rng.randrange(len(data)), len(data) - rng.randrange(1, 9)))
            data[at] = rng.choice((0, 1, 2, 255, data[at] ^ 1 << rng.randrange(8)))
        cut = rng.choice((0, 0, 0, 8, 76))
        count = rng.choice((count, count, count - 1, count + 1, 0xFFFF))
        found = bytes(data[: len(data) - cut])
        index = Index()
        taken = index.load(found, count, DATA_UNITS)
        wanted = one_by_one(found, count)
        if taken:
            assert wanted is not None
            assert contents(index) == newest_of(wanted)
        else:
            assert len(index) == 0
        accepted += taken
        refused += wanted is None
    assert accepted > 20
    assert refused > 20


@pytest.mark.parametrize(
    "records",
    [
        [record.encode_delete(7, bytes(32))],
        [record.encode_layout(7, 3, b"J[]")],
        put(7, bytes(4096))[1:],
        [*put(7, b"k"), record.encode_delete(8, bytes(32))],
        put(COUNTER_LIMIT, b"k"),
    ],
    ids=["delete", "layout", "the rest of a key", "put and delete", "impossible log sequence"],
)
def test_everything_but_puts_is_left_to_be_read_one_by_one(records: list[bytes]) -> None:
    index = Index()
    assert not index.load(b"".join(records), len(records), DATA_UNITS)
    assert len(index) == 0


def test_extents_outside_the_data_zone_or_over_each_other_are_refused() -> None:
    def body(extents: list[tuple[int, int]]) -> bytes:
        return record.encode_put(7, bytes(32), 8192, 1, bytes(16), extents, bytes(8), b"k")[0]

    index = Index()
    for extents in ([(4, 1), (4, 1)], [(DATA_UNITS - 1, 2)], [(DATA_UNITS, 1), (0, 1)]):
        raw = body(extents)
        assert not index.load(raw, 1, DATA_UNITS)
        assert one_by_one(raw, 1) is None
    assert index.load(body([(DATA_UNITS - 1, 1), (4, 1)]), 1, DATA_UNITS)


# -- the structure -----------------------------------------------------------------------------------------


class Plain:
    """What the index is, as an ordered dictionary."""

    def __init__(self) -> None:
        self.chunks: OrderedDict[bytes, bytes] = OrderedDict()
        self.pins: Counter[bytes] = Counter()


def check_same(index: Index, plain: Plain) -> None:
    raws = list(plain.chunks.values())
    entries = [Entry(0, raw) for raw in raws]
    assert [entry.raw for entry in index] == raws
    assert len(index) == len(raws)
    assert index.record_bytes == sum(map(len, raws))
    assert index.payload_bytes == sum(entry.payload_bytes for entry in entries)
    assert index.sums() == (index.record_bytes, index.payload_bytes)
    assert index.shapes() == Counter((entry.layout_id, entry.payload_bytes) for entry in entries)
    assert sorted(map(tuple, index.extents().tolist())) == sorted(
        extent for entry in entries for extent in entry.extents
    )
    assert index.digests() == list(plain.chunks)
    assert [entry.digest for entry in index.victims()] == [
        digest for digest in plain.chunks if not plain.pins[digest]
    ]
    for after in (0, 1 << 39):
        later = sorted((one for one in entries if one.log_sequence > after), key=lambda one: one.log_sequence)
        digests, payload_bytes = index.by_log_sequence(after)
        assert digests == [entry.digest for entry in later]
        assert payload_bytes == sum(entry.payload_bytes for entry in later)


@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_an_ordered_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    keys = [struct.pack("<H", number) for number in range(3000)]
    index, plain = Index(), Plain()
    for step in range(20_000):
        key = rng.choice(keys[: 40 + step // 5])
        digest = record.key_digest(key)
        verb = rng.choices(("insert", "remove", "touch", "pin", "unpin", "tail"), (9, 3, 3, 1, 1, 1))[0]
        present = digest in plain.chunks
        assert (digest in index) == present
        if verb == "insert" and not present:
            long_key = key * rng.choice((1, 1, 1, rng.randrange(1, 60)))
            raw = b"".join(put(step, long_key, rng.choice(SIZES_BYTES), rng.randrange(1 << 20)))
            raw = raw[:16] + digest + raw[48:]
            assert index.insert(raw) == Entry(0, raw)
            plain.chunks[digest] = raw
        elif verb == "remove":
            removed = index.remove(digest)
            assert (removed.raw if removed else None) == plain.chunks.pop(digest, None)
            del plain.pins[digest]
        elif verb == "touch":
            index.touch(digest)
            if present:
                plain.chunks.move_to_end(digest)
        elif verb == "pin":
            assert index.pin(digest, 1) == present
            plain.pins[digest] += present
        elif verb == "unpin":
            assert index.pin(digest, -1) == (plain.pins[digest] > 0)
            plain.pins[digest] -= plain.pins[digest] > 0
        elif present and len(plain.chunks[digest]) < 300 and not plain.pins[digest]:
            raw = plain.chunks.pop(digest)
            tail = b"\x40\0\4".ljust(64, b"t")
            index.add_tail(digest, Entry(0, raw).log_sequence, tail)
            plain.chunks[digest] = raw[: record.length_of(raw)] + tail
        found = index.get(digest)
        assert (found.raw if found else None) == plain.chunks.get(digest)
        if found is not None:
            assert index.pins(found) == plain.pins[digest]
            assert index.holds(found)
        if step % 2000 == 0:
            check_same(index, plain)
    check_same(index, plain)


def test_a_put_of_the_same_key_is_another_entry() -> None:
    index = Index()
    first = index.insert(put(1, b"k")[0])
    index.remove(first.digest)
    index.insert(put(2, b"k")[0])
    assert not index.holds(first)


def test_a_leased_chunk_outlives_its_removal() -> None:
    index = Index()
    raw = put(1, b"k")[0]
    entry = index.insert(raw)
    found = index.acquire([entry.digest, bytes(32), entry.digest])
    assert (list(found.positions), list(found.places)) == ([0, 2], [entry.place] * 2)
    assert index.leases(entry) == 2
    assert list(index.victims()) == []
    assert index.remove(entry.digest) == entry
    assert index.any_leased
    for number in range(2, 40):  # none of them takes its place
        index.insert(put(number, bytes([number]))[0])
    assert index.at(entry.place).raw == raw
    assert index.release(array("I", [entry.place])) == []
    assert index.release(array("I", [entry.place])) == [entry]
    assert not index.any_leased


def test_a_lease_returned_on_a_chunk_that_stays() -> None:
    index = Index()
    entry = index.insert(put(1, b"k")[0])
    index.lease(entry)
    assert index.release(array("I", [entry.place])) == []
    assert [one.digest for one in index.victims()] == [entry.digest]


def test_pins_have_a_limit() -> None:
    index = Index()
    entry = index.insert(put(1, b"k")[0])
    assert index.pin(entry.digest, 65535)
    with pytest.raises(InvalidArgument, match="65535"):
        index.pin(entry.digest, 1)
    assert index.pins(entry) == 65535
    assert not index.pin(bytes(32), 1)


def test_memory_of_what_left_is_used_again() -> None:
    """As many chunks as before need as much as before, also where records changed their size in between."""
    rng = random.Random(5)
    index = Index()
    digests: list[bytes] = []
    peaks = []
    for turn in range(60):
        for digest in digests:
            assert index.remove(digest)
        digests = [
            index.insert(put(number, rng.randbytes(30 + 8 * (turn % 3)))[0]).digest for number in range(2000)
        ]
        peaks.append(index.resident_bytes)
    assert peaks[-1] == peaks[6]


def test_bytes_beside_the_records() -> None:
    index = Index()
    count = 200_000
    raw = bytearray(put(1, bytes(36))[0])
    assert len(raw) == 128
    for number in range(count):
        raw[16:24] = number.to_bytes(8, "little")
        index.insert(bytes(raw))
    assert index.resident_bytes / count <= 160
    assert index.record_bytes == 128 * count


# -- snapshots ---------------------------------------------------------------------------------------------


def records_in(bodies: list[tuple[bytes, int]]) -> list[bytes]:
    found = []
    for body, count in bodies:
        assert len(body) <= PAGE_PAYLOAD_BYTES
        first = len(found)
        while body:
            length = record.length_of(body)
            found.append(body[:length])
            body = body[length:]
        assert len(found) - first == count
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_snapshot_is_what_was_there_when_it_was_taken(seed: int) -> None:
    rng = random.Random(seed)
    index = Index()
    sequence = 0

    def change() -> None:
        nonlocal sequence
        for _ in range(rng.randrange(60)):
            sequence += 1
            digest = record.key_digest(struct.pack("<H", rng.randrange(400)))
            verb = rng.choice(("insert", "insert", "remove", "touch", "lease"))
            if verb == "insert" and digest not in index:
                key = bytes(rng.choice((2, 30, 3000, 4096)))
                raw = b"".join(put(sequence, key, 5000))
                index.insert(raw[:16] + digest + raw[48:])
            elif verb == "remove":
                index.remove(digest)
            elif verb == "touch":
                index.touch(digest)
            elif verb == "lease":
                found = index.acquire([digest])
                index.remove(digest)
                index.release(found.places)

    for turn in range(40):
        change()
        wanted = [entry.raw for entry in index]
        snapshot = index.snapshot()
        bodies = []
        while made := snapshot.bodies(rng.choice((2, 3, 7))):
            bodies += made
            if rng.random() < 0.7:
                change()
            if turn % 5 == 4:
                break  # given up half-way
        else:
            found = records_in(bodies)
            assert sorted(found) == sorted(
                one
                for raw in wanted
                for one in (raw[: record.length_of(raw)], raw[record.length_of(raw) :])
                if one
            )
            assert not snapshot.bodies(2)
        snapshot.close()


def test_a_snapshot_keeps_the_order() -> None:
    index = Index()
    raws = [put(number, struct.pack("<H", number))[0] for number in range(500)]
    for raw in raws:
        index.insert(raw)
    snapshot = index.snapshot()
    found: list[bytes] = []
    while made := snapshot.bodies(4):
        found += records_in(made)
        index.insert(put(1000 + len(found), struct.pack("<I", len(found)))[0])
    assert found == raws
    snapshot.close()


def test_pages_of_a_snapshot_are_full() -> None:
    index = Index()
    for number in range(500):
        index.insert(put(number, struct.pack("<H", number) * 40)[0])
    snapshot = index.snapshot()
    bodies = []
    while made := snapshot.bodies(2):
        bodies += made
    longest = max(len(raw.raw) for raw in index)
    assert all(len(body) > PAGE_PAYLOAD_BYTES - longest for body, _ in bodies[:-1])


# -- batches -----------------------------------------------------------------------------------------------


def test_transfers_of_many_chunks_are_those_of_each() -> None:
    rng = random.Random(7)
    index = Index()
    for _ in range(40):
        raw = random_put(rng)[0]
        if record.digest_of(raw) not in index:
            index.insert(raw)
    entries = list(index)
    found = index.acquire([entry.digest for entry in entries])
    assert list(found.positions) == list(range(len(entries)))
    assert list(found.payload_bytes) == [entry.payload_bytes for entry in entries]
    assert list(found.layout_ids) == [entry.layout_id for entry in entries]
    assert list(found.extent_counts) == [len(entry.extents) for entry in entries]
    wanted = Batch(Direction.READ, Priority.LOAD)
    segment_counts = []
    base_bytes = 5 << 20
    for entry in entries:
        segments = [(4096, entry.payload_bytes)] if entry.payload_bytes < 2 else [(8192, 1), (1 << 30, 1)]
        segment_counts.append(len(segments))
        wanted.add(
            entry.payload_bytes,
            [(base_bytes + start * 4096, count * 4096) for start, count in entry.extents],
            segments,
            geometry.leaf_bytes_for(entry.payload_bytes),
        )
    for hashed in (True, False):
        batch = Batch(Direction.READ, Priority.LOAD)
        extents = sum(found.extent_counts)
        index.add_transfers(batch, found.places, extents, array("I", segment_counts), base_bytes, hashed)
        assert batch.extents == wanted.extents
        assert len(batch) == len(entries)
        if hashed:
            assert batch.transfers == wanted.transfers
            assert batch.leaf_values == wanted.leaf_values
        else:
            assert len(batch.leaf_values) == 0


def test_transfers_of_new_chunks_are_those_of_each() -> None:
    rng = random.Random(9)
    puts = [Entry(1, random_put(rng)[0]) for _ in range(40)]
    wanted = Batch(Direction.WRITE, Priority.STORE)
    base_bytes = 7 << 20
    counts = array("I", [rng.randrange(1, 4) for _ in puts])
    for entry, count in zip(puts, counts, strict=True):
        wanted.add(
            entry.payload_bytes,
            [(base_bytes + start * 4096, units * 4096) for start, units in entry.extents],
            [(4096, 1)] * count,
            geometry.leaf_bytes_for(entry.payload_bytes),
        )
    batch = Batch(Direction.WRITE, Priority.STORE)
    sizes = [entry.payload_bytes for entry in puts]
    add_put_transfers(batch, sizes, [entry.extents for entry in puts], counts, base_bytes)
    assert batch.extents == wanted.extents
    assert batch.transfers == wanted.transfers
    assert batch.leaf_values == wanted.leaf_values


def test_the_first_victims_are_taken_together() -> None:
    rng = random.Random(10)
    index = Index()
    while len(index) < 60:
        raw = random_put(rng)[0]
        if record.digest_of(raw) not in index:
            index.insert(raw)
    entries = list(index)
    index.pin(entries[1].digest, 1)
    index.lease(entries[3])
    idle = [entry for entry in entries if entry not in (entries[1], entries[3])]
    units = sum(entry.units for entry in idle[:20])
    places = index.first_victims(units)
    assert list(places) == [entry.place for entry in idle[:20]]
    taken = index.take(places)
    assert taken.digests == [entry.digest for entry in idle[:20]]
    assert list(taken.layout_ids) == [entry.layout_id for entry in idle[:20]]
    assert taken.extents == [extent for entry in idle[:20] for extent in entry.extents]
    assert taken.payload_bytes == sum(entry.payload_bytes for entry in idle[:20])
    assert list(index) == [entries[1], entries[3], *idle[20:]]
    assert len(index.first_victims(1 << 40)) == len(idle) - 20


def test_inexact_compares_digest_size_layout_and_leaves() -> None:
    index = Index()
    layout = dice_bytes(1, 16)
    leaves = dice_bytes(2, 8 * 3)
    payload_bytes = 300_000

    def insert(key: bytes, root: bytes, units: int) -> None:
        index.insert(
            record.encode_put(1, record.key_digest(key), payload_bytes, 1, root, [(units, 74)], leaves, key)[
                0
            ]
        )

    insert(b"right", record.root_checksum(record.key_digest(b"right"), payload_bytes, layout, leaves), 0)
    insert(b"wrong", record.root_checksum(record.key_digest(b"right"), payload_bytes, layout, leaves), 80)
    places = index.acquire([record.key_digest(b"right"), record.key_digest(b"wrong")]).places
    batch = Batch(Direction.READ, Priority.LOAD)
    index.add_transfers(batch, places, 2, array("I", [1, 1]), 0, True)
    batch.leaf_values = array("Q", leaves * 2)
    assert index.inexact(batch, places, layout * 2) == [1]
    assert index.inexact(batch, places, dice_bytes(9, 16) + layout) == [0, 1]
    batch.leaf_values[2] ^= 1
    assert index.inexact(batch, places, layout * 2) == [0, 1]
    batch.leaf_values[2] ^= 1
    batch.set_result(0, -5)
    assert index.inexact(batch, places, layout * 2) == [0, 1]


def test_records_of_a_wave_are_those_encoded_one_by_one() -> None:
    rng = random.Random(8)
    base_bytes = 3 << 20
    batch = Batch(Direction.WRITE, Priority.STORE)
    wanted: list[bytes] = []
    numbers, keys, texts, layouts, layout_ids = [], [], bytearray(), [], array("I")
    first = 1000
    for number in range(120):
        raw = random_put(rng)[0]
        decoded = record.decode(raw)
        assert isinstance(decoded, record.PutRecord)
        leaf_bytes = geometry.leaf_bytes_for(decoded.payload_bytes)
        batch.add(
            decoded.payload_bytes,
            [(base_bytes + start * 4096, count * 4096) for start, count in decoded.extents],
            [(4096, decoded.payload_bytes)],
            leaf_bytes,
        )
        leaves = array("Q", decoded.leaves)
        batch.leaf_values[len(batch.leaf_values) - len(leaves) :] = leaves
        if number % 7 == 3:
            continue  # one that could not be written
        key = rng.randbytes(rng.choice((1, 8, 36, 3000, 3900, 4000, 4096)))
        layout = rng.randbytes(16)
        digest = record.key_digest(key + bytes([number]))
        wanted += record.encode_put(
            first + len(numbers),
            digest,
            decoded.payload_bytes,
            number,
            record.root_checksum(digest, decoded.payload_bytes, layout, decoded.leaves),
            decoded.extents,
            decoded.leaves,
            key,
            bool(number % 2),
        )
        numbers.append(number)
        keys.append((key, digest))
        texts.append(number % 2)
        layouts.append(layout)
        layout_ids.append(number)
    index = Index()
    made = index.insert_many(
        batch,
        numbers,
        first_log_sequence=first,
        digests=[digest for _, digest in keys],
        keys=[key for key, _ in keys],
        keys_are_text=bytes(texts),
        layout_ids=layout_ids,
        layout_checksums=b"".join(layouts),
        base_bytes=base_bytes,
        room_bytes=sum(map(len, wanted)),
    )
    assert made == wanted
    assert b"".join(entry.raw for entry in index) == b"".join(wanted)
    for entry, (key, digest) in zip(index, keys, strict=True):
        assert entry.digest == digest
        assert (entry.key if isinstance(entry.key, bytes) else key) == key
    assert list(index.find([keys[5][1], bytes(32)])) == [index.get(keys[5][1]).place, 0]  # type: ignore[union-attr]
