"""A process that carries one adapter out on request: a JSON object a line in, a JSON object a line back.

    {"do": "probe"}                                  -> {"NAME": {"missing": "", "version": "0.5.6"}, ...}
    {"do": "open", "peer": NAME, "memory": "ordinary", ...the fields of `Setup`}
    {"do": "put", "seconds": 1.0, "durable": false}  -> {"moved_bytes": ..., "wall_s": ..., "cpu_s": ...}
    {"do": "get", "seconds": 1.0}                    -> the same
    {"do": "clear"}, {"do": "close"}

A put stores all chunks of the set once, or again after a `clear` until `seconds` were spent in putting; a get
reads them once, or again after a `forget`. Only the adapter's `put` and `get` are timed. CPU is user and
system time of this process, all threads, and of children it waited for.

What was got is compared with what was put, every byte, outside the measurement. An error ends the process
after one line {"error": ...}. What a peer prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from peers import PEERS
from peers.base import Peer, Setup, arena

STAMP_BYTES = 8
SEED = 0x626B76
PR_SET_PDEATHSIG = 1


def probe() -> dict[str, Any]:
    """What can be used here."""
    found = {}
    for name, peer in PEERS.items():
        missing = peer.missing()
        version = "" if missing else version_of(peer.packages[0].partition("==")[0])
        found[name] = {"missing": missing, "version": version}
    return found


def version_of(distribution: str) -> str:
    """The installed version; "" for a source tree that was never installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Work:
    """One adapter, its memory and the chunks it stores."""

    def __init__(self, request: dict[str, Any]) -> None:
        fields = ("chunk_bytes", "batch_chunks", "chunk_count", "threads")
        setup = Setup(Path(request["place"]), **{field: request[field] for field in fields})
        self.setup = setup
        self.payloads = allocate(request["memory"], setup)
        self.outs = allocate(request["memory"], setup)
        generator = torch.Generator().manual_seed(SEED)
        for payload in self.payloads:
            payload.random_(0, 256, generator=generator)
        self.peer: Peer = PEERS[request["peer"]](setup)
        self.peer.open(self.payloads, self.outs)
        self.generation = 0

    def batches(self) -> Iterator[range]:
        """The chunks of the set, a batch at a time."""
        for first in range(0, self.setup.chunk_count, self.setup.batch_chunks):
            yield range(first, min(first + self.setup.batch_chunks, self.setup.chunk_count))

    def stamp(self, chunks: Sequence[int]) -> Sequence[torch.Tensor]:
        """Make the payloads those of `chunks`, unlike any other's and any earlier ones."""
        for chunk, payload in zip(chunks, self.payloads, strict=False):
            payload[:STAMP_BYTES].view(torch.int64)[0] = self.generation << 32 | chunk
        return self.payloads[: len(chunks)]

    def put(self, seconds: float, durable: bool) -> dict[str, float]:
        """Store the set."""
        clock = Clock()
        while clock.wall_s < seconds or not clock.moved_bytes:
            self.peer.clear()
            self.generation += 1
            for chunks in self.batches():
                payloads = self.stamp(chunks)
                clock.time(
                    lambda chunks=chunks, payloads=payloads: self.peer.put(chunks, payloads, durable),
                    len(chunks) * self.setup.chunk_bytes,
                )
        self.peer.settle()
        return clock.result()

    def get(self, seconds: float) -> dict[str, float]:
        """Read the set, cold."""
        clock = Clock()
        while clock.wall_s < seconds or not clock.moved_bytes:
            self.peer.forget()
            for chunks in self.batches():
                outs = self.outs[: len(chunks)]
                got = clock.time(
                    lambda chunks=chunks, outs=outs: self.peer.get(chunks, outs),
                    len(chunks) * self.setup.chunk_bytes,
                )
                self.compare(chunks, got)
        return clock.result()

    def compare(self, chunks: Sequence[int], got: Sequence[torch.Tensor]) -> None:
        """Every byte. What was read is spoilt then, so that the next get has to read it again."""
        for chunk, tensor, payload in zip(chunks, got, self.stamp(chunks), strict=True):
            if not torch.equal(tensor, payload):
                raise RuntimeError(f"chunk {chunk} came back with bytes that were not put")
            tensor[:STAMP_BYTES] = 0


def allocate(memory: str, setup: Setup) -> list[torch.Tensor]:
    """One batch of chunks, every page touched."""
    if memory == "huge":
        return arena(setup.batch_chunks, setup.chunk_bytes)
    return [torch.zeros(setup.chunk_bytes, dtype=torch.uint8) for _ in range(setup.batch_chunks)]


class Clock:
    """Wall time and CPU of what it times, together."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.moved_bytes = 0

    def time(self, work: Callable[[], Any], moved_bytes: int) -> Any:
        """Do it."""
        cpu_s, started = cpu_used_s(), time.perf_counter()
        outcome = work()
        self.wall_s += time.perf_counter() - started
        self.cpu_s += cpu_used_s() - cpu_s
        self.moved_bytes += moved_bytes
        return outcome

    def result(self) -> dict[str, float]:
        """As it goes over the line."""
        return {"moved_bytes": self.moved_bytes, "wall_s": self.wall_s, "cpu_s": self.cpu_s}


def cpu_used_s() -> float:
    """User and system time of this process and of children it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def answer(request: dict[str, Any], work: Work | None) -> tuple[dict[str, Any], Work | None]:
    """Carry one request out."""
    verb = request["do"]
    if verb == "probe":
        return probe(), work
    if verb == "open":
        return {}, Work(request)
    assert work is not None, f"{verb} before open"
    if verb == "put":
        return work.put(request["seconds"], request["durable"]), work
    if verb == "get":
        return work.get(request["seconds"]), work
    if verb == "clear":
        work.peer.clear()
        work.peer.settle()
        return {}, work
    assert verb == "close", verb
    work.peer.close()
    return {}, None


def serve(replies: TextIO) -> int:
    """Answer until standard input ends."""
    work = None
    for line in sys.stdin:
        try:
            reply, work = answer(json.loads(line), work)
        except Exception as error:  # whatever a peer raises is its result
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies, flush=True)
            return 1
        print(json.dumps(reply), file=replies, flush=True)
    return 0


def die_with_parent() -> None:
    """Whatever threads a peer has: who asks for nothing any more must not find the device in use."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Keep the answers apart from what peers print."""
    die_with_parent()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return serve(replies)


if __name__ == "__main__":
    sys.exit(main())
