"""A small Llama with a real KV geometry, built from a seed, and its cache cut into chunks.

The weights are random: what is shown is that stored KV bytes are exact, and that needs no trained model.
Geometry: 8 layers, 8 query heads on 2 KV heads (grouped-query attention), head dimension 128, float32:
16 KiB of KV a token, 4 MiB a 256-token chunk. Tokens are bytes.

Invariant: every forward pass is cut at the same token positions whether or not part of the prefix came
from the store. Equal shapes pick equal kernels, and only then are logits equal to the last bit.
Not here: keys (`blockkv.prefix`), processes (`blockkv.demo.worker`).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

WEIGHT_SEED = 20260219
VOCABULARY_COUNT = 256


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the model. Defaults: about 91 million parameters."""

    layers: int = 8
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    feed_forward: int = 2816
    max_tokens: int = 32768

    def chunk_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the KV of `tokens` tokens: (layers, K and V, KV heads, tokens, head dimension)."""
        return (self.layers, 2, self.kv_heads, tokens, self.head_dim)


class ByteLlama:
    """The model, ready to run. `digest` names its weights and configuration."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._config = LlamaConfig(
            vocab_size=VOCABULARY_COUNT,
            hidden_size=geometry.query_heads * geometry.head_dim,
            intermediate_size=geometry.feed_forward,
            num_hidden_layers=geometry.layers,
            num_attention_heads=geometry.query_heads,
            num_key_value_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            max_position_embeddings=geometry.max_tokens,
        )
        torch.manual_seed(WEIGHT_SEED)
        self._model: Any = LlamaForCausalLM(self._config)
        self._model.train(False)
        # transformers 5.23 renamed the argument; the old name still works there but warns.
        parameters = inspect.signature(type(self._model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.parameter_count = sum(parameter.numel() for parameter in self._model.parameters())
        self.digest = self._digest()

    def _digest(self) -> bytes:
        """BLAKE2b-256 over the geometry and every weight: KV of other weights must never be found."""
        state = hashlib.blake2b(repr(self.geometry).encode(), digest_size=32)
        for name, parameter in sorted(self._model.named_parameters()):
            state.update(name.encode())
            state.update(parameter.detach().contiguous().view(torch.uint8).numpy())
        return state.digest()

    def empty_cache(self) -> DynamicCache:
        """A cache without tokens."""
        return DynamicCache(config=self._config)

    def forward(self, token_ids: list[int], cache: DynamicCache) -> torch.Tensor:
        """Run `token_ids` after what `cache` holds, append their KV to it; logits of the last one, (256,)."""
        tokens = torch.tensor([token_ids], dtype=torch.long)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        with torch.inference_mode():
            output = self._model(input_ids=tokens, use_cache=True, logits_to_keep=1, **arguments)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def prefill(
        self, token_ids: list[int], cache: DynamicCache, start: int, chunk_tokens: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Prefill `token_ids[start:]` chunk by chunk; yields (first token, end, logits of the last token).

        `start` must be a multiple of `chunk_tokens` and the number of tokens in `cache`.
        """
        assert start % chunk_tokens == 0, "a restored prefix ends on a chunk"
        for first in range(start, len(token_ids), chunk_tokens):
            end = min(first + chunk_tokens, len(token_ids))
            yield first, end, self.forward(token_ids[first:end], cache)

    def extract(self, cache: DynamicCache, first: int, end: int, out: torch.Tensor) -> None:
        """Gather the KV of tokens [first, end) into `out`, of shape `geometry.chunk_shape(end - first)`."""
        held: Any
        for layer, held in enumerate(cache.layers):
            out[layer, 0].copy_(held.keys[0, :, first:end])
            out[layer, 1].copy_(held.values[0, :, first:end])

    def restore(self, chunks: torch.Tensor) -> DynamicCache:
        """A cache made of `chunks`, of shape (chunks, *geometry.chunk_shape(chunk tokens)), in order."""
        geometry = self.geometry
        tokens = chunks.shape[0] * chunks.shape[4]
        joined = chunks.permute(1, 2, 3, 0, 4, 5).reshape(geometry.chunk_shape(tokens))
        cache = self.empty_cache()
        for layer in range(geometry.layers):
            cache.update(joined[layer, 0].unsqueeze(0), joined[layer, 1].unsqueeze(0), layer)
        return cache


def tokenize(text: bytes) -> list[int]:
    """Token ids of `text`: its bytes."""
    return list(text)
