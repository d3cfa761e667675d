"""Helpers for tests on real devices: run tools, mount, fork, and prove that nothing was written."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class LoopDevices(Protocol):
    """Signature of the `loop_device` fixture."""

    def __call__(self, size_bytes: int, sector_bytes: int = 512, read_only: bool = False) -> Path: ...


def tool(*command: object) -> str:
    """Run a program and return its output, stripped."""
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run(*command: object) -> None:
    tool(*command)


def shell(command: str) -> None:
    """Run a clearing command as the operator would."""
    subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True, input="YES\n")


@contextmanager
def file_system(kind: str, *options: str) -> Iterator[Path]:
    """Mount one that needs no device."""
    with tempfile.TemporaryDirectory(prefix="blockkv-test.") as name:
        run("mount", "-t", kind, *options, "none", name)
        try:
            yield Path(name)
        finally:
            run("umount", name)


@contextmanager
def mounted(device: Path, *options: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="blockkv-test.") as name:
        run("mount", *options, device, name)
        try:
            yield Path(name)
        finally:
            if os.path.ismount(name):
                run("umount", name)


def digest(path: Path) -> bytes:
    os.sync()  # what a file system still has in memory is not our doing
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


@contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Assert that the body writes nothing to a device or file.

    What is mounted there is mounted read-only: a file system writes from its journal when it likes.
    """
    before = digest(path)
    yield
    assert digest(path) == before, f"{path} was written to"


def in_child(action: Callable[[], object]) -> tuple[str, str]:
    """Fork, run `action` and return the name and message of what it raised, two empty strings if nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = ("", "")
        try:
            action()
        except BaseException as error:
            outcome = (type(error).__name__, str(error))
        os.write(writer, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        kind, message = json.loads(file.read())
    os.waitpid(child, 0)
    return kind, message


def read_only_user(user: int) -> None:
    """Become an ordinary user, for good: only in a child."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
