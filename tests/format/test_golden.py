"""Stores of version 1 stay readable: golden files, read by the package and by an independent decoder."""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path
from typing import Any

import independent_decoder
import numpy
import pytest
from format_samples import flipped

import blockkv
from blockkv.format import geometry, record, superblock
from blockkv.format.checkpoint import CheckpointReader, pack
from blockkv.format.geometry import PAGE_BYTES, Geometry, Zone
from blockkv.format.journal import Replay, build_pages
from blockkv.format.page import PageKind, decode_page, encode_page
from blockkv.format.record import DeleteRecord, KeyTailRecord, LayoutRecord, PutRecord, Record
from blockkv.testing import SimulatedDevice

GOLDEN = Path(__file__).parent / "golden"
VALUES = json.loads((GOLDEN / "values.v1.json").read_text())


def golden(name: str) -> bytes:
    return lzma.decompress((GOLDEN / name).read_bytes())


SLOT = golden("superblock-slot-2.v1.xz")
JOURNAL_PAGE = golden("journal-page-9.v1.xz")
CHECKPOINT = golden("checkpoint-pages.v1.xz")
CHECKPOINT_PAGES = [CHECKPOINT[start : start + PAGE_BYTES] for start in range(0, len(CHECKPOINT), PAGE_BYTES)]
STORE_ID = bytes.fromhex(VALUES["superblock"]["uuid"])


def plain(value: Any) -> Any:
    """As in values.v1.json: bytes in hex, tuples as lists."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def record_values(one: Record) -> dict[str, Any]:
    operation = {PutRecord: 1, DeleteRecord: 2, LayoutRecord: 3, KeyTailRecord: 4}[type(one)]
    return plain({"operation": operation, **dataclasses.asdict(one)})


# -- the independent decoder -------------------------------------------------------------------------------


def test_the_independent_decoder_shares_no_code() -> None:
    source = Path(independent_decoder.__file__).read_text()
    for allowed in ('b"blockkv\\0"', 'b"blockkv 1 ', "docs/format.md"):
        source = source.replace(allowed, "")
    assert "blockkv" not in source


def test_the_independent_decoder_reads_the_golden_files() -> None:
    slot = plain(independent_decoder.superblock(SLOT, 2))
    assert not any(bytes.fromhex(slot.pop("reserved")))
    assert slot.pop("array") is None
    assert slot == VALUES["superblock"]
    assert plain(independent_decoder.page(JOURNAL_PAGE, 1, STORE_ID, 9)) == VALUES["journal_page"]
    pages = [
        plain(independent_decoder.page(one, 2, STORE_ID, index)) for index, one in enumerate(CHECKPOINT_PAGES)
    ]
    assert pages == VALUES["checkpoint_pages"]


# -- the package -------------------------------------------------------------------------------------------


def golden_superblock() -> superblock.Superblock:
    return superblock.decode(SLOT, 2)


def test_the_package_reads_the_golden_superblock() -> None:
    found = golden_superblock()
    values = dataclasses.asdict(found)
    del values["reserved"]
    assert values.pop("array") is None
    assert values.pop("encryption") is None
    zones = values.pop("geometry")
    values |= {name: list(zone.values()) if isinstance(zone, dict) else zone for name, zone in zones.items()}
    assert plain(values) == VALUES["superblock"]


def test_the_package_writes_the_golden_superblock() -> None:
    values = {
        name: bytes.fromhex(value) if isinstance(getattr(golden_superblock(), name, None), bytes) else value
        for name, value in VALUES["superblock"].items()
    }
    zones = {name: Zone(*values.pop(name)) for name in ("checkpoint_a", "checkpoint_b", "journal", "data")}
    shape = Geometry(values.pop("device_bytes"), values.pop("lba_bytes"), **zones)
    assert superblock.Superblock(geometry=shape, **values).encode(2) == SLOT


def test_the_package_plans_the_golden_zones() -> None:
    shape = golden_superblock().geometry
    assert geometry.plan(shape.device_bytes, shape.lba_bytes, 1 << 20) == shape


@pytest.mark.parametrize(
    ("data", "kind", "sequence", "values"),
    [
        (JOURNAL_PAGE, PageKind.JOURNAL, 9, VALUES["journal_page"]),
        *[
            (one, PageKind.CHECKPOINT, index, VALUES["checkpoint_pages"][index])
            for index, one in enumerate(CHECKPOINT_PAGES)
        ],
    ],
    ids=["journal", "checkpoint-0", "checkpoint-1", "checkpoint-2"],
)
def test_the_package_reads_and_writes_the_golden_pages(
    data: bytes, kind: PageKind, sequence: int, values: dict[str, Any]
) -> None:
    found = decode_page(data, kind=kind, store_id=STORE_ID, sequence=sequence)
    for name in ("checksum", "link", "epoch", "sealed_sequence"):
        assert plain(getattr(found, name)) == values[name]
    views = list(
        record.iterate_records(found.body, found.record_count, golden_superblock().geometry.data_units)
    )
    assert [record_values(record.decode(view[3])) for view in views] == values["records"]
    again = encode_page(
        kind, STORE_ID, sequence, found.epoch, found.link, found.sealed_sequence, [view[3] for view in views]
    )
    assert again == data


def encode(one: Record) -> list[bytes]:
    if isinstance(one, PutRecord):
        return record.encode_put(
            one.log_sequence,
            one.digest,
            one.payload_bytes,
            one.layout_id,
            one.root,
            one.extents,
            one.leaves,
            one.key,
            one.key_is_text,
        )
    if isinstance(one, DeleteRecord):
        return [record.encode_delete(one.log_sequence, one.digest)]
    assert isinstance(one, LayoutRecord)
    return [record.encode_layout(one.log_sequence, one.layout_id, one.body)]


def test_the_package_writes_the_golden_checkpoint_and_journal() -> None:
    current = golden_superblock()
    records: list[bytes] = []
    decoded = [record.decode(view[3]) for view in CheckpointReader([CHECKPOINT], current)]
    for one, following in zip(decoded, [*decoded[1:], None], strict=True):
        if isinstance(following, KeyTailRecord):
            assert isinstance(one, PutRecord)
            one = dataclasses.replace(one, key=one.key + following.tail)
            assert record.key_digest(one.key) == one.digest
        if not isinstance(one, KeyTailRecord):
            records += encode(one)
    assert b"".join(pack(records, current.uuid, current.checkpoint_id, 2)) == CHECKPOINT
    (page,) = Replay(lambda sequence: JOURNAL_PAGE if sequence == 9 else b"", current)
    records = [raw for view in page.records for raw in encode(record.decode(view[3]))]
    pages = build_pages(
        records,
        9,
        current.replay_predecessor,
        current.epoch,
        current.uuid,
        page.sealed_sequence,
        current.geometry.journal_pages,
    )
    assert pages == [(9, JOURNAL_PAGE)]


# -- both on one image -------------------------------------------------------------------------------------


def small_image() -> tuple[bytes, dict[bytes, bytes]]:
    """A store as the document describes it, with a checkpoint, a journal, and chunks of every shape."""
    shape = geometry.plan(8 << 20, 512, 1 << 20, 6 * PAGE_BYTES)
    image = bytearray(8 << 20)
    layout = b'J["tensor",[["","uint8",[1]]]]'
    contents: dict[bytes, bytes] = {}

    def put(log_sequence: int, key: bytes, payload: bytes, extents: list[tuple[int, int]]) -> list[bytes]:
        done = 0
        for start, count in extents:
            part = payload[done : done + count * PAGE_BYTES]
            image[shape.unit_offset(start) : shape.unit_offset(start) + len(part)] = part
            done += len(part)
        size = geometry.leaf_bytes_for(len(payload))
        leaves = b"".join(
            independent_decoder.xxhash.xxh3_64_intdigest(payload[at : at + size]).to_bytes(8, "little")
            for at in range(0, len(payload), size)
        )
        digest = record.key_digest(key)
        root = record.root_checksum(digest, len(payload), record.layout_checksum(layout), leaves)
        contents[key] = payload
        return record.encode_put(log_sequence, digest, len(payload), 1, root, extents, leaves, key)

    long_key = b"long" * 1000
    in_checkpoint = [
        record.encode_layout(1, 1, layout),
        *put(2, b"small", b"payload" * 100, [(3, 1)]),
        *put(3, b"gone", b"x", [(4, 1)]),
        *put(4, b"scattered", bytes(range(256)) * 2000, [(64, 64), (256, 32), (5, 29)]),
    ]
    in_journal = [
        *put(5, long_key, b"y" * 5000, [(96 + 64, 2)]),
        record.encode_delete(6, record.key_digest(b"gone")),
    ]
    del contents[b"gone"]
    identity = bytes(range(16))
    checkpoint_pages = list(pack(in_checkpoint, identity, identity, 1))
    area = shape.checkpoint_b.offset_bytes
    image[area : area + len(checkpoint_pages) * PAGE_BYTES] = b"".join(checkpoint_pages)
    current = superblock.Superblock(
        identity, 2, 2, shape, 1, identity, len(checkpoint_pages), 4, 4, 11, bytes(16), 11, False, 2
    )
    for index, page in build_pages(in_journal, 11, bytes(16), 2, identity, 10, shape.journal_pages):
        image[shape.journal_offset(index) : shape.journal_offset(index) + PAGE_BYTES] = page
    for generation in (1, 2):
        one = dataclasses.replace(current, generation=generation, clean=generation == 1)
        for slot_index in superblock.slots_of(generation):
            offset = shape.slot_offsets[slot_index]
            image[offset : offset + PAGE_BYTES] = one.encode(slot_index)
    return bytes(image), contents


def test_the_independent_decoder_reads_a_whole_image() -> None:
    image, contents = small_image()
    assert independent_decoder.newest_superblock(image)["generation"] == 2
    assert independent_decoder.chunks(image) == contents


def test_the_independent_decoder_refuses_damaged_payload() -> None:
    image, contents = small_image()
    assert contents[b"small"] in image
    damaged = bytearray(image)
    damaged[image.index(contents[b"small"]) + 10] ^= 1
    with pytest.raises(independent_decoder.Refused, match="leaves"):
        independent_decoder.chunks(bytes(damaged))


STORE = golden("store.v1.xz")
SMALL = numpy.arange(2 * 8 * 128, dtype=numpy.float16).tobytes()
STORE_CONTENTS = {
    b"small": SMALL,
    b"\0\xffbinary": b"bytes " * 1000,
    b"k and v": bytes([3]) * 150_000 + bytes([4]) * 150_000,
    b"prefix/" + b"0123456789abcdef" * 255: SMALL,
}
"""What the store left when it was killed: two chunks in the checkpoint, two and a delete in the journal."""


def test_the_independent_decoder_reads_a_store_of_version_1() -> None:
    assert independent_decoder.newest_superblock(STORE)["label"] == "golden"
    assert independent_decoder.chunks(STORE) == STORE_CONTENTS


def test_the_package_opens_a_store_of_version_1() -> None:
    device = SimulatedDevice(len(STORE), lba_bytes=4096)
    for start in range(0, len(STORE), PAGE_BYTES):
        if any(unit := STORE[start : start + PAGE_BYTES]):
            device.poke(start, unit)
    with blockkv.open(device) as store:
        keys = {key.encode() if isinstance(key, str) else key: key for key in store.keys()}  # noqa: SIM118 - a Store is no mapping
        assert {encoded: type(key) for encoded, key in keys.items()} == {
            key: bytes if b"binary" in key else str for key in STORE_CONTENTS
        }
        pair = store.get("k and v")
        expected = ("torch.uint8", (150_000,))
        assert {name: (str(one.dtype), one.shape) for name, one in pair.items()} == {
            "k": expected,
            "v": expected,
        }
        for encoded, key in keys.items():
            found = store.get(key)
            tensors = found.values() if isinstance(found, dict) else [found]
            assert b"".join(one.numpy().tobytes() for one in tensors) == STORE_CONTENTS[encoded]
        assert store.check(payload=True).ok


ENCRYPTED_STORE = golden("encrypted-store.v1.xz")
ENCRYPTED_SECRET = bytes(range(32))
ENCRYPTED_PASSPHRASE = "correct horse battery staple"
ENCRYPTED_CONTENTS = {
    b"small": SMALL,
    b"k and v": bytes([3]) * 5000 + bytes([4]) * 5000,
}
"""One in the checkpoint, one in the journal."""


def test_the_independent_decoder_reads_an_encrypted_store_of_version_1() -> None:
    plain = independent_decoder.decrypted(ENCRYPTED_STORE, ENCRYPTED_SECRET)
    assert independent_decoder.chunks(plain) == ENCRYPTED_CONTENTS


@pytest.mark.parametrize("unlock", [ENCRYPTED_SECRET, blockkv.Passphrase(ENCRYPTED_PASSPHRASE)])
def test_the_package_opens_an_encrypted_store_of_version_1(unlock: Any) -> None:
    device = SimulatedDevice(len(ENCRYPTED_STORE), lba_bytes=4096)
    device.poke(0, ENCRYPTED_STORE)
    with blockkv.open(device, unlock=unlock) as store:
        assert set(store.keys()) == {key.decode() for key in ENCRYPTED_CONTENTS}
        assert store.get("small").numpy().tobytes() == SMALL
        assert store.get("k and v")["v"].numpy().tobytes() == bytes([4]) * 5000
        assert store.check(payload=True).ok


def test_the_independent_decoder_refuses_what_the_package_refuses() -> None:
    for bit in range(0, 8 * PAGE_BYTES, 61):
        with pytest.raises(independent_decoder.Refused):
            independent_decoder.superblock(flipped(SLOT, bit), 2)
        with pytest.raises(independent_decoder.Refused):
            independent_decoder.page(flipped(JOURNAL_PAGE, bit), 1, STORE_ID, 9)
