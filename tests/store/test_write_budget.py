"""Stores with a write budget: what exceeds it is not stored, and no more reaches the device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import blockkv
from blockkv.catalog.wear import WriteBudget
from blockkv.demo.replay import read_trace, replay
from blockkv.errors import BatchError, InvalidArgument, StoreFull
from blockkv.serving.owner import Owner
from blockkv.testing import SimulatedDevice

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CHUNK_BYTES = 64 * KIB
GROUP_BYTES = MIB
"""A commit group of these tests is less: pages of records, of 16 KiB each."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice(64 * MIB)
    blockkv.format(device, average_chunk="64KiB")
    return device


@pytest.fixture
def store(device: SimulatedDevice, clock: Clock) -> Iterator[blockkv.Store]:
    """24 GiB a day: at most 1 GiB at once, 0.28 MB/s."""
    budget = WriteBudget(24 * GIB, clock)
    with blockkv.open(device, commit_interval_ms=None, write_budget=budget) as store:
        yield store


def chunks(count: int, first: int = 0) -> list[tuple[str, torch.Tensor]]:
    return [(f"k{first + n}", torch.full((CHUNK_BYTES,), n, dtype=torch.uint8)) for n in range(count)]


def test_chunks_beyond_it_are_not_stored(store: blockkv.Store, clock: Clock) -> None:
    assert store.put_many(chunks(3)) == [False] * 3
    assert store.stats()["put_over_budget"] == 3
    clock.now_s += 10 * CHUNK_BYTES / (23 * GIB / 86400)
    results = store.put_many(chunks(20))
    assert 5 < sum(results) <= 10
    assert results == sorted(results, reverse=True), "the first of a prefix, not the last"
    assert store.lookup([key for key, _ in chunks(20)]) == sum(results)
    assert store.put_many(chunks(20))[: sum(results)] == [False] * sum(results)
    assert store.stats()["put_over_budget"] == 3 + 2 * (20 - sum(results))
    assert not store.put("k19", bytes(CHUNK_BYTES))
    assert not store.submit_put("k19", bytes(CHUNK_BYTES)).result()
    clock.now_s += 86400
    assert all(store.put_many(chunks(20, first=100)))


def test_what_is_there_already_costs_nothing(store: blockkv.Store, clock: Clock) -> None:
    clock.now_s += 3600
    assert all(store.put_many(chunks(4)))
    before = store.stats()["put_over_budget"]
    for _ in range(1000):
        store.put_many(chunks(4))
    assert store.stats()["put_over_budget"] == before
    assert store.put("other", b"x")


def test_metadata_and_growing_chunks_are_charged(store: blockkv.Store, clock: Clock) -> None:
    budget = store._state.write_budget
    assert budget is not None
    clock.now_s += 3600
    assert store.put("one", bytes(CHUNK_BYTES))
    charged, written = budget.left_bytes(), store.stats()["device_write_bytes"]
    with store.reserve("growing", 4 * MIB) as chunk:
        for _ in range(1024):
            chunk.append(torch.ones(4 * KIB, dtype=torch.uint8))
        chunk.seal()
    for number in range(30):
        store.delete(f"k{number}")
        store.put(f"k{number}", b"x", durable=True)
    store.checkpoint()
    assert store.put("last", b"x")
    store.commit()
    assert store.put("another", b"x")
    gone = charged - budget.left_bytes()
    assert gone == store.stats()["device_write_bytes"] - written


def test_a_replay_stays_below_it() -> None:
    """In the time of the trace; hits go down, and not to nothing."""
    requests = read_trace(None, 400)
    hits: dict[bool, int] = {}
    for is_budgeted in (False, True):
        device = SimulatedDevice(64 * MIB)
        blockkv.format(device, average_chunk="16KiB")
        clock = Clock()
        budget = WriteBudget(GIB, clock) if is_budgeted else None
        with blockkv.open(device, commit_interval_ms=None, write_budget=budget) as store:
            opened_bytes = store.stats()["device_write_bytes"]

            def next_request(
                done: int,
                _total: int,
                clock: Clock = clock,
                store: blockkv.Store = store,
                opened_bytes: int = opened_bytes,
                is_budgeted: bool = is_budgeted,
            ) -> None:
                store.commit()
                written_bytes = store.stats()["device_write_bytes"] - opened_bytes
                earned_bytes = clock.now_s * (GIB * 23 / 24) / 86400
                assert not is_budgeted or written_bytes <= earned_bytes + GROUP_BYTES
                if done < len(requests):
                    clock.now_s = requests[done].timestamp_ms / 1000

            report = replay(store, requests, 16 * KIB, progress=next_request)
            hits[is_budgeted] = report.hit_count
            assert bool(store.stats()["put_over_budget"]) == is_budgeted
    assert 0 < hits[True] < hits[False]


def test_clients_of_an_owner_share_it(tmp_path: Path) -> None:
    image, socket = tmp_path / "owned.img", tmp_path / "socket"
    blockkv.format(image, size="64MiB", average_chunk="64KiB")
    clock = Clock()
    budget = WriteBudget(24 * GIB, clock)
    owner = Owner(blockkv.open(image, commit_interval_ms=None, write_budget=budget), socket)
    thread = threading.Thread(target=owner.serve)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(owner.close)
        stack.callback(thread.join)
        stack.callback(owner.stop)
        client = stack.enter_context(blockkv.open(socket))
        assert client.put_many(chunks(3)) == [False] * 3
        clock.now_s += 100
        figures = client.stats()
        assert (figures["put_over_budget"], figures["owner_put_over_budget"]) == (3, 3)
        left_bytes = figures["write_budget_left_bytes"]
        assert 25 * MIB < left_bytes < 28 * MIB
        mixed = [(f"large {n}", bytes(MIB)) for n in range(300)] + [(f"small {n}", b"x") for n in range(300)]
        results = client.put_many(mixed)
        assert results == [True] * sum(results) + [False] * (600 - sum(results)), "no gaps"
        assert -MIB < client.stats()["write_budget_left_bytes"] < MIB
        clock.now_s += 7200
        left_bytes = client.stats()["write_budget_left_bytes"]
        with pytest.raises(StoreFull):
            client.put("larger than the store", bytes(70 * MIB))
        until_s = time.monotonic() + 30
        # The owner is told, and nobody waits for it.
        while client.stats()["write_budget_left_bytes"] != left_bytes:
            assert time.monotonic() < until_s, "what was not written is given back"
            time.sleep(0.01)


def test_an_array_has_one_for_all_members() -> None:
    devices = [SimulatedDevice(64 * MIB) for _ in range(2)]
    blockkv.format(devices, average_chunk="64KiB")
    with blockkv.open(devices, write_budget="1TB") as store:
        assert isinstance(store, blockkv.store.ArrayStore)
        first, second = (member.store._state.write_budget for member in store._members)
        assert first is not None
        assert second is not None
        assert first is not second
        assert first.bytes_per_day == second.bytes_per_day == 1 << 39


def test_what_is_not_written_is_given_back(store: blockkv.Store, clock: Clock) -> None:
    clock.now_s += 7200
    left_bytes = store.stats()["write_budget_left_bytes"]
    with pytest.raises(StoreFull):
        store.put("larger than the store", bytes(100 * MIB))
    assert store.put_many([(f"late {n}", bytes(MIB)) for n in range(8)], deadline_s=0) == [False] * 8
    with pytest.raises(BatchError):
        store.put_many([("no tensor", 5), ("x" * 5000, b"x")])  # type: ignore[list-item]
    assert store.stats()["write_budget_left_bytes"] == left_bytes
    assert store.put("k", bytes(MIB))
    assert store.stats()["write_budget_left_bytes"] == left_bytes - MIB


def test_a_call_leaves_no_gaps(store: blockkv.Store, clock: Clock) -> None:
    clock.now_s += 100
    mixed = [(f"large {n}", bytes(MIB)) for n in range(300)] + [(f"small {n}", b"x") for n in range(300)]
    results = store.put_many(mixed)
    assert 20 < sum(results) < 30
    assert results == [True] * sum(results) + [False] * (600 - sum(results))
    assert store.put_many(mixed[: sum(results)]) == [False] * sum(results), "they are there"
    assert store.check().ok


def test_a_debt_is_not_paid_with_what_the_bucket_could_not_hold(store: blockkv.Store, clock: Clock) -> None:
    clock.now_s += 30 * 86400
    with store.reserve("grown", 32 * MIB) as chunk:
        for _ in range(64):
            chunk.append(torch.zeros(512 * KIB, dtype=torch.uint8))
        chunk.seal()
    written_bytes = GIB - store.stats()["write_budget_left_bytes"]
    assert 32 * MIB <= written_bytes < 34 * MIB


def test_a_memory_tier_keeps_what_deserves_it(device: SimulatedDevice, clock: Clock) -> None:
    budget = WriteBudget(24 * GIB, clock)
    tier = blockkv.TieredStore(
        blockkv.open(device, commit_interval_ms=None, write_budget=budget), 32 * MIB, interval_s=None
    )
    for number in range(10):
        assert tier.put(f"k{number}", bytes(2 * MIB), place=blockkv.Place("p", number))
    clock.now_s += 40  # 10 MiB and a half
    tier.close()
    with blockkv.open(device.clone(), read_only=True) as store:
        assert [number for number in range(10) if store.contains(f"k{number}")] == [0, 1, 2, 3, 4]


def test_one_that_cannot_be_meant_is_refused(device: SimulatedDevice) -> None:
    for wrong in ("5MB", 0, "much", 10**400):
        with pytest.raises(InvalidArgument):
            blockkv.open(device, write_budget=wrong)
    with blockkv.open(device, write_budget="2TB") as store:
        assert store.info()["options"]["policies"]["write_budget_bytes_per_day"] == 2 << 40
