"""The simulated device against a model of the fault model: random histories, every crash explained.

The model is independent: it keeps, per 512-byte sector, the set of contents a power cut may leave.
"""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockkv.device.base import Batch, Direction, Priority
from blockkv.testing import Crash, SimulatedDevice, Step, crash_clone, histories, payload

SECTOR = 512
UNITS = 8


def run(seed: int, operations: int) -> None:
    rng = random.Random(seed)
    device = SimulatedDevice(UNITS * 4096, deferred=True, seed=seed, discard_granularity_bytes=0)
    current = [bytes(SECTOR)] * (UNITS * 8)
    possible = [{bytes(SECTOR)} for _ in range(UNITS * 8)]
    in_flight: list[tuple[Batch, int, bytes]] = []
    for step in range(operations):
        verb = rng.choice(("submit", "submit", "wait", "flush", "crash", "kill"))
        if verb == "submit":
            busy = {at + i for _, at, data in in_flight for i in range(len(data) // SECTOR)}
            first, count = rng.randrange(UNITS), rng.randrange(1, 3)
            data = random.Random(seed * 1000 + step).randbytes(4096 * min(count, UNITS - first))
            sectors = range(first * 8, first * 8 + len(data) // SECTOR)
            if busy & set(sectors):
                continue
            source = array("B", data)
            batch = Batch(Direction.WRITE, Priority.STORE)
            batch.keepalive.append(source)
            batch.add(len(data), [(first * 4096, len(data))], [(source.buffer_info()[0], len(data))])
            device.submit(batch)
            in_flight.append((batch, first * 8, data))
            for i, sector in enumerate(sectors):
                possible[sector].add(data[i * SECTOR : (i + 1) * SECTOR])
        elif verb == "wait" and in_flight:
            batch, at, data = in_flight.pop(rng.randrange(len(in_flight)))
            device.wait(batch)
            for i in range(len(data) // SECTOR):
                current[at + i] = data[i * SECTOR : (i + 1) * SECTOR]
        elif verb == "flush":
            device.flush()
            possible = [{content} for content in current]
            for _, at, data in in_flight:
                for i in range(len(data) // SECTOR):
                    possible[at + i].add(data[i * SECTOR : (i + 1) * SECTOR])
        elif verb == "crash":
            image = device.crash_clone(rng).peek(0, UNITS * 4096)
            for sector, allowed in enumerate(possible):
                assert image[sector * SECTOR : (sector + 1) * SECTOR] in allowed, (seed, step, sector)
        elif verb == "kill":
            landing = {
                at + i: data[i * SECTOR : (i + 1) * SECTOR]
                for _, at, data in in_flight
                for i in range(len(data) // SECTOR)
            }
            killed = device.crash_clone(rng, Crash.PROCESS_KILL)
            image = killed.peek(0, UNITS * 4096)
            for sector in range(UNITS * 8):
                content = image[sector * SECTOR : (sector + 1) * SECTOR]
                assert content in (current[sector], landing.get(sector)), (seed, step, sector)
            later = killed.crash_clone(rng).peek(0, UNITS * 4096)
            for sector, allowed in enumerate(possible):
                assert later[sector * SECTOR : (sector + 1) * SECTOR] in allowed, (seed, step, sector)
        for sector in range(UNITS * 8):
            assert device.peek(sector * SECTOR, SECTOR) == current[sector]


@pytest.mark.parametrize("seed", range(60))
def test_every_crash_is_one_the_fault_model_allows(seed: int) -> None:
    run(seed, 60)


def test_crash_clone_reaches_every_corner() -> None:
    """Two pages of two sectors' worth of tearing: all 16 combinations turn up."""
    device = SimulatedDevice(2 * 4096, tear_bytes=2048)
    device.write(0, b"\1" * 8192)
    rng = random.Random(0)
    seen = {bytes(crash_clone(device, rng).peek(at, 1)[0] for at in range(0, 8192, 2048)) for _ in range(600)}
    assert len(seen) == 16


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(max_steps=12), st.integers(0, 2**32))
def test_generated_histories_are_well_formed(steps: list[Step], seed: int) -> None:
    for step in steps:
        if step.verb == "put":
            assert 1 <= step.payload_bytes <= 3 * 131072
            assert step.key
        else:
            assert step.verb in {"get", "delete", "checkpoint", "flush", "reopen", "power_cut", "kill"}
    assert payload("a", seed, 64) == payload("a", seed, 64) != payload("b", seed, 64)
