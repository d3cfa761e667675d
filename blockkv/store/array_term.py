"""Terms: which members of an array hold what counts.

A term is a number and the set of members that belong to it. Whoever goes on without a member, or takes one in
again, first writes the next term to every member that belongs to it, and until all of them have it nothing is
put. A member that comes back and does not belong to the newest term was away while others went on: a key that
it holds may have been put again elsewhere, with other bytes. So nothing that it holds counts.

A crash may come between any two members. One that belongs to the newest term and does not know it yet was
about to be told; nothing was put before it was, so what it holds counts.

Not here: writing terms, emptying members (`array_open`, `array_store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockkv.errors import WrongStore
from blockkv.format.superblock import Membership

__all__ = ["Standing", "members_of", "set_of", "standing_of"]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the members at hand say together."""

    term: int
    """The newest number that any of them knows."""
    members: int
    """Bit i: what member i holds counts."""
    settled: bool
    """Whether that is the very term `term`. Where it is not the next one has to be written."""


def standing_of(found: Sequence[Membership]) -> Standing:
    """Whose content counts, of an array of which `found` are at hand; each once, and of one array.

    Raises WrongStore where two sets of members have gone on without each other.
    """
    term = max(one.term for one in found)
    claims = {one.term_members for one in found if one.term == term}
    if len(claims) == 1:
        return Standing(term, claims.pop(), settled=True)
    # Each set was meant to go on without somebody of the others. A member that one of them names knows that
    # it did not: nothing was put before all of them had been told.
    held = [
        members
        for members in claims
        if all(
            (one.term, one.term_members) == (term, members)
            for one in found
            if members >> one.member_index & 1
        )
    ]
    if len(held) == 1:
        return Standing(term, held[0], settled=True)
    if held:
        sides = " and of ".join(_text(members) for members in sorted(held))
        raise WrongStore(
            f"the array {found[0].array_uuid_text} may have been written to on the side of {sides}, each "
            "without the other: give the members too that are on both, or open one side alone (degraded) for "
            "writing; the other is emptied when it comes back"
        )
    everybody = 0
    for members in claims:
        everybody |= members
    return Standing(term, everybody, settled=False)


def members_of(members: int) -> list[int]:
    """The members in a set, ascending."""
    return [index for index in range(members.bit_length()) if members >> index & 1]


def set_of(indices: Iterable[int]) -> int:
    """The set of these members."""
    members = 0
    for index in indices:
        members |= 1 << index
    return members


def _text(members: int) -> str:
    names = ", ".join(map(str, members_of(members)))
    return f"member {names}" if members.bit_count() == 1 else f"members {names}"
