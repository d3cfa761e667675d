"""Runs llama.cpp on a store as told: a JSON list of runs in, a JSON list of what came of each out.

Every run makes a context of its own; see `run` for what it may be told.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import numpy as np

import blockkv
from blockkv.connectors.llama_cpp import (
    BlockKVCache,
    Context,
    Sequences,
    export_slot,
    fingerprint,
    import_slot,
    sharing_context,
    states,
)
from blockkv.errors import BlockKVError, InvalidArgument
from blockkv.testing import StallingDevice

GENERATED = 12


def tokens_of(told: dict[str, Any]) -> list[int]:
    """`count` random tokens; from `differs_from` on others than without it."""
    count, differs = told["count"], told.get("differs_from")
    tokens = np.random.default_rng(7).integers(3, 259, count)
    if differs is not None:
        tokens[differs:] = np.random.default_rng(8).integers(3, 259, count - differs)
    return [int(one) for one in tokens]


def llama_of(told: dict[str, Any], **options: Any) -> Any:
    base = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, "verbose": False}
    options = {**base, **told.get("llama", {}), **options}
    if told.get("sharing"):
        with sharing_context():
            return llama_cpp.Llama(told["model"], **options)
    return llama_cpp.Llama(told["model"], **options)


def evaluate(llama: Any, tokens: list[int], split: int) -> dict[str, Any]:
    """Evaluate what the context has not, in the same two pieces in any case, and some greedy tokens."""
    if llama.n_tokens < split:
        llama.eval(tokens[llama.n_tokens : split])
    llama.eval(tokens[max(split, llama.n_tokens) :])
    logits = llama.scores[split : llama.n_tokens]
    return {"logits": hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()}


def generate(llama: Any) -> list[int]:
    generated = []
    for _ in range(GENERATED):
        generated.append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
        llama.eval(generated[-1:])
    return generated


def with_sequences(told: dict[str, Any], store: Any) -> dict[str, Any]:
    llama = llama_of(told)
    sequences = Sequences(store, Context.of(llama), **told.get("options", {}))
    tokens = tokens_of(told)
    found: dict[str, Any] = {"form": sequences.form, "restored": 0}
    if told.get("load"):
        found["restored"] = sequences.load(tokens)
        llama.input_ids[: found["restored"]] = tokens[: found["restored"]]
        llama.n_tokens = found["restored"]
    found |= evaluate(llama, tokens, told["split"])
    if told.get("save"):
        found["saved"] = sequences.save(tokens)
    found["tokens"] = generate(llama)
    found["counters"] = dict(sequences.counters)
    found["stats"] = store.stats()
    llama.close()
    return found


def with_cache(told: dict[str, Any], store: Any) -> dict[str, Any]:
    """Completions of `prompts`, one after the other, each in a context of its own where `fresh`."""
    found: dict[str, Any] = {"completions": []}
    llama = llama_of(told, logits_all=False)
    cache = BlockKVCache(llama, store=store, **told.get("options", {}))
    for prompt in told["prompts"]:
        if told.get("fresh"):
            cache.close()
            llama.close()
            llama = llama_of(told, logits_all=False)
            cache = BlockKVCache(llama, store=store, **told.get("options", {}))
        if told.get("attach", True):
            cache.attach()
        else:
            llama.set_cache(cache)
        answer = llama.create_completion(prompt, max_tokens=GENERATED, temperature=0.0)
        found["completions"].append(
            {
                "tokens": llama.input_ids[: llama.n_tokens].tolist(),
                "prompt_tokens": answer["usage"]["prompt_tokens"],
                "text": answer["choices"][0]["text"],
                "counters": cache.stats(),
                "size": cache.cache_size,
            }
        )
    cache.close()
    found["cache_is_gone"] = llama.cache is None and "save_state" not in vars(llama)
    llama.close()
    return found


def with_images(told: dict[str, Any], store: Any) -> dict[str, Any]:
    """A chat handler for images, known by the projector that it names; given before the cache, and after."""
    llama = llama_of(told, logits_all=False)
    handler = SimpleNamespace(clip_model_path="projector.gguf")
    cache = BlockKVCache(llama, store=store, **told.get("options", {}))
    tokens = tokens_of(told)
    llama.eval(tokens)
    llama.chat_handler = handler
    cache[tokens] = None
    found: dict[str, Any] = {"with_handler": len(store)}
    llama.chat_handler = None
    cache[tokens] = None
    found["without"] = len(store)
    llama.reset()
    llama.chat_handler = handler
    try:
        cache[tokens]
    except KeyError as error:
        found["miss"] = str(error)
    try:
        BlockKVCache(llama, store=store)
    except BlockKVError as error:
        found["refused"] = str(error)
    llama.close()
    return found


def with_stall(told: dict[str, Any]) -> dict[str, Any]:
    device = StallingDevice()
    blockkv.format(device, average_chunk="64KiB")
    with blockkv.open(device) as store:
        first = with_sequences({**told, "save": True}, store)
        store.commit()
        llama = llama_of(told)
        options = {**told.get("options", {}), "load_deadline_s": 0.5}
        sequences = Sequences(store, Context.of(llama), **options)
        device.gate.clear()
        begun = time.monotonic()
        restored = sequences.load(tokens_of(told))
        waited_s = time.monotonic() - begun
        found = {"restored": restored, **evaluate(llama, tokens_of(told), told["split"])}
        found |= {"tokens": generate(llama), "waited_s": waited_s, "counters": dict(sequences.counters)}
        device.gate.set()
        again = with_sequences({**told, "load": True}, store)
        llama.close()
    return {"first": first, "stalled": found, "again": again}


def with_slots(told: dict[str, Any], store: Any) -> dict[str, Any]:
    """Export to `path` (and `session`), or import from it, with a context of its own."""
    llama = llama_of(told)
    sequences = Sequences(store, Context.of(llama), **told.get("options", {}))
    tokens, path = tokens_of(told), told["path"]
    found: dict[str, Any] = {}
    held = (llama_cpp.llama_token * len(tokens))(*tokens)
    if told["do"] in ("export", "export_llama"):
        found |= evaluate(llama, tokens, told["split"])
        if told["do"] == "export":
            found["bytes"] = export_slot(sequences, path, tokens, session=told.get("session", False))
        elif told.get("session"):
            found["ok"] = llama_cpp.llama_state_save_file(llama.ctx, path.encode(), held, len(tokens))
        else:
            found["bytes"] = llama_cpp.llama_state_seq_save_file(
                llama.ctx, path.encode(), 0, held, len(tokens)
            )
        found["tokens"] = generate(llama)
        return found
    if told["do"] == "import":
        given = import_slot(sequences, path, trusted=told.get("trusted", False))
        found |= {"equal": given == tokens, "stored": sequences.stored([*tokens, 3])}
    else:
        count = llama_cpp.ctypes.c_size_t()
        if told.get("session"):
            llama_cpp.llama_state_load_file(llama.ctx, path.encode(), held, len(held), count)
        else:
            llama_cpp.llama_state_seq_load_file(llama.ctx, path.encode(), 0, held, len(held), count)
        found["equal"] = list(held)[: count.value] == tokens
    llama.input_ids[: len(tokens)] = tokens
    llama.n_tokens = len(tokens)
    # the last token once more, for its logits
    llama_cpp.llama_memory_seq_rm(sequences.context.memory, 0, len(tokens) - 1, -1)
    llama.n_tokens -= 1
    llama.eval(tokens[-1:])
    found["tokens"] = generate(llama)
    return found


def with_digest(told: dict[str, Any]) -> dict[str, Any]:
    computed = 0
    compute = fingerprint.digest_of_bytes

    def counted(path: Path) -> bytes:
        nonlocal computed
        computed += 1
        return compute(path)

    fingerprint.digest_of_bytes = counted
    digest = fingerprint.model_digest(told["model"])
    fingerprint.digest_of_bytes = compute
    return {"digest": digest, "computed": computed}


def with_damage(told: dict[str, Any]) -> dict[str, Any]:
    """Files damaged in many ways are refused, or are what they were in shape; nothing else is raised."""
    content = Path(told["path"]).read_bytes()
    random = np.random.default_rng(3)
    found: dict[str, Any] = {"refused": 0, "unknown": 0, "whole": 0}
    for number in range(told["times"]):
        cut = int(random.integers(1, len(content))) if number % 3 == 0 else len(content)
        damaged = bytearray(content[:cut])
        head_bytes = 12 if number % 5 == 0 else 9000  # what the file is, or how its state is laid out
        for position in random.integers(0, min(cut, head_bytes), 1 + number % 4):
            damaged[position] = int(random.integers(256))
        try:
            saved = states.read_file(memoryview(damaged))
        except InvalidArgument:
            found["refused"] += 1
            continue
        found["whole" if states.cells_of(saved.state) else "unknown"] += 1
    saved = states.read_file(memoryview(content))
    (cells,) = states.cells_of(saved.state)
    found["positions"] = cells.positions.tolist() == list(range(len(saved.tokens)))
    found["layers"] = cells.layers
    return found


def run(told: dict[str, Any]) -> dict[str, Any]:
    """`kind`: one of `kinds`, or stall, digest, damage; `told` has what they need. Errors are told."""
    try:
        if told["kind"] == "stall":
            return with_stall(told)
        if told["kind"] == "digest":
            return with_digest(told)
        if told["kind"] == "damage":
            return with_damage(told)
        with blockkv.open(told["device"]) as store:
            kinds = {
                "sequences": with_sequences,
                "cache": with_cache,
                "slots": with_slots,
                "images": with_images,
            }
            return kinds[told["kind"]](told, store)
    except BlockKVError as error:
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    print(json.dumps([run(told) for told in json.loads(sys.argv[1])]))
