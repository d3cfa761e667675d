"""The index: which chunks exist, where, and in which order they would leave.

Lookups touch RAM only. The order of the index *is* the eviction order, least recently used first; checkpoints
write it in that order, so recency survives a restart. The structure itself is in C (`native/index.h`): the
encoded record of a chunk and about 24 bytes beside it.

Invariants
  * every chunk's extents are live in the allocator and belong to no other chunk;
  * a chunk with leases or pins is never among `victims`;
  * `record_bytes` is the sum of the encoded sizes of all entries: what the next checkpoint needs.

Not here: I/O, the free map, when a removed chunk's extents may be reused (`blockkv.store`), locking: callers
hold the store's lock.
"""

from __future__ import annotations

import errno
import itertools
import secrets
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockkv._native import ffi, lib
from blockkv.device.base import TRANSFER_FIELDS, Batch
from blockkv.errors import InvalidArgument
from blockkv.format import record
from blockkv.format.geometry import unit_count
from blockkv.format.page import PAGE_PAYLOAD_BYTES
from blockkv.format.record import DIGEST_BYTES, summary_of
from blockkv.space.allocator import Extent

__all__ = ["Acquired", "Entry", "Index", "Snapshot", "Taken", "add_put_transfers"]

_PAYLOAD_BITS = 32
"""Of a layout id and a payload size side by side in 64 bits, where the size fits."""


class Entry:
    """One stored chunk, as its checked, still encoded records say. A copy: it does not change.

    Entries are equal when they are the same put of the same key.
    """

    __slots__ = ("layout_id", "log_sequence", "payload_bytes", "place", "raw")

    def __init__(self, place: int, raw: bytes) -> None:
        self.place = place
        """Where the index has it; for the index only, and only while it is there or leased."""
        self.raw = raw
        """The encoded PUT record, and the KEY_TAIL record where the key did not fit into it."""
        self.layout_id, self.payload_bytes = summary_of(raw)
        self.log_sequence = int.from_bytes(raw[8:16], "little")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Entry)
            and self.log_sequence == other.log_sequence
            and self.digest == other.digest
        )

    def __hash__(self) -> int:
        return hash(self.log_sequence)

    @property
    def digest(self) -> bytes:
        return record.digest_of(self.raw)

    @property
    def extents(self) -> tuple[Extent, ...]:
        return record.extents_of(self.raw)

    @property
    def units(self) -> int:
        return unit_count(self.payload_bytes)

    @property
    def root(self) -> bytes:
        return record.root_of(self.raw)

    @property
    def leaves(self) -> bytes:
        """Leaf checksums, 8 bytes each."""
        return self._put.leaves

    @property
    def key(self) -> str | bytes:
        """The key as it was given: text or bytes."""
        put = self._put
        key = put.key
        if len(self.raw) > record.length_of(self.raw):
            rest = record.decode(self.raw[record.length_of(self.raw) :])
            assert isinstance(rest, record.KeyTailRecord)
            key += rest.tail
        return key.decode(errors="replace") if put.key_is_text else key

    @property
    def record_bytes(self) -> int:
        return len(self.raw)

    @property
    def _put(self) -> record.PutRecord:
        put = record.decode(self.raw)
        assert isinstance(put, record.PutRecord)
        return put


@dataclass(frozen=True, slots=True)
class Acquired:
    """Chunks that were found, and leased; column by column."""

    positions: array[int]
    """Which of the digests each has."""
    places: array[int]
    layout_ids: array[int]
    extent_counts: array[int]
    payload_bytes: array[int]


@dataclass(frozen=True, slots=True)
class Taken:
    """Chunks that were taken out of the index."""

    digests: list[bytes]
    layout_ids: array[int]
    extents: list[Extent]
    """Of all of them."""
    payload_bytes: int
    """Of all of them."""


class Index:
    """Chunks by digest, least recently used first."""

    def __init__(self) -> None:
        self._index = ffi.gc(lib.bkv_index_new(secrets.randbits(64)), lib.bkv_index_free)
        if not self._index:
            raise MemoryError
        self._totals = ffi.new("struct bkv_index_totals *")

    # -- in all ----------------------------------------------------------------------------------------

    @property
    def totals(self) -> Any:
        """`struct bkv_index_totals`, as of now."""
        lib.bkv_index_totals(self._index, self._totals)
        return self._totals

    def __len__(self) -> int:
        return int(self.totals.chunks)

    @property
    def record_bytes(self) -> int:
        """Encoded size of all entries."""
        return int(self.totals.record_bytes)

    @property
    def payload_bytes(self) -> int:
        return int(self.totals.payload_bytes)

    @property
    def resident_bytes(self) -> int:
        """Memory of the index."""
        return int(self.totals.resident_bytes)

    @property
    def any_leased(self) -> bool:
        """Whether transfers are in flight on any chunk, removed or not."""
        return bool(self.totals.leased)

    # -- one chunk -------------------------------------------------------------------------------------

    def __contains__(self, digest: bytes) -> bool:
        return bool(lib.bkv_index_find(self._index, digest))

    def get(self, digest: bytes) -> Entry | None:
        """The entry, without touching its place in the eviction order."""
        place = lib.bkv_index_find(self._index, digest)
        return self._entry(place) if place else None

    def at(self, place: int) -> Entry:
        """The entry at a place that is leased."""
        return self._entry(place)

    def holds(self, entry: Entry) -> bool:
        """Whether that very put is in the index."""
        return self.get(entry.digest) == entry

    def idle(self, digest: bytes) -> Entry | None:
        """The entry, if it has neither leases nor pins."""
        place = lib.bkv_index_find(self._index, digest)
        if not place or lib.bkv_index_leases(self._index, place) or lib.bkv_index_pin(self._index, place, 0):
            return None
        return self._entry(place)

    def touch(self, digest: bytes) -> None:
        """Make a chunk the last to be evicted. Unknown digests are ignored."""
        place = lib.bkv_index_find(self._index, digest)
        if place:
            lib.bkv_index_touch(self._index, place)

    def insert(self, raw: bytes) -> Entry:
        """Add a chunk, most recently used, by its encoded PUT record and, where there is one, its KEY_TAIL.

        Its digest must not be present.
        """
        place = lib.bkv_index_insert(self._index, raw, len(raw))
        if place == -errno.ENOMEM:
            raise MemoryError
        assert place > 0, "the key is in the index already"
        return Entry(place, raw)

    def find(self, digests: Sequence[bytes]) -> array[int]:
        """The places of many chunks, 0 where there is none."""
        places = array("I", bytes(4 * len(digests)))
        lib.bkv_index_find_many(self._index, b"".join(digests), len(digests), _words(places))
        return places

    def insert_many(
        self,
        batch: Batch,
        numbers: Sequence[int],
        *,
        first_log_sequence: int,
        digests: Sequence[bytes],
        keys: Sequence[bytes],
        keys_are_text: bytes,
        layout_ids: array[int],
        layout_checksums: bytes,
        base_bytes: int,
        room_bytes: int,
    ) -> list[bytes]:
        """Add the chunks that these transfers of a batch have written, most recently used, in this order.

        The other sequences go with `numbers`; log sequences go up by one. The data zone begins at
        `base_bytes`, and the records take at most `room_bytes`. Returns the encoded records.
        """
        count = len(numbers)
        positions, lengths = array("I", numbers), array("I", bytes(4 * count))
        key_bytes = array("I", map(len, keys))
        memory = bytearray(room_bytes)
        # named, so that all of it lasts until the call is over
        held = {
            "transfers": ffi.from_buffer("struct bkv_transfer[]", batch.transfers),
            "extents": ffi.from_buffer("struct bkv_extent[]", batch.extents),
            "leaf_values": _longs(batch.leaf_values),
            "positions": _words(positions),
            "digests": ffi.from_buffer("uint8_t[]", b"".join(digests)),
            "layout_checksums": ffi.from_buffer("uint8_t[]", layout_checksums),
            "layout_ids": _words(layout_ids),
            "keys": ffi.from_buffer("uint8_t[]", b"".join(keys)),
            "key_bytes": _words(key_bytes),
            "keys_are_text": ffi.from_buffer("uint8_t[]", keys_are_text),
        }
        puts = ffi.new(
            "struct bkv_index_puts *",
            {
                **held,
                "base_bytes": base_bytes,
                "first_log_sequence": first_log_sequence,
                "count": count,
            },
        )
        target = ffi.from_buffer("uint8_t[]", memory)
        used = lib.bkv_index_insert_many(self._index, puts, target, room_bytes, _words(lengths))
        if used == -errno.ENOMEM:
            raise MemoryError
        assert used >= 0, f"a key is in the index already, or its record is too long ({used})"
        if max(lengths) > PAGE_PAYLOAD_BYTES:
            # Only together with a KEY_TAIL: the PUT record before it fills a page.
            for number in reversed(range(count)):
                if lengths[number] > PAGE_PAYLOAD_BYTES:
                    lengths[number : number + 1] = array(
                        "I", [PAGE_PAYLOAD_BYTES, lengths[number] - PAGE_PAYLOAD_BYTES]
                    )
        records, ends = bytes(memory[:used]), itertools.accumulate(lengths)
        return [records[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def remove(self, digest: bytes) -> Entry | None:
        """Take a chunk out, or None if there is none. With leases it is forgotten with the last `release`."""
        place = lib.bkv_index_find(self._index, digest)
        if not place:
            return None
        entry = self._entry(place)
        lib.bkv_index_remove(self._index, place)
        if not lib.bkv_index_leases(self._index, place):
            lib.bkv_index_drop(self._index, place)
        return entry

    def add_tail(self, digest: bytes, log_sequence: int, raw: bytes) -> None:
        """Give the chunk of that log sequence the rest of its key. Without one nothing happens."""
        entry = self.get(digest)
        if entry is not None and entry.log_sequence == log_sequence:
            self.remove(digest)
            self.insert(entry.raw[: record.length_of(entry.raw)] + raw)

    def pin(self, digest: bytes, change: int) -> bool:
        """Add `change` to the pins of a chunk. False when there is none, or too few pins.

        Raises InvalidArgument where there are too many.
        """
        place = lib.bkv_index_find(self._index, digest)
        if not place:
            return False
        if lib.bkv_index_pin(self._index, place, change) >= 0:
            return True
        if change > 0:
            raise InvalidArgument("the chunk was pinned 65535 times; unpin it as often as it is pinned")
        return False

    def pins(self, entry: Entry) -> int:
        """How many pins a chunk of the index has."""
        return int(lib.bkv_index_pin(self._index, entry.place, 0))

    # -- leases ----------------------------------------------------------------------------------------

    def lease(self, entry: Entry) -> None:
        """Note that a transfer is in flight on a chunk of the index: until `release` it is no victim."""
        lib.bkv_index_lease(self._index, entry.place)

    def leases(self, entry: Entry) -> int:
        """How many transfers are in flight on it."""
        return int(lib.bkv_index_leases(self._index, entry.place))

    def release(self, places: array[int]) -> list[Entry]:
        """Take a lease of each back. The entries of chunks that were removed meanwhile and have none left."""
        gone = array("I", places)
        count = lib.bkv_index_release_many(self._index, _words(gone), len(gone))
        entries = [self._entry(place) for place in gone[:count]]
        for entry in entries:
            lib.bkv_index_drop(self._index, entry.place)
        return entries

    def acquire(self, digests: Sequence[bytes]) -> Acquired:
        """Find, touch and lease many chunks."""
        count = len(digests)
        columns, payload_bytes = array("I", bytes(16 * count)), array("Q", bytes(8 * count))
        found = lib.bkv_index_acquire(
            self._index, b"".join(digests), count, _words(columns), _longs(payload_bytes)
        )
        positions, places, layout_ids, extent_counts = (
            columns[first : first + found] for first in range(0, 4 * count or 4, count or 1)
        )
        return Acquired(positions, places, layout_ids, extent_counts, payload_bytes[:found])

    def add_transfers(
        self,
        batch: Batch,
        places: array[int],
        extents: int,
        segment_counts: array[int],
        base_bytes: int,
        hashed: bool,
    ) -> None:
        """Make an empty batch, whose memory segments are there, read these leased chunks.

        They have so many extents together. `segment_counts` says how many segments belong to each; the data
        zone begins at `base_bytes`.
        """
        count = len(places)
        batch.transfers = array("Q", bytes(8 * TRANSFER_FIELDS * count))
        batch.extents = array("Q", bytes(16 * extents))
        leaves = lib.bkv_index_transfers(
            self._index,
            _words(places),
            count,
            base_bytes,
            hashed,
            _words(segment_counts),
            ffi.from_buffer("struct bkv_transfer[]", batch.transfers),
            ffi.from_buffer("struct bkv_extent[]", batch.extents),
        )
        batch.leaf_values = array("Q", bytes(8 * leaves))

    def inexact(self, batch: Batch, places: array[int], layout_checksums: bytes) -> list[int]:
        """Of a batch that `add_transfers` made, with checksums, the transfers that did not succeed, or whose
        leaves are not those of the chunk, read with the layout whose checksum is at its place in
        `layout_checksums`.
        """
        exact = bytearray(len(places))
        count = lib.bkv_index_verify(
            self._index,
            _words(places),
            len(places),
            ffi.from_buffer("struct bkv_transfer[]", batch.transfers),
            _longs(batch.leaf_values),
            layout_checksums,
            ffi.from_buffer("uint8_t[]", exact),
        )
        return [number for number, is_exact in enumerate(exact) if not is_exact] if count else []

    # -- all chunks ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, first to leave first. Do not change the index while iterating."""
        return self._walk(lib.bkv_index_next)

    def victims(self) -> Iterator[Entry]:
        """Entries that may leave, first to go first. Do not change the index while iterating."""
        return self._walk(lib.bkv_index_next_idle)

    def first_victims(self, units: int) -> array[int]:
        """The places of the first of `victims`, as many as hold `units` units together, or all there are."""
        places = array("I", bytes(4 * min(len(self), units)))
        count = lib.bkv_index_victims(self._index, units, len(places), _words(places))
        return places[:count]

    def take(self, places: array[int]) -> Taken:
        """Take out chunks that have no leases."""
        count = len(places)
        totals = ffi.new("struct bkv_index_totals *")
        lib.bkv_index_sum(self._index, _words(places), count, totals)
        digests = bytearray(DIGEST_BYTES * count)
        layout_ids, extents = array("I", bytes(4 * count)), array("Q", bytes(16 * totals.extents))
        held = {
            "digests": ffi.from_buffer("uint8_t[]", digests),
            "layout_ids": _words(layout_ids),
            "extents": _longs(extents),
        }
        lib.bkv_index_take(self._index, _words(places), count, ffi.new("struct bkv_index_columns *", held))
        return Taken(
            [bytes(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES)],
            layout_ids,
            list(zip(extents[::2], extents[1::2], strict=True)),
            int(totals.payload_bytes),
        )

    def reserve(self, chunks: int) -> None:
        """Make room for so many chunks at once."""
        if lib.bkv_index_reserve(self._index, chunks):
            raise MemoryError

    def load(self, body: memoryview | bytes, record_count: int, data_units: int) -> bool:
        """Add the records of a checkpoint page, most recently used last; of one digest the last counts.

        False, with nothing added, unless all of them are PUT records that are right and fill `body`.
        """
        code = lib.bkv_index_load(self._index, ffi.from_buffer(body), len(body), record_count, data_units)
        if code == -errno.ENOMEM:
            raise MemoryError
        return not code

    def extents(self) -> NDArray[np.int64]:
        """(start, units) of every extent of every chunk, in no order."""
        found = np.empty((int(self.totals.extents), 2), np.int64)
        self._export(extents=found)
        return found

    def shapes(self) -> Counter[tuple[int, int]]:
        """How many chunks there are of each (layout id, payload bytes)."""
        layout_ids = np.empty(len(self), np.uint32)
        payload_bytes = np.empty(len(self), np.uint64)
        self._export(layout_ids=layout_ids, payload_bytes=payload_bytes)
        found: Counter[tuple[int, int]] = Counter()
        long = payload_bytes >> _PAYLOAD_BITS > 0
        found.update(zip(layout_ids[long].tolist(), payload_bytes[long].tolist(), strict=True))
        joint = layout_ids[~long].astype(np.uint64) << _PAYLOAD_BITS | payload_bytes[~long]
        for key, count in zip(*np.unique(joint, return_counts=True), strict=True):
            found[int(key) >> _PAYLOAD_BITS, int(key) & (1 << _PAYLOAD_BITS) - 1] += int(count)
        return found

    def sums(self) -> tuple[int, int]:
        """`record_bytes` and `payload_bytes`, counted anew."""
        record_bytes, payload_bytes = np.empty(len(self), np.uint32), np.empty(len(self), np.uint64)
        self._export(record_bytes=record_bytes, payload_bytes=payload_bytes)
        return int(record_bytes.sum(dtype=np.uint64)), int(payload_bytes.sum())

    def digests(self) -> list[bytes]:
        """All digests, first to leave first."""
        found: list[bytes] = self._digests().tolist()
        return found

    def by_log_sequence(self, after_sequence: int) -> tuple[list[bytes], int]:
        """The digests of chunks with a later log sequence, in its order, and their payload bytes in all.

        All of them after sequence 0.
        """
        sequences, payload_bytes = np.empty(len(self), np.uint64), np.empty(len(self), np.uint64)
        self._export(log_sequences=sequences, payload_bytes=payload_bytes)
        order = np.argsort(sequences, kind="stable")
        order = order[int(np.searchsorted(sequences[order], after_sequence, "right")) :]
        found: list[bytes] = self._digests()[order].tolist()
        return found, int(payload_bytes[order].sum())

    def snapshot(self) -> Snapshot:
        """All records as of now, to be read while the index changes. One at a time."""
        return Snapshot(self._index)

    def _digests(self) -> NDArray[np.void]:
        found = np.empty(len(self) * DIGEST_BYTES, np.uint8)
        self._export(digests=found)
        return found.view(f"V{DIGEST_BYTES}")

    def _entry(self, place: int) -> Entry:
        length = ffi.new("uint32_t *")
        records = lib.bkv_index_records(self._index, place, length)
        return Entry(place, ffi.buffer(records, length[0])[:])

    def _walk(self, following: Any) -> Iterator[Entry]:
        place = 0
        while place := following(self._index, place):
            yield self._entry(place)

    def _export(self, **columns: NDArray[Any]) -> None:
        held = {name: ffi.from_buffer(_CTYPES[column.itemsize], column) for name, column in columns.items()}
        lib.bkv_index_export(self._index, ffi.new("struct bkv_index_columns *", held))


class Snapshot:
    """The records of all chunks as of one moment, in eviction order, in page bodies.

    Call `close`, with the store's lock held like everything else.
    """

    def __init__(self, index: Any) -> None:
        self._index = index
        code = lib.bkv_index_snapshot_begin(index)
        assert not code, "a snapshot is under way"

    def bodies(self, count: int) -> list[tuple[bytes, int]]:
        """The next `count` or fewer page bodies with the number of records in each; none at the end."""
        memory = bytearray(count * PAGE_PAYLOAD_BYTES)
        lengths, records = array("H", bytes(2 * count)), array("H", bytes(2 * count))
        made = lib.bkv_index_snapshot_next(
            self._index,
            count,
            ffi.from_buffer("uint8_t[]", memory),
            ffi.from_buffer("uint16_t[]", lengths),
            ffi.from_buffer("uint16_t[]", records),
        )
        if made < 0:
            raise MemoryError
        view = memoryview(memory)
        return [
            (bytes(view[start : start + lengths[page]]), records[page])
            for page, start in enumerate(range(0, made * PAGE_PAYLOAD_BYTES, PAGE_PAYLOAD_BYTES))
        ]

    def close(self) -> None:
        """Let another snapshot begin."""
        lib.bkv_index_snapshot_end(self._index)


def add_put_transfers(
    batch: Batch,
    payload_bytes: Sequence[int],
    extents: Sequence[tuple[Extent, ...]],
    segment_counts: array[int],
    base_bytes: int,
) -> None:
    """Make an empty batch, whose memory segments are there, write new chunks to these extents.

    `segment_counts` says how many segments belong to each chunk; the data zone begins at `base_bytes`.
    """
    count = len(payload_bytes)
    batch.transfers = array("Q", bytes(8 * TRANSFER_FIELDS * count))
    batch.extents = array("Q", itertools.chain.from_iterable(itertools.chain.from_iterable(extents)))
    leaves = lib.bkv_put_transfers(
        _longs(array("Q", payload_bytes)),
        _words(array("I", map(len, extents))),
        _words(segment_counts),
        count,
        base_bytes,
        ffi.from_buffer("struct bkv_extent[]", batch.extents),
        ffi.from_buffer("struct bkv_transfer[]", batch.transfers),
    )
    batch.leaf_values = array("Q", bytes(8 * leaves))


_CTYPES = {1: "uint8_t[]", 4: "uint32_t[]", 8: "uint64_t[]"}

assert lib.BKV_PAGE_PAYLOAD_BYTES == PAGE_PAYLOAD_BYTES
assert lib.BKV_DIGEST_BYTES == DIGEST_BYTES


def _words(values: array[int]) -> Any:
    return ffi.from_buffer("uint32_t[]", values)


def _longs(values: array[int]) -> Any:
    return ffi.from_buffer("uint64_t[]", values)
