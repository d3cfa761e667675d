"""The checksum a record holds for its chunk, and checking chunks on the device against it.

The checksum stands with the referrer, not beside the data: stale, misdirected and rotten data, and a run
that was reused too early, all fail the same comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from blockkv.catalog.index import Entry
from blockkv.catalog.layouts import Layout, Layouts
from blockkv.device.base import UNIT_BYTES, Batch, Device, Direction, Priority
from blockkv.format import record
from blockkv.format.geometry import Geometry, leaf_bytes_for
from blockkv.memory import aligned_memory
from blockkv.space.allocator import Extent

VERIFY_BYTES = 32 << 20
"""Payload read per batch when chunks are checked without a caller's memory to read them into."""


def root_checksum(digest: bytes, payload_bytes: int, layout: Layout, leaves: bytes) -> bytes:
    """The checksum that the record of a chunk with these leaf checksums holds: 16 bytes."""
    return record.root_checksum(digest, payload_bytes, layout.digest, leaves)


def device_extents(geometry: Geometry, extents: Iterable[Extent]) -> list[tuple[int, int]]:
    """Extents in units of the data zone as (device offset, bytes)."""
    base = geometry.data.offset_bytes
    return [(base + start * UNIT_BYTES, count * UNIT_BYTES) for start, count in extents]


def verify_chunks(
    device: Device,
    geometry: Geometry,
    entries: Sequence[Entry],
    layouts: Layouts,
    priority: Priority = Priority.LOAD,
) -> Iterator[tuple[Entry, int]]:
    """Read every chunk and compare it with its record.

    Yields (entry, outcome): 0 when exact, 1 when the bytes differ, or the negative errno of the read.
    """
    if not entries:
        return
    import torch  # takes seconds to import; without payload to read nobody needs it

    total_bytes = sum(entry.units for entry in entries) * UNIT_BYTES
    longest_bytes = max(entry.units for entry in entries) * UNIT_BYTES
    memory_bytes = max(longest_bytes, min(total_bytes, VERIFY_BYTES))
    memory = torch.frombuffer(aligned_memory(memory_bytes), dtype=torch.uint8)
    for wave in _waves(entries, memory.nbytes):
        batch = Batch(Direction.READ, priority)
        batch.keepalive.append(memory)
        address = memory.data_ptr()
        for entry in wave:
            batch.add(
                entry.payload_bytes,
                device_extents(geometry, entry.extents),
                [(address, entry.payload_bytes)],
                leaf_bytes_for(entry.payload_bytes),
            )
            address += entry.units * UNIT_BYTES
        device.submit(batch)
        device.wait(batch)
        for position, entry in enumerate(wave):
            code = batch.result(position)
            if code == 0:
                root = root_checksum(
                    entry.digest, entry.payload_bytes, layouts[entry.layout_id], batch.leaves(position)
                )
                code = int(root != entry.root)
            yield entry, code


def _waves(entries: Sequence[Entry], limit_bytes: int) -> Iterator[list[Entry]]:
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
