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
from blockkv.errors import StoreFull
from blockkv.format.geometry import RUN_UNITS
from blockkv.space.allocator import Extent
from blockkv.store.state import State

SPACE_WAIT_S = 5.0
"""How long to wait for readers and writers to give back what they hold."""


def reserve_extent(state: State, units: int, record_bytes: int) -> Extent:
    """An extent of `units` that is live from now on, and room for `record_bytes` in the next checkpoint.

    Raises StoreFull, saying what is in the way.
    """
    if units > state.geometry.data_units:
        raise StoreFull(
            f"{units * UNIT_BYTES} bytes in one piece can never fit: the data zone of {state.device.path} "
            f"has {state.geometry.data.size_bytes} bytes"
        )
    if state.layouts.exhausted:
        raise StoreFull(f"{state.device.path} has no numbers left for layouts; format it anew")
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
                raise _full(state, units, record_bytes)
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


def _full(state: State, units: int, record_bytes: int) -> StoreFull:
    if record_bytes > state.record_room_bytes:
        return StoreFull(
            f"{state.device.path} holds {len(state.index)} chunks and its checkpoint area has no room for "
            "another record; delete chunks, allow eviction, or format with a smaller --average-chunk"
        )
    allocator = state.allocator
    advice = (
        "what lies between is pinned, growing, being read or written, or quarantined"
        if state.options.evict
        else "delete chunks or open with evict=True"
    )
    return StoreFull(
        f"{state.device.path} has {allocator.free_units * UNIT_BYTES} bytes free in "
        f"{allocator.free_extent_count} pieces, the largest of {allocator.largest_free * UNIT_BYTES}, and "
        f"{units * UNIT_BYTES} are needed in one; {advice}"
    )
