"""The device tests, and the store tests that use a real device, on namespaces of the guest.

They are the same tests that run on loop devices outside; `tests/conftest.py` gives them namespaces instead.
Both LBA formats are there in several sizes, so that most tests get a whole namespace.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from guest_system import GuestSystem
from machine import Machine, MachineError, Namespace
from workspace import workspace

__all__ = ["QUICK", "SuiteFigures", "run_suite", "run_tests"]

ROOT = Path(__file__).parents[2]
GUEST_SUITE = Path(__file__).with_name("guest_suite.py")
LBA_SIZES = (512, 4096)
NAMESPACE_SIZES_MIB = (1, 4, 8, 16, 32, 64, 96, 2048)
SCRATCH_MIB = 4096
PLACING = (
    ("placing", 1, 4096, "0-3"),
    ("placing", 2, 512, "4-5"),
    ("placing", 3, 4096, "6"),
    ("grouped", 1, 4096, "0-3"),
)
"""Namespaces with placement handles: controller, nsid, LBA size and which handles."""
PLACING_SIZE_MIB = 96
METADATA_SIZE_MIB = 32
TIMEOUT_S = 3600.0

FULL = (
    "tests/vm/guest_namespace.py",
    "tests/vm/guest_passthrough.py",
    "tests/vm/guest_placement.py",
    "tests/vm/guest_doctor.py",
    "tests/vm/guest_encryption.py",
    "tests/vm/guest_deploy.py",
    "tests/device/test_engine.py",
    "tests/device/test_engine_lifecycle.py",
    "tests/device/test_namespace.py",
    "tests/device/test_holders.py",
    "tests/device/test_occupancy.py",
    "tests/store/test_integrity.py",
)
QUICK = (
    "tests/vm/guest_namespace.py",
    "tests/vm/guest_passthrough.py",
    "tests/vm/guest_placement.py",
    "tests/vm/guest_doctor.py",
    "tests/vm/guest_encryption.py",
    "tests/vm/guest_deploy.py",
    "tests/device/test_engine.py::test_random_batches_match_a_copy_in_memory[device512-io_uring]",
    "tests/device/test_engine.py::test_random_batches_match_a_copy_in_memory[device4096-io_uring]",
    "tests/device/test_engine.py::test_neighbours_on_the_device_become_one_request",
    "tests/device/test_engine.py::test_only_what_is_misaligned_bounces",
    "tests/device/test_engine_lifecycle.py::test_discard_empties_what_it_names",
    "tests/device/test_engine_lifecycle.py::test_close_waits_for_what_is_in_flight",
    "tests/device/test_namespace.py::test_readers_share_and_exclude_writers",
    "tests/device/test_namespace.py::test_a_read_only_device_is_refused_to_writers",
)
"""What CI runs."""

ELSEWHERE = (
    # of loop devices and what is below them
    "tests/device/test_engine_lifecycle.py::test_media_errors_of_a_device_stay_with_their_transfer",
    "tests/device/test_engine_lifecycle.py::test_a_device_that_lost_its_size_is_gone",
    "tests/device/test_namespace.py::test_a_device_that_cannot_discard_says_so",
    "tests/device/test_namespace.py::test_identity_of_a_loop_device",
    "tests/device/test_namespace.py::test_the_backing_file_of_a_loop_device_is_refused",
    "tests/device/test_namespace.py::test_two_loop_devices_over_the_same_bytes_are_one",
    "tests/device/test_namespace.py::test_loop_devices_over_different_bytes_are_independent",
    "tests/device/test_namespace.py::test_a_loop_device_over_a_file_somebody_has_locked_is_refused",
    "tests/device/test_namespace.py::test_a_loop_device_over_an_unlinked_file_is_usable",
    "tests/device/test_namespace.py::test_a_detached_loop_device_has_no_bytes",
    "tests/device/test_occupancy.py::test_a_mounted_file_system",
    "tests/device/test_occupancy.py::test_a_loop_device_over_it",
    "tests/device/test_occupancy.py::test_another_loop_device_over_the_same_file",
    # of files in memory, where the guest's kernel has no direct I/O
    "tests/device/test_engine_lifecycle.py::test_a_full_backing_store_is_an_error_of_that_transfer",
    "tests/device/test_namespace.py::test_limits_of_a_file_in_memory",
    # count requests on a device that takes 128 segments in one; NVMe takes 127
    "tests/device/test_engine.py::test_requests_are_no_larger_than_the_limit",
    "tests/device/test_engine_lifecycle.py::test_requests_inside_a_registered_region_are_fixed",
    # of partition tables whose partitions the kernel has not read
    "tests/device/test_occupancy.py::test_a_partition_table",
    # of what the guest has not: Btrfs in its kernel, a root that is no chroot
    "tests/device/test_occupancy.py::test_every_member_of_a_mounted_btrfs",
    "tests/device/test_occupancy.py::test_a_mount_in_another_namespace",
    # want it quick, or larger than the guest's memory
    "tests/device/test_namespace.py::test_a_mounted_device_is_refused_at_once",
    "tests/device/test_occupancy.py::test_it_is_quick_and_reads_only_the_ends",
)
"""Tests that say nothing about a namespace."""


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
    with workspace() as directory:
        namespaces: list[Namespace] = []
        for lba_bytes in LBA_SIZES:
            for size_mib in NAMESPACE_SIZES_MIB:
                namespaces.append(image_namespace(directory, len(namespaces) + 1, lba_bytes, size_mib))
        scratch = image_namespace(directory, len(namespaces) + 1, 4096, SCRATCH_MIB)
        with_metadata = [
            replace(
                image_namespace(directory, nsid, 4096, METADATA_SIZE_MIB, "metadata"),
                metadata_bytes=8,
                protection_type=nsid - 1,
            )
            for nsid in (1, 2)
        ]
        placing = [
            replace(
                image_namespace(directory, nsid, lba_bytes, PLACING_SIZE_MIB, controller),
                reclaim_unit_handles=handles,
            )
            for controller, nsid, lba_bytes, handles in PLACING
        ]
        deselected = [f"--deselect={test}" for test in ELSEWHERE]
        arguments = [str(GUEST_SUITE), "--scratch", str(scratch.nsid), *selected, *deselected]
        return run_tests(system, [*namespaces, scratch, *with_metadata, *placing], arguments, say)


def image_namespace(
    directory: Path, nsid: int, lba_bytes: int, size_mib: int, controller: str = "fixed"
) -> Namespace:
    image = directory / f"{controller}-{nsid}.img"
    image.touch()
    os.truncate(image, size_mib << 20)
    return Namespace(image, nsid, lba_bytes, controller)


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
