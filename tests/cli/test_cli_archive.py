"""copy, dump, load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import answered, flip, json_answer

import blockkv


@pytest.fixture
def stores(image_dir: Path) -> tuple[Path, Path]:
    """One with twenty chunks, and an empty one."""
    paths = image_dir / "first.img", image_dir / "second.img"
    for path in paths:
        blockkv.format(path, size="64MiB", average_chunk="64KiB")
    with blockkv.open(paths[0]) as store:
        store.put_many(
            [(f"k{number}", torch.full((5000,), number, dtype=torch.uint8)) for number in range(20)]
        )
    return paths


def test_dump_and_load(stores: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = stores
    file = tmp_path / "kv.tar"
    found = json_answer("dump", first, file)
    assert (found.pop("chunks"), found.pop("payload_bytes")) == (20, 100_000)
    assert found == dict.fromkeys(("existing", "evicted", "no_room", "refused", "lost"), 0)
    assert "exists" in json_answer("dump", first, file, code=2)["error"]["message"]
    assert "exists" in json_answer("dump", first, second, code=2)["error"]["message"], "no device is written"
    assert json_answer("load", second, file)["chunks"] == 20
    assert "20 were there already" in answered("load", second, file).out
    assert json_answer("load", second, first, code=5)["error"]["type"] == "ArchiveError"
    json_answer("load", second, tmp_path / "none", code=4)
    with blockkv.open(second) as store:
        assert torch.equal(store.get("k7"), torch.full((5000,), 7, dtype=torch.uint8))


def test_through_a_pipe(stores: tuple[Path, Path]) -> None:
    first, second = stores
    command = f"{sys.executable} -m blockkv"
    piped = f"{command} dump {first} - | gzip | gunzip | {command} load {second} - --json"
    done = subprocess.run(piped, shell=True, capture_output=True, text=True, check=True)
    assert '"chunks": 20' in done.stdout
    assert "20 chunks" in done.stderr
    assert answered("dump", first, "-", "--json", code=2)


def test_copy(stores: tuple[Path, Path], image_dir: Path) -> None:
    first, second = stores
    assert json_answer("copy", first, second)["chunks"] == 20
    assert json_answer("copy", first, second, "--no-evict")["existing"] == 20
    json_answer("copy", first, image_dir / "none", code=4)
    json_answer("copy", first, first, code=3)
    members = [image_dir / "left.img", image_dir / "right.img"]
    blockkv.format(members, size="64MiB")
    assert json_answer("copy", first, ",".join(map(str, members)))["chunks"] == 20


def test_a_target_that_is_too_small(image_dir: Path) -> None:
    first, second = image_dir / "large.img", image_dir / "small.img"
    blockkv.format(first, size="48MiB")
    blockkv.format(second, size="24MiB")
    with blockkv.open(first) as store:
        store.put_many([(f"k{number:02}", torch.full((1 << 20,), number)) for number in range(4)])
    assert "2 did not fit" in answered("copy", first, second).out
    again = answered("copy", first, second).out
    assert "2 were there already" in again
    assert "2 did not fit beside those that were used later" in again
    assert "not wanted" not in again
    blockkv.format(second, size="24MiB", force=True)
    full = answered("copy", first, second, "--no-evict", code=1).out
    assert "2 chunks" in full
    assert "2 found no room" in full


def test_what_is_damaged_is_left_out(stores: tuple[Path, Path]) -> None:
    first, second = stores
    with blockkv.open(first) as store:
        entry = store.entry("k7")
        assert entry is not None
        offset_bytes = store._state.geometry.unit_offset(entry.extents[0][0])
    flip(first, offset_bytes + 100)
    answer = answered("copy", first, second, code=1)
    assert "19 chunks" in answer.out
    assert "1 could not be read" in answer.out
