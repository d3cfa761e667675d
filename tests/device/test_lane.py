"""Batches that are waited for at once are carried out by the thread that waits."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
from engine_tools import MIB, Memory, batch_of, engine_on, run
from engine_workload import Workload

from blockkv.device.base import UNIT_BYTES, Batch, Direction
from blockkv.device.engine import NativeDevice


def lone(direction: Direction, memory: Memory, size_bytes: int, leaf_bytes: int = 0, at: int = 0) -> Batch:
    batch = batch_of(
        direction, [(size_bytes, [(0, size_bytes)], [(memory.at(at), size_bytes)])], leaf_bytes=leaf_bytes
    )
    batch.is_lone = True
    return batch


def image_of(directory: Path, size_bytes: int) -> Path:
    path = directory / "lane.img"
    path.write_bytes(bytes(size_bytes))
    return path


def threads_of(device: NativeDevice, batch: Batch) -> int:
    """How many other threads of the engine came to run while the batch was carried out."""

    def switches() -> dict[str, int]:
        found = {}
        for task in Path("/proc/self/task").iterdir():
            if not (task / "comm").read_text().startswith("blockkv-"):
                continue
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    found[task.name] = int(line.split()[1])
        return found

    before: dict[str, int] = {}
    while (now := switches()) != before:  # some are on their way to sleep
        before = now
        time.sleep(0.2)
    assert run(device, batch) == [0]
    after = switches()
    return sum(after[name] != count for name, count in before.items() if name in after)


@pytest.mark.parametrize("lba_bytes", [512, 4096])
@pytest.mark.parametrize("offset", [0, 3], ids=["direct", "staged"])
def test_no_other_thread_takes_part(loop_device, lba_bytes: int, offset: int) -> None:
    memory = Memory(2 * MIB)
    with engine_on(loop_device(16 * MIB, lba_bytes)) as device:
        for direction in (Direction.WRITE, Direction.READ):
            batch = lone(direction, memory, MIB, leaf_bytes=131072, at=offset)
            assert threads_of(device, batch) == 0
            through_the_reactor = lone(direction, memory, MIB, leaf_bytes=131072, at=offset)
            through_the_reactor.is_lone = False
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


def test_a_long_batch_or_one_beside_others_goes_through_the_reactor(image_dir: Path) -> None:
    memory = Memory(16 * MIB)
    with engine_on(image_of(image_dir, 16 * MIB)) as device:
        assert threads_of(device, lone(Direction.READ, memory, 16 * MIB)) > 0
        other = batch_of(Direction.READ, [(8 * MIB, [(0, 8 * MIB)], [(memory.at(0), 8 * MIB)])])
        done = threading.Event()
        other.on_done = lambda _: done.set()
        device.submit(other)
        assert run(device, lone(Direction.READ, memory, UNIT_BYTES, at=8 * MIB)) == [0]
        assert done.wait(60)


def test_nothing_happens_before_the_wait(image_dir: Path) -> None:
    memory = Memory(UNIT_BYTES)
    path = image_of(image_dir, MIB)
    memory.fill(b"x" * UNIT_BYTES)
    with engine_on(path) as device:
        batch = lone(Direction.WRITE, memory, UNIT_BYTES)
        device.submit(batch)
        assert device.counters()["device_requests"] == 0
        device.wait(batch)
        assert path.read_bytes()[:UNIT_BYTES] == b"x" * UNIT_BYTES


def test_a_device_that_was_closed_meanwhile_says_so(image_dir: Path) -> None:
    memory = Memory(UNIT_BYTES)
    with engine_on(image_of(image_dir, MIB)) as device:
        batch = lone(Direction.READ, memory, UNIT_BYTES)
        device.submit(batch)
        device.close()
        device.wait(batch)
        assert batch.result(0) == -errno.ESHUTDOWN
