"""The bytes of a chunk, from its key and version: different in every word, and between any two."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

__all__ = ["payload", "version_of"]

SIZES = (5_000, 16_384, 70_000, 131_072, 400_000)


def payload(key: str, version: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    rng = random.Random(f"{key}.{version}")  # noqa: S311
    count = rng.choice(SIZES) // 8
    words = np.arange(count, dtype=np.uint64) * np.uint64(rng.getrandbits(64) | 1)
    words += np.uint64(rng.getrandbits(64))
    words[0] = version
    return words


def version_of(key: str, data: Any) -> int:
    """The version whose payload this is. Raises ValueError for bytes that were never put under `key`."""
    raw = bytes(data)
    version = int.from_bytes(raw[:8], "little")
    if payload(key, version).tobytes() != raw:
        raise ValueError(f"{len(raw)} bytes that were never put under {key}")
    return version
