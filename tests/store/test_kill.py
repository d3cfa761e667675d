"""SIGKILL under load on a loop device: nothing durable is lost, nothing wrong is read, every open succeeds.

A slice of what `tools/kill_test.py` does; longer runs and their counts are in docs/fault-model.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "kill_test.py"


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_killed_under_load(loop_device, sector_bytes: int) -> None:  # type: ignore[no-untyped-def]
    device = loop_device(512 << 20, sector_bytes)
    done = subprocess.run(
        [sys.executable, TOOL, device, "--kills", "12", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["findings"] == []
    assert figures["kills"] == 12
    assert figures["durable_puts_acknowledged"] > 20
