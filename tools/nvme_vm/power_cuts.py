"""What is on the media of a drive after the power was cut, and whether a store on it keeps its promises.

A `Media` follows the history of a drive. Every write that no answered flush covers is volatile: at a cut each
of its sectors has reached the media or has not, by itself.
"""

from __future__ import annotations

import random
from pathlib import Path

from nbd_server import SECTOR_BYTES, Event, Flush, Write
from oracle import Oracle
from payloads import version_of

import blockkv

__all__ = ["Media", "judge"]

WHOLE, LOST, TORN = "whole", "lost", "torn"


class Media:
    """The durable bytes of one drive, and the writes that may or may not be there too."""

    def __init__(self, drive: str, durable: bytearray) -> None:
        self.durable = durable
        self.flush_count = 0
        self._drive = drive
        self._volatile: list[Write] = []
        self._answered: set[Write] = set()
        self._covered: dict[Flush, list[Write]] = {}

    def follow(self, event: Event) -> None:
        if event.drive != self._drive:
            return
        subject = event.subject
        if isinstance(subject, Write):
            if event.is_answer:
                self._answered.add(subject)
            else:
                self._volatile.append(subject)
        elif isinstance(subject, Flush):
            if event.is_answer:
                self._settle(self._covered.pop(subject))
                self.flush_count += 1
            else:
                self._covered[subject] = [write for write in self._volatile if write in self._answered]

    @property
    def volatile_bytes(self) -> int:
        return sum(len(write.data) for write in self._volatile)

    def cut(self, rng: random.Random) -> bytearray:
        """The bytes on the media if the power fails now."""
        image = bytearray(self.durable)
        # from a drive that had written nothing to one that had written nearly all
        kept = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        torn = rng.choice((0.0, 0.5, 1.0))
        for write in self._volatile:
            if rng.random() < torn:
                for start in range(0, len(write.data), SECTOR_BYTES):
                    if rng.random() < kept:
                        at = write.offset + start
                        image[at : at + SECTOR_BYTES] = write.data[start : start + SECTOR_BYTES]
            elif rng.random() < kept:
                image[write.offset : write.offset + len(write.data)] = write.data
        return image

    def _settle(self, covered: list[Write]) -> None:
        for write in covered:
            self.durable[write.offset : write.offset + len(write.data)] = write.data
        settled = set(covered)
        self._volatile = [write for write in self._volatile if write not in settled]
        self._answered -= settled


def judge(image: Path, oracle: Oracle) -> list[str]:
    """Open what a cut left and compare; returns everything that is wrong. The image is written to."""
    try:
        with blockkv.open(image, commit_interval_ms=None) as store:
            found: dict[str, int | None] = {}
            problems = []
            keys = [str(key) for key in store.keys()]  # noqa: SIM118 - a store is no mapping
            for key, tensor in zip(keys, store.get_many(keys), strict=True):
                if tensor is None:
                    problems.append(f"unreadable: {key} is listed and does not verify")
                    continue
                try:
                    found[key] = version_of(key, tensor.numpy())
                except ValueError as error:
                    problems.append(f"wrong: {error}")
            problems += oracle.judge(found)
            report = store.check(payload=True)
            if not report.ok:
                problems.append(f"check: {report}")
            return problems
    except blockkv.NotFormatted as error:
        return [f"unopened: {error}"] if oracle.is_formatted else []
    except blockkv.BlockKVError as error:
        return [f"unopened: {type(error).__name__}: {error}"]
