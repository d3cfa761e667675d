#!/usr/bin/env python3
"""The tier of blockkv beside vLLM's own tier on files, as vLLM's tiering manager calls them.

    tools/engines vllm
    PYTHONPATH=. .engines/vllm/bin/python tools/connector_bench/vllm.py --paced      in memory (root), minutes
    PYTHONPATH=. .engines/vllm/bin/python tools/connector_bench/vllm.py --disk /var/tmp --json
    PYTHONPATH=. .engines/vllm/bin/python tools/connector_bench/vllm.py /dev/nvme0n1 --force

The device is divided: a partition for blockkv, one with ext4 for the files. In every round each contender has
its turn, in an order that changes: rows of a real primary tier are stored in jobs, all submitted at once; the
tier is closed; a new one loads them, cold, and the bytes are compared. The first round is not counted.

  fs            vLLM's tier on files: O_DIRECT, no checksum, its own 32 threads
  blockkv       as configured by default: loads go to memory of the tier and are copied
  direct        with "direct": true: loads go to the primary tier's memory
  unverified    the same without the checksum on loads: what the checksum costs is the difference

CPU is user and system time of the whole process; whoever waits polls every two milliseconds. Ratios are to
fs, round by round: the median, with the smallest and largest.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path[0] = str(Path(__file__).parents[1])  # of the other tools; this directory has a module called vllm

import bench_tool  # noqa: E402
import click  # noqa: E402
import numpy as np  # noqa: E402
from bench_tool import DeviceOptions, OutputOptions  # noqa: E402
from peer_compare import file_system, keep_mounts_private  # noqa: E402
from rich.table import Table  # noqa: E402
from vllm.v1.kv_offload import config as offloading  # noqa: E402
from vllm.v1.kv_offload.base import ReqContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402

from blockkv.bench.device import partitions  # noqa: E402
from blockkv.connectors.vllm_cpu import CpuTieringSpec  # noqa: E402
from blockkv.errors import BlockKVError  # noqa: E402

MEBIBYTE = 1 << 20
SPARE_BYTES = 160 * MEBIBYTE
POLL_EVERY_S = 0.002
OPS = ("store", "load")


def contenders(device: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """Configurations of a secondary tier."""
    ours = {
        "type": "BlockKVTier",
        "module_path": "blockkv.connectors.vllm",
        "device": str(device),
        "weights": "none",
        "max_store_bytes": 1 << 40,
    }
    return {
        "fs": {"type": "fs", "root_dir": str(directory)},
        "blockkv": ours,
        "direct": ours | {"direct": True},
        "unverified": ours | {"direct": True, "store_options": {"verify": False}},
    }


@contextmanager
def tier_of(config: dict[str, Any], rows: int, row_bytes: int) -> Iterator[tuple[Any, Any]]:
    """(tier, its primary tier's rows): made by vLLM's own spec, manager and factory."""
    spec = CpuTieringSpec(
        offloading.OffloadingConfig(
            groups=(offloading.OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), group_id=0),),
            worker_kv_bytes_per_block=row_bytes,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": rows * row_bytes, "secondary_tiers": [config]},
            engine_id=f"bench{os.getpid()}",
            model=offloading.OffloadingModelConfig(name="m", dtype="bfloat16"),
            cache=offloading.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=offloading.OffloadingParallelConfig(
                **dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1),
                **dict.fromkeys(("rank", "data_parallel_index"), 0),
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
            kv_cache_layout="LBHNC",
        )
    )
    manager = spec.get_manager()
    try:
        yield manager.secondary_tiers[0], np.asarray(manager.primary_tier.get_kv_memoryview())
    finally:
        gc.collect()
        manager.shutdown()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def carry_out(
    tier: Any, submit: Callable[[Any], None], keys: list[bytes], job_rows: int, load: bool
) -> dict[str, float]:
    """Submit it all and poll until it has ended; (GB/s, CPU s/GB)."""
    row_bytes = tier._primary_kv_view.strides[0]
    begun_cpu_s, begun_s = cpu_s(), time.perf_counter()
    left = set()
    for number, first in enumerate(range(0, len(keys), job_rows)):
        left.add(number)
        rows = np.arange(first, min(first + job_rows, len(keys)), dtype=np.int32)
        submit(TransferJob(number, keys[first : first + job_rows], rows, load, ReqContext("r")))
    while left:
        for result in tier.get_finished_jobs():
            if not result.success:
                raise BlockKVError(f"{tier.tier_type}: job {result.job_id} failed")
            left.remove(result.job_id)
        time.sleep(POLL_EVERY_S)
    took_s, gb = time.perf_counter() - begun_s, len(keys) * row_bytes / 1e9
    return {"gb_per_s": gb / took_s, "cpu_s_per_gb": (cpu_s() - begun_cpu_s) / gb}


def turn(
    config: dict[str, Any], rows: int, row_bytes: int, job_rows: int, seed: int
) -> dict[str, dict[str, float]]:
    """Store, close, load, compare; what both took."""
    keys = [bytes(make_offload_key(np.random.default_rng((seed, one)).bytes(32), 0)) for one in range(rows)]
    base = np.random.default_rng(seed).integers(-128, 128, row_bytes, dtype=np.int8)
    expected = np.empty_like(base)
    with tier_of(config, rows, row_bytes) as (tier, memory):
        for one in range(rows):
            fill(memory[one], base, seed, one)
        stored = carry_out(tier, tier.submit_store, keys, job_rows, load=False)
        del memory
    forget(Path(config["root_dir"]) if "root_dir" in config else None)
    with tier_of(config, rows, row_bytes) as (tier, memory):
        memory[:] = 0
        loaded = carry_out(tier, tier.submit_load, keys, job_rows, load=True)
        for one in range(rows):
            fill(expected, base, seed, one)
            if not np.array_equal(memory[one], expected):
                raise BlockKVError(f"{config['type']}: row {one} is not what was stored")
        del memory
    return {"store": stored, "load": loaded}


def fill(row: np.ndarray, base: np.ndarray, seed: int, number: int) -> None:
    """Bytes that no other row, and no other round, has."""
    np.add(base, np.int8(number % 128), out=row)
    row[:16].view(np.int64)[:] = seed, number


def forget(directory: Path | None) -> None:
    """Nothing of the files is in the page cache then; the store uses none."""
    for path in directory.rglob("*.bin") if directory else ():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def empty(name: str, config: dict[str, Any]) -> None:
    """What an earlier turn has left."""
    import shutil

    import blockkv

    if name == "fs":
        for path in Path(config["root_dir"]).iterdir():
            if path.name != "lost+found":
                shutil.rmtree(path)
    else:
        blockkv.format(config["device"], force=True)


@bench_tool.benchmark(read_gb_s=1.5, write_gb_s=1.2)
@click.option(
    "--row-mib", multiple=True, type=float, default=[2, 8], show_default=True, help="Size of a row."
)
@click.option("--set-mib", default=512, show_default=True, help="Rows that are stored and loaded in a turn.")
@click.option("--job-mib", default=32, show_default=True, help="Rows of one job.")
@click.option("--rounds", default=5, show_default=True, help="Counted turns of every contender.")
def main(
    on: DeviceOptions, to: OutputOptions, row_mib: tuple[float, ...], set_mib: int, job_mib: int, rounds: int
) -> None:
    """Compare the tiers on DEVICE, which is overwritten, or on one made."""
    keep_mounts_private()
    rows_of_table = []
    set_bytes = set_mib * MEBIBYTE
    sizes = [set_bytes + SPARE_BYTES, set_bytes + SPARE_BYTES * 2]
    with on.target(sum(sizes) + 8 * MEBIBYTE, large_requests=True) as target:
        with partitions(target.path, sizes) as (raw, formatted), file_system(formatted) as directory:
            configs = contenders(raw, directory)
            for mib in row_mib:
                row_bytes = int(mib * MEBIBYTE)
                found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in configs}
                for number in range(rounds + 1):
                    names = list(configs)
                    for name in names[number % len(names) :] + names[: number % len(names)]:
                        empty(name, configs[name])
                        result = turn(
                            configs[name],
                            set_bytes // row_bytes,
                            row_bytes,
                            max(1, job_mib * MEBIBYTE // row_bytes),
                            number,
                        )
                        if number:
                            found[name].append(result)
                rows_of_table += summary(mib, found)
        described = target.described
    to.document(
        {"target": described, "set_mib": set_mib, "job_mib": job_mib, "rounds": rounds, "rows": rows_of_table}
    )
    to.console().print(table(rows_of_table))


def summary(mib: float, found: dict[str, list[dict[str, dict[str, float]]]]) -> list[dict[str, Any]]:
    rows = []
    for op in OPS:
        for name, turns in found.items():
            ratios = [
                one[op]["gb_per_s"] / other[op]["gb_per_s"]
                for one, other in zip(turns, found["fs"], strict=True)
            ]
            rows.append(
                {
                    "row_mib": mib,
                    "op": op,
                    "tier": name,
                    "gb_per_s": statistics.median(one[op]["gb_per_s"] for one in turns),
                    "cpu_s_per_gb": statistics.median(one[op]["cpu_s_per_gb"] for one in turns),
                    "ratio_to_fs": statistics.median(ratios),
                    "ratio_spread": bench_tool.spread(ratios),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table("row MiB", "", "tier", "GB/s", "CPU s/GB", "GB/s, to fs", "spread")
    for row in rows:
        made.add_row(
            f"{row['row_mib']:g}",
            row["op"],
            row["tier"],
            f"{row['gb_per_s']:.2f}",
            f"{row['cpu_s_per_gb']:.3f}",
            f"{row['ratio_to_fs']:.2f}",
            row["ratio_spread"],
        )
    return made


if __name__ == "__main__":
    main()
