#!/usr/bin/env python3
"""Completions with llama-cpp-python that go on from what an earlier process has computed.

    examples/llama_cpp_cache.py model.gguf /dev/nvme1n1 "Once upon a time ..."

Run it twice: the second time the prompt is read from the store instead of being computed. The device, or a
file made with `truncate -s 1G kv.img`, is formatted if it is blank; one that holds anything is refused.
"""

from __future__ import annotations

import argparse
import time

import llama_cpp

from blockkv.connectors.llama_cpp import BlockKVCache, sharing_context


def main() -> None:
    parser = argparse.ArgumentParser(description="complete a prompt, with its KV cache in a store")
    parser.add_argument("model")
    parser.add_argument("device")
    parser.add_argument("prompt")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    with sharing_context():
        llama = llama_cpp.Llama(arguments.model, n_ctx=arguments.context_tokens, verbose=False)
    with BlockKVCache(llama, device=arguments.device, format=True) as cache:
        cache.attach()
        begun = time.monotonic()
        answer = llama.create_completion(arguments.prompt, max_tokens=arguments.max_tokens, temperature=0.0)
        seconds = time.monotonic() - begun
        stats = cache.stats()
    print(answer["choices"][0]["text"])
    print(
        f"{stats['tokens_loaded']} of {answer['usage']['prompt_tokens']} tokens of the prompt came from the "
        f"store, {stats['chunks_saved']} chunks were written; {seconds:.2f} s"
    )


if __name__ == "__main__":
    main()
