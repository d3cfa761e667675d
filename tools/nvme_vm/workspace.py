"""A directory in memory for images and sockets, which no run leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["workspace"]

MEMORY_DIR = Path("/dev/shm")  # noqa: S108 - images belong in memory
PREFIX = "blockkv-vm."


@contextmanager
def workspace() -> Iterator[Path]:
    """A directory of our own. Those of processes that were killed are removed on the way."""
    for leftover in MEMORY_DIR.glob(f"{PREFIX}*"):
        if not Path("/proc", leftover.name.split(".")[1]).exists():
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}.", dir=MEMORY_DIR) as name:
        yield Path(name)
