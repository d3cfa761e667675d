"""Pins between a hit and its load: what an engine was told is there stays there until it has fetched it.

::

    leases = Leases(store, lease_s=60)
    leases.find("family/key", request="r1")     # pinned, on the caller's thread
    held = leases.begin_load(["family/key"])
    ...
    leases.end_load(held)                       # the pin is given back

A pin is given back after the load, when all requests that hit the chunk have ended, or after `lease_s`
without either.

A store of this process is asked at once, from its memory. One that another process owns (`blockkv serve`) is
asked in the background, for that may take its time: `find` says LATER until it has answered, and NO when that
takes longer than a second.

Not here: threads. One thread at a time calls this.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import blockkv
from blockkv.errors import BlockKVError, InvalidArgument

__all__ = ["Found", "Lease", "Leases"]

OWNER_PATIENCE_S = 1.0
"""How long a look-up waits for the process that owns the store."""

log = logging.getLogger(__name__)


class Found(enum.Enum):
    """What `Leases.find` says."""

    YES = enum.auto()
    NO = enum.auto()
    LATER = enum.auto()


@dataclass(slots=True, eq=False)
class Lease:
    """A chunk that is pinned."""

    name: str
    until_s: float = 0
    requests: set[str] = field(default_factory=set)
    loads: int = 0


@dataclass(slots=True)
class _Question:
    asked_s: float
    found: bool | None = None
    given_up: bool = False
    """NO was said before the answer was there."""


class Leases:
    """See the module."""

    def __init__(self, store: blockkv.Store, lease_s: float) -> None:
        """Raises InvalidArgument for a time that is not above 0."""
        if lease_s <= 0:
            raise InvalidArgument(f"lease_s is {lease_s}; use seconds above 0")
        self._store = store
        self._lease_s = lease_s
        self._leases: dict[str, Lease] = {}
        self._questions: dict[str, _Question] = {}
        self._work: queue.SimpleQueue[tuple[str, _Question | None] | None] = queue.SimpleQueue()
        self.expired = 0
        """Leases that ended because `lease_s` were over."""
        self._thread: threading.Thread | None = None
        if store.is_client:
            self._thread = threading.Thread(target=self._ask_owner, name="blockkv-lookups", daemon=True)
            self._thread.start()

    def __len__(self) -> int:
        return len(self._leases)

    def find(self, name: str, request: str) -> Found:
        """Whether the chunk is there, and if so keep it there. Raises BlockKVError."""
        lease = self._leases.get(name)
        if self._thread is None:
            if not (self._store.pin(name) if lease is None else self._store.contains(name)):
                return Found.NO
        elif lease is None and (answer := self._answer(name)) is not Found.YES:
            return answer
        if lease is None:
            lease = self._leases[name] = Lease(name)
        lease.until_s = time.monotonic() + self._lease_s
        lease.requests.add(request)
        return Found.YES

    def begin_load(self, names: Iterable[str]) -> list[Lease]:
        """Those of the chunks that are leased stay so until `end_load` with what this returns."""
        held = [self._leases[name] for name in names if name in self._leases]
        for lease in held:
            lease.loads += 1
        return held

    def end_load(self, held: Sequence[Lease]) -> None:
        """The chunks were fetched, or could not be."""
        for lease in held:
            lease.loads -= 1
            if not lease.loads:
                self._release(lease)

    def end_request(self, request: str) -> None:
        """It will not ask for what it has hit, but for what is being loaded."""
        for lease in [one for one in self._leases.values() if request in one.requests]:
            lease.requests.discard(request)
            if not lease.requests and not lease.loads:
                self._release(lease)

    def sweep(self) -> None:
        """Give back what is over; call it once in a while."""
        now_s = time.monotonic()
        for lease in [one for one in self._leases.values() if one.until_s < now_s and not one.loads]:
            self.expired += 1
            self._release(lease)
        for name, question in list(self._questions.items()):
            if question.found is not None and question.asked_s + self._lease_s < now_s:
                del self._questions[name]
                if question.found and name not in self._leases:
                    self._release(Lease(name))

    def release_all(self) -> None:
        """All but what is being loaded."""
        for lease in [one for one in self._leases.values() if not one.loads]:
            self._release(lease)

    def close(self, timeout_s: float = 5) -> None:
        """End the background's thread."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout_s)

    def _release(self, lease: Lease) -> None:
        self._leases.pop(lease.name, None)
        if self._thread is not None:
            self._work.put((lease.name, None))
        else:
            self._unpin(lease.name)

    def _unpin(self, name: str) -> None:
        try:
            self._store.unpin(name)
        except BlockKVError as error:
            log.debug("blockkv: %s could not be unpinned: %s", name, error)

    def _answer(self, name: str) -> Found:
        question = self._questions.get(name)
        if question is None or (question.given_up and question.found is False):
            # a late no tells of the past: of an owner that was gone, or of a chunk that was not there yet
            question = self._questions[name] = _Question(time.monotonic())
            self._work.put((name, question))
        if question.found is None:
            question.given_up = time.monotonic() - question.asked_s > OWNER_PATIENCE_S
            return Found.NO if question.given_up else Found.LATER
        del self._questions[name]
        return Found.YES if question.found else Found.NO

    def _ask_owner(self) -> None:
        while (taken := self._work.get()) is not None:
            name, question = taken
            if question is None:
                self._unpin(name)
                continue
            try:
                question.found = self._store.pin(name)
            except BlockKVError as error:
                log.debug("blockkv: %s could not be looked up: %s", name, error)
                question.found = False
