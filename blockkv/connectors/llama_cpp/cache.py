"""A cache for `llama_cpp.Llama.set_cache`, in a store.

::

    cache = BlockKVCache(llama, device="/dev/nvme1n1")
    cache.attach()                                  # or llama.set_cache(cache)
    llama.create_completion(prompt)                 # loads what is stored of it, saves what it has become

How the engine uses a cache (`Llama._create_completion`): it asks for the prompt's tokens before it evaluates
them, takes the `LlamaState` it gets where that is longer than what the context has already, and stores a
state after every completion. A `LlamaState` is the state of the whole context, the logits of a batch, and a
copy of both. So here a hit goes straight into the context, and what is returned is a `LlamaState` that the
engine finds there already. A save, too, is taken from the context, in chunks where that is possible: then
only what is new is written.

`attach` also keeps the engine from making the state that `set_cache` alone would throw away, which for a
context of a gigabyte are three copies of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
from llama_cpp.llama import LlamaState
from llama_cpp.llama_cache import BaseLlamaCache

import blockkv
from blockkv.connectors.llama_cpp.fingerprint import Context
from blockkv.connectors.llama_cpp.sequences import DEFAULT_CHUNK_TOKENS, Sequences
from blockkv.connectors.opening import open_store
from blockkv.errors import BlockKVError, InvalidArgument

__all__ = ["BlockKVCache"]

IMAGES = (
    "this Llama has a chat handler for images, which evaluates them past its record of tokens: what is in "
    "the context could be taken for a text's"
)

log = logging.getLogger(__name__)


class _StateInContext(LlamaState):
    """The state that the context has at the moment, made only if somebody reads its bytes."""

    def __init__(self, llama: Any) -> None:
        self._llama = llama
        self._made: Any = None
        self.input_ids = llama.input_ids.copy()
        self.n_tokens = llama.n_tokens
        self.seed = llama._seed

    def _whole(self) -> Any:
        if self._made is None:
            if self._llama.n_tokens != self.n_tokens:
                raise InvalidArgument("the context has gone on since; this state was not kept")
            self._made = type(self._llama).save_state(self._llama)
        return self._made

    @property
    def scores(self) -> Any:
        return self._whole().scores

    @property
    def llama_state(self) -> Any:
        return self._whole().llama_state

    @property
    def llama_state_size(self) -> Any:
        return self._whole().llama_state_size


class BlockKVCache(BaseLlamaCache):
    """For one `llama_cpp.Llama`, whose thread uses it. Several of them may share a store, each with its own.

    A context manager; closing it closes the store that it has opened.
    """

    def __init__(
        self,
        llama: Any,
        *,
        device: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        store: blockkv.Store | None = None,
        format: bool = False,
        form: Literal["auto", "chunks", "whole"] = "auto",
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        weights: str = "",
        salt: str = "",
        durable: bool = False,
        load_deadline_s: float | None = 30.0,
    ) -> None:
        """In the store on `device`, a path or the paths of an array; or in one that is open already.

        With `format` a device that holds no store is formatted, if it is blank. The rest is as of
        `Sequences`. Raises InvalidArgument, OccupiedError, DeviceError, DeviceBusy.
        """
        super().__init__()
        if _sees_images(llama):
            raise InvalidArgument(IMAGES)
        if (device is None) == (store is None):
            raise InvalidArgument("give a device, or a store that is open, and not both")
        self._llama = llama
        self._owned = open_store(device, format=format) if device is not None else None
        opened = self._owned if store is None else store
        assert opened is not None
        self.store = opened
        try:
            self.sequences = Sequences(
                self.store,
                Context.of(llama),
                form=form,
                chunk_tokens=chunk_tokens,
                weights=weights,
                salt=salt,
                durable=durable,
                load_deadline_s=load_deadline_s,
            )
        except BaseException:
            self.close()
            raise

    def attach(self) -> None:
        """Become the cache of the `Llama`, which then makes no state of its own after a completion."""
        self._llama.set_cache(self)
        self._llama.save_state = lambda: _StateInContext(self._llama)

    def detach(self) -> None:
        """Take `attach` back."""
        self._llama.set_cache(None)
        vars(self._llama).pop("save_state", None)

    def close(self) -> None:
        """Detach, and close the store if it was opened here. Raises what `Store.close` does."""
        if self._llama.cache is self:
            self.detach()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, int]:
        """Counters since it was made; see docs/connectors/llama_cpp.md."""
        return dict(self.sequences.counters)

    # -- what the engine calls -------------------------------------------------------------------------

    @property
    def cache_size(self) -> int:
        """Payload in the store, of everybody who uses it, in bytes."""
        try:
            return int(self.store.stats()["payload_bytes"])
        except BlockKVError as error:
            log.warning("the store does not say what it holds: %s", error)
            return 0

    def __bool__(self) -> bool:
        return True  # the engine asks, and takes a cache that says it is empty for none

    def __contains__(self, key: Sequence[int]) -> bool:
        return self.sequences.stored(key) > 0

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Restore the longest stored beginning of these tokens into the context; KeyError for a miss."""
        llama, tokens = self._llama, np.asarray(key, np.intc)
        if _sees_images(llama):
            raise KeyError(IMAGES)
        held = _common(llama.input_ids[: llama.n_tokens], tokens)
        if self.sequences.stored(tokens) <= held:
            self.sequences.counters["loads"] += 1
            self.sequences.counters["tokens_asked"] += len(tokens)
            raise KeyError("the store has no more of it than the context")
        restored = self.sequences.load(tokens, keep=held)
        llama.input_ids[:restored] = tokens[:restored]
        llama.n_tokens = restored
        llama._requires_eval = True
        if restored <= held:
            raise KeyError("it could not be read, or did not verify")
        return _StateInContext(llama)

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Store what the context holds of these tokens; `value`, a copy of it, is not used.

        The last token of a completion has been sampled and not evaluated: it is not in there.
        """
        llama = self._llama
        if _sees_images(llama):
            log.warning("nothing is stored: %s", IMAGES)
            return
        held = _common(llama.input_ids[: llama.n_tokens], np.asarray(key, np.intc))
        if held == llama.n_tokens and held:
            self.sequences.save_quietly(llama.input_ids[:held])


def _sees_images(llama: Any) -> bool:
    """Whether its chat handler puts images into the context: all of llama-cpp-python's name a projector."""
    return hasattr(getattr(llama, "chat_handler", None), "clip_model_path")


def _common(one: Any, other: Any) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
