"""One member of an open array: a store, and what the array has to know of it beyond what every user may.

Not here: what the array makes of it (`array_store`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence

from blockkv.device.base import UNIT_BYTES
from blockkv.errors import DeviceLost
from blockkv.format.superblock import Membership
from blockkv.store.data_path import DataPath
from blockkv.store.growing import GrowingChunk, Guard
from blockkv.store.keys import Key
from blockkv.store.store import Store
from blockkv.store.watch import Watch

__all__ = ["Member"]

EVICTABLE_SHARE = 8
"""What eviction can make room for counts as 1/8 of the data zone: little beside free space, and much beside
what one round of evictions frees, so that members that are all full get the same."""


class Member:
    """A store that is member `index` of an array. `queued_bytes` and `placed_bytes` are the array's."""

    def __init__(self, index: int, store: Store) -> None:
        self.index = index
        self.store = store
        self.lost = ""
        """Why it is not used any more; "" while it is."""
        self.queued_bytes = 0
        """Payload of puts that it is carrying out."""
        self.placed_bytes = 0
        """Payload given to it lately."""
        self._state = store._state
        self._lazy_sequence = 0

    @property
    def path(self) -> str:
        return self._state.device.path

    def has(self, state: DataPath) -> bool:
        """Whether that is the state of its store."""
        return self._state is state

    def holds(self, digest: bytes) -> bool:
        """Whether a chunk with this digest is stored. RAM only."""
        with self._state.lock:
            self._state.expire()
            return digest in self._state.index

    def looked_up(self, keys: Sequence[Key]) -> None:
        """Tell the policies of this member, if it has any, of a request for a prefix."""
        if self._state.keeping is not None:
            self.store._looked_up(keys)

    def claims(self, digest: bytes) -> tuple[bool, bool]:
        """(whether it holds the key, or grows a chunk under it; whether a crash may bring it back although it
        is deleted), as of now.
        """
        with self._state.lock:
            self._state.expire()
            held = digest in self._state.index or digest in self._state.reserved
            return held, self._state.deletes_undurably(digest)

    def grows(self, digest: bytes) -> bool:
        """Whether a chunk is growing under this key."""
        with self._state.lock:
            return digest in self._state.reserved

    @property
    def writable(self) -> bool:
        """Whether it takes puts: it is not read-only, and no metadata write has failed."""
        return not (self.lost or self._state.read_only_reason or self._state.log.failure)

    @property
    def device_is_gone(self) -> bool:
        """Whether a metadata write failed because the device went away."""
        return isinstance(self._state.log.failure, DeviceLost)

    @property
    def data_bytes(self) -> int:
        return self._state.geometry.data.size_bytes

    @property
    def room_bytes(self) -> int:
        """Free space and, where it may evict, some of what it can make free."""
        free_bytes = self._state.allocator.free_units * UNIT_BYTES
        return free_bytes + (self.data_bytes // EVICTABLE_SHARE if self._state.options.evict else 0)

    def reserve(self, key: Key, capacity_bytes: int, guard: Guard) -> GrowingChunk:
        """`Store.reserve` on it, with everything that is done to the chunk later inside `guard`."""
        with self.operation(True):
            return self.store._reserve(key, capacity_bytes, guard)

    def begin_watch(self, watch: Watch, unheard: Iterable[bytes]) -> list[bytes]:
        """`Store._begin_watch` on it: without those of its chunks that count as not there."""
        return self.store._begin_watch(watch, unheard)

    def list_for(self, watch: Watch, digests: Sequence[bytes]) -> None:
        """`Store._list_for` on it."""
        self.store._list_for(watch, digests)

    def end_watches(self) -> None:
        """Tell whoever watches it that all of its chunks are gone, and nothing more."""
        state = self._state
        with state.lock:
            for watch in state.watches:
                for entry in state.index:
                    watch.removed(entry.digest, entry.key, entry.payload_bytes)
            state.watches.clear()

    def operation(self, writing: bool) -> contextlib.AbstractContextManager[None]:
        """Holds its `close` back."""
        return self.store._operation(writing)

    def digests(self) -> list[bytes]:
        """The digests of all its chunks."""
        with self._state.lock:
            return self._state.index.digests()

    def drop(self, digests: Iterable[bytes]) -> None:
        """Delete the chunks with these digests that it holds, durably. Raises StoreReadOnly."""
        with self._state.changing:
            for digest in digests:
                entry = self._state.index.get(digest)
                if entry is not None:
                    self._state.delete(entry)
        self.store.commit()

    @property
    def may_be_inexact(self) -> bool:
        """Whether it was not closed, or its metadata was damaged: it may hold what it had deleted."""
        return not self.store.info()["recovery"]["was_clean"] or bool(self.store.findings)

    def acknowledge_lazily(self) -> None:
        """Note that something was acknowledged that is not durable yet."""
        with self._state.lock:
            self._lazy_sequence = self._state.log.newest_log_sequence

    @property
    def owes(self) -> bool:
        """Whether something that was acknowledged lazily is not durable."""
        return self._lazy_sequence > self._state.log.durable_sequence

    def begin_term(self, term: int, term_members: int) -> None:
        """Write the next term to it. Raises StoreReadOnly."""
        array = dataclasses.replace(self.membership, term=term, term_members=term_members)
        self._state.log.renew_superblock(array=array)

    @property
    def membership(self) -> Membership:
        """What its superblock says about the array."""
        found = self._state.log.superblock.array
        assert found is not None
        return found
