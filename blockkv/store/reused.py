"""A device that was given to something else after it held a store, and still has superblocks of that.

A partition table or a file system is smaller than the MiB that superblocks are spread over, so three or four
of them outlive it. Reading such a store does no harm: what was overwritten is a miss. Writing would end what
is there now.

Only what stands in the first MiB, or carries a signature that libblkid knows, is found. A store keeps that
MiB zero but for its superblocks, so that this costs two reads where nothing is wrong.
"""

from __future__ import annotations

from blockkv.device import occupancy
from blockkv.device.base import Limits
from blockkv.errors import OccupiedError
from blockkv.format import superblock
from blockkv.format.geometry import slot_offsets

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
    return occupancy.beside_store(
        path,
        descriptor,
        slot_offsets(limits.size_bytes),
        superblock.MAGIC,
        superblock.SUPERBLOCK.offsets["magic"],
    )
