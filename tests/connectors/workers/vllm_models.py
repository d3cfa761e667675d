"""Tiny models for vLLM, made on the spot: random weights from a seed, no tokenizer, no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}


def llama() -> Any:
    """Four layers of full attention: one KV group."""
    return transformers.LlamaConfig(num_hidden_layers=4, **COMMON)


def hybrid() -> Any:
    """Sliding and full attention, two to one: several KV groups."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return transformers.Gemma3TextConfig(
        num_hidden_layers=6, layer_types=kinds, sliding_window=64, query_pre_attn_scalar=64, **COMMON
    )


def make(kind: str, directory: Path, seed: int = 0) -> Path:
    """Write it once."""
    path = directory / f"{kind}-{seed}"
    if not (path / "config.json").exists():
        torch.manual_seed(seed)
        config = {"llama": llama, "hybrid": hybrid}[kind]()
        config.architectures = [{"llama": "LlamaForCausalLM", "hybrid": "Gemma3ForCausalLM"}[kind]]
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(path)
    return path
