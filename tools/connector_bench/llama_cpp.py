#!/usr/bin/env python3
"""Sequences in a store beside llama.cpp's own state files, through the page cache, on one device.

    tools/engines llama_cpp
    PYTHONPATH=. .engines/llama_cpp/bin/python tools/connector_bench/llama_cpp.py --paced      in memory
    (root) PYTHONPATH=. .engines/llama_cpp/bin/python tools/connector_bench/llama_cpp.py --disk /var/tmp
    --json

The device is divided: a partition for the store, one with ext4 for the files. In every round each contender
has its turn, in an order that changes: it saves the same sequence so many times, as different ones, until all
is on media; it is closed, the files are dropped from the page cache, and all are restored, one after the
other. What is then in the context is compared. The first round is not counted.

  files         llama_state_seq_save_file and fsync; llama_state_seq_load_file
  chunks        chunks of 256 tokens, a durable commit for each sequence
  whole         a chunk for each sequence
  unverified    chunks, without the checksum on loads: what the checksum costs is the difference

CPU is user and system time of the whole process; what the kernel writes back of files in threads of its own
is not in it. All contenders have llama.cpp gather the state from its tensors, and scatter it. Ratios are to
files, round by round: the median, with the smallest and largest.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(
    Path(__file__).parents[1]
)  # of the other tools; this directory has a module called llama_cpp

import bench_tool  # noqa: E402
import click  # noqa: E402
import llama_cpp  # noqa: E402
import numpy as np  # noqa: E402
from bench_tool import DeviceOptions, OutputOptions  # noqa: E402
from peer_compare import file_system, keep_mounts_private  # noqa: E402
from rich.table import Table  # noqa: E402

import blockkv  # noqa: E402
from blockkv.bench.device import partitions  # noqa: E402
from blockkv.connectors.llama_cpp import Context, Sequences, sharing_context  # noqa: E402
from blockkv.errors import BlockKVError  # noqa: E402

MEBIBYTE = 1 << 20
SPARE_BYTES = 160 * MEBIBYTE
FILES = "files"
FORMS = {"chunks": "chunks", "whole": "whole", "unverified": "chunks"}
LAYERS, HEADS = 16, 4
"""With heads of 64 in f16 a token takes 16 KiB."""
MODEL_MAKER = Path(__file__).parents[2] / "tests" / "connectors" / "workers" / "llama_cpp_model.py"


@dataclasses.dataclass
class Engine:
    """A context that has evaluated `tokens`, and what their state is."""

    llama: Any
    tokens: Any
    state: bytes

    @property
    def memory(self) -> Any:
        return llama_cpp.llama_get_memory(self.llama.ctx)

    def read(self) -> bytes:
        size_bytes = llama_cpp.llama_state_seq_get_size(self.llama.ctx, 0)
        buffer = (ctypes.c_uint8 * size_bytes)()
        llama_cpp.llama_state_seq_get_data(self.llama.ctx, buffer, size_bytes, 0)
        return bytes(buffer)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, False)

    def restore(self) -> None:
        """Back to where it was."""
        self.clear()
        buffer = (ctypes.c_uint8 * len(self.state)).from_buffer_copy(self.state)
        llama_cpp.llama_state_seq_set_data(self.llama.ctx, buffer, len(self.state), 0)


def engine(directory: Path, token_count: int) -> Engine:
    specification = importlib.util.spec_from_file_location("llama_cpp_model", MODEL_MAKER)
    assert specification is not None
    assert specification.loader is not None
    maker = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(maker)
    path = str(directory / "model.gguf")
    maker.make(path, layers=LAYERS, heads=HEADS)
    with sharing_context():
        llama = llama_cpp.Llama(path, n_ctx=token_count + 512, verbose=False)
    tokens = np.random.default_rng(1).integers(3, 259, token_count).astype(np.int32)
    llama.eval([int(one) for one in tokens])
    made = Engine(llama, tokens, b"")
    made.state = made.read()
    return made


def measured(call: Callable[[], None], size_bytes: int) -> dict[str, float]:
    used, begun_s = cpu_s(), time.perf_counter()
    call()
    took_s, gb = time.perf_counter() - begun_s, size_bytes / 1e9
    return {"gb_per_s": gb / took_s, "cpu_s_per_gb": (cpu_s() - used) / gb}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def turn_of_files(made: Engine, directory: Path, count: int) -> dict[str, dict[str, float]]:
    paths = [directory / f"{number}.state" for number in range(count)]
    held = (llama_cpp.llama_token * len(made.tokens))(*made.tokens)

    def save() -> None:
        for path in paths:
            if not llama_cpp.llama_state_seq_save_file(
                made.llama.ctx, str(path).encode(), 0, held, len(made.tokens)
            ):
                raise BlockKVError(f"{path} was not written")
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def load() -> None:
        found = ctypes.c_size_t()
        for path in paths:
            if not llama_cpp.llama_state_seq_load_file(
                made.llama.ctx, str(path).encode(), 0, held, len(held), found
            ):
                raise BlockKVError(f"{path} was not read")

    saved = measured(save, count * len(made.state))
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    made.clear()
    loaded = measured(load, count * len(made.state))
    for path in paths:
        path.unlink()
    return {"save": saved, "load": loaded}


def turn_of_store(made: Engine, device: Path, count: int, name: str) -> dict[str, dict[str, float]]:
    blockkv.format(device, force=True)

    def sequences_in(store: blockkv.Store) -> Sequences:
        return Sequences(
            store,
            Context.of(made.llama),
            form=FORMS[name],  # type: ignore[arg-type]
            weights="made for this",
            durable=True,
        )

    def save() -> None:
        for number in range(count):
            sequences.family = dataclasses.replace(sequences.family, salt=f"{number}")
            if not sequences.save(made.tokens):
                raise BlockKVError("nothing was saved")

    def load() -> None:
        for number in range(count):
            sequences.family = dataclasses.replace(sequences.family, salt=f"{number}")
            if sequences.load([*made.tokens, 3]) != len(made.tokens):
                raise BlockKVError("not all was restored")

    with blockkv.open(device) as store:
        sequences = sequences_in(store)
        sequences.save(made.tokens)  # what it does once, such as making memory
        saved = measured(save, count * len(made.state))
    made.clear()
    with blockkv.open(device, verify=name != "unverified") as store:
        sequences = sequences_in(store)
        sequences.load(made.tokens)
        loaded = measured(load, count * len(made.state))
    return {"save": saved, "load": loaded}


@bench_tool.benchmark(read_gb_s=1.5, write_gb_s=1.2)
@click.option("--tokens", default=4096, show_default=True, help="Of a sequence: 16 KiB each.")
@click.option("--sequences", default=6, show_default=True, help="Saved and restored in a turn.")
@click.option("--rounds", default=5, show_default=True, help="Counted turns of every contender.")
def main(on: DeviceOptions, to: OutputOptions, tokens: int, sequences: int, rounds: int) -> None:
    """Compare them on DEVICE, which is overwritten, or on one made."""
    keep_mounts_private()
    names = [FILES, *FORMS]
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in names}
    size_bytes = tokens * LAYERS * HEADS * 64 * 2 * 2 * sequences + SPARE_BYTES
    sizes = [size_bytes, size_bytes + SPARE_BYTES]
    with contextlib.ExitStack() as stack:
        made = engine(Path(stack.enter_context(tempfile.TemporaryDirectory())), tokens)
        target = stack.enter_context(on.target(sum(sizes) + 8 * MEBIBYTE, large_requests=True))
        raw, formatted = stack.enter_context(partitions(target.path, sizes))
        directory = stack.enter_context(file_system(formatted))
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                made.restore()
                if name == FILES:
                    result = turn_of_files(made, directory, sequences)
                else:
                    result = turn_of_store(made, raw, sequences, name)
                if made.read() != made.state:
                    raise BlockKVError(f"{name}: what was restored is not what was saved")
                if number:
                    found[name].append(result)
        described = target.described
    rows = summary(found)
    state_mib = len(made.state) / MEBIBYTE
    to.document(
        {"target": described, "state_mib": state_mib, "sequences": sequences, "rounds": rounds, "rows": rows}
    )
    to.console().print(f"{sequences} sequences of {tokens} tokens, {state_mib:.0f} MiB each")
    to.console().print(table(rows))


def summary(found: dict[str, list[dict[str, dict[str, float]]]]) -> list[dict[str, Any]]:
    rows = []
    for op in ("save", "load"):
        for name, turns in found.items():
            ratios = [
                one[op]["gb_per_s"] / other[op]["gb_per_s"]
                for one, other in zip(turns, found[FILES], strict=True)
            ]
            rows.append(
                {
                    "op": op,
                    "name": name,
                    "gb_per_s": statistics.median(one[op]["gb_per_s"] for one in turns),
                    "cpu_s_per_gb": statistics.median(one[op]["cpu_s_per_gb"] for one in turns),
                    "ratio_to_files": statistics.median(ratios),
                    "ratio_spread": bench_tool.spread(ratios),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table("", "", "GB/s", "CPU s/GB", "GB/s, to files", "spread")
    for row in rows:
        made.add_row(
            row["op"],
            row["name"],
            f"{row['gb_per_s']:.2f}",
            f"{row['cpu_s_per_gb']:.3f}",
            f"{row['ratio_to_files']:.2f}",
            row["ratio_spread"],
        )
    return made


if __name__ == "__main__":
    main()
