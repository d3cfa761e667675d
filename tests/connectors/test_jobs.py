"""Background jobs: each ends exactly once, on time, and never touches memory that was given back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import blockkv
from blockkv.connectors.jobs import BackgroundJobs, Outcome
from blockkv.errors import InvalidArgument
from blockkv.testing import StallingDevice

CHUNK_BYTES = 1 << 20


@pytest.fixture
def device() -> Iterator[StallingDevice]:
    device = StallingDevice()
    blockkv.format(device, average_chunk="64KiB")
    yield device
    device.gate.set()


@pytest.fixture
def store(device: StallingDevice) -> Iterator[blockkv.Store]:
    with blockkv.open(device) as store:
        yield store
        device.gate.set()


def payloads(count: int) -> dict[str, torch.Tensor]:
    return {f"k{one}": torch.randint(256, (CHUNK_BYTES,), dtype=torch.uint8) for one in range(count)}


def until(what: Callable[[], object], timeout_s: float = 60) -> None:
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.002)


def outcomes(jobs: BackgroundJobs, count: int) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}

    def all_of_them() -> bool:
        for outcome in jobs.finished():
            assert outcome.job not in found
            found[outcome.job] = outcome
        return len(found) >= count

    until(all_of_them)
    assert len(found) == count
    return found


@pytest.mark.parametrize("staged", [True, False])
def test_what_was_stored_is_loaded(store: blockkv.Store, staged: bool) -> None:
    jobs = BackgroundJobs(store, staged=staged, load_deadline_s=20)
    there = payloads(20)
    jobs.submit_store(1, list(there), list(there.values()))
    stored = outcomes(jobs, 1)[1]
    assert stored.all_done
    assert stored.bytes_moved == 20 * CHUNK_BYTES
    jobs.submit_store(2, list(there), list(there.values()))
    again = outcomes(jobs, 1)[2]
    assert again.all_done
    assert again.bytes_moved == 0

    outs = [torch.zeros(CHUNK_BYTES, dtype=torch.uint8) for _ in range(21)]
    jobs.submit_load(3, [*there, "elsewhere"], outs)
    loaded = outcomes(jobs, 1)[3]
    assert loaded.done == (True,) * 20 + (False,)
    assert loaded.reason == ""
    assert all(torch.equal(out, tensor) for out, tensor in zip(outs, there.values(), strict=False))
    assert jobs.counters["load_misses"] == 1
    assert jobs.close()


def test_a_late_load_ends_on_time_and_never_writes(device: StallingDevice, store: blockkv.Store) -> None:
    jobs = BackgroundJobs(store, load_deadline_s=0.3)
    there = payloads(12)
    store.put_many(there)
    device.gate.clear()
    outs = [torch.full((CHUNK_BYTES,), 7, dtype=torch.uint8) for _ in there]
    begun = time.monotonic()
    jobs.submit_load(1, list(there), outs)
    late = outcomes(jobs, 1)[1]
    assert 0.25 < time.monotonic() - begun < 15
    assert not any(late.done)
    assert "0.3 s" in late.reason
    device.gate.set()
    for number in itertools.count(2):  # whatever a busy machine manages in 0.3 s
        jobs.submit_load(number, ["k0"], [torch.empty_like(outs[0])])
        if outcomes(jobs, 1)[number].all_done:
            break  # the threads are free again
    assert all(int(out.min()) == int(out.max()) == 7 for out in outs)
    assert jobs.close()


def test_a_stall_is_seen_and_seen_to_end(device: StallingDevice, store: blockkv.Store) -> None:
    jobs = BackgroundJobs(store, load_deadline_s=0.2)
    store.put("k0", torch.ones(CHUNK_BYTES, dtype=torch.uint8))
    assert not jobs.stalled
    device.gate.clear()
    begun = time.monotonic()
    jobs.submit_load(1, ["k0"], [torch.empty(CHUNK_BYTES, dtype=torch.uint8)])
    assert not jobs.stalled or time.monotonic() - begun > 0.2, "it is not late yet"
    outcomes(jobs, 1)
    assert jobs.stalled
    jobs.submit_load(2, ["k0"], [torch.empty(CHUNK_BYTES, dtype=torch.uint8)])
    outcomes(jobs, 1)
    device.gate.set()
    until(lambda: not jobs.stalled)
    assert jobs.close()


@pytest.mark.parametrize("staged", [True, False])
def test_a_stall_is_seen_whoever_owns_the_memory(
    device: StallingDevice, store: blockkv.Store, staged: bool
) -> None:
    jobs = BackgroundJobs(store, load_deadline_s=0.2, staged=staged)
    store.put("k0", torch.ones(CHUNK_BYTES, dtype=torch.uint8))
    device.gate.clear()
    jobs.submit_load(1, ["k0"], [torch.empty(CHUNK_BYTES, dtype=torch.uint8)])
    until(lambda: jobs.stalled)
    if staged:
        until(lambda: not jobs.pending())
    else:
        time.sleep(0.1)
        assert jobs.pending() == 1, "memory that the device writes to is not given back"
    device.gate.set()
    assert jobs.drain(60)
    assert jobs.close()
    assert not jobs.stalled


def test_what_is_rewritten_is_deleted_first(store: blockkv.Store) -> None:
    jobs = BackgroundJobs(store)
    old, new = payloads(2), payloads(2)
    store.put_many(old)
    jobs.submit_store(1, list(new), list(new.values()), rewrite=["k1", "elsewhere"])
    stored = outcomes(jobs, 1)[1]
    assert stored.all_done
    assert stored.bytes_moved == CHUNK_BYTES
    assert torch.equal(store.get("k0"), old["k0"])
    assert torch.equal(store.get("k1"), new["k1"])
    assert jobs.close()


def test_a_late_store_keeps_its_memory_until_it_is_written(
    device: StallingDevice, store: blockkv.Store
) -> None:
    jobs = BackgroundJobs(store, store_deadline_s=2, store_threads=1)
    first, second = payloads(1), {"later": torch.ones(CHUNK_BYTES, dtype=torch.uint8)}
    device.gate.clear()
    jobs.submit_store(1, list(first), list(first.values()))
    until(lambda: jobs._jobs[1].running)
    jobs.submit_store(2, list(second), list(second.values()))
    assert outcomes(jobs, 1)[2].done == (False,)
    assert jobs.pending() == 1
    device.gate.set()
    assert outcomes(jobs, 1)[1].done == (True,)
    assert torch.equal(store.get("k0"), first["k0"])
    assert not store.contains("later")
    assert jobs.close()


def test_stores_beyond_the_bound_are_dropped(device: StallingDevice, store: blockkv.Store) -> None:
    jobs = BackgroundJobs(store, max_store_bytes=3 * CHUNK_BYTES)
    there = payloads(5)
    device.gate.clear()
    for number, (key, tensor) in enumerate(there.items()):
        jobs.submit_store(number, [key], [tensor])
    dropped = outcomes(jobs, 2)
    assert sorted(dropped) == [3, 4]
    assert all("waiting" in one.reason for one in dropped.values())
    device.gate.set()
    assert all(one.all_done for one in outcomes(jobs, 3).values())
    assert jobs.counters["stores_dropped"] == 2
    assert jobs.close()


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf"), 1e10])
def test_a_deadline_that_no_clock_has_is_refused(store: blockkv.Store, seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="load_deadline_s"):
        BackgroundJobs(store, load_deadline_s=seconds)
    with pytest.raises(InvalidArgument, match="store_deadline_s"):
        BackgroundJobs(store, store_deadline_s=seconds)


def test_closing_ends_what_has_not_begun(device: StallingDevice, store: blockkv.Store) -> None:
    jobs = BackgroundJobs(store, load_threads=1)
    there = payloads(3)
    store.put_many(there)
    device.gate.clear()
    for number, key in enumerate(there):
        jobs.submit_load(number, [key], [torch.empty(CHUNK_BYTES, dtype=torch.uint8)])
    until(lambda: len(jobs._queues[True]) == 2)  # the first has begun
    assert not jobs.close(timeout_s=0.2)
    ended = outcomes(jobs, 2)
    assert sorted(ended) == [1, 2]
    device.gate.set()
    assert jobs.drain(60)
    assert outcomes(jobs, 1)[0].all_done
    jobs.submit_load(9, ["k0"], [torch.empty(CHUNK_BYTES, dtype=torch.uint8)])
    assert outcomes(jobs, 1)[9].done == (False,)


def test_submitting_waits_for_nothing(device: StallingDevice, store: blockkv.Store) -> None:
    jobs = BackgroundJobs(store, load_deadline_s=1)
    tensor = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    store.put("k0", tensor)
    device.gate.clear()
    taken = []
    for number in range(300):
        begun = time.perf_counter()
        (jobs.submit_load if number % 2 else jobs.submit_store)(number, ["k0"], [tensor])
        taken.append(time.perf_counter() - begun)
    assert sorted(taken)[270] < 0.5  # a hang of the device is 1 s here
    device.gate.set()
    outcomes(jobs, 300)
    assert jobs.close()


def test_whoever_is_to_be_woken_is_told_how_each_job_ended(store: blockkv.Store) -> None:
    told: list[Outcome] = []
    jobs = BackgroundJobs(store, ended=told.append)
    there = payloads(2)
    jobs.submit_store(1, list(there), list(there.values()))
    assert jobs.drain(60)
    jobs.submit_load(2, ["elsewhere"], [torch.empty(CHUNK_BYTES, dtype=torch.uint8)])
    assert jobs.drain(60)
    until(lambda: len(told) == 2)
    assert [(one.job, one.is_load, one.all_done) for one in told] == [(1, False, True), (2, True, False)]
    assert jobs.finished() == []
    assert jobs.close()


def test_who_is_told_may_submit_more_and_may_fail(store: blockkv.Store) -> None:
    told: list[int] = []

    def go_on(outcome: Outcome) -> None:
        told.append(outcome.job)
        if outcome.job < 5:
            jobs.submit_load(outcome.job + 1, ["elsewhere"], [torch.empty(CHUNK_BYTES, dtype=torch.uint8)])
        raise RuntimeError("of whoever is told")

    jobs = BackgroundJobs(store, ended=go_on, load_threads=1)
    jobs.submit_load(0, ["elsewhere"], [torch.empty(CHUNK_BYTES, dtype=torch.uint8)])
    until(lambda: len(told) == 6)
    assert told == [0, 1, 2, 3, 4, 5]
    assert jobs.close()
