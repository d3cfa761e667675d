"""Comparing a store with fio: what is measured, that it is checked, and that nobody's data is in the way."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blockkv
from blockkv.bench.compare import Case, CaseResult, Settings, ShapeResult, _check_gets, compare, plan_cases
from blockkv.bench.fio import SHAPES
from blockkv.errors import BlockKVError, InvalidArgument

pytestmark = pytest.mark.requires_tool("fio")

ROOT = Path(__file__).parents[2]
QUICK = Settings(pairs=2, seconds=0.1, shape_rounds=1)


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "store.img"
    path.write_bytes(bytes(128 << 20))
    return path


def test_every_case_is_measured_on_both_sides(image: Path) -> None:
    cases = plan_cases(chunk_sizes_bytes=[1 << 20], batch_bytes=4 << 20, memory=["huge"])
    announced: list[object] = []
    shapes, results = compare(image, cases, QUICK, announced.append, force=True)
    assert [result.case for result in results] == cases
    assert [(shape.op, shape.shape) for shape in shapes] == [(op, s) for op in ("get", "put") for s in SHAPES]
    assert len(announced) == len(shapes) + len(results)
    assert {type(found) for found in announced} == {ShapeResult, CaseResult}
    for result in results:
        assert result.pairs == 2
        assert result.ratio_spread[0] <= result.ratio <= result.ratio_spread[1]
        assert result.gb_per_s > 0.01
        assert result.fio_gb_per_s > 0.01
        assert 0 < result.cpu_s_per_gb < 50
        best = max((s for s in shapes if s.op == result.case.op), key=lambda shape: shape.gb_per_s)
        assert result.fio_shape == best.shape


def test_cases_fill_a_batch_with_chunks_and_never_less_than_one() -> None:
    cases = plan_cases(["get"], [2 << 20, 128 << 20], 64 << 20, [True], ["ordinary"])
    assert cases == [
        Case("get", 2 << 20, 32, True, "ordinary"),
        Case("get", 128 << 20, 1, True, "ordinary"),
    ]


@pytest.mark.parametrize("spoil", ["delete", "replace"])
def test_what_is_read_is_compared_with_what_was_put(image: Path, spoil: str) -> None:
    case = Case("get", 1 << 20, 2, True, "huge")
    chunks = [torch.full((case.chunk_bytes,), value, dtype=torch.uint8) for value in (1, 2)]
    outs = [torch.empty_like(chunk) for chunk in chunks]
    blockkv.format(image, force=True)
    with blockkv.open(image) as store:
        for number, chunk in enumerate(chunks):
            chunk[:8].view(torch.int64)[0] = number
            store.put(f"0/{number}", chunk)
        _check_gets(store, case, [["0/0", "0/1"]], chunks, outs)
        store.delete("0/1")
        if spoil == "replace":
            store.put("0/1", chunks[0])
        with pytest.raises(BlockKVError, match="read back is not what was put"):
            _check_gets(store, case, [["0/0", "0/1"]], chunks, outs)


def test_a_device_too_small_for_a_case_is_refused_with_the_numbers(image: Path) -> None:
    cases = plan_cases(chunk_sizes_bytes=[8 << 20], batch_bytes=64 << 20)
    with pytest.raises(InvalidArgument, match=rf"data zone has \d+ bytes, these cases need {768 << 20}"):
        compare(image, cases, QUICK, force=True)


def tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "fio_compare.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


QUICK_OPTIONS = ("--chunk-mib", "1", "--batch-mib", "4", "--pairs", "1", "--seconds", "0.1", "--verify", "on")


@pytest.mark.requires_root
def test_the_tool_measures_a_paced_device() -> None:
    done = tool(
        "--paced", "--size-gib", "0.25", "--read-gb-s", "1", "--memory", "huge", "--json", *QUICK_OPTIONS
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["device"]["paced_read_gb_per_s"] == 1
    assert [case["op"] for case in document["cases"]] == ["get", "put"]
    for case in document["cases"]:
        assert case.keys() == {
            *("op", "chunk_bytes", "chunks_per_call", "verify", "memory", "calls"),
            *("gb_per_s", "fio_gb_per_s", "ratio", "ratio_spread", "cpu_s_per_gb", "fio_cpu_s_per_gb"),
            *("fio_shape", "pairs", "call_latency_us", "fio_latency_us"),
        }
        for latency_us in (case["call_latency_us"], case["fio_latency_us"]):
            assert 0 < latency_us["p50"] <= latency_us["p99"] <= latency_us["p99.9"]
    assert "beside fio" in done.stderr  # the table


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4")
def test_the_tool_leaves_an_occupied_device_alone(image: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    before = hashlib.sha256(image.read_bytes()).digest()
    done = tool(image, *QUICK_OPTIONS)
    assert done.returncode != 0
    assert "ext4" in done.stderr
    assert hashlib.sha256(image.read_bytes()).digest() == before


def test_the_tool_wants_one_device() -> None:
    assert tool().returncode == 2
