"""The example runs as it stands, here on a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_clients.py"


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup")
def test_two_processes_share_a_device(loop_device) -> None:
    words = [sys.executable, EXAMPLE, loop_device(128 << 20, 4096)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found 4 of 6 chunks, computes 2" in done.stdout
    assert "the owner is back, 6 of 6 chunks are there" in done.stdout
    assert done.stdout.count("owner:    serving") == 2
