"""Preloads in the background that wait for their turn, and can be withdrawn until then.

What the device has got it cannot give back: it may still write to that memory. So it gets a little of them at
a time, and the rest stays here, where cancelling costs nothing and frees everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["HANDED_OVER_BYTES", "Preloads"]

HANDED_OVER_BYTES = 64 << 20
"""Given to the device at once: twice what it takes of preloads at a time, so that it never runs dry."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    size_bytes: int
    begin: Callable[[], None]
    withdrawn: Callable[[], None]


class Preloads:
    """A queue in the order of asking. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._last_ticket = 0
        self._handed_over_bytes = 0
        self._starting = False

    def add(self, size_bytes: int, begin: Callable[[], None], withdrawn: Callable[[], None]) -> int:
        """Take up a preload; its ticket. `begin` is called when it is its turn, on whatever thread finds that
        out, and must see to it that `ended` is called once; or `withdrawn` is, after it was withdrawn.

        Call `advance` then.
        """
        with self._lock:
            self._last_ticket += 1
            self._waiting[self._last_ticket] = _Waiting(size_bytes, begin, withdrawn)
            return self._last_ticket

    def advance(self) -> None:
        """Begin what there is room for."""
        while True:
            with self._lock:
                if self._starting or not self._waiting or self._handed_over_bytes >= HANDED_OVER_BYTES:
                    return
                self._starting = True  # a preload that ends at once must not begin the next one inside this
                one = self._waiting.pop(next(iter(self._waiting)))
                self._handed_over_bytes += one.size_bytes
            try:
                one.begin()
            finally:
                with self._lock:
                    self._starting = False

    def ended(self, size_bytes: int) -> None:
        """One that has begun is over."""
        with self._lock:
            self._handed_over_bytes -= size_bytes
        self.advance()

    def withdraw(self, ticket: int) -> bool:
        """Take one out; False when it has begun."""
        with self._lock:
            one = self._waiting.pop(ticket, None)
        if one is None:
            return False
        one.withdrawn()
        return True

    def withdraw_all(self) -> None:
        """Take out all that wait."""
        for ticket in list(self._waiting):
            self.withdraw(ticket)
