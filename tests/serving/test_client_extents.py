"""A client gets the extents of a chunk as the owner does, and its lease holds it for both."""

from __future__ import annotations

import os

import torch
from serving_tools import Serves, wait_until

import blockkv


def moved(chunk: blockkv.ChunkExtents) -> torch.Tensor:
    memory = blockkv.empty(chunk.size_bytes, torch.uint8)
    position = 0
    for fd, offset_bytes, length_bytes in chunk.descriptors:
        piece = memoryview(memory.numpy())[position : position + length_bytes]
        assert os.preadv(fd, [piece], offset_bytes) == length_bytes
        position += length_bytes
    return memory


def test_what_a_client_has_leased_stays_where_it_is(serve: Serves) -> None:
    owner = serve()
    value = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    with blockkv.open(owner.path) as client, blockkv.open(owner.path) as other:
        client.put("k", value)
        assert client.extents("elsewhere") is None
        with client.extents("k") as chunk:
            other.delete("k", durable=True)
            for number in range(80):
                other.put(f"{number}", torch.full((1 << 20,), number % 256, dtype=torch.uint8))
            assert other.stats()["chunks_evicted"]
            assert torch.equal(chunk.tensors(moved(chunk)), value)
            assert client.extents("k") is None
        assert not client.contains("k")


def test_a_lease_ends_with_its_owner_and_what_comes_then_does_not_verify(serve: Serves) -> None:
    owner = serve()
    device = owner.store.info()["path"]
    with blockkv.open(owner.path) as client:
        client.put("k", torch.ones(1 << 20, dtype=torch.uint8), durable=True)
        chunk = client.extents("k")
        memory = moved(chunk)
        serve.end(owner)
        with blockkv.open(device) as store:
            store.delete("k", durable=True)
            for number in range(80):
                store.put(f"{number}", torch.full((1 << 20,), 2 + number % 250, dtype=torch.uint8))
        assert chunk.verify(memory)
        wait_until(lambda: not chunk.verify(moved(chunk)), "its space to hold another chunk", 5)
        chunk.close()
