"""Test doubles and generators for code that stores through blockkv.

    from blockkv.testing import FaultPlan, SimulatedDevice, crash_clone

    device = SimulatedDevice(16 << 20, plan=FaultPlan.fail(operation=40))
    ...                                              # run a store on it
    after = crash_clone(device, random.Random(7))    # one state a power cut, now, could leave behind

`SimulatedDevice` is a `blockkv.device.base.Device`: a store runs on it unchanged. The faults it models
are described in `blockkv.device.simulated`. `histories()` needs the `hypothesis` package. `RecordingDevice`
tells what a store writes, flushes and discards on a real device.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blockkv.device.base import Batch, Device, Direction
from blockkv.device.engine import DEFAULT_DEPTH
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
    "RecordingDevice",
    "SimulatedDevice",
    "StallingDevice",
    "Step",
    "crash_clone",
    "histories",
    "mixtures",
    "payload",
]


class StallingDevice(SimulatedDevice):
    """A simulated device that takes nothing while `gate` is clear: for what must not wait for a device.

        device = StallingDevice()
        ...                          # a store on it
        device.gate.clear()          # from now on it hangs
        device.gate.set()            # it goes on where it was

    Requests are carried out on a thread of its own, so that whoever submits one is not held up.
    """

    def __init__(self, size_bytes: int = 64 << 20) -> None:
        super().__init__(size_bytes, threads=True)
        self.gate = threading.Event()
        self.gate.set()
        self.before_operation = lambda kind: self._pass_the_gate()

    def _pass_the_gate(self) -> None:
        self.gate.wait()


class RecordingDevice(Device):
    """A real device, or any other `Device`, that tells of every write, flush and discard when it is asked
    for.

    `record` gets the kind, the offset and the length in bytes (0 and 0 for a flush), one call for each extent
    of a write, one call at a time, on whatever thread asks. It must not use the store. With `keep_discards`
    they are recorded and not passed on: what a store would have discarded, on a device that stays as it is.
    With `placements` it gets the `Placement` of a write, too.

        blockkv.format(path)
        with blockkv.open(RecordingDevice(path, record), discard=True) as store: ...

    Opens a path as `blockkv.open` does, with its defaults and its exceptions.
    """

    def __init__(
        self,
        device: Device | str | os.PathLike[str],
        record: Callable[..., None],
        *,
        keep_discards: bool = False,
        placements: bool = False,
    ) -> None:
        if not isinstance(device, Device):
            from blockkv.store.store import open_device

            device = open_device(device, read_only=False, engine="auto", depth=DEFAULT_DEPTH)
        self._device = device
        self._record = record
        self._keep_discards = keep_discards
        self._placements = placements
        self._lock = threading.Lock()
        self.path = device.path
        self.limits = device.limits
        if keep_discards and not device.limits.discard_granularity_bytes:
            # they are asked for all the same, although a file has none
            self.limits = replace(device.limits, discard_granularity_bytes=device.limits.lba_bytes)

    @property
    def engine_name(self) -> str:
        return self._device.engine_name

    @property
    def engine_reason(self) -> str:
        return self._device.engine_reason

    def placement(self) -> dict[str, Any]:
        return self._device.placement()

    def submit(self, batch: Batch) -> None:
        if batch.direction is Direction.WRITE:
            placement = (batch.placement,) if self._placements else ()
            with self._lock:
                for index in range(0, len(batch.extents), 2):
                    self._record(OperationKind.WRITE, *batch.extents[index : index + 2], *placement)
        self._device.submit(batch)

    def wait(self, batch: Batch) -> None:
        self._device.wait(batch)

    def flush(self) -> None:
        with self._lock:
            self._record(OperationKind.FLUSH, 0, 0)
        self._device.flush()

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        with self._lock:
            self._record(OperationKind.DISCARD, offset_bytes, length_bytes)
        if not self._keep_discards:
            self._device.discard(offset_bytes, length_bytes)

    def register(self, address: int, length_bytes: int) -> int:
        return self._device.register(address, length_bytes)

    def unregister(self, handle: int) -> None:
        self._device.unregister(handle)

    def open_reader(self) -> int:
        return self._device.open_reader()

    def counters(self) -> dict[str, int]:
        return self._device.counters()

    def close(self) -> None:
        self._device.close()


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
