"""A real NVMe driver in a virtual machine: a selection of what `tools/nvme_vm/nvme_vm.py` does.

Longer runs and their counts are in docs/testing-nvme.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools/nvme_vm/nvme_vm.py"

pytestmark = [
    pytest.mark.requires_root,
    pytest.mark.requires_tool("qemu-system-x86_64", "busybox", "cpio", "depmod"),
    pytest.mark.timeout(1800),
]


def figures_of(*arguments: str) -> dict[str, Any]:
    """What the tool reports; its own words when it found something."""
    done = subprocess.run(
        [sys.executable, TOOL, *arguments, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_the_device_tests_pass_on_namespaces_of_both_lba_sizes() -> None:
    figures = figures_of("suite", "--quick")
    assert figures["failures"] == []
    assert figures["tests"] >= 63


def test_power_cuts_lose_nothing_that_was_acknowledged() -> None:
    """And a store that does not flush is found out, or the judge is no judge."""
    figures = figures_of("cuts", "--count", "30", "--boots", "1", "--mutant-cuts", "10", "--events", "1500")
    assert figures["findings"] == []
    assert figures["cuts"] == 30
    assert figures["mutant_violations"] > 0
    assert figures["durable_acknowledged"] > 50
    assert figures["largest_volatile_bytes"] > 0


def test_faults_of_the_drive_end_as_documented() -> None:
    figures = figures_of("faults")
    assert figures["failures"] == []
    assert figures["tests"] >= 13
