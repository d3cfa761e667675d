"""SGLang without a GPU: its own host pools, controllers and storage factory, filled with numbers."""

from __future__ import annotations

from queue import Queue
from typing import Any

import sglang_importable  # noqa: F401
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE_TOKENS = 64
MEMORY_BYTES = 4 << 30
"""What the pools may claim: SGLang would leave 10 GiB of the machine alone."""
MODULE = {
    "backend_name": "blockkv",
    "module_path": "blockkv.connectors.sglang",
    "class_name": "BlockKVHiCache",
}


def mha_pool(
    layout: str,
    *,
    dtype: torch.dtype = torch.float32,
    pages: int = 32,
    layers: int = 4,
    heads: int = 2,
    dim: int = 64,
) -> Any:
    """A host pool of keys and values, full of noise."""
    tokens = pages * PAGE_TOKENS
    k, v = (tuple(torch.zeros(1, heads, dim, dtype=dtype) for _ in range(layers)) for _ in range(2))
    tables = [torch.tensor([one.data_ptr() for one in side], dtype=torch.uint64) for side in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=tables[0], v_data_ptrs=tables[1], layout=KVBufferLayout.NHD),
        page_size=PAGE_TOKENS,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(MEMORY_BYTES):
        pool = MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE_TOKENS,
            layout,
            pin_memory=False,
            device_capacity_tokens=tokens,
            start_layer=0,
            end_layer=layers,
            host_token_capacity=tokens,
        )
    fill(pool, 0)
    return pool


def mla_pool(layout: str, *, pages: int = 32, layers: int = 4) -> Any:
    """A host pool of latent keys and values, the same on every tensor-parallel rank."""
    tokens = pages * PAGE_TOKENS
    rows = tuple(torch.zeros(1, 1, 96) for _ in range(layers))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([one.data_ptr() for one in rows], dtype=torch.uint64),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=PAGE_TOKENS,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        kv_cache_dim=96,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(MEMORY_BYTES):
        pool = MLATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE_TOKENS,
            layout,
            pin_memory=False,
            device_capacity_tokens=tokens,
            start_layer=0,
            end_layer=layers,
            target_layer_num=layers,
            host_token_capacity=tokens,
        )
    fill(pool, 0)
    return pool


def mamba_pool(slots: int = 8, side_states: bool = False) -> Any:
    """A host pool of states, full of noise; with side states it does not say where its pages are."""
    info = MambaStateBufferInfo(
        conv=(torch.zeros(2, slots, 3, 16),),
        temporal=torch.zeros(2, slots, 4, 8, 8),
        extra_checkpoint_buffers=(torch.zeros(slots, 5),) if side_states else (),
    )
    with host_memory_budget_scope(MEMORY_BYTES):
        pool = MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")
    fill(pool, 0)
    return pool


def buffers(pool: Any) -> list[torch.Tensor]:
    """The memory of a pool."""
    found = pool.kv_buffer
    return list(found) if isinstance(found, list) else [found]


def fill(pool: Any, seed: int) -> None:
    """Numbers that differ everywhere, and with the seed."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))


def page_of(pool: Any, index: int) -> torch.Tensor:
    """The content of a page."""
    return pool.get_data_page(index, flat=True).clone()


def storage_config(extra: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    """As the controller makes it, with our options."""
    facts = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "meta/llama",
        **changes,
    }
    return HiCacheStorageConfig(**facts, extra_config={**MODULE, **extra})


def attach(pool: Any, extra: dict[str, Any], backend: str = "dynamic", **changes: Any) -> Any:
    """A controller with a storage backend attached to `pool`, a pool or a group of pools.

    What `attach_storage_backend` does, without its threads and process groups.
    """
    is_group = isinstance(pool, HostPoolGroup)
    controller = object.__new__(HybridCacheController if is_group else HiCacheController)
    anchor = pool.anchor_entry.host_pool if is_group else pool
    controller.storage_config = storage_config(extra, **changes)
    controller.storage_backend_type = backend
    controller.storage_backend = StorageBackendFactory.create_backend(
        backend, controller.storage_config, anchor
    )
    try:
        controller.storage_backend.register_mem_pool_host(anchor)
        for entry in pool.entries if is_group else ():
            controller.storage_backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
        controller.storage_backend.on_host_pools_registered()
    except BaseException:
        controller.storage_backend.close()
        raise
    controller.storage_host_pool = anchor
    controller.mem_pool_host = pool
    controller.page_size = PAGE_TOKENS
    controller.prefetch_sync_queue = Queue()
    zero_copy = backend == "dynamic" and bool(extra.get("interface_v1", 0))
    controller.page_get_func = controller._page_get_zero_copy if zero_copy else controller._generic_page_get
    controller.page_set_func = controller._page_set_zero_copy if zero_copy else controller._generic_page_set
    return controller


def hybrid(layout: str, *, side_states: bool = False) -> Any:
    """A group of pools: keys and values, those of a sliding window, an indexer beside the first, states."""
    pools = {
        PoolName.KV: mha_pool(layout),
        PoolName.SWA: mha_pool(layout, layers=2, pages=8),
        PoolName.INDEXER: mha_pool(layout, layers=1, heads=1),
        PoolName.MAMBA: mamba_pool(side_states=side_states),
    }
    return HostPoolGroup(
        [
            PoolEntry(name, pool, None, lambda layer: layer, is_primary_index_anchor=name == PoolName.KV)
            for name, pool in pools.items()
        ]
    )
