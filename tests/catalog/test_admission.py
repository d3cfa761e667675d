"""Admission policies, by themselves."""

from __future__ import annotations

import hashlib
import math
import random

from blockkv.catalog.admission import Adaptive, Admission, SecondAsk


def chunk(*name: int) -> bytes:
    return hashlib.blake2b(repr(name).encode(), digest_size=16).digest()


def chain(conversation: int, length: int) -> list[bytes]:
    return [chunk(conversation, number) for number in range(length)]


def test_the_second_ask_is_enough() -> None:
    policy = SecondAsk()
    policy.asked(chain(1, 3))
    assert not any(map(policy.admits, chain(1, 3)))
    policy.asked(chain(1, 5))
    assert [policy.admits(digest) for digest in chain(1, 5)] == [True, True, True, False, False]


def test_what_nobody_asked_for_is_not_admitted_by_the_second_ask() -> None:
    assert not SecondAsk().admits(chunk(1))


def test_only_so_many_asks_are_remembered() -> None:
    policy = SecondAsk(remembered_chunks=4)
    policy.asked(chain(1, 2))
    policy.asked(chain(2, 4))
    policy.asked(chain(1, 2))
    assert not any(map(policy.admits, chain(1, 2)))


def test_everything_is_admitted_until_the_store_was_full() -> None:
    policy = Adaptive()
    for number in range(200):
        policy.asked(chain(number, 30))
        assert all(map(policy.admits, chain(number, 30)))
    assert policy.limit == math.inf


def drive(policy: Adaptive, *, stored_count: int, comes_back: bool) -> None:
    """Requests of 20 chunks; the store is full. With `comes_back` each is repeated three requests later."""
    pick = random.Random(1)
    for number in range(3000):
        policy.asked(chain(number, 20))
        if comes_back and number >= 3:
            policy.asked(chain(number - 3, 20 + pick.randrange(3)))
        policy.evicting(stored_count)


def test_what_never_comes_back_is_not_written() -> None:
    policy = Adaptive()
    drive(policy, stored_count=2000, comes_back=False)
    assert policy.limit == 0
    policy.asked(chain(-1, 20))
    assert not any(map(policy.admits, chain(-1, 20)))
    policy.asked(chain(-1, 20))
    assert all(map(policy.admits, chain(-1, 20)))


def test_what_comes_back_in_time_is_written() -> None:
    policy = Adaptive()
    drive(policy, stored_count=2000, comes_back=True)
    assert policy.limit >= 20
    policy.asked(chain(-1, 20))
    assert all(map(policy.admits, chain(-1, 20)[:-1]))


def test_what_comes_back_too_late_is_not_written() -> None:
    """The store holds less than the three requests that lie between."""
    policy = Adaptive()
    drive(policy, stored_count=40, comes_back=True)
    assert policy.limit < 20


def test_policies_are_admissions() -> None:
    policies: list[Admission] = [SecondAsk(), Adaptive()]
    assert all(policy.evicting(10) is None for policy in policies)  # type: ignore[func-returns-value]
