#!/usr/bin/env python3
"""Crash the store, by the hundred thousand, and compare what comes back with what was promised.

One history is a sequence of puts (one piece to several, a byte to several runs), deletes, gets, flushes,
checkpoints, discards and reopens on a simulated device with a journal of a few pages, so that it wraps all
the time and groups of three pages and more are in flight. Everything about it follows from --seed and its
number. On the way, before any device operation, the state a crash would leave is cloned off, recovered and
judged; the recovery may itself be cut short several times over. Then the history goes on from a crash of
its own, several times.

Profiles
  power   power cuts and process kills, volatile cache, tearing, garbage sectors: nothing acknowledged may
          be lost, the index is a prefix of the log, contains() promises only what get() gives
  errors  the same, and operations that fail with EIO, ENODATA, ENOSPC or ETIMEDOUT
  lying   flushes that lie:                                 opens; exact bytes or a miss
  astray  lost, torn, misdirected writes and reads:         opens; exact bytes or a miss
  rot     bits that flip at rest, in data and metadata:     opens; exact bytes or a miss

Mutants are known protocol bugs patched into the store from here. Each must be caught: a harness that misses
them would miss the real ones.

    tools/crash_explorer.py --states 20000               all profiles in turn, then all mutants
    tools/crash_explorer.py --every --histories 500      a crash at every operation of 500 histories
    tools/crash_explorer.py --seed 1 --history 47        one history again, with its steps and timeline
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import errno
import functools
import itertools
import json
import logging
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import blockkv
from blockkv.device.base import UNIT_BYTES, Batch
from blockkv.errors import BatchError, BlockKVError, NotFormatted, StoreFull
from blockkv.format import journal as journal_module
from blockkv.format import superblock as superblock_module
from blockkv.format.journal import EndReason, Replay
from blockkv.store import Store
from blockkv.store import create as create_module
from blockkv.store import gets as gets_module
from blockkv.store import log as log_module
from blockkv.store import recovery as recovery_module
from blockkv.store import store as store_module
from blockkv.store.gets import GetRun
from blockkv.store.log import Log
from blockkv.store.puts import PutRun
from blockkv.store.state import State
from blockkv.testing import (
    Crash,
    Fault,
    FaultKind,
    FaultPlan,
    OperationKind,
    SimulatedDevice,
    mixtures,
)

PROFILES = ("power", "errors", "lying", "astray", "rot")
PROFILE_WEIGHTS = (60, 10, 10, 10, 10)
STRICT_PROFILES = ("power", "errors")
KEYS = [f"k{number}" for number in range(7)] + [f"long{number}".ljust(3900, "x") for number in range(4)]
"""The long ones make records that fill a page, so that a group of them is several pages."""
DEVICE_BYTES = 8 << 20
"""Two superblock MiB, two checkpoint areas, a journal of a few pages, and little data: full quickly."""
RECOVERY_DEPTH = 5
PROBE_SHARE = 0.3
"""Share of device operations before which a crash state is cloned off and judged."""
STEPS = ("put", "durable", "many", "delete", "get", "commit", "checkpoint", "close")
STEP_WEIGHTS = (30, 15, 12, 18, 12, 8, 4, 2)


class Violation(Exception):
    """The store broke a promise."""


# --- the oracle: no code in common with the store -----------------------------------------------------------


@dataclass(slots=True)
class Event:
    """Key `key` changed to `version` (None: deleted), or perhaps did not (`maybe`)."""

    key: str
    version: int | None
    maybe: bool = False


class Oracle:
    """What the store may hold, now and after a crash.

    `events` happened in this order since `base` was on media; the first `durable_count` of them were
    acknowledged as durable. A crash may cut the events at any later point. The payload of a put that was not
    acknowledged as durable may be missing even where the put survived: then the key is absent.
    """

    def __init__(self, base: dict[str, int | None]) -> None:
        self.base = base
        self.live = dict(base)
        """What a reader sees now; exact between operations."""
        self.events: list[Event] = []
        self.durable_count = 0

    def all_durable(self) -> None:
        """Everything done so far was acknowledged as durable."""
        self.base = dict(self.live)
        self.events = []
        self.durable_count = 0

    def key_durable(self, key: str, version: int | None) -> None:
        """That `key` has `version`, and with it everything before, was acknowledged as durable."""
        for position, event in enumerate(self.events):
            if event.key == key and event.version == version == self.live[key]:
                event.maybe = False
                self.durable_count = max(self.durable_count, position + 1)

    def judge(self, found: dict[str, int | None]) -> None:
        """Raise Violation unless some cut explains `found`."""
        complaint = ""
        for cut in range(len(self.events), self.durable_count - 1, -1):
            allowed = self.allowed(cut)
            wrong = [key for key in found if found[key] not in allowed[key]]
            if not wrong:
                return
            complaint = complaint or ", ".join(
                f"{short(key)} is version {found[key]} instead of {allowed[key]}" for key in wrong
            )
        raise Violation(f"no prefix of the log covers what was acknowledged and explains this: {complaint}")

    def allowed(self, cut: int) -> dict[str, set[int | None]]:
        """Per key the versions (None: absent) that may be found if the log was cut after `cut` events."""
        allowed: dict[str, set[int | None]] = {key: {version} for key, version in self.base.items()}
        for position, event in enumerate(self.events[:cut]):
            if not event.maybe:
                allowed[event.key] = set()
            allowed[event.key].add(event.version)
            if position >= self.durable_count:
                allowed[event.key].add(None)
        return allowed


def short(key: str) -> str:
    return key[:5].rstrip("x")


def dice(name: str) -> random.Random:
    """A source of randomness that follows from its name alone."""
    return random.Random(name)  # noqa: S311  nothing secret


# --- one history --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Settings:
    """What the command line asked for."""

    seed: int = 0
    probe_share: float = PROBE_SHARE
    exhaustive: bool = False
    profile: str | None = None


@dataclass(slots=True)
class Tally:
    """What was done so far."""

    histories: int = 0
    states: int = 0
    operations: int = 0
    recoveries_cut: int = 0
    by_profile: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROFILES, 0))


class History:
    """One history: its device, its store, its oracle and its dice."""

    def __init__(self, number: int, settings: Settings, tally: Tally) -> None:
        self.number = number
        self.settings = settings
        self.tally = tally
        self.rng = dice(f"history {settings.seed} {number}")
        # Apart, so that the share of probes does not change the history.
        self.probe_rng = dice(f"probe {settings.seed} {number}")
        rng = self.rng
        drawn = rng.choices(PROFILES, PROFILE_WEIGHTS)[0]
        self.profile = settings.profile or drawn
        self.strict = self.profile in STRICT_PROFILES
        self.evict = self.profile != "errors" and rng.random() < 0.3
        self.discard = rng.random() < 0.5
        self.garbage = rng.choice((0.0, 0.0, 0.15)) if self.profile == "power" else 0.0
        self.kill_share = rng.choice((0.0, 0.4, 0.8))
        self.keys = KEYS if rng.random() < 0.6 else KEYS[:4]
        self.contents: dict[tuple[str, int], list[bytes]] = {}
        self.newest = dict.fromkeys(KEYS, 0)
        self.oracle = Oracle(dict.fromkeys(self.keys))
        self.steps: list[str] = []
        self.device = formatted(rng.choice((6, 6, 7, 8))).crash_clone(rng)
        self.clone: SimulatedDevice | None = None
        self.branch_steps: list[str] = []

    def run(self) -> None:
        """Raise Violation, with the whole story, if the store breaks a promise."""
        self.tally.histories += 1
        try:
            for round_number in range(self.rng.randint(1, 5)):
                self.steps.append(f"[{round_number}")
                self.round()
        except Exception as error:  # whatever escapes the store is a finding too
            raise Violation(self.story(error)) from error

    def story(self, error: Exception) -> str:
        """Seed, operation, steps and timelines: all it takes to see what happened."""
        kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
        lines = [
            f"{kind}{error}",
            f"seed {self.settings.seed} history {self.number} profile {self.profile} "
            f"operation {self.device.operation_count} evict {self.evict} discard {self.discard}",
            f"steps: {' '.join(self.steps)}",
            f"timeline: {self.device.timeline(last=80)}",
        ]
        if self.clone is not None:
            lines.append(f"after the crash: {' '.join(self.branch_steps)} {self.clone.timeline(last=80)}")
        return "\n    ".join(lines)

    def round(self) -> None:
        """Open, perhaps with crashes on the way; work; crash."""
        rng = self.rng
        self.device = self.cut_recoveries(self.device, rng, 0.2)
        device = self.device
        device.deferred = rng.random() < 0.7
        store = open_store(device, self.evict, self.discard)
        self.oracle = Oracle(self.look(store, self.oracle))
        device.set_plan(self.plan(device))
        device.before_operation = self.probe
        self.work(store, rng.randint(3, 30))
        device.before_operation = None
        self.tally.operations += device.operation_count
        self.device = self.crash(device, rng)

    def work(self, store: Store, step_count: int) -> None:
        for _ in range(step_count):
            if self.device.stopped or not self.step(store):
                break

    def crash(self, device: SimulatedDevice, rng: random.Random) -> SimulatedDevice:
        crash = Crash.PROCESS_KILL if rng.random() < self.kill_share else Crash.POWER_CUT
        if rng is self.rng:
            self.steps.append("kill]" if crash is Crash.PROCESS_KILL else "power]")
        after = device.crash_clone(rng, crash, garbage=self.garbage)
        written = after.written_units() if self.profile == "rot" else []
        for _ in range(rng.choice((1, 1, 2, 5)) if written else 0):
            after.flip_bit(rng.choice(written) * UNIT_BYTES + rng.randrange(UNIT_BYTES), rng.randrange(8))
        return after

    def cut_recoveries(self, device: SimulatedDevice, rng: random.Random, share: float) -> SimulatedDevice:
        """Crash up to five recoveries, one after the other; the device ends as the last crash left it."""
        for _ in range(RECOVERY_DEPTH):
            if rng.random() >= share:
                break
            device.set_plan(FaultPlan.stop(device.operation_count + rng.randrange(20)))
            try:
                open_store(device, self.evict, self.discard)
            except BlockKVError:
                if not device.stopped:
                    raise
            device.set_plan(None)
            self.tally.recoveries_cut += 1
            device = self.crash(device, rng)
        return device

    def plan(self, device: SimulatedDevice) -> FaultPlan:
        """What goes wrong in this round: perhaps a stop, and the faults of the profile."""
        rng, start = self.rng, device.operation_count
        faults = []
        if rng.random() < 0.5:
            faults.append(Fault(FaultKind.STOP, operation=start + rng.randrange(120)))
        if self.profile == "errors":
            code = rng.choice((errno.EIO, errno.ENODATA, errno.ENOSPC, errno.ETIMEDOUT))
            faults.append(Fault(FaultKind.ERROR, operation=start + rng.randrange(100), errno=code))
        elif self.profile == "lying":
            share = rng.choice((0.2, 0.6, 1.0))
            faults.append(Fault(FaultKind.LYING_FLUSH, probability=share, fire_count=None))
        elif self.profile == "astray":
            kinds = (FaultKind.LOST, FaultKind.TORN, FaultKind.MISDIRECTED, FaultKind.MISDIRECTED)
            written = device.written_units()
            for _ in range(rng.randint(1, 3)):
                target = None
                if written and rng.random() < 0.7:  # onto something that matters, in any zone
                    target = min(rng.choice(written) * UNIT_BYTES, DEVICE_BYTES - (1 << 20))
                faults.append(
                    Fault(
                        rng.choice(kinds),
                        on=rng.choice((OperationKind.READ, OperationKind.WRITE, OperationKind.WRITE)),
                        skip_count=rng.randrange(40),
                        target_offset_bytes=target,
                    )
                )
        return FaultPlan(tuple(faults), seed=rng.getrandbits(32))

    # -- judging ---------------------------------------------------------------------------------------

    def probe(self, kind: OperationKind) -> None:
        """Before an operation of the history: crash a clone, recover it, judge it, perhaps twice."""
        rng = self.probe_rng
        if rng.random() >= self.settings.probe_share:
            return
        clone = self.clone = self.crash(self.device, rng)
        clone = self.clone = self.cut_recoveries(clone, rng, 0.15)
        store = open_store(clone, self.evict, self.discard)
        found = self.look(store, self.oracle)
        if rng.random() < 0.5:
            # A little work, cut short while its first group is in flight, or none at all: what a finished
            # recovery shows is on media, so that another crash takes nothing back.
            branch = copy.copy(self)
            branch.device, branch.oracle, branch.rng = clone, Oracle(found), rng
            branch.contents, branch.newest, branch.steps = dict(self.contents), dict(self.newest), []
            self.branch_steps = branch.steps
            if rng.random() < 0.6:
                clone.deferred = rng.random() < 0.7
                clone.set_plan(FaultPlan.stop(clone.operation_count + rng.randrange(12)))
                branch.work(store, rng.randint(1, 4))
            clone = self.clone = branch.crash(clone, rng)
            branch.look(open_store(clone, self.evict, self.discard), branch.oracle)
            self.branch_steps = []
        self.clone = None

    def look(self, store: Store, oracle: Oracle) -> dict[str, int | None]:
        """Read everything of a store just opened and compare it with what `oracle` allows."""
        self.tally.states += 1
        self.tally.by_profile[self.profile] += 1
        found: dict[str, int | None] = {}
        promised = [store.contains(key) for key in self.keys]
        for key, promise, value in zip(self.keys, promised, store.get_many(self.keys), strict=True):
            found[key] = self.version_of(key, value)
            if self.strict and promise != (found[key] is not None):
                raise Violation(f"contains({short(key)}) is {promise}, get finds version {found[key]}")
        if self.strict:
            oracle.judge(found)
        report = store.check()
        if report.problems:
            raise Violation(f"check: {'; '.join(report.problems)}")
        return found

    def version_of(self, key: str, value: Any) -> int | None:
        """The version `get` returned, None for a miss. Raises Violation for bytes never put there."""
        if value is None:
            return None
        tensors = value if isinstance(value, list) else [value]
        pieces = [tensor.numpy().tobytes() for tensor in tensors]
        for version in range(self.newest[key], 0, -1):
            if self.contents[key, version] == pieces:
                return version
        raise Violation(f"get({short(key)}) returned {sum(map(len, pieces))} bytes that were never put there")

    # -- steps -----------------------------------------------------------------------------------------

    def step(self, store: Store) -> bool:
        """One operation on the store, told to the oracle. False when the round is over."""
        rng, oracle = self.rng, self.oracle
        verb = rng.choices(STEPS, STEP_WEIGHTS)[0]
        key = rng.choice(self.keys)
        self.steps.append(verb if verb in ("commit", "checkpoint", "close") else f"{verb}:{short(key)}")
        try:
            if verb in ("put", "durable"):
                self.put(store, [key], durable=verb == "durable", many=False)
            elif verb == "many":
                keys = rng.sample(self.keys, rng.randint(2, min(6, len(self.keys))))
                if rng.random() < 0.5:
                    keys.sort(key=len, reverse=True)
                self.put(store, keys, durable=rng.random() < 0.5, many=True)
            elif verb == "delete":
                self.delete(store, key, durable=rng.random() < 0.3)
            elif verb == "get":
                self.get(store, key)
            elif verb == "commit":
                store.commit()
                oracle.all_durable()
            elif verb == "checkpoint":
                store.checkpoint()
                oracle.all_durable()
            else:
                store.close()
                oracle.all_durable()
        except BlockKVError as error:
            self.steps.append(f"({type(error).__name__})")
            if not (self.device.stopped or self.profile == "errors"):
                raise
        return verb != "close"

    def value(self, key: str, version: int) -> bytes | list[torch.Tensor]:
        pieces = self.contents[key, version]
        if len(pieces) == 1:
            return pieces[0]
        return [torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in pieces]

    def new_version(self, key: str) -> int:
        """Make content for a put: one piece to five, a byte to several runs, often whole units."""
        rng = self.rng
        self.newest[key] += 1
        version = self.newest[key]
        count = rng.choices((1, 2, 5), (70, 20, 10))[0]
        size_bytes = rng.choices((4096, 40960, 131072, 409600), (50, 32, 14, 4))[0] // count
        source = dice(f"{self.settings.seed} {self.number} {short(key)} {version}")
        self.contents[key, version] = [
            source.randbytes(rng.choice((size_bytes, 1 + rng.randrange(size_bytes)))) for _ in range(count)
        ]
        return version

    def put(self, store: Store, keys: list[str], *, durable: bool, many: bool) -> None:
        oracle = self.oracle
        fresh = {key: self.new_version(key) for key in keys if oracle.live[key] is None or self.evict}
        items = [(key, self.value(key, fresh.get(key) or oracle.live[key] or 0)) for key in keys]
        # During the call anything may have happened; a store that evicts may drop any key to make room.
        start = len(oracle.events)
        if self.evict:
            oracle.events += [Event(key, None, maybe=True) for key in self.keys]
        oracle.events += [Event(key, version, maybe=True) for key, version in fresh.items()]
        failure: BlockKVError | None = None
        stored = [False] * len(keys)
        try:
            if many:
                stored = store.put_many(items, durable=durable)
            else:
                stored = [store.put(*items[0], durable=durable)]
        except BatchError as error:
            stored = [bool(result) for result in error.results]
            failure = next((one for one in error.errors.values() if not isinstance(one, StoreFull)), error)
        except BlockKVError as error:
            failure = error
        if self.device.stopped and failure is not None:
            return
        for key, was_stored in zip(keys, stored, strict=True):
            if self.strict and was_stored and key not in fresh:
                raise Violation(f"put wrote {short(key)}, which was there")
        written = {
            key: fresh[key]
            for key, was_stored in zip(keys, stored, strict=True)
            if key in fresh and was_stored
        }
        if not self.evict:
            written = fresh  # what a put that failed halfway left behind is there or not
        self.settle(store, start, written, exact=not (self.evict and many))
        if durable and failure is None:
            for key in keys:
                if oracle.live[key] is not None:
                    oracle.key_durable(key, oracle.live[key])
        if failure is not None and not isinstance(failure, StoreFull | BatchError):
            raise failure

    def delete(self, store: Store, key: str, *, durable: bool) -> None:
        oracle = self.oracle
        start = len(oracle.events)
        oracle.events.append(Event(key, None, maybe=True))
        was_there = oracle.live[key] is not None
        failure: BlockKVError | None = None
        deleted = was_there
        try:
            deleted = store.delete(key, durable=durable)
        except BlockKVError as error:
            if self.device.stopped:
                return
            failure = error
        if self.strict and deleted != was_there:
            raise Violation(f"delete({short(key)}) returned {deleted}, but it was there: {was_there}")
        self.settle(store, start, {}, exact=True)
        if failure is not None:
            raise failure
        if durable and deleted:
            oracle.key_durable(key, None)

    def get(self, store: Store, key: str) -> None:
        oracle = self.oracle
        found = self.version_of(key, store.get(key))
        if found == oracle.live[key] or self.device.stopped:
            return
        if self.profile == "power" or (self.strict and found is not None):
            raise Violation(f"get({short(key)}) found version {found} instead of {oracle.live[key]}")
        # What cannot be read is dropped from the index, and that is logged.
        self.settle(store, len(oracle.events), {}, exact=True)

    def settle(self, store: Store, start: int, fresh: dict[str, int], *, exact: bool) -> None:
        """The operation is over: replace what might have happened by what did.

        Evictions are logged before the put they make room for; within a put of several, in between: then
        (`exact` False) the order of its events is left open.
        """
        oracle = self.oracle
        gone, come = [], []
        for key in self.keys:
            was, there = oracle.live[key], store.contains(key)
            version = fresh.get(key)
            now = (was if version is None else version) if there else None
            if was is not None and now != was:
                gone.append(Event(key, None, maybe=not exact))
            if version is not None and (now == version or not exact):
                come.append(Event(key, version, maybe=not exact))
                if now is None:
                    come.append(Event(key, None, maybe=True))
            oracle.live[key] = now
        oracle.events[start:] = gone + come


# --- directed histories -------------------------------------------------------------------------------------


class Directed(History, ABC):
    """A history made to reach one corner, instead of drawn."""

    profile_name = "power"

    def __init__(self, number: int, settings: Settings, tally: Tally, keys: list[str] = KEYS) -> None:
        super().__init__(number, dataclasses.replace(settings, profile=self.profile_name), tally)
        self.evict = self.discard = False
        self.garbage = 0.0
        self.keys = keys
        self.oracle = Oracle(dict.fromkeys(keys))
        self.device = formatted(6).clone()

    def run(self) -> None:
        """Raise Violation, with the whole story, if the store breaks a promise."""
        self.tally.histories += 1
        try:
            self.carry_out()
        except Exception as error:
            raise Violation(self.story(error)) from error

    @abstractmethod
    def carry_out(self) -> None:
        """The history."""


class GhostPages(Directed):
    """Two crashed epochs write the same journal page, and what landed of each makes one whole page.

    Epoch e writes page n and some of its sectors land; epoch e + 1 writes its own page n and only the others
    land. Where those are zero in both, epoch e's page is whole again, and follows the right predecessor. Dice
    throw this about three times in 100,000 crashes. The records are deletes: no payload betrays a dead one.
    """

    def __init__(self, number: int, settings: Settings, tally: Tally) -> None:
        super().__init__(number, settings, tally, keys=["k0", "k1"])

    def carry_out(self) -> None:
        """Both commits, for many ways to divide the sectors between them."""
        self.fill_ring()
        edges = [1 << sector for sector in range(8)] + [255 ^ 1 << sector for sector in range(8)]
        masks = range(256) if self.settings.exhaustive else edges + self.rng.sample(range(256), 16)
        start, base = self.device, self.oracle.base
        for mask in masks:
            self.oracle = Oracle(base)
            self.device = self.cut_commit(start, "k0", mask)
            self.device = self.cut_commit(self.device, "k1", 255 ^ mask)
            self.look(open_store(self.device, self.evict, self.discard), self.oracle)

    def fill_ring(self) -> None:
        """Store the keys, and leave no page of the ring with a sector of zeros."""
        store = open_store(self.device, self.evict, self.discard)
        self.put(store, self.keys, durable=True, many=True)
        self.oracle.all_durable()
        for number in range(12):
            store.put(f"{number:02}".ljust(3780, "x"), b"x", durable=True)
        self.device = self.device.clone()

    def cut_commit(self, device: SimulatedDevice, key: str, mask: int) -> SimulatedDevice:
        """Delete and commit on a copy; the sectors in `mask` of the journal page land."""
        device = self.device = device.clone()
        store = open_store(device, self.evict, self.discard)
        self.oracle = Oracle(self.look(store, self.oracle))
        self.delete(store, key, durable=False)
        before = device.clone()
        store.commit()
        changed = [unit for unit in device.written_units() if not same_unit(device, before, unit)]
        assert len(changed) == 1, f"a commit of one record wrote units {changed}"
        offset = changed[0] * UNIT_BYTES
        versions = [before.peek(offset, UNIT_BYTES), device.peek(offset, UNIT_BYTES)]
        before.poke(offset, next(itertools.islice(mixtures(versions), mask, None)))
        self.steps.append(f"{key}&{mask:#x}")
        return before


class TornPages(Directed):
    """Every mixture of old and new sectors of every single page a short history writes."""

    def __init__(self, number: int, settings: Settings, tally: Tally) -> None:
        super().__init__(number, settings, tally)
        self.device = formatted(6).clone()
        self.before = self.device.clone()

    def carry_out(self) -> None:
        """Superblocks, journal and checkpoint pages and payload, over blank space and over old content."""
        self.device.before_operation = self.tear
        for _ in range(2):
            store = open_store(self.device, self.evict, self.discard)
            for key in self.keys[:2]:
                self.put(store, [key], durable=True, many=False)
            self.delete(store, self.keys[0], durable=True)
            store.checkpoint()
            self.oracle.all_durable()
            self.put(store, [self.keys[-1]], durable=True, many=False)

    def tear(self, _: OperationKind) -> None:
        """After a write of one page, and before the next operation: all 256 crashes inside that write."""
        last = self.device.operations()[-1:]
        if last and last[0].kind is OperationKind.WRITE and last[0].length_bytes == UNIT_BYTES:
            offset = last[0].offset_bytes
            versions = [self.before.peek(offset, UNIT_BYTES), self.device.peek(offset, UNIT_BYTES)]
            for page in mixtures(versions):
                self.clone = self.before.clone()
                self.clone.poke(offset, page)
                self.look(open_store(self.clone, self.evict, self.discard), self.oracle)
            self.clone = None
        self.before = self.device.clone()


class CutFormat(Directed):
    """A format over an older store, stopped at every operation: the old store, an empty one, or none."""

    def carry_out(self) -> None:
        """Several crash states for each operation."""
        store = open_store(self.device, self.evict, self.discard)
        for key in self.keys[:4]:
            self.put(store, [key], durable=True, many=False)
            store.checkpoint()  # so that slots of several generations hold a store
        store.close()
        self.oracle.all_durable()
        old = self.device.clone()
        for operation in itertools.count():
            self.device = old.clone(FaultPlan.stop(operation))
            with contextlib.suppress(BlockKVError):
                blockkv.format(self.device, average_chunk="16KiB", journal=6 * UNIT_BYTES, force=True)
            if not self.device.stopped:
                break
            for _ in range(200 if self.settings.exhaustive else 15):
                self.clone = self.device.crash_clone(self.rng)
                try:
                    store = open_store(self.clone, self.evict, self.discard)
                except NotFormatted:
                    self.tally.states += 1
                    continue
                empty = Oracle(dict.fromkeys(self.keys))
                self.look(store, self.oracle if store.contains(self.keys[0]) else empty)
                self.clone = None


class FailEvery(Directed):
    """A history in which operation 0, 1, 2, ... fails, with each errno a device answers with."""

    profile_name = "errors"

    def carry_out(self) -> None:
        """Run it again and again until the failing operation lies beyond its end."""
        start, plain_dice = self.device, self.rng.getstate()
        for code in (errno.EIO, errno.ENODATA, errno.ENOSPC, errno.ETIMEDOUT):
            for operation in itertools.count():
                self.rng.setstate(plain_dice)
                self.device, self.oracle = start.clone(), Oracle(dict.fromkeys(self.keys))
                self.steps.append(f"[{operation} {errno.errorcode[code]}")
                store = open_store(self.device, self.evict, self.discard)
                self.device.set_plan(FaultPlan.fail(self.device.operation_count + operation, code))
                self.work(store, 25)
                self.device.set_plan(None)
                if not self.device.counters()["faults_injected"]:
                    break
                for crash in Crash:
                    self.clone = self.device.crash_clone(self.probe_rng, crash)
                    self.look(open_store(self.clone, self.evict, self.discard), self.oracle)
                self.clone, self.steps = None, []


def same_unit(one: SimulatedDevice, other: SimulatedDevice, unit: int) -> bool:
    offset = unit * UNIT_BYTES
    return one.peek(offset, UNIT_BYTES) == other.peek(offset, UNIT_BYTES)


DIRECTED: dict[int, type[Directed]] = {-1: GhostPages, -2: CutFormat, -3: FailEvery, -4: TornPages}
"""Histories with numbers of their own, for --history."""


# --- the store under test -----------------------------------------------------------------------------------


@functools.cache
def formatted(journal_pages: int) -> SimulatedDevice:
    """A freshly formatted device. Histories start from copies: they may share the store's identity."""
    device = SimulatedDevice(DEVICE_BYTES)
    blockkv.format(device, average_chunk="16KiB", journal=journal_pages * UNIT_BYTES)
    device.flush()
    return device


def open_store(device: SimulatedDevice, evict: bool, discard: bool) -> Store:
    """Open without a background thread: one seed fixes everything."""
    # Each clone is a machine of its own, so the rule against opening two copies of a store does not apply;
    # and nothing is closed at exit, because these machines have crashed.
    store_module._open_stores.clear()
    return blockkv.open(device, evict=evict, discard=discard, commit_interval_ms=None)


# --- mutants ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutant:
    """A protocol bug. `patch` installs it for as long as the context lasts."""

    name: str
    patch: Callable[[], contextlib.AbstractContextManager[object]]
    profile: str = "power"


def replaced(
    owner: object, name: str, make: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[object]:
    """Replace an attribute by what `make` returns for the original."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def without_flushes(device: Any) -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(device, "flush", return_value=None)


def acknowledge_before_flush() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def write_pages(self: Log, group: Any) -> None:
            self._device.flush()  # for the group before
            with without_flushes(self._device):
                original(self, group)

        return write_pages

    return replaced(Log, "_write_pages", make)


def flush_before_pages_complete() -> contextlib.AbstractContextManager[object]:
    def make_write_pages(original: Any) -> Any:
        def write_pages(self: Log, group: Any) -> None:
            device, wait = self._device, self._device.wait

            def flush_then_wait(batch: Batch) -> None:
                type(device).flush(device)
                wait(batch)

            with without_flushes(device), mock.patch.object(device, "wait", flush_then_wait):
                original(self, group)

        return write_pages

    return replaced(Log, "_write_pages", make_write_pages)


@contextlib.contextmanager
def flush_before_data_completes() -> Iterator[None]:
    late: list[tuple[Any, Batch]] = []

    def wait_for_late() -> None:
        while late:
            device, batch = late.pop()
            device.wait(batch)

    def make_finish(original: Any) -> Any:
        def finish(self: PutRun) -> None:
            wave = self._in_flight.popleft()
            if wave.refusal is None:
                late.append((self._state.device, wave.batch))
            self._complete(wave)

        return finish

    def make_write_pages(original: Any) -> Any:
        def write_pages(self: Log, group: Any) -> None:
            original(self, group)
            wait_for_late()

        return write_pages

    def make_start(original: Any) -> Any:
        def start(self: GetRun) -> None:
            wait_for_late()
            original(self)

        return start

    with (
        mock.patch.object(PutRun, "_finish", make_finish(None)),
        replaced(Log, "_write_pages", make_write_pages),
        mock.patch.object(GetRun, "_start", make_start(GetRun._start)),
    ):
        yield


def no_verification_on_get() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(gets_module, "root_checksum", return_value=AlwaysEqual())


class AlwaysEqual:
    """Equal to everything: a comparison left out."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def unsealed_tail_trusted() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(recovery_module, "_verify_unsealed", return_value=[])


def superblock_before_checkpoint_flushed() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def write_checkpoint(self: Log, *arguments: Any) -> Any:
            with without_flushes(self._device):
                return original(self, *arguments)

        return write_checkpoint

    return replaced(Log, "_write_checkpoint", make)


def checkpoint_over_active_area() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def write_checkpoint(self: Log, *arguments: Any) -> Any:
            current = self.superblock
            self.superblock = dataclasses.replace(current, checkpoint_area=1 - current.checkpoint_area)
            try:
                return original(self, *arguments)
            finally:
                self.superblock = current

        return write_checkpoint

    return replaced(Log, "_write_checkpoint", make)


@contextlib.contextmanager
def one_superblock_slot() -> Iterator[None]:
    def write_superblock(device: Any, found: Any) -> None:
        device.write(found.geometry.slot_offsets[0], found.encode(0))
        device.flush()

    with (
        mock.patch.object(superblock_module, "slots_of", return_value=(0, 4)),
        mock.patch.object(log_module, "write_superblock", write_superblock),
        mock.patch.object(store_module, "write_superblock", write_superblock),
        mock.patch.object(create_module, "write_superblock", write_superblock),
        fresh_format(),
    ):
        yield


@contextlib.contextmanager
def fresh_format() -> Iterator[None]:
    """Devices formatted by a mutant are not for anybody else."""
    formatted.cache_clear()
    try:
        yield
    finally:
        formatted.cache_clear()


def reuse_before_delete_is_durable() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(State, "_defer", lambda self, extents, group: self.allocator.release(extents))


def discard_before_delete_is_durable() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def delete(self: State, entry: Any) -> Any:
            group = original(self, entry)
            for start, count in entry.extents:
                self.device.discard(self.geometry.unit_offset(start), count * UNIT_BYTES)
            return group

        return delete

    return replaced(State, "delete", make)


class AnyEpoch(int):
    """An epoch that passes every comparison."""

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = lambda self, other: True
    __hash__ = int.__hash__


def no_predecessor_and_no_epoch() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def decode_page(data: Any, *, link: bytes | None = None, **asked: Any) -> Any:
            page = original(data, **asked)
            return page if link is None else dataclasses.replace(page, epoch=AnyEpoch(page.epoch))

        return decode_page

    return replaced(journal_module, "decode_page", make)


class NeverDecreasing(Replay):
    """A replay that accepts any page whose epoch is not below that of the page before."""

    def __init__(self, read_page: Any, found: Any, *arguments: Any) -> None:
        lax = dataclasses.replace(found, epoch=found.epoch + 1, epoch_start_sequence=1 << 61)
        super().__init__(read_page, lax, *arguments)

    @property
    def end(self) -> Any:
        return dataclasses.replace(super().end, reason=EndReason.END_OF_LOG)


def epoch_never_decreases() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(recovery_module, "Replay", NeverDecreasing)


def dropped_put_not_deleted() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def recover(*arguments: Any, **options: Any) -> Any:
            recovered = original(*arguments, **options)
            recovered.dropped.clear()
            return recovered

        return recover

    return replaced(store_module, "recover", make)


MUTANTS = (
    Mutant("acknowledge-before-flush", acknowledge_before_flush),
    Mutant("flush-before-pages-complete", flush_before_pages_complete),
    Mutant("flush-before-data-completes", flush_before_data_completes),
    Mutant("no-verification-on-get", no_verification_on_get, "rot"),
    Mutant("unsealed-tail-trusted", unsealed_tail_trusted),
    Mutant("superblock-before-checkpoint-flushed", superblock_before_checkpoint_flushed),
    Mutant("checkpoint-over-active-area", checkpoint_over_active_area),
    Mutant("one-superblock-slot", one_superblock_slot),
    Mutant("reuse-before-delete-is-durable", reuse_before_delete_is_durable),
    Mutant("discard-before-delete-is-durable", discard_before_delete_is_durable),
    Mutant("no-predecessor-and-no-epoch", no_predecessor_and_no_epoch),
    Mutant("epoch-never-decreases", epoch_never_decreases),
    Mutant("dropped-put-not-deleted", dropped_put_not_deleted),
)
"""`no flush at open` is not among them: the superblock that every open writes is followed by a flush before
anything is acknowledged, so leaving out the first one breaks no promise."""


# --- command line -------------------------------------------------------------------------------------------


def explore(
    settings: Settings, tally: Tally, first: int, states: int, histories: int | None, deadline: float
) -> str | None:
    """Run histories from number `first` on. Returns the story of the first violation, or None."""
    last_state = tally.states + states
    directed = list(DIRECTED) if settings.exhaustive else [-1]
    if first or settings.profile not in (None, "power"):
        directed = []
    for number in itertools.chain(directed, itertools.count(first)):
        if tally.states >= last_state or time.monotonic() >= deadline:
            return None
        if histories is not None and number >= first + histories:
            return None
        try:
            DIRECTED.get(number, History)(number, settings, tally).run()
        except Violation as violation:
            return str(violation)
    return None


def main() -> int:
    names = [mutant.name for mutant in MUTANTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=10_000, help="crash states to examine (default 10000)")
    parser.add_argument("--histories", type=int, help="at most this many histories")
    parser.add_argument("--seconds", type=float, help="at most this long, mutants not included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--history", type=int, help="run this one again")
    parser.add_argument(
        "--every", action="store_true", help="a crash state before every device operation, every torn page"
    )
    parser.add_argument("--profile", choices=PROFILES, help="only this one")
    parser.add_argument(
        "--mutant",
        default="all",
        choices=[*names, "all", "none"],
        metavar="NAME",
        help="which mutants must be caught: all, none, or one of " + ", ".join(names),
    )
    parser.add_argument("--mutant-states", type=int, default=50_000, help="give up on a mutant after these")
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    # A pure function that every recovery calls eight times, mostly with the same bytes.
    superblock_module.decode = functools.lru_cache(maxsize=4096)(superblock_module.decode)

    settings = Settings(options.seed, 1.0 if options.every else PROBE_SHARE, options.every, options.profile)
    tally, started = Tally(), time.monotonic()
    one_history = options.history is not None
    first, histories = (options.history, 1) if one_history else (0, options.histories)
    deadline = started + options.seconds if options.seconds else float("inf")
    violations: list[str] = []
    caught: dict[str, dict[str, Any]] = {}
    chosen = [mutant for mutant in MUTANTS if options.mutant in ("all", mutant.name)]
    if not (one_history and options.mutant in names):
        story = explore(settings, tally, first, 10**9 if one_history else options.states, histories, deadline)
        if story:
            violations.append(story)
            print(f"VIOLATION {story}", file=sys.stderr)
    elapsed_s = time.monotonic() - started
    for mutant in chosen if not one_history or options.mutant in names else []:
        mutant_settings = dataclasses.replace(settings, profile=mutant.profile)
        mutant_tally, mutant_started = Tally(), time.monotonic()
        with mutant.patch():
            story = explore(
                mutant_settings, mutant_tally, first, options.mutant_states, histories, float("inf")
            )
        caught[mutant.name] = {
            "caught": story is not None,
            "states": mutant_tally.states,
            "seconds": round(time.monotonic() - mutant_started, 1),
        }
        verdict = "caught" if story else "NOT CAUGHT"
        print(f"mutant {mutant.name:38} {verdict} after {mutant_tally.states} states", file=sys.stderr)
        if one_history and story:
            print(story, file=sys.stderr)

    result = {
        "states": tally.states,
        "violations": len(violations),
        "seed": options.seed,
        "histories": tally.histories,
        "operations": tally.operations,
        "recoveries_cut": tally.recoveries_cut,
        "states_by_profile": tally.by_profile,
        "states_per_second": round(tally.states / elapsed_s) if elapsed_s else 0,
        "seconds": round(elapsed_s, 1),
        "mutants": {name: found["caught"] for name, found in caught.items()},
        "mutant_states": {name: found["states"] for name, found in caught.items()},
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            if name not in ("mutants", "mutant_states"):
                print(f"{name:20} {value}")
    return 1 if violations or not all(found["caught"] for found in caught.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
