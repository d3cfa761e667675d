"""Watching a store that another process owns, across owners that come and go.

The owner keeps the watch and is asked for what has changed. A new owner knows nothing of it: then everything
that is there is asked for, and compared with what was told before.

Not here: watching in the process of the store (`blockkv.store.watch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from blockkv.errors import OwnerLost, StoreClosed
from blockkv.serving import protocol
from blockkv.serving.connection import Connection
from blockkv.store.watch import Change, Watch

__all__ = ["ClientWatch"]

Ask = Callable[[protocol.TakeChanges], tuple[protocol.Changes, Connection]]
"""Ask the owner that is there; the answer, and on which connection. Raises OwnerLost."""


class ClientWatch(Watch):
    """A `Watch` of a client. While the owner is gone nothing has changed; what it told stays known."""

    def __init__(self, number: int, ask: Ask) -> None:
        super().__init__()
        self._number = number
        self._ask = ask
        self._taking = threading.Lock()
        self._connection: Connection | None = None
        """On which the watch is."""
        self._known: dict[str | bytes, int] = {}
        """Payload bytes of the chunks that were told as stored."""

    def take(self) -> list[Change]:
        with self._taking:
            try:
                changes, connection = self._ask_for_all()
            except (OwnerLost, StoreClosed):
                return []
            if connection is not self._connection and self._connection is not None:
                changes = self._compared(changes)
            self._connection = connection
            for change in changes:
                if change.stored:
                    self._known[change.key] = change.payload_bytes
                else:
                    self._known.pop(change.key, None)
            return changes

    def _ask_for_all(self) -> tuple[list[Change], Connection]:
        """Everything that one connection has to tell. Raises OwnerLost."""
        while True:
            changes: list[Change] = []
            first: Connection | None = None
            while True:
                answer, connection = self._ask(protocol.TakeChanges(self._number))
                if first is not None and connection is not first:
                    break  # another owner meanwhile: it begins at the beginning
                first = connection
                changes += _changes(answer)
                if not answer.more:
                    return changes, connection

    def _compared(self, listed: list[Change]) -> list[Change]:
        """What has changed between what was told and what is there now, which is `listed`."""
        there = {change.key: change.payload_bytes for change in listed if change.stored}
        gone = [
            Change(key, size_bytes, False)
            for key, size_bytes in self._known.items()
            if there.get(key) != size_bytes
        ]
        came = [
            Change(key, size_bytes, True)
            for key, size_bytes in there.items()
            if self._known.get(key) != size_bytes
        ]
        return gone + came

    def close(self) -> None:
        super().close()
        with self._taking:
            self._known = {}
            if self._connection is not None:
                self._connection.post(protocol.EndWatch(self._number))


def _changes(answer: protocol.Changes) -> list[Change]:
    return [
        Change(raw.decode(errors="surrogateescape") if kind & 1 else raw, size_bytes, bool(kind & 2))
        for raw, kind, size_bytes in zip(answer.keys, answer.kinds, answer.sizes_bytes, strict=True)
    ]
