"""The drives behind the namespaces: an NBD server in memory whose every answer the harness decides.

`VolatileDisk` is a drive with a volatile write cache. Everything that arrives and everything that is answered
goes, in order, into one history shared by all exports; `power_cuts` replays it. It also answers with errors,
or for a while not at all.

`ControlDisk` is how the guest talks to the harness: the text of each write is an event in the same history.
A write that the guest has seen complete has its place before everything the guest did afterwards.

Strictness: a flush covers the writes that were answered before it arrived and no others, which is all that
the NVMe specification promises. Answers are delayed at random and come out of order, so that there are
writes in flight when a flush arrives. FUA is not offered: QEMU's controller drops it anyway.

Protocol: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md, fixed newstyle, simple replies.
"""

from __future__ import annotations

import errno
import random
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

__all__ = ["ControlDisk", "Event", "Export", "Fault", "Flush", "NbdServer", "VolatileDisk", "Write"]

SECTOR_BYTES = 512

GREETING = struct.pack(">8s8sH", b"NBDMAGIC", b"IHAVEOPT", 0b11)
OPTION = struct.Struct(">8sII")
OPTION_EXPORT_NAME, OPTION_ABORT, OPTION_GO = 1, 2, 7
REPLY_MAGIC = 0x3E889045565A9
REPLY_ACK, REPLY_INFO, REPLY_UNSUPPORTED = 1, 3, 1 << 31 | 1
INFO_EXPORT, INFO_SIZES = 0, 3
HAS_FLAGS, SEND_FLUSH, SEND_TRIM, SEND_WRITE_ZEROES = 1, 4, 32, 64
LARGEST_REQUEST_BYTES = 32 << 20

REQUEST = struct.Struct(">IHHQQI")
REQUEST_MAGIC, SIMPLE_REPLY_MAGIC = 0x25609513, 0x67446698
READ, WRITE, DISCONNECT, FLUSH, TRIM, WRITE_ZEROES = 0, 1, 2, 3, 4, 6

ANSWER_CHANCE = 0.7
"""Of each request in each turn of the loop, so that answers come late and out of order."""
RECEIVE_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Write:
    """Data on its way to the media of a drive; a discard is one of zeros."""

    offset: int
    data: bytes
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class Flush:
    is_answered: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A write or flush that arrived, or was answered, at a drive; or something the guest said."""

    drive: str
    subject: Write | Flush | str
    is_answer: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    connection: _Connection
    command: int
    handle: int
    offset: int
    length: int
    data: bytes = b""
    subject: Write | Flush | None = None


class Export(ABC):
    """What stands behind one socket. Called on the server's thread, `server.lock` held."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes

    @abstractmethod
    def arrive(self, request: _Request, history: list[Event]) -> None:
        """A request came in."""

    @abstractmethod
    def answer(self, request: _Request, history: list[Event]) -> tuple[int, bytes] | None:
        """The errno (0: none) and the data to answer with; None: not yet."""


@dataclass(slots=True)
class Fault:
    """Requests of a kind ("read", "write", "flush") that touch the range fail while it is armed."""

    kind: str
    offset: int = 0
    length: int = 1 << 62
    touched_count: int = 0


_KINDS = {READ: "read", WRITE: "write", WRITE_ZEROES: "write", FLUSH: "flush", TRIM: "discard"}


class VolatileDisk(Export):
    """A drive with a volatile write cache. `contents` is what a read finds; nothing is on media by itself."""

    def __init__(self, name: str, contents: bytearray, *, recorded: bool = True) -> None:
        super().__init__(name, len(contents))
        self.contents = contents
        self.faults: list[Fault] = []
        self.silent_until = 0.0
        """`time.monotonic()` until which nothing is answered."""
        self.request_counts = dict.fromkeys(_KINDS.values(), 0)
        self._recorded = recorded

    def arrive(self, request: _Request, history: list[Event]) -> None:
        self.request_counts[_KINDS[request.command]] += 1
        if request.command == READ:
            return
        if request.command == FLUSH:
            request.subject = Flush()
        else:
            data = request.data if request.command == WRITE else bytes(request.length)
            request.subject = Write(request.offset, data)
            if not self._fault_of(request):
                self.contents[request.offset : request.offset + len(data)] = data
        if self._recorded:
            history.append(Event(self.name, request.subject))

    def answer(self, request: _Request, history: list[Event]) -> tuple[int, bytes] | None:
        if time.monotonic() < self.silent_until:
            return None
        if fault := self._fault_of(request):
            fault.touched_count += 1
            return errno.EIO, b""
        if request.command == READ:
            return 0, bytes(self.contents[request.offset : request.offset + request.length])
        assert request.subject is not None
        request.subject.is_answered = True
        if self._recorded:
            history.append(Event(self.name, request.subject, is_answer=True))
        return 0, b""

    def _fault_of(self, request: _Request) -> Fault | None:
        end = request.offset + request.length
        for fault in self.faults:
            touched = request.offset < fault.offset + fault.length and end > fault.offset
            if fault.kind == _KINDS[request.command] and (touched or fault.kind == "flush"):
                return fault
        return None


class ControlDisk(Export):
    """Text from the guest. What `on_text` returns, the guest reads back from where it wrote."""

    def __init__(self, name: str, on_text: Callable[[str], str] = lambda _: "") -> None:
        super().__init__(name, 1 << 20)
        self._on_text = on_text
        self._answers: dict[int, bytes] = {}

    def arrive(self, request: _Request, history: list[Event]) -> None:
        if request.command == WRITE:
            text = request.data.split(b"\0", 1)[0].decode()
            history.append(Event(self.name, text))
            self._answers[request.offset] = self._on_text(text).encode()

    def answer(self, request: _Request, history: list[Event]) -> tuple[int, bytes] | None:
        if request.command != READ:
            return 0, b""
        return 0, self._answers.get(request.offset, b"").ljust(request.length, b"\0")[: request.length]


@dataclass(slots=True, eq=False)
class _Connection:
    export: Export
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)

    def drain(self) -> bool:
        """Take in everything that has arrived; False when the other end hung up."""
        while True:
            try:
                data = self.socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            self.received += data

    def requests(self) -> list[_Request]:
        found = []
        position = 0
        while len(self.received) - position >= REQUEST.size:
            magic, _, command, handle, offset, length = REQUEST.unpack_from(self.received, position)
            assert magic == REQUEST_MAGIC, f"{magic:#x} is no request"
            end = position + REQUEST.size + (length if command == WRITE else 0)
            if len(self.received) < end:
                break
            data = bytes(self.received[position + REQUEST.size : end])
            found.append(_Request(self, command, handle, offset, length, data))
            position = end
        del self.received[:position]
        return found


class NbdServer:
    """Serves exports on UNIX sockets in a directory until closed. `history` is what happened, in order."""

    def __init__(self, directory: Path, exports: list[Export], rng: random.Random) -> None:
        self.history: list[Event] = []
        self.lock = threading.Lock()
        self._rng = rng
        self._unanswered: list[_Request] = []
        self._is_cut = False
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._connections: list[_Connection] = []
        self.paths: dict[str, Path] = {}
        for export in exports:
            path = directory / f"{export.name}.nbd"
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ, export)
            self.paths[export.name] = path
        self._stop_reading, self._stop_writing = socket.socketpair()
        self._selector.register(self._stop_reading, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="nbd", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut_power(self) -> list[Event]:
        """From now on nothing is answered or recorded. Returns the history."""
        with self.lock:
            self._is_cut = True
        return self.history

    def close(self) -> None:
        self._stop_writing.send(b"x")
        self._thread.join()
        for end in (*self._listeners, self._stop_reading, self._stop_writing):
            end.close()
        for connection in self._connections:
            connection.socket.close()
        for path in self.paths.values():
            path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            # with answers due, look for what else arrived, but do not wait long
            ready = self._selector.select(0.0005 if self._unanswered else None)
            arrived: list[_Request] = []
            for key, _ in ready:
                if key.data is None:
                    return
                if isinstance(key.data, _Connection):
                    arrived += self._take_in(key.data)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept(key.fileobj, key.data)
            with self.lock:
                if self._is_cut:
                    self._unanswered.clear()
                    continue
                for request in arrived:
                    request.connection.export.arrive(request, self.history)
                self._unanswered += arrived
                self._answer_some()

    def _take_in(self, connection: _Connection) -> list[_Request]:
        is_open = connection.drain()
        requests = connection.requests()
        if any(request.command == DISCONNECT for request in requests) or not is_open:
            self._selector.unregister(connection.socket)
        return [request for request in requests if request.command != DISCONNECT]

    def _answer_some(self) -> None:
        self._rng.shuffle(self._unanswered)
        kept = []
        for request in self._unanswered:
            answer = None
            if self._rng.random() < ANSWER_CHANCE:
                answer = request.connection.export.answer(request, self.history)
            if answer is None:
                kept.append(request)
                continue
            code, data = answer
            try:
                request.connection.socket.sendall(
                    struct.pack(">IIQ", SIMPLE_REPLY_MAGIC, code, request.handle) + data
                )
            except ConnectionError:
                continue  # QEMU is gone
        self._unanswered = kept

    def _accept(self, listener: socket.socket, export: Export) -> None:
        connected, _ = listener.accept()
        if _negotiate(connected, export):
            connection = _Connection(export, connected)
            self._connections.append(connection)
            self._selector.register(connected, selectors.EVENT_READ, connection)
        else:
            connected.close()


def _negotiate(connected: socket.socket, export: Export) -> bool:
    """The handshake; False when the client went away again, as QEMU does after a look."""
    connected.sendall(GREETING)
    _receive(connected, 4)
    flags = HAS_FLAGS | SEND_FLUSH | SEND_TRIM | SEND_WRITE_ZEROES
    while True:
        try:
            _, option, length = OPTION.unpack(_receive(connected, OPTION.size))
        except ConnectionError:
            return False
        _receive(connected, length)
        if option == OPTION_EXPORT_NAME:
            connected.sendall(struct.pack(">QH", export.size_bytes, flags))
            return True
        if option == OPTION_GO:
            replies = [
                (REPLY_INFO, struct.pack(">HQH", INFO_EXPORT, export.size_bytes, flags)),
                (
                    REPLY_INFO,
                    struct.pack(">HIII", INFO_SIZES, SECTOR_BYTES, 4096, LARGEST_REQUEST_BYTES),
                ),
                (REPLY_ACK, b""),
            ]
        else:
            replies = [(REPLY_ACK if option == OPTION_ABORT else REPLY_UNSUPPORTED, b"")]
        for kind, data in replies:
            connected.sendall(struct.pack(">QIII", REPLY_MAGIC, option, kind, len(data)) + data)
        if option == OPTION_GO:
            return True
        if option == OPTION_ABORT:
            return False


def _receive(connected: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connected.recv(length - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data
