"""vLLM's tiered offloading on a machine without a GPU: for trying things out, and for tests.

vLLM's own `TieringOffloadingSpec` refuses the CPU platform, because it moves pages with CUDA streams. This
one copies them, and leaves all else as it is: the manager, the tiers and their factory, the scheduler, the
metrics. There is nothing to win on a CPU, where both copies are in the same memory::

    "kv_connector_extra_config": {"spec_name": "CpuTieringSpec",
                                  "spec_module_path": "blockkv.connectors.vllm_cpu", ...}

Not here: the canonical layout. vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from blockkv.errors import InvalidArgument

__all__ = ["CpuTieringSpec"]


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` whose pages are copied by the CPU."""

    _copying: OffloadingWorker | None = None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """What copies between KV cache and primary tier. Raises InvalidArgument for the canonical layout."""
        if self.config.canonical_layout:
            raise InvalidArgument("CpuTieringSpec: canonical_layout needs a GPU")
        if self._copying is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copying = _CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._copying


class _CopyingWorker(OffloadingWorker):
    """Copies at once, so that a job has ended when it was submitted."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._pages = [one.tensor for one in kv_caches.tensors]
        self._rows = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk)
            for one in kv_caches.tensors
        ]
        self._groups = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the KV cache."""
        return self._copy(job_id, src_spec, dst_spec, to_cache=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """To the KV cache."""
        return self._copy(job_id, dst_spec, src_spec, to_cache=True)

    def get_finished(self) -> list[TransferResult]:
        """What was submitted since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Let the region go."""
        self._pages, self._rows = [], []
        self._region.cleanup()

    def _copy(self, job_id: int, pages: Any, rows: Any, *, to_cache: bool) -> bool:
        """Blocks lie group by group; the first of a group may be in the middle of its chunk."""
        moved, page_at, row_at = 0, 0, 0
        for refs, count, first in zip(self._groups, pages.group_sizes, pages.block_indices, strict=True):
            skipped = first % self._blocks_per_chunk
            for number in range(skipped, skipped + count):
                row = int(rows.block_ids[row_at + number // self._blocks_per_chunk])
                place = number % self._blocks_per_chunk
                for ref in refs:
                    page = self._pages[ref.tensor_idx][int(pages.block_ids[page_at + number - skipped])]
                    cell = self._rows[ref.tensor_idx][row].view(self._blocks_per_chunk, -1)[place]
                    target, source = (page, cell) if to_cache else (cell, page)
                    target.view(-1)[: ref.page_size_bytes].copy_(source.view(-1)[: ref.page_size_bytes])
                    moved += ref.page_size_bytes
            page_at += count
            if count:
                row_at += -(-(skipped + count) // self._blocks_per_chunk)
        self._finished.append(TransferResult(job_id, True, moved, 0.0))
        return True
