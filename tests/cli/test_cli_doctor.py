"""`blockkv doctor`: says the right thing, and ends with the right code."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import blockkv_command
from seccomp_filter import IO_URING_ENTER, IO_URING_REGISTER, IO_URING_SETUP, forbid

import blockkv
import blockkv.cli.examine  # as somebody else it cannot be imported any more

NOBODY = 65534
MIB = 1 << 20


def doctor(
    *arguments: str | Path, before: Callable[[], None] = lambda: None
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the first observation of each topic; in a process in which `before` runs first.

    Forked: somebody else may not be able to reach this Python.
    """
    there, here = multiprocessing.Pipe()

    def run() -> None:
        before()
        answer = blockkv_command("doctor", *arguments, "--json")
        there.send((answer.code, answer.out or answer.err))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    there.close()
    code, out = here.recv()
    child.join()
    document = json.loads(out)
    assert "observations" in document, out
    return code, {one["topic"]: one for one in reversed(document["observations"])}


@pytest.fixture
def direct_loop(loop_device: Any) -> Iterator[Path]:
    """A loop device that takes direct I/O through to its file. Its node keeps the mode it had."""
    device: Path = loop_device(64 * MIB, 4096)
    subprocess.run(["losetup", "--direct-io=on", device], check=True)
    mode = device.stat().st_mode
    yield device
    device.chmod(mode)


def test_a_good_machine_and_a_good_device(direct_loop: Path) -> None:
    code, found = doctor()
    assert code == 0
    assert set(found) == {"kernel", "io_uring", "locked memory", "huge pages", "checksums"}
    code, found = doctor(direct_loop)
    assert code == 0
    assert found["engine"]["found"] == "io_uring, with direct I/O"
    assert "`blockkv format` takes it" in found["content"]["found"]


def test_a_store_is_told_from_other_content(direct_loop: Path) -> None:
    blockkv.format(direct_loop)
    code, found = doctor(direct_loop)
    assert (code, found["content"]["verdict"]) == (0, "good")
    with blockkv.open(direct_loop):
        code, found = doctor(direct_loop)
        assert code == 3
        assert f"pid {os.getpid()}" in found["in use"]["found"]
        assert found["engine"]["verdict"] == "good", "the rest is looked at all the same"


def test_a_store_that_needs_a_larger_device(image_dir: Path) -> None:
    path = image_dir / "kv.img"
    uuid = blockkv.format(path, size=64 * MIB)["uuid"]
    os.truncate(path, 48 * MIB)
    code, found = doctor(path)
    assert (code, found["size"]["verdict"]) == (4, "unusable")
    assert f"{48 * MIB} bytes, and the store on it needs {64 * MIB}" in found["size"]["found"]
    assert f"blockkv wipe {path} --uuid {uuid}" in found["size"]["fixes"][2]
    os.truncate(path, 64 * MIB)
    assert doctor(path)[1]["size"]["verdict"] == "good"


@pytest.mark.requires_tool("sfdisk")
def test_a_store_whose_device_was_given_away(direct_loop: Path) -> None:
    blockkv.format(direct_loop)
    subprocess.run(["sfdisk", "-q", direct_loop], input="label: gpt\nsize=8MiB\n", text=True, check=True)
    code, found = doctor(direct_loop)
    assert (code, found["content"]["verdict"]) == (3, "refused")
    assert "made after the store that was there" in found["content"]["found"]


@pytest.mark.requires_tool("mkfs.ext4")
def test_a_mounted_device_is_refused(direct_loop: Path, tmp_path: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", direct_loop], check=True)
    code, found = doctor(direct_loop)
    assert code == 3
    assert "ext4" in found["content"]["found"]
    subprocess.run(["mount", direct_loop, tmp_path], check=True)
    try:
        code, found = doctor(direct_loop)
        assert code == 3
        assert f"ext4 file system mounted on {tmp_path}" in found["in use"]["found"]
        assert found["in use"]["fixes"] == [f"umount {tmp_path}"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_no_permission(direct_loop: Path) -> None:
    direct_loop.chmod(0o600)
    code, found = doctor(direct_loop, before=become_nobody)
    assert code == 4
    assert found["permission"]["verdict"] == "unusable"
    assert "/etc/udev/rules.d/60-blockkv.rules" in found["permission"]["fixes"][2]
    assert f'KERNEL=="{direct_loop.name}"' in found["permission"]["fixes"][2]
    assert "engine" not in found


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def test_io_uring_denied_by_seccomp(direct_loop: Path) -> None:
    def deny() -> None:
        forbid(IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER, code=1)

    code, found = doctor(direct_loop, before=deny)
    assert code == 1
    assert "a seccomp filter" in found["io_uring"]["found"]
    assert "io_uring_setup" in found["io_uring"]["fixes"][0]
    assert found["engine"]["found"].startswith("threads")


def test_little_lockable_memory(direct_loop: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        become_nobody()

    direct_loop.chmod(0o666)
    code, found = doctor(direct_loop, before=limit)
    assert code == 1
    assert found["locked memory"]["found"].startswith("limited to 64 KiB")
    assert "memlock unlimited" in found["locked memory"]["fixes"][0]


def test_a_loop_device_through_the_page_cache(loop_device: Any) -> None:
    device = loop_device(64 * MIB, 4096)
    subprocess.run(["losetup", "--direct-io=off", device], check=True)
    code, found = doctor(device)
    assert code == 1
    assert found["loop device"]["fixes"] == [f"losetup --direct-io=on {device}"]


def test_what_is_no_device() -> None:
    code, found = doctor("/dev/no-such-device")
    assert code == 4
    assert found["device"]["verdict"] == "unusable"
    assert doctor("/dev/null")[0] == 4
    assert doctor("")[0] == 4


def test_it_changes_nothing_and_prints_commands(direct_loop: Path) -> None:
    before = direct_loop.read_bytes()
    command = [sys.executable, "-m", "blockkv", "doctor", str(direct_loop), "--fix-hint"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "good" in done.stdout.splitlines()[-1]
    assert direct_loop.read_bytes() == before
