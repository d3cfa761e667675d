"""A formatted simulated device, and a store on it without background threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import blockkv
from blockkv.testing import SimulatedDevice

OpenStore = Callable[..., blockkv.Store]


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice(64 << 20, strict=True)
    blockkv.format(device, average_chunk="64KiB")
    return device


@pytest.fixture
def open_on() -> Iterator[OpenStore]:
    """Open stores that are closed after the test, without a background thread."""
    opened: list[blockkv.Store] = []

    def open_(device: Any, **options: Any) -> blockkv.Store:
        options.setdefault("commit_interval_ms", None)
        store = blockkv.open(device, **options)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(device: SimulatedDevice, open_on: OpenStore) -> blockkv.Store:
    return open_on(device)
