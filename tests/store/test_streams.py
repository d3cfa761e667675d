"""Streams: every piece in order and exact, bounded look-ahead, and a prefix that ends where damage is."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layouts_drawn import layouts, parts, sliced

import blockkv
from blockkv import KVLayout, Part
from blockkv.testing import Fault, FaultKind, FaultPlan, OperationKind, SimulatedDevice

LAYERS = 6
LAYOUT = KVLayout.of("layers kv tokens heads dim", "float16", layers=LAYERS, kv=2, tokens=64, heads=8, dim=64)
LAYER_BYTES = LAYOUT.payload_bytes // LAYERS
assert LAYER_BYTES == 128 << 10, "one leaf"
SMALL = KVLayout.of("layers kv tokens heads dim", "float16", layers=LAYERS, kv=2, tokens=8, heads=8, dim=64)
assert SMALL.payload_bytes // LAYERS == 16 << 10, "eight layers of it share a leaf"


def fill(store: blockkv.Store, count: int, layout: KVLayout = LAYOUT) -> dict[str, torch.Tensor]:
    (array,) = layout.arrays
    whole = {f"k{number}": torch.randn(array.shape).half() for number in range(count)}
    store.put_many(whole, durable=True)
    return whole


def place_of(store: blockkv.Store, key: str, offset_bytes: int) -> int:
    entry = store.entry(key)
    assert entry is not None
    assert len(entry.extents) == 1
    return int(store.info()["data_offset_bytes"]) + entry.extents[0][0] * 4096 + offset_bytes


@pytest.mark.parametrize("layout", [LAYOUT, SMALL], ids=["whole leaves", "shared leaves"])
def test_layers_come_in_order_and_exact(store: blockkv.Store, layout: KVLayout) -> None:
    whole = fill(store, 3, layout)
    bound = 2 * 3 * 128 << 10
    before = store.stats()["device_read_bytes"]
    with store.stream([*whole, "nothing", "k0"], layout=layout, lookahead_bytes=bound) as stream:
        assert stream.valid_keys == 3
        for expected, (layer, tensors) in enumerate(stream):
            assert layer == expected
            assert len(tensors) == 3
            for tensor, there in zip(tensors, whole.values(), strict=True):
                assert torch.equal(tensor, there[layer : layer + 1])
        assert expected == LAYERS - 1
    assert stream.valid_keys == 3
    assert stream.problem is None
    assert 0 < stream.peak_bytes <= bound
    assert store.stats()["device_read_bytes"] - before == 3 * layout.payload_bytes, "nothing is read twice"
    assert not store._state.any_leased()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(
    layout=layouts(4, 3000),
    part=parts(),
    order=st.permutations(["layers", "kv", "tokens", "heads"]).flatmap(
        lambda axes: st.integers(1, 3).map(lambda count: " ".join(axes[:count]))
    ),
    room=st.integers(0, 1 << 20),
)
def test_every_order_of_every_layout(layout: KVLayout, part: Part, order: str, room: int) -> None:
    assume(layout.payload_bytes <= 1 << 20)
    content = np.random.default_rng(0).integers(0, 256, layout.payload_bytes, dtype=np.uint8)
    axes = order.split()
    expected = {}
    for numbers in itertools.product(*map(layout.numbers, axes)):
        one = part
        for axis, number in zip(axes, numbers, strict=True):
            chosen = part.along(axis)
            if chosen is not None and number not in ((chosen,) if isinstance(chosen, int) else chosen):
                break
            one = one.narrowed(axis, number)
        else:
            if sliced(layout, one, content):
                expected[numbers if len(axes) > 1 else numbers[0]] = one
    assume(expected)
    device = SimulatedDevice(16 << 20)
    blockkv.format(device, average_chunk="64KiB")
    with blockkv.open(device, commit_interval_ms=None) as store:
        payloads = {"a": content, "b": content[::-1].copy()}
        store.put_many(payloads)
        bound = 4 * layout.payload_bytes + (1 << 18) + room
        stream = store.stream(payloads, order, layout=layout, part=part, lookahead_bytes=bound)
        for number, tensors in stream:
            for tensor, payload in zip(tensors, payloads.values(), strict=True):
                found = {layout.arrays[0].name: tensor} if len(layout.arrays) == 1 else tensor
                wanted = sliced(layout, expected[number], payload)
                assert list(found) == list(wanted)
                for name in found:
                    packed = torch.empty(found[name].shape, dtype=found[name].dtype).copy_(found[name])
                    assert bytes(packed.view(-1).view(torch.uint8).numpy()) == wanted[name].tobytes()
            assert number == next(iter(expected)), "in order"
            del expected[number]
        assert not expected, "all of them, each once"
        assert stream.peak_bytes <= bound
        assert not store._state.any_leased()


def test_pieces_go_into_memory_of_the_caller(store: blockkv.Store) -> None:
    whole = fill(store, 2)
    pools = [torch.zeros(5, 2, 64, 8, 64).half() for _ in range(LAYERS)]
    pages = [3, 1]
    stream = store.stream(
        whole,
        layout=LAYOUT,
        into=lambda layer, position: pools[layer][pages[position]].view(1, 2, 64, 8, 64),
        lookahead_bytes=4 * LAYER_BYTES,
    )
    for layer, tensors in stream:
        assert tensors[1].data_ptr() == pools[layer][1].data_ptr()
    for page, there in zip(pages, whole.values(), strict=True):
        assert torch.equal(torch.stack([pool[page] for pool in pools]), there)
    assert stream.peak_bytes <= 4 * LAYER_BYTES


def test_memory_that_does_not_fit_is_refused(store: blockkv.Store) -> None:
    whole = fill(store, 2)
    with pytest.raises(blockkv.LayoutMismatch):
        store.stream(whole, layout=LAYOUT, into=lambda layer, position: torch.zeros(3))
    assert not store._state.any_leased()


@pytest.mark.parametrize("lookahead_layers", [1, 3, 100])
def test_damage_ends_the_prefix(device: SimulatedDevice, open_on: Any, lookahead_layers: int) -> None:
    store = open_on(device)
    whole = fill(store, 4)
    device.flip_bit(place_of(store, "k2", 3 * LAYER_BYTES + 5), 1)
    stream = store.stream(whole, layout=LAYOUT, lookahead_bytes=lookahead_layers * 4 * LAYER_BYTES)
    counts = []
    for layer, tensors in stream:
        counts.append(len(tensors))
        for tensor, there in zip(tensors, whole.values(), strict=False):
            assert torch.equal(tensor, there[layer : layer + 1])
    assert len(counts) == LAYERS
    assert set(counts[3:]) == {2}, "from the damaged layer on only the chunks before it"
    assert counts == sorted(counts, reverse=True)
    assert stream.valid_keys == 2
    assert stream.problem is None
    assert store.lookup(whole) == 2, "it was dropped"
    assert store.stats()["chunks_dropped_damaged"] == 1
    assert not store._state.any_leased()


def test_damage_of_the_first_chunk_ends_the_stream(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    whole = fill(store, 2)
    device.flip_bit(place_of(store, "k0", 2 * LAYER_BYTES), 0)
    stream = store.stream(whole, layout=LAYOUT, lookahead_bytes=2 * LAYER_BYTES)
    layers = [layer for layer, _ in stream]
    assert layers in ([0], [0, 1]), "as soon as it is known"
    assert stream.valid_keys == 0


def test_a_lost_device_ends_the_stream_without_raising(device: SimulatedDevice, open_on: Any) -> None:
    import errno

    store = open_on(device)
    whole = fill(store, 2)
    stream = store.stream(whole, layout=LAYOUT, lookahead_bytes=2 * LAYER_BYTES)
    assert next(stream)[0] == 0
    broken = Fault(FaultKind.ERROR, on=OperationKind.READ, errno=errno.ENODEV, fire_count=None)
    device.set_plan(FaultPlan((broken,)))  # whatever the stream has asked for by now
    rest = [layer for layer, _ in stream]
    assert len(rest) < LAYERS - 1
    assert stream.valid_keys == 0
    assert isinstance(stream.problem, blockkv.DeviceLost)


def test_a_lost_member_ends_the_prefix_at_its_first_chunk() -> None:
    devices = [SimulatedDevice(32 << 20, path=f"device-{index}") for index in range(2)]
    blockkv.format(devices, average_chunk="64KiB")
    with blockkv.open(devices, commit_interval_ms=None) as store:
        whole = fill(store, 6)
        keys = sorted(whole, key=lambda key: store.entry(key).device)
        kept = sum(store.entry(key).device == "device-0" for key in keys)
        stream = store.stream(keys, layout=LAYOUT, lookahead_bytes=6 * LAYER_BYTES)
        assert len(next(stream)[1]) == 6
        devices[1].stop()
        counts = [len(tensors) for _, tensors in stream]
        assert len(counts) == LAYERS - 1
        assert counts[-1] == stream.valid_keys == kept
        assert stream.problem is None
        assert store.stats()["members_lost"] == 1


def test_chunks_of_a_stream_are_not_evicted(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    whole = fill(store, 2)
    stream = store.stream(whole, layout=LAYOUT, lookahead_bytes=2 * LAYER_BYTES)
    for number in range(150):
        store.put(f"other {number}", torch.zeros(512 << 10, dtype=torch.uint8))
    assert store.stats()["chunks_evicted"] > 0
    for layer, tensors in stream:
        assert all(
            torch.equal(tensor, there[layer : layer + 1])
            for tensor, there in zip(tensors, whole.values(), strict=True)
        )
    assert layer == LAYERS - 1


def test_several_pieces_in_hand_stay_until_they_are_given_back(store: blockkv.Store) -> None:
    whole = fill(store, 2)
    bound = 2 * 2 * LAYER_BYTES
    with store.stream(whole, layout=LAYOUT, lookahead_bytes=bound, in_hand=2) as stream:
        held = [stream.take(), stream.take()]
        with pytest.raises(blockkv.InvalidArgument, match="give one back"):
            stream.take()
        held[0].give_back()
        held[0].give_back()
        seen = [held[1]]
        while (taken := stream.take()) is not None:
            for piece in (seen[-1], taken):
                for tensor, there in zip(piece.tensors, whole.values(), strict=True):
                    assert torch.equal(tensor, there[piece.number : piece.number + 1])
            seen[-1].give_back()
            seen.append(taken)
        assert [piece.number for piece in seen] == list(range(1, LAYERS))
        assert stream.peak_bytes <= bound
        assert stream.memory_bytes == bound + 2 * 2 * LAYER_BYTES
        assert store._state.any_leased(), "until it is closed"
    assert not store._state.any_leased()
    with pytest.raises(blockkv.InvalidArgument, match="in_hand"):
        store.stream(whole, layout=LAYOUT, in_hand=0)


@pytest.mark.parametrize("how", ["close", "forgotten", "exhausted"])
def test_leases_end_with_the_stream(store: blockkv.Store, how: str) -> None:
    whole = fill(store, 2)
    stream = store.stream(whole, layout=LAYOUT, lookahead_bytes=2 * LAYER_BYTES, preload=True)
    next(stream)
    stream.promote()
    assert store._state.any_leased()
    if how == "close":
        stream.close()
        stream.close()
        assert [*stream] == []
    elif how == "exhausted":
        assert len([*stream]) == LAYERS - 1
    else:
        del stream
        with store._state.changed:
            # A thread may be asking for the next piece just now; with that it lets go.
            assert store._state.changed.wait_for(lambda: not store._state.any_leased(), 30)
    assert not store._state.any_leased()


def test_a_stream_that_the_collector_finds_holds_nobody_up(store: blockkv.Store) -> None:
    class Kept(list[torch.Tensor]):
        """Memory of the pool, with the collector running when somebody looks, under the lock of the pool."""

        def __iter__(self) -> Any:
            gc.collect()
            return super().__iter__()

    whole = fill(store, 2)
    ring: list[Any] = [store.stream(whole, layout=LAYOUT, lookahead_bytes=2 * LAYER_BYTES)]
    next(ring[0])
    while ring[0]._feeding:
        time.sleep(0.01)
    ring.append(ring)
    store._stream_pool._kept = Kept()
    ring = []
    assert len([*store.stream(whole, layout=LAYOUT)]) == LAYERS
    with store._state.changed:
        assert store._state.changed.wait_for(lambda: not store._state.any_leased(), 30)


def test_a_growing_chunk_ends_the_prefix_and_goes_on_growing(store: blockkv.Store) -> None:
    whole = fill(store, 1)
    (layout,) = LAYOUT.arrays
    with store.reserve("grown", 4 * LAYOUT.payload_bytes) as chunk:
        chunk.append(torch.zeros(layout.shape).half(), durable=True)
        stream = store.stream([*whole, "grown"], layout=LAYOUT, lookahead_bytes=2 * LAYER_BYTES)
        assert stream.valid_keys == 1
        next(stream)
        chunk.append(torch.zeros(layout.shape).half(), durable=True)
        chunk.seal()
        assert len([*stream]) == LAYERS - 1


@pytest.mark.parametrize("what", ["close the stream", "close the store", "exit"])
def test_what_into_must_not_do_ends_its_stream_alone(store: blockkv.Store, what: str) -> None:
    whole = fill(store, 2)
    streams: list[Any] = []

    def into(layer: int, position: int) -> torch.Tensor:
        if layer == 2 and what == "exit":
            raise SystemExit
        if layer == 2:
            (streams[0] if what == "close the stream" else store).close()
        return torch.empty(1, 2, 64, 8, 64).half()

    bound = 2 * LAYER_BYTES
    streams.append(store.stream(whole, layout=LAYOUT, into=into, lookahead_bytes=bound))
    assert len([*streams[0]]) <= 2
    assert "SystemExit" in str(streams[0].problem) or isinstance(streams[0].problem, blockkv.InvalidArgument)
    assert len([*store.stream(whole, layout=LAYOUT)]) == LAYERS


def test_a_closed_store_ends_the_stream(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    whole = fill(store, 2)
    stream = store.stream(whole, layout=LAYOUT, lookahead_bytes=2 * LAYER_BYTES)
    next(stream)
    store.close()
    assert len([*stream]) <= 2
    assert isinstance(stream.problem, blockkv.StoreClosed)
    with pytest.raises(blockkv.StoreClosed):
        store.stream(whole, layout=LAYOUT)


def test_what_cannot_be_streamed_is_refused(store: blockkv.Store) -> None:
    whole = fill(store, 2)
    orders: list[Any] = ["", "dim", "layers layers", "layers dim", ["layers"]]
    for order in orders:
        with pytest.raises(blockkv.InvalidArgument, match="order="):
            store.stream(whole, order, layout=LAYOUT)
    layout: Any = "layers kv"
    with pytest.raises(blockkv.InvalidArgument, match="give a KVLayout"):
        store.stream(whole, layout=layout)
    with pytest.raises(blockkv.InvalidArgument, match=f"takes {2 * LAYER_BYTES}"):
        store.stream(whole, layout=LAYOUT, lookahead_bytes=2 * LAYER_BYTES - 1)
    with pytest.raises(blockkv.InvalidArgument, match="nothing along"):
        store.stream(whole, layout=LAYOUT, part=Part(layers=LAYERS))
    with pytest.raises(blockkv.LayoutMismatch):
        store.stream(whole, layout=SMALL)
    with pytest.raises(blockkv.InvalidArgument, match="one key"):
        store.stream("k0", layout=LAYOUT)
    assert [*store.stream(["nothing"], layout=LAYOUT)] == []
    assert [*store.stream([], layout=LAYOUT)] == []
    assert not store._state.any_leased()


def test_a_real_device(block_targets: Any) -> None:
    target = block_targets(64 << 20)
    blockkv.format(target, average_chunk="64KiB")
    with blockkv.open(target) as store:
        whole = fill(store, 8)
        bound = 3 * 8 * LAYER_BYTES
        stream = store.stream(whole, "layers kv", layout=LAYOUT, lookahead_bytes=bound)
        for (layer, kv), tensors in stream:
            for tensor, there in zip(tensors, whole.values(), strict=True):
                assert torch.equal(tensor, there[layer : layer + 1, kv : kv + 1])
        assert (layer, kv) == (LAYERS - 1, 1)
        assert stream.peak_bytes <= bound
