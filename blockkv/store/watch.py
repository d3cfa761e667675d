"""What comes and goes in a store, told in order to whoever keeps books of it.

::

    with store.watch() as watch:
        for change in watch.take():       # at first every chunk that is there
            ...
        ...
        for change in watch.take():       # then what has been stored and removed since

Invariants
  * what was taken so far, applied in order, is exactly what was in the store at the moment of the last
    `take`;
  * a watch never holds more than two changes for a chunk: one that came and went between two takes is not
    told. So one that is never asked is bounded, by what was there when it was asked last and what is now;
  * telling costs the store's own operations a few microseconds a chunk, and waits for nobody.

Not here: why a chunk is gone (`Store.stats` counts that), and what has not become durable yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

__all__ = ["Change", "Watch"]


@dataclass(frozen=True, slots=True)
class Change:
    """A chunk was stored, or is gone: evicted, deleted, expired, damaged, or lost with its device."""

    key: str | bytes
    payload_bytes: int
    stored: bool
    """Whether it is there now."""


class Watch:
    """Get one from `Store.watch`. Thread-safe: threads that `take` share the changes out among them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[bytes, tuple[Change | None, Change | None]] = {}
        """By digest: what has to be told as gone, and then what as stored."""
        self._unlisted: set[bytes] = set()
        """Digests of chunks that were there at the beginning and have not been listed yet."""
        self._unheard: set[bytes] = set()
        """Digests of chunks that count as not there."""
        self._detach: list[Callable[[], None]] = []

    def take(self) -> list[Change]:
        """The changes since the last call, for each key in order; at first every chunk that is there."""
        with self._lock:
            pending, self._pending = self._pending, {}
        return [change for both in pending.values() for change in both if change is not None]

    def close(self) -> None:
        """End it. Idempotent; closing the store does it too."""
        detach, self._detach = self._detach, []
        for one in detach:
            one()
        with self._lock:
            self._pending = {}
            self._unlisted = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for the store, with its lock held -------------------------------------------------------------

    def attach(self, detach: Callable[[], None]) -> None:
        """`detach` ends being told; the store calls this before it tells anything."""
        self._detach.append(detach)

    def expect(self, digests: Iterable[bytes], unheard: Iterable[bytes] = ()) -> None:
        """These are there and will be listed, each by `list_one`, unless they are removed before.

        Chunks that are `unheard` count as not there until they are stored anew.
        """
        with self._lock:
            self._unheard.update(unheard)
            self._unlisted.update(digests)
            self._unlisted -= self._unheard

    def list_one(self, digest: bytes, key: str | bytes, payload_bytes: int) -> None:
        """A chunk that was expected and is there."""
        with self._lock:
            if digest in self._unlisted:
                self._unlisted.discard(digest)
                self._pending[digest] = (None, Change(key, payload_bytes, True))

    def stored(self, digest: bytes, key: str | bytes, payload_bytes: int) -> None:
        """A chunk is there from now on."""
        with self._lock:
            self._unheard.discard(digest)
            gone, _ = self._pending.pop(digest, (None, None))
            self._pending[digest] = (gone, Change(key, payload_bytes, True))

    def removed(self, digest: bytes, key: str | bytes, payload_bytes: int) -> None:
        """A chunk is gone."""
        with self._lock:
            if digest in self._unheard:
                return
            if digest in self._unlisted:
                self._unlisted.discard(digest)
                return
            gone, came = self._pending.pop(digest, (None, None))
            if came is None:
                gone = Change(key, payload_bytes, False)
            if gone is not None:
                self._pending[digest] = (gone, None)
