#!/usr/bin/env python3
"""Ages a store: writes the device over, many times, nearly full, and looks at what has become of it.

    tools/churn.py --paced --times 10                      on a device in memory, as fast as a drive (root)
    tools/churn.py store.img --times 3 --plot churn.png    on a file that exists
    tools/churn.py /dev/nvme0n1p4 --force --json           a real one; EVERYTHING ON IT IS DESTROYED

Chunks of mixed sizes, a mixture of log-normal distributions cut off at 16 KiB and 32 MiB, are put in batches.
Before each batch the chunks used longest ago are deleted, in the order in which the store would evict them,
so that no more than --fill of the data zone is live (with --fill 1 the store evicts by itself); --reads of a
batch's chunks are read, chosen at random, and every byte compared, which counts as a use and stirs that
order. All follows from --seed. A pass has written the data zone once over. With --brief a share of the chunks
has a priority below the others' and leaves before all of them.

For each pass
  put, get        GB/s and CPU s/GB of the calls; gets are of chunks chosen at random, at the end of the pass
  run             mean length of a contiguous piece of a live chunk
  fragmented      share of the live chunks in more than one piece
  request         mean size of the requests to the device
  writes          bytes written to the device per byte of payload
  FTL             what a drive makes of these writes and discards: pages written to flash per page written
                  (a model, see `blockkv.bench.ftl`; --over-provisioning and --erase-unit-mib are its own;
                  with --handles it keeps apart what a drive with so many placement handles would)

At the end: whether free, live, pending and quarantined space add up to the data zone, what rounding to units
costs, what `check` says, and the last pass beside the first. Exits with 1 when something does not add up.
"""

from __future__ import annotations

import itertools
import random
import resource
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_tool
import click
import torch
from bench_tool import DeviceOptions, OutputOptions
from rich.table import Table

import blockkv
from blockkv.bench.device import write_throughout
from blockkv.bench.ftl import Ftl
from blockkv.device.base import Placement
from blockkv.device.placement import assign
from blockkv.errors import BlockKVError
from blockkv.testing import OperationKind, RecordingDevice

KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
UNIT_BYTES = 4096
SIZE_STEP_BYTES = 256
LEAST_BYTES, MOST_BYTES = 16 * KIBIBYTE, 32 * MEBIBYTE
MIXTURE = ((0.5, 64 * KIBIBYTE, 0.7), (0.3, MEBIBYTE, 0.7), (0.2, 8 * MEBIBYTE, 0.6))
"""(weight, median, sigma): state of MLA models and tails, a few hundred tokens of small models, and of
large."""
AVERAGE_CHUNK_BYTES = 256 * KIBIBYTE
"""Half of the chunks are small: at the default of 1 MiB their records would fill the index first."""
ARENA_BYTES = 64 * MEBIBYTE
LARGEST_SHARE = 64
"""A chunk has at most this part of the data zone, so that a small device holds a mixture too."""
SAMPLE_BYTES = 2048 * MEBIBYTE
"""What the gets at the end of a pass read."""
BRIEF_PRIORITY = -1
TABLE_CHARS = 136
PANELS = (
    ("GB/s", ("put_gb_per_s", "get_gb_per_s")),
    ("write amplification", ("write_amplification", "ftl_write_amplification")),
    ("KiB", ("mean_run_kib", "mean_request_kib")),
    ("share", ("fragmented_share",)),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to do to the store. `brief`: share of the chunks that leave before the others."""

    times: float
    fill: float
    reads: float
    batch_bytes: int
    seed: int
    brief: float = 0.0
    largest_bytes: int = MOST_BYTES


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass. Figures of the store are as of its end, all others of its duration."""

    number: int
    payload_bytes: int
    put_gb_per_s: float
    put_cpu_s_per_gb: float
    get_gb_per_s: float
    get_cpu_s_per_gb: float
    write_amplification: float
    ftl_write_amplification: float
    mean_request_bytes: float
    chunks: int
    live_bytes: int
    mean_run_bytes: float
    fragmented_share: float
    rounding_share: float
    """Of the live space: from the end of a payload to the end of its last unit."""
    free_extents: int
    largest_free_bytes: int


class Sizes:
    """Chunk sizes, drawn from `MIXTURE`."""

    def __init__(self, rng: random.Random, most_bytes: int) -> None:
        self._rng = rng
        self._most_bytes = most_bytes

    def draw(self) -> int:
        """One size in bytes, a multiple of `SIZE_STEP_BYTES`."""
        weights = [weight for weight, _, _ in MIXTURE]
        while True:
            _, median_bytes, sigma = self._rng.choices(MIXTURE, weights)[0]
            size = self._rng.lognormvariate(0, sigma) * median_bytes
            if LEAST_BYTES <= size <= self._most_bytes:
                return int(size) // SIZE_STEP_BYTES * SIZE_STEP_BYTES


class Clock:
    """Time and CPU of this process inside it, and the payload moved meanwhile."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._cpu_s, self._started = _cpu_s(), time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.wall_s += time.perf_counter() - self._started
        self.cpu_s += _cpu_s() - self._cpu_s

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / 1e9 / self.wall_s if self.wall_s else 0.0

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.moved_bytes / 1e9) if self.moved_bytes else 0.0


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Trace:
    """What the store wrote and discarded, on its way to the model, a drive with so many placement handles."""

    def __init__(self, ftl: Ftl, handles: int = 1) -> None:
        self._ftl = ftl
        self._streams = assign(range(handles))
        self._waiting: deque[tuple[OperationKind, int, int, Placement]] = deque()

    def record(
        self,
        kind: OperationKind,
        offset_bytes: int,
        length_bytes: int,
        placement: Placement = Placement.DATA,
    ) -> None:
        """As `RecordingDevice` calls it, on any thread."""
        self._waiting.append((kind, offset_bytes, length_bytes, placement))

    def work_off(self) -> None:
        """Show the model what has come in; outside every measurement."""
        while self._waiting:
            kind, offset_bytes, length_bytes, placement = self._waiting.popleft()
            if kind is OperationKind.WRITE:
                self._ftl.write(offset_bytes, length_bytes, self._streams[placement])
            elif kind is OperationKind.DISCARD:
                self._ftl.discard(offset_bytes, length_bytes)


class Churn:
    """A store and what should be in it."""

    def __init__(
        self,
        store: blockkv.Store,
        trace: Trace,
        ftl: Ftl,
        settings: Settings,
        discard_at_once: bool = False,
    ) -> None:
        """`discard_at_once`: after every batch, all that is free, as a store in no hurry has done by then."""
        self.store = store
        self.discard_at_once = discard_at_once
        self.trace = trace
        self.ftl = ftl
        self.settings = settings
        self.rng = random.Random(settings.seed)  # noqa: S311  not a secret
        self.data_bytes: int = store.stats()["data_bytes"]
        self.sizes = Sizes(self.rng, min(settings.largest_bytes, self.data_bytes // LARGEST_SHARE))
        self.arena = blockkv.empty((ARENA_BYTES,), dtype=torch.uint8)
        self.arena.random_(0, 256, generator=torch.Generator().manual_seed(settings.seed))
        self.outs = blockkv.empty((settings.batch_bytes + MOST_BYTES,), dtype=torch.uint8)
        self.live: dict[str, tuple[int, int]] = {}
        """Key -> (offset in the arena, size) of its payload."""
        self.live_bytes = 0
        self.brief: dict[str, None] = {}
        """Stored ones that leave before the others, in this order."""
        self.names = map(str, itertools.count())
        self.gone_count = 0
        """Chunks that nobody deleted and that are not there: as many as the store evicted, or some are
        lost."""

    def payload(self, key: str) -> torch.Tensor:
        """What a chunk holds."""
        start, size = self.live[key]
        return self.arena[start : start + size]

    def run_pass(self, number: int, progress: Callable[[int], None]) -> Pass:
        """Write the data zone once over."""
        puts, gets, before = Clock(), Clock(), self.store.stats()
        self.ftl.reset_counters()
        while puts.moved_bytes < self.data_bytes:
            batch = self._draw_batch()
            with puts:
                self._put(batch)
            puts.moved_bytes += sum(self.live[key][1] for key in batch)
            if self.discard_at_once:
                self.store.discard_freed()
            self.trace.work_off()
            self._read(self._sample(round(len(batch) * self.settings.reads)), Clock())
            progress(puts.moved_bytes)
        self.store.commit()
        while gets.moved_bytes < min(SAMPLE_BYTES, self.live_bytes):
            self._read(self._sample(32), gets)
        self.trace.work_off()
        after = self.store.stats()
        done = Counter(after)
        done.subtract(before)
        requests = max(1, done["device_requests"])
        pieces = self._pieces()
        return Pass(
            number=number,
            payload_bytes=puts.moved_bytes,
            put_gb_per_s=puts.gb_per_s,
            put_cpu_s_per_gb=puts.cpu_s_per_gb,
            get_gb_per_s=gets.gb_per_s,
            get_cpu_s_per_gb=gets.cpu_s_per_gb,
            write_amplification=done["device_write_bytes"] / max(1, done["put_bytes"]),
            ftl_write_amplification=self.ftl.write_amplification,
            mean_request_bytes=(done["device_read_bytes"] + done["device_write_bytes"]) / requests,
            free_extents=after["free_extents"],
            largest_free_bytes=after["largest_free_bytes"],
            **describe_pieces(pieces, [self.live[key][1] for key in self.live]),
        )

    def _put(self, batch: Sequence[str]) -> None:
        share = self.settings.brief
        brief = dict.fromkeys(key for key in batch if share and self.rng.random() < share)
        self.store.put_many([(key, self.payload(key)) for key in batch if key not in brief])
        if brief:
            self.store.put_many([(key, self.payload(key)) for key in brief], priority=BRIEF_PRIORITY)
            self.brief |= brief

    def _draw_batch(self) -> list[str]:
        """New chunks, and room for them."""
        batch, batch_bytes = [], 0
        while batch_bytes < self.settings.batch_bytes:
            size = self.sizes.draw()
            start = self.rng.randrange((ARENA_BYTES - size) // UNIT_BYTES) * UNIT_BYTES
            key = next(self.names)
            batch.append(key)
            batch_bytes += rounded(size)
            self.live[key] = start, size
        self._make_room(batch_bytes)
        self.live_bytes += batch_bytes
        return batch

    def _make_room(self, wanted_bytes: int) -> None:
        """Delete what was used longest ago, until there is as much below the fill."""
        if self.settings.fill >= 1:
            return
        limit_bytes = int(self.settings.fill * self.data_bytes) - wanted_bytes
        if self.live_bytes <= limit_bytes:
            return
        for key in itertools.chain(list(self.brief), self.store.keys()):
            assert isinstance(key, str)
            self.store.delete(key)
            self._forget(key)
            if self.live_bytes <= limit_bytes:
                return

    def _forget(self, key: str) -> None:
        self.live_bytes -= rounded(self.live.pop(key)[1])
        self.brief.pop(key, None)

    def _forget_evicted(self) -> None:
        """The store makes room too: always with a fill of 1, else while deleted space is not free yet."""
        stored = set(self.store.keys())
        for key in [key for key in self.live if key not in stored]:
            self._forget(key)
            self.gone_count += 1

    def _sample(self, count: int) -> list[str]:
        """Stored chunks, chosen at random."""
        self._forget_evicted()
        return self.rng.sample(list(self.live), min(count, len(self.live)))

    def _read(self, keys: Sequence[str], clock: Clock) -> None:
        """Get chunks and compare every byte."""
        for part in self._parts(keys):
            outs = []
            end = 0
            for key in part:
                size = self.live[key][1]
                outs.append(self.outs[end : end + size])
                end += rounded(size)
            with clock:
                found = self.store.get_many(part, outs)
            for key, out, hit in zip(part, outs, found, strict=True):
                clock.moved_bytes += len(out)
                if not hit:
                    raise BlockKVError(f"chunk {key!r} was stored a moment ago and is missing")
                if not torch.equal(out, self.payload(key)):
                    raise BlockKVError(f"chunk {key!r} of {len(out)} bytes is not what was put")

    def _parts(self, keys: Iterable[str]) -> Iterable[list[str]]:
        """As many at a time as there is memory for."""
        part: list[str] = []
        part_bytes = 0
        for key in keys:
            part.append(key)
            part_bytes += rounded(self.live[key][1])
            if part_bytes >= self.settings.batch_bytes:
                yield part
                part, part_bytes = [], 0
        if part:
            yield part

    def _pieces(self) -> list[list[int]]:
        """Bytes of the contiguous pieces of every live chunk, in the order of `live`."""
        self._forget_evicted()
        entries = [self.store.entry(key) for key in self.live]
        return [
            [count * UNIT_BYTES for _, count in joined(entry.extents)]
            for entry in entries
            if entry is not None
        ]

    def account(self) -> dict[str, Any]:
        """Where the data zone is, in bytes, and whether that is all of it."""
        report = self.store.check()
        pieces = self._pieces()
        self.store.commit()
        figures = self.store.stats()
        used_bytes = sum(map(sum, pieces))
        known_bytes = (
            used_bytes + figures["free_bytes"] + figures["pending_free_bytes"] + figures["quarantined_bytes"]
        )
        return {
            "data_bytes": figures["data_bytes"],
            "used_bytes": used_bytes,
            "free_bytes": figures["free_bytes"],
            "pending_free_bytes": figures["pending_free_bytes"],
            "quarantined_bytes": figures["quarantined_bytes"],
            "payload_bytes": figures["payload_bytes"],
            "rounding_bytes": used_bytes - figures["payload_bytes"],
            "adds_up": known_bytes == figures["data_bytes"] and len(pieces) == figures["chunks"],
            "check_ok": report.ok,
            "lost_count": self.gone_count - figures["chunks_evicted"],
            "chunks_evicted": figures["chunks_evicted"],
            "chunks_deleted": figures["chunks_deleted"],
        }


def rounded(size_bytes: int) -> int:
    """The space that a payload takes."""
    return -(-size_bytes // UNIT_BYTES) * UNIT_BYTES


def joined(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extents with those that follow each other on the device made one."""
    found: list[tuple[int, int]] = []
    for start, count in extents:
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((start, count))
    return found


def describe_pieces(pieces: Sequence[Sequence[int]], payloads_bytes: Sequence[int]) -> dict[str, Any]:
    """How whole the chunks are: fields of `Pass`."""
    live_bytes = sum(map(sum, pieces))
    return {
        "chunks": len(pieces),
        "live_bytes": live_bytes,
        "mean_run_bytes": live_bytes / max(1, sum(map(len, pieces))),
        "fragmented_share": sum(len(piece) > 1 for piece in pieces) / max(1, len(pieces)),
        "rounding_share": 1 - sum(payloads_bytes) / live_bytes if live_bytes else 0.0,
    }


def churn(
    path: Path,
    settings: Settings,
    ftl_options: dict[str, Any],
    discard: str,
    force: bool,
    progress: Callable[[int, float], None],
    handles: int = 1,
) -> tuple[list[Pass], dict[str, Any]]:
    """Format, write everything once, and go through all passes."""
    average_bytes = min(AVERAGE_CHUNK_BYTES, settings.largest_bytes // 4)
    facts = blockkv.format(path, average_chunk=average_bytes, force=force)
    # formatting discarded it: what is read and written from now on is as on a drive that was in use
    offset_bytes, data_bytes = facts["data_offset_bytes"], facts["data_bytes"]
    write_throughout(path, data_bytes, offset_bytes)
    ftl = Ftl(facts["device_bytes"], **ftl_options, streams=handles)
    ftl.write(0, facts["device_bytes"])
    ftl.discard(offset_bytes, data_bytes)
    trace = Trace(ftl, handles)
    device = RecordingDevice(path, trace.record, keep_discards=discard == "model", placements=True)
    passes = []
    with blockkv.open(device, discard=discard != "off") as store:
        run = Churn(store, trace, ftl, settings, discard == "model")
        for number in itertools.count(1):
            passes.append(
                run.run_pass(number, lambda done, first=number - 1: progress(first, done / data_bytes))
            )
            if sum(one.payload_bytes for one in passes) >= settings.times * data_bytes:
                return passes, run.account()
    raise AssertionError("unreachable: the passes end")


def beside_first(passes: Sequence[Pass]) -> dict[str, float]:
    """The last pass, the first being 1."""
    first, last = passes[0], passes[-1]
    names = ("put_gb_per_s", "get_gb_per_s", "put_cpu_s_per_gb", "get_cpu_s_per_gb", "mean_run_bytes")
    return {name: getattr(last, name) / getattr(first, name) for name in names if getattr(first, name)}


def table(passes: Sequence[Pass]) -> Table:
    """A line a pass."""
    shown = Table(title="An ageing store, pass by pass")
    headings = ["pass", "put GB/s", "CPU s/GB", "get GB/s", "CPU s/GB", "chunks", "run KiB", "fragmented"]
    for heading in [*headings, "request KiB", "writes", "FTL", "rounding"]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for one in passes:
        shown.add_row(
            str(one.number),
            f"{one.put_gb_per_s:.2f}",
            f"{one.put_cpu_s_per_gb:.3f}",
            f"{one.get_gb_per_s:.2f}",
            f"{one.get_cpu_s_per_gb:.3f}",
            str(one.chunks),
            f"{one.mean_run_bytes / KIBIBYTE:.0f}",
            f"{one.fragmented_share:.1%}",
            f"{one.mean_request_bytes / KIBIBYTE:.0f}",
            f"{one.write_amplification:.3f}",
            f"{one.ftl_write_amplification:.3f}",
            f"{one.rounding_share:.2%}",
        )
    return shown


def draw(figure: Any, passes: Sequence[Pass]) -> None:
    """Four panels over the passes."""
    for axes, (unit, names) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for name in names:
            scale = KIBIBYTE if name.endswith("_kib") else 1
            field = name.removesuffix("_kib") + "_bytes" if scale > 1 else name
            values = [getattr(one, field) / scale for one in passes]
            label = name.removesuffix("_gb_per_s").removesuffix("_kib").replace("_", " ")
            axes.plot([one.number for one in passes], values, marker="o", label=label)
        axes.set_ylabel(unit)
        axes.set_xlabel("pass")
        axes.set_xticks(range(1, len(passes) + 1, max(1, len(passes) // 10)))
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.legend(loc="lower left")


@bench_tool.benchmark(size_gib=2.0, read_gb_s=3.0, write_gb_s=2.4)
@click.option("--times", default=10.0, show_default=True, help="Write the data zone so many times.")
@click.option("--fill", default=0.95, show_default=True, help="Live share; 1: the store evicts by itself.")
@click.option("--reads", default=0.25, show_default=True, help="Chunks read per chunk put.")
@click.option("--batch-mib", default=32, show_default=True, help="Payload of one call.")
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--discard",
    type=click.Choice(["model", "device", "off"]),
    default="model",
    show_default=True,
    help="Whom the store tells about freed space: the FTL model, after every batch; model and device, in the "
    "background; nobody.",
)
@click.option("--over-provisioning", default=0.07, show_default=True, help="Of the FTL model.")
@click.option("--erase-unit-mib", default=4.0, show_default=True, help="Of the FTL model.")
@click.option("--largest-kib", default=MOST_BYTES >> 10, show_default=True, help="Of a chunk.")
@click.option("--brief", default=0.0, show_default=True, help="Share of the chunks that leave first.")
@click.option(
    "--handles",
    type=click.IntRange(1, len(Placement)),
    default=1,
    show_default=True,
    help="Placement handles of the FTL model: what it keeps apart, see `blockkv.device.placement`.",
)
def main(
    on: DeviceOptions,
    to: OutputOptions,
    times: float,
    fill: float,
    reads: float,
    batch_mib: int,
    seed: int,
    discard: str,
    over_provisioning: float,
    erase_unit_mib: float,
    largest_kib: int,
    brief: float,
    handles: int,
) -> None:
    """Age a store on DEVICE, which is formatted and overwritten, or on one made for it."""
    if not 0 < fill <= 1:
        raise click.UsageError("--fill is a share: above 0, at most 1")
    if not 0 <= brief < 1:
        raise click.UsageError("--brief is a share: from 0, below 1")
    if largest_kib * KIBIBYTE < 4 * LEAST_BYTES:
        raise click.UsageError(f"--largest-kib is at least {4 * LEAST_BYTES // KIBIBYTE}")
    settings = Settings(
        times, fill, reads, batch_mib * MEBIBYTE, seed, brief, largest_bytes=largest_kib * KIBIBYTE
    )
    ftl_options = {
        "over_provisioning": over_provisioning,
        "erase_unit_bytes": int(erase_unit_mib * MEBIBYTE),
    }
    with on.target() as target, bench_tool.progress_bar(times) as advance:
        passes, accounting = churn(
            target.path,
            settings,
            ftl_options,
            discard,
            target.force,
            lambda number, share: advance(f"pass {number + 1}", number + share),
            handles,
        )
        described = target.described
    relative = beside_first(passes)
    to.document(
        {
            "device": described,
            "settings": asdict(settings) | {"discard": discard},
            "ftl": ftl_options | {"handles": handles},
            "passes": [asdict(one) for one in passes],
            "last_to_first": relative,
            "accounting": accounting,
        }
    )
    console = to.console(TABLE_CHARS)
    console.print(table(passes))
    for name, value in relative.items():
        console.print(f"{name}: the last pass is {value:.3f} of the first", highlight=False)
    median = statistics.median(one.ftl_write_amplification for one in passes[len(passes) // 2 :])
    console.print(f"FTL write amplification, second half of the passes: {median:.3f}", highlight=False)
    for name, value in accounting.items():
        console.print(f"{name:>20}  {value}", highlight=False)
    to.draw(lambda figure: draw(figure, passes), height_in=7)
    if not accounting["adds_up"] or not accounting["check_ok"] or accounting["lost_count"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
