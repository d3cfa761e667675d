"""The allocator against a model that keeps one state per unit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockkv.errors import FormatError
from blockkv.format.geometry import MAX_EXTENT_UNITS, MAX_EXTENTS, RUN_UNITS
from blockkv.space.allocator import Allocator

FREE, LIVE, PENDING, QUARANTINED, WITHHELD = "free", "live", "pending", "quarantined", "withheld"


class Model:
    """One state per unit, and the placement rules restated over that list."""

    def __init__(self, data_units: int) -> None:
        self.states = [FREE] * data_units
        self.came_back: set[int] = set()
        """Units that were given back since they were withheld."""

    def mark(self, extents, state: str, expected: str) -> None:
        for start, count in extents:
            for unit in range(start, start + count):
                assert self.states[unit] == expected, f"unit {unit} is {self.states[unit]}, not {expected}"
                self.states[unit] = state
                if state == FREE and expected != WITHHELD:
                    self.came_back.add(unit)

    def count(self, state: str) -> int:
        return self.states.count(state)

    def free_extents(self) -> list[tuple[int, int]]:
        found = []
        for state, group in itertools.groupby(enumerate(self.states), key=lambda pair: pair[1]):
            units = [unit for unit, _ in group]
            if state == FREE:
                found.append((units[0], len(units)))
        return found

    def aligned_lengths(self) -> list[int]:
        """Units from the first run boundary to the end, of free extents with a whole run, longest first."""
        lengths = [start + count - -(-start // RUN_UNITS) * RUN_UNITS for start, count in self.free_extents()]
        return sorted((length for length in lengths if length >= RUN_UNITS), reverse=True)

    def holes(self) -> list[int]:
        """Sizes of the free stretches inside runs that are not wholly free (or not whole runs)."""
        sizes = []
        for first in range(0, len(self.states), RUN_UNITS):
            run = self.states[first : first + RUN_UNITS]
            if run == [FREE] * RUN_UNITS:
                continue
            sizes += [len(list(group)) for state, group in itertools.groupby(run) if state == FREE]
        return sizes

    def whole_runs(self) -> int:
        return sum(length // RUN_UNITS for length in self.aligned_lengths())

    def fewest_extents(self, units: int) -> int | None:
        """How many extents a chunk of a run or more takes at least; None where it has no place."""
        rest = units
        lengths = self.aligned_lengths()
        for used, length in enumerate(lengths):
            if rest <= length:
                return used + 1
            rest -= length // RUN_UNITS * RUN_UNITS
            if rest < RUN_UNITS and any(size >= rest for size in self.holes()):
                return used + 2
        return None


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(data_units=st.integers(1, 10 * RUN_UNITS), grain_units=st.sampled_from([32, 32, 64]))
    def start(self, data_units: int, grain_units: int) -> None:
        self.model = Model(data_units)
        self.allocator = Allocator(data_units)
        self.grain_units = grain_units
        self.allocator.remember_freed(grain_units)
        self.withheld: list[tuple[int, int]] = []
        self.chunks: list[tuple[tuple[int, int], ...]] = []
        self.waiting: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self.quarantined: list[tuple[tuple[int, int], ...]] = []

    @rule(units=st.one_of(st.integers(1, 31), st.integers(32, 200), st.sampled_from([32, 64, 96])))
    def allocate(self, units: int) -> None:
        free, holes, lengths = self.model.count(FREE), self.model.holes(), self.model.aligned_lengths()
        whole_runs, fewest = self.model.whole_runs(), self.model.fewest_extents(units)
        extents = self.allocator.allocate(units)
        if units < RUN_UNITS:
            assert (extents is None) == (units > free)
        else:
            assert (extents is None) == (fewest is None)
        if extents is None:
            return
        self.model.mark(extents, LIVE, FREE)
        self.chunks.append(extents)
        assert sum(count for _, count in extents) == units
        if units < RUN_UNITS:
            fitting = [size for size in holes if size >= units]
            assert len(extents) == 1 or not (fitting or whole_runs)
            assert self.model.whole_runs() == whole_runs - (not fitting and whole_runs > 0)
            if fitting:
                holes.remove(min(fitting))
                holes += [min(fitting) - units] if min(fitting) > units else []
                assert sorted(self.model.holes()) == sorted(holes)
        else:
            assert len(extents) == fewest
            assert all(start % RUN_UNITS == 0 for start, _ in extents[:-1])
            assert all(count % RUN_UNITS == 0 for _, count in extents[:-1])
            assert extents[-1][0] % RUN_UNITS == 0 or extents[-1][1] < RUN_UNITS
            if len(extents) == 1:
                tightest = min(length for length in lengths if length >= units)
                lengths.remove(tightest)
                if tightest - units >= RUN_UNITS:
                    rest = tightest - -(-units // RUN_UNITS) * RUN_UNITS
                    lengths += [rest] if rest >= RUN_UNITS else []
                assert self.model.aligned_lengths() == sorted(lengths, reverse=True)

    def take(self, data: Any) -> tuple[tuple[int, int], ...]:
        return self.chunks.pop(data.draw(st.integers(0, len(self.chunks) - 1), label="chunk"))

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        extents = self.take(data)
        self.allocator.release(extents)
        self.model.mark(extents, FREE, LIVE)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), token=st.integers(0, 9))
    def defer(self, data: Any, token: int) -> None:
        extents = self.take(data)
        self.allocator.defer(extents, token)
        self.model.mark(extents, PENDING, LIVE)
        self.waiting.append((token, extents))

    @rule(token=st.integers(0, 9))
    def settle(self, token: int) -> None:
        settled = [extents for waiting, extents in self.waiting if waiting <= token]
        self.waiting = [(waiting, extents) for waiting, extents in self.waiting if waiting > token]
        for extents in settled:
            self.model.mark(extents, FREE, PENDING)
        assert self.allocator.settle(token) == sum(count for extents in settled for _, count in extents)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def quarantine(self, data: Any) -> None:
        extents = self.take(data)
        self.allocator.quarantine(extents)
        self.model.mark(extents, QUARANTINED, LIVE)
        self.quarantined.append(extents)

    @rule(data=st.data(), limit_units=st.integers(0, 200))
    def withhold(self, data: Any, limit_units: int) -> None:
        """What came back, whole grains; never more than there is, and nothing of what is in use."""
        owners = self.allocator.longest_free(0, 100)
        counts = dict(self.model.free_extents())
        assert len(owners) == len(self.model.aligned_lengths())
        for owner in [*owners, 1 << 40] if data.draw(st.booleans()) else owners[:1]:
            first = -(-owner // self.grain_units) * self.grain_units
            end = owner + counts.get(owner, 0)
            grains = [
                grain
                for grain in range(first, end - self.grain_units + 1, self.grain_units)
                if self.model.came_back & set(range(grain, grain + self.grain_units))
            ]
            extent = self.allocator.withhold(owner, limit_units)
            assert (extent is None) == (not grains or limit_units < self.grain_units)
            if extent is None:
                continue
            start, count = extent
            assert start == grains[0]
            assert 0 < count <= limit_units
            assert not count % self.grain_units
            self.model.mark([extent], WITHHELD, FREE)
            assert set(range(start, start + count, self.grain_units)) <= set(grains)
            self.model.came_back -= set(range(start, start + count))
            self.withheld.append(extent)

    @precondition(lambda self: self.withheld)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        extent = self.withheld.pop(data.draw(st.integers(0, len(self.withheld) - 1), label="withheld"))
        self.allocator.give_back(extent)
        self.model.mark([extent], FREE, WITHHELD)

    @rule(random_order=st.randoms(use_true_random=False))
    def reopen(self, random_order: random.Random) -> None:
        """Only what is live survives; the free map is the complement."""
        for extents in [*self.quarantined, self.withheld, *(extents for _, extents in self.waiting)]:
            for start, count in extents:
                self.model.states[start : start + count] = [FREE] * count
        self.quarantined, self.waiting, self.withheld = [], [], []
        self.model.came_back.clear()
        live = self.live_extents()
        random_order.shuffle(live)
        self.allocator = Allocator.from_live(len(self.model.states), live)
        self.allocator.remember_freed(self.grain_units)

    def live_extents(self) -> list[tuple[int, int]]:
        return [extent for extents in self.chunks for extent in extents]

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check(self.live_extents())
        assert list(self.allocator.free_extents()) == self.model.free_extents()
        assert self.allocator.free_extent_count == len(self.model.free_extents())
        assert self.allocator.free_units == self.model.count(FREE)
        assert self.allocator.live_units == self.model.count(LIVE)
        assert self.allocator.pending_units == self.model.count(PENDING)
        assert self.allocator.quarantined_units == self.model.count(QUARANTINED)
        assert self.allocator.withheld_units == self.model.count(WITHHELD)
        assert self.allocator.largest_free == max([*self.model.aligned_lengths()[:1], *self.model.holes(), 0])


AllocatorMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAllocatorAgainstModel = AllocatorMachine.TestCase


def test_runs_are_shared_by_small_chunks_and_kept_whole_for_large_ones() -> None:
    allocator = Allocator(4 * RUN_UNITS)
    small = [allocator.allocate(8) for _ in range(4)]
    assert sorted(start for ((start, _),) in small) == [0, 8, 16, 24]
    assert allocator.allocate(3 * RUN_UNITS) == ((RUN_UNITS, 3 * RUN_UNITS),)
    assert allocator.free_units == 0


def test_the_tightest_fit_is_taken() -> None:
    # Free: 32 units at 0, 64 at 64, 33 at 192.
    allocator = Allocator.from_live(8 * RUN_UNITS, [(32, 32), (128, 64), (225, 31)])
    assert allocator.allocate(33) == ((192, 33),)
    assert allocator.allocate(64) == ((64, 64),)
    assert allocator.allocate(32) == ((0, 32),)


def test_a_scattered_large_chunk_takes_the_longest_first() -> None:
    # Free: 32 at 0, 96 at 64, 64 at 192, 5 at 290.
    allocator = Allocator.from_live(10 * RUN_UNITS, [(32, 32), (160, 32), (256, 34), (295, 25)])
    assert allocator.allocate(96 + 64 + 5) == ((64, 96), (192, 64), (290, 5))
    assert allocator.allocate(33) is None
    assert allocator.allocate(32) == ((0, 32),)


def test_the_rest_of_a_scattered_chunk_is_a_tight_fit_too() -> None:
    # Free: 96 at 0, 64 at 128, 32 at 224.
    allocator = Allocator.from_live(8 * RUN_UNITS, [(96, 32), (192, 32)])
    assert allocator.allocate(128) == ((0, 96), (224, 32))


def test_small_chunks_leave_the_free_space_beside_them_in_one_piece() -> None:
    allocator = Allocator.from_live(128, [(40, 88)])
    assert allocator.allocate(4) == ((36, 4),)  # the end of the hole, not its middle
    assert list(allocator.free_extents()) == [(0, 36)]
    allocator = Allocator.from_live(128, [(0, 28), (96, 32)])
    assert allocator.allocate(8) == ((88, 8),)  # breaks the last run, not the one in the middle
    assert list(allocator.free_extents()) == [(28, 60)]


def test_a_small_chunk_is_divided_only_when_nothing_else_is_left() -> None:
    live = [(unit, 1) for unit in range(64) if unit % 4 == 0]
    allocator = Allocator.from_live(64, live)
    extents = allocator.allocate(7)
    assert extents is not None
    assert sorted(count for _, count in extents) == [1, 3, 3]
    allocator.check([*live, *extents])


def test_small_chunks_of_one_call_lie_one_behind_the_other() -> None:
    allocator = Allocator(16 * RUN_UNITS)
    hole = allocator.allocate(3)
    assert hole is not None
    found = allocator.allocate_many([4] * 20 + [2 * RUN_UNITS] + [7] * 5)
    small = [extents for extents in found if sum(count for _, count in extents) < RUN_UNITS]
    assert [count for extents in small for _, count in extents] == [4] * 20 + [7] * 5
    place = small[0][0][0]
    assert place % RUN_UNITS == 0
    for ((start, count),) in small:
        assert start == place
        place += count
    allocator.check([*hole, *itertools.chain.from_iterable(found)])


def test_less_than_a_run_of_small_chunks_fills_holes() -> None:
    allocator = Allocator(4 * RUN_UNITS)
    allocator.allocate(3)
    found = allocator.allocate_many([4, 4])
    assert all(start < RUN_UNITS for ((start, _),) in found)


def test_many_chunks_get_space_up_to_the_first_that_gets_none() -> None:
    allocator = Allocator(4 * RUN_UNITS)
    found = allocator.allocate_many([RUN_UNITS, 5, 2 * RUN_UNITS, 30, 2 * RUN_UNITS, 1])
    assert len(found) == 3
    assert allocator.free_units == 4 * RUN_UNITS - 3 * RUN_UNITS - 5
    allocator.check(itertools.chain.from_iterable(found))
    full = Allocator(RUN_UNITS)
    assert full.allocate_many([20, 20]) == [((0, 20),)]
    full.check([(0, 20)])


def test_no_chunk_has_more_extents_than_a_record_holds() -> None:
    runs = 2 * MAX_EXTENTS + 2
    every_other = [(run * RUN_UNITS, RUN_UNITS) for run in range(1, runs, 2)]
    allocator = Allocator.from_live(runs * RUN_UNITS, every_other)
    assert allocator.allocate((MAX_EXTENTS + 1) * RUN_UNITS) is None
    extents = allocator.allocate(MAX_EXTENTS * RUN_UNITS)
    assert extents is not None
    assert len(extents) == MAX_EXTENTS
    allocator.check([*every_other, *extents])


def test_extents_longer_than_a_record_can_express_are_divided() -> None:
    units = 2 * MAX_EXTENT_UNITS + 5
    allocator = Allocator(1 << 28)
    extents = allocator.allocate(units)
    assert extents == (
        (0, MAX_EXTENT_UNITS),
        (MAX_EXTENT_UNITS, MAX_EXTENT_UNITS),
        (2 * MAX_EXTENT_UNITS, 5),
    )
    allocator.release(extents)
    assert list(allocator.free_extents()) == [(0, 1 << 28)]


def test_a_chunk_of_too_many_long_extents_takes_nothing() -> None:
    allocator = Allocator(1 << 33)
    assert allocator.allocate(MAX_EXTENTS * MAX_EXTENT_UNITS + 1) is None
    allocator.check([])
    assert allocator.free_units == 1 << 33


def test_overlapping_live_extents_are_named() -> None:
    with pytest.raises(FormatError, match="10 units at 5 and 4 units at 14"):
        Allocator.from_live(100, [(14, 4), (5, 10), (60, 1)])
    with pytest.raises(FormatError, match="4 units at 97 is not inside 100"):
        Allocator.from_live(100, [(97, 4), (5, 10)])


def test_giving_back_what_is_free_fails() -> None:
    allocator = Allocator(100)
    extents = allocator.allocate(10)
    assert extents is not None
    allocator.release(extents)
    for give_back in (allocator.release, allocator.quarantine, lambda extents: allocator.defer(extents, 1)):
        with pytest.raises(AssertionError, match="free already"):
            give_back(extents)
    with pytest.raises(AssertionError, match="do not exist"):
        allocator.release([(96, 5)])


def test_check_finds_what_the_cheap_assertions_miss() -> None:
    allocator = Allocator(256)
    extents = allocator.allocate(64)
    assert extents is not None
    allocator.quarantine([(128, 4)])  # strictly inside a free extent, so nothing notices yet
    with pytest.raises(AssertionError, match="overlaps"):
        allocator.check()


def test_check_finds_units_that_are_nowhere() -> None:
    allocator = Allocator(256)
    extents = allocator.allocate(64)
    assert extents is not None
    allocator.check(extents)
    with pytest.raises(AssertionError, match="nowhere"):
        allocator.check([])


def test_pending_extents_wait_for_their_token() -> None:
    allocator = Allocator(96)
    first, second = allocator.allocate(32), allocator.allocate(32)
    assert first is not None
    assert second is not None
    allocator.defer(first, 7)
    allocator.defer(second, 9)
    assert allocator.allocate(64) is None
    assert allocator.settle(6) == 0
    assert list(allocator.pending_extents()) == [*first, *second]
    assert allocator.settle(8) == 32
    assert allocator.pending_units == 32
    assert list(allocator.pending_extents()) == list(second)


def test_one_history_gives_one_placement() -> None:
    """Nothing depends on hash order, time or chance."""

    def history() -> list[object]:
        dice = random.Random(11)
        allocator = Allocator(1 << 14)
        live: list[tuple[tuple[int, int], ...]] = []
        seen: list[object] = []
        for _ in range(2000):
            if live and dice.random() < 0.45:
                allocator.release(live.pop(dice.randrange(len(live))))
            else:
                extents = allocator.allocate(dice.choice([1, 5, 31, 32, 40, 300]))
                seen.append(extents)
                if extents is not None:
                    live.append(extents)
        allocator.check([extent for extents in live for extent in extents])
        return seen

    assert history() == history()


def test_many_equal_holes_are_taken_in_constant_time_each() -> None:
    """Popping the newest of 200,000 equal holes one by one must not walk over the ones taken before."""
    holes = 200_000
    allocator = Allocator.from_live(holes * 40, [(index * 40 + 8, 32) for index in range(holes)])
    taken = [allocator.allocate(8) for _ in range(holes)]
    assert None not in taken
    assert allocator.free_units == 0
