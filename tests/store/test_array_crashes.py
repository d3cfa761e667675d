"""Arrays that crash while they lose members and take them back: a slice of `tools/array_explorer.py`."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "array_explorer.py"
SEED = 20


@pytest.fixture
def explorer() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("array_explorer", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["array_explorer"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    logging.disable(logging.CRITICAL)
    yield module
    logging.disable(logging.NOTSET)


def test_a_slice_of_random_histories(explorer: ModuleType) -> None:
    tally = explorer.Tally()
    assert explorer.explore(SEED, tally, 0, 8, float("inf")) is None
    assert tally.states > 100
    assert tally.losses
    assert tally.degraded_opens > 50


def test_a_crash_before_every_operation_of_an_open(explorer: ModuleType) -> None:
    """Without a member, and with it again: whatever a crash leaves is opened once more, and exact."""
    history = explorer.History(0, SEED, explorer.Tally())
    history.devices = history.devices[:1]
    history = next(
        one
        for one in (explorer.History(number, SEED, explorer.Tally()) for number in range(20))
        if len(one.devices) == 3
    )
    everybody = [0, 1, 2]
    store, _ = history.open(history.devices, history.past, everybody)
    for key in explorer.KEYS:
        history.put(store, [key], durable=True)
    store.close()
    for there in ([0, 2], everybody):
        history.devices = explorer.crash(history.devices, history.rng)
        before, past = history.devices, explorer.copied(history.past)
        at = 0
        while True:
            devices = [device.clone() for device in before]
            left: list[object] = []
            count = 0

            def tick(kind: object, devices: list[object] = devices, left: list[object] = left) -> None:
                nonlocal count
                if count == at:  # noqa: B023  the loop waits
                    left.extend(explorer.crash(devices, history.rng))
                count += 1

            for device in devices:
                device.before_operation = tick
            held = explorer.copied(past)
            history.open(devices, held, there, told=False)
            if not left:
                break
            for device in left:
                device.before_operation = None  # type: ignore[attr-defined]
            again, _ = history.open(left, held, everybody, told=False)
            history.look(again, held, everybody)
            at += 1
        assert at > 20
        store, _ = history.open(history.devices, history.past, there)
        history.look(store, history.past, there)
        history.known(store, history.past)
        if there != everybody:
            for key in explorer.KEYS:  # those that went with member 1 get other bytes
                history.put(store, [key], durable=True)
        store.close()


@pytest.mark.parametrize(
    "mutant",
    [
        "degraded open keeps the term",
        "outdated members count",
        "emptied members belong to the next term",
        "outdated members are emptied after the term",
        "a loss begins no term",
    ],
)
def test_a_broken_protocol_is_noticed(explorer: ModuleType, mutant: str) -> None:
    with explorer.MUTANTS[mutant]():
        assert explorer.explore(SEED, explorer.Tally(), 0, 30, float("inf")) is not None
