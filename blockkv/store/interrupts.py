"""Signals wait while a store operation runs.

A Python signal handler runs between any two bytecodes of the main thread and may raise there: Ctrl-C does.
In the middle of a commit or of a change to index and free map that would leave a group that is neither
written nor pending, or an extent that is both free and live. So an operation in the main thread holds back
the handlers; they run at its next safe point, or when it returns.

Only handlers that are Python functions are held back: the default actions end the process, which the store
survives by design.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

HELD = tuple(
    map(
        int,
        (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGALRM,
            signal.SIGVTALRM,
            signal.SIGPROF,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ),
    )
)
"""The signals programs install raising handlers for."""

# The functions of `signal` make enums of what these give and take: ten microseconds for every operation.
_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal

_MAIN = threading.main_thread().ident


class _Interrupts:
    """Reentrant; in any thread but the main one it does nothing, for no handler runs there."""

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: list[int] = []

    def __enter__(self) -> None:
        if threading.get_ident() != _MAIN:
            return
        self._depth += 1
        if self._depth == 1:
            try:
                self._hold()
            except BaseException:
                self._depth = 0
                self._let_go()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() != _MAIN:
            return
        self._depth -= 1
        if self._depth == 0:
            self._let_go()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """A safe point that takes long: handlers run at once in here, and may raise."""
        if self._depth != 1 or threading.get_ident() != _MAIN:
            yield
            return
        try:
            self._let_go()
            yield
        finally:
            self._hold()

    def deliver(self) -> None:
        """A safe point: run the handlers of what arrived. Whatever they raise leaves from here."""
        if self._arrived and self._depth == 1 and threading.get_ident() == _MAIN:
            try:
                self._let_go()
            finally:
                self._hold()

    def _hold(self) -> None:
        for number in HELD:
            handler = _get(number)
            if callable(handler):
                self._handlers[number] = handler
                _set(number, self._note)

    def _let_go(self) -> None:
        handlers, self._handlers = self._handlers, {}
        try:
            _restore(list(handlers.items()))
        finally:
            # Not before: until the last handler is back, more may arrive.
            arrived, self._arrived = self._arrived, []
            _raise(arrived)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._arrived:
            self._arrived.append(number)


def _restore(handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]]) -> None:
    # One by one, whatever they raise: a handler may run as soon as it is back.
    if handlers:
        try:
            _set(*handlers[0])
        finally:
            _restore(handlers[1:])


def _raise(numbers: list[int]) -> None:
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise(numbers[1:])


interrupts = _Interrupts()
"""`with interrupts:` round everything that must not be left half done."""
