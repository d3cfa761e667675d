"""The device tests, and the store tests that use a real device, on namespaces of the guest.

They are the same tests that run on loop devices outside; `tests/conftest.py` gives them namespaces instead.
Both LBA formats are there in several sizes, so that most tests get a whole namespace.
"""

from __future__ import annotations

import os
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from guest_system import GuestSystem
from machine import Machine, MachineError, Namespace

__all__ = ["QUICK", "SuiteFigures", "run_suite", "run_tests"]

ROOT = Path(__file__).parents[2]
GUEST_SUITE = Path(__file__).with_name("guest_suite.py")
MEMORY_DIR = Path("/dev/shm")  # noqa: S108 - images belong in memory
LBA_SIZES = (512, 4096)
NAMESPACE_SIZES_MIB = (1, 4, 8, 16, 32, 64, 96, 2048)
SCRATCH_MIB = 4096
TIMEOUT_S = 3600.0

FULL = (
    "tests/vm/guest_namespace.py",
    "tests/device/test_engine.py",
    "tests/device/test_engine_lifecycle.py",
    "tests/device/test_namespace.py",
    "tests/device/test_holders.py",
    "tests/device/test_occupancy.py",
    "tests/store/test_integrity.py",
    "tests/store/test_kill.py",
)
QUICK = (
    "tests/vm/guest_namespace.py",
    "tests/device/test_engine.py::test_only_what_is_misaligned_bounces",
)
ELSEWHERE: tuple[str, ...] = ()
"""Tests of what is not a namespace: they ask for a loop device's backing file, or for a file in memory."""


@dataclass
class SuiteFigures:
    """Outcome of the tests that ran in the guest."""

    tests: int = 0
    failed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.tests > 0 and not self.failed


def run_suite(system: GuestSystem, selected: Sequence[str], say: Callable[[str], None]) -> SuiteFigures:
    """Run pytest in the guest on both LBA formats. Raises MachineError."""
    with tempfile.TemporaryDirectory(prefix="blockkv-vm.", dir=MEMORY_DIR) as name:
        namespaces: list[Namespace] = []
        for lba_bytes in LBA_SIZES:
            for size_mib in NAMESPACE_SIZES_MIB:
                namespaces.append(image_namespace(Path(name), len(namespaces) + 1, lba_bytes, size_mib))
        scratch = image_namespace(Path(name), len(namespaces) + 1, 4096, SCRATCH_MIB)
        deselected = [f"--deselect={test}" for test in ELSEWHERE]
        arguments = [str(GUEST_SUITE), str(scratch.nsid), *selected, *deselected]
        return run_tests(system, [*namespaces, scratch], arguments, say)


def image_namespace(directory: Path, nsid: int, lba_bytes: int, size_mib: int) -> Namespace:
    image = directory / f"{nsid}.img"
    image.touch()
    os.truncate(image, size_mib << 20)
    return Namespace(image, nsid, lba_bytes)


def run_tests(
    system: GuestSystem,
    namespaces: Sequence[Namespace],
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> SuiteFigures:
    """Run a Python script of ours in the guest that reports as JUnit XML."""
    script = [["cd", str(ROOT)], [str(ROOT / ".venv/bin/python"), *arguments]]
    with Machine(system, namespaces, script, on_line=say) as machine:
        status = machine.wait(TIMEOUT_S)
        return read_results(machine.report(), status)


def read_results(report: Sequence[str], status: int) -> SuiteFigures:
    """The report is the XML, then how the script ended."""
    text = "\n".join(line for line in report if not line.startswith("exit "))
    if not text:
        raise MachineError(f"the tests in the guest ended with {status} and without results")
    figures = SuiteFigures()
    for case in ElementTree.fromstring(text).iter("testcase"):  # noqa: S314 - pytest of the guest wrote it
        figures.tests += 1
        figures.seconds += float(case.get("time", "0"))
        for problem in (child for child in case if child.tag in ("failure", "error", "skipped")):
            figures.failed += 1
            figures.failures.append(f"{case.get('classname')}::{case.get('name')}: {problem.get('message')}")
    if status and not figures.failed:
        raise MachineError(f"the tests in the guest passed and pytest ended with {status}")
    return figures
