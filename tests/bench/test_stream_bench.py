"""Streaming with simulated compute: what counts as a stall, the queue's pace, and the document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blockkv
from blockkv.demo.replay import Request

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import stream_bench  # noqa: E402


def test_excess_is_what_no_look_ahead_could_hide_taken_off() -> None:
    hidden = stream_bench.Streamed(2.0, io_s=1.0, compute_s=2.0, stall_s=0.03, peak_bytes=1, bound_bytes=2)
    assert hidden.least_stall_s == 0
    assert hidden.excess == pytest.approx(0.03)
    partly = stream_bench.Streamed(0.4, io_s=1.0, compute_s=0.4, stall_s=0.62, peak_bytes=1, bound_bytes=2)
    assert partly.excess == pytest.approx(0.02)
    between = stream_bench.median_of([hidden, hidden, partly])
    assert between.stall_s == 0.03
    assert between.bound_bytes == 2


def test_work_has_the_stored_prefix_and_the_pace_that_was_asked_for() -> None:
    requests = [Request(1000, (1, 2)), Request(2000, (1, 2, 3)), Request(3000, (1, 9))]
    work = stream_bench.work_of(requests, compute_s_per_chunk=0.5, load=0.8)
    assert [one.keys for one in work] == [(), ("trace/1", "trace/2"), ("trace/1",)]
    assert [one.compute_s for one in work] == [1.0, 0.5, 0.5]
    assert [one.arrival_s for one in work] == pytest.approx([0, 1.25, 2.5]), (
        "2 s of compute are 80 % of 2.5 s"
    )


@pytest.mark.parametrize("preload", [False, True])
def test_every_request_with_a_prefix_gets_its_first_layer(image_dir: Path, preload: bool) -> None:
    layout = stream_bench.layout_of(4, 16384)
    blockkv.format(image_dir / "store.img", size="64MiB")
    requests = [Request(number, (1, 2, 10 + number)) for number in range(6)]
    work = stream_bench.work_of(requests, 0.002, 5.0)
    with blockkv.open(image_dir / "store.img") as store:
        stream_bench.fill(store, sorted({key for one in work for key in one.keys}), layout.payload_bytes)
        served = stream_bench.serve(store, work, layout, preload, 2)
        assert len(served.first_layer_ms) == 5
        assert served.waiting_at_once >= 1
        assert store.stats()["get_part_bytes"] == 5 * 2 * layout.payload_bytes
        assert not store._state.any_leased()


def test_streaming_stays_within_the_bound(image_dir: Path) -> None:
    layout = stream_bench.layout_of(8, 131072)
    blockkv.format(image_dir / "store.img", size="64MiB")
    with blockkv.open(image_dir / "store.img") as store:
        stream_bench.fill(store, ["a", "b"], layout.payload_bytes)
        outs = list(torch.empty((2, layout.payload_bytes), dtype=torch.uint8).unbind(0))
        io_s = stream_bench.io_seconds(store, ["a", "b"], outs)
        run = stream_bench.streamed(store, ["a", "b"], layout, 0.5, io_s, 1 << 20)
        assert 0 < run.peak_bytes <= run.bound_bytes == 1 << 20
        assert run.compute_s > 0


def test_the_tool_prints_a_document(image_dir: Path) -> None:
    image = image_dir / "device.img"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    options = "--force --chunks 1 --layers 8 --requests 20 --chunk-kib 64 --rounds 1 --compute 0 --compute 1"
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "stream_bench.py", image, *options.split(), "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    document = json.loads(done.stdout)
    assert [row["compute_share"] for row in document["streaming"]] == [0, 1]
    assert all(row["peak_bytes"] <= row["bound_bytes"] for row in document["streaming"])
    assert document["first_layer_ratio"] > 0
    assert (
        document["first_layer_ms"]["queued"]["count"] == document["first_layer_ms"]["at_start"]["count"] > 0
    )
