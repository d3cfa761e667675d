"""Making what a store held unreadable, by the strongest means that there is, and saying which it was.

    key        the store is encrypted: all superblocks, which hold the wrapped volume key, are overwritten
    format     NVMe Format NVM, with a cryptographic erase where the drive has it, else a user data erase
    overwrite  zeros over every LBA, then a discard

Order: for `overwrite`, all between the superblocks -> superblocks, each flushed -> the rest of both ends ->
flush -> discard -> the superblocks are read again. Cut short, the store is still found, to be wiped again.

A drive keeps old copies of LBAs that it has moved, and spare ones that nobody can address. `format` reaches
them; `key` and `overwrite` do not, which for `key` matters only as far as such a copy is of a superblock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockkv.device import namespace, passthrough
from blockkv.device.base import UNIT_BYTES, Device
from blockkv.device.engine import NativeDevice
from blockkv.device.nvme_erase import Eraser, eraser_of
from blockkv.errors import (
    BlockKVError,
    DeviceError,
    DeviceTooSmall,
    InvalidArgument,
    NotFormatted,
    WrongStore,
)
from blockkv.format.geometry import MEBIBYTE, SLOTS_PER_COPY, slot_offsets
from blockkv.format.superblock import Superblock, newest_of
from blockkv.store.interrupts import interrupts
from blockkv.store.old_tails import clear_old_tails
from blockkv.store.recovery import read_superblock, readable_slots
from blockkv.store.reused import refuse_if_reused

__all__ = ["Method", "WipeReport", "wipe_device"]

Method = Literal["key", "format", "overwrite"]
Progress = Callable[[int, int], None]
PIECE_BYTES = 8 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class WipeReport:
    """What was done, and what it is worth."""

    path: str
    store: str
    """The uuid of the store that was there."""
    method: Method
    what: str
    overwritten_bytes: int
    discarded: bool


def wipe_device(
    path: str | os.PathLike[str],
    store: str,
    method: Method | None = None,
    progress: Progress | None = None,
) -> WipeReport:
    """Wipe the device or file that holds the store with the uuid `store`, which is the consent to it.

    Without `method` the first that is possible: "key", "format", "overwrite". `progress(done, total)` is in
    bytes. A store that needs a larger device than this is now is wiped as far as it lies on it, which the
    report says.

    Raises WrongStore where another store is there, NotFormatted where none is, InvalidArgument for a method
    that is not possible there, OccupiedError where something else was made on the device since, DeviceBusy,
    DeviceError.
    """
    if method not in (None, "key", "format", "overwrite"):
        raise InvalidArgument(f"method is {method!r}; use 'key', 'format' or 'overwrite'")
    descriptor, canonical, limits = namespace.open_namespace(passthrough.block_device_of(path) or path)
    with interrupts, contextlib.closing(NativeDevice(descriptor, canonical, limits)) as device:
        refuse_if_reused(canonical, descriptor, limits)
        device.flush()
        found = _find(device)
        if found.uuid_text != store:
            raise WrongStore(f"{canonical} holds the store {found.uuid_text}, and {store} was to be wiped")
        how = _chosen(device, descriptor, found, method)
        interrupts.deliver()
        clear_old_tails(device, found)
        if isinstance(how, Eraser):
            how.erase(descriptor)
            kind = "cryptographic erase" if how.cryptographic else "user data erase"
            _check(device, found)
            what = f"the drive erased the namespace: Format NVM, {kind}"
            return WipeReport(canonical, store, "format", what + _beyond(device, found), 0, False)
        overwritten_bytes = _overwrite_between(device, progress) if how == "overwrite" else 0
        overwritten_bytes += _overwrite_ends(device, found)
        overwritten_bytes += _overwrite_rest(canonical, limits.size_bytes)
        device.flush()
        discarded = False
        with contextlib.suppress(DeviceError):  # it is erased without it
            device.discard(0, _size_bytes(device))
            discarded = bool(limits.discard_granularity_bytes)
        device.flush()
        _check(device, found)
    if how == "key":
        what = "the key is destroyed: all superblocks, with what it was wrapped in, are overwritten"
    else:
        what = "every LBA is overwritten; what the drive has moved or keeps in spare is out of reach"
    return WipeReport(canonical, store, how, what + _beyond(device, found), overwritten_bytes, discarded)


def _find(device: Device) -> Superblock:
    """The superblock of the store, also of one whose device shrank. Raises as `read_superblock`."""
    try:
        return read_superblock(device)[0]
    except (DeviceTooSmall, NotFormatted) as error:  # the latter of a short copy
        try:
            found = newest_of(readable_slots(device, slot_offsets(device.limits.size_bytes)))
        except NotFormatted:
            raise error from None
        if found.geometry.device_bytes <= device.limits.size_bytes:
            raise
        return found


def _within(device: Device, offsets: Iterable[int]) -> list[int]:
    """Those of the places of superblocks that the device has, in order."""
    return sorted({offset for offset in offsets if 0 <= offset <= _size_bytes(device) - UNIT_BYTES})


def _size_bytes(device: Device) -> int:
    return device.limits.size_bytes // UNIT_BYTES * UNIT_BYTES


def _beyond(device: Device, found: Superblock) -> str:
    """What a wipe cannot reach of a store whose device shrank."""
    has_bytes, needed_bytes = device.limits.size_bytes, found.geometry.device_bytes
    if needed_bytes <= has_bytes:
        return ""
    return (
        f"; the store reaches to byte {needed_bytes} and the device ends at {has_bytes}: what lay beyond, "
        "with copies of superblocks, is out of reach"
    )


def _tail(device: Device) -> int:
    """Where the end of the device begins that is not overwritten before the superblocks."""
    return max(MEBIBYTE, slot_offsets(device.limits.size_bytes)[SLOTS_PER_COPY])


def _chosen(
    device: NativeDevice, descriptor: int, found: Superblock, method: Method | None
) -> Eraser | Literal["key", "overwrite"]:
    if method == "key" or (method is None and found.encryption):
        if not found.encryption:
            raise InvalidArgument(f"{device.path} is not encrypted: there is no key to destroy")
        return "key"
    if method == "overwrite":
        return "overwrite"
    eraser = eraser_of(device.path, descriptor)
    if isinstance(eraser, str):
        if method == "format":
            raise InvalidArgument(f"{device.path} cannot be erased by Format NVM: {eraser}")
        return "overwrite"
    return eraser


def _overwrite_between(device: Device, progress: Progress | None) -> int:
    size_bytes, tail = _size_bytes(device), _tail(device)
    zeros = bytes(PIECE_BYTES)
    for offset in range(MEBIBYTE, size_bytes, PIECE_BYTES):
        interrupts.deliver()
        end = min(offset + PIECE_BYTES, tail)
        if end > offset:
            device.write(offset, zeros[: end - offset])
        if progress:
            progress(min(offset + PIECE_BYTES, size_bytes), size_bytes)
    return tail - MEBIBYTE


def _overwrite_ends(device: Device, found: Superblock) -> int:
    """Zeros where superblocks of this store are, and then over both ends of store and device."""
    size_bytes = _size_bytes(device)
    for offset in _within(device, (*found.geometry.slot_offsets, *slot_offsets(size_bytes))):
        device.write(offset, bytes(UNIT_BYTES))
        device.flush()
    # of a store that reaches beyond the device the end is in that of the device
    tails = sorted({min(found.geometry.slot_offsets[SLOTS_PER_COPY], _tail(device)), _tail(device)})
    ends = [(0, min(MEBIBYTE, size_bytes))]
    ends += [(tail, min(2 * MEBIBYTE, size_bytes - tail)) for tail in tails if tail < size_bytes]
    for offset, length_bytes in ends:
        device.write(offset, bytes(length_bytes))
    return sum(length_bytes for _, length_bytes in ends)


def _overwrite_rest(path: str, size_bytes: int) -> int:
    """Zeros over what is less than a unit, at the end of an odd copy: the engine writes whole ones."""
    rest_bytes = size_bytes % UNIT_BYTES
    if rest_bytes:
        with Path(path).open("r+b", buffering=0) as file:
            file.seek(size_bytes - rest_bytes)
            file.write(bytes(rest_bytes))
            os.fsync(file.fileno())
    return rest_bytes


def _check(device: Device, found: Superblock) -> None:
    """Raises BlockKVError where a superblock is still there."""
    for offset in _within(device, found.geometry.slot_offsets):
        if found.uuid in device.read(offset, UNIT_BYTES):
            raise BlockKVError(
                f"{device.path}: the superblock at byte {offset} was overwritten and is still there; the "
                "device does not do what it is told, destroy it"
            )
