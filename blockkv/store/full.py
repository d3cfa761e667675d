"""Why there is no space for a chunk: what StoreFull says, and how long is waited before."""

from __future__ import annotations

from blockkv.errors import StoreFull
from blockkv.store.state import State

SPACE_WAIT_S = 5.0
"""How long to wait for readers and other writers to give back the only space that is left."""


def refuse_impossible(state: State, units: int, what: str) -> None:
    """Raise StoreFull where no eviction would ever help; `what` would need the units."""
    if units > state.geometry.data_units:
        raise StoreFull(
            f"{what} can never fit: the data zone of {state.device.path} has "
            f"{state.geometry.data.size_bytes} bytes"
        )
    if state.layouts.exhausted:
        raise StoreFull(f"{state.device.path} has no numbers left for layouts; format it anew")


def store_full(state: State, record_bytes: int, space: str, kept: str) -> StoreFull:
    """Nothing more can be evicted. `space` says what there is and what is needed, `kept` what has to stay."""
    path = state.device.path
    if record_bytes > state.record_room_bytes:
        return StoreFull(
            f"{path} holds {len(state.index)} chunks and its checkpoint area has no room for another record; "
            "delete chunks, allow eviction, or format with a smaller --average-chunk"
        )
    advice = kept if state.options.evict else "delete chunks or open with evict=True"
    return StoreFull(f"{path} has {space}; {advice}")
