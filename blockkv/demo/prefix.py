"""Chunk keys of a token sequence: a chained hash, so that equal keys mean equal prefixes.

Invariant: key i depends on every token up to the end of chunk i and on everything the bytes of the chunk
depend on (model weights, chunk size, layout). Two prompts share key i exactly if they share that prefix.
Not here: what is stored under a key (`blockkv.demo.model`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 32


def chain_seed(model_digest: bytes, chunk_tokens: int, layout: str) -> bytes:
    """Digest every chain of this model, chunk size and layout starts from."""
    header = f"blockkv-demo:{chunk_tokens}:{layout}:".encode()
    return hashlib.blake2b(header + model_digest, digest_size=DIGEST_BYTES).digest()


def prefix_keys(
    token_ids: Sequence[int], model_digest: bytes, chunk_tokens: int = 256, layout: str = "lkhtd-f32"
) -> list[str]:
    """Keys of the whole chunks of `token_ids`, in order: one per `chunk_tokens` tokens.

    A tail shorter than `chunk_tokens` has no key. Keys are printable, "<model>/<chain>" in hexadecimal.
    """
    link = chain_seed(model_digest, chunk_tokens, layout)
    family = link.hex()[:16]
    keys = []
    for start in range(0, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        tokens = array("I", token_ids[start : start + chunk_tokens])
        link = hashlib.blake2b(link + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
        keys.append(f"{family}/{link.hex()}")
    return keys
