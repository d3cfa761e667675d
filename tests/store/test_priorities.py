"""Loads before preloads before stores, puts that may be dropped, deadlines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv.device.base import Batch, Direction, Priority
from blockkv.testing import SimulatedDevice

MIB = 1 << 20


@pytest.fixture(params=["io_uring", "threads"])
def store(request: pytest.FixtureRequest, image_dir: Path) -> Iterator[blockkv.Store]:
    blockkv.format(image_dir / "store.img", size="256MiB")
    with blockkv.open(image_dir / "store.img", engine=request.param) as opened:
        yield opened


def test_a_load_does_not_wait_for_the_stores_before_it(store: blockkv.Store) -> None:
    store.put("wanted", torch.ones(2 * MIB, dtype=torch.uint8))
    source = blockkv.empty(64 * MIB, torch.uint8)
    for _ in range(20):
        stores_over, done = with_stores_before_it(store, source)
        if stores_over < 4:
            assert done.index("load") < len(done) - 1
            return
    pytest.fail("this machine writes faster than it submits")


def with_stores_before_it(store: blockkv.Store, source: torch.Tensor) -> tuple[int, list[str]]:
    """Get a chunk behind half a gibibyte of stores: how many of eight were over once it was asked for; what
    ended when.
    """
    device = store._state.device
    done: list[str] = []
    everything = threading.Semaphore(0)

    def told(name: str) -> Any:
        def on_done(_: Batch) -> None:
            done.append(name)
            everything.release()

        return on_done

    base = store._state.geometry.data.offset_bytes + 64 * MIB
    for number in range(8):
        batch = Batch(Direction.WRITE, Priority.STORE)
        batch.keepalive.append(source)
        for part in range(8):
            batch.add(8 * MIB, [(base + 8 * MIB * part, 8 * MIB)], [(source.data_ptr(), 8 * MIB)])
        batch.on_done = told(f"store {number}")
        device.submit(batch)
    got = store.submit_get("wanted")
    got.add_done_callback(lambda _: (done.append("load"), everything.release()))
    stores_over = sum(name != "load" for name in list(done))
    for _ in range(9):
        assert everything.acquire(timeout=60)
    assert torch.equal(got.result(), torch.ones(2 * MIB, dtype=torch.uint8))
    return stores_over, done


def test_a_preload_is_a_get(store: blockkv.Store) -> None:
    value = torch.randn(1000)
    store.put("k", value)
    assert torch.equal(store.get("k", preload=True), value)
    assert torch.equal(store.get_many(["k"], preload=True)[0], value)
    assert torch.equal(store.submit_get("k", preload=True).result(), value)


def test_a_get_whose_deadline_has_passed_is_a_miss(store: blockkv.Store) -> None:
    value = torch.randn(MIB)
    store.put("k", value)
    out = torch.ones(MIB)
    assert store.get("k", out=out, deadline_s=0) is False
    assert store.get_many(["k", "k"], deadline_s=0) == [None, None]
    assert store.submit_get("k", deadline_s=0).result() is None
    stats = store.stats()
    assert stats["get_deadline"] == 4
    assert stats["expired_requests"] >= 4
    assert stats["chunks_dropped_damaged"] == 0
    assert torch.equal(store.get("k", deadline_s=60), value)
    assert not store._state.any_leased()


def test_a_put_whose_deadline_has_passed_is_dropped(store: blockkv.Store) -> None:
    free_bytes = store.stats()["free_bytes"]
    value = torch.randn(MIB)
    assert store.put("k", value, deadline_s=0) is False
    assert store.put_many([("a", value), ("b", value)], deadline_s=0) == [False, False]
    assert store.submit_put("k", value, deadline_s=0).result() is False
    stats = store.stats()
    assert stats["put_dropped"] == 4
    assert stats["free_bytes"] == free_bytes
    assert stats["quarantined_bytes"] == 0
    assert not store._state.claims
    assert store._state.store_bytes == store._state.reserved_record_bytes == 0
    assert store.put("k", value, deadline_s=60)
    assert torch.equal(store.get("k"), value)
    assert store.check(payload=True).ok


@pytest.mark.parametrize("deadline_s", [-1, float("nan"), float("inf"), 1e9])
def test_deadlines_are_checked(store: blockkv.Store, deadline_s: float) -> None:
    for call in (
        lambda: store.get("k", deadline_s=deadline_s),
        lambda: store.put("k", b"x", deadline_s=deadline_s),
        lambda: store.submit_get("k", deadline_s=deadline_s),
        lambda: store.submit_put("k", b"x", deadline_s=deadline_s),
    ):
        with pytest.raises(blockkv.InvalidArgument, match="deadline_s"):
            call()


class Busy(SimulatedDevice):
    """Carries out no data writes until it is told to."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()

    def wait(self, batch: Batch) -> None:
        if batch.priority is Priority.STORE and batch.direction is Direction.WRITE:
            self.has_begun.set()
            assert self.may_go_on.wait(60)
        super().wait(batch)


@pytest.fixture
def busy() -> Iterator[tuple[blockkv.Store, Busy]]:
    device = Busy()
    blockkv.format(device)
    with blockkv.open(device, max_store_bytes=MIB) as store:
        yield store, device
        device.may_go_on.set()


VALUE = bytes(MIB)


def test_puts_that_may_be_dropped_are_when_the_store_is_behind(busy: tuple[blockkv.Store, Busy]) -> None:
    store, device = busy
    first = store.submit_put("first", VALUE)
    assert device.has_begun.wait(60)
    assert store.put("dropped", VALUE, droppable=True) is False
    assert store.put("late", VALUE, deadline_s=0.01) is False
    assert store.stats()["put_dropped"] == 2
    device.may_go_on.set()
    assert first.result(60)
    assert store.put("kept", VALUE, droppable=True)
    assert sorted(store.keys()) == ["first", "kept"]
    assert store.check(payload=True).ok


def test_other_puts_wait(busy: tuple[blockkv.Store, Busy]) -> None:
    store, device = busy
    futures = [store.submit_put(f"k{number}", VALUE) for number in range(5)]
    assert device.has_begun.wait(60)
    with store._state.lock:
        assert store._state.store_bytes == MIB
    device.may_go_on.set()
    assert all(future.result(60) for future in futures)
    assert store._state.store_bytes == 0


def test_a_call_larger_than_the_limit_goes_on_by_itself(busy: tuple[blockkv.Store, Busy]) -> None:
    store, device = busy
    device.may_go_on.set()
    assert store.put_many([(f"k{number}", bytes(3 * MIB)) for number in range(5)]) == [True] * 5


def test_the_limit_is_checked() -> None:
    device = SimulatedDevice(64 << 20)
    blockkv.format(device)
    with pytest.raises(blockkv.InvalidArgument, match="max_store_bytes"):
        blockkv.open(device, max_store_bytes=0)
