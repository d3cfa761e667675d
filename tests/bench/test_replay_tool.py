"""Replaying a trace against stores of several sizes: the sizes, the model beside it, and the document."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import blockkv
from blockkv.demo.replay import Request, footprint, percentiles_ms, read_trace
from blockkv.errors import OccupiedError
from blockkv.testing import SimulatedDevice

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import replay as replay_tool  # noqa: E402

MEBIBYTE = 1 << 20
CHUNK_BYTES = 16384


def requests_of(*hash_ids: tuple[int, ...]) -> list[Request]:
    return [Request(0, ids) for ids in hash_ids]


@pytest.mark.parametrize("data_bytes", [MEBIBYTE, 40 * MEBIBYTE, 1000 * MEBIBYTE])
def test_a_store_has_the_size_asked_for(data_bytes: int) -> None:
    size_bytes = replay_tool.store_bytes(data_bytes, CHUNK_BYTES)
    simulated = SimulatedDevice(size_bytes, discard_granularity_bytes=0)
    found = blockkv.format(simulated, average_chunk=CHUNK_BYTES)["data_bytes"]
    assert found >= data_bytes
    if size_bytes > replay_tool.LEAST_STORE_BYTES:
        assert found - data_bytes < 4 * MEBIBYTE


def test_the_model_is_least_recently_used() -> None:
    requests = requests_of((1, 2), (3,), (1, 2), (4,), (3,), (1,))
    # of three: 3 leaves for 4, which came after 1 and 2 were used; then 1 leaves for 3, and 2 for 1
    assert replay_tool.lru_hit_rate(requests, 3) == 2 / 8
    assert replay_tool.lru_hit_rate(requests, 4) == 4 / 8
    assert replay_tool.lru_hit_rate(requests_of((1, 2, 1)), 1) == 0


def test_the_model_with_room_for_all_hits_what_an_infinite_store_would() -> None:
    requests = read_trace(limit=300)
    asked = footprint(requests)
    assert replay_tool.lru_hit_rate(requests, asked.distinct_count) == pytest.approx(asked.infinite_hit_rate)


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles_ms([]) == {}
    found = percentiles_ms([number / 1000 for number in range(1001)])
    assert found == pytest.approx({"p50": 500, "p90": 900, "p99": 990, "p99.9": 999, "max": 1000})


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup", "addpart", "delpart")
def test_every_share_gets_a_store_of_its_size(loop_device: Callable[..., Path]) -> None:
    requests = read_trace(limit=150)
    asked = footprint(requests)
    device = loop_device(replay_tool.device_bytes(requests, [0.6], CHUNK_BYTES))
    seen: list[tuple[str, float]] = []
    small, large = replay_tool.replay_shares(
        device, requests, [0.3, 0.6], CHUNK_BYTES, True, lambda what, done: seen.append((what, done))
    )
    assert small["share"] == pytest.approx(0.3, abs=0.12)
    assert large["share"] == pytest.approx(0.6, abs=0.12)
    assert small["share"] < large["share"]
    assert small["chunks_evicted"] > large["chunks_evicted"] > 0
    assert small["hit_rate"] <= large["hit_rate"] <= asked.infinite_hit_rate
    for report in (small, large):
        assert report["hit_rate"] == pytest.approx(report["lru_hit_rate"], abs=0.03)
        assert report["checked_bytes"] == report["get_bytes"] > 0
        assert report["device_write_bytes"] > report["put_bytes"] > 0
        assert report["prefix_ms"]["p50"] <= report["prefix_ms"]["p99"] <= report["prefix_ms"]["max"]
        assert report["failed_get_count"] == 0
    assert seen[-1] == ("share 0.6", 300)


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4")
def test_an_occupied_device_is_left_alone(loop_device: Callable[..., Path]) -> None:
    device = loop_device(64 * MEBIBYTE)
    subprocess.run(["mkfs.ext4", "-q", "-F", device], check=True)
    before = hashlib.sha256(device.read_bytes()).digest()
    with pytest.raises(OccupiedError, match="ext4"):
        replay_tool.replay_shares(device, requests_of((1,)), [1], CHUNK_BYTES, False, lambda what, done: None)
    assert hashlib.sha256(device.read_bytes()).digest() == before


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup", "addpart", "delpart")
def test_the_tool_replays_a_trace_of_ones_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "hash_ids": list(range(first, first + 8))} for first in (0, 8, 0, 16)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    plot = tmp_path / "plot.png"
    command = [sys.executable, ROOT / "tools/replay.py", "--disk", tmp_path, "--trace", trace, "--json"]
    command += ["--share", "1", "--share", "2", "--chunk-kib", "64", "--plot", plot]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["trace"]["distinct_count"] == 24
    assert document["chunk_bytes"] == 65536
    for report in document["stores"]:
        assert report["hit_count"] == 8
        assert report["hit_rate_of_infinite"] == 1
        assert report["put_bytes"] == 24 * 65536
        assert "get_call_s" not in report
        assert {"p50", "p99", "p99.9"} < report["get_call_ms"].keys()
    assert "would hit if nothing were ever evicted" in done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
