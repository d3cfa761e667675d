#!/usr/bin/env python3
"""A client of `blockkv serve` beside a store of one's own, on the same device.

    tools/serve_bench.py --paced                    a device in memory, held to a drive's speed (root)
    tools/serve_bench.py /dev/nvme0n1p4 --force     a partition or namespace; EVERYTHING ON IT IS DESTROYED

Own: the store is open in this process. Served: an owner runs in a process of its own, and this one is its
client. The two take turns, round by round, each on the device freshly formatted; the same chunks, calls and
memory. Chunks go --batch-mib at a time with put_many and get_many, then --singles of them one by one.

  put, get     GB/s of the calls
  CPU s/GB     of this process; with the owner's of those that are served
  one by one   microseconds a get and a lazy put of one chunk: median
  lookup       microseconds for one key, and for 256: median, and the 99th percentile
"""

from __future__ import annotations

import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import bench_tool
import click
import torch
from bench_tool import DeviceOptions, OutputOptions
from rich.table import Table

import blockkv

KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
STORE_SHARE = 1.25
LOOKUPS = 2000
LOOKUP_KEYS = 256
WAYS = ("own", "served")


@dataclass(frozen=True, slots=True)
class Round:
    """What was measured in one round of one way. Sizes in GB of 1e9 bytes."""

    put_gb_per_s: float
    get_gb_per_s: float
    put_cpu_s_per_gb: float
    get_cpu_s_per_gb: float
    owner_put_cpu_s_per_gb: float
    owner_get_cpu_s_per_gb: float
    single_put_us: float
    single_get_us: float
    lookup_us: float
    lookup_p99_us: float
    lookup_many_us: float


@contextmanager
def opened(way: str, device: Path) -> Iterator[tuple[blockkv.Store, int]]:
    """A store on the device, and the process that owns it where that is another one (else 0)."""
    if way == "own":
        with blockkv.open(device, evict=False) as store:
            yield store, 0
        return
    with tempfile.TemporaryDirectory(prefix="blockkv-serve.") as directory:
        socket = Path(directory) / "owner.sock"
        words = [sys.executable, "-m", "blockkv", "serve", str(device), "--socket", str(socket), "--no-evict"]
        owner = subprocess.Popen(words, stdout=subprocess.PIPE)
        try:
            assert owner.stdout is not None
            owner.stdout.readline()
            with blockkv.open(socket) as store:
                yield store, owner.pid
        finally:
            owner.send_signal(signal.SIGTERM)
            owner.wait()


def cpu_s(process: int) -> float:
    """CPU time of this process (0), or of another one."""
    if not process:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Took:
    """Of one piece of work."""

    s: float
    own_cpu_s: float
    owner_cpu_s: float


def took(owner: int, work: Callable[[], None]) -> Took:
    """Time and CPU time of something."""
    own, theirs, begin = cpu_s(0), cpu_s(owner) if owner else 0.0, time.perf_counter()
    work()
    s = time.perf_counter() - begin
    return Took(s, cpu_s(0) - own, (cpu_s(owner) if owner else 0.0) - theirs)


def times_us(count: int, work: Callable[[int], object]) -> list[float]:
    """Microseconds of each of `count` calls."""
    found = []
    for number in range(count):
        begin = time.perf_counter()
        work(number)
        found.append(1e6 * (time.perf_counter() - begin))
    return found


def one_round(
    way: str, device: Path, chunks: torch.Tensor, outs: torch.Tensor, total_bytes: int, singles: int
) -> Round:
    """Format, put everything, get everything, look things up."""
    blockkv.format(device, average_chunk=chunks[0].nbytes, force=True)
    in_batch = len(chunks)
    count = max(1, total_bytes // chunks.nbytes) * in_batch
    keys = [f"chunk/{number}" for number in range(count)]
    batches = [keys[first : first + in_batch] for first in range(0, count, in_batch)]
    sources, targets = list(chunks.unbind(0)), list(outs.unbind(0))
    gb = count * chunks[0].nbytes / 1e9
    singles = min(singles, count // 2)

    def put() -> None:
        for batch in batches:
            store.put_many(zip(batch, sources, strict=True))
        store.commit()

    def get() -> None:
        for batch in batches:
            assert all(store.get_many(batch, targets))

    with opened(way, device) as (store, owner):
        puts = took(owner, put)
        gets = took(owner, get)
        assert torch.equal(outs, chunks)
        one_get = times_us(singles, lambda number: store.get(keys[number % count], targets[0]))
        for number in range(singles):
            store.delete(keys[number])
        store.commit()
        one_put = times_us(singles, lambda number: store.put(f"single/{number}", sources[0]))
        one_look = times_us(LOOKUPS, lambda number: store.contains(keys[-1 - number % singles]))
        many = (keys[singles:] * LOOKUP_KEYS)[:LOOKUP_KEYS]
        many_look = times_us(LOOKUPS // 10, lambda number: store.lookup(many))
    return Round(
        gb / puts.s,
        gb / gets.s,
        puts.own_cpu_s / gb,
        gets.own_cpu_s / gb,
        puts.owner_cpu_s / gb,
        gets.owner_cpu_s / gb,
        statistics.median(one_put),
        statistics.median(one_get),
        statistics.median(one_look),
        sorted(one_look)[int(0.99 * len(one_look))],
        statistics.median(many_look),
    )


def table_of(runs: dict[int, dict[str, list[Round]]]) -> Table:
    """Medians over the rounds."""
    table = Table(title="client beside a store of one's own")
    for name in ("chunk", "", "put GB/s", "get GB/s", "put CPU s/GB", "get CPU s/GB", "one put us"):
        table.add_column(name, justify="right")
    for name in ("one get us", "lookup us (p99)", "of 256 us"):
        table.add_column(name, justify="right")
    for chunk_kib, ways in runs.items():
        for way, rounds in ways.items():

            def median(name: str, rounds: list[Round] = rounds) -> float:
                return statistics.median(getattr(one, name) for one in rounds)

            def cpu(name: str, way: str = way, median: Callable[[str], float] = median) -> str:
                of_owner = f" + {median(f'owner_{name}'):.3f}" if way == "served" else ""
                return f"{median(name):.3f}{of_owner}"

            table.add_row(
                f"{chunk_kib} KiB",
                way,
                f"{median('put_gb_per_s'):.2f}",
                f"{median('get_gb_per_s'):.2f}",
                cpu("put_cpu_s_per_gb"),
                cpu("get_cpu_s_per_gb"),
                f"{median('single_put_us'):.0f}",
                f"{median('single_get_us'):.0f}",
                f"{median('lookup_us'):.1f} ({median('lookup_p99_us'):.0f})",
                f"{median('lookup_many_us'):.0f}",
            )
    return table


@bench_tool.benchmark(read_gb_s=3.0, write_gb_s=2.0)
@click.option("--chunk-kib", "chunks_kib", type=int, multiple=True, help="Repeatable. [64, 1024, 4096]")
@click.option("--total-mib", default=512, show_default=True, help="Put and got in a round.")
@click.option("--batch-mib", default=64, show_default=True, help="In one call.")
@click.option("--singles", default=100, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(
    on: DeviceOptions,
    to: OutputOptions,
    chunks_kib: tuple[int, ...],
    total_mib: int,
    batch_mib: int,
    singles: int,
    rounds: int,
) -> None:
    chunks_kib = chunks_kib or (64, 1024, 4096)
    runs: dict[int, dict[str, list[Round]]] = {size: {way: [] for way in WAYS} for size in chunks_kib}
    least_bytes = int((total_mib + singles * max(chunks_kib) / KIBIBYTE) * MEBIBYTE * STORE_SHARE)
    with (
        on.target(least_bytes) as target,
        bench_tool.progress_bar(rounds * len(chunks_kib)) as advance,
    ):
        if on.device is not None and not target.force:
            raise click.UsageError("what is on DEVICE will be lost; say --force")
        for number in range(rounds):
            for place, chunk_kib in enumerate(chunks_kib):
                advance(f"{chunk_kib} KiB", number * len(chunks_kib) + place)
                count = max(1, batch_mib * KIBIBYTE // chunk_kib)
                chunks = blockkv.empty((count, chunk_kib * KIBIBYTE), torch.uint8)
                chunks.random_(0, 256)
                outs = blockkv.empty((count, chunk_kib * KIBIBYTE), torch.uint8)
                for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                    runs[chunk_kib][way].append(
                        one_round(way, target.path, chunks, outs, total_mib * MEBIBYTE, singles)
                    )
    to.console().print(table_of(runs))
    rows = [
        {"chunk_kib": chunk_kib, "way": way, "rounds": [asdict(one) for one in found]}
        for chunk_kib, ways in runs.items()
        for way, found in ways.items()
    ]
    to.document({"device": target.described, "runs": rows})


if __name__ == "__main__":
    main()
