"""vLLM keeps its KV cache on a device: the second process does not compute the prompt again.

    tools/engines vllm
    PYTHONPATH=. .engines/vllm/bin/python examples/vllm_tier.py

Runs as it stands, on a CPU, with a tiny random model in a temporary directory. On a GPU, with a model of
yours: leave `spec_module_path` out, name the spec TieringOffloadingSpec, and give a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def tiny_model(directory: Path) -> None:
    """Four layers of random numbers."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        architectures=["LlamaForCausalLM"],
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def ask(model: str, device: str) -> None:
    """What every process of the engine does; prints the result as JSON."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=1024,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "blockkv.connectors.vllm_cpu",
                "cpu_bytes_to_use": 64 << 20,
                "secondary_tiers": [
                    {
                        "type": "BlockKVTier",
                        "module_path": "blockkv.connectors.vllm",
                        "device": device,
                        "format": True,
                    }
                ],
            },
        },
    )
    prompt = {"prompt_token_ids": [one * 7 % 512 for one in range(300)]}
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"cached": output.num_cached_tokens, "tokens": list(output.outputs[0].token_ids)}))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model, device = Path(directory, "model"), Path(directory, "kv.img")
        tiny_model(model)
        device.touch()
        os.truncate(device, 64 << 20)
        answers = []
        for process in ("first", "second"):
            done = subprocess.run(
                [sys.executable, __file__, str(model), str(device)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            answers.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{process} process: {answers[-1]['cached']} of 300 tokens from the device")
        assert answers[0]["tokens"] == answers[1]["tokens"]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        ask(*sys.argv[1:])
    else:
        main()
