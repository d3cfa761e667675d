"""Eviction policies, by themselves: what they propose, and that nothing they are not told does harm."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockkv.catalog.eviction import Eviction, Lru, PrefixAware, S3Fifo

EVERY = pytest.mark.parametrize("make", [Lru, S3Fifo, PrefixAware])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def chunk(*name: int) -> bytes:
    return repr(name).encode()


def chain(conversation: int, length: int, first: int = 0) -> list[bytes]:
    return [chunk(conversation, number) for number in range(first, length)]


def store(policy: Eviction, digests: list[bytes]) -> None:
    policy.asked(digests)
    for digest in digests:
        policy.inserted(digest)


@EVERY
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("aiurv"), st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_victims_are_the_stored_chunks_each_once(
    make: Callable[[], Eviction], moves: list[tuple[str, int, int]]
) -> None:
    """Whatever came before, in whatever order, chunks it never heard of among it."""
    policy = make()
    held: set[bytes] = set()
    for move, conversation, length in moves:
        digests = chain(conversation, length)
        if move == "a":
            policy.asked(digests)
        elif move == "i" and digests[-1] not in held:
            policy.inserted(digests[-1])
            held.add(digests[-1])
        elif move == "u":
            policy.used(digests[-1])
        elif move == "r":
            policy.removed(digests[-1])
            held.discard(digests[-1])
        elif move == "v":
            for victim in take(policy.victims(), length):
                assert victim in held
                policy.removed(victim)
                held.discard(victim)
    proposed = list(policy.victims())
    assert len(set(proposed)) == len(proposed)
    assert set(proposed) == held


def take(victims: Iterator[bytes], count: int) -> list[bytes]:
    return [victim for _, victim in zip(range(count), victims, strict=False)]


def test_lru_is_the_order_of_use() -> None:
    policy = Lru()
    store(policy, chain(1, 4))
    policy.used(chunk(1, 0))
    assert list(policy.victims()) == [chunk(1, 1), chunk(1, 2), chunk(1, 3), chunk(1, 0)]


def test_s3_fifo_lets_what_was_not_used_leave_first_and_remembers_it() -> None:
    policy = S3Fifo()
    store(policy, chain(1, 10))
    for number in range(8):
        policy.used(chunk(1, number))
    assert set(take(policy.victims(), 2)) == {chunk(1, 8), chunk(1, 9)}
    policy.removed(chunk(1, 9))
    policy.inserted(chunk(1, 9))  # the ghost knows it: straight to the main queue
    assert chunk(1, 9) not in take(policy.victims(), 8)


def test_a_prefix_loses_its_end_first() -> None:
    policy = PrefixAware(Clock())
    store(policy, chain(1, 6))
    assert list(policy.victims()) == list(reversed(chain(1, 6)))


def test_what_another_prefix_shares_outlives_both_ends() -> None:
    clock = Clock()
    policy = PrefixAware(clock)
    shared = chain(0, 3)
    store(policy, shared + chain(1, 9))
    clock.now_s = 60
    policy.asked(shared + chain(2, 9))  # takes the shared part over, and is never stored itself
    proposed = list(policy.victims())
    assert proposed[-3:] == list(reversed(shared))


def test_long_pastes_leave_before_short_turns_of_the_same_age() -> None:
    policy = PrefixAware(Clock())
    store(policy, chain(1, 3))
    store(policy, chain(2, 200))
    proposed = list(policy.victims())
    assert proposed.index(chunk(1, 0)) > proposed.index(chunk(2, 0))


def test_conversations_that_went_on_outlive_new_ones() -> None:
    clock = Clock()
    policy = PrefixAware(clock)
    for turn in range(1, 5):
        clock.now_s += 60
        policy.asked(chain(1, 10 + 2 * turn))
        for digest in chain(1, 10 + 2 * turn):
            policy.inserted(digest)
    store(policy, chain(2, 2))
    proposed = list(policy.victims())
    assert proposed.index(chunk(1, 0)) > proposed.index(chunk(2, 0))


def test_it_learns_what_is_continued_in_this_traffic() -> None:
    """Here it is the long requests that come back, against what is assumed at first."""
    clock, pick = Clock(), random.Random(7)
    policy = PrefixAware(clock)
    waiting: list[tuple[float, int]] = []
    for number in range(3000):
        clock.now_s += 1
        length = pick.choice((4, 100))
        policy.asked(chain(number, length))
        if length == 100:
            waiting.append((clock.now_s + pick.expovariate(1 / 100), number))
        while waiting and min(waiting)[0] <= clock.now_s:
            due = min(waiting)
            waiting.remove(due)
            policy.asked(chain(due[1], 101))
    store(policy, chain(-1, 4))
    store(policy, chain(-2, 100))
    proposed = list(policy.victims())
    assert proposed.index(chunk(-1, 0)) < proposed.index(chunk(-2, 0))


def test_what_is_remembered_is_bounded_by_what_is_stored() -> None:
    policy = PrefixAware(Clock(), remembered_per_chunk=2)
    store(policy, chain(1, 100))
    for number in range(2, 2000):
        policy.asked(chain(number, 20))
    assert len(policy._owner) <= 100 * 3 + 1024
    assert len(policy._parent) <= len(policy._owner)
    assert len(policy._in_slot) < 1024
    assert set(policy.victims()) == set(chain(1, 100))
