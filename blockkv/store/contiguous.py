"""One contiguous extent: found in free space, or made by eviction.

A put takes what pieces there are; a chunk that grows is read as one run while it does, so it gets one extent.
Where no free extent is long enough, those chunks make room that were used longest ago and lie together: the
run of units that becomes free first if chunks leave in their order.

Not here: what the extent is used for (`growing`).
"""

from __future__ import annotations

import time
from array import array

from blockkv.catalog.index import Entry
from blockkv.device.base import UNIT_BYTES
from blockkv.format.geometry import RUN_UNITS
from blockkv.space.allocator import Extent
from blockkv.store.full import SPACE_WAIT_S, refuse_impossible, store_full
from blockkv.store.state import State


def reserve_extent(state: State, units: int, record_bytes: int) -> Extent:
    """An extent of `units` that is live from now on, and room for `record_bytes` in the next checkpoint.

    Raises StoreFull, saying what is in the way.
    """
    refuse_impossible(state, units, f"{units * UNIT_BYTES} bytes in one piece")
    deadline = time.monotonic() + SPACE_WAIT_S
    while True:
        with state.changing:
            has_room = record_bytes <= state.record_room_bytes
            extents = (state.allocator.allocate(units) if has_room else None) or ()
            if len(extents) == 1:
                state.reserved_record_bytes += record_bytes
                return extents[0]
            state.allocator.release(extents)
            coming = 0
            if state.options.evict:
                coming = state.evict_all(victims_for(state, units)) if has_room else state.evict(1)
            coming += state.allocator.pending_units
        if coming:
            state.log.commit()
            continue
        with state.lock:
            patience_s = deadline - time.monotonic()
            if patience_s <= 0 or not (state.claims or state.any_leased()):
                free = state.allocator
                space = (
                    f"{free.free_units * UNIT_BYTES} bytes free in {free.free_extent_count} pieces, the "
                    f"largest of {free.largest_free * UNIT_BYTES}, and {units * UNIT_BYTES} are needed in one"
                )
                kept = "what lies between is pinned, growing, being read or written, or quarantined"
                raise store_full(state, record_bytes, space, kept)
            state.changed.wait(min(patience_s, 0.1))


def victims_for(state: State, units: int) -> array[int]:
    """The places of the chunks that have to leave for `units` in one piece; none where none has to, or may.

    The caller holds the lock.
    """
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}

    def add(start: int, count: int) -> int:
        """Join an extent with its neighbours. Returns the first run of the result that is long enough."""
        end = start + count
        if end in ends:
            end = ends.pop(end)
        if start in starts:
            start = starts.pop(start)
        ends[start], starts[end] = end, start
        first = start + -start % RUN_UNITS
        return first if end - first >= units else -1

    for start, count in [*state.allocator.free_extents(), *state.allocator.pending_extents()]:
        if add(start, count) >= 0:
            return array("I")
    candidates: list[Entry] = []
    for entry in state.index.victims():
        candidates.append(entry)
        for start, count in entry.extents:
            first = add(start, count)
            if first >= 0:
                met = [one.place for one in candidates if _meets(one, first, first + units)]
                return array("I", met)
    return array("I")


def _meets(entry: Entry, start: int, end: int) -> bool:
    return any(first < end and start < first + count for first, count in entry.extents)
