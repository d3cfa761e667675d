"""Two paths, one, or the page cache: a small run of everything, and how its result is put together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blockkv.bench.device import CGROUP_ROOT
from blockkv.bench.memory_group import PREFIX, memory_group
from blockkv.bench.two_paths import ARMS, Shape, Timing, Work, measure
from blockkv.errors import BlockKVError

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import dual_path  # noqa: E402

MIB = 1 << 20
SHAPE = Shape(tensors=6, prefill_bytes=3 * MIB, step_bytes=64 << 10, steps=2)


def test_the_workload_notices_other_bytes() -> None:
    work = Work(SHAPE)
    rows = torch.cat(list(work.prefill(4)))
    work.use(4, 0, rows)
    rows = torch.cat([rows, work.step(4, 0)])
    work.use(4, 1, rows)
    for wrong in (None, rows[:-1], torch.zeros_like(rows)):
        with pytest.raises(BlockKVError):
            work.use(4, 1, wrong)
    with pytest.raises(BlockKVError):
        work.use(5, 1, rows)


def test_rows_are_medians_beside_the_better_one() -> None:
    def timings(*totals: float) -> list[Timing]:
        return [Timing(1.0, total - 1.0, 0.5) for total in totals]

    found = {0.5: {"mmap": timings(9, 8, 30), "direct": timings(4, 5, 6), "dual": timings(5, 4, 3)}}
    (row,) = dual_path.rows_of(found)
    assert (row["cap_fraction"], row["mmap_s"], row["direct_s"], row["dual_s"]) == (0.5, 9, 5, 4)
    assert row["dual_over_best"] == 0.8
    assert row["dual_over_best_by_round"] == [1.25, 0.8, 0.5]
    assert row["dual_memory_share"] == 0.5
    assert dual_path.table_of([row], SHAPE).row_count == 1


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4", "mount", "losetup")
def test_every_arrangement_runs_in_its_group(loop_device: Any) -> None:
    device = loop_device(256 * MIB, 4096)
    for arm in ARMS:
        timing = measure(arm, device, SHAPE, 160 * MIB, None)
        assert timing.prefill_s > 0
        assert timing.decode_s > 0
        assert timing.memory_share == (1.0 if arm == "dual" else 0.0)
    with pytest.raises(BlockKVError, match="dual with"):
        measure("dual", device, SHAPE, 8 * MIB, None)
    assert not list(CGROUP_ROOT.glob(f"**/{PREFIX}{os.getpid()}"))


@pytest.mark.requires_root
def test_groups_of_killed_processes_are_removed() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with memory_group(64 * MIB, None) as group:
        left = group.with_name(f"{PREFIX}{child.pid}")
        other = group.with_name(f"{PREFIX}{os.getppid()}")
        left.mkdir()
        other.mkdir()
    try:
        with memory_group(64 * MIB, None):
            assert not left.exists()
            assert other.exists(), "that process lives"
    finally:
        other.rmdir()


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4", "mount", "losetup")
def test_the_document(tmp_path: Path) -> None:
    shape = ["--tensors", "4", "--tensor-mib", "2", "--steps", "1", "--rounds", "1"]
    caps = ["--cap", "20", "--cap", "12", "--plot", str(tmp_path / "paths.png")]
    command = [sys.executable, ROOT / "tools" / "dual_path.py", "--paced", "--json", *shape, *caps]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["cap_fraction"] for row in document["caps"]] == [20.0, 12.0]
    for row in document["caps"]:
        assert row["dual_over_best"] == row["dual_s"] / min(row["mmap_s"], row["direct_s"])
    assert document["workload"]["kv_bytes"] == 4 * (2 * MIB + (256 << 10))
    assert (tmp_path / "paths.png").stat().st_size > 1000
