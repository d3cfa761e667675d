"""Sizes of KV caches, and from when on loading one pays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockkv.errors import InvalidArgument
from blockkv.kv_size import KVSize, LoadTime, fit

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 7168,
    "torch_dtype": "bfloat16",
}
GEMMA = {
    "text_config": {
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "dtype": "bfloat16",
    }
}


@pytest.mark.parametrize(
    ("config", "bytes_per_token", "prefill_tokens_per_s", "gb_per_s"),
    [
        (LLAMA_8B, 131_072, 15_000, 1.97),
        (LLAMA_70B, 327_680, 2_000, 0.66),
        (DEEPSEEK_V3, 70_272, 8_000, 0.56),
    ],
)
def test_break_even_of_models_that_were_measured(
    config: dict[str, Any], bytes_per_token: int, prefill_tokens_per_s: float, gb_per_s: float
) -> None:
    """Rates as published with py-kvcache and by the models' makers."""
    size = KVSize.of_config(config)
    assert size.bytes_per_token == bytes_per_token
    assert round(size.break_even_bytes_per_s(prefill_tokens_per_s) / 1e9, 2) == gb_per_s


@pytest.mark.parametrize(
    ("config", "tokens", "gib"),
    [(LLAMA_8B, 32768, 4), (LLAMA_8B, 131072, 16), (LLAMA_70B, 32768, 10), (LLAMA_70B, 131072, 40)],
)
def test_sizes_people_have(config: dict[str, Any], tokens: int, gib: int) -> None:
    assert KVSize.of_config(config).size_bytes(tokens) == gib << 30


def test_numbers_say_the_same_as_a_configuration() -> None:
    assert KVSize.of_heads(32, 8, 128).bytes_per_token == KVSize.of_config(LLAMA_8B).bytes_per_token
    assert KVSize.of_config(LLAMA_8B, "fp8").bytes_per_token == 65_536


def test_all_heads_keep_kv_where_nothing_else_is_said() -> None:
    config = {name: value for name, value in LLAMA_8B.items() if name != "num_key_value_heads"}
    assert KVSize.of_config(config).bytes_per_token == 4 * 131_072


def test_windows_keep_their_last_tokens() -> None:
    size = KVSize.of_config(GEMMA)
    token = 2 * 4 * 256 * 2
    assert size.size_bytes(1000) == 12 * token * 1000
    assert size.size_bytes(100_000) == 2 * token * 100_000 + 10 * token * 1024
    listed = {
        **GEMMA["text_config"],
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    }
    assert KVSize.of_config(listed) == size


def test_windows_that_are_switched_off_or_only_above_some_layer() -> None:
    config = {**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}
    assert KVSize.of_config(config) == KVSize.of_config(LLAMA_8B)
    config |= {"use_sliding_window": True, "max_window_layers": 24}
    assert [group.layers for group in KVSize.of_config(config).groups] == [24, 8]
    assert [group.window_tokens for group in KVSize.of_config(config).groups] == [None, 4096]
    mistral = {**LLAMA_8B, "sliding_window": 4096}
    assert [group.window_tokens for group in KVSize.of_config(mistral).groups] == [4096]


def test_layers_with_a_state_keep_no_tokens() -> None:
    hybrid = {**LLAMA_8B, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}
    size = KVSize.of_config(hybrid)
    assert (size.bytes_per_token, size.state_layers) == (131_072 // 4, 24)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({**LLAMA_8B, "torch_dtype": "float7"}, "float7"),
        ({**LLAMA_8B, "num_hidden_layers": "two"}, "num_hidden_layers"),
        ({**LLAMA_8B, "layer_types": ["mamba"] * 32}, "no layer"),
        ({**LLAMA_8B, "layer_types": ["sliding_attention"] * 32}, "sliding_window"),
    ],
)
def test_what_cannot_be_told_is_named(config: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        KVSize.of_config(config)


@given(
    st.sampled_from([LLAMA_8B, DEEPSEEK_V3, GEMMA]),
    st.floats(0, 1),
    st.floats(0.1, 20),
    st.floats(500, 50_000),
)
def test_the_break_even_context_is_the_shortest_that_pays(
    config: dict[str, Any], request_s: float, gb_per_s: float, prefill_tokens_per_s: float
) -> None:
    size, load = KVSize.of_config(config), LoadTime(request_s, 1 / (gb_per_s * 1e9))

    def pays(tokens: int) -> bool:
        return load.of(size.size_bytes(tokens)) < tokens / prefill_tokens_per_s

    found = size.break_even_tokens(load, prefill_tokens_per_s)
    if found is None:
        assert not any(map(pays, (1, 100, 10_000, 1_000_000)))
    else:
        assert pays(found + 1)
        assert found < 3 or not pays(found - 2)


@given(st.floats(1e-5, 1), st.floats(0.1, 20))
def test_a_line_is_found_again(request_s: float, gb_per_s: float) -> None:
    load = LoadTime(request_s, 1 / (gb_per_s * 1e9))
    samples = [(size, load.of(size)) for size in (1 << 20, 1 << 22, 1 << 24, 1 << 26)]
    found = fit(samples)
    assert found.of(1 << 25) == pytest.approx(load.of(1 << 25), rel=1e-6)


def test_no_part_of_a_line_is_negative() -> None:
    found = fit([(1 << 20, 1e-4), (1 << 24, 1e-2)])
    assert found.seconds == 0
    assert found.seconds_per_byte > 0


@pytest.mark.parametrize(
    "samples", [[], [(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 2.0), (2, 1.0)], [(1, 0.0), (2, 1.0)]]
)
def test_what_gives_no_line_is_refused(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(InvalidArgument):
        fit(samples)


def test_a_rate_is_above_zero() -> None:
    size = KVSize.of_config(LLAMA_8B)
    with pytest.raises(InvalidArgument):
        size.break_even_bytes_per_s(0)
    with pytest.raises(InvalidArgument):
        size.break_even_tokens(LoadTime(0, 1e-9), -1)
