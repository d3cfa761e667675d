"""Numbers that a caller gives."""

from __future__ import annotations


def is_number(value: object) -> bool:
    """Whether it is an int or a float. So is nan, which no comparison holds for."""
    return isinstance(value, int | float) and not isinstance(value, bool)
