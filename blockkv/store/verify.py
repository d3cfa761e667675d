"""The checksum a record holds for its chunk, and checking chunks on the device against it.

The checksum stands with the referrer, not beside the data: stale, misdirected and rotten data, and a run
that was reused too early, all fail the same comparison.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterable, Iterator, Sequence

from blockkv.catalog.index import Entry
from blockkv.catalog.layouts import Layout, Layouts
from blockkv.device.base import UNIT_BYTES, Batch, Device, Direction, Priority, device_error
from blockkv.errors import BlockKVError, DeviceLost
from blockkv.format import record
from blockkv.format.geometry import Geometry, leaf_bytes_for
from blockkv.logs import described, logger_for
from blockkv.memory import aligned_memory
from blockkv.space.allocator import Extent

VERIFY_BYTES = 32 << 20
"""Payload read per batch when chunks are checked without a caller's memory to read them into."""

MEDIUM_ERRNOS = frozenset((errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EREMOTEIO))
"""What the kernel answers for a sector that cannot be read (`blk_errors` in block/blk-core.c). Anything else,
from no memory to a bad address of the caller, says nothing about the medium: it may pass."""
WRONG_BYTES = 1
"""The outcome of reading a chunk whose bytes are not those that were put."""


def is_damage(outcome: int) -> bool:
    """Whether `outcome`, of `Verifier.verify` or of a transfer, says that the chunk is gone for good."""
    return outcome == WRONG_BYTES or -outcome in MEDIUM_ERRNOS


def root_checksum(digest: bytes, payload_bytes: int, layout: Layout, leaves: bytes) -> bytes:
    """The checksum that the record of a chunk with these leaf checksums holds: 16 bytes."""
    return record.root_checksum(digest, payload_bytes, layout.digest, leaves)


def device_extents(geometry: Geometry, extents: Iterable[Extent]) -> list[tuple[int, int]]:
    """Extents in units of the data zone as (device offset, bytes)."""
    base = geometry.data.offset_bytes
    return [(base + start * UNIT_BYTES, count * UNIT_BYTES) for start, count in extents]


class Verifier:
    """Reads chunks into memory of its own and compares them with their records."""

    def __init__(self, device: Device, geometry: Geometry, priority: Priority = Priority.LOAD) -> None:
        self._device = device
        self._geometry = geometry
        self._priority = priority
        self._memory = memoryview(b"")

    def verify(self, chunks: Sequence[tuple[Entry, Layout]]) -> list[int]:
        """One outcome a chunk: 0 when exact, WRONG_BYTES, or the negative errno of the read.

        One batch, and memory for all of it. What fails is read once more, by itself: a single read says
        little about what is on the medium. Raises DeviceLost.
        """
        if not chunks:
            return []
        return [
            outcome and self._read([chunk])[0]
            for chunk, outcome in zip(chunks, self._read(chunks), strict=True)
        ]

    def _read(self, chunks: Sequence[tuple[Entry, Layout]]) -> list[int]:
        address = self._address(sum(entry.units for entry, _ in chunks) * UNIT_BYTES)
        batch = Batch(Direction.READ, self._priority)
        batch.keepalive.append(self._memory)
        for entry, _ in chunks:
            batch.add(
                entry.payload_bytes,
                device_extents(self._geometry, entry.extents),
                [(address, entry.payload_bytes)],
                leaf_bytes_for(entry.payload_bytes),
            )
            address += entry.units * UNIT_BYTES
        self._device.submit(batch)
        self._device.wait(batch)
        outcomes = []
        for position, (entry, layout) in enumerate(chunks):
            code = batch.result(position)
            if code:
                error = device_error(self._device.path, f"reading {entry.payload_bytes} bytes", code)
                if isinstance(error, DeviceLost):
                    raise error
            else:
                leaves = batch.leaves(position)
                root = root_checksum(entry.digest, entry.payload_bytes, layout, leaves)
                code = WRONG_BYTES if root != entry.root else 0
            outcomes.append(code)
        return outcomes

    def _address(self, size_bytes: int) -> int:
        if len(self._memory) < size_bytes:
            self._memory = aligned_memory(size_bytes)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) if self._memory else 0


def confirm_damage(
    device: Device, geometry: Geometry, priority: Priority, chunks: Sequence[tuple[Entry, Layout]]
) -> list[bool]:
    """Whether each of these chunks, which did not verify, is none any more: it is read into our own memory.

    One that is right there, or cannot be read just now, stays.
    """
    outcomes = [0] * len(chunks)
    try:
        outcomes = Verifier(device, geometry, priority).verify(chunks)
    except (BlockKVError, MemoryError) as error:
        logger_for(device.path, error=error).warning(
            "chunks cannot be read again just now: %s", described(error)
        )
    for (entry, _), outcome in zip(chunks, outcomes, strict=True):
        if not is_damage(outcome):
            logger_for(device.path, key_digest=entry.digest.hex(), chunk_bytes=entry.payload_bytes).warning(
                "a chunk of %d bytes did not verify and stays, for the device may have it right: is the "
                "memory it was read into written to by others?",
                entry.payload_bytes,
            )
    return list(map(is_damage, outcomes))


def verify_chunks(
    device: Device, geometry: Geometry, entries: Sequence[Entry], layouts: Layouts
) -> Iterator[tuple[Entry, int]]:
    """Read every chunk and compare it with its record: (entry, outcome) for each. Raises DeviceLost."""
    verifier = Verifier(device, geometry)
    for wave in in_waves(entries, VERIFY_BYTES):
        yield from zip(wave, verifier.verify([(one, layouts[one.layout_id]) for one in wave]), strict=True)


def in_waves(entries: Iterable[Entry], limit_bytes: int) -> Iterator[list[Entry]]:
    """`entries` in lists of at most `limit_bytes` on the device; a longer one is alone."""
    wave: list[Entry] = []
    wave_bytes = 0
    for entry in entries:
        entry_bytes = entry.units * UNIT_BYTES
        if wave and wave_bytes + entry_bytes > limit_bytes:
            yield wave
            wave, wave_bytes = [], 0
        wave.append(entry)
        wave_bytes += entry_bytes
    if wave:
        yield wave
