"""One of two processes that share the KV cache of models: `save` or `load`, and an image.

Prints a line of JSON: for each kind of model and of cache how many tokens were stored or found, and what the
model made of the rest.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

import blockkv
from blockkv.connectors.transformers import load_prefix, model_family, save_cache

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import build, prompt

CHUNK_TOKENS = 64
PROMPT_TOKENS, SAVED_TOKENS, GENERATED_TOKENS = 700, 600, 12


def main(role: str, image: str) -> None:
    """Do the same for all of them."""
    torch.set_num_threads(1)
    with torch.inference_mode(), blockkv.open(image) as store:
        done = {
            f"{name}, {kind}": run(store, role, name, kind)
            for name in ("llama", "gemma", "lfm", "qwen")
            for kind in ("dynamic", "static")
        }
    print(json.dumps(done))


def run(store: blockkv.Store, role: str, name: str, kind: str) -> dict[str, Any]:
    """Save a prefix or find it, and go on from there."""
    model = build(name)
    tokens = prompt(PROMPT_TOKENS)
    family = model_family(model, salt=kind)  # each finds its own
    empty = (
        DynamicCache(config=model.config)
        if kind == "dynamic"
        else StaticCache(config=model.config, max_cache_len=1024)
    )
    if role == "save":
        cache = empty
        whole = SAVED_TOKENS - SAVED_TOKENS % CHUNK_TOKENS if name == "llama" else SAVED_TOKENS
        model(input_ids=tokens[:, :whole], cache=cache, use_cache=True)
        count = save_cache(store, cache, tokens, family, chunk_tokens=CHUNK_TOKENS, durable=True)
    else:
        cache, count = load_prefix(store, tokens, family, cache=empty, chunk_tokens=CHUNK_TOKENS)
    # Both go on from there with the same calls: equal shapes pick equal kernels.
    logits = model(input_ids=tokens[:, count:-1], cache=cache, use_cache=True).logits
    ids = model.generate(input_ids=tokens, cache=cache, max_new_tokens=GENERATED_TOKENS, do_sample=False)
    raw = logits.contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "count": count,
        "logits": hashlib.blake2b(raw).hexdigest(),
        "tokens": ids[0, PROMPT_TOKENS:].tolist(),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
