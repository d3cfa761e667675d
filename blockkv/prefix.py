"""Keys of prefixes: a chained hash over token ids, so that equal keys mean equal bytes.

::

    family = Family(model="llama-3.1-8b", weights="0e9e39f", dtype="float16", layout="lkhtd")
    keys = prefix_keys(token_ids, 256, family)      # one for each whole chunk of 256 tokens
    stored = store.lookup(keys)                     # the longest stored prefix, in chunks

Invariants
  * key i depends on every token up to the end of chunk i, on the size of a chunk, and on all of the family;
  * two families, or two sizes of chunks, share no key: what one of them has put, the other cannot get.

Not here: what is stored under a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from blockkv.errors import InvalidArgument

__all__ = ["Family", "PrefixChain", "prefix_keys"]

LINK_BYTES = 32
NAME_CHARS = 16
TOKEN_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class Family:
    """Everything but the tokens that the bytes of a chunk depend on.

    Chunks are only ever exchanged within a family. Two engines of which any of these differ compute other
    bytes for the same tokens, or lay them out otherwise; a field that was left out when it should have been
    given is how one model comes to read another's cache. All fields count, in this order.
    """

    model: str
    """Which architecture and configuration: a name with its version."""
    weights: str | bytes
    """A fingerprint of the weights: a digest of the files or the commit they came with, never just a name.
    Whatever changes the results belongs to it: adapters (LoRA), merged or quantised weights.
    """
    dtype: str
    """Of the stored values, with what is needed to read them: "float16", "fp8_e4m3, scale per head"."""
    layout: str
    """The order of what is in a chunk, and how attention was computed where that changes the bytes."""
    tensor_rank: int = 0
    tensor_ranks: int = 1
    """Which share of the heads: the rank, and of how many, under tensor parallelism."""
    pipeline_rank: int = 0
    pipeline_ranks: int = 1
    """Which share of the layers, under pipeline parallelism."""
    salt: str | bytes = ""
    """Anything else that must keep caches apart: a tenant. Whoever does not know it cannot make the keys, so
    that hits do not tell one tenant what another has asked.
    """

    def __post_init__(self) -> None:
        for name in ("model", "weights", "dtype", "layout"):
            if not getattr(self, name):
                raise InvalidArgument(f"the {name} of a family is empty; without it caches would be mixed up")
        for rank, ranks in (
            (self.tensor_rank, self.tensor_ranks),
            (self.pipeline_rank, self.pipeline_ranks),
        ):
            if not 0 <= rank < ranks:
                raise InvalidArgument(f"rank {rank} of {ranks}; ranks are counted from 0")

    @property
    def digest(self) -> bytes:
        """BLAKE2b-256 over all fields, each with its kind and length, so that none runs into the next."""
        state = hashlib.blake2b(digest_size=LINK_BYTES, person=b"blockkv family")
        for value in astuple(self):
            encoded = value if isinstance(value, bytes) else str(value).encode()
            state.update(f"{type(value).__name__}{len(encoded)}:".encode() + encoded)
        return state.digest()

    @property
    def name(self) -> str:
        """What the keys of this family begin with: 16 hexadecimal digits. Quotas go by it."""
        return self.digest.hex()[:NAME_CHARS]

    def differences(self, other: Family) -> tuple[str, ...]:
        """The names of the fields that keep the two apart; none if they share a cache."""
        return tuple(
            field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)
        )


class PrefixChain:
    """The keys of a sequence that grows, as when decoding: each token is hashed once."""

    def __init__(self, chunk_tokens: int, family: Family) -> None:
        """`chunk_tokens`: tokens a chunk. Raises InvalidArgument unless there is at least one."""
        if not (isinstance(chunk_tokens, int) and 1 <= chunk_tokens <= TOKEN_LIMIT):
            raise InvalidArgument(f"chunk_tokens is {chunk_tokens!r}; use 1 to {TOKEN_LIMIT}")
        if not isinstance(family, Family):
            raise InvalidArgument(f"family is {family!r}; give a Family, which keeps caches apart")
        self._chunk_tokens = chunk_tokens
        self._name = family.name
        self._link = hashlib.blake2b(
            family.digest + chunk_tokens.to_bytes(8, "little"), digest_size=LINK_BYTES
        ).digest()
        self._rest: NDArray[np.uint32] = np.empty(0, np.uint32)

    def extend(self, tokens: Sequence[int] | NDArray[np.integer]) -> list[str]:
        """Append tokens; the keys of the chunks that they complete, in order.

        Raises InvalidArgument, with nothing appended, for what is no sequence of ids from 0 to 2^32 - 1.
        """
        joined = np.concatenate([self._rest, _token_array(tokens)])
        whole = len(joined) - len(joined) % self._chunk_tokens
        keys = []
        for start in range(0, whole, self._chunk_tokens):
            chunk = joined[start : start + self._chunk_tokens]
            self._link = hashlib.blake2b(self._link + chunk.tobytes(), digest_size=LINK_BYTES).digest()
            keys.append(f"{self._name}/{self._link.hex()}")
        self._rest = joined[whole:]
        return keys


def prefix_keys(tokens: Sequence[int] | NDArray[np.integer], chunk_tokens: int, family: Family) -> list[str]:
    """The keys of the whole chunks of `tokens`, in order: one for every `chunk_tokens` of them.

    A tail that is shorter has no key. Keys are printable: the family's name, a slash, 64 hexadecimal digits.
    Raises InvalidArgument for what is no sequence of ids from 0 to 2^32 - 1.
    """
    return PrefixChain(chunk_tokens, family).extend(tokens)


def _token_array(tokens: Iterable[int] | NDArray[np.integer]) -> NDArray[np.uint32]:
    try:
        found = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"token ids are whole numbers in one sequence: {error}") from error
    if not found.size:
        return np.empty(0, np.uint32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidArgument(
            f"token ids are whole numbers in one sequence, not {found.dtype} of shape {found.shape}"
        )
    if int(found.min()) < 0 or int(found.max()) >= TOKEN_LIMIT:
        raise InvalidArgument(
            f"token ids are 0 to {TOKEN_LIMIT - 1}, these go from {found.min()} to {found.max()}"
        )
    return found.astype("<u4")
