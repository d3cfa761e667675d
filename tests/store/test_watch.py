"""Watches: what was taken, applied in order, is what is in the store; whatever makes chunks come and go."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import blockkv
from blockkv.testing import SimulatedDevice

OpenStore = Callable[..., blockkv.Store]
SIZE_BYTES = 50_000


class Books:
    """What a watch has told, applied in order; a change that cannot be is an error."""

    def __init__(self, watch: blockkv.Watch) -> None:
        self.watch = watch
        self.sizes: dict[str | bytes, int] = {}

    def settle(self) -> dict[str | bytes, int]:
        for change in self.watch.take():
            if change.stored:
                assert change.key not in self.sizes
                self.sizes[change.key] = change.payload_bytes
            else:
                assert self.sizes.pop(change.key) == change.payload_bytes
        return self.sizes


def actual(store: blockkv.Store) -> dict[str | bytes, int]:
    entries = map(store.entry, list(store.keys()))
    return {entry.key: entry.payload_bytes for entry in entries if entry is not None}


def test_begins_with_what_is_there_and_goes_on_with_what_changes(store: blockkv.Store) -> None:
    store.put("a", bytes(1000))
    store.put(b"\xff\x00", bytes(2000))
    with store.watch() as watch:
        assert {(one.key, one.payload_bytes, one.stored) for one in watch.take()} == {
            ("a", 1000, True),
            (b"\xff\x00", 2000, True),
        }
        assert watch.take() == []
        store.put("c", bytes(3000))
        store.put("a", bytes(1))  # is there already
        store.delete("a")
        assert watch.take() == [blockkv.Change("c", 3000, True), blockkv.Change("a", 1000, False)]


def test_what_came_and_went_between_two_takes_is_not_told_and_what_was_replaced_is_told_in_order(
    store: blockkv.Store,
) -> None:
    store.put("a", bytes(1000))
    with store.watch() as watch:
        watch.take()
        store.put("b", bytes(10))
        store.delete("b")
        store.delete("a")
        store.put("a", bytes(2000))
        assert watch.take() == [blockkv.Change("a", 1000, False), blockkv.Change("a", 2000, True)]


def test_evictions_expiry_quotas_and_growing_chunks_are_told(
    device: SimulatedDevice, open_on: OpenStore
) -> None:
    store = open_on(device, quotas={"limited": 4 * SIZE_BYTES})
    books = Books(store.watch())
    for number in range(8):
        store.put(f"limited/{number}", bytes(SIZE_BYTES))
    assert len(books.settle()) == 4 == len(actual(store))
    store.put("brief", bytes(10), ttl_s=0.01)
    assert "brief" in books.settle()
    time.sleep(0.05)
    assert not store.contains("brief")
    assert "brief" not in books.settle()
    with store.reserve("grown", 1 << 20) as grown:
        grown.append(bytes(700_000), durable=True)
        assert books.settle()["grown"] == 700_000
        grown.append(bytes(1000))
        grown.seal()
    assert books.settle()["grown"] == 701_000
    for number in range(1500):
        store.put(f"many/{number}", bytes(SIZE_BYTES))
    assert store.stats()["chunks_evicted"] > 4
    assert books.settle() == actual(store)


def test_a_damaged_chunk_is_told_as_gone(device: SimulatedDevice, open_on: OpenStore) -> None:
    store = open_on(device)
    store.put("a", bytes(range(256)) * 64)
    books = Books(store.watch())
    books.settle()
    entry = store.entry("a")
    assert entry is not None
    start = store.info()["data_offset_bytes"] + entry.extents[0][0] * 4096
    device.flip_bit(start, 0)
    assert store.get("a") is None
    assert books.settle() == {}


def test_closing_either_ends_it(store: blockkv.Store) -> None:
    watch, other = store.watch(), store.watch()
    store.put("a", bytes(10))
    watch.close()
    watch.close()
    assert watch.take() == []
    store.put("b", bytes(10))
    assert len(other.take()) == 2
    store.close()
    assert other.take() == []


def test_books_are_exact_while_threads_put_delete_and_evict(
    device: SimulatedDevice, open_on: OpenStore
) -> None:
    store = open_on(device)
    for number in range(700):
        store.put(f"old/{number}", bytes(2 * SIZE_BYTES))
    ending = threading.Event()
    failures: list[Any] = []

    def work(seed: int) -> None:
        random_ = random.Random(seed)
        try:
            while not ending.is_set():
                key = f"k{random_.randrange(600)}"
                if random_.random() < 0.2:
                    store.delete(key)
                else:
                    store.put(key, bytes(random_.randrange(1, 2 * SIZE_BYTES)))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    books = Books(store.watch())  # begins while they are at it
    until = time.monotonic() + 2
    while time.monotonic() < until:
        books.settle()
    ending.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.stats()["chunks_evicted"] > 0
    assert books.settle() == actual(store)


def test_an_array_tells_of_all_members_and_of_the_loss_of_one(open_on: OpenStore) -> None:
    devices = [SimulatedDevice(32 << 20) for _ in range(3)]
    blockkv.format(devices, average_chunk="64KiB")
    store = open_on(devices)
    for number in range(20):
        store.put(f"k{number}", bytes(SIZE_BYTES))
    books = Books(store.watch())
    assert len(books.settle()) == 20
    for number in range(20, 40):
        store.put(f"k{number}", bytes(SIZE_BYTES))
    store.delete("k3")
    assert books.settle() == actual(store)
    store.commit()
    devices[1].stop()
    for number in range(40):
        store.get(f"k{number}")
    assert store.stats()["members_lost"] == 1
    assert 0 < len(books.settle()) < 39
    for number in range(40):
        store.put(f"k{number}", bytes(SIZE_BYTES))
    assert books.settle() == actual(store)
    assert len(books.sizes) == 40
