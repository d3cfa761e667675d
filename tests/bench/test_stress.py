"""fio and a store in turn: what is counted as an error, what drift is, and that both sides verify."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import blockkv
from blockkv.bench import fio
from blockkv.bench.stress import SHAPE, Cycle, StressSettings, drift, error_count, stress
from blockkv.errors import BlockKVError, DeviceLost, InvalidArgument

pytestmark = pytest.mark.requires_tool("fio")

ROOT = Path(__file__).parents[2]
MEBIBYTE = 1 << 20
SETTINGS = StressSettings(hours=0, chunk_bytes=MEBIBYTE, batch_bytes=4 * MEBIBYTE)
GOOD = Cycle(1, 1.0, 3.0, 4.0, 2.0, 5.0, 0, 0, 0, 0, ())


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "store.img"
    path.write_bytes(bytes(96 * MEBIBYTE))
    return path


def test_ratios_are_store_per_fio_and_unknown_where_a_side_failed() -> None:
    assert (GOOD.put_ratio, GOOD.get_ratio, GOOD.errors) == (1.5, 0.8, 0)
    assert replace(GOOD, fio_read_gb_per_s=None).get_ratio is None
    assert replace(GOOD, put_gb_per_s=None).put_ratio is None


@pytest.mark.parametrize(
    "change",
    [
        {"fio_verify_errors": 1},
        {"wrong_chunks": 1},
        {"missing_chunks": 1},
        {"counted_damage": 1},
        {"failures": ("it broke",)},
    ],
)
def test_every_kind_of_error_counts(change: dict[str, Any]) -> None:
    assert error_count([GOOD, replace(GOOD, **change), GOOD]) == 1


def test_drift_is_the_last_quarter_by_the_first() -> None:
    assert drift([2.0, 2.0, 9.0, 9.0, 9.0, 9.0, 1.0, 1.0]) == 0.5
    assert drift([1.0, None, 3.0]) == 3
    assert drift([1.0]) is None
    assert drift([None, None]) is None


def test_a_cycle_verifies_both_sides(image: Path) -> None:
    seen: list[Cycle] = []
    cycles = stress(image, SETTINGS, seen.append, force=True)
    assert cycles == seen
    assert len(cycles) == 1, "no time, one cycle all the same"
    assert error_count(cycles) == 0
    assert cycles[0].put_ratio is not None
    assert cycles[0].get_ratio is not None
    with blockkv.open(image) as store:
        assert len(store) == 0


def test_time_makes_cycles(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle takes an hour here."""
    seen: list[Cycle] = []
    monkeypatch.setattr("blockkv.bench.stress.time", SimpleNamespace(monotonic=lambda: 3600.0 * len(seen)))
    cycles = stress(image, replace(SETTINGS, hours=2.5), seen.append, force=True)
    assert cycles == seen
    assert [cycle.number for cycle in cycles] == [1, 2, 3]
    assert [cycle.elapsed_s for cycle in cycles] == [0, 3600, 7200]
    assert error_count(cycles) == 0


def test_what_the_store_gives_wrong_is_counted(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = blockkv.Store.get_many

    def lying(store: blockkv.Store, keys: Any, outs: Any = None) -> list[Any]:
        found = honest(store, keys, outs)
        outs[0][77] ^= 1
        found[1] = False
        return found

    monkeypatch.setattr(blockkv.Store, "get_many", lying)
    cycle = stress(image, SETTINGS, force=True)[0]
    assert cycle.wrong_chunks == cycle.missing_chunks > 0
    assert cycle.fio_verify_errors == 0


def test_what_fio_reads_wrong_is_counted(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fio.run

    def damaging(path: Path, direction: Any, *arguments: Any, **options: Any) -> fio.FioRun:
        if direction == "read":
            with path.open("r+b") as file:
                for request in (0, 3):
                    file.seek(options["offset_bytes"] + request * SHAPE.request_bytes + 1000)
                    file.write(b"damage")
        return honest(path, direction, *arguments, **options)

    monkeypatch.setattr("blockkv.bench.stress.fio.run", damaging)
    assert stress(image, SETTINGS, force=True)[0].fio_verify_errors == 2


def test_an_exception_is_counted_and_a_lost_device_ends_it(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise BlockKVError("no room")

    monkeypatch.setattr(blockkv.Store, "put_many", fail)
    cycle = stress(image, SETTINGS, force=True)[0]
    assert cycle.failures == ("BlockKVError: no room",)
    assert cycle.put_ratio is None
    assert cycle.fio_read_gb_per_s is not None

    def vanish(*arguments: object, **options: object) -> None:
        raise DeviceLost("gone", 19)

    monkeypatch.setattr(blockkv.Store, "put_many", vanish)
    with pytest.raises(DeviceLost):
        stress(image, SETTINGS, force=True)


def test_a_device_too_small_is_refused(image: Path) -> None:
    with pytest.raises(InvalidArgument, match="these cases need"):
        stress(image, StressSettings(hours=0), force=True)


def tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools/fio_compare.py", "--stress", "--hours", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_tool_reports_cycles_and_drift(image: Path, tmp_path: Path) -> None:
    image.write_bytes(bytes(400 * MEBIBYTE))
    plot = tmp_path / "plot.png"
    done = tool(image, "--batch-mib", "16", "--json", "--plot", plot)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.keys() == {"device", "settings", "cycles", "drift", "errors"}
    assert document["errors"] == 0
    assert document["drift"] == {"put_ratio": None, "get_ratio": None}
    assert document["cycles"][0]["get_ratio"] > 0
    assert "1 cycles, 0 errors" in done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_tool_leaves_a_store_with_chunks_alone(image: Path) -> None:
    blockkv.format(image, force=True)
    with blockkv.open(image) as store:
        store.put("a", b"kept")
    done = tool(image, "--batch-mib", "4")
    assert done.returncode != 0
    with blockkv.open(image) as store:
        assert store.get("a") is not None
