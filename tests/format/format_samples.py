"""Small valid structs for the format tests, all from fixed values."""

from __future__ import annotations

import random

from xxhash import xxh3_128_digest

from blockkv.format import geometry, record
from blockkv.format.page import PAGE_BYTES, PageKind, encode_page
from blockkv.format.superblock import Superblock

STORE_ID = bytes(range(16))
CHECKPOINT_ID = bytes(range(100, 116))
PREDECESSOR = bytes(range(200, 216))
SECTOR_BYTES = 512

GEOMETRY = geometry.plan(16 << 20, 512, 1 << 20)


def dice_bytes(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


def put(
    log_sequence: int, key: bytes = b"key", payload_bytes: int = 100_000, start_unit: int = 0
) -> list[bytes]:
    """The records of a chunk in a single extent."""
    return record.encode_put(
        log_sequence,
        record.key_digest(key),
        payload_bytes,
        1,
        dice_bytes(log_sequence, 16),
        [(start_unit, geometry.unit_count(payload_bytes))] if payload_bytes else [],
        dice_bytes(log_sequence, 8 * geometry.leaf_count(payload_bytes)),
        key,
    )


def superblock(**changes: object) -> Superblock:
    values: dict[str, object] = {
        "uuid": STORE_ID,
        "generation": 6,
        "epoch": 3,
        "geometry": GEOMETRY,
        "checkpoint_area": 1,
        "checkpoint_id": CHECKPOINT_ID,
        "checkpoint_page_count": 2,
        "checkpoint_record_count": 40,
        "log_sequence": 77,
        "replay_from_sequence": 9,
        "replay_predecessor": PREDECESSOR,
        "epoch_start_sequence": 9,
        "clean": False,
        "next_layout_id": 5,
        "average_chunk_bytes": 1 << 20,
        "holder_boot_id": "0f2f66e0-0000-4000-8000-000000000001",
        "holder_pid": 4242,
        "holder_host": "node-7",
        "namespace_nguid": bytes(range(16, 32)),
        "namespace_eui64": bytes(range(32, 40)),
        "namespace_serial": "S5XXNG0R",
        "label": "prefix cache",
        "scrub_sequence": 50,
    }
    return Superblock(**{**values, **changes})  # type: ignore[arg-type]


def page(kind: PageKind, sequence: int = 9, records: list[bytes] | None = None, **changes: object) -> bytes:
    values: dict[str, object] = {
        "store_id": STORE_ID,
        "epoch": 3,
        "link": PREDECESSOR if kind == PageKind.JOURNAL else CHECKPOINT_ID,
        "sealed_sequence": sequence - 1 if kind == PageKind.JOURNAL else 0,
    }
    records = [*put(5), record.encode_delete(6, record.key_digest(b"gone"))] if records is None else records
    values |= {"sequence": sequence, "records": records, **changes}
    return encode_page(kind, **values)  # type: ignore[arg-type]


def with_checksum(content: bytes | bytearray) -> bytes:
    """A slot or page with its checksum made right again, as somebody who forges an image would do."""
    assert len(content) == PAGE_BYTES
    return xxh3_128_digest(bytes(content[16:])) + bytes(content[16:])


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def torn(old: bytes, new: bytes, landed: int) -> bytes:
    """`new` over `old`, where only the sectors whose bit is set in `landed` arrived."""
    return b"".join(
        (new if landed >> sector & 1 else old)[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES]
        for sector in range(PAGE_BYTES // SECTOR_BYTES)
    )
