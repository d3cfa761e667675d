#!/usr/bin/env python3
"""Replays real KV-cache traffic against stores of several sizes, every byte checked.

    tools/replay.py --paced --trace conversation_trace.jsonl --share 0.05 --share 0.25     in memory (root)
    tools/replay.py /dev/nvme0n1 --force --trace conversation_trace.jsonl --chunk-kib 1024 --json

For each request of the trace the longest stored prefix is looked up and read, and the rest is put: what an
engine does that keeps its KV cache here, without the model. --share is the size of the store as a share of
what the trace asks for in all. Without --trace the first 1,024 requests of the Mooncake conversation trace
are replayed, which ship with blockkv (FAST '25; JSON lines with `timestamp` and `hash_ids`, one id per 512
tokens; .gz, .xz).

    hit rate    references that were read from the store, per reference
    of infinite the same per hit of a store that never evicts: no policy can do better than 1
    LRU         hit rate of a model of as many chunks, of which the least recently used one leaves
    prefix      how long requests waited for their prefix: lookup and all gets, percentiles
    writes      bytes written to the device per byte put

Requests follow each other as fast as the store allows, so that a latency is that of an idle queue. On a paced
device latencies mean little: the throttle lets bursts through and then waits. CPU s/GB is of the store's
calls.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_tool
import click
from bench_tool import DeviceOptions, OutputOptions
from rich.table import Table

import blockkv
from blockkv.bench.device import partitions
from blockkv.catalog.wear import WriteBudget
from blockkv.cli.byte_sizes import Size
from blockkv.demo.replay import Request, footprint, read_trace, replay_and_report
from blockkv.errors import InvalidArgument
from blockkv.testing import SimulatedDevice

KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
UNIT_BYTES = 4096
LEAST_STORE_BYTES = 32 * MEBIBYTE
TABLE_CHARS = 150


def store_bytes(data_bytes: int, chunk_bytes: int) -> int:
    """The size of a device whose store has a data zone of `data_bytes`, or a little more.

    Asked of `blockkv.format` on simulated devices: how much goes to metadata is its business.
    """
    size_bytes = max(LEAST_STORE_BYTES, data_bytes)
    for _ in range(20):
        size_bytes = -(-size_bytes // MEBIBYTE) * MEBIBYTE
        simulated = SimulatedDevice(size_bytes, discard_granularity_bytes=0)
        found = blockkv.format(simulated, average_chunk=chunk_bytes)["data_bytes"]
        if found >= data_bytes:
            return size_bytes
        size_bytes += data_bytes - found
    raise InvalidArgument(f"no device gives a data zone of {data_bytes} bytes with chunks of {chunk_bytes}")


def lru_hit_rate(requests: Sequence[Request], capacity_chunks: int) -> float:
    """Hits per reference of a cache of so many chunks, used as the store is used."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = references = 0
    for request in requests:
        references += len(request.hash_ids)
        found = sum(1 for _ in itertools.takewhile(cache.__contains__, request.hash_ids))
        hits += found
        for position, hash_id in enumerate(request.hash_ids):
            if position >= found and hash_id in cache:
                continue  # a put of what is there changes nothing
            cache[hash_id] = None
            cache.move_to_end(hash_id)
            if len(cache) > capacity_chunks:
                cache.popitem(last=False)
    return hits / references if references else 0.0


class TraceClock:
    """The time of the request that comes next, in seconds."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self.done = 0

    def __call__(self) -> float:
        return self._requests[min(self.done, len(self._requests) - 1)].timestamp_ms / 1000


def replay_shares(
    device: Path,
    requests: Sequence[Request],
    shares: Sequence[float],
    chunk_bytes: int,
    force: bool,
    progress: Callable[[str, float], None],
    options: Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """A new store for each share, on a partition of just its size; the report of each.

    `options` are those of `blockkv.open`. The days of a write budget are those of the trace.
    """
    asked = footprint(requests)
    blockkv.format(device, force=force)  # refuses what is occupied
    found = []
    for number, share in enumerate(shares):
        wanted_bytes = int(share * asked.distinct_count * rounded(chunk_bytes))
        with partitions(device, [store_bytes(wanted_bytes, chunk_bytes)]) as (partition,):
            facts = blockkv.format(partition, average_chunk=chunk_bytes, force=True)
            clock = TraceClock(requests)

            def on(done: int, total: int, number: int = number, clock: TraceClock = clock) -> None:
                clock.done = done
                progress(f"share {shares[number]:g}", number * total + done)

            budget = WriteBudget(budget_bytes, clock) if budget_bytes is not None else None
            with blockkv.open(partition, write_budget=budget, **(options or {})) as store:
                report = replay_and_report(store, requests, chunk_bytes, progress=on)
                report["put_over_budget"] = store.stats()["put_over_budget"]
                report["put_refused"] = store.stats()["put_refused"]
        capacity_chunks = facts["data_bytes"] // rounded(chunk_bytes)
        found.append(
            {
                "share_asked": share,
                "share": capacity_chunks / asked.distinct_count,
                "data_bytes": facts["data_bytes"],
                "lru_hit_rate": lru_hit_rate(requests, capacity_chunks),
                "hit_rate_of_infinite": report["hit_rate"] / asked.infinite_hit_rate
                if asked.infinite_hit_count
                else 0.0,
                "write_amplification": report["device_write_bytes"] / max(1, report["put_bytes"]),
                **report,
            }
        )
    return found


def rounded(size_bytes: int) -> int:
    """The space that a payload takes."""
    return -(-size_bytes // UNIT_BYTES) * UNIT_BYTES


def device_bytes(requests: Sequence[Request], shares: Sequence[float], chunk_bytes: int) -> int:
    """The device needs this much for the largest of the stores."""
    data_bytes = int(max(shares) * footprint(requests).distinct_count * rounded(chunk_bytes))
    return store_bytes(data_bytes, chunk_bytes) + 2 * MEBIBYTE


def table(reports: Sequence[dict[str, Any]]) -> Table:
    """A line a share."""
    shown = Table(title="A trace against stores of several sizes")
    headings = ["share", "hit rate", "of infinite", "LRU", "get GB/s", "put GB/s", "CPU s/GB"]
    headings += ["prefix ms p50", "p99", "p99.9", "GB got", "GB put", "writes", "evicted"]
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        waits = report["prefix_ms"]
        shown.add_row(
            f"{report['share']:.3f}",
            f"{report['hit_rate']:.3f}",
            f"{report['hit_rate_of_infinite']:.3f}",
            f"{report['lru_hit_rate']:.3f}",
            f"{report['get_gb_per_s']:.2f}",
            f"{report['put_gb_per_s']:.2f}",
            f"{report['cpu_s_per_gb']:.3f}",
            *(f"{waits[name]:.2f}" if waits else "-" for name in ("p50", "p99", "p99.9")),
            f"{report['get_bytes'] / 1e9:.2f}",
            f"{report['put_bytes'] / 1e9:.2f}",
            f"{report['write_amplification']:.3f}",
            str(report["chunks_evicted"]),
        )
    return shown


def draw(figure: Any, reports: Sequence[dict[str, Any]]) -> None:
    """Hit rates over the share, and how long a prefix takes."""
    shares = [report["share"] for report in reports]
    left, right = figure.subplots(1, 2)
    for name, label in (("hit_rate", "blockkv"), ("lru_hit_rate", "LRU, model")):
        left.plot(shares, [report[name] for report in reports], marker="o", label=label)
    left.axhline(reports[0]["infinite_hit_rate"], color="black", linewidth=1, label="nothing ever evicted")
    left.set_xlabel("store / footprint of the trace")
    left.set_ylabel("hit rate")
    left.margins(y=0.1)
    left.set_ylim(bottom=0)
    left.legend()
    for name in ("p50", "p90", "p99", "p99.9"):
        right.plot(shares, [report["prefix_ms"].get(name, 0.0) for report in reports], marker="o", label=name)
    right.set_xlabel("store / footprint of the trace")
    right.set_ylabel("time until a prefix is read, ms")
    right.set_yscale("log")
    right.legend()


@bench_tool.benchmark(read_gb_s=3.0, write_gb_s=2.4)
@click.option("--trace", type=click.Path(), help="JSON lines; .gz, .xz. Default: the one that ships.")
@click.option("--requests", "limit", type=click.IntRange(min=1), help="Only the first so many.")
@click.option(
    "--share",
    "shares",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    default=[0.05, 0.1, 0.25],
    show_default=True,
    help="Size of the store as a share of the footprint; may be given several times.",
)
@click.option("--chunk-kib", default=128, show_default=True, help="What stands for 512 tokens.")
@click.option("--eviction", default="lru", show_default=True, help="Who leaves: lru, prefix, s3fifo.")
@click.option("--admission", default="all", show_default=True, help="What is written: all, twice, adaptive.")
@click.option("--write-budget", type=Size(), help="Most bytes written in a day of the trace.")
def main(
    on: DeviceOptions,
    to: OutputOptions,
    trace: str | None,
    limit: int | None,
    shares: tuple[float, ...],
    chunk_kib: int,
    eviction: str,
    admission: str,
    write_budget: int | None,
) -> None:
    """Replay a trace on stores of several sizes on DEVICE, a block device, or on one made for it."""
    requests = read_trace(trace, limit)
    chunk_bytes = chunk_kib * KIBIBYTE
    with (
        on.target(device_bytes(requests, shares, chunk_bytes)) as target,
        bench_tool.progress_bar(len(shares) * len(requests)) as advance,
    ):
        policies = {"eviction": eviction, "admission": admission}
        reports = replay_shares(
            target.path, requests, shares, chunk_bytes, target.force, advance, policies, write_budget
        )
    asked = footprint(requests)
    to.document(
        {
            "device": target.described,
            "trace": {
                "path": trace,
                "request_count": asked.request_count,
                "reference_count": asked.reference_count,
                "distinct_count": asked.distinct_count,
                "infinite_hit_rate": asked.infinite_hit_rate,
            },
            "chunk_bytes": chunk_bytes,
            **policies,
            "write_budget_bytes_per_day": write_budget,
            "stores": reports,
        }
    )
    console = to.console(TABLE_CHARS)
    console.print(table(reports))
    console.print(
        f"{asked.request_count} requests, {asked.reference_count} references to {asked.distinct_count} "
        f"chunks; {asked.infinite_hit_rate:.3f} would hit if nothing were ever evicted",
        highlight=False,
    )
    to.draw(lambda figure: draw(figure, reports), width_in=12)


if __name__ == "__main__":
    main()
