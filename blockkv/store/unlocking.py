"""Opening what is encrypted: from its superblock to a device that reads and writes plain bytes.

Order: a key slot gives the volume key -> the superblock is authenticated with it -> the device gets the
cipher key. Nothing else of an encrypted store is read before, and nothing of it is believed.

The key of an ephemeral store was in the memory of the process that had it open, and is gone with it: opened
for writing such a store begins anew, empty, with another key.
"""

from __future__ import annotations

from blockkv.device.base import Device
from blockkv.encryption.secret import ENVIRONMENT, Passphrase, Unlocker
from blockkv.encryption.volume_key import VolumeKey
from blockkv.errors import FormatError, StoreReadOnly, WrongKey
from blockkv.format.superblock import Superblock
from blockkv.store.create import begin_anew
from blockkv.store.interrupts import interrupts
from blockkv.store.old_tails import clear_old_tails

__all__ = ["unlock_device", "unlock_superblock", "volume_key_of"]


def unlock_device(
    device: Device, found: Superblock, unlocker: Unlocker, *, read_only: bool
) -> tuple[Superblock, VolumeKey | None]:
    """The superblock to go on with, and the key; from here on the device decrypts and encrypts.

    Raises WrongKey, FormatError where the superblock was forged, StoreReadOnly for an ephemeral store that
    only a later version writes, InvalidArgument, DeviceError.
    """
    if found.encryption is None:
        if unlocker.is_explicit:
            raise WrongKey(
                f"{device.path} holds the store {found.uuid_text}, which is not encrypted; open it without "
                "unlock=, or format it with encrypt="
            )
        return found, None
    if found.encryption.ephemeral and unlocker.is_explicit:
        raise WrongKey(
            f"{device.path} holds the ephemeral store {found.uuid_text}, which nothing unlocks; opened for "
            "writing, without unlock=, it begins anew, empty"
        )
    if found.read_only_reason and not read_only:
        if found.encryption.ephemeral:
            raise StoreReadOnly(f"{device.path}: {found.read_only_reason}, and the store is ephemeral")
        read_only = True
    if found.encryption.ephemeral and not read_only:
        found, key = begin_anew(device, found)
    else:
        key, _ = volume_key_of(device.path, found, unlocker)
        found = unlock_superblock(device.path, found, key)
    if not read_only:
        if device.cipher_key:  # who looked before writing has it decrypt already
            device.encrypt(key.cipher_key, 0, 0)
        clear_old_tails(device, found)
    zone = found.geometry.encrypted_zone
    device.encrypt(key.cipher_key, zone.offset_bytes, zone.end_bytes)
    return found, key


def volume_key_of(path: str, found: Superblock, unlocker: Unlocker) -> tuple[VolumeKey, int]:
    """The volume key of an encrypted store, and which slot it was in.

    Raises WrongKey where nothing was given, or what was given opens no slot; InvalidArgument.
    """
    assert found.encryption
    if found.encryption.ephemeral:
        raise WrongKey(
            f"{path} holds the ephemeral store {found.uuid_text}: its key was in the memory of the process "
            "that had it open, and its chunks are gone with it; opened for writing it begins anew"
        )
    with interrupts.allowed():  # somebody may be asked, and think it over
        given = unlocker.secret()
    if given is None:
        raise WrongKey(
            f"{path} holds the encrypted store {found.uuid_text}; say what opens it, with unlock=, "
            f"--unlock or {ENVIRONMENT}: passphrase, passphrase-file:PATH, key-file:PATH, keyring:DESCRIPTION"
        )
    opened = VolumeKey.unwrap(found.uuid, found.encryption.slots, given)
    if opened is None:
        what = "passphrase" if isinstance(given, Passphrase) else "secret"
        kinds = ", ".join(slot.kind.name.lower() for slot in found.encryption.slots if slot)
        raise WrongKey(
            f"{path}: the {what} given opens none of the key slots of the store {found.uuid_text} ({kinds})"
        )
    return opened


def unlock_superblock(path: str, found: Superblock, key: VolumeKey) -> Superblock:
    """`found` with the key. Raises FormatError where it was not written by whoever has that."""
    unlocked = found.unlocked(key.mac_key)
    if unlocked is None:
        raise FormatError(
            f"{path}: the newest superblock of the store {found.uuid_text}, generation {found.generation}, "
            "was changed by somebody without its key; nothing on the device is to be trusted"
        )
    return unlocked
