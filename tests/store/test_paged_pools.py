"""Pages of a paged-attention pool to and from chunks: no copy of ours where they are aligned.

Pools as engines have them: for each layer K and V, `pages` of so many tokens; a chunk is a few pages of every
layer, which lie anywhere in the pools.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import blockkv
from blockkv import KVLayout, Part

LAYERS, PAGES, PAGE_TOKENS, HEADS, DIM = 3, 40, 16, 4, 64
PAGE_BYTES = PAGE_TOKENS * HEADS * DIM * 2
CHUNK_PAGES = 4
LAYOUT = KVLayout.of(
    "layers kv tokens heads dim",
    "float16",
    layers=LAYERS,
    kv=2,
    tokens=CHUNK_PAGES * PAGE_TOKENS,
    heads=HEADS,
    dim=DIM,
)


def pools(aligned: bool) -> list[torch.Tensor]:
    """One a layer: K and V, pages, tokens, heads, head dim."""
    shape = (2, PAGES, PAGE_TOKENS, HEADS, DIM)
    if aligned:
        return [blockkv.empty(shape, torch.float16).normal_() for _ in range(LAYERS)]
    count = 2 * PAGES * PAGE_TOKENS * HEADS * DIM
    return [torch.randn(count + 1).half()[1:].view(shape) for _ in range(LAYERS)]


def pieces(of: list[torch.Tensor], pages: list[int]) -> list[torch.Tensor]:
    """The pages of a chunk, in the order of LAYOUT."""
    return [pool[kv, page] for pool in of for kv in range(2) for page in pages]


def drawn(count: int, seed: int) -> list[list[int]]:
    order = random.Random(seed).sample(range(PAGES), count * CHUNK_PAGES)
    return [order[first : first + CHUNK_PAGES] for first in range(0, len(order), CHUNK_PAGES)]


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
def test_pages_go_to_chunks_and_come_back_elsewhere(block_targets: Any, aligned: bool) -> None:
    target = block_targets(64 << 20)
    blockkv.format(target, average_chunk="64KiB")
    source, sink = pools(aligned), pools(aligned)
    from_pages, to_pages = drawn(8, 1), drawn(8, 2)
    keys = [f"k{number}" for number in range(8)]
    with blockkv.open(target, commit_interval_ms=None) as store:
        before = store.stats()
        store.put_many([(key, pieces(source, pages)) for key, pages in zip(keys, from_pages, strict=True)])
        assert store.get_many(keys, [pieces(sink, pages) for pages in to_pages]) == [True] * 8
        for one, other in zip(from_pages, to_pages, strict=True):
            for there, here in zip(pieces(source, one), pieces(sink, other), strict=True):
                assert torch.equal(there, here)
        after = store.stats()
        moved = 2 * 8 * LAYOUT.payload_bytes
        assert after["bounced_bytes"] - before["bounced_bytes"] == (0 if aligned else moved)
        assert after["direct_bytes"] - before["direct_bytes"] == (moved if aligned else 0)
        assert after["put_copied_bytes"] == after["get_copied_bytes"] == 0
        entry = store.entry("k0")
        assert len(entry.extents) == 1, "one extent, however many pages"


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
def test_a_layer_of_many_chunks_goes_to_pages(block_targets: Any, aligned: bool) -> None:
    target = block_targets(64 << 20)
    blockkv.format(target, average_chunk="64KiB")
    source, sink = pools(aligned), pools(aligned)
    from_pages, to_pages = drawn(8, 1), drawn(8, 2)
    keys = [f"k{number}" for number in range(8)]
    wanted = [
        (number, page, Part(layers=1, kv=word, tokens=range(at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)))
        for number, pages in enumerate(to_pages)
        for word in ("k", "v")
        for at, page in enumerate(pages)
    ]
    with blockkv.open(target, commit_interval_ms=None) as store:
        store.put_many([(key, pieces(source, pages)) for key, pages in zip(keys, from_pages, strict=True)])
        hits = store.get_many(
            [keys[number] for number, _, _ in wanted],
            [
                sink[1][int(part.kv == "v"), page].view(1, 1, PAGE_TOKENS, HEADS, DIM)
                for _, page, part in wanted
            ],
            part=[part for _, _, part in wanted],
            layout=LAYOUT,
        )
        assert all(hits)
    for one, other in zip(from_pages, to_pages, strict=True):
        for kv in range(2):
            assert torch.equal(source[1][kv, one], sink[1][kv, other])
