"""The whole demo on one namespace: format, speed beside fio, kill and resume, a trace with evictions.

Every stage adds its figures to one result, ready for JSON. A file of our own making is removed at the end;
one left by a demo that was killed is removed by the next. Not here: how speed is measured (handed in),
drawing and printing (`blockkv.cli.demo`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blockkv
from blockkv.demo import replay as replays
from blockkv.demo.resume import Progress, ResumeOptions, resume_after_kill
from blockkv.errors import BlockKVError

FILE_PREFIX = "demo-"
MEBIBYTE = 1 << 20

Measure = Callable[[str, Progress], dict[str, Any]]
"""Measures store and fio on a path whose content is not needed; figures, or `{"skipped": reason}`."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run on, and how much. `device` None: a file in the user's cache directory."""

    device: str | None = None
    size_bytes: int = 512 * MEBIBYTE
    """Of the file, where one has to be made."""
    force: bool = False
    keep: bool = False
    chunk_bytes: int = 128 * 1024
    """What stands for a 512-token chunk of the trace."""
    request_count: int = 1000
    trace_path: str | None = None
    resume: ResumeOptions = field(default_factory=ResumeOptions)


def run(options: DemoOptions, measure: Measure, progress: Progress) -> dict[str, Any]:
    """Run every stage; the figures of all of them.

    `ok` is True when the resumed logits were identical, nothing durable was lost, and every chunk of the
    trace had its own content. Raises whatever `blockkv.format` refuses with,
    WorkerFailedError, WrongContentError.
    """
    if importlib.util.find_spec("transformers") is None:
        raise BlockKVError("the demo needs transformers; run: pip install 'blockkv[demo]'")
    requests = replays.read_trace(options.trace_path, options.request_count)
    begin = time.perf_counter()
    with _target(options) as (path, made), tempfile.TemporaryDirectory(prefix="blockkv-demo.") as scratch:
        progress("formatting", 0, 0)
        clock = _StageClock()
        size_bytes = options.size_bytes if made else None
        blockkv.format(
            path, size=size_bytes, average_chunk=options.chunk_bytes, label="demo", force=options.force
        )
        clock.stage("format")
        speed = measure(path, progress)
        clock.stage("speed")
        # Measuring leaves a store of its own shape behind; what is on the device is ours by now.
        blockkv.format(path, average_chunk=options.chunk_bytes, label="demo", force=True)
        resumed = resume_after_kill(path, options.resume, Path(scratch), progress)
        clock.stage("resume")
        traced = _replay(path, requests, options.chunk_bytes, progress)
        clock.stage("trace")
        with blockkv.open(path, read_only=True) as store:
            document = store.info()
    return {
        "ok": resumed["identical"]
        and resumed["durable_chunks_lost"] == 0
        and traced["failed_get_count"] == 0,
        "store": {**document, "removed": made and not options.keep},
        "speed": speed,
        "resume": resumed,
        "trace": traced,
        "stage_s": clock.stages,
        "seconds": time.perf_counter() - begin,
    }


class _StageClock:
    """How long each stage took, in seconds."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._last = time.perf_counter()

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self.stages[name], self._last = now - self._last, now


@contextlib.contextmanager
def _target(options: DemoOptions) -> Iterator[tuple[str, bool]]:
    """The path to run on, and whether it is a file of our making; that one is removed unless kept."""
    if options.device is not None:
        made = not Path(options.device).exists()
        path = Path(options.device)
    else:
        # Not the directory for temporary files: that is often in memory, and the subject here is a disk.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockkv"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_leftovers(cache)
        made, path = True, cache / f"{FILE_PREFIX}{os.getpid()}.img"
    try:
        yield str(path), made
    finally:
        if made and not options.keep:
            path.unlink(missing_ok=True)


def _remove_leftovers(cache: Path) -> None:
    for path in cache.glob(f"{FILE_PREFIX}*.img"):
        match = re.fullmatch(rf"{FILE_PREFIX}(\d+)\.img", path.name)
        if match and not Path("/proc", match[1]).exists():
            path.unlink(missing_ok=True)


def _replay(
    path: str, requests: list[replays.Request], chunk_bytes: int, progress: Progress
) -> dict[str, Any]:
    with blockkv.open(path) as store:
        return replays.replay_and_report(
            store,
            requests,
            chunk_bytes,
            progress=lambda done, total: progress("trace: requests", done, total),
        )
