#!/usr/bin/env python3
"""SGLang's HiCache on a store, beside its file backend: the same pages of the same host pool.

    .engines/sglang/bin/python tools/connector_bench/sglang.py --paced            in memory (root)
    .engines/sglang/bin/python tools/connector_bench/sglang.py --disk /var/tmp --json
    .engines/sglang/bin/python tools/connector_bench/sglang.py /dev/nvme0n1 --force      IT IS OVERWRITTEN

`tools/engines sglang` makes that Python. A host pool of SGLang on the CPU, by default of the geometry of
Llama 3.1 8B in 16 bits, is backed up and prefetched by SGLang's own controller: `_page_backup`,
`_storage_hit_query` and `_page_transfer`, in batches of 128 pages. Ours has the interface v1; the file
backend has v0, and a file for each page.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# This file is called like the package that it uses; a script's own directory comes first otherwise.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "connectors" / "workers"))
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import bench_tool
import click
import sglang_importable  # noqa: F401
import torch
from bench_tool import DeviceOptions, OutputOptions
from connector_bench.rounds import OURS, Contestant, drop_files, run, sync_files
from sglang.srt.managers.cache_controller import PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.utils import get_hash_str
from sglang_pools import PAGE_TOKENS, attach, mha_pool

import blockkv


class HiCache(ABC):
    """A storage backend under SGLang's controller. Half of the pool is stored, the other half loaded to."""

    def __init__(self, name: str, pool: Any, pages: int, backend: str, options: dict[str, Any]) -> None:
        self.name = name
        self._pool, self._pages = pool, pages
        self._tokens = list(range(pages * PAGE_TOKENS))
        self._hashes = get_hash_str(self._tokens, None, page_size=PAGE_TOKENS)
        self._controller = attach(pool, options, backend, enable_storage_metrics=False)

    @property
    def _backend(self) -> Any:
        return self._controller.storage_backend

    def store(self) -> None:
        operation = StorageOperation(torch.arange(len(self._tokens)), self._tokens, hash_value=self._hashes)
        self._controller._page_backup(operation)
        assert operation.completed_tokens == len(self._tokens)

    def load(self) -> None:
        operation = PrefetchOperation("bench", self._tokens)
        operation.hash_value, count = self._controller._storage_hit_query(operation)
        operation.host_indices = torch.arange(count, 2 * count)
        assert self._controller._page_transfer(operation) == self._pages

    def check(self) -> None:
        count = len(self._tokens)
        k_and_v = self._pool.kv_buffer
        assert torch.equal(k_and_v[:, count : 2 * count], k_and_v[:, :count])
        k_and_v[:, count : 2 * count] = 0

    def forget(self) -> None:
        self._backend.clear()

    @abstractmethod
    def sync(self) -> None: ...

    @abstractmethod
    def drop_page_cache(self) -> None: ...

    def close(self) -> None:
        getattr(self._backend, "close", lambda: None)()


class Store(HiCache):
    """The connector."""

    def sync(self) -> None:
        self._backend._store.commit()

    def drop_page_cache(self) -> None:
        pass  # it goes past it


class Files(HiCache):
    """SGLang's `file`."""

    def sync(self) -> None:
        sync_files(Path(self._backend.file_path))

    def drop_page_cache(self) -> None:
        drop_files(Path(self._backend.file_path))


@bench_tool.benchmark()
@click.option("--pages", default=64, show_default=True, help=f"Pages of {PAGE_TOKENS} tokens in a set.")
@click.option("--layers", default=32, show_default=True)
@click.option("--heads", default=8, show_default=True, help="KV heads of this rank.")
@click.option("--dim", default=128, show_default=True, help="Dimension of a head.")
@click.option("--layout", default="page_first", show_default=True, help="Of the host pool.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--limit", default=2.0, show_default=True, help="Memory besides the pool, in sets; 0: none.")
def main(on: DeviceOptions, to: OutputOptions, **given: Any) -> None:
    """See the module."""
    torch.set_num_threads(1)
    geometry = {name: given[name] for name in ("layers", "heads", "dim")}
    pages = given["pages"]
    pool = mha_pool(given["layout"], dtype=torch.float16, pages=2 * pages, **geometry)
    set_bytes = pages * pool.get_size_per_token() * PAGE_TOKENS

    def make(device: Path, directory: Path) -> Sequence[Contestant]:
        blockkv.format(device, force=True)
        options = {"device": str(device), "weights": "bench", "interface_v1": 1}
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(directory / "hicache")
        return [
            Store(OURS, pool, pages, "dynamic", options),
            Files("file", pool, pages, "file", {}),
        ]

    limit_bytes = int(given["limit"] * set_bytes) if given["limit"] else None
    facts = {**geometry, "pages": pages, "page_tokens": PAGE_TOKENS, "layout": given["layout"]}
    run(on, to, make, set_bytes, given["rounds"], limit_bytes, facts)


if __name__ == "__main__":
    main()
