"""Ageing a store: what is drawn, what is counted, that all follows from the seed, and that it adds up."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import blockkv
from blockkv.bench.ftl import Ftl
from blockkv.errors import BlockKVError

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import churn  # noqa: E402
from churn import MEBIBYTE, Churn, Pass, Settings, Sizes, Trace  # noqa: E402

from blockkv.testing import OperationKind  # noqa: E402

SIZE_BYTES = 96 * MEBIBYTE
SETTINGS = Settings(times=3, fill=0.9, reads=0.5, batch_bytes=2 * MEBIBYTE, seed=3)
FTL = {"over_provisioning": 0.07, "erase_unit_bytes": MEBIBYTE}


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "store.img"
    with path.open("wb") as file:
        file.truncate(SIZE_BYTES)
    return path


def run(
    image: Path, settings: Settings = SETTINGS, discard: str = "model"
) -> tuple[list[Pass], dict[str, Any]]:
    return churn.churn(image, settings, FTL, discard, True, lambda number, share: None)


def test_sizes_are_a_mixture_within_bounds() -> None:
    sizes = Sizes(random.Random(1), churn.MOST_BYTES)
    drawn = [sizes.draw() for _ in range(5000)]
    assert min(drawn) >= churn.LEAST_BYTES
    assert max(drawn) <= churn.MOST_BYTES
    assert all(size % churn.SIZE_STEP_BYTES == 0 for size in drawn)
    assert 100 << 10 < statistics.median(drawn) < 400 << 10
    assert sum(size > 4 * MEBIBYTE for size in drawn) / 5000 == pytest.approx(0.2, abs=0.05)
    again = Sizes(random.Random(1), churn.MOST_BYTES)
    assert [again.draw() for _ in range(100)] == drawn[:100]


def test_extents_that_follow_each_other_are_one_piece() -> None:
    assert churn.joined([(8, 4), (12, 4), (20, 1), (0, 2)]) == [(8, 8), (20, 1), (0, 2)]
    assert churn.joined([]) == []


def test_pieces_are_described_as_they_are() -> None:
    found = churn.describe_pieces([[8192], [4096, 4096], [4096]], [8000, 8000, 100])
    assert found == {
        "chunks": 3,
        "live_bytes": 20480,
        "mean_run_bytes": 5120,
        "fragmented_share": pytest.approx(1 / 3),
        "rounding_share": pytest.approx(1 - 16100 / 20480),
    }
    assert churn.describe_pieces([], [])["mean_run_bytes"] == 0


def test_the_model_sees_writes_and_discards_and_no_flushes() -> None:
    ftl = Ftl(8 * MEBIBYTE, 0.1, MEBIBYTE)
    trace = Trace(ftl)
    trace.record(OperationKind.WRITE, 4096, 8192)
    trace.record(OperationKind.FLUSH, 0, 0)
    trace.record(OperationKind.DISCARD, 4096, 4096)
    assert ftl.host_pages == 0, "nothing before it is asked for"
    trace.work_off()
    assert (ftl.host_pages, ftl.discarded_pages) == (2, 1)
    trace.work_off()
    assert ftl.host_pages == 2


@pytest.mark.parametrize("fill", [0.9, 1.0])
def test_an_aged_store_adds_up(image: Path, fill: float) -> None:
    settings = Settings(times=3, fill=fill, reads=0.5, batch_bytes=2 * MEBIBYTE, seed=3)
    passes, accounting = run(image, settings)
    assert [one.number for one in passes] == [1, 2, 3]
    assert accounting["adds_up"]
    assert accounting["check_ok"]
    assert accounting["lost_count"] == 0
    assert accounting["rounding_bytes"] >= 0
    live = accounting["used_bytes"] / accounting["data_bytes"]
    if fill < 1:
        assert accounting["chunks_deleted"] > 0
        assert fill - 0.1 < live <= fill
    else:
        assert accounting["chunks_evicted"] > 0
        assert live > 0.85
    for one in passes:
        assert one.payload_bytes >= accounting["data_bytes"]
        assert one.write_amplification > 1
        assert one.ftl_write_amplification >= 1
        assert 0 <= one.fragmented_share <= 1
        assert one.mean_run_bytes >= 4096
        assert one.mean_request_bytes >= 4096
        assert 0 <= one.rounding_share < 0.2


def test_a_drive_that_keeps_apart_what_leaves_first_writes_less(image: Path) -> None:
    settings = Settings(times=3, fill=0.9, reads=0.5, batch_bytes=2 * MEBIBYTE, seed=3, brief=0.5)
    amplification = []
    for handles in (1, 2):
        passes, accounting = churn.churn(
            image, settings, FTL, "model", True, lambda number, share: None, handles
        )
        assert accounting["adds_up"]
        assert accounting["lost_count"] == 0
        amplification.append(passes[-1].ftl_write_amplification)
    assert amplification[1] < amplification[0]


def test_a_drive_that_is_told_about_free_space_writes_less(image: Path) -> None:
    told, _ = run(image)
    untold, accounting = run(image, discard="off")
    assert accounting["adds_up"]
    assert told[-1].ftl_write_amplification < untold[-1].ftl_write_amplification


def test_discards_go_to_the_device_too(image: Path) -> None:
    passes, accounting = run(image, discard="device")
    assert len(passes) == 3
    assert accounting["adds_up"]


def test_payloads_and_sizes_follow_from_the_seed(image: Path) -> None:
    drawn = []
    for seed in (1, 1, 2):
        blockkv.format(image, force=True)
        with blockkv.open(image) as store:
            ftl = Ftl(SIZE_BYTES, **FTL)
            ager = Churn(store, Trace(ftl), ftl, Settings(1, 0.9, 0, MEBIBYTE, seed))
            ager._draw_batch()
            drawn.append((dict(ager.live), ager.arena[:64].tolist()))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_wrong_byte_ends_it(image: Path) -> None:
    blockkv.format(image, force=True)
    with blockkv.open(image) as store:
        ftl = Ftl(SIZE_BYTES, **FTL)
        ager = Churn(store, Trace(ftl), ftl, SETTINGS)
        batch = ager._draw_batch()
        store.put_many([(key, ager.payload(key)) for key in batch])
        ager._read(batch, churn.Clock())
        ager.payload(batch[0])[5] ^= 1
        with pytest.raises(BlockKVError, match="is not what was put"):
            ager._read(batch, churn.Clock())


def test_a_missing_chunk_ends_it(image: Path) -> None:
    blockkv.format(image, force=True)
    with blockkv.open(image) as store:
        ftl = Ftl(SIZE_BYTES, **FTL)
        ager = Churn(store, Trace(ftl), ftl, SETTINGS)
        batch = ager._draw_batch()
        with pytest.raises(BlockKVError, match="is missing"):
            ager._read(batch, churn.Clock())


def test_the_last_pass_is_compared_with_the_first() -> None:
    first = Pass(1, 1, 2.0, 0.1, 4.0, 0.1, 1, 1, 1, 1, 1, 100, 0, 0, 1, 1)
    last = Pass(2, 1, 1.0, 0.2, 4.0, 0.1, 1, 1, 1, 1, 1, 50, 0, 0, 1, 1)
    assert churn.beside_first([first, last]) == {
        "put_gb_per_s": 0.5,
        "get_gb_per_s": 1.0,
        "put_cpu_s_per_gb": 2.0,
        "get_cpu_s_per_gb": 1.0,
        "mean_run_bytes": 0.5,
    }


def tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools/churn.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_tool_reports_passes_and_accounting(image: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    done = tool(image, "--force", "--times", "1.5", "--batch-mib", "2", "--json", "--plot", plot)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.keys() == {"device", "settings", "ftl", "passes", "last_to_first", "accounting"}
    assert len(document["passes"]) == 2
    assert document["accounting"]["adds_up"]
    assert document["passes"][0].keys() == set(Pass.__slots__)
    assert "FTL write amplification" in done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_tool_leaves_an_occupied_device_alone(image: Path) -> None:
    blockkv.format(image, force=True)
    with blockkv.open(image) as store:
        store.put("a", b"kept")
    assert tool(image).returncode != 0
    with blockkv.open(image) as store:
        assert store.get("a") is not None


def test_the_tool_refuses_a_fill_that_is_no_share(image: Path) -> None:
    assert tool(image, "--fill", "95").returncode == 2
