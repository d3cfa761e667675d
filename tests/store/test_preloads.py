"""Preloads in the background: a few at a time with the device, and the others can be cancelled."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest
import torch

import blockkv
from blockkv import KVLayout, Part
from blockkv.store import preloads
from blockkv.testing import SimulatedDevice

MIB = 1 << 20
LAYOUT = KVLayout.of("layers dim", "uint8", layers=4, dim=MIB // 4)


@pytest.fixture(autouse=True)
def two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloads, "HANDED_OVER_BYTES", 2 * MIB)


@pytest.fixture(params=["store", "array"])
def slow(request: pytest.FixtureRequest, open_on: Any) -> tuple[blockkv.Store, list[SimulatedDevice]]:
    """A store with eight chunks, and its devices: from now on they do nothing until told to."""
    devices = [SimulatedDevice(64 << 20, path=f"device-{index}") for index in range(2)]
    target: Any = devices if request.param == "array" else devices[0]
    blockkv.format(target, average_chunk="64KiB")
    store = open_on(target)
    keys = [f"k{number}" for number in range(8)]
    for number, key in enumerate(keys):
        store.put(key, torch.full((MIB,), number, dtype=torch.uint8))
    for device in devices:
        device.deferred = True
    return store, devices


def complete(devices: list[SimulatedDevice]) -> None:
    while sum(device.complete() for device in devices):
        pass


def keys_of_one_device(store: blockkv.Store) -> list[str]:
    """All of a store, four or so of an array of two."""
    by_device: dict[str, list[str]] = {}
    for number in range(8):
        by_device.setdefault(store.entry(f"k{number}").device, []).append(f"k{number}")
    return max(by_device.values(), key=len)


@pytest.mark.parametrize("part", [None, Part(layers=2)])
def test_what_waits_can_be_cancelled(
    slow: tuple[blockkv.Store, list[SimulatedDevice]], part: Part | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, devices = slow
    layout = None
    if part is not None:
        monkeypatch.setattr(preloads, "HANDED_OVER_BYTES", MIB // 2)
        layout = LAYOUT
    keys = keys_of_one_device(store)[:4]
    outs = [torch.full((1, MIB // 4) if part else (MIB,), 99, dtype=torch.uint8) for _ in keys]
    futures = [
        store.submit_get(key, out, part=part, layout=layout, preload=True)
        for key, out in zip(keys, outs, strict=True)
    ]
    assert [future.cancel() for future in futures] == [False, False, True, True], "the device has two of them"
    assert futures[3].cancel(), "again"
    assert [future.cancelled() for future in futures] == [False, False, True, True]
    finished = concurrent.futures.wait(futures[2:], timeout=10).done
    assert finished == set(futures[2:])
    complete(devices)
    for future, key, out in zip(futures[:2], keys, outs, strict=False):
        assert future.result(10) is True
        assert bool((out == int(key[1:])).all())
    assert all(bool((out == 99).all()) for out in outs[2:]), "nothing was read for it"
    assert not futures[0].cancel()
    stats = store.stats()
    assert stats["get_chunks"] + stats["get_parts"] == 2
    with pytest.raises(concurrent.futures.CancelledError):
        futures[3].result()


def test_all_get_their_turn(slow: tuple[blockkv.Store, list[SimulatedDevice]]) -> None:
    store, devices = slow
    keys = [f"k{number}" for number in range(8)]
    futures = [store.submit_get(key, preload=True) for key in [*keys, "nothing", ""][:9]]
    futures.append(store.submit_get("k1", torch.zeros(3), preload=True))
    complete(devices)
    for number, future in enumerate(futures[:8]):
        assert bool((future.result(10) == number).all())
    assert futures[8].result(10) is None
    with pytest.raises(blockkv.LayoutMismatch):
        futures[9].result(10)
    assert store._preloads._handed_over_bytes == 0


def test_closing_cancels_what_waits(slow: tuple[blockkv.Store, list[SimulatedDevice]]) -> None:
    store, devices = slow
    keys = keys_of_one_device(store)[:4]
    futures = [store.submit_get(key, preload=True) for key in keys]
    closing = threading.Thread(target=store.close)
    closing.start()
    assert concurrent.futures.wait(futures[2:], timeout=30).done == set(futures[2:])
    assert futures[2].cancelled()
    complete(devices)
    closing.join(30)
    assert not closing.is_alive()
    assert all(future.result(10) is not None for future in futures[:2])


def test_cancelling_what_awaits_it_cancels_it(slow: tuple[blockkv.Store, list[SimulatedDevice]]) -> None:
    store, devices = slow
    keys = keys_of_one_device(store)[:3]
    futures = [store.submit_get(key, preload=True) for key in keys]

    async def wait() -> None:
        async with asyncio.timeout(0.01):
            await futures[2]

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    assert futures[2].cancelled()
    complete(devices)
    assert futures[1].result(10) is not None


def test_thousands_of_misses_do_not_pile_up(store: blockkv.Store) -> None:
    futures = [store.submit_get(f"nothing {number}", preload=True) for number in range(3000)]
    assert all(future.result(10) is None for future in futures)
