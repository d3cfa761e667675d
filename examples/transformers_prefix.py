#!/usr/bin/env python3
"""A long prompt that a transformers model reads once, and any later process only loads.

    examples/transformers_prefix.py                              a small model, a store in a temporary file
    examples/transformers_prefix.py --device /dev/nvme0n1p4 --model meta-llama/Llama-3.1-8B

A `--device` that holds no store is formatted; one that holds anything else is refused.

Two questions are asked about one long text. The first computes the text's KV cache and saves it; for the
second, `load_prefix` gives `generate` a cache that holds the text already. Both are asked again without a
store: the answers are the same, token for token. Run it again with the same device, and the first question
finds the text as well.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import blockkv
from blockkv.connectors.transformers import load_prefix, model_family, save_cache
from blockkv.errors import DeviceTooSmall, NotFormatted

TEXT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 2400, 24, 16


def small_model() -> Any:
    """A Llama of random weights: what matters is that they are the same each time."""
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def answer(model: Any, tokens: torch.Tensor, cache: Any) -> Any:
    """Go on from `cache`, which holds a prefix of `tokens`, shape (1, tokens), or nothing."""
    return model.generate(
        input_ids=tokens,
        cache=cache,
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
    )


def ask(store: blockkv.Store, model: Any, family: blockkv.Family, tokens: torch.Tensor) -> list[int]:
    """The answer, with as much from the store as there is; the rest is saved for whoever asks next."""
    begin = time.perf_counter()
    cache, held = load_prefix(store, tokens, family, config=model.config)
    output = answer(model, tokens, cache)
    seconds = time.perf_counter() - begin
    stored = save_cache(store, output.cache, output.sequences, family)
    print(f"{held} of {tokens.shape[1]} tokens from the store, {seconds:.3f} s, {stored} tokens in it now")
    return output.sequences[0, tokens.shape[1] :].tolist()


def main() -> None:
    """Ask both questions, with and without the store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=Path, help="a partition, a namespace or a file; default: temporary")
    parser.add_argument("--model", help="a name or a directory for from_pretrained; default: a small one")
    arguments = parser.parse_args()
    model = (
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
        if arguments.model
        else small_model()
    )
    model.eval()
    family = model_family(model)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(model.config.vocab_size, (1, TEXT_TOKENS), generator=generator)
    questions = torch.randint(model.config.vocab_size, (2, QUESTION_TOKENS), generator=generator)
    prompts = [torch.cat([text, question[None]], 1) for question in questions]
    with contextlib.ExitStack() as stack:
        device = arguments.device
        if device is None:
            device = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kv.img"
            blockkv.format(device, size="256MiB")
        try:
            store = stack.enter_context(blockkv.open(device))
        except (NotFormatted, DeviceTooSmall):
            blockkv.format(device)
            store = stack.enter_context(blockkv.open(device))
        with torch.inference_mode():
            from_store = [ask(store, model, family, prompt) for prompt in prompts]
            computed = [
                answer(model, prompt, DynamicCache(config=model.config))
                .sequences[0, prompt.shape[1] :]
                .tolist()
                for prompt in prompts
            ]
    assert from_store == computed, "the same answers"
    print("without a store the answers are the same")


if __name__ == "__main__":
    main()
