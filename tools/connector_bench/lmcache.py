#!/usr/bin/env python3
"""The L2 adapter of blockkv beside LMCache's own: raw_block, and fs with and without the page cache.

    tools/engines lmcache && .engines/lmcache/bin/pip install transformers     raw_block imports it
    PYTHONPATH=. .engines/lmcache/bin/python tools/connector_bench/lmcache.py --paced      in memory (root),
    minutes PYTHONPATH=. .engines/lmcache/bin/python tools/connector_bench/lmcache.py --disk /var/tmp --json
    PYTHONPATH=. .engines/lmcache/bin/python tools/connector_bench/lmcache.py /dev/nvme0n1 --force

All are called as LMCache's controllers call them: tasks of --task-mib are submitted at once, and whoever
waits sleeps on the descriptor. Objects lie in one L1 memory that is known to all of them.

  blockkv             as configured by default: a store is acknowledged when it is durable
  blockkv, lazy       with "durable": false
  raw_block           on a partition, by io_uring with registered memory
  raw_block, posix    the same, by preadv and pwritev, as it is configured by default
  fs                  files on ext4
  fs, direct          with "use_odirect": true

raw_block and fs have no checksum, and acknowledge what is in the drive's cache, or the page cache. raw_block
writes its index once a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
warnings.simplefilter("ignore", FutureWarning)  # of what LMCache imports, about years to come
sys.path[0] = str(Path(__file__).parents[1])  # of the other tools; this file is called like what it imports

import bench_tool  # noqa: E402
import click  # noqa: E402
import torch  # noqa: E402
from bench_tool import DeviceOptions, OutputOptions  # noqa: E402
from connector_bench.rounds import OURS, Contestant, drop_files, run, sync_files  # noqa: E402
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # noqa: E402
from lmcache.v1.distributed.internal_api import L1MemoryDesc  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj  # noqa: E402
from lmcache.v1.platform import consume_fd  # noqa: E402

import blockkv  # noqa: E402
from blockkv.errors import BlockKVError  # noqa: E402

MEBIBYTE = 1 << 20
PAGE_BYTES = 4096
PATIENCE_S = 120


class L1:
    """The memory of LMCache's first tier: objects to store from, and as many to load to."""

    def __init__(self, object_bytes: int, count: int, huge: bool) -> None:
        memory_bytes = 2 * object_bytes * count
        if huge:
            self.memory = blockkv.empty(memory_bytes, torch.uint8)
        else:
            spare = torch.empty(memory_bytes + PAGE_BYTES, dtype=torch.uint8)
            start = -spare.data_ptr() % PAGE_BYTES
            self.memory = spare[start : start + memory_bytes]
        generator = torch.Generator().manual_seed(1)
        self.memory.random_(0, 256, generator=generator)
        self.desc = L1MemoryDesc(self.memory.data_ptr(), memory_bytes, PAGE_BYTES, memory_bytes)
        self.shape = torch.Size([object_bytes // 2])
        objects = [self._object(number * object_bytes, object_bytes) for number in range(2 * count)]
        self.sources, self.targets = objects[:count], objects[count:]

    def _object(self, start: int, size_bytes: int) -> TensorMemoryObj:
        meta = MemoryObjMetadata(
            shape=self.shape,
            dtype=torch.float16,
            address=start,
            phy_size=size_bytes,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        return TensorMemoryObj(self.memory[start : start + size_bytes], meta, None)


class Tier:
    """One L2 adapter."""

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        l1: L1,
        task_objects: int,
        sync: Callable[[Any], None],
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self._l1 = l1
        self._task_objects = task_objects
        self._sync = sync
        self._directory = directory
        args = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        (config,) = parse_args_to_l2_adapters_config(args).adapters
        self._tier: Any = create_l2_adapter(config, l1_memory_desc=l1.desc)
        self._sets = 0
        self._keys: list[ObjectKey] = []

    def store(self) -> None:
        """All objects, under keys that are new."""
        self._sets += 1
        self._keys = [
            ObjectKey(bytes([self._sets]) + number.to_bytes(31, "big"), "model", 0)
            for number in range(len(self._l1.sources))
        ]
        tasks = [self._tier.submit_store_task(*part) for part in self._parts(self._l1.sources)]
        ended: dict[int, Any] = {}

        def pop() -> bool:
            ended.update(self._tier.pop_completed_store_tasks())
            return len(ended) == len(tasks)

        self._wait(self._tier.get_store_event_fd(), pop)
        if not all(result.is_successful() for result in ended.values()):
            raise BlockKVError(f"{self.name}: a store failed")

    def sync(self) -> None:
        """To media."""
        self._sync(self._tier)

    def load(self) -> None:
        """Look up, load and unlock all objects."""
        layout = {0: MemoryLayoutDesc([self._l1.shape], [torch.float16])}
        look = self._tier.submit_lookup_and_lock_task(self._keys, layout)
        found: list[Any] = []

        def looked_up() -> bool:
            found.append(self._tier.query_lookup_and_lock_result(look))
            return found[-1] is not None

        self._wait(self._tier.get_lookup_and_lock_event_fd(), looked_up)
        tasks = {self._tier.submit_load_task(*part) for part in self._parts(self._l1.targets)}
        loaded = 0

        def loads() -> bool:
            nonlocal loaded
            for task in list(tasks):
                bitmap = self._tier.query_load_result(task)
                if bitmap is not None:
                    tasks.remove(task)
                    loaded += bitmap.popcount()
            return not tasks

        self._wait(self._tier.get_load_event_fd(), loads)
        self._tier.submit_unlock(self._keys)
        if loaded != len(self._keys) != found[-1].popcount():
            raise BlockKVError(f"{self.name}: {loaded} of {len(self._keys)} objects were loaded")

    def check(self) -> None:
        """Every byte; and forget them."""
        for source, target in zip(self._l1.sources, self._l1.targets, strict=True):
            assert torch.equal(source.raw_data, target.raw_data), self.name
            target.raw_data.zero_()

    def forget(self) -> None:
        """Delete them."""
        self._tier.delete(self._keys)

    def drop_page_cache(self) -> None:
        """Of the files, if there are any."""
        if self._directory is not None:
            drop_files(self._directory)

    def close(self) -> None:
        """End it."""
        self._tier.close()

    def _parts(self, objects: Sequence[TensorMemoryObj]) -> list[tuple[list[ObjectKey], list[Any]]]:
        step = self._task_objects
        return [
            (self._keys[first : first + step], list(objects[first : first + step]))
            for first in range(0, len(objects), step)
        ]

    def _wait(self, descriptor: int, done: Callable[[], bool]) -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if poller.poll(1000):
                consume_fd(descriptor)
                if done():
                    return
        raise BlockKVError(f"{self.name} did not end in {PATIENCE_S} s")


def sync_device(device: Path, tier: Any) -> None:
    """What is in the drive's cache, to media."""
    descriptor = os.open(device, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def contestants(
    l1: L1, object_bytes: int, task_objects: int, own: Path, mount: Path, *more: Path
) -> list[Contestant]:
    """All of them; ours first."""
    lazy_device, ring_device, posix_device = more
    made: list[Contestant] = []
    for name, device, durable in ((OURS, own, True), (f"{OURS}, lazy", lazy_device, False)):
        blockkv.format(device, force=True)
        spec = {
            "type": "plugin",
            "module_path": "blockkv.connectors.lmcache",
            "class_name": "BlockKVL2Adapter",
            "adapter_params": {"device": str(device), "weights": "none", "durable": durable},
        }
        made.append(Tier(name, spec, l1, task_objects, lambda tier: tier._store.commit()))
    for name, device, engine in (
        ("raw_block", ring_device, "io_uring"),
        ("raw_block, posix", posix_device, "posix"),
    ):
        spec = {
            "type": "raw_block",
            "device_path": str(device),
            "slot_bytes": object_bytes + PAGE_BYTES,
            "meta_total_bytes": 32 * MEBIBYTE,
            "load_checkpoint_on_init": False,
            "io_engine": engine,
        }
        made.append(Tier(name, spec, l1, task_objects, partial(sync_device, device)))
    for name, use_odirect in (("fs", False), ("fs, direct", True)):
        directory = mount / name.replace(", ", "-")
        directory.mkdir()
        spec = {"type": "fs", "base_path": str(directory), "use_odirect": use_odirect}
        made.append(
            Tier(name, spec, l1, task_objects, lambda tier, files=directory: sync_files(files), directory)
        )
    return made


@bench_tool.benchmark(read_gb_s=3.0, write_gb_s=2.4)
@click.option("--object-mib", default=8.0, show_default=True, help="Size of an object.")
@click.option(
    "--set-mib", default=1024, show_default=True, help="Objects that are stored and loaded in a turn."
)
@click.option("--task-mib", default=64, show_default=True, help="Objects of one task.")
@click.option("--rounds", default=5, show_default=True, help="Counted turns of everybody.")
@click.option("--huge/--ordinary", default=False, show_default=True, help="Pages of the L1 memory.")
@click.option("--limit-mib", type=int, help="Once more with so much memory, page cache included.")
def main(
    on: DeviceOptions,
    to: OutputOptions,
    object_mib: float,
    set_mib: int,
    task_mib: int,
    rounds: int,
    huge: bool,
    limit_mib: int | None,
) -> None:
    """Compare L2 adapters on DEVICE, which is overwritten, or on one made."""
    object_bytes = int(object_mib * MEBIBYTE)
    count = set_mib * MEBIBYTE // object_bytes
    l1 = L1(object_bytes, count, huge)
    make = partial(contestants, l1, object_bytes, max(1, task_mib * MEBIBYTE // object_bytes))
    limit_bytes = None if limit_mib is None else limit_mib * MEBIBYTE
    facts = {"object_bytes": object_bytes, "task_mib": task_mib, "huge_pages": huge}
    run(on, to, make, count * object_bytes, rounds, limit_bytes, facts, more_partitions=3)


if __name__ == "__main__":
    main()
