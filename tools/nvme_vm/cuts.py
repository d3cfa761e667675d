"""Power cuts: a store in the guest, the plug pulled at a random moment, and a look at what is left.

One boot gives many cuts. The drive's history is replayed up to random moments, and at each one its volatile
writes are kept, lost and torn at random. The boot itself ends in a cut too: the virtual machine is killed,
and the next one boots with what that left, opens the store under the real kernel and goes on.

The judge is judged: a workload whose flushes do nothing must be found out, in the same boot.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from guest_system import GuestSystem
from machine import Machine, Namespace
from nbd_server import ControlDisk, Event, Export, NbdServer, VolatileDisk, Write
from oracle import Oracle
from power_cuts import Media, judge
from workspace import workspace

__all__ = ["run_cuts"]

ROOT = Path(__file__).parents[2]
WORKLOAD = Path(__file__).with_name("guest_workload.py")
IMAGE_BYTES = 24 << 20
CONTROL_LBA_BYTES = 512
MUTANT_STEPS = 40
TIMEOUT_S = 1800.0


@dataclass
class Figures:
    """What was done and what was found."""

    seed: int
    cuts: int = 0
    boots: int = 0
    opens_in_guest: int = 0
    durable_acknowledged: int = 0
    flushes: int = 0
    writes: int = 0
    largest_volatile_bytes: int = 0
    violations: int = 0
    mutant_cuts: int = 0
    mutant_violations: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations and (not self.mutant_cuts or bool(self.mutant_violations))


def run_cuts(
    system: GuestSystem,
    *,
    count: int,
    boots: int,
    mutant_cuts: int,
    most_events: int,
    lba_bytes: int,
    seed: int,
    keep: Path,
    say: Callable[[str], None],
) -> Figures:
    """Cut the power `count` times in all; what a violation was found in stays in `keep`.

    The seed fixes every choice made here and in the guest, but not the guest's speed. Raises MachineError.
    """
    rng = random.Random(seed)  # noqa: S311
    figures = Figures(seed)
    media, oracle = bytearray(IMAGE_BYTES), Oracle()
    for boot in range(boots):
        mutate = mutant_cuts > 0 and boot == 0
        history = work_until_cut(
            system, media, lba_bytes, most_events, rng, is_first=boot == 0, mutate=mutate, say=say
        )
        say(f"boot {boot + 1} of {boots} ended after {len(history)} events; replaying them")
        if mutate:
            mutant = Replay("mutant", bytearray(IMAGE_BYTES), Oracle())
            mutant.run(history, mutant_cuts, rng, keep=None)
            figures.mutant_cuts, figures.mutant_violations = mutant_cuts, len(mutant.findings)
        replay = Replay("data", media, oracle)
        share = count * (boot + 1) // boots - count * boot // boots
        media = replay.run(history, share, rng, keep)
        figures.boots += 1
        figures.cuts += share
        figures.flushes += replay.media.flush_count
        figures.writes += replay.write_count
        figures.largest_volatile_bytes = max(figures.largest_volatile_bytes, replay.largest_volatile_bytes)
        figures.findings += [f"boot {boot + 1}, {finding}" for finding in replay.findings]
    figures.opens_in_guest = oracle.open_count
    figures.durable_acknowledged = oracle.durable_count
    figures.violations = len(figures.findings)
    return figures


def work_until_cut(
    system: GuestSystem,
    media: bytearray,
    lba_bytes: int,
    most_events: int,
    rng: random.Random,
    *,
    is_first: bool,
    mutate: bool,
    say: Callable[[str], None],
) -> list[Event]:
    """Boot with these bytes on the media, work, pull the plug; returns what happened up to then."""
    enough = threading.Event()
    opened_at = 0
    extra_events = rng.randrange(most_events // 2, most_events)

    def on_text(text: str) -> str:
        nonlocal opened_at
        if text.startswith("failed"):
            enough.set()
        elif opened_at:
            if len(server.history) >= opened_at + extra_events:
                enough.set()
        elif text.startswith(("found", "missing")):
            opened_at = len(server.history)
        return ""

    with workspace() as directory:
        exports: list[Export] = [VolatileDisk("data", bytearray(media)), ControlDisk("control", on_text)]
        if mutate:
            exports += [VolatileDisk("mutant", bytearray(IMAGE_BYTES)), ControlDisk("mutant-control")]
        with NbdServer(directory, exports, random.Random(rng.random())) as server:  # noqa: S311
            namespaces = [
                Namespace(
                    server.paths[export.name],
                    nsid,
                    CONTROL_LBA_BYTES if isinstance(export, ControlDisk) else lba_bytes,
                    is_nbd=True,
                )
                for nsid, export in enumerate(exports, 1)
            ]
            words = [str(ROOT / ".venv/bin/python"), str(WORKLOAD), str(rng.random())]
            words += ["--fresh"] if is_first else []
            words += ["--mutant-steps", str(MUTANT_STEPS)] if mutate else []
            script = [["cd", str(ROOT)], words]
            with Machine(system, namespaces, script, on_line=say) as machine:
                machine.watch(enough, TIMEOUT_S)
                history = server.cut_power()
                machine.kill()
    return history


class Replay:
    """Walks through the history of a drive and cuts the power here and there."""

    def __init__(self, drive: str, media: bytearray, oracle: Oracle) -> None:
        self.media = Media(drive, bytearray(media))
        self.findings: list[str] = []
        self.write_count = 0
        self.largest_volatile_bytes = 0
        self._drive = drive
        self._control = "control" if drive == "data" else f"{drive}-control"
        self._oracle = oracle

    def run(self, history: list[Event], count: int, rng: random.Random, keep: Path | None) -> bytearray:
        """Cut `count` times, the last time at the end; returns what that one left on the media."""
        events = [event for event in history if event.drive in (self._drive, self._control)]
        places = sorted(rng.randrange(len(events)) for _ in range(count - 1))
        image = bytearray()
        for number, event in enumerate(events):
            if isinstance(event.subject, str):
                self._oracle.hear(event.subject)
            else:
                self.media.follow(event)
                self.write_count += isinstance(event.subject, Write) and not event.is_answer
            self.largest_volatile_bytes = max(self.largest_volatile_bytes, self.media.volatile_bytes)
            while places and places[0] == number:
                places.pop(0)
                self._cut(number, rng, keep)
        image = self._cut(len(events), rng, keep)
        self.findings += self._oracle.violations
        self._oracle.violations = []
        return image

    def _cut(self, number: int, rng: random.Random, keep: Path | None) -> bytearray:
        image = self.media.cut(rng)
        with workspace() as directory:
            file = directory / "cut.img"
            file.write_bytes(image)
            problems = judge(file, self._oracle)
        if problems and keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"cut-{number}.img").write_bytes(image)
            (keep / f"cut-{number}.txt").write_text("\n".join(problems) + "\n")
        self.findings += [f"event {number}: {problem}" for problem in problems]
        return image
