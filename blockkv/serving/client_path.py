"""What the owner has leased to this client, as the paths of reads and writes want to have it.

The index here has the records of chunks that are leased, and of no others: a get asks the owner, which leases
what is there and sends the records; what is read is verified against them here.

Invariants
  * a record that arrives is checked as one from the device is, before anything is read by it;
  * every lease that the owner has given is given back once, also one whose answer came too late;
  * nothing here waits for the owner while the lock is held.

Not here: connecting (`client`), puts (`client_puts`).
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from blockkv.catalog.index import Acquired, Entry, Index
from blockkv.catalog.layouts import Layout
from blockkv.device.base import Device, Priority
from blockkv.errors import FormatError, OwnerLost
from blockkv.format.geometry import Geometry
from blockkv.format.record import Operation, extents_of, iterate_records, summary_of
from blockkv.serving import protocol
from blockkv.serving.connection import Connection, TimedOut
from blockkv.serving.protocol import Malformed, Message
from blockkv.store.data_path import DataPath, Options

__all__ = ["ClientPath"]

logger = logging.getLogger("blockkv")


ACQUIRE_KEYS = 1024
"""In one request: a record is no longer than a page."""


class _Unanswered(Exception):
    """Nothing was leased; the counter of why."""


class ClientPath(DataPath):
    """A device of another process, and the chunks that it leases to us."""

    def __init__(
        self,
        connection: Connection,
        device: Device,
        geometry: Geometry,
        options: Options,
        counters: Counter[str],
        patience_s: float,
    ) -> None:
        self.connection = connection
        self.device = device
        self.geometry = geometry
        self.options = options
        self.index = Index()
        self.lock = threading.RLock()
        self.changing = self.lock  # type: ignore[assignment]  # what it enters is nobody's business
        self.changed = threading.Condition(self.lock)
        self.counters = counters
        self.store_bytes = 0
        self._patience_s = patience_s
        self._places: dict[int, int] = {}
        """What the owner calls the chunk at each place of the index."""

    def acquire(self, digests: Sequence[bytes], deadline_ns: int = 0) -> tuple[Acquired, list[Layout]]:
        found: Acquired = _none()
        layouts: list[Layout] = []
        for first in range(0, len(digests), ACQUIRE_KEYS):
            some = digests[first : first + ACQUIRE_KEYS]
            try:
                more, theirs = self._enter(self._ask(some, deadline_ns), some)
            except _Unanswered as reason:
                missed = len(digests) - first
                with self.lock:
                    self.counters[str(reason)] += missed
                    self.counters["get_misses"] += missed
                break
            found.positions.extend(array("I", [first + position for position in more.positions]))
            found.places.extend(more.places)
            found.layout_ids.extend(more.layout_ids)
            found.extent_counts.extend(more.extent_counts)
            found.payload_bytes.extend(more.payload_bytes)
            layouts += theirs
        return found, layouts

    def _ask(self, digests: Sequence[bytes], deadline_ns: int) -> protocol.Acquired:
        """Have chunks leased. Raises _Unanswered."""
        try:
            return self.connection.call(
                protocol.Acquire(digests),
                protocol.Acquired,
                patience_left_s(deadline_ns, self._patience_s),
                self._give_back,
            )
        except TimedOut:
            if deadline_ns:
                raise _Unanswered("get_deadline") from None
            self.connection.end("it does not answer")
        except OwnerLost:
            pass
        raise _Unanswered("get_owner_lost")

    def _enter(self, answer: protocol.Acquired, digests: Sequence[bytes]) -> tuple[Acquired, list[Layout]]:
        """Take leased chunks into the index. Raises _Unanswered."""
        try:
            return self._entered(answer, digests)
        except (Malformed, FormatError, ValueError) as error:
            self.connection.end(f"what it leases is no chunk: {error!r}")
            raise _Unanswered("get_owner_lost") from None

    def _entered(self, answer: protocol.Acquired, digests: Sequence[bytes]) -> tuple[Acquired, list[Layout]]:
        records = _checked(answer, digests, self.geometry)
        given = list(map(_layout, answer.layouts))
        layouts = [given[number] for number in answer.layout_of]
        with self.lock:
            places = array("I")
            for raw, place in zip(records, answer.places, strict=True):
                entry = self.index.get(raw[16:48])
                if entry is None or entry.raw != raw:
                    if entry is not None:
                        self.index.remove(entry.digest)  # put anew meanwhile; whoever reads it still has it
                    entry = self.index.insert(raw)
                self.index.lease(entry)
                self._places[entry.place] = place
                places.append(entry.place)
            self.counters["get_misses"] += len(digests) - len(records)
        found = Acquired(
            answer.positions,
            places,
            array("I", [summary_of(raw)[0] for raw in records]),
            array("I", [len(extents_of(raw)) for raw in records]),
            array("Q", [summary_of(raw)[1] for raw in records]),
        )
        return found, layouts

    def _give_back(self, answer: Message) -> None:
        if isinstance(answer, protocol.Acquired):
            self.connection.post(protocol.Release(answer.places))

    def release(self, places: array[int]) -> None:
        theirs = array("I", [self._places[place] for place in places])
        for entry in self.index.release(places):
            del self._places[entry.place]
        for place in set(places):
            if place in self._places:
                entry = self.index.at(place)
                if not self.index.leases(entry):
                    self.index.remove(entry.digest)
                    del self._places[place]
        self.connection.post(protocol.Release(theirs))
        self.changed.notify_all()

    def confirm_damage(self, priority: Priority, chunks: Sequence[tuple[Entry, Layout]]) -> list[bool]:
        # The owner looks for itself, before it drops what others put.
        return [True] * len(chunks)

    def drop_damaged(self, entry: Entry) -> None:
        if entry.place in self._places:
            self.connection.post(protocol.Doubt(array("I", [self._places[entry.place]])))

    def grows(self, digest: bytes) -> bool:
        return False

    @property
    def lease_count(self) -> int:
        """Chunks that are leased."""
        return len(self._places)


@lru_cache(maxsize=1024)
def _layout(body: bytes) -> Layout:
    """Raises ValueError."""
    return Layout.decode(body)


def _none() -> Acquired:
    return Acquired(array("I"), array("I"), array("I"), array("I"), array("Q"))


def _checked(answer: protocol.Acquired, digests: Sequence[bytes], geometry: Geometry) -> list[bytes]:
    """The records of an answer. Raises Malformed, FormatError."""
    count = len(answer.records)
    if not count == len(answer.positions) == len(answer.places) == len(answer.layout_of):
        raise Malformed("columns of unlike length")
    views = list(iterate_records(b"".join(answer.records), count, geometry.data_units))
    for (operation, _, digest, raw), position, layout, given in zip(
        views, answer.positions, answer.layout_of, answer.records, strict=True
    ):
        if (
            operation != Operation.PUT
            or position >= len(digests)
            or digest != digests[position]
            or raw != given
            or layout >= len(answer.layouts)
        ):
            raise Malformed("a record of another chunk")
    return [raw for *_, raw in views]


def patience_left_s(deadline_ns: int, patience_s: float) -> float:
    """How long to wait for the owner, where the caller's own time ends at `deadline_ns` (0: never)."""
    if not deadline_ns:
        return patience_s
    return min(patience_s, max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
