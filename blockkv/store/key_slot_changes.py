"""Changing what opens an encrypted store, while nobody has it open. No chunk is written for that.

The new slots go to all eight superblocks, so that no superblock keeps one that was removed. What the drive
itself keeps of overwritten LBAs is not ours to say, and who has copied a superblock and knows a removed
passphrase still has the volume key: then format anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blockkv.device.base import Device
from blockkv.encryption.secret import Passphrase, Secret, Unlock, Unlocker, parse_unlock
from blockkv.encryption.volume_key import VolumeKey, wrap
from blockkv.errors import InvalidArgument, StoreReadOnly, WrongKey, WrongStore
from blockkv.format.geometry import SLOTS_PER_COPY
from blockkv.format.key_slots import KEY_SLOT_COUNT, KeySlot
from blockkv.format.superblock import Encryption, Superblock
from blockkv.store.array_term import set_of, standing_of
from blockkv.store.create import Target, several
from blockkv.store.interrupts import interrupts
from blockkv.store.log import write_superblock
from blockkv.store.old_tails import clear_old_tails
from blockkv.store.recovery import read_superblock, readable_slots
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


@dataclass(frozen=True, slots=True)
class _Unlocked:
    """A device, and what its store is opened with now."""

    device: Device
    superblock: Superblock
    slots: Slots
    key: VolumeKey
    opened: int
    """The slot that opened it."""
    unfinished: bool
    """Not all superblocks say the same: a change was cut short, or one of them is damaged."""


def add_key_slot(path: Target | Sequence[Target], new: Unlock, unlock: Unlock | None = None) -> list[int]:
    """Let `new` open the store too; which slot it got, for each member. `unlock` is what opens it now.

    Cut short it can be done again. Of an array all members have to be there that belong to it. One that was
    away meanwhile, and comes back, is opened by what opened it then: given with the others it is brought up
    to them by this, `unlock` being that, and `new` what opens the others.

    Raises WrongKey, InvalidArgument (all slots are in use, `new` opens the store already, or cannot be
    taken), and as opening does.
    """
    secret = parse_unlock(new, new=True)
    used: list[int] = []

    def change(members: Sequence[_Unlocked]) -> list[Slots]:
        have = [VolumeKey.unwrap(one.key.uuid, one.slots, secret) for one in members]
        if all(have) and not any(one.unfinished for one in members):
            slots = ", ".join(str(one[1]) for one in have if one)
            raise InvalidArgument(f"what is to be added opens the store already, by key slot {slots}")
        changed = []
        for one, there in zip(members, have, strict=True):
            if there is None and None not in one.slots:
                raise InvalidArgument(f"all {KEY_SLOT_COUNT} key slots are in use; remove one first")
            used.append(there[1] if there else one.slots.index(None))
            changed.append(
                one.slots
                if there
                else (*one.slots[: used[-1]], wrap(one.key, secret), *one.slots[used[-1] + 1 :])
            )
        return changed

    _change(path, unlock, change, new=secret)
    return used


def remove_key_slot(path: Target | Sequence[Target], slot: int, unlock: Unlock | None = None) -> None:
    """What opened the store by this slot does not any more. `unlock` has to open it by another one.

    Cut short, some superblocks still have the slot: it can be done again. Of an array all members have to be
    there that belong to it.

    Raises WrongKey, InvalidArgument (the slot is not in use, or the one that `unlock` opens), and as opening
    does.
    """

    def change(members: Sequence[_Unlocked]) -> list[Slots]:
        known = 0 <= slot < KEY_SLOT_COUNT
        if not known or not any(one.unfinished or one.slots[slot] for one in members):
            raise InvalidArgument(f"key slot {slot} is not in use")
        if any(one.opened == slot for one in members):
            raise InvalidArgument(
                f"key slot {slot} is the one that opened the store; open it with what is to stay, or nobody "
                "could be sure that it still opens"
            )
        return [(*one.slots[:slot], None, *one.slots[slot + 1 :]) for one in members]

    _change(path, unlock, change)


def _change(
    path: Target | Sequence[Target],
    unlock: Unlock | None,
    change: Callable[[Sequence[_Unlocked]], list[Slots]],
    new: Passphrase | Secret | None = None,
) -> None:
    """All members are unlocked, and the change is found possible, before one is written.

    What `new` opens already, of an array, need not be opened by `unlock`: others were away when it was
    changed.
    """
    unlocker = Unlocker(unlock)
    with interrupts, contextlib.ExitStack() as stack:
        members = [
            _unlocked(device, unlocker, new) for device in _devices(path, read_only=False, stack=stack)
        ]
        _refuse_some_of_an_array(members)
        changed = change(members)
        interrupts.deliver()
        for one, slots in zip(members, changed, strict=True):
            clear_old_tails(one.device, one.superblock)
            superblock = one.superblock
            assert superblock.encryption is not None
            encryption = dataclasses.replace(superblock.encryption, slots=slots)
            for _ in range(SLOTS_PER_COPY):
                superblock = dataclasses.replace(
                    superblock, generation=superblock.generation + 1, encryption=encryption
                )
                write_superblock(one.device, superblock)


def _unlocked(device: Device, unlocker: Unlocker, new: Passphrase | Secret | None) -> _Unlocked:
    device.flush()
    found, _ = read_superblock(device)
    encryption = _encryption(device, found)
    try:
        key, opened = volume_key_of(device.path, found, unlocker)
    except WrongKey:
        has = VolumeKey.unwrap(found.uuid, encryption.slots, new) if new and found.array else None
        if has is None:
            raise
        key, opened = has
    unfinished = not _is_everywhere(device, found)
    found = unlock_superblock(device.path, found, key)
    if found.read_only_reason:
        raise StoreReadOnly(f"{device.path}: {found.read_only_reason}")
    return _Unlocked(device, found, encryption.slots, key, opened, unfinished)


def _refuse_some_of_an_array(members: Sequence[_Unlocked]) -> None:
    """Raise WrongStore unless all are given that belong to the array, or one store that is none."""
    places = [one.superblock.array for one in members if one.superblock.array]
    if not places and len(members) == 1:
        return
    arrays = {place.array_uuid_text for place in places}
    if len(arrays) > 1 or len(places) < len(members):
        raise WrongStore(f"{', '.join(one.device.path for one in members)} are not members of one array")
    missing = standing_of(places).members & ~set_of(place.member_index for place in places)
    if missing:
        indices = [index for index in range(places[0].member_count) if missing >> index & 1]
        raise WrongStore(
            f"the array {places[0].array_uuid_text} has {places[0].member_count} members, counted from 0; "
            f"{', '.join(map(str, indices))} missing: what opens them is changed together"
        )


def _is_everywhere(device: Device, found: Superblock) -> bool:
    """All eight superblocks can be read, and have the same key slots."""
    slots = _encryption(device, found).slots
    return all(
        isinstance(one, Superblock) and one.encryption is not None and one.encryption.slots == slots
        for one in readable_slots(device, found.geometry.slot_offsets)
    )


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
