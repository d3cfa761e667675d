#!/usr/bin/env python3
"""Crash the store, by the hundred thousand, and compare what comes back with what was promised.

One history is a sequence of puts (one piece to several, a byte to several runs), deletes, gets, flushes,
checkpoints, discards and reopens on a simulated device with a journal of a few pages, so that it wraps all
the time and groups of three pages and more are in flight. Everything about it follows from --seed and its
number. On the way, before any device operation, the state a crash would leave is cloned off, recovered and
judged; the recovery may itself be cut short several times over. Then the history goes on from a crash of
its own, several times.

Profiles
  power   power cuts and process kills, volatile cache, tearing, garbage sectors: nothing acknowledged may
          be lost, the index is a prefix of the log, contains() promises only what get() gives
  errors  the same, and operations that fail with EIO, ENODATA, ENOSPC or ETIMEDOUT
  lying   flushes that lie:                                 opens; exact bytes or a miss
  astray  lost, torn, misdirected writes and reads:         opens; exact bytes or a miss
  rot     bits that flip at rest, in data and metadata:     opens; exact bytes or a miss

Mutants are known protocol bugs patched into the store from here. Each must be caught: a harness that misses
them would miss the real ones.

    tools/crash_explorer.py --states 20000               all profiles in turn, then all mutants
    tools/crash_explorer.py --every --histories 500      a crash at every operation of 500 histories
    tools/crash_explorer.py --seed 1 --history 47        one history again, with its steps and timeline
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import logging
import secrets
import sys
import time
from typing import Any

from crash.directed import DIRECTED, QUICK
from crash.history import PROBE_SHARE, PROFILES, History, Settings, Tally
from crash.mutants import MUTANTS
from crash.oracle import Violation

from blockkv.format import superblock as superblock_module


def explore(
    settings: Settings, tally: Tally, first: int, states: int, histories: int | None, deadline: float
) -> str | None:
    """Run histories from number `first` on. Returns the story of the first violation, or None."""
    last_state = tally.states + states
    directed = list(DIRECTED) if settings.exhaustive else QUICK
    if first or settings.profile not in (None, "power"):
        directed = []
    for number in itertools.chain(directed, itertools.count(first)):
        if tally.states >= last_state or time.monotonic() >= deadline:
            return None
        if histories is not None and number >= first + histories:
            return None
        try:
            DIRECTED.get(number, History)(number, settings, tally).run()
        except Violation as violation:
            return str(violation)
    return None


def main() -> int:
    names = [mutant.name for mutant in MUTANTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=10_000, help="crash states to examine (default 10000)")
    parser.add_argument("--histories", type=int, help="at most this many histories")
    parser.add_argument("--seconds", type=float, help="at most this long, mutants not included")
    parser.add_argument("--seed", type=int, help="default: a fresh one, which is printed")
    parser.add_argument("--history", type=int, help="run this one again")
    parser.add_argument(
        "--every", action="store_true", help="a crash state before every device operation, every torn page"
    )
    parser.add_argument("--profile", choices=PROFILES, help="only this one")
    parser.add_argument(
        "--mutant",
        default="all",
        choices=[*names, "all", "none"],
        metavar="NAME",
        help="which mutants must be caught: all, none, or one of " + ", ".join(names),
    )
    parser.add_argument("--mutant-states", type=int, default=50_000, help="give up on a mutant after these")
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbelow(1 << 31)
        print(f"seed {options.seed}", file=sys.stderr)
    logging.disable(logging.CRITICAL)
    # A pure function that every recovery calls eight times, mostly with the same bytes.
    superblock_module.decode = functools.lru_cache(maxsize=4096)(superblock_module.decode)

    settings = Settings(options.seed, 1.0 if options.every else PROBE_SHARE, options.every, options.profile)
    tally, started = Tally(), time.monotonic()
    one_history = options.history is not None
    first, histories = (options.history, 1) if one_history else (0, options.histories)
    deadline = started + options.seconds if options.seconds else float("inf")
    violations: list[str] = []
    caught: dict[str, dict[str, Any]] = {}
    chosen = [mutant for mutant in MUTANTS if options.mutant in ("all", mutant.name)]
    if not (one_history and options.mutant in names):
        story = explore(settings, tally, first, 10**9 if one_history else options.states, histories, deadline)
        if story:
            violations.append(story)
            print(f"VIOLATION {story}", file=sys.stderr)
    elapsed_s = time.monotonic() - started
    for mutant in chosen if not one_history or options.mutant in names else []:
        mutant_settings = dataclasses.replace(settings, profile=mutant.profile)
        mutant_tally, mutant_started = Tally(), time.monotonic()
        with mutant.patch():
            story = explore(
                mutant_settings, mutant_tally, first, options.mutant_states, histories, float("inf")
            )
        caught[mutant.name] = {
            "caught": story is not None,
            "states": mutant_tally.states,
            "seconds": round(time.monotonic() - mutant_started, 1),
        }
        verdict = "caught" if story else "NOT CAUGHT"
        print(f"mutant {mutant.name:38} {verdict} after {mutant_tally.states} states", file=sys.stderr)
        if one_history and story:
            print(story, file=sys.stderr)

    result = {
        "states": tally.states,
        "violations": len(violations),
        "seed": options.seed,
        "histories": tally.histories,
        "operations": tally.operations,
        "recoveries_cut": tally.recoveries_cut,
        "states_by_profile": tally.by_profile,
        "states_per_second": round(tally.states / elapsed_s) if elapsed_s else 0,
        "seconds": round(elapsed_s, 1),
        "mutants": {name: found["caught"] for name, found in caught.items()},
        "mutant_states": {name: found["states"] for name, found in caught.items()},
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            if name not in ("mutants", "mutant_states"):
                print(f"{name:20} {value}")
    return 1 if violations or not all(found["caught"] for found in caught.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
