"""The write budget: never more in 24 hours than it says, whatever comes when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockkv.catalog.wear import DAY_S, WriteBudget
from blockkv.errors import InvalidArgument

GIB = 1 << 30
A_DAY = 240 * GIB


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.floats(0, 40_000), st.integers(1, 20 * GIB)), max_size=60))
def test_no_day_takes_more_than_its_budget(writes: list[tuple[float, int]]) -> None:
    clock = Clock()
    budget = WriteBudget(A_DAY, clock)
    admitted: list[tuple[float, int]] = []
    for pause_s, size_bytes in writes:
        clock.now_s += pause_s
        if budget.admits(size_bytes):
            admitted.append((clock.now_s, size_bytes))
    for number, (first_s, _) in enumerate(admitted):
        day = [size for at_s, size in admitted[number:] if at_s - first_s <= DAY_S]
        assert sum(day) <= A_DAY + 1


def test_it_is_empty_at_first_and_holds_an_hour() -> None:
    clock = Clock()
    budget = WriteBudget(A_DAY, clock)
    assert not budget.admits(1)
    clock.now_s += 3600
    assert 9 * GIB < budget.left_bytes() < 10 * GIB
    clock.now_s += 10 * 3600
    assert budget.left_bytes() == 10 * GIB
    assert budget.admits(10 * GIB)
    assert not budget.admits(1 << 20)


def test_what_was_not_asked_for_is_a_debt() -> None:
    clock = Clock()
    budget = WriteBudget(A_DAY, clock)
    clock.now_s += 3600
    budget.charge(15 * GIB)
    assert budget.left_bytes() < -5 * GIB
    clock.now_s += 1800
    assert not budget.admits(1)
    clock.now_s += 3600
    assert budget.admits(1)


def test_a_chunk_larger_than_the_bucket_never_fits() -> None:
    clock = Clock()
    budget = WriteBudget(A_DAY, clock)
    clock.now_s += 1e6
    assert not budget.admits(10 * GIB + 1)
    assert budget.admits(10 * GIB)
    assert budget.left_bytes() == 0


def test_what_is_given_back_does_not_overfill_it() -> None:
    clock = Clock()
    budget = WriteBudget(A_DAY, clock)
    clock.now_s += 1e6
    assert budget.admits(4 * GIB)
    clock.now_s += 1e6
    budget.refund(4 * GIB)
    assert budget.left_bytes() == 10 * GIB
    assert budget.admits(4 * GIB)
    budget.refund(3 * GIB)
    assert budget.left_bytes() == 9 * GIB


@pytest.mark.parametrize("wrong", [0, -1, 5_000_000, 1e12, "2TB", 10**400])
def test_what_cannot_be_meant_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="bytes a day"):
        WriteBudget(wrong)  # type: ignore[arg-type]
    assert WriteBudget(A_DAY).shared(4).bytes_per_day == A_DAY // 4
    with pytest.raises(InvalidArgument):
        WriteBudget(2 * GIB).shared(3)
