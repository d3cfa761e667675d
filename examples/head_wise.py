#!/usr/bin/env python3
"""Attention one KV head at a time, from the store: memory for one head's KV instead of all of them.

    examples/head_wise.py                    a store in a temporary file
    examples/head_wise.py /dev/nvme0n1p4     a partition or namespace that holds nothing; it is formatted

The case of HEADINFER (arXiv 2502.12574): the KV cache of a long context does not fit beside the model, but
attention of one head needs only that head's. A stream in the order "layers heads" brings K and V of one head
of one layer at a time, reads the next ones meanwhile, and never holds more than it is told to.

A toy model: each layer's output is the query of the next. What comes out is compared with attention that has
the whole cache in memory.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import blockkv
from blockkv import KVLayout


@dataclass(frozen=True)
class Shape:
    """Of the model and its context. `queries` heads share one KV head."""

    layers: int = 4
    heads: int = 8
    queries: int = 4
    dim: int = 64
    chunk_tokens: int = 256
    chunks: int = 4

    @property
    def layout(self) -> KVLayout:
        """Of one chunk: all of a head lies together."""
        return KVLayout.of(
            "layers heads kv tokens dim",
            "float32",
            layers=self.layers,
            heads=self.heads,
            kv=2,
            tokens=self.chunk_tokens,
            dim=self.dim,
        )

    @property
    def kv_bytes(self) -> int:
        return self.chunks * self.layout.payload_bytes

    @property
    def keys(self) -> list[str]:
        return [f"context/{number}" for number in range(self.chunks)]


@dataclass(frozen=True)
class Outcome:
    """What a run found."""

    largest_difference: float
    kv_bytes: int
    resident_kv_bytes: int
    """Memory for KV that the head-wise run had, at its peak."""
    lookahead_bytes: int


def full_attention(query: torch.Tensor, cache: torch.Tensor, shape: Shape) -> torch.Tensor:
    """All layers with all of the cache in memory: (chunks, layers, heads, kv, tokens, dim)."""
    for layer in range(shape.layers):
        keys, values = (torch.cat(list(cache[:, layer, :, kv]), dim=1) for kv in range(2))
        weights = torch.softmax(query @ keys.transpose(1, 2) / math.sqrt(shape.dim), dim=-1)
        query = weights @ values
    return query


def head_attention(query: torch.Tensor, pieces: list[torch.Tensor]) -> torch.Tensor:
    """One KV head over the chunks of its context, (1, 1, kv, tokens, dim) each: softmax as it goes along."""
    largest = torch.full((len(query), 1), -torch.inf)
    total = torch.zeros(len(query), 1)
    output = torch.zeros_like(query)
    for piece in pieces:
        keys, values = piece[0, 0]
        scores = query @ keys.T / math.sqrt(query.shape[1])
        new_largest = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
        scale, weights = torch.exp(largest - new_largest), torch.exp(scores - new_largest)
        output = output * scale + weights @ values
        total = total * scale + weights.sum(dim=1, keepdim=True)
        largest = new_largest
    return output / total


def head_wise_attention(
    store: blockkv.Store, query: torch.Tensor, shape: Shape, lookahead_bytes: int
) -> tuple[torch.Tensor, int]:
    """All layers, head by head from the store, and how much memory for KV that took."""
    output = torch.empty_like(query)
    with store.stream(
        shape.keys, "layers heads", layout=shape.layout, lookahead_bytes=lookahead_bytes
    ) as stream:
        for (_, head), pieces in stream:
            if len(pieces) < shape.chunks:
                raise SystemExit(f"only {len(pieces)} chunks of the context verify: compute the rest anew")
            output[head] = head_attention(query[head], pieces)
            if head == shape.heads - 1:
                query, output = output, torch.empty_like(query)
    return query, stream.memory_bytes


def run(path: Path, shape: Shape) -> Outcome:
    """Store a context, and attend to it both ways."""
    torch.manual_seed(0)
    cache = torch.randn(shape.chunks, shape.layers, shape.heads, 2, shape.chunk_tokens, shape.dim)
    query = torch.randn(shape.heads, shape.queries, shape.dim)
    head_bytes = shape.kv_bytes // shape.layers // shape.heads
    with blockkv.open(path) as store:
        store.put_many(zip(shape.keys, cache, strict=True))
        found, resident_bytes = head_wise_attention(store, query, shape, 2 * head_bytes)
    difference = (found - full_attention(query, cache, shape)).abs().max().item()
    return Outcome(difference, shape.kv_bytes, resident_bytes, 2 * head_bytes)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("device", nargs="?", type=Path, help="what to format; a temporary file by default")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as directory:
        if device is None:
            device = Path(directory) / "store.img"
            blockkv.format(device, size="128MiB")
        else:
            blockkv.format(device)
        outcome = run(device, Shape())
    share = outcome.resident_kv_bytes / outcome.kv_bytes
    print(f"KV cache of the context: {outcome.kv_bytes >> 10} KiB")
    print(f"memory for KV, head-wise: {outcome.resident_kv_bytes >> 10} KiB, {share:.1%} of it")
    print(f"largest difference to full attention: {outcome.largest_difference:.1e}")


if __name__ == "__main__":
    main()
