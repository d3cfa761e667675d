"""Growing a store to a device that has become larger.

Order: lock every device -> read what is on it, as an open does -> plan the zones (`format.geometry.grown`) ->
refuse what is damaged, too small or not to be written -> open, as whoever writes -> `Log.grow` -> close.
Nothing is written before nothing is left to refuse; for an array that holds for all of its members, which
then grow one after the other. Cut short anywhere, each of them is what it was or has grown.

Not here: chunks that grow (`growing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from blockkv.device.base import Device
from blockkv.encryption.secret import Unlock, Unlocker
from blockkv.errors import (
    DeviceReadOnly,
    DeviceTooSmall,
    FormatError,
    InvalidArgument,
    StoreReadOnly,
    WrongStore,
)
from blockkv.format.geometry import Geometry, grown
from blockkv.format.superblock import Superblock
from blockkv.store.array_open import open_any
from blockkv.store.array_store import ArrayStore
from blockkv.store.create import Target, several
from blockkv.store.interrupts import interrupts
from blockkv.store.recovery import read_superblock, recover
from blockkv.store.store import Store, open_device, refuse_second_open
from blockkv.store.unlocking import unlock_device

__all__ = ["grow_device"]


def grow_device(
    path: Target | Sequence[Target], *, dry_run: bool = False, unlock: Unlock | None = None
) -> dict[str, Any]:
    """Give a store the space of its namespace, partition, loop device or file that has become larger.

    The store is nobody's meanwhile: it is locked as `blockkv.open` locks it. Chunks and everything else stay.
    A crash at any instant leaves the store as it was, or grown. Where there is no space to be had nothing is
    written and `grown` is False, so that it can be done again at any time. `dry_run`: nothing is written.

    Larger checkpoint areas go with the space where the present ones are too small for it: `average_chunk`
    means what it meant. The journal stays as it is. Several paths grow the members of an array, all of which
    have to be there. `unlock`: what opens an encrypted store, as for `blockkv.open`.

    Returns path, `grown`, `device_bytes`, `data_bytes` and `checkpoint_area_bytes`, the last three with what
    they were before as `..._before`; for an array of all `members`, beside `grown`.

    Raises DeviceBusy (open elsewhere, mounted), DeviceReadOnly, StoreReadOnly (a later version may write it),
    DeviceTooSmall (the device shrank, or has too little for the checkpoint areas), FormatError (it is
    damaged), WrongStore (a member of an array alone), InvalidArgument (it is ephemeral), and what
    `blockkv.open` raises. Nothing was written then.
    """
    unlocker = Unlocker(unlock)
    with interrupts, contextlib.ExitStack() as stack:
        devices: list[Device] = []
        plans: list[tuple[Superblock, Geometry | None]] = []
        for one in several(path):
            device = one
            if not isinstance(one, Device):
                device = open_device(one, read_only=False, engine="auto", depth=64)
                stack.callback(device.close)
            devices.append(device)
            plans.append(_planned(device, unlocker, by_path=device is not one))
        place = plans[0][0].array
        if place is not None and len(devices) < place.member_count:
            raise WrongStore(
                f"{devices[0].path} is member {place.member_index} of an array of {place.member_count} "
                f"({place.array_uuid_text}), whose members grow together: give all of them"
            )
        interrupts.deliver()
        if not dry_run and any(zones for _, zones in plans):
            secret = unlocker.secret() if plans[0][0].encryption else None
            with open_any(devices, evict=False, commit_interval_ms=None, unlock=secret) as store:
                for member in _members(store):
                    zones = plans[devices.index(member._state.device)][1]
                    if zones is not None:
                        member._state.log.grow(zones)
    facts = [
        _facts(device, found, zones, dry_run=dry_run)
        for device, (found, zones) in zip(devices, plans, strict=True)
    ]
    return facts[0] if len(facts) == 1 else {"grown": any(one["grown"] for one in facts), "members": facts}


def _planned(device: Device, unlocker: Unlocker, *, by_path: bool) -> tuple[Superblock, Geometry | None]:
    """What is on the device, and the zones it is to have; None where nothing changes."""
    if device.limits.read_only:
        raise DeviceReadOnly(f"{device.path} is read-only")
    device.flush()
    found, findings = read_superblock(device)
    refuse_second_open(device, found, read_only=False, by_path=by_path)
    if found.encryption and found.encryption.ephemeral:
        raise InvalidArgument(
            f"{device.path} is ephemeral: it takes all of its device whenever it is opened for writing"
        )
    found, _ = unlock_device(device, found, unlocker, read_only=True)
    try:
        zones = grown(found.geometry, device.limits.size_bytes, found.average_chunk_bytes)
    except (DeviceTooSmall, FormatError) as error:
        raise type(error)(f"{device.path}: {error}") from None
    recovered = recover(device, found)
    if recovered.read_only_reason:
        raise StoreReadOnly(f"{device.path}: {recovered.read_only_reason}")
    # A chunk whose payload did not arrive before a crash is no damage.
    findings += [finding for finding in recovered.findings if finding.structure != "chunk"]
    if findings:
        raise FormatError(
            f"{device.path} is damaged and does not grow: {findings[0]}; `blockkv check --repair` puts that "
            "right"
        )
    return found, zones


def _members(store: Store) -> list[Store]:
    return [member.store for member in store._members] if isinstance(store, ArrayStore) else [store]


def _facts(device: Device, found: Superblock, zones: Geometry | None, *, dry_run: bool) -> dict[str, Any]:
    before, after = found.geometry, zones or found.geometry
    return {
        "path": device.path,
        "grown": zones is not None and not dry_run,
        "device_bytes_before": before.device_bytes,
        "device_bytes": after.device_bytes,
        "data_bytes_before": before.data.size_bytes,
        "data_bytes": after.data.size_bytes,
        "checkpoint_area_bytes_before": before.checkpoint_a.size_bytes,
        "checkpoint_area_bytes": after.checkpoint_a.size_bytes,
    }
