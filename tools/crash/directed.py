"""Histories made to reach one corner, instead of drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import blockkv
from blockkv.device.base import UNIT_BYTES
from blockkv.errors import BlockKVError, NotFormatted, StoreFull
from blockkv.store import Store
from blockkv.testing import Crash, Fault, FaultKind, FaultPlan, OperationKind, SimulatedDevice, mixtures
from crash.history import KEYS, RECOVERY_DEPTH, History, Settings, Tally, formatted, open_store
from crash.oracle import Event, Oracle, Violation, short

__all__ = ["DIRECTED", "QUICK"]

LONG0, LONG1 = KEYS[-2:]


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
    """A whole life of a store in which operation 0, 1, 2, ... fails, in every way a device fails.

    Format, open, puts, get, deletes, commit, checkpoint, close, open again, scrub, and check with a repair.
    """

    profile_name = "errors"
    life = (
        ("open", ""),
        ("put", "k0"),
        ("durable", LONG0),
        ("many", ""),
        ("get", "k0"),
        ("delete", "k0"),
        ("commit", ""),
        ("put", LONG1),
        ("checkpoint", ""),
        ("durable", "k1"),
        ("delete", LONG0),
        ("close", ""),
        ("open", ""),
        ("durable", "k3"),
        ("kill", ""),
        ("open", ""),
        ("get", "k1"),
        ("put", "k0"),
        ("scrub", ""),
        ("durable", "k2"),
        ("delete", "k1"),
        ("repair", ""),
        ("put", "k4"),
    )

    def carry_out(self) -> None:
        """Each life again and again, until the failing operation lies beyond its end."""
        codes = (errno.EIO, errno.ENODATA, errno.ENOSPC, errno.ETIMEDOUT)
        faults = [Fault(FaultKind.ERROR, errno=code) for code in codes]
        faults += [Fault(FaultKind.SHORT, done_bytes=512), Fault(FaultKind.SHORT), Fault(FaultKind.STOP)]
        start, plain_dice = self.device, self.rng.getstate()
        for fault in faults:
            for operation in itertools.count():
                self.rng.setstate(plain_dice)
                self.device, self.oracle = start.clone(), Oracle(dict.fromkeys(self.keys))
                self.steps.append(f"[{operation} {fault.kind.value} {errno.errorcode[fault.errno]}")
                self.operations_left = operation
                self.arm(fault)
                was_formatted = self.live(fault)
                if self.device.operation_count <= self.operations_left:
                    break
                self.device.set_plan(None)
                for crash in Crash:
                    self.clone = self.device.crash_clone(self.probe_rng, crash)
                    with contextlib.nullcontext() if was_formatted else contextlib.suppress(NotFormatted):
                        self.look(open_store(self.clone, self.evict, self.discard), self.oracle)
                self.clone, self.steps = None, []

    def arm(self, fault: Fault) -> None:
        """Let the fault hit once `operations_left` operations of this device are over."""
        if self.operations_left >= 0:
            fault = dataclasses.replace(fault, operation=self.operations_left)
            self.device.set_plan(FaultPlan((fault,), self.operations_left))

    def live(self, fault: Fault) -> bool:
        """Carry out the life until its store is of no more use. Returns whether formatting succeeded."""
        try:
            blockkv.format(self.device, average_chunk="16KiB", journal=6 * UNIT_BYTES, force=True)
        except BlockKVError:
            return False
        store = None
        for verb, key in self.life:
            if self.device.stopped:
                break
            if verb == "open":
                self.steps.append(verb)
                try:
                    store = open_store(self.device, self.evict, self.discard)
                except BlockKVError:
                    break
                self.judge_open(store)
                self.arm(fault)
            elif verb != "kill":
                assert store is not None
                self.carry(store, verb, key)
            if verb in ("close", "kill"):
                self.operations_left -= self.device.operation_count
                self.device = self.device.crash_clone(self.rng, Crash.PROCESS_KILL)
                self.arm(fault)
        return True

    def judge_open(self, store: Store) -> None:
        """What the index names is what was acknowledged, less chunks that had to be read and could not be."""
        self.device.set_plan(None)
        unreadable = store.info()["recovery"]["chunks_dropped_unsealed"]
        found = {key: self.version_of(key, store.get(key)) for key in self.keys}
        live = self.oracle.live
        missing = [key for key in self.keys if live[key] is not None and found[key] is None]
        if len(missing) > unreadable:
            self.oracle.judge(found)
        # Dropping them is the first thing this epoch logs; until that is durable a crash brings them back.
        dropped = missing if unreadable else []
        self.oracle = Oracle(found | {key: live[key] for key in dropped})
        self.oracle.events = [Event(key, None) for key in dropped]
        self.oracle.live = dict(found)


class ShortSequences(Directed):
    """Every sequence of a few operations, crashed before every device operation it makes."""

    alphabet = (
        ("put", "k2"),
        ("durable", "k3"),
        ("put", LONG1),
        ("delete", "k0"),
        ("delete", LONG0),
        ("get", "k1"),
        ("commit", ""),
        ("checkpoint", ""),
        ("scrub", ""),
        ("close", ""),
        ("kill", ""),
    )

    def carry_out(self) -> None:
        """All sequences of up to three operations; of up to two where not everything is asked for."""
        self.probe_everything()
        store = open_store(self.device, self.evict, self.discard)
        self.put(store, ["k0", "k1", LONG0], durable=True, many=True)
        self.oracle.all_durable()
        base, start = self.oracle.base, self.device.clone()
        for length in range(1, 4 if self.settings.exhaustive else 3):
            for sequence in itertools.product(self.alphabet, repeat=length):
                self.steps = []
                self.device, self.oracle = start.clone(), Oracle(base)
                self.device.before_operation = self.probe
                store = self.reopen()
                for verb, key in sequence:
                    if verb != "kill" and self.carry(store, verb, key):
                        continue
                    self.device = self.device.crash_clone(self.rng, Crash.PROCESS_KILL)
                    self.device.before_operation = self.probe
                    store = self.reopen()
                for crash in Crash:
                    self.clone = self.device.crash_clone(self.probe_rng, crash)
                    self.look(open_store(self.clone, self.evict, self.discard), self.oracle)

    def probe_everything(self) -> None:
        """A crash before every operation."""
        self.settings = dataclasses.replace(self.settings, probe_share=1.0)

    def reopen(self) -> Store:
        """Open what a close or a crash left; what it shows is durable from then on."""
        store = open_store(self.device, self.evict, self.discard)
        self.device.before_operation, probe = None, self.device.before_operation
        self.oracle = Oracle(self.look(store, self.oracle))
        self.device.before_operation = probe
        return store


class CutRecoveries(Directed):
    """Recoveries cut at each of their writes and flushes, and the recovery after each of those, five deep."""

    def carry_out(self) -> None:
        """From a store killed with a group in flight; three deep where not everything is asked for."""
        store = open_store(self.device, self.evict, self.discard)
        self.put(store, self.keys[:3], durable=True, many=True)
        self.oracle.all_durable()
        self.put(store, [*self.keys[3:5], LONG0], durable=False, many=True)
        self.delete(store, self.keys[0], durable=False)
        self.device.set_plan(FaultPlan.stop(self.device.operation_count + 1))
        with contextlib.suppress(BlockKVError):
            store.commit()
        for crash in Crash:
            self.cut(
                self.device.crash_clone(self.rng, crash), RECOVERY_DEPTH if self.settings.exhaustive else 3
            )

    def cut(self, device: SimulatedDevice, depth: int) -> None:
        """Judge what `device` holds, then what every cut recovery of it leaves."""
        self.clone = device.crash_clone(self.rng, Crash.PROCESS_KILL)
        self.look(open_store(self.clone, self.evict, self.discard), self.oracle)
        if not depth:
            return
        changes = [
            one.sequence
            for one in self.clone.operations()
            if one.kind in (OperationKind.WRITE, OperationKind.FLUSH)
        ]
        for operation in changes:
            trial = device.crash_clone(self.rng, Crash.PROCESS_KILL)
            trial.set_plan(FaultPlan.stop(operation))
            with contextlib.suppress(BlockKVError):
                open_store(trial, self.evict, self.discard)
            assert trial.stopped, f"recovery made no operation {operation}"
            self.tally.recoveries_cut += 1
            self.cut(trial.crash_clone(self.rng), depth - 1)


class Growth(Directed):
    """Chunks that grow, beside puts and deletes, crashed at any operation, several times over."""

    growing_keys = ("k0", "k1", LONG0)
    verbs = ("append", "durable", "seal", "abandon", "put", "delete", "commit", "checkpoint", "close")
    weights = (30, 25, 8, 5, 10, 6, 5, 3, 2)

    def carry_out(self) -> None:
        """Lives from the same start, each with a few crashes."""
        rng, start = self.rng, self.device
        for _ in range(400 if self.settings.exhaustive else 20):
            self.device, self.oracle = start.clone(), Oracle(dict.fromkeys(self.keys))
            self.garbage = rng.choice((0.0, 0.15))
            self.steps = []
            for _ in range(rng.randint(1, 4)):
                self.device = self.cut_recoveries(self.device, rng, 0.1)
                self.device.deferred = rng.random() < 0.7
                store = open_store(self.device, self.evict, self.discard)
                self.oracle = Oracle(self.look(store, self.oracle))
                if rng.random() < 0.5:
                    self.device.set_plan(FaultPlan.stop(self.device.operation_count + rng.randrange(60)))
                self.device.before_operation = self.probe
                with contextlib.suppress(BlockKVError):
                    self.grow(store)
                self.device.before_operation = None
                self.device = self.crash(self.device, rng)

    def grow(self, store: Store) -> None:
        """Steps on up to three growing chunks at once."""
        rng, growing = self.rng, dict[str, tuple[Any, bytearray]]()
        for _ in range(rng.randint(3, 25)):
            verb = rng.choices(self.verbs, self.weights)[0]
            key = rng.choice(self.growing_keys)
            if verb in ("put", "delete", "commit", "checkpoint", "close"):
                key = rng.choice([one for one in self.keys if one not in growing])
                if not self.carry(store, verb, key) or self.device.stopped:
                    return
                continue
            self.steps.append(f"{verb}:{short(key)}")
            if key not in growing:
                if self.oracle.live[key] is not None:
                    continue
                try:
                    growing[key] = store.reserve(key, 500_000), bytearray()
                except StoreFull:
                    continue
            chunk, content = growing[key]
            if verb in ("append", "durable"):
                self.append(key, chunk, content, durable=verb == "durable")
            elif verb == "abandon" or not content:
                self.change(key, None, chunk.abandon)
                del growing[key]
            else:
                durable = rng.random() < 0.3
                version = self.next_version(key, content)
                self.change(key, version, lambda chunk=chunk, durable=durable: chunk.seal(durable))
                if durable:
                    self.oracle.key_durable(key, version)
                del growing[key]

    def append(self, key: str, chunk: Any, content: bytearray, *, durable: bool) -> None:
        """Append some bytes, often up to the edge of a unit; and read them."""
        size_bytes = self.rng.choice((1 + self.rng.randrange(90_000), 4096, 40_960, -len(content) % 4096))
        rows = self.rng.randbytes(min(size_bytes, chunk.capacity_bytes - len(content)))
        content += rows
        if rows and not durable:
            chunk.append(rows)
        elif rows:
            version = self.next_version(key, content)
            self.change(key, version, lambda: chunk.append(rows, durable=True))
            self.oracle.key_durable(key, version)
        if content and bytes(chunk.read().numpy()) != content:
            raise Violation(f"{short(key)} does not read as it was appended")

    def next_version(self, key: str, content: bytearray) -> int:
        """A version that consists of what was appended so far."""
        if self.contents.get((key, self.newest[key])) == [bytes(content)]:
            return self.newest[key]
        self.newest[key] += 1
        self.contents[key, self.newest[key]] = [bytes(content)]
        return self.newest[key]

    def change(self, key: str, version: int | None, call: Callable[[], object]) -> None:
        """Tell the oracle of a change, before and after it happens."""
        was = self.oracle.live[key]
        if was is None and version is None:
            call()
            return
        event = Event(key, version, maybe=True, replaces=was is not None and version is not None)
        self.oracle.events.append(event)
        call()
        event.maybe = False
        self.oracle.live[key] = version


def same_unit(one: SimulatedDevice, other: SimulatedDevice, unit: int) -> bool:
    offset = unit * UNIT_BYTES
    return one.peek(offset, UNIT_BYTES) == other.peek(offset, UNIT_BYTES)


DIRECTED: dict[int, type[Directed]] = {
    -1: GhostPages,
    -2: CutFormat,
    -3: FailEvery,
    -4: TornPages,
    -5: ShortSequences,
    -6: CutRecoveries,
    -7: Growth,
}
"""Histories with numbers of their own, for --history."""
QUICK = (-1, -7)
"""Those that no random history stands in for: every run begins with them."""
