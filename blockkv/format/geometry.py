"""Where everything is: zones of the device, units, runs, extents and leaves.

Invariants of a `Geometry`
  * zones start on 1 MiB, do not overlap, and lie between the superblock head and the superblock tail;
  * the data zone is whole runs; extents count 4 KiB units from its start;
  * nothing here depends on the content of the device.

Not here: the content of the zones (`superblock`, `journal`, `checkpoint`), which units are free
(`blockkv.space`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from blockkv.device.base import UNIT_BYTES
from blockkv.errors import DeviceTooSmall, FormatError, InvalidArgument

__all__ = [
    "DEFAULT_JOURNAL_BYTES",
    "LEAF_BYTES",
    "MAX_DATA_UNITS",
    "MAX_EXTENTS",
    "MAX_EXTENT_UNITS",
    "MAX_LEAVES",
    "MEBIBYTE",
    "MIN_JOURNAL_PAGES",
    "PAGE_BYTES",
    "RUN_BYTES",
    "RUN_UNITS",
    "SLOTS_PER_COPY",
    "SLOT_COUNT",
    "UNIT_BYTES",
    "Geometry",
    "Zone",
    "growable_bytes",
    "grown",
    "leaf_bytes_for",
    "leaf_count",
    "pack_extent",
    "plan",
    "slot_offsets",
    "unit_count",
    "unpack_extent",
    "validate",
]

MEBIBYTE = 1 << 20
PAGE_BYTES = UNIT_BYTES
"""Metadata page: the journal and the checkpoints are made of these."""
RUN_BYTES = 128 * 1024
"""Chunks of at least this size start on a multiple of it in the data zone."""
RUN_UNITS = RUN_BYTES // UNIT_BYTES
LEAF_BYTES = 128 * 1024
"""Payload bytes per leaf checksum, doubled for large chunks until `MAX_LEAVES` are enough."""
MAX_LEAVES = 256
MAX_EXTENTS = 192
"""Extents of one chunk. With `MAX_LEAVES` leaves the record still fits in a page, with part of the key."""

_START_BITS = 40
_COUNT_BITS = 24
MAX_EXTENT_UNITS = (1 << _COUNT_BITS) - RUN_UNITS
"""Units in one extent: what 24 bits hold, in whole runs (64 GiB less one run)."""
MAX_DATA_UNITS = 1 << _START_BITS
"""Units the data zone can have: what the start of an extent can address (4 PiB)."""

SLOTS_PER_COPY = 4
SLOT_COUNT = 2 * SLOTS_PER_COPY
"""Superblock slots: 0 to 3 in the head, 4 to 7 in the tail."""
_SLOT_STRIDE_BYTES = 256 * 1024
# Slots this far apart never share an indirection unit of the drive (16 KiB and more on QLC), so
# rewriting one cannot endanger another.

DEFAULT_JOURNAL_BYTES = 64 * MEBIBYTE
MIN_JOURNAL_PAGES = 6
_MIN_DATA_BYTES = 2 * MEBIBYTE
_RECORD_BYTES_ESTIMATE = 144
"""A PUT with two extents and a key of about 36 bytes, without its leaves."""
_LBA_SIZES_BYTES = (512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Zone:
    """A contiguous part of the device."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte after the zone."""
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """The zones of a store. Fixed until it is grown."""

    device_bytes: int
    lba_bytes: int
    checkpoint_a: Zone
    checkpoint_b: Zone
    journal: Zone
    data: Zone

    @property
    def journal_pages(self) -> int:
        """Pages in the journal ring."""
        return self.journal.size_bytes // PAGE_BYTES

    @property
    def checkpoint_pages(self) -> int:
        """Pages in each of the two checkpoint areas."""
        return self.checkpoint_a.size_bytes // PAGE_BYTES

    @property
    def checkpoints(self) -> tuple[Zone, Zone]:
        """Both checkpoint areas, in the order of `Superblock.checkpoint_area`."""
        return self.checkpoint_a, self.checkpoint_b

    @property
    def data_units(self) -> int:
        """Units in the data zone."""
        return self.data.size_bytes // UNIT_BYTES

    @property
    def slot_offsets(self) -> tuple[int, ...]:
        """Byte offsets of the eight superblock slots; see `slot_offsets()`."""
        return slot_offsets(self.device_bytes)

    @property
    def encrypted_zone(self) -> Zone:
        """What an encrypted store encrypts of its device: all between head and tail."""
        return Zone(MEBIBYTE, _tail_offset(self.device_bytes) - MEBIBYTE)

    def unit_offset(self, unit: int) -> int:
        """The device offset in bytes of a unit of the data zone."""
        return self.data.offset_bytes + unit * UNIT_BYTES

    def journal_offset(self, page_index: int) -> int:
        """The device offset in bytes of a page of the journal ring."""
        return self.journal.offset_bytes + page_index * PAGE_BYTES


def slot_offsets(device_bytes: int) -> tuple[int, ...]:
    """Byte offsets of the superblock slots: 0 to 3 in the first MiB, 4 to 7 in the last whole MiB.

    Needs only the device size, so the slots can be found before anything has been read.
    """
    tail = _tail_offset(device_bytes)
    return tuple(copy + index * _SLOT_STRIDE_BYTES for copy in (0, tail) for index in range(SLOTS_PER_COPY))


def plan(
    device_bytes: int, lba_bytes: int, average_chunk_bytes: int, journal_bytes: int | None = None
) -> Geometry:
    """Divide a device into zones.

    `average_chunk_bytes` decides how large the checkpoint areas are, and thereby how many chunks the store
    can hold: like the bytes-per-inode ratio of mke2fs it cannot be changed later. `journal_bytes` defaults to
    64 MiB or a sixteenth of the device, whichever is smaller.

    Raises DeviceTooSmall when no useful store fits, InvalidArgument for impossible parameters.
    """
    if lba_bytes not in _LBA_SIZES_BYTES:
        raise InvalidArgument(f"logical block size {lba_bytes} is not one of {_LBA_SIZES_BYTES}")
    if average_chunk_bytes < UNIT_BYTES:
        raise InvalidArgument(f"average chunk of {average_chunk_bytes} bytes is smaller than {UNIT_BYTES}")
    if journal_bytes is None:
        sixteenth = device_bytes // 16 // MEBIBYTE * MEBIBYTE
        journal_bytes = max(MEBIBYTE, min(DEFAULT_JOURNAL_BYTES, sixteenth))
    if journal_bytes % PAGE_BYTES or journal_bytes < MIN_JOURNAL_PAGES * PAGE_BYTES:
        raise InvalidArgument(
            f"journal of {journal_bytes} bytes is not a multiple of {PAGE_BYTES} "
            f"of at least {MIN_JOURNAL_PAGES * PAGE_BYTES}"
        )
    journal_span = _round_up(journal_bytes, MEBIBYTE)
    fixed = 2 * MEBIBYTE + journal_span
    smallest = fixed + 2 * _checkpoint_bytes(_MIN_DATA_BYTES, average_chunk_bytes) + _MIN_DATA_BYTES
    if device_bytes < smallest:
        raise DeviceTooSmall(
            f"device of {device_bytes} bytes is too small: with a journal of {journal_bytes} bytes and "
            f"chunks of {average_chunk_bytes} bytes on average a store needs {smallest} bytes"
        )
    available = device_bytes // MEBIBYTE * MEBIBYTE - fixed
    checkpoint_bytes = _fit_checkpoint(available, average_chunk_bytes)
    offset = MEBIBYTE
    checkpoint_a = Zone(offset, checkpoint_bytes)
    checkpoint_b = Zone(checkpoint_a.end_bytes, checkpoint_bytes)
    journal = Zone(checkpoint_b.end_bytes, journal_bytes)
    data = Zone(journal.offset_bytes + journal_span, available - 2 * checkpoint_bytes)
    geometry = Geometry(device_bytes, lba_bytes, checkpoint_a, checkpoint_b, journal, data)
    validate(geometry)
    return geometry


def grown(geometry: Geometry, device_bytes: int, average_chunk_bytes: int) -> Geometry | None:
    """The zones of a store whose device has `device_bytes` now; None where that gives it no more space.

    The data zone begins where it did and goes on across the old tail, so every extent keeps its meaning; the
    journal stays. Checkpoint areas stay where they lie before the data zone and are large enough for all of
    it. Otherwise new ones for it lie at the end, where nothing of the old store is, not even its tail: the
    next checkpoint can be written before the old superblocks are let go.

    Raises DeviceTooSmall where the new space does not hold those areas, FormatError for zones in an order
    that `plan` does not make.
    """
    end = _tail_offset(device_bytes)
    old_end = _tail_offset(geometry.device_bytes) + MEBIBYTE
    if end < old_end:
        return None
    offset = geometry.data.offset_bytes
    if geometry.journal.offset_bytes > offset:
        raise FormatError("the journal lies behind the data zone, which therefore cannot grow")
    average_chunk_bytes = max(average_chunk_bytes, UNIT_BYTES)  # nobody has checked what the image says
    areas = geometry.checkpoints
    if any(area.offset_bytes > offset for area in areas) or areas[0].size_bytes < _checkpoint_bytes(
        end - offset, average_chunk_bytes
    ):
        area_bytes = _larger_checkpoint(geometry, end, average_chunk_bytes)
        if end - 2 * area_bytes < old_end:
            while end - 2 * area_bytes < old_end:
                end = old_end + 2 * area_bytes
                area_bytes = _larger_checkpoint(geometry, end, average_chunk_bytes)
            raise DeviceTooSmall(
                f"{device_bytes} bytes are too few to grow to from {geometry.device_bytes}: there have to be "
                f"larger checkpoint areas too; it takes a device of at least {end + MEBIBYTE} bytes"
            )
        areas = Zone(end - 2 * area_bytes, area_bytes), Zone(end - area_bytes, area_bytes)
        end = areas[0].offset_bytes
    data = Zone(offset, end - offset)
    larger = Geometry(device_bytes, geometry.lba_bytes, *areas, geometry.journal, data)
    validate(larger)
    return larger


def growable_bytes(geometry: Geometry, device_bytes: int, average_chunk_bytes: int) -> int:
    """How much larger the data zone can become (`grown`) on a device that has `device_bytes` now."""
    try:
        larger = grown(geometry, device_bytes, average_chunk_bytes)
    except (DeviceTooSmall, FormatError):
        return 0
    return larger.data.size_bytes - geometry.data.size_bytes if larger else 0


def validate(geometry: Geometry) -> None:
    """Check a geometry read from a device. Raises FormatError naming the first violation."""
    if geometry.lba_bytes not in _LBA_SIZES_BYTES:
        raise FormatError(f"logical block size {geometry.lba_bytes} is not one of {_LBA_SIZES_BYTES}")
    named = [
        ("checkpoint A", geometry.checkpoint_a),
        ("checkpoint B", geometry.checkpoint_b),
        ("journal", geometry.journal),
        ("data", geometry.data),
    ]
    tail = _tail_offset(geometry.device_bytes)
    for name, zone in named:
        unit = RUN_BYTES if name == "data" else PAGE_BYTES
        if zone.offset_bytes % MEBIBYTE or zone.size_bytes % unit or not zone.size_bytes:
            raise FormatError(
                f"{name} zone of {zone.size_bytes} bytes at {zone.offset_bytes} is misaligned or empty"
            )
        if zone.offset_bytes < MEBIBYTE or zone.end_bytes > tail:
            raise FormatError(
                f"{name} zone of {zone.size_bytes} bytes at {zone.offset_bytes} "
                f"is not between the superblocks ({MEBIBYTE} to {tail})"
            )
    in_order = sorted(named, key=lambda pair: pair[1].offset_bytes)
    for (name, zone), (next_name, next_zone) in itertools.pairwise(in_order):
        if zone.end_bytes > next_zone.offset_bytes:
            raise FormatError(
                f"{name} zone ends at {zone.end_bytes}, {next_name} zone starts at {next_zone.offset_bytes}"
            )
    if geometry.checkpoint_a.size_bytes != geometry.checkpoint_b.size_bytes:
        raise FormatError(
            f"checkpoint zones differ: {geometry.checkpoint_a.size_bytes} "
            f"and {geometry.checkpoint_b.size_bytes} bytes"
        )
    if geometry.journal_pages < MIN_JOURNAL_PAGES:
        raise FormatError(f"journal of {geometry.journal_pages} pages is smaller than {MIN_JOURNAL_PAGES}")
    if geometry.data_units > MAX_DATA_UNITS:
        raise FormatError(f"data zone of {geometry.data_units} units is larger than {MAX_DATA_UNITS}")


def unit_count(payload_bytes: int) -> int:
    """Units that hold a payload."""
    return -(-payload_bytes // UNIT_BYTES)


def leaf_bytes_for(payload_bytes: int) -> int:
    """Payload bytes per leaf checksum of a chunk: 128 KiB, doubled until 256 leaves are enough."""
    return LEAF_BYTES << (max(payload_bytes - 1, 0) // (LEAF_BYTES * MAX_LEAVES)).bit_length()


def leaf_count(payload_bytes: int) -> int:
    """Leaf checksums of a chunk: 0 for an empty payload, at most `MAX_LEAVES`."""
    return -(-payload_bytes // leaf_bytes_for(payload_bytes))


def pack_extent(start_unit: int, count_units: int) -> int:
    """An extent as it is on disk: the start in the low 40 bits, the count in the high 24.

    Raises InvalidArgument when it does not fit.
    """
    if not (0 <= start_unit < 1 << _START_BITS and 0 < count_units < 1 << _COUNT_BITS):
        raise InvalidArgument(f"extent of {count_units} units at {start_unit} cannot be represented")
    return start_unit | count_units << _START_BITS


def unpack_extent(word: int) -> tuple[int, int]:
    """(start_unit, count_units) of an extent as it is on disk."""
    return word & ((1 << _START_BITS) - 1), word >> _START_BITS


def pack_extents(extents: Iterable[tuple[int, int]]) -> list[int]:
    """Several extents as they are on disk; see `pack_extent`."""
    return [pack_extent(start, count) for start, count in extents]


def _tail_offset(device_bytes: int) -> int:
    return device_bytes // MEBIBYTE * MEBIBYTE - MEBIBYTE


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _checkpoint_bytes(data_bytes: int, average_chunk_bytes: int) -> int:
    """Bytes of one checkpoint area for a data zone full of average chunks.

    Twice the records: a page is closed when the next record does not fit, so two successive pages hold more
    than one page's worth of records and no checkpoint fills less than half of its pages.
    """
    record_bytes = _RECORD_BYTES_ESTIMATE + 8 * leaf_count(average_chunk_bytes)
    records = -(-data_bytes // average_chunk_bytes)
    payload = 2 * records * record_bytes
    return max(MEBIBYTE, _round_up(payload, MEBIBYTE))


def _larger_checkpoint(geometry: Geometry, end_bytes: int, average_chunk_bytes: int) -> int:
    """Bytes of a new area for a data zone that ends before two of it at `end_bytes`; no fewer than of old."""
    fitting = _fit_checkpoint(end_bytes - geometry.data.offset_bytes, average_chunk_bytes)
    return max(fitting, _round_up(geometry.checkpoint_a.size_bytes, MEBIBYTE))


def _fit_checkpoint(available_bytes: int, average_chunk_bytes: int) -> int:
    """The smallest area that serves the data zone left beside two of it."""
    low, high = 1, available_bytes // (2 * MEBIBYTE)
    while low < high:
        middle = (low + high) // 2
        data_bytes = available_bytes - 2 * middle * MEBIBYTE
        if middle * MEBIBYTE >= _checkpoint_bytes(data_bytes, average_chunk_bytes):
            high = middle
        else:
            low = middle + 1
    return low * MEBIBYTE
