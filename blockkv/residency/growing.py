"""A chunk that grows in memory, or directly in the store.

Not here: growing in the store (`blockkv.store.growing`), who has to leave memory (`memory_tier`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from blockkv.errors import BlockKVError, GrowthEnded, InvalidArgument, StoreClosed, StoreFull
from blockkv.residency.copies import copy_out, gather, tensor_at
from blockkv.residency.memory_tier import MemoryTier, Resident
from blockkv.store.growing import GrowingChunk
from blockkv.store.keys import Key, encode_key
from blockkv.store.rows import Rows
from blockkv.tensors import Tensors, describe

if TYPE_CHECKING:
    import torch

__all__ = ["TieredGrowingChunk"]


class TieredGrowingChunk:
    """`GrowingChunk` in memory, or directly in the store. Get one from `TieredStore.reserve`.

    In memory nothing is written until it leaves: then all it has is appended to a growing chunk of the store,
    and it goes on there. A durable append makes it leave.
    """

    def __init__(
        self,
        tier: MemoryTier,
        operation: Callable[[], AbstractContextManager[None]],
        key: Key,
        capacity_bytes: int,
        where: Resident | GrowingChunk,
    ) -> None:
        """For `TieredStore.reserve`; `operation` holds its `close` back."""
        self.key = key
        self.capacity_bytes = capacity_bytes
        self._tier = tier
        self._operation = operation
        self._lock = threading.RLock()
        self._rows = Rows()
        self._size_bytes = 0
        self._resident = where if isinstance(where, Resident) else None
        self._direct = where if isinstance(where, GrowingChunk) else None
        self._ended: type[BlockKVError] | None = None
        self._ended_how = ""

    @property
    def in_memory(self) -> bool:
        """Whether it grows in memory."""
        return self._resident is not None

    @property
    def size_bytes(self) -> int:
        """Payload so far."""
        return self._size_bytes if self._direct is None else self._direct.size_bytes

    def __len__(self) -> int:
        """Rows so far."""
        return self.size_bytes // self._rows.row_bytes if self._direct is None else len(self._direct)

    def append(self, tensors: Tensors, durable: bool = False) -> int:
        """`GrowingChunk.append`."""
        with self._operation(), self._lock:
            self._check()
            if durable and self._resident is not None:
                self._make_leave()
            if self._direct is not None:
                return self._direct.append(tensors, durable)
            assert self._resident is not None
            described = describe(tensors)
            self._rows.accept(described, self._size_bytes, self.capacity_bytes)
            gather(described, self._resident.part.address + self._size_bytes)
            self._size_bytes += described.payload_bytes
            return len(self)

    def read(self, start: int = 0, stop: int | None = None, out: Any = None, *, preload: bool = False) -> Any:
        """`GrowingChunk.read`; from memory a copy."""
        with self._operation():
            with self._leased() as resident:
                if resident is not None:
                    first, end = self._rows.range_of(start, stop, self._size_bytes)
                    self._tier.count("memory_hits", end - first, "memory_hit_bytes")
                    return copy_out(resident.part.address + first, self._rows.layout(end - first), out)
            assert self._direct is not None
            return self._direct.read(start, stop, out, preload=preload)

    @contextlib.contextmanager
    def borrow(
        self, start: int = 0, stop: int | None = None, out: Any = None
    ) -> Iterator[torch.Tensor | None]:
        """Rows as a tensor: in memory those themselves, not to be written to; else `out`, or new memory,
        filled from the device. None where they could not be read. To be used while the context lasts.
        """
        with self._operation(), self._leased() as resident:
            if resident is not None:
                first, end = self._rows.range_of(start, stop, self._size_bytes)
                self._tier.count("memory_hits", end - first, "memory_hit_bytes")
                yield tensor_at(resident.part, first, self._rows.layout(end - first))
                return
            assert self._direct is not None
            found = self._direct.read(start, stop, out)
            yield found if out is None else (out if found else None)

    def seal(self, durable: bool = False) -> None:
        """`GrowingChunk.seal`. What grew in memory stays there, and is in the store with `durable`."""
        with self._operation(), self._lock:
            self._check()
            resident = self._resident
            if resident is None:
                assert self._direct is not None
                self._direct.seal(durable)
                self._tier.growing_in_store.discard(encode_key(self.key))
            else:
                if not self._size_bytes:
                    raise InvalidArgument("nothing was appended; there is nothing to seal")
                layout = self._rows.layout(self._size_bytes)
                version = None
                if durable:  # what the admission policy of the store refuses is not there
                    self._tier.store.put(self.key, tensor_at(resident.part, 0, layout), durable=True)
                    version = self._tier.version_of(self.key)
                with self._tier.lock:
                    resident.layout, resident.size_bytes = layout, self._size_bytes
                    resident.version, resident.growing, resident.stuck = version, None, False
            self._ended, self._ended_how = GrowthEnded, "the growing chunk was sealed; get it from the store"

    def abandon(self) -> None:
        """`GrowingChunk.abandon`."""
        with self._lock:
            if self._ended is not None:
                return
            resident, self._resident = self._resident, None
            self._ended, self._ended_how = GrowthEnded, "the growing chunk was abandoned"
            if resident is not None:
                with self._tier.lock:
                    self._tier.remove(resident)
            elif self._direct is not None:
                self._direct.abandon()
                self._tier.growing_in_store.discard(encode_key(self.key))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    # -- inside ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended(self._ended_how)

    @contextlib.contextmanager
    def _leased(self) -> Iterator[Resident | None]:
        """Its memory, which stays while the context lasts; None where it grows in the store."""
        with self._lock:
            self._check()
            resident = self._resident
            if resident is not None:
                with self._tier.lock:
                    resident.leases += 1
                    self._tier.use(resident)
        try:
            yield resident
        finally:
            if resident is not None:
                self._tier.release(resident)

    def spill(self) -> None:
        """Go on in the store, for the tier, which takes the memory back then. Raises StoreFull."""
        with self._lock:
            resident = self._resident
            if resident is None or self._ended is not None:
                return
            direct = self._tier.store.reserve(self.key, self.capacity_bytes)
            if self._size_bytes:
                try:
                    direct.append(tensor_at(resident.part, 0, self._rows.layout(self._size_bytes)))
                except BlockKVError:
                    direct.abandon()
                    raise
                self._tier.count("write_backs", self._size_bytes, "write_back_bytes")
            with self._tier.lock:
                self._tier.growing_in_store.add(resident.encoded)
            self._direct, self._resident = direct, None

    def _make_leave(self) -> None:
        resident = self._resident
        assert resident is not None
        with self._tier.lock:
            resident.leaving = True
        self._tier.leave([resident])
        if self._resident is not None:
            raise StoreFull("what grows in memory cannot be made durable: there is no room in the store")

    def end_with_tier(self) -> None:
        """The tier is closed, and with it what grew in its memory is gone."""
        self._resident = None
        if self._ended is None:
            self._ended, self._ended_how = StoreClosed, "the store was closed"
