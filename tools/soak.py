#!/usr/bin/env python3
"""Hours of everything at once, with every byte and every order of events checked.

    tools/soak.py --seconds 600                      on partitions of a loop device in memory (root)
    tools/soak.py --device /dev/nvme0n1 --force      one store on this device; it is formatted
    tools/soak.py --seed 7 --threads 12 --engine threads --json

In every process, threads put, get, delete, pin, touch, commit, checkpoint and check a store that is full, one
by one, many at a time and with futures; the same keys in all threads, more of them than fit, so that eviction
and reuse never stop. Other processes try to open and to format what is held, under every name it has, and
must be refused each time. At the end the store is closed, opened again, and compared.

Every 512 bytes of a chunk name its key, its version and their place in it. A version is put once, so every
get says of which put it saw the bytes. What must hold, with every operation an interval on one clock:

    wrong        a chunk gives bytes that no put of that key wrote, or a mixture
    stale        a get sees a version after something else about its key (a miss, a delete, another version)
                 was seen, that the version had preceded
    phantom      a put finds its key there, or a get sees a version, when nothing can be there
    lost         a key that is pinned, and that nobody deletes, is a miss
    inconsistent the store's own check finds something, or counts damage
    intruded     somebody else opened what was held
    failed       an operation raised what it should not

Exits with 1 when anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import logging
import os
import random
import select
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

import blockkv
from blockkv.device import namespace

Words = np.ndarray[Any, np.dtype[np.uint64]]

SIZES = (48, 512, 1000, 4096, 4097, 16_384, 65_536, 70_001, 131_072, 131_073, 300_007, 524_288, 1_048_579)
SIZE_WEIGHTS = (1, 1, 1, 4, 4, 8, 8, 8, 8, 4, 2, 1, 1)
"""Small ones fill the holes that large ones leave."""
SECTOR_BYTES = 512
SECTOR_WORDS = SECTOR_BYTES // 8
OVERCOMMIT = 2.5
"""Bytes of all keys over the size of the data zone."""
FUTURES = 6
FINDINGS_KEPT = 20
STORE_BYTES = 128 << 20
HARD_LINK = ".hard-link"
LOOP_CLR_FD = 0x4C01
"""ioctl of linux/loop.h: detach at the last close."""


# -- payload -----------------------------------------------------------------------------------------------


def payload(key: int, version: int, size_bytes: int) -> torch.Tensor:
    """Bytes like no other chunk's: each sector starts with key, version, its number and the size."""
    count = -(-size_bytes // SECTOR_BYTES) * SECTOR_WORDS
    factor = (key * 0x9E3779B97F4A7C15 + version * 0xD1B54A32D192ED03) % (1 << 64) | 1
    words: Words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(factor)
    sectors = words.reshape(-1, SECTOR_WORDS)
    sectors[:, 0], sectors[:, 1], sectors[:, 3] = key, version, size_bytes
    sectors[:, 2] = np.arange(len(sectors), dtype=np.uint64)
    return torch.from_numpy(words.view(np.uint8)[:size_bytes])


def version_in(value: torch.Tensor) -> int:
    """The version that the first sector names."""
    return int(value[:16].numpy().view(np.uint64)[1])


def describe_difference(value: torch.Tensor, expected: torch.Tensor) -> str:
    """Which sectors are not what they should be, and what they say they are."""
    found, wanted = value.numpy(), expected.numpy()
    wrong = sorted(set((np.flatnonzero(found != wanted) // SECTOR_BYTES).tolist()))
    says = []
    for sector in wrong[:4]:
        piece = found[sector * SECTOR_BYTES :][:32]
        says.append(
            f"{sector}: {piece.view(np.uint64).tolist() if len(piece) == 32 else piece.tobytes().hex()}"
        )
    return f"{len(wrong)} sectors of {len(found)} bytes, as key, version, sector, size: {'; '.join(says)}"


# -- the oracle --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Version:
    """What is known of one put's life; times are of the oracle's clock."""

    started: int
    born_by: int | None = None
    """It had been put by then."""
    dead_by: int | None = None
    """It was gone by then: something else was seen about its key, and had come later."""


@dataclass(slots=True)
class History:
    """Of one key."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    versions: dict[int, Version] = field(default_factory=dict)


class Oracle:
    """Judges operations by when they started and ended, and by what they saw.

    The life of a version is one interval, since no version is put twice: who was there before something else
    was seen cannot be there after it.
    """

    def __init__(self, key_count: int) -> None:
        self._clock = itertools.count(1)
        self._next_version = itertools.count(1)
        self._histories = [History() for _ in range(key_count)]
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []

    def now(self) -> int:
        return next(self._clock)

    def found(self, kind: str, what: str) -> None:
        with self._lock:
            self.counts[kind] += 1
            if len(self.findings) < FINDINGS_KEPT:
                self.findings.append(f"{kind}: {what}")

    def begin_put(self, key: int) -> int:
        """A new version, about to be put."""
        version = next(self._next_version)
        with self._histories[key].lock:
            self._histories[key].versions[version] = Version(self.now())
        return version

    def end_put(self, key: int, version: int, started: int, was_put: bool | None) -> None:
        """`was_put` is None when the put raised."""
        history, ended = self._histories[key], self.now()
        with history.lock:
            if was_put:
                self._see_something_else(history, version, started, ended)
                one = history.versions[version]
                one.born_by = min(one.born_by or ended, ended)
                return
            one = history.versions.pop(version)
            if one.born_by is not None:
                self.found(
                    "phantom", f"key {key}: version {version} was seen, and its put did not take place"
                )
            if was_put is False:
                self._check_possible(history, key, started, ended, "a put found its key there")

    def end_get(self, key: int, version: int | None, started: int) -> None:
        """A get ended: with this version, or with a miss."""
        history, ended = self._histories[key], self.now()
        with history.lock:
            if version is not None:
                one = history.versions.get(version)
                if one is None or one.started > ended:
                    self.found("phantom", f"key {key}: a get saw version {version}, which was never put")
                    return
                if one.dead_by is not None and one.dead_by < started:
                    self.found(
                        "stale",
                        f"key {key}: version {version}, gone by {one.dead_by}, seen {started} to {ended}",
                    )
                one.born_by = min(one.born_by or ended, ended)
            self._see_something_else(history, version, started, ended)

    def end_delete(self, key: int, was_there: bool, started: int) -> None:
        history, ended = self._histories[key], self.now()
        with history.lock:
            if was_there:
                self._check_possible(history, key, started, ended, "a delete found its key there")
            self._see_something_else(history, None, started, ended)

    def end_contains(self, key: int, is_there: bool, started: int) -> None:
        history, ended = self._histories[key], self.now()
        with history.lock:
            if is_there:
                self._check_possible(history, key, started, ended, "contains() said yes")
            else:
                self._see_something_else(history, None, started, ended)

    def _see_something_else(self, history: History, version: int | None, started: int, ended: int) -> None:
        gone = []
        for number, one in history.versions.items():
            if number == version or one.born_by is None or one.born_by > started:
                continue
            if one.dead_by is None or one.dead_by > ended:
                one.dead_by = ended
            if one.dead_by < self._oldest_running():
                gone.append(number)
        for number in gone:  # nobody can see it any more and be right
            del history.versions[number]

    def _check_possible(self, history: History, key: int, started: int, ended: int, what: str) -> None:
        if not any(
            one.started < ended and (one.dead_by is None or one.dead_by > started)
            for one in history.versions.values()
        ):
            self.found(
                "phantom", f"key {key}: {what} between {started} and {ended}, and nothing can have been"
            )

    # -- running operations, so that what is over can be forgotten

    running: dict[int, int]

    def _oldest_running(self) -> int:
        return min(self.running.values(), default=0)

    def versions_kept(self) -> int:
        return sum(len(history.versions) for history in self._histories)


# -- one store ---------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """One thread of operations drawn from its own seed."""

    def __init__(self, soak: Soak, number: int) -> None:
        super().__init__(name=f"soak-{number}", daemon=True)
        self.number = number
        self.soak = soak
        self.oracle = soak.oracle
        self.rng = random.Random(f"{soak.seed}.{number}")  # noqa: S311
        self.operations: Counter[str] = Counter()
        self.outputs: dict[int, torch.Tensor] = {}
        self._own_keys = [key for key in soak.own_keys if key % soak.threads == number]
        self._verbs: list[tuple[Callable[[blockkv.Store], None], int]] = [
            (self.get, 24),
            (self.get_into, 14),
            (self.get_many, 6),
            (self.get_later, 6),
            (self.put, 24),
            (self.put_many, 4),
            (self.put_later, 3),
            (self.delete, 4),
            (self.look, 8),
            (self.pin, 2),
            (self.commit, 1),
        ]

    def run(self) -> None:
        verbs, weights = zip(*self._verbs, strict=True)
        while not self.soak.over.is_set():
            with self.soak.open_store() as store:
                verb = self.rng.choices(verbs, weights)[0]
                self.oracle.running[self.number] = self.oracle.now()
                try:
                    verb(store)
                except Exception:
                    self.oracle.found("failed", f"{verb.__name__}: {traceback.format_exc(limit=6)}")
                finally:
                    self.oracle.running[self.number] = 1 << 62
                self.operations[verb.__name__] += 1
                if self.number == 0 and self.rng.random() < 0.002:
                    self.maintain(store)

    def draw(self) -> int:
        return self.rng.randrange(self.soak.shared_keys)

    def draw_several(self) -> list[int]:
        return self.rng.sample(range(self.soak.shared_keys), self.rng.randrange(2, 12))

    # -- reading

    def judge(self, key: int, value: torch.Tensor | None, started: int) -> None:
        if value is None:
            self.oracle.end_get(key, None, started)
            return
        expected = self.check_bytes(key, value)
        if expected is not None:
            self.oracle.end_get(key, expected, started)

    def check_bytes(self, key: int, value: torch.Tensor) -> int | None:
        """The version whose bytes these are; None, and a finding, where they are nobody's."""
        size_bytes = self.soak.sizes[key]
        if value.numel() != size_bytes:
            self.oracle.found("wrong", f"key {key}: {value.numel()} bytes instead of {size_bytes}")
            return None
        version = version_in(value)
        expected = payload(key, version, size_bytes)
        if not torch.equal(value, expected):
            self.oracle.found("wrong", f"key {key}: {describe_difference(value, expected)}")
            return None
        return version

    def get(self, store: blockkv.Store) -> None:
        key, started = self.draw(), self.oracle.now()
        self.judge(key, store.get(name(key)), started)

    def output(self, key: int) -> torch.Tensor:
        size_bytes = self.soak.sizes[key]
        whole = self.outputs.get(size_bytes)
        if whole is None:
            whole = self.outputs[size_bytes] = torch.empty(size_bytes + 64, dtype=torch.uint8)
        start = self.rng.choice((0, 0, 1, 7, 64))  # direct I/O wants aligned memory; callers do not know that
        return whole[start : start + size_bytes]

    def get_into(self, store: blockkv.Store) -> None:
        key = self.draw()
        out, started = self.output(key), self.oracle.now()
        self.judge(key, out if store.get(name(key), out=out) else None, started)

    def get_many(self, store: blockkv.Store) -> None:
        keys, started = self.draw_several(), self.oracle.now()
        values = store.get_many([name(key) for key in keys])
        for key, value in zip(keys, values, strict=True):
            self.judge(key, value, started)

    def get_later(self, store: blockkv.Store) -> None:
        keys = [self.draw() for _ in range(FUTURES)]
        pending = [(key, self.oracle.now(), store.submit_get(name(key))) for key in keys]
        for key, started, future in pending:
            self.judge(key, future.result(60), started)

    def look(self, store: blockkv.Store) -> None:
        key, started = self.draw(), self.oracle.now()
        if self.rng.random() < 0.5:
            self.oracle.end_contains(key, store.contains(name(key)), started)
        else:
            self.oracle.end_contains(key, store.entry(name(key)) is not None, started)
        store.touch(name(self.draw()))
        store.lookup([name(key) for key in self.draw_several()])
        self.soak.sample(store)

    # -- writing

    def put(self, store: blockkv.Store) -> None:
        key = self.draw()
        self.put_one(key, lambda value: store.put(name(key), value, durable=self.rng.random() < 0.1))

    def put_one(self, key: int, put: Callable[[torch.Tensor], bool]) -> int | None:
        """Returns the version that is there now, if it is ours."""
        version, started = self.oracle.begin_put(key), self.oracle.now()
        value = payload(key, version, self.soak.sizes[key])
        try:
            was_put = put(value)
        except blockkv.StoreFull:
            self.operations["full"] += 1
            self.oracle.end_put(key, version, started, None)
            return None
        self.oracle.end_put(key, version, started, was_put)
        return version if was_put else None

    def put_many(self, store: blockkv.Store) -> None:
        self.put_several(store, self.draw_several())

    def put_several(self, store: blockkv.Store, keys: list[int]) -> None:
        versions, started = [self.oracle.begin_put(key) for key in keys], self.oracle.now()
        items = [
            (name(key), payload(key, version, self.soak.sizes[key]))
            for key, version in zip(keys, versions, strict=True)
        ]
        failed: dict[int, blockkv.BlockKVError] = {}
        try:
            results: list[Any] = store.put_many(items, durable=self.rng.random() < 0.3)
        except blockkv.BatchError as error:
            results, failed = error.results, error.errors
            for one in failed.values():
                if not isinstance(one, blockkv.StoreFull):
                    raise
        for position, (key, version) in enumerate(zip(keys, versions, strict=True)):
            self.oracle.end_put(key, version, started, None if position in failed else results[position])

    def put_later(self, store: blockkv.Store) -> None:
        keys = self.rng.sample(range(self.soak.shared_keys), FUTURES)
        pending = []
        for key in keys:
            version, started = self.oracle.begin_put(key), self.oracle.now()
            value = payload(key, version, self.soak.sizes[key])
            pending.append((key, version, started, store.submit_put(name(key), value)))
        for key, version, started, future in pending:
            try:
                self.oracle.end_put(key, version, started, future.result(60))
            except blockkv.StoreFull:
                self.oracle.end_put(key, version, started, None)

    def delete(self, store: blockkv.Store) -> None:
        key, started = self.draw(), self.oracle.now()
        was_there = store.delete(name(key), durable=self.rng.random() < 0.1)
        self.oracle.end_delete(key, was_there, started)

    def pin(self, store: blockkv.Store) -> None:
        """A key nobody else deletes must be there, with these bytes, for as long as it is pinned."""
        key = self.rng.choice(self._own_keys)
        version = self.put_one(key, lambda value: store.put(name(key), value))
        if version is None or not store.pin(name(key)):
            return
        try:
            if store.contains(
                name(key)
            ):  # it may have been evicted and is another's by now: keys are ours alone
                for _ in range(self.rng.randrange(1, 4)):
                    self.put(store)
                    value = store.get(name(key))
                    if value is None or self.check_bytes(key, value) != version:
                        self.oracle.found(
                            "lost", f"key {key}, version {version}, pinned: {value is not None}"
                        )
        finally:
            store.unpin(name(key))
        started = self.oracle.now()
        self.oracle.end_delete(key, store.delete(name(key)), started)

    def commit(self, store: blockkv.Store) -> None:
        if self.rng.random() < 0.7:
            store.commit()
        else:
            store.checkpoint()

    def maintain(self, store: blockkv.Store) -> None:
        self.soak.inspect(store, store.check(payload=self.rng.random() < 0.3))


def name(key: int) -> str | bytes:
    """Keys of both kinds, some longer than a page of the journal leaves room for."""
    if key % 3 == 0:
        return b"\xff" + key.to_bytes(8, "little")
    return f"key-{key}" + ("/long" * 700 if key % 17 == 1 else "")


class Soak:
    """Everything that happens to one store."""

    def __init__(self, device: str, seed: int, threads: int, engine: str) -> None:
        self.device = device
        self.seed = seed
        self.threads = threads
        self.engine = engine
        with self._open() as store:
            data_bytes = store.stats()["data_bytes"]
        rng = random.Random(seed)  # noqa: S311
        self.sizes: list[int] = []
        while sum(self.sizes) < OVERCOMMIT * data_bytes:
            self.sizes.append(rng.choices(SIZES, SIZE_WEIGHTS)[0])
        self.shared_keys = len(self.sizes)
        self.own_keys = range(self.shared_keys, self.shared_keys + 4 * threads)
        self.sizes += [rng.choice(SIZES) for _ in self.own_keys]
        self.oracle = Oracle(len(self.sizes))
        self.oracle.running = dict.fromkeys(range(threads), 1 << 62)
        self.over = threading.Event()
        self.fill_samples: list[float] = []
        self.totals: Counter[str] = Counter()
        self.engine_used = ""
        self._store: blockkv.Store | None = None
        self._gate = threading.Condition()
        self._inside = 0
        self._reopening = False

    def _open(self) -> blockkv.Store:
        return blockkv.open(self.device, engine=self.engine, commit_interval_ms=3, discard=True)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def open_store(self) -> Iterator[blockkv.Store]:
        """The store, which stays open meanwhile."""
        with self._gate:
            self._gate.wait_for(lambda: not self._reopening)
            self._inside += 1
        assert self._store is not None
        try:
            yield self._store
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    def sample(self, store: blockkv.Store) -> None:
        figures = store.stats()
        self.fill_samples.append(1 - figures["free_bytes"] / figures["data_bytes"])

    def inspect(self, store: blockkv.Store, report: blockkv.CheckReport) -> None:
        if not report.ok:
            self.oracle.found("inconsistent", str(report))
        figures = store.stats()
        for counter in (
            "get_checksum_mismatch",
            "get_device_error",
            "get_transient_error",
            "put_device_error",
        ):
            if figures[counter]:
                self.oracle.found("inconsistent", f"{counter} is {figures[counter]}")

    def run(self, seconds: float, intruders: Intruders, progress: Callable[[float], None]) -> dict[str, Any]:
        started = time.monotonic()
        with intruders.kept_away():
            self._store = self._open()
        self.engine_used = self._store.info()["engine"]
        workers = [Worker(self, number) for number in range(self.threads)]
        keys = iter(range(self.shared_keys))
        while not self._store.stats()["chunks_evicted"]:
            workers[0].put_several(self._store, list(itertools.islice(keys, 64)))
        for worker in workers:
            worker.start()
        reopens = 0
        next_reopen = seconds / 5
        while (elapsed := time.monotonic() - started) < seconds:
            time.sleep(min(0.5, seconds - elapsed))
            progress(min(elapsed, seconds))
            if elapsed > next_reopen:
                with intruders.kept_away():
                    self.reopen()
                reopens += 1
                next_reopen += seconds / 5
        self.over.set()
        for worker in workers:
            worker.join()
        with intruders.kept_away():
            self.reopen()
        self.compare(workers[0])
        outcome = intruders.end()
        for kind, what in outcome["findings"]:
            self.oracle.found(kind, what)
        self.close()
        operations = sum((worker.operations for worker in workers), Counter[str]())
        full = sorted(self.fill_samples) or [0.0]
        return {
            "device": self.device,
            "seed": self.seed,
            "seconds": round(time.monotonic() - started, 1),
            "engine": self.engine_used,
            "keys": len(self.sizes),
            "operations": sum(operations.values()),
            "by_verb": dict(sorted(operations.items())),
            "bytes_checked": self.totals["get_bytes"],
            **{name: self.totals[name] for name in FIGURES},
            "fill_median": round(full[len(full) // 2], 3),
            "reopens": reopens + 1,
            "refusals": outcome["refused"],
            **{kind: self.oracle.counts[kind] for kind in KINDS},
            "findings": self.oracle.findings,
        }

    def reopen(self) -> None:
        """Close and open again, with nobody inside: nothing comes back, nothing pinned is lost."""
        with self._gate:
            self._reopening = True
            self._gate.wait_for(lambda: not self._inside)
        self.close()
        self._store = self._open()
        with self._gate:
            self._reopening = False
            self._gate.notify_all()

    def close(self) -> None:
        assert self._store is not None
        figures = self._store.stats()
        self.inspect(self._store, self._store.check())
        for figure in ("get_bytes", *FIGURES):
            self.totals[figure] += figures[figure]
        self._store.close()

    def compare(self, worker: Worker) -> None:
        """Read everything that is there; what is not there is an ordinary miss."""
        assert self._store is not None
        for key in range(len(self.sizes)):
            started = self.oracle.now()
            worker.judge(key, self._store.get(name(key)), started)
        keys = list(self._store.keys())
        if len(keys) != len({blockkv_key(key) for key in keys}) or len(keys) != len(self._store):
            self.oracle.found("inconsistent", f"{len(keys)} keys listed, {len(self._store)} counted")
        self.inspect(self._store, self._store.check(payload=True))


def blockkv_key(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


KINDS = ("wrong", "stale", "phantom", "lost", "inconsistent", "intruded", "failed")
FIGURES = (
    "put_chunks",
    "put_existing",
    "get_chunks",
    "get_misses",
    "chunks_deleted",
    "chunks_evicted",
    "groups_committed",
    "checkpoints_written",
)


# -- intruders ---------------------------------------------------------------------------------------------


class Intruders:
    """A process that tries to open and to format what is held, but for the moments when it is not."""

    def __init__(self, names: list[str]) -> None:
        command = [sys.executable, __file__, "--intrude", *names]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._say, self._hear = self._process.stdin, self._process.stdout

    @contextlib.contextmanager
    def kept_away(self) -> Iterator[None]:
        self._tell("pause")
        yield
        self._tell("go on")

    def _tell(self, word: str) -> None:
        self._say.write(word + "\n")
        self._say.flush()
        assert self._hear.readline() == word + "\n"

    def end(self) -> dict[str, Any]:
        out, _ = self._process.communicate()  # closes its standard input: it stops
        return dict(json.loads(out))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def intrude(names: list[str]) -> int:
    """The process: told to pause, it waits until told to go on; at the end it says how it went."""
    refused = 0
    findings: list[tuple[str, str]] = []
    namespace.LOCK_WAIT_S = 0.1  # try often rather than long
    for turn in itertools.count():
        if turn == 0 or select.select([sys.stdin], [], [], 0)[0]:
            for _ in ("pause", "go on"):
                word = sys.stdin.readline()
                print(word, end="", flush=True)
            if not word:
                break
        path = names[turn % len(names)]
        try:
            if turn % 3 == 2:
                blockkv.format(path, force=True)
            else:
                blockkv.open(path, read_only=turn % 2 == 1).close()
            findings.append(("intruded", f"{path} on turn {turn}"))
        except blockkv.DeviceBusy:
            refused += 1
        except blockkv.BlockKVError as error:
            findings.append(("failed", f"an intruder at {path} was told {type(error).__name__}: {error}"))
    print(json.dumps({"refused": refused, "findings": findings[:FINDINGS_KEPT]}))
    return 0


def names_of(device: str, directory: Path) -> list[str]:
    """Paths that lead to a device: its own, a symbolic link, a node of our own, and its whole disk."""
    link = directory / "link"
    link.symlink_to(device)
    found = [device, str(link)]
    status = Path(device).stat()
    if stat.S_ISBLK(status.st_mode):
        node = directory / "node"
        os.mknod(node, stat.S_IFBLK | 0o600, status.st_rdev)
        found.append(str(node))
        sysfs = Path(f"/sys/dev/block/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}").resolve()
        if (sysfs / "partition").exists():
            found.append(f"/dev/{sysfs.parent.name}")
    else:
        hard = Path(device).with_suffix(HARD_LINK)
        os.link(device, hard)
        found.append(str(hard))
    return found


# -- devices and processes ---------------------------------------------------------------------------------


@contextlib.contextmanager
def partitions_in_memory(count: int, sector_bytes: int) -> Iterator[list[str]]:
    """Partitions of a loop device over an unlinked file in memory: gone with whoever uses it last."""
    with tempfile.NamedTemporaryFile(prefix="blockkv-soak.", dir="/dev/shm") as image:
        image.truncate((count + 1) * STORE_BYTES)
        command = [
            "losetup",
            "--find",
            "--show",
            "--partscan",
            "--direct-io=on",
            f"--sector-size={sector_bytes}",
        ]
        path = tool(*command, image.name)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for number in range(
                1, count + 1
            ):  # told to the kernel alone: not every one reads partition tables
                tool("addpart", path, number, number * STORE_BYTES // 512, STORE_BYTES // 512)
        finally:
            with Path(path).open("rb") as second:  # from the only opener it would detach at once
                fcntl.ioctl(second, LOOP_CLR_FD)
    try:
        yield [f"{path}p{number}" for number in range(1, count + 1)]
    finally:
        os.close(descriptor)


def tool(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return done.stdout.strip()


def soak(options: argparse.Namespace, device: str, progress: Callable[[float], None]) -> dict[str, Any]:
    """One store, and one process of intruders, for as long as asked for."""
    blockkv.format(device, average_chunk="64KiB", journal="512KiB", force=options.force)
    one = Soak(device, options.seed, options.threads, options.engine)
    with tempfile.TemporaryDirectory(prefix="blockkv-soak.") as directory:
        names = names_of(device, Path(directory))
        intruders = Intruders(names)
        try:
            return one.run(options.seconds, intruders, progress)
        finally:
            intruders.kill()
            for path in names:
                if path.endswith(HARD_LINK):
                    Path(path).unlink()


def run_all(options: argparse.Namespace, devices: list[str], progress: Callable[[float], None]) -> list[Any]:
    """A process for each device but the first, which is ours."""
    others = []
    for number, device in enumerate(devices[1:], 1):
        command = [
            sys.executable,
            __file__,
            "--device",
            device,
            "--seed",
            str(options.seed + number),
            "--json",
        ]
        for option in ("seconds", "threads", "engine"):
            command += [f"--{option}", str(getattr(options, option))]
        others.append(
            subprocess.Popen([*command, *["--force"] * options.force], stdout=subprocess.PIPE, text=True)
        )
    figures = [soak(options, devices[0], progress)]
    for other in others:
        out, _ = other.communicate()
        figures += json.loads(out)
    return figures


def main() -> int:
    if sys.argv[1:2] == ["--intrude"]:
        return intrude(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: random, printed")
    parser.add_argument("--threads", type=int, default=6, help="in each process (default 6)")
    parser.add_argument("--processes", type=int, default=2, help="each with a store of its own (default 2)")
    parser.add_argument("--device", action="append", help="format and use these, a process on each")
    parser.add_argument("--sector", type=int, default=4096, choices=(512, 4096), help="of the loop device")
    parser.add_argument("--engine", default="auto", choices=("auto", "io_uring", "threads", "passthrough"))
    parser.add_argument("--force", action="store_true", help="format a device that holds other data")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 32)
    logging.getLogger("blockkv").setLevel(logging.CRITICAL)
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        devices = options.device or stack.enter_context(
            partitions_in_memory(options.processes, options.sector)
        )
        bar = stack.enter_context(Progress(console=console, disable=not console.is_terminal))
        task = bar.add_task("soaking", total=options.seconds)
        figures = run_all(options, devices, lambda seconds: bar.update(task, completed=seconds))
    if options.json:
        print(json.dumps(figures))
    else:
        for one in figures:
            for figure, value in one.items():
                print(f"{figure:>20}  {value}")
            print()
    return int(any(one["findings"] for one in figures))


if __name__ == "__main__":
    sys.exit(main())
