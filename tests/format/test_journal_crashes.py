"""The journal under power loss: random histories on a disk that loses, reorders and tears what is unflushed.

The oracle keeps the log as it was written. After every crash replay must give a prefix of it that covers all
that was flushed, and must not speak of damage; after rot in a page that was known to be flushed it must not
give more than what lies before it, and must speak of damage.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from format_samples import GEOMETRY, PREDECESSOR, SECTOR_BYTES, STORE_ID, flipped, superblock

from blockkv.format.geometry import PAGE_BYTES, Zone
from blockkv.format.journal import EndReason, Replay, ReplayEnd, build_pages
from blockkv.format.page import checksum_of
from blockkv.format.record import encode_delete

RING_PAGES = 6
SEED_OF_A_REVIVED_PAGE = 368
SMALL = dataclasses.replace(GEOMETRY, journal=Zone(GEOMETRY.journal.offset_bytes, RING_PAGES * PAGE_BYTES))


class Disk:
    """A ring whose writes are volatile until a flush; a crash rolls dice for every sector of every write."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.stable = bytearray(RING_PAGES * PAGE_BYTES)
        self.unflushed: list[tuple[int, bytes]] = []

    def write(self, index: int, page: bytes) -> None:
        self.unflushed.append((index, page))

    def flush(self) -> None:
        for index, page in self.unflushed:
            self.stable[index * PAGE_BYTES : (index + 1) * PAGE_BYTES] = page
        self.unflushed.clear()

    def crash(self) -> None:
        landed = self.dice.choice((0.1, 0.5, 0.9, 1.0))
        self.dice.shuffle(self.unflushed)
        for index, page in self.unflushed:
            for offset in range(0, PAGE_BYTES, SECTOR_BYTES):
                if self.dice.random() < landed:
                    start = index * PAGE_BYTES + offset
                    self.stable[start : start + SECTOR_BYTES] = page[offset : offset + SECTOR_BYTES]
        self.unflushed.clear()

    def read(self, sequence: int) -> bytes:
        start = sequence % RING_PAGES * PAGE_BYTES
        return bytes(self.stable[start : start + PAGE_BYTES])


class History:
    """A writer that follows the rules of docs/format.md, and the log it believes in."""

    def __init__(self, seed: int, drop_epoch_start: bool = False) -> None:
        self.dice = random.Random(seed)
        self.disk = Disk(self.dice)
        self.drop_epoch_start = drop_epoch_start
        self.superblock = superblock(
            geometry=SMALL, epoch=0, replay_from_sequence=1, epoch_start_sequence=1, log_sequence=0
        )
        self.log: list[tuple[int, int]] = []
        """(page sequence, log sequence) of every record since the anchor."""
        self.durable_sequence = 0
        self.next_log_sequence = 1
        self.open()

    def replay(self) -> tuple[list[tuple[int, int]], ReplayEnd]:
        one = self.superblock
        if self.drop_epoch_start:  # what is left of the rule is "epochs never decrease"
            everything = one.replay_from_sequence + RING_PAGES
            one = dataclasses.replace(one, epoch=one.epoch + 1, epoch_start_sequence=everything)
        replay = Replay(self.disk.read, one)
        found = [(page.sequence, view[1]) for page in replay for view in page.records]
        return found, replay.end

    def open(self) -> None:
        found, end = self.replay()
        assert found == self.log[: len(found)], "replay is no prefix of the log"
        assert end.next_sequence > self.durable_sequence, "a flushed page was not replayed"
        if not self.drop_epoch_start:
            assert end.reason is EndReason.END_OF_LOG, f"damage where there was none: {end}"
        self.log = found
        self.next_sequence, self.predecessor = end.next_sequence, end.predecessor
        self.sealed_sequence = end.sealed_sequence
        self.durable_sequence = end.next_sequence - 1  # it was read after a flush
        self.superblock = dataclasses.replace(
            self.superblock, epoch=self.superblock.epoch + 1, epoch_start_sequence=end.next_sequence
        )

    def free_pages(self) -> int:
        return RING_PAGES - (self.next_sequence - self.superblock.replay_from_sequence)

    def commit(self) -> None:
        """One group of one or more pages; several groups may be in flight before a flush."""
        records = []
        for _ in range(self.dice.choice((1, 1, 2, 84, 100))):
            records.append(encode_delete(self.next_log_sequence, bytes(32)))
            self.next_log_sequence += 1
        pages = build_pages(
            records,
            self.next_sequence,
            self.predecessor,
            self.superblock.epoch,
            STORE_ID,
            self.sealed_sequence,
            RING_PAGES,
        )
        if len(pages) > self.free_pages():
            return
        number = self.next_log_sequence - len(records)
        for position, (index, page) in enumerate(pages):
            self.disk.write(index, page)
            in_page = int.from_bytes(page[74:76], "little")
            self.log += [(self.next_sequence + position, number + step) for step in range(in_page)]
            number += in_page
        self.next_sequence += len(pages)
        self.predecessor = checksum_of(pages[-1][1])

    def flush(self) -> None:
        self.disk.flush()
        self.sealed_sequence = self.durable_sequence = self.next_sequence - 1

    def checkpoint(self) -> None:
        self.flush()
        self.log = []
        self.superblock = dataclasses.replace(
            self.superblock, replay_from_sequence=self.next_sequence, replay_predecessor=self.predecessor
        )

    def step(self) -> None:
        kind = self.dice.choices(("commit", "flush", "checkpoint", "crash"), (6, 3, 1, 2))[0]
        if kind == "crash":
            self.disk.crash()
            self.open()
        else:
            getattr(self, kind)()
            if not self.free_pages():
                self.checkpoint()


def run(seed: int, steps: int = 40, drop_epoch_start: bool = False) -> History:
    history = History(seed, drop_epoch_start)
    for _ in range(steps):
        history.step()
    return history


def test_replay_is_a_prefix_that_covers_every_flush() -> None:
    for seed in range(200):
        run(seed)


def test_the_harness_catches_a_missing_anchor() -> None:
    """Without epoch_start_sequence dead pages come back. The seed was found by trying them from 0 on."""
    run(SEED_OF_A_REVIVED_PAGE)
    with pytest.raises(AssertionError, match="no prefix"):
        run(SEED_OF_A_REVIVED_PAGE, drop_epoch_start=True)


def test_rot_in_a_page_known_to_be_flushed_is_reported() -> None:
    reported = 0
    for seed in range(200):
        history = run(seed, steps=20)
        history.flush()
        last = history.log[-1][0] if history.log else 0
        replayed = sorted({sequence for sequence, _ in history.log if sequence <= history.sealed_sequence})
        known = [sequence for sequence in replayed if sequence < last and known_flushed(history, sequence)]
        if not known:
            continue
        victim = history.dice.choice(known)
        index = victim % RING_PAGES * PAGE_BYTES
        page = bytes(history.disk.stable[index : index + PAGE_BYTES])
        history.disk.stable[index : index + PAGE_BYTES] = flipped(
            page, history.dice.randrange(8 * PAGE_BYTES)
        )
        found, end = history.replay()
        assert found == [pair for pair in history.log if pair[0] < victim]
        assert (end.reason, end.next_sequence) == (EndReason.DAMAGED, victim)
        reported += 1
    assert reported > 40


def known_flushed(history: History, sequence: int) -> bool:
    """Whether anything on the disk says that this page was durable."""
    if sequence < history.superblock.epoch_start_sequence:
        return True
    later = range(sequence + 1, history.next_sequence)
    return any(int.from_bytes(history.disk.read(page)[64:72], "little") >= sequence for page in later)


def test_the_predecessor_starts_as_the_anchor_says() -> None:
    assert History(0).superblock.replay_predecessor == PREDECESSOR
