"""From a stream through a copier: every piece exact, nothing given back too early, depth that adapts."""

from __future__ import annotations

import errno
import threading
from collections import deque
from typing import Any

import pytest
import torch

import blockkv
from blockkv import KVLayout
from blockkv.gpu import Copier, CudaCopier, PacedCopier, Pipeline, Ticket
from blockkv.testing import FaultPlan, SimulatedDevice

LAYERS = 6
LAYOUT = KVLayout.of("layers kv tokens heads dim", "float16", layers=LAYERS, kv=2, tokens=64, heads=8, dim=64)
LAYER_BYTES = LAYOUT.payload_bytes // LAYERS


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice(64 << 20)
    blockkv.format(device, average_chunk="64KiB")
    return device


def fill(store: blockkv.Store, count: int = 3) -> dict[str, torch.Tensor]:
    whole = {f"k{number}": torch.randn(LAYERS, 2, 64, 8, 64).half() for number in range(count)}
    store.put_many(whole, durable=True)
    return whole


COPIERS = [
    pytest.param(lambda: PacedCopier(50e6), id="copying is slow"),
    pytest.param(lambda: PacedCopier(1e12), id="copying is fast"),
]
if (
    torch.cuda.is_available()
):  # a case that exists only there, rather than one skipped elsewhere: CI skips nothing
    COPIERS.append(pytest.param(CudaCopier, id="cuda"))


@pytest.mark.parametrize("make", COPIERS)
@pytest.mark.parametrize("in_hand", [1, 3])
def test_every_piece_arrives_exactly(device: SimulatedDevice, make: Any, in_hand: int) -> None:
    with blockkv.open(device, commit_interval_ms=None) as store:
        whole = fill(store)
        bound = 4 * 3 * LAYER_BYTES
        stream = store.stream(whole, layout=LAYOUT, lookahead_bytes=bound, in_hand=in_hand)
        with Pipeline(stream, make(), ahead=2) as pipeline:
            kept = list(pipeline)
        assert [layer for layer, _ in kept] == list(range(LAYERS))
        for layer, tensors in kept:
            for tensor, there in zip(tensors, whole.values(), strict=True):
                assert torch.equal(tensor.cpu(), there[layer : layer + 1])
        assert pipeline.valid_keys == 3
        assert stream.peak_bytes <= bound
        assert not store._state.any_leased()


def test_pieces_go_where_the_caller_says(device: SimulatedDevice) -> None:
    pool = torch.zeros(LAYERS, 5, 2, 64, 8, 64).half()

    def into(layer: int, position: int) -> torch.Tensor:
        return pool[layer, position + 1 : position + 2]

    with blockkv.open(device, commit_interval_ms=None) as store:
        whole = fill(store)
        with Pipeline(store.stream(whole, layout=LAYOUT, in_hand=2), PacedCopier(1e12), into) as pipeline:
            assert len([*pipeline]) == LAYERS
    for position, there in enumerate(whole.values(), 1):
        assert torch.equal(pool[:, position], there)


def test_several_arrays(device: SimulatedDevice) -> None:
    values = KVLayout.of("layers heads dim", "int8", "values", layers=3, heads=2, dim=50_000)
    scales = KVLayout.of("layers heads", "float32", "scales", layers=3, heads=2)
    parts = {"values": torch.randint(-9, 9, (3, 2, 50_000)).to(torch.int8), "scales": torch.randn(3, 2)}
    with blockkv.open(device, commit_interval_ms=None) as store:
        store.put("k", parts)
        stream = store.stream(["k"], layout=values + scales, in_hand=2)
        for layer, (found,) in Pipeline(stream, PacedCopier(1e12)):
            assert torch.equal(found["values"], parts["values"][layer : layer + 1])
            assert torch.equal(found["scales"], parts["scales"][layer : layer + 1])
    assert layer == 2


def test_damage_ends_the_prefix(device: SimulatedDevice) -> None:
    with blockkv.open(device, commit_interval_ms=None) as store:
        whole = fill(store)
        start = store.info()["data_offset_bytes"] + store.entry("k1").extents[0][0] * 4096
        device.flip_bit(start + 3 * LAYER_BYTES, 0)
        pipeline = Pipeline(store.stream(whole, layout=LAYOUT, in_hand=2), PacedCopier(1e12))
        counts = [len(tensors) for _, tensors in pipeline]
        assert len(counts) == LAYERS
        assert counts[-1] == pipeline.valid_keys == 1


def test_a_lost_device_raises_nothing(device: SimulatedDevice) -> None:
    with blockkv.open(device, commit_interval_ms=None) as store:
        whole = fill(store)
        device.set_plan(FaultPlan.fail(device.operation_count, errno.ENODEV))
        pipeline = Pipeline(store.stream(whole, layout=LAYOUT), PacedCopier(1e12))
        assert [*pipeline] == []
        assert pipeline.valid_keys == 0
        assert isinstance(pipeline.problem, blockkv.DeviceLost)


def test_it_can_be_left_half_way(device: SimulatedDevice) -> None:
    with blockkv.open(device, commit_interval_ms=None) as store:
        whole = fill(store)
        with Pipeline(store.stream(whole, layout=LAYOUT, in_hand=2), PacedCopier(100e6)) as pipeline:
            next(pipeline)
        assert [*pipeline] == []
        pipeline.close()
        assert not store._state.any_leased()


def test_a_copy_that_fails_is_told(device: SimulatedDevice) -> None:
    with blockkv.open(device, commit_interval_ms=None) as store:
        whole = fill(store)
        stream = store.stream(whole, layout=LAYOUT, in_hand=2)
        pipeline = Pipeline(stream, PacedCopier(1e12), lambda layer, position: torch.zeros(7))
        with pytest.raises(RuntimeError):
            list(pipeline)
        assert not store._state.any_leased()


class Copies(Copier):
    """Copies that are over at once, or only when they are waited for."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.over: list[threading.Event] = []

    def prepare(self, memory: torch.Tensor) -> None: ...

    def forget(self, memory: torch.Tensor) -> None: ...

    def copy(self, source: torch.Tensor, target: torch.Tensor | None) -> tuple[torch.Tensor, Ticket]:
        event = threading.Event()
        self.over.append(event)
        if self.at_once:
            event.set()
        return source.clone(), Waited(event)


class Waited(Ticket):
    """A copy that is over when it is waited for."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def is_over(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._event.set()

    def before_use(self) -> None: ...


class Script:
    """A stream whose pieces are ready when the script says so."""

    def __init__(self, ready: list[bool], copier: Copies, in_hand_limit: int) -> None:
        self.ready = deque(ready)
        self.copier = copier
        self.in_hand_limit = in_hand_limit
        self.in_hand = 0
        self.ahead_limit = 16
        self.limits: list[int] = []
        """`ahead_limit` at each piece."""
        self.problem = None
        self.valid_keys = 1
        self.memory = None
        self.closed = False

    @property
    def is_ready(self) -> bool:
        return bool(self.ready and self.ready[0])

    def take(self) -> Hand | None:
        if not self.ready:
            return None
        self.limits.append(self.ahead_limit)
        self.ready.popleft()
        self.in_hand += 1
        assert self.in_hand <= self.in_hand_limit
        return Hand(len(self.limits) - 1, self)

    def close(self) -> None:
        self.closed = True


class Hand:
    """A piece of a script."""

    def __init__(self, number: int, script: Script) -> None:
        self.number = number
        self.tensors = [torch.full((4,), float(number))]
        self._script = script

    def give_back(self) -> None:
        assert self._script.copier.over[self.number].is_set(), "given back while it was being copied"
        self._script.in_hand -= 1


def test_it_looks_further_ahead_while_reading_takes_long() -> None:
    copier = Copies(at_once=True)
    script = Script([False] * 6, copier, 3)
    pipeline = Pipeline(script, copier)
    assert [number for number, _ in pipeline] == list(range(6))
    assert script.limits == [4, 8, 16, 16, 16, 16], "twice as far each time, within the stream's own bound"
    assert pipeline.bottleneck == "read"
    assert script.closed
    assert script.in_hand == 0


def test_it_looks_less_far_ahead_while_copying_takes_long() -> None:
    copier = Copies(at_once=False)
    script = Script([False] + [True] * 7, copier, 2)
    pipeline = Pipeline(script, copier)
    assert [number for number, _ in pipeline] == list(range(8))
    assert script.limits == [4, 4, 3, 2, 2, 2, 2, 2]
    assert pipeline.bottleneck == "copy"
    assert script.in_hand == 0


def test_copiers_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(blockkv.InvalidArgument, match="choose"):
        CudaCopier()
    with pytest.raises(blockkv.InvalidArgument, match="bytes_per_s"):
        PacedCopier(0)
