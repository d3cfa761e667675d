"""The judge of the power cuts: what a drive may hold after one, and what a store may show."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/nvme_vm"))

from nbd_server import Event, Flush, Write
from oracle import Oracle
from power_cuts import Media

SECTOR = 512


def media_after(*events: tuple[Write | Flush, bool]) -> Media:
    media = Media("data", bytearray(8 * SECTOR))
    for subject, is_answer in events:
        media.follow(Event("data", subject, is_answer))
    return media


def states(media: Media) -> set[bytes]:
    """What the first two sectors may hold, one letter each."""
    rng = random.Random(1)
    return {bytes(media.cut(rng)[: 2 * SECTOR : SECTOR]) for _ in range(400)}


def test_a_flush_covers_what_was_answered_before_it_arrived() -> None:
    covered, late, flush = Write(0, b"a" * SECTOR), Write(SECTOR, b"b" * SECTOR), Flush()
    media = media_after((covered, False), (covered, True), (late, False), (flush, False), (late, True))
    assert states(media) == {b"\0\0", b"a\0", b"\0b", b"ab"}, "a flush under way has promised nothing"
    media.follow(Event("data", flush, is_answer=True))
    assert states(media) == {b"a\0", b"ab"}


def test_each_sector_is_kept_or_lost_by_itself() -> None:
    write = Write(0, b"a" * SECTOR + b"b" * SECTOR)
    assert states(media_after((write, False), (write, True))) == {b"\0\0", b"a\0", b"\0b", b"ab"}


def test_any_version_since_the_flush_may_be_there() -> None:
    first, second = Write(0, b"1" * SECTOR), Write(0, b"2" * SECTOR)
    media = media_after((first, False), (first, True), (second, False), (second, True))
    assert {state[:1] for state in states(media)} == {b"\0", b"1", b"2"}


def test_another_drive_is_none_of_its_business() -> None:
    media = media_after()
    media.follow(Event("other", Write(0, b"a" * SECTOR)))
    assert states(media) == {b"\0\0"}


HISTORY = (
    "put k 1",
    "durable k",
    "pinned k",
    "put lazy 1",
    "is-put lazy",
    "unpin k",
    "delete k",
    "is-deleted k",
    "put k 2",
)


@pytest.mark.parametrize(
    ("length", "found", "problems"),
    [
        (1, {}, 0),
        (1, {"k": 1}, 0),
        (2, {"k": 1}, 0),
        (2, {}, 0),  # it may have been evicted
        (3, {"k": 1}, 0),
        (3, {}, 1),
        (3, {"k": 2}, 1),
        (5, {"k": 1, "lazy": 1}, 0),
        (5, {"k": 1}, 0),
        (5, {"k": 1, "stranger": 1}, 1),
        (7, {}, 0),
        (8, {"k": 1}, 0),  # a lazy delete may be undone
        (9, {"k": 2}, 0),
        (9, {"k": 3}, 1),
    ],
)
def test_the_oracle(length: int, found: dict[str, int | None], problems: int) -> None:
    oracle = Oracle()
    for text in HISTORY[:length]:
        oracle.hear(text)
    assert len(oracle.judge(found)) == problems


def test_a_commit_covers_what_had_returned() -> None:
    oracle = Oracle()
    for text in (
        "put a 1",
        "is-put a",
        "pinned a",
        "put b 1",
        "commit t",
        "is-put b",
        "pinned b",
        "committed t",
    ):
        oracle.hear(text)
    assert oracle.judge({"a": 1, "b": 1}) == []
    assert oracle.judge({"a": 1}) == []
    assert len(oracle.judge({"b": 1})) == 1


def test_what_an_open_showed_stays() -> None:
    oracle = Oracle()
    for text in ("put a 1", "is-put a", "put b 1", "is-put b", "open", "found a 1", "missing b"):
        oracle.hear(text)
    assert oracle.violations == []
    assert oracle.judge({"a": 1}) == []
    assert len(oracle.judge({"a": 1, "b": 1})) == 1
    oracle.hear("found c 1")
    assert len(oracle.violations) == 1
