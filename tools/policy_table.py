#!/usr/bin/env python3
"""What eviction and admission policies do to a trace of real KV-cache traffic, by simulation.

    tools/policy_table.py conversation_trace.jsonl
    tools/policy_table.py conversation_trace.jsonl --tried --json --plot policies.png

Each request of the trace gets its longest stored prefix, and puts the rest; a full store makes room before
it writes. No device is touched and nothing is timed: the policies are the very objects that a store is opened
with, the store is a set. Without a trace the first 1,024 requests of the Mooncake conversation trace are
taken, which ship with blockkv.

    store        its size as a share of what the trace asks for in all
    hit rate     references that were found, per reference
    written      chunks written, as a share of those that LRU writes when it admits everything
    hits/write   hits per chunk written
    gap closed   of the hits that Belady's policy, which knows the future, has and LRU has not

--tried adds the policies that did not make it into blockkv.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import bench_tool
import click
import tried_policies as tried
from bench_tool import OutputOptions
from rich.table import Table

from blockkv.catalog.admission import Adaptive, Admission, SecondAsk
from blockkv.catalog.eviction import Eviction, Lru, PrefixAware, S3Fifo
from blockkv.demo.replay import Request, footprint, read_trace
from blockkv.errors import BlockKVError

TABLE_CHARS = 110
DIGEST_BYTES = 16
BELADY = "Belady"

Chain = tuple[bytes, ...]


class Clock:
    """The time of the trace, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


EVICTIONS: dict[str, Callable[[Clock], Eviction]] = {
    "LRU": lambda clock: Lru(),
    "S3-FIFO": lambda clock: S3Fifo(),
    "prefix": lambda clock: PrefixAware(clock),
}
TRIED: dict[str, Callable[[Clock], Eviction]] = {
    "LRU, roots last": lambda clock: tried.RootsLast(),
    "2Q": lambda clock: tried.TwoQueues(),
    "LRU-2": lambda clock: tried.LruTwo(),
    "ARC": lambda clock: tried.Arc(),
    "W-TinyLFU": lambda clock: tried.TinyLfu(),
    "greedy, asks": lambda clock: tried.Greedy(lambda asks, depth: 20000 * math.log2(1 + asks)),
    "greedy, asks/depth": lambda clock: tried.Greedy(lambda asks, depth: 20000 * asks / math.sqrt(1 + depth)),
    "bulk first": lambda clock: tried.ShortTurnsStay(),
    "prefix, nothing assumed": lambda clock: PrefixAware(clock, assume=False),
}
ADMISSIONS: dict[str, Callable[[], Admission | None]] = {
    "all": lambda: None,
    "twice": SecondAsk,
    "adaptive": Adaptive,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy on one store. Counts are of chunks."""

    eviction: str
    admission: str
    share: float
    capacity_count: int
    hit_count: int
    written_count: int
    reference_count: int

    @property
    def hit_rate(self) -> float:
        """Hits per reference."""
        return self.hit_count / self.reference_count

    @property
    def hits_per_write(self) -> float:
        """Hits per chunk written."""
        return self.hit_count / max(1, self.written_count)


class Outcomes(Protocol):
    """What is told of each outcome as it comes."""

    def __call__(self, what: str, done: float) -> None: ...


def chains(requests: Sequence[Request]) -> list[tuple[float, Chain]]:
    """Time in seconds and digests of each request."""
    known: dict[int, bytes] = {}
    for request in requests:
        for hash_id in request.hash_ids:
            if hash_id not in known:
                raw = hash_id.to_bytes(8, "little")
                known[hash_id] = hashlib.blake2b(raw, digest_size=DIGEST_BYTES).digest()
    return [
        (request.timestamp_ms / 1000, tuple(known[hash_id] for hash_id in request.hash_ids))
        for request in requests
    ]


def replay(
    asked: Sequence[tuple[float, Chain]],
    capacity_count: int,
    clock: Clock,
    eviction: Eviction,
    admission: Admission | None,
) -> tuple[int, int]:
    """Hits and writes of a store of so many chunks."""
    stored: set[bytes] = set()
    hits = writes = 0
    for now_s, chain in asked:
        clock.now_s = now_s
        eviction.asked(chain)
        if admission is not None:
            admission.asked(chain)
        found = next((n for n, digest in enumerate(chain) if digest not in stored), len(chain))
        hits += found
        for digest in chain[:found]:
            eviction.used(digest)
        new = [digest for digest in chain[found:] if digest not in stored]
        if admission is not None:
            new = [digest for digest in new if admission.admits(digest)]
        excess = len(stored) + len(new) - capacity_count
        if excess > 0:
            if admission is not None:
                admission.evicting(len(stored))
            for victim in take(eviction.victims(), excess):
                eviction.removed(victim)
                stored.remove(victim)
        for digest in new:
            eviction.inserted(digest)
            stored.add(digest)
        writes += len(new)
    return hits, writes


def take(victims: Iterator[bytes], count: int) -> list[bytes]:
    """The first `count`; a store removes nothing while it asks."""
    return [victim for _, victim in zip(range(count), victims, strict=False)]


def belady(asked: Sequence[tuple[float, Chain]], capacity_count: int) -> tuple[int, int]:
    """Hits and writes where whatever is asked for again last leaves first, and nothing is written in vain."""
    following: list[dict[bytes, int]] = [{} for _ in asked]
    latest: dict[bytes, int] = {}
    for number in range(len(asked) - 1, -1, -1):
        for digest in asked[number][1]:
            following[number][digest] = latest.get(digest, len(asked))
            latest[digest] = number
    next_ask: dict[bytes, int] = {}
    heap: list[tuple[int, int, bytes]] = []
    hits = writes = 0
    for number, (_, chain) in enumerate(asked):
        found = next((n for n, digest in enumerate(chain) if digest not in next_ask), len(chain))
        hits += found
        before = set(chain) & next_ask.keys()
        for depth, digest in enumerate(chain):
            next_ask[digest] = following[number][digest]
            heapq.heappush(heap, (-next_ask[digest], -depth, digest))
        while heap and (len(next_ask) > capacity_count or heap[0][0] == -len(asked)):
            ask, _, digest = heapq.heappop(heap)
            if next_ask.get(digest) == -ask:
                del next_ask[digest]
        writes += sum(digest in next_ask and digest not in before for digest in chain)
    return hits, writes


def s3_fifo_strict(asked: Sequence[tuple[float, Chain]], capacity_count: int) -> tuple[int, int]:
    """S3-FIFO whose queues keep to 10 and 90 % also while the store is not full, as for CPU caches."""
    most_small = max(1, capacity_count // 10)
    small: OrderedDict[bytes, int] = OrderedDict()
    main: OrderedDict[bytes, int] = OrderedDict()
    ghost: OrderedDict[bytes, None] = OrderedDict()
    hits = writes = 0

    def add_to_main(digest: bytes) -> None:
        main[digest] = 0
        while len(main) > capacity_count - most_small:
            oldest, uses = main.popitem(last=False)
            if uses:
                main[oldest] = uses - 1

    for _, chain in asked:
        found = next((n for n, one in enumerate(chain) if one not in small and one not in main), len(chain))
        hits += found
        for digest in chain[:found]:
            queue = small if digest in small else main
            if digest in queue:
                queue[digest] = min(3, queue[digest] + 1)
        for digest in chain[found:]:
            if digest in small or digest in main:
                continue
            writes += 1
            if ghost.pop(digest, 0) is None:
                add_to_main(digest)
            else:
                small[digest] = 0
            while len(small) > most_small:
                oldest, uses = small.popitem(last=False)
                if uses:
                    add_to_main(oldest)
                else:
                    ghost[oldest] = None
                    if len(ghost) > capacity_count * 9 // 10:
                        ghost.popitem(last=False)
    return hits, writes


def measure(
    requests: Sequence[Request], shares: Sequence[float], with_tried: bool, progress: Outcomes
) -> list[Outcome]:
    """Every policy on every store."""
    asked = chains(requests)
    sizes = footprint(requests)
    references = sizes.reference_count
    evictions = EVICTIONS | (TRIED if with_tried else {})
    found: list[Outcome] = []
    for share in shares:
        capacity = max(1, int(share * sizes.distinct_count))

        def add(
            eviction: str,
            admission: str,
            counts: tuple[int, int],
            share: float = share,
            capacity: int = capacity,
        ) -> None:
            found.append(Outcome(eviction, admission, share, capacity, *counts, references))
            progress(f"{share:g} {eviction}, {admission}", len(found))

        for name, make in evictions.items():
            for admission, make_admission in ADMISSIONS.items():
                if name in EVICTIONS or admission == "all":
                    clock = Clock()
                    counts = replay(asked, capacity, clock, make(clock), make_admission())
                    add(name, admission, counts)
        if with_tried:
            add("S3-FIFO, strict", "all", s3_fifo_strict(asked, capacity))
        add(BELADY, "own", belady(asked, capacity))
    return found


def documents(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For JSON and table: each outcome beside LRU and Belady on the same store."""
    found = []
    for one in outcomes:
        same = [other for other in outcomes if other.share == one.share]
        lru = next(other for other in same if (other.eviction, other.admission) == ("LRU", "all"))
        best = next(other for other in same if other.eviction == BELADY)
        gap = best.hit_rate - lru.hit_rate
        found.append(
            {
                **asdict(one),
                "hit_rate": one.hit_rate,
                "hits_per_write": one.hits_per_write,
                "written_of_lru": one.written_count / lru.written_count,
                "gap_closed": (one.hit_rate - lru.hit_rate) / gap if gap > 0 else 0.0,
            }
        )
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a policy and store."""
    shown = Table(title="Policies on a trace")
    for heading in ("store", "eviction", "admission"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("hit rate", "written", "hits/write", "gap closed"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["share"] != row["share"]:
            shown.add_section()
        shown.add_row(
            f"{row['share']:.0%}",
            row["eviction"],
            row["admission"],
            f"{row['hit_rate']:.4f}",
            f"{row['written_of_lru']:.1%}",
            f"{row['hits_per_write']:.2f}",
            f"{row['gap_closed']:+.1%}",
        )
    return shown


def draw(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Hit rate over the size of the store, and over what is written on the smallest."""
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys((row["eviction"], row["admission"]) for row in rows))
    smallest = min(row["share"] for row in rows)
    for name in names:
        mine = [row for row in rows if (row["eviction"], row["admission"]) == name]
        label = ", ".join(name)
        left.plot([row["share"] for row in mine], [row["hit_rate"] for row in mine], marker="o", label=label)
        for row in mine:
            if row["share"] == smallest:
                right.scatter(row["written_count"], row["hit_rate"], label=label)
    left.set_xscale("log")
    left.set_xlabel("store / footprint of the trace")
    left.set_ylabel("hit rate")
    right.set_xlabel(f"chunks written, store of {smallest:.0%}")
    right.set_ylabel("hit rate")
    left.legend(fontsize=6)


@click.command(help=__doc__ and __doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.argument("trace", required=False, type=click.Path())
@click.option("--requests", "limit", type=click.IntRange(min=1), help="Only the first so many.")
@click.option(
    "--share",
    "shares",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    default=[0.05, 0.1, 0.25, 1.0],
    show_default=True,
    help="Size of the store as a share of the footprint; may be given several times.",
)
@click.option("--tried", "with_tried", is_flag=True, help="Also the policies that were tried and left out.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the result into this PNG file.")
def main(
    trace: str | None,
    limit: int | None,
    shares: tuple[float, ...],
    with_tried: bool,
    as_json: bool,
    plot: str | None,
) -> None:
    """Simulate and report."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    to = OutputOptions(as_json, plot)
    bench_tool.refuse_plot_without_matplotlib(to)
    try:
        requests = read_trace(trace, limit)
    except BlockKVError as error:
        raise click.ClickException(str(error)) from error
    per_share = len(EVICTIONS) * len(ADMISSIONS) + 1 + (len(TRIED) + 1 if with_tried else 0)
    with bench_tool.progress_bar(len(shares) * per_share) as advance:
        rows = documents(measure(requests, shares, with_tried, advance))
    sizes = footprint(requests)
    to.document({"trace": {"path": trace, **asdict(sizes)}, "outcomes": rows})
    console = to.console(TABLE_CHARS)
    console.print(table(rows))
    console.print(
        f"{sizes.request_count} requests, {sizes.reference_count} references to {sizes.distinct_count} "
        f"chunks; {sizes.infinite_hit_rate:.4f} would hit if nothing were ever evicted",
        highlight=False,
    )
    to.draw(lambda figure: draw(figure, rows), width_in=12)


if __name__ == "__main__":
    main()
