"""Slot and session files of llama.cpp: written from a context, read into one, with the check that they lack.

Beside a file that is written here stands `NAME.blockkv.json`: the family of what is in it, and a BLAKE2b-256
digest of the file. llama-server and `llama_state_seq_load_file` read the file and take no notice of the
other. A file without it, from llama-server's `--slot-save-path` for instance, is read only by somebody who
vouches for it: nothing in it tells which model it is of, and nothing would tell of a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import blockkv
from blockkv.connectors.llama_cpp.fingerprint import family_of
from blockkv.connectors.llama_cpp.sequences import Sequences, Tokens
from blockkv.connectors.llama_cpp.states import HEADER_BYTES, cells_of, read_file, with_header, write_file
from blockkv.errors import InvalidArgument

__all__ = ["export_slot", "import_slot"]

FORM = "slot file"
PIECE_BYTES = 8 << 20


def export_slot(
    sequences: Sequences,
    path: str | os.PathLike[str],
    tokens: Tokens,
    sequence: int = 0,
    *,
    session: bool = False,
    weights: str = "",
) -> int:
    """Write what `sequence` of the context holds, which are the states of `tokens`. Returns bytes written.

    A slot file (ggsq), as llama-server restores it from its `--slot-save-path`; with `session` a session file
    (ggsn), as `--prompt-cache` reads it. To have something from the store, `load` it first. Raises
    InvalidArgument where the sequence does not have these tokens, OSError.
    """
    ids = np.ascontiguousarray(tokens, np.int32)
    state = sequences.state(sequence, len(ids))[HEADER_BYTES:]
    context = sequences.context
    digest, size_bytes = hashlib.blake2b(digest_size=32), 0
    target = Path(path)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
        for piece in write_file(ids, state, context.architecture if session else ""):
            file.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
    family = family_of(context, FORM, weights=weights)
    said = {"family": asdict(family), "blake2b_256": digest.hexdigest(), "size_bytes": size_bytes}
    # In this order a crash leaves a pair that does not fit, and is refused.
    _beside(target).write_text(json.dumps(said, indent=1))
    Path(file.name).replace(target)
    return size_bytes


def import_slot(
    sequences: Sequences,
    path: str | os.PathLike[str],
    sequence: int = 0,
    *,
    trusted: bool = False,
    weights: str = "",
) -> list[int]:
    """Read a slot or session file into `sequence`, whose content goes, and store it. Returns its tokens.

    The file must be what `export_slot` has written, of a context of the same family; its digest is compared
    first. With `trusted` it may be without one: then only its form is checked, and that llama.cpp takes it.

    Raises InvalidArgument: no such file, not trusted, damaged, or of another model, version or setting, which
    it names.
    """
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path)} cannot be read: {error}") from error
    is_known = _check(Path(path), content, sequences, trusted, weights)
    saved = read_file(memoryview(content))  # type: ignore[arg-type]
    context = sequences.context
    if saved.architecture not in ("", context.architecture):
        raise InvalidArgument(
            f"{os.fspath(path)} is of a {saved.architecture}, this is a {context.architecture}"
        )
    caches = cells_of(saved.state)
    if not caches and not is_known:
        raise InvalidArgument(f"{os.fspath(path)} is damaged, or of a model whose states have no known form")
    if caches and (caches[0].positions.max(initial=-1) != len(saved.tokens) - 1):
        raise InvalidArgument(f"{os.fspath(path)} has not the states of its {len(saved.tokens)} tokens")
    state = blockkv.empty(HEADER_BYTES + len(saved.state), torch.uint8)
    state[:HEADER_BYTES] = torch.frombuffer(bytearray(with_header(sequence)), dtype=torch.uint8)
    state[HEADER_BYTES:] = torch.from_numpy(content[len(content) - len(saved.state) :])
    if not sequences.restore(sequence, state, len(saved.tokens)):
        raise InvalidArgument(f"{os.fspath(path)} does not fit this context: llama.cpp does not take it")
    sequences.save(saved.tokens, sequence)
    return [int(one) for one in saved.tokens]


def _check(path: Path, content: Any, sequences: Sequences, trusted: bool, weights: str) -> bool:
    """Whether the file is known to be right. Raises where it is known to be wrong, or not trusted."""
    try:
        said = json.loads(_beside(path).read_text())
    except FileNotFoundError:
        if trusted:
            return False
        raise InvalidArgument(
            f"{path}: there is no {_beside(path).name} to say what model it is of, and if it is whole; "
            "give trusted=True if you know"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{_beside(path)} cannot be read: {error}") from error
    try:
        theirs, digest = blockkv.Family(**said["family"]), said["blake2b_256"]
    except (TypeError, KeyError) as error:
        raise InvalidArgument(f"{_beside(path)} is not what export_slot writes: {error!r}") from error
    ours = family_of(sequences.context, FORM, weights=weights)
    if theirs != ours:
        differences = ", ".join(
            f"{name}: {getattr(theirs, name)!r}, here {getattr(ours, name)!r}"
            for name in theirs.differences(ours)
        )
        raise InvalidArgument(f"{path} was written by another context: {differences}")
    if hashlib.blake2b(content, digest_size=32).hexdigest() != digest:
        raise InvalidArgument(f"{path} is not what was written: it is damaged, or was written again since")
    return True


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".blockkv.json")
