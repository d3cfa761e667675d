"""Which placement handle of an NVMe namespace gets what: Flexible Data Placement (FDP, NVMe TP4146).

A drive erases reclaim units, of tens of megabytes to gigabytes, as a whole, and first writes again what is
still valid in them. With FDP a write names one of the handles of its namespace, and the drive fills a reclaim
unit by one handle only: what was written by one handle and dies together leaves units in which nothing has to
be written again.

How handles are given out, by what a store knows of lifetimes when it writes, what differs most first. With

  1  all is together, and writes name no handle
  2  what is gone soon is apart: metadata, which are written over in place, page by page; chunks with a time
     to live, and those with a priority below 0, which leave before others
  3  what stays longest, too: chunks with a priority above 0, which leave after others
  4  and metadata by themselves

More are not used: among chunks of one priority the order of eviction is that of use, which nobody knows when
they are written. Other data get the first handle, by which the drive writes what names none: so a store that
is opened with other engines by turns, or written to by clients, keeps them together. In a model of a drive
metadata by themselves make no difference that is seen, the others do (docs/performance.md, "Measured").

Not here: reading the handles (`nvme_admin`), naming them (`native/passthrough.c`), which chunks are of which
kind (`blockkv.store.keeping`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockkv.device.base import Placement
from blockkv.device.nvme_admin import Fdp, ask_fdp
from blockkv.errors import DeviceError

__all__ = ["Places", "assign", "find_places", "places_of"]

HANDLES = ((0, 0, 0, 0), (0, 1, 1, 0), (0, 1, 1, 2), (0, 3, 1, 2))
"""For 1, 2, 3 and more handles: which one each `Placement` gets, in the order of its values."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where what is written goes."""

    reason: str
    """In words: why so, or why not."""
    identifiers: dict[Placement, int] | None = None
    """None: writes name no handle."""

    def described(self, counters: dict[str, int]) -> dict[str, object]:
        """For people and JSON; `counters` are those of the device."""
        handles = []
        for identifier in sorted(set((self.identifiers or {}).values())):
            holds = [one for one, named in (self.identifiers or {}).items() if named == identifier]
            handles.append(
                {
                    "identifier": identifier,
                    "holds": [one.name.lower() for one in holds],
                    "write_bytes": sum(counters[f"{one.name.lower()}_write_bytes"] for one in holds),
                }
            )
        return {"on": self.identifiers is not None, "reason": self.reason, "handles": handles}


def assign(identifiers: Sequence[int]) -> dict[Placement, int]:
    """A placement identifier for everything, from those of a namespace in ascending order: at least one."""
    chosen = HANDLES[min(len(identifiers), len(HANDLES)) - 1]
    return {one: identifiers[chosen[one]] for one in Placement}


def places_of(fdp: Fdp | None) -> Places:
    """What to do with what the drive has."""
    if fdp is None:
        return Places("FDP is not offered by the drive, or off for this namespace")
    if fdp.has_groups:
        return Places(
            "the namespace has several reclaim groups, and to name a handle is to write in one of them only"
        )
    if len(fdp.handles) < 2:
        return Places("the namespace has one placement handle: nothing can be kept apart")
    identifiers = assign([one.identifier for one in fdp.handles])
    used = len(set(identifiers.values()))
    return Places(f"{used} of {len(fdp.handles)} placement handles of the namespace are used", identifiers)


def find_places(path: str, descriptor: int) -> Places:
    """Ask the drive. Placement is no condition for anything: where it does not answer, there is none."""
    try:
        return places_of(ask_fdp(path, descriptor))
    except DeviceError as error:
        return Places(f"the drive does not tell its placement handles: {error}")
