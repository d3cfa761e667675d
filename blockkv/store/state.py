"""The mutable state of an open store and the few moves that keep it consistent.

Everything here is called with `lock` held and does no I/O. What a move makes necessary on the device goes
into the pending commit group; extents come back to the allocator when that group is durable and the last
reader is gone.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType

from blockkv.catalog.index import Acquired, Entry, Index
from blockkv.catalog.layouts import Layout, Layouts
from blockkv.device.base import UNIT_BYTES, Batch, Device, Priority
from blockkv.errors import BlockKVError
from blockkv.format import record
from blockkv.format.checkpoint import bodies_of
from blockkv.format.geometry import PAGE_BYTES, Geometry
from blockkv.format.page import PAGE_PAYLOAD_BYTES
from blockkv.format.superblock import slots_of
from blockkv.logs import logger_for
from blockkv.space.allocator import Allocator, Extent
from blockkv.store.data_path import DataPath, Options
from blockkv.store.discards import Discards
from blockkv.store.keeping import Keeping
from blockkv.store.log import Log
from blockkv.store.recovery import Recovered
from blockkv.store.verify import confirm_damage
from blockkv.store.watch import Watch

EVICT_SHARE = 128
"""When full, evict at least 1/128 of the data zone, up to EVICT_LIMIT_UNITS: each round costs one flush."""
EVICT_LIMIT_UNITS = (64 << 20) // UNIT_BYTES
GROWING = "a chunk is growing under this key; seal or abandon it first"
"""Why a key that is reserved is neither put, nor deleted, nor reserved again."""
DELETES_PRUNED_AT = 4096
"""Deletes remembered before those that have become durable are forgotten."""


SNAPSHOT_PAGES = 64
"""Page bodies of a checkpoint made at a time. Between them other threads get the lock, and Python's own."""


class _Changing:
    """The state's lock, and the rule that a change which did not finish ends all writing.

    Nothing can tell how far it came: what is on the device is right, what is in memory may not be.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state.lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, BlockKVError):
            self._state.log.fail(error)
        self._state.lock.release()


class State(DataPath):
    """Index, free map, layouts, log and counters of one open store, under one lock."""

    def __init__(self, device: Device, recovered: Recovered, options: Options) -> None:
        self.device = device
        self.options = options
        self.geometry: Geometry = recovered.superblock.geometry
        self.index: Index = recovered.index
        self.layouts: Layouts = recovered.layouts
        self.allocator: Allocator = recovered.allocator
        self.read_only_reason = recovered.read_only_reason
        self.lock = threading.RLock()
        self.changing = _Changing(self)
        """`with state.changing:` round every change of more than one of these structures."""
        self.changed = threading.Condition(self.lock)
        self.counters: Counter[str] = Counter()
        self.scrub_finished_at = 0.0
        """When the last pass of a scrub ended (`time.time`); 0 when none has since open."""
        self.claims: set[bytes] = set()
        """Digests of keys being written."""
        self.store_bytes = 0
        self.reserved: dict[bytes, tuple[Extent, ...]] = {}
        """Extents of growing chunks that no entry of the index has, by digest."""
        self.reserved_record_bytes = 0
        """Record bytes of chunks being written: they will need room in the next checkpoint too."""
        self._deletes: dict[bytes, int] | None = {} if recovered.superblock.array else None
        """Of a member of an array: digests of deleted keys, and the log sequence of the DELETE."""
        self._deletes_limit = DELETES_PRUNED_AT
        self._deleted: dict[int, int] = {}
        """Chunks deleted while leased, by their place in the index: the log sequence of their DELETE."""
        # A page is closed by the first record that does not fit: two in succession hold more than one can.
        # The layouts at both ends begin pages of their own.
        self._record_limit_bytes = (self.geometry.checkpoint_pages - 2) * PAGE_PAYLOAD_BYTES // 2
        self.discards: Discards | None = None
        if options.discard and not self.read_only_reason:
            self.discards = Discards(
                device,
                self.geometry,
                self.allocator,
                self.lock,
                self.changed,
                self.counters,
                options.discard_bytes_per_s,
            )
        budget = options.policies.write_budget
        # Its own: members of an array are given the same one.
        self.write_budget = budget.shared(1) if budget is not None else None
        self.log = Log(
            device,
            recovered.superblock,
            recovered.tail,
            self.lock,
            self.allocator,
            lambda: StateSnapshot(self),
            self._freed,
            self.wear,
        )
        if not self.read_only_reason:
            self.wear(len(slots_of(0)) * PAGE_BYTES)  # the superblock of this open
        self.watches: list[Watch] = []
        """Who is told of every chunk that comes and goes."""
        self.keeping: Keeping | None = None
        """None as long as only the least recently used leave, and everything may come in and stay."""
        if not options.policies.are_default and not self.read_only_reason:
            self.keep()
        with self.lock:
            for digest, extents in recovered.dropped:
                # Their pages say PUT and count as flushed once this epoch's first page is written; only a
                # DELETE in that group keeps the next recovery from trusting them.
                self.defer(extents, self._append_deletes([digest]))

    # -- chunks ----------------------------------------------------------------------------------------

    def insert(
        self,
        batch: Batch,
        numbers: Sequence[int],
        *,
        digests: Sequence[bytes],
        keys: Sequence[bytes],
        keys_are_text: bytes,
        layouts: Sequence[Layout],
        record_bytes_at_most: int,
    ) -> int:
        """Make chunks visible that these transfers of a batch have written, and log them.

        The other sequences go with `numbers`. Returns the log sequence of the last.
        """
        layout_ids: dict[int, int] = {}
        distinct = {id(layout): layout for layout in layouts}
        for one, count in Counter(map(id, layouts)).items():
            layout_id, is_new = self.layouts.acquire(distinct[one], count)
            if is_new:
                body = distinct[one].body
                self.log.append([record.encode_layout(self.log.next_log_sequences(), layout_id, body)])
            layout_ids[one] = layout_id
        records = self.index.insert_many(
            batch,
            numbers,
            first_log_sequence=self.log.next_log_sequences(len(numbers)),
            digests=digests,
            keys=keys,
            keys_are_text=keys_are_text,
            layout_ids=array("I", [layout_ids[id(layout)] for layout in layouts]),
            layout_checksums=b"".join([layout.digest for layout in layouts]),
            base_bytes=self.geometry.data.offset_bytes,
            room_bytes=record_bytes_at_most,
        )
        if self.keeping is not None:
            self.keeping.inserted(digests, keys)
        for watch in self.watches:
            for digest, key, is_text, layout in zip(digests, keys, keys_are_text, layouts, strict=True):
                told = key.decode(errors="replace") if is_text else key
                watch.stored(digest, told, layout.payload_bytes)
        return self.log.append(records)

    def wear(self, size_bytes: int) -> None:
        """So much is being written that no put has asked the write budget for. Takes the lock."""
        if self.write_budget is not None:
            with self.lock:
                self.write_budget.charge(size_bytes)

    def afford(self, units: Sequence[int]) -> int:
        """How many chunks of so many units each the write budget lets in, and is charged for, in order."""
        budget = self.write_budget
        if budget is None:
            return len(units)
        for number, count in enumerate(units):
            if not budget.admits(count * UNIT_BYTES):
                self.counters["put_over_budget"] += len(units) - number
                return number
        return len(units)

    def refund(self, units: int) -> None:
        """Chunks of so many units that it was charged for are not written."""
        if self.write_budget is not None:
            self.write_budget.refund(units * UNIT_BYTES)

    def delete(self, entry: Entry) -> int:
        """Remove an indexed entry and log it. Its extents come back once that is durable.

        Returns the log sequence of the DELETE.
        """
        leased = self.index.leases(entry)
        self._forget(entry)
        log_sequence = self._append_deletes([entry.digest])
        if leased:
            self._deleted[entry.place] = log_sequence
        else:
            self.defer(entry.extents, log_sequence)
        return log_sequence

    def drop_damaged(self, entry: Entry) -> None:
        """Remove an entry whose bytes do not verify; its extents stay unused while the store is open."""
        if not self.index.holds(entry):
            return
        self._forget(entry)
        self._append_deletes([entry.digest])
        self.allocator.quarantine(entry.extents)
        self.counters["chunks_dropped_damaged"] += 1
        # Not its key: that may be a prompt.
        logger_for(self.device.path, key_digest=entry.digest.hex(), chunk_bytes=entry.payload_bytes).warning(
            "a chunk of %d bytes did not verify and was dropped; key digest %s...",
            entry.payload_bytes,
            entry.digest[:8].hex(),
        )

    def acquire(self, digests: Sequence[bytes], deadline_ns: int = 0) -> tuple[Acquired, list[Layout]]:
        with self.lock:
            found = self.index.acquire(digests)
            layouts = list(map(self.layouts.__getitem__, found.layout_ids))
            if len(layouts) < len(digests):
                self.counters["get_misses"] += len(digests) - len(layouts)
        return found, layouts

    def confirm_damage(self, priority: Priority, chunks: Sequence[tuple[Entry, Layout]]) -> list[bool]:
        return confirm_damage(self.device, self.geometry, priority, chunks)

    def lease(self, entry: Entry) -> None:
        """Keep the entry's extents from being reused until `release`."""
        self.index.lease(entry)

    def release(self, places: array[int]) -> None:
        """Give leases back, by the places of entries; the last one lets the extents of a deleted chunk go."""
        for entry in self.index.release(places):
            # One that was dropped as damaged is not in there, and its extents are in quarantine.
            log_sequence = self._deleted.pop(entry.place, 0)
            if log_sequence:
                self.defer(entry.extents, log_sequence)
        self.changed.notify_all()

    def evict(self, units: int) -> int:
        """Delete least recently used chunks that hold at least `units` together, or what there is.

        Returns how many units will come back when their deletes are durable.
        """
        self.expire()
        wanted = max(units, min(self.geometry.data_units // EVICT_SHARE, EVICT_LIMIT_UNITS))
        keeping = self.keeping
        return self.evict_all(
            self.index.first_victims(wanted) if keeping is None else keeping.victims(wanted)
        )

    def evict_all(self, places: array[int]) -> int:
        """Delete the chunks at these places, which nobody reads, to make room; returns what `evict` does."""
        leaving = [self.index.at(place) for place in places] if self.watches else []
        taken = self.index.take(places)
        if not taken.digests:
            return 0
        self._tell_removed(leaving)
        if self.keeping is not None:
            self.keeping.left(taken.digests)
        for layout_id, count in Counter(taken.layout_ids).items():
            self.layouts.release(layout_id, count)
        self.defer(taken.extents, self._append_deletes(taken.digests))
        self.counters["chunks_evicted"] += len(taken.digests)
        self.counters["bytes_evicted"] += taken.payload_bytes
        return sum(count for _, count in taken.extents)

    def keep(self) -> Keeping:
        """What policies, priorities and the rest need: made now, if nothing has needed it so far."""
        if self.keeping is None:
            self.keeping = Keeping(self.index, self.options.policies)
        return self.keeping

    def expire(self) -> None:
        """Delete chunks whose time to live is over."""
        if self.keeping is None:
            return
        expired = self.keeping.expired()
        if expired:
            with self.changing:
                self.counters["chunks_expired"] += self._delete_all(expired)

    def keep_quotas(self) -> None:
        """Evict from families that are above their quota, until they are not."""
        if self.keeping is not None:
            with self.changing:
                for digest in self.keeping.excess():
                    entry = self.index.get(digest)
                    assert entry is not None
                    self.delete(entry)
                    self.counters["chunks_evicted"] += 1
                    self.counters["bytes_evicted"] += entry.payload_bytes

    def _delete_all(self, digests: Sequence[bytes]) -> int:
        entries = [entry for digest in digests if (entry := self.index.get(digest)) is not None]
        for entry in entries:
            self.delete(entry)
        return len(entries)

    @property
    def record_room_bytes(self) -> int:
        """How many more bytes of records the next checkpoint can hold."""
        used = self.index.record_bytes + self.reserved_record_bytes + 2 * self.layouts.body_bytes
        return self._record_limit_bytes - used

    def replace(self, old: Entry | None, records: Sequence[bytes]) -> Entry:
        """Log a PUT and make its chunk visible in place of `old`, with its pins; nobody may be reading that.

        The extents of `old` are the caller's again. The layout was acquired for the new chunk.
        """
        pins = 0
        if old is not None:
            pins = self.index.pins(old)
            self._forget(old)
        entry = self.index.insert(b"".join(records))
        if self.keeping is not None:
            self.keeping.inserted([entry.digest], [entry.key])
        for watch in self.watches:
            watch.stored(entry.digest, entry.key, entry.payload_bytes)
        if pins:
            self.index.pin(entry.digest, pins)
        self.log.append(records)
        return entry

    def grows(self, digest: bytes) -> bool:
        return digest in self.reserved

    def any_leased(self) -> bool:
        """Whether extents are held that come back by themselves: by readers, or for a discard."""
        return self.index.any_leased or self.allocator.withheld_units > 0

    def deletes_undurably(self, digest: bytes) -> bool:
        """Whether this member of an array has deleted the key and a crash may still bring it back."""
        deletes = self._deletes
        return deletes is not None and deletes.get(digest, 0) > self.log.durable_sequence

    def _forget(self, entry: Entry) -> None:
        removed = self.index.remove(entry.digest)
        assert removed == entry
        self.layouts.release(entry.layout_id)
        if self.keeping is not None:
            self.keeping.left([entry.digest])
        self._tell_removed([entry])

    def unwatch(self, watch: Watch) -> None:
        """Tell it nothing more. The caller need not hold the lock."""
        with self.lock:
            if watch in self.watches:
                self.watches.remove(watch)

    def _tell_removed(self, entries: Sequence[Entry]) -> None:
        for watch in self.watches:
            for entry in entries:
                watch.removed(entry.digest, entry.key, entry.payload_bytes)

    def _append_deletes(self, digests: Sequence[bytes]) -> int:
        """Log that these chunks are gone. Returns the log sequence of the last DELETE."""
        first = self.log.next_log_sequences(len(digests))
        last = self.log.append(record.encode_deletes(first, digests))
        if self._deletes is not None:
            self._deletes.update(zip(digests, range(first, last + 1), strict=True))
            if len(self._deletes) > self._deletes_limit:
                durable = self.log.durable_sequence
                self._deletes = {
                    one: sequence for one, sequence in self._deletes.items() if sequence > durable
                }
                self._deletes_limit = DELETES_PRUNED_AT + 2 * len(self._deletes)
        return last

    def defer(self, extents: Sequence[Extent], log_sequence: int) -> None:
        """Let live extents come back once the record `log_sequence` is durable."""
        self.allocator.defer(extents, log_sequence)
        if log_sequence <= self.log.durable_sequence:
            self.allocator.settle(self.log.durable_sequence)
            self._freed()

    def stop(self) -> None:
        """End the background threads. The caller does not hold the lock."""
        if self.discards is not None:
            self.discards.stop()
        self.log.stop()

    def _freed(self) -> None:
        if self.discards is not None:
            self.discards.wake()


class StateSnapshot:
    """What a checkpoint holds: see `blockkv.store.log.Snapshot`. Made with the lock held."""

    def __init__(self, state: State) -> None:
        self._lock = state.lock
        self._layouts = [
            record.encode_layout(0, layout_id, layout.body) for layout_id, layout in state.layouts
        ]
        self._records = state.index.snapshot()
        self.next_layout_id = state.layouts.next_id

    def bodies(self) -> Iterator[tuple[bytes, int]]:
        """Page bodies and their record counts. The lock is held for a slice at a time."""
        # Layouts are written at both ends, so that no single damaged page loses them.
        yield from bodies_of(self._layouts)
        while True:
            with self._lock:
                bodies = self._records.bodies(SNAPSHOT_PAGES)
            if not bodies:
                break
            yield from bodies
        yield from bodies_of(self._layouts)

    def close(self) -> None:
        """Let another one be made."""
        with self._lock:
            self._records.close()
