"""`blockkv top`: the figures of an interval, from a store that works meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import answered, json_answer

import blockkv
from blockkv.cli.top import Sample, figures, percentile_us
from blockkv.metrics import serve_metrics


@pytest.fixture
def busy(store: Path) -> Iterator[str]:
    """The endpoint of a store that puts and gets all the time, one get in four a miss."""
    stop = threading.Event()
    with blockkv.open(store) as opened, serve_metrics(opened, port=0) as port:

        def work() -> None:
            number = 0
            while not stop.wait(0.002):
                opened.put(f"k{number}", torch.zeros(10_000))
                opened.get_many([f"k{number}"] * 1)
                opened.get_many([f"k{number - 1}", f"k{number - 2}", "never"])
                number += 1

        thread = threading.Thread(target=work)
        thread.start()
        yield f"http://127.0.0.1:{port}/metrics"
        stop.set()
        thread.join()


def test_an_interval_of_a_busy_store(busy: str, store: Path) -> None:
    document = json_answer("top", busy, "--interval", "1")
    (shown,) = document.values()
    assert list(document) == [str(store)]
    assert shown["hit_rate"] == pytest.approx(0.75, abs=0.05)
    assert shown["put_gb_per_s"] > 0
    assert shown["get_gb_per_s"] > 2 * shown["put_gb_per_s"]
    assert shown["operations"]["put"]["calls_per_s"] > 10
    assert 0 < shown["operations"]["get"]["p50_us"] <= shown["operations"]["get"]["p99_us"]
    assert shown["written_tb_per_day"] > 0
    text = answered("top", busy, "--once", "--interval", "0.2", "--rated-tbw", "600").out
    assert "hit rate" in text
    assert "days to 600 TB" in " ".join(text.split())


def test_figures_are_differences() -> None:
    before = Sample(10.0, {"get_chunks": 5, "get_misses": 5, "get_bytes": 1e9, "chunks": 7})
    before.calls["get"] = {0.001: 3, 0.1: 4, float("inf"): 4}
    before.call_s["get"] = 1.0
    after = Sample(12.0, {"get_chunks": 8, "get_misses": 6, "get_bytes": 5e9, "chunks": 9})
    after.calls["get"] = {0.001: 12, 0.1: 13, float("inf"): 14}
    after.call_s["get"] = 5.0
    shown = figures(before, after)
    assert shown["hit_rate"] == 0.75
    assert shown["get_gb_per_s"] == 2.0
    assert shown["operations"]["get"] == {
        "calls_per_s": 5.0,
        "in_progress": 2.0,
        "p50_us": 1000.0,
        "p99_us": 100_000.0,
        "stalls": 1,
    }
    quiet = figures(after, after)
    assert quiet["hit_rate"] is None
    assert quiet["operations"]["get"]["p99_us"] == percentile_us({}, 50) == 0


def test_what_cannot_be_asked(store: Path) -> None:
    answered("top", "ftp://somewhere", code=2)
    assert "does not answer" in answered("top", "http://127.0.0.1:9/metrics", code=4).err
