"""Terms: whose content counts, from what the members at hand say."""

from __future__ import annotations

import pytest

from blockkv.errors import WrongStore
from blockkv.format.superblock import Membership
from blockkv.store.array_term import Standing, members_of, set_of, standing_of


def says(*terms: tuple[int, int, str]) -> list[Membership]:
    """(member, term, members of the term as "02") for each member that is there."""
    return [
        Membership(bytes(range(1, 17)), 3, index, term, set_of(map(int, members)))
        for index, term, members in terms
    ]


@pytest.mark.parametrize(
    ("found", "standing"),
    [
        (says((0, 1, "012"), (1, 1, "012"), (2, 1, "012")), Standing(1, 0b111, True)),
        (says((0, 1, "012"), (2, 1, "012")), Standing(1, 0b111, True)),
        # 1 was away
        (says((0, 2, "02"), (1, 1, "012"), (2, 2, "02")), Standing(2, 0b101, True)),
        (says((0, 2, "02"), (1, 1, "012")), Standing(2, 0b101, True)),
        # 2 was about to be told
        (says((0, 2, "02"), (1, 1, "012"), (2, 1, "012")), Standing(2, 0b101, True)),
        # both were about to go on without the other, and 2 knows which did, or that none did
        (says((0, 2, "02"), (1, 2, "12"), (2, 2, "12")), Standing(2, 0b110, True)),
        (says((0, 2, "02"), (1, 2, "12"), (2, 1, "012")), Standing(2, 0b111, False)),
    ],
)
def test_whose_content_counts(found: list[Membership], standing: Standing) -> None:
    assert standing_of(found) == standing


@pytest.mark.parametrize(
    "found",
    [
        says((0, 2, "0"), (1, 2, "1")),
        says((0, 2, "0"), (1, 2, "12"), (2, 2, "12")),
        says((0, 2, "02"), (1, 2, "12")),
    ],
)
def test_sides_that_may_both_have_gone_on_are_refused(found: list[Membership]) -> None:
    with pytest.raises(WrongStore, match="each without the other"):
        standing_of(found)


def test_sets_of_members() -> None:
    assert members_of(0b1101) == [0, 2, 3]
    assert set_of([3, 0, 2]) == 0b1101
