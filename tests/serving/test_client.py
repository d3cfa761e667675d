"""A client is a store: the same calls have the same results as on a store of one's own, and what differs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_tools import Serves, wait_until

import blockkv
from blockkv import KVLayout, Part
from blockkv.errors import (
    BatchError,
    DeviceError,
    InvalidArgument,
    LayoutMismatch,
    StoreClosed,
    StoreFull,
    StoreReadOnly,
)
from blockkv.metrics import StoreCollector
from blockkv.serving.client import ClientStore

SIZES = {"layers": 4, "kv": 2, "heads": 2, "tokens": 64, "dim": 128}
LAYOUT = KVLayout.of("layers kv heads tokens dim", "float16", **SIZES)


@pytest.fixture(params=["own", "served"])
def store(request: pytest.FixtureRequest, image_dir: Path, serve: Serves) -> Iterator[blockkv.Store]:
    """The same for a store of this process and for a client."""
    if request.param == "own":
        path: Any = image_dir / "own.img"
        blockkv.format(path, size="64MiB", average_chunk="64KiB")
    else:
        path = serve().path
    with blockkv.open(path) as opened:
        assert isinstance(opened, ClientStore) == (request.param == "served")
        yield opened


@pytest.fixture
def client(serve: Serves) -> Iterator[blockkv.Store]:
    with blockkv.open(serve().path) as opened:
        yield opened


def noise(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


# -- the same as a store of one's own ------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        noise(1, 1000),
        noise(2, 64, 3000).bfloat16(),
        noise(3, 300, 50).t(),
        noise(4, 40, 40)[::2, ::2],
        [noise(5, 10), noise(6, 20000).half()],
        {"k": noise(7, 4, 8, 16), "v": noise(8, 4, 8, 16)},
        b"some bytes",
        bytearray(5 << 20),
    ],
    ids=["small", "large", "transposed", "strided", "list", "dict", "bytes", "5 MiB"],
)
def test_what_was_put_comes_back(store: blockkv.Store, value: Any) -> None:
    assert store.put("key", value) is True
    found = store.get("key")
    if isinstance(value, dict):
        assert list(found) == list(value)
        assert all(torch.equal(found[name], value[name]) for name in value)
    elif isinstance(value, list):
        assert all(map(torch.equal, found, value))
    elif isinstance(value, torch.Tensor):
        assert found.dtype is value.dtype
        assert torch.equal(found, value)
    else:
        assert bytes(found.numpy()) == bytes(value)


def test_a_key_that_exists_is_not_written(store: blockkv.Store) -> None:
    assert store.put("key", noise(1, 5000))
    assert not store.put("key", noise(2, 5000), durable=True)
    assert torch.equal(store.get("key"), noise(1, 5000))
    assert store.stats()["put_existing"] == 1


def test_into_memory_of_the_caller(store: blockkv.Store) -> None:
    store.put("key", noise(1, 300, 50))
    out = torch.zeros(50, 300).t()
    assert store.get("key", out) is True
    assert torch.equal(out, noise(1, 300, 50))
    assert store.get("other", out) is False
    with pytest.raises(LayoutMismatch):
        store.get("key", torch.zeros(300, 50, dtype=torch.float64))
    memory = bytearray(300 * 50 * 4)
    assert store.get("key", memory)
    assert bytes(memory) == noise(1, 300, 50).numpy().tobytes()


def test_many_at_once(store: blockkv.Store) -> None:
    items = {f"key {number}": noise(number, 1000 + number) for number in range(700)}
    assert store.put_many(items, durable=True) == [True] * 700
    assert store.put_many(list(items.items())[:10]) == [False] * 10
    keys = [*items, "missing"]
    found = store.get_many(keys)
    assert all(map(torch.equal, found, items.values()))
    assert found[-1] is None
    outs = [torch.empty(1000 + number) for number in range(700)]
    assert store.get_many(list(items), outs) == [True] * 700
    assert all(map(torch.equal, outs, items.values()))
    assert store.stats()["get_misses"] == 1


def test_one_bad_key_leaves_its_neighbours_alone(store: blockkv.Store) -> None:
    items = [("a", noise(1, 10)), ("", noise(2, 10)), ("b", torch.empty(0)), ("c", noise(3, 10))]
    with pytest.raises(BatchError) as caught:
        store.put_many(items)
    assert caught.value.results == [True, False, False, True]
    assert {position: type(error) for position, error in caught.value.errors.items()} == {
        1: InvalidArgument,
        2: InvalidArgument,
    }
    with pytest.raises(BatchError) as caught:
        store.get_many(["a", "", "c"])
    assert torch.equal(caught.value.results[0], noise(1, 10))
    assert torch.equal(caught.value.results[2], noise(3, 10))


def test_a_key_twice_in_a_call(store: blockkv.Store) -> None:
    assert store.put_many([("key", noise(1, 10)), ("key", noise(2, 10)), ("b", noise(3, 10))]) == [
        True,
        False,
        True,
    ]
    assert torch.equal(store.get("key"), noise(1, 10))
    assert all(torch.equal(found, noise(1, 10)) for found in store.get_many(["key", "key", "key"]))


def test_the_catalog(store: blockkv.Store) -> None:
    keys: list[str | bytes] = [f"key {number}" for number in range(30)] + [b"\xff\x00"]
    for number, key in enumerate(keys):
        store.put(key, noise(number, 100))
    assert len(store) == 31
    assert list(store.keys()) == keys
    assert store.contains("key 3")
    assert b"\xff\x00" in store
    assert "key 31" not in store
    assert store.lookup(keys) == 31
    assert store.lookup(["key 0", "key 1", "missing", "key 2"]) == 2
    assert store.lookup([]) == 0
    info = store.entry("key 3")
    assert info is not None
    assert (info.key, info.payload_bytes, info.pins) == ("key 3", 400, 0)
    assert info.layout.specs[0].shape == (100,)
    store.commit()
    info = store.entry("key 3")
    assert info is not None
    assert info.durable
    assert store.entry("missing") is None
    assert store.touch("key 0")
    assert not store.touch("missing")
    assert next(iter(store.keys())) == "key 1"
    assert store.delete("key 1")
    assert not store.delete("key 1")
    assert store.delete("key 2", durable=True)
    assert store.get("key 1") is None
    assert len(store) == 29
    store.checkpoint()


class Books:
    """What a watch has told, applied in order; a change that cannot be is an error."""

    def __init__(self, store: blockkv.Store) -> None:
        self.watch = store.watch()
        self.sizes: dict[str | bytes, int] = {}

    def settle(self) -> dict[str | bytes, int]:
        for change in self.watch.take():
            if change.stored:
                assert change.key not in self.sizes
                self.sizes[change.key] = change.payload_bytes
            else:
                assert self.sizes.pop(change.key) == change.payload_bytes
        return self.sizes


def test_a_watch_keeps_exact_books(store: blockkv.Store) -> None:
    store.put("early", bytes(1000))
    books = Books(store)
    assert books.settle() == {"early": 1000}
    assert books.watch.take() == []
    store.put_many([(f"key {number}", bytes(10 + number)) for number in range(1500)])
    store.put(b"\xff", bytes(7))
    store.delete("key 3")
    store.delete("early")
    store.put("early", bytes(2000))
    assert books.settle() == {
        **{f"key {number}": 10 + number for number in range(1500) if number != 3},
        b"\xff": 7,
        "early": 2000,
    }
    for number in range(30):
        store.put(f"large {number}", bytearray(4 << 20))
    assert set(books.settle()) == set(store.keys())
    books.watch.close()
    store.close()
    assert books.watch.take() == []


def test_where_a_chunk_lies(store: blockkv.Store) -> None:
    store.put("key", noise(1, 50_000))
    with store.extents("key") as chunk:
        memory = blockkv.empty((chunk.size_bytes,), torch.uint8)
        position = 0
        for fd, offset_bytes, length_bytes in chunk.descriptors:
            os.preadv(fd, [memory.numpy()[position : position + length_bytes]], offset_bytes)
            position += length_bytes
        assert torch.equal(chunk.tensors(memory), noise(1, 50_000))
    assert store.extents("missing") is None


def test_more_keys_than_one_answer_has(store: blockkv.Store) -> None:
    keys = [f"{number:05}" for number in range(2500)]
    store.put_many([(key, b"x") for key in keys])
    assert list(store.keys()) == keys
    assert store.lookup(keys) == 2500


def test_pins_keep_chunks(store: blockkv.Store) -> None:
    store.put("kept", noise(1, 1000))
    assert store.pin("kept")
    assert not store.pin("missing")
    for number in range(30):
        store.put(f"other {number}", bytearray(4 << 20))
    assert torch.equal(store.get("kept"), noise(1, 1000))
    assert store.stats()["chunks_evicted"] > 0
    assert store.unpin("kept")
    assert not store.unpin("kept")
    for number in range(30, 60):
        store.put(f"other {number}", bytearray(4 << 20))
    assert store.get("kept") is None


def test_the_owner_forgets_pins_that_are_taken_back(serve: Serves) -> None:
    owner = serve()
    with blockkv.open(owner.path) as store:
        for number in range(3):
            store.put(f"key {number}", b"x")
            assert store.pin(f"key {number}")
            assert store.unpin(f"key {number}")
            assert store.touch(f"key {number}")
        (session,) = owner._sessions
        assert not session._pins


def test_connecting_again_outlives_a_lack_of_descriptors(
    serve: Serves, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = serve()
    with blockkv.open(owner.path) as store:
        connect, failures = ClientStore._connect, [1, 2]

        def connect_late(self: ClientStore) -> Any:
            if failures:
                failures.pop()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return connect(self)

        monkeypatch.setattr(ClientStore, "_connect", connect_late)
        (session,) = owner._sessions
        session.hang_up()
        wait_until(lambda: not failures and store.is_connected, "it is connected again")
        assert store.put("key", b"x")


def test_more_than_there_is_room_for_at_once(store: blockkv.Store) -> None:
    store.put_many([(str(number), bytearray([number]) * (3 << 20)) for number in range(40)])
    found = [number for number in range(40) if store.contains(str(number))]
    assert 10 < len(found) < 20
    for number in found:
        assert bytes(store.get(str(number)).numpy()) == bytes([number]) * (3 << 20)


def test_in_the_background(store: blockkv.Store) -> None:
    futures = [store.submit_put(f"key {number}", noise(number, 5000)) for number in range(20)]
    assert [future.result(20) for future in futures] == [True] * 20
    gets = [store.submit_get(f"key {number}", preload=number % 2 == 0) for number in range(21)]
    for number, future in enumerate(gets[:-1]):
        assert torch.equal(future.result(20), noise(number, 5000))
    assert gets[-1].result(20) is None

    async def awaited() -> Any:
        return await store.submit_get("key 3")

    assert torch.equal(asyncio.run(awaited()), noise(3, 5000))
    with pytest.raises(LayoutMismatch):
        store.submit_get("key 3", torch.empty(3)).result(20)


def test_parts_and_streams(store: blockkv.Store) -> None:
    values = [noise(number, *SIZES.values()).half() for number in range(3)]
    for number, value in enumerate(values):
        store.put(f"key {number}", value)
    part = Part(layers=range(1, 3), heads=1)
    assert torch.equal(store.get("key 1", part=part, layout=LAYOUT), values[1][1:3, :, 1:2])
    assert store.get("missing", part=part, layout=LAYOUT) is None
    future = store.submit_get("key 2", part=part, layout=LAYOUT)
    assert torch.equal(future.result(20), values[2][1:3, :, 1:2])
    with store.stream(["key 0", "key 1", "key 2", "missing"], layout=LAYOUT) as stream:
        layers = [(layer, [piece.clone() for piece in pieces]) for layer, pieces in stream]
    assert [layer for layer, _ in layers] == [0, 1, 2, 3]
    for layer, pieces in layers:
        assert len(pieces) == 3
        assert all(torch.equal(piece[0], value[layer]) for piece, value in zip(pieces, values, strict=True))


def test_a_time_to_live_and_priorities(store: blockkv.Store, serve: Serves) -> None:
    (own,) = [owner.store for owner in serve.owners] or [store]
    store.put("short", noise(1, 10), ttl_s=100)
    store.put("high", noise(2, 10), priority=5)
    assert store.contains("short")
    own._state.keep()._clock = lambda: time.monotonic() + 100
    assert not store.contains("short")
    assert store.get("short") is None
    for number in range(30):
        store.put(f"other {number}", bytearray(4 << 20))
    assert store.contains("high")


def test_a_deadline_that_is_over(store: blockkv.Store) -> None:
    store.put("key", bytearray(1 << 20))
    assert store.get("key", deadline_s=0) is None
    assert store.put("other", bytearray(1 << 20), deadline_s=0) is False
    assert not store.contains("other")
    assert store.put("other", bytearray(1 << 20), droppable=True, deadline_s=20)
    figures = store.stats()
    assert figures["get_deadline"] == 1
    assert figures["put_dropped"] == 1


def test_registered_memory(store: blockkv.Store) -> None:
    memory = blockkv.empty((1 << 20,), torch.uint8)
    store.put("key", bytearray(b"\7") * (1 << 20))
    with store.register(memory):
        assert store.get("key", memory)
    assert bool((memory == 7).all())


def test_many_threads(store: blockkv.Store) -> None:
    problems: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            for number in range(25):
                key = f"{number % 10}"
                store.put(key, noise(number % 10, 3000 + number % 10))
                found = store.get(key)
                if found is not None:
                    assert torch.equal(found, noise(number % 10, 3000 + number % 10))
                if number % 7 == thread:
                    store.delete(key)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_what_is_closed_is_closed(store: blockkv.Store) -> None:
    store.put("key", noise(1, 10))
    store.close()
    store.close()
    for call in (lambda: store.get("key"), lambda: store.put("key", b"x"), lambda: store.lookup(["key"])):
        with pytest.raises(StoreClosed):
            call()


# -- what differs --------------------------------------------------------------------------------------


def test_two_clients_see_one_store(serve: Serves) -> None:
    owner = serve()
    with blockkv.open(owner.path) as one, blockkv.open(f"unix:{owner.path}") as two:
        one.put("key", noise(1, 70000))
        assert torch.equal(two.get("key"), noise(1, 70000))
        assert not two.put("key", noise(2, 70000))
        two.delete("key")
        assert one.get("key") is None
        assert torch.equal(two.get("other") or torch.ones(1), torch.ones(1))


def test_what_clients_put_is_on_the_device(image_dir: Path, serve: Serves) -> None:
    owner = serve()
    with blockkv.open(owner.path) as client:
        client.put_many({str(number): noise(number, 10000) for number in range(50)})
        client.put("long " * 700, noise(99, 100))
    serve.end(owner)
    with blockkv.open(image_dir / "0.img") as store:
        assert len(store) == 51
        assert all(torch.equal(store.get(str(number)), noise(number, 10000)) for number in range(50))
        assert "long " * 700 in list(store.keys())
        assert store.check(payload=True).ok


def test_what_is_for_the_owner_is_refused(client: blockkv.Store, serve: Serves) -> None:
    for call in (
        lambda: client.reserve("key", 1 << 20),
        lambda: client.check(),
        lambda: client.scrub(),
        lambda: client.start_scrub(),
        lambda: client.discard_freed(),
        lambda: client.findings,
    ):
        with pytest.raises(InvalidArgument, match="owner"):
            call()
    path = serve().path
    for option in ({"evict": False}, {"verify": False}, {"quotas": {"a": 1}}, {"degraded": True}):
        with pytest.raises(InvalidArgument, match="blockkv serve"):
            blockkv.open(path, **option)  # type: ignore[arg-type]


def test_options_of_a_client(serve: Serves) -> None:
    path = serve().path
    with blockkv.open(path, engine="threads", depth=8, max_store_bytes=1 << 20) as client:
        client.put_many({str(number): bytearray([number]) * (1 << 20) for number in range(20)})
        assert bytes(client.get("3").numpy()) == b"\3" * (1 << 20)
        assert client.info()["engine"] == "threads"
    with blockkv.open(path, read_only=True) as reader:
        assert reader.contains("3")
        with pytest.raises(StoreReadOnly):
            reader.put("key", b"x")


def test_an_option_that_there_is_not(serve: Serves, image_dir: Path) -> None:
    for path in (serve().path, image_dir / "none"):
        with pytest.raises(TypeError, match=r"^blockkv\.open\(\) has no option 'evct'$"):
            blockkv.open(path, evct=False)  # type: ignore[call-arg]


def test_figures_of_both(serve: Serves) -> None:
    owner = serve()
    with blockkv.open(owner.path) as one, blockkv.open(owner.path) as two:
        one.put("a", b"a")
        two.put("b", b"b")
        figures = one.stats()
        assert (figures["chunks"], figures["put_chunks"], figures["owner_put_chunks"]) == (2, 1, 2)
        assert (figures["clients"], figures["owner_connected"]) == (2, 1)
        measured = {family.name for family in StoreCollector(one).collect()}
        assert {"blockkv_owner_connected", "blockkv_clients", "blockkv_get_owner_lost"} <= measured
        info = one.info()
        assert info["owner_pid"] == os.getpid()
        assert len(info["clients"]) == 2
        assert info["socket"] == owner.path


def test_nobody_serves_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="blockkv serve"):
        blockkv.open(f"unix:{tmp_path / 'none.sock'}")


def test_no_room_says_so(serve: Serves) -> None:
    with blockkv.open(serve(evict=False).path) as client:
        with pytest.raises(BatchError) as caught:
            client.put_many([(str(number), bytearray(4 << 20)) for number in range(20)])
        assert {type(error) for error in caught.value.errors.values()} == {StoreFull}
        with pytest.raises(StoreFull, match="never fit"):
            client.put("huge", bytearray(70 << 20))
        figures = client.stats()
        assert figures["client_puts"] == 0
        assert len(client) == 20 - len(caught.value.errors)


def test_damage_is_found_by_a_client_and_judged_by_the_owner(
    image_dir: Path, serve: Serves, caplog: pytest.LogCaptureFixture
) -> None:
    owner = serve()
    with blockkv.open(owner.path) as client:
        client.put("good", noise(1, 50000))
        client.put("bad", noise(2, 50000))
        info = client.entry("bad")
        assert info is not None
        offset = owner.store.info()["data_offset_bytes"] + info.extents[0][0] * 4096
        with (image_dir / "0.img").open("r+b") as image:
            image.seek(offset + 777)
            image.write(b"damage")
        with caplog.at_level(logging.WARNING):
            out = torch.ones(50000)
            assert client.get("bad", out) is False
        assert bool((out == 0).all())
        assert client.stats()["get_checksum_mismatch"] == 1
        assert torch.equal(client.get("good"), noise(1, 50000))
        wait_until(lambda: not client.contains("bad"), "the owner has looked for itself")
        figures = client.stats()
        assert figures["chunks_dropped_damaged"] == 1
        assert figures["quarantined_bytes"] == 200704
        assert client.put("bad", noise(3, 50000))
        assert torch.equal(client.get("bad"), noise(3, 50000))


def test_memory_that_is_written_to_meanwhile_costs_no_chunk(serve: Serves) -> None:
    """The client finds wrong bytes, the owner right ones: the chunk stays."""
    owner = serve()
    with blockkv.open(owner.path) as client:
        client.put("key", noise(1, 50000))
        assert isinstance(client, ClientStore)
        found, _ = client._data.acquire([_digest("key")])
        with client._data.lock:
            client._data.drop_damaged(client._data.index.at(found.places[0]))
            client._data.release(found.places)
        wait_until(lambda: client.stats()["client_leases"] == 0, "the owner has looked for itself")
        assert torch.equal(client.get("key"), noise(1, 50000))


def test_policies_of_the_owner_hear_of_clients(serve: Serves) -> None:
    with blockkv.open(serve(admission="twice").path) as client:
        assert not client.put("key", b"x")
        assert client.stats()["put_refused"] == 1
        client.lookup(["key"])
        assert client.put("key", b"x")


def test_quotas_of_the_owner_hold_for_clients(serve: Serves) -> None:
    with blockkv.open(serve(quotas={"small": 1 << 20}).path) as client:
        for number in range(40):
            client.put(f"small/{number}", bytearray(100_000))
        assert 5 <= len(client) <= 10


def _digest(key: str) -> bytes:
    from blockkv.format.record import key_digest

    return key_digest(key.encode())


def test_a_forked_child_has_nothing(client: blockkv.Store) -> None:
    client.put("key", noise(1, 1000))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            client.get("key")
        except StoreClosed:
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert torch.equal(client.get("key"), noise(1, 1000))


def test_a_memory_tier_in_front(serve: Serves) -> None:
    with blockkv.open(serve().path) as client, blockkv.TieredStore(client, 4 << 20) as tier:
        for number in range(20):
            tier.put(f"{number}", noise(number, 100_000))
        for number in range(20):
            assert torch.equal(tier.get(f"{number}"), noise(number, 100_000))
        assert client.stats()["get_chunks"] > 0
