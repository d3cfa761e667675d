"""Scrubbing: everything is read once a pass, at the rate asked for, from where the last scrub stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from damage import CHECKPOINTED, KEYS, exact, open_copy, payload, sample

import blockkv
from blockkv.device.base import Batch, Priority
from blockkv.store.log import write_superblock
from blockkv.store.scrub import SAVE_INTERVAL_S, Scrub, TokenBucket
from blockkv.testing import (
    Crash,
    Fault,
    FaultKind,
    FaultPlan,
    OperationKind,
    SimulatedDevice,
    crash_clone,
)

MADE = sample()
TOTAL_BYTES = sum(payload(key).nbytes for key in KEYS)
RATE = 40_000
"""A wave is a quarter of it: three chunks or so."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings about damage are what these tests ask for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Time:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def wait(self, duration_s: float) -> None:
        self.waited_s.append(duration_s)
        self.now_s += duration_s


def scrub_of(
    store: blockkv.Store,
    rate: float = RATE,
    progress: Callable[[int, int], None] | None = None,
    time: Time | None = None,
) -> Scrub:
    time = time or Time()
    return Scrub(store._state, rate, progress, clock=time.clock, wait=time.wait)


def cut_short(store: blockkv.Store, waves: int, time: Time | None = None) -> blockkv.ScrubReport:
    """Scrub this many waves."""
    seen = itertools.count(1)

    def progress(done_bytes: int, total_bytes: int) -> None:
        if next(seen) == waves:
            scrub.stop()

    scrub = scrub_of(store, progress=progress, time=time)
    report = scrub.run()
    assert not report.finished
    return report


def unreadable(key: str, code: int, count: int | None = None) -> FaultPlan:
    """Reads of a chunk's payload are answered with `code`: the next `count`, or all."""
    place = (MADE.places[key], 4096)
    return FaultPlan(
        (Fault(FaultKind.ERROR, on=OperationKind.READ, within=place, fire_count=count, errno=code),)
    )


# -- the rate ----------------------------------------------------------------------------------------------


def test_a_token_bucket_gives_its_burst_and_then_its_rate() -> None:
    time = Time()
    bucket = TokenBucket(100, 50, time.clock)
    assert bucket.take(30) == 0
    assert bucket.take(20) == 0
    assert bucket.take(10) == pytest.approx(0.1)
    assert bucket.take(90) == pytest.approx(1.0)
    time.now_s += 1.0
    assert bucket.take(0) == 0
    time.now_s += 3600
    assert bucket.take(50) == 0, "an idle bucket does not save more than its burst"
    assert bucket.take(25) == pytest.approx(0.25)


@pytest.mark.parametrize("rate", [5_000, 40_000, 1_000_000])
def test_a_pass_takes_as_long_as_its_rate_says(rate: int) -> None:
    time = Time()
    with open_copy(MADE.copy()) as store:
        report = scrub_of(store, rate, time=time).run()
    assert report.finished
    assert report.payload_bytes == TOTAL_BYTES
    assert time.now_s == pytest.approx(TOTAL_BYTES / rate, abs=0.3 + 5000 / rate)
    assert max(time.waited_s, default=0) <= 0.25


def test_a_rate_must_be_one(store: blockkv.Store) -> None:
    for rate in (0, -5, float("nan")):
        with pytest.raises(blockkv.InvalidArgument, match="never end"):
            store.scrub(rate)
    assert store.scrub().finished


# -- a pass ------------------------------------------------------------------------------------------------


def test_a_pass_reads_every_chunk_once() -> None:
    steps: list[tuple[int, int]] = []
    with open_copy(MADE.copy()) as store:
        report = store.scrub(1e9, progress=lambda done, total: steps.append((done, total)))
        stats = store.stats()
    assert report.ok
    assert (report.finished, report.resumed) == (True, False)
    assert (report.chunks, report.payload_bytes) == (len(KEYS), TOTAL_BYTES)
    assert steps[-1] == (TOTAL_BYTES, TOTAL_BYTES)
    assert (stats["scrub_chunks"], stats["scrub_bytes"]) == (len(KEYS), TOTAL_BYTES)
    assert (stats["scrub_passes"], stats["scrub_damaged"], stats["scrub_sequence"]) == (1, 0, 0)
    assert stats["scrub_finished_at"] > 1_600_000_000


def test_an_empty_store_is_a_finished_pass(store: blockkv.Store) -> None:
    report = store.scrub()
    assert report.finished
    assert report.ok
    assert report.chunks == 0


def test_damage_is_dropped_as_a_get_would() -> None:
    device = MADE.copy()
    device.flip_bit(MADE.places["c7"] + 20, 2)
    with open_copy(device) as store:
        device.set_plan(unreadable("c9", errno.EIO))
        report = store.scrub(1e9)
        assert set(report.damaged_keys) == {"c7", "c9"}
        assert not report.ok
        assert store.get("c7") is None
        stats = store.stats()
        assert stats["scrub_damaged"] == stats["chunks_dropped_damaged"] == 2
        assert stats["quarantined_bytes"] >= 8192
        assert exact(store, set(KEYS) - {"c7", "c9"})
        assert store.scrub(1e9).ok
    with open_copy(device.clone()) as store:
        assert not store.contains("c7")
        assert store.check(payload=True).ok


def test_an_error_that_may_pass_is_no_damage() -> None:
    device = MADE.copy()
    with open_copy(device) as store:
        device.set_plan(unreadable("c7", errno.ETIMEDOUT))
        report = store.scrub(1e9)
        assert report.damaged_keys == ()
        assert [key for key, _ in report.unread] == ["c7"]
        assert not report.ok
        assert store.stats()["scrub_transient_error"] == 1
        device.set_plan(None)
        assert exact(store, KEYS)


def test_nothing_is_dropped_on_the_word_of_one_read() -> None:
    device = MADE.copy()
    with open_copy(device) as store:
        device.set_plan(unreadable("c7", errno.EIO, count=1))
        assert store.scrub(1e9).ok
        assert device.counters()["faults_injected"] == 1
        assert exact(store, KEYS)


def test_a_device_that_goes_away_ends_the_scrub_and_drops_nothing() -> None:
    device = MADE.copy()
    with open_copy(device) as store:
        device.set_plan(unreadable("c7", errno.ENODEV, count=1))
        with pytest.raises(blockkv.DeviceLost):
            store.scrub(RATE * 100)
        assert not store._state.any_leased()
        assert exact(store, KEYS)
        assert store.scrub(1e9).ok


def test_a_read_only_store_can_be_scrubbed() -> None:
    device = MADE.copy()
    device.flip_bit(MADE.places["c7"] + 20, 2)
    with open_copy(device, read_only=True) as store:
        assert store.scrub(1e9).damaged_keys == ("c7",)
    assert {one.kind for one in device.operations()} == {OperationKind.READ}


# -- beside other work -------------------------------------------------------------------------------------


def test_chunks_come_and_go_while_a_pass_goes_on() -> None:
    fates = iter(["delete", "replace", "put"])

    def progress(done_bytes: int, total_bytes: int) -> None:
        assert not store._state.any_leased(), "nothing is leased between waves"
        match next(fates, ""):
            case "delete":
                for key in CHECKPOINTED[50:60]:
                    store.delete(key)
            case "replace":
                store.delete("c70")
                store.put("c70", payload("c70"))
            case "put":
                store.put("new", payload("new"))

    with open_copy(MADE.copy()) as store:
        report = scrub_of(store, progress=progress).run()
        assert report.finished
        assert report.ok
        assert report.chunks == len(KEYS) - 10
        assert store.stats()["scrub_sequence"] == 0
        assert scrub_of(store).run().chunks == len(KEYS) - 9
        assert store.check(payload=True).ok


def test_no_lock_is_held_and_little_is_leased_while_it_reads() -> None:
    device = MADE.copy()
    with open_copy(device) as store:
        leased: list[int] = []
        mine = threading.get_ident()

        def look() -> None:
            with store._state.lock:
                index = store._state.index
                leased.append(sum(index.leases(entry) for entry in index))

        def before(kind: OperationKind) -> None:
            assert threading.get_ident() == mine
            other = threading.Thread(target=look, daemon=True)
            other.start()
            other.join(60)
            assert not other.is_alive(), f"the store's lock is held during {kind}"

        device.before_operation = before
        assert scrub_of(store).run().ok
        device.before_operation = None
    assert len(leased) >= len(KEYS)
    assert 1 <= max(leased) <= 12


def test_it_reads_after_everything_else() -> None:
    device = MADE.copy()
    submit, seen = device.submit, set()

    def submitted(batch: Batch) -> None:
        seen.add(batch.priority)
        submit(batch)

    with open_copy(device) as store:
        device.submit = submitted  # type: ignore[method-assign]
        store.scrub(1e9)
        del device.submit  # type: ignore[method-assign]
    assert seen == {max(Priority)}


def test_one_scrub_at_a_time(store: blockkv.Store) -> None:
    store.put("k", b"x" * 5000)

    def progress(done_bytes: int, total_bytes: int) -> None:
        for begin in (store.scrub, store.start_scrub):
            with pytest.raises(blockkv.InvalidArgument, match="under way"):
                begin()

    assert store.scrub(progress=progress).finished
    assert store.start_scrub().result(60).finished
    store.stop_scrub()  # none is under way: nothing happens


def test_in_the_background() -> None:
    device = MADE.copy()
    device.flip_bit(MADE.places["c7"] + 20, 2)
    with open_copy(device) as store:
        report = store.start_scrub(1e9).result(60)
        assert report.finished
        assert report.damaged_keys == ("c7",)
        device.set_plan(unreadable("c8", errno.ENODEV, count=1))
        with pytest.raises(blockkv.DeviceLost):
            store.start_scrub(1e9).result(60)
        assert store.start_scrub(1e9).result(60).finished


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_background_scrub_ends_when_it_is_told(end: str) -> None:
    store = open_copy(MADE.copy())
    read = threading.Event()
    # A byte a second: were it to wait for its rate, this would take a day.
    future = store.start_scrub(1, progress=lambda done, total: read.set())
    assert read.wait(60)
    if end == "stop":
        store.stop_scrub()
        assert not future.result(60).finished
        store.close()
    else:
        store.close()
        assert future.done()
        assert not future.result().finished
    assert future.result().chunks >= 1


def test_a_closed_store_is_not_scrubbed(store: blockkv.Store) -> None:
    store.close()
    for begin in (store.scrub, store.start_scrub):
        with pytest.raises(blockkv.StoreClosed):
            begin()
    store.stop_scrub()


def test_ctrl_c_ends_it_between_two_waves() -> None:
    device = MADE.copy()
    with open_copy(device) as store:
        with pytest.raises(KeyboardInterrupt):
            store.scrub(RATE, progress=lambda done, total: signal.raise_signal(signal.SIGINT))
        assert not store._state.any_leased()
        assert store.stats()["scrub_sequence"] > 0
        report = store.scrub(1e9)
        assert report.resumed
        assert 0 < report.chunks < len(KEYS)
        assert exact(store, KEYS)


def test_on_a_device(block_targets: Any) -> None:
    target = block_targets(96 << 20)
    blockkv.format(target)
    with blockkv.open(target) as store:
        store.put_many([(f"k{number}", torch.full((700_000,), number)) for number in range(8)])
        future = store.start_scrub(1e9)
        for number in range(8):
            assert torch.equal(store.get(f"k{number}"), torch.full((700_000,), number))
        report = future.result(120)
        assert report.finished
        assert report.chunks == 8
        assert report.ok


def test_beside_puts_that_evict_what_it_reads(image_dir: Any) -> None:
    path = image_dir / "full.img"
    blockkv.format(path, size="16MiB", average_chunk="64KiB")
    with blockkv.open(path) as store:
        store.put_many([(f"k{number}", torch.full((30_000,), number)) for number in range(40)])
        future = store.start_scrub(1e9)
        passes = 0
        for number in range(40, 400):
            assert store.put(f"k{number}", torch.full((30_000,), number))
            found = store.get(f"k{number - 5}")
            assert found is not None
            assert torch.equal(found, torch.full((30_000,), number - 5))
            if future.done():
                assert future.result().ok
                passes += 1
                future = store.start_scrub(1e9)
        assert future.result(60).ok
        assert store.stats()["chunks_evicted"] > 100
        assert store.stats()["scrub_passes"] == passes + 1
        assert store.check(payload=True).ok


# -- going on ----------------------------------------------------------------------------------------------


def test_it_goes_on_after_a_close() -> None:
    device = MADE.copy()
    done = 0
    for number in range(4):
        with open_copy(device) as store:
            report = cut_short(store, 5)
        assert report.resumed == (number > 0)
        done += report.chunks
        device = device.clone()
    with open_copy(device) as store:
        report = scrub_of(store).run()
        assert report.finished
        assert report.resumed
        assert done + report.chunks == len(KEYS)
        assert not scrub_of(store).run().resumed


def test_after_a_crash_it_goes_on_from_the_last_superblock() -> None:
    device = MADE.copy()
    store = open_copy(device)
    first = cut_short(store, 5)
    store.checkpoint()
    second = cut_short(store, 5)
    after = crash_clone(device, random.Random(2))
    with open_copy(after) as store:
        report = scrub_of(store).run()
        assert report.resumed
        assert first.chunks + report.chunks == len(KEYS)
    assert second.resumed


def test_the_cursor_is_written_once_a_minute() -> None:
    device = MADE.copy()
    store = open_copy(device)
    store.commit()
    time = Time()
    generation = store.info()["generation"]
    slow = 1_000
    scrub_of(store, slow, time=time).run()
    assert time.now_s > 3 * SAVE_INTERVAL_S
    written = store.info()["generation"] - generation
    assert time.now_s / SAVE_INTERVAL_S - 2 <= written <= time.now_s / SAVE_INTERVAL_S
    # A kill now costs what was read since the last of them.
    with open_copy(crash_clone(device, random.Random(3), Crash.PROCESS_KILL)) as again:
        report = scrub_of(again).run()
        assert report.resumed
        assert report.payload_bytes <= slow * (SAVE_INTERVAL_S + 10)


def test_a_superblock_that_cannot_be_written_does_not_stop_the_reading() -> None:
    device = MADE.copy()
    store = open_copy(device)
    store.commit()
    device.set_plan(FaultPlan((Fault(FaultKind.ERROR, on=OperationKind.WRITE),)))
    report = scrub_of(store, 1_000).run()
    assert report.finished
    assert report.chunks == len(KEYS)
    assert store.info()["write_failure"]
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()


def test_sequences_that_come_again_after_a_crash_are_not_taken_for_verified() -> None:
    device = MADE.copy()
    store = open_copy(device)
    store.commit()
    generation = store._state.log.superblock
    store.put_many([(f"lazy{number}", payload(f"lazy{number}")) for number in range(20)])
    scrub_of(store).run()
    store._state.log.scrub_sequence = store._state.log.next_log_sequences()
    # As if a checkpoint under way had taken the cursor along, and then only the older records survived.
    write_superblock(
        device,
        dataclasses.replace(
            generation,
            generation=generation.generation + 1,
            scrub_sequence=store._state.log.scrub_sequence,
        ),
    )
    after = crash_clone(device, random.Random(1), Crash.PROCESS_KILL)
    with open_copy(after) as store:
        assert store.info()["recovery"]["journal_pages_replayed"]
        store.put_many([(f"new{number}", payload(f"new{number}")) for number in range(20)], durable=True)
        again = crash_clone(after, random.Random(1))
    with open_copy(again) as store:
        assert scrub_of(store).run().chunks == 20


# -- faults while it runs ----------------------------------------------------------------------------------

FAULTS = {
    "eio": lambda number: Fault(FaultKind.ERROR, operation=number),
    "timeout": lambda number: Fault(FaultKind.ERROR, operation=number, errno=errno.ETIMEDOUT),
    "short": lambda number: Fault(FaultKind.SHORT, operation=number, done_bytes=512),
    "power cut": lambda number: Fault(FaultKind.STOP, operation=number),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_scrub_that_fails_at_any_operation_loses_nothing(fault: str) -> None:
    victim = "c50"
    harmed = MADE.copy()
    harmed.flip_bit(MADE.places[victim] + 3, 3)
    kept = set(KEYS) - {victim}
    rng = random.Random(11)
    # Every third operation, and other ones for every fault.
    for number in itertools.count(list(FAULTS).index(fault) % 3, 3):
        device = harmed.clone(FaultPlan((FAULTS[fault](number),), seed=number))
        time = Time()
        with contextlib.suppress(blockkv.BlockKVError), open_copy(device) as store:
            scrub_of(store, 2_000, time=time).run()  # slow enough to write superblocks meanwhile
        if number >= device.operation_count:
            break
        after = crash_clone(device, rng, rng.choice(list(Crash)))
        with open_copy(after) as store:
            assert kept <= {str(key) for key in store.keys()} <= set(KEYS)  # noqa: SIM118
            assert exact(store, kept)
            assert store.get(victim) is None
            assert scrub_of(store).run().finished
            assert store.check(payload=True).ok
    assert number > len(KEYS) + 20


def test_a_simulated_device_that_completes_on_its_own_thread(open_on: Any) -> None:
    device = SimulatedDevice(16 << 20, threads=True)
    blockkv.format(device, average_chunk="4KiB")
    store = open_on(device)
    store.put_many([(key, payload(key)) for key in KEYS], durable=True)
    future = store.start_scrub(1e9)
    assert exact(store, KEYS)
    assert future.result(60).chunks == len(KEYS)
