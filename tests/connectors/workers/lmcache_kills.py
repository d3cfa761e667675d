"""An adapter under load whose process is killed at any moment: what LMCache was told is stored, hits.

    lmcache_kills.py ROUNDS SEED

The process that stores tells of every acknowledgement by a pipe, and is killed; another one opens what is
left, looks for all of it, reads it, and compares the count with the store. Prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from lmcache_contract import CHUNK_BYTES, L1, Device, Listener, content, keys, load, look, store, stored_bytes

BATCH = 4
PATIENCE_S = 60
MOST_BATCHES = 1500
"""In one life: less than there is room for, however fast the machine is."""
CONTENTS = 16
"""Objects have one of so many contents, by their number."""


def write(device: Device, first: int, acknowledged: int) -> None:
    """Store, evict and delete until killed; the pipe gets the number of each batch that is acknowledged."""
    l1 = L1()
    tier = device.open(l1)
    objects = [l1.object(fill=number) for number in range(CONTENTS)]
    for batch in range(first, first + MOST_BATCHES):
        numbers = range(batch * BATCH, (batch + 1) * BATCH)
        result = store(tier, keys(numbers), [objects[number % CONTENTS] for number in numbers])
        assert result.is_successful()
        os.write(acknowledged, f"{batch}\n".encode())
    signal.pause()


def check(device: Device, batches: list[int], answer: int) -> None:
    """Every batch hits and is right, and usage is what is there."""
    l1 = L1()
    tier = device.open(l1)
    listener = Listener()
    tier.register_listener(listener)
    usage = tier.get_usage()
    assert usage.total_bytes_used == stored_bytes(tier) == sum(listener.sizes.values())
    assert len(listener.sizes) == tier.report_status()["keys_recovered"]
    out = l1.blank(BATCH)
    right = [content(number) for number in range(CONTENTS)]
    for batch in batches:
        numbers = range(batch * BATCH, (batch + 1) * BATCH)
        assert look(tier, keys(numbers)) == [True] * BATCH, batch
        assert load(tier, keys(numbers), out) == [True] * BATCH, batch
        for number, one in zip(numbers, out, strict=True):
            assert torch.equal(one.raw_data, right[number % CONTENTS]), number
        tier.submit_unlock(keys(numbers))
    # Room for the next round: LMCache deletes what it likes, and that is counted, too.
    tier.delete(list(listener.sizes)[: len(listener.sizes) // 2])
    assert tier.get_usage().total_bytes_used == stored_bytes(tier)
    tier.close()
    os.write(answer, f"{usage.total_bytes_used // CHUNK_BYTES}\n".encode())


def forked(call: object, *arguments: object) -> tuple[int, int]:
    """The process that calls it with these and the end of a pipe to write to; the other end."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    code = 1
    try:
        call(*arguments, theirs)  # type: ignore[operator]
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def rest_of(descriptor: int) -> list[int]:
    """The numbers in a pipe, but for one that was cut short."""
    with os.fdopen(descriptor, "rb") as pipe:
        return [int(line) for line in pipe.read().split(b"\n")[:-1]]


def main(rounds: str, seed: str) -> None:
    dice = random.Random(int(seed))
    acknowledged, chunks, first = 0, [], 0
    with tempfile.TemporaryDirectory(prefix="blockkv-lmcache-", dir="/var/tmp") as folder:
        device = Device(Path(folder), size="2GiB")
        for _ in range(int(rounds)):
            child, pipe = forked(write, device, first)
            select.select([pipe], [], [], PATIENCE_S)  # until it has begun
            time.sleep(0.1 + dice.random())
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            batches = rest_of(pipe)
            acknowledged += len(batches)
            first = max([first, *batches]) + 2  # one may have been on its way
            child, pipe = forked(check, device, batches)
            status = os.waitpid(child, 0)[1]
            assert status == 0, f"batches {batches[:1]} to {batches[-1:]}"
            chunks += rest_of(pipe)
    print(json.dumps({"acknowledged": acknowledged * BATCH, "chunks": chunks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
