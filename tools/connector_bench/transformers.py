#!/usr/bin/env python3
"""A transformers KV cache in a store, beside torch.save and safetensors.

    tools/connector_bench/transformers.py --paced                   in memory, held to a drive's speed (root)
    tools/connector_bench/transformers.py --disk /var/tmp --json    on a loop device over a file
    tools/connector_bench/transformers.py /dev/nvme0n1 --force      EVERYTHING ON IT IS DESTROYED

A cache of --tokens tokens, by default of the geometry of Llama 3.1 8B in 16 bits, is saved with
`save_cache` and loaded with `load_prefix`; with `torch.save` and `torch.load`; with
`safetensors.torch.save_file` and `load_file`. Each load gives a DynamicCache. That somebody has to name
the files, and that a longer prompt finds nothing in them, is not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

# This file is called like the package that it uses; a script's own directory comes first otherwise.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[1]))

import bench_tool
import safetensors.torch
import torch
from bench_tool import DeviceOptions, OutputOptions
from connector_bench.rounds import OURS, Contestant, drop_files, run, sync_files
from transformers import DynamicCache, LlamaConfig

import blockkv
from blockkv.connectors.transformers import load_prefix, save_cache


class Cache:
    """The cache that is saved, and the ones that are loaded."""

    def __init__(self, tokens: int, layers: int, heads: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.config = LlamaConfig(
            num_hidden_layers=layers,
            num_key_value_heads=heads,
            num_attention_heads=heads,
            head_dim=dim,
            hidden_size=heads * dim,
        )
        self.token_ids = torch.arange(tokens + 1)
        self.cache = DynamicCache(config=self.config)
        for layer in range(layers):
            keys, values = (
                torch.randn(1, heads, tokens, dim, generator=generator, dtype=torch.float16) for _ in range(2)
            )
            self.cache.update(keys, values, layer)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it, by name."""
        found = {}
        for number, layer in enumerate(self.cache.layers):
            found |= {f"{number}.keys": layer.keys, f"{number}.values": layer.values}
        return found

    def of(self, tensors: dict[str, torch.Tensor]) -> Any:
        """A cache made of tensors, without a copy."""
        made = DynamicCache(config=self.config)
        for number, layer in enumerate(made.layers):
            keys, values = tensors[f"{number}.keys"], tensors[f"{number}.values"]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return made

    def assert_equal(self, loaded: Any) -> None:
        """Every byte."""
        for mine, theirs in zip(loaded.layers, self.cache.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)


class Store:
    """The connector."""

    name = OURS

    def __init__(self, cache: Cache, device: Path, chunk_tokens: int) -> None:
        blockkv.format(device, force=True, average_chunk="1MiB")
        self._cache, self._chunk_tokens = cache, chunk_tokens
        self._store = blockkv.open(device)
        self._family = blockkv.Family("bench", "1", "float16", "bench")
        self._loaded: Any = None

    def store(self) -> None:
        count = save_cache(
            self._store,
            self._cache.cache,
            self._cache.token_ids,
            self._family,
            chunk_tokens=self._chunk_tokens,
        )
        assert count == len(self._cache.token_ids) - 1

    def sync(self) -> None:
        self._store.commit()

    def load(self) -> None:
        self._loaded = None
        self._loaded, held = load_prefix(
            self._store,
            self._cache.token_ids,
            self._family,
            config=self._cache.config,
            chunk_tokens=self._chunk_tokens,
        )
        assert held == len(self._cache.token_ids) - 1

    def check(self) -> None:
        self._cache.assert_equal(self._loaded)

    def forget(self) -> None:
        self._loaded = None
        for key in list(self._store.keys()):
            self._store.delete(key)
        self._store.commit()

    def drop_page_cache(self) -> None:
        pass  # it goes past it

    def close(self) -> None:
        self._store.close()


class Files:
    """A file, written and read by one of the libraries that people use for it."""

    def __init__(self, name: str, cache: Cache, directory: Path) -> None:
        self.name = name
        self._cache, self._directory = cache, directory / name
        self._directory.mkdir()
        self._path = self._directory / "cache"
        self._loaded: Any = None

    def store(self) -> None:
        if self.name == "torch.save":
            torch.save(self._cache.tensors, self._path)
        else:
            safetensors.torch.save_file(self._cache.tensors, self._path)

    def sync(self) -> None:
        sync_files(self._directory)

    def load(self) -> None:
        self._loaded = None
        if self.name == "torch.save":
            tensors = torch.load(self._path)
        else:
            tensors = safetensors.torch.load_file(self._path)
            # mapped until somebody reads it, which attention does at once
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._loaded = self._cache.of(tensors)

    def check(self) -> None:
        self._cache.assert_equal(self._loaded)

    def forget(self) -> None:
        self._loaded = None
        self._path.unlink()

    def drop_page_cache(self) -> None:
        drop_files(self._directory)


@bench_tool.benchmark()
@click.option("--tokens", default=2048, show_default=True, help="Tokens in the cache.")
@click.option("--layers", default=32, show_default=True)
@click.option("--heads", default=8, show_default=True, help="KV heads.")
@click.option("--dim", default=128, show_default=True, help="Dimension of a head.")
@click.option("--chunk-tokens", default=256, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--limit", default=1.3, show_default=True, help="Memory, in sizes of the cache; 0: no limit.")
def main(on: DeviceOptions, to: OutputOptions, **given: Any) -> None:
    """See the module."""
    torch.set_num_threads(1)
    geometry = {name: given[name] for name in ("tokens", "layers", "heads", "dim")}
    cache = Cache(**geometry)
    set_bytes = sum(tensor.nbytes for tensor in cache.tensors.values())

    def make(device: Path, directory: Path) -> Sequence[Contestant]:
        return [
            Store(cache, device, given["chunk_tokens"]),
            Files("torch.save", cache, directory),
            Files("safetensors", cache, directory),
        ]

    limit_bytes = int(given["limit"] * set_bytes) if given["limit"] else None
    run(on, to, make, set_bytes, given["rounds"], limit_bytes, {**geometry, "torch": torch.__version__})


if __name__ == "__main__":
    main()
