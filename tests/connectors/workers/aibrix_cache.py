"""A cache manager of AIBrix on a store; puts or gets some tokens and prints what came of it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {
    "AIBRIX_KV_CACHE_OL_BLOCK_SIZE": "16",
    "AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED": "0",
    "AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND": "BLOCKKV",
    "AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": "0",
    "AIBRIX_KV_CACHE_OL_L2_CACHE_PER_TOKEN_TIMEOUT_MS": "200",
    "AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": "0.0625",
}
TOLD: dict[str, Any] = json.loads(sys.argv[1])
os.environ |= TOLD.get("environment", {})

import aibrix_kvcache.cache_manager as managers  # noqa: E402
import torch  # noqa: E402
from aibrix_kvcache.cache_hashable import TokenListView  # noqa: E402
from aibrix_kvcache.config import KVCacheConfig  # noqa: E402
from aibrix_kvcache.spec import (  # noqa: E402
    KVCacheBlockLayout,
    KVCacheBlockSpec,
    KVCacheTensorSpec,
    ModelSpec,
)

from blockkv.connectors import aibrix  # noqa: E402
from blockkv.errors import BlockKVError  # noqa: E402

managers.TESTING_DISABLE_PIN_MEMORY = True  # there is no GPU to pin it for
HEADS, LAYERS, TOKENS = 2, 4, 96


def values_of(number: int, spec: KVCacheBlockSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(spec.block_shape, generator=generator).to(spec.block_dtype)


def run() -> dict[str, Any]:
    spec = KVCacheBlockSpec(
        block_ntokens=16,
        block_dtype=torch.float16,
        block_layout=KVCacheBlockLayout.LCND,
        tensor_spec=KVCacheTensorSpec(heads=list(range(HEADS)), layers=list(range(LAYERS)), head_size=64),
    )
    options = {"weights": "w1", "dtype": "float16", "device": TOLD["device"], **TOLD.get("options", {})}
    with aibrix.install(**options) as installed:
        manager = managers.BaseKVCacheManager(KVCacheConfig(spec, ModelSpec(1024, 1024)))
        tokens = TokenListView([*range(1000, 1000 + TOKENS)])
        found: dict[str, Any] = {}
        if TOLD["do"] == "put":
            handle = manager.allocate_for(None, tokens).get()
            for number, tensor in enumerate(handle.to_tensors()):
                tensor.copy_(values_of(number, spec))
            found["put"] = manager.put(None, tokens, handle).get()
        else:
            found["exists"] = manager.exists(None, tokens).get(default=0)
            status = manager.acquire(None, tokens)
            found["acquired"] = 0
            if status.is_ok():
                count, handle = status.get()
                tensors = handle.to_tensors()
                found["acquired"] = count
                found["equal"] = sum(
                    torch.equal(tensor, values_of(number, spec)) for number, tensor in enumerate(tensors)
                )
                handle.release()
        found["stats"] = installed.store.stats()
        manager.close()
    return found


if __name__ == "__main__":
    try:
        outcome = run()
    except BlockKVError as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(outcome))
