"""What the public methods promise, on a simulated device."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import blockkv
from blockkv.device.base import Batch
from blockkv.testing import SimulatedDevice

UNUSABLE_DTYPES = {"quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"}
DTYPES = sorted(
    {
        str(dtype).removeprefix("torch.")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    }
    - UNUSABLE_DTYPES
)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; also for dtypes that know no comparison."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and bytes(one.contiguous().view(-1).view(torch.uint8).numpy())
        == bytes(other.contiguous().view(-1).view(torch.uint8).numpy())
    )


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if name == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(store: blockkv.Store, name: str) -> None:
    tensor = of_dtype(name, 3, 5, 7)
    assert store.put("k", tensor)
    found = store.get("k")
    assert same_bits(found, tensor)
    out = torch.zeros(3 * 5 * 7 * tensor.element_size(), dtype=torch.uint8).view(tensor.dtype).view(3, 5, 7)
    assert store.get("k", out=out) is True
    assert same_bits(out, tensor)


def test_dtypes_include_those_that_matter() -> None:
    assert {"bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "bool"} <= set(DTYPES)


def test_miss_is_none_or_false(store: blockkv.Store) -> None:
    assert store.get("nothing") is None
    out = torch.full((4,), 7.0)
    assert store.get("nothing", out=out) is False
    assert bool((out == 7).all())
    assert store.get_many(["a", "b"]) == [None, None]
    assert store.delete("nothing") is False
    assert store.entry("nothing") is None
    assert not store.contains("nothing")
    assert store.stats()["get_misses"] == 4


def test_existing_key_is_left_alone(store: blockkv.Store) -> None:
    first, second = torch.randn(1000), torch.randn(1000)
    assert store.put("k", first) is True
    written = store.stats()["device_write_bytes"]
    assert store.put("k", second) is False
    assert store.stats()["device_write_bytes"] == written
    assert torch.equal(store.get("k"), first)


def test_names_forms_and_dtypes_survive_a_restart(device: SimulatedDevice, open_on: Any) -> None:
    k, v = torch.randn(4, 8, 16, dtype=torch.float32), torch.randn(4, 8, 16).to(torch.bfloat16)
    with open_on(device) as store:
        store.put("dict", {"k": k, "v": v})
        store.put("list", [v, k])
        store.put("tuple", (k,))
        store.put(b"\x00\xff", v.to(torch.float8_e4m3fn))
        store.put("bytes", b"some bytes")
        store.put("scalar", torch.tensor(1.5))
    store = open_on(device.clone())
    found = store.get("dict")
    assert list(found) == ["k", "v"]
    assert same_bits(found["k"], k)
    assert same_bits(found["v"], v)
    assert [tensor.dtype for tensor in store.get("list")] == [torch.bfloat16, torch.float32]
    assert isinstance(store.get("tuple"), list)
    assert same_bits(store.get(b"\x00\xff"), v.to(torch.float8_e4m3fn))
    assert bytes(store.get("bytes").numpy()) == b"some bytes"
    assert store.get("scalar").item() == 1.5
    assert set(store.keys()) == {"dict", "list", "tuple", b"\x00\xff", "bytes", "scalar"}


def test_str_and_its_utf8_bytes_are_one_key(store: blockkv.Store) -> None:
    assert store.put("é", b"x")
    assert store.contains("é".encode())
    assert store.put("é".encode(), b"x") is False


@pytest.mark.parametrize("key", ["", b"", "x" * 4097, b"x" * 4097, 5, None, "é" * 2049])
def test_bad_keys_are_refused(store: blockkv.Store, key: Any) -> None:
    with pytest.raises(blockkv.InvalidArgument):
        store.put(key, b"x")
    with pytest.raises(blockkv.InvalidArgument):
        store.get(key)


def test_longest_keys_survive_a_restart(device: SimulatedDevice, open_on: Any) -> None:
    keys = [bytes([number]) * 4096 for number in range(9)] + ["é" * 2048, "x" * 3000]
    with open_on(device) as store:
        store.put_many([(key, b"payload %d" % number) for number, key in enumerate(keys)], durable=True)
    store = open_on(device.clone())
    assert list(store.keys()) == keys
    assert bytes(store.get(keys[3]).numpy()) == b"payload 3"


NON_CONTIGUOUS = {
    "transposed": lambda t: t.transpose(0, 1),
    "inner transposed": lambda t: t.transpose(2, 3),
    "every second head": lambda t: t[:, ::2],
    "some tokens": lambda t: t[:, :, 10:50],
    "narrow dim": lambda t: t[..., 3:77],
    "one layer": lambda t: t[1],
    "permuted": lambda t: t.permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("shape", NON_CONTIGUOUS)
def test_non_contiguous_in_and_out(store: blockkv.Store, shape: str) -> None:
    cut = NON_CONTIGUOUS[shape]
    source = cut(torch.randn(4, 6, 64, 128))
    assert not source.is_contiguous() or shape == "one layer"
    store.put("k", source)
    assert torch.equal(store.get("k"), source)
    background = torch.full((4, 6, 64, 128), 9.0)
    target = cut(background)
    assert store.get("k", out=target)
    assert torch.equal(target, source)
    assert int((background == 9.0).sum()) == background.numel() - target.numel()


def test_pieces_of_a_non_contiguous_tensor_are_not_copied(store: blockkv.Store) -> None:
    pool = torch.randn(2, 16, 32, 128)
    store.put("k", pool[:, 4:8])
    assert store.stats()["put_copied_bytes"] == 0
    store.put("fine", pool.transpose(2, 3))
    assert store.stats()["put_copied_bytes"] == pool.nbytes


def test_expanded_tensors_can_be_put_but_not_filled(store: blockkv.Store) -> None:
    expanded = torch.randn(1, 4096).expand(8, 4096)
    store.put("k", expanded)
    assert torch.equal(store.get("k"), expanded)
    with pytest.raises(blockkv.LayoutMismatch, match="overlapping"):
        store.get("k", out=torch.zeros(1, 4096).expand(8, 4096))
    pool = torch.zeros(4096)
    store.put("pair", [torch.ones(4096), torch.ones(4096)])
    with pytest.raises(blockkv.LayoutMismatch, match="overlap"):
        store.get("pair", out=[pool, pool])


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(10, 9),
        torch.zeros(9, 10),
        torch.zeros(10, 10, dtype=torch.float64),
        torch.zeros(10, 10, dtype=torch.int32),
        [torch.zeros(10, 10)],
        {"k": torch.zeros(10, 10)},
        bytearray(399),
        bytes(400),
        torch.zeros(10, 10, device="meta"),
        [],
    ],
    ids=lambda out: f"{type(out).__name__}-{getattr(out, 'dtype', '')}{list(getattr(out, 'shape', []))}",
)
def test_wrong_out_is_refused_and_untouched(store: blockkv.Store, out: Any) -> None:
    store.put("k", torch.randn(10, 10))
    before = bytes(out) if isinstance(out, (bytes, bytearray)) else None
    with pytest.raises(blockkv.LayoutMismatch):
        store.get("k", out=out)
    if before is not None:
        assert bytes(out) == before
    elif isinstance(out, torch.Tensor) and out.device.type == "cpu":
        assert not out.any()


def test_bytes_like_outputs(store: blockkv.Store) -> None:
    tensor = torch.randn(10, 10)
    store.put("k", tensor)
    raw = bytearray(400)
    assert store.get("k", out=raw)
    assert bytes(raw) == bytes(tensor.numpy())
    array = np.zeros((10, 10), dtype=np.float32)
    assert store.get("k", out=array)
    assert np.array_equal(array, tensor.numpy())


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(0),
        torch.empty(3, 0, 2),
        b"",
        [],
        {},
        [torch.ones(2), torch.empty(0)],
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "text",
        5,
        {"": torch.ones(1)},
        {1: torch.ones(1)},
        [b"bytes"],
        {f"{'name' * 30}.{number}.{os.urandom(40).hex()}": torch.ones(1) for number in range(200)},
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_what_cannot_be_stored_is_refused(store: blockkv.Store, value: Any) -> None:
    with pytest.raises(blockkv.InvalidArgument):
        store.put("k", value)
    assert not store.contains("k")
    assert store.put("k", b"still free")


def test_batches_give_results_per_key(store: blockkv.Store) -> None:
    with pytest.raises(blockkv.BatchError) as caught:
        store.put_many([("a", b"1"), ("", b"2"), ("b", torch.empty(0)), ("c", b"3"), ("a", b"4")])
    assert caught.value.results == [True, False, False, True, False]
    assert set(caught.value.errors) == {1, 2}
    with pytest.raises(blockkv.BatchError) as caught:
        store.get_many(["a", "missing", "c"], [bytearray(1), bytearray(1), bytearray(2)])
    assert caught.value.results == [True, False, False]
    assert isinstance(caught.value.errors[2], blockkv.LayoutMismatch)
    with pytest.raises(blockkv.InvalidArgument, match="2 keys but 1"):
        store.get_many(["a", "c"], [bytearray(1)])
    found = store.get_many(iter(["a", "missing", "c"]))
    assert found[1] is None
    assert [bytes(item.numpy()) for item in (found[0], found[2])] == [b"1", b"3"]


def test_put_many_takes_mappings(store: blockkv.Store) -> None:
    assert store.put_many({"a": b"1", b"b": b"2"}) == [True, True]
    assert store.lookup(["a", "b", "c", "a"]) == 2
    assert store.lookup([]) == 0
    assert len(store) == 2
    assert "a" in store


def test_batches_longer_than_a_wave(store: blockkv.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockkv.store.waves.WAVE_BYTES", 100_000)
    values = {f"k{number}": torch.randn(7_000 + number) for number in range(50)}
    assert all(store.put_many(values, durable=True))
    outs = [torch.empty_like(value) for value in values.values()]
    assert all(store.get_many(values, outs))
    assert all(torch.equal(out, value) for out, value in zip(outs, values.values(), strict=True))


def test_evicts_least_recently_used_first(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    value = torch.zeros(1 << 18)
    stored = []
    while not store.stats()["chunks_evicted"]:
        stored.append(f"k{len(stored)}")
        store.put(stored[-1], value)
        store.get("k0")
        store.pin("k1")
    assert store.contains("k0")
    assert store.contains("k1")
    assert not store.contains("k2")
    assert list(store.keys())[-1] == "k0"
    assert store.check(payload=True).ok


def test_put_many_larger_than_the_store(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    total = 3 * store.info()["data_bytes"]
    value = torch.zeros(1 << 18)
    keys = [f"k{number}" for number in range(total // value.nbytes)]
    assert all(store.put_many([(key, value) for key in keys]))
    assert store.contains(keys[-1])
    assert not store.contains(keys[0])
    assert store.check(payload=True).ok


def put_until_refused(store: blockkv.Store, value: Any, prefix: str = "k", pin: bool = False) -> None:
    for number in range(100_000):
        store.put(f"{prefix}{number}", value)
        if pin:
            assert store.pin(f"{prefix}{number}")


def test_full_without_eviction(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device, evict=False)
    value = torch.zeros(1 << 18)
    with pytest.raises(blockkv.StoreFull, match="evict=True"):
        put_until_refused(store, value)
    assert len(store) > 50
    store.delete("k0")
    assert store.put("again", value)
    with pytest.raises(blockkv.StoreFull, match="never fit"):
        store.put("huge", torch.zeros(64 << 20, dtype=torch.uint8))


def test_pinned_chunks_are_not_evicted(
    device: SimulatedDevice, open_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockkv.store.room.SPACE_WAIT_S", 0.05)
    store = open_on(device)
    value = torch.zeros(1 << 18)
    with pytest.raises(blockkv.StoreFull, match="pinned"):
        put_until_refused(store, value, pin=True)
    assert store.unpin("k0")
    assert not store.unpin("k0")
    assert store.put("new", value)
    assert not store.contains("k0")


def test_metadata_space_runs_out_before_data(open_on: Any) -> None:
    device = SimulatedDevice(16 << 20)
    blockkv.format(device, average_chunk="16MiB", journal="64KiB")
    store = open_on(device, evict=False)
    with pytest.raises(blockkv.StoreFull, match="average-chunk"):
        put_until_refused(store, b"x", "a rather long key, to fill the checkpoint area sooner" * 8)
    count = len(store)
    store.close()
    store = open_on(device.clone())
    assert len(store) == count
    assert store.put("evicts for records too " * 150, b"x")
    assert len(store) < count
    assert store.stats()["chunks_evicted"] > 0
    assert store.check(payload=True).ok


def test_space_of_small_chunks(store: blockkv.Store) -> None:
    free = store.stats()["free_bytes"]
    payload = torch.zeros(16 << 10, dtype=torch.uint8)
    store.put_many([(f"k{number}", payload) for number in range(1000)])
    used = free - store.stats()["free_bytes"] + store.stats()["record_bytes"]
    assert used <= 1.1 * 1000 * payload.nbytes


def test_read_only(device: SimulatedDevice, open_on: Any) -> None:
    with open_on(device) as store:
        store.put("k", b"value")
    device = device.clone()
    store = open_on(device, read_only=True)
    assert bytes(store.get("k").numpy()) == b"value"
    for action in (
        lambda: store.put("x", b"y"),
        lambda: store.delete("k"),
        store.commit,
        store.checkpoint,
    ):
        with pytest.raises(blockkv.StoreReadOnly):
            action()
    assert store.check(payload=True).ok
    store.close()
    assert "write" not in device.timeline()


def test_closed(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    store.put("k", b"v")
    store.close()
    store.close()
    for action in (
        lambda: store.put("x", b"y"),
        lambda: store.get("k"),
        lambda: store.contains("k"),
        store.keys,
    ):
        with pytest.raises(blockkv.StoreClosed):
            action()


def test_the_same_device_twice(device: SimulatedDevice, open_on: Any) -> None:
    open_on(device)
    with pytest.raises(blockkv.DeviceBusy, match="simulated"):
        blockkv.open(device)


def test_futures_and_await(store: blockkv.Store) -> None:
    puts = [store.submit_put(f"k{number}", torch.full((1000,), number)) for number in range(20)]
    assert all(future.result() for future in puts)

    async def load() -> list[torch.Tensor]:
        return list(await asyncio.gather(*(store.submit_get(f"k{number}") for number in range(20))))

    found = asyncio.run(load())
    assert [int(tensor[0]) for tensor in found] == list(range(20))
    with pytest.raises(blockkv.InvalidArgument):
        store.submit_put("", b"x").result()


def test_threads_putting_the_same_keys(store: blockkv.Store) -> None:
    values = {f"k{number}": torch.full((5000,), number) for number in range(40)}
    written: list[list[bool]] = []
    threads = [
        threading.Thread(target=lambda: written.append(store.put_many(values, durable=True)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sum(results) for results in zip(*written, strict=True)] == [1] * 40
    assert all(torch.equal(store.get(key), value) for key, value in values.items())
    assert store.check(payload=True).ok


def test_a_chunk_deleted_while_it_is_read_keeps_its_extents(store: blockkv.Store) -> None:
    value = torch.randn(1 << 16)
    store.put("k", value)
    state = store._state
    entry = state.index.get(next(iter(state.index)).digest)
    assert entry is not None
    with state.lock:
        state.lease(entry)
    live = state.allocator.live_units
    store.delete("k", durable=True)
    assert state.allocator.live_units == live
    with state.lock:
        state.release([entry.place])
    assert state.allocator.live_units == 0
    assert store.check().ok


def test_forked_child_cannot_use_the_store(store: blockkv.Store) -> None:
    store.put("k", b"v")
    pid = os.fork()
    if pid == 0:
        try:
            store.get("k")
        except blockkv.StoreClosed:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert store.get("k") is not None


def test_entry_tells_what_is_known(store: blockkv.Store) -> None:
    store.put("k", {"k": torch.zeros(2, 3)}, durable=True)
    store.put("lazy", b"x")
    info = store.entry("k")
    assert info is not None
    assert (info.key, info.payload_bytes, info.durable, info.pins) == ("k", 24, True, 0)
    assert str(info.layout) == "dict(k: float32[2, 3])"
    lazy = store.entry("lazy")
    assert lazy is not None
    assert not lazy.durable
    store.commit()
    assert store.entry("lazy").durable  # type: ignore[union-attr]


def test_layouts_are_forgotten_with_their_last_chunk(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    for number in range(1, 200):
        store.put(f"k{number}", torch.zeros(number))
        if number > 10:
            store.delete(f"k{number - 10}")
    assert len(list(store._state.layouts)) == 10
    store.close()
    store = open_on(device.clone())
    assert len(list(store._state.layouts)) == 10
    assert torch.equal(store.get("k199"), torch.zeros(199))


def test_closing_from_inside_an_operation_is_refused(tmp_path: Any) -> None:
    """It would wait for itself, for ever."""
    path = tmp_path / "store"
    blockkv.format(path, size="32MiB")
    store = blockkv.open(path)
    store.put_many([(f"k{number}", bytes(5000)) for number in range(5)], durable=True)
    refusals: list[blockkv.BlockKVError] = []

    def close(*_: object) -> None:
        try:
            store.close()
        except blockkv.BlockKVError as error:
            refusals.append(error)

    store.scrub(1e12, progress=close)
    store.start_scrub(1e12, progress=close).result(timeout=60)
    store.check(payload=True, progress=close)
    assert len(refusals) >= 3
    assert all("from inside an operation" in str(error) for error in refusals)
    told = threading.Event()
    future = store.submit_put("later", bytes(5000))
    future.add_done_callback(lambda _: (close(), told.set()))
    assert told.wait(60)
    assert future.result() is True
    store.close()
    with blockkv.open(path) as again:
        assert len(again) == 6


def test_a_nested_tensor_is_refused_by_name(tmp_path: Any) -> None:
    blockkv.format(tmp_path / "store", size="32MiB")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with blockkv.open(tmp_path / "store") as store, pytest.raises(blockkv.InvalidArgument, match="nested"):
        store.put("k", nested)


NO_NUMBERS = ["x", "1", [], float("nan"), None, True]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_options_that_are_no_numbers_are_named_with_what_was_given(
    device: SimulatedDevice, store: blockkv.Store, image_dir: Path, value: Any
) -> None:
    shown = re.escape(repr(value))
    for name in ("max_store_bytes", "commit_interval_ms", "discard_bytes_per_s"):
        if value is not None or name != "commit_interval_ms":
            with pytest.raises(blockkv.InvalidArgument, match=f"{name} is {shown}"):
                blockkv.open(device, **{name: value})
    with pytest.raises(blockkv.InvalidArgument, match=f"a scrub of {shown} bytes"):
        store.scrub(value)
    if value is not None:
        for call in (lambda **late: store.put("k", b"1", **late), lambda **late: store.get("k", **late)):
            with pytest.raises(blockkv.InvalidArgument, match=f"deadline_s is {shown}"):
                call(deadline_s=value)
    if value is not True:  # which is 1
        image = image_dir / "image"
        blockkv.format(image, size="16MiB", force=True)
        with pytest.raises(blockkv.InvalidArgument, match=f"depth is {shown}"):
            blockkv.open(image, depth=value)


@pytest.mark.parametrize("items", [None, 3])
def test_what_is_no_list_is_named(store: blockkv.Store, items: Any) -> None:
    for call, what in (
        (store.get_many, "keys"),
        (store.lookup, "keys"),
        (store.put_many, r"\(key, tensors\) pairs"),
        (lambda outs: store.get_many(["k"], outs), "outputs"),
    ):
        if items is not None or what != "outputs":
            with pytest.raises(blockkv.InvalidArgument, match=f"{items} is no list of {what}"):
                call(items)


def test_python_objects_are_refused(store: blockkv.Store) -> None:
    with pytest.raises(blockkv.InvalidArgument, match="Python objects"):
        store.put("k", np.array([{}, None], dtype=object))  # type: ignore[arg-type]


def test_only_the_beginning_of_a_call_that_turns_out_long_is_on_its_thread(
    store: blockkv.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = store._state.device
    submit, seen = device.submit, []

    def watch(batch: Batch) -> None:
        seen.append(batch.on_caller)
        submit(batch)

    monkeypatch.setattr(device, "submit", watch)
    small = [(f"small {number}", b"x") for number in range(32)]
    large = [(f"large {number}", bytes([number]) * (3 << 20)) for number in range(4)]
    store.put_many(small + large)
    assert seen[0]
    assert not seen[-1]
    seen.clear()
    assert store.get_many(["small 1", "large 1"])[1] is not None
    assert seen == [True]


def test_info_says_when_memory_is_reached_directly(store: blockkv.Store) -> None:
    info = store.info()
    assert f"multiple of {info['limits']['memory_alignment_bytes']} bytes" in info["memory"]
