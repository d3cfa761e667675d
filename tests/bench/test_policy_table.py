"""The table of policies: its simulation, by small traces that can be worked out and by the one that ships."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockkv.demo.replay import Request, footprint, read_trace

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import policy_table  # noqa: E402
import replay  # noqa: E402

REQUESTS = 400
SHARES = (0.05, 0.25)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    requests = read_trace(None, REQUESTS)
    return policy_table.documents(policy_table.measure(requests, SHARES, True, lambda what, done: None))


def found(rows: list[dict[str, Any]], share: float, eviction: str, admission: str) -> dict[str, Any]:
    return next(
        row
        for row in rows
        if (row["share"], row["eviction"], row["admission"]) == (share, eviction, admission)
    )


def test_lru_is_the_lru_of_the_replay(rows: list[dict[str, Any]]) -> None:
    requests = read_trace(None, REQUESTS)
    for share in SHARES:
        row = found(rows, share, "LRU", "all")
        modelled = replay.lru_hit_rate(requests, row["capacity_count"])
        assert row["hit_rate"] == pytest.approx(modelled, abs=0.003)


def test_nobody_does_better_than_belady_and_belady_no_better_than_an_endless_store(
    rows: list[dict[str, Any]],
) -> None:
    endless = footprint(read_trace(None, REQUESTS)).infinite_hit_rate
    for share in SHARES:
        best = found(rows, share, "Belady", "own")
        assert best["hit_rate"] <= endless + 1e-9
        assert all(row["hit_rate"] <= best["hit_rate"] for row in rows if row["share"] == share)
        assert best["gap_closed"] == 1


def test_every_policy_is_in_the_table_and_admission_saves_writes(rows: list[dict[str, Any]]) -> None:
    names = {row["eviction"] for row in rows}
    assert names == {*policy_table.EVICTIONS, *policy_table.TRIED, "S3-FIFO, strict", "Belady"}
    for eviction in policy_table.EVICTIONS:
        written = [
            found(rows, 0.05, eviction, admission)["written_count"]
            for admission in ("all", "adaptive", "twice")
        ]
        assert written == sorted(written, reverse=True)


def test_counts_that_can_be_worked_out() -> None:
    """A store of two chunks: 1 2, then 1 2 again, then 3 4, then 1 2."""
    requests = [Request(0, (1, 2)), Request(1, (1, 2)), Request(2, (3, 4)), Request(3, (1, 2))]
    asked = policy_table.chains(requests)
    clock = policy_table.Clock()
    assert policy_table.replay(asked, 2, clock, policy_table.Lru(), None) == (2, 6)
    assert policy_table.replay(asked, 2, clock, policy_table.Lru(), policy_table.SecondAsk()) == (2, 2)
    assert policy_table.belady(asked, 2) == (4, 2)


def test_the_tool_prints_one_document(tmp_path: Path) -> None:
    plot = tmp_path / "policies.png"
    ran = subprocess.run(
        [TOOLS / "policy_table.py", "--requests", "50", "--share", "0.2", "--json", "--plot", plot],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(TOOLS.parent)},
    )
    document = json.loads(ran.stdout)
    assert document["trace"]["request_count"] == 50
    assert len(document["outcomes"]) == 10
    assert "gap closed" in ran.stderr
    assert plot.stat().st_size > 1000
