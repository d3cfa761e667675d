#!/usr/bin/env python
"""SGLang's HiCache on a store, without a GPU: SGLang's host pool and hashes, and the storage backend.

    source .engines/sglang/bin/activate      or SGLang's environment, wherever it is
    examples/sglang_hicache.py               a store in a temporary file
    examples/sglang_hicache.py DEVICE        one that is formatted, or blank

Ten pages of a host pool are stored as HiCache would, and looked for by a second backend, as after a
restart. It finds nine of them, because the other prompt differs in its last page. In a server SGLang does
all this itself; what it is told is the configuration that is printed first, see docs/connectors/sglang.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_torchvision_available

PAGE_TOKENS, PAGES, LAYERS, HEADS, DIM = 64, 24, 4, 2, 64


def host_pool() -> Any:
    """A host pool of SGLang's with room for 24 pages, as a server makes it beside those on the GPU."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    sides = [tuple(torch.zeros(1, HEADS, DIM) for _ in range(LAYERS)) for _ in range(2)]
    tables = [torch.tensor([one.data_ptr() for one in side], dtype=torch.uint64) for side in sides]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=sides[0],
            v=sides[1],
            k_data_ptrs=tables[0],
            v_data_ptrs=tables[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE_TOKENS,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(
            info,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=PAGE_TOKENS,
            layout="page_first",
            pin_memory=False,
            device_capacity_tokens=PAGES * PAGE_TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            host_token_capacity=PAGES * PAGE_TOKENS,
        )


def backend(extra: dict[str, Any], pool: Any) -> Any:
    """The storage backend, made by SGLang's factory."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=True,
        is_page_first_layout=True,
        model_name="example",
        extra_config=extra,
    )
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def main() -> None:
    """Store, find, load, compare."""
    if not is_torchvision_available() and importlib.util.find_spec("torchvision") is None:
        # SGLang imports it for images, of which there are none here.
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].InterpolationMode = object  # type: ignore[attr-defined]
    from sglang.srt.mem_cache.utils import get_hash_str

    with tempfile.TemporaryDirectory() as directory:
        device = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(directory) / "kv.img"
        if not device.exists():
            device.touch()
            os.truncate(device, 64 << 20)
        extra = {
            "backend_name": "blockkv",
            "module_path": "blockkv.connectors.sglang",
            "class_name": "BlockKVHiCache",
            "interface_v1": 1,
            "device": str(device),
            "format": True,
            "weights": "what the weights are",
        }
        print(json.dumps(extra, indent=2))

        pool = host_pool()
        pool.kv_buffer.normal_()
        tokens = list(range(10 * PAGE_TOKENS))
        storage = backend(extra, pool)
        hashes = get_hash_str(tokens, None, page_size=PAGE_TOKENS)
        assert all(storage.batch_set_v1(hashes, torch.arange(len(tokens))))
        storage.close()

        storage = backend(extra, pool)
        hashes = get_hash_str([*tokens[:-1], 0], None, page_size=PAGE_TOKENS)
        found = storage.batch_exists(hashes)
        end = len(tokens)
        where = torch.arange(end, end + found * PAGE_TOKENS)
        assert all(storage.batch_get_v1(hashes[:found], where))
        loaded = pool.kv_buffer[:, end : end + found * PAGE_TOKENS]
        assert torch.equal(loaded, pool.kv_buffer[:, : found * PAGE_TOKENS])
        print(f"{found} of {len(hashes)} pages found and loaded, equal to what was stored")
        print(storage.get_stats())
        storage.close()


if __name__ == "__main__":
    main()
