"""Leases on a store that another process owns: what its answers mean when they come late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

import blockkv
from blockkv.connectors import leases as module
from blockkv.connectors.leases import Found, Leases
from blockkv.errors import OwnerLost

WAIT_S = 20


class Owner:
    """Answers pins when it is told to, with what it is told."""

    def __init__(self) -> None:
        self.answers = threading.Semaphore(0)
        self.there: set[str] = set()
        self.gone = False
        self.pinned: list[str] = []
        self.is_client = True

    def pin(self, name: str) -> bool:
        assert self.answers.acquire(timeout=WAIT_S)
        if self.gone:
            raise OwnerLost("gone")
        if name in self.there:
            self.pinned.append(name)
        return name in self.there

    def unpin(self, name: str) -> None:
        self.pinned.remove(name)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def leases(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leases]:
    """An owner that does not answer is waited for briefly; see `patient`."""
    monkeypatch.setattr(module, "OWNER_PATIENCE_S", 0.05)
    made = Leases(cast(blockkv.Store, owner), lease_s=60)
    yield made
    owner.answers.release(100)
    made.close()


@pytest.fixture
def patient(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on an answer is waited for, however long the thread that asks for it has to."""
    return lambda: monkeypatch.setattr(module, "OWNER_PATIENCE_S", WAIT_S)


def until(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def answer(leases: Leases, name: str) -> Found:
    found = [leases.find(name, "r")]
    until(lambda: found[-1] is not Found.LATER or bool(found.append(leases.find(name, "r"))))
    return found[-1]


def answered(leases: Leases, name: str) -> bool:
    return leases._questions[name].found is not None


def test_an_owner_that_takes_its_time_is_a_no(owner: Owner, leases: Leases) -> None:
    assert answer(leases, "a") is Found.NO


def test_a_no_that_came_too_late_is_asked_again(
    owner: Owner, leases: Leases, patient: Callable[[], None]
) -> None:
    """The owner was gone when it was asked; by the next look-up it may be back with everything."""
    assert answer(leases, "a") is Found.NO
    owner.gone = True
    owner.answers.release()
    until(lambda: answered(leases, "a"))
    owner.gone, owner.there = False, {"a"}
    owner.answers.release()
    patient()
    assert answer(leases, "a") is Found.YES
    assert owner.pinned == ["a"]


def test_a_yes_that_came_too_late_holds_the_chunk(owner: Owner, leases: Leases) -> None:
    owner.there = {"a"}
    assert answer(leases, "a") is Found.NO
    owner.answers.release()
    until(lambda: answered(leases, "a"))
    assert leases.find("a", "r") is Found.YES
    leases.end_request("r")
    until(lambda: not owner.pinned)


def test_a_no_in_time_is_an_answer(owner: Owner, leases: Leases, patient: Callable[[], None]) -> None:
    patient()
    assert leases.find("a", "r") is Found.LATER
    owner.answers.release()
    until(lambda: answered(leases, "a"))
    owner.there = {"a"}
    assert leases.find("a", "r") is Found.NO
