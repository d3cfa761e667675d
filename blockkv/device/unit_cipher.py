"""AES-256-XTS by units of 4 KiB in Python: what `native/cipher.c` does, for those who are not in a hurry.

The simulated device encrypts with it, and `blockkv inspect` reads with it. Tests hold it against the C.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import XTS

from blockkv.device.base import UNIT_BYTES

__all__ = ["UnitCipher"]


class UnitCipher:
    """Encrypts whole units that lie in [from, to) on the device; leaves others as they are."""

    def __init__(self, key: bytes, from_bytes: int, to_bytes: int) -> None:
        self._key = AES(key)
        self._range = range(from_bytes, to_bytes)

    def encrypt(self, offset_bytes: int, data: bytes) -> bytes:
        """What is to lie on the device from `offset_bytes` on."""
        return self._convert(offset_bytes, data, encrypt=True)

    def decrypt(self, offset_bytes: int, data: bytes) -> bytes:
        """What is meant by what lies there."""
        return self._convert(offset_bytes, data, encrypt=False)

    def _convert(self, offset_bytes: int, data: bytes, *, encrypt: bool) -> bytes:
        pieces = []
        for start in range(0, len(data), UNIT_BYTES):
            piece, at = data[start : start + UNIT_BYTES], offset_bytes + start
            if at in self._range:
                cipher = Cipher(self._key, XTS((at // UNIT_BYTES).to_bytes(16, "little")))
                converter = cipher.encryptor() if encrypt else cipher.decryptor()
                piece = converter.update(piece) + converter.finalize()
            pieces.append(piece)
        return b"".join(pieces)
