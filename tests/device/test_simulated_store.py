"""The store on the simulated device, crashed by tools/crash_explorer.py: a sample of what a long run does.

Every seeded protocol bug must be caught here: a harness that misses one would miss the real ones too.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "crash_explorer.py"
spec = importlib.util.spec_from_file_location("crash_explorer", TOOL)
assert spec is not None
assert spec.loader is not None
explorer = importlib.util.module_from_spec(spec)
sys.modules["crash_explorer"] = explorer
spec.loader.exec_module(explorer)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tens of thousands of expected warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("profile", explorer.PROFILES)
def test_crashed_histories_keep_every_promise(profile: str) -> None:
    tally = explorer.Tally()
    story = explorer.explore(explorer.Settings(seed=20, profile=profile), tally, 1, 200, None, float("inf"))
    assert story is None, story
    assert tally.states >= 200
    assert tally.recoveries_cut > 5


@pytest.mark.parametrize("number", [-1, -2, -3])
def test_directed_histories_keep_every_promise(number: int) -> None:
    tally = explorer.Tally()
    explorer.DIRECTED[number](number, explorer.Settings(seed=20), tally).run()
    assert tally.states > 90


@pytest.mark.parametrize("mutant", explorer.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_protocol_bug_is_caught(mutant: explorer.Mutant) -> None:
    settings = explorer.Settings(seed=20, profile=mutant.profile)
    with mutant.patch():
        story = explorer.explore(settings, explorer.Tally(), 0, 6000, None, float("inf"))
    assert story is not None, f"{mutant.name} went unnoticed"
    assert "seed 20 history" in story
    assert "timeline:" in story


def test_a_history_is_fixed_by_its_seed_and_number() -> None:
    def steps() -> tuple[list[str], int]:
        history = explorer.History(3, explorer.Settings(seed=20, profile="power"), explorer.Tally())
        history.run()
        return history.steps, history.tally.states

    assert steps() == steps()
