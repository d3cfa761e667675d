"""Many threads and processes at once: a slice of what `tools/soak.py` does, and what its oracle notices."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import blockkv
from blockkv.catalog.index import Index
from blockkv.space.allocator import Allocator
from blockkv.store import gets
from blockkv.store.state import State

TOOL = Path(__file__).parents[2] / "tools" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_slice(loop_device: Any) -> None:
    device = loop_device(64 << 20, 4096)
    command = [sys.executable, TOOL, "--device", device, "--seconds", "8", "--seed", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = json.loads(done.stdout)
    assert figures["findings"] == []
    assert figures["get_chunks"] > 20
    assert figures["chunks_evicted"] > 0
    assert figures["refusals"] > 0


def test_a_slice_on_threads_and_a_file(image_dir: Path) -> None:
    path = image_dir / "store"
    with path.open("wb") as file:
        file.truncate(48 << 20)
    command = [sys.executable, TOOL, "--device", path, "--seconds", "3", "--engine", "threads", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = json.loads(done.stdout)
    assert figures["engine"] == "threads"
    assert figures["findings"] == []
    assert figures["get_chunks"] > 20


# -- the oracle sees what it should ------------------------------------------------------------------------


@pytest.fixture
def oracle(soak: ModuleType) -> Any:
    found = soak.Oracle(2)
    found.running = {}
    return found


def put(oracle: Any, key: int, was_put: bool = True) -> int:
    version = oracle.begin_put(key)
    oracle.end_put(key, version, oracle.now(), was_put)
    return int(version)


def test_an_ordinary_history_is_no_finding(oracle: Any) -> None:
    first = put(oracle, 0)
    oracle.end_get(0, first, oracle.now())
    assert put(oracle, 0, was_put=False) > first
    oracle.end_delete(0, True, oracle.now())
    oracle.end_get(0, None, oracle.now())
    second = put(oracle, 0)
    oracle.end_get(0, second, oracle.now())
    oracle.end_contains(0, True, oracle.now())
    oracle.end_get(1, None, oracle.now())
    assert oracle.findings == []


def test_overlapping_operations_may_see_either(oracle: Any) -> None:
    first = put(oracle, 0)
    reading = oracle.now()
    oracle.end_delete(0, True, oracle.now())
    second = put(oracle, 0)
    oracle.end_get(0, first, reading)  # it began while the first was there
    oracle.end_get(0, second, reading)
    assert oracle.findings == []


@pytest.mark.parametrize("event", ["delete", "miss", "other", "contains"])
def test_what_was_gone_is_stale(oracle: Any, event: str) -> None:
    first = put(oracle, 0)
    if event == "delete":
        oracle.end_delete(0, True, oracle.now())
    elif event == "miss":
        oracle.end_get(0, None, oracle.now())
    elif event == "contains":
        oracle.end_contains(0, False, oracle.now())
    else:
        put(oracle, 0)
    oracle.running[0] = 0
    oracle.end_get(0, first, oracle.now())
    assert oracle.counts == {"stale": 1}


def test_what_was_never_put_is_a_phantom(oracle: Any) -> None:
    oracle.end_get(0, 77, oracle.now())
    put(oracle, 0, was_put=False)
    oracle.end_delete(0, True, oracle.now())
    version = oracle.begin_put(0)
    oracle.end_get(0, version, oracle.now())
    oracle.end_put(0, version, oracle.now(), None)
    assert oracle.counts == {"phantom": 4}


def test_every_sector_names_its_chunk(soak: ModuleType) -> None:
    for size_bytes in soak.SIZES:
        value = soak.payload(5, 9, size_bytes)
        assert value.numel() == size_bytes
        assert soak.version_in(value) == 9
        assert torch.equal(value, soak.payload(5, 9, size_bytes))
        assert not torch.equal(value, soak.payload(5, 10, size_bytes))
    mixed = torch.cat([soak.payload(5, 9, 4096)[:2048], soak.payload(6, 3, 4096)[2048:]])
    text = soak.describe_difference(mixed, soak.payload(5, 9, 4096))
    assert "4 sectors of 4096 bytes" in text
    assert "4: [6, 3, 4, 4096]" in text


class NoIntruders:
    def kept_away(self) -> Any:
        return contextlib.nullcontext()

    def end(self) -> dict[str, Any]:
        return {"refused": 0, "findings": []}


def run(soak: ModuleType, path: Path, seconds: float) -> Any:
    blockkv.format(path, size=32 << 20, average_chunk="64KiB", journal="512KiB")
    return soak.Soak(str(path), 3, 4, "auto").run(seconds, NoIntruders(), lambda _: None)


def test_deletes_that_do_nothing_are_noticed(
    soak: ModuleType, image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockkv.Store, "delete", lambda *_, **__: True)
    figures = run(soak, image_dir / "store", 2)
    assert figures["stale"] + figures["phantom"]


@pytest.fixture
def slow_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between finding a chunk and reading it, time enough for others to make room, and to take this one."""
    allocate = gets.allocate

    def dawdle(layouts: Any) -> Any:
        time.sleep(0.01)
        return allocate(layouts)

    def evict_newest(state: State, units: int) -> int:
        index, found = state.index, 0
        for entry in reversed(list(index)):
            if found < max(units, 256) and not (index.leases(entry) or index.pins(entry)):
                state.delete(entry)
                state.counters["chunks_evicted"] += 1
                found += entry.units
        return found

    monkeypatch.setattr(gets, "allocate", dawdle)
    monkeypatch.setattr(State, "evict", evict_newest)


@pytest.mark.usefixtures("slow_readers")
def test_slow_readers_are_no_finding(soak: ModuleType, image_dir: Path) -> None:
    assert run(soak, image_dir / "store", 2)["findings"] == []


@pytest.mark.usefixtures("slow_readers")
def test_reuse_under_a_reader_is_noticed(
    soak: ModuleType, image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extents of a deleted chunk are given out at once, whoever reads them still. On a busy machine somebody
    does once in a second or two.
    """
    monkeypatch.setattr(Index, "leases", lambda *_: 0)
    monkeypatch.setattr(Allocator, "defer", lambda self, extents, _: self.release(extents))
    for turn in range(20):
        figures = run(soak, image_dir / f"store {turn}", 4)
        if figures["wrong"] + figures["inconsistent"]:
            return
    pytest.fail("it was not noticed")
