"""From a stream of the store to the accelerator: reading, verifying and copying go on at the same time.

    device -> (engine: read, verify) -> pieces of the stream -> (copier) -> accelerator -> whoever iterates

Invariants
  * a piece is given back to the stream only after its copy is over;
  * at most `ahead` pieces are copied, or being copied, and not handed over yet.

How far the stream reads ahead adapts: further while pieces are waited for and nothing is being copied, less
far while copies are waited for, because memory that only holds what waits is of use to others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from blockkv.errors import BlockKVError
from blockkv.gpu.copiers import Copier, Ticket

__all__ = ["Pipeline"]

FIRST_AHEAD = 2
"""Submissions that the stream is ahead at first: one that is read and one that waits for the device."""


class Taken(Protocol):
    """A piece in hand: see `blockkv.store.streams`."""

    number: Any
    tensors: list[Any]

    def give_back(self) -> None:
        """Its memory is used again."""


class Stream(Protocol):
    """What is needed of a stream: see `blockkv.store.streams.PartStream`."""

    ahead_limit: int
    problem: BlockKVError | None

    @property
    def in_hand_limit(self) -> int: ...

    @property
    def valid_keys(self) -> int: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def memory(self) -> Any: ...

    def take(self) -> Taken | None:
        """The next piece; None at the end."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(slots=True)
class _Copied:
    number: Any
    values: list[Any]
    tickets: list[Ticket]


class Pipeline(Iterator[tuple[Any, list[Any]]]):
    """Hands over (number, tensors) of a stream, on the accelerator. Close it, or use it as a context manager.

    Owns the stream, which must allow several pieces in hand (`in_hand` of `Store.stream`). `into(number,
    position)` says where the part of each key goes; without it each gets new memory. Iterate in one thread.

    Like a stream it raises nothing for what is missing, damaged or lost: `valid_keys` says what is there.
    """

    def __init__(
        self,
        stream: Stream,
        copier: Copier,
        into: Callable[[Any, int], Any] | None = None,
        *,
        ahead: int = 4,
    ) -> None:
        self._stream = stream
        self._copier = copier
        self._into = into
        self._ahead = max(1, ahead)
        self._condition = threading.Condition()
        self._copied: deque[_Copied] = deque()
        self._under_way: deque[tuple[Taken, list[Ticket]]] = deque()
        self._over = False
        self._closed = False
        self._failure: BaseException | None = None
        self.read_waits = 0
        """How often a piece was waited for while nothing was being copied: reading is what takes long."""
        self.copy_waits = 0
        """How often a copy was waited for while pieces were there: copying is."""
        self._farthest = stream.ahead_limit
        stream.ahead_limit = min(FIRST_AHEAD, self._farthest)
        self._memory = stream.memory
        if self._memory is not None:
            copier.prepare(self._memory)
        self._thread = threading.Thread(target=self._run, name="blockkv-copy", daemon=True)
        self._thread.start()

    @property
    def valid_keys(self) -> int:
        """How many keys, from the first on, have come whole so far."""
        return self._stream.valid_keys

    @property
    def problem(self) -> BlockKVError | None:
        """What ended the stream, beside chunks that are missing or damaged."""
        return self._stream.problem

    @property
    def bottleneck(self) -> str:
        """What was waited for more often: "read", "copy", or "" where nothing was."""
        if self.read_waits == self.copy_waits:
            return ""
        return "read" if self.read_waits > self.copy_waits else "copy"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, list[Any]]:
        """The next piece, which may be used from now on."""
        with self._condition:
            self._condition.wait_for(lambda: self._copied or self._over or self._closed)
            piece = self._copied.popleft() if self._copied and not self._closed else None
            self._condition.notify_all()
        if piece is None or not self.valid_keys:
            self.close()
            if self._failure is not None:
                raise self._failure
            raise StopIteration
        try:
            for ticket in piece.tickets:
                ticket.before_use()
        except BaseException:
            self.close()
            raise
        return piece.number, piece.values[: self.valid_keys]

    def close(self) -> None:
        """Wait for the copies under way and end the stream. Idempotent."""
        with self._condition:
            first, self._closed = not self._closed, True
            self._condition.notify_all()
        self._thread.join()
        if first:
            if self._memory is not None:
                self._copier.forget(self._memory)
                self._memory = None
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._may_go_on():
                self._make_room()
                self._adapt()
                taken = self._stream.take()
                if taken is None:
                    break
                self._copy(taken)
        except BaseException as error:
            self._failure = error
        finally:
            while self._under_way:
                self._finish_one()
            with self._condition:
                self._over = True
                self._condition.notify_all()

    def _may_go_on(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._closed or len(self._copied) < self._ahead)
            return not self._closed

    def _make_room(self) -> None:
        """Give back what is copied; wait for a copy where all that may be in hand is."""
        while self._under_way and all(ticket.is_over() for ticket in self._under_way[0][1]):
            self._finish_one()
        if len(self._under_way) >= self._stream.in_hand_limit:
            if self._stream.is_ready:
                self.copy_waits += 1
                self._stream.ahead_limit = max(FIRST_AHEAD, self._stream.ahead_limit - 1)
            self._finish_one()

    def _adapt(self) -> None:
        if not self._stream.is_ready and not self._under_way:
            self.read_waits += 1
            self._stream.ahead_limit = min(self._farthest, 2 * self._stream.ahead_limit)

    def _finish_one(self) -> None:
        taken, tickets = self._under_way.popleft()
        for ticket in tickets:
            try:
                ticket.wait()
            except Exception as error:  # the others are waited for all the same
                self._failure = self._failure or error
        taken.give_back()

    def _copy(self, taken: Taken) -> None:
        values: list[Any] = []
        tickets: list[Ticket] = []
        self._under_way.append((taken, tickets))
        for position, value in enumerate(taken.tensors):
            target = None if self._into is None else self._into(taken.number, position)
            if isinstance(value, dict):
                copies = {
                    name: self._copier.copy(tensor, None if target is None else target[name])
                    for name, tensor in value.items()
                }
                values.append({name: tensor for name, (tensor, _) in copies.items()})
                tickets += [ticket for _, ticket in copies.values()]
            else:
                tensor, ticket = self._copier.copy(value, target)
                values.append(tensor)
                tickets.append(ticket)
        with self._condition:
            self._copied.append(_Copied(taken.number, values, tickets))
            self._condition.notify_all()
