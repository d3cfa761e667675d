"""A store beside fio on the same device, in interleaved pairs.

For every case (put or get, chunk size, verified or not, kind of memory) a pair is one run of fio and one
of the store, next to each other in time and in alternating order; the ratio is taken pair by pair and its
median reported with the extremes. fio runs in the shape that was fastest on this device a moment before.

Both sides move data between the device and memory that stays allocated: fio a few MiB, the store one batch.
On a device in memory that flatters fio, whose buffers stay in the CPU's cache; `Settings.equal_memory` shows
by how much. CPU is user and system time of the whole process; the store's is this one, Python and all threads
included. What was read is compared with what was written, once per case, outside the measurement.

The device is formatted once and then written throughout: a drive answers reads of what was never written, or
discarded, without touching its flash, and would look faster than it is.

Not here: making a device (`blockkv.bench.device`), printing (`tools/fio_compare.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

import blockkv
from blockkv.bench import fio
from blockkv.errors import BlockKVError, InvalidArgument

__all__ = ["Case", "CaseResult", "Settings", "ShapeResult", "compare", "plan_cases"]

T = TypeVar("T")
Op = Literal["put", "get"]
Memory = Literal["huge", "ordinary"]
Calls = Literal["batch", "futures", "single"]
"""All chunks in one call; `FUTURES` calls in flight; or each waited for before the next."""

FUTURES = 8

FILL_SHARE = 0.85
"""How much of the data zone a put run may fill: allocation on a nearly full store is another subject."""
GET_SHARE = 0.5
"""How much of the data zone is filled for gets to read from."""
MIN_CALLS = 12
"""The data zone must hold this many batches."""
STAMP_BYTES = 8
WARM_UP_S = 0.3
"""A throttled device first lets through what it saved up during a pause; a drive fills its cache."""
WARM_UP_SHARE = 0.25
"""The warm-up of a put run also ends when it has filled this much of what the run may fill."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure."""

    op: Op
    chunk_bytes: int
    chunks_per_call: int
    verify: bool
    memory: Memory
    calls: Calls = "batch"


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """How fast fio was in one shape, before the pairs; the fastest becomes the reference."""

    op: Op
    shape: fio.Shape
    gb_per_s: float
    cpu_s_per_gb: float
    huge_pages: bool


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Medians over the pairs; `ratio` is store / fio, `ratio_spread` its smallest and largest value."""

    case: Case
    gb_per_s: float
    fio_gb_per_s: float
    ratio: float
    ratio_spread: tuple[float, float]
    cpu_s_per_gb: float
    fio_cpu_s_per_gb: float
    fio_shape: fio.Shape
    pairs: int
    call_latency_us: dict[str, float]
    """How long a call took, at p50, p99 and p99.9, over all pairs: one chunk of "single" and "futures"."""
    fio_latency_us: dict[str, float]
    """How long a request of that shape took fio: medians over the pairs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and how often to measure."""

    pairs: int = 5
    seconds: float = 1.5
    """Length of one run. A put run also ends when the store is `FILL_SHARE` full."""
    shape_rounds: int = 2
    """Runs of every fio shape before the pairs."""
    shapes: Sequence[fio.Shape] = fio.SHAPES
    """What fio is tried in; the fastest is the reference."""
    equal_memory: bool = False
    """fio's queue is made so deep that its buffers are as large as one call of the store. A device in memory
    copies faster into buffers that stay in the CPU's cache, as fio's few MiB do and no KV cache does."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of the store."""

    gb_per_s: float
    cpu_s_per_gb: float
    latencies_s: Sequence[float] = ()
    """Of each call."""


def plan_cases(
    ops: Sequence[Op] = ("get", "put"),
    chunk_sizes_bytes: Sequence[int] = (2 << 20, 8 << 20, 32 << 20),
    batch_bytes: int = 64 << 20,
    verify: Sequence[bool] = (True, False),
    memory: Sequence[Memory] = ("huge", "ordinary"),
    calls: Calls = "batch",
) -> list[Case]:
    """The cases of every combination, `batch_bytes` of chunks in each call (at least one chunk).

    A put always computes the checksum, so that there is only its verified case.
    """
    return [
        Case(op, chunk_bytes, max(1, batch_bytes // chunk_bytes), verified, kind, calls)
        for op, chunk_bytes, kind, verified in itertools.product(ops, chunk_sizes_bytes, memory, verify)
        if verified or op == "get"
    ]


def compare(
    path: str | Path,
    cases: Sequence[Case],
    settings: Settings = Settings(),
    progress: Callable[[ShapeResult | CaseResult], None] = lambda result: None,
    *,
    force: bool = False,
) -> tuple[list[ShapeResult], list[CaseResult]]:
    """Measure `cases` on the device at `path`, which is formatted and then overwritten again and again.

    Refuses what `blockkv.format` refuses, with the same `force`. `progress` sees every result as it is found.
    Raises InvalidArgument when the device is too small for a case, BlockKVError when what was read is not
    what was written, and what `blockkv.format`, `blockkv.open` and fio raise.
    """
    path = Path(path)
    zone = prepare(path, cases, force)
    shapes: list[ShapeResult] = []
    results: list[CaseResult] = []
    candidates = settings.shapes
    if settings.equal_memory:
        call_bytes = max(case.chunk_bytes * case.chunks_per_call for case in cases)
        candidates = [fio.Shape(s.request_bytes, call_bytes // s.request_bytes) for s in candidates]
    largest = max(shape.request_bytes * shape.depth for shape in candidates)
    with fio.reserved_huge_pages(largest):
        _write_throughout(path, zone)
        for op, group in itertools.groupby(cases, key=lambda case: case.op):
            found = _measure_shapes(path, op, candidates, zone, settings)
            best = max(found, key=lambda result: result.gb_per_s).shape
            shapes += found
            for result in found:
                progress(result)
            for case in group:
                results.append(_measure_case(path, case, zone, best, settings))
                progress(results[-1])
    return shapes, results


def prepare(path: Path, cases: Sequence[Case], force: bool) -> tuple[int, int]:
    """Format; offset and size in bytes of the data zone, which is also where fio reads and writes."""
    facts = blockkv.format(path, average_chunk=min(case.chunk_bytes for case in cases), force=force)
    zone = int(facts["data_offset_bytes"]), int(facts["data_bytes"])
    needed_bytes = max(case.chunk_bytes * case.chunks_per_call for case in cases) * MIN_CALLS
    if zone[1] < needed_bytes:
        raise InvalidArgument(f"{path}: the data zone has {zone[1]} bytes, these cases need {needed_bytes}")
    return zone


def _write_throughout(path: Path, zone: tuple[int, int]) -> None:
    shape = fio.SHAPES[-1]
    size_bytes = zone[1] // shape.request_bytes * shape.request_bytes
    fio.run(path, "write", shape, offset_bytes=zone[0], size_bytes=size_bytes, total_bytes=size_bytes)


@contextlib.contextmanager
def empty_store(path: Path, case: Case) -> Iterator[blockkv.Store]:
    """The store with nothing in it, emptied again afterwards: fio may have written over what it held."""
    with blockkv.open(path, verify=case.verify) as store:
        yield store
        for key in list(store.keys()):
            store.delete(key)


def _measure_shapes(
    path: Path, op: Op, candidates: Sequence[fio.Shape], zone: tuple[int, int], settings: Settings
) -> list[ShapeResult]:
    runs: dict[fio.Shape, list[fio.FioRun]] = {shape: [] for shape in candidates}
    for _ in range(settings.shape_rounds):
        for shape, done in runs.items():
            done.append(_run_fio(path, op, shape, zone, settings))
    return [
        ShapeResult(
            op,
            shape,
            statistics.median(run.gb_per_s for run in done),
            statistics.median(run.cpu_s_per_gb for run in done),
            all(run.huge_pages for run in done),
        )
        for shape, done in runs.items()
    ]


def _run_fio(path: Path, op: Op, shape: fio.Shape, zone: tuple[int, int], settings: Settings) -> fio.FioRun:
    return fio.run(
        path,
        "read" if op == "get" else "write",
        shape,
        offset_bytes=zone[0],
        size_bytes=zone[1] // shape.request_bytes * shape.request_bytes,
        seconds=settings.seconds,
    )


def _measure_case(
    path: Path, case: Case, zone: tuple[int, int], shape: fio.Shape, settings: Settings
) -> CaseResult:
    chunks = allocate(case)
    of_store: list[Sample] = []
    of_fio: list[fio.FioRun] = []

    def run_fio() -> None:
        of_fio.append(_run_fio(path, case.op, shape, zone, settings))

    if case.op == "put":

        def run_store() -> None:
            with empty_store(path, case) as store:
                of_store.append(_measure_puts(store, case, chunks, zone[1], settings.seconds))

        _run_pairs(settings.pairs, run_fio, run_store)
    else:
        with empty_store(path, case) as store:
            batches = _fill(store, case, chunks, zone[1])
            outs = allocate(case)
            _check_gets(store, case, batches, chunks, outs)
            _run_pairs(
                settings.pairs,
                run_fio,
                lambda: of_store.append(_measure_gets(store, case, batches, outs, settings.seconds)),
            )

    ratios = [ours.gb_per_s / theirs.gb_per_s for ours, theirs in zip(of_store, of_fio, strict=True)]
    return CaseResult(
        case,
        statistics.median(sample.gb_per_s for sample in of_store),
        statistics.median(run.gb_per_s for run in of_fio),
        statistics.median(ratios),
        (min(ratios), max(ratios)),
        statistics.median(sample.cpu_s_per_gb for sample in of_store),
        statistics.median(run.cpu_s_per_gb for run in of_fio),
        shape,
        settings.pairs,
        latencies_us([seconds for sample in of_store for seconds in sample.latencies_s]),
        {
            name: statistics.median(run.latency_us[name] for run in of_fio)
            for name in of_fio[0].latency_us
            if all(name in run.latency_us for run in of_fio)
        },
    )


def latencies_us(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and p99.9 in microseconds; the nearest rank, so p99.9 of few calls is the longest."""
    ranked = sorted(seconds)
    return {
        f"p{percent:g}": ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))] * 1e6
        for percent in map(float, fio.PERCENTILES)
        if ranked
    }


def _run_pairs(count: int, first: Callable[[], None], second: Callable[[], None]) -> None:
    for number in range(count):
        for run in (first, second) if number % 2 == 0 else (second, first):
            run()


def allocate(case: Case) -> list[torch.Tensor]:
    """One batch of chunks, every page touched, contents random."""
    if case.memory == "huge":
        chunks = list(blockkv.empty((case.chunks_per_call, case.chunk_bytes), torch.uint8).unbind(0))
    else:
        chunks = [torch.empty(case.chunk_bytes, dtype=torch.uint8) for _ in range(case.chunks_per_call)]
    for chunk in chunks:
        chunk.random_(0, 256)
    return chunks


def stamp(chunk: torch.Tensor, number: int) -> None:
    """Make a chunk unlike any with another number."""
    chunk[:STAMP_BYTES].view(torch.int64)[0] = number


def batch_keys(count: int) -> Iterator[list[str]]:
    """Fresh keys, `count` at a time."""
    for batch in itertools.count():
        yield [f"{batch}/{position}" for position in range(count)]


def _fill(store: blockkv.Store, case: Case, chunks: list[torch.Tensor], data_bytes: int) -> list[list[str]]:
    """Put chunks that all differ into `GET_SHARE` of the store; the keys, batch by batch."""
    batch_count = int(data_bytes * GET_SHARE) // (case.chunk_bytes * case.chunks_per_call)
    batches = list(itertools.islice(batch_keys(case.chunks_per_call), batch_count))
    for batch_index, keys in enumerate(batches):
        for position, chunk in enumerate(chunks):
            stamp(chunk, batch_index * case.chunks_per_call + position)
        store.put_many(zip(keys, chunks, strict=True), durable=True)
    return batches


def _check_gets(
    store: blockkv.Store,
    case: Case,
    batches: list[list[str]],
    chunks: list[torch.Tensor],
    outs: list[torch.Tensor],
) -> None:
    for batch_index, keys in enumerate(batches):
        for out in outs:
            out.zero_()
        found = store.get_many(keys, outs)
        for position, (chunk, out) in enumerate(zip(chunks, outs, strict=True)):
            stamp(chunk, batch_index * case.chunks_per_call + position)
            if not found[position] or not torch.equal(chunk, out):
                raise BlockKVError(f"chunk {keys[position]!r} read back is not what was put: {case}")


def _measure_gets(
    store: blockkv.Store, case: Case, batches: list[list[str]], outs: list[torch.Tensor], seconds: float
) -> Sample:
    latencies_s: list[float] = []

    def get_batch(keys: list[str]) -> None:
        if case.calls == "batch":
            found = _timed(latencies_s, lambda: store.get_many(keys, outs))
        elif case.calls == "single":
            found = [
                _timed(latencies_s, lambda key=key, out=out: store.get(key, out))  # type: ignore[misc]
                for key, out in zip(keys, outs, strict=True)
            ]
        else:
            found = _some_at_a_time(store.submit_get, zip(keys, outs, strict=True), latencies_s)
        if not all(found):
            raise BlockKVError(f"a chunk that was put is missing: {case}")

    endless = itertools.cycle(batches)
    return _measure(case, get_batch, endless, endless, seconds, latencies_s)


def _timed(latencies_s: list[float], call: Callable[[], T]) -> T:
    started = time.perf_counter()
    result = call()
    latencies_s.append(time.perf_counter() - started)
    return result


def _some_at_a_time(
    submit: Callable[[str, torch.Tensor], Future[Any]],
    pairs: Iterable[tuple[str, torch.Tensor]],
    latencies_s: list[float],
) -> list[Any]:
    """The results of calls of which `FUTURES` are in flight."""
    in_flight: deque[Future[Any]] = deque()
    results = []
    for key, chunk in pairs:
        if len(in_flight) == FUTURES:
            results.append(in_flight.popleft().result())
        started = time.perf_counter()
        future = submit(key, chunk)
        future.add_done_callback(
            lambda _, started=started: latencies_s.append(time.perf_counter() - started)  # type: ignore[misc]
        )
        in_flight.append(future)
    return results + [future.result() for future in in_flight]


def _measure_puts(
    store: blockkv.Store, case: Case, chunks: list[torch.Tensor], data_bytes: int, seconds: float
) -> Sample:
    last: list[str] = []
    latencies_s: list[float] = []

    def put_batch(keys: list[str]) -> None:
        nonlocal last
        last = keys
        pairs = zip(keys, chunks, strict=True)
        if case.calls == "batch":
            done = _timed(latencies_s, lambda: store.put_many(pairs))
        elif case.calls == "single":
            done = [
                _timed(latencies_s, lambda key=key, chunk=chunk: store.put(key, chunk))  # type: ignore[misc]
                for key, chunk in pairs
            ]
        else:
            done = _some_at_a_time(store.submit_put, pairs, latencies_s)
        if not all(done):
            raise BlockKVError(f"a new key was there already: {case}")

    calls_at_most = int(data_bytes * FILL_SHARE) // (case.chunk_bytes * case.chunks_per_call)
    batches = itertools.islice(batch_keys(case.chunks_per_call), calls_at_most)
    warm_up = itertools.islice(batches, int(calls_at_most * WARM_UP_SHARE))
    sample = _measure(case, put_batch, warm_up, batches, seconds, latencies_s)
    for key, chunk in zip(last, chunks, strict=True):
        if not torch.equal(chunk, store.get(key)):
            raise BlockKVError(f"chunk {key!r} read back is not what was put: {case}")
    return sample


def _measure(
    case: Case,
    move: Callable[[list[str]], None],
    warm_up: Iterator[list[str]],
    batches: Iterator[list[str]],
    seconds: float,
    latencies_s: list[float],
) -> Sample:
    """Move batch after batch, after a warm-up, for `seconds` or until there are no more.

    `move` notes how long its calls took in `latencies_s`.
    """
    with Clock() as clock:
        for keys in warm_up:
            move(keys)
            if clock.elapsed_s() >= WARM_UP_S:
                break
    moved_bytes = 0
    latencies_s.clear()
    with Clock() as clock:
        for keys in batches:
            move(keys)
            moved_bytes += case.chunk_bytes * case.chunks_per_call
            if clock.elapsed_s() >= seconds:
                break
    return replace(clock.sample(moved_bytes), latencies_s=tuple(latencies_s))


class Clock:
    """Wall time and CPU of this process between entering and leaving the context."""

    def __enter__(self) -> Clock:
        self._cpu_s = _process_cpu_s()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.wall_s = self.elapsed_s()
        self._cpu_s = _process_cpu_s() - self._cpu_s

    def elapsed_s(self) -> float:
        """Since it was entered."""
        return time.perf_counter() - self._start

    def sample(self, moved_bytes: int) -> Sample:
        """Speed and CPU of moving so much in the time it measured."""
        return Sample(moved_bytes / self.wall_s / 1e9, self._cpu_s / (moved_bytes / 1e9))


def _process_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
