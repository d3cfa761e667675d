"""How big a model's KV cache is, how long it takes to load, and from when on that beats computing it.

A cache is groups of layers that keep the same: full attention keeps every token, a sliding window its last
few, multi-head latent attention (MLA) one latent vector a token in place of K and V.

Loading `bytes` takes `seconds + seconds_per_byte x bytes` (`LoadTime`, measured by `blockkv calibrate`);
computing `tokens` takes `tokens / prefill rate`. In the ratio of the two the length of the context cancels,
but for the seconds that every request costs.

Not here: measuring (`blockkv.bench.calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockkv.errors import InvalidArgument

__all__ = ["KVGroup", "KVSize", "LoadTime", "fit"]

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
}
"""Bytes of a value; scales of quantised ones, a few per cent, are left out."""

STATE_LAYERS = frozenset(("linear_attention", "mamba", "ssm", "recurrent", "conv"))
"""Layer types that keep a state of fixed size and no tokens."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same of each token."""

    what: str
    layers: int
    bytes_per_token: int
    """Of all these layers together."""
    window_tokens: int | None = None
    """Tokens kept at most; None: all."""

    def size_bytes(self, tokens: int) -> int:
        """Of a context of so many tokens."""
        return self.bytes_per_token * (
            tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        )


@dataclass(frozen=True, slots=True)
class LoadTime:
    """What loading takes: a fixed part for every request, and one in proportion to the bytes."""

    seconds: float
    seconds_per_byte: float

    def of(self, size_bytes: float) -> float:
        """Seconds to load so many bytes with one request."""
        return self.seconds + self.seconds_per_byte * size_bytes

    @property
    def bytes_per_s(self) -> float:
        """What the rate of one long request comes to."""
        return 1 / self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class KVSize:
    """The KV cache of a model."""

    groups: tuple[KVGroup, ...]
    state_layers: int = 0
    """Layers that keep a state of fixed size, which is not counted."""

    @classmethod
    def of_heads(cls, layers: int, kv_heads: int, head_dim: int, dtype: str = "float16") -> KVSize:
        """A model that keeps K and V of so many heads in every layer. Raises InvalidArgument."""
        return cls((_heads("full attention", layers, kv_heads, head_dim, dtype, None),))

    @classmethod
    def of_config(cls, config: Mapping[str, Any], dtype: str | None = None) -> KVSize:
        """A model by its Hugging Face `config.json`; `dtype` where the cache has another than the weights.

        Knows grouped-query attention, MLA (`kv_lora_rank`), sliding windows (`layer_types`,
        `sliding_window_pattern`, `max_window_layers`) and layers with a state. Raises InvalidArgument, naming
        what is missing.
        """
        config = config.get("text_config", config)
        layers = _whole(config, "num_hidden_layers")
        kept = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        kept = kept.removeprefix("torch.")
        types = _layer_types(config, layers)
        window = config.get("sliding_window") or config.get("attention_chunk_size")
        counts: dict[str, int] = {}
        for one in types:
            counts[one] = counts.get(one, 0) + 1
        groups = []
        for one, count in counts.items():
            windowed = one not in ("full_attention", "attention")
            if one in STATE_LAYERS:
                continue
            limit = _whole({"sliding_window": window}, "sliding_window") if windowed else None
            groups.append(_attention(config, count, kept, limit))
        if not groups:
            raise InvalidArgument("the configuration has no layer that keeps K and V")
        return cls(tuple(groups), sum(count for one, count in counts.items() if one in STATE_LAYERS))

    @property
    def bytes_per_token(self) -> int:
        """Of a token that every layer keeps."""
        return sum(group.bytes_per_token for group in self.groups)

    def size_bytes(self, tokens: int) -> int:
        """Of a context of so many tokens."""
        return sum(group.size_bytes(tokens) for group in self.groups)

    def break_even_bytes_per_s(self, prefill_tokens_per_s: float, tokens: int | None = None) -> float:
        """The rate from which on loading is quicker than computing, but for the fixed part.

        Of a token that every layer keeps, or of a whole context of so many: windows make it less.
        """
        if not prefill_tokens_per_s > 0:
            raise InvalidArgument(f"the prefill rate is {prefill_tokens_per_s}; use tokens a second, above 0")
        each = self.bytes_per_token if tokens is None else self.size_bytes(tokens) / tokens
        return each * prefill_tokens_per_s

    def break_even_tokens(self, load: LoadTime, prefill_tokens_per_s: float) -> int | None:
        """The shortest context that is loaded sooner than computed; None where no length is."""
        if not prefill_tokens_per_s > 0:
            raise InvalidArgument(f"the prefill rate is {prefill_tokens_per_s}; use tokens a second, above 0")
        ends = sorted({group.window_tokens for group in self.groups if group.window_tokens} | {0})
        for start, end in zip(ends, [*ends[1:], math.inf], strict=True):
            growing = sum(
                group.bytes_per_token
                for group in self.groups
                if group.window_tokens is None or group.window_tokens > start
            )
            gain_s = 1 / prefill_tokens_per_s - load.seconds_per_byte * growing
            debt_s = load.of(self.size_bytes(start)) - start / prefill_tokens_per_s
            if debt_s < 0 and start:
                return start
            if gain_s > 0 and start + debt_s / gain_s < end:
                return start + math.floor(debt_s / gain_s) + 1
        return None


def fit(samples: Sequence[tuple[int, float]]) -> LoadTime:
    """The line through (bytes, seconds) with the least squares of relative errors, neither part below 0.

    Raises InvalidArgument for samples of fewer than two sizes.
    """
    if len({size for size, _ in samples}) < 2 or any(seconds <= 0 for _, seconds in samples):
        raise InvalidArgument("a line takes samples of at least two sizes, each longer than 0 s")
    weights = [1 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, samples, strict=True)) / total
    mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, samples, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, samples, strict=True))
    slope = (
        sum(
            w * (size - mean_size) * (seconds - mean_s)
            for w, (size, seconds) in zip(weights, samples, strict=True)
        )
        / spread
    )
    if slope <= 0:
        raise InvalidArgument("more bytes did not take longer: the measurement says nothing")
    if mean_s - slope * mean_size < 0:
        slope = sum(w * size * seconds for w, (size, seconds) in zip(weights, samples, strict=True)) / sum(
            w * size**2 for w, (size, _) in zip(weights, samples, strict=True)
        )
        return LoadTime(0.0, slope)
    return LoadTime(mean_s - slope * mean_size, slope)


def _attention(config: Mapping[str, Any], layers: int, dtype: str, window: int | None) -> KVGroup:
    if config.get("kv_lora_rank"):
        values = _whole(config, "kv_lora_rank") + int(config.get("qk_rope_head_dim") or 0)
        return KVGroup("latent (MLA)", layers, _bytes(layers * values, dtype), window)
    query_heads = _whole(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or query_heads)
    head_dim = config.get("head_dim") or _whole(config, "hidden_size") // query_heads
    what = "full attention" if window is None else "sliding window"
    return _heads(what, layers, kv_heads, int(head_dim), dtype, window)


def _heads(what: str, layers: int, kv_heads: int, head_dim: int, dtype: str, window: int | None) -> KVGroup:
    if min(layers, kv_heads, head_dim) < 1:
        raise InvalidArgument(
            f"{layers} layers of {kv_heads} KV heads of {head_dim}: give at least 1 of each"
        )
    return KVGroup(what, layers, _bytes(2 * layers * kv_heads * head_dim, dtype), window)


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """What each layer is, in the words of `layer_types`."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    pattern = int(config.get("sliding_window_pattern") or 0)
    if pattern:
        return [
            "full_attention" if (number + 1) % pattern == 0 else "sliding_attention"
            for number in range(layers)
        ]
    full = int(config.get("max_window_layers") or 0) if config.get("use_sliding_window") else 0
    full = min(full, layers)
    return ["full_attention"] * full + ["sliding_attention"] * (layers - full)


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"the configuration says {name} = {value!r}; a whole number above 0 is needed")
    return value


def _bytes(values: int, dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise InvalidArgument(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
    return math.ceil(values * DTYPE_BYTES[dtype])
