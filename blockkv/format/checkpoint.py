"""The checkpoint: a snapshot of the index as a run of pages at the start of one of two areas.

Page i of a checkpoint is page i of its area and carries the checkpoint's random id, which the superblock
names; pages of an older checkpoint in the same area are therefore never mistaken for its own. A page that is
damaged costs the records in it, and nothing else.

Not here: which records to include and when to switch areas (`blockkv.store`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from blockkv.format.geometry import PAGE_BYTES
from blockkv.format.page import PAGE_HEADER, PageKind, PageRejected, decode_page, encode_page, fill_pages
from blockkv.format.record import RecordMalformed, RecordView, iterate_records
from blockkv.format.scan import PutTable, scan_puts
from blockkv.format.superblock import Superblock

__all__ = ["CheckpointReader", "pack"]

Body = tuple[int, int, int]
"""Start and end of a page's records in its piece, and how many there should be."""


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
        self._piece_sequence = 0

    @property
    def damaged_pages(self) -> int:
        """Pages that were not what they should be, or missing from `pieces`."""
        return len(self.damage) + self._missing_pages

    @property
    def lost_records(self) -> int:
        """Records the superblock promised and the pages did not hold. Only after the iteration."""
        return max(0, self._superblock.checkpoint_record_count - self.record_count)

    def __iter__(self) -> Iterator[RecordView]:
        for piece, first_page, bodies in self._bodies():
            for body in bodies:
                yield from self._records(piece, first_page, body)

    def runs(self) -> Iterator[PutTable | list[RecordView]]:
        """The same records in the same order; pages of plain PUTs as tables, which is far faster."""
        for piece, first_page, bodies in self._bodies():
            plain, table = scan_puts(piece, bodies, self._superblock.geometry.data_units)
            first = 0
            for is_plain, group in itertools.groupby(zip(plain, bodies, strict=True), lambda pair: pair[0]):
                if is_plain:
                    end = first + sum(record_count for _, (_, _, record_count) in group)
                    self.record_count += end - first
                    yield table.rows(first, end)
                    first = end
                else:
                    for _, body in group:
                        yield self._records(piece, first_page, body)

    def _bodies(self) -> Iterator[tuple[bytes, int, list[Body]]]:
        """(piece, index of its first page, bodies of its intact pages), piece by piece."""
        superblock = self._superblock
        index, page_count = 0, superblock.checkpoint_page_count
        for piece in map(bytes, self._pieces):
            first_page, bodies = index, []
            for start in range(0, min(len(piece), (page_count - first_page) * PAGE_BYTES), PAGE_BYTES):
                try:
                    page = decode_page(
                        memoryview(piece)[start : start + PAGE_BYTES],
                        kind=PageKind.CHECKPOINT,
                        store_id=superblock.uuid,
                        sequence=index,
                        link=superblock.checkpoint_id,
                    )
                except PageRejected as error:
                    self.damage.append((index, str(error)))
                else:
                    body_start = start + PAGE_HEADER.size_bytes
                    bodies.append((body_start, body_start + len(page.body), page.record_count))
                index += 1
            yield piece, first_page, bodies
        self._missing_pages = page_count - index

    def _records(self, piece: bytes, first_page: int, body: Body) -> list[RecordView]:
        start, end, record_count = body
        data_units = self._superblock.geometry.data_units
        try:
            records = list(iterate_records(piece[start:end], record_count, data_units))
        except RecordMalformed as error:
            self.damage.append((first_page + start // PAGE_BYTES, str(error)))
            return []
        self.record_count += len(records)
        return records
