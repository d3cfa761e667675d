"""Puts where the catalog is in another process: it claims and finds space, we write, it makes visible.

Two round trips for up to 256 chunks: `BeginPuts` before they are written, `EndPuts` for each wave that is.
Where there is no space as it is, one more for each chunk.

Not here: the steps that are the same everywhere (`blockkv.store.puts`).
"""

from __future__ import annotations

import errno
import time
from array import array
from collections.abc import Collection, Sequence
from typing import TypeVar

from blockkv.device.base import device_error
from blockkv.errors import BlockKVError, InvalidArgument, StoreFull
from blockkv.format.record import key_digest
from blockkv.serving import protocol
from blockkv.serving.client_path import ClientPath
from blockkv.serving.connection import TimedOut
from blockkv.serving.protocol import Malformed, Message, Outcome
from blockkv.space.allocator import Extent
from blockkv.store.keeping import Stay
from blockkv.store.keys import encode_keys
from blockkv.store.puts import Columns, Item, Puts, PutWave
from blockkv.store.state import GROWING
from blockkv.tensors import describe_many

__all__ = ["ClientPuts"]

INSIST_AFTER_S = 3.0
"""How long to wait for whoever puts the same key. It may hang; then both write it, and the first counts."""
NOT_WRITTEN = 1
"""In `EndPuts.outcomes`."""

COUNTER_OF = {Outcome.EXISTING: "put_existing", Outcome.OVER_BUDGET: "put_over_budget"}
"""Of chunks that are not written; "put_refused" for all others."""

A = TypeVar("A", bound=Message)


class TooLate(Exception):
    """The deadline of the call is over. The owner may answer yet."""


class ClientPuts(Puts):
    """One put or put_many call of a client."""

    _state: ClientPath

    def __init__(
        self,
        path: ClientPath,
        count: int,
        patience_s: float,
        deadline_ns: int = 0,
        droppable: bool = False,
        stays: Stay | None = None,
    ) -> None:
        super().__init__(path, count, deadline_ns, droppable)
        self._patience_s = patience_s
        self._stays = stays or Stay()
        self._insist = False
        self._over_budget = False
        """Whether the owner's write budget has refused one of this call."""
        self._tickets: dict[bytes, int] = {}
        """By digest, of the keys that this call has claimed."""
        self._granted: dict[bytes, tuple[Extent, ...]] = {}
        """Where to write those that have space and are not begun."""

    def _claim(self, positions: Sequence[int], items: Sequence[Item]) -> Columns:
        given = [items[position] for position in positions]
        keys, errors = encode_keys([key for key, _ in given])
        if errors:
            self.errors |= {positions[number]: error for number, error in errors.items()}
            positions = [position for position in positions if position not in self.errors]
        pieces, errors = describe_many([items[position][1] for position in positions])
        if errors:
            self.errors |= {positions[number]: error for number, error in errors.items()}
            fit = [number for number in range(len(positions)) if number not in errors]
            positions = [positions[number] for number in fit]
            keys = [keys[number] for number in fit]
        puts = self._columns(positions, items, keys, list(map(key_digest, keys)), pieces)
        if not positions:
            return puts
        patience_s = self._patience_s
        if self._deadline_ns:
            patience_s = min(patience_s, max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9))
        try:
            begun = self._call(self._begin(puts), protocol.Begun, self._take_back, patience_s)
            extents = _extents(begun, len(positions))
        except TooLate:
            self._count("put_dropped", len(positions))
            return puts.chosen([])
        except BlockKVError as error:
            self.errors |= dict.fromkeys(positions, error)
            return puts.chosen([])
        self.last_sequence = max(self.last_sequence, begun.sequence)
        chosen, unwanted = [], []
        for number, outcome in enumerate(begun.outcomes):
            digest, position = puts.digests[number], positions[number]
            if outcome in (Outcome.GRANTED, Outcome.WAITING) and self._over_budget:
                unwanted.append(begun.tickets[number])  # behind a gap
                self._count("put_over_budget")
            elif outcome in (Outcome.GRANTED, Outcome.WAITING):
                self._own.add(digest)
                self._tickets[digest] = begun.tickets[number]
                if outcome == Outcome.GRANTED:
                    self._granted[digest] = extents[number]
                chosen.append(number)
            elif outcome == Outcome.CLAIMED:
                self._postponed.append((digest, position))
            elif outcome == Outcome.GROWING:
                self.errors[position] = InvalidArgument(GROWING)
            else:
                self._count(COUNTER_OF.get(outcome, "put_refused"))
        self._over_budget |= Outcome.OVER_BUDGET in begun.outcomes
        if unwanted:
            self._state.connection.post(protocol.GiveUp(array("Q", unwanted)))
        return puts if len(chosen) == len(positions) else puts.chosen(chosen)

    def _begin(self, puts: Columns) -> protocol.BeginPuts:
        numbers: dict[bytes, int] = {}
        layout_of = array("I", [numbers.setdefault(one.body, len(numbers)) for one in puts.pieces.layouts])
        return protocol.BeginPuts(
            puts.keys,
            puts.keys_are_text,
            array("Q", puts.pieces.sizes_bytes),
            list(numbers),
            layout_of,
            self._stays.ttl_s or 0.0,
            self._stays.priority,
            int(self._insist),
        )

    def _take_back(self, begun: Message) -> None:
        """What came too late is not going to be written."""
        if isinstance(begun, protocol.Begun):
            self._state.connection.post(protocol.GiveUp(array("Q", filter(None, begun.tickets))))

    def _give_up(self, digests: Collection[bytes]) -> None:
        self._own.difference_update(digests)
        tickets = [self._tickets.pop(digest) for digest in digests if digest in self._tickets]
        for digest in digests:
            self._granted.pop(digest, None)
        if tickets:
            self._state.connection.post(protocol.GiveUp(array("Q", tickets)))

    def _wait_for_others(self, digest: bytes) -> None:
        self._insist = False
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < INSIST_AFTER_S:
            try:
                if self._call(protocol.WaitForPut([digest]), protocol.Answer).value:
                    return
            except BlockKVError:
                return  # the next request says why
        self._insist = True

    def _place(self, puts: Columns, first: int) -> list[tuple[Extent, ...]]:
        extents = []
        for digest in puts.digests[first:]:
            found = self._granted.pop(digest, None)
            if found is None:
                break
            extents.append(found)
        return extents

    def _displace(self, puts: Columns, extents: Sequence[tuple[Extent, ...]]) -> None:
        self._give_up(puts.digests)

    def _allocate(self, puts: Columns, number: int) -> tuple[Extent, ...]:
        ticket = self._tickets[puts.digests[number]]
        while True:
            patient = not self._in_flight
            granted = self._call(protocol.Allocate(ticket, int(patient)), protocol.Granted)
            if granted.extents:
                return _pairs(granted.extents)
            if patient:
                size_bytes = puts.pieces.sizes_bytes[number]
                raise StoreFull(f"{self._state.device.path} has no space for a chunk of {size_bytes} bytes")
            self._drain()

    def _complete(self, wave: PutWave) -> None:
        state, puts = self._state, wave.puts
        with state.lock:
            if not wave.dropped:
                state.store_bytes -= wave.payload_bytes
            state.changed.notify_all()
        outcomes = self._outcomes(wave)
        tickets = array("Q", [self._tickets.pop(digest) for digest in puts.digests])
        self._own.difference_update(puts.digests)
        leaves = [b"" if outcome else wave.batch.leaves(number) for number, outcome in enumerate(outcomes)]
        inserted = bytes(len(outcomes))
        try:
            ended = self._call(protocol.EndPuts(tickets, outcomes, leaves), protocol.Ended)
            if len(ended.inserted) != len(outcomes):
                raise Malformed("an answer to another number of puts")
            self.last_sequence = max(self.last_sequence, ended.sequence)
            inserted = ended.inserted
        except BlockKVError as error:
            # Whether they are stored nobody can say; who puts them again finds out.
            for number, position in enumerate(puts.positions):
                if not outcomes[number]:
                    self.errors[position] = error
            return
        for number, position in enumerate(puts.positions):
            if inserted[number]:
                self.results[position] = True
                self._count("put_chunks")
                self._count("put_bytes", puts.pieces.sizes_bytes[number])
                if puts.pieces.described:
                    self._count("put_copied_bytes", puts.pieces.described[number].copied_bytes)
            elif not outcomes[number]:
                self._count("put_existing")

    def _outcomes(self, wave: PutWave) -> array[int]:
        """What became of each on the device; results and errors of those that are not written are entered."""
        puts = wave.puts
        count = len(puts.positions)
        if wave.refusal is not None:
            self.errors |= dict.fromkeys(puts.positions, wave.refusal)
            return array("i", [NOT_WRITTEN] * count)
        if wave.dropped:
            self._count("put_dropped", count)
            return array("i", [NOT_WRITTEN] * count)
        outcomes = array("i", bytes(4 * count))
        for number, code in wave.batch.failed():
            if code == -errno.ETIME:
                outcomes[number] = NOT_WRITTEN
                self._count("put_dropped")
                continue
            outcomes[number] = code
            self._count("put_device_error")
            what = f"writing a chunk of {puts.pieces.sizes_bytes[number]} bytes"
            self.errors[puts.positions[number]] = device_error(self._state.device.path, what, code)
        return outcomes

    def _call(
        self, message: Message, kind: type[A], late: object = None, patience_s: float | None = None
    ) -> A:
        """The owner's answer. Raises TooLate where less than the usual patience was over."""
        usual_s = self._patience_s
        left_s = usual_s if patience_s is None else patience_s
        try:
            return self._state.connection.call(message, kind, left_s, late)  # type: ignore[arg-type]
        except TimedOut:
            if left_s < usual_s:
                raise TooLate from None
            self._state.connection.end("it does not answer")
            raise

    def _count(self, name: str, change: int = 1) -> None:
        with self._state.lock:
            self._state.counters[name] += change


def _extents(begun: protocol.Begun, count: int) -> list[tuple[Extent, ...]]:
    """The extents of each. Raises Malformed."""
    if not count == len(begun.outcomes) == len(begun.tickets) == len(begun.extent_counts):
        raise Malformed("columns of unlike length")
    if 2 * sum(begun.extent_counts) != len(begun.extents):
        raise Malformed("extents of another number")
    found, first = [], 0
    for each in begun.extent_counts:
        found.append(_pairs(begun.extents[first : first + 2 * each]))
        first += 2 * each
    return found


def _pairs(words: array[int]) -> tuple[Extent, ...]:
    return tuple(zip(words[::2], words[1::2], strict=True))
