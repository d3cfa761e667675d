#!/usr/bin/env python3
"""Open one store at once from several threads and processes, under all of its names: one gets in.

    tools/race_test.py --races 1000 [--seed S] [--json]

In each race some of the contenders are threads of one process, some of another. What they open is

    file        a file: by its path, a relative path, a symbolic link, a hard link and a bind mount
    device      a loop device: by its node, another node for it, a symbolic link, and its backing file
    twins       two loop devices over the same bytes
    stacked     a loop device, and another one over it
    partition   a partition, another node for it, and the whole disk

Exactly one must win and all others be told DeviceBusy. Each open for writing makes one epoch: the store's
epoch must be one higher after each race, or a loser wrote before it was refused. Needs root. Exits with 1
when anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import blockkv
from blockkv.device import namespace

STORE_BYTES = 16 << 20
WAIT_S = 0.8
"""How long a loser waits for a lock: longer than contenders get in each other's way."""
THREADS = 3
PROCESSES = 2


@dataclass(frozen=True)
class Scenario:
    name: str
    paths: list[str]
    is_store: bool = True
    """Else only the device is opened: its names do not all lead to the same store."""

    def open(self, path: str) -> Callable[[], object]:
        """Raises DeviceBusy; returns how to let go."""
        if self.is_store:
            return blockkv.open(path, commit_interval_ms=None).close
        descriptor, _, _ = namespace.open_namespace(path)
        return functools.partial(os.close, descriptor)

    def epoch(self) -> int:
        if not self.is_store:
            return 0
        with blockkv.open(self.paths[0], read_only=True) as store:
            return int(store.info()["epoch"])


def tool(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextlib.contextmanager
def scenarios(directory: Path) -> Iterator[list[Scenario]]:
    """Everything that has several names."""
    with contextlib.ExitStack() as stack:

        def image(name: str) -> Path:
            path = directory / name
            with path.open("wb") as file:
                file.truncate(STORE_BYTES)
            return path

        def loop(over: object) -> str:
            path = tool("losetup", "--find", "--show", "--partscan", "--direct-io=on", over)
            stack.callback(tool, "losetup", "--detach", path)
            return path

        def node(device: str) -> str:
            path = directory / f"node-of-{Path(device).name}"
            os.mknod(path, stat.S_IFBLK | 0o600, Path(device).stat().st_rdev)
            return str(path)

        def link(target: object) -> str:
            path = directory / f"link-to-{Path(str(target)).name}"
            path.symlink_to(str(target))
            return str(path)

        file = image("file")
        (directory / "hard").hardlink_to(file)
        mount_point = directory / "mounted"
        mount_point.mkdir()
        tool("mount", "--bind", directory, mount_point)
        stack.callback(tool, "umount", mount_point)
        stack.enter_context(contextlib.chdir(directory))
        backing = image("backing")
        device = loop(backing)
        shared = image("shared")
        first, second = loop(shared), loop(shared)
        lower = loop(image("lower"))
        upper = loop(lower)
        disk = loop(image("disk"))
        tool("addpart", disk, 1, 2048, 16384)
        found = [
            Scenario(
                "file", [str(file), "file", link(file), str(directory / "hard"), str(mount_point / "file")]
            ),
            Scenario("device", [device, node(device), link(device), str(backing)]),
            Scenario("twins", [first, second]),
            Scenario("stacked", [lower, upper]),
            Scenario("partition", [disk, f"{disk}p1", node(f"{disk}p1")], is_store=False),
        ]
        for scenario in found:
            if scenario.is_store:
                # The lower one of a stack is never free to be opened: something is built on it.
                blockkv.format(scenario.paths[1 if scenario.name == "stacked" else 0], average_chunk="64KiB")
        yield [
            Scenario(one.name, one.paths[::-1], one.is_store) if one.name == "stacked" else one
            for one in found
        ]


def contend(scenario: Scenario, paths: list[str], start: float, say: int, hold: int) -> None:
    """The contenders of one process: every one says how it went; who won holds until told."""

    def one(path: str) -> None:
        time.sleep(max(0.0, start - time.monotonic()))
        try:
            let_go = scenario.open(path)
        except blockkv.DeviceBusy:
            os.write(say, f"busy {path}\n".encode())
            return
        except BaseException as error:
            os.write(say, f"{type(error).__name__} {path}: {error}\n".replace("\n", " ").encode() + b"\n")
            return
        os.write(say, f"won {path}\n".encode())
        os.read(hold, 1)
        let_go()

    threads = [threading.Thread(target=one, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def race(scenario: Scenario, rng: random.Random) -> tuple[Counter[str], list[str]]:
    """One race. Returns how the contenders fared and what is wrong with that."""
    before = scenario.epoch()
    hear, say = os.pipe()
    hold, release = os.pipe()
    start = time.monotonic() + 0.05
    children = []
    for _ in range(PROCESSES):
        # The first name is one that can be opened; not all can, beside the others.
        paths = [scenario.paths[0], *(rng.choice(scenario.paths) for _ in range(THREADS - 1))]
        child = os.fork()
        if child == 0:
            os.close(hear)
            os.close(release)
            with contextlib.suppress(BaseException):
                contend(scenario, paths, start, say, hold)
            os._exit(0)
        children.append(child)
    os.close(say)
    os.close(hold)
    with os.fdopen(hear) as lines:
        said = [lines.readline() for _ in range(PROCESSES * THREADS)]
        os.close(release)
        said += lines.readlines()
    for child in children:
        os.waitpid(child, 0)
    outcomes = Counter(line.partition(" ")[0] for line in said)
    problems = [line.strip() for line in said if line.split(" ")[0] not in ("busy", "won")]
    if outcomes["won"] != 1 or len(said) != PROCESSES * THREADS:
        problems.append(f"{outcomes['won']} winners: {' '.join(line.strip() for line in said)}")
    if scenario.is_store and scenario.epoch() != before + outcomes["won"]:
        problems.append(f"{outcomes['won']} opens, but the epoch went from {before} to {scenario.epoch()}")
    return outcomes, [f"{scenario.name}: {problem}" for problem in problems]


def run(races: int, seed: int, directory: Path, progress: Callable[[], None]) -> dict[str, Any]:
    rng = random.Random(seed)  # noqa: S311
    outcomes: Counter[str] = Counter()
    by_scenario: Counter[str] = Counter()
    findings: list[str] = []
    namespace.LOCK_WAIT_S = WAIT_S
    with scenarios(directory) as found:
        for number in range(races):
            scenario = found[number % len(found)]
            fared, problems = race(scenario, rng)
            outcomes += fared
            by_scenario[scenario.name] += 1
            findings += [f"race {number}: {problem}" for problem in problems]
            progress()
    return {
        "races": races,
        "seed": seed,
        "winners": outcomes["won"],
        "refused": outcomes["busy"],
        "by_scenario": dict(by_scenario),
        "findings": findings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--races", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: random, printed")
    parser.add_argument("--directory", type=Path, help="for images, existing and empty (default: in memory)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    logging.getLogger("blockkv").setLevel(logging.CRITICAL)
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        directory = options.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="blockkv-race.", dir="/dev/shm"))
        )
        bar = stack.enter_context(Progress(console=console, disable=not console.is_terminal))
        task = bar.add_task("racing", total=options.races)
        figures = run(options.races, seed, directory, lambda: bar.advance(task))
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>12}  {value}")
    return int(bool(figures["findings"]))


if __name__ == "__main__":
    sys.exit(main())
