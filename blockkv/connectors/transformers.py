"""The KV cache of a transformers model in a store: what one process computed, any later one goes on from.

::

    family = model_family(model)
    cache, held = load_prefix(store, token_ids, family, config=model.config)
    output = model.generate(input_ids, cache=cache, return_dict_in_generate=True)
    save_cache(store, output.cache, output.sequences[0], family)

Tokens are kept in chunks of `chunk_tokens`: under the key of a prefix (`blockkv.prefix_keys`) lie the keys
and values of its last chunk, of every layer in order, each of shape (KV heads, tokens, head dimension). To
restore a cache the device writes them side by side into what become the layers' tensors, without a copy.

A layer that keeps only a window, or a recurrent state, cannot go back to an earlier token. Caches with such
layers get a snapshot besides: their state after exactly the tokens that were saved, under a key of all these.

Invariants
  * a restored cache is bit for bit the one that was saved, up to `held` tokens; what is damaged, missing or
    of another shape ends the prefix before it, and is computed again;
  * `held` is less than the number of tokens: the model has at least one to run, and its logits to give.

Not here: batches of more than one sequence, and caches that quantise; both are refused by name.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

import blockkv
from blockkv.errors import BatchError, BlockKVError, InvalidArgument, LayoutMismatch, StoreClosed

__all__ = ["DEFAULT_CHUNK_TOKENS", "load_prefix", "model_family", "save_cache", "weights_fingerprint"]

DEFAULT_CHUNK_TOKENS = 256
FORMAT = "transformers 1"
"""Counts up when what is stored under a key changes."""
STAGED_BYTES = 256 << 20
"""How much of a cache on an accelerator is copied to the CPU at a time."""
ATTEMPTS = 4
"""How often a prefix is looked for again after something of it turned out to be damaged."""

FULL, SLIDING, LINEAR = "full", "sliding", "linear"
KINDS: dict[str, tuple[str, ...]] = {
    "DynamicLayer": (FULL,),
    "StaticLayer": (FULL,),
    "DynamicSlidingWindowLayer": (SLIDING,),
    "StaticSlidingWindowLayer": (SLIDING,),
    "LinearAttentionLayer": (LINEAR,),
    "LinearAttentionAndFullAttentionLayer": (LINEAR, FULL),
    "LinearAttentionAndSlidingWindowAttentionLayer": (LINEAR, SLIDING),
    "LinearAttentionAndStaticFullAttentionLayer": (LINEAR, FULL),
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": (LINEAR, SLIDING),
    "DummyLayer": (),
}
"""What a layer of a cache holds, by the exact class: one derived from it may hold more."""
NOT_IN_FAMILY = ("_name_or_path", "architectures", "transformers_version", "use_cache")
"""Fields of a configuration that no key or value depends on."""

log = logging.getLogger(__name__)


def model_family(
    model: Any,
    *,
    weights: str | bytes | None = None,
    salt: str | bytes = "",
    tensor_rank: int = 0,
    tensor_ranks: int = 1,
) -> blockkv.Family:
    """The family of a loaded model's KV cache.

    It covers the configuration, the weights, the dtype and the implementation of attention. `weights` is the
    commit or digest that they came with; None: `weights_fingerprint(model)`. What else the cache of a prompt
    depends on goes into `salt`: a digest of images, of embeddings or positions that were given instead of the
    defaults, a tenant.

    Under tensor parallelism every rank has a share of the heads, and `weights` is needed. Raises
    InvalidArgument.
    """
    config = model.config
    fields = {name: value for name, value in config.to_dict().items() if name not in NOT_IN_FAMILY}
    digest = hashlib.blake2b(json.dumps(fields, sort_keys=True, default=str).encode(), digest_size=16)
    attention = getattr(config, "_attn_implementation", None) or "default"
    return blockkv.Family(
        model=f"{type(model).__name__} {digest.hexdigest()}",
        weights=weights_fingerprint(model) if weights is None else weights,
        dtype=str(model.dtype).removeprefix("torch."),
        layout=f"{FORMAT}, layer kv head token dim, attention {attention}",
        tensor_rank=tensor_rank,
        tensor_ranks=tensor_ranks,
        salt=salt,
    )


def weights_fingerprint(model: Any) -> str:
    """A digest of everything in the model's `state_dict`: the name, dtype, shape and bytes of each tensor.

    Every byte is read once, at the speed of memory (XXH3-128 a tensor, BLAKE2b over those): it tells
    different weights from each other, and is no defence against weights that were made to collide. Not
    covered: the code of the model, and buffers that it does not save, which follow from its configuration.

    Raises InvalidArgument where the bytes are not here, or not all of it: weights on the meta device, sharded
    ones, adapters, whose choice may change later.
    """
    if getattr(model, "peft_config", None):
        raise InvalidArgument(
            "the model has adapters (peft), and which are active is not in its weights; give weights=, "
            "a name for this combination"
        )
    state = hashlib.blake2b(digest_size=32, person=b"blockkv weights")
    seen: dict[tuple[Any, ...], bytes] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            state.update(f"{name}={tensor!r};".encode())
            continue
        if tensor.is_meta or type(tensor).__name__ == "DTensor":
            where = "sharded over several ranks" if not tensor.is_meta else "on the meta device"
            raise InvalidArgument(f"{name} is {where}, so its bytes are not here; give weights=")
        facts = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.data_ptr())
        if facts not in seen:
            seen[facts] = _tensor_digest(name, tensor)
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode() + seen[facts])
    return state.hexdigest()


def save_cache(
    store: blockkv.Store,
    cache: Any,
    token_ids: Any,
    family: blockkv.Family,
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    durable: bool = False,
    held: int | None = None,
) -> int:
    """Put what a cache of one sequence holds; how many tokens of it, from the first, are in the store now.

    `cache` is a DynamicCache or a StaticCache, on any device. `token_ids`, a list or a tensor of one row, are
    the tokens it was computed from; there may be more of them, as after `generate`, whose last token is not
    in the cache. Whole chunks are put, those that are there already are not put again. A cache that has
    sliding or linear layers can be gone on from only where it was saved, after exactly as many tokens.

    A cache of states alone (Mamba) does not know how many tokens it has seen: `held` has to say it, after
    `generate` one less than the sequence has.

    What the device refuses is logged, and counts as not stored. Raises InvalidArgument for caches that cannot
    be kept, StoreClosed.
    """
    layers = _layers(cache)
    tokens = _tokens(token_ids)
    count = _held_tokens(layers)
    if count is None and held is None:
        raise InvalidArgument(
            "the cache has states only, which do not count the tokens they have seen: give held=, how many "
            "that are; after generate one less than its sequence has"
        )
    if held is not None and (held < 1 or count not in (None, held)):
        raise InvalidArgument(f"held is {held}, but the cache holds {count or 'some'} tokens")
    count = count if count is not None else held or 0
    if count > len(tokens):
        raise InvalidArgument(f"the cache holds {count} tokens, but only {len(tokens)} token ids were given")
    keys = blockkv.prefix_keys(tokens[:count], chunk_tokens, family)
    kinds = {kind for _, layer in layers for kind in _kinds(layer)}
    wanted = list(zip(keys, range(len(keys)), strict=True)) if FULL in kinds else []
    state_key = None
    if count and kinds & {SLIDING, LINEAR}:
        state_key = _state_keys(tokens[:count], keys, chunk_tokens, family, count)[-1][1]
    _check_batch(layers)
    _check_dtype(layers, family)
    try:
        _put(store, layers, wanted, state_key, chunk_tokens, count)
        if durable:
            store.commit()
        stored = store.lookup(keys) * chunk_tokens if FULL in kinds else count
        if state_key is None:
            return stored
        whole = count - count % chunk_tokens
        return count if stored >= whole and store.contains(state_key) else 0
    except (InvalidArgument, StoreClosed):
        raise
    except BlockKVError as error:
        log.warning("a KV cache was not stored: %s", error)
        return 0


def load_prefix(
    store: blockkv.Store,
    token_ids: Any,
    family: blockkv.Family,
    *,
    config: Any = None,
    cache: Any = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    device: Any = "cpu",
) -> tuple[Any, int]:
    """The cache of the longest stored prefix of `token_ids`, and how many tokens it holds; 0: none is there.

    Makes a `DynamicCache` for `config`, the model's, on `device`: one for all layers, or a sequence with
    one for each. Or fills `cache`, an empty DynamicCache or StaticCache; one that has its memory already,
    where it is. At least one token is left for the model. `chunk_tokens` is what they were saved with.
    Pass it on to the model or to `generate`, with all of the tokens or with those after the prefix.

    A chunk that is damaged or cannot be read ends the prefix before it. Raises InvalidArgument for caches
    that cannot be filled, StoreClosed.
    """
    if cache is None:
        if config is None:
            raise InvalidArgument("give config=, the model's, or cache=, the empty one that is to be filled")
        from transformers import DynamicCache

        cache = DynamicCache(config=config)
    layers = _layers(cache)
    if not layers:
        raise InvalidArgument("the cache has no layers yet; make it with the model's config=")
    tokens = _tokens(token_ids)
    _check_batch(layers)
    if _held_tokens(layers) != 0:
        raise InvalidArgument("the cache holds tokens already; give an empty one, or call its reset()")
    limit = max(0, min(len(tokens), _capacity(layers)) - 1)
    keys = blockkv.prefix_keys(tokens[:limit], chunk_tokens, family)
    try:
        return cache, _Restore(store, layers, family, chunk_tokens, device).run(tokens[:limit], keys)
    except StoreClosed:
        raise
    except BlockKVError as error:
        log.warning("no stored KV cache could be read: %s", error)
        cache.reset()
        return cache, 0


# -- what a cache is made of -------------------------------------------------------------------------------


def _layers(cache: Any) -> list[tuple[int, Any]]:
    """The layers that hold something, with their numbers. Raises InvalidArgument, naming what is refused."""
    name = type(cache).__name__
    if hasattr(cache, "self_attention_cache"):
        raise InvalidArgument(f"{name}: keep its self_attention_cache; the other half follows from the input")
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise InvalidArgument(f"{name} is no transformers cache with layers; transformers 5 is needed")
    for number, layer in enumerate(layers):
        if type(layer).__name__ not in KINDS:
            raise InvalidArgument(
                f"layer {number} of the {name} is a {type(layer).__name__}, which cannot be kept: it holds "
                "more than keys, values and states of its sequence"
            )
        if _is_static(layer) and not hasattr(layer, "cumulative_length"):
            raise InvalidArgument(
                f"layer {number} of the {name} does not know how many tokens it holds; from 5.9 on those of "
                "transformers do"
            )
    return [(number, layer) for number, layer in enumerate(layers) if _kinds(layer)]


def _kinds(layer: Any) -> tuple[str, ...]:
    return KINDS[type(layer).__name__]


def _is_static(layer: Any) -> bool:
    return "Static" in type(layer).__name__


def _held_tokens(layers: Sequence[tuple[int, Any]]) -> int | None:
    """How many tokens a cache has seen; None where it has only states, which do not count them."""
    attention = [layer for _, layer in layers if set(_kinds(layer)) & {FULL, SLIDING}]
    for layer in attention:
        if layer.is_initialized and (count := int(layer.get_seq_length())):
            return count
    if attention:
        return 0
    started = any(any(layer.has_previous_state.values()) for _, layer in layers)
    return None if started else 0


def _capacity(layers: Sequence[tuple[int, Any]]) -> int:
    """How many tokens fit into a cache."""
    lengths = [layer.max_cache_len for _, layer in layers if _is_static(layer) and FULL in _kinds(layer)]
    return min(lengths, default=1 << 62)


def _check_batch(layers: Sequence[tuple[int, Any]]) -> None:
    for number, layer in layers:
        kinds, held = _kinds(layer), []
        if set(kinds) & {FULL, SLIDING} and layer.is_initialized:
            held.append(layer.keys)
        if LINEAR in kinds:
            for states in (layer.conv_states, layer.recurrent_states):
                held += states.values() if isinstance(states, Mapping) else [states]
        for one in held:
            if isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[0] != 1:
                raise InvalidArgument(
                    f"layer {number} holds a batch of {one.shape[0]}; a cache of one sequence is kept"
                )


def _check_dtype(layers: Sequence[tuple[int, Any]], family: blockkv.Family) -> None:
    for number, layer in layers:
        if not set(_kinds(layer)) & {FULL, SLIDING} or not layer.is_initialized:
            continue
        if layer.keys.dim() != 4 or layer.keys.shape[0] != 1:
            batch = layer.keys.shape[0] if layer.keys.dim() else 0
            raise InvalidArgument(f"layer {number} holds a batch of {batch}; a cache of one sequence is kept")
        found = str(layer.keys.dtype).removeprefix("torch.")
        if found != family.dtype:
            raise InvalidArgument(f"layer {number} holds {found}, but the family says {family.dtype}")


def _tokens(token_ids: Any) -> NDArray[np.integer]:
    """One row of token ids."""
    if isinstance(token_ids, torch.Tensor):
        token_ids = token_ids.detach().cpu().numpy()
    found = np.asarray(token_ids)
    if found.ndim == 2 and found.shape[0] == 1:
        found = found[0]
    if found.ndim != 1:
        raise InvalidArgument(f"token ids of shape {found.shape}; give those of one sequence")
    return found


def _state_keys(
    tokens: NDArray[np.integer], keys: Sequence[str], chunk_tokens: int, family: blockkv.Family, last: int
) -> list[tuple[int, str]]:
    """The keys of the snapshots after each number of tokens from the chunk that `last` ends in, ascending.

    A chunk's numbers are from one past its first token to its end.
    """
    number = (last - 1) // chunk_tokens
    before = keys[number - 1] if number else f"{family.name}/{chunk_tokens}"
    state = hashlib.blake2b(before.encode(), digest_size=32, person=b"blockkv state")
    found = []
    for position, token in enumerate(tokens[number * chunk_tokens : last].astype("<u4"), 1):
        state.update(token.tobytes())
        found.append((number * chunk_tokens + position, f"{family.name}/s{state.hexdigest()}"))
    return found


# -- saving ------------------------------------------------------------------------------------------------


def _put(
    store: blockkv.Store,
    layers: Sequence[tuple[int, Any]],
    chunks: Sequence[tuple[str, int]],
    state_key: str | None,
    chunk_tokens: int,
    count: int,
) -> None:
    def described() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        for key, number in chunks:
            if not store.contains(key):
                yield key, _rows(layers, number * chunk_tokens, (number + 1) * chunk_tokens)
        if state_key is not None and not store.contains(state_key):
            yield state_key, _state(layers, count - count % chunk_tokens, count)

    batch: list[tuple[str, dict[str, torch.Tensor]]] = []
    staged = 0
    problems: list[BlockKVError] = []
    for key, tensors in described():
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
            staged += sum(tensor.nbytes for tensor in tensors.values())
        batch.append((key, tensors))
        if staged >= STAGED_BYTES:
            problems += _put_batch(store, batch)
            batch, staged = [], 0
    problems += _put_batch(store, batch)
    if problems:
        log.warning("%d chunks of a KV cache were not stored: %s", len(problems), problems[0])


def _put_batch(store: blockkv.Store, batch: Sequence[Any]) -> list[BlockKVError]:
    try:
        if batch:
            store.put_many(batch)
    except BatchError as error:
        return list(error.errors.values())
    return []


def _rows(layers: Sequence[tuple[int, Any]], first: int, end: int) -> dict[str, torch.Tensor]:
    """The keys and values of tokens [first, end) in the layers that have all."""
    found = {}
    for number, layer in layers:
        if FULL in _kinds(layer) and layer.is_initialized:
            found[f"{number}.keys"] = layer.keys.detach()[0, :, first:end]
            found[f"{number}.values"] = layer.values.detach()[0, :, first:end]
    return found


def _state(layers: Sequence[tuple[int, Any]], first: int, count: int) -> dict[str, torch.Tensor]:
    """What is left of a cache of `count` tokens when whole chunks, up to `first`, lie by themselves."""
    found = _rows(layers, first, count) if first < count else {}
    for number, layer in layers:
        kinds = _kinds(layer)
        if SLIDING in kinds and layer.is_initialized:
            held = min(count, layer.keys.shape[2])
            if not _is_static(layer):
                held = min(held, max(1, layer.sliding_window - 1))
                rows = slice(layer.keys.shape[2] - held, None)
            else:
                rows = slice(0, held)
            found[f"{number}.keys"] = layer.keys.detach()[0, :, rows]
            found[f"{number}.values"] = layer.values.detach()[0, :, rows]
        if LINEAR in kinds:
            for name, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                if not isinstance(states, Mapping):
                    raise InvalidArgument(
                        f"layer {number} keeps its {name} state as a {type(states).__name__}; from 5.19 on "
                        "transformers has it by number, as is needed here"
                    )
                found |= {
                    f"{number}.{name}.{index}": tensor.detach()
                    for index, tensor in states.items()
                    if tensor is not None
                }
    return found


# -- restoring ---------------------------------------------------------------------------------------------


class _Restore:
    """One restore: which chunks, into which memory."""

    def __init__(
        self,
        store: blockkv.Store,
        layers: Sequence[tuple[int, Any]],
        family: blockkv.Family,
        chunk_tokens: int,
        device: Any,
    ) -> None:
        self._store = store
        self._layers = layers
        self._family = family
        self._chunk_tokens = chunk_tokens
        alike = isinstance(device, (str, int, torch.device))
        self._devices = {number: torch.device(device if alike else device[number]) for number, _ in layers}
        self._kinds = {kind for _, layer in layers for kind in _kinds(layer)}

    def run(self, tokens: NDArray[np.integer], keys: Sequence[str]) -> int:
        """Fill the layers; how many tokens they hold then."""
        if self._kinds & {SLIDING, LINEAR}:
            for _ in range(ATTEMPTS):
                found = self._find_state(tokens, keys)
                if found is None:
                    return 0
                if self._load_state(*found, keys):
                    return found[0]
            return 0
        return self._load_chunks(keys)

    # Caches that can be cut anywhere

    def _load_chunks(self, keys: Sequence[str]) -> int:
        found = self._store.lookup(keys)
        shapes = self._shapes(keys[0], self._chunk_tokens) if found else None
        if shapes is None:
            return 0
        memory = self._memory(shapes, found * self._chunk_tokens)
        outs = [self._at(memory, number) for number in range(found)]
        filled = self._get(keys[:found], outs)
        valid = next((number for number, hit in enumerate(filled) if not hit), found)
        _clear(outs[valid:])
        self._hand_over(memory, valid * self._chunk_tokens)
        return valid * self._chunk_tokens

    # Caches with a snapshot

    def _find_state(self, tokens: NDArray[np.integer], keys: Sequence[str]) -> tuple[int, str] | None:
        """The longest prefix that has its snapshot and, where layers have all tokens, its chunks."""
        size = self._chunk_tokens
        last = len(tokens)
        if FULL in self._kinds:
            last = min(last, (self._store.lookup(keys) + 1) * size - 1)
        while last > 0:
            positions = _state_keys(tokens, keys, size, self._family, last)
            for position, key in reversed(positions):
                if self._store.contains(key):
                    return position, key
            last = positions[0][0] - 1
        return None

    def _load_state(self, count: int, state_key: str, keys: Sequence[str]) -> bool:
        size = self._chunk_tokens
        whole = count // size if FULL in self._kinds else 0
        if (entry := self._store.entry(state_key)) is None:
            return False
        state = {spec.name: torch.empty(spec.shape, dtype=_dtype(spec.dtype)) for spec in entry.layout.specs}
        memory: dict[str, torch.Tensor] = {}
        outs: list[dict[str, torch.Tensor]] = []
        if FULL in self._kinds:
            shapes = self._shapes(keys[0], size) if whole else self._full_shapes(state)
            if shapes is None:
                return False
            memory = self._memory(shapes, count)
            outs = [self._at(memory, number) for number in range(whole)]
            tail = slice(whole * size, count)
            state |= {name: rows[:, tail] for name, rows in memory.items() if count % size}
        filled = all(self._get([*keys[:whole], state_key], [*outs, state]))
        if not filled or not self._fits(state, count):
            _clear([*outs, state])
            return False
        self._hand_over(memory, count)
        self._hand_over_state(state, count)
        return True

    def _full_shapes(self, state: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, ...]] | None:
        shapes = {}
        for number, layer in self._layers:
            for name in (f"{number}.keys", f"{number}.values"):
                if FULL in _kinds(layer) and name in state:
                    heads, _, dim = state[name].shape
                    shapes[name] = (state[name].dtype, heads, dim)
        return shapes or None

    def _fits(self, state: Mapping[str, torch.Tensor], count: int) -> bool:
        """Whether a snapshot has what the layers need: its window may be of a shorter static cache."""
        for number, layer in self._layers:
            if SLIDING in _kinds(layer) and f"{number}.keys" in state:
                held = state[f"{number}.keys"].shape[1]
                if held < min(count, self._window(layer) - 1):
                    return False
        return True

    @staticmethod
    def _window(layer: Any) -> int:
        return int(layer.max_cache_len if _is_static(layer) else layer.sliding_window)

    # Memory

    def _shapes(self, key: str, tokens: int) -> dict[str, tuple[Any, ...]] | None:
        """By name (dtype, heads, dimension) of what a chunk holds, or None where it is not for this cache."""
        entry = self._store.entry(key)
        if entry is None:
            return None
        shapes = {}
        names = {f"{number}." for number, layer in self._layers if FULL in _kinds(layer)}
        for spec in entry.layout.specs:
            known = spec.name.removesuffix("keys").removesuffix("values") in names
            if not known or len(spec.shape) != 3 or spec.shape[1] != tokens:
                log.warning("a stored chunk holds %s %s: not for this cache", spec.name, spec.shape)
                return None
            shapes[spec.name] = (_dtype(spec.dtype), spec.shape[0], spec.shape[2])
        return shapes

    def _memory(self, shapes: Mapping[str, tuple[Any, ...]], tokens: int) -> dict[str, torch.Tensor]:
        """For each name a tensor (heads, tokens, dimension) that the device can write to.

        Of a static cache on the CPU it is the layer's own; otherwise rows begin where direct I/O may.
        """
        memory: dict[str, torch.Tensor] = {}
        room = -(-tokens // self._chunk_tokens) * self._chunk_tokens
        for number, layer in self._layers:
            names = [name for name in (f"{number}.keys", f"{number}.values") if name in shapes]
            if not names:
                continue
            if _is_static(layer):
                self._initialize(number, layer, *(shapes[name] for name in names))
            if _is_static(layer) and layer.keys.device.type == "cpu":
                memory |= {names[0]: layer.keys[0], names[1]: layer.values[0]}
                continue
            for name in names:
                dtype, heads, dim = shapes[name]
                memory[name] = blockkv.empty((heads, room, dim), dtype)
        return memory

    def _at(self, memory: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        first = number * self._chunk_tokens
        return {name: rows[:, first : first + self._chunk_tokens] for name, rows in memory.items()}

    def _get(self, keys: Sequence[str], outs: Sequence[Mapping[str, torch.Tensor]]) -> list[bool]:
        try:
            return self._store.get_many(keys, outs)
        except BatchError as error:
            log.warning("a stored KV cache ends early: %s", error)
            return [one is True for one in error.results]

    def _initialize(self, number: int, layer: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        if not layer.is_initialized:
            fakes = [
                torch.empty((1, heads, 0, dim), dtype=dtype, device=self._devices[number])
                for dtype, heads, dim in (keys, values)
            ]
            layer.lazy_initialization(*fakes)

    def _hand_over(self, memory: Mapping[str, torch.Tensor], count: int) -> None:
        """Make what was read the layers' own."""
        for number, layer in self._layers:
            if FULL not in _kinds(layer) or f"{number}.keys" not in memory or not count:
                continue
            keys, values = (memory[f"{number}.{name}"][None, :, :count] for name in ("keys", "values"))
            if _is_static(layer):
                with torch.inference_mode():
                    if layer.keys.device.type != "cpu":
                        layer.keys[:, :, :count].copy_(keys)
                        layer.values[:, :, :count].copy_(values)
                    layer.cumulative_length.fill_(count)
            else:
                device = self._devices[number]
                keys, values = keys.to(device), values.to(device)
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values

    def _hand_over_state(self, state: Mapping[str, torch.Tensor], count: int) -> None:
        for number, layer in self._layers:
            if SLIDING in _kinds(layer) and f"{number}.keys" in state:
                self._slide(
                    number, layer, state[f"{number}.keys"][None], state[f"{number}.values"][None], count
                )
            if LINEAR in _kinds(layer):
                for name, tensor in state.items():
                    prefix, _, index = name.rpartition(".")
                    if prefix == f"{number}.conv":
                        layer.update_conv_state(tensor.to(self._devices[number]), int(index))
                        layer.has_previous_state[int(index)] = True
                    elif prefix == f"{number}.recurrent":
                        layer.update_recurrent_state(tensor.to(self._devices[number]), int(index))
                        layer.has_previous_state[int(index)] = True

    def _slide(self, number: int, layer: Any, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
        """Put a window at the end of `count` tokens into a layer."""
        window = self._window(layer)
        if not _is_static(layer):
            first = max(0, keys.shape[2] - min(count, max(1, window - 1)))
            device = self._devices[number]
            keys, values = keys[:, :, first:].to(device), values[:, :, first:].to(device)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, count
            return
        self._initialize(number, layer, *((one.dtype, one.shape[1], one.shape[3]) for one in (keys, values)))
        held = min(count, window, keys.shape[2])
        # A full window's oldest token leaves before anything is attended to, so it need not be there.
        end = min(count, window)
        with torch.inference_mode():
            for target, source in ((layer.keys, keys), (layer.values, values)):
                target[:, :, end - held : end].copy_(source[:, :, keys.shape[2] - held :])
            layer.cumulative_length.fill_(end)
        layer.cumulative_length_int = count


def _clear(outs: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Attention masks what is not there, but 0 times what a failed read left may be no number."""
    with torch.inference_mode():  # in which a layer's own memory may have been made
        for out in outs:
            for rows in out.values():
                rows.zero_()


def _dtype(name: str) -> torch.dtype:
    """The dtype of that name. Not by `getattr`: names come from a device, and torch imports some."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise LayoutMismatch(f"this torch has no dtype {name!r}")
    return found


def _tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    try:
        plain: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return xxhash.xxh3_128_digest(plain)
    except (RuntimeError, TypeError) as error:  # sparse, quantized, subclasses: torch has no one way
        kind = type(tensor).__name__
        raise InvalidArgument(f"{name}, a {kind}, has no plain bytes; give weights=") from error
