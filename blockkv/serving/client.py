"""A store that another process owns: the catalog there, the bytes moved here.

    get   ask the owner, which leases -> read from the device into the caller's memory -> verify -> release
    put   ask the owner for space -> write to the device -> tell the owner, which makes it visible

Invariants
  * what is read is verified against the records that the owner sent, as in a store of one's own;
  * what belongs to one connection (leases, space, descriptors) is never used with another one;
  * when a connection ends its device is closed, as soon as nothing is in flight on it any more: until then no
    other owner can have the device;
  * nothing is called durable that an owner who died may have taken with him: `commit` says so, once.

When the owner is gone gets are misses and changes raise OwnerLost; a thread connects again when it is back.

Not here: what the owner leases (`client_path`), puts (`client_puts`), requests (`connection`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from blockkv.catalog.index import Entry
from blockkv.catalog.layouts import Layout
from blockkv.device.base import Limits
from blockkv.device.engine import NativeDevice
from blockkv.errors import (
    BlockKVError,
    DeviceError,
    InvalidArgument,
    OwnerLost,
    StoreClosed,
    StoreReadOnly,
    VersionTooNew,
)
from blockkv.format import superblock
from blockkv.format.record import key_digest
from blockkv.logs import logger_for
from blockkv.serving import protocol
from blockkv.serving.client_path import ClientPath
from blockkv.serving.client_puts import ClientPuts
from blockkv.serving.client_watch import ClientWatch
from blockkv.serving.connection import Connection, TimedOut, error_of
from blockkv.serving.protocol import Malformed, Message, encode
from blockkv.serving.wire import Frames
from blockkv.store.check import CheckReport
from blockkv.store.data_path import DataPath, Options
from blockkv.store.finding import Finding
from blockkv.store.growing import GrowingChunk
from blockkv.store.interrupts import interrupts
from blockkv.store.keeping import Stay
from blockkv.store.keys import Key, encode_key
from blockkv.store.latencies import Latencies
from blockkv.store.part_gets import Leased, lease
from blockkv.store.preloads import Preloads
from blockkv.store.scrub import ScrubReport
from blockkv.store.store import BELONGS_TO_PARENT, COUNTERS, ChunkInfo, Store, StoreFuture, several_keys
from blockkv.store.streams import StreamPool
from blockkv.store.watch import Watch
from blockkv.tensors import Tensors, describe

__all__ = ["ClientStore"]

PATIENCE_S = 30.0
"""How long the owner may take to answer before it counts as lost. Commits wait for the device."""
LOOKUP_PATIENCE_S = 1.0
"""The same for what schedulers ask; then it is a miss, as are all until the owner answers again."""
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = (0.02, 1.0)
"""The first and the longest pause between attempts to connect again."""
WATCH_S = 1.0
"""How often messages that could not be sent are tried again."""
LOOKUP_KEYS = 8192
DESCRIPTORS = 2

A = TypeVar("A", bound=Message)


class _Session:
    """One connection, with its device and what was leased on it."""

    def __init__(
        self,
        connection: Connection,
        device: NativeDevice,
        welcome: protocol.Welcome,
        path: ClientPath,
        uuid: bytes,
    ) -> None:
        self.uuid = uuid
        """Of the store that is served."""
        self.connection = connection
        self.device = device
        self.epoch = welcome.epoch
        self.opened_sequence = welcome.opened_sequence
        self.path = path
        self.lazy_sequence = 0
        """The newest log sequence of a change that was not made durable by us."""
        self.registrations: dict[int, int] = {}
        """Handles of registered memory at the device, by those of the store."""

    def end(self) -> None:
        """Wait for what is in flight, then let go of the device and of the socket."""
        self.connection.end("the store was closed")
        self.device.close()
        self.connection.close()


class ClientStore(Store):
    """A store that is open in the process of `blockkv serve`. Get one from `blockkv.open` with its socket.

    A `Store` with the same promises. What differs: the owner may go and come back (see the module), pins end
    with this store, and what concerns the whole device is for the owner: `reserve`, `check`, `scrub` and
    `discard_freed` raise InvalidArgument. Counters in `stats` that this store has are its own, those of the
    owner for all clients are called `owner_...`.
    """

    def __init__(
        self,
        path: str,
        *,
        read_only: bool,
        engine: Literal["auto", "io_uring", "threads", "passthrough"],
        depth: int,
        max_store_bytes: int,
    ) -> None:
        self._path = path
        self._read_only = read_only
        self._engine: Literal["auto", "io_uring", "threads", "passthrough"] = engine
        self._depth = depth
        self._options = Options(max_store_bytes=max_store_bytes)
        self._counters: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._active_count = 0
        self._inside = threading.local()
        self._closed = ""
        self._latencies = Latencies()
        self._executor = None
        self._preloads = Preloads()
        self._stream_pool = StreamPool(self._go_inside)
        self._registered: dict[int, tuple[int, int]] = {}
        """Memory that is registered, by our own handles."""
        self._last_registration = 0
        self._last_listing = 0
        self._last_watch = 0
        self._owed = ""
        """What the next commit has to say of changes that went away with an owner."""
        self._session = self._connect()
        self._ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="blockkv-owner-watch", daemon=True)
        self._watcher.start()
        _open_clients.add(self)

    @property
    def _shared_lock(self) -> threading.RLock:
        return self._lock

    @property
    def _where(self) -> str:
        return self._path

    @property
    def _data(self) -> DataPath:
        return self._session.path

    # -- connecting ------------------------------------------------------------------------------------

    def _connect(self) -> _Session:
        """Raises DeviceError (nobody serves there), OwnerLost, VersionTooNew."""
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        descriptors: list[int] = []
        try:
            raw.settimeout(CONNECT_TIMEOUT_S)
            raw.connect(self._path)
            name = f"{Path(sys.argv[0]).name or 'python'} ({os.getpid()})"
            raw.sendall(encode(protocol.Hello(protocol.VERSION, name), 1))
            frames = Frames(raw)
            first, descriptors, _, _ = socket.recv_fds(raw, 65536, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            frames.add(first)
            while (frame := frames.next()) is None:
                if not first or not frames.fill():
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            welcome = frame.message
            if isinstance(welcome, protocol.Failure):
                raise error_of(welcome)
            if not isinstance(welcome, protocol.Welcome) or len(descriptors) != DESCRIPTORS:
                raise Malformed(f"a {type(welcome).__name__} with {len(descriptors)} descriptors comes first")
            session = self._begin(raw, frames, welcome, descriptors)
            session.connection.durable_sequence = frame.durable_sequence
        except BaseException as error:
            raw.close()
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            if isinstance(error, TimeoutError):
                raise OwnerLost(f"{self._path}: the owner of the store does not answer") from None
            if isinstance(error, OSError) and not isinstance(error, BlockKVError):
                raise DeviceError(
                    f"{self._path}: nobody serves a store there ({os.strerror(error.errno or 0)}); start "
                    f"`blockkv serve DEVICE --socket {self._path}`",
                    error.errno,
                ) from None
            raise
        return session

    def _begin(
        self, raw: socket.socket, frames: Frames, welcome: protocol.Welcome, descriptors: list[int]
    ) -> _Session:
        if welcome.version != protocol.VERSION:
            raise VersionTooNew(
                f"{self._path}: its owner speaks version {welcome.version} of the protocol, and this client "
                f"version {protocol.VERSION}: use the same blockkv for both"
            )
        try:
            found = superblock.decode(welcome.superblock, welcome.slot)
            limits = Limits(**json.loads(welcome.limits))
        except (TypeError, ValueError, BlockKVError) as error:
            raise Malformed(f"what it serves cannot be read: {error}") from None
        path = f"{welcome.path} ({self._path})"
        device_fd, lifeline = descriptors
        engine = "auto" if self._engine == "passthrough" else self._engine
        device = NativeDevice(device_fd, path, limits, engine=engine, depth=self._depth, lifeline=lifeline)
        descriptors.clear()  # the device has them now
        if welcome.cipher_key:
            zone = found.geometry.encrypted_zone
            try:
                device.encrypt(welcome.cipher_key, zone.offset_bytes, zone.end_bytes)
            except BaseException:
                device.close()
                raise
        connection = Connection(raw, frames, self._path)
        data_path = ClientPath(connection, device, found.geometry, self._options, self._counters, PATIENCE_S)
        return _Session(connection, device, welcome, data_path, found.uuid)

    def _watch(self) -> None:
        """Run on a thread of its own: sees the owner go, lets go of the device, connects again."""
        while not self._ending.is_set():
            session = self._session
            if not session.connection.wait_for_end(WATCH_S):
                session.connection.flush()
                continue
            if self._ending.is_set():
                return
            session.connection.end("it has closed the connection")
            logger_for(self._path).warning("the owner of the store is gone; gets are misses until it is back")
            self._note_debt(session)
            session.end()
            self._reconnect(session)

    def _note_debt(self, session: _Session) -> None:
        with self._lock:
            if session.lazy_sequence > session.connection.durable_sequence:
                self._owed = (
                    f"{self._path}: the owner of the store went away with changes that may not have been "
                    "durable; what was put or deleted since is not affected"
                )

    def _reconnect(self, before: _Session) -> None:
        pause_s = RECONNECT_S[0]
        while not self._ending.wait(pause_s):
            pause_s = min(2 * pause_s, RECONNECT_S[1])
            try:
                session = self._connect()
            except (BlockKVError, OSError) as error:  # short of descriptors, say: not for ever
                logger_for(self._path).debug("%s", error)
                continue
            if session.uuid != before.uuid:
                session.end()
                logger_for(self._path).error("another store is served there now; this one stays lost")
                pause_s = RECONNECT_S[1]
                continue
            with self._lock:
                if session.epoch == before.epoch:
                    self._owed = ""  # it is the same owner, who has it all
                    session.lazy_sequence = before.lazy_sequence
                elif session.epoch == before.epoch + 1 and before.lazy_sequence <= session.opened_sequence:
                    self._owed = ""  # the next owner found all of it on the device
                self._session = session
                for handle in self._registered:
                    self._register_at(session, handle)
            logger_for(self._path).warning("connected to the owner of the store again")
            return

    def _call(self, message: Message, kind: type[A]) -> A:
        return self._call_on(self._session, message, kind)

    def _call_on(self, session: _Session, message: Message, kind: type[A]) -> A:
        with interrupts:
            try:
                return session.connection.call(message, kind, PATIENCE_S)
            except TimedOut as error:
                session.connection.end("it does not answer")
                raise OwnerLost(str(error)) from None

    # -- writing ---------------------------------------------------------------------------------------

    def reserve(self, key: Key, capacity_bytes: int) -> GrowingChunk:
        raise self._for_owner("reserve", "put chunks when they are complete")

    def delete(self, key: Key, durable: bool = False) -> bool:
        digest = key_digest(encode_key(key))
        with self._operation(writing=True):
            session = self._session
            sequence = self._call(protocol.Delete([digest]), protocol.Answer).value
            if sequence:
                self._changed(session, sequence, durable)
        return sequence > 0

    def commit(self) -> None:
        """See `Store.commit`. Raises OwnerLost once where changes may have gone away with an owner."""
        with self._operation(writing=True):
            self._call(protocol.Commit(0), protocol.Answer)
            self._pay_debt()

    def checkpoint(self) -> None:
        with self._operation(writing=True):
            self._call(protocol.Checkpoint(), protocol.Answer)

    def discard_freed(self) -> int:
        raise self._for_owner("discard_freed", "the owner does it by itself when started with --discard")

    def _changed(self, session: _Session, sequence: int, durable: bool) -> None:
        """A change up to `sequence` has been made: make it durable, or note that it is not."""
        if durable and sequence:
            self._call_on(session, protocol.Commit(sequence), protocol.Answer)
            return
        with self._lock:
            session.lazy_sequence = max(session.lazy_sequence, sequence)
            if session.connection.lost:
                self._note_debt(session)

    def _pay_debt(self) -> None:
        with self._lock:
            owed, self._owed = self._owed, ""
        if owed:
            raise OwnerLost(owed)

    def _put(
        self,
        items: list[tuple[Key, Tensors]],
        durable: bool,
        droppable: bool,
        deadline_ns: int,
        stays: Stay | None = None,
    ) -> tuple[list[bool], dict[int, BlockKVError]]:
        with self._operation(writing=True):
            session = self._session
            session.connection.check()
            run = ClientPuts(session.path, len(items), PATIENCE_S, deadline_ns, droppable, stays)
            run.run(items)
            errors = {number: self._told(session, error) for number, error in run.errors.items()}
            if run.last_sequence:
                try:
                    self._changed(session, run.last_sequence, durable)
                except OwnerLost as error:
                    fit = [number for number in range(len(items)) if number not in errors]
                    errors |= dict.fromkeys(fit, error)
        return run.results, errors

    def _told(self, session: _Session, error: BlockKVError) -> BlockKVError:
        """What to say of an error: the device of a session is closed because its owner was lost."""
        if session.connection.lost and isinstance(error, (StoreClosed, TimedOut)):
            return session.connection.error()
        return error

    # -- reading ---------------------------------------------------------------------------------------

    def _note_gets(self, keys: Sequence[Key]) -> None:
        return  # the owner does

    def _lease_chunks(self, digests: Sequence[bytes]) -> list[Leased | None]:
        return lease(self._data, digests)

    def _outlives(self, state: DataPath, error: BlockKVError) -> bool:
        lost = isinstance(state, ClientPath) and bool(state.connection.lost)
        if lost and isinstance(error, (StoreClosed, OwnerLost)):
            with self._lock:
                self._counters["get_owner_lost"] += 1
            return True
        return False

    # -- the catalog -----------------------------------------------------------------------------------

    def contains(self, key: Key) -> bool:
        """Whether the key is stored: one round trip to the owner. False while it is gone."""
        digest = key_digest(encode_key(key))
        self._check_open()
        return self._look_up([digest], 0) == 1

    def lookup(self, keys: Iterable[Key]) -> int:
        """How many of `keys`, from the first on, are stored without a gap: one round trip for 8192 keys."""
        self._check_open()
        digests = [key_digest(encode_key(key)) for key in several_keys(keys)]
        length = 0
        for first in range(0, len(digests), LOOKUP_KEYS):
            some = digests[first : first + LOOKUP_KEYS]
            found = self._look_up(some, 1)
            length += found
            if found < len(some):
                break
        return length

    def _look_up(self, digests: Sequence[bytes], counts_as_request: int) -> int:
        connection = self._session.connection
        message = protocol.Lookup(digests, counts_as_request)
        with interrupts:
            try:
                if connection.is_stalled():
                    raise TimedOut
                return min(connection.call(message, protocol.Answer, LOOKUP_PATIENCE_S).value, len(digests))
            except (OwnerLost, TimedOut):
                with self._lock:
                    self._counters["lookup_owner_lost"] += 1
                return 0

    def touch(self, key: Key) -> bool:
        return self._mark(key, protocol.Marking.TOUCH)

    def pin(self, key: Key) -> bool:
        """See `Store.pin`. The pin ends with this store, and when the owner goes."""
        return self._mark(key, protocol.Marking.PIN)

    def unpin(self, key: Key) -> bool:
        """Take back one `pin` of this store."""
        return self._mark(key, protocol.Marking.UNPIN)

    def _mark(self, key: Key, marking: int) -> bool:
        digest = key_digest(encode_key(key))
        with self._operation():
            return self._call(protocol.Mark([digest], marking), protocol.Answer).value == 1

    def keys(self) -> Iterator[str | bytes]:
        self._check_open()
        with self._lock:
            self._last_listing += 1
            listing = self._last_listing

        def more() -> list[str | bytes]:
            answer = self._call(protocol.ListKeys(listing), protocol.Listed)
            return [
                key.decode(errors="replace") if is_text else key
                for key, is_text in zip(answer.keys, answer.keys_are_text, strict=True)
            ]

        first = more()

        def found() -> Iterator[str | bytes]:
            some = first
            while some:
                yield from some
                some = more()

        return found()

    def watch(self) -> Watch:
        """See `Store.watch`. While the owner is gone nothing is told; afterwards what the next one found."""
        self._check_open()
        with self._lock:
            self._last_watch += 1
            return ClientWatch(self._last_watch, self._take_changes)

    def _take_changes(self, message: protocol.TakeChanges) -> tuple[protocol.Changes, Connection]:
        with self._operation():
            session = self._session
            return self._call_on(session, message, protocol.Changes), session.connection

    def entry(self, key: Key) -> ChunkInfo | None:
        digest = key_digest(encode_key(key))
        with self._operation():
            session = self._session
            answer = self._call(protocol.Describe([digest]), protocol.Described)
            if not answer.records:
                return None
            entry = Entry(0, b"".join(answer.records))
            return ChunkInfo(
                key=entry.key,
                digest=entry.digest,
                payload_bytes=entry.payload_bytes,
                layout=Layout.decode(answer.layout),
                extents=entry.extents,
                log_sequence=entry.log_sequence,
                durable=bool(answer.durable),
                pins=answer.pins,
                device=session.device.path,
            )

    def __len__(self) -> int:
        self._check_open()
        return self._call(protocol.Length(), protocol.Answer).value

    # -- memory ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def register(self, memory: Any) -> Iterator[bool]:
        described = describe(memory)
        if described.copied_bytes or len(described.segments) != 1:
            raise InvalidArgument("only contiguous memory can be registered")
        self._check_open()
        with self._lock:
            self._last_registration += 1
            handle = self._last_registration
            self._registered[handle] = described.segments[0]
            try:
                available = self._register_at(self._session, handle, strict=True)
            except BaseException:
                del self._registered[handle]
                raise
        try:
            yield available
        finally:
            with self._lock:
                del self._registered[handle]
                session = self._session
                theirs = session.registrations.pop(handle, -1)
                if theirs >= 0 and not self._closed:
                    session.device.unregister(theirs)
            del described

    def _register_at(self, session: _Session, handle: int, strict: bool = False) -> bool:
        try:
            session.registrations[handle] = session.device.register(*self._registered[handle])
        except (DeviceError, StoreClosed) as error:
            if strict and isinstance(error, DeviceError):
                raise
            return False
        return session.registrations[handle] >= 0

    # -- looking after ---------------------------------------------------------------------------------

    @property
    def read_only(self) -> bool:
        return self._read_only

    @property
    def is_client(self) -> bool:
        return True

    @property
    def is_connected(self) -> bool:
        """Whether the owner is there, as far as is known."""
        return not (self._closed or self._session.connection.lost)

    def stats(self) -> dict[str, Any]:
        """Counters of this store, and of the owner for all clients (`owner_...`), and the present state.

        While the owner is gone those of this store alone.
        """
        figures: dict[str, Any] = {}
        if not self._closed:
            with contextlib.suppress(OwnerLost):
                figures = dict(self._document(protocol.Stats()))
        device = self._session.device.counters()
        for name in [*OWN_COUNTERS, *device]:
            if name in figures:
                figures[f"owner_{name}"] = figures.pop(name)
        with self._lock:
            own = {name: self._counters[name] for name in (*OWN_COUNTERS, *CLIENT_COUNTERS)}
            own["leased_chunks"] = self._session.path.lease_count
        return figures | own | device | {"owner_connected": int(self.is_connected)}

    def info(self) -> dict[str, Any]:
        device = self._session.device
        self._check_open()
        return dict(self._document(protocol.Info())) | {
            "engine": device.engine_name,
            "engine_reason": device.engine_reason,
            "placement": device.placement(),
            "read_only_reason": "it was opened read-only" if self._read_only else "",
        }

    def _document(self, message: Message) -> dict[str, Any]:
        document = json.loads(self._call(message, protocol.Document).text)
        assert isinstance(document, dict)
        return document

    @property
    def findings(self) -> tuple[Finding, ...]:
        raise self._for_owner("findings", "stop the owner and use `blockkv check`")

    def check(
        self,
        payload: bool = False,
        *,
        repair: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> CheckReport:
        raise self._for_owner("check", "stop the owner and use `blockkv check`")

    def scrub(
        self, bytes_per_s: float = 0, *, progress: Callable[[int, int], None] | None = None
    ) -> ScrubReport:
        raise self._for_owner("scrub", "start the owner with --scrub")

    def start_scrub(
        self, bytes_per_s: float = 0, *, progress: Callable[[int, int], None] | None = None
    ) -> StoreFuture[ScrubReport]:
        raise self._for_owner("scrub", "start the owner with --scrub")

    def stop_scrub(self) -> None:
        raise self._for_owner("scrub", "start the owner with --scrub")

    def _for_owner(self, what: str, instead: str) -> InvalidArgument:
        return InvalidArgument(f"{self._path}: {what} is not for clients of an owner; {instead}")

    def _close(self) -> None:
        if self._executor is not None and not self._closed:
            self._executor.shutdown()
        self._preloads.withdraw_all()
        with self._lock:
            if self._closed:
                return
            self._closed = "the store was closed"
            self._idle.wait_for(lambda: self._active_count == 0)
        self._stream_pool.end()
        session = self._session
        try:
            lazy = session.lazy_sequence > session.connection.durable_sequence
            if lazy and not session.connection.lost:
                self._call_on(session, protocol.Commit(0), protocol.Answer)
        finally:
            self._ending.set()
            session.end()
            self._watcher.join()
            if self._session is not session:  # connected again meanwhile
                self._session.end()
            _open_clients.discard(self)
        self._pay_debt()

    def __repr__(self) -> str:
        state = " closed" if self._closed else "" if self.is_connected else " owner gone"
        return f"<blockkv.ClientStore {self._path}{state}>"

    # -- inside ----------------------------------------------------------------------------------------

    def _enter(self, writing: bool = False) -> None:
        with self._lock:
            self._check_open()
            if writing and self._read_only:
                raise StoreReadOnly(f"{self._path}: it was opened read-only")
            self._active_count += 1

    def _leave(self) -> None:
        with self._lock:
            self._active_count -= 1
            if self._closed:
                self._idle.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self._path}: {self._closed}")

    def _abandon(self, reason: str) -> None:
        """In a forked child: the connection, the device and all of it belong to the parent."""
        self._closed = reason
        self._lock = threading.RLock()
        self._session.connection.abandon()


OWN_COUNTERS = tuple(name for name in COUNTERS if name.startswith(("put_", "get_", "part_")))
"""Counters of `Store.stats` that a client counts itself."""
CLIENT_COUNTERS = ("get_owner_lost", "lookup_owner_lost")
"""Counters of `ClientStore.stats` beyond those of a store."""

_open_clients: weakref.WeakSet[ClientStore] = weakref.WeakSet()
"""To close at exit, and to give up in a forked child."""


@atexit.register
def _close_all() -> None:
    for client in list(_open_clients):
        try:
            client.close()
        except BlockKVError as error:
            logger_for(client._where).error("closing at exit: %s", error)


def _abandon_all() -> None:
    for client in list(_open_clients):
        client._abandon(BELONGS_TO_PARENT)


os.register_at_fork(after_in_child=_abandon_all)
