"""fio and a store in turn on one device, for hours, every byte verified on both sides.

A cycle: fio writes a part of the data zone with a checksum in every request and reads it back; the store,
empty until then, is filled as far as that with chunks that all differ, and every chunk is read back in
another order and compared; then it is emptied. So each side writes over what the other left. Errors are
counted and the run goes on, unless the device is lost.

The ratio store / fio is taken cycle by cycle, for puts beside fio's writes and for gets beside its verified
reads: both check what they read. How it develops says whether the device or the store gets slower with time.

Not here: making a device (`blockkv.bench.device`), printing (`tools/fio_compare.py`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import blockkv
from blockkv.bench import fio
from blockkv.bench.compare import Case, Clock, allocate, batch_keys, empty_store, prepare, stamp
from blockkv.errors import BlockKVError, DeviceLost

__all__ = ["Cycle", "StressSettings", "drift", "error_count", "stress"]

SHAPE = fio.Shape(512 << 10, 16)
DRIFT_SHARE = 0.25
"""The first and the last quarter of the cycles are compared."""
DAMAGE_COUNTERS = ("get_checksum_mismatch", "get_device_error", "get_transient_error", "put_device_error")


@dataclass(frozen=True, slots=True)
class StressSettings:
    """How long, and how much of the data zone in each cycle."""

    hours: float
    share: float = 0.5
    seed: int = 1
    chunk_bytes: int = 8 << 20
    batch_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle. A speed is None where the side failed before it was known."""

    number: int
    elapsed_s: float
    """At its end, since the first one began."""
    put_gb_per_s: float | None
    get_gb_per_s: float | None
    fio_write_gb_per_s: float | None
    fio_read_gb_per_s: float | None
    fio_verify_errors: int
    wrong_chunks: int
    missing_chunks: int
    counted_damage: int
    """What the store itself counted: bytes that did not verify, and errors of the device."""
    failures: tuple[str, ...]
    """What was raised."""

    @property
    def put_ratio(self) -> float | None:
        """Store / fio, of writing."""
        return _ratio(self.put_gb_per_s, self.fio_write_gb_per_s)

    @property
    def get_ratio(self) -> float | None:
        """Store / fio, of reading with verification."""
        return _ratio(self.get_gb_per_s, self.fio_read_gb_per_s)

    @property
    def errors(self) -> int:
        """Everything that went wrong, on either side."""
        found = self.fio_verify_errors + self.wrong_chunks + self.missing_chunks + self.counted_damage
        return found + len(self.failures)


def stress(
    path: str | Path,
    settings: StressSettings,
    progress: Callable[[Cycle], None] = lambda cycle: None,
    *,
    force: bool = False,
) -> list[Cycle]:
    """Cycles on the device at `path`, which is formatted, until `settings.hours` are over; one at least.

    Raises what `compare.prepare` raises, and DeviceLost.
    """
    path = Path(path)
    chunks_per_call = max(1, settings.batch_bytes // settings.chunk_bytes)
    case = Case("put", settings.chunk_bytes, chunks_per_call, True, "huge")
    zone = prepare(path, [case], force)
    run = _Run(path, settings, case, zone)
    started = time.monotonic()
    cycles: list[Cycle] = []
    while not cycles or time.monotonic() - started < settings.hours * 3600:
        cycles.append(run.cycle(len(cycles) + 1, started))
        progress(cycles[-1])
    return cycles


class _Run:
    """What stays the same from cycle to cycle."""

    def __init__(self, path: Path, settings: StressSettings, case: Case, zone: tuple[int, int]) -> None:
        self._path = path
        self._case = case
        self._offset_bytes = zone[0]
        self._share_bytes = int(zone[1] * settings.share)
        self._rng = random.Random(settings.seed)  # noqa: S311  not a secret
        self._chunks = allocate(case)
        self._outs = allocate(case)

    def cycle(self, number: int, started: float) -> Cycle:
        """Both sides, in alternating order."""
        failures: list[str] = []
        of_fio: list[fio.FioRun] = []
        of_store = _StoreSide()

        def run_fio() -> None:
            of_fio.append(self._fio("write"))
            of_fio.append(self._fio("read"))

        def run_store() -> None:
            with empty_store(self._path, self._case) as store:
                self._store(store, number, of_store)

        for side in (run_fio, run_store) if number % 2 else (run_store, run_fio):
            try:
                side()
            except DeviceLost:
                raise
            except BlockKVError as error:
                failures.append(f"{type(error).__name__}: {error}")
        return Cycle(
            number=number,
            elapsed_s=time.monotonic() - started,
            put_gb_per_s=of_store.put_gb_per_s,
            get_gb_per_s=of_store.get_gb_per_s,
            fio_write_gb_per_s=of_fio[0].gb_per_s if of_fio else None,
            fio_read_gb_per_s=of_fio[1].gb_per_s if len(of_fio) > 1 else None,
            fio_verify_errors=sum(run.verify_errors for run in of_fio),
            wrong_chunks=of_store.wrong_chunks,
            missing_chunks=of_store.missing_chunks,
            counted_damage=of_store.counted_damage,
            failures=tuple(failures),
        )

    def _fio(self, direction: str) -> fio.FioRun:
        size_bytes = self._share_bytes // SHAPE.request_bytes * SHAPE.request_bytes
        return fio.run(
            self._path,
            "write" if direction == "write" else "read",
            SHAPE,
            offset_bytes=self._offset_bytes,
            size_bytes=size_bytes,
            total_bytes=size_bytes,
            verify=True,
        )

    def _store(self, store: blockkv.Store, number: int, found: _StoreSide) -> None:
        """Fill, read back in another order, compare."""
        case = self._case
        call_bytes = case.chunk_bytes * case.chunks_per_call
        count = max(1, self._share_bytes // call_bytes)
        batches = [keys for keys, _ in zip(batch_keys(case.chunks_per_call), range(count), strict=False)]
        moving_s = 0.0
        for batch_index, keys in enumerate(batches):
            self._stamp(number, batch_index)
            with Clock() as clock:
                store.put_many(zip(keys, self._chunks, strict=True))
            moving_s += clock.wall_s
        found.put_gb_per_s = count * call_bytes / 1e9 / moving_s
        order = list(enumerate(batches))
        self._rng.shuffle(order)
        moving_s = 0.0
        for batch_index, keys in order:
            with Clock() as clock:
                hits = store.get_many(keys, self._outs)
            moving_s += clock.wall_s
            for hit, out, chunk in zip(hits, self._outs, self._stamp(number, batch_index), strict=True):
                found.missing_chunks += not hit
                found.wrong_chunks += bool(hit) and not torch.equal(out, chunk)
                out.zero_()
        found.get_gb_per_s = count * call_bytes / 1e9 / moving_s
        figures = store.stats()
        found.counted_damage = sum(figures[counter] for counter in DAMAGE_COUNTERS)

    def _stamp(self, number: int, batch_index: int) -> list[torch.Tensor]:
        """Make the chunks those of this cycle and batch."""
        for position, chunk in enumerate(self._chunks):
            stamp(chunk, number << 40 | batch_index << 16 | position)
        return self._chunks


class _StoreSide:
    """What the store's half of a cycle found so far."""

    def __init__(self) -> None:
        self.put_gb_per_s: float | None = None
        self.get_gb_per_s: float | None = None
        self.wrong_chunks = self.missing_chunks = self.counted_damage = 0


def error_count(cycles: Sequence[Cycle]) -> int:
    """Everything that went wrong in any of them."""
    return sum(cycle.errors for cycle in cycles)


def drift(ratios: Sequence[float | None]) -> float | None:
    """Median of the last quarter per median of the first; None with fewer than two ratios."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < 2:
        return None
    count = max(1, int(len(known) * DRIFT_SHARE))
    return statistics.median(known[-count:]) / statistics.median(known[:count])


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs
