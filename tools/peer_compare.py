#!/usr/bin/env python3
"""blockkv beside other ways to keep tensors on a device: same payloads, same device, one run.

    tools/peer_compare.py --install-peers peers-venv               what the others need, once
    tools/peer_compare.py --paced --peer-python peers-venv/bin/python --quick      in memory (root), minutes
    tools/peer_compare.py --disk /var/tmp --peer-python peers-venv/bin/python --json
    tools/peer_compare.py /dev/nvme0n1 --force                     a real one; EVERYTHING ON IT IS DESTROYED

Peers are LMCache's io_uring engine and its raw_block core, NIXL's POSIX plugin, DeepSpeed AIO, O_DIRECT
files, safetensors, torch.save with and without mmap, and buffered files. A peer that cannot be imported is a
row that says what to install.

Every peer is a process of its own. The device is divided: a partition for each that wants one, and one with
ext4 for those that store files. In every round each peer has its turn, in an order that changes: put a set of
chunks in batches, drop it from the page cache, get it back and compare every byte, put it again with fsync.
Then the next one, so that whatever the machine does meanwhile meets all alike. The first round is not
counted.

Ratios are blockkv / peer, round by round: the median, with the smallest and largest. CPU is user and system
time of the peer's process with all threads; what the kernel writes back later for buffered files is nobody's,
so that their put without fsync is a copy to memory. blockkv verifies the checksum of every get.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_tool
import click
import torch
from bench_tool import DeviceOptions, OutputOptions
from peers import PEERS
from rich.table import Table

import blockkv
from blockkv.bench.device import partitions, write_throughout
from blockkv.errors import BlockKVError

TOOLS = Path(__file__).parent
OURS = "blockkv"
OPS = ("put", "get", "durable put")
MEBIBYTE = 1 << 20
PARTITION_SPARE_BYTES = 128 * MEBIBYTE
FILE_SYSTEM_SPARE_BYTES = 256 * MEBIBYTE
"""For metadata: of a store, LMCache's index; of ext4 with its journal."""
HEADLINES = (
    ("get", "safetensors"),
    ("durable put", "safetensors"),
    ("durable put", "torch.save"),
    ("get", "DeepSpeed AIO"),
    ("put", "DeepSpeed AIO"),
    ("get", "LMCache raw_block"),
    ("put", "LMCache raw_block"),
)
"""What the comparison is made for: cold gets and durable puts beside what people use."""
ENVIRONMENT = {
    # torch copies with several threads; those that wait for more work would take the device's cores
    "OMP_WAIT_POLICY": "PASSIVE",
    # LMCache reports its use over the network otherwise
    "LMCACHE_TRACK_USAGE": "false",
}
TABLE_CHARS = 152
CLONE_NEWNS = 0x20000
"""unshare(2)."""
TEMPORARY_PREFIX = "blockkv-peers."


class PeerFailedError(BlockKVError):
    """A peer's process ended, or its answer was an error. The message is what it said."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One phase of one turn."""

    gb_per_s: float
    cpu_s_per_gb: float

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Sample:
        """From a worker's reply."""
        moved_gb = reply["moved_bytes"] / 1e9
        return cls(moved_gb / reply["wall_s"], reply["cpu_s"] / moved_gb)


Samples = dict[str, dict[str, list[Sample]]]
"""Peer -> op -> one sample a round."""


@dataclass(slots=True)
class Row:
    """A peer at one chunk size. `failure` says why there are no figures, or no more."""

    peer: str
    chunk_bytes: int
    failure: str = ""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Op -> medians, and the ratio blockkv / peer with its spread."""


def figures(samples: Samples, peer: str, op: str) -> dict[str, Any] | None:
    """Medians of a peer's samples, and the ratio blockkv / peer, round by round. None without samples."""
    theirs = samples[peer].get(op, [])
    if not theirs:
        return None
    found: dict[str, Any] = {
        "gb_per_s": statistics.median(sample.gb_per_s for sample in theirs),
        "gb_per_s_spread": [f(sample.gb_per_s for sample in theirs) for f in (min, max)],
        "cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in theirs),
    }
    ours = samples[OURS].get(op, [])
    ratios = [mine.gb_per_s / their.gb_per_s for mine, their in zip(ours, theirs, strict=False)]
    if ratios:
        found |= {"ratio": statistics.median(ratios), "ratio_spread": [min(ratios), max(ratios)]}
    return found


def headlines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The ratios that matter most, one for each chunk size."""
    found = []
    for (op, peer), row in itertools.product(HEADLINES, rows):
        if row.peer == peer and op in row.figures:
            ratio = row.figures[op].get("ratio")
            found.append({"op": op, "peer": peer, "chunk_bytes": row.chunk_bytes, "ratio": ratio})
    return found


class Worker:
    """A peer's process."""

    def __init__(self, python: str, log: Path) -> None:
        self._log = log.open("w+")
        path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [python, "-m", "peers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one reply. Raises PeerFailedError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in reply:
            raise PeerFailedError(reply["error"])
        return reply

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().strip().splitlines()
        return f"its process ended with {code}: {said[-1] if said else 'no message'}"

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()
        self._log.close()


@dataclass(frozen=True, slots=True)
class Peers:
    """Which peers can be used, each with the Python that has it, and what is missing for the others."""

    pythons: dict[str, str]
    versions: dict[str, str]
    missing: dict[str, str]


def find_peers(wanted: Sequence[str], peer_python: str | None) -> Peers:
    """Ask this Python, then the other, what each can import."""
    found = Peers({}, {}, {})
    with temporary_directory() as directory:
        for python in filter(None, (sys.executable, peer_python)):
            worker = Worker(python, directory / "probe.log")
            try:
                answers = worker.ask(do="probe")
            finally:
                worker.stop()
            for name in wanted:
                answer = answers[name]
                if not answer["missing"] and name not in found.pythons:
                    found.pythons[name] = python
                    found.versions[name] = answer["version"]
                found.missing[name] = answer["missing"]
    in_order = {name: found.pythons[name] for name in wanted if name in found.pythons}
    missing = {name: found.missing[name] for name in wanted if name not in in_order}
    return Peers(in_order, found.versions, missing)


def make_environment(directory: Path, say: Callable[[str], None]) -> str:
    """Make a Python environment with every peer that can be had, and name its interpreter."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    # the same PyTorch first and in every command, or pip would bring one with CUDA of several gigabytes
    torch_requirement = f"torch=={torch.__version__.partition('+')[0]}"
    for packages in dict.fromkeys(peer.packages for name, peer in PEERS.items() if name != OURS):
        command = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        say(f"pip install {' '.join(packages)}")
        done = subprocess.run(
            [*command, torch_requirement, *packages],
            env={**os.environ, "DS_BUILD_OPS": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            say(f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    for name, peer in PEERS.items():
        if peer.prepare:
            say(f"preparing {name}")
            subprocess.run([str(python), "-c", peer.prepare], capture_output=True, check=False)
    return str(python)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    chunk_sizes_bytes: Sequence[int]
    batch_bytes: int
    set_bytes: int
    rounds: int
    seconds: float
    memory: str
    threads: int

    def setup(self, chunk_bytes: int) -> dict[str, int]:
        """The fields of a worker's `Setup`: whole batches, at least one."""
        batch_chunks = max(1, self.batch_bytes // chunk_bytes)
        batches = max(1, self.set_bytes // (batch_chunks * chunk_bytes))
        return {
            "chunk_bytes": chunk_bytes,
            "batch_chunks": batch_chunks,
            "chunk_count": batches * batch_chunks,
            "threads": self.threads,
        }

    def partition_sizes(self, peers: Sequence[str]) -> dict[str, int]:
        """Partition -> bytes: one of each raw peer, named after it, and one with files for all others."""
        largest_bytes = max(
            shape["chunk_count"] * chunk_bytes
            for chunk_bytes in self.chunk_sizes_bytes
            for shape in [self.setup(chunk_bytes)]
        )
        raw = [name for name in peers if PEERS[name].place == "partition"]
        sizes = dict.fromkeys(raw, 2 * largest_bytes + PARTITION_SPARE_BYTES)
        if len(raw) < len(peers):
            sizes["files"] = 2 * largest_bytes + FILE_SYSTEM_SPARE_BYTES
        return sizes

    def device_bytes(self, peers: Sequence[str]) -> int:
        """The device needs this much: the partitions, and a mebibyte at each end."""
        return sum(self.partition_sizes(peers).values()) + 2 * MEBIBYTE


def turns(peers: Sequence[str], round_number: int) -> list[str]:
    """The order of a round: each round starts with another peer, every other one runs backwards."""
    first = round_number % len(peers)
    order = [*peers[first:], *peers[:first]]
    return order if round_number % 2 == 0 else order[::-1]


def compare(
    device: Path, plan: Plan, found: Peers, force: bool, progress: Callable[[str], None]
) -> list[Row]:
    """Divide the device and measure; a row for each chunk size and peer that could be imported."""
    blockkv.format(device, force=force)  # refuses what is occupied
    write_throughout(device, plan.device_bytes(list(found.pythons)))  # formatting discarded it
    names = list(found.pythons)
    sizes = plan.partition_sizes(names)
    rows = []
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(partitions(device, list(sizes.values())))
        places = dict(zip(sizes, made, strict=True))
        if "files" in places:
            mount = stack.enter_context(file_system(places.pop("files")))
            for number, name in enumerate(name for name in names if name not in places):
                places[name] = mount / str(number)
                places[name].mkdir()
        logs = stack.enter_context(temporary_directory())
        for chunk_bytes in plan.chunk_sizes_bytes:
            rows += measure(chunk_bytes, plan, found, places, logs, progress)
    return rows


@contextlib.contextmanager
def file_system(partition: Path) -> Iterator[Path]:
    """An ext4, mounted. Nothing is discarded: a drive answers reads of what was discarded without work."""
    options = "nodiscard,lazy_itable_init=0,lazy_journal_init=0"
    run("mkfs.ext4", "-q", "-F", "-E", options, partition)
    with temporary_directory() as directory:
        run("mount", "-o", "noatime", partition, directory)
        try:
            yield directory
        finally:
            run("umount", directory)


def keep_mounts_private() -> None:
    """What this process mounts from now on is seen by it and its children alone, and goes with them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        code = ctypes.get_errno()
        raise BlockKVError(f"unshare of the mounts was refused: {os.strerror(code)}; run as root")
    run("mount", "--make-rprivate", "/")


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory for a while. Removes those of earlier runs that were killed; its name says whose it is."""
    for left in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        if not Path("/proc", left.name.split(".")[1]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY_PREFIX}{os.getpid()}.") as directory:
        yield Path(directory)


def run(*command: object) -> None:
    """A system tool. Raises BlockKVError with what it said."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BlockKVError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def measure(
    chunk_bytes: int,
    plan: Plan,
    found: Peers,
    places: dict[str, Path],
    logs: Path,
    progress: Callable[[str], None],
) -> list[Row]:
    """Every peer at one chunk size, in rounds."""
    rows = {name: Row(name, chunk_bytes) for name in found.pythons}
    samples: Samples = {name: {} for name in rows}
    workers: dict[str, Worker] = {}
    size = f"{chunk_bytes / MEBIBYTE:g} MiB"
    try:
        for name, python in found.pythons.items():  # what they import takes longer than the rest
            workers[name] = Worker(python, logs / f"{places[name].name}.log")
        for name in found.pythons:
            with failing(rows[name]):
                progress(f"{size}: {name} starts")
                place = str(places[name])
                workers[name].ask(
                    do="open", peer=name, place=place, memory=plan.memory, **plan.setup(chunk_bytes)
                )
        for number in range(plan.rounds + 1):
            for name in turns(list(rows), number):
                progress(f"{size}, round {number} of {plan.rounds}: {name}")
                if not rows[name].failure:
                    with failing(rows[name]):
                        for op, sample in turn(workers[name], name, plan.seconds).items():
                            if number:
                                samples[name].setdefault(op, []).append(sample)
        for name, worker in workers.items():
            if not rows[name].failure:
                with failing(rows[name]):
                    worker.ask(do="close")
    finally:
        for worker in workers.values():
            worker.stop()
    for name, row in rows.items():
        row.figures = {op: found for op in OPS if (found := figures(samples, name, op)) is not None}
    return list(rows.values())


@contextlib.contextmanager
def failing(row: Row) -> Iterator[None]:
    """A peer that fails is a row that says so; the others go on."""
    try:
        yield
    except PeerFailedError as error:
        if row.peer == OURS:
            raise
        row.failure = str(error)


def turn(worker: Worker, name: str, seconds: float) -> dict[str, Sample]:
    """One peer's part of a round."""
    done = {
        "put": Sample.of(worker.ask(do="put", seconds=seconds, durable=False)),
        "get": Sample.of(worker.ask(do="get", seconds=seconds)),
    }
    if PEERS[name].durable:
        done["durable put"] = Sample.of(worker.ask(do="put", seconds=seconds, durable=True))
    worker.ask(do="clear")
    return done


def document(described: dict[str, Any], plan: Plan, found: Peers, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON. Speeds in 10^9 bytes a second, ratios blockkv / peer."""
    return {
        "device": described,
        "memory": plan.memory,
        "batch_bytes": plan.batch_bytes,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "threads": plan.threads,
        "peers": [
            {
                "peer": name,
                "what": PEERS[name].what,
                "version": found.versions.get(name),
                "missing": found.missing.get(name, ""),
                "install": PEERS[name].install() if name in found.missing else "",
            }
            for name in [*found.pythons, *found.missing]
        ],
        "rows": [
            {
                "peer": row.peer,
                "chunk_bytes": row.chunk_bytes,
                "failure": row.failure,
                **{op.replace(" ", "_"): row.figures.get(op) for op in OPS},
            }
            for row in rows
        ],
        "headlines": headlines(rows),
    }


def table(rows: Sequence[Row], found: Peers) -> Table:
    """A line a peer and chunk size."""
    shown = Table(title="GB/s, CPU s/GB, and blockkv / peer with its smallest and largest value")
    shown.add_column("chunk", no_wrap=True)
    shown.add_column("peer", no_wrap=True)
    for op in ("put", "cold get", "durable put"):
        for heading in (op, "CPU", "ratio"):
            shown.add_column(heading, justify="right", no_wrap=True)
    for _, group in itertools.groupby(rows, key=lambda row: row.chunk_bytes):
        shown.add_section()
        for row in group:
            cells = [cell for op in OPS for cell in cells_of(row.figures.get(op))]
            name = f"{row.peer} (failed)" if row.failure else row.peer
            shown.add_row(f"{row.chunk_bytes / MEBIBYTE:g} MiB", name, *cells)
    shown.add_section()
    for name in found.missing:
        shown.add_row("", f"{name} (not installed)", *["-"] * 9)
    return shown


def remarks(rows: Sequence[Row], found: Peers) -> Iterator[str]:
    """What the table has no room for: the headlines, what failed, and what to install."""
    for line in headlines(rows):
        size = f"{line['chunk_bytes'] / MEBIBYTE:g} MiB"
        yield f"{line['op']}, {size}: blockkv / {line['peer']} = {line['ratio']:.2f}"
    for row in rows:
        if row.failure:
            yield f"{row.peer} failed at {row.chunk_bytes / MEBIBYTE:g} MiB: {row.failure}"
    for name, reason in found.missing.items():
        yield f"{name} is not installed ({reason}); to have it: {PEERS[name].install()}"


def cells_of(figure: dict[str, Any] | None) -> list[str]:
    """GB/s, CPU and ratio of one op; dashes where there is none, as of a peer that cannot be durable."""
    if figure is None:
        return ["-", "-", "-"]
    ratio = "-"
    if "ratio" in figure:
        low, high = figure["ratio_spread"]
        ratio = f"{figure['ratio']:.2f} ({low:.2f}-{high:.2f})"
    return [f"{figure['gb_per_s']:.2f}", f"{figure['cpu_s_per_gb']:.3f}", ratio]


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Bars, ours in another colour: a row of panels for each chunk size, GB/s of every op and CPU of gets."""
    sizes = list(dict.fromkeys(row.chunk_bytes for row in rows))
    columns = [(OPS[0], "gb_per_s"), (OPS[1], "gb_per_s"), (OPS[2], "gb_per_s"), ("get", "cpu_s_per_gb")]
    panels = figure.subplots(len(sizes), len(columns), sharex="col", sharey=True, squeeze=False)
    for chunk_bytes, line in zip(sizes, panels, strict=True):
        shown = [row for row in rows if row.chunk_bytes == chunk_bytes]
        colours = ["tab:orange" if row.peer == OURS else "tab:blue" for row in shown]
        for axes, (op, what) in zip(line, columns, strict=True):
            values = [row.figures.get(op, {}).get(what, 0.0) for row in shown]
            bars = axes.barh([row.peer for row in shown], values, color=colours)
            digits = 2 if what == "gb_per_s" else 3
            labels = [f"{value:.{digits}f}" if value else "-" for value in values]
            axes.bar_label(bars, labels, padding=2, fontsize="small")
            axes.margins(x=0.2)
        line[0].set_ylabel(f"{chunk_bytes / MEBIBYTE:g} MiB", fontweight="bold")
    for axes, (op, what) in zip(panels[0], columns, strict=True):
        name = "cold get" if op == "get" else op
        axes.set_title(f"{name}, GB/s" if what == "gb_per_s" else f"{name}, CPU s/GB")
    panels[0][0].invert_yaxis()


@bench_tool.benchmark(read_gb_s=3.0, write_gb_s=2.4)
@click.option("--chunk-mib", multiple=True, type=float, default=[2, 8, 32], show_default=True)
@click.option("--batch-mib", default=64, show_default=True, help="In flight at a time.")
@click.option("--set-mib", default=512, show_default=True, help="Chunks of one peer on the device at a time.")
@click.option("--rounds", default=5, show_default=True, help="Counted turns of every peer.")
@click.option("--seconds", default=1.0, show_default=True, help="A phase lasts at least this long.")
@click.option("--quick", is_flag=True, help="In minutes: 3 rounds of sets of 256 MiB, 0.3 s a phase.")
@click.option(
    "--memory",
    type=click.Choice(["ordinary", "huge"]),
    default="ordinary",
    show_default=True,
    help="Of the tensors: as torch makes them, or aligned on huge pages.",
)
@click.option("--threads", default=4, show_default=True, help="Of peers that work with a pool of threads.")
@click.option("--peer", "wanted", multiple=True, type=click.Choice(list(PEERS)), help="Only these.")
@click.option("--peer-python", type=click.Path(exists=True), help="A Python that has what this one has not.")
@click.option("--install-peers", type=click.Path(file_okay=False), help="Make such a Python here, use it.")
def main(
    on: DeviceOptions,
    to: OutputOptions,
    chunk_mib: tuple[float, ...],
    batch_mib: int,
    set_mib: int,
    rounds: int,
    seconds: float,
    quick: bool,
    memory: str,
    threads: int,
    wanted: tuple[str, ...],
    peer_python: str | None,
    install_peers: str | None,
) -> None:
    """Compare blockkv with other ways to keep tensors, on DEVICE, which is overwritten, or on one made."""
    console = to.console(TABLE_CHARS)
    if install_peers:
        peer_python = make_environment(Path(install_peers), console.print)
        if on.is_none:
            return
    if quick:
        rounds, set_mib, seconds = min(rounds, 3), min(set_mib, 256), min(seconds, 0.3)
    found = find_peers(list(dict.fromkeys([OURS, *(wanted or PEERS)])), peer_python)
    sizes_bytes = [int(mib * MEBIBYTE) for mib in chunk_mib]
    plan = Plan(sizes_bytes, batch_mib * MEBIBYTE, set_mib * MEBIBYTE, rounds, seconds, memory, threads)
    keep_mounts_private()
    count = len(sizes_bytes) * len(found.pythons) * (rounds + 2)
    with (
        on.target(plan.device_bytes(list(found.pythons)), large_requests=True) as target,
        bench_tool.progress_bar(count) as advance,
    ):
        steps = itertools.count()
        rows = compare(target.path, plan, found, target.force, lambda what: advance(what, next(steps)))
    to.document(document(target.described, plan, found, rows))
    console.print(table(rows, found))
    for line in remarks(rows, found):
        console.print(line, highlight=False, markup=False)
    to.draw(lambda figure: draw(figure, rows), width_in=15, height_in=1 + 3 * len(sizes_bytes))


if __name__ == "__main__":
    main()
