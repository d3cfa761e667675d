#!/usr/bin/env python3
"""What a store of very many chunks costs: memory, metadata, open time, lookups, checkpoints.

    tools/scale.py                          a million chunks
    tools/scale.py --chunks 10000000        ten million
    tools/scale.py --json

The image is a sparse file: a store whose checkpoint names that many chunks of one 4 KiB unit, written with
the store's own format code; payload is not written, and nothing here reads any. Each figure is taken in a
process of its own, that has a small store open already, so that only what the chunks cost is counted.

Figures
  open_s                     from `blockkv.open` to the store, page cache dropped for the image; the median
  resident_bytes_per_chunk   growth of the process's resident memory by the open
  index_bytes_per_chunk      of that, the index (`Store.stats`)
  metadata_bytes_per_chunk   checkpoint pages on the device
  lookup_us                  one `contains` of a random key: median
  checkpoint_s               one `checkpoint`
  checkpoint_stall_ms        the longest `contains` of another thread meanwhile
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch  # noqa: F401 - opening a store imports it: a second and 200 MB that are not what is measured
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import blockkv
from blockkv.catalog.layouts import Layout, TensorSpec
from blockkv.device import namespace
from blockkv.device.engine import NativeDevice
from blockkv.format import checkpoint, record
from blockkv.format.geometry import PAGE_BYTES, UNIT_BYTES
from blockkv.store.log import write_superblock
from blockkv.store.recovery import read_superblock

PAYLOAD_BYTES = UNIT_BYTES
BURST_PAGES = 2048
LOOKUPS = 20_000


def key_of(number: int, key_bytes: int) -> bytes:
    """The key of chunk `number`: as long as asked for, and different from all others."""
    return number.to_bytes(8, "little").ljust(key_bytes, b"k")


def records_of(
    chunks: int, key_bytes: int, layout: bytes, progress: Callable[[int], None]
) -> Iterator[bytes]:
    """What the checkpoint of such a store holds."""
    yield record.encode_layout(0, 1, layout)
    for number in range(chunks):
        key = key_of(number, key_bytes)
        digest = record.key_digest(key)
        yield record.encode_put(
            number + 1, digest, PAYLOAD_BYTES, 1, bytes(16), [(number, 1)], digest[:8], key
        )[0]
        if number % 10_000 == 0:
            progress(number)
    yield record.encode_layout(0, 1, layout)


def make_image(path: Path, chunks: int, key_bytes: int, progress: Callable[[int], None]) -> int:
    """Write the store. Returns the bytes of its checkpoint."""
    size_bytes = int(chunks * (PAYLOAD_BYTES + 1024)) + (256 << 20)
    blockkv.format(path, size=size_bytes, average_chunk=PAYLOAD_BYTES)
    layout = Layout("tensor", (TensorSpec("", "uint8", (PAYLOAD_BYTES,)),)).body
    descriptor, canonical, limits = namespace.open_namespace(path, read_only=False)
    device = NativeDevice(descriptor, canonical, limits)
    try:
        found, _ = read_superblock(device)
        area = 1 - found.checkpoint_area
        offset_bytes = found.geometry.checkpoints[area].offset_bytes
        checkpoint_id = os.urandom(16)
        pages = checkpoint.pack(
            records_of(chunks, key_bytes, layout, progress), found.uuid, checkpoint_id, found.epoch
        )
        burst: list[bytes] = []
        page_count = 0
        for page in pages:
            burst.append(page)
            if len(burst) == BURST_PAGES:
                device.write(offset_bytes + page_count * PAGE_BYTES, b"".join(burst))
                page_count += len(burst)
                burst.clear()
        if burst:
            device.write(offset_bytes + page_count * PAGE_BYTES, b"".join(burst))
            page_count += len(burst)
        device.flush()
        changed = {
            "generation": found.generation + 1,
            "checkpoint_area": area,
            "checkpoint_id": checkpoint_id,
            "checkpoint_page_count": page_count,
            "checkpoint_record_count": chunks + 2,
            "log_sequence": chunks,
            "next_layout_id": 2,
        }
        write_superblock(device, dataclasses.replace(found, **changed))  # type: ignore[arg-type]
    finally:
        device.close()
    return page_count * PAGE_BYTES


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_cached(path: Path) -> None:
    """Drop the image from the page cache; direct I/O would not use it, and its memory is in the way."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def measure(path: Path, small: Path, chunks: int, key_bytes: int, changing: bool) -> dict[str, float]:
    """One open and what follows, in a fresh process. With `changing` also the checkpoint."""
    blockkv.open(small)
    forget_cached(path)
    before_bytes = resident_bytes()
    started = time.perf_counter()
    store = blockkv.open(path, commit_interval_ms=None)
    open_s = time.perf_counter() - started
    # What the C library keeps of freed memory, up to 32 MiB, is as much for one chunk as for a million.
    ctypes.CDLL(None).malloc_trim(0)
    figures = {
        "open_s": open_s,
        "resident_bytes_per_chunk": (resident_bytes() - before_bytes) / chunks,
        "index_bytes_per_chunk": store.stats()["index_bytes"] / chunks,
    }
    assert len(store) == chunks, f"{len(store)} chunks instead of {chunks}"
    dice = random.Random(1)  # noqa: S311 - not for secrets
    keys = [key_of(dice.randrange(2 * chunks), key_bytes) for _ in range(LOOKUPS)]
    figures["lookup_us"] = statistics.median(latencies(store, keys)) * 1e6
    if changing:
        figures |= checkpoint_figures(store, keys)
    store.close()
    return figures


def latencies(store: blockkv.Store, keys: list[bytes]) -> list[float]:
    """Seconds of one `contains` for each of the keys."""
    clock = time.perf_counter
    found = []
    for key in keys:
        started = clock()
        store.contains(key)
        found.append(clock() - started)
    return found


def checkpoint_figures(store: blockkv.Store, keys: list[bytes]) -> dict[str, float]:
    """How long a checkpoint takes, and the longest lookup while it does."""
    longest: list[float] = [0.0]
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            longest.append(max(latencies(store, keys[:1000])))

    looker = threading.Thread(target=look)
    looker.start()
    time.sleep(0.1)
    longest.clear()
    longest.append(0.0)
    started = time.perf_counter()
    store.checkpoint()
    took_s = time.perf_counter() - started
    done.set()
    looker.join()
    return {"checkpoint_s": took_s, "checkpoint_stall_ms": max(longest) * 1e3}


def in_a_fresh_process(*arguments: Any) -> dict[str, float]:
    """`measure`, away from everything this process holds."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(measure, arguments)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--chunks", default=1_000_000, show_default=True, type=click.IntRange(1))
@click.option("--key-bytes", default=36, show_default=True, type=click.IntRange(8, 1024))
@click.option(
    "--runs", default=5, show_default=True, type=click.IntRange(1), help="Opens to take the median of."
)
@click.option("--directory", type=click.Path(file_okay=False, exists=True), help="For the sparse image.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw open time and memory into this file.")
def main(
    chunks: int, key_bytes: int, runs: int, directory: str | None, as_json: bool, plot: str | None
) -> None:
    """Measure a store of CHUNKS chunks on a sparse image."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="blockkv-scale-") as scratch:
        figures = figures_of(Path(scratch), chunks, key_bytes, runs, console)
        if plot is not None:
            counts = sorted({max(1, chunks // 10), max(1, chunks // 3), chunks})
            draw(
                plot,
                [figures_of(Path(scratch), count, key_bytes, runs, console) for count in counts[:-1]]
                + [figures],
            )
    if as_json:
        json.dump(figures, sys.stdout, indent=1)
        print()
        return
    table = Table(title=f"{chunks:,} chunks, keys of {key_bytes} bytes")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.3f}")
    Console().print(table)


def figures_of(scratch: Path, chunks: int, key_bytes: int, runs: int, console: Console) -> dict[str, Any]:
    """Make the image, measure it, remove it."""
    path, small = scratch / "image", scratch / "small"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if not small.exists():
        blockkv.format(small, size="64MiB")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("writing the image", total=chunks)
        metadata_bytes = make_image(path, chunks, key_bytes, lambda done: bar.update(task, completed=done))
        task = bar.add_task("measuring", total=runs)
        found = []
        for run in range(runs):
            found.append(in_a_fresh_process(path, small, chunks, key_bytes, run == runs - 1))
            bar.advance(task)
    path.unlink()
    median = {name: statistics.median(one[name] for one in found if name in one) for name in found[-1]}
    return {"chunks": chunks, "metadata_bytes_per_chunk": metadata_bytes / chunks, **median}


def draw(path: str, series: list[dict[str, Any]]) -> None:
    """Open time and memory over the number of chunks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    counts = [one["chunks"] for one in series]
    left.plot(counts, [one["open_s"] for one in series], marker="o")
    left.set(title="open", xlabel="chunks", ylabel="seconds")
    right.plot(counts, [one["resident_bytes_per_chunk"] for one in series], marker="o", label="resident")
    right.plot(counts, [one["metadata_bytes_per_chunk"] for one in series], marker="o", label="on the device")
    right.set(title="bytes a chunk", xlabel="chunks")
    right.legend(loc="lower left")
    left.loglog()
    right.set_xscale("log")
    right.set_ylim(0, 1.15 * right.get_ylim()[1])
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
