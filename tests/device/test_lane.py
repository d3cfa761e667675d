"""Batches that are waited for at once are carried out by the thread that waits."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from blockkv._native import lib
from engine_tools import MIB, Memory, batch_of, engine_on, run
from engine_workload import Workload

from blockkv.device.base import UNIT_BYTES, Batch, Direction
from blockkv.device.engine import NativeDevice


def lone(direction: Direction, memory: Memory, size_bytes: int, leaf_bytes: int = 0, at: int = 0) -> Batch:
    batch = batch_of(
        direction, [(size_bytes, [(0, size_bytes)], [(memory.at(at), size_bytes)])], leaf_bytes=leaf_bytes
    )
    batch.on_caller = True
    return batch


def image_of(directory: Path, size_bytes: int) -> Path:
    path = directory / "lane.img"
    path.write_bytes(bytes(size_bytes))
    return path


def threads_of(device: NativeDevice, batch: Batch) -> int:
    """How many other threads of the engine came to run while the batch was carried out."""

    def threads() -> dict[str, tuple[str, int]]:
        """Of each its state, and how often it went to sleep."""
        found = {}
        for task in Path("/proc/self/task").iterdir():
            if not (task / "comm").read_text().startswith("blockkv-"):
                continue
            lines = (line.split() for line in (task / "status").read_text().splitlines())
            status = {words[0]: words[1] for words in lines if len(words) > 1}
            found[task.name] = status["State:"], int(status["voluntary_ctxt_switches:"])
        return found

    before: dict[str, tuple[str, int]] = {}
    # Some are on their way to sleep, and one that waits for a processor looks the same for long.
    while (now := threads()) != before or any(state != "S" for state, _ in now.values()):
        before = now
        time.sleep(0.2)
    assert run(device, batch) == [0]
    after = threads()
    return sum(after[name] != found for name, found in before.items() if name in after)


@pytest.mark.parametrize("lba_bytes", [512, 4096])
@pytest.mark.parametrize("offset", [0, 3], ids=["direct", "staged"])
def test_no_other_thread_takes_part(loop_device, lba_bytes: int, offset: int) -> None:
    memory = Memory(2 * MIB)
    with engine_on(loop_device(16 * MIB, lba_bytes)) as device:
        for direction in (Direction.WRITE, Direction.READ):
            batch = lone(direction, memory, MIB, leaf_bytes=131072, at=offset)
            assert threads_of(device, batch) == 0
            through_the_reactor = lone(direction, memory, MIB, leaf_bytes=131072, at=offset)
            through_the_reactor.on_caller = False
            assert threads_of(device, through_the_reactor) > 0
            assert batch.leaf_values == through_the_reactor.leaf_values


def test_random_batches_on_the_lane_and_beside_others(loop_device) -> None:
    with engine_on(loop_device(64 * MIB, 512), depth=8, staging_bytes=2 * MIB) as device:
        alone = Workload(device, seed=1)
        for _ in range(40):
            alone.step()
        workers = [Workload(device, seed, base=16 * MIB * seed) for seed in (1, 2, 3)]

        def work(workload: Workload) -> None:
            for _ in range(40):
                workload.step()

        threads = [threading.Thread(target=work, args=(one,)) for one in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_a_batch_beside_others_goes_through_the_reactor(image_dir: Path) -> None:
    memory = Memory(16 * MIB)
    with engine_on(image_of(image_dir, 16 * MIB)) as device:
        other = batch_of(Direction.READ, [(8 * MIB, [(0, 8 * MIB)], [(memory.at(0), 8 * MIB)])])
        done = threading.Event()
        other.on_done = lambda _: done.set()
        device.submit(other)
        assert run(device, lone(Direction.READ, memory, UNIT_BYTES, at=8 * MIB)) == [0]
        assert done.wait(60)


def test_a_thread_has_several_batches_on_the_lane(loop_device) -> None:
    """Direct ones are with the device at once, staged ones from their wait on; in any order of the waits."""
    memory = Memory(24 * MIB)
    memory.fill(random.Random(3).randbytes(12 * MIB))
    with engine_on(loop_device(32 * MIB, 512), staging_bytes=2 * MIB) as device:
        for offsets in ((0, 0, 0), (0, 3, 0), (3, 3, 3)):
            for order in itertools.permutations(range(3)):
                for direction, start in ((Direction.WRITE, 0), (Direction.READ, 12 * MIB)):
                    batches = []
                    for number, offset in enumerate(offsets):
                        place = number * 4 * MIB
                        batch = batch_of(
                            direction,
                            [(3 * MIB, [(place, 3 * MIB)], [(memory.at(start + place + offset), 3 * MIB)])],
                            leaf_bytes=131072,
                        )
                        batch.on_caller = True
                        device.submit(batch)
                        batches.append(batch)
                    for number in order:
                        device.wait(batches[number])
                        assert batches[number].result(0) == 0
                for number, offset in enumerate(offsets):
                    place = number * 4 * MIB + offset
                    assert memory.read(place, 3 * MIB) == memory.read(12 * MIB + place, 3 * MIB)
                memory.fill(bytes(12 * MIB), 12 * MIB)
        other = Workload(device, seed=5, base=16 * MIB)
        thread = threading.Thread(target=lambda: [other.step() for _ in range(20)])
        batch = lone(Direction.READ, memory, MIB)
        device.submit(batch)  # has the lane: others go through the reactor
        thread.start()
        thread.join()
        device.wait(batch)
        assert batch.result(0) == 0


def test_failed_requests_do_not_keep_staging_from_those_that_follow(image_dir: Path) -> None:
    """What failed is tried again part by part and holds its staging; there is room for two requests."""
    path = image_of(image_dir, 4 * MIB)
    memory = Memory(8 * MIB)
    with engine_on(path, staging_bytes=MIB) as device:
        os.truncate(path, 0)
        batch = batch_of(
            Direction.READ,
            [(131072, [(at, 131072)], [(memory.at(at + 3), 131072)]) for at in range(0, 3 * MIB, 131072)],
        )
        batch.on_caller = True
        assert run(device, batch) == [-errno.ENODEV] * 24
        assert device.counters()["isolated_requests"]


@pytest.mark.parametrize("offset", [0, 3], ids=["direct", "staged"])
def test_what_nobody_waited_for_does_not_hold_up_close(image_dir: Path, offset: int) -> None:
    """Ctrl-C between submit and wait, as in the middle of a format."""
    memory = Memory(4 * MIB)
    memory.fill(b"x" * (2 * MIB))
    path = image_of(image_dir, 4 * MIB)
    with engine_on(path) as device:
        device.submit(lone(Direction.WRITE, memory, MIB, leaf_bytes=131072, at=offset))
    assert path.read_bytes()[:MIB] == b"x" * MIB


def test_a_wait_that_was_interrupted_can_be_repeated(
    image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two lines of `wait`; and close, which repeats it, when it came from the last one."""
    memory = Memory(4 * MIB)
    wait = lib.bkv_engine_wait
    for after in (False, True):
        with engine_on(image_of(image_dir, 4 * MIB)) as device:
            batch = lone(Direction.READ, memory, MIB)
            device.submit(batch)

            def interrupted(engine: object, place: object, after: bool = after) -> None:
                if after:
                    wait(engine, place)
                raise KeyboardInterrupt

            monkeypatch.setattr("blockkv.device.engine.lib", Mock(wraps=lib, bkv_engine_wait=interrupted))
            with pytest.raises(KeyboardInterrupt):
                device.wait(batch)
            monkeypatch.undo()
