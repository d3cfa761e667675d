"""A whole vLLM engine on the tier, in one process; what it found, as a line of JSON.

vllm_engine.py SCENARIO MODEL DIRECTORY DEVICE
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import vllm_models
from vllm import LLM, SamplingParams

PROMPT_TOKENS = 300


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(512) for _ in range(tokens)]


class Engine:
    def __init__(
        self,
        model: Path,
        device: str,
        *,
        dtype: str = "float32",
        extra: dict[str, Any] | None = None,
        **tier: Any,
    ) -> None:
        config = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "blockkv.connectors.vllm_cpu",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [
                {"type": "BlockKVTier", "module_path": "blockkv.connectors.vllm", "device": device, **tier}
            ],
        }
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            block_size=32,
            max_model_len=1024,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": config | (extra or {}),
            },
        )
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.tier = scheduler.connector.connector_scheduler.manager.secondary_tiers[0]

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        sampling = SamplingParams(max_tokens=16, temperature=0, logprobs=5, detokenize=False)
        begun = time.monotonic()
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        took_s = time.monotonic() - begun
        (choice,) = output.outputs
        return {
            "cached": output.num_cached_tokens,
            "tokens": list(choice.token_ids),
            "logprobs": [
                sorted((token, one.logprob.hex()) for token, one in step.items()) for step in choice.logprobs
            ],
            "took_s": took_s,
        }

    def settle(self) -> None:
        """Wait until what was offered is stored."""
        assert self.tier._jobs.drain(120)

    def forget(self) -> None:
        """All that is in memory: the prefix cache and the primary tier."""
        until = time.monotonic() + 60
        while not self.llm.reset_prefix_cache(reset_connector=True):
            assert time.monotonic() < until, "the cache is not reset"
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        self.tier._look_at_store()
        self.ask(prompt(99, 8))  # counters travel with a step
        found = {}
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:kv_offload_")
            if hasattr(metric, "value") and name != metric.name and metric.labels.get("tier") != "0:primary":
                found[name] = metric.value
        return found

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class GatedStore:
    """The tier's store, behind a device that does not answer while the gate is shut."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_many(self, *arguments: Any, **options: Any) -> Any:
        self.gate.wait()
        return self._store.get_many(*arguments, **options)

    def put_many(self, *arguments: Any, **options: Any) -> Any:
        self.gate.wait()
        return self._store.put_many(*arguments, **options)


def cold(model: Path, device: str) -> dict[str, Any]:
    """Two prompts that nobody has seen, and once more out of the engine's own prefix cache."""
    engine = Engine(model, device, format=True)
    found = {name: engine.ask(prompt(seed)) for name, seed in (("first", 1), ("second", 2))}
    found |= {f"{name}_again": engine.ask(prompt(seed)) for name, seed in (("first", 1), ("second", 2))}
    engine.settle()
    found["metrics"] = engine.metrics()
    engine.close()
    return found


def warm(model: Path, device: str) -> dict[str, Any]:
    """Another process: what is stored is found."""
    engine = Engine(model, device)
    found = {"first": engine.ask(prompt(1)), "metrics": engine.metrics()}
    engine.close()
    return found


def trouble(model: Path, device: str) -> dict[str, Any]:
    """Another process, and all that can go wrong in it. Loads are late only while the device stalls."""
    engine = Engine(model, device, load_deadline_s=60.0)
    tier = engine.tier
    found = {"first": engine.ask(prompt(1))}

    flip_byte(Path(device), tier)
    found["damaged"] = engine.ask(prompt(2))
    found["damaged_metrics"] = engine.metrics()
    engine.settle()
    engine.forget()
    found["rewritten"] = engine.ask(prompt(2))
    found["after_reset"] = engine.ask(prompt(1))

    engine.forget()
    gated = tier._jobs._store = GatedStore(tier._store)
    gated.gate.clear()
    tier._jobs._deadlines_s[True] = 1.0
    found["stalled"] = engine.ask(prompt(1))
    found["still_stalled"] = engine.ask(prompt(2))
    found["stalled_metrics"] = engine.metrics()
    gated.gate.set()
    engine.settle()
    until = time.monotonic() + 60
    while tier._jobs.stalled:
        assert time.monotonic() < until, "it stalls for ever"
        time.sleep(0.01)
    tier._jobs._deadlines_s[True] = 60.0
    engine.forget()
    found["second_after_stall"] = engine.ask(prompt(2))
    found["first_after_stall"] = engine.ask(prompt(1))
    engine.settle()

    tier._jobs._max_store_bytes = 1
    gated.gate.clear()
    found["saturating"] = [engine.ask(prompt(seed)) for seed in (3, 4, 5)]
    gated.gate.set()
    engine.settle()
    found["saturated_metrics"] = engine.metrics()
    engine.close()
    return found


def other(model: Path, device: str) -> dict[str, Any]:
    """The same prompts with another dtype."""
    engine = Engine(model, device, dtype="bfloat16")
    found = {"first": engine.ask(prompt(1)), "chunks": len(engine.tier._store)}
    engine.close()
    return found


def chunks(model: Path, device: str) -> dict[str, Any]:
    """Chunks of several blocks, of which the first and the last are partly there on the way to the cache."""
    engine = Engine(model, device, extra={"blocks_per_chunk": 3}, format=True, direct=True)
    found = {
        "cold": engine.ask(prompt(1)),
        "again": engine.ask(prompt(1)),
        "short": engine.ask(prompt(1, 40)),
    }
    engine.settle()
    engine.llm.reset_prefix_cache()
    engine.ask(prompt(1, 40))  # one block of the first chunk is in the cache then
    found["partly"] = engine.ask(prompt(1))
    engine.forget()
    found["warm"] = engine.ask(prompt(1))
    engine.close()
    return found


def flip_byte(path: Path, tier: Any) -> None:
    """In the last chunk that was stored, past the store."""
    store = tier._store
    listed = store.keys()
    mine = [store.entry(name) for name in listed if name.startswith(f"{tier._family}/")]
    entry = max(mine, key=lambda entry: entry.log_sequence)
    place = int(tier._store.info()["data_offset_bytes"]) + entry.extents[0][0] * 4096 + 1234
    with path.open("r+b", buffering=0) as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0x10]))


if __name__ == "__main__":
    scenario, kind, directory, device = sys.argv[1:]
    print(json.dumps(globals()[scenario](vllm_models.make(kind, Path(directory)), device)))
