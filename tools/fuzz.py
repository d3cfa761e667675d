#!/usr/bin/env python3
"""Feed hostile bytes to everything that decodes: an image is an attacker's input.

    tools/fuzz.py --seconds 600 --corpus DIR      guided by coverage (atheris), until something breaks
    tools/fuzz.py --runs 5000 --seed 7            random inputs, all from one seed, without atheris
    tools/fuzz.py FILE ...                        these inputs again, e.g. what was found

Targets, chosen by the first byte of an input: superblock, page, records, checkpoint, journal, layout, open.
For the first six the rest is what is decoded, with its checksum made right half of the time. For `open` the
rest is a list of edits to a sound image: fields of superblocks, pages and records, whole records, pages moved
or torn, bytes overwritten. Checksums, links and sequences are then made right again, or not, so that what
lies behind them is reached as easily as they are.

What must hold
  * nothing but a BlockKVError comes out;
  * what is read from the device, and memory, stay within a few times the image;
  * an open that fails, and one for reading only, wrote nothing;
  * a store that opened is consistent: its own check says so, and so does the next open. What it acknowledged
    is there then, and the bytes of a get are those of the put.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import lzma
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from xxhash import xxh3_128_digest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GUIDED = "--seconds" in sys.argv
if GUIDED:
    import atheris

    instrumented = atheris.instrument_imports(include=["blockkv"])
else:
    instrumented = contextlib.nullcontext()

with instrumented:
    import blockkv
    from blockkv.catalog.layouts import Layout
    from blockkv.errors import BlockKVError
    from blockkv.format import record, superblock
    from blockkv.format.checkpoint import CheckpointReader
    from blockkv.format.fields import StructLayout
    from blockkv.format.geometry import PAGE_BYTES, slot_offsets
    from blockkv.format.journal import Replay
    from blockkv.format.page import PAGE_HEADER, PageKind, checksum_of, decode_page
    from blockkv.testing import OperationKind, SimulatedDevice

GOLDEN = ROOT / "tests" / "format" / "golden"
LONGEST_INPUT_BYTES = 8192
READ_LIMIT_FACTOR = 12
"""Bytes read by one open and everything done to the store, over the size of the image."""
MEMORY_LIMIT_FACTOR = 8
MEMORY_LIMIT_BYTES = 64 << 20
MEMORY_EVERY = 32
"""Memory is measured for one input in so many: it takes three times as long."""
RECORDS = {
    1: record.PUT_RECORD,
    2: record.DELETE_RECORD,
    3: record.LAYOUT_RECORD,
    4: record.KEY_TAIL_RECORD,
}


class Broken(Exception):
    """Something that must hold did not."""


class Source:
    """Numbers and bytes taken from an input; zeros once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def number(self, size_bytes: int) -> int:
        return int.from_bytes(self.take(size_bytes), "little")

    def below(self, limit: int) -> int:
        return self.number(1 if limit <= 256 else 2) % limit if limit > 1 else 0

    def take(self, size_bytes: int) -> bytes:
        piece = self._data[self._at : self._at + size_bytes]
        self._at += size_bytes
        return piece.ljust(size_bytes, b"\0")

    def rest(self) -> bytes:
        return self.take(self.left)

    def value(self, old: int, limit: int) -> int:
        """Mostly what programs stumble over."""
        choice = self.below(16)
        candidates = (0, 1, old + 1, old - 1, limit - 1, limit - 2, limit >> 1, 1 << self.below(64), 1 << 62)
        if choice < len(candidates):
            return candidates[choice] % limit
        if choice < 12:
            return (old ^ 1 << self.below(64)) % limit
        return self.number(8) % limit


# -- images ------------------------------------------------------------------------------------------------


@dataclass
class Page:
    """A metadata page taken apart. `raw` overwrites bytes of it, wherever they lie."""

    header: dict[str, Any]
    records: list[bytes]
    raw: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes, kind: PageKind, store_id: bytes, sequence: int, data_units: int) -> Page:
        found = decode_page(data, kind=kind, store_id=store_id, sequence=sequence)
        views = record.iterate_records(found.body, found.record_count, data_units)
        return cls(PAGE_HEADER.unpack_from(data), [view[3] for view in views])

    def encode(self) -> bytes:
        self.header["reserved"] = self.header.get("reserved", bytes(2))
        data = bytearray(pack(PAGE_HEADER, self.header) + b"".join(self.records))
        data = data.ljust(PAGE_BYTES, b"\0")
        for offset, piece in self.raw.items():
            data[offset : offset + len(piece)] = piece
        return bytes(data[:PAGE_BYTES])


@dataclass
class Image:
    """A sound image taken apart: what edits work on."""

    device: SimulatedDevice
    superblock: dict[str, Any]
    checkpoint: list[Page]
    journal: list[Page]

    @property
    def pages(self) -> list[Page]:
        return self.checkpoint + self.journal

    def copy(self) -> Image:
        return Image(
            self.device.clone(),
            dict(self.superblock),
            *([Page(dict(page.header), list(page.records)) for page in pages]
              for pages in (self.checkpoint, self.journal)),
        )  # fmt: skip


def pack(layout: StructLayout, values: dict[str, Any]) -> bytes:
    """A struct of values that need not make sense."""
    return layout.struct.pack(
        *(
            value.encode() if isinstance(value := values.get(one.name, b""), str) else value
            for one in layout.fields
        )
    )


def sealed(data: bytes) -> bytes:
    """A slot or page with its checksum made right."""
    return xxh3_128_digest(data[16:]) + data[16:]


def take_apart(device: SimulatedDevice) -> Image:
    slots = [device.peek(offset, PAGE_BYTES) for offset in slot_offsets(device.limits.size_bytes)]
    found = superblock.choose(slots)
    raw = slots[superblock.slots_of(found.generation)[0]]
    units = found.geometry.data_units
    checkpoint = [
        Page.of(
            device.peek(found.checkpoint_zone.offset_bytes + index * PAGE_BYTES, PAGE_BYTES),
            PageKind.CHECKPOINT,
            found.uuid,
            index,
            units,
        )
        for index in range(found.checkpoint_page_count)
    ]

    def read_page(sequence: int) -> bytes:
        index = sequence % found.geometry.journal_pages
        return device.peek(found.geometry.journal_offset(index), PAGE_BYTES)

    journal = [
        Page.of(read_page(page.sequence), PageKind.JOURNAL, found.uuid, page.sequence, units)
        for page in Replay(read_page, found)
    ]
    values = superblock.SUPERBLOCK.unpack_from(raw)
    return Image(device, {**values, "reserved": bytes(superblock.RESERVED_BYTES)}, checkpoint, journal)


def store_of_version_1() -> SimulatedDevice:
    data = lzma.decompress((GOLDEN / "store.v1.xz").read_bytes())
    device = SimulatedDevice(len(data))
    for start in range(0, len(data), PAGE_BYTES):
        if any(unit := data[start : start + PAGE_BYTES]):
            device.poke(start, unit)
    return device


def scattered_store(seed: int) -> SimulatedDevice:
    """Chunks of every form in several extents, keys of every length, deletes; killed with a journal left."""
    rng = random.Random(seed)  # noqa: S311
    device = SimulatedDevice(8 << 20)
    blockkv.format(device, average_chunk="16KiB", journal=24 * PAGE_BYTES)
    store = blockkv.open(device, commit_interval_ms=None)
    names: list[str | bytes] = []
    for step in range(60):
        key: str | bytes = f"key {step}" * rng.choice((1, 1, 5, 400))
        if step % 5 == 0:
            key = b"\xff" + rng.randbytes(rng.choice((3, 30)))
        size = rng.choice((1, 100, 4096, 5000, 70_000, 200_000))
        flat = torch.arange(size, dtype=torch.uint8) + step
        value: Any = rng.choice((flat, [flat, flat[:1]], {"k": flat, "v": flat.view(1, -1)}))
        store.put(key, value)
        names.append(key)
        if rng.random() < 0.3:
            store.delete(names.pop(rng.randrange(len(names))))
        if step % 7 == 0:
            store.commit()
        if step == 40:
            store.checkpoint()
    store.commit()
    return device.clone()


@functools.cache
def images() -> tuple[Image, ...]:
    found = tuple(map(take_apart, (store_of_version_1(), scattered_store(1), scattered_store(2))))
    assert all(image.journal and image.checkpoint for image in found)
    return found


def edit(source: Source) -> SimulatedDevice:
    """The image an input stands for."""
    image = images()[source.below(len(images()))].copy()
    policy = source.number(1)
    copies: list[tuple[int, int, int]] = []
    for _ in range(24):
        if not source.left:
            break
        edit_once(source, image, copies)
    put_together(image, policy)
    device = image.device
    for origin, target, length_bytes in copies:
        device.poke(target, device.peek(origin, length_bytes))
    return device


def edit_once(source: Source, image: Image, copies: list[tuple[int, int, int]]) -> None:
    verb = source.below(10)
    if verb == 0:
        change_field(source, superblock.SUPERBLOCK, image.superblock)
        return
    if verb == 1:
        offset = source.number(4) % image.device.limits.size_bytes
        piece = source.take(source.below(64))
        if offset + len(piece) <= image.device.limits.size_bytes:
            image.device.poke(offset, piece)
        return
    if verb == 2:
        count = image.device.limits.size_bytes // 512
        copies.append((source.number(4) % count * 512, source.number(4) % count * 512, 512))
        return
    page = image.pages[source.below(len(image.pages))]
    index = source.below(len(page.records)) if page.records else 0
    if verb == 3:
        change_field(source, PAGE_HEADER, page.header)
    elif verb == 4:
        offset = source.below(PAGE_BYTES)
        page.raw[offset] = source.take(1 + source.below(32))
    elif verb == 5 and page.records:
        del page.records[index]
        count_records(page)
    elif verb == 6:
        page.records.insert(index, new_record(source, image))
        count_records(page)
    elif verb == 7 and page.records:
        other = image.pages[source.below(len(image.pages))]
        other.records.insert(source.below(len(other.records) + 1), page.records[index])
        count_records(other)
    elif page.records:
        change_record(source, page, index)


def change_field(source: Source, layout: StructLayout, values: dict[str, Any]) -> None:
    one = layout.fields[source.below(len(layout.fields))]
    old = values.get(one.name, b"")
    if isinstance(old, int):
        values[one.name] = source.value(old, 1 << 8 * one.size_bytes)
    else:
        values[one.name] = source.take(one.size_bytes)


def count_records(page: Page) -> None:
    page.header["record_count"] = len(page.records)
    page.header["body_bytes"] = sum(map(len, page.records)) & 0xFFFF


def change_record(source: Source, page: Page, index: int) -> None:
    raw = page.records[index]
    layout = RECORDS.get(raw[2])
    if layout is None or len(raw) < layout.size_bytes:
        return
    fixed = layout.struct.unpack_from(raw)
    values = dict(zip((one.name for one in layout.fields), fixed, strict=True))
    rest = bytearray(raw[layout.size_bytes :])
    if source.below(3):
        change_field(source, layout, values)
    elif rest:
        offset = source.below(len(rest))
        if source.below(2) and offset + 8 <= len(rest):
            (old,) = struct.unpack_from("<Q", rest, offset)
            rest[offset : offset + 8] = source.value(old, 1 << 64).to_bytes(8, "little")
        else:
            piece = source.take(1 + source.below(16))
            rest[offset : offset + len(piece)] = piece
    page.records[index] = pack(layout, values) + bytes(rest)
    count_records(page)


def new_record(source: Source, image: Image) -> bytes:
    """A record that is well formed by itself, and fits nothing else."""
    log_sequence = source.value(image.superblock["log_sequence"], 1 << 64)
    everything = [raw for page in image.pages for raw in page.records]
    digests = [raw[16:48] for raw in everything if raw[2] in (1, 2)] or [bytes(32)]
    digest = digests[source.below(len(digests))]
    operation = source.below(4)
    if operation == 0:
        return record.encode_delete(log_sequence, digest)
    if operation == 1:
        body = source.take(source.below(200))
        if source.below(2):
            name = source.take(8).decode(errors="replace")
            dtype = ("uint8", "bfloat16", "qint8", "onnx", "bits8", "float")[source.below(6)]
            shape = [source.value(1, 1 << 64) for _ in range(source.below(4))]
            body = b"J" + json.dumps(["list", [[name, dtype, shape]] * (1 + source.below(8))]).encode()
        return record.encode_layout(log_sequence, source.value(1, 1 << 32), body[: record.LAYOUT_BODY_MAX])
    if operation == 2:
        tail = source.take(source.below(64))
        padding = -(50 + len(tail)) % 8
        fixed = record.KEY_TAIL_RECORD.pack(
            record_bytes=50 + len(tail) + padding, operation=4, log_sequence=log_sequence, digest=digest,
            tail_bytes=len(tail)
        )  # fmt: skip
        return fixed + tail + bytes(padding)
    extents = [(source.below(512), 1 + source.below(40)) for _ in range(1 + source.below(4))]
    payload_bytes = sum(count for _, count in extents) * PAGE_BYTES - source.below(PAGE_BYTES)
    leaves = bytes(8 * record.leaf_count(payload_bytes))
    key = source.take(source.below(40))
    layout_id = source.value(1, 1 << 32)
    (raw, *_) = record.encode_put(
        log_sequence, digest, payload_bytes, layout_id, source.take(16), extents, leaves, key, True
    )
    return raw


def put_together(image: Image, policy: int) -> None:
    """Write the parts back, made consistent again as far as `policy` says."""
    seal = (lambda data: data) if policy & 3 == 3 else sealed
    relink = policy & 12 != 12
    values, device = image.superblock, image.device
    size_bytes = device.limits.size_bytes
    generation = values["generation"]
    offsets = slot_offsets(size_bytes)
    if policy & 16:  # and no older one to fall back to
        for offset in offsets:
            device.poke(offset, bytes(PAGE_BYTES))
    for slot_index in superblock.slots_of(generation):
        data = pack(superblock.SUPERBLOCK, {**values, "slot_index": slot_index})
        device.poke(offsets[slot_index], seal(data))

    def place(offset: int, data: bytes) -> None:
        if 0 <= offset <= size_bytes - PAGE_BYTES:
            device.poke(offset, data)

    area = "checkpoint_b" if values["checkpoint_area"] else "checkpoint_a"
    for index, page in enumerate(image.checkpoint):
        if relink:
            page.header |= {"link": values["checkpoint_id"], "store_id": values["uuid"]}
        place(values[f"{area}_offset_bytes"] + index * PAGE_BYTES, seal(page.encode()))
    predecessor = values["replay_predecessor"]
    first = values["replay_from_sequence"]
    journal_pages = max(1, values["journal_size_bytes"] // PAGE_BYTES)
    for index, page in enumerate(image.journal):
        if relink:
            page.header |= {"link": predecessor, "store_id": values["uuid"]}
            if policy & 32:
                page.header |= {"sequence": (first + index) % (1 << 64), "epoch": values["epoch"]}
                page.header["sealed_sequence"] = min(page.header["sealed_sequence"], page.header["sequence"])
        data = seal(page.encode())
        predecessor = checksum_of(data)
        place(values["journal_offset_bytes"] + (first + index) % journal_pages * PAGE_BYTES, data)


# -- targets -----------------------------------------------------------------------------------------------


@functools.cache
def reference() -> superblock.Superblock:
    image = images()[0]
    return superblock.decode(
        image.device.peek(slot_offsets(8 << 20)[image.superblock["slot_index"]], PAGE_BYTES),
        image.superblock["slot_index"],
    )


def page_of(source: Source) -> bytes:
    seal = source.number(1) & 1
    data = source.take(PAGE_BYTES)
    return sealed(data) if seal else data


def fuzz_superblock(source: Source) -> None:
    slots = [b""] * 8
    slot_index = source.below(8)
    slots[slot_index] = page_of(source)
    found = superblock.choose(slots)
    again = found.encode(slot_index)
    if superblock.decode(again, slot_index) != found:
        raise Broken("a superblock that was accepted reads differently once encoded")


def check_records(body: bytes, record_count: int, data_units: int) -> None:
    for operation, _, _, raw in record.iterate_records(body, record_count, data_units):
        one = record.decode(raw)
        if operation == record.Operation.PUT:
            assert isinstance(one, record.PutRecord)
            if one.extents != record.extents_of(raw) or one.root != record.root_of(raw):
                raise Broken("two ways to read one record differ")
            for start, count in one.extents:
                if not 0 < count <= data_units - start:
                    raise Broken(f"an extent outside the data zone: {start}, {count}")


def fuzz_page(source: Source) -> None:
    kind = PageKind(1 + source.below(2))
    data = page_of(source)
    page = decode_page(
        data,
        kind=kind,
        store_id=data[16:32],
        sequence=int.from_bytes(data[48:56], "little"),
        link=data[32:48],
    )
    check_records(page.body, page.record_count, reference().geometry.data_units)


def fuzz_records(source: Source) -> None:
    count = source.below(64)
    check_records(source.rest(), count, reference().geometry.data_units)


def fuzz_checkpoint(source: Source) -> None:
    found = dataclasses.replace(reference(), checkpoint_page_count=source.below(4))
    pieces = [page_of(source) for _ in range(found.checkpoint_page_count)]
    reader = CheckpointReader(pieces, found)
    count = sum(1 for _ in reader)
    if count != reader.record_count or reader.damaged_pages > found.checkpoint_page_count:
        raise Broken("the checkpoint's counts do not add up")


def fuzz_journal(source: Source) -> None:
    found = reference()
    pages: dict[int, bytes] = {}
    predecessor = found.replay_predecessor
    relink = source.number(1) & 1
    for sequence in range(found.replay_from_sequence, found.replay_from_sequence + 1 + source.below(4)):
        data = page_of(source)
        if relink:
            data = sealed(data[:32] + predecessor + sequence.to_bytes(8, "little") + data[56:])
        pages[sequence] = data
        predecessor = checksum_of(data)
    replay = Replay(lambda sequence: pages.get(sequence, b""), found)
    accepted = [page.sequence for page in replay]
    if replay.end.next_sequence != found.replay_from_sequence + len(accepted):
        raise Broken("the end of the log is not behind its last page")


def fuzz_layout(source: Source) -> None:
    try:
        layout = Layout.decode(source.rest())
    except ValueError:
        return
    with contextlib.suppress(BlockKVError):
        assert layout.payload_bytes > 0
    assert str(layout)
    assert layout.body


# -- open --------------------------------------------------------------------------------------------------


def writes(device: SimulatedDevice) -> list[str]:
    kinds = (OperationKind.WRITE, OperationKind.DISCARD)
    return [str(one) for one in device.operations() if one.kind in kinds]


def fuzz_open(source: Source) -> None:
    device = edit(source)
    looked_at = device.clone()
    with contextlib.suppress(BlockKVError):
        store = blockkv.open(looked_at, read_only=True, commit_interval_ms=None)
        use(store)
        store.close()
    if writes(looked_at):
        raise Broken(f"a read-only open wrote: {writes(looked_at)}")
    check_amount(looked_at)
    try:
        store = blockkv.open(device, commit_interval_ms=None)
    except BlockKVError:
        if writes(device):
            raise Broken(f"an open that failed wrote: {writes(device)}") from None
        raise
    keys = use(store)
    expected = change(store, keys)
    check_amount(device)
    with blockkv.open(device.clone(), commit_interval_ms=None) as again:
        found = {key: again.entry(key) is not None for key in expected}
        if found != expected:
            raise Broken(f"acknowledged and not so: {[key for key in found if found[key] != expected[key]]}")
        use(again)


def use(store: blockkv.Store) -> list[str | bytes]:
    """Read everything; returns the keys that gave their chunk."""
    keys = list(store.keys())
    store.stats()
    store.info()
    good: list[str | bytes] = []
    for key in keys:
        store.entry(key)
        with contextlib.suppress(BlockKVError):
            value = store.get(key)
            if value is not None:
                good.append(key)
    report = store.check(payload=True)
    if report.problems:
        raise Broken(f"inconsistent: {report.problems}")
    return good


def change(store: blockkv.Store, keys: list[str | bytes]) -> dict[str | bytes, bool]:
    """Delete and put; returns which keys must be there from now on and which must not, also after a close."""
    expected: dict[str | bytes, bool] = {}
    try:
        for key in keys[::3]:
            store.delete(key)
            expected[key] = False
        fresh = ["fresh 1", "fresh 2"]
        payload = torch.arange(9000, dtype=torch.int16)
        for key in fresh:
            store.put(key, payload)
        store.commit()
        for key in fresh:
            value = store.get(key)
            if value is not None and not torch.equal(value, payload):
                raise Broken(f"{key} gave other bytes than were put")
            expected[key] = store.contains(key)
        store.checkpoint()
    except BlockKVError:
        expected = {}
    with contextlib.suppress(BlockKVError):
        store.close()
        return expected
    return {}


def check_amount(device: SimulatedDevice) -> None:
    read_bytes = device.counters()["device_read_bytes"]
    if read_bytes > READ_LIMIT_FACTOR * device.limits.size_bytes:
        raise Broken(f"{read_bytes} bytes read from a device of {device.limits.size_bytes}")


TARGETS: dict[str, Callable[[Source], None]] = {
    "superblock": fuzz_superblock,
    "page": fuzz_page,
    "records": fuzz_records,
    "checkpoint": fuzz_checkpoint,
    "journal": fuzz_journal,
    "layout": fuzz_layout,
    "open": fuzz_open,
}
_NAMES = (*TARGETS, "open", "open", "open")


def run_one(data: bytes) -> None:
    """Carry out one input. Raises whatever must not come out."""
    source = Source(data[1:])
    with contextlib.suppress(BlockKVError):
        TARGETS[_NAMES[data[0] % len(_NAMES)] if data else "open"](source)


def run_measured(data: bytes) -> None:
    """The same, with a look at memory."""
    images(), reference()
    tracemalloc.start()
    try:
        run_one(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak_bytes > MEMORY_LIMIT_BYTES + MEMORY_LIMIT_FACTOR * (8 << 20):
        raise Broken(f"{peak_bytes} bytes of memory for an image of {8 << 20}")


# -- drivers -----------------------------------------------------------------------------------------------


def seeds() -> Iterator[tuple[str, bytes]]:
    """Inputs to start from: the golden files for what decodes, a few edits of every kind for `open`."""
    names = list(_NAMES)
    golden = {path.name: lzma.decompress(path.read_bytes()) for path in sorted(GOLDEN.glob("*.xz"))}
    slot, page = golden["superblock-slot-2.v1.xz"], golden["journal-page-9.v1.xz"]
    checkpoint = golden["checkpoint-pages.v1.xz"]
    pages = [checkpoint[start : start + PAGE_BYTES] for start in range(0, len(checkpoint), PAGE_BYTES)]
    for seal in (b"\0", b"\1"):
        yield f"superblock-{seal[0]}", bytes([names.index("superblock"), 2]) + seal + slot
        yield f"journal-{seal[0]}", bytes([names.index("journal"), seal[0], 0]) + seal + page
        yield f"page-{seal[0]}", bytes([names.index("page"), 0]) + seal + page
        yield (
            f"checkpoint-{seal[0]}",
            bytes([names.index("checkpoint"), 3]) + b"".join(seal + one for one in pages[:3]),
        )
    for number, one in enumerate((page, *pages)):
        count, body_bytes = struct.unpack_from("<HH", one, 74)
        yield f"records-{number}", bytes([names.index("records"), count]) + one[80 : 80 + body_bytes]
    for number, image in enumerate(images()):
        for index, raw in enumerate(raw for page in image.pages for raw in page.records if raw[2] == 3):
            yield f"layout-{number}-{index}", bytes([names.index("layout")]) + record.decode(raw).body  # type: ignore[union-attr]
    rng = random.Random(1)  # noqa: S311
    for number in range(60):
        yield f"open-{number}", random_input(rng, "open")


def random_input(rng: random.Random, target: str | None = None) -> bytes:
    """An input for one target. Edits are few, mostly: some get further than many."""
    if target is None:
        target = rng.choice(_NAMES)
    number = _NAMES.index(target)
    if target == "open":
        policy = rng.choice((0, 0, 0, 16, 16, 32, 48, 48, rng.randrange(256)))
        return bytes((number, rng.randrange(256), policy)) + rng.randbytes(
            rng.choice((6, 10, 16, 24, 40, 80, 200))
        )
    data = bytearray(rng.choice([sample for sample in _samples() if sample[0] == number]))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(1, len(data))
        choice = rng.random()
        if choice < 0.4:
            data[at] ^= 1 << rng.randrange(8)
        elif choice < 0.8:
            value = rng.choice((0, 1, 255, rng.randrange(256)))
            data[at : at + rng.choice((1, 1, 2, 4, 8))] = bytes([value]) * rng.choice((1, 2, 4, 8))
        else:
            data[at : at + rng.randrange(8)] = rng.randbytes(rng.randrange(8))
    return bytes(data)


@functools.cache
def _samples() -> tuple[bytes, ...]:
    return tuple(data for name, data in seeds() if not name.startswith("open"))


def run_random(runs: int, seed: int, progress: Callable[[], None] = lambda: None) -> bytes | None:
    """Carry out `runs` inputs drawn from `seed`. Returns the first that broke something, and logs how."""
    for number in range(runs):
        data = random_input(random.Random(f"{seed}.{number}"))  # noqa: S311
        try:
            (run_measured if number % MEMORY_EVERY == 0 else run_one)(data)
        except Exception:
            logging.getLogger("fuzz").exception("input %d of seed %d: %s", number, seed, data.hex())
            return data
        progress()
    return None


def run_guided(seconds: int, corpus: Path, libfuzzer: list[str]) -> None:
    """Until something breaks, or `seconds` are over. Never returns: libFuzzer ends the process."""
    corpus.mkdir(parents=True, exist_ok=True)
    for name, data in seeds():
        (corpus / f"seed-{name}").write_bytes(data)
    count = 0

    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        (run_measured if count % (32 * MEMORY_EVERY) == 0 else run_one)(data)

    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST_INPUT_BYTES}",
        f"-artifact_prefix={corpus}.",
        "-timeout=60",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
        *libfuzzer,
        str(corpus),
    ]
    images(), reference()
    atheris.Setup(arguments, one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="*", type=Path, help="files with inputs to run again")
    parser.add_argument("--seconds", type=int, help="how long to fuzz, guided by coverage")
    parser.add_argument("--corpus", type=Path, help="where inputs are kept (default: a temporary directory)")
    parser.add_argument("--runs", type=int, default=2000, help="how many random inputs (default 2000)")
    parser.add_argument("--seed", type=int, default=1)
    options, libfuzzer = parser.parse_known_args()
    logging.getLogger("blockkv").setLevel(logging.CRITICAL)
    if options.inputs:
        for path in options.inputs:
            run_measured(path.read_bytes())
        return 0
    if options.seconds is not None:
        corpus = options.corpus or Path(tempfile.mkdtemp(prefix="blockkv-fuzz.")) / "corpus"
        run_guided(options.seconds, corpus, libfuzzer)
    console = Console(stderr=True)
    started = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("fuzzing", total=options.runs)
        broken = run_random(options.runs, options.seed, lambda: bar.advance(task))
    if broken is None:
        print(
            f"{options.runs} inputs of seed {options.seed}, nothing broke, {time.monotonic() - started:.1f} s"
        )
    return int(broken is not None)


if __name__ == "__main__":
    sys.exit(main())
