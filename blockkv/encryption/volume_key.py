"""The volume key of a store: random, made when it is formatted, and the root of all its other keys.

    volume key --HKDF-SHA256--> cipher key, 64 bytes   AES-256-XTS of everything but the superblocks
               --HKDF-SHA256--> header key, 32 bytes   HMAC-SHA256 of the superblocks
    passphrase --Argon2id----->                 \\
    secret     --HKDF-SHA256--> slot key, 32 bytes   AES-256-GCM of the volume key, in a key slot

So a passphrase can be changed without writing a chunk, and to destroy the slots is to destroy the store.

Sources: HKDF RFC 5869, Argon2 RFC 9106 (its second recommended option: 64 MiB, 3 passes, 4 lanes), XTS
IEEE 1619 and NIST SP 800-38E, GCM NIST SP 800-38D. All of it is the `cryptography` package's, of which the
extra `encryption` is made.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blockkv.encryption.secret import Passphrase, Secret
from blockkv.errors import InvalidArgument, WrongKey
from blockkv.format.key_slots import KEY_SLOT_COUNT, NONCE_BYTES, SALT_BYTES, KeySlot, KeySlotKind

__all__ = ["NO_SLOTS", "VolumeKey", "only_slot", "wrap"]

VOLUME_KEY_BYTES = 32
CIPHER_KEY_BYTES = 64
MAC_KEY_BYTES = 32
ARGON2_MEMORY_KIB = 64 << 10
ARGON2_PASSES = 3
ARGON2_LANES = 4


@dataclass(frozen=True, slots=True)
class VolumeKey:
    """The key of the store with this uuid."""

    uuid: bytes
    key: bytes = field(repr=False)

    @classmethod
    def new(cls, uuid: bytes) -> VolumeKey:
        """A random one."""
        return cls(uuid, os.urandom(VOLUME_KEY_BYTES))

    @classmethod
    def unwrap(
        cls, uuid: bytes, slots: Sequence[KeySlot | None], unlock: Passphrase | Secret
    ) -> tuple[VolumeKey, int] | None:
        """The one that is in the first slot that `unlock` opens, and which slot that is; None: it opens none.

        Takes the time of Argon2id for every slot with a passphrase that is tried.
        """
        invalid_tag = _module("exceptions").InvalidTag
        for index, slot in enumerate(slots):
            if slot is None or (slot.kind is KeySlotKind.PASSPHRASE) != isinstance(unlock, Passphrase):
                continue
            gcm = _module("hazmat.primitives.ciphers.aead").AESGCM(_slot_key(slot, unlock))
            try:
                key = gcm.decrypt(slot.nonce, slot.wrapped, uuid + slot.parameters)
            except invalid_tag:
                continue
            return cls(uuid, key), index
        return None

    @property
    def cipher_key(self) -> bytes:
        """Both keys of AES-256-XTS."""
        return _hkdf(self.key, self.uuid, b"blockkv 1 cipher", CIPHER_KEY_BYTES)

    @property
    def mac_key(self) -> bytes:
        """Of the HMAC over superblocks."""
        return _hkdf(self.key, self.uuid, b"blockkv 1 header", MAC_KEY_BYTES)


def wrap(volume_key: VolumeKey, unlock: Passphrase | Secret) -> KeySlot:
    """A slot that `unlock` opens."""
    if isinstance(unlock, Passphrase):
        slot = KeySlot(
            KeySlotKind.PASSPHRASE,
            os.urandom(SALT_BYTES),
            memory_kib=ARGON2_MEMORY_KIB,
            passes=ARGON2_PASSES,
            lanes=ARGON2_LANES,
        )
    else:
        slot = KeySlot(KeySlotKind.SECRET, os.urandom(SALT_BYTES))
    gcm = _module("hazmat.primitives.ciphers.aead").AESGCM(_slot_key(slot, unlock))
    nonce = os.urandom(NONCE_BYTES)
    return replace(
        slot, nonce=nonce, wrapped=gcm.encrypt(nonce, volume_key.key, volume_key.uuid + slot.parameters)
    )


NO_SLOTS: tuple[KeySlot | None, ...] = (None,) * KEY_SLOT_COUNT


def only_slot(slot: KeySlot) -> tuple[KeySlot | None, ...]:
    """The slots of a new store."""
    return (slot, *NO_SLOTS[1:])


def _slot_key(slot: KeySlot, unlock: Passphrase | Secret) -> bytes:
    if isinstance(unlock, Secret):
        return _hkdf(unlock.data, slot.salt, b"blockkv 1 slot", VOLUME_KEY_BYTES)
    argon2 = _module("hazmat.primitives.kdf.argon2").Argon2id(
        salt=slot.salt,
        length=VOLUME_KEY_BYTES,
        iterations=slot.passes,
        lanes=slot.lanes,
        memory_cost=slot.memory_kib,
    )
    try:
        return bytes(argon2.derive(unlock.text.encode(errors="surrogateescape")))
    except MemoryError:
        raise WrongKey(f"the passphrase needs {slot.memory_kib} KiB of memory to be tried") from None


def _hkdf(secret: bytes, salt: bytes, info: bytes, length_bytes: int) -> bytes:
    sha256 = _module("hazmat.primitives.hashes").SHA256()
    hkdf = _module("hazmat.primitives.kdf.hkdf").HKDF(
        algorithm=sha256, length=length_bytes, salt=salt, info=info
    )
    return bytes(hkdf.derive(secret))


def _module(name: str) -> Any:
    """A module of the `cryptography` package, which only encrypted stores need."""
    try:
        return importlib.import_module(f"cryptography.{name}")
    except ImportError as error:
        raise InvalidArgument(
            f"an encrypted store needs the package `cryptography`, 44 or later ({error}); "
            "pip install 'blockkv[encryption]'"
        ) from None
