"""The native engine moves the right bytes: scatter, gather, staging, padding, checksums, validation."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import xxhash
from blockkv._native import ffi
from engine_tools import ENGINES, MIB, Memory, batch_of, engine_on, one_extent, run, thread_names
from engine_workload import SIZE_BYTES, Workload, expected_leaves
from hypothesis import given, settings
from hypothesis import strategies as st

from blockkv.device.base import TRANSFER_FIELDS, UNIT_BYTES, Batch, Direction, Priority
from blockkv.device.engine import checksum_variant, leaf_checksum, leaf_checksums
from blockkv.errors import InvalidArgument

engines = pytest.mark.parametrize("engine", ENGINES)


@engines
def test_random_batches_match_a_copy_in_memory(block_targets, engine: str) -> None:
    with engine_on(block_targets(SIZE_BYTES), engine) as device:
        workload = Workload(device, seed=1)
        for _ in range(40):
            workload.step()
        workload.compare()
        counters = device.counters()
    for name in ("bounced_bytes", "direct_bytes", "coalesced_requests", "hashed_bytes"):
        assert counters[name] > 0


@engines
def test_threads_do_not_disturb_each_other(block_targets, engine: str) -> None:
    share = 16 * MIB
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            workload = Workload(device, seed=number, base=number * share, size=share)
            for _ in range(8):
                workload.step()
            workload.compare()
        except BaseException as error:
            failures.append(error)

    # little staging and few requests in flight, so that everybody has to wait for something
    with engine_on(block_targets(4 * share), engine, depth=4, staging_bytes=MIB, workers=3) as device:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut_of_one_payload(session_image_dir: Path, data: st.DataObject) -> None:
    payload = data.draw(st.integers(1, 40000), label="payload")
    memory, source = Memory(1 << 18), random.Random(payload).randbytes(payload)
    extents, segments, at, offset, position = [], [], 0, 0, 0
    units = -(-payload // UNIT_BYTES)
    while units:
        count = data.draw(st.integers(1, units), label="units")
        offset += UNIT_BYTES * data.draw(st.integers(0, 1), label="gap")
        extents.append((offset, count * UNIT_BYTES))
        offset += count * UNIT_BYTES
        units -= count
    while at < payload:
        length = (
            data.draw(st.integers(1, payload - at), label="segment") if len(segments) < 8 else payload - at
        )
        position += data.draw(st.sampled_from((0, 1, 512 - position % 512, 4096 - position % 4096)))
        segments.append((memory.at(position), length))
        memory.fill(source[at : at + length], position)
        position += length
        at += length
    image = session_image_dir / "any-cut.img"
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(MIB)
    with engine_on(image) as device:
        written = batch_of(Direction.WRITE, [(payload, extents, segments)], leaf_bytes=1000)
        assert run(device, written) == [0]
        assert written.leaves(0) == expected_leaves(source, 1000)
        stored = b"".join(device.read(*extent) for extent in extents)
        assert stored == source + bytes(-payload % UNIT_BYTES)
        memory.fill(bytes(memory.size_bytes))
        read = batch_of(Direction.READ, [(payload, extents, segments)], leaf_bytes=1000)
        assert run(device, read) == [0]
        assert read.leaves(0) == written.leaves(0)
        found = b"".join(memory.read(address - memory.at(0), length) for address, length in segments)
        assert found == source


@engines
@pytest.mark.parametrize("payload", [1, 511, 513, 4095, 4097, 70000])
@pytest.mark.parametrize("misaligned", [0, 3])
def test_padding_is_zero_and_neighbours_stay(
    block_targets, engine: str, payload: int, misaligned: int
) -> None:
    with engine_on(block_targets(MIB), engine) as device:
        device.write(0, b"\xff" * (256 << 10))
        memory = Memory(128 << 10)
        memory.fill(b"\x11" * memory.size_bytes)
        extent = one_extent(UNIT_BYTES, payload)
        segments = [(memory.at(misaligned), payload)]
        assert run(device, batch_of(Direction.WRITE, [(payload, extent, segments)])) == [0]
        end = UNIT_BYTES + extent[0][1]
        stored = device.read(0, 256 << 10)
        assert stored[UNIT_BYTES : UNIT_BYTES + payload] == b"\x11" * payload
        assert stored[UNIT_BYTES + payload : end] == bytes(end - UNIT_BYTES - payload)
        assert set(stored[:UNIT_BYTES]) == set(stored[end:]) == {0xFF}


@pytest.mark.parametrize("direction", list(Direction))
def test_a_leaf_in_hundreds_of_segments(image_dir: Path, direction: Direction) -> None:
    image = image_dir / "leaf.img"
    image.write_bytes(bytes(MIB))
    memory = Memory(MIB)
    source = random.Random(7).randbytes(200 * 1000)
    with engine_on(image) as device:
        device.write(0, source + bytes(-len(source) % UNIT_BYTES))
        memory.fill(source)
        segments = [(memory.at(1000 * number), 1000) for number in range(200)]
        batch = batch_of(direction, [(len(source), one_extent(0, len(source)), segments)], leaf_bytes=131072)
        assert run(device, batch) == [0]
        assert batch.leaves(0) == expected_leaves(source, 131072)
        assert device.counters()["hashed_bytes"] == len(source)


def test_empty_batches_and_empty_payloads_are_done_at_once(image_dir: Path) -> None:
    image = image_dir / "empty.img"
    image.write_bytes(bytes(MIB))
    with engine_on(image) as device:
        assert run(device, Batch(Direction.READ, Priority.LOAD)) == []
        assert run(device, batch_of(Direction.WRITE, [(0, [], [])], leaf_bytes=4096)) == [0]
        finished = threading.Event()
        batch = Batch(Direction.READ, Priority.LOAD)
        batch.on_done = lambda _: finished.set()
        device.submit(batch)
        assert finished.wait(10)
        assert device.counters()["device_requests"] == 0


@engines
def test_neighbours_on_the_device_become_one_request(loop_device, engine: str) -> None:
    memory = Memory(MIB)
    with engine_on(loop_device(MIB, 4096), engine) as device:
        chunks = [
            (UNIT_BYTES, one_extent(number * UNIT_BYTES, UNIT_BYTES), [(memory.at(2 * number * 4096), 4096)])
            for number in (5, 3, 1, 0, 2, 4, 6, 7)
        ]
        for number in range(8):
            memory.fill(bytes([number + 1]) * UNIT_BYTES, 2 * number * 4096)
        assert run(device, batch_of(Direction.WRITE, chunks)) == [0] * 8
        counters = device.counters()
        assert (counters["device_requests"], counters["coalesced_requests"]) == (1, 1)
        assert counters["device_write_bytes"] == 8 * UNIT_BYTES
        assert counters["bounced_bytes"] == 0
        assert device.read(0, 8 * UNIT_BYTES) == b"".join(bytes([n + 1]) * UNIT_BYTES for n in range(8))


@pytest.mark.parametrize(
    ("limit_bytes", "requests"), [(512 << 10, 4), (2 * MIB, 4), (128 << 10, 16), (96 << 10, 22)]
)
def test_requests_are_no_larger_than_the_limit(loop_device, limit_bytes: int, requests: int) -> None:
    memory = Memory(2 * MIB)
    with engine_on(loop_device(2 * MIB, 4096), max_transfer_bytes=limit_bytes) as device:
        batch = batch_of(Direction.WRITE, [(2 * MIB, [(0, 2 * MIB)], [(memory.at(0), 2 * MIB)])])
        assert run(device, batch) == [0]
        assert device.counters()["device_requests"] == requests


def test_only_what_is_misaligned_bounces(loop_device) -> None:
    memory = Memory(4 * MIB)
    with engine_on(loop_device(4 * MIB, 4096), memory_alignment_bytes=512) as device:
        aligned = (MIB, one_extent(0, MIB), [(memory.at(0), MIB)])
        misaligned = (65536, one_extent(MIB, 65536), [(memory.at(MIB + 7), 65536)])
        # the LBA in which the first segment ends holds the start of the second
        split = (
            65536,
            one_extent(2 * MIB, 65536),
            [(memory.at(2 * MIB), 33280), (memory.at(3 * MIB), 32256)],
        )
        assert run(device, batch_of(Direction.WRITE, [aligned, misaligned, split])) == [0, 0, 0]
        counters = device.counters()
        assert counters["bounced_transfers"] == 2
        assert counters["bounced_bytes"] == 65536 + 4096
        assert counters["direct_bytes"] == MIB + 65536 - 4096


def test_a_large_load_leaves_no_kernel_worker_behind(loop_device) -> None:
    memory = Memory(8 * MIB)
    with engine_on(loop_device(8 * MIB, 4096)) as device:
        for direction in (Direction.WRITE, Direction.READ):
            segments = [(memory.at(0), 8 * MIB)]
            assert run(
                device, batch_of(direction, [(8 * MIB, [(0, 8 * MIB)], segments)], leaf_bytes=131072)
            ) == [0]
        names = thread_names()
        assert "blockkv-ring" in names
        assert not [name for name in names if name.startswith("iou-wrk")]


@pytest.mark.parametrize(
    "length", [0, 1, 3, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 4096, 131072, 1000003]
)
def test_checksums_are_xxh3(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert leaf_checksum(data) == xxhash.xxh3_64_intdigest(data)
    assert leaf_checksums(data, 1000) == expected_leaves(data, 1000)


def test_checksums_use_the_widest_vectors_of_this_cpu() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    expected = "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else "baseline"
    assert checksum_variant() == expected
    with pytest.raises(InvalidArgument, match="leaf_bytes is 0"):
        leaf_checksums(b"x", 0)


def test_transfer_layout_is_that_of_the_c_struct() -> None:
    struct = ffi.typeof("struct bkv_transfer")
    assert ffi.sizeof(struct) == 8 * TRANSFER_FIELDS
    assert {name: field.offset for name, field in struct.fields} == {
        "payload_bytes": 0,
        "first_extent": 8,
        "extent_count": 12,
        "first_segment": 16,
        "segment_count": 20,
        "first_leaf": 24,
        "leaf_count": 28,
        "leaf_bytes": 32,
        "result": 40,
        "flags": 44,
    }


def with_word(word: int, value: int) -> Batch:
    """A good transfer with one of its words replaced."""
    batch = batch_of(Direction.WRITE, [(8192, [(0, 8192)], [(MEMORY.at(0), 8192)])], leaf_bytes=4096)
    batch.transfers[word] = value
    return batch


MEMORY = Memory(MIB)
BAD = {
    "extent between units": batch_of(Direction.WRITE, [(4096, [(512, 4096)], [(MEMORY.at(0), 4096)])]),
    "extent of half a unit": batch_of(Direction.WRITE, [(2048, [(0, 2048)], [(MEMORY.at(0), 2048)])]),
    "extent past the end": batch_of(Direction.WRITE, [(8192, [(MIB - 4096, 8192)], [(MEMORY.at(0), 8192)])]),
    "extent far past the end": batch_of(
        Direction.WRITE, [(8192, [((1 << 64) - 4096, 8192)], [(MEMORY.at(0), 8192)])]
    ),
    "empty extent": batch_of(Direction.WRITE, [(4096, [(0, 4096), (8192, 0)], [(MEMORY.at(0), 4096)])]),
    "too little room": batch_of(Direction.WRITE, [(8192, [(0, 4096)], [(MEMORY.at(0), 8192)])]),
    "too much room": batch_of(Direction.WRITE, [(4096, [(0, 8192)], [(MEMORY.at(0), 4096)])]),
    "too little memory": batch_of(Direction.WRITE, [(8192, [(0, 8192)], [(MEMORY.at(0), 8191)])]),
    "too much memory": batch_of(Direction.WRITE, [(8192, [(0, 8192)], [(MEMORY.at(0), 8193)])]),
    "memory at zero": batch_of(Direction.WRITE, [(4096, [(0, 4096)], [(0, 4096)])]),
    "memory past the address space": batch_of(
        Direction.WRITE, [(4096, [(0, 4096)], [((1 << 64) - 1, 4096)])]
    ),
    "huge payload": with_word(0, (1 << 64) - 1),
    "extents past their array": with_word(1, 0 | 2 << 32),
    "no such extent": with_word(1, 0xFFFFFFFF | 1 << 32),
    "segments past their array": with_word(2, 1 | 1 << 32),
    "leaves past their array": with_word(3, 1 | 2 << 32),
    "too few leaves": with_word(3, 0 | 1 << 32),
    "leaves without a size": with_word(4, 0),
    "unknown flag": with_word(5, 1 << 32),
}


@engines
@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused_and_starts_nothing(image_dir: Path, engine: str, name: str) -> None:
    image = image_dir / "bad.img"
    image.write_bytes(b"\xee" * MIB)
    MEMORY.fill(bytes(MIB))
    good = (4096, [(65536, 4096)], [(MEMORY.at(0), 4096)])
    with engine_on(image, engine) as device:
        bad = BAD[name]
        with pytest.raises(InvalidArgument, match="transfer 0: "):
            device.submit(bad)
        assert bad.native is None
        mixed = batch_of(Direction.WRITE, [good, (8192, [(512, 8192)], [(MEMORY.at(0), 8192)])])
        with pytest.raises(InvalidArgument, match="transfer 1: extent 0"):
            device.submit(mixed)
        assert device.counters()["device_requests"] == 0
    assert set(image.read_bytes()) == {0xEE}


def test_arrays_of_a_batch_in_flight_cannot_be_resized(image_dir: Path) -> None:
    image = image_dir / "resize.img"
    image.write_bytes(bytes(MIB))
    with engine_on(image) as device:
        batch = batch_of(Direction.READ, [(4096, [(0, 4096)], [(MEMORY.at(0), 4096)])], leaf_bytes=4096)
        device.submit(batch)
        with pytest.raises(BufferError):
            batch.add(4096, [(4096, 4096)], [(MEMORY.at(0), 4096)])
        device.wait(batch)
        assert batch.result(0) == 0
