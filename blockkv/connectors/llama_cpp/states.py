"""The state of a sequence as llama.cpp writes it (`llama_state_seq_get_data`), and files of it.

::

    u32 magic, i32 sequence             of a state in memory; a file has none of this
    for each cache: one, or two where some layers have a sliding window
        u32 streams
        for each stream: u32 cells, and where there are any
            for each cell: i32 position, u32 1, i32 x, y, token (M-RoPE models only), i32 sequence
            u32 V is transposed, u32 layers
            for each layer: i32 type of K, u64 bytes a row, the rows
            for each layer: i32 type of V, u64 bytes a row, the rows
                or, transposed: i32 type of V, u32 bytes an element, u32 rows, the rows

    slot file (`--slot-save-path`, `llama_state_seq_save_file`):
        u32 "ggsq", u32 3, u32 tokens, i32 each, state
    session file (`--prompt-cache`, `llama_state_save_file`):
        u32 "ggsn", u32 10, u32 tokens, i32 each, u32 length of a name, the architecture's name, the state of
        all sequences

Source: `state_write` in src/llama-kv-cache.cpp, `state_seq_save_file` and `state_save_file` in
src/llama-context.cpp, and include/llama.h, of the llama.cpp that llama-cpp-python 0.3.36 brings. There is no
checksum and no model in any of them.

What is not of this form, such as recurrent states, is read by nobody here: it is stored as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockkv.errors import InvalidArgument

__all__ = ["HEADER_BYTES", "Cells", "SavedFile", "cells_of", "read_file", "with_header", "write_file"]

MAGIC = 0xAF143CD8
HEADER_BYTES = 8
SLOT_MAGIC, SLOT_VERSION = 0x67677371, 3
SESSION_MAGIC, SESSION_VERSION = 0x6767736E, 10
EXTENSION_BYTES = (0, 12)
MOST_CACHES = 2
MOST_LAYERS = 4096
LONGEST_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Cells:
    """Of one cache in a state: which positions it has, and how they lie."""

    positions: NDArray[np.int32]
    is_transposed: bool
    layers: int
    shape: tuple[tuple[int, int], ...]
    """Type and bytes a row of each layer's K, then of its V."""


def cells_of(state: memoryview) -> list[Cells]:
    """The caches of a state without its header; none where it is of no known form."""
    if not len(state):
        return []
    for extension_bytes in EXTENSION_BYTES:
        for has_values in (True, False):
            found = _caches(state, extension_bytes, has_values)
            if found is not None:
                return found
    return []


def _caches(state: memoryview, extension_bytes: int, has_values: bool) -> list[Cells] | None:
    caches: list[Cells] = []
    offset = 0
    try:
        while offset < len(state):
            if len(caches) == MOST_CACHES:
                return None
            cells, offset = _cache(state, offset, extension_bytes, has_values)
            caches.append(cells)
    except (struct.error, ValueError):
        return None
    return caches


def _cache(state: memoryview, offset: int, extension_bytes: int, has_values: bool) -> tuple[Cells, int]:
    """One cache from `offset` on, and where it ends. Raises ValueError or struct.error."""
    (streams,) = struct.unpack_from("<I", state, offset)
    offset += 4
    if not 1 <= streams <= MOST_LAYERS:
        raise ValueError("streams")
    found = Cells(np.empty(0, np.int32), False, 0, ())
    for _ in range(streams):
        (count,) = struct.unpack_from("<I", state, offset)
        offset += 4
        if not count:
            continue
        if found.layers:
            raise ValueError("a sequence is in one stream")
        words = 3 + extension_bytes // 4
        table = np.frombuffer(state, np.int32, count * words, offset).reshape(count, words)
        offset += table.nbytes
        if (table[:, 1] != 1).any():
            raise ValueError("cells of several sequences")
        is_transposed, layers = struct.unpack_from("<II", state, offset)
        offset += 8
        if is_transposed > 1 or not 1 <= layers <= MOST_LAYERS:
            raise ValueError("layers")
        shape = []
        for _ in range(layers):
            kind, row_bytes = struct.unpack_from("<iQ", state, offset)
            shape.append((kind, row_bytes))
            offset += 12 + row_bytes * count
        for _ in range(layers if has_values else 0):
            if is_transposed:
                kind, element_bytes, rows = struct.unpack_from("<iII", state, offset)
                row_bytes = element_bytes * rows
            else:
                kind, row_bytes = struct.unpack_from("<iQ", state, offset)
            shape.append((kind, row_bytes))
            offset += 12 + row_bytes * count
        if offset > len(state):
            raise ValueError("cut short")
        found = Cells(table[:, 0].copy(), bool(is_transposed), layers, tuple(shape))
    return found, offset


def with_header(sequence: int) -> bytes:
    """What comes before a state in memory."""
    return struct.pack("<Ii", MAGIC, sequence)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A slot or session file."""

    tokens: NDArray[np.int32]
    state: memoryview
    """Without a header."""
    architecture: str
    """Of a session file; a slot file does not say."""


def read_file(content: memoryview) -> SavedFile:
    """Take a slot or session file apart. Raises InvalidArgument for what is none, or of another version."""
    try:
        magic, version, count = struct.unpack_from("<III", content)
        offset = 12
        if (magic, version) not in ((SLOT_MAGIC, SLOT_VERSION), (SESSION_MAGIC, SESSION_VERSION)):
            raise InvalidArgument(
                f"not a file that this can read: magic {magic:#x}, version {version}; known are slot files "
                f"(ggsq) of version {SLOT_VERSION} and session files (ggsn) of version {SESSION_VERSION}"
            )
        tokens = np.frombuffer(content, np.int32, count, offset).copy()
        offset += tokens.nbytes
        name = ""
        if magic == SESSION_MAGIC:
            (length,) = struct.unpack_from("<I", content, offset)
            if length > LONGEST_NAME_BYTES:
                raise InvalidArgument("not a session file: its architecture has no name")
            name = bytes(content[offset + 4 : offset + 4 + length]).decode(errors="replace")
            offset += 4 + length
    except (struct.error, ValueError) as error:
        raise InvalidArgument(f"not a slot or session file of llama.cpp: {error}") from error
    return SavedFile(tokens, content[offset:], name)


def write_file(tokens: NDArray[np.int32], state: memoryview, architecture: str = "") -> Iterator[bytes]:
    """The pieces of a slot file; of a session file where an architecture is named."""
    magic, version = (SESSION_MAGIC, SESSION_VERSION) if architecture else (SLOT_MAGIC, SLOT_VERSION)
    yield struct.pack("<III", magic, version, len(tokens)) + tokens.astype("<i4").tobytes()
    if architecture:
        yield struct.pack("<I", len(architecture.encode())) + architecture.encode()
    yield from (state[first : first + (8 << 20)] for first in range(0, len(state), 8 << 20))  # type: ignore[misc]
