"""Which tensors deserve memory.

A ranker is a function of a `Candidate`; what it gives back is compared, and who has the least goes direct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from blockkv.errors import InvalidArgument

__all__ = ["Candidate", "Place", "Ranker", "rank_by_layer"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk belongs: chunks of one `group`, a request, are read together, `layer` by layer."""

    group: str | bytes
    layer: int = 0


def check_place(place: object) -> None:
    """Raise InvalidArgument for what is no place."""
    if not isinstance(place, Place):
        raise InvalidArgument(f"place is {place!r}; give a Place")


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of a chunk when it is ranked."""

    key: bytes
    place: Place
    size_bytes: int
    last_use: int
    """When it was put or read last: a number that grows with every use of any chunk."""
    group_use: int
    """The same of its group."""
    in_store: bool
    """Whether it would be lost with its memory, or not."""


Ranker: TypeAlias = Callable[[Candidate], Any]


def rank_by_layer(candidate: Candidate) -> tuple[int, int, int]:
    """Groups that were used lately before others, and in a group the first layers before later ones.

    Within a group recency would be the worst rule: its chunks are read in a circle, and the one that was used
    longest ago is the next one. The first layers are needed first, and while the model computes them the
    later ones can be read.
    """
    return candidate.group_use, -candidate.place.layer, candidate.last_use
