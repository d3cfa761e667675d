"""How long calls take: histograms whose buckets double, from a microsecond to a minute.

A call is what the caller waits for: a `get_many` of a hundred chunks is one, and so is a future from its
submission on. Not here: how long the device takes.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

__all__ = ["BUCKETS", "KINDS", "Latencies", "Latency"]

KINDS = ("get", "put", "durable_put")
BUCKETS = 27
"""Bucket i holds what took less than 2^i us, and not less than half of that; the last one, all else."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Calls of one kind since open."""

    counts: tuple[int, ...]
    """Of each bucket: see `upper_bounds_us`."""
    total_s: float

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    @staticmethod
    def upper_bounds_us() -> tuple[int, ...]:
        """Of all buckets but the last, which has none."""
        return tuple(1 << number for number in range(BUCKETS - 1))

    def percentile_us(self, percent: float) -> float:
        """What `percent` of the calls did not exceed, within the factor of 2 that a bucket is wide.

        0 where there were none. Calls are taken to be spread evenly within their bucket.
        """
        wanted, below = self.count * percent / 100, 0
        for number, count in enumerate(self.counts):
            if count and below + count >= wanted:
                low, high = (1 << number) / 2, float(1 << number)
                return low + (high - low) * (wanted - below) / count
            below += count
        return 0.0


class Latencies:
    """Collects them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {kind: [0] * BUCKETS for kind in KINDS}
        self._total_ns = dict.fromkeys(KINDS, 0)

    def note(self, kind: str, begun_ns: int) -> None:
        """A call of that kind, which began then (`time.monotonic_ns`), has ended."""
        took_ns = time.monotonic_ns() - begun_ns
        bucket = min((took_ns // 1000).bit_length(), BUCKETS - 1)
        with self._lock:
            self._counts[kind][bucket] += 1
            self._total_ns[kind] += took_ns

    def timed(self, kind: str) -> _Timed:
        """A context that is one call; one that raises counts as well."""
        return _Timed(self, kind)

    def time_future(self, kind: str, future: Future[Any]) -> None:
        """Count a call that has just been submitted when its future is done; a cancelled one is none."""
        begun_ns = time.monotonic_ns()

        def done(ended: Future[Any]) -> None:
            if not ended.cancelled():
                self.note(kind, begun_ns)

        future.add_done_callback(done)

    def read(self) -> dict[str, Latency]:
        """By kind."""
        with self._lock:
            return {
                kind: Latency(tuple(counts), self._total_ns[kind] / 1e9)
                for kind, counts in self._counts.items()
            }


class _Timed:
    """See `Latencies.timed`. Not a generator: every get and put goes through it."""

    __slots__ = ("_begun_ns", "_kind", "_latencies")

    def __init__(self, latencies: Latencies, kind: str) -> None:
        self._latencies = latencies
        self._kind = kind

    def __enter__(self) -> None:
        self._begun_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._latencies.note(self._kind, self._begun_ns)
