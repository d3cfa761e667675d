"""The client's end of a connection: requests of any number of threads, answers to each.

There is no thread that receives. Of the threads that wait for an answer one reads the socket, and hands over
what is for others; when it has its own, the next one reads. So a request of a single thread costs no more
than its two system calls, and the owner's two.

Not here: connecting (`client`), what the messages mean (`protocol`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from blockkv import errors
from blockkv.errors import BlockKVError, DeviceError, OwnerLost
from blockkv.serving import protocol
from blockkv.serving.protocol import Malformed, Message, encode
from blockkv.serving.wire import Frame, Frames

__all__ = ["Connection", "TimedOut", "error_of"]

UNSENT_LIMIT_BYTES = 16 << 20
"""Of messages that nobody waits for: an owner that takes none of so many is taken for lost."""
RECEIVE_SLICE_S = 0.1
"""How often a thread that reads looks whether its time is over."""

A = TypeVar("A", bound=Message)


class TimedOut(BlockKVError):
    """The owner has not answered in time; it may be well all the same."""


@dataclass(slots=True)
class _Slot:
    """A request that was sent."""

    answer: Message | None = None
    late: Callable[[Message], None] | None = None
    """What becomes of an answer that nobody waits for any more."""
    is_abandoned: bool = False


class Connection:
    """To the owner at `path`. Ends once, with `lost`; then every call raises OwnerLost."""

    def __init__(self, connection: socket.socket, frames: Frames, path: str) -> None:
        self.path = path
        self.durable_sequence = 0
        """The newest log sequence that the owner has said to be durable."""
        self.lost = ""
        """Why it is over."""
        self._socket = connection
        connection.setblocking(True)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(RECEIVE_SLICE_S * 1e6))
        )
        self._frames = frames
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._slots: dict[int, _Slot] = {}
        self._abandoned_count = 0
        """Requests that were not answered in time and have not been since."""
        self._last_request = 1  # that of the Hello
        self._is_reading = False
        self._send_lock = threading.Lock()
        self._unsent = b""
        self._queued_bytes = 0
        """Of all frames so far; those that are not sent yet stand in `_unsent`."""

    def call(
        self,
        message: Message,
        kind: type[A],
        timeout_s: float,
        late: Callable[[Message], None] | None = None,
    ) -> A:
        """Send a request and return its answer.

        `late` gets an answer that comes after the time is over, on some thread. Raises OwnerLost, TimedOut,
        and what the owner says.
        """
        deadline_s = time.monotonic() + timeout_s
        slot = _Slot(late=late)
        with self._lock:
            self.check()
            self._last_request += 1
            number = self._last_request
            self._slots[number] = slot
        try:
            self._send(encode(message, number), deadline_s)
            self._wait_for(slot, deadline_s)
        except BaseException:
            with self._lock:
                # Answered or not: nobody looks at it any more.
                answer, slot.is_abandoned = slot.answer, True
                self._abandoned_count += answer is None
            if answer is not None and late is not None:
                late(answer)
            raise
        answer = slot.answer
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, protocol.Failure):
            raise error_of(answer)
        problem = f"the answer to a {type(message).__name__} is a {type(answer).__name__}"
        self.end(problem)
        raise self.error()

    def is_stalled(self) -> bool:
        """Whether an answer is overdue, and still is not. Sends and reads what goes, waits for nothing."""
        if self._abandoned_count:
            self.flush()  # the request itself may not have got away
            with contextlib.suppress(TimedOut, OwnerLost):
                self._wait_for(_Slot(), 0)
        return self._abandoned_count > 0

    def post(self, message: Message) -> None:
        """Send what has no answer. Never waits, raises nothing: on a lost connection it is dropped."""
        with contextlib.suppress(OwnerLost):
            self._send(encode(message), None)

    def flush(self) -> None:
        """Try again to send what could not be sent. Never waits."""
        with contextlib.suppress(OwnerLost):
            self._send(b"", None)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Return when the other end is closed, or after that time; whether it is."""
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), select.POLLRDHUP)
            return bool(poll.poll(timeout_s * 1000)) or bool(self.lost)
        except (OSError, ValueError):
            return True

    def end(self, why: str) -> None:
        """It is over: whoever waits is told."""
        with self._lock:
            if self.lost:
                return
            self.lost = why or "it was closed"
            self._arrived.notify_all()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Let go of the socket, when nobody reads it any more. From the thread that is in `wait_for_end`."""
        self.end("the store was closed")
        with self._lock:
            self._arrived.wait_for(lambda: not self._is_reading)
        with self._send_lock:
            self._socket.close()

    def abandon(self) -> None:
        """In a forked child: close the copy, and leave the connection to the parent."""
        self.lost = "it belongs to the parent process"
        self._socket.close()

    def check(self) -> None:
        """Raise OwnerLost if it is over."""
        if self.lost:
            raise self.error()

    def error(self) -> OwnerLost:
        """What to raise when it is over."""
        return OwnerLost(
            f"{self.path}: the owner of the store is gone ({self.lost}); start `blockkv serve` again if "
            "nothing does, and go on: the connection is made again by itself"
        )

    def _send(self, frame: bytes, deadline_s: float | None) -> None:
        """Send all of it; without a deadline as much as goes, and the rest with the next one.

        Nobody waits for room with the lock: what others send, and when they give up, is their own affair.
        """
        with self._send_lock:
            self._unsent += frame
            self._queued_bytes += len(frame)
            wanted = self._queued_bytes
        while True:
            with self._send_lock:
                self._push()
                if self._queued_bytes - len(self._unsent) >= wanted:
                    return
                is_too_much = len(self._unsent) > UNSENT_LIMIT_BYTES
            if deadline_s is None:
                if is_too_much:
                    self.end("it takes no messages")
                return
            self._wait_for_room(deadline_s)

    def _push(self) -> None:
        """Send as much as goes, with the lock held. Raises OwnerLost."""
        while self._unsent:
            self.check()
            try:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]
            except BlockingIOError:
                return
            except OSError as error:
                self.end(str(error))
                raise self.error() from None

    def _wait_for_room(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._timed_out()
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLOUT)
        poll.poll(min(left_s, RECEIVE_SLICE_S) * 1000)

    def _wait_for(self, slot: _Slot, deadline_s: float) -> None:
        """Return when the slot has its answer; reads the socket where nobody else does."""
        with self._lock:
            while slot.answer is None and self._is_reading:
                self.check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._timed_out()
                self._arrived.wait(left_s)
            if slot.answer is not None:
                return
            self.check()
            self._is_reading = True
        try:
            while slot.answer is None:
                frame = self._receive(deadline_s)
                if frame is not None:
                    self._hand_over(frame, slot)
        finally:
            with self._lock:
                self._is_reading = False
                self._arrived.notify_all()

    def _receive(self, deadline_s: float) -> Frame | None:
        try:
            frame = self._frames.next()
            if frame is not None:
                return frame
            if not self._frames.fill(0 if deadline_s else socket.MSG_DONTWAIT):
                self.end("it has closed the connection")
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise self._timed_out() from None
        except (Malformed, OSError) as error:
            self.end(f"what arrived is no message: {error}" if isinstance(error, Malformed) else str(error))
        self.check()
        return None

    def _hand_over(self, frame: Frame, mine: _Slot) -> None:
        late = None
        with self._lock:
            if frame.durable_sequence > self.durable_sequence:
                self.durable_sequence = frame.durable_sequence
            slot = self._slots.pop(frame.request, None)
            if slot is None:
                return
            slot.answer = frame.message
            if slot.is_abandoned:
                late = slot.late
                self._abandoned_count -= 1
            elif slot is not mine:
                self._arrived.notify_all()
        if late is not None:
            late(frame.message)

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"{self.path}: the owner of the store has not answered in time")


def error_of(failure: protocol.Failure) -> BlockKVError:
    """The exception that the owner had."""
    kind = getattr(errors, failure.error, BlockKVError)
    if not (isinstance(kind, type) and issubclass(kind, BlockKVError)) or kind is errors.BatchError:
        kind = BlockKVError
    if issubclass(kind, DeviceError):
        return kind(failure.what, failure.errno or None)
    return kind(failure.what)
