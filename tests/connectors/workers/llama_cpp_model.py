"""Tiny models with random weights, in files as llama.cpp reads them. In the Python that has `gguf`."""

from __future__ import annotations

import sys

import gguf
import numpy as np

VOCABULARY = 512
WIDTH = 128


class _Weights:
    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._random = np.random.default_rng(seed)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        values = self._random.standard_normal((rows, columns), np.float32) * 0.3
        self._writer.add_tensor(f"{name}.weight", values)

    def vector(self, name: str, size: int, *, centre: float = 1.0, suffix: str = ".weight") -> None:
        values = centre + self._random.standard_normal(size, np.float32) * 0.1
        self._writer.add_tensor(f"{name}{suffix}", values.astype(np.float32))


def make(path: str, architecture: str = "llama", seed: int = 1, layers: int = 4, heads: int = 2) -> None:
    """`architecture`: llama, gemma3 (windows of 64 tokens in five layers of six), mamba (recurrent)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.matrix("token_embd", VOCABULARY, WIDTH)
    weights.vector("output_norm", WIDTH)
    if architecture == "mamba":
        _mamba(writer, weights, layers)
    else:
        _attention(writer, weights, architecture, layers, heads)
    _tokens(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _attention(
    writer: gguf.GGUFWriter, weights: _Weights, architecture: str, layers: int, heads: int
) -> None:
    head, inner = 64, 256
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    is_sliding = architecture == "gemma3"
    if is_sliding:
        writer.add_sliding_window(64)
    else:
        writer.add_rope_dimension_count(head)
        weights.matrix("output", VOCABULARY, WIDTH)
    for layer in range(layers):
        name = f"blk.{layer}"
        weights.vector(f"{name}.attn_norm", WIDTH)
        for part in ("attn_q", "attn_k", "attn_v"):
            weights.matrix(f"{name}.{part}", heads * head, WIDTH)
        weights.matrix(f"{name}.attn_output", WIDTH, heads * head)
        weights.vector(f"{name}.ffn_norm", WIDTH)
        weights.matrix(f"{name}.ffn_gate", inner, WIDTH)
        weights.matrix(f"{name}.ffn_up", inner, WIDTH)
        weights.matrix(f"{name}.ffn_down", WIDTH, inner)
        if is_sliding:
            for part in ("attn_q_norm", "attn_k_norm"):
                weights.vector(f"{name}.{part}", head)
            for part in ("post_attention_norm", "post_ffw_norm"):
                weights.vector(f"{name}.{part}", WIDTH)


def _mamba(writer: gguf.GGUFWriter, weights: _Weights, layers: int) -> None:
    inner, state, rank, kernel = 2 * WIDTH, 16, 8, 4
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    for layer in range(layers):
        name = f"blk.{layer}"
        weights.vector(f"{name}.attn_norm", WIDTH)
        weights.matrix(f"{name}.ssm_in", 2 * inner, WIDTH)
        weights.matrix(f"{name}.ssm_conv1d", inner, kernel)
        weights.vector(f"{name}.ssm_conv1d", inner, centre=0.0, suffix=".bias")
        weights.matrix(f"{name}.ssm_x", rank + 2 * state, inner)
        weights.matrix(f"{name}.ssm_dt", inner, rank)
        weights.vector(f"{name}.ssm_dt", inner, centre=0.0, suffix=".bias")
        writer.add_tensor(f"{name}.ssm_a", -np.ones((inner, state), np.float32))
        writer.add_tensor(f"{name}.ssm_d", np.ones(inner, np.float32))
        weights.matrix(f"{name}.ssm_out", WIDTH, inner)


def _tokens(writer: gguf.GGUFWriter) -> None:
    """A vocabulary of bytes, and words that no text has."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    more = VOCABULARY - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"~{number}~" for number in range(more))])
    writer.add_token_scores([0.0] * len(tokens) + [-1e6] * more)
    writer.add_token_types([*map(int, types), *[int(kinds.NORMAL)] * more])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


if __name__ == "__main__":
    make(sys.argv[1], *sys.argv[2:3], *map(int, sys.argv[3:]))
    print("{}")
