"""Damage to what is stored, on the device itself."""

from __future__ import annotations

from pathlib import Path

import blockkv

UNIT_BYTES = 4096


def flip_byte(path: Path, store: blockkv.Store, key: str | bytes, offset_bytes: int = 0) -> None:
    """Change one byte of a chunk's payload on the device at `path`, past the store that is open on it."""
    entry = store.entry(key)
    assert entry is not None, f"{key!r} is not stored"
    place = int(store.info()["data_offset_bytes"]) + entry.extents[0][0] * UNIT_BYTES + offset_bytes
    with path.open("r+b", buffering=0) as device:
        device.seek(place)
        byte = device.read(1)
        device.seek(place)
        device.write(bytes([byte[0] ^ 0x10]))
