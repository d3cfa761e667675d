"""Discards: after the delete is durable, of free space alone, in large ranges, at a bounded rate."""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import blockkv
from blockkv.device.simulated import Crash, Fault, FaultKind, FaultPlan, OperationKind
from blockkv.space.allocator import Allocator
from blockkv.store import discards
from blockkv.store.discards import Discards
from blockkv.testing import SimulatedDevice

OpenStore = Callable[..., blockkv.Store]
MIB = 1 << 20
RUN_BYTES = 128 << 10


class Meddled(SimulatedDevice):
    """While it discards, something else happens."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        self.meanwhile()
        super().discard(offset_bytes, length_bytes)


def meddled(size_bytes: int = 16 * MIB, **options: Any) -> Meddled:
    device = Meddled(size_bytes, **options)
    blockkv.format(device, average_chunk="64KiB")
    return device


def discarded(device: SimulatedDevice) -> list[tuple[int, int]]:
    """(offset, length) of every discard."""
    return [
        (one.offset_bytes, one.length_bytes)
        for one in device.operations()
        if one.kind is OperationKind.DISCARD
    ]


def wait_until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.005)


def payload(key: str, size_bytes: int) -> bytes:
    return (key.encode() * (size_bytes // len(key) + 1))[:size_bytes]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discards, "REST_S", 0.0)


def test_nothing_is_discarded_before_its_delete_is_durable(open_on: OpenStore) -> None:
    device = meddled()
    store = open_on(device, discard=True)
    store.put("k", bytes(MIB))
    before = len(discarded(device))
    store.delete("k")
    assert store.discard_freed() == 0
    assert len(discarded(device)) == before
    store.commit()
    assert store.discard_freed() == MIB
    (found,) = discarded(device)[before:]
    assert found[1] == MIB
    assert store.stats()["discarded_bytes"] == MIB
    flushes = [one.sequence for one in device.operations() if one.kind is OperationKind.FLUSH]
    discard_sequence = device.operations()[-1].sequence
    assert flushes[-1] == discard_sequence - 1


def test_neighbours_are_discarded_together_and_only_once(open_on: OpenStore) -> None:
    device = meddled()
    store = open_on(device, discard=True)
    before = len(discarded(device))
    store.put_many([(f"k{number}", bytes(RUN_BYTES)) for number in range(32)])
    for number in range(32):
        store.delete(f"k{number}")
    store.commit()
    store.discard_freed()
    assert [length for _, length in discarded(device)[before:]] == [32 * RUN_BYTES]
    store.put("other", bytes(1000), durable=True)
    assert store.discard_freed() == 0
    assert len(discarded(device)) == before + 1


def test_what_is_not_asked_for_is_not_done(open_on: OpenStore) -> None:
    device = meddled()
    before = len(discarded(device))
    store = open_on(device)
    store.put("k", bytes(MIB))
    store.delete("k", durable=True)
    with pytest.raises(blockkv.InvalidArgument, match="discard=True"):
        store.discard_freed()
    assert len(discarded(device)) == before


@pytest.mark.parametrize("granularity_bytes", [4096, RUN_BYTES, 3 * RUN_BYTES])
def test_ranges_are_whole_runs_of_at_least_the_granularity(
    open_on: OpenStore, granularity_bytes: int
) -> None:
    device = meddled(discard_granularity_bytes=granularity_bytes)
    store = open_on(device, discard=True)
    zone = store.info()["data_offset_bytes"]
    before = len(discarded(device))
    for number in range(24):
        store.put(f"k{number}", bytes(50_000 * (number % 5 + 1)))
    for number in range(0, 24, 2):
        store.delete(f"k{number}", durable=True)
        store.discard_freed()
    for number in range(1, 24, 2):
        store.delete(f"k{number}")
    store.commit()
    store.discard_freed()
    found = discarded(device)[before:]
    grain_bytes = max(granularity_bytes, RUN_BYTES)
    assert found
    assert all(not (offset - zone) % grain_bytes and not length % grain_bytes for offset, length in found)


def test_a_device_that_cannot_discard_costs_nothing(open_on: OpenStore) -> None:
    device = meddled(discard_granularity_bytes=0)
    store = open_on(device, discard=True)
    store.put("k", bytes(MIB))
    store.delete("k", durable=True)
    assert store.discard_freed() == 0
    assert not store._state.allocator._freed_grains


def test_a_failure_switches_them_off_and_loses_no_space(open_on: OpenStore) -> None:
    device = meddled()
    store = open_on(device, discard=True)
    free_bytes = store.stats()["free_bytes"]
    device.set_plan(FaultPlan((Fault(FaultKind.ERROR, on=OperationKind.DISCARD, errno=errno.EIO),)))
    for _ in range(2):
        store.put("k", bytes(MIB))
        store.delete("k", durable=True)
        assert store.discard_freed() == 0
    figures = store.stats()
    assert (figures["discard_failed"], figures["discarded_bytes"]) == (1, 0)
    assert figures["free_bytes"] == free_bytes
    assert store.check().ok


# -- never live data -------------------------------------------------------------------------------------


class History:
    """Puts, gets and deletes of a store that is full, some of them while the device is discarding."""

    def __init__(self, store: blockkv.Store, steps: list[tuple[str, int, int]]) -> None:
        self.store = store
        self.steps = iter(steps)
        self.live: dict[str, int] = {}
        self.nested = False

    def run(self, count: int) -> None:
        for kind, number, size in itertools.islice(self.steps, count):
            key = f"k{number}"
            if kind == "put":
                if self.store.put(key, payload(key, size * 1000 + 1)):
                    self.live[key] = size * 1000 + 1
            elif kind == "delete":
                self.store.delete(key)
                self.live.pop(key, None)
            else:
                self.store.commit()
                if not self.nested:
                    self.store.discard_freed()
            self.compare()

    def meddle(self) -> None:
        if not self.nested:
            self.nested = True
            try:
                self.run(3)
            finally:
                self.nested = False

    def compare(self) -> None:
        """What was not evicted is there, byte for byte."""
        for key, size_bytes in self.live.items():
            if self.store.contains(key):
                found = self.store.get(key)
                exact = found is not None and bytes(found.numpy()) == payload(key, size_bytes)
                assert exact, f"{key} is damaged"
        assert self.store.stats()["chunks_dropped_damaged"] == 0
        assert self.store.check(payload=True).ok


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "delete", "commit"]),
        st.integers(0, 30),
        st.sampled_from([1, 30, 130, 300, 700, 1500]),
    ),
    min_size=5,
    max_size=60,
)


def carry_out(steps: list[tuple[str, int, int]], seed: int) -> None:
    device = meddled(8 * MIB, seed=seed)
    with blockkv.open(device, discard=True, commit_interval_ms=None) as store:
        history = History(store, steps)
        device.meanwhile = history.meddle
        history.run(len(steps))
        store.commit()
        store.discard_freed()
        history.compare()


@given(STEPS, st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_live_data_is_never_discarded(steps: list[tuple[str, int, int]], seed: int) -> None:
    carry_out(steps, seed)


def test_discarding_what_was_given_out_again_would_be_noticed() -> None:
    """Delete, commit, and puts that get the same place while the device discards it."""
    steps = [("put", 0, 1500), ("delete", 0, 1), ("commit", 0, 1), *[("put", n, 1500) for n in range(1, 4)]]
    carry_out(steps, 1)
    withhold, give_back = Discards._withhold, Allocator.give_back

    def not_withheld(self: Discards, owner: int) -> Any:
        extent = withhold(self, owner)
        if extent is not None:
            give_back(self._allocator, extent)
        return extent

    def if_withheld(self: Allocator, extent: Any) -> None:
        if extent in self._withheld:
            give_back(self, extent)

    with (
        mock.patch.object(Discards, "_withhold", not_withheld),
        mock.patch.object(Allocator, "give_back", if_withheld),
        pytest.raises(AssertionError, match="damaged"),
    ):
        carry_out(steps, 1)


def test_a_put_that_lacks_space_waits_for_what_is_being_discarded(open_on: OpenStore) -> None:
    device = meddled(8 * MIB)
    store = open_on(device, discard=True, evict=False)
    free_bytes = store.stats()["largest_free_bytes"]
    store.put("k", bytes(free_bytes))
    store.delete("k")
    results = []
    thread = threading.Thread(target=lambda: results.append(store.put("all", bytes(free_bytes))))
    waiting = threading.Event()

    def meanwhile() -> None:
        if not waiting.is_set():
            assert store.stats()["free_bytes"] >= free_bytes
            with mock.patch.object(store._state.changed, "wait", side_effect=tell(store._state.changed.wait)):
                thread.start()
                waiting.wait(60)

    def tell(wait: Callable[..., bool]) -> Callable[..., bool]:
        def waits(*arguments: Any) -> bool:
            waiting.set()
            return wait(*arguments)

        return waits

    device.meanwhile = meanwhile
    store.commit()
    store.discard_freed()
    thread.join(60)
    assert waiting.is_set()
    assert results == [True]
    assert store.check(payload=True).ok


# -- in the background -----------------------------------------------------------------------------------


def test_in_the_background_while_others_put_and_get(at_once: None) -> None:
    device = meddled(16 * MIB, threads=True)
    with blockkv.open(device, discard=True, commit_interval_ms=1) as store:

        def work(name: str) -> None:
            for turn in range(60):
                key = f"{name} {turn % 7}"
                size_bytes = 1000 + 90_000 * (turn % 4)
                store.put(key, payload(key, size_bytes))
                found = store.get(key)
                assert found is None or bytes(found.numpy()) == payload(key, found.numel())
                if turn % 3 == 0:
                    store.delete(key, durable=True)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, "abc"))
        wait_until(lambda: store.stats()["discarded_bytes"] > 0)
        figures = store.stats()
        assert figures["get_checksum_mismatch"] == figures["chunks_dropped_damaged"] == 0
        assert store.check(payload=True).ok
    with blockkv.open(device.crash_clone(random.Random(1), Crash.POWER_CUT)) as store:
        assert store.check(payload=True).ok


def test_commits_and_gets_do_not_wait_for_a_discard(at_once: None) -> None:
    device = meddled(32 * MIB, threads=True)
    inside, go_on = threading.Event(), threading.Event()

    def meanwhile() -> None:
        inside.set()
        go_on.wait(60)

    with blockkv.open(device, discard=True, commit_interval_ms=1) as store:
        store.put("kept", payload("kept", MIB))
        device.meanwhile = meanwhile
        store.put("k", bytes(4 * MIB))
        store.delete("k", durable=True)
        assert inside.wait(60)
        assert bytes(store.get("kept").numpy()) == payload("kept", MIB)
        assert store.put("new", bytes(MIB), durable=True)
        assert store.delete("new", durable=True)
        store.checkpoint()
        assert store.check(payload=True).ok
        assert store.stats()["discarded_bytes"] == 0
        go_on.set()
        wait_until(lambda: store.stats()["discarded_bytes"] >= 4 * MIB)


def test_the_rate_is_kept(monkeypatch: pytest.MonkeyPatch, open_on: OpenStore) -> None:
    device = meddled(32 * MIB)
    monkeypatch.setattr(discards, "COMMAND_UNITS", MIB // 4096)
    monkeypatch.setattr(discards.time, "monotonic", lambda: 0.0)
    store = open_on(device, discard=True, discard_bytes_per_s=4 * MIB)
    store.put("k", bytes(4 * MIB))
    for number in range(8):
        store.put(f"small {number}", bytes(RUN_BYTES))
    store.delete("k")
    for number in range(0, 8, 2):
        store.delete(f"small {number}")
    store.commit()
    before, pauses = len(discarded(device)), []
    found = store._state.discards
    assert found is not None
    monkeypatch.setattr(found, "_pause", lambda seconds: pauses.append(seconds) or True)
    found._pass(paced=True)
    lengths = [length for _, length in discarded(device)[before:]]
    assert max(lengths) == MIB
    assert pauses == [max(length / (4 * MIB), 1 / discards.COMMANDS_PER_S) for length in lengths]


def test_the_end_does_not_wait_for_what_is_left(at_once: None) -> None:
    device = meddled(32 * MIB, threads=True)
    with blockkv.open(device, discard=True, commit_interval_ms=1, discard_bytes_per_s=1) as store:
        store.put("k", bytes(MIB))
        store.delete("k", durable=True)
        wait_until(lambda: store.stats()["discarded_bytes"] > 0)  # and its pause takes twelve days
    assert store.stats()["discarded_bytes"] > 0


@pytest.mark.parametrize("rate", [0, -1, float("nan"), "fast", None, True])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(blockkv.InvalidArgument, match="discard_bytes_per_s is"):
        blockkv.open(meddled(), discard=True, discard_bytes_per_s=rate)
