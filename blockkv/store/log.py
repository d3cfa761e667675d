"""Group commit and checkpoint: the order in which metadata reaches the device.

One commit group is one burst of journal pages and one flush::

    commit       pages of the group -> completions -> FLUSH -> group durable -> its freed extents reusable
    checkpoint   snapshot of the index -> inactive area -> FLUSH
                 -> superblock generation + 1: head, FLUSH, tail, FLUSH -> older pages reusable
    grow         old tail, copied to where the new one will be -> FLUSH -> checkpoint, as above, with the new
                 zones in the superblock -> three more superblocks, so that every slot has them

Data writes complete before their record enters a group, so the group's one flush covers them too. It
needs no FUA. A page may still land while data it names does not, which is why pages carry the sequence
known to be flushed and recovery reads the payload of everything later (`blockkv.store.recovery`).

Invariants
  * a group is durable only when everything logged before it is (groups become durable in order);
  * records with a log sequence number up to the checkpoint's are part of the checkpoint and are skipped
    when pages written after its anchor name them again;
  * a journal page is overwritten only after a superblock whose anchor lies behind it is durable;
  * a failed page, flush or superblock write ends all writing: it is never retried, because the kernel may
    have dropped the data and reported the failure only once.

Lock order: `_checkpoint_lock`, then `_commit_lock`, then the store's lock (`_lock`).
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blockkv.device.base import Batch, Device, Direction, Placement, Priority, device_error
from blockkv.errors import BlockKVError, DeviceError, StoreFull, StoreReadOnly
from blockkv.format import checkpoint
from blockkv.format.geometry import PAGE_BYTES, SLOTS_PER_COPY, Geometry
from blockkv.format.journal import build_pages
from blockkv.format.page import PAGE_PAYLOAD_BYTES, checksum_of
from blockkv.format.superblock import Membership, Superblock, slots_of
from blockkv.logs import described, logger_for
from blockkv.space.allocator import Allocator

CHECKPOINT_AT = 0.5
"""Share of the journal in use at which a checkpoint starts in the background."""
BLOCK_AT = 0.9
"""Share of the journal in use at which commits wait for a checkpoint."""
CHECKPOINT_WRITE_BYTES = 4 << 20
"""Checkpoint pages handed to the device at a time."""


@dataclass(slots=True)
class Group:
    """Records that become durable together."""

    last_sequence: int
    """Log sequence of the last record, or where there is none of the last one before."""
    records: list[bytes] = field(default_factory=list)
    record_bytes: int = 0


@dataclass(slots=True)
class Tail:
    """Where the journal goes on."""

    next_sequence: int
    predecessor: bytes
    sealed_sequence: int
    next_log_sequence: int


class Snapshot(Protocol):
    """Every record a checkpoint holds, as of the moment it was taken."""

    next_layout_id: int

    def bodies(self) -> Iterator[tuple[bytes, int]]:
        """Page bodies, in the order to write them, and the number of records in each. Takes the lock."""

    def close(self) -> None:
        """Let it go. The caller holds no lock."""


class Log:
    """The journal, the checkpoints and the superblock of one open store."""

    def __init__(
        self,
        device: Device,
        superblock: Superblock,
        tail: Tail,
        lock: threading.RLock,
        allocator: Allocator,
        take_snapshot: Callable[[], Snapshot],
        on_freed: Callable[[], None] = lambda: None,
        on_written: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        """`on_freed` is called with the lock held when space has become free, `on_written` without it with
        the bytes of pages, checkpoints and superblocks that have been written.
        """
        self.superblock = superblock
        self.geometry: Geometry = superblock.geometry
        self.failure: BaseException | None = None
        self.durable_sequence = tail.next_log_sequence - 1
        self.recovered_sequence = self.durable_sequence
        """The newest log sequence that was on the device when this epoch began."""
        """Every record up to this log sequence is on media."""
        self.groups_committed = 0
        self.pages_written = 0
        self.checkpoints_written = 0
        self._on_written = on_written
        self.checkpoint_s = 0.0
        self.scrub_sequence = superblock.scrub_sequence
        """Up to which log sequence the scrub under way has verified; 0 when there is none."""
        self._device = device
        self._tail = tail
        self._lock = lock
        self._allocator = allocator
        self._take_snapshot = take_snapshot
        self._on_freed = on_freed
        self._pending = Group(self.durable_sequence)
        self._commit_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._thread: threading.Thread | None = None
        self._stopping = False

    # -- filling the pending group (store lock held) ---------------------------------------------------

    def next_log_sequences(self, count: int = 1) -> int:
        """The first of `count` numbers for the next records, which are appended before the lock is let go."""
        first = self._tail.next_log_sequence
        self._tail.next_log_sequence += count
        return first

    @property
    def newest_log_sequence(self) -> int:
        """The number of the last record."""
        return self._tail.next_log_sequence - 1

    def append(self, records: Iterable[bytes]) -> int:
        """Add encoded records to the pending group. Returns the log sequence of the last. Store lock held."""
        group = self._pending
        for record in records:
            group.records.append(record)
            group.record_bytes += len(record)
        group.last_sequence = self.newest_log_sequence
        self._work.notify()
        return group.last_sequence

    # -- commit ----------------------------------------------------------------------------------------

    def commit(self, log_sequence: int | None = None) -> None:
        """Return once the record of `log_sequence` (default: everything appended so far) is durable.

        Raises StoreReadOnly when the log cannot be written any more.
        """
        with self._lock:
            newest = self._pending.last_sequence
        wanted = newest if log_sequence is None else min(log_sequence, newest)
        while wanted > self.durable_sequence:
            if not self._commit_pending(wanted):
                self.checkpoint(
                    needed=lambda: wanted > self.durable_sequence and not self._fits(self._pending)
                )

    def flush_payload(self) -> None:
        """Make payload writes that completed durable, ahead of their record. Raises StoreReadOnly.

        For a record that takes the place of a durable one: recovery drops a key whose newest record names
        payload that is not there, and does not go back to the one before.
        """
        self.check_writable()
        try:
            self._device.flush()
        except DeviceError as error:
            self.fail(error)
            raise self._refusal() from error

    def _commit_pending(self, wanted: int) -> bool:
        """Write the pending group unless `wanted` is durable already; False when the journal is too full."""
        with self._commit_lock:
            self.check_writable()
            if wanted <= self.durable_sequence:
                return True
            with self._lock:
                group = self._pending
                if not self._fits(group):
                    return False
                self._pending = Group(group.last_sequence)
            try:
                self._write_pages(group)
                self._settle(group)
            except DeviceError as error:
                self.fail(error)
                raise self._refusal() from error
            except BaseException as error:
                self.fail(error)  # how far it came is unknown; its sequence may be on the device already
                raise
        return True

    def _fits(self, group: Group) -> bool:
        # The records of two neighbouring pages together exceed one page, or they would share it.
        pages = 2 * group.record_bytes // PAGE_PAYLOAD_BYTES + 1
        used = self._tail.next_sequence - self.superblock.replay_from_sequence
        return used + pages <= int(self.geometry.journal_pages * BLOCK_AT)

    @property
    def journal_used(self) -> float:
        """Share of the journal that a recovery would have to replay."""
        used = self._tail.next_sequence - self.superblock.replay_from_sequence
        return used / self.geometry.journal_pages

    def _checkpoint_due(self) -> bool:
        return self.journal_used >= CHECKPOINT_AT

    def _write_pages(self, group: Group) -> None:
        pages = build_pages(
            group.records,
            next_sequence=self._tail.next_sequence,
            predecessor=self._tail.predecessor,
            epoch=self.superblock.epoch,
            store_id=self.superblock.uuid,
            sealed_sequence=self._tail.sealed_sequence,
            journal_pages=self.geometry.journal_pages,
        )
        write_all(self._device, [(self.geometry.journal_offset(index), page) for index, page in pages])
        self._device.flush()
        self._tail.next_sequence += len(pages)
        self._tail.predecessor = checksum_of(pages[-1][1])
        self._tail.sealed_sequence = self._tail.next_sequence - 1
        self.pages_written += len(pages)
        self._on_written(len(pages) * PAGE_BYTES)

    def _settle(self, group: Group) -> None:
        """The group is on media: what it deleted becomes free."""
        with self._lock:
            self.durable_sequence = group.last_sequence
            self.groups_committed += 1
            if self._allocator.settle(group.last_sequence):
                self._on_freed()

    # -- checkpoint ------------------------------------------------------------------------------------

    def checkpoint(
        self, *, needed: Callable[[], bool] | None = None, clean: bool = False, hold_commits: bool = True
    ) -> None:
        """Write the whole index to the inactive area and move the superblock to it.

        `needed` is asked once the checkpoint's turn has come; another one may have made it unnecessary.
        With `hold_commits` no group is committed meanwhile and everything appended before becomes durable
        with the checkpoint; without it commits go on, behind the checkpoint's anchor. Raises StoreReadOnly
        or StoreFull (the checkpoint area is too small for the index).
        """
        with self._checkpoint_lock:
            self._commit_lock.acquire()
            held = True
            try:
                self.check_writable()
                if needed is not None and not needed():
                    return
                started = time.monotonic()
                with self._lock:
                    snapshot = self._take_snapshot()
                    log_sequence = self._tail.next_log_sequence - 1
                    covered: Group | None = None
                    if hold_commits:
                        covered = self._pending
                        self._pending = Group(covered.last_sequence)
                    anchor = dataclasses.replace(self._tail)
                    scrub_sequence = self.scrub_sequence
                if not hold_commits:
                    self._commit_lock.release()
                    held = False
                try:
                    superblock = self._write_checkpoint(snapshot, log_sequence, anchor, clean)
                    superblock = dataclasses.replace(superblock, scrub_sequence=scrub_sequence)
                    self._write_superblock(superblock)
                except DeviceError as error:
                    self.fail(error)
                    raise self._refusal() from error
                except StoreFull:
                    if covered is not None:
                        with self._lock:
                            covered.records.extend(self._pending.records)
                            covered.record_bytes += self._pending.record_bytes
                            covered.last_sequence = self._pending.last_sequence
                            self._pending = covered
                    raise
                except BaseException as error:
                    self.fail(error)
                    raise
                finally:
                    snapshot.close()
                self.superblock = superblock
                self.checkpoints_written += 1
                self.checkpoint_s += time.monotonic() - started
                if covered is not None:
                    self._settle(covered)
            finally:
                if held:
                    self._commit_lock.release()

    def _write_superblock(self, superblock: Superblock) -> None:
        write_superblock(self._device, superblock)
        self._on_written(len(slots_of(superblock.generation)) * PAGE_BYTES)

    def _write_checkpoint(
        self,
        snapshot: Snapshot,
        log_sequence: int,
        anchor: Tail,
        clean: bool,
    ) -> Superblock:
        area = 1 - self.superblock.checkpoint_area
        zone = self.geometry.checkpoints[area]
        checkpoint_id = os.urandom(16)
        offset, page_count, record_count = zone.offset_bytes, 0, 0
        burst: list[bytes] = []

        def write_burst() -> None:
            nonlocal offset
            data = b"".join(burst)
            if offset + len(data) > zone.offset_bytes + zone.size_bytes:
                raise StoreFull(
                    f"the index needs more than the {zone.size_bytes} bytes of a checkpoint area; "
                    "format with a smaller --average-chunk to keep this many chunks"
                )
            self._device.write(offset, data)
            self._on_written(len(data))
            offset += len(data)
            burst.clear()

        def counted_bodies() -> Iterator[tuple[bytes, int]]:
            nonlocal record_count
            for body, records in snapshot.bodies():
                record_count += records
                yield body, records

        for page in checkpoint.pages(
            counted_bodies(), self.superblock.uuid, checkpoint_id, self.superblock.epoch
        ):
            burst.append(page)
            page_count += 1
            if len(burst) * PAGE_BYTES >= CHECKPOINT_WRITE_BYTES:
                write_burst()
        if burst:
            write_burst()
        self._device.flush()
        return dataclasses.replace(
            self.superblock,
            generation=self.superblock.generation + 1,
            geometry=self.geometry,
            checkpoint_area=area,
            checkpoint_id=checkpoint_id,
            checkpoint_page_count=page_count,
            checkpoint_record_count=record_count,
            log_sequence=log_sequence,
            replay_from_sequence=anchor.next_sequence,
            replay_predecessor=anchor.predecessor,
            next_layout_id=snapshot.next_layout_id,
            clean=clean,
        )

    def renew_superblock(self, count: int = 1, array: Membership | None = None) -> None:
        """Make everything durable, then go on by `count` superblocks that name the same checkpoint.

        As many as a copy has slots make all slots valid again. `array` is the new place of a member of one.
        Raises StoreReadOnly.
        """
        with self._lock:
            scrub_sequence = self.scrub_sequence
        self.commit()
        with self._checkpoint_lock:
            self.check_writable()
            for _ in range(count):
                superblock = dataclasses.replace(
                    self.superblock,
                    generation=self.superblock.generation + 1,
                    scrub_sequence=scrub_sequence,
                    array=array or self.superblock.array,
                )
                try:
                    self._write_superblock(superblock)
                except DeviceError as error:
                    self.fail(error)
                    raise self._refusal() from error
                except BaseException as error:
                    self.fail(error)
                    raise
                self.superblock = superblock

    def grow(self, geometry: Geometry) -> None:
        """Make everything durable, with the zones of `geometry` from now on (`format.geometry.grown`).

        Until a superblock says so nothing is written that the old zones know of. The space that is new is
        not handed out before the store is opened again. Raises DeviceError (nothing has changed),
        StoreReadOnly.
        """
        old, new = self.geometry.slot_offsets, geometry.slot_offsets
        # With what they say now the new slots are what a tail is whose newest superblocks have not arrived.
        # Everything else there, to the end of the device, might be taken for something by somebody. A wrapped
        # volume key must not be where nobody knows, if this is cut short: then the slots are blank.
        tail_offset = new[SLOTS_PER_COPY]
        tail = bytearray((geometry.device_bytes - tail_offset) // PAGE_BYTES * PAGE_BYTES)
        for offset, new_offset in zip(old[SLOTS_PER_COPY:], new[SLOTS_PER_COPY:], strict=True):
            within = new_offset - tail_offset
            if not self._device.cipher_key:
                tail[within : within + PAGE_BYTES] = self._device.read(offset, PAGE_BYTES)
        self._device.write(tail_offset, bytes(tail))
        self._device.flush()
        self._on_written(len(tail))
        if (
            self._device.cipher_key
        ):  # from here on the old tail is payload, or will be, like what is behind it
            zone = geometry.encrypted_zone
            self._device.encrypt(self._device.cipher_key, zone.offset_bytes, zone.end_bytes)
        self.geometry = geometry
        self.checkpoint()
        self._clear(old[SLOTS_PER_COPY:])
        self.renew_superblock(SLOTS_PER_COPY - 1)

    def _clear(self, superblock_offsets: Sequence[int]) -> None:
        """Superblocks of a smaller device: what a volume key was wrapped in must not outlive its key slot.

        What a crash in between leaves, `old_tails` clears, while there are superblocks that tell of it.
        """
        try:
            for offset in superblock_offsets:
                self._device.write(offset, bytes(PAGE_BYTES))
            self._device.flush()
        except DeviceError as error:
            self.fail(error)
            raise self._refusal() from error
        self._on_written(len(superblock_offsets) * PAGE_BYTES)

    # -- failure ---------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Raises StoreReadOnly once a metadata write has failed."""
        if self.failure is not None:
            raise self._refusal()

    def _refusal(self) -> StoreReadOnly:
        assert self.failure is not None
        return StoreReadOnly(
            f"{self._device.path}: no more writes since a metadata write failed: {described(self.failure)}"
        )

    def fail(self, error: BaseException) -> None:
        """End all writing because of `error`."""
        if self.failure is None:
            self.failure = error
            logger_for(self._device.path, error=error).error(
                "the store is read-only now: %s", described(error)
            )

    # -- background ------------------------------------------------------------------------------------

    def start(self, interval_s: float) -> None:
        """Commit in the background, at most `interval_s` after a record was appended."""
        self._thread = threading.Thread(
            target=self._run, args=(interval_s,), name="blockkv-commit", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the background thread; nothing is committed any more unless asked for."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, interval_s: float) -> None:
        while True:
            with self._lock:
                while not (self._stopping or (self._pending.records and self.failure is None)):
                    self._work.wait()
                if not self._stopping:
                    self._work.wait_for(lambda: self._stopping, interval_s)
                if self._stopping:
                    return
            try:
                self.commit()
                if self._checkpoint_due():
                    self.checkpoint(needed=self._checkpoint_due, hold_commits=False)
            except BlockKVError as error:
                logger_for(self._device.path).error("background commit: %s", error)


def write_all(device: Device, pieces: list[tuple[int, bytes]]) -> None:
    """Write (device offset, bytes) pieces in one batch, unordered. Raises DeviceError for the first."""
    batch = Batch(Direction.WRITE, Priority.LOAD)
    batch.placement = Placement.METADATA
    memory = bytearray(b"".join(data for _, data in pieces))
    address = address_of(memory)
    batch.keepalive.append(memory)
    for offset, data in pieces:
        batch.add(len(data), [(offset, len(data))], [(address, len(data))])
        address += len(data)
    device.submit(batch)
    device.wait(batch)
    for position, (offset, data) in enumerate(pieces):
        code = batch.result(position)
        if code:
            raise device_error(device.path, f"write of {len(data)} bytes at {offset}", code)


def write_superblock(device: Device, superblock: Superblock) -> None:
    """Make `superblock` the newest: head copy, flush, tail copy, flush. Raises DeviceError."""
    offsets = superblock.geometry.slot_offsets
    for slot_index in slots_of(superblock.generation):
        device.write(offsets[slot_index], superblock.encode(slot_index))
        device.flush()


def address_of(memory: bytearray) -> int:
    """The address of a bytearray's bytes; valid while it is alive and not resized."""
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
