"""Records: what pages are filled with. One record is one step of the store's history.

    PUT        a chunk exists: its digest, size, layout, root checksum, extents, leaf checksums, key
    DELETE     a chunk is gone
    LAYOUT     a layout id stands for this description (dtype, shapes, names; opaque here)
    KEY_TAIL   the end of a key too long for the PUT before it

Invariants
  * a record lies within one page; its length is a multiple of 8 and follows from its own fields, so no two
    encodings of one record exist;
  * everything read from a device is checked against hostile input before it is used: a record that is
    accepted names extents inside the data zone that cover its payload exactly.

The checksums of a chunk stand here, with the referrer, not beside the payload: misdirected and stale payload
is caught as surely as damaged payload.

Not here: pages (`page`), overlap between the extents of different records (`blockkv.space`).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from xxhash import xxh3_128_digest

from blockkv.errors import FormatError, InvalidArgument
from blockkv.format.fields import Field, StructLayout
from blockkv.format.geometry import (
    MAX_DATA_UNITS,
    MAX_EXTENTS,
    RUN_UNITS,
    leaf_count,
    pack_extent,
    unit_count,
    unpack_extent,
)
from blockkv.format.page import CHECKSUM_BYTES, COUNTER_LIMIT, PAGE_PAYLOAD_BYTES

__all__ = [
    "DELETE_RECORD",
    "DIGEST_BYTES",
    "KEY_TAIL_RECORD",
    "LAYOUT_BODY_MAX",
    "LAYOUT_RECORD",
    "MAX_KEY_BYTES",
    "MAX_LAYOUT_ID",
    "PUT_RECORD",
    "SHORTEST_PUT_BYTES",
    "DeleteRecord",
    "KeyTailRecord",
    "LayoutRecord",
    "Operation",
    "PutRecord",
    "Record",
    "RecordMalformed",
    "RecordView",
    "decode",
    "digest_of",
    "encode_delete",
    "encode_layout",
    "encode_put",
    "extents_of",
    "iterate_records",
    "key_digest",
    "layout_checksum",
    "length_of",
    "put_bytes_at_most",
    "root_checksum",
    "root_of",
    "summary_of",
]

DIGEST_BYTES = 32
MAX_KEY_BYTES = 4096


class Operation(enum.IntEnum):
    PUT = 1
    DELETE = 2
    LAYOUT = 3
    KEY_TAIL = 4


_LENGTH = Field("record_bytes", "u16", "length of the whole record, a multiple of 8")
_LOG_SEQUENCE = Field("log_sequence", "u64", "position in the store's history; orders records of one key")
_DIGEST = Field("digest", "bytes[32]", "BLAKE2b-256 of the key: the chunk's identity")

PUT_RECORD = StructLayout(
    "PUT record",
    [
        _LENGTH,
        Field("operation", "u8", "1"),
        Field("extent_count", "u8", "extents after the fixed part, at most 192"),
        Field("layout_id", "u32", "the LAYOUT record that says how the payload is divided into tensors"),
        _LOG_SEQUENCE,
        _DIGEST,
        Field("payload_bytes", "u64", "bytes of payload; the extents cover it exactly, rounded up to 4 KiB"),
        Field(
            "root",
            "bytes[16]",
            "root checksum over digest, size, layout and leaves: any wrong byte of payload",
        ),
        Field("key_bytes", "u16", "length of the whole key, 1 to 4096; 0: not recorded"),
        Field("flags", "u8", "bit 0: the key was given as text (UTF-8); the others zero, checked"),
        Field("reserved", "zero[1]", "zero, checked"),
    ],
    size_bytes=76,
)
DELETE_RECORD = StructLayout(
    "DELETE record",
    [
        _LENGTH,
        Field("operation", "u8", "2"),
        Field("reserved", "zero[5]", "zero, checked"),
        _LOG_SEQUENCE,
        _DIGEST,
    ],
    size_bytes=48,
)
LAYOUT_RECORD = StructLayout(
    "LAYOUT record",
    [
        _LENGTH,
        Field("operation", "u8", "3"),
        Field("reserved", "zero[1]", "zero, checked"),
        Field("layout_id", "u32", "what PUT records call it"),
        _LOG_SEQUENCE,
        Field("body_bytes", "u16", "length of the description that follows"),
    ],
    size_bytes=18,
)
KEY_TAIL_RECORD = StructLayout(
    "KEY_TAIL record",
    [
        _LENGTH,
        Field("operation", "u8", "4"),
        Field("reserved", "zero[5]", "zero, checked"),
        _LOG_SEQUENCE,
        Field("digest", "bytes[32]", "the digest of the PUT it belongs to"),
        Field("tail_bytes", "u16", "length of the rest of the key that follows"),
    ],
    size_bytes=50,
)

_FLAG_KEY_IS_TEXT = 1
_PUT_BYTES = PUT_RECORD.size_bytes
_DELETE_BYTES = DELETE_RECORD.size_bytes
_LAYOUT_BYTES = LAYOUT_RECORD.size_bytes
_TAIL_BYTES = KEY_TAIL_RECORD.size_bytes
LAYOUT_BODY_MAX = PAGE_PAYLOAD_BYTES - _LAYOUT_BYTES
"""Longest description a LAYOUT record holds."""
MAX_LAYOUT_ID = (1 << 32) - 2
"""The superblock's `next_layout_id` must still be able to exceed it."""

_ROOT_OFFSET = PUT_RECORD.offsets["root"]
_DIGEST_OFFSET = PUT_RECORD.offsets["digest"]
_pack_put = PUT_RECORD.struct.pack
_unpack_put = PUT_RECORD.struct.unpack_from
_pack_delete = DELETE_RECORD.struct.pack
_unpack_delete = DELETE_RECORD.struct.unpack_from
_unpack_layout = LAYOUT_RECORD.struct.unpack_from
_unpack_tail = KEY_TAIL_RECORD.struct.unpack_from
summary_of: Callable[[bytes], tuple[int, int]] = struct.Struct("<4xI40xQ").unpack_from
"""(layout id, payload bytes) of an accepted PUT record, without decoding the rest of it: bytes 4 and 48."""
_unpack_word = struct.Struct("<Q").unpack_from
SHORTEST_PUT_BYTES = 96
"""A PUT record of one extent, one leaf and a key of up to four bytes: 92 bytes and padding."""
_ZEROS = tuple(bytes(length) for length in range(8))
_START_MASK = MAX_DATA_UNITS - 1

RecordView = tuple[int, int, bytes, bytes]
"""(operation, log_sequence, digest, raw): a checked record whose details are still encoded in `raw`.

The digest is empty for LAYOUT. `decode(raw)` gives the whole record, `extents_of(raw)` and
`summary_of(raw)` parts of it.
"""


class RecordMalformed(FormatError):
    """A record violates the format. Nothing of its page can be believed."""


@dataclass(frozen=True, slots=True)
class PutRecord:
    """A chunk exists."""

    log_sequence: int
    digest: bytes
    payload_bytes: int
    layout_id: int
    root: bytes
    """16 bytes; see `root_checksum`."""
    extents: tuple[tuple[int, int], ...]
    """(start_unit, count_units), relative to the data zone, in payload order."""
    leaves: bytes
    """8 little-endian bytes a leaf: XXH3-64 of each `leaf_bytes_for(payload_bytes)` bytes of payload."""
    key: bytes
    """The key, or its beginning where it continues in a KEY_TAIL record."""
    key_bytes_total: int
    key_is_text: bool = False


@dataclass(frozen=True, slots=True)
class DeleteRecord:
    """A chunk is gone."""

    log_sequence: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """`layout_id` stands for `body`."""

    log_sequence: int
    layout_id: int
    body: bytes


@dataclass(frozen=True, slots=True)
class KeyTailRecord:
    """The end of the key of the PUT record before it, which has the same digest."""

    log_sequence: int
    digest: bytes
    tail: bytes


Record = PutRecord | DeleteRecord | LayoutRecord | KeyTailRecord


def key_digest(key: bytes) -> bytes:
    """The identity of a chunk: BLAKE2b-256 of its key. 32 bytes."""
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


def layout_checksum(layout_body: bytes) -> bytes:
    """XXH3-128 of a layout description, as it enters the root checksum. 16 bytes."""
    return xxh3_128_digest(layout_body)


def root_checksum(digest: bytes, payload_bytes: int, layout_checksum_: bytes, leaves: bytes) -> bytes:
    """XXH3-128 over key digest, payload size, layout and leaf checksums. 16 bytes.

    The digest and the layout are part of it, so that a record which names another chunk's extents, or reads
    them with another dtype, does not verify.
    """
    return xxh3_128_digest(digest + payload_bytes.to_bytes(8, "little") + layout_checksum_ + leaves)


def encode_put(
    log_sequence: int,
    digest: bytes,
    payload_bytes: int,
    layout_id: int,
    root: bytes,
    extents: Sequence[tuple[int, int]],
    leaves: bytes,
    key: bytes,
    key_is_text: bool = False,
) -> list[bytes]:
    """A PUT record, followed by a KEY_TAIL record where the key is longer than the page leaves room for.

    Raises InvalidArgument when extents or leaves do not fit the payload, or a field is out of range.
    """
    if len(extents) > MAX_EXTENTS:
        raise InvalidArgument(f"{len(extents)} extents exceed {MAX_EXTENTS}")
    if sum(count for _, count in extents) != unit_count(payload_bytes):
        raise InvalidArgument(f"extents {list(extents)} do not hold exactly {payload_bytes} bytes")
    if len(leaves) != 8 * leaf_count(payload_bytes):
        raise InvalidArgument(f"{len(leaves)} bytes of leaves for a payload of {payload_bytes} bytes")
    if len(key) > MAX_KEY_BYTES:
        raise InvalidArgument(f"key of {len(key)} bytes exceeds {MAX_KEY_BYTES}")
    if len(digest) != DIGEST_BYTES or len(root) != CHECKSUM_BYTES:
        raise InvalidArgument(f"digest of {len(digest)} and root of {len(root)} bytes")
    words = b"".join([pack_extent(start, count).to_bytes(8, "little") for start, count in extents])
    inline_bytes = min(len(key), PAGE_PAYLOAD_BYTES - _PUT_BYTES - len(words) - len(leaves))
    used_bytes = _PUT_BYTES + len(words) + len(leaves) + inline_bytes
    padding = -used_bytes % 8
    flags = _FLAG_KEY_IS_TEXT if key_is_text else 0
    # Not PUT_RECORD.pack: this runs once a put, and takes a quarter of the time.
    try:
        fixed = _pack_put(used_bytes + padding, Operation.PUT, len(extents), layout_id, log_sequence, digest,
                          payload_bytes, root, len(key), flags, b"")  # fmt: skip
    except struct.error as error:
        raise InvalidArgument(f"layout id {layout_id}, log sequence {log_sequence}: {error}") from None
    records = [b"".join((fixed, words, leaves, key[:inline_bytes], _ZEROS[padding]))]
    if inline_bytes < len(key):
        tail = key[inline_bytes:]
        padding = -(_TAIL_BYTES + len(tail)) % 8
        fixed = KEY_TAIL_RECORD.pack(
            record_bytes=_TAIL_BYTES + len(tail) + padding,
            operation=Operation.KEY_TAIL,
            log_sequence=log_sequence,
            digest=digest,
            tail_bytes=len(tail),
        )
        records.append(fixed + tail + _ZEROS[padding])
    return records


def encode_delete(log_sequence: int, digest: bytes) -> bytes:
    """A DELETE record. Raises InvalidArgument when a field is out of range."""
    return DELETE_RECORD.pack(
        record_bytes=_DELETE_BYTES, operation=Operation.DELETE, log_sequence=log_sequence, digest=digest
    )


def encode_deletes(first_log_sequence: int, digests: Sequence[bytes]) -> list[bytes]:
    """`encode_delete` for many digests, of 32 bytes, with log sequences that go up by one."""
    sequences = range(first_log_sequence, first_log_sequence + len(digests))
    return [
        _pack_delete(_DELETE_BYTES, Operation.DELETE, b"", sequence, digest)
        for sequence, digest in zip(sequences, digests, strict=True)
    ]


def encode_layout(log_sequence: int, layout_id: int, body: bytes) -> bytes:
    """A LAYOUT record. Raises InvalidArgument when `body` exceeds LAYOUT_BODY_MAX."""
    if len(body) > LAYOUT_BODY_MAX:
        raise InvalidArgument(f"layout description of {len(body)} bytes exceeds {LAYOUT_BODY_MAX}")
    padding = -(_LAYOUT_BYTES + len(body)) % 8
    fixed = LAYOUT_RECORD.pack(
        record_bytes=_LAYOUT_BYTES + len(body) + padding,
        operation=Operation.LAYOUT,
        layout_id=layout_id,
        log_sequence=log_sequence,
        body_bytes=len(body),
    )
    return fixed + body + _ZEROS[padding]


def iterate_records(body: bytes, record_count: int, data_units: int) -> Iterator[RecordView]:
    """The records of a page body, checked, in order. About 1 us each.

    Raises RecordMalformed at the first violation, also when `record_count` records do not fill the body
    exactly. Whoever applies records must apply those of a page together or not at all.
    """
    end = len(body)
    offset = 0
    for _ in range(record_count):
        room = end - offset
        operation = body[offset + 2] if room >= _LAYOUT_BYTES else 0
        if operation == 1:
            if room < _PUT_BYTES:
                raise RecordMalformed(f"PUT at {offset}: {room} bytes left")
            (record_bytes, _, extent_count, _, log_sequence, digest, payload_bytes, _, key_bytes, flags,
             reserved) = _unpack_put(body, offset)  # fmt: skip
            # One extent of up to 32 MiB is nearly every chunk there is; the rest takes the long way.
            if extent_count == 1 and 0 < payload_bytes <= 0x2000000 and room >= 84:
                (word,) = _unpack_word(body, offset + 76)
                units = word >> 40
                if (payload_bytes + 4095) >> 12 != units or (word & _START_MASK) + units > data_units:
                    raise RecordMalformed(f"PUT at {offset}: extent {word:#x} for {payload_bytes} bytes")
                variable_bytes = 8 + ((payload_bytes + 131071) >> 17 << 3)
            else:
                variable_bytes = _check_extents(body, offset, extent_count, payload_bytes, data_units)
            inline_bytes = PAGE_PAYLOAD_BYTES - _PUT_BYTES - variable_bytes
            if key_bytes < inline_bytes:
                inline_bytes = key_bytes
            used_bytes = _PUT_BYTES + variable_bytes + inline_bytes
            if flags > 1 or reserved != b"\0" or key_bytes > MAX_KEY_BYTES:
                raise RecordMalformed(f"PUT at {offset}: flags {flags}, key of {key_bytes} bytes")
        elif operation == 2:
            if room < _DELETE_BYTES:
                raise RecordMalformed(f"DELETE at {offset}: {room} bytes left")
            record_bytes, _, reserved, log_sequence, digest = _unpack_delete(body, offset)
            used_bytes = _DELETE_BYTES
            if any(reserved):
                raise RecordMalformed(f"DELETE at {offset}: reserved bytes {reserved.hex()}")
        elif operation == 3:
            record_bytes, _, reserved, layout_id, log_sequence, body_bytes = _unpack_layout(body, offset)
            digest = b""
            used_bytes = _LAYOUT_BYTES + body_bytes
            if any(reserved) or layout_id > MAX_LAYOUT_ID:
                raise RecordMalformed(f"LAYOUT at {offset}: id {layout_id}, reserved bytes {reserved.hex()}")
        elif operation == 4:
            if room < _TAIL_BYTES:
                raise RecordMalformed(f"KEY_TAIL at {offset}: {room} bytes left")
            record_bytes, _, reserved, log_sequence, digest, tail_bytes = _unpack_tail(body, offset)
            used_bytes = _TAIL_BYTES + tail_bytes
            if any(reserved) or not 0 < tail_bytes < MAX_KEY_BYTES:
                raise RecordMalformed(f"KEY_TAIL at {offset}: {tail_bytes} bytes, reserved {reserved.hex()}")
        else:
            raise RecordMalformed(f"record at {offset}: operation {operation}, {room} bytes left")
        if log_sequence >= COUNTER_LIMIT:
            raise RecordMalformed(f"record at {offset}: log sequence {log_sequence}")
        padding = -used_bytes & 7
        next_offset = offset + record_bytes
        if record_bytes != used_bytes + padding or next_offset > end:
            raise RecordMalformed(
                f"record at {offset}: {record_bytes} bytes instead of {used_bytes + padding}"
            )
        raw = body[offset:next_offset]
        if padding and not raw.endswith(_ZEROS[padding]):
            raise RecordMalformed(f"record at {offset}: padding is not zero")
        yield operation, log_sequence, digest, raw
        offset = next_offset
    if offset != end:
        raise RecordMalformed(f"{record_count} records end at {offset}, the body at {end}")


def _check_extents(body: bytes, offset: int, extent_count: int, payload_bytes: int, data_units: int) -> int:
    """Bytes of extents and leaves of the PUT at `offset`. Raises RecordMalformed."""
    units = unit_count(payload_bytes)
    extents_bytes = 8 * extent_count
    if extent_count > MAX_EXTENTS or len(body) - offset - _PUT_BYTES < extents_bytes:
        raise RecordMalformed(f"PUT at {offset}: {extent_count} extents for {payload_bytes} bytes")
    total_units = end = 0
    for start, count in sorted(_extents(body, offset, extent_count)):
        if not count or start < end or start + count > data_units:
            raise RecordMalformed(
                f"PUT at {offset}: extent of {count} units at {start} is empty, overlaps another one, "
                f"or leaves the {data_units} data units"
            )
        total_units += count
        end = start + count
    if total_units != units:
        raise RecordMalformed(f"PUT at {offset}: extents of {total_units} units for {payload_bytes} bytes")
    return extents_bytes + 8 * leaf_count(payload_bytes)


def _extents(raw: bytes, offset: int, extent_count: int) -> Iterator[tuple[int, int]]:
    words = struct.unpack_from(f"<{extent_count}Q", raw, offset + _PUT_BYTES)
    return map(unpack_extent, words)


def decode(raw: bytes) -> Record:
    """The whole of one record that `iterate_records` has accepted, or that an encoder has made."""
    operation = raw[2]
    if operation == Operation.PUT:
        (_, _, extent_count, layout_id, log_sequence, digest, payload_bytes, root, key_bytes, flags,
         _) = _unpack_put(raw)  # fmt: skip
        leaves_start = _PUT_BYTES + 8 * extent_count
        key_start = leaves_start + 8 * leaf_count(payload_bytes)
        inline_bytes = min(key_bytes, PAGE_PAYLOAD_BYTES - key_start)
        return PutRecord(
            log_sequence,
            digest,
            payload_bytes,
            layout_id,
            root,
            tuple(_extents(raw, 0, extent_count)),
            raw[leaves_start:key_start],
            raw[key_start : key_start + inline_bytes],
            key_bytes,
            bool(flags & _FLAG_KEY_IS_TEXT),
        )
    if operation == Operation.DELETE:
        _, _, _, log_sequence, digest = _unpack_delete(raw)
        return DeleteRecord(log_sequence, digest)
    if operation == Operation.LAYOUT:
        _, _, _, layout_id, log_sequence, body_bytes = _unpack_layout(raw)
        return LayoutRecord(log_sequence, layout_id, raw[_LAYOUT_BYTES : _LAYOUT_BYTES + body_bytes])
    assert operation == Operation.KEY_TAIL, f"operation {operation} was not checked"
    _, _, _, log_sequence, digest, tail_bytes = _unpack_tail(raw)
    return KeyTailRecord(log_sequence, digest, raw[_TAIL_BYTES : _TAIL_BYTES + tail_bytes])


def extents_of(raw: bytes) -> tuple[tuple[int, int], ...]:
    """The extents of an accepted PUT record, without decoding the rest of it."""
    if raw[3] == 1:
        (word,) = _unpack_word(raw, _PUT_BYTES)
        return ((word & _START_MASK, word >> 40),)
    return tuple(_extents(raw, 0, raw[3]))


def root_of(raw: bytes) -> bytes:
    """The root checksum of an accepted PUT record, without decoding the rest of it. 16 bytes."""
    return raw[_ROOT_OFFSET : _ROOT_OFFSET + 16]


def digest_of(raw: bytes) -> bytes:
    """The key digest of an accepted PUT record, without decoding the rest of it. 32 bytes."""
    return raw[_DIGEST_OFFSET : _DIGEST_OFFSET + DIGEST_BYTES]


def length_of(raw: bytes) -> int:
    """The length of the accepted record that `raw` begins with."""
    return raw[0] | raw[1] << 8


def put_bytes_at_most(payload_bytes: int, key_bytes: int) -> int:
    """The most that the records of such a chunk can take, whatever extents it gets."""
    units = unit_count(payload_bytes)
    extents_at_most = min(units if units < RUN_UNITS else units // RUN_UNITS + 1, MAX_EXTENTS)
    return _PUT_BYTES + 8 * (extents_at_most + leaf_count(payload_bytes)) + key_bytes + _TAIL_BYTES + 16
