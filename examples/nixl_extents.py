#!/usr/bin/env python3
"""Chunks moved by NIXL straight from where the store has put them, and verified where they arrive.

    examples/nixl_extents.py                      a store in a temporary file
    examples/nixl_extents.py /dev/nvme0n1p4       a partition or namespace that holds nothing; it is formatted

NIXL's POSIX plugin reads with io_uring into host memory; with a CUDA build and the "GDS" plugin the same
descriptors go into memory of a GPU, registered as "VRAM". Needs the package nixl (or nixl-cu12).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import blockkv


def nixl_api() -> Any:
    """The Python API, under whichever name this build of NIXL has."""
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{package}._api")
    raise SystemExit("this needs NIXL: pip install nixl-cu12")


class Mover:
    """An agent with the POSIX plugin, which moves extents of a store to memory."""

    def __init__(self) -> None:
        api = nixl_api()
        self._agent = api.nixl_agent("blockkv", api.nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {"use_uring": "true"})

    def move(self, chunks: Sequence[blockkv.ChunkExtents], into: Sequence[torch.Tensor]) -> None:
        """Read all chunks in one transfer. Raises RuntimeError where NIXL says that it failed."""
        files, memory = [], []
        for chunk, target in zip(chunks, into, strict=True):
            position = 0
            for fd, offset_bytes, length_bytes in chunk.descriptors:
                files.append((offset_bytes, length_bytes, fd, ""))
                memory.append((target.data_ptr() + position, length_bytes, 0, ""))
                position += length_bytes
        agent = self._agent
        registered = [
            agent.register_memory(files, "FILE", backends=["POSIX"]),
            agent.register_memory(memory, "DRAM", backends=["POSIX"]),
        ]
        try:
            remote = agent.get_xfer_descs([one[:3] for one in files], "FILE")
            local = agent.get_xfer_descs([one[:3] for one in memory], "DRAM")
            handle = agent.initialize_xfer("READ", local, remote, "blockkv")
            try:
                state = agent.transfer(handle)
                while state == "PROC":
                    time.sleep(0.0001)
                    state = agent.check_xfer_state(handle)
                if state != "DONE":
                    raise RuntimeError(f"NIXL ended with {state}")
            finally:
                agent.release_xfer_handle(handle)
        finally:
            for one in registered:
                agent.deregister_memory(one)


def run(device: str | Path) -> dict[str, int]:
    """Store some layers, read them back through NIXL. Returns how many came, and verified."""
    layers = {f"layer-{one}": torch.randn(2, 256, 8, 128).half() for one in range(8)}
    with blockkv.open(device) as store, contextlib.ExitStack() as leases:
        store.put_many(layers)
        found = [store.extents(key) for key in [*layers, "elsewhere"]]
        chunks = [leases.enter_context(chunk) for chunk in found if chunk is not None]
        memory = [blockkv.empty(chunk.size_bytes, torch.uint8) for chunk in chunks]
        Mover().move(chunks, memory)
        arrived = [chunk.tensors(moved) for chunk, moved in zip(chunks, memory, strict=True)]
        equal = sum(torch.equal(one, other) for one, other in zip(arrived, layers.values(), strict=True))
        memory[3][12345] ^= 1  # as if the transfer had gone wrong
        return {"moved": len(chunks), "equal": equal, "wrong_accepted": int(chunks[3].verify(memory[3]))}


def main() -> None:
    parser = argparse.ArgumentParser(description="move chunks with NIXL")
    parser.add_argument("device", nargs="?", help="a device that holds nothing (default: a temporary file)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.device:
            device: str | Path = arguments.device
            blockkv.format(device)
        else:
            device = Path(directory) / "store.img"
            blockkv.format(device, size="256MiB")
        outcome = run(device)
    print(f"{outcome['moved']} chunks moved by NIXL, {outcome['equal']} equal to what was put")
    print("a byte changed on the way: " + ("taken for right" if outcome["wrong_accepted"] else "told"))


if __name__ == "__main__":
    main()
