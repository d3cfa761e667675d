"""The checkpoint: a snapshot of the index as a run of pages at the start of one of two areas.

Page i of a checkpoint is page i of its area and carries the checkpoint's random id, which the superblock
names; pages of an older checkpoint in the same area are therefore never mistaken for its own. A page that is
damaged costs the records in it, and nothing else.

Not here: which records to include and when to switch areas (`blockkv.store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blockkv.format.geometry import PAGE_BYTES
from blockkv.format.page import PageKind, PageRejected, decode_page, encode_page, fill_pages
from blockkv.format.record import RecordMalformed, RecordView, iterate_records
from blockkv.format.superblock import Superblock

__all__ = ["CheckpointReader", "pack"]


def pack(records: Iterable[bytes], store_id: bytes, checkpoint_id: bytes, epoch: int) -> Iterator[bytes]:
    """The pages of a checkpoint, in order, made one at a time.

    The caller stops, and calls the store full, when there are more than the area holds. Raises
    InvalidArgument for a record larger than a page.
    """
    for sequence, group in enumerate(fill_pages(records)):
        yield encode_page(PageKind.CHECKPOINT, store_id, sequence, epoch, checkpoint_id, 0, group)


class CheckpointReader:
    """Iterates over the records of the checkpoint a superblock names, in order.

    `pieces` are the bytes of its area from the start, in pieces of whole pages; pages that could not be read
    are zero bytes. Iterating never raises for damage: a bad page is skipped and counted.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview], superblock: Superblock) -> None:
        self._pieces = pieces
        self._superblock = superblock
        self.record_count = 0
        """Records found so far."""
        self.damage: list[tuple[int, str]] = []
        """(index, what is wrong) of the pages that were not what they should be."""
        self._missing_pages = 0

    @property
    def damaged_pages(self) -> int:
        """Pages that were not what they should be, or missing from `pieces`."""
        return len(self.damage) + self._missing_pages

    @property
    def lost_records(self) -> int:
        """Records the superblock promised and the pages did not hold. Only after the iteration."""
        return max(0, self._superblock.checkpoint_record_count - self.record_count)

    def __iter__(self) -> Iterator[RecordView]:
        superblock = self._superblock
        data_units = superblock.geometry.data_units
        sequence = 0
        for data in _pages(self._pieces, superblock.checkpoint_page_count):
            try:
                page = decode_page(
                    data,
                    kind=PageKind.CHECKPOINT,
                    store_id=superblock.uuid,
                    sequence=sequence,
                    link=superblock.checkpoint_id,
                )
                records = list(iterate_records(page.body, page.record_count, data_units))
            except (PageRejected, RecordMalformed) as error:
                self.damage.append((sequence, str(error)))
            else:
                self.record_count += len(records)
                yield from records
            sequence += 1
        self._missing_pages = superblock.checkpoint_page_count - sequence


def _pages(pieces: Iterable[bytes | memoryview], page_count: int) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        for offset in range(0, len(view), PAGE_BYTES):
            if not page_count:
                return
            page_count -= 1
            yield view[offset : offset + PAGE_BYTES]
