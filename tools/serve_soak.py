#!/usr/bin/env python3
"""An owner and its clients, killed at random, for as long as you like: nothing wrong, lost or leaked.

    tools/serve_soak.py --minutes 10                     on a device in memory, as slow as a drive (root)
    tools/serve_soak.py store.img --minutes 1 --json     on a file that exists; its content is lost
    tools/serve_soak.py --minutes 60 --clients 4 --seed 7

`blockkv serve` holds the device. Clients, two threads each, put, get, look up and delete: keys of their own,
most of them durable, and keys that all of them put and delete. What a key holds follows from the key, so
every byte of every get is compared. When a put is durable the client writes that down, in a file that
outlives it: from then on the key must be found, until the line that is written before its delete.

Meanwhile one of them at a time is killed (SIGKILL), stopped for a moment and then killed or not, or, the
owner, told to end (SIGTERM); and started again. The device is slow enough that what was killed has writes
under way. Now and then all clients are killed at once and the owner is asked: as soon as their requests have
ended it must have no lease, no space and no claim of theirs left.

At the end everything that must be there is read from the device without an owner, and the store is checked
with its payload. Exits with 1 when a byte was wrong, a durable chunk is missing, or something was leaked.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import blockkv
from blockkv.bench.device import paced_device
from blockkv.errors import BlockKVError, DeviceError, OwnerLost, StoreFull

MEBIBYTE = 1 << 20
READ_BYTES_PER_S, WRITE_BYTES_PER_S = 600 * MEBIBYTE, 200 * MEBIBYTE
LEAST_BYTES, MOST_BYTES = 4 << 10, 8 * MEBIBYTE
THREADS = 2
SHARED_KEYS = 60
OWN_SHARE = 0.4
"""Of the data zone, for the durable chunks of all threads together."""
AUDIT_S = 20.0
SETTLE_S = 20.0
"""How long the requests of killed clients may take on a device this slow."""
START_S = 60.0

COUNTS = (
    "put_durable",
    "put_lazy",
    "put_bytes",
    "get_hits",
    "get_bytes",
    "get_misses",
    "get_unanswered",
    "deletes",
    "lookups",
    "full",
    "owner_lost",
    "wrong",
    "lost",
)
"""What each thread counts, in memory that outlives it."""


# -- content -------------------------------------------------------------------------------------------

_NOISE = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 2 * MOST_BYTES, np.uint8)


def content_of(key: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What is stored under a key: between 4 KiB and 8 MiB."""
    digest = hashlib.sha256(key.encode()).digest()
    share = int.from_bytes(digest[:4], "little") / 2**32
    size_bytes = int(LEAST_BYTES * (MOST_BYTES / LEAST_BYTES) ** share)
    start = int.from_bytes(digest[4:8], "little") % MOST_BYTES
    content = _NOISE[start : start + size_bytes].copy()
    content[:32] = np.frombuffer(digest, np.uint8)
    return content


def is_right(key: str, found: bytearray | np.ndarray[Any, Any]) -> bool:
    """Whether these are the bytes of the key."""
    return bool(np.array_equal(np.frombuffer(found, np.uint8), content_of(key)))


# -- what must be there --------------------------------------------------------------------------------


class Ledger:
    """What a thread knows to be durable, line by line: "D key" once it is, "X key" before it is deleted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, None] = {}
        self.last = 0
        for line in path.read_text().splitlines() if path.exists() else []:
            mark, _, key = line.partition(" ")
            self.last = max(self.last, int(key.rpartition("/")[2]))
            if mark == "D":
                self.keys[key] = None
            else:
                self.keys.pop(key, None)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, mark: str, key: str) -> None:
        os.write(self._file, f"{mark} {key}\n".encode())
        if mark == "D":
            self.keys[key] = None
        elif mark == "X":
            self.keys.pop(key, None)

    def next_key(self) -> str:
        """One that was never used: what became of the last one before a kill nobody knows."""
        self.last += 1
        key = f"{self.path.stem}/{self.last}"
        os.write(self._file, f"B {key}\n".encode())
        return key


# -- a client ------------------------------------------------------------------------------------------


class Life:
    """One thread of a client."""

    def __init__(self, store: blockkv.Store, directory: Path, name: str, seed: int, own_bytes: int) -> None:
        self.store = store
        self.ledger = Ledger(directory / f"{name}.ledger")
        self.counts = np.memmap(directory / f"{name}.counts", np.int64, "r+", shape=(len(COUNTS),))
        self.events = directory / f"{name}.events"
        self.random = random.Random(seed)  # noqa: S311
        self.own_bytes = own_bytes

    def count(self, name: str, change: int = 1) -> None:
        self.counts[COUNTS.index(name)] += change

    def report(self, what: str, key: str) -> None:
        self.count(what)
        with self.events.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {what} {key} {self.store.stats()}\n")

    def run(self) -> None:
        """Until the process ends."""
        steps = (
            (0.30, self.get_own),
            (0.25, self.put_own),
            (0.10, self.put_shared),
            (0.15, self.get_shared),
            (0.05, self.delete_shared),
            (0.05, self.in_background),
            (0.10, self.look_up),
        )
        while True:
            try:
                self.make_room()
                step = self.random.choices([one for _, one in steps], [weight for weight, _ in steps])[0]
                step()
            except OwnerLost:
                self.count("owner_lost")
                time.sleep(0.02)
            except blockkv.BatchError as error:
                self.take(error)
            except StoreFull:
                self.full()

    def take(self, error: blockkv.BatchError) -> None:
        for one in error.errors.values():
            if isinstance(one, OwnerLost):
                self.count("owner_lost")
            elif isinstance(one, StoreFull):
                self.full()
            else:
                raise one

    def full(self) -> None:
        self.count("full")
        try:
            for number in range(0, SHARED_KEYS, 4):
                self.store.delete(f"shared/{number}")
        except OwnerLost:
            self.count("owner_lost")

    def make_room(self) -> None:
        sizes = sum(content_of(key).nbytes for key in self.ledger.keys)
        while sizes > self.own_bytes:
            key = next(iter(self.ledger.keys))
            sizes -= content_of(key).nbytes
            self.ledger.note("X", key)
            self.store.delete(key)
            self.count("deletes")

    def put_own(self) -> None:
        keys = [self.ledger.next_key() for _ in range(self.random.randint(1, 4))]
        durable = self.random.random() < 0.7
        self.store.put_many([(key, memoryview(content_of(key))) for key in keys], durable=durable)
        if not durable:
            self.store.commit()  # says if an owner has died in between
        for key in keys:
            self.ledger.note("D", key)
            self.count("put_bytes", content_of(key).nbytes)
        self.count("put_durable", len(keys))

    def get_own(self) -> None:
        keys = list(self.ledger.keys)
        keys = self.random.sample(keys, min(len(keys), self.random.randint(1, 8)))
        outs = [bytearray(content_of(key).nbytes) for key in keys]
        for key, out, hit in zip(keys, outs, self.store.get_many(keys, outs), strict=True):
            if hit:
                self.compare(key, out)
            else:
                self.look_again(key)

    def look_again(self, key: str) -> None:
        """A miss of what must be there: while the owner is gone that says nothing."""
        for _ in range(2000):
            before = self.unanswered()
            out = bytearray(content_of(key).nbytes)
            if self.store.get(key, out):
                self.count("get_unanswered")
                self.compare(key, out)
                return
            if self.unanswered() == before:
                self.report("lost", key)
                self.ledger.keys.pop(key)
                return
            time.sleep(0.02)
        raise BlockKVError("the owner does not come back")

    def unanswered(self) -> int:
        figures = self.store.stats()
        return figures["get_owner_lost"] + 1_000_000 * (not figures["owner_connected"])

    def compare(self, key: str, out: bytearray) -> None:
        self.count("get_hits")
        self.count("get_bytes", len(out))
        if not is_right(key, out):
            self.report("wrong", key)

    def shared(self) -> str:
        return f"shared/{self.random.randrange(SHARED_KEYS)}"

    def put_shared(self) -> None:
        keys = list({self.shared() for _ in range(3)})
        self.store.put_many(
            [(key, memoryview(content_of(key))) for key in keys], droppable=self.random.random() < 0.3
        )
        self.count("put_lazy", len(keys))

    def get_shared(self) -> None:
        keys = list({self.shared() for _ in range(8)})
        for key, found in zip(keys, self.store.get_many(keys), strict=True):
            if found is None:
                self.count("get_misses")
            else:
                self.compare(key, bytearray(found.numpy()))

    def delete_shared(self) -> None:
        self.store.delete(self.shared())
        self.count("deletes")

    def in_background(self) -> None:
        keys = list({self.shared() for _ in range(6)})
        outs = [bytearray(content_of(key).nbytes) for key in keys]
        futures = [
            self.store.submit_get(key, out, preload=self.random.random() < 0.5, deadline_s=5)
            for key, out in zip(keys, outs, strict=True)
        ]
        fresh = self.shared()
        put = self.store.submit_put(fresh, memoryview(content_of(fresh)))
        for key, out, future in zip(keys, outs, futures, strict=True):
            if future.result(60):
                self.compare(key, out)
            else:
                self.count("get_misses")
        put.result(60)
        self.count("put_lazy")

    def look_up(self) -> None:
        keys = list(self.ledger.keys)[:200]
        length = self.store.lookup(keys)
        self.count("lookups")
        if length < len(keys):
            self.look_again(keys[length])


def be_client(socket: str, directory: Path, number: int, seed: int, own_bytes: int) -> None:
    """What a client process does."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            store = blockkv.open(socket)
            break
        except (DeviceError, OwnerLost):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
    lives = [
        Life(store, directory, f"client{number}-{thread}", seed + thread, own_bytes)
        for thread in range(THREADS)
    ]
    failed = threading.Event()

    def run(life: Life) -> None:
        try:
            life.run()
        except BaseException:
            import traceback

            (directory / f"{life.events.stem}.failed").write_text(traceback.format_exc())
            failed.set()
            raise

    for life in lives:
        threading.Thread(target=run, args=(life,), daemon=True).start()
    failed.wait()
    os._exit(1)


# -- the one who kills ---------------------------------------------------------------------------------


class Soak:
    """Owner, clients, and what happens to them."""

    def __init__(self, device: str, directory: Path, clients: int, seed: int) -> None:
        self.device = device
        self.directory = directory
        self.socket = str(directory / "owner.sock")
        self.random = random.Random(seed)  # noqa: S311
        self.events: Counter[str] = Counter()
        self.problems: list[str] = []
        self.client_count = clients
        self.clients: list[subprocess.Popen[bytes] | None] = [None] * clients
        self.settle_s = 0.0
        self.restart_s = 0.0
        with blockkv.open(device) as store:
            self.own_bytes = int(store.stats()["data_bytes"] * OWN_SHARE / clients / THREADS)
        for number, thread in itertools.product(range(clients), range(THREADS)):
            np.zeros(len(COUNTS), np.int64).tofile(directory / f"client{number}-{thread}.counts")
        self.owner = self.start_owner()

    def start_owner(self) -> subprocess.Popen[bytes]:
        begin_s = time.monotonic()
        command = ["-m", "blockkv", "serve", self.device, "--socket", self.socket, "--no-evict"]
        owner = subprocess.Popen(
            [sys.executable, *command, "--wait-s", str(START_S)],
            stdout=subprocess.PIPE,
            stderr=(self.directory / "owner.log").open("ab"),
        )
        assert owner.stdout is not None
        if not owner.stdout.readline():
            self.problems.append(f"the owner does not start: {owner.wait()}")
        self.restart_s = max(self.restart_s, time.monotonic() - begin_s)
        self.events["owner_starts"] += 1
        return owner

    def start_client(self, number: int) -> None:
        self.events["client_starts"] += 1
        words = [__file__, "--client", self.socket, self.directory, number, self.random.randrange(1 << 30)]
        self.clients[number] = subprocess.Popen(
            [sys.executable, *map(str, words), str(self.own_bytes)],
            stderr=(self.directory / "client.log").open("ab"),
        )

    def end(self, process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
        process.send_signal(number)
        process.wait(START_S)
        if process.stdout is not None:
            process.stdout.close()

    def step(self) -> None:
        """Something happens to somebody."""
        for number, client in enumerate(self.clients):
            if client is None or client.poll() is not None:
                if client is not None and client.returncode != -signal.SIGKILL:
                    self.problems.append(f"client {number} ended by itself: {client.returncode}")
                self.start_client(number)
        if self.owner.poll() is not None:
            self.problems.append(f"the owner ended by itself: {self.owner.returncode}")
            self.owner = self.start_owner()
        time.sleep(self.random.uniform(0.2, 2.5))
        what = self.random.choices(
            ("owner killed", "owner ended", "client killed", "client stopped"), (3, 1, 4, 2)
        )
        self.events[what[0]] += 1
        client = self.clients[self.random.randrange(self.client_count)]
        assert client is not None
        match what[0]:
            case "owner killed":
                self.end(self.owner)
                time.sleep(self.random.choice((0, 0, 0.3, 1.5)))
                self.owner = self.start_owner()
            case "owner ended":
                self.end(self.owner, signal.SIGTERM)
                if self.owner.returncode:
                    self.problems.append(f"the owner ended with {self.owner.returncode}")
                self.owner = self.start_owner()
            case "client killed":
                self.end(client)
            case "client stopped":
                client.send_signal(signal.SIGSTOP)
                time.sleep(self.random.uniform(0.1, 2))
                if self.random.random() < 0.5:
                    self.end(client)
                else:
                    client.send_signal(signal.SIGCONT)

    def kill_clients(self) -> None:
        for number, client in enumerate(self.clients):
            if client is not None and client.poll() is None:
                self.end(client)
            self.clients[number] = None

    def audit(self) -> None:
        """All clients are gone: what is left of them at the owner, and is there what must be?"""
        self.kill_clients()
        self.events["audits"] += 1
        begin_s = time.monotonic()
        with blockkv.open(self.socket) as store:
            while True:
                figures = store.stats()
                left = {
                    name: figures[name]
                    for name in ("clients_letting_go", "client_leases", "client_puts")
                    if figures[name]
                }
                if not left and figures["clients"] == 1:
                    break
                if time.monotonic() - begin_s > SETTLE_S:
                    self.problems.append(f"leaked: {left}, {figures['clients']} clients")
                    self.events["leaks"] += 1
                    break
                time.sleep(0.01)
            self.settle_s = max(self.settle_s, time.monotonic() - begin_s)
            self.verify(store)

    def must_be_there(self) -> Iterator[str]:
        for path in sorted(self.directory.glob("*.ledger")):
            yield from Ledger(path).keys

    def verify(self, store: blockkv.Store) -> None:
        for key in self.must_be_there():
            out = bytearray(content_of(key).nbytes)
            self.events["verified"] += 1
            if not store.get(key, out):
                self.problems.append(f"lost: {key}")
                self.events["lost"] += 1
            elif not is_right(key, out):
                self.problems.append(f"wrong: {key}")
                self.events["wrong"] += 1

    def finish(self) -> None:
        self.audit()
        self.end(self.owner, signal.SIGTERM)
        with blockkv.open(self.device) as store:
            self.verify(store)
            report = store.check(payload=True)
            self.problems += map(str, report.findings)
            figures = store.stats()
            if figures["quarantined_bytes"]:
                self.problems.append(f"{figures['quarantined_bytes']} bytes in quarantine")

    def run(self, minutes: float) -> None:
        end_s = time.monotonic() + 60 * minutes
        audit_s = time.monotonic() + min(AUDIT_S, 20 * minutes)
        while time.monotonic() < end_s:
            self.step()
            if time.monotonic() > audit_s:
                self.audit()
                audit_s = time.monotonic() + AUDIT_S
        self.finish()

    def document(self) -> dict[str, Any]:
        totals = np.zeros(len(COUNTS), np.int64)
        for path in self.directory.glob("*.counts"):
            totals += np.fromfile(path, np.int64)
        counts = {name: int(value) for name, value in zip(COUNTS, totals, strict=True)}
        for name in ("wrong", "lost"):
            counts[name] += self.events.pop(name, 0)
        for path in [*self.directory.glob("*.events"), *self.directory.glob("*.failed")]:
            self.problems.append(f"{path.name}: {path.read_text()[:2000]}")
        return {
            **counts,
            "leaks": self.events.pop("leaks", 0),
            **{name.replace(" ", "_"): count for name, count in sorted(self.events.items())},
            "longest_settle_s": round(self.settle_s, 3),
            "longest_owner_start_s": round(self.restart_s, 3),
            "problems": self.problems,
        }


@contextlib.contextmanager
def device_for(path: str | None, size_bytes: int) -> Iterator[str]:
    if path is not None:
        yield path
        return
    with paced_device(size_bytes, READ_BYTES_PER_S, WRITE_BYTES_PER_S) as device, device.joined():
        yield str(device.path)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("device", required=False)
@click.option("--minutes", default=1.0, show_default=True)
@click.option("--clients", default=2, show_default=True)
@click.option("--size-mib", default=512, show_default=True, help="Of the device in memory.")
@click.option("--seed", type=int, help="What happens when; not when requests come.")
@click.option("--json", "as_json", is_flag=True)
def main(
    device: str | None, minutes: float, clients: int, size_mib: int, seed: int | None, as_json: bool
) -> None:
    seed = random.randrange(1 << 30) if seed is None else seed  # noqa: S311
    with (
        tempfile.TemporaryDirectory(prefix="blockkv-soak.") as directory,
        device_for(device, size_mib * MEBIBYTE) as path,
    ):
        blockkv.format(path, average_chunk="64KiB", force=True)
        soak = Soak(path, Path(directory), clients, seed)
        try:
            soak.run(minutes)
        finally:
            soak.kill_clients()
            if soak.owner.poll() is None:
                soak.end(soak.owner)
        document = {"minutes": minutes, "seed": seed, **soak.document()}
        if document["problems"]:
            for name in ("owner.log", "client.log"):
                text = (
                    Path(directory, name).read_text(errors="replace")
                    if Path(directory, name).exists()
                    else ""
                )
                document["problems"].append(f"{name}: ...{text[-3000:]}")
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        for name, value in document.items():
            if name != "problems":
                click.echo(f"{name:24}{value}")
        for problem in document["problems"]:
            click.echo(f"PROBLEM {problem}")
    sys.exit(bool(document["problems"] or document["wrong"] or document["lost"] or document["leaks"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        socket_at, directory_at, client_number, client_seed, bytes_of_own = sys.argv[2:]
        be_client(socket_at, Path(directory_at), int(client_number), int(client_seed), int(bytes_of_own))
    else:
        main()
