"""What is wrong with a store, one finding a fact: what, where, and what a repair does about it.

Recovery makes them while it reads the metadata, `check` while it looks at the rest. Not here: looking.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from blockkv.catalog.index import Entry
from blockkv.format.geometry import SLOTS_PER_COPY, Geometry
from blockkv.format.superblock import Superblock, SuperblockFault, SuperblockRejected, slots_of

__all__ = ["Finding", "Remedy", "chunk_finding", "slot_findings", "tail_is_unfinished"]


class Remedy(enum.Enum):
    """What a repair does about a finding."""

    REWRITE = "writes it again"
    NEW_CHECKPOINT = "goes on without its records"
    CUT = "ends the log before it"
    DROP = "drops the chunk"
    KEEP = "keeps the chunk; every get verifies it"
    REOPEN = "cannot help; close the store and check it again"
    RETURN = "cannot help; open the array with it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `str` gives it as a line without the key."""

    structure: str
    """"superblock slot", "checkpoint", "checkpoint page", "journal page", "chunk", "index" or "free map"."""
    what: str
    remedy: Remedy
    index: int | None = None
    """Which slot, page of the checkpoint, or journal sequence."""
    offset_bytes: int | None = None
    """Where it begins on the device."""
    key: str | bytes | None = None
    """The chunk it is about."""
    device: str | None = None
    """On which member of an array."""

    @property
    def where(self) -> str:
        """Index and offset as text, with a space before."""
        index = f" {self.index}" if self.index is not None else ""
        return index + (f" at byte {self.offset_bytes}" if self.offset_bytes is not None else "")

    def __str__(self) -> str:
        device = f"{self.device}: " if self.device else ""
        return f"{device}{self.structure}{self.where}: {self.what}"


def chunk_finding(entry: Entry, geometry: Geometry, what: str, remedy: Remedy = Remedy.DROP) -> Finding:
    """A finding about a chunk, which lies where its first extent does."""
    extents = entry.extents
    offset_bytes = geometry.unit_offset(extents[0][0]) if extents else None
    return Finding("chunk", what, remedy, offset_bytes=offset_bytes, key=entry.key)


TORN_FAULTS = (SuperblockFault.TORN, SuperblockFault.BLANK, SuperblockFault.NOT_OURS)
"""What a write of several sectors can leave; the last two where nothing was before."""


def tail_is_unfinished(slots: Sequence[Superblock | SuperblockRejected], newest: Superblock) -> bool:
    """Whether an encrypted store grew, and not all slots of its new tail, blank until then, were written."""
    return newest.encryption is not None and any(
        isinstance(slot, SuperblockRejected) and slot.fault is SuperblockFault.BLANK
        for slot in slots[SLOTS_PER_COPY:]
    )


def slot_findings(slots: Sequence[Superblock | SuperblockRejected], newest: Superblock) -> list[Finding]:
    """Those of the examined `slots` that do not hold what they ought to; `newest` is the store's superblock.

    A slot is written head first, then tail. A crash in between leaves the tail with the superblock it held
    before, and one during a write leaves the old or the new content: everything in use lies in one sector. So
    an older superblock in the tail is no damage. Everything else is: what cannot be believed, a head older
    than what was written after it, nothing where something was.

    The superblocks of an encrypted store have a code in another sector, so there the slot that a crash found
    being written may be torn. And when it grows its new tail is blank, until each slot has been written.
    """
    found = []
    grows = any(
        isinstance(slot, Superblock) and slot.geometry.device_bytes < newest.geometry.device_bytes
        for slot in slots[:SLOTS_PER_COPY]
    )
    being_written = (slots_of(newest.generation)[1], *slots_of(newest.generation + 1))
    for slot_index, slot in enumerate(slots):
        due = newest.generation - (newest.generation - slot_index) % SLOTS_PER_COPY
        is_tail = slot_index >= SLOTS_PER_COPY
        what = ""
        if isinstance(slot, SuperblockRejected):
            before = due - SLOTS_PER_COPY if is_tail else due
            is_torn = slot_index in being_written and slot.fault in TORN_FAULTS
            is_blank = is_tail and slot.fault is SuperblockFault.BLANK
            is_not_yet = is_blank and (grows or slot_index in being_written)
            if newest.encryption and (is_torn or is_not_yet):
                continue
            if slot.fault is not SuperblockFault.BLANK or before > 0:
                what = str(slot)
        elif slot.uuid != newest.uuid:
            what = f"belongs to another store, {slot.uuid_text}"
        elif slot.generation < due and not is_tail:
            what = f"holds generation {slot.generation}, and {due} was written there"
        if what:
            offset_bytes = newest.geometry.slot_offsets[slot_index]
            found.append(Finding("superblock slot", what, Remedy.REWRITE, slot_index, offset_bytes))
    return found
