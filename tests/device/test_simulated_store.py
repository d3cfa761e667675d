"""The store on the simulated device, crashed by tools/crash_py: a sample of what a long run does.

Every seeded protocol bug must be caught here: a harness that misses one would miss the real ones too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from crash.directed import DIRECTED
from crash.history import PROFILES, History, Settings, Tally
from crash.mutants import MUTANTS, Mutant
from crash_explorer import explore


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tens of thousands of expected warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("profile", PROFILES)
def test_crashed_histories_keep_every_promise(profile: str) -> None:
    tally = Tally()
    story = explore(Settings(seed=20, profile=profile), tally, 1, 200, None, float("inf"))
    assert story is None, story
    assert tally.states >= 200
    assert tally.recoveries_cut > 5


@pytest.mark.parametrize("number", sorted(DIRECTED))
def test_directed_histories_keep_every_promise(number: int) -> None:
    tally = Tally()
    DIRECTED[number](number, Settings(seed=20), tally).run()
    assert tally.states > 90


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_protocol_bug_is_caught(mutant: Mutant) -> None:
    settings = Settings(seed=20, profile=mutant.profile)
    with mutant.patch():
        story = explore(settings, Tally(), 0, 6000, None, float("inf"))
    assert story is not None, f"{mutant.name} went unnoticed"
    assert "seed 20 history" in story
    assert "timeline:" in story


def test_a_history_is_fixed_by_its_seed_and_number() -> None:
    def steps() -> tuple[list[str], int]:
        history = History(3, Settings(seed=20, profile="power"), Tally())
        history.run()
        return history.steps, history.tally.states

    assert steps() == steps()
