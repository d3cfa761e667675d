"""One history: a store at work on a device that crashes, and the judging of every state a crash leaves."""

from __future__ import annotations

import copy
import errno
import functools
import random
from dataclasses import dataclass, field
from typing import Any

import torch

import blockkv
from blockkv.device.base import UNIT_BYTES
from blockkv.errors import BatchError, BlockKVError, StoreFull
from blockkv.store import Store
from blockkv.store import store as store_module
from blockkv.testing import Crash, Fault, FaultKind, FaultPlan, OperationKind, SimulatedDevice
from crash.oracle import Event, Oracle, Violation, short

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
STEPS = ("put", "durable", "many", "delete", "get", "commit", "checkpoint", "scrub", "repair", "close")
STEP_WEIGHTS = (30, 15, 12, 18, 12, 8, 4, 2, 1, 2)
KEYED_STEPS = ("put", "durable", "delete", "get")
SCRUB_BYTES_PER_S = 1e12
"""No waiting."""


def dice(name: str) -> random.Random:
    """A source of randomness that follows from its name alone."""
    return random.Random(name)  # noqa: S311  nothing secret


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
        """One operation on the store, drawn. False when the round is over."""
        verb = self.rng.choices(STEPS, STEP_WEIGHTS)[0]
        return self.carry(store, verb, self.rng.choice(self.keys))

    def carry(self, store: Store, verb: str, key: str) -> bool:
        """One operation on the store, told to the oracle. False when the store was closed."""
        rng, oracle = self.rng, self.oracle
        self.steps.append(f"{verb}:{short(key)}" if verb in KEYED_STEPS else verb)
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
                if self.discard:
                    store.discard_freed()
            elif verb == "checkpoint":
                store.checkpoint()
                oracle.all_durable()
            elif verb == "scrub":
                store.scrub(SCRUB_BYTES_PER_S)
                self.settle(store, len(oracle.events), {}, exact=True)
            elif verb == "repair":
                store.check(payload=True, repair=True)
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
