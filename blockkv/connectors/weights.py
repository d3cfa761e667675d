"""A fingerprint of a model's weights, from its files: what keeps two fine-tunes of one model apart.

::

    paths = weight_files("/models/llama-3.1-8b")
    fingerprint(paths)                       # reads every byte, at the speed of the page cache
    fingerprint(paths, remembered_in=store)  # reads them once; later only as long as no file has changed

Every byte of every file counts. A sample would do for two fine-tunes, which differ nearly everywhere, but not
for one that has a single row of its embedding replaced. Each 64 MiB is digested by XXH3-128, which is as fast
as memory and keeps apart what nobody has made to collide; the digests, names and sizes by BLAKE2b-256.

The result is remembered in a store under the files' paths, sizes, inodes and times of change (`st_mtime_ns`
and `st_ctime_ns`: writing to a file changes the latter, whatever is done to the former).

Not here: what else the results of a model depend on (adapters, command lines): a `Family` has more fields.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

import blockkv
from blockkv.errors import InvalidArgument

__all__ = ["file_digest", "fingerprint", "weight_files"]

SEGMENT_BYTES = 64 << 20
READ_BYTES = 4 << 20
THREADS = 2
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""The first of these that a directory has any of is taken for its weights."""
CONFIGURATION = ("config.json", "params.json", "*quant*.json", "*.py")
"""What turns the same weights into other results: configuration, quantisation, the model's own code."""


def weight_files(model: str | os.PathLike[str]) -> list[Path]:
    """The files that a model's results depend on: weights, configuration, code; of a directory, or one file.

    Raises InvalidArgument where there are no weights.
    """
    path = Path(model)
    if path.is_file():
        return [path]
    for suffix in WEIGHT_SUFFIXES:
        if weights := sorted(path.glob(f"*{suffix}")):
            others = {one for pattern in CONFIGURATION for one in path.glob(pattern)}
            return weights + sorted(others)
    raise InvalidArgument(
        f"{os.fspath(model)}: no weights are there; files end in {', '.join(WEIGHT_SUFFIXES)}"
    )


def fingerprint(paths: Sequence[Path], remembered_in: blockkv.Store | None = None) -> str:
    """32 hexadecimal digits that depend on the names and on every byte of the files, in their order.

    With a store it is looked up there first, and put there. Raises OSError, and BlockKVError where the files
    changed meanwhile.
    """
    seen = _identity(paths)
    key = f"weights/{seen}"
    if remembered_in is not None and (known := remembered_in.get(key)) is not None:
        return bytes(known.numpy()).decode()
    state = hashlib.blake2b(digest_size=16, person=b"blockkv weights")
    for path in paths:
        state.update(f"{len(path.name.encode())}:{path.name}{path.stat().st_size}:".encode())
        state.update(file_digest(path))
    if _identity(paths) != seen:
        raise blockkv.BlockKVError(
            f"{paths[0].parent}: the weights changed while they were read; start again"
        )
    if remembered_in is not None:
        remembered_in.put(key, state.hexdigest().encode())
    return state.hexdigest()


def file_digest(path: Path) -> bytes:
    """32 bytes that depend on every byte of a file, and on its size. Raises OSError."""
    size_bytes = path.stat().st_size
    state = hashlib.blake2b(str(size_bytes).encode(), digest_size=32, person=b"blockkv file")
    with ThreadPoolExecutor(THREADS, "blockkv-weights") as threads:
        for digest in threads.map(_digest, itertools.repeat(path), range(0, size_bytes, SEGMENT_BYTES)):
            state.update(digest)
    return state.digest()


def _digest(path: Path, start: int) -> bytes:
    state = xxhash.xxh3_128()
    for piece in _pieces(path, start):
        state.update(piece)
    return state.digest()


def _pieces(path: Path, start: int) -> Iterator[memoryview]:
    """The segment from `start` on, in memory that is used again."""
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = SEGMENT_BYTES
        while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
            yield buffer[:count]
            left -= count


def _identity(paths: Sequence[Path]) -> str:
    """Whether they are the same files as last time, without reading them."""
    state = hashlib.blake2b(digest_size=16)
    for path in paths:
        found = path.stat()
        facts = (os.fspath(path.resolve()), found.st_dev, found.st_ino, found.st_size)
        state.update(repr((*facts, found.st_mtime_ns, found.st_ctime_ns)).encode())
    return state.hexdigest()
