"""Where a chunk lies, for whoever moves its bytes himself: NIXL, GPUDirect Storage, another process.

::

    with store.extents("prompt-1/0") as chunk:                   # None for a miss
        memory = blockkv.empty(chunk.size_bytes, torch.uint8)
        position = 0
        for fd, offset_bytes, length_bytes in chunk.descriptors:
            ...                                                  # read so many bytes to memory[position:]
            position += length_bytes
        tensors = chunk.tensors(memory)                          # verified; None where it is something else

Invariants
  * the chunk stays where it is until `close`: it is leased, so it is neither evicted nor, when it is deleted,
    overwritten;
  * the descriptors are for reading alone: whatever goes wrong there, the store is not written to;
  * nothing here is a hit before `verify` or `tensors` has said so.

Closing the store ends the lease. What is read after that may be another chunk's, and does not verify.

Not here: writing. Who writes to a device beside its store can destroy other chunks by a wrong offset, and by
a write that arrives after its space was given to somebody else. Checksums would tell, and the chunks would be
gone all the same; so puts go through the store.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from blockkv.device.base import UNIT_BYTES
from blockkv.device.engine import leaf_checksums
from blockkv.errors import BlockKVError, InvalidArgument, StoreClosed
from blockkv.format.geometry import leaf_bytes_for
from blockkv.store.keys import Key
from blockkv.store.part_gets import Leased, release
from blockkv.store.verify import device_extents
from blockkv.tensors import bytes_of, values_over

__all__ = ["ChunkExtents", "DeviceExtent"]


class DeviceExtent(NamedTuple):
    """One contiguous range of a chunk on its device, in whole units of 4 KiB."""

    fd: int
    """Open for reading, with O_DIRECT: addresses, offsets and lengths are aligned as the device wants it."""
    offset_bytes: int
    length_bytes: int


class Source(Protocol):
    """What is asked of the store that leased the chunk."""

    def get(self, key: Key) -> Any:
        """Read it as everybody does."""


class ChunkExtents:
    """A leased chunk and where it lies. Get one from `Store.extents`; a context manager, or `close` it.

    Any thread may use it.
    """

    def __init__(self, source: Source, key: Key, chunk: Leased) -> None:
        """Takes the lease over, also where it raises: InvalidArgument, DeviceError."""
        self._source = source
        self._key = key
        self._lock = threading.Lock()
        self._chunk: Leased | None = chunk
        self._fd = -1
        try:
            if chunk.state.device.cipher_key:
                raise InvalidArgument(
                    f"{chunk.state.device.path} is encrypted: nobody else can use what lies there; take get()"
                )
            self._fd = chunk.state.device.open_reader()
        except BaseException:
            self.close()
            raise
        entry = chunk.entry
        self._layout = chunk.layout
        self._leaves = chunk.leaves
        self._payload_bytes = entry.payload_bytes
        self._descriptors = tuple(
            DeviceExtent(self._fd, offset_bytes, length_bytes)
            for offset_bytes, length_bytes in device_extents(chunk.state.geometry, entry.extents)
        )

    @property
    def descriptors(self) -> tuple[DeviceExtent, ...]:
        """(fd, offset in bytes, length in bytes), in the order of the payload. They are closed by `close`.

        Their lengths are `size_bytes` together. Raises StoreClosed once this is closed.
        """
        with self._lock:
            if self._chunk is None:
                raise StoreClosed("these extents were closed; ask the store again")
            return self._descriptors

    @property
    def payload_bytes(self) -> int:
        """How many bytes the chunk has, from the first extent on. What follows in the last one is zero."""
        return self._payload_bytes

    @property
    def size_bytes(self) -> int:
        """How many bytes all extents have: the payload in whole units of 4 KiB."""
        return -(-self._payload_bytes // UNIT_BYTES) * UNIT_BYTES

    @property
    def leaf_bytes(self) -> int:
        """How many bytes of payload one checksum is of; the last one may be of fewer."""
        return leaf_bytes_for(self._payload_bytes)

    @property
    def leaves(self) -> bytes:
        """The checksums that the store has of this chunk: XXH3-64, seed 0, 8 bytes little-endian each.

        For who verifies elsewhere, for instance a part of the payload.
        """
        return self._leaves

    def verify(self, memory: Any) -> bool:
        """Whether `memory` begins with exactly the bytes that were put.

        A contiguous CPU tensor or bytes-like object of at least `payload_bytes`. Where it does not, the chunk
        is read once more as a `get` does it, which tells damage from a transfer that went wrong, counts it,
        and drops a chunk that is damaged. Raises InvalidArgument (memory that is elsewhere, or too short).
        """
        view = bytes_of(memory)
        if len(view) < self._payload_bytes:
            raise InvalidArgument(f"{len(view)} bytes of memory, and the chunk has {self._payload_bytes}")
        if leaf_checksums(view[: self._payload_bytes], self.leaf_bytes) == self._leaves:
            return True
        with contextlib.suppress(
            BlockKVError
        ):  # closed, or its device is gone: then there is nothing to find
            self._source.get(self._key)
        return False

    def tensors(self, memory: Any) -> Any:
        """The tensors that were put, in their form and without a copy; None where `memory` does not verify.

        A tensor that lies there unaligned for its dtype is copied. Raises what `verify` does.
        """
        return values_over(bytes_of(memory), self._layout) if self.verify(memory) else None

    def close(self) -> None:
        """Give the lease back and close the descriptors, which nobody may be using. Idempotent."""
        with self._lock:
            chunk, self._chunk = self._chunk, None
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if chunk is not None:
            release([chunk])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Not the lease: a finalizer runs in the middle of anything, and must not wait for a lock.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            warnings.warn(
                "the extents of a chunk were not closed: it stays leased until the store is closed",
                ResourceWarning,
                stacklevel=1,
            )
