#!/usr/bin/env python3
"""Two processes, one device: what one computes the other finds.

    examples/two_clients.py                    a store in a temporary file
    examples/two_clients.py /dev/nvme0n1p4     a partition or namespace that holds nothing; it is formatted

`blockkv serve` owns the device. Two workers open its socket: the first stores the KV cache of a prompt, the
second looks up a longer prompt that begins the same, and loads what is there. Then the owner is killed and
started again under them, and they go on. No payload crosses the socket: workers read and write the device
themselves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import blockkv

TOKENS_A_CHUNK, LAYERS, HEADS, DIM = 256, 4, 8, 64
PROMPT = list(range(1024))
LONGER = [*PROMPT, *range(5000, 5512)]
PATIENCE_S = 30


def start_owner(device: str, socket: str) -> subprocess.Popen[bytes]:
    """`blockkv serve`, ready."""
    owner = subprocess.Popen(
        [sys.executable, "-m", "blockkv", "serve", device, "--socket", socket], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    print(f"owner:    {owner.stdout.readline().decode().strip()}", flush=True)
    return owner


def keys_of(tokens: list[int]) -> list[str]:
    """One key for each whole chunk of a prompt, which depends on all tokens before."""
    family = blockkv.Family(model="toy", weights="none", dtype="float16", layout="layers kv tokens heads dim")
    return blockkv.prefix_keys(tokens, TOKENS_A_CHUNK, family)


def kv_of(key: str) -> torch.Tensor:
    """What a model would compute for a chunk: here it follows from the key."""
    generator = torch.Generator().manual_seed(int.from_bytes(key.encode()[-6:], "little"))
    return torch.randn(LAYERS, 2, TOKENS_A_CHUNK, HEADS, DIM, generator=generator).half()


def first_worker(socket: str, other: Connection) -> None:
    """Computes a prompt and stores it."""
    with blockkv.open(socket) as store:
        keys = keys_of(PROMPT)
        store.put_many([(key, kv_of(key)) for key in keys], durable=True)
        print(f"worker 1: stored {len(keys)} chunks", flush=True)
        other.send("stored")
        other.recv()


def second_worker(socket: str, other: Connection) -> None:
    """Has a longer prompt, and finds its beginning."""
    with blockkv.open(socket) as store:
        other.recv()
        keys = keys_of(LONGER)
        found = store.lookup(keys)
        chunks = store.get_many(keys[:found])
        assert all(torch.equal(chunk, kv_of(key)) for chunk, key in zip(chunks, keys, strict=False))
        print(f"worker 2: found {found} of {len(keys)} chunks, computes {len(keys) - found}", flush=True)
        store.put_many([(key, kv_of(key)) for key in keys[found:]], durable=True)
        other.send("kill the owner")
        other.recv()
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := store.lookup(keys)) < len(keys):  # all of it misses, until the owner is back
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert all(torch.equal(store.get(key), kv_of(key)) for key in keys)
        print(f"worker 2: the owner is back, {found} of {len(keys)} chunks are there", flush=True)
        other.send("done")


def main() -> None:
    parser = argparse.ArgumentParser(description="Two processes share one device.")
    parser.add_argument("device", nargs="?", help="a partition or namespace that holds nothing")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as directory:
        path, socket = device or str(Path(directory) / "store.img"), str(Path(directory) / "owner.sock")
        blockkv.format(path, size=None if device else "256MiB")
        owner = start_owner(path, socket)
        context = multiprocessing.get_context("spawn")
        ours: list[Connection] = []
        workers = []
        for work in (first_worker, second_worker):
            here, there = context.Pipe()
            ours.append(here)
            workers.append(context.Process(target=work, args=(socket, there)))
            workers[-1].start()
        first, second = ours
        try:
            second.send(first.recv())
            second.recv()
            owner.kill()
            owner.wait()
            second.send("killed")
            owner = start_owner(path, socket)
            second.recv()
            first.send("done")
            for worker in workers:
                worker.join(PATIENCE_S)
                assert worker.exitcode == 0
        finally:
            owner.terminate()
            owner.wait()


if __name__ == "__main__":
    main()
