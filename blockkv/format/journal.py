"""The journal: a ring of pages, one chain of records since the last checkpoint.

Page s lies at index s modulo the ring length. It is real if and only if it passes the checks of `Replay`:

    sequence     == s
    link         == checksum of page s - 1; for the first page the superblock's replay_predecessor
    epoch        == the superblock's, from epoch_start_sequence on
    epoch        <  the superblock's and not below that of page s - 1, before it

Why this suffices, and what the writer must do for it, is argued in docs/format.md under "Anchors".

Not here: reading, writing and flushing (`blockkv.store`); what records mean.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from blockkv.format.geometry import PAGE_BYTES
from blockkv.format.page import (
    PAGE_HEADER,
    PageFault,
    PageKind,
    PageRejected,
    checksum_of,
    decode_page,
    encode_page,
    fill_pages,
)
from blockkv.format.record import RecordMalformed, RecordView, iterate_records
from blockkv.format.superblock import Superblock

__all__ = [
    "PEEK_PAGES",
    "EndReason",
    "JournalPage",
    "Replay",
    "ReplayEnd",
    "build_pages",
    "page_index",
]

PEEK_PAGES = 1024
"""How far beyond the end of the log replay looks for proof that pages are missing: more than one commit
group, so that a later group's sealed sequence is within sight."""


_BLANK_PAGE = bytes(PAGE_BYTES)
_SEQUENCE_OFFSET = PAGE_HEADER.offsets["sequence"]


def page_index(sequence: int, journal_pages: int) -> int:
    """The place of a sequence in the ring, in pages."""
    return sequence % journal_pages


def build_pages(
    records: Iterable[bytes],
    next_sequence: int,
    predecessor: bytes,
    epoch: int,
    store_id: bytes,
    sealed_sequence: int,
    journal_pages: int,
) -> list[tuple[int, bytes]]:
    """Pages for one commit group: (page index in the ring, 4096 bytes), in order.

    Records keep their order; those of one group may be spread over several pages. The group starts at
    `next_sequence` after the page with checksum `predecessor`. Raises InvalidArgument for a record larger
    than a page.
    """
    pages: list[tuple[int, bytes]] = []
    sequence = next_sequence
    for group in fill_pages(records):
        page = encode_page(PageKind.JOURNAL, store_id, sequence, epoch, predecessor, sealed_sequence, group)
        pages.append((page_index(sequence, journal_pages), page))
        predecessor = checksum_of(page)
        sequence += 1
    return pages


class EndReason(enum.Enum):
    END_OF_LOG = "the log ends here"
    DAMAGED = "journal damaged: pages that were known to be durable are missing"


@dataclass(frozen=True, slots=True)
class JournalPage:
    """One accepted page."""

    sequence: int
    epoch: int
    sealed_sequence: int
    records: list[RecordView]


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """Where and why replay stopped."""

    reason: EndReason
    next_sequence: int
    """The sequence the next page gets."""
    predecessor: bytes
    """The checksum the next page names as its predecessor."""
    sealed_sequence: int
    """Pages above this one may name payload that never landed: read and verify it before trusting them."""
    newest_epoch: int
    """The highest epoch seen in any page of this store; the next epoch must be higher still."""
    fault: PageFault | None
    """Why the page at `next_sequence` was not accepted; None when the whole ring was."""
    torn_pages: int
    """Pages with a wrong checksum in the part that was looked at, from `next_sequence` on."""
    stale_pages: int
    """Whole pages of this store there that belong to an earlier lap or another history."""


class Replay:
    """Iterates over the accepted pages from the superblock's anchor on; then `end` says how it ended.

    `read_page` returns the 4096 bytes of the page for a sequence, or `b""` where it cannot be read. It is
    called with ascending sequences: each until the first that is rejected, then up to `peek_pages` more.
    """

    def __init__(
        self, read_page: Callable[[int], bytes], superblock: Superblock, peek_pages: int = PEEK_PAGES
    ) -> None:
        self._read_page = read_page
        self._superblock = superblock
        self._peek_pages = peek_pages
        self._end: ReplayEnd | None = None

    @property
    def end(self) -> ReplayEnd:
        """How replay ended. Only after the iteration is exhausted."""
        assert self._end is not None, "replay has not ended"
        return self._end

    def __iter__(self) -> Iterator[JournalPage]:
        superblock = self._superblock
        geometry = superblock.geometry
        first_sequence = sequence = superblock.replay_from_sequence
        predecessor = superblock.replay_predecessor
        sealed_sequence = sequence - 1
        newest_epoch = superblock.epoch
        epoch = 0
        fault: PageFault | None = None
        data = b""
        while sequence < first_sequence + geometry.journal_pages:
            data = self._read_page(sequence)
            try:
                page = decode_page(
                    data, kind=PageKind.JOURNAL, store_id=superblock.uuid, sequence=sequence, link=predecessor
                )
                if sequence >= superblock.epoch_start_sequence:
                    epoch_fits = page.epoch == superblock.epoch
                else:
                    epoch_fits = epoch <= page.epoch < superblock.epoch
                if not epoch_fits:
                    raise PageRejected(PageFault.WRONG_EPOCH, f"{page.epoch} in epoch {superblock.epoch}")
                records = list(iterate_records(page.body, page.record_count, geometry.data_units))
            except PageRejected as rejected:
                fault = rejected.fault
                break
            except RecordMalformed:
                fault = PageFault.MALFORMED
                break
            yield JournalPage(sequence, page.epoch, page.sealed_sequence, records)
            predecessor = page.checksum
            epoch = page.epoch
            sealed_sequence = max(sealed_sequence, page.sealed_sequence)
            sequence += 1
        self._end = self._peek(sequence, predecessor, sealed_sequence, newest_epoch, fault, data)

    def _peek(
        self,
        end_sequence: int,
        predecessor: bytes,
        sealed_sequence: int,
        newest_epoch: int,
        fault: PageFault | None,
        data: bytes,
    ) -> ReplayEnd:
        """Look for proof that the page at `end_sequence` was once durable.

        A later page of this epoch is not enough: pages of one group are in flight together and any of them
        may land. One that was built when `end_sequence` was already known flushed is.
        """
        superblock = self._superblock
        damaged = fault is not None and (
            end_sequence < superblock.epoch_start_sequence or fault is PageFault.MALFORMED
        )
        torn_pages = stale_pages = 0
        last_sequence = superblock.replay_from_sequence + superblock.geometry.journal_pages
        for sequence in range(end_sequence, min(end_sequence + 1 + self._peek_pages, last_sequence)):
            if sequence > end_sequence:
                data = self._read_page(sequence)
            found = _whole_page(data, superblock.uuid)
            if found is None:
                torn_pages += data not in (_BLANK_PAGE, b"")
                continue
            its_sequence, its_epoch, its_sealed = found
            newest_epoch = max(newest_epoch, its_epoch)
            if its_epoch > superblock.epoch or (its_epoch == superblock.epoch and its_sealed >= end_sequence):
                damaged = True
            elif its_epoch < superblock.epoch or its_sequence != sequence:
                stale_pages += 1
        return ReplayEnd(
            EndReason.DAMAGED if damaged else EndReason.END_OF_LOG,
            end_sequence,
            predecessor,
            sealed_sequence,
            newest_epoch,
            fault,
            torn_pages,
            stale_pages,
        )


def _whole_page(data: bytes, store_id: bytes) -> tuple[int, int, int] | None:
    """(sequence, epoch, sealed sequence) of a whole journal page of this store, whatever its place."""
    if len(data) != PAGE_BYTES:
        return None
    sequence = int.from_bytes(data[_SEQUENCE_OFFSET : _SEQUENCE_OFFSET + 8], "little")
    try:
        page = decode_page(data, kind=PageKind.JOURNAL, store_id=store_id, sequence=sequence)
    except PageRejected:
        return None
    return page.sequence, page.epoch, page.sealed_sequence
