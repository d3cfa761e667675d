"""Opening a store: from bytes on a device to an index, a free map and the place where the log goes on.

Order: flush (a killed process may have left writes in the drive's cache) -> newest valid superblock ->
its checkpoint -> journal pages from the anchor -> payload of records that were not known to be flushed.
Recovery changes nothing on the device; the caller writes one superblock afterwards, in a slot nobody
needs, so it can be cut short and repeated at will.

What does not verify is dropped, counted and told as a finding: a damaged checkpoint page costs its records, a
journal page that is not the next one ends the replay. Where two records claim the same units (a checkpoint
page that could not be read last time and can now) the one whose payload verifies holds, or the later one.

What could not be read just now is no damage: metadata then ends the open, for it would be opened without what
it says, and payload is left to the gets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blockkv.catalog.index import Entry, Index
from blockkv.catalog.layouts import Layout, Layouts
from blockkv.device.base import Device
from blockkv.errors import (
    DeviceError,
    DeviceLost,
    DeviceTooSmall,
    FormatError,
    InvalidArgument,
    NotFormatted,
    VersionTooNew,
)
from blockkv.format import record, superblock
from blockkv.format.checkpoint import CheckpointReader
from blockkv.format.geometry import PAGE_BYTES, SLOT_COUNT, SLOTS_PER_COPY, slot_offsets
from blockkv.format.journal import EndReason, Replay, ReplayEnd, page_index
from blockkv.format.page import COUNTER_LIMIT
from blockkv.format.record import LayoutRecord, Operation, RecordView
from blockkv.format.superblock import Superblock, SuperblockRejected
from blockkv.logs import logger_for
from blockkv.space.allocator import Allocator, Extent
from blockkv.store.finding import Finding, Remedy, chunk_finding, slot_findings
from blockkv.store.log import Tail
from blockkv.store.verify import MEDIUM_ERRNOS, is_damage, verify_chunks

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
    findings: list[Finding]
    """What was wrong with the metadata, and what was dropped for it."""


def read_superblock(device: Device) -> tuple[Superblock, list[Finding]]:
    """The newest valid superblock, and what is wrong with the slots.

    Raises NotFormatted, VersionTooNew, DeviceTooSmall (the device shrank), DeviceLost, and DeviceError where
    slots that may hold a newer one cannot be read just now.
    """
    try:
        return _read_superblock(device)
    except (NotFormatted, VersionTooNew) as error:
        raise type(error)(f"{device.path}: {error}") from None


def _read_superblock(device: Device) -> tuple[Superblock, list[Finding]]:
    size_bytes = device.limits.size_bytes
    if size_bytes < SMALLEST_BYTES:
        superblock.choose([bytes(PAGE_BYTES)] * SLOT_COUNT)  # says what it misses
    offsets = slot_offsets(size_bytes)
    slots = _examine_slots(device, offsets)
    found = superblock.newest_of(slots)
    if found.geometry.device_bytes > size_bytes:
        raise DeviceTooSmall(
            f"{device.path} has {size_bytes} bytes, but the store {found.uuid_text} on it was formatted for "
            f"{found.geometry.device_bytes}: the device shrank or this is a truncated copy"
        )
    if found.geometry.slot_offsets != offsets:  # the device has grown: its end is not the store's
        slots = _examine_slots(device, found.geometry.slot_offsets)
        found = superblock.newest_of(slots)
    return found, slot_findings(slots, found)


def recover(device: Device, found: Superblock) -> Recovered:
    """Build the state of the store from `found`, its checkpoint and the journal. Writes nothing.

    Raises DeviceLost, and DeviceError where metadata cannot be read just now.
    """
    report = RecoveryReport(was_clean=found.clean)
    findings: list[Finding] = []
    with _no_garbage_collection():
        index, layouts = _load_checkpoint(device, found, report, findings)
        report.checkpoint_chunks = len(index)
        end, last_log_sequence, unsealed = _replay(device, found, index, layouts, report, findings)
        dropped = _drop_without_layout(index, layouts, found, report, findings)
        dropped += _verify_unsealed(device, found, index, layouts, unsealed, report, findings)
        try:
            allocator = _allocator_beside(index, dropped, found)
        except FormatError as error:
            logger_for(device.path).warning("%s", error)
            dropped = _resolve_overlaps(device, found, index, layouts, dropped, report, findings)
            allocator = _allocator_beside(index, dropped, found)
        for (layout_id, _), count in index.shapes().items():
            layouts.refer(layout_id, count)
        layouts.forget_unused()
    tail = Tail(end.next_sequence, end.predecessor, end.sealed_sequence, last_log_sequence + 1)
    _tell(device, report)
    return Recovered(
        found,
        index,
        layouts,
        allocator,
        tail,
        dropped,
        end.newest_epoch,
        found.read_only_reason,
        report,
        findings,
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
        # The sequences of groups that did not become durable come again, for chunks nobody has verified.
        scrub_sequence=min(found.scrub_sequence, recovered.tail.next_log_sequence - 1),
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
    device: Device, found: Superblock, report: RecoveryReport, findings: list[Finding]
) -> tuple[Index, Layouts]:
    index = Index()
    layouts = Layouts(found.next_layout_id)
    zone = found.checkpoint_zone
    length_bytes = found.checkpoint_page_count * PAGE_BYTES
    pieces = (
        _read_pages(device, zone.offset_bytes + done, min(READ_AHEAD_BYTES, length_bytes - done))
        for done in range(0, length_bytes, READ_AHEAD_BYTES)
    )
    reader = CheckpointReader(pieces, found)
    index.reserve(min(found.checkpoint_record_count, length_bytes // record.SHORTEST_PUT_BYTES))
    for body in reader.bodies():
        # Nearly every page holds nothing but PUT records, and those the index reads itself.
        if index.load(body.records, body.record_count, found.geometry.data_units):
            reader.record_count += body.record_count
        else:
            for view in reader.records(body):
                _apply(view, index, layouts, device.path)
    report.checkpoint_pages_damaged = reader.damaged_pages
    report.checkpoint_records_lost = reader.lost_records
    findings.extend(
        Finding("checkpoint page", what, Remedy.NEW_CHECKPOINT, page, zone.offset_bytes + page * PAGE_BYTES)
        for page, what in reader.damage
    )
    if reader.lost_records:
        what = f"{reader.lost_records} of {found.checkpoint_record_count} records are lost with its pages"
        findings.append(Finding("checkpoint", what, Remedy.NEW_CHECKPOINT, offset_bytes=zone.offset_bytes))
    return index, layouts


def _replay(
    device: Device,
    found: Superblock,
    index: Index,
    layouts: Layouts,
    report: RecoveryReport,
    findings: list[Finding],
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
            entry = _apply(view, index, layouts, device.path)
            if entry is not None:
                put_in_page.append((page.sequence, entry))
    end = replay.end
    report.journal_damaged = end.reason is EndReason.DAMAGED
    if report.journal_damaged:
        fault = f"; it {end.fault.value}" if end.fault else ""
        what = f"it was durable and is not there{fault}"
        place = found.geometry.journal_offset(page_index(end.next_sequence, found.geometry.journal_pages))
        findings.append(Finding("journal page", what, Remedy.CUT, end.next_sequence, place))
    unsealed = [entry for sequence, entry in put_in_page if sequence > end.sealed_sequence]
    return end, last_log_sequence, unsealed


def _apply(view: RecordView, index: Index, layouts: Layouts, path: str) -> Entry | None:
    """One record's effect. Returns the entry that a PUT made."""
    operation, log_sequence, digest, raw = view
    if operation == Operation.PUT:
        index.remove(digest)
        return index.insert(raw)
    if operation == Operation.DELETE:
        index.remove(digest)
    elif operation == Operation.KEY_TAIL:
        index.add_tail(digest, log_sequence, raw)
    else:
        defined = record.decode(raw)
        assert isinstance(defined, LayoutRecord)
        if defined.layout_id not in layouts:
            try:
                layouts.define(defined.layout_id, Layout.decode(defined.body))
            except ValueError as error:
                logger_for(path).warning("layout %d is not usable: %s", defined.layout_id, error)
    return None


def _drop_without_layout(
    index: Index,
    layouts: Layouts,
    found: Superblock,
    report: RecoveryReport,
    findings: list[Finding],
) -> list[Dropped]:
    """Chunks whose layout was lost, or has another size than their payload, cannot be given back."""
    sizes: dict[int, int] = {}
    for layout_id, layout in layouts:
        # A dtype that this torch does not know yet or any more says nothing against the chunk.
        with contextlib.suppress(InvalidArgument):
            sizes[layout_id] = layout.payload_bytes
    unusable = {
        (layout_id, payload_bytes)
        for layout_id, payload_bytes in index.shapes()
        if sizes.get(layout_id) != payload_bytes and (layout_id in sizes or layout_id not in layouts)
    }
    lost = [one for one in index if (one.layout_id, one.payload_bytes) in unusable] if unusable else []
    for entry in lost:
        index.remove(entry.digest)
        size_bytes = sizes.get(entry.layout_id)
        what = (
            f"its layout, number {entry.layout_id}, is lost"
            if size_bytes is None
            else f"it has {entry.payload_bytes} bytes and its layout {size_bytes}"
        )
        findings.append(chunk_finding(entry, found.geometry, what))
    report.chunks_dropped_no_layout = len(lost)
    return [(entry.digest, entry.extents) for entry in lost]


def _allocator_beside(index: Index, dropped: list[Dropped], found: Superblock) -> Allocator:
    more = [extent for _, extents in dropped for extent in extents]
    live = np.concatenate((index.extents(), np.array(more, np.int64).reshape(-1, 2)))
    return Allocator.from_live(found.geometry.data_units, live)


def _resolve_overlaps(
    device: Device,
    found: Superblock,
    index: Index,
    layouts: Layouts,
    dropped: list[Dropped],
    report: RecoveryReport,
    findings: list[Finding],
) -> list[Dropped]:
    """Of the entries that claim the same units drop those whose payload is not there, then the earlier ones.

    Whoever is dropped gives up its extents: another chunk may have them.
    """
    losers: list[Entry] = []
    verified: set[bytes] = set()
    while rivals := {one.digest: one for pair in _overlaps(index) for one in pair}:
        doubtful = [entry for digest, entry in rivals.items() if digest not in verified]
        if doubtful:
            outcomes = verify_chunks(device, found.geometry, doubtful, layouts)
            beaten = [entry for entry, outcome in outcomes if is_damage(outcome)]
            verified.update(entry.digest for entry in doubtful)
        else:
            beaten = [min(rivals.values(), key=lambda one: one.log_sequence)]
        for loser in beaten:
            index.remove(loser.digest)
        losers += beaten
    for loser in losers:
        findings.append(chunk_finding(loser, found.geometry, "another chunk has the same units"))
    report.chunks_dropped_overlap = len(losers)
    return [(digest, ()) for digest in [*(one.digest for one in losers), *(digest for digest, _ in dropped)]]


def _overlaps(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Some pairs of entries that claim the same units: at least one where there are any."""
    claims = [(extent, entry) for entry in entries for extent in entry.extents]
    claims.sort(key=lambda claim: claim[0])
    end, holder = 0, None
    for (start, count), entry in claims:
        if holder is not None and start < end:
            yield holder, entry
        if start + count > end:
            end, holder = start + count, entry


def _verify_unsealed(
    device: Device,
    found: Superblock,
    index: Index,
    layouts: Layouts,
    unsealed: list[Entry],
    report: RecoveryReport,
    findings: list[Finding],
) -> list[Dropped]:
    """Read the payload of the last group's chunks: their page may have landed where their data did not."""
    suspects = [entry for entry in unsealed if index.holds(entry)]
    report.chunks_unsealed = len(suspects)
    failed = []
    for entry, outcome in verify_chunks(device, found.geometry, suspects, layouts):
        if is_damage(outcome):
            what = "put just before a crash, and its payload did not arrive or is damaged"
            findings.append(chunk_finding(entry, found.geometry, what))
            failed.append(entry)
        elif outcome:
            what = f"cannot be read just now: {os.strerror(-outcome)} (errno {-outcome})"
            findings.append(chunk_finding(entry, found.geometry, what, Remedy.KEEP))
    for entry in failed:
        index.remove(entry.digest)
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


def _examine_slots(device: Device, offsets: Sequence[int]) -> list[Superblock | SuperblockRejected]:
    """What the superblock slots hold.

    Raises DeviceError where both copies of a generation are in doubt, one of them for an error that may pass:
    without them the store would go on from an older superblock, whose checkpoint is overwritten.
    """
    slots: list[bytes] = []
    passing: dict[int, DeviceError] = {}
    for slot_index, offset in enumerate(offsets):
        try:
            slots.append(_read_or_blank(device, offset, PAGE_BYTES))
        except DeviceLost:
            raise
        except DeviceError as error:
            passing[slot_index] = error
            slots.append(b"")
    found = superblock.examine(slots)
    for slot_index, reason in passing.items():
        if not isinstance(found[(slot_index + SLOTS_PER_COPY) % SLOT_COUNT], Superblock):
            raise reason
    return found


def readable_slots(device: Device, offsets: Sequence[int]) -> list[Superblock | SuperblockRejected]:
    """What the eight superblock slots hold, for whoever does without those that cannot be read."""
    return superblock.examine([read_if_possible(device, offset) for offset in offsets])


def read_if_possible(device: Device, offset_bytes: int) -> bytes:
    """The page there, or none of it where it cannot be read or the device has ended. Raises DeviceLost."""
    if not 0 <= offset_bytes <= device.limits.size_bytes - PAGE_BYTES:
        return b""
    try:
        return device.read(offset_bytes, PAGE_BYTES)
    except DeviceLost:
        raise
    except DeviceError:
        return b""


def _read_pages(device: Device, offset_bytes: int, length_bytes: int) -> bytes:
    """Metadata pages; where a piece cannot be read, page by page, with zeros for those that cannot.

    Raises DeviceError where one cannot be read just now.
    """
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
    """The bytes there, or none where the medium does not give them. Raises DeviceError for anything else."""
    try:
        return device.read(offset_bytes, length_bytes)
    except DeviceError as error:
        if error.errno not in MEDIUM_ERRNOS:
            raise
        logger_for(device.path).warning("a page cannot be read: %s", error)
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
        logger_for(device.path).warning(
            "metadata was damaged; opened without %d records%s",
            lost,
            " and without the end of the log" if report.journal_damaged else "",
        )
    elif not report.was_clean:
        logger_for(device.path).info("was not closed; recovered: %s", report)
