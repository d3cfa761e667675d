"""The index: which chunks exist, where, and in which order they would leave.

Lookups touch RAM only. Iteration order of the index *is* the eviction order, least recently used first;
checkpoints write it in that order, so recency survives a restart.

Invariants
  * every entry's extents are live in the allocator and belong to no other entry;
  * an entry with leases or pins is never among `victims`;
  * `record_bytes` is the sum of the encoded sizes of all entries: what the next checkpoint needs.

Not here: I/O, the free map, when a removed entry's extents may be reused (`blockkv.store`).
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from blockkv.format import record
from blockkv.format.geometry import unit_count
from blockkv.format.record import summary_of
from blockkv.format.scan import PutTable
from blockkv.space.allocator import Extent

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_PAYLOAD_BITS = 26
"""Enough for the payload of a chunk in a table; a layout id has 32 more, and the sign stays out of it."""
_PAYLOAD_MASK = (1 << _PAYLOAD_BITS) - 1


class Entry:
    """One stored chunk: its checked, still encoded PUT record, and who is using it.

    Everything but the last three attributes is fixed once the entry is in the index.
    """

    __slots__ = (
        "digest",
        "group",
        "layout_id",
        "leases",
        "log_sequence",
        "payload_bytes",
        "pins",
        "raw",
        "tail",
    )

    def __init__(self, digest: bytes, log_sequence: int, raw: bytes, tail: bytes = b"") -> None:
        self.digest = digest
        self.log_sequence = log_sequence
        self.layout_id, self.payload_bytes = summary_of(raw)
        self.raw = raw
        self.tail = tail
        """The encoded KEY_TAIL record, where the key did not fit into the PUT record."""
        self.group = 0
        """Number of the commit group that makes the chunk durable; 0 when it was read from the device."""
        self.leases = 0
        """Transfers in flight on the extents, which must not be reused while it is not 0."""
        self.pins = 0

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
        put = record.decode(self.raw)
        assert isinstance(put, record.PutRecord)
        return put.leaves

    @property
    def key(self) -> str | bytes:
        """The key as it was given: text or bytes."""
        put = record.decode(self.raw)
        assert isinstance(put, record.PutRecord)
        key = put.key
        if self.tail:
            rest = record.decode(self.tail)
            assert isinstance(rest, record.KeyTailRecord)
            key += rest.tail
        return key.decode(errors="replace") if put.key_is_text else key

    @property
    def records(self) -> list[bytes]:
        """The encoded records of the chunk, for the next checkpoint."""
        return [self.raw, self.tail] if self.tail else [self.raw]

    @property
    def record_bytes(self) -> int:
        return len(self.raw) + len(self.tail)


class Index:
    """Chunks by digest, least recently used first.

    What a checkpoint held stays in the tables it was read into, and becomes an `Entry` when somebody asks for
    it: a store of a million chunks opens in little more than the time it takes to read them.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._slots: OrderedDict[bytes, Entry | int] = OrderedDict()
        """An entry, or the place of one: number of the table << _ROW_BITS | row."""
        self._made: set[Entry] = set()
        """The entries among the slots: few beside the rows, after opening a large store."""
        self._tables: list[PutTable] = []
        self._in_table: list[NDArray[np.bool_]] = []
        """Per table, which rows are chunks of this index that have no `Entry` yet."""
        self.record_bytes = 0
        self.payload_bytes = 0
        for entry in entries:
            self.insert(entry)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def __iter__(self) -> Iterator[Entry]:
        return map(self._entry, self._slots, self._slots.values())

    def load(self, table: PutTable) -> None:
        """Add a table of checked records, most recently used last. Of one digest the last record counts."""
        first, expected = len(self._tables) << _ROW_BITS, len(self) + len(table)
        self._tables.append(table)
        self._in_table.append(np.ones(len(table), np.bool_))
        self.record_bytes += int(table.record_bytes.sum())
        self.payload_bytes += int(table.payload_bytes.sum())
        self._slots.update(zip(table.digests(), range(first, first + len(table)), strict=True))
        if len(self) != expected:
            self._recount()

    def _recount(self) -> None:
        for rows in self._in_table:
            rows[:] = False
        for slot in self._slots.values():
            if isinstance(slot, int):
                self._in_table[slot >> _ROW_BITS][slot & _ROW_MASK] = True
        self._made = {slot for slot in self._slots.values() if isinstance(slot, Entry)}
        made = sum(entry.record_bytes for entry in self._made)
        self.record_bytes = made + int(self._column("record_bytes").sum())
        made = sum(entry.payload_bytes for entry in self._made)
        self.payload_bytes = made + int(self._column("payload_bytes").sum())

    def get(self, digest: bytes) -> Entry | None:
        """The entry, without touching its place in the eviction order."""
        slot = self._slots.get(digest)
        return slot if slot is None else self._entry(digest, slot)

    def _entry(self, digest: bytes, slot: Entry | int) -> Entry:
        if not isinstance(slot, int):
            return slot
        number, row = slot >> _ROW_BITS, slot & _ROW_MASK
        table = self._tables[number]
        entry = Entry(digest, int(table.log_sequence[row]), table.raw(row))
        self._slots[digest] = entry
        self._made.add(entry)
        self._in_table[number][row] = False
        return entry

    def touch(self, digest: bytes) -> None:
        """Make an entry the last to be evicted. Unknown digests are ignored."""
        if digest in self._slots:
            self._slots.move_to_end(digest)

    def insert(self, entry: Entry) -> None:
        """Add an entry, most recently used. The digest must not be present."""
        assert entry.digest not in self._slots
        self._slots[entry.digest] = entry
        self._made.add(entry)
        self.record_bytes += entry.record_bytes
        self.payload_bytes += entry.payload_bytes

    def remove(self, digest: bytes) -> Entry | None:
        """Take an entry out, or None if there is none."""
        entry = self.get(digest)
        if entry is not None:
            del self._slots[digest]
            self._made.remove(entry)
            self.record_bytes -= entry.record_bytes
            self.payload_bytes -= entry.payload_bytes
        return entry

    def add_tail(self, digest: bytes, log_sequence: int, raw: bytes) -> None:
        """Give the entry of that log sequence the rest of its key. Without one nothing happens."""
        entry = self.get(digest)
        if entry is not None and entry.log_sequence == log_sequence:
            self.record_bytes += len(raw) - len(entry.tail)
            entry.tail = raw

    def victims(self) -> Iterator[Entry]:
        """Entries that may leave, first to go first. Do not change the index while iterating."""
        return (entry for entry in self if not (entry.leases or entry.pins))

    def any_leased(self) -> bool:
        """Whether transfers are in flight on any entry."""
        return any(entry.leases for entry in self._made)

    def snapshot(self) -> list[Entry]:
        """All entries in eviction order, as of now."""
        return list(self)

    def records(self) -> list[bytes]:
        """The encoded records of all chunks in eviction order."""
        found: list[bytes] = []
        for slot in self._slots.values():
            if isinstance(slot, int):
                found.append(self._tables[slot >> _ROW_BITS].raw(slot & _ROW_MASK))
            else:
                found.extend(slot.records)
        return found

    def extents(self) -> NDArray[np.int64]:
        """(start, units) of every extent of every chunk, in no order."""
        listed = [extent for entry in self._made for extent in entry.extents]
        table = np.column_stack((self._column("start_unit"), self._column("units")))
        return np.concatenate((np.array(listed, np.int64).reshape(-1, 2), table))

    def shapes(self) -> Counter[tuple[int, int]]:
        """How many chunks there are of each (layout id, payload bytes)."""
        found = Counter((entry.layout_id, entry.payload_bytes) for entry in self._made)
        joint = self._column("layout_id") << _PAYLOAD_BITS | self._column("payload_bytes")
        for key, count in zip(*np.unique(joint, return_counts=True), strict=True):
            found[int(key) >> _PAYLOAD_BITS, int(key) & _PAYLOAD_MASK] += int(count)
        return found

    def by_log_sequence(self, after_sequence: int) -> tuple[list[bytes], int]:
        """The digests of chunks with a later log sequence, in its order, and their payload bytes in all."""
        made = [entry for entry in self._made if entry.log_sequence > after_sequence]
        sequences = [np.array([entry.log_sequence for entry in made], np.int64)]
        digests = [entry.digest for entry in made]
        payload_bytes = sum(entry.payload_bytes for entry in made)
        for table, rows in zip(self._tables, self._in_table, strict=True):
            wanted = rows & (table.log_sequence > after_sequence)
            sequences.append(table.log_sequence[wanted])
            digests += itertools.compress(table.digests(), wanted)
            payload_bytes += int(table.payload_bytes[wanted].sum())
        order = np.argsort(np.concatenate(sequences), kind="stable").tolist()
        return [digests[place] for place in order], payload_bytes

    def _column(self, name: str) -> NDArray[np.int64]:
        """One field of all chunks that are still in tables."""
        columns = [
            getattr(table, name)[rows] for table, rows in zip(self._tables, self._in_table, strict=True)
        ]
        return np.concatenate([*columns, np.zeros(0, np.int64)])
