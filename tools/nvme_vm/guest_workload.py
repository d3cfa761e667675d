"""In the guest: use a store until the power is cut, and tell the harness about every step.

    guest_workload.py SEED [--fresh] [--mutant-steps N]

Each round a child opens the store, says what it found, and puts, deletes, evicts, commits and checkpoints
from several threads; it ends with a clean close or is killed. What is said before a step and after it:

    format, formatted
    open, found KEY VERSION, missing KEY     after an open: what it shows is there to stay
    put KEY VERSION, is-put KEY ...          begun; returned
    delete KEY, is-deleted KEY
    durable KEY ...                          a durable put or delete of these was acknowledged
    commit THREAD, committed THREAD          what had returned before is durable
    pinned KEY, unpin KEY                    in between it may not be evicted
    wrong KEY                                a get gave other bytes

With `--mutant-steps` a store that does not flush comes first, for so many steps, on namespaces of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch  # noqa: F401 - once, in the parent of all children
from guest_devices import Control, namespaces
from payloads import payload, version_of

import blockkv
from blockkv.device.engine import NativeDevice

DATA_NSID, CONTROL_NSID, MUTANT_NSID, MUTANT_CONTROL_NSID = 1, 2, 3, 4
THREADS = 4
KEYS_PER_THREAD = 16
PINNED_PER_THREAD = 5
LONGEST_ROUND_S = 4.0


class Worker:
    """One thread with keys of its own, so that the steps on a key have an order."""

    def __init__(self, store: blockkv.Store, control: Control, number: int, seed: str) -> None:
        self.store, self.control = store, control
        self.rng = random.Random(seed)  # noqa: S311
        self.name = f"t{number}"
        self.keys = [f"{number}.{part}" for part in range(KEYS_PER_THREAD)]
        self.versions = dict.fromkeys(self.keys, 0)
        self.pinned: list[str] = []

    def look(self) -> None:
        """Say what the open store has of the keys."""
        for key in self.keys:
            found = self.store.get(key)
            if found is None:
                self.control.say(f"missing {key}")
                continue
            try:
                version = version_of(key, found.numpy())
            except ValueError:
                self.control.say(f"wrong {key}")
                continue
            self.versions[key] = version
            self.control.say(f"found {key} {version}")

    def run(self, stop: threading.Event, limit: int) -> None:
        # a version is never put twice, whatever a crash took back
        base = time.time_ns()
        for step in range(limit):
            if stop.is_set():
                return
            chosen = self.rng.random()
            if chosen < 0.6:
                self.put(base + step)
            elif chosen < 0.8:
                self.delete()
            elif chosen < 0.9:
                self.check()
            elif chosen < 0.97:
                self.control.say(f"commit {self.name}")
                self.store.commit()
                self.control.say(f"committed {self.name}")
            else:
                self.store.checkpoint()

    def put(self, version: int) -> None:
        free = [key for key in self.keys if key not in self.store]
        keys = self.rng.sample(free, min(len(free), self.rng.choice((1, 1, 1, 4))))
        if not keys:
            return self.delete()
        durable = self.rng.random() < 0.6
        for key in keys:
            self.control.say(f"put {key} {version}")
        try:
            self.store.put_many([(key, payload(key, version).data) for key in keys], durable=durable)
        except (blockkv.StoreFull, blockkv.BatchError):
            return None
        self.control.say(f"{'durable' if durable else 'is-put'} {' '.join(keys)}")
        while len(self.pinned) >= PINNED_PER_THREAD:
            self.unpin(self.pinned[0])
        for key in keys[:1]:
            if self.store.pin(key):
                self.pinned.append(key)
                self.control.say(f"pinned {key}")
        return None

    def unpin(self, key: str) -> None:
        self.pinned.remove(key)
        self.control.say(f"unpin {key}")
        self.store.unpin(key)

    def delete(self) -> None:
        there = [key for key in self.keys if key in self.store]
        if not there:
            return
        key = self.rng.choice(there)
        if key in self.pinned:
            self.unpin(key)
        durable = self.rng.random() < 0.5
        self.control.say(f"delete {key}")
        is_deleted = self.store.delete(key, durable=durable)
        # an eviction that came first is as good as a lazy delete
        self.control.say(f"{'durable' if durable and is_deleted else 'is-deleted'} {key}")

    def check(self) -> None:
        key = self.rng.choice(self.keys)
        found = self.store.get(key)
        if found is not None:
            try:
                version_of(key, found.numpy())
            except ValueError:
                self.control.say(f"wrong {key}")


def one_round(device: Path, control: Control, seed: str, step_limit: int, mutant: bool) -> None:
    rng = random.Random(seed)  # noqa: S311
    control.say("open")
    store = blockkv.open(device, commit_interval_ms=rng.choice((2.0, 10.0, None)), discard=rng.random() < 0.3)
    if mutant:
        NativeDevice.flush = lambda self: None  # type: ignore[method-assign]
    workers = [Worker(store, control, number, f"{seed}.{number}") for number in range(THREADS)]
    for worker in workers:
        worker.look()
    stop = threading.Event()
    threads = [threading.Thread(target=worker.run, args=(stop, step_limit)) for worker in workers]
    for thread in threads:
        thread.start()
    if step_limit == sys.maxsize:
        time.sleep(rng.random() * LONGEST_ROUND_S)
        if rng.random() < 0.5:
            os.kill(os.getpid(), signal.SIGKILL)
        stop.set()
    for thread in threads:
        thread.join()
    store.close()


def in_child(device: Path, control: Control, seed: str, step_limit: int, mutant: bool) -> None:
    child = os.fork()
    if child == 0:
        try:
            one_round(device, control, seed, step_limit, mutant)
        except BaseException as error:
            control.say(f"failed {type(error).__name__}: {error}"[:400])
            raise
        os._exit(0)
    os.waitpid(child, 0)


def make_store(device: Path, control: Control) -> None:
    control.say("format")
    blockkv.format(device, average_chunk="64KiB", journal="256KiB")
    control.say("formatted")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--mutant-steps", type=int, default=0)
    options = parser.parse_args()
    devices = namespaces()
    if options.mutant_steps:
        device, control = devices[MUTANT_NSID], Control(devices[MUTANT_CONTROL_NSID])
        make_store(device, control)
        in_child(device, control, f"{options.seed}.mutant", options.mutant_steps, mutant=True)
    device, control = devices[DATA_NSID], Control(devices[CONTROL_NSID])
    if options.fresh:
        make_store(device, control)
    for number in itertools.count():
        in_child(device, control, f"{options.seed}.{number}", sys.maxsize, mutant=False)


if __name__ == "__main__":
    main()
