#!/usr/bin/env python3
"""Kill a store with SIGKILL at random moments, under load, and look at what it left behind.

    tools/kill_test.py DEVICE --kills 100 [--seed S] [--json] [--force]

Every round a child opens the store and puts and deletes from several threads until it is killed, with
reads, writes and journal pages in flight. It says on a pipe what it is about to do and what was
acknowledged. Another child then opens the store and checks

    lost       a chunk whose durable put was acknowledged, and that nobody began to delete, is missing
    wrong      a chunk that is present has other bytes than were put under its key
    phantom    a chunk is present that nobody put, or whose durable delete was acknowledged
    unopened   the store did not open, or its own check found problems

The store does not evict here, so nothing may be missing. Exits with 1 when anything was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # noqa: F401 - in the parent: or every child spends its short life importing it for its first put
from rich.console import Console
from rich.progress import Progress

import blockkv

THREADS = 4
SIZES = (5_000, 16_384, 70_000, 131_072, 400_000, 2 << 20)
LONGEST_LIFE_S = 0.15


def payload(name: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The bytes of a key: different in every word, and between any two keys."""
    rng = random.Random(name)  # noqa: S311
    words = rng.choice(SIZES) // 8
    return np.arange(words, dtype=np.uint64) * np.uint64(rng.getrandbits(64) | 1) + np.uint64(
        rng.getrandbits(64)
    )


def work(device: str, round_index: int, seed: int, say: Callable[[str], None]) -> None:
    """Put and delete until killed."""
    store = blockkv.open(device, evict=False, commit_interval_ms=2)
    say("ready")

    def one(thread_index: int) -> None:
        rng = random.Random(f"{seed}.{round_index}.{thread_index}")  # noqa: S311
        mine: list[str] = []
        for step in range(1_000_000):
            names = [f"{round_index}.{thread_index}.{step}.{part}" for part in range(rng.choice((1, 1, 4)))]
            durable = rng.random() < 0.7
            try:
                say("put " + " ".join(names))
                store.put_many([(name, payload(name)) for name in names], durable=durable)
                if durable:
                    say("durable " + " ".join(names))
                mine += names
            except (blockkv.StoreFull, blockkv.BatchError):
                pass
            while len(mine) > 12 or (mine and rng.random() < 0.2):
                victim = mine.pop(rng.randrange(len(mine)))
                say(f"deleting {victim}")
                store.delete(victim, durable=rng.random() < 0.5)
                # A later durable operation covers it in any case; only that one's acknowledgement counts.
                if rng.random() < 0.5:
                    store.commit()
                    say(f"deleted {victim}")
            if rng.random() < 0.05:
                store.checkpoint()
            if mine:
                store.get(rng.choice(mine))

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Ledger:
    """What the store was asked for and what it acknowledged, over all rounds."""

    def __init__(self) -> None:
        self.put: set[str] = set()
        self.durable: set[str] = set()
        self.deleting: set[str] = set()
        self.deleted: set[str] = set()

    def note(self, line: str) -> None:
        verb, *names = line.split()
        {
            "put": self.put,
            "durable": self.durable,
            "deleting": self.deleting,
            "deleted": self.deleted,
            "ready": set[str](),
        }[verb].update(names)


def inspect(device: str, ledger: Ledger, say: Callable[[str], None]) -> None:
    """Open what the killed process left and compare it with the ledger; say one JSON line."""
    found: dict[str, list[str]] = {"lost": [], "wrong": [], "phantom": [], "unopened": []}
    figures: dict[str, Any] = {}
    started = time.monotonic()
    try:
        with blockkv.open(device, evict=False) as store:
            figures = {"open_s": time.monotonic() - started, **store.info()["recovery"]}
            keys = [str(key) for key in store.keys()]  # noqa: SIM118 - a store is no mapping
            for name, tensor in zip(keys, store.get_many(keys), strict=True):
                if name not in ledger.put or name in ledger.deleted:
                    found["phantom"].append(name)
                elif tensor is None or bytes(tensor.numpy()) != payload(name).tobytes():
                    found["wrong"].append(name)
            found["lost"] = sorted(ledger.durable - ledger.deleting - set(keys))
            report = store.check()
            if not report.ok:
                found["unopened"].append(str(report))
            figures["chunks"] = len(keys)
            victims = [name for name in keys if name in ledger.deleting or random.random() < 0.5]  # noqa: S311
            for name in victims:
                say(f"deleting {name}")
                store.delete(name)
        for name in victims:
            say(f"deleted {name}")
    except blockkv.BlockKVError as error:
        found["unopened"].append(f"{type(error).__name__}: {error}")
    say("result " + json.dumps({"found": found, "figures": figures}))


def in_child(action: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Run `action` in a forked process; returns its pid and the pipe it says its lines on."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.close(reading)
        action(lambda line: os.write(writing, (line + "\n").encode()) and None)
    finally:
        os._exit(0)


def read_lines(pipe: int, until: float | None = None) -> list[str]:
    """Everything said on the pipe until it is closed, or until that time."""
    data = b""
    while until is None or time.monotonic() < until:
        if until is not None and not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            break
        piece = os.read(pipe, 1 << 16)
        if not piece:
            break
        data += piece
        if until is not None and b"ready\n" in data:
            break
    return data.decode().splitlines(keepends=True)


def run(device: str, kills: int, seed: int, progress: Callable[[], None]) -> dict[str, Any]:
    """Kill `kills` times; returns the figures, with everything found by kind."""
    rng = random.Random(seed)  # noqa: S311
    ledger = Ledger()
    totals: dict[str, list[str]] = {"lost": [], "wrong": [], "phantom": [], "unopened": []}
    opens_s, dropped, unsealed, acknowledged = [], 0, 0, 0
    for round_index in range(kills):
        pid, pipe = in_child(lambda say, r=round_index: work(device, r, seed, say))  # type: ignore[misc]
        lines = read_lines(pipe, time.monotonic() + 30)
        time.sleep(rng.random() * LONGEST_LIFE_S)
        os.kill(pid, signal.SIGKILL)
        lines += read_lines(pipe)
        os.close(pipe)
        os.waitpid(pid, 0)
        for line in "".join(lines).splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be cut short by the kill
                ledger.note(line)
        acknowledged = len(ledger.durable)
        pid, pipe = in_child(lambda say: inspect(device, ledger, say))
        for line in read_lines(pipe):
            verb, _, rest = line.strip().partition(" ")
            if verb != "result":
                ledger.note(line)
                continue
            outcome = json.loads(rest)
            for kind, names in outcome["found"].items():
                totals[kind] += [f"round {round_index}: {name}" for name in names]
            opens_s.append(outcome["figures"].get("open_s", 0.0))
            dropped += outcome["figures"].get("chunks_dropped_unsealed", 0)
            unsealed += outcome["figures"].get("chunks_unsealed", 0)
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
        if status or len(opens_s) != round_index + 1:
            totals["unopened"].append(f"round {round_index}: the checking process ended with {status}")
            opens_s.append(0.0)
        progress()
    return {
        "device": device,
        "kills": kills,
        "seed": seed,
        "durable_puts_acknowledged": acknowledged,
        "deletes_acknowledged": len(ledger.deleted),
        "unsealed_chunks_verified": unsealed,
        "unsealed_chunks_dropped": dropped,
        "longest_open_s": round(max(opens_s, default=0.0), 3),
        **{kind: len(names) for kind, names in totals.items()},
        "findings": [name for names in totals.values() for name in names],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", help="block device, or a file that is created with --size; it is formatted")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="default: random, printed")
    parser.add_argument("--size", default=None, help="size of the file to create")
    parser.add_argument("--force", action="store_true", help="format a device that holds other data")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    blockkv.format(
        options.device, size=options.size, average_chunk="64KiB", journal="256KiB", force=options.force
    )
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("killing", total=options.kills)
        figures = run(options.device, options.kills, seed, lambda: bar.advance(task))
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>28}  {value}")
    return int(bool(figures["findings"]))


if __name__ == "__main__":
    sys.exit(main())
