#!/usr/bin/env python3
"""A real NVMe namespace under a real kernel and driver, in a virtual machine. Needs root, x86-64, Debian 12.

    tools/nvme_vm/nvme_vm.py prepare                      what it needs: packages, a kernel in a cache
    tools/nvme_vm/nvme_vm.py suite [--quick] [TEST ...]   the device tests on both LBA formats
    tools/nvme_vm/nvme_vm.py cuts --count 200 --seed 1    power cuts that lose unflushed writes
    tools/nvme_vm/nvme_vm.py faults                       media errors, a hang, namespaces that go away

Exits with 1 when something was found, 2 when the virtual machine could not do its work. What each of them
shows, and what this emulation cannot show, is in docs/testing-nvme.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from guest_system import GuestSystem, SetupError, prepare
from machine import MachineError


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def suite(system: GuestSystem, options: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    from suite import FULL, QUICK, run_suite

    figures = run_suite(system, options.tests or (QUICK if options.quick else FULL), say)
    return figures.passed, dataclasses.asdict(figures)


def cuts(system: GuestSystem, options: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    from cuts import run_cuts

    figures = run_cuts(
        system,
        count=options.count,
        boots=options.boots,
        mutant_cuts=options.mutant_cuts,
        most_events=options.events,
        lba_bytes=options.lba_bytes,
        seed=options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32),
        keep=options.keep or Path(tempfile.gettempdir(), "blockkv-power-cuts"),
        say=say,
    )
    return figures.passed, dataclasses.asdict(figures)


def faults(system: GuestSystem, options: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    from faults import run_faults

    figures = run_faults(system, options.tests, say)
    return figures.passed, dataclasses.asdict(figures)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").set_defaults(action=None)
    for action in (suite, cuts, faults):
        command = commands.add_parser(action.__name__)
        command.set_defaults(action=action)
        command.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
        if action is suite:
            command.add_argument("--quick", action="store_true", help="the selection that CI runs")
        if action is not cuts:
            command.add_argument(
                "tests", nargs="*", help="pytest arguments, after --; default: all that apply"
            )
        else:
            command.add_argument("--count", type=int, default=200, help="power cuts to look at")
            command.add_argument("--boots", type=int, default=2, help="each ends with a cut of its own")
            command.add_argument("--mutant-cuts", type=int, default=20, help="of a store that does not flush")
            command.add_argument("--events", type=int, default=4000, help="at most, before the plug is out")
            command.add_argument("--lba-bytes", type=int, choices=(512, 4096), default=512)
            command.add_argument("--seed", type=int, default=None, help="default: random, printed")
            command.add_argument("--keep", type=Path, default=None, help="directory for images of violations")
    options = parser.parse_args()
    # a terminated harness takes its virtual machine down
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    try:
        system = prepare(say)
        if options.action is None:
            return 0
        started = time.monotonic()
        passed, figures = options.action(system, options)
    except (SetupError, MachineError) as error:
        say(f"nvme_vm: {error}")
        return 2
    figures["wall_s"] = round(time.monotonic() - started, 1)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>24}  {value}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
