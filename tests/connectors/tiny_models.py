"""Models of a few layers, built from a seed: one of each kind of cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY_COUNT = 300
WINDOW_TOKENS = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_COUNT,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # else random weights give logits that hardly differ
}


def build(name: str, seed: int = 3, **changes: Any) -> Any:
    """A model in evaluation mode. `llama` has all tokens in all layers, `gemma` windows in two of three,
    `lfm` convolutions in every other, `qwen` recurrent states in three of four.
    """
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaForCausalLM, LlamaConfig, {"num_hidden_layers": 3, "head_dim": 64}),
        "gemma": (
            Gemma3ForCausalLM,
            Gemma3TextConfig,
            {
                "num_hidden_layers": 3,
                "head_dim": 32,
                "sliding_window": WINDOW_TOKENS,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
        ),
        "lfm": (
            Lfm2ForCausalLM,
            Lfm2Config,
            {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
        ),
        "qwen": (
            Qwen3NextForCausalLM,
            Qwen3NextConfig,
            {
                "num_hidden_layers": 4,
                "head_dim": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 32,
                "linear_value_head_dim": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
            },
        ),
    }
    model_class, config_class, own = classes[name]
    torch.manual_seed(seed)
    config = config_class(**{**COMMON, **own, "eos_token_id": None, "bos_token_id": None, **changes})
    return model_class(config).eval()


def prompt(count: int, seed: int = 5) -> torch.Tensor:
    """Token ids, shape (1, count)."""
    return torch.randint(0, VOCABULARY_COUNT, (1, count), generator=torch.Generator().manual_seed(seed))
