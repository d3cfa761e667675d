"""How many flushes a store sends: one a commit group, and those of opening, checkpoints and closing.

    opening for writing    1, for what a killed process left in the cache, and 2 with the first superblock
    a commit group         1
    a checkpoint           3: its pages, and 2 with the superblock; it makes the open group durable by itself
    closing                that of the open group, if there is one, and the 3 of a checkpoint
    opening for reading    none

A device without a volatile cache gets none from the kernel, whatever is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv.testing import OperationKind, SimulatedDevice

SIZE_BYTES = 64 << 20
AT_OPEN = 3
AT_CHECKPOINT = 3


def payload(number: int) -> torch.Tensor:
    return torch.full((20_000,), number % 251, dtype=torch.uint8)


def work(store: blockkv.Store) -> int:
    """Every kind of operation; returns the flushes that must have been sent for it."""
    before = store.stats()["groups_committed"]
    checkpoints = store.stats()["checkpoints_written"]
    for number in range(20):
        store.put(number.to_bytes(4, "little"), payload(number))  # lazy: none
    store.commit()
    store.put("durable", payload(1), durable=True)
    store.put_many([(f"many {number}", payload(number)) for number in range(50)], durable=True)
    store.put("durable", payload(1), durable=True)  # there, and durable: none
    store.commit()  # nothing to commit: none
    store.delete("many 3", durable=True)
    store.get_many([f"many {number}" for number in range(50)])
    store.put("in a checkpoint", payload(2))
    store.checkpoint()
    store.put("after it", payload(3), durable=True)
    stats = store.stats()
    # The group that a checkpoint covers is durable with it and needs no flush of its own.
    groups = stats["groups_committed"] - before - (stats["checkpoints_written"] - checkpoints)
    assert groups == 5
    return groups + AT_CHECKPOINT * (stats["checkpoints_written"] - checkpoints)


@pytest.mark.parametrize("cache", [True, False])
def test_flushes_of_the_store(cache: bool) -> None:
    """The store asks for the same ones whatever the cache; who drops them is the kernel, see below."""
    device = SimulatedDevice(SIZE_BYTES, volatile_write_cache=cache)
    blockkv.format(device, average_chunk="64KiB")

    def flushes() -> int:
        return device.counters()["device_flush_count"]

    count = flushes()
    store = blockkv.open(device, commit_interval_ms=None)
    assert flushes() - count == AT_OPEN
    count = flushes()
    expected = work(store)
    assert flushes() - count == expected
    count = flushes()
    store.put("pending", payload(4))
    store.close()
    assert flushes() - count == 1 + AT_CHECKPOINT


def test_a_reader_sends_none() -> None:
    device = SimulatedDevice(SIZE_BYTES)
    blockkv.format(device, average_chunk="64KiB")
    blockkv.open(device.clone()).close()
    reading = device.clone()
    with blockkv.open(reading, read_only=True) as store:
        store.check(payload=True)
    assert {one.kind for one in reading.operations()} == {OperationKind.READ}


class Queue:
    """The request queue of a loop device: its cache setting, and the flushes that reached the driver."""

    def __init__(self, device: Path) -> None:
        self._directory = Path("/sys/block") / device.name
        self.write_cache = self._directory / "queue" / "write_cache"

    @property
    def flushes(self) -> int:
        """Field 16 of Documentation/admin-guide/iostats: flush requests completed."""
        return int((self._directory / "stat").read_text().split()[15])


@pytest.fixture
def queue(loop_device: Any) -> Iterator[tuple[Path, Queue]]:
    device = loop_device(SIZE_BYTES, 4096)
    queue = Queue(device)
    before = queue.write_cache.read_text()
    yield device, queue
    queue.write_cache.write_text(before)


@pytest.mark.requires_root
@pytest.mark.parametrize("cache", ["write back", "write through"])
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_flushes_of_a_loop_device(queue: tuple[Path, Queue], cache: str, engine: Any) -> None:
    device, kernel = queue
    kernel.write_cache.write_text(cache)
    blockkv.format(device, average_chunk="64KiB")
    before = kernel.flushes
    with blockkv.open(device, commit_interval_ms=None, engine=engine) as store:
        assert store.info()["limits"]["volatile_write_cache"] == (cache == "write back")
        assert store.stats()["flushes"] == AT_OPEN
        assert kernel.flushes - before == (AT_OPEN if cache == "write back" else 0)
        expected = AT_OPEN + work(store)
        assert store.stats()["flushes"] == expected
        assert kernel.flushes - before == (expected if cache == "write back" else 0)
    assert kernel.flushes - before == (expected + AT_CHECKPOINT if cache == "write back" else 0)
    assert kernel.write_cache.read_text().strip() == cache
