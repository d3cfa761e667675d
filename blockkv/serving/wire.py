"""Frames on a Unix socket, for both sides.

Not here: what the messages mean, who waits for which (`connection`, `session`).
"""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from blockkv.serving.protocol import FRAME_LIMIT_BYTES, HEADER, Malformed, Message, decode

__all__ = ["Frame", "Frames", "Peer", "peer_of", "socket_path"]

BUFFER_BYTES = 64 << 10
"""What is received at once. Grows for longer frames, and stays so."""

UNIX_PREFIX = re.compile(r"unix:(//(?=/))?")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it arrived."""

    message: Message
    request: int
    """0: nobody waits for an answer."""
    durable_sequence: int


class Frames:
    """What a connection receives. Used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = bytearray(BUFFER_BYTES)
        self._begin = 0
        self._end = 0

    def next(self) -> Frame | None:
        """A frame that is there already, or None. Raises Malformed."""
        if self._end - self._begin < HEADER.size:
            return None
        size_bytes, kind, zero, request, durable = HEADER.unpack_from(self._memory, self._begin)
        if size_bytes > FRAME_LIMIT_BYTES or zero:
            raise Malformed(f"a frame of kind {kind} and {size_bytes} bytes")
        begin = self._begin + HEADER.size
        if self._end - begin < size_bytes:
            return None
        with memoryview(self._memory) as memory, memory[begin : begin + size_bytes] as body:
            message = decode(kind, body)
        self._begin = begin + size_bytes
        return Frame(message, request, durable)

    def fill(self, flags: int = 0) -> bool:
        """Receive more; False at the end of the stream. Raises OSError as `recv` does."""
        self._make_room()
        with memoryview(self._memory) as memory, memory[self._end :] as free:
            received = self._connection.recv_into(free, 0, flags)
        self._end += received
        return received > 0

    def add(self, data: bytes) -> None:
        """Take what was received elsewhere."""
        self._memory[self._end : self._end + len(data)] = data
        self._end += len(data)

    def _make_room(self) -> None:
        """Move what is there to the front, and see to it that the frame it begins with fits."""
        if self._begin:
            self._memory[: self._end - self._begin] = self._memory[self._begin : self._end]
            self._end -= self._begin
            self._begin = 0
        wanted = HEADER.size
        if self._end >= HEADER.size:
            wanted += min(HEADER.unpack_from(self._memory)[0], FRAME_LIMIT_BYTES)
        if len(self._memory) < wanted:
            self._memory.extend(bytes(wanted - len(self._memory)))


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel tells (`SO_PEERCRED`, unix(7)): when it connected."""

    process: int
    user: int
    group: int

    def __str__(self) -> str:
        return f"pid {self.process}, user {self.user}"


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end."""
    size = struct.calcsize("3i")
    return Peer(*struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)))


def socket_path(path: object) -> str | None:
    """The socket that `path` names: with "unix:" before it, or because a socket is there. Else None."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    text = os.fsdecode(path)
    if (prefix := UNIX_PREFIX.match(text)) is not None:
        return text[prefix.end() :]
    try:
        return text if stat.S_ISSOCK(Path(text).stat().st_mode) else None
    except (OSError, ValueError):
        return None
