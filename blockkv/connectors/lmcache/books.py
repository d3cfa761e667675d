"""Which objects of LMCache's are in the store, followed from its watch, and told to LMCache.

LMCache counts what it has been told is stored and deleted. Chunks also leave because the device is full or
they are damaged, and after a restart they are there without having been stored. All of that comes from the
watch, so the count is the sum of what is in the store.

Invariants
  * LMCache is told of each chunk in the order in which it came and went, and of chunks of ours only;
  * `settle` holds the lock while it tells: when it returns, everything up to its call has been told.

Not here: the counting itself, which LMCache's base class does.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lmcache.v1.distributed.api import ObjectKey

import blockkv
from blockkv.connectors.lmcache.names import Namespace

__all__ = ["Books", "Stored"]

TOLD_AT_ONCE = 4096
"""Keys in one notification: what a restart has recovered may be millions."""

Tell = Callable[[list[ObjectKey], list[int]], None]
"""Of keys and their sizes in bytes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk of ours."""

    chunk: str
    key: ObjectKey
    layout: str
    size_bytes: int


class Books:
    """Thread-safe."""

    def __init__(self, watch: blockkv.Watch, names: Namespace, stored: Tell, deleted: Tell) -> None:
        self._watch = watch
        self._names = names
        self._tell_stored = stored
        self._tell_deleted = deleted
        self._lock = threading.RLock()  # LMCache may ask something while it is told
        self._chunks: dict[str, Stored] = {}
        self._by_key: dict[ObjectKey, list[Stored]] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def settle(self) -> None:
        """Follow what has come and gone so far."""
        with self._lock:
            gone: list[Stored] = []
            came: list[Stored] = []
            for change in self._watch.take():
                if not change.stored:
                    one = self._remove(change.key)
                    if one is not None:
                        gone.append(one)
                elif (found := self._names.object_of(change.key)) is not None:
                    one = Stored(str(change.key), *found, change.payload_bytes)
                    self._chunks[one.chunk] = one
                    self._by_key.setdefault(one.key, []).append(one)
                    came.append(one)
            _tell(self._tell_deleted, gone)
            _tell(self._tell_stored, came)

    def tell_all(self, tell: Tell) -> None:
        """Tell somebody who comes late of everything that is there."""
        with self._lock:
            _tell(tell, list(self._chunks.values()))

    def of_chunk(self, chunk: str) -> Stored | None:
        """What is known of a chunk."""
        return self._chunks.get(chunk)

    def of_key(self, key: ObjectKey) -> list[Stored]:
        """The chunks of a key: one for each layout in which it was stored, the newest last."""
        with self._lock:
            return list(self._by_key.get(key, ()))

    def page(self, model: str | None, size: int, after: str) -> tuple[list[Stored], bool]:
        """The first `size` chunks whose names come after `after`, in order; whether there are more."""
        with self._lock:
            names = heapq.nsmallest(size + 1, self._listed(model, after))
            return [self._chunks[name] for name in names[:size]], len(names) > size

    def _listed(self, model: str | None, after: str) -> Iterator[str]:
        for name, one in self._chunks.items():
            if name > after and (model is None or one.key.model_name == model):
                yield name

    def _remove(self, chunk: str | bytes) -> Stored | None:
        one = self._chunks.pop(chunk, None) if isinstance(chunk, str) else None
        if one is not None:
            others = self._by_key[one.key]
            others.remove(one)
            if not others:
                del self._by_key[one.key]
        return one


def _tell(tell: Tell, stored: Sequence[Stored]) -> None:
    for first in range(0, len(stored), TOLD_AT_ONCE):
        some = stored[first : first + TOLD_AT_ONCE]
        try:
            tell([one.key for one in some], [one.size_bytes for one in some])
        except Exception:
            log.exception("LMCache could not be told of %d chunks that came or went", len(some))
