#!/usr/bin/env python3
"""Layers from the store while a model computes: how long it waits for them.

    tools/stream_bench.py --paced                    a device in memory, held to a drive's speed (root)
    tools/stream_bench.py /dev/nvme0n1p4 --force     a partition or namespace; EVERYTHING ON IT IS DESTROYED

Streaming: --chunks chunks of --layers layers, K and V of --piece-kib each, are streamed layer by layer, and
every layer is computed upon for as long as the row says: a share of what reading all of it takes with
get_many, the I/O time. Computing is sleeping.

    stall     what the model waited for layers, in all
    at least  I/O time less compute time: what no look-ahead can hide
    excess    stall beyond that, per I/O time; the bar is 5 %
    ahead     the most that was read or asked for and not handed over yet, and its bound

Queueing: the requests of a trace arrive as it says, sped up until the model is busy for --load of the time,
and are served one after the other. What is stored of a request's prefix is streamed; the rest is computed.
"At start" the stream begins when the request is served; "queued" when it arrives, as a preload, for at most
--queued requests at a time.

    first layer   from the moment the request is served to its first layer; requests with a stored prefix
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_tool
import click
import torch
from bench_tool import DeviceOptions, OutputOptions
from rich.table import Table

import blockkv
from blockkv import KVLayout
from blockkv.demo.replay import Request, read_trace
from blockkv.errors import BlockKVError

KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
QUEUE_LAYERS = 8
"""Of the chunks of the trace. Of 1 MiB each layer is one leaf."""
EDGE_BYTES = 2 * 128 * KIBIBYTE
"""What is read beyond a layer that does not begin and end with a leaf, at most, where chunks have 32 MiB."""
STORE_SHARE = 1.25
"""Size of a device that is made, per payload on it."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streaming run. Times in seconds."""

    compute_share: float
    """Compute time per I/O time, as asked for."""
    io_s: float
    compute_s: float
    stall_s: float
    peak_bytes: int
    bound_bytes: int

    @property
    def least_stall_s(self) -> float:
        return max(0.0, self.io_s - self.compute_s)

    @property
    def excess(self) -> float:
        return (self.stall_s - self.least_stall_s) / self.io_s


@dataclass(frozen=True, slots=True)
class Work:
    """One request of the trace as the benchmark carries it out."""

    arrival_s: float
    keys: tuple[str, ...]
    """Its stored prefix."""
    compute_s: float


@dataclass(frozen=True, slots=True)
class Queued:
    """The trace served one way."""

    preload: bool
    first_layer_ms: tuple[float, ...]
    """Of each request with a stored prefix."""
    waiting_at_once: int
    """The most requests that waited."""


def layout_of(layers: int, piece_bytes: int) -> KVLayout:
    """K and V of each layer side by side: one chunk."""
    return KVLayout.of("layers kv piece", "uint8", layers=layers, kv=2, piece=piece_bytes)


def fill(store: blockkv.Store, keys: Sequence[str], chunk_bytes: int) -> None:
    """Put chunks of random bytes."""
    chunk = blockkv.empty(chunk_bytes, torch.uint8)
    for key in keys:
        chunk.random_(0, 256)
        store.put(key, chunk)
    store.commit()


def io_seconds(store: blockkv.Store, keys: Sequence[str], outs: Sequence[torch.Tensor]) -> float:
    """How long it takes to read all of the chunks into memory that is there."""
    started = time.perf_counter()
    if not all(store.get_many(keys, outs)):
        raise BlockKVError("a chunk that was put is missing")
    return time.perf_counter() - started


def streamed(
    store: blockkv.Store,
    keys: Sequence[str],
    layout: KVLayout,
    compute_share: float,
    io_s: float,
    bound_bytes: int,
) -> Streamed:
    """Stream all layers once, computing in between."""
    layers = len(layout.numbers("layers"))
    stall_s = compute_s = 0.0
    with store.stream(keys, layout=layout, lookahead_bytes=bound_bytes) as stream:
        for _ in range(layers):
            asked = time.perf_counter()
            _, tensors = next(stream)
            came = time.perf_counter()
            if len(tensors) < len(keys):
                raise BlockKVError("a chunk that was put does not verify")
            if compute_share:
                time.sleep(compute_share * io_s / layers)
            stall_s += came - asked
            compute_s += time.perf_counter() - came
        return Streamed(compute_share, io_s, compute_s, stall_s, stream.peak_bytes, bound_bytes)


def median_of(runs: Sequence[Streamed]) -> Streamed:
    """Of each figure; of the bytes ahead the largest."""
    names = ("io_s", "compute_s", "stall_s")
    figures = {name: statistics.median(getattr(run, name) for run in runs) for name in names}
    peak_bytes = max(run.peak_bytes for run in runs)
    return Streamed(
        compute_share=runs[0].compute_share, peak_bytes=peak_bytes, bound_bytes=runs[0].bound_bytes, **figures
    )


def work_of(requests: Sequence[Request], compute_s_per_chunk: float, load: float) -> list[Work]:
    """What the requests make of a store that keeps everything, at a pace at which the model is busy for
    `load` of the time.
    """
    seen: set[int] = set()
    hits, computed = [], []
    for request in requests:
        count = next((n for n, one in enumerate(request.hash_ids) if one not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
        hits.append(tuple(f"trace/{one}" for one in request.hash_ids[:count]))
        computed.append(max(1, len(request.hash_ids) - count) * compute_s_per_chunk)
    lasted_ms = max(1, requests[-1].timestamp_ms - requests[0].timestamp_ms)
    scale = sum(computed) / load / lasted_ms
    first_ms = requests[0].timestamp_ms
    return [
        Work((request.timestamp_ms - first_ms) * scale, keys, compute_s)
        for request, keys, compute_s in zip(requests, hits, computed, strict=True)
    ]


def serve(
    store: blockkv.Store, work: Sequence[Work], layout: KVLayout, preload: bool, queued_at_most: int
) -> Queued:
    """Serve all requests in the order in which they arrive."""
    layers = len(layout.numbers("layers"))
    layer_bytes = layout.payload_bytes // layers
    started = time.perf_counter()
    arriving, waiting = deque(work), deque[Work]()
    streams: dict[Work, Any] = {}
    first_layer_ms, most = [], 0

    def stream_of(one: Work, early: bool) -> Any:
        # Two layers each: the first, and the next while that is in hand.
        bound_bytes = 2 * len(one.keys) * (layer_bytes + EDGE_BYTES)
        return store.stream(one.keys, layout=layout, lookahead_bytes=bound_bytes, preload=early)

    def admit() -> None:
        nonlocal most
        while arriving and arriving[0].arrival_s <= time.perf_counter() - started:
            waiting.append(arriving.popleft())
        most = max(most, len(waiting))
        if preload:
            for one in list(waiting)[:queued_at_most]:
                if one.keys and one not in streams:
                    streams[one] = stream_of(one, True)

    while arriving or waiting:
        admit()
        if not waiting:
            time.sleep(max(0.0, arriving[0].arrival_s - (time.perf_counter() - started)))
            continue
        one = waiting.popleft()
        begun = time.perf_counter()
        if not one.keys:
            _compute(one.compute_s, layers, admit)
            continue
        stream = streams.pop(one, None) or stream_of(one, False)
        with stream:
            stream.promote()
            for number, _ in stream:
                if not number:
                    first_layer_ms.append((time.perf_counter() - begun) * 1000)
                _compute(one.compute_s / layers, 1, admit)
    return Queued(preload, tuple(first_layer_ms), most)


def _compute(seconds: float, steps: int, admit: Callable[[], None]) -> None:
    for _ in range(steps):
        time.sleep(seconds / steps)
        admit()


def run_queue(
    device: Path, requests: Sequence[Request], chunk_bytes: int, load: float, queued: int, rounds: int
) -> list[Queued]:
    """Serve the trace both ways, in turn."""
    layout = layout_of(QUEUE_LAYERS, chunk_bytes // QUEUE_LAYERS // 2)
    keys = list(dict.fromkeys(f"trace/{one}" for request in requests for one in request.hash_ids))
    blockkv.format(device, average_chunk=chunk_bytes, force=True)
    found = []
    with blockkv.open(device, evict=False) as store:
        fill(store, keys, chunk_bytes)
        # As fast as a model is that computes a chunk in four times what reading it takes.
        outs = list(blockkv.empty((min(len(keys), 64), chunk_bytes), torch.uint8).unbind(0))
        chunk_s = min(io_seconds(store, keys[: len(outs)], outs) for _ in range(3)) / len(outs)
        work = work_of(requests, 4 * chunk_s, load)
        for _ in range(rounds):
            found += [serve(store, work, layout, preload, queued) for preload in (False, True)]
    return found


@bench_tool.benchmark()
@click.option("--chunks", default=8, show_default=True, help="Chunks of the prefix that is streamed.")
@click.option("--layers", default=80, show_default=True)
@click.option("--piece-kib", default=512, show_default=True, help="K, and V, of one layer of a chunk.")
@click.option("--lookahead-mib", default=64, show_default=True, help="Bound of what is read ahead.")
@click.option("--compute", "shares", type=float, multiple=True, help="Compute time per I/O time. Repeatable.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="Instead of the one that ships.")
@click.option("--requests", "request_count", default=200, show_default=True, help="Of the trace.")
@click.option("--chunk-kib", default=1024, show_default=True, help="Size of the chunks of the trace.")
@click.option("--load", default=0.8, show_default=True, help="Share of the time in which the model is busy.")
@click.option("--queued", default=4, show_default=True, help="Waiting requests whose preload is under way.")
@click.option("--rounds", default=3, show_default=True)
def main(
    on: DeviceOptions,
    to: OutputOptions,
    chunks: int,
    layers: int,
    piece_kib: int,
    lookahead_mib: int,
    shares: tuple[float, ...],
    trace: str | None,
    request_count: int,
    chunk_kib: int,
    load: float,
    queued: int,
    rounds: int,
) -> None:
    """Measure and print."""
    console = to.console()
    layout = layout_of(layers, piece_kib * KIBIBYTE)
    requests = read_trace(trace, request_count)
    distinct_count = len({one for request in requests for one in request.hash_ids})
    payload_bytes = max(chunks * layout.payload_bytes, distinct_count * chunk_kib * KIBIBYTE)
    least_bytes = -(-int(payload_bytes * STORE_SHARE + 256 * MEBIBYTE) // MEBIBYTE) * MEBIBYTE
    shares = shares or (0.0, 0.5, 0.9, 1.1, 2.0)
    keys = [f"prefix/{number}" for number in range(chunks)]
    runs: dict[float, list[Streamed]] = {share: [] for share in shares}
    with on.target(least_bytes) as target, bench_tool.progress_bar(rounds + 1) as advance:
        blockkv.format(target.path, average_chunk=layout.payload_bytes, force=target.force)
        with blockkv.open(target.path, evict=False) as store:
            fill(store, keys, layout.payload_bytes)
            outs = list(blockkv.empty((chunks, layout.payload_bytes), torch.uint8).unbind(0))
            streamed(store, keys, layout, 0.0, io_seconds(store, keys, outs), lookahead_mib * MEBIBYTE)
            for number in range(rounds):
                advance("streaming", number)
                for share in shares:
                    io_s = io_seconds(store, keys, outs)
                    runs[share].append(streamed(store, keys, layout, share, io_s, lookahead_mib * MEBIBYTE))
            del outs
        advance("queueing", rounds)
        queue = run_queue(target.path, requests, chunk_kib * KIBIBYTE, load, queued, rounds)
    rows = [median_of(found) for found in runs.values()]
    first_ms = {preload: _first_layer_ms(queue, preload) for preload in (False, True)}
    ratio = statistics.mean(first_ms[False]) / statistics.mean(first_ms[True])
    to.document(
        {
            "device": target.described,
            "streaming": [
                {**asdict(row), "least_stall_s": row.least_stall_s, "excess": row.excess} for row in rows
            ],
            "first_layer_ms": {
                "at_start": _summary(first_ms[False]),
                "queued": _summary(first_ms[True]),
            },
            "waiting_at_once": max(one.waiting_at_once for one in queue),
            "first_layer_ratio": ratio,
        }
    )
    console.print(_streaming_table(rows))
    console.print(_queue_table(first_ms))
    console.print(f"time to first layer, at start per queued: {ratio:.2f}", highlight=False)
    to.draw(lambda figure: _draw(figure, rows, first_ms), width_in=12)


def _first_layer_ms(queue: Sequence[Queued], preload: bool) -> list[float]:
    return [value for one in queue if one.preload is preload for value in one.first_layer_ms]


def _summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    cuts = statistics.quantiles(values, n=100)
    return {
        "count": len(values),
        "mean": statistics.mean(values),
        "p50": cuts[49],
        "p90": cuts[89],
        "p99": cuts[98],
    }


def _streaming_table(rows: Sequence[Streamed]) -> Table:
    table = Table(title="streaming, milliseconds; medians over the rounds")
    for heading in (
        "compute per I/O",
        "I/O",
        "compute",
        "stall",
        "at least",
        "excess",
        "ahead MiB",
        "bound MiB",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.compute_share:g}",
            *(
                f"{seconds * 1000:.1f}"
                for seconds in (row.io_s, row.compute_s, row.stall_s, row.least_stall_s)
            ),
            f"{row.excess:.1%}",
            f"{row.peak_bytes / MEBIBYTE:.0f}",
            f"{row.bound_bytes / MEBIBYTE:.0f}",
        )
    return table


def _queue_table(first_ms: dict[bool, list[float]]) -> Table:
    table = Table(title="from service to the first layer, milliseconds")
    for heading in ("stream begins", "requests", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right")
    for preload, values in first_ms.items():
        found = _summary(values)
        figures = (f"{found[name]:.2f}" for name in ("mean", "p50", "p90", "p99"))
        table.add_row("queued" if preload else "at start", str(int(found["count"])), *figures)
    return table


def _draw(figure: Any, rows: Sequence[Streamed], first_ms: dict[bool, list[float]]) -> None:
    left, right = figure.subplots(1, 2)
    shares = [row.compute_share for row in rows]
    left.plot(shares, [row.stall_s * 1000 for row in rows], "o-", label="stall")
    left.plot(shares, [row.least_stall_s * 1000 for row in rows], "--", label="I/O less compute")
    left.set_xlabel("compute time per I/O time")
    left.set_ylabel("milliseconds")
    left.legend()
    for preload, values in first_ms.items():
        ordered = sorted(values)
        shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
        right.step(ordered, shares, where="post", label="queued" if preload else "at start")
    right.set_xlabel("milliseconds from service to the first layer")
    right.set_ylabel("share of requests")
    right.legend()


if __name__ == "__main__":
    main()
