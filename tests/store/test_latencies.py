"""Histograms of calls: right buckets, percentiles within them."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from blockkv.store.latencies import BUCKETS, Latencies, Latency


def test_each_call_is_in_its_bucket() -> None:
    latencies = Latencies()
    for took_us in (0, 1, 3, 4, 900, 1 << 40):
        latencies.note("get", time.monotonic_ns() - took_us * 1000)
    counts = latencies.read()["get"].counts
    assert sum(counts) == 6
    assert counts[-1] == 1
    bounds = Latency.upper_bounds_us()
    assert len(bounds) == BUCKETS - 1 == len(counts) - 1
    assert sum(count for count, bound in zip(counts, bounds, strict=False) if bound <= 512) >= 3
    assert latencies.read()["put"].count == 0


def test_percentiles_lie_in_the_bucket_of_their_call() -> None:
    counts = [0] * BUCKETS
    counts[5], counts[10] = 90, 10  # 16 to 32 us, 512 to 1024 us
    latency = Latency(tuple(counts), 0.01)
    assert latency.percentile_us(0) == 16
    assert latency.percentile_us(45) == pytest.approx(24)
    assert latency.percentile_us(90) == 32
    assert latency.percentile_us(95) == pytest.approx(768)
    assert latency.percentile_us(100) == 1024
    assert Latency((0,) * BUCKETS, 0).percentile_us(99) == 0


def test_what_raises_is_a_call_and_what_is_cancelled_is_none() -> None:
    latencies = Latencies()
    with pytest.raises(KeyError), latencies.timed("put"):
        raise KeyError
    futures: list[Future[Any]] = [Future() for _ in range(3)]
    for future in futures:
        latencies.time_future("get", future)
    futures[0].set_result(1)
    futures[1].set_exception(ValueError())
    futures[2].cancel()
    assert latencies.read()["put"].count == 1
    assert latencies.read()["get"].count == 2
