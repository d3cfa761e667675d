"""Replay of the journal: which pages are real, and how the end of the log is told from damage."""

from __future__ import annotations

from typing import Any

import pytest
from format_samples import GEOMETRY, PREDECESSOR, STORE_ID, flipped, put, superblock, torn, with_checksum

from blockkv.errors import InvalidArgument
from blockkv.format import journal
from blockkv.format.geometry import PAGE_BYTES
from blockkv.format.journal import EndReason, Replay, ReplayEnd, build_pages, page_index
from blockkv.format.page import PageFault, PageKind, checksum_of, encode_page
from blockkv.format.record import encode_delete
from blockkv.format.superblock import Superblock

JOURNAL_PAGES = GEOMETRY.journal_pages


class Ring:
    """A journal ring in memory, and a writer for it."""

    def __init__(self, first_sequence: int = 9, predecessor: bytes = PREDECESSOR, epoch: int = 3) -> None:
        self.pages: dict[int, bytes] = {}
        self.next_sequence = first_sequence
        self.predecessor = predecessor
        self.epoch = epoch
        self.sealed_sequence = first_sequence - 1

    def build(self, records: list[bytes]) -> list[bytes]:
        """The pages of one group, not yet written."""
        pages = build_pages(
            records,
            self.next_sequence,
            self.predecessor,
            self.epoch,
            STORE_ID,
            self.sealed_sequence,
            JOURNAL_PAGES,
        )
        assert [index for index, _ in pages] == [
            page_index(self.next_sequence + position, JOURNAL_PAGES) for position in range(len(pages))
        ]
        self.next_sequence += len(pages)
        self.predecessor = checksum_of(pages[-1][1])
        return [page for _, page in pages]

    def commit(self, *groups: list[bytes], flush: bool = True) -> None:
        """Write groups that are in flight together, then flush."""
        for group in groups:
            first = self.next_sequence
            for position, page in enumerate(self.build(group)):
                self[first + position] = page
        if flush:
            self.sealed_sequence = self.next_sequence - 1

    def reopen(self, epoch: int, end: ReplayEnd) -> None:
        """Go on as the next epoch, where the replay of the last one ended."""
        self.epoch = epoch
        self.next_sequence, self.predecessor = end.next_sequence, end.predecessor
        self.sealed_sequence = end.sealed_sequence

    def __setitem__(self, sequence: int, page: bytes) -> None:
        self.pages[page_index(sequence, JOURNAL_PAGES)] = page

    def __getitem__(self, sequence: int) -> bytes:
        return self.pages.get(page_index(sequence, JOURNAL_PAGES), bytes(PAGE_BYTES))

    def replay(self, one: Superblock | None = None, **options: Any) -> tuple[list[int], ReplayEnd]:
        """(log sequences of the records replayed, how it ended)"""
        replay = Replay(self.__getitem__, one or superblock(), **options)
        found = [view[1] for page in replay for view in page.records]
        return found, replay.end


def chunks(first: int, count: int) -> list[bytes]:
    return [record for number in range(first, first + count) for record in put(number, b"%d" % number)]


def test_replay_gives_the_log_in_order() -> None:
    ring = Ring()
    for first in range(1, 301, 60):
        ring.commit(chunks(first, 60))
    assert ring.next_sequence > 14
    found, end = ring.replay()
    assert found == list(range(1, 301))
    assert end == ReplayEnd(
        EndReason.END_OF_LOG,
        ring.next_sequence,
        ring.predecessor,
        ring.next_sequence - 3,
        3,
        PageFault.TORN,
        0,
        0,
    )


def test_an_empty_journal() -> None:
    found, end = Ring().replay()
    assert found == []
    assert (end.reason, end.next_sequence, end.predecessor) == (EndReason.END_OF_LOG, 9, PREDECESSOR)
    assert end.sealed_sequence == 8


def test_the_ring_wraps_around() -> None:
    first = 3 * JOURNAL_PAGES - 2
    ring = Ring(first)
    for number in range(1, 6):
        ring.commit(chunks(number, 1))
    assert sorted(ring.pages) == [0, 1, 2, JOURNAL_PAGES - 2, JOURNAL_PAGES - 1]
    found, end = ring.replay(superblock(replay_from_sequence=first, epoch_start_sequence=first))
    assert found == [1, 2, 3, 4, 5]
    assert end.next_sequence == first + 5


def test_a_ring_that_is_full_to_the_last_page() -> None:
    ring = Ring()
    for number in range(JOURNAL_PAGES):
        ring.commit([encode_delete(number, bytes(32))])
    found, end = ring.replay()
    assert found == list(range(JOURNAL_PAGES))
    assert (end.reason, end.fault) == (EndReason.END_OF_LOG, None)
    assert end.next_sequence == 9 + JOURNAL_PAGES


def test_a_key_may_end_in_the_next_page_of_its_group() -> None:
    ring = Ring()
    long = put(2, bytes(4096))
    assert len(long) == 2
    ring.commit([*put(1), *long, *put(3)])
    assert ring.next_sequence == 12
    found, _ = ring.replay()
    assert found == [1, 2, 2, 3]


def test_a_torn_page_ends_the_log() -> None:
    ring = Ring()
    ring.commit(chunks(1, 1))
    ring.commit(chunks(2, 1))
    ring[10] = ring[10][: PAGE_BYTES - 4000] + bytes(4000)
    found, end = ring.replay()
    assert found == [1]
    assert (end.reason, end.fault, end.torn_pages) == (EndReason.END_OF_LOG, PageFault.TORN, 1)


def test_an_unreadable_page_ends_the_log() -> None:
    ring = Ring()
    ring.commit(chunks(1, 1))
    ring[10] = b""
    found, end = ring.replay()
    assert found == [1]
    assert (end.fault, end.torn_pages) == (PageFault.TORN, 0)


def test_a_group_of_which_only_later_pages_landed_is_no_damage() -> None:
    """Pages in flight together land in any order; nothing in them was acknowledged."""
    ring = Ring()
    ring.commit(chunks(1, 1))
    ring.commit(chunks(2, 90), chunks(92, 1))
    assert ring.next_sequence == 14
    ring[10] = bytes(PAGE_BYTES)
    found, end = ring.replay()
    assert found == [1]
    assert end.reason is EndReason.END_OF_LOG


def test_a_page_known_to_be_flushed_that_is_missing_is_damage() -> None:
    ring = Ring()
    for number in range(1, 5):
        ring.commit(chunks(number, 1))
    ring[10] = flipped(ring[10], 5000)
    found, end = ring.replay()
    assert found == [1]
    assert (end.reason, end.fault, end.next_sequence) == (EndReason.DAMAGED, PageFault.TORN, 10)


def test_the_very_next_page_is_proof_enough() -> None:
    ring = Ring()
    for number in range(1, 4):
        ring.commit(chunks(number, 1))
    ring[10] = bytes(PAGE_BYTES)
    assert ring.replay()[1].reason is EndReason.DAMAGED


def test_damage_is_found_within_the_window() -> None:
    ring = Ring()
    ring.commit(chunks(1, 1))
    ring.commit(*[chunks(number, 1) for number in range(2, 12)])
    ring.commit(chunks(12, 1))
    ring[10] = bytes(PAGE_BYTES)
    assert ring.replay(peek_pages=9)[1].reason is EndReason.END_OF_LOG
    assert ring.replay(peek_pages=10)[1].reason is EndReason.DAMAGED
    assert ring.replay()[1].reason is EndReason.DAMAGED
    assert journal.PEEK_PAGES >= JOURNAL_PAGES


def test_the_last_page_of_the_log_missing_cannot_be_told_from_the_end() -> None:
    """An honest limit: no later page says that it was there."""
    ring = Ring()
    ring.commit(chunks(1, 1))
    ring.commit(chunks(2, 1))
    ring[10] = bytes(PAGE_BYTES)
    assert ring.replay()[1].reason is EndReason.END_OF_LOG


def test_a_page_that_recovery_once_accepted_is_damage_when_missing() -> None:
    ring = Ring()
    ring.commit(chunks(1, 1))
    ring.commit(chunks(2, 1))
    later = superblock(epoch=4, epoch_start_sequence=11)
    assert ring.replay(later)[0] == [1, 2]
    ring[10] = bytes(PAGE_BYTES)
    found, end = ring.replay(later)
    assert found == [1]
    assert end.reason is EndReason.DAMAGED


def test_pages_of_an_earlier_lap_are_stale() -> None:
    ring = Ring(9)
    for number in range(JOURNAL_PAGES + 3):
        ring.commit([encode_delete(number, bytes(32))])
    first = JOURNAL_PAGES + 9
    predecessor = checksum_of(ring[first - 1])
    one = superblock(replay_from_sequence=first, replay_predecessor=predecessor, epoch_start_sequence=9)
    found, end = ring.replay(one)
    assert found == list(range(JOURNAL_PAGES, JOURNAL_PAGES + 3))
    assert (end.reason, end.fault) == (EndReason.END_OF_LOG, PageFault.WRONG_SEQUENCE)
    assert end.stale_pages == JOURNAL_PAGES - 3


def test_the_first_page_must_follow_the_anchor() -> None:
    ring = Ring(predecessor=bytes(16))
    ring.commit(chunks(1, 1))
    found, end = ring.replay()
    assert found == []
    assert end.fault is PageFault.WRONG_PREDECESSOR


def test_pages_of_another_store_or_kind_are_refused() -> None:
    ring = Ring()
    ring[9] = encode_page(PageKind.JOURNAL, bytes(16), 9, 3, PREDECESSOR, 8, put(1))
    assert ring.replay()[1].fault is PageFault.WRONG_STORE
    ring[9] = encode_page(PageKind.CHECKPOINT, STORE_ID, 9, 3, PREDECESSOR, 0, put(1))
    assert ring.replay()[1].fault is PageFault.WRONG_KIND


@pytest.mark.parametrize("body", [b"\1" * 64, put(1, start_unit=GEOMETRY.data_units)[0]])
def test_a_page_with_a_malformed_record_is_damage_as_a_whole(body: bytes) -> None:
    ring = Ring()
    ring.commit(chunks(1, 1))
    ring.commit([*put(2), body])
    found, end = ring.replay()
    assert found == [1]
    assert (end.reason, end.fault) == (EndReason.DAMAGED, PageFault.MALFORMED)


def epoch_sequence(*epochs: int) -> Ring:
    """A chain of one-record pages from sequence 9 on, written by these epochs."""
    ring = Ring()
    for number, epoch in enumerate(epochs, start=1):
        ring.epoch = epoch
        ring.commit(chunks(number, 1))
    return ring


@pytest.mark.parametrize(
    ("epochs", "epoch", "epoch_start", "accepted"),
    [
        ((1, 1, 2, 3, 3), 3, 12, 5),
        ((3, 3, 3), 3, 9, 3),
        ((1, 1, 1), 3, 12, 3),
        ((1, 1, 1), 3, 11, 2),  # page 11 would have to be of epoch 3
        ((2, 1, 2), 3, 12, 1),  # epochs never go back
        ((1, 3, 3), 3, 12, 1),  # epoch 3 wrote nothing before 12
        ((1, 2, 4), 3, 11, 2),  # a page of a later epoch than the superblock's
        ((1, 2, 3), 3, 10, 1),
    ],
)
def test_the_epoch_rule(epochs: tuple[int, ...], epoch: int, epoch_start: int, accepted: int) -> None:
    one = superblock(epoch=epoch, epoch_start_sequence=epoch_start)
    found, end = epoch_sequence(*epochs).replay(one)
    assert found == list(range(1, accepted + 1))
    if accepted < len(epochs):
        assert end.fault is PageFault.WRONG_EPOCH


def test_a_page_of_a_later_epoch_says_that_a_superblock_was_lost() -> None:
    ring = epoch_sequence(1, 2, 4)
    _, end = ring.replay(superblock(epoch=3, epoch_start_sequence=11))
    assert (end.reason, end.newest_epoch) == (EndReason.DAMAGED, 4)


def test_a_dead_page_made_whole_by_a_later_tear_stays_dead() -> None:
    """Epoch 2's page loses its last sector, epoch 3's page of the same place only lands that one, all zero.

    Epoch 2's page is then whole, and its predecessor is right. Only epoch_start_sequence tells.
    """
    ring = Ring(epoch=2)
    ring.commit(chunks(1, 1))
    lost = ring.build(chunks(2, 1))[0]
    ring[10] = torn(bytes([0xEE]) * PAGE_BYTES, lost, 0b01111111)
    found, end = ring.replay(superblock(epoch=2))
    assert found == [1]
    ring.reopen(3, end)
    rewritten = ring.build(chunks(3, 1))[0]
    ring[10] = torn(ring[10], rewritten, 0b10000000)
    assert ring[10] == lost
    found, end = ring.replay(superblock(epoch=3, epoch_start_sequence=10))
    assert found == [1]
    assert (end.reason, end.fault, end.stale_pages) == (EndReason.END_OF_LOG, PageFault.WRONG_EPOCH, 1)
    # Without that anchor the dead record would be back: this test can fail.
    assert ring.replay(superblock(epoch=3, epoch_start_sequence=11))[0] == [1, 2]


def test_a_ghost_of_an_epoch_number_used_twice_is_refused_by_its_predecessor() -> None:
    """When every copy of a superblock is lost its epoch may be used again; the chain still holds."""
    ring = Ring()
    ring.commit(chunks(1, 1), chunks(2, 1), chunks(3, 1))
    _, end = Ring().replay()
    ring.reopen(3, end)
    ring.commit(chunks(4, 1))
    found, end = ring.replay()
    assert found == [4]
    assert end.fault is PageFault.WRONG_PREDECESSOR


def test_sealed_pages_are_told_from_the_last_group() -> None:
    ring = Ring()
    ring.commit(chunks(1, 1))
    ring.commit(chunks(2, 1), chunks(3, 1))
    ring.commit(chunks(4, 1), flush=False)
    _, end = ring.replay()
    assert end.sealed_sequence == 11
    ring[12] = bytes(PAGE_BYTES)
    _, end = ring.replay()
    assert end.sealed_sequence == 9


def test_hostile_sequences_end_at_once() -> None:
    reads: list[int] = []

    def read_page(sequence: int) -> bytes:
        reads.append(sequence)
        return with_checksum(bytes(PAGE_BYTES))

    replay = Replay(read_page, superblock(replay_from_sequence=(1 << 62) - 1, epoch_start_sequence=1))
    assert list(replay) == []
    assert len(reads) <= JOURNAL_PAGES


def test_the_end_is_known_only_at_the_end() -> None:
    ring = Ring()
    ring.commit(chunks(1, 1))
    replay = Replay(ring.__getitem__, superblock())
    next(iter(replay))
    with pytest.raises(AssertionError, match="has not ended"):
        _ = replay.end


def test_a_record_larger_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        build_pages([bytes(PAGE_BYTES)], 9, PREDECESSOR, 3, STORE_ID, 8, JOURNAL_PAGES)
