"""Test doubles and generators for code that stores through blockkv.

    from blockkv.testing import FaultPlan, SimulatedDevice, crash_clone

    device = SimulatedDevice(16 << 20, plan=FaultPlan.fail(operation=40))
    ...                                              # run a store on it
    after = crash_clone(device, random.Random(7))    # one state a power cut, now, could leave behind

`SimulatedDevice` is a `blockkv.device.base.Device`: a store runs on it unchanged. The faults it models
are described in `blockkv.device.simulated`. `histories()` needs the `hypothesis` package.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockkv.device.simulated import (
    Crash,
    Fault,
    FaultKind,
    FaultPlan,
    Operation,
    OperationKind,
    SimulatedDevice,
    mixtures,
)

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "Crash",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "Operation",
    "OperationKind",
    "SimulatedDevice",
    "Step",
    "crash_clone",
    "histories",
    "mixtures",
    "payload",
]


def crash_clone(
    device: SimulatedDevice,
    rng: random.Random,
    crash: Crash = Crash.POWER_CUT,
    *,
    garbage: float = 0.0,
    plan: FaultPlan | None = None,
) -> SimulatedDevice:
    """A device holding one state that `crash`, right now, could leave; `device` keeps running.

    Call it as often as wanted: each call draws another state. See `SimulatedDevice.crash_clone`.
    """
    return device.crash_clone(rng, crash, garbage=garbage, plan=plan)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a history: `verb` is put, get, delete, checkpoint, flush, reopen, power_cut or kill."""

    verb: str
    key: str = ""
    payload_bytes: int = 0
    durable: bool = False


def payload(key: str, version: int, length_bytes: int) -> bytes:
    """Content fixed by key, version and length, and like no other: wrong bytes never pass for right ones."""
    return random.Random(f"{key}/{version}/{length_bytes}").randbytes(length_bytes)  # noqa: S311  not a secret


def histories(
    *,
    key_count: int = 6,
    max_payload_bytes: int = 3 * 131072,
    max_steps: int = 40,
    crashes: bool = True,
) -> SearchStrategy[list[Step]]:
    """A hypothesis strategy: lists of `Step`, from one piece to several runs per chunk.

    Sizes crowd around unit and run boundaries, where off-by-one errors live.
    """
    from hypothesis import strategies

    edges = [
        size
        for size in (1, 511, 4095, 4096, 4097, 65536, 131071, 131072, 131073, 262144, 300000)
        if size <= max_payload_bytes
    ]
    keys = strategies.sampled_from([f"key-{number}" for number in range(key_count)])
    sizes = strategies.one_of(strategies.sampled_from(edges), strategies.integers(1, max_payload_bytes))
    put = strategies.builds(
        Step, verb=strategies.just("put"), key=keys, payload_bytes=sizes, durable=strategies.booleans()
    )
    keyed = strategies.builds(Step, verb=strategies.sampled_from(["get", "delete"]), key=keys)
    verbs = ["checkpoint", "flush", "reopen", *(["power_cut", "kill"] if crashes else [])]
    other = strategies.builds(Step, verb=strategies.sampled_from(verbs))
    return strategies.lists(strategies.one_of(put, put, keyed, other), max_size=max_steps)
