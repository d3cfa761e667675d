"""Superblocks of an encrypted store that lie where its device ended before it grew.

`Log.grow` clears them. A crash may come between the first superblock of the larger store and that; then those
at the head still say where the old end was, and whoever unlocks the store for writing goes on from there.
Otherwise a wrapped volume key would stay in the data zone that no change of key slots reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockkv.device.base import Device
from blockkv.format.geometry import PAGE_BYTES, SLOTS_PER_COPY
from blockkv.format.superblock import Superblock
from blockkv.store.recovery import read_if_possible, readable_slots

__all__ = ["clear_old_tails"]


def clear_old_tails(device: Device, found: Superblock) -> None:
    """Zero what is left of key slots in the tails of smaller devices. Raises DeviceError.

    `device` does not decrypt: what the store has written there since holds no key slot, as it is there.
    """
    slots = readable_slots(device, found.geometry.slot_offsets)
    superblocks = [slot for slot in slots[:SLOTS_PER_COPY] if isinstance(slot, Superblock)]
    pieces = [piece for one in superblocks for piece in _of_key_slots(one)]
    tails = {
        one.geometry.slot_offsets[SLOTS_PER_COPY:]
        for one in superblocks
        if one.uuid == found.uuid and one.geometry.device_bytes < found.geometry.device_bytes
    }
    cleared = False
    for offset in (offset for tail in tails for offset in tail):
        page = read_if_possible(device, offset)
        if any(piece in page for piece in pieces):
            device.write(offset, bytes(PAGE_BYTES))
            cleared = True
    if cleared:
        device.flush()


def _of_key_slots(one: Superblock) -> Sequence[bytes]:
    """What tells a page that holds a key slot, or the part of one that a torn write has left."""
    if one.encryption is None:
        return []
    slots = [slot for slot in one.encryption.slots if slot]
    return [piece for slot in slots for piece in (slot.salt, slot.wrapped[:16], slot.wrapped[-16:])]
