"""NIXL's POSIX plugin moves the extents of chunks, from raw devices."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, engine_python, run_in

import blockkv

WORKER = Path(__file__).parent / "workers" / "nixl_moves.py"
EXAMPLE = ROOT / "examples" / "nixl_extents.py"


@pytest.mark.requires_root
@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_the_example_on_a_raw_device(loop_device: Any, sector_bytes: int) -> None:
    done = subprocess.run(
        [engine_python("nixl"), EXAMPLE, loop_device(64 << 20, sector_bytes)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "8 chunks moved by NIXL, 8 equal to what was put",
        "a byte changed on the way: told",
    ]


@pytest.mark.requires_root
def test_chunks_in_pieces_on_an_array_of_raw_devices(loop_device: Any) -> None:
    devices = [str(loop_device(64 << 20)) for _ in range(2)]
    blockkv.format(devices, average_chunk="64KiB")
    found = run_in("nixl", WORKER, *devices)
    assert found["equal"] == 4
    assert found["pieces"] > 8
    assert found["devices"] == 4  # a descriptor for each, although there are two devices
