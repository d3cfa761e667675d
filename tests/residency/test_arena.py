"""The memory of the tier: handed out, given back, and never more than allowed."""

from __future__ import annotations

import itertools
import random

import pytest

from blockkv.residency.arena import SLAB_BYTES, Arena, Part

MIB = 1 << 20


def test_parts_do_not_overlap_and_the_bound_holds() -> None:
    dice = random.Random(5)
    arena, limit = Arena(), 64 * MIB
    held: list[tuple[Part, int, int]] = []
    for number in range(2000):
        if held and dice.random() < 0.5:
            part, size, mark = held.pop(dice.randrange(len(held)))
            assert int(part.memory[0]) == int(part.memory[size - 1]) == mark
            arena.give(part)
        else:
            size = dice.choice((1, 4096, 100_000, 700_000, 2 * MIB, 5 * MIB))
            part_or_none = arena.take(size, limit)
            if part_or_none is None:
                assert arena.used_bytes + max(size, SLAB_BYTES) > limit
                continue
            mark = number % 251
            assert part_or_none.memory.nbytes >= size
            part_or_none.memory[0] = part_or_none.memory[size - 1] = mark
            held.append((part_or_none, size, mark))
        assert arena.used_bytes <= arena.resident_bytes <= limit
        addresses = sorted((part.address, part.memory.nbytes) for part, _, _ in held)
        for (start, length), (following, _) in itertools.pairwise(addresses):
            assert start + length <= following
    for part, _, _ in held:
        arena.give(part)
    assert arena.used_bytes == 0
    arena.shrink(0)
    assert arena.resident_bytes == 0


def test_memory_is_kept_until_the_bound_falls() -> None:
    arena = Arena()
    first = arena.take(4 * MIB, 8 * MIB)
    assert first is not None
    address = first.address
    arena.give(first)
    assert arena.resident_bytes == 4 * MIB
    again = arena.take(3 * MIB + 1, 8 * MIB)
    assert again is not None
    assert again.address == address
    arena.give(again)
    assert arena.take(6 * MIB, 8 * MIB) is not None  # the spare one makes room
    assert arena.resident_bytes == 6 * MIB
    assert arena.take(3 * MIB, 8 * MIB) is None


@pytest.mark.requires_root
def test_locked_memory() -> None:
    """Root may lock what it likes."""
    part = Arena(lock_memory=True).take(2 * MIB, 8 * MIB)
    assert part is not None
    part.memory.fill_(7)


def test_what_nobody_has_touched_is_told_apart() -> None:
    """The kernel has not charged it yet: a budget that counted it would be too large by that much."""
    arena = Arena()
    first, small = arena.take(8 * MIB, 64 * MIB), arena.take(1000, 64 * MIB)
    assert first is not None
    assert small is not None
    assert arena.touched_bytes() == 0
    first.memory[: 2 * MIB] = 1
    assert arena.touched_bytes() == 2 * MIB
    first.memory.fill_(1)
    small.memory.fill_(1)
    touched_bytes = arena.touched_bytes()
    assert 8 * MIB < touched_bytes <= arena.resident_bytes == 8 * MIB + SLAB_BYTES
    arena.give(first)
    assert arena.touched_bytes() == touched_bytes
    again = arena.take(8 * MIB, 64 * MIB)
    assert again is not None
    assert arena.touched_bytes() == touched_bytes
    arena.give(again)
    arena.give(small)
    arena.shrink(0)
    assert arena.touched_bytes() == arena.resident_bytes == 0
