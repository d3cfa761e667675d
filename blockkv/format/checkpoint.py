"""The checkpoint: a snapshot of the index as a run of pages at the start of one of two areas.

Page i of a checkpoint is page i of its area and carries the checkpoint's random id, which the superblock
names; pages of an older checkpoint in the same area are therefore never mistaken for its own. A page that is
damaged costs the records in it, and nothing else.

Not here: which records to include and when to switch areas (`blockkv.store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blockkv.format.geometry import PAGE_BYTES
from blockkv.format.page import PageKind, PageRejected, decode_page, encode_body, fill_pages
from blockkv.format.record import RecordMalformed, RecordView, iterate_records
from blockkv.format.superblock import Superblock

__all__ = ["Body", "CheckpointReader", "bodies_of", "pack", "pages"]


@dataclass(frozen=True, slots=True)
class Body:
    """What an intact page holds, before anybody looked at its records."""

    page_index: int
    records: bytes
    record_count: int


def bodies_of(records: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Page bodies that hold `records` in order, and how many each holds.

    Raises InvalidArgument for a record larger than a page.
    """
    for group in fill_pages(records):
        yield b"".join(group), len(group)


def pages(
    bodies: Iterable[tuple[bytes, int]], store_id: bytes, checkpoint_id: bytes, epoch: int
) -> Iterator[bytes]:
    """The pages of a checkpoint, in order, made one at a time from (encoded records, how many).

    The caller stops, and calls the store full, when there are more than the area holds.
    """
    for sequence, (body, record_count) in enumerate(bodies):
        yield encode_body(
            PageKind.CHECKPOINT, store_id, sequence, epoch, checkpoint_id, 0, body, record_count
        )


def pack(records: Iterable[bytes], store_id: bytes, checkpoint_id: bytes, epoch: int) -> Iterator[bytes]:
    """`pages` of `records`. Raises InvalidArgument for a record larger than a page."""
    return pages(bodies_of(records), store_id, checkpoint_id, epoch)


class CheckpointReader:
    """Reads the checkpoint a superblock names: its intact pages (`bodies`), or all records (iteration).

    `pieces` are the bytes of its area from the start, in pieces of whole pages; pages that could not be read
    are zero bytes. Nothing is raised for damage: a bad page is skipped and counted.
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
        for body in self.bodies():
            yield from self.records(body)

    def bodies(self) -> Iterator[Body]:
        """The intact pages, in order. Give each to `records`, or count what was taken from it."""
        superblock = self._superblock
        index, page_count = 0, superblock.checkpoint_page_count
        for read in self._pieces:
            piece = memoryview(read)
            for start in range(0, min(len(piece), (page_count - index) * PAGE_BYTES), PAGE_BYTES):
                try:
                    page = decode_page(
                        piece[start : start + PAGE_BYTES],
                        kind=PageKind.CHECKPOINT,
                        store_id=superblock.uuid,
                        sequence=index,
                        link=superblock.checkpoint_id,
                    )
                except PageRejected as error:
                    self.damage.append((index, str(error)))
                else:
                    yield Body(index, page.body, page.record_count)
                index += 1
        self._missing_pages = page_count - index

    def records(self, body: Body) -> list[RecordView]:
        """The records of a page, all or, where one of them is not right, none."""
        data_units = self._superblock.geometry.data_units
        try:
            found = list(iterate_records(body.records, body.record_count, data_units))
        except RecordMalformed as error:
            self.damage.append((body.page_index, str(error)))
            return []
        self.record_count += len(found)
        return found
