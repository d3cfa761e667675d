"""Many PUT records at once: what a million chunks need to be opened in about a second.

Nearly every page of a checkpoint holds nothing but PUT records of one extent whose key fits: plain ones.
Their n-th records are read for all pages together, as columns. A page with anything else in it, or anything
wrong, is left to `record.iterate_records`, which says what; what is accepted here it accepts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockkv.format.geometry import LEAF_BYTES, MAX_LEAVES, UNIT_BYTES
from blockkv.format.page import COUNTER_LIMIT, PAGE_PAYLOAD_BYTES
from blockkv.format.record import DIGEST_BYTES, MAX_KEY_BYTES, PUT_RECORD, Operation

__all__ = ["PutTable", "scan_puts"]

_WORD_BYTES = 4
_PLAIN_LIMIT_BYTES = MAX_LEAVES * LEAF_BYTES
"""Payload up to which every leaf has `LEAF_BYTES`; larger chunks are few."""


def _word(field: str) -> int:
    offset = PUT_RECORD.offsets[field]
    assert offset % _WORD_BYTES == 0, f"{field} is not aligned"
    return offset // _WORD_BYTES


# `record_bytes`, `operation` and `extent_count` share a word; key length, flags and `reserved` another.
_LAYOUT_ID, _LOG_SEQUENCE, _PAYLOAD, _KEY = map(
    _word, ("layout_id", "log_sequence", "payload_bytes", "key_bytes")
)
_DIGEST_OFFSET = PUT_RECORD.offsets["digest"]
assert _DIGEST_OFFSET % 8 == 0, "digests are gathered as 64-bit words"
_EXTENT = PUT_RECORD.size_bytes // _WORD_BYTES
_VARIABLE_OFFSET = PUT_RECORD.size_bytes + 8
"""Where the leaves of a record of one extent begin."""
_SMALLEST_BYTES = _VARIABLE_OFFSET + 8
"""A record of one extent and one leaf."""
_PLAIN_PUT = 1 << 8 | Operation.PUT
"""Operation and extent count."""

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PutTable:
    """Plain PUT records, in order, still encoded in `pages`; item i of a column belongs to record i."""

    pages: bytes
    offset_bytes: Column
    record_bytes: Column
    log_sequence: Column
    layout_id: Column
    payload_bytes: Column
    start_unit: Column
    units: Column

    def __len__(self) -> int:
        return len(self.offset_bytes)

    def rows(self, first: int, end: int) -> PutTable:
        """The rows from `first` up to `end`, exclusive."""
        columns = (getattr(self, name)[first:end] for name in self.__slots__[1:])
        return PutTable(self.pages, *columns)

    def digests(self) -> list[bytes]:
        """The key digests, in order."""
        places = ((self.offset_bytes + _DIGEST_OFFSET) // 8)[:, None] + np.arange(DIGEST_BYTES // 8)
        gathered = np.frombuffer(self.pages, np.uint64)[places]
        found: list[bytes] = gathered.view(f"V{DIGEST_BYTES}").ravel().tolist()
        return found

    def raw(self, row: int) -> bytes:
        """The encoded record."""
        start = int(self.offset_bytes[row])
        return self.pages[start : start + int(self.record_bytes[row])]


def scan_puts(
    pages: bytes, bodies: Sequence[tuple[int, int, int]], data_units: int
) -> tuple[NDArray[np.bool_], PutTable]:
    """Which page bodies hold only plain PUT records, and those records.

    `bodies` are (start, end, record count) of the bodies, bytes in `pages`, which start on a multiple of 8.
    """
    starts, ends, counts = np.array(bodies, np.int64).reshape(-1, 3).T
    # Those that cannot hold so many are not plain, and nothing is allocated for them.
    plain = (counts * _SMALLEST_BYTES <= ends - starts) & (counts > 0)
    rows = np.where(plain, counts, 0)
    firsts = np.cumsum(rows) - rows
    columns = np.zeros((7, int(rows.sum())), np.int64)
    words = np.frombuffer(pages, "<u4").astype(np.int64)
    at = starts.copy()
    for number in range(int(rows.max(initial=0))):
        reading = np.flatnonzero(plain & (number < rows))
        place, room = at[reading], (ends - at)[reading]
        fits = room >= _SMALLEST_BYTES
        is_plain, *found = _read(words, np.where(fits, place, starts[reading]) // _WORD_BYTES, data_units)
        plain[reading] = fits & is_plain & (found[0] <= room)
        columns[:, firsts[reading] + number] = (place, *found)
        at[reading] += np.where(plain[reading], found[0], 0)
    plain &= at == ends
    return plain, PutTable(pages, *columns[:, np.repeat(plain, rows)])


def _read(words: Column, at: Column, data_units: int) -> tuple[NDArray[np.bool_], *tuple[Column, ...]]:
    """Whether there is a plain PUT at each of `at`, and its fields in the order of `PutTable`."""
    head, key = words[at], words[at + _KEY]
    record_bytes, key_bytes, flags_and_reserved = head & 0xFFFF, key & 0xFFFF, key >> 16
    # The upper halves of 64-bit fields; what does not fit the format's limits is not plain.
    log_high, payload_high = words[at + _LOG_SEQUENCE + 1], words[at + _PAYLOAD + 1]
    log_sequence = words[at + _LOG_SEQUENCE] | log_high << 32
    payload_bytes = words[at + _PAYLOAD]
    extent_high = words[at + _EXTENT + 1]
    start_unit, units = words[at + _EXTENT] | (extent_high & 0xFF) << 32, extent_high >> 8
    leaf_bytes = -(-payload_bytes // LEAF_BYTES) * 8
    used_bytes = _VARIABLE_OFFSET + leaf_bytes + key_bytes
    padding = -used_bytes & 7
    is_plain = (
        (head >> 16 == _PLAIN_PUT)
        & (record_bytes == used_bytes + padding)
        & (log_sequence >= 0)
        & (log_sequence < COUNTER_LIMIT)
        & (payload_high == 0)
        & (payload_bytes > 0)
        & (payload_bytes <= _PLAIN_LIMIT_BYTES)
        & (units == -(-payload_bytes // UNIT_BYTES))
        & (start_unit + units <= data_units)
        & (used_bytes <= PAGE_PAYLOAD_BYTES)
        & (key_bytes <= MAX_KEY_BYTES)
        & (flags_and_reserved <= 1)
    )
    # Padding is at most the last seven bytes: what two words hold.
    last = np.where(is_plain, at + record_bytes // _WORD_BYTES - 1, at + 1)
    last = np.minimum(last, len(words) - 1)
    high_bits = 8 * np.minimum(padding, 4)
    low_bits = 8 * np.maximum(padding - 4, 0)
    is_plain &= (words[last] >> (32 - high_bits) == 0) & (words[last - 1] >> (32 - low_bits) == 0)
    return (
        is_plain,
        record_bytes,
        log_sequence,
        words[at + _LAYOUT_ID],
        payload_bytes,
        start_unit,
        units,
    )
