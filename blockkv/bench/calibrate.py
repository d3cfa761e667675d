"""What loading takes on this device, through a store's own gets: a line through measured times.

Chunks are put under keys of their own, read back in requests of several sizes in an order that changes, and
deleted. Nothing else in the store is touched, and nothing is evicted for it.
"""

from __future__ import annotations

import random
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import blockkv
from blockkv.errors import BatchError, InvalidArgument, StoreFull
from blockkv.kv_size import LoadTime, fit

if TYPE_CHECKING:
    import torch

FITTED_CHUNKS = (1, 2, 4, 8, 16, 32)
"""Chunks of the requests that the line goes through."""
CHECKED_CHUNKS = (3, 6, 12, 20, 28)
"""And of those that it is then compared with."""
PATTERN_SEED = 20260731
UNIT_BYTES = 4096
"""Space in a store is given out in units of that: docs/format.md."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A size that the line does not go through."""

    size_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """Medians of what was measured, and the line."""

    chunk_bytes: int
    load: LoadTime
    samples: tuple[tuple[int, float], ...]
    """(bytes, seconds) that the line goes through."""
    comparisons: tuple[Comparison, ...]


def calibrate(
    store: blockkv.Store,
    chunk_bytes: int = 2 << 20,
    rounds: int = 9,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Measure. `store` is open for writing with `evict=False`, and has room for 32 such chunks.

    Raises InvalidArgument (sizes; no memory for that), StoreFull, and what gets and puts raise.
    """
    import torch

    if chunk_bytes < 1 or rounds < 1:
        raise InvalidArgument(f"{rounds} rounds with chunks of {chunk_bytes} bytes; use at least 1 of each")
    count = max(FITTED_CHUNKS + CHECKED_CHUNKS)
    needed_bytes = count * -(-chunk_bytes // UNIT_BYTES) * UNIT_BYTES
    free_bytes = _free_bytes(store)
    full = StoreFull(
        f"{store._where} has {free_bytes} bytes free, and to calibrate takes {needed_bytes}: {count} "
        f"chunks of {chunk_bytes} bytes; delete chunks, or take smaller ones (--chunk)"
    )
    if needed_bytes > free_bytes:
        raise full
    try:
        memory = blockkv.empty((count, chunk_bytes), torch.uint8)
    except MemoryError:
        raise InvalidArgument(
            f"there is no memory for {count} chunks of {chunk_bytes} bytes; take smaller ones (--chunk)"
        ) from None
    memory.copy_(
        torch.randint(
            0, 256, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(PATTERN_SEED)
        )
    )
    outs = list(memory)
    keys = [f"blockkv-calibrate/{uuid.uuid4().hex}/{number}" for number in range(count)]
    pick = random.Random(PATTERN_SEED)  # noqa: S311 - an order, no secret
    times_s: dict[int, list[float]] = {chunks: [] for chunks in FITTED_CHUNKS + CHECKED_CHUNKS}
    try:
        try:
            store.put_many(list(zip(keys, outs, strict=True)), durable=True)
        except BatchError as error:
            # Free space is no promise: members of an array fill up one by one, records take space too.
            if all(isinstance(one, StoreFull) for one in error.errors.values()):
                raise full from error
            raise
        _read(store, keys, outs)  # the first one registers the memory
        for done in range(rounds):
            for chunks in pick.sample(list(times_s), len(times_s)):
                first = pick.randrange(count - chunks + 1)
                times_s[chunks].append(
                    _read(store, keys[first : first + chunks], outs[first : first + chunks])
                )
            if progress is not None:
                progress(done + 1, rounds)
    finally:
        for key in keys:
            store.delete(key)
    medians = {chunks: statistics.median(times) for chunks, times in times_s.items()}
    samples = tuple((chunks * chunk_bytes, medians[chunks]) for chunks in FITTED_CHUNKS)
    load = fit(samples)
    return Calibration(
        chunk_bytes,
        load,
        samples,
        tuple(
            Comparison(chunks * chunk_bytes, medians[chunks], load.of(chunks * chunk_bytes))
            for chunks in CHECKED_CHUNKS
        ),
    )


def _free_bytes(store: blockkv.Store) -> int:
    store.commit()  # what was deleted is free then
    figures = store.stats()
    return int(figures["free_bytes"]) + int(figures["pending_free_bytes"])


def _read(store: blockkv.Store, keys: list[str], outs: list[torch.Tensor]) -> float:
    started = time.perf_counter()
    hits = store.get_many(keys, outs)
    took_s = time.perf_counter() - started
    if not all(hits):
        raise InvalidArgument(f"{len(hits) - sum(hits)} of {len(hits)} chunks that were just put are misses")
    return took_s
