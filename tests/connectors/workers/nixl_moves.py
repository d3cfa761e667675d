"""NIXL moves chunks of the stores it is told of; prints what came of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

import blockkv
from blockkv.errors import StoreFull

EXAMPLE = Path(__file__).parents[3] / "examples" / "nixl_extents.py"


def example() -> Any:
    specification = importlib.util.spec_from_file_location("nixl_extents", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["nixl_extents"] = module
    specification.loader.exec_module(module)
    return module


def in_pieces(device: list[str]) -> dict[str, int]:
    """Chunks that lie in pieces, deleted while they are leased, and read while the store is written to."""
    mover = example().Mover()
    with blockkv.open(device, evict=False) as store, contextlib.ExitStack() as leases:
        count = 0
        with contextlib.suppress(StoreFull):
            while True:
                store.put(f"{count}", torch.zeros(256 << 10, dtype=torch.uint8))
                count += 1
        for number in range(count):
            if number % 4 < 2:  # the members take turns
                store.delete(f"{number}")
        store.commit()
        values = [torch.randint(256, (2 << 20,), dtype=torch.uint8) for _ in range(4)]
        for number, value in enumerate(values):
            store.put(f"in pieces {number}", value)
        chunks = [leases.enter_context(store.extents(f"in pieces {one}")) for one in range(len(values))]
        for number in range(len(values)):
            store.delete(f"in pieces {number}", durable=True)
        store.put_many({f"more {one}": torch.ones(1 << 18) for one in range(8)}, durable=True)
        memory = [blockkv.empty(chunk.size_bytes, torch.uint8) for chunk in chunks]
        mover.move(chunks, memory)
        return {
            "pieces": sum(len(chunk.descriptors) for chunk in chunks),
            "devices": len({chunk.descriptors[0].fd for chunk in chunks}),
            "equal": sum(
                torch.equal(chunk.tensors(moved), value)
                for chunk, moved, value in zip(chunks, memory, values, strict=True)
            ),
        }


if __name__ == "__main__":
    print(json.dumps(in_pieces(sys.argv[1:])))
