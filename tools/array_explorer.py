#!/usr/bin/env python3
"""Crash arrays, lose members, bring them back, and compare what is found with what was promised.

One history is a sequence of rounds on an array of two to four simulated devices. A round opens the array,
with all members or degraded; puts, deletes, commits, loses members while it works; then power fails or the
process is killed. Before some device operations, or with --every before each, all devices are cloned in a
state that a crash would leave; the clones are opened, with all members or without some, perhaps crash
meanwhile, and are judged.

The oracle: per key the states that it went through since the last one that is known to be on media. Whatever
is found must be one of these. What a lost or missing member holds may be a miss; once anything has been
acknowledged without the member, it must be. A key is never found in two members.

Mutants are protocol bugs patched into the store from here. Each must be caught.

    tools/array_explorer.py --histories 200 --every
    tools/array_explorer.py --seed 1 --history 47        one history again
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import blockkv
from blockkv.device.base import UNIT_BYTES
from blockkv.errors import DeviceLost, StoreFull, WrongStore
from blockkv.format.record import key_digest
from blockkv.store import array_open, array_store
from blockkv.store import store as store_module
from blockkv.store.array_store import ArrayStore
from blockkv.testing import Crash, OperationKind, SimulatedDevice, payload

DEVICE_BYTES = 8 << 20
KEYS = [f"k{number}" for number in range(6)]
SIZES = (100, 4096, 20_000, 140_000)
STEPS = ("put", "durable", "many", "delete", "erase", "get", "commit", "checkpoint", "lose")
STEP_WEIGHTS = (20, 12, 8, 16, 6, 8, 8, 2, 3)
PROBE_SHARE = 0.1
DEPTH = 2
"""Crashes during the open after a crash."""


class Violation(Exception):
    """The array broke a promise."""


def dice(name: str) -> random.Random:
    """A source of randomness that follows from its name alone."""
    return random.Random(name)  # noqa: S311  nothing secret


@dataclasses.dataclass(slots=True)
class Past:
    """What one key went through, and which member has held it last."""

    states: list[int | None]
    durable: int = 0
    """The last of the states that is known to be on media."""
    holder: int | None = None

    def allowed(self) -> set[int | None]:
        """What may be found."""
        return set(self.states[self.durable :])


@dataclasses.dataclass(slots=True)
class Tally:
    """What was done so far."""

    histories: int = 0
    states: int = 0
    crashed_opens: int = 0
    losses: int = 0
    degraded_opens: int = 0
    divided: int = 0


class _Inline:
    """An executor that carries out everything at once: the same seed, the same history."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call it now."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing is left to do."""


class History:
    """One history: devices, oracle and dice."""

    def __init__(self, number: int, seed: int, tally: Tally, *, every: bool = False) -> None:
        self.number, self.seed, self.tally, self.every = number, seed, tally, every
        self.rng = dice(f"array {seed} {number}")
        self.probe_rng = dice(f"array probe {seed} {number}")
        self.devices = [
            SimulatedDevice(DEVICE_BYTES, path=f"d{index}", lba_bytes=self.rng.choice((512, 4096)))
            for index in range(self.rng.choice((2, 3, 3, 4)))
        ]
        blockkv.format(self.devices, average_chunk="16KiB", journal=6 * UNIT_BYTES)
        for device in self.devices:
            device.flush()
        self.devices = [device.clone() for device in self.devices]
        self.past = {key: Past([None]) for key in KEYS}
        self.versions = itertools.count(1)
        self.contents: dict[bytes, tuple[str, int]] = {}
        self.steps: list[str] = []
        self.apart: list[set[int]] = []
        """Sets of members that the array was opened with for writing, or was about to."""
        self.current = set(range(len(self.devices)))
        """Who knows the newest term that anything was acknowledged in. Whoever opens the array with none of
        these goes back to what it was before, and nothing on their media says so."""
        self.gone: dict[int, list[tuple[str, int]]] = {}
        """Per member lost in this round: keys, and the state that says that they went with it."""

    def run(self) -> None:
        """Raise Violation, with the whole story, if the array breaks a promise."""
        self.tally.histories += 1
        try:
            for _ in range(self.rng.randint(2, 5)):
                self.round()
        except Exception as error:  # whatever escapes the store is a finding too
            kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
            raise Violation(
                f"{kind}{error}\n    seed {self.seed} history {self.number}, {len(self.devices)} devices"
                f"\n    steps: {' '.join(self.steps)}"
            ) from error

    def round(self) -> None:
        """Open, perhaps with crashes on the way; work; crash or close."""
        rng = self.rng
        for _ in range(rng.choice((0, 0, 1, 2))):
            there = self.subset(rng)
            self.devices, self.past = self.crash_open(self.devices, self.past, there, rng)
        there = self.subset(rng)
        self.steps.append(f"[{there}")
        for device in self.devices:
            device.before_operation = self.probe
        store, there = self.open(self.devices, self.past, there)
        self.look(store, self.past, there)
        self.known(store, self.past)
        self.gone = {}
        for _ in range(rng.randint(2, 20)):
            self.step(store)
        if rng.random() < 0.2:
            self.steps.append("close")
            with contextlib.suppress(DeviceLost):
                store.close()
            if store._present:
                self.all_durable()
        for device in self.devices:
            device.before_operation = None
        self.devices = crash(self.devices, rng)
        self.steps.append("crash]")

    # -- opening ---------------------------------------------------------------------------------------

    def subset(self, rng: random.Random) -> list[int]:
        """Which members to open with: mostly all."""
        everybody = list(range(len(self.devices)))
        if rng.random() < 0.5:
            return everybody
        kept = {rng.choice(sorted(self.current))}
        absent = rng.choice((1, 1, 1, 1, 1, 2, 3))
        return sorted(kept | set(rng.sample(everybody, max(0, len(everybody) - absent))))

    def open(
        self,
        devices: Sequence[SimulatedDevice],
        past: dict[str, Past],
        there: Sequence[int],
        *,
        told: bool = True,
    ) -> tuple[ArrayStore, list[int]]:
        """Open with these members. What the others hold may be gone from now on."""
        # Each set of clones is a machine of its own, and what crashed is not closed at exit.
        store_module._open_stores.clear()
        others = set(range(len(devices))) - set(there)
        for one in past.values():
            if one.holder in others:
                one.states.append(None)
        self.tally.degraded_opens += bool(others)
        self.apart.append(set(there))
        given = [devices[index] for index in there]
        try:
            store = blockkv.open(given, degraded=True, evict=False, commit_interval_ms=None)
        except WrongStore as error:
            if "without the other" not in str(error):
                raise
            # Only where two sets were opened for writing, and no common member is there to say which holds.
            if not any(not one & other & set(there) for one in self.apart for other in self.apart):
                raise Violation(f"called divided, and never was: {error}") from error
            self.tally.divided += 1
            for one in past.values():
                one.states.append(None)
            return self.open(devices, past, sorted(self.current & set(there))[:1], told=told)
        if told:
            self.current = set(there)
        assert isinstance(store, ArrayStore)
        store._writers = store._readers = _Inline()  # type: ignore[assignment]
        return store, list(there)

    def crash_open(
        self,
        devices: Sequence[SimulatedDevice],
        past: dict[str, Past],
        there: Sequence[int],
        rng: random.Random,
    ) -> tuple[list[SimulatedDevice], dict[str, Past]]:
        """Open, and crash before some device operation of it. Returns what that leaves."""
        self.tally.crashed_opens += 1
        for device in devices:
            device.before_operation = None
        counted = [device.clone() for device in devices]
        with contextlib.suppress(WrongStore):
            self.open(counted, copied(past), there, told=False)
        operations = sum(device.operation_count for device in counted)
        at = rng.randrange(operations + 1)
        if past is self.past:
            self.steps.append(f"({there}!{at}/{operations})")
        left: list[SimulatedDevice] = []
        count = 0

        def tick(kind: OperationKind) -> None:
            nonlocal count
            if count == at:
                left.extend(crash(devices, rng))
            count += 1

        for device in devices:
            device.before_operation = tick
        with contextlib.suppress(WrongStore):
            self.open(devices, past, there, told=False)
        for device in devices:
            device.before_operation = None
        return left or crash(devices, rng), past

    def look(self, store: ArrayStore, past: dict[str, Past], there: Sequence[int]) -> None:
        """Read everything of an array just opened and compare it with what may be found."""
        self.tally.states += 1
        promised = [store.contains(key) for key in KEYS]
        for key, promise, value in zip(KEYS, promised, store.get_many(KEYS), strict=True):
            found = self.version_of(key, value)
            if found not in past[key].allowed():
                raise Violation(
                    f"{key} is version {found}, allowed are {past[key].allowed()}; opened with {there}, "
                    f"it was held by {past[key].holder}"
                )
            if promise != (found is not None):
                raise Violation(f"contains({key}) is {promise}, get finds version {found}")
        report = store.check()
        if report.problems:
            raise Violation(f"check: {report.problems}")

    def known(self, store: ArrayStore, past: dict[str, Past]) -> None:
        """An open that is complete shows what is on media."""
        for key, value in zip(KEYS, store.get_many(KEYS), strict=True):
            past[key] = Past([self.version_of(key, value)], 0, holder_of(store, key))

    def version_of(self, key: str, value: Any) -> int | None:
        """The version that these bytes are. Raises Violation for bytes never put there."""
        if value is None:
            return None
        owner, version = self.contents.get(value.numpy().tobytes(), ("nobody", 0))
        if owner != key:
            raise Violation(f"{key} has bytes that were never put there, but {owner} version {version}")
        return version

    # -- working ---------------------------------------------------------------------------------------

    def step(self, store: ArrayStore) -> None:
        """One operation of a random kind."""
        rng = self.rng
        verb = rng.choices(STEPS, STEP_WEIGHTS)[0]
        keys = rng.sample(KEYS, rng.randint(2, 4) if verb == "many" else 1)
        durable = verb in ("durable", "erase") or (verb == "many" and rng.random() < 0.5)
        self.steps.append(
            f"{verb}:{','.join(keys)}" if verb not in ("commit", "checkpoint", "lose") else verb
        )
        try:
            if verb in ("put", "durable", "many"):
                self.put(store, keys, durable=durable)
            elif verb in ("delete", "erase"):
                self.delete(store, keys[0], durable=durable)
            elif verb == "get":
                self.get(store, keys[0])
            elif verb == "lose":
                self.lose(store)
            else:
                store.commit() if verb == "commit" else store.checkpoint()
                self.all_durable()
        except DeviceLost as error:
            if verb in ("commit", "checkpoint") and store._present:
                self.all_durable()
            elif store._present:
                raise Violation(f"{verb}: {error}") from error
        self.confirm(store)

    def put(self, store: ArrayStore, keys: Sequence[str], *, durable: bool) -> None:
        fresh: dict[str, tuple[int, bytes, int]] = {}
        for key in keys:
            version = next(self.versions)
            data = payload(key, version, self.rng.choice(SIZES))
            self.contents[data] = key, version
            self.past[key].states.append(version)
            fresh[key] = version, data, len(self.past[key].states) - 1
        errors: dict[int, blockkv.BlockKVError] = {}
        try:
            results = store.put_many([(key, fresh[key][1]) for key in keys], durable=durable)
        except blockkv.BatchError as error:
            errors, results = error.errors, [bool(result) for result in error.results]
            if not all(isinstance(one, StoreFull | DeviceLost) for one in errors.values()):
                raise
        for position, (key, written) in enumerate(zip(keys, results, strict=True)):
            one, (version, _, place) = self.past[key], fresh[key]
            if position in errors:
                if isinstance(errors[position], StoreFull):
                    one.states.remove(version)
            elif written:
                one.holder = holder_of(store, key)
                if durable:
                    one.durable = place
            else:
                one.states.remove(version)
                if durable and one.holder is not None and not self.devices[one.holder].stopped:
                    one.durable = len(one.states) - 1

    def delete(self, store: ArrayStore, key: str, *, durable: bool) -> None:
        one = self.past[key]
        was = holder_of(store, key)
        one.states.append(None)
        place = len(one.states) - 1
        deleted = store.delete(key, durable)
        if deleted != (was is not None):
            raise Violation(f"delete({key}) returned {deleted}, it was held by {was}")
        if durable and deleted:
            one.durable = place

    def get(self, store: ArrayStore, key: str) -> None:
        one = self.past[key]
        found = self.version_of(key, store.get(key))
        lost = one.holder is not None and self.devices[one.holder].stopped
        if found != one.states[-1] and not (found is None and lost):
            raise Violation(f"get({key}) found version {found} instead of {one.states[-1]}")

    def lose(self, store: ArrayStore) -> None:
        """A member's device goes away; perhaps nobody notices at once."""
        if len(store._present) < 2 and self.rng.random() < 0.9:
            return
        self.tally.losses += 1
        index = self.rng.choice(store._members).index
        self.devices[index].stop()
        self.apart.append({one.index for one in store._members if not self.devices[one.index].stopped})
        self.gone.setdefault(index, [])
        for key, one in self.past.items():
            if one.holder == index:
                one.states.append(None)
                self.gone[index].append((key, len(one.states) - 1))

    def confirm(self, store: ArrayStore) -> None:
        """What went with a lost member is gone for good once the others are on media without it."""
        for key, one in self.past.items():
            # Nobody has noticed yet: what was put on the member after its device went away went with it.
            if one.holder is not None and self.devices[one.holder].stopped and one.states[-1] is not None:
                one.states.append(None)
                self.gone.setdefault(one.holder, []).append((key, len(one.states) - 1))
        if store._losses_told != store._losses:
            return
        for member in store._members:
            if member.lost:
                self.current.discard(member.index)
                for key, place in self.gone.pop(member.index, []):
                    self.past[key].durable = max(self.past[key].durable, place)

    def all_durable(self) -> None:
        """All that members hold whose devices are there; `confirm` is for the others."""
        for one in self.past.values():
            if one.holder is None or not self.devices[one.holder].stopped:
                one.durable = len(one.states) - 1

    # -- judging ---------------------------------------------------------------------------------------

    def probe(self, kind: OperationKind) -> None:
        """Before an operation: crash clones, open them, perhaps with crashes on the way, and judge."""
        rng = self.probe_rng
        if not self.every and rng.random() >= PROBE_SHARE:
            return
        clones, past = crash(self.devices, rng), copied(self.past)
        kept = self.apart, self.steps, self.current
        self.apart, self.steps = list(self.apart), [*self.steps, "probe"]
        self.current = set(self.current)
        opened = list(store_module._open_stores)
        for _ in range(rng.randint(0, DEPTH)):
            there = self.subset(rng)
            self.steps.append(f"{there}")
            clones, past = self.crash_open(clones, past, there, rng)
        there = self.subset(rng)
        self.steps.append(f"finally {there}")
        store, there = self.open(clones, past, there)
        self.look(store, past, there)
        store_module._open_stores.update(opened)
        self.apart, self.steps, self.current = kept


def crash(devices: Sequence[SimulatedDevice], rng: random.Random) -> list[SimulatedDevice]:
    """All devices as a crash of the machine could leave them now."""
    how = rng.choice((Crash.POWER_CUT, Crash.POWER_CUT, Crash.PROCESS_KILL))
    return [device.crash_clone(rng, how) for device in devices]


def copied(past: dict[str, Past]) -> dict[str, Past]:
    """An independent copy."""
    return {key: Past(list(one.states), one.durable, one.holder) for key, one in past.items()}


def holder_of(store: ArrayStore, key: str) -> int | None:
    """Which member holds the key."""
    member = store._holder(key_digest(key.encode()))
    return None if member is None else member.index


# -- mutants -------------------------------------------------------------------------------------------------


def _twice_is_a_violation(members: Sequence[Any]) -> set[bytes]:
    twice = _HELD_TWICE(members)
    if twice:
        raise Violation(f"{len(twice)} keys are held by two members")
    return twice


_HELD_TWICE = array_open._held_twice
_EMPTY = array_open._empty
_STANDING = array_open.standing_of
_OPEN_MEMBERS = array_open._open_members


def _empty_into_the_term(one: Any, standing: Any) -> None:
    everybody = (1 << one.place.member_count) - 1
    _EMPTY(one, dataclasses.replace(standing, term=standing.term + 1, members=everybody))


def _empty_afterwards(found: Any, standing: Any, missing: Any, outdated: Any, options: Any) -> ArrayStore:
    """The term before the emptying: members are told while others are not emptied yet."""
    kept, array_open._empty = array_open._empty, _EMPTY
    try:
        store = _OPEN_MEMBERS(found, standing, missing, outdated, options)
        if standing is not None:
            late = [one for one in store._members if not standing.members >> one.index & 1]
            for member in late:
                member.drop(member.digests())
        return store
    finally:
        array_open._empty = kept


def _no_new_term(found: Any, standing: Any, missing: Any, outdated: Any, options: Any) -> ArrayStore:
    if standing is None:
        return _OPEN_MEMBERS(found, standing, missing, outdated, options)
    with mock.patch.object(array_open, "set_of", return_value=standing.members):
        return _OPEN_MEMBERS(found, standing, missing, outdated, options)


def _lowest(found: Any) -> Any:
    standing = _STANDING(found)
    return dataclasses.replace(standing, members=(1 << found[0].member_count) - 1)


@contextlib.contextmanager
def _several(*patches: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    "degraded open keeps the term": lambda: mock.patch.object(array_open, "_open_members", _no_new_term),
    "outdated members count": lambda: mock.patch.object(array_open, "standing_of", _lowest),
    "emptied members belong to the next term": lambda: mock.patch.object(
        array_open, "_empty", _empty_into_the_term
    ),
    "outdated members are emptied after the term": lambda: _several(
        mock.patch.object(array_open, "_empty", return_value=None),
        mock.patch.object(array_open, "_open_members", _empty_afterwards),
    ),
    "a loss begins no term": lambda: mock.patch.object(
        ArrayStore, "_begin_term_if_due", lambda self: setattr(self, "_losses_told", self._losses)
    ),
    "a put does not wait for the term": lambda: mock.patch.object(
        ArrayStore, "_assign", _assign_without_waiting
    ),
    "a deleted key goes anywhere": lambda: mock.patch.object(
        array_store.Member, "claims", lambda self, digest: (self.holds(digest), False)
    ),
}

_ASSIGN = ArrayStore._assign


def _assign_without_waiting(self: ArrayStore, *arguments: Any) -> Any:
    """Puts go on as soon as one member of several knows of the term."""
    assigned = _ASSIGN(self, *arguments)
    if self._losses_told != self._losses and self._present:
        self._losses_told = self._losses
        members = array_store.set_of(member.index for member in self._present)
        self._term += 1
        with contextlib.suppress(blockkv.BlockKVError):
            self._present[0].begin_term(self._term, members)
    return assigned


def explore(
    seed: int, tally: Tally, first: int, histories: int | None, deadline: float, *, every: bool = False
) -> str | None:
    """Run histories from number `first` on. Returns the story of the first violation, or None."""
    with mock.patch.object(array_open, "_held_twice", _twice_is_a_violation):
        for number in itertools.count(first):
            if time.monotonic() >= deadline or (histories is not None and number >= first + histories):
                return None
            try:
                History(number, seed, tally, every=every).run()
            except Violation as violation:
                return str(violation)
    return None


def main() -> int:
    """Explore, then let every mutant be caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--histories", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seconds", type=float, help="at most this long, mutants not included")
    parser.add_argument("--seed", type=int, help="default: a fresh one, which is printed")
    parser.add_argument("--history", type=int, help="run this one again")
    parser.add_argument("--every", action="store_true", help="a crash before every device operation")
    parser.add_argument("--mutant", default="all", choices=[*MUTANTS, "all", "none"], metavar="NAME")
    parser.add_argument("--mutant-histories", type=int, default=2000, help="give up on a mutant after these")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbelow(1 << 31)
        print(f"seed {options.seed}", file=sys.stderr)
    logging.disable(logging.CRITICAL)
    tally, started = Tally(), time.monotonic()
    deadline = started + options.seconds if options.seconds else float("inf")
    first, count = (options.history, 1) if options.history is not None else (0, options.histories)
    story = explore(options.seed, tally, first, count, deadline, every=options.every)
    if story:
        print(f"VIOLATION {story}", file=sys.stderr)
    result = {
        **dataclasses.asdict(tally),
        "seconds": round(time.monotonic() - started, 1),
        "seed": options.seed,
    }
    missed = []
    for name, patch in MUTANTS.items() if options.history is None else ():
        if options.mutant not in ("all", name):
            continue
        mutant_tally = Tally()
        with patch():
            caught = explore(options.seed, mutant_tally, 0, options.mutant_histories, float("inf"))
        print(f"mutant {name:45} {'caught' if caught else 'NOT CAUGHT'} after {mutant_tally.histories}")
        if not caught:
            missed.append(name)
    print(json.dumps(result))
    return 1 if story or missed else 0


if __name__ == "__main__":
    sys.exit(main())
