"""One store, one writer: by whatever name, from whatever process, a second is refused and writes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import blockkv
from blockkv.device import namespace

TOOL = Path(__file__).parents[2] / "tools" / "race_test.py"
SIZE_BYTES = 16 << 20

Names = Callable[[str], tuple[str, list[str]]]


def tool(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout.strip()


def digest(path: str) -> bytes:
    with Path(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "blake2b").digest()


def impatient() -> Any:
    """Nobody lets go meanwhile, so nobody need wait for it; outside udev may still be probing."""
    return mock.patch.object(namespace, "LOCK_WAIT_S", 0.05)


@pytest.fixture
def names(image_dir: Path, loop_device: Any) -> Iterator[Names]:
    """Make a device or file of a kind: (the path to hold it by, every other way to it)."""
    with contextlib.ExitStack() as stack:

        def attach(over: object) -> str:
            path = tool("losetup", "--find", "--show", "--partscan", "--direct-io=on", over)
            stack.callback(tool, "losetup", "--detach", path)
            return path

        def node(device: str) -> str:
            path = image_dir / f"node-of-{Path(device).name}"
            os.mknod(path, stat.S_IFBLK | 0o600, Path(device).stat().st_rdev)
            return str(path)

        def link(target: str) -> str:
            path = image_dir / "link"
            path.symlink_to(target)
            return str(path)

        def make(kind: str) -> tuple[str, list[str]]:
            image = image_dir / "image"
            with image.open("wb") as file:
                file.truncate(SIZE_BYTES)
            if kind == "file":
                (image_dir / "hard").hardlink_to(image)
                mount_point = image_dir / "mounted"
                mount_point.mkdir()
                tool("mount", "--bind", image_dir, mount_point)
                stack.callback(tool, "umount", mount_point)
                stack.enter_context(contextlib.chdir(image_dir))
                others = ["image", link("image"), str(image_dir / "hard"), str(mount_point / "image")]
                return str(image), [str(image), *others]
            if kind == "file below a loop device":
                device = attach(image)
                return device, [str(image)]
            if kind == "device":
                device = attach(image)
                return device, [device, node(device), link(device)]
            if kind == "twins":
                first, second = attach(image), attach(image)
                return first, [second]
            if kind == "stacked":
                lower = attach(image)
                upper = attach(lower)
                return upper, [lower]
            disk = attach(image)
            tool("addpart", disk, 1, 2048, (SIZE_BYTES >> 9) - 4096)
            tool("addpart", disk, 2, (SIZE_BYTES >> 9) - 2048, 1024)
            part = f"{disk}p1"
            return part, [part, node(part), disk, node(disk)]

        yield make


def refusals(path: str) -> list[BaseException]:
    """What opening for writing, opening for reading and formatting by force end with."""
    found: list[BaseException] = []
    for attempt in (
        lambda: blockkv.open(path).close(),
        lambda: blockkv.open(path, read_only=True).close(),
        lambda: blockkv.format(path, force=True),
    ):
        try:
            with impatient():
                attempt()
        except BaseException as error:
            found.append(error)
        else:
            found.append(AssertionError(f"{path} was opened"))
    return found


KINDS = ["file", "file below a loop device", "device", "twins", "stacked", "partition"]


@pytest.mark.requires_root
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_is_refused_before_it_writes(names: Names, kind: str) -> None:
    path, others = names(kind)
    blockkv.format(path, average_chunk="64KiB")
    with blockkv.open(path, commit_interval_ms=None) as store:
        store.put("key", b"value" * 3000, durable=True)
        before = digest(path)
        for other in others:
            for error in refusals(other):
                assert isinstance(error, blockkv.DeviceBusy), f"{other}: {error!r}"
                assert "losetup -d" in str(error) or "held by" in str(error) or "close" in str(error)
        child = os.fork()
        if child == 0:
            wrong = [
                other for other in others for e in refusals(other) if not isinstance(e, blockkv.DeviceBusy)
            ]
            os._exit(len(wrong))
        assert os.waitpid(child, 0)[1] == 0
        assert digest(path) == before
        assert store.get("key") is not None
    with blockkv.open(path) as store:  # and nobody stays locked out
        assert store.contains("key")


@pytest.mark.requires_root
def test_a_loop_device_over_a_held_file(image_dir: Path) -> None:
    image = image_dir / "image"
    blockkv.format(image, size=SIZE_BYTES, average_chunk="64KiB")
    with blockkv.open(image) as store:
        device = tool("losetup", "--find", "--show", image)
        try:
            store.put("key", b"value", durable=True)
            before = digest(str(image))
            assert all(isinstance(error, blockkv.DeviceBusy) for error in refusals(device))
            assert digest(str(image)) == before
        finally:
            tool("losetup", "--detach", device)


def test_readers_keep_a_writer_out_and_each_other_in(block_targets: Any) -> None:
    target = block_targets(SIZE_BYTES)
    blockkv.format(target)
    with blockkv.open(target, read_only=True), blockkv.open(target, read_only=True, engine="threads"):
        before = digest(str(target))
        with impatient(), pytest.raises(blockkv.DeviceBusy):
            blockkv.open(target)
        with impatient(), pytest.raises(blockkv.DeviceBusy):
            blockkv.format(target, force=True)
        assert digest(str(target)) == before


@pytest.mark.requires_root
def test_a_reader_by_another_node_keeps_a_writer_out(loop_device: Any, image_dir: Path) -> None:
    device = loop_device(SIZE_BYTES)
    blockkv.format(device)
    node = image_dir / "node"
    os.mknod(node, stat.S_IFBLK | 0o600, device.stat().st_rdev)
    with blockkv.open(node, read_only=True) as store:
        assert store.info()["path"] == str(device)
        with impatient(), pytest.raises(blockkv.DeviceBusy):
            blockkv.open(device)


def test_of_many_threads_one_gets_in(block_targets: Any) -> None:
    target = block_targets(SIZE_BYTES)
    blockkv.format(target)
    barrier, opened, refused = threading.Barrier(8), [], []

    def attempt() -> None:
        barrier.wait()
        try:
            opened.append(blockkv.open(target))
        except blockkv.DeviceBusy as error:
            refused.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert len(refused) == 7
    opened[0].close()


@pytest.mark.requires_root
def test_races(image_dir: Path) -> None:
    """A slice of what `tools/race_test.py` does."""
    command = [sys.executable, TOOL, "--races", "25", "--seed", "11", "--directory", image_dir, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["findings"] == []
    assert figures["winners"] == 25
    assert figures["refused"] == 125
