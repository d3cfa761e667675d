"""Fixtures every test may use: images in memory, loop devices, and the rule that CI skips nothing.

`image_dir`      a directory in memory for device images, removed after the test
`loop_device`    makes loop devices of a given size and LBA size, detached after the test
`block_targets`  runs a test three times: on a regular file, and on loop devices with 512 and 4096 byte LBAs

With BLOCKKV_TEST_DEVICES, a list of device paths separated by colons, both make devices of those instead: a
whole one where its size is the one asked for, else a partition of the largest. Their content is lost.

Markers `requires_root` and `requires_tool("mkfs.xfs", ...)` skip where something is missing. With CI=true or
BLOCKKV_REQUIRE_ALL=1 the same thing is a failure: a check that silently does not run is no check.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

MEMORY_DIR = Path("/dev/shm")
DIRECTORY_PREFIX = "blockkv-test."
MEMORY_DIR_MIN_FREE_BYTES = 1 << 30
ATTACH_ATTEMPTS = 20
GIVEN_DEVICES = [Path(name) for name in os.environ.get("BLOCKKV_TEST_DEVICES", "").split(":") if name]
PARTITION_ALIGNMENT_BYTES = 1 << 20


class LoopDevices(Protocol):
    """Signature of the `loop_device` fixture."""

    def __call__(self, size_bytes: int, sector_bytes: int = 512, read_only: bool = False) -> Path: ...


class Targets(Protocol):
    """Signature of the `block_targets` fixture."""

    def __call__(self, size_bytes: int) -> Path: ...


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs the tests in its background hands on an ignored SIGINT, to what is under test too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "requires_root: needs root (loop devices, mounts, cgroups)")
    config.addinivalue_line("markers", "requires_tool(*names): needs these programs on PATH")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist a file is run by one process, and so are all that reserve huge pages or pace devices.

    What takes longest comes first, so that nobody waits for it in the end.
    """
    if not hasattr(config, "workerinput"):
        return
    items.sort(key=lambda item: [slow not in item.path.parts for slow in ("vm", "connectors")])
    for item in items:
        benchmark = item.path.parent.name == "bench" or item.path.stem == "test_cli_bench"
        item.add_marker(pytest.mark.xdist_group("bench" if benchmark else item.path.stem))


def everything_is_required() -> bool:
    return os.environ.get("CI") == "true" or os.environ.get("BLOCKKV_REQUIRE_ALL") == "1"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and everything_is_required() and skipped_tests(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if everything_is_required() and (reports := skipped_tests(terminalreporter.config)):
        terminalreporter.write_line(f"{len(reports)} skipped, and in CI nothing may be", red=True)


def skipped_tests(config: pytest.Config) -> list[object]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return list(reporter.stats.get("skipped", [])) if reporter else []


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("requires_root"):
        need_root()
    for marker in item.iter_markers("requires_tool"):
        need_tools(*marker.args)


def need_root() -> None:
    if os.geteuid() != 0:
        missing("root")


def need_tools(*names: str) -> None:
    absent = [name for name in names if shutil.which(name) is None]
    if absent:
        missing(", ".join(absent))


def missing(what: str) -> None:
    """Skip the running test, or fail it where everything has to be there."""
    if everything_is_required():
        pytest.fail(f"needs {what}, and in CI nothing may be missing", pytrace=False)
    pytest.skip(f"needs {what}")


@pytest.fixture(scope="session")
def session_image_dir() -> Iterator[Path]:
    """One directory for the images of this run, in memory where there is room for them."""
    parent = MEMORY_DIR
    # those who give devices say with TMPDIR what is to be below files
    if GIVEN_DEVICES or not parent.is_dir() or shutil.disk_usage(parent).free < MEMORY_DIR_MIN_FREE_BYTES:
        parent = Path(tempfile.gettempdir())
    remove_leftovers(parent)
    directory = parent / f"{DIRECTORY_PREFIX}{os.getpid()}"
    directory.mkdir()
    yield directory
    detach_all_below(directory)
    shutil.rmtree(directory)


@pytest.fixture
def image_dir(session_image_dir: Path) -> Iterator[Path]:
    """An empty directory for device images; what is left in it is detached and removed after the test."""
    directory = Path(tempfile.mkdtemp(dir=session_image_dir))
    yield directory
    detach_all_below(directory)
    shutil.rmtree(directory)


@pytest.fixture
def loop_device(image_dir: Path) -> Iterator[LoopDevices]:
    """Make loop devices: `loop_device(size_bytes, sector_bytes=512, read_only=False) -> Path`.

    Each has its own sparse image in memory and direct I/O on, so its limits are those of a real device.
    """
    need_root()
    if GIVEN_DEVICES:
        devices = GivenDevices()
        yield devices.make
        devices.give_back()
        return
    need_tools("losetup")
    numbers = itertools.count()

    def make(size_bytes: int, sector_bytes: int = 512, read_only: bool = False) -> Path:
        image = image_dir / f"loop-{next(numbers)}.img"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        return attach(image, sector_bytes, read_only)

    yield make


class GivenDevices:
    """Makes what a test asks for of the devices it was given, and takes it apart again."""

    def __init__(self) -> None:
        self._whole: list[Path] = []
        self._partitions: list[tuple[Path, int]] = []
        self._used_bytes: dict[Path, int] = {}

    def make(self, size_bytes: int, sector_bytes: int = 512, read_only: bool = False) -> Path:
        fitting = {
            disk: given_size_bytes
            for disk, given_size_bytes in sizes_of_given_devices(sector_bytes).items()
            if disk not in self._whole
        }
        device = next((disk for disk, given in fitting.items() if given == size_bytes), None)
        if device is None:
            device = self._partition(max(fitting, key=fitting.__getitem__), size_bytes)
        else:
            self._whole.append(device)
            subprocess.run(["partx", "--delete", device], capture_output=True, check=False)
        zero_out = ["blkdiscard", "--force", "--zeroout", device]
        subprocess.run(zero_out, check=True, capture_output=True)
        if read_only:
            subprocess.run(["blockdev", "--setro", device], check=True)
        return device

    def _partition(self, disk: Path, size_bytes: int) -> Path:
        offset_bytes = self._used_bytes.get(disk, PARTITION_ALIGNMENT_BYTES)
        aligned_bytes = -(-size_bytes // PARTITION_ALIGNMENT_BYTES) * PARTITION_ALIGNMENT_BYTES
        self._used_bytes[disk] = offset_bytes + aligned_bytes
        assert self._used_bytes[disk] <= size_of_given_device(disk), f"{disk} is too small for this test"
        number = len(self._partitions) + 1
        subprocess.run(
            ["addpart", disk, str(number), str(offset_bytes // 512), str(size_bytes // 512)], check=True
        )
        self._partitions.append((disk, number))
        return Path(f"{disk}p{number}")

    def give_back(self) -> None:
        for disk, number in self._partitions:
            subprocess.run(["delpart", disk, str(number)], check=True)
        for disk in self._whole:
            subprocess.run(["blockdev", "--setrw", disk], check=True)


def size_of_given_device(disk: Path) -> int:
    return int(Path("/sys/block", disk.name, "size").read_text()) * 512


def sizes_of_given_devices(sector_bytes: int) -> dict[Path, int]:
    return {
        disk: size_of_given_device(disk)
        for disk in GIVEN_DEVICES
        if int(Path("/sys/block", disk.name, "queue/logical_block_size").read_text()) == sector_bytes
    }


def target_kinds() -> list[str]:
    if not GIVEN_DEVICES:
        return ["file", "loop512", "loop4096"]
    return [f"device{size}" for size in (512, 4096) if sizes_of_given_devices(size)]


@pytest.fixture(params=target_kinds())
def block_targets(request: pytest.FixtureRequest, image_dir: Path) -> Targets:
    """Make whatever the test is parametrised for: `block_targets(size_bytes) -> Path`."""
    kind: str = request.param
    if kind == "file":
        numbers = itertools.count()

        def make_file(size_bytes: int) -> Path:
            image = image_dir / f"file-{next(numbers)}.img"
            with image.open("wb") as file:
                file.truncate(size_bytes)
            return image

        return make_file
    loop_devices: LoopDevices = request.getfixturevalue("loop_device")
    sector_bytes = int(kind.removeprefix("loop").removeprefix("device"))
    return lambda size_bytes: loop_devices(size_bytes, sector_bytes)


def attach(image: Path, sector_bytes: int, read_only: bool) -> Path:
    """Put a loop device over `image`. Retries: another process may take the free number first."""
    command = ["losetup", "--find", "--show", "--direct-io=on", f"--sector-size={sector_bytes}"]
    if read_only:
        command.append("--read-only")
    for _ in range(ATTACH_ATTEMPTS):
        done = subprocess.run([*command, str(image)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Path(done.stdout.strip())
        time.sleep(0.05)
    raise RuntimeError(f"losetup could not attach {image}: {done.stderr.strip()}")


def detach_all_below(directory: Path) -> None:
    """Detach every loop device whose image lies in `directory`, also one that a test made by itself."""
    for backing_file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            image = Path(backing_file.read_text().strip().removesuffix(" (deleted)"))
        except OSError:  # detached by its owner while we looked
            continue
        if image.is_relative_to(directory):
            # on a device that is still open this marks it for detaching at the last close
            subprocess.run(["losetup", "--detach", f"/dev/{backing_file.parts[3]}"], check=False)


def remove_leftovers(parent: Path) -> None:
    """Clean up after runs that were killed: their directory names a process that is gone."""
    for directory in parent.glob(f"{DIRECTORY_PREFIX}*"):
        process = directory.name.removeprefix(DIRECTORY_PREFIX)
        if process.isdigit() and not Path("/proc", process).exists():
            detach_all_below(directory)
            shutil.rmtree(directory, ignore_errors=True)
