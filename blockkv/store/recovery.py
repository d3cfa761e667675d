"""Opening a store: from bytes on a device to an index, a free map and the place where the log goes on.

Order: flush (a killed process may have left writes in the drive's cache) -> newest valid superblock ->
its checkpoint -> journal pages from the anchor -> payload of records that were not known to be flushed.
Recovery changes nothing on the device; the caller writes one superblock afterwards, in a slot nobody
needs, so it can be cut short and repeated at will.

What does not verify is dropped and counted, never repaired: a damaged checkpoint page costs its records, a
journal page that is not the next one ends the replay. Where two records claim the same units (a checkpoint
page that could not be read last time and can now) the later one holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockkv.catalog.index import Entry, Index
from blockkv.catalog.layouts import Layout, Layouts
from blockkv.device.base import Device
from blockkv.errors import DeviceError, DeviceLost, DeviceTooSmall, FormatError, InvalidArgument
from blockkv.format import record, superblock
from blockkv.format.checkpoint import CheckpointReader
from blockkv.format.geometry import PAGE_BYTES, SLOT_COUNT, slot_offsets
from blockkv.format.journal import EndReason, Replay, ReplayEnd
from blockkv.format.page import COUNTER_LIMIT
from blockkv.format.record import LayoutRecord, Operation, RecordView
from blockkv.format.superblock import Superblock
from blockkv.space.allocator import Allocator, Extent
from blockkv.store.log import Tail
from blockkv.store.verify import verify_chunks

logger = logging.getLogger("blockkv")

READ_AHEAD_BYTES = 4 << 20
"""Metadata read in one piece while the checkpoint and the journal are scanned."""
JOURNAL_READ_PAGES = 64
"""Journal pages read ahead at first; doubled with every read, so a short log costs one small read."""


EXHAUSTED_AT = COUNTER_LIMIT // 2
"""From here on a store is not written any more: what it counts to must stay below the limit of the format."""

SMALLEST_BYTES = 4 << 20
"""No store fits on less, and its superblock slots would not lie apart."""


@dataclass(slots=True)
class RecoveryReport:
    """What an open found. All zero after a clean shutdown, except `checkpoint_chunks`."""

    was_clean: bool = False
    checkpoint_chunks: int = 0
    checkpoint_pages_damaged: int = 0
    checkpoint_records_lost: int = 0
    journal_pages_replayed: int = 0
    journal_damaged: bool = False
    chunks_unsealed: int = 0
    """Chunks whose payload was read and verified because it was not known to be flushed."""
    chunks_dropped_unsealed: int = 0
    chunks_dropped_no_layout: int = 0
    chunks_dropped_overlap: int = 0


Dropped = tuple[bytes, tuple[Extent, ...]]
"""Key digest, and the extents that stay live until its delete is durable (none if another chunk has them)."""


@dataclass(slots=True)
class Recovered:
    """Everything the store needs to go on. `superblock` is the one found, not yet the next."""

    superblock: Superblock
    index: Index
    layouts: Layouts
    allocator: Allocator
    tail: Tail
    dropped: list[Dropped]
    """Chunks the log still names: this epoch's first group must delete them."""
    newest_epoch: int
    read_only_reason: str | None
    report: RecoveryReport


def read_superblock(device: Device) -> Superblock:
    """The newest valid superblock.

    Raises NotFormatted, VersionTooNew, DeviceTooSmall (the device shrank), DeviceLost.
    """
    size_bytes = device.limits.size_bytes
    if size_bytes >= SMALLEST_BYTES:
        slots = [_read_or_blank(device, offset, PAGE_BYTES) for offset in slot_offsets(size_bytes)]
    else:
        slots = [bytes(PAGE_BYTES)] * SLOT_COUNT
    found = superblock.choose(slots)
    if found.geometry.device_bytes > size_bytes:
        raise DeviceTooSmall(
            f"{device.path} has {size_bytes} bytes, but the store {found.uuid_text} on it was formatted for "
            f"{found.geometry.device_bytes}: the device shrank or this is a truncated copy"
        )
    return found


def recover(device: Device, found: Superblock, *, verify_unsealed: bool = True) -> Recovered:
    """Build the state of the store from `found`, its checkpoint and the journal. Writes nothing."""
    report = RecoveryReport(was_clean=found.clean)
    with _no_garbage_collection():
        entries, layouts = _load_checkpoint(device, found, report)
        report.checkpoint_chunks = len(entries)
        end, last_log_sequence, unsealed = _replay(device, found, entries, layouts, report)
        dropped = _drop_without_layout(entries, layouts, report)
        if verify_unsealed:
            dropped += _verify_unsealed(device, found, entries, layouts, unsealed, report)
        try:
            allocator = _allocator_beside(entries, dropped, found)
        except FormatError as error:
            logger.warning("%s: %s", device.path, error)
            dropped = _resolve_overlaps(entries, dropped, report)
            allocator = _allocator_beside(entries, dropped, found)
        for layout_id, count in Counter(entry.layout_id for entry in entries.values()).items():
            layouts.refer(layout_id, count)
        layouts.forget_unused()
        index = Index(entries)
    tail = Tail(end.next_sequence, end.predecessor, end.sealed_sequence, last_log_sequence + 1)
    _tell(device, report)
    return Recovered(
        found, index, layouts, allocator, tail, dropped, end.newest_epoch, found.read_only_reason, report
    )


def next_epoch(recovered: Recovered) -> Superblock:
    """The superblock that makes this open the only one whose pages count from here on.

    Raises FormatError where a counter is so close to its limit that no honest store can have come there.
    """
    found, tail = recovered.superblock, recovered.tail
    highest = max(
        found.generation, found.epoch, recovered.newest_epoch, tail.next_sequence, tail.next_log_sequence
    )
    if highest >= EXHAUSTED_AT:
        raise FormatError(
            f"a counter of the store {found.uuid_text} stands at {highest}: the image was forged, or is "
            "damaged in a way that its checksums do not show; open it with read_only=True to save its chunks"
        )
    return dataclasses.replace(
        found,
        generation=found.generation + 1,
        epoch=max(found.epoch, recovered.newest_epoch) + 1,
        epoch_start_sequence=recovered.tail.next_sequence,
        clean=False,
        next_layout_id=recovered.layouts.next_id,
        holder_boot_id=boot_id(),
        holder_pid=os.getpid(),
        holder_host=socket.gethostname(),
    )


def boot_id() -> str:
    """The kernel's boot id, for messages; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _load_checkpoint(
    device: Device, found: Superblock, report: RecoveryReport
) -> tuple[dict[bytes, Entry], Layouts]:
    entries: dict[bytes, Entry] = {}
    layouts = Layouts(found.next_layout_id)
    zone = found.checkpoint_zone
    length_bytes = found.checkpoint_page_count * PAGE_BYTES
    pieces = (
        _read_pages(device, zone.offset_bytes + done, min(READ_AHEAD_BYTES, length_bytes - done))
        for done in range(0, length_bytes, READ_AHEAD_BYTES)
    )
    reader = CheckpointReader(pieces, found)
    for view in reader:
        if view[0] == Operation.PUT:
            entries[view[2]] = Entry(view[2], view[1], view[3])
        else:
            _apply(view, entries, layouts)
    report.checkpoint_pages_damaged = reader.damaged_pages
    report.checkpoint_records_lost = reader.lost_records
    return entries, layouts


def _replay(
    device: Device, found: Superblock, entries: dict[bytes, Entry], layouts: Layouts, report: RecoveryReport
) -> tuple[ReplayEnd, int, list[Entry]]:
    """Apply the journal. Returns how it ended, the last log sequence, and entries that may lack payload."""
    replay = Replay(_JournalReader(device, found), found)
    last_log_sequence = found.log_sequence
    put_in_page: list[tuple[int, Entry]] = []
    for page in replay:
        report.journal_pages_replayed += 1
        for view in page.records:
            log_sequence = view[1]
            # Groups that were committed while the checkpoint was being written lie behind its anchor, but
            # what they did is part of it.
            if log_sequence <= found.log_sequence:
                continue
            last_log_sequence = max(last_log_sequence, log_sequence)
            entry = _apply(view, entries, layouts)
            if entry is not None:
                put_in_page.append((page.sequence, entry))
    end = replay.end
    report.journal_damaged = end.reason is EndReason.DAMAGED
    unsealed = [entry for sequence, entry in put_in_page if sequence > end.sealed_sequence]
    return end, last_log_sequence, unsealed


def _apply(view: RecordView, entries: dict[bytes, Entry], layouts: Layouts) -> Entry | None:
    """One record's effect. Returns the entry that a PUT made."""
    operation, log_sequence, digest, raw = view
    if operation == Operation.PUT:
        entry = Entry(digest, log_sequence, raw)
        entries.pop(digest, None)
        entries[digest] = entry
        return entry
    if operation == Operation.DELETE:
        entries.pop(digest, None)
    elif operation == Operation.KEY_TAIL:
        owner = entries.get(digest)
        if owner is not None and owner.log_sequence == log_sequence:
            owner.tail = raw
    else:
        defined = record.decode(raw)
        assert isinstance(defined, LayoutRecord)
        if defined.layout_id not in layouts:
            try:
                layouts.define(defined.layout_id, Layout.decode(defined.body))
            except ValueError as error:
                logger.warning("layout %d is not usable: %s", defined.layout_id, error)
    return None


def _drop_without_layout(
    entries: dict[bytes, Entry], layouts: Layouts, report: RecoveryReport
) -> list[Dropped]:
    """Chunks whose layout was lost, or has another size than their payload, cannot be given back."""
    sizes: dict[int, int] = {}
    for layout_id, layout in layouts:
        # A dtype that this torch does not know yet or any more says nothing against the chunk.
        with contextlib.suppress(InvalidArgument):
            sizes[layout_id] = layout.payload_bytes
    suspects = [entry for entry in entries.values() if sizes.get(entry.layout_id) != entry.payload_bytes]
    lost = [entry for entry in suspects if entry.layout_id in sizes or entry.layout_id not in layouts]
    for entry in lost:
        del entries[entry.digest]
    report.chunks_dropped_no_layout = len(lost)
    return [(entry.digest, entry.extents) for entry in lost]


def _allocator_beside(entries: dict[bytes, Entry], dropped: list[Dropped], found: Superblock) -> Allocator:
    live = [extent for entry in entries.values() for extent in entry.extents]
    live += [extent for _, extents in dropped for extent in extents]
    return Allocator.from_live(found.geometry.data_units, live)


def _resolve_overlaps(
    entries: dict[bytes, Entry], dropped: list[Dropped], report: RecoveryReport
) -> list[Dropped]:
    """Of two entries that claim the same units keep the later one; whoever loses gives up its extents."""
    claims = [(extent, entry) for entry in entries.values() for extent in entry.extents]
    claims.sort(key=lambda claim: claim[0])
    losers: dict[bytes, Entry] = {}
    end, holder = 0, None
    for (start, count), entry in claims:
        if holder is not None and start < end:
            loser = min(holder, entry, key=lambda one: one.log_sequence)
            losers[loser.digest] = loser
            if loser is entry:
                continue
        end, holder = start + count, entry
    for loser in losers.values():
        del entries[loser.digest]
    report.chunks_dropped_overlap = len(losers)
    return [(digest, ()) for digest in [*losers, *(digest for digest, _ in dropped)]]


def _verify_unsealed(
    device: Device,
    found: Superblock,
    entries: dict[bytes, Entry],
    layouts: Layouts,
    unsealed: list[Entry],
    report: RecoveryReport,
) -> list[Dropped]:
    """Read the payload of the last group's chunks: their page may have landed where their data did not."""
    suspects = [entry for entry in unsealed if entries.get(entry.digest) is entry]
    report.chunks_unsealed = len(suspects)
    failed = [entry for entry, outcome in verify_chunks(device, found.geometry, suspects, layouts) if outcome]
    for entry in failed:
        del entries[entry.digest]
    report.chunks_dropped_unsealed = len(failed)
    return [(entry.digest, entry.extents) for entry in failed]


class _JournalReader:
    """Journal pages by sequence, read ahead in pieces that grow."""

    def __init__(self, device: Device, found: Superblock) -> None:
        self._device = device
        self._geometry = found.geometry
        self._first_sequence = 0
        self._pages = b""
        self._read_pages = JOURNAL_READ_PAGES

    def __call__(self, sequence: int) -> bytes:
        offset = (sequence - self._first_sequence) * PAGE_BYTES
        if not 0 <= offset < len(self._pages):
            index = sequence % self._geometry.journal_pages
            count = min(self._read_pages, self._geometry.journal_pages - index)
            self._read_pages = min(2 * self._read_pages, READ_AHEAD_BYTES // PAGE_BYTES)
            self._pages = _read_pages(self._device, self._geometry.journal_offset(index), count * PAGE_BYTES)
            self._first_sequence, offset = sequence, 0
        return self._pages[offset : offset + PAGE_BYTES]


def _read_pages(device: Device, offset_bytes: int, length_bytes: int) -> bytes:
    """Metadata pages; where a piece cannot be read, page by page, with zeros for those that cannot."""
    try:
        return device.read(offset_bytes, length_bytes)
    except DeviceLost:
        raise
    except DeviceError:
        return b"".join(
            _read_or_blank(device, offset_bytes + done, PAGE_BYTES) or bytes(PAGE_BYTES)
            for done in range(0, length_bytes, PAGE_BYTES)
        )


def _read_or_blank(device: Device, offset_bytes: int, length_bytes: int) -> bytes:
    try:
        return device.read(offset_bytes, length_bytes)
    except DeviceLost:
        raise
    except DeviceError as error:
        logger.warning("%s", error)
        return b""


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # A million small objects that all stay alive: every collection in between is wasted work.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tell(device: Device, report: RecoveryReport) -> None:
    lost = report.checkpoint_records_lost + report.chunks_dropped_no_layout + report.chunks_dropped_overlap
    if lost or report.journal_damaged or report.checkpoint_pages_damaged:
        logger.warning("%s: metadata was damaged; opened without what it described: %s", device.path, report)
    elif not report.was_clean:
        logger.info("%s: was not closed; recovered: %s", device.path, report)
