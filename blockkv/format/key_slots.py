"""Key slots: the volume key of an encrypted store, wrapped once for everything that may open it.

Eight slots of 120 bytes lie in every superblock. A slot in use holds the 32 bytes of the volume key,
encrypted and authenticated with AES-256-GCM under a key that is derived from a passphrase (Argon2id) or from
a secret (HKDF-SHA256). Whoever has neither learns nothing from it but these parameters.

The additional data of the GCM are the store's uuid and the slot up to its nonce, so that a slot of another
store, or one with cheaper parameters, does not open.

Not here: deriving and wrapping (`blockkv.encryption`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from blockkv.errors import FormatError, InvalidArgument
from blockkv.format.fields import Field, FieldRejected, StructLayout

__all__ = [
    "KEY_SLOT",
    "KEY_SLOTS_BYTES",
    "KEY_SLOT_COUNT",
    "MAX_LANES",
    "MAX_MEMORY_KIB",
    "MAX_PASSES",
    "NONCE_BYTES",
    "SALT_BYTES",
    "WRAPPED_BYTES",
    "KeySlot",
    "KeySlotKind",
    "decode",
    "encode",
]

KEY_SLOT_COUNT = 8
SALT_BYTES = 32
NONCE_BYTES = 12
WRAPPED_BYTES = 48
"""The volume key and the tag of AES-256-GCM."""
MAX_MEMORY_KIB = 1 << 20
MAX_PASSES = 16
MAX_LANES = 64
"""More would let a forged superblock take the machine's memory, or many minutes, before anything is known to
fit. Slots are written with 64 MiB and 3 passes."""

KEY_SLOT = StructLayout(
    "key slot",
    [
        Field("kind", "u32", "0: not in use; 1: a passphrase; 2: a secret (key file, keyring)"),
        Field("memory_kib", "u32", "of a passphrase: memory of Argon2id, 8 x lanes to 1 GiB; else 0"),
        Field("passes", "u32", "of a passphrase: passes of Argon2id, 1 to 16; else 0"),
        Field("lanes", "u32", "of a passphrase: lanes of Argon2id, 1 to 64; else 0"),
        Field("salt", "bytes[32]", "of Argon2id or HKDF"),
        Field("nonce", "bytes[12]", "of AES-256-GCM"),
        Field("wrapped", "bytes[48]", "the volume key and its tag: another passphrase, a changed slot"),
        Field("reserved", "zero[12]", "zero, checked"),
    ],
    size_bytes=120,
)
KEY_SLOTS_BYTES = KEY_SLOT_COUNT * KEY_SLOT.size_bytes
_AUTHENTICATED_BYTES = KEY_SLOT.offsets["nonce"]


class KeySlotKind(enum.IntEnum):
    """What opens a slot."""

    PASSPHRASE = 1
    SECRET = 2


@dataclass(frozen=True, slots=True)
class KeySlot:
    """One slot in use."""

    kind: KeySlotKind
    salt: bytes
    nonce: bytes = bytes(NONCE_BYTES)
    wrapped: bytes = bytes(WRAPPED_BYTES)
    memory_kib: int = 0
    passes: int = 0
    lanes: int = 0

    def encode(self) -> bytes:
        """Its 120 bytes."""
        return KEY_SLOT.pack(
            kind=int(self.kind),
            memory_kib=self.memory_kib,
            passes=self.passes,
            lanes=self.lanes,
            salt=self.salt,
            nonce=self.nonce,
            wrapped=self.wrapped,
        )

    @property
    def parameters(self) -> bytes:
        """What the tag of `wrapped` authenticates of the slot."""
        return self.encode()[:_AUTHENTICATED_BYTES]


def encode(slots: Sequence[KeySlot | None]) -> bytes:
    """All eight slots; None for one that is not in use."""
    if len(slots) != KEY_SLOT_COUNT:
        raise InvalidArgument(f"{len(slots)} key slots instead of {KEY_SLOT_COUNT}")
    return b"".join(bytes(KEY_SLOT.size_bytes) if slot is None else slot.encode() for slot in slots)


def decode(data: bytes) -> tuple[KeySlot | None, ...]:
    """The eight slots. Raises FormatError for one that cannot be."""
    return tuple(_decode(data, index) for index in range(KEY_SLOT_COUNT))


def _decode(data: bytes, index: int) -> KeySlot | None:
    try:
        values = KEY_SLOT.unpack_from(data, index * KEY_SLOT.size_bytes)
    except FieldRejected as error:
        raise FormatError(f"key slot {index}: {error}") from None
    memory_kib, passes, lanes = values["memory_kib"], values["passes"], values["lanes"]
    if values["kind"] == 0:
        if any(data[index * KEY_SLOT.size_bytes : (index + 1) * KEY_SLOT.size_bytes]):
            raise FormatError(f"key slot {index} is not in use and not zero")
        return None
    if values["kind"] == KeySlotKind.PASSPHRASE:
        possible = (
            1 <= lanes <= MAX_LANES
            and 8 * lanes <= memory_kib <= MAX_MEMORY_KIB
            and 1 <= passes <= MAX_PASSES
        )
    else:
        possible = values["kind"] == KeySlotKind.SECRET and not (memory_kib or passes or lanes)
    if not possible:
        raise FormatError(
            f"key slot {index}: kind {values['kind']} with {memory_kib} KiB, {passes} passes, {lanes} lanes"
        )
    return KeySlot(
        KeySlotKind(values["kind"]),
        values["salt"],
        values["nonce"],
        values["wrapped"],
        memory_kib,
        passes,
        lanes,
    )
