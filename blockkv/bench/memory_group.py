"""A control group that holds a process to an amount of memory, page cache included.

Version 1 (the memory controller) or 2. What a process had before it joined stays charged elsewhere, so what
it imports and what it is started with does not count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from blockkv.bench.device import CGROUP_ROOT, PacedDevice
from blockkv.errors import BlockKVError

__all__ = ["join", "memory_group", "paced_writeback"]

PREFIX = "blockkv-memory."


@contextlib.contextmanager
def memory_group(limit_bytes: int, pace: PacedDevice | None) -> Iterator[Path]:
    """A group with `limit_bytes`, to be joined by one process and its threads. Raises BlockKVError.

    With version 2 a process is in one group: it then has the speed of `pace` as well.
    """
    root = CGROUP_ROOT / "memory"
    is_v1 = root.is_dir()
    group = (root if is_v1 else CGROUP_ROOT) / f"{PREFIX}{os.getpid()}"
    try:
        if not is_v1:
            (CGROUP_ROOT / "cgroup.subtree_control").write_text("+memory +io")
        _remove_abandoned(group.parent)
        group.mkdir()
        try:
            (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))
            if not is_v1 and pace is not None:
                (group / "io.max").write_text((pace.cgroup / "io.max").read_text())
            yield group
        finally:
            with contextlib.suppress(OSError):
                (group / "memory.force_empty").write_text("0")  # version 1: page cache would keep it
            group.rmdir()
    except OSError as error:
        if isinstance(error, BlockKVError):
            raise
        raise BlockKVError(f"no control group at {group} can limit memory: {error}") from error


def _remove_abandoned(root: Path) -> None:
    """Groups of processes that were killed. One that is in use cannot be removed."""
    for group in root.glob(f"{PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(PREFIX)).exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def join(group: Path) -> None:
    """Move this process into a group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def paced_writeback(pace: PacedDevice | None) -> Iterator[bool]:
    """Hold the kernel's own writing, of dirty page cache, to the device's speed too. Yields whether it is.

    Version 1 charges it to the root group, whose throttle is set while the context lasts; version 2 charges
    it to whoever made the pages dirty.
    """
    throttle = CGROUP_ROOT / "blkio" / "blkio.throttle.write_bps_device"
    if pace is None or not throttle.exists():
        yield pace is not None
        return
    number = pace.path.stat().st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    throttle.write_text(f"{name} {pace.write_bytes_per_s}")
    try:
        yield True
    finally:
        throttle.write_text(f"{name} 0")
