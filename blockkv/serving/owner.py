"""The owner of a catalog: one open store, served to the processes of a machine on a Unix socket.

The owner has the device for itself, as every opened store has: catalog, free map, log, eviction. Clients get
a copy of its descriptor and move the bytes themselves. What that needs:

  * The descriptor is a copy, not opened anew. So the claim on the device (O_EXCL, flock) lasts until the last
    client has let go of it, whatever became of the owner: nobody opens a device that an old client may still
    write to.
  * With it goes a lifeline, the writing end of a pipe. The client registers it with its rings
    (`blockkv.device.engine`), and the kernel closes a ring's files after the last request of it has
    completed, also when the process was killed: that it is gone is not enough, its writes go on. When the
    reading end here hangs up, nothing of that client can reach the device, and its extents are free.

Threads: one per client that answers what needs no waiting; workers for what does; `serve` takes connections
and looks at lifelines.

Not here: what a client may do (`session`), messages (`protocol`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockkv.device.engine import NativeDevice
from blockkv.errors import DeviceBusy, DeviceError, InvalidArgument
from blockkv.format.superblock import slots_of
from blockkv.logs import logger_for
from blockkv.serving import protocol
from blockkv.serving.client import ClientStore
from blockkv.serving.protocol import Message
from blockkv.serving.session import Session
from blockkv.serving.wire import peer_of
from blockkv.store import ArrayStore, Store
from blockkv.store.latencies import Latency

__all__ = ["Owner"]

CLIENT_LIMIT = 256
WORKERS = 16
"""Commits, and what has to look at the device."""
WAITERS = 64
"""Requests that wait for others: for space, for a key that is being put."""
GREETING_TIMEOUT_S = 10
"""A process that connects and says nothing."""
CLOSING_WAIT_S = 10.0
"""How long the end of the owner waits for the end of its clients' requests."""

ACCEPT_PAUSE_S = 0.1
"""After one that could not be taken: what is short, descriptors for example, is short for a while."""

_WAKE, _ACCEPT = "wake", "accept"


class Owner:
    """Serves `store` at the socket `path`, from construction on; call `serve` on some thread.

    The store is the owner's until `close`, which closes it. `mode` and `group` say who may connect: whoever
    may write to the socket has the rights of the owner on the device.

    Raises DeviceBusy where somebody serves there already, InvalidArgument (an array, a store that is open
    read-only, a device that cannot be shared), DeviceError (the socket cannot be made).
    """

    def __init__(
        self, store: Store, path: str | os.PathLike[str], *, mode: int = 0o600, group: int | None = None
    ) -> None:
        if isinstance(store, ClientStore):
            raise InvalidArgument(f"{store!r} has an owner; its clients connect there")
        if isinstance(store, ArrayStore):
            raise InvalidArgument(
                "an array cannot be served: format each device as a store of its own, and serve those"
            )
        if store.read_only:
            raise InvalidArgument(f"{store!r} is open read-only: clients would have to write")
        if not isinstance(store._state.device, NativeDevice):
            raise InvalidArgument(f"{store!r} is on a device of this process alone")
        self.store = store
        self.path = os.fspath(path)
        self._listener = _listen(self.path, mode, group)
        self._device = store._state.device
        recovery = store._recovery
        is_whole = not (recovery.chunks_dropped_unsealed or recovery.journal_damaged)
        self._opened_sequence = store._state.log.recovered_sequence if is_whole else 0
        self._lock = store._state.lock
        self._sessions: set[Session] = set()
        self._threads: set[threading.Thread] = set()
        self._claims: set[bytes] = set()
        self._accepted = 0
        self._closing = False
        self._closed = False
        self.workers: Executor = ThreadPoolExecutor(WORKERS, "blockkv-serve")
        self._waiters = ThreadPoolExecutor(WAITERS, "blockkv-wait")
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, _WAKE)
        self._inode = Path(self.path).stat().st_ino
        self._selector.register(self._listener, selectors.EVENT_READ, _ACCEPT)
        self._arrived: list[tuple[int, Session]] = []
        """Lifelines that `serve` is to look at."""

    # -- serving ---------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Take connections until `stop`."""
        while not self._closing:
            self._look(None)

    def stop(self) -> None:
        """End `serve`. From any thread, and from a signal handler."""
        self._closing = True
        if not self._closed:
            self._wake()

    def close(self) -> None:
        """Hang up, wait for what clients have in flight, close the store. Idempotent.

        `serve` has returned. A client whose requests do not end keeps the device: its next owner is refused
        until they have. Raises what `Store.close` raises.
        """
        if self._closed:
            return
        self._closed = self._closing = True
        self._selector.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            if Path(self.path).stat().st_ino == self._inode:
                Path(self.path).unlink()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.hang_up()
        for thread in list(self._threads):
            thread.join()
        self.workers.shutdown()
        self._waiters.shutdown()
        deadline = time.monotonic() + CLOSING_WAIT_S
        while self._sessions and (left_s := deadline - time.monotonic()) > 0:
            self._look(left_s)
        for session in self._sessions:
            logger_for(self.path, client=str(session)).warning(
                "%s is gone or does not let go of %s", session, self._device.path
            )
        self._device.is_shared = bool(self._sessions)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Session):
                os.close(key.fd)
        self._selector.close()
        os.close(self._wake_receiver)
        os.close(self._wake_sender)
        self.store.close()

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_sender, b"!")

    def _look(self, timeout_s: float | None) -> None:
        """Wait for something to happen, and deal with it."""
        for key, _ in self._selector.select(timeout_s):
            if key.data == _WAKE:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_receiver, 4096)
            elif key.data == _ACCEPT:
                self._accept()
            else:
                # Nobody writes to a lifeline: it hangs up, or somebody does what is not foreseen.
                if os.read(key.fd, 1):
                    key.data.hang_up()
                    continue
                self._selector.unregister(key.fd)
                os.close(key.fd)
                key.data.lifeline_closed()
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for descriptor, session in arrived:
            self._selector.register(descriptor, selectors.EVENT_READ, session)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):  # it has gone again
                logger_for(self.path).warning("a connection was not taken: %s", error)
                time.sleep(ACCEPT_PAUSE_S)
            return
        if len(self._sessions) >= CLIENT_LIMIT:
            logger_for(self.path).warning("%d clients are connected; another one is refused", CLIENT_LIMIT)
            connection.close()
            return
        connection.settimeout(GREETING_TIMEOUT_S)
        self._accepted += 1
        session = Session(self, connection, peer_of(connection), self._accepted)
        with self._lock:
            self._sessions.add(session)

        def run() -> None:
            session.run()
            self._threads.discard(thread)

        thread = threading.Thread(target=run, name=f"blockkv-client-{session.number}", daemon=True)
        self._threads.add(thread)
        thread.start()

    # -- for sessions ----------------------------------------------------------------------------------

    def welcome(self) -> Message:
        """See `blockkv.serving.session.Host`, as for the next ones."""
        superblock = self.store._state.log.superblock
        slot, _ = slots_of(superblock.generation)
        return protocol.Welcome(
            protocol.VERSION,
            superblock.epoch,
            superblock.encode(slot),
            slot,
            self._device.path,
            json.dumps(asdict(self._device.limits)),
            self._opened_sequence,
            self._device.cipher_key,
        )

    @contextlib.contextmanager
    def handing_over(self, session: Session) -> Iterator[list[int]]:
        """For a client: copies of the device's descriptor and of a new lifeline, closed here afterwards."""
        device = self._device.share()
        try:
            receiver, sender = os.pipe2(os.O_CLOEXEC)
            try:
                with self._lock:
                    self._arrived.append((receiver, session))
                self._wake()
                yield [device, sender]
            finally:
                os.close(sender)
        finally:
            os.close(device)

    def pool_for(self, message: Message) -> Executor | None:
        """Where a request is carried out that has to wait; None: at once."""
        if isinstance(message, (protocol.Allocate, protocol.WaitForPut)):
            return self._waiters
        if isinstance(message, (protocol.Commit, protocol.Checkpoint)):
            return self.workers
        return None

    def look_at(self, session: Session) -> None:
        """Forget a session once it has let go of everything."""
        if session.let_go():
            with self._lock:
                self._sessions.discard(session)
            self._wake()

    def claim(self, digest: bytes) -> None:
        """A client puts this key."""
        self._claims.add(digest)

    def unclaim(self, digest: bytes) -> None:
        """It is free again."""
        self._claims.discard(digest)

    def is_claimed(self, digest: bytes) -> bool:
        """Whether a client has."""
        return digest in self._claims

    @property
    def writing_count(self) -> int:
        return sum(session.writing_count for session in self._sessions)

    # -- for people ------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def read_only(self) -> bool:
        return self.store.read_only

    def latencies(self) -> dict[str, Latency]:
        """`Store.latencies`: calls of this process, not of clients."""
        return self.store.latencies()

    def stats(self) -> dict[str, Any]:
        """`Store.stats`, and how many clients there are and what they have."""
        with self._lock:
            sessions = list(self._sessions)
            return self.store.stats() | {
                "clients": sum(session.is_heard for session in sessions),
                "clients_letting_go": sum(not session.is_heard for session in sessions),
                "clients_accepted": self._accepted,
                "client_leases": sum(session.lease_count for session in sessions),
                "client_puts": sum(session.ticket_count for session in sessions),
            }

    def info(self) -> dict[str, Any]:
        """`Store.info`, and who the clients are."""
        with self._lock:
            return self.store.info() | {
                "socket": self.path,
                "owner_pid": os.getpid(),
                "clients": [session.described for session in self._sessions],
            }


def _listen(path: str, mode: int, group: int | None) -> socket.socket:
    """A listening socket at `path`, where there is none, or one that nobody listens to any more."""
    _refuse_live(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # Bound under another name first: nobody may connect before the mode is set.
    temporary = f"{path}.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        listener.bind(temporary)
        try:
            if group is not None:
                os.chown(temporary, -1, group)
            Path(temporary).chmod(mode)
            listener.listen(CLIENT_LIMIT)
            listener.setblocking(False)
            Path(temporary).rename(path)
        except BaseException:
            Path(temporary).unlink()
            raise
    except OSError as error:
        listener.close()
        raise DeviceError(
            f"{path}: the socket cannot be made: {error.strerror or error}", error.errno
        ) from None
    return listener


def _refuse_live(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise DeviceError(f"{path} exists and is no socket; give another path", errno.EEXIST)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(GREETING_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # whoever listened there is gone
        except OSError as error:
            raise DeviceError(f"{path}: {error.strerror or error}", error.errno) from None
        raise DeviceBusy(f"{path} is served already, by {peer_of(probe)}", errno.EADDRINUSE)
