"""One client at the owner: what it was given, and what becomes of that when it goes.

A client has leases (chunks that it reads), tickets (chunks that it writes), claims (keys that it puts) and
pins. The connection and the lifeline tell how it fares:

    connection closed   the client is gone, or will not be heard any more: claims and pins end
    lifeline closed     no request of it can reach the device any more: leases and tickets end

Invariants
  * what a client may still read from or write to is nobody else's: extents come back after the last copy of
    its lifeline is closed, which the kernel does after the last request has completed, and not before;
  * whatever a client sends is checked against what it was given; what is not right ends this connection and
    touches nothing else;
  * a chunk becomes visible when the client has said that all of it is written, once, whoever else put the
    same key meanwhile.

Not here: who may connect, the lifelines (`owner`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from blockkv.catalog.index import Entry, add_put_transfers
from blockkv.catalog.layouts import TEXT_LIMIT_BYTES, Layout
from blockkv.device.base import UNIT_BYTES, Batch, Direction, Priority
from blockkv.errors import BlockKVError, DeviceError, StoreFull
from blockkv.format.geometry import MAX_DATA_UNITS, leaf_count, unit_count
from blockkv.format.record import (
    LAYOUT_BODY_MAX,
    MAX_KEY_BYTES,
    key_digest,
    length_of,
    put_bytes_at_most,
)
from blockkv.logs import described, logger_for
from blockkv.serving import protocol
from blockkv.serving.protocol import Malformed, Message, Outcome, encode
from blockkv.serving.wire import Frames, Peer
from blockkv.space.allocator import Extent
from blockkv.store import Store
from blockkv.store.keeping import Stay, stay
from blockkv.store.room import displace, make_room, place
from blockkv.store.watch import Change, Watch

__all__ = ["Session"]

LEASE_LIMIT = 1 << 20
"""Leases of one client: more are a fault of it."""
TICKET_LIMIT = 1 << 16
GRANTED_SHARE = 4
"""A client may be writing to a quarter of the data zone at a time; what is more waits for that."""
JOB_LIMIT = 64
"""Requests of one client that may wait, for the device or for others, before the next is looked at."""
LISTING_LIMIT = 8
WATCH_LIMIT = 8
KEYS_AT_A_TIME = 1024
CLAIM_WAIT_S = 1.0
SEND_TIMEOUT_S = 10
"""A client that takes no answers for so long is not heard any more."""


@dataclass(slots=True)
class _Ticket:
    """A chunk that a client puts."""

    number: int
    digest: bytes
    key: bytes
    key_is_text: bool
    payload_bytes: int
    units: int
    record_bytes: int
    layout: Layout
    stays: Stay | None
    claims: bool
    """Whether it holds the claim of its key; not when another one does, and this one insisted."""
    extents: tuple[Extent, ...] | None = None


class Host(Protocol):
    """What a session needs of the owner."""

    path: str
    store: Store
    workers: Executor

    def welcome(self) -> Message:
        """What every client is told first."""

    def handing_over(self, session: Session) -> AbstractContextManager[list[int]]:
        """The descriptors for a client: the device, and a lifeline. The owner's copies end with it."""

    def pool_for(self, message: Message) -> Executor | None:
        """Where a request is carried out that may take long; None for the others."""

    def look_at(self, session: Session) -> None:
        """Something of the session is over; perhaps that was the last of it."""

    def claim(self, digest: bytes) -> None:
        """A client has claimed a key. Under the lock of the store, like the next three."""

    def unclaim(self, digest: bytes) -> None:
        """It is free again."""

    def is_claimed(self, digest: bytes) -> bool:
        """Whether a client puts this key, and not somebody in this process."""

    @property
    def writing_count(self) -> int:
        """Chunks that clients may be writing, those that are gone among them."""

    def stats(self) -> dict[str, Any]:
        """For `protocol.Stats`."""

    def info(self) -> dict[str, Any]:
        """For `protocol.Info`."""


class _NotNow(Exception):
    """Space would have to be waited for."""


class Session:
    """One connection. `run` it on a thread of its own."""

    def __init__(self, owner: Host, connection: socket.socket, peer: Peer, number: int) -> None:
        self.number = number
        self.peer = peer
        self.name = ""
        self._owner = owner
        self._store = owner.store
        self._state = owner.store._state
        self._connection = connection
        self._send_lock = threading.Lock()
        self._closing_lock = threading.Lock()
        """Nobody uses the number of a descriptor that is closed, and may be another client's by then."""
        self._lock = self._state.lock
        """The store's: what a client was given changes together with the store."""
        self._idle = threading.Condition(self._lock)
        self._jobs = 0
        self._leases: Counter[int] = Counter()
        self._lease_count = 0
        self._tickets: dict[int, _Ticket] = {}
        self._last_ticket = 0
        self._granted_units = 0
        self._pins: Counter[tuple[bytes, int]] = Counter()
        """By digest and log sequence: what was put again under a key is not what was pinned."""
        self._watches: dict[int, tuple[Watch, deque[Change]]] = {}
        """Each with changes that were taken for the client and not told yet."""
        self._listings: dict[int, Iterator[str | bytes]] = {}
        self.is_heard = True
        """False once the connection is over."""
        self._reaches_device = False

    # -- the connection --------------------------------------------------------------------------------

    def run(self) -> None:
        """Answer the client until it goes. Raises nothing."""
        problem = ""
        frames = Frames(self._connection)
        try:
            self._greet(frames)
            while (frame := self._next(frames)) is not None:
                self._take(frame.message, frame.request)
        except Malformed as error:
            problem = f"what it sent is no message: {error}"
        except OSError as error:
            problem = "" if isinstance(error, ConnectionError) else str(error)
        except Exception as error:
            logger_for(self._owner.path, client=str(self)).exception("an error while serving %s", self)
            problem = described(error)
        if problem:
            logger_for(self._owner.path, client=str(self)).warning(
                "the connection of %s is closed: %s", self, problem
            )
        self._leave()

    def _next(self, frames: Frames) -> Any:
        while True:
            frame = frames.next()
            if frame is not None or not frames.fill():
                return frame

    def _greet(self, frames: Frames) -> None:
        frame = self._next(frames)
        if frame is None:
            return
        self._connection.settimeout(None)
        hello = frame.message
        if not isinstance(hello, protocol.Hello):
            raise Malformed(f"a {type(hello).__name__} before the Hello")
        if hello.version != protocol.VERSION:
            what = (
                f"{self._owner.path}: this owner speaks version {protocol.VERSION} of the protocol, and the "
                f"client version {hello.version}: use the same blockkv for both"
            )
            self._send(protocol.Failure("VersionTooNew", 0, what), frame.request)
            raise Malformed(what)
        self.name = hello.name[:200]
        with self._owner.handing_over(self) as descriptors:
            self._reaches_device = True
            frame_bytes = encode(self._owner.welcome(), frame.request, self._state.log.durable_sequence)
            with self._send_lock:
                socket.send_fds(self._connection, [frame_bytes], descriptors)
        # A client that does not take its answers must not hold up others.
        self._connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0)
        )

    def _take(self, message: Message, request: int) -> None:
        """Carry out a request, here or, where it may have to wait, on another thread."""
        handler = HANDLERS.get(type(message))
        if handler is None:
            raise Malformed(f"a {type(message).__name__} is not for the owner")
        pool = self._owner.pool_for(message)
        if pool is None:
            self._carry_out(handler, message, request)
        else:
            self._begin(pool, lambda: self._carry_out(handler, message, request))

    def _begin(self, pool: Executor, job: Callable[[], None]) -> None:
        """Do something on another thread. Waits while this client has much of that already."""
        with self._lock:
            self._idle.wait_for(lambda: self._jobs < JOB_LIMIT or not self.is_heard)
            self._jobs += 1

        def run() -> None:
            try:
                job()
            except (Malformed, OSError) as error:
                logger_for(self._owner.path, client=str(self)).warning(
                    "the connection of %s is closed: %s", self, error
                )
                self.hang_up()
            except Exception:
                logger_for(self._owner.path, client=str(self)).exception("an error while serving %s", self)
                self.hang_up()
            finally:
                with self._lock:
                    self._jobs -= 1
                    self._idle.notify_all()
                self._owner.look_at(self)

        try:
            pool.submit(run)
        except RuntimeError:  # it is being closed
            with self._lock:
                self._jobs -= 1
            raise ConnectionAbortedError from None

    def _carry_out(
        self, handler: Callable[[Session, Any], Message | None], message: Message, request: int
    ) -> None:
        try:
            answer = handler(self, message)
        except Malformed:
            raise
        except BlockKVError as error:
            code = error.errno if isinstance(error, DeviceError) else 0
            answer = protocol.Failure(type(error).__name__, code or 0, str(error))
        if answer is not None:
            self._send(answer, request)

    def _send(self, message: Message, request: int) -> None:
        frame = encode(message, request, self._state.log.durable_sequence)
        with self._send_lock:
            self._connection.sendall(frame)

    def hang_up(self) -> None:
        """Stop listening to the client: `run` ends then. From any thread."""
        with self._closing_lock, contextlib.suppress(OSError):  # it may be closed already
            self._connection.shutdown(socket.SHUT_RDWR)

    def _leave(self) -> None:
        """The connection is over: nobody has to wait for the client's word any more."""
        self.hang_up()
        with self._lock:
            self.is_heard = False
            for ticket in self._tickets.values():
                self._unclaim(ticket)
            for (digest, sequence), count in self._pins.items():
                entry = self._state.index.get(digest)
                if entry is not None and entry.log_sequence == sequence:
                    self._state.index.pin(digest, -count)
            self._pins.clear()
            self._listings.clear()
            watches = [watch for watch, _ in self._watches.values()]
            self._watches.clear()
            self._state.changed.notify_all()
            self._idle.notify_all()
        for watch in watches:
            watch.close()
        with self._send_lock, self._closing_lock:
            self._connection.close()
        self._owner.look_at(self)

    def lifeline_closed(self) -> None:
        """Nothing of the client can reach the device any more."""
        self._reaches_device = False
        self.hang_up()
        self._owner.look_at(self)

    def let_go(self) -> bool:
        """Give back what the client had, if it is gone in every way; False as long as it is not."""
        state = self._state
        with state.changing:
            if self.is_heard or self._reaches_device or self._jobs:
                return False
            for ticket in list(self._tickets.values()):
                if ticket.extents is not None:
                    displace(state, [ticket.record_bytes], [ticket.extents])
                self._end(ticket)
            state.release(array("I", self._leases.elements()))
            self._leases.clear()
            self._lease_count = 0
        return True

    @property
    def described(self) -> dict[str, Any]:
        """For people and programs."""
        return {
            "pid": self.peer.process,
            "user": self.peer.user,
            "name": self.name,
            "connected": self.is_heard,
            "leases": self._lease_count,
            "puts": len(self._tickets),
            "writing_bytes": self._granted_units * UNIT_BYTES,
            "pins": self._pins.total(),
        }

    @property
    def lease_count(self) -> int:
        return self._lease_count

    @property
    def writing_count(self) -> int:
        """Chunks that have extents and may be being written."""
        return sum(ticket.extents is not None for ticket in self._tickets.values())

    @property
    def ticket_count(self) -> int:
        return len(self._tickets)

    def __str__(self) -> str:
        return f"{self.name or 'a client'} ({self.peer})"

    # -- reading ---------------------------------------------------------------------------------------

    def acquire(self, message: protocol.Acquire) -> Message:
        """See `protocol.Acquire`."""
        state = self._state
        with self._lock:
            state.expire()
            if state.keeping is not None:
                state.keeping.got(message.digests)
            if self._lease_count + len(message.digests) > LEASE_LIMIT:
                raise Malformed(f"more than {LEASE_LIMIT} leases")
            found, layouts = state.acquire(message.digests)
            self._leases.update(found.places)
            self._lease_count += len(found.places)
            records = [_put_record(state.index.at(one)) for one in found.places]
        numbers: dict[bytes, int] = {}
        layout_of = array("I", [numbers.setdefault(layout.body, len(numbers)) for layout in layouts])
        return protocol.Acquired(found.positions, found.places, records, list(numbers), layout_of)

    def release(self, message: protocol.Release) -> None:
        """See `protocol.Release`."""
        with self._lock:
            self._check_leased(Counter(message.places))
            self._leases.subtract(message.places)
            for one in message.places:
                if not self._leases[one]:
                    del self._leases[one]
            self._lease_count -= len(message.places)
            self._state.release(array("I", message.places))

    def doubt(self, message: protocol.Doubt) -> None:
        """See `protocol.Doubt`. The chunks are leased for this, whatever the client does meanwhile."""
        state = self._state
        with self._lock:
            self._check_leased(Counter(message.places))
            entries = [state.index.at(one) for one in message.places]
            for entry in entries:
                state.lease(entry)
            # One whose layout is gone was dropped meanwhile.
            layouts = state.layouts
            chunks = [(one, layouts[one.layout_id]) for one in entries if state.index.holds(one)]
        self._begin(self._owner.workers, lambda: self._judge(message.places, chunks))

    def _judge(self, places: array[int], chunks: list[tuple[Entry, Layout]]) -> None:
        state = self._state
        damaged: list[bool] = []
        try:
            damaged = state.confirm_damage(Priority.LOAD, chunks)
        finally:
            with state.changing:
                for entry, _ in itertools.compress(chunks, damaged):
                    state.drop_damaged(entry)
                state.release(array("I", places))

    def lookup(self, message: protocol.Lookup) -> Message:
        """See `protocol.Lookup`."""
        state = self._state
        with self._lock:
            state.expire()
            if message.counts_as_request and state.keeping is not None:
                state.keeping.looked_up(message.digests)
            places = state.index.find(message.digests)
        return protocol.Answer(places.index(0) if 0 in places else len(places))

    def _check_leased(self, places: Counter[int]) -> None:
        for one, count in places.items():
            if self._leases[one] < count:
                raise Malformed(f"place {one} is not leased to it so often")

    # -- putting ---------------------------------------------------------------------------------------

    def begin_puts(self, message: protocol.BeginPuts) -> Message:
        """See `protocol.BeginPuts`."""
        state = self._state
        asked = self._asked(message)
        outcomes = bytearray([Outcome.WAITING]) * len(asked)
        over_budget = False
        sequence = 0
        with self._store._operation(writing=True), state.changing:
            state.expire()
            digests = [ticket.digest for ticket in asked]
            admitted = [True] * len(asked)
            if state.keeping is not None or (asked and asked[0].stays is not None):
                admitted = state.keep().admitted(digests)
            places = state.index.find(digests)
            for number, ticket in enumerate(asked):
                if ticket.digest in state.reserved:
                    outcomes[number] = Outcome.GROWING
                elif places[number]:
                    outcomes[number] = Outcome.EXISTING
                    state.counters["put_existing"] += 1
                    state.index.touch(ticket.digest)
                    sequence = max(sequence, state.index.at(places[number]).log_sequence)
                elif not admitted[number]:
                    outcomes[number] = Outcome.REFUSED
                    state.counters["put_refused"] += 1
                elif ticket.digest in state.claims and not (
                    message.insist and self._owner.is_claimed(ticket.digest)
                ):
                    outcomes[number] = Outcome.CLAIMED
                elif over_budget or not state.afford([ticket.units]):
                    outcomes[number] = Outcome.OVER_BUDGET
                    state.counters["put_over_budget"] += over_budget
                    over_budget = True
                else:
                    self._admit(ticket)
            mine = [ticket for ticket in asked if ticket.number]
            limit_units = self._limit_units()
            fitting = 0
            total = self._granted_units
            for ticket in mine:
                total += ticket.units
                if total > limit_units:
                    break
                fitting += 1
            first = mine[:fitting]
            found = place(state, [one.units for one in first], [one.record_bytes for one in first])
            for ticket, extents in zip(first, found, strict=False):
                self._grant(ticket, extents)
        for number, ticket in enumerate(asked):
            if ticket.extents is not None:
                outcomes[number] = Outcome.GRANTED
        return protocol.Begun(
            bytes(outcomes),
            array("Q", [ticket.number for ticket in asked]),
            array("I", [len(ticket.extents or ()) for ticket in asked]),
            array("Q", [word for ticket in asked for one in ticket.extents or () for word in one]),
            sequence,
        )

    def _asked(self, message: protocol.BeginPuts) -> list[_Ticket]:
        """What a client asks to put, checked, without numbers yet."""
        count = len(message.keys)
        if not count == len(message.keys_are_text) == len(message.sizes_bytes) == len(message.layout_of):
            raise Malformed("columns of unlike length")
        if len(self._tickets) + count > TICKET_LIMIT:
            raise Malformed(f"more than {TICKET_LIMIT} puts at a time")
        try:
            layouts = [_layout(body) for body in message.layouts]
            stays = stay(message.ttl_s or None, message.priority)
        except ValueError as error:
            raise Malformed(str(error)) from None
        limit_bytes = MAX_DATA_UNITS * UNIT_BYTES  # what is too large for this store is refused with words
        asked = []
        for key, is_text, size_bytes, layout in zip(
            message.keys, message.keys_are_text, message.sizes_bytes, message.layout_of, strict=True
        ):
            if not 1 <= len(key) <= MAX_KEY_BYTES or is_text > 1 or layout >= len(layouts):
                raise Malformed(f"a key of {len(key)} bytes, with layout {layout}")
            if not 1 <= size_bytes <= limit_bytes:
                raise Malformed(f"a chunk of {size_bytes} bytes")
            if size_bytes != layouts[layout].payload_bytes:
                raise Malformed(
                    f"a chunk of {size_bytes} bytes with a layout of {layouts[layout].payload_bytes}"
                )
            asked.append(
                _Ticket(
                    0,
                    key_digest(key),
                    key,
                    bool(is_text),
                    size_bytes,
                    unit_count(size_bytes),
                    put_bytes_at_most(size_bytes, len(key)),
                    layouts[layout],
                    stays,
                    claims=False,
                )
            )
        return asked

    def _admit(self, ticket: _Ticket) -> None:
        self._last_ticket += 1
        ticket.number = self._last_ticket
        self._tickets[ticket.number] = ticket
        if ticket.digest not in self._state.claims:
            self._state.claims.add(ticket.digest)
            self._owner.claim(ticket.digest)
            ticket.claims = True

    def _grant(self, ticket: _Ticket, extents: tuple[Extent, ...]) -> None:
        ticket.extents = extents
        self._granted_units += ticket.units

    def _limit_units(self) -> int:
        return max(self._state.geometry.data_units // GRANTED_SHARE, 1)

    def allocate(self, message: protocol.Allocate) -> Message:
        """See `protocol.Allocate`."""
        state = self._state
        with self._lock:
            if 0 < message.ticket <= self._last_ticket and message.ticket not in self._tickets:
                return protocol.Granted(array("Q"))  # given up while this waited for a thread
            ticket = self._ticket(message.ticket)
            if ticket.extents is not None:
                raise Malformed("it has space already")

        def wait_for_own() -> bool:
            if not message.patient:
                raise _NotNow
            return False

        def waiting_claims() -> int:
            return len(state.claims) - self._owner.writing_count

        with self._store._operation(writing=True):
            try:
                self._wait_for_share(ticket, patient=bool(message.patient))
                extents = make_room(
                    state,
                    ticket.units,
                    ticket.record_bytes,
                    f"a chunk of {ticket.payload_bytes} bytes",
                    own_claims=waiting_claims,
                    wait_for_own=wait_for_own,
                )
            except _NotNow:
                return protocol.Granted(array("Q"))
        with state.changing:
            if not self.is_heard or message.ticket not in self._tickets:
                displace(state, [ticket.record_bytes], [extents])
                return protocol.Granted(array("Q"))
            self._grant(ticket, extents)
        return protocol.Granted(array("Q", [word for one in extents for word in one]))

    def _wait_for_share(self, ticket: _Ticket, *, patient: bool) -> None:
        """Return when this client holds so little that it may have more. Raises _NotNow, StoreFull."""
        limit_units = self._limit_units()

        def fits() -> bool:
            return not self._granted_units or self._granted_units + ticket.units <= limit_units

        with self._lock:
            if fits():
                return
            if not patient:
                raise _NotNow
            if not self._state.changed.wait_for(lambda: fits() or not self.is_heard, SHARE_WAIT_S):
                raise StoreFull(
                    f"{self._owner.path}: this client is writing {self._granted_units * UNIT_BYTES} bytes, "
                    f"and may not have more than {limit_units * UNIT_BYTES} under way"
                )

    def end_puts(self, message: protocol.EndPuts) -> Message:
        """See `protocol.EndPuts`."""
        state = self._state
        count = len(message.tickets)
        if not count == len(message.outcomes) == len(message.leaves):
            raise Malformed("columns of unlike length")
        if len(set(message.tickets)) < count:
            raise Malformed("a ticket is ended twice")
        with self._store._operation(), state.changing:
            tickets = [self._ticket(number) for number in message.tickets]
            for ticket, outcome, leaves in zip(tickets, message.outcomes, message.leaves, strict=True):
                if not outcome and (
                    ticket.extents is None or len(leaves) != 8 * leaf_count(ticket.payload_bytes)
                ):
                    raise Malformed(f"{len(leaves)} bytes of leaves for {ticket.payload_bytes} of payload")
            written: dict[bytes, tuple[int, bytes]] = {}
            for number, (ticket, outcome) in enumerate(zip(tickets, message.outcomes, strict=True)):
                if ticket.extents is not None:
                    state.reserved_record_bytes -= ticket.record_bytes
                    # Nobody can put what is in no log; and what others have put meanwhile is as good.
                    if not outcome and ticket.digest not in written and not self._is_taken(ticket.digest):
                        written[ticket.digest] = number, message.leaves[number]
                    elif outcome < 0:
                        state.allocator.quarantine(ticket.extents)
                        state.counters["put_device_error"] += 1
                    else:
                        state.allocator.release(ticket.extents)
                if outcome > 0:
                    state.refund(ticket.units)
            inserted = bytearray(count)
            sequence = 0
            if written and state.log.failure is None:
                sequence = self._insert([tickets[number] for number, _ in written.values()], written)
                for number, _ in written.values():
                    inserted[number] = 1
            else:
                for number, _ in written.values():
                    state.allocator.release(tickets[number].extents or ())
            for ticket in tickets:
                self._end(ticket)
                entry = state.index.get(ticket.digest)
                if entry is not None:
                    sequence = max(sequence, entry.log_sequence)
            state.changed.notify_all()
        state.log.check_writable()
        return protocol.Ended(bytes(inserted), sequence)

    def _is_taken(self, digest: bytes) -> bool:
        return digest in self._state.index or digest in self._state.reserved

    def _insert(self, tickets: Sequence[_Ticket], written: dict[bytes, tuple[int, bytes]]) -> int:
        """Make chunks visible; returns the log sequence of the last."""
        state = self._state
        sizes = [ticket.payload_bytes for ticket in tickets]
        batch = Batch(Direction.WRITE, Priority.STORE)
        add_put_transfers(
            batch,
            sizes,
            [ticket.extents or () for ticket in tickets],
            array("I", bytes(4 * len(tickets))),
            state.geometry.data.offset_bytes,
        )
        batch.leaf_values = array("Q", b"".join([leaves for _, leaves in written.values()]))
        stays = tickets[0].stays
        digests = [ticket.digest for ticket in tickets]
        keeping = state.keep() if stays is not None else state.keeping
        if keeping is not None and stays is not None:
            keeping.begin_put(digests, stays)
        try:
            sequence = state.insert(
                batch,
                range(len(tickets)),
                digests=digests,
                keys=[ticket.key for ticket in tickets],
                keys_are_text=bytes([ticket.key_is_text for ticket in tickets]),
                layouts=[ticket.layout for ticket in tickets],
                record_bytes_at_most=sum(ticket.record_bytes for ticket in tickets),
            )
        finally:
            if keeping is not None:
                keeping.end_put(digests)
                keeping.used(digests)
                state.keep_quotas()
        state.counters["put_chunks"] += len(tickets)
        state.counters["put_bytes"] += sum(sizes)
        return sequence

    def give_up(self, message: protocol.GiveUp) -> None:
        """See `protocol.GiveUp`."""
        with self._state.changing:
            for number in message.tickets:
                ticket = self._ticket(number)
                if ticket.extents is not None:
                    displace(self._state, [ticket.record_bytes], [ticket.extents])
                self._state.refund(ticket.units)
                self._end(ticket)
            self._state.changed.notify_all()

    def wait_for_put(self, message: protocol.WaitForPut) -> Message:
        """See `protocol.WaitForPut`."""
        state = self._state
        with self._lock:
            free = state.changed.wait_for(
                lambda: not state.claims.intersection(message.digests) or not self.is_heard, CLAIM_WAIT_S
            )
        return protocol.Answer(int(free))

    def _ticket(self, number: int) -> _Ticket:
        ticket = self._tickets.get(number)
        if ticket is None:
            raise Malformed(f"there is no ticket {number}")
        return ticket

    def _end(self, ticket: _Ticket) -> None:
        """Forget a ticket whose extents have a place."""
        self._unclaim(ticket)
        if ticket.extents is not None:
            self._granted_units -= ticket.units
        del self._tickets[ticket.number]

    def _unclaim(self, ticket: _Ticket) -> None:
        if ticket.claims:
            ticket.claims = False
            self._state.claims.discard(ticket.digest)
            self._owner.unclaim(ticket.digest)

    # -- the catalog -----------------------------------------------------------------------------------

    def delete(self, message: protocol.Delete) -> Message:
        """See `protocol.Delete`."""
        if len(message.digests) != 1:
            raise Malformed(f"{len(message.digests)} keys to delete")
        with self._store._operation(writing=True):
            return protocol.Answer(self._store._delete(message.digests[0]))

    def commit(self, message: protocol.Commit) -> Message | None:
        """See `protocol.Commit`."""
        with self._store._operation(writing=True):
            if message.sequence:
                self._state.log.commit(min(message.sequence, self._state.log.newest_log_sequence))
            else:
                self._state.log.commit()
        return protocol.Answer(1)

    def checkpoint(self, message: protocol.Checkpoint) -> Message:
        """See `protocol.Checkpoint`."""
        self._store.checkpoint()
        return protocol.Answer(1)

    def mark(self, message: protocol.Mark) -> Message:
        """See `protocol.Mark`."""
        index, keeping = self._state.index, self._state.keeping
        if len(message.digests) != 1:
            raise Malformed(f"{len(message.digests)} keys to mark")
        (digest,) = message.digests
        with self._lock:
            self._state.expire()
            entry = index.get(digest)
            if entry is None:
                return protocol.Answer(0)
            pin = digest, entry.log_sequence
            done = True
            if message.marking == protocol.Marking.TOUCH:
                index.touch(digest)
                if keeping is not None:
                    keeping.used([digest])
            elif message.marking == protocol.Marking.PIN:
                done = index.pin(digest, 1)
                self._pins[pin] += done
            else:
                done = self._pins[pin] > 0 and index.pin(digest, -1)
                self._pins[pin] -= done
            if not self._pins[pin]:
                del self._pins[pin]
        return protocol.Answer(int(done))

    def describe(self, message: protocol.Describe) -> Message:
        """See `protocol.Describe`."""
        state = self._state
        with self._lock:
            state.expire()
            entry = state.index.get(message.digests[0]) if message.digests else None
            if entry is None:
                return protocol.Described([], b"", 0, 0)
            length = length_of(entry.raw)
            records = [entry.raw[:length]] + ([entry.raw[length:]] if len(entry.raw) > length else [])
            durable = entry.log_sequence <= state.log.durable_sequence
            body = state.layouts[entry.layout_id].body
            return protocol.Described(records, body, int(durable), state.index.pins(entry))

    def list_keys(self, message: protocol.ListKeys) -> Message:
        """See `protocol.ListKeys`."""
        listing = self._listings.get(message.listing)
        if listing is None:
            while len(self._listings) >= LISTING_LIMIT:
                del self._listings[next(iter(self._listings))]
            listing = self._listings[message.listing] = self._store.keys()
        found = list(itertools.islice(listing, KEYS_AT_A_TIME))
        if not found:
            del self._listings[message.listing]
        return protocol.Listed(
            list(map(_raw, found)),
            bytes([isinstance(key, str) for key in found]),
        )

    def take_changes(self, message: protocol.TakeChanges) -> Message:
        """See `protocol.TakeChanges`."""
        if message.watch not in self._watches:
            if len(self._watches) >= WATCH_LIMIT:
                raise Malformed(f"more than {WATCH_LIMIT} watches")
            self._watches[message.watch] = self._store.watch(), deque()
        watch, taken = self._watches[message.watch]
        if not taken:
            taken.extend(watch.take())
        some = [taken.popleft() for _ in range(min(KEYS_AT_A_TIME, len(taken)))]
        kinds = bytes(isinstance(one.key, str) | one.stored << 1 for one in some)
        sizes = array("Q", [one.payload_bytes for one in some])
        return protocol.Changes([_raw(one.key) for one in some], kinds, sizes, int(bool(taken)))

    def end_watch(self, message: protocol.EndWatch) -> None:
        """See `protocol.EndWatch`."""
        watch, _ = self._watches.pop(message.watch, (None, None))
        if watch is not None:
            watch.close()

    def stats(self, message: protocol.Stats) -> Message:
        """See `protocol.Stats`."""
        return protocol.Document(json.dumps(self._owner.stats(), default=str))

    def info(self, message: protocol.Info) -> Message:
        """See `protocol.Info`."""
        return protocol.Document(json.dumps(self._owner.info(), default=str))

    def length(self, message: protocol.Length) -> Message:
        """See `protocol.Length`."""
        return protocol.Answer(len(self._store))


SHARE_WAIT_S = 5.0
"""How long a client waits for what it is writing itself before it is told that this is too much."""

HANDLERS: dict[type[Message], Callable[[Session, Any], Message | None]] = {
    protocol.Acquire: Session.acquire,
    protocol.Release: Session.release,
    protocol.Doubt: Session.doubt,
    protocol.Lookup: Session.lookup,
    protocol.BeginPuts: Session.begin_puts,
    protocol.Allocate: Session.allocate,
    protocol.EndPuts: Session.end_puts,
    protocol.GiveUp: Session.give_up,
    protocol.WaitForPut: Session.wait_for_put,
    protocol.Delete: Session.delete,
    protocol.Commit: Session.commit,
    protocol.Checkpoint: Session.checkpoint,
    protocol.Mark: Session.mark,
    protocol.Describe: Session.describe,
    protocol.ListKeys: Session.list_keys,
    protocol.TakeChanges: Session.take_changes,
    protocol.EndWatch: Session.end_watch,
    protocol.Stats: Session.stats,
    protocol.Info: Session.info,
    protocol.Length: Session.length,
}


def _raw(key: str | bytes) -> bytes:
    return key.encode(errors="surrogateescape") if isinstance(key, str) else key


def _put_record(entry: Entry) -> bytes:
    """Without the rest of a key that did not fit: nobody reads chunks by that."""
    return entry.raw[: length_of(entry.raw)]


@lru_cache(maxsize=1024)
def _layout(body: bytes) -> Layout:
    """Raises ValueError."""
    if len(body) > LAYOUT_BODY_MAX:
        raise ValueError(f"a layout of {len(body)} bytes")
    layout = Layout.decode(body)
    if layout.text_bytes > TEXT_LIMIT_BYTES:
        raise ValueError(f"a layout of {layout.text_bytes} bytes of text")
    return layout
