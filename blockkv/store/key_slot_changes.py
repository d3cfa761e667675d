"""Changing what opens an encrypted store, while nobody has it open. No chunk is written for that.

The new slots go to all eight superblocks, so that no superblock keeps one that was removed. What the drive
itself keeps of overwritten LBAs is not ours to say, and who has copied a superblock and knows a removed
passphrase still has the volume key: then format anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from blockkv.device.base import Device
from blockkv.encryption.secret import Unlock, Unlocker, parse_unlock
from blockkv.encryption.volume_key import VolumeKey, wrap
from blockkv.errors import DeviceError, InvalidArgument, StoreReadOnly, WrongKey
from blockkv.format import superblock as superblocks
from blockkv.format.geometry import PAGE_BYTES, SLOTS_PER_COPY
from blockkv.format.key_slots import KEY_SLOT_COUNT, KeySlot
from blockkv.format.superblock import Encryption, Superblock, SuperblockRejected
from blockkv.store.create import Target, several
from blockkv.store.interrupts import interrupts
from blockkv.store.log import write_superblock
from blockkv.store.old_tails import clear_old_tails
from blockkv.store.recovery import read_superblock
from blockkv.store.store import open_device
from blockkv.store.unlocking import unlock_superblock, volume_key_of

__all__ = ["add_key_slot", "key_slots", "remove_key_slot"]

Slots = tuple[KeySlot | None, ...]


def key_slots(path: Target | Sequence[Target]) -> list[dict[str, Any]]:
    """The key slots in use of each member: {"path", "slot", "kind", and for a passphrase what it costs}.

    Needs no key. Raises WrongKey for a store that is not encrypted, and as opening does.
    """
    rows = []
    for device in _devices(path, read_only=True):
        encryption = _encryption(device, read_superblock(device)[0])
        for index, slot in enumerate(encryption.slots):
            if slot is not None:
                cost = {"memory_kib": slot.memory_kib, "passes": slot.passes, "lanes": slot.lanes}
                kind = slot.kind.name.lower()
                rows.append(
                    {"path": device.path, "slot": index, "kind": kind, **(cost if slot.passes else {})}
                )
    return rows


def add_key_slot(path: Target | Sequence[Target], new: Unlock, unlock: Unlock | None = None) -> list[int]:
    """Let `new` open the store too; which slot it got, for each member. `unlock` is what opens it now.

    Raises WrongKey, InvalidArgument (all slots are in use, or `new` cannot be taken), and as opening does.
    """
    secret = parse_unlock(new, new=True)
    used: list[int] = []

    def change(slots: Slots, key: VolumeKey, opened: int, unfinished: bool) -> Slots:
        del opened, unfinished
        same = VolumeKey.unwrap(key.uuid, slots, secret)
        if same is not None:
            raise InvalidArgument(f"what is to be added opens the store already, by key slot {same[1]}")
        if None not in slots:
            raise InvalidArgument(f"all {KEY_SLOT_COUNT} key slots are in use; remove one first")
        used.append(slots.index(None))
        return (*slots[: used[-1]], wrap(key, secret), *slots[used[-1] + 1 :])

    _change(path, unlock, change)
    return used


def remove_key_slot(path: Target | Sequence[Target], slot: int, unlock: Unlock | None = None) -> None:
    """What opened the store by this slot does not any more. `unlock` has to open it by another one.

    Where it was cut short, some superblocks still have the slot: then it can be done again.

    Raises WrongKey, InvalidArgument (the slot is not in use, or the one that `unlock` opens), and as opening
    does.
    """

    def change(slots: Slots, key: VolumeKey, opened: int, unfinished: bool) -> Slots:
        del key
        if 0 <= slot < KEY_SLOT_COUNT and slots[slot] is None and unfinished:
            return slots
        if not 0 <= slot < KEY_SLOT_COUNT or slots[slot] is None:
            raise InvalidArgument(f"key slot {slot} is not in use")
        if slot == opened:
            raise InvalidArgument(
                f"key slot {slot} is the one that opened the store; open it with what is to stay, or nobody "
                "could be sure that it still opens"
            )
        return (*slots[:slot], None, *slots[slot + 1 :])

    _change(path, unlock, change)


def _change(path: Target | Sequence[Target], unlock: Unlock | None, change: Any) -> None:
    """All members are unlocked, and the change is found possible, before one is written."""
    unlocker = Unlocker(unlock)
    with interrupts, contextlib.ExitStack() as stack:
        pending: list[tuple[Device, Superblock]] = []
        for device in _devices(path, read_only=False, stack=stack):
            device.flush()
            found, _ = read_superblock(device)
            encryption = _encryption(device, found)
            key, opened = volume_key_of(device.path, found, unlocker)
            found = unlock_superblock(device.path, found, key)
            if found.read_only_reason:
                raise StoreReadOnly(f"{device.path}: {found.read_only_reason}")
            slots = change(encryption.slots, key, opened, unfinished=not _is_everywhere(device, found))
            assert found.encryption is not None
            pending.append(
                (
                    device,
                    dataclasses.replace(found, encryption=dataclasses.replace(found.encryption, slots=slots)),
                )
            )
        interrupts.deliver()
        for device, superblock in pending:
            clear_old_tails(device, superblock)
            for _ in range(SLOTS_PER_COPY):
                superblock = dataclasses.replace(superblock, generation=superblock.generation + 1)
                write_superblock(device, superblock)


def _is_everywhere(device: Device, found: Superblock) -> bool:
    """All eight superblocks can be read, and have the same key slots."""
    for index, offset in enumerate(found.geometry.slot_offsets):
        try:
            one = superblocks.decode(device.read(offset, PAGE_BYTES), index)
        except (SuperblockRejected, DeviceError):
            return False
        if one.encryption is None or one.encryption.slots != _encryption(device, found).slots:
            return False
    return True


def _devices(
    path: Target | Sequence[Target], *, read_only: bool, stack: contextlib.ExitStack | None = None
) -> Iterator[Device]:
    with contextlib.ExitStack() as own:
        for one in several(path):
            if isinstance(one, Device):
                yield one
                continue
            device = open_device(os.fspath(one), read_only=read_only, engine="auto", depth=8)
            (stack or own).callback(device.close)
            yield device


def _encryption(device: Device, found: Superblock) -> Encryption:
    if found.encryption is None:
        raise WrongKey(f"{device.path} holds the store {found.uuid_text}, which is not encrypted")
    return found.encryption
