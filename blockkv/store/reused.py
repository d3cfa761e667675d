"""A device that was given to something else after it held a store, and still has superblocks of that.

A partition table or a file system is smaller than the MiB that superblocks are spread over, so three or four
of them outlive it. Reading such a store does no harm: what was overwritten is a miss. Writing would end what
is there now.

A store keeps both ends of its device zero but for its superblocks. So whatever stands between those, and any
signature that libblkid knows there, is of somebody else; it costs two MiB of reads to see that nothing is.

Not seen is what nobody knows and is in the page of a superblock only: that is no different from damage.
"""

from __future__ import annotations

from itertools import pairwise

from blockkv.device import occupancy
from blockkv.device.base import Limits
from blockkv.errors import OccupiedError
from blockkv.format import superblock
from blockkv.format.geometry import MEBIBYTE, PAGE_BYTES, SLOTS_PER_COPY, slot_offsets
from blockkv.format.superblock import Superblock
from blockkv.store.recovery import SMALLEST_BYTES

__all__ = ["made_since", "refuse_if_reused"]


def refuse_if_reused(path: str, descriptor: int, limits: Limits) -> None:
    """Raise OccupiedError where something was made on the device since the store on it.

    `descriptor` is that of an exclusive open. Where there is no store nothing is raised.
    """
    found = made_since(path, descriptor, limits)
    if found:
        raise OccupiedError(
            f"{path} held a store, and something else was made on it since, which writing to the store would "
            "destroy. If that is to stay, give another device. If it may go, clear it; what is left of the "
            "store can be opened then, and read_only=True reads it as it is.\n"
            + "\n".join(f"  {finding}" for finding in found)
        )


def made_since(path: str, descriptor: int, limits: Limits) -> list[occupancy.Finding]:
    """What stands where only a store was; empty where nothing does, and where there is no store."""
    size_bytes = limits.size_bytes
    if size_bytes < SMALLEST_BYTES:
        return []
    offsets = slot_offsets(size_bytes)
    pages = [occupancy.readable(path, descriptor, offset, PAGE_BYTES) for offset in offsets]
    slots = superblock.examine(pages)
    # The end of a disk may be that of a partition, with the superblocks of a store that is in there.
    own = [
        slot
        for index, slot in enumerate(slots)
        if isinstance(slot, Superblock) and slot.geometry.slot_offsets[index] == offsets[index]
    ]
    if not own:
        return []
    ends = [(0, MEBIBYTE)]
    if max(own, key=lambda slot: slot.generation).geometry.device_bytes == size_bytes:
        ends.append((offsets[SLOTS_PER_COPY], size_bytes // PAGE_BYTES * PAGE_BYTES))
    between = []
    for start, end in ends:
        within = [offset for offset in offsets if start <= offset < end]
        for offset, following in pairwise([*within, end]):
            gap = offset + PAGE_BYTES, following
            content = occupancy.readable(path, descriptor, gap[0], gap[1] - gap[0])
            between += list(occupancy.nonzero(path, content, gap[0]))
    unknown = [
        any(page) and not isinstance(slot, Superblock) for page, slot in zip(pages, slots, strict=True)
    ]
    if not between and not any(unknown[: SLOTS_PER_COPY * len(ends)]):
        return []
    known = occupancy.recognised(path, descriptor, ends)
    if not unknown[0]:  # where all of them begin
        known = [finding for finding in known if finding.kind != "unprobed"]
    return known + between
