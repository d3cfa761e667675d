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

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from blockkv.format import record
from blockkv.format.geometry import unit_count
from blockkv.format.record import summary_of
from blockkv.space.allocator import Extent


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
    """Chunks by digest, least recently used first: `entries` in that order, to begin with."""

    def __init__(self, entries: Mapping[bytes, Entry] | None = None) -> None:
        self._entries: OrderedDict[bytes, Entry] = OrderedDict(entries or {})
        self.record_bytes = sum(entry.record_bytes for entry in self)
        self.payload_bytes = sum(entry.payload_bytes for entry in self)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, digest: bytes) -> Entry | None:
        """The entry, without touching its place in the eviction order."""
        return self._entries.get(digest)

    def touch(self, digest: bytes) -> None:
        """Make an entry the last to be evicted. Unknown digests are ignored."""
        if digest in self._entries:
            self._entries.move_to_end(digest)

    def insert(self, entry: Entry) -> None:
        """Add an entry, most recently used. The digest must not be present."""
        assert entry.digest not in self._entries
        self._entries[entry.digest] = entry
        self.record_bytes += entry.record_bytes
        self.payload_bytes += entry.payload_bytes

    def remove(self, digest: bytes) -> Entry | None:
        """Take an entry out, or None if there is none."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.record_bytes -= entry.record_bytes
            self.payload_bytes -= entry.payload_bytes
        return entry

    def victims(self) -> Iterator[Entry]:
        """Entries that may leave, first to go first. Do not change the index while iterating."""
        return (entry for entry in self._entries.values() if not (entry.leases or entry.pins))

    def snapshot(self) -> list[Entry]:
        """All entries in eviction order, as of now."""
        return list(self._entries.values())

    def by_log_sequence(self, after_sequence: int) -> tuple[list[bytes], int]:
        """The digests of chunks with a later log sequence, in its order, and their payload bytes in all."""
        later = [entry for entry in self if entry.log_sequence > after_sequence]
        later.sort(key=lambda entry: entry.log_sequence)
        return [entry.digest for entry in later], sum(entry.payload_bytes for entry in later)
