"""Space for chunks that are about to be written: extents, and their part of the next checkpoint.

What is placed here is live and belongs to no entry of the index until the chunk is inserted, or until it is
released. One contiguous extent for a chunk that grows is another matter: see `contiguous`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from blockkv.device.base import UNIT_BYTES
from blockkv.space.allocator import Extent
from blockkv.store.full import SPACE_WAIT_S, refuse_impossible, store_full
from blockkv.store.state import State

__all__ = ["displace", "make_room", "place"]


def place(state: State, units: Sequence[int], record_bytes: Sequence[int]) -> list[tuple[Extent, ...]]:
    """Extents for chunks of so many units each, from the first on, as many as there is space for as it is."""
    with state.changing:
        if state.layouts.exhausted:
            return []
        room_bytes, fitting = state.record_room_bytes, 0
        for one in record_bytes:
            room_bytes -= one
            if room_bytes < 0:
                break
            fitting += 1
        extents = state.allocator.allocate_many(units[:fitting])
        state.reserved_record_bytes += sum(record_bytes[: len(extents)])
    return extents


def displace(state: State, record_bytes: Sequence[int], extents: Sequence[tuple[Extent, ...]]) -> None:
    """Give back what was placed for chunks of which nothing is being written."""
    with state.changing:
        for one in extents:
            state.allocator.release(one)
        state.reserved_record_bytes -= sum(record_bytes)


def make_room(
    state: State,
    units: int,
    record_bytes: int,
    what: str,
    *,
    own_claims: Callable[[], int],
    wait_for_own: Callable[[], bool],
) -> tuple[Extent, ...]:
    """Extents for one chunk, evicting as needed; reserves its part of the next checkpoint.

    `own_claims` is how many keys the caller has claimed. `wait_for_own` completes what the caller is writing,
    which may be evicted then, and says whether there was anything. Raises StoreFull, about `what`.
    """
    refuse_impossible(state, units, what)
    deadline = time.monotonic() + SPACE_WAIT_S
    while True:
        with state.changing:
            has_room = record_bytes <= state.record_room_bytes
            extents = state.allocator.allocate(units) if has_room else None
            if extents is not None:
                state.reserved_record_bytes += record_bytes
                return extents
            coming = state.evict(units) if state.options.evict else 0
            coming += state.allocator.pending_units
        if coming:
            state.log.commit()
            continue
        if wait_for_own():
            continue
        with state.lock:
            patience_s = deadline - time.monotonic()
            others_write = len(state.claims) > own_claims()
            if patience_s <= 0 or not (others_write or state.any_leased()):
                free_bytes, needed_bytes = state.allocator.free_units * UNIT_BYTES, units * UNIT_BYTES
                space = f"{free_bytes} bytes free and {needed_bytes} are needed"
                kept = "everything else is pinned, being read or written, or quarantined"
                raise store_full(state, record_bytes, space, kept)
            state.changed.wait(min(patience_s, 0.1))
