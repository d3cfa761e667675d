"""Growing chunks: what is appended can be read at once, and sealed it is a chunk like any other."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import blockkv
from blockkv.device.engine import leaf_checksums
from blockkv.format.geometry import leaf_bytes_for
from blockkv.store.leaves import GrowingLeaves
from blockkv.store.staging import BUFFER_BYTES
from blockkv.testing import Fault, FaultKind, FaultPlan, OperationKind, RecordingDevice, SimulatedDevice

RUN_BYTES = 128 << 10


def content(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def as_bytes(value: Any) -> bytes:
    return bytes(value.contiguous().view(-1).view(torch.uint8).numpy())


def append_often(chunk: blockkv.GrowingChunk, rows: torch.Tensor) -> None:
    """Writes are waited for by later appends."""
    for _ in range(5):
        chunk.append(rows)


def reserved_bytes(capacity_bytes: int) -> int:
    main = -(-capacity_bytes // RUN_BYTES) * RUN_BYTES
    return main + 2 * min(BUFFER_BYTES, main)


# -- against an oracle -------------------------------------------------------------------------------------

EDGES = [1, 511, 4095, 4096, 4097, RUN_BYTES - 1, RUN_BYTES, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1]
SIZES = st.one_of(st.sampled_from([*EDGES, 2 * BUFFER_BYTES, 700_001]), st.integers(1, 40_000))


class Growth(RuleBasedStateMachine):
    """A store with growing chunks, beside byte strings."""

    lba_bytes = 512

    @initialize(deferred=st.booleans())
    def open(self, deferred: bool) -> None:
        self.device = SimulatedDevice(24 << 20, lba_bytes=self.lba_bytes, deferred=deferred)
        blockkv.format(self.device, average_chunk="64KiB")
        self.store = blockkv.open(self.device, commit_interval_ms=None, evict=False)
        self.growing: dict[str, tuple[blockkv.GrowingChunk, bytearray, int]] = {}
        self.stored: dict[str, bytes] = {}
        self.names = 0
        self.seed = 0

    def chosen(self, number: int) -> tuple[str, blockkv.GrowingChunk, bytearray, int]:
        key = sorted(self.growing)[number % len(self.growing)]
        return (key, *self.growing[key])

    @rule(capacity_bytes=st.one_of(SIZES, st.integers(1 << 20, 3 << 20)))
    def reserve(self, capacity_bytes: int) -> None:
        key = f"key {self.names}"
        self.names += 1
        try:
            self.growing[key] = self.store.reserve(key, capacity_bytes), bytearray(), 0
        except blockkv.StoreFull:
            assert self.store.stats()["largest_free_bytes"] < reserved_bytes(capacity_bytes)

    @precondition(lambda self: self.growing)
    @rule(number=st.integers(0, 9), sizes=st.lists(SIZES, min_size=1, max_size=3), durable=st.booleans())
    def append(self, number: int, sizes: list[int], durable: bool) -> None:
        key, chunk, oracle, durable_bytes = self.chosen(number)
        self.seed += 1
        pieces = [content(size, self.seed + place) for place, size in enumerate(sizes)]
        try:
            assert chunk.append(pieces, durable) == len(oracle) + sum(sizes)
        except blockkv.CapacityExceeded:
            assert len(oracle) + sum(sizes) > chunk.capacity_bytes
            return
        for piece in pieces:
            oracle += as_bytes(piece)
            piece.zero_()
        self.growing[key] = chunk, oracle, len(oracle) if durable else durable_bytes

    @precondition(lambda self: self.growing)
    @rule(number=st.integers(0, 9), first=st.floats(0, 1), last=st.floats(0, 1), into=st.booleans())
    def read(self, number: int, first: float, last: float, into: bool) -> None:
        _, chunk, oracle, _ = self.chosen(number)
        start, stop = sorted((int(first * len(oracle)), int(last * len(oracle))))
        if start == stop:
            with pytest.raises(blockkv.InvalidArgument):
                chunk.read(start, stop)
        elif into:
            memory = bytearray(stop - start)
            assert chunk.read(start, stop, out=memory) is True
            assert memory == oracle[start:stop]
        else:
            assert as_bytes(chunk.read(start, stop)) == oracle[start:stop]

    @precondition(lambda self: self.growing)
    @rule(number=st.integers(0, 9), durable=st.booleans())
    def seal(self, number: int, durable: bool) -> None:
        key, chunk, oracle, _ = self.chosen(number)
        if not oracle:
            with pytest.raises(blockkv.InvalidArgument):
                chunk.seal()
            return
        chunk.seal(durable)
        del self.growing[key]
        self.stored[key] = bytes(oracle)
        entry = self.store.entry(key)
        assert entry is not None
        assert len(entry.extents) == 1
        assert entry.durable or not durable
        with pytest.raises(blockkv.GrowthEnded):
            chunk.append(b"more")

    @precondition(lambda self: self.growing)
    @rule(number=st.integers(0, 9))
    def abandon(self, number: int) -> None:
        key, chunk, _, _ = self.chosen(number)
        chunk.abandon()
        chunk.abandon()
        del self.growing[key]

    @precondition(lambda self: self.stored)
    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        key = sorted(self.stored)[number % len(self.stored)]
        assert self.store.delete(key)
        del self.stored[key]

    @rule(how=st.sampled_from(["close", "power", "commit", "checkpoint"]))
    def go_on(self, how: str) -> None:
        if how in ("commit", "checkpoint"):
            getattr(self.store, how)()
            return
        self.store.close()
        for chunk, _, _ in self.growing.values():
            with pytest.raises(blockkv.StoreClosed):
                chunk.append(b"late")
            chunk.abandon()
        self.device = self.device.clone()
        self.store = blockkv.open(self.device, commit_interval_ms=None, evict=False)
        for key, (_, oracle, durable_bytes) in self.growing.items():
            if durable_bytes:
                self.stored[key] = bytes(oracle[:durable_bytes])
        self.growing = {}

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "store"):
            return
        found = dict(zip(self.stored, self.store.get_many(list(self.stored)), strict=True))
        assert {key: as_bytes(value) for key, value in found.items()} == self.stored
        for key, (chunk, oracle, durable_bytes) in self.growing.items():
            assert (chunk.size_bytes, chunk.durable_bytes) == (len(oracle), durable_bytes)
            early = self.store.get(key)
            assert (b"" if early is None else as_bytes(early)) == oracle[:durable_bytes]
        stats = self.store.stats()
        assert stats["growing_chunks"] == len(self.growing)
        assert self.store.check().ok
        accounted = stats["free_bytes"] + stats["pending_free_bytes"] + stats["reserved_bytes"]
        entries = [self.store.entry(key) for key in [*self.stored, *self.growing]]
        in_index = sum(count * 4096 for entry in entries if entry for _, count in entry.extents)
        assert accounted + in_index == stats["data_bytes"]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class GrowthOn4096(Growth):
    lba_bytes = 4096


TestGrowth = Growth.TestCase
TestGrowthOn4096 = GrowthOn4096.TestCase
TestGrowth.settings = TestGrowthOn4096.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None
)


# -- rows --------------------------------------------------------------------------------------------------


def test_rows_of_any_dtype_become_one_tensor(store: blockkv.Store) -> None:
    rows = torch.randn(700, 4, 32).to(torch.bfloat16)
    with store.reserve("k", 1 << 20) as chunk:
        assert chunk.append(rows[:1]) == 1
        assert chunk.append([rows[1:3], rows[3:500]], durable=True) == 500
        assert torch.equal(chunk.read(2, 400), rows[2:400])
        assert chunk.append(rows[500:].transpose(1, 2).contiguous().transpose(1, 2)) == 700
        out = torch.zeros(1000, 4, 32, dtype=torch.bfloat16)
        assert chunk.read(out=out[:700])
        assert torch.equal(out[:700], rows)
        strided = torch.zeros(700, 32, 4, dtype=torch.bfloat16).transpose(1, 2)
        assert chunk.read(out=strided)
        assert torch.equal(strided, rows)
        assert len(chunk) == 700
        chunk.seal()
    found = store.get("k")
    assert found.dtype == rows.dtype
    assert torch.equal(found, rows)


def test_other_rows_are_refused(store: blockkv.Store) -> None:
    chunk = store.reserve("k", 1 << 20)
    chunk.append(torch.zeros(2, 8))
    for other in (torch.zeros(2, 9), torch.zeros(2, 8, dtype=torch.float16), b"bytes", torch.tensor(1.0)):
        with pytest.raises(blockkv.InvalidArgument):
            chunk.append(other)
    with pytest.raises(blockkv.InvalidArgument):
        chunk.append([torch.zeros(2, 8), torch.zeros(2)])
    assert len(chunk) == 2
    for out in (torch.zeros(2, 9), torch.zeros(3, 8), bytes(64), bytearray(63)):
        with pytest.raises(blockkv.InvalidArgument):
            chunk.read(out=out)
    for start, stop in ((0, 3), (-1, 1), (1, 1), (2, 1)):
        with pytest.raises(blockkv.InvalidArgument):
            chunk.read(start, stop)
    assert torch.equal(chunk.read(), torch.zeros(2, 8))
    chunk.abandon()


def test_capacity_is_a_bound(store: blockkv.Store) -> None:
    chunk = store.reserve("k", 10_000)
    chunk.append(content(9_000))
    with pytest.raises(blockkv.CapacityExceeded, match="10000 bytes were reserved and 9000 are in use"):
        chunk.append(content(1_001))
    chunk.append(content(1_000, 1))
    assert as_bytes(chunk.read()) == as_bytes(content(9_000)) + as_bytes(content(1_000, 1))
    chunk.seal()
    assert store.stats()["put_bytes"] == 10_000


@pytest.mark.parametrize("capacity_bytes", [0, -1, 1 << 60])
def test_impossible_capacities_are_refused(store: blockkv.Store, capacity_bytes: int) -> None:
    with pytest.raises(blockkv.InvalidArgument):
        store.reserve("k", capacity_bytes)
    with pytest.raises(blockkv.StoreFull, match="can never fit"):
        store.reserve("k", 1 << 30)
    assert store.stats()["growing_chunks"] == 0


# -- the key -----------------------------------------------------------------------------------------------


def test_the_key_belongs_to_the_growing_chunk(store: blockkv.Store) -> None:
    chunk = store.reserve("k", 1 << 20)
    for durable in (False, True):
        chunk.append(b"rows", durable)
        assert store.contains("k") is durable
        with pytest.raises(blockkv.InvalidArgument, match="growing"):
            store.put("k", b"other")
        with pytest.raises(blockkv.InvalidArgument, match="growing"):
            store.delete("k")
        with pytest.raises(blockkv.InvalidArgument, match="growing"):
            store.reserve("k", 100)
    chunk.seal()
    with pytest.raises(blockkv.InvalidArgument, match="stored"):
        store.reserve("k", 100)
    assert store.put("k", b"other") is False
    assert store.delete("k")


def test_pins_of_a_user_stay(store: blockkv.Store) -> None:
    chunk = store.reserve("k", 1 << 20)
    chunk.append(b"one", durable=True)
    assert not store.unpin("k"), "the growing chunk's own pin"
    assert store.pin("k")
    assert store.pin("k")
    assert store.unpin("k")
    chunk.append(b"two", durable=True)
    chunk.seal()
    entry = store.entry("k")
    assert entry is not None
    assert entry.pins == 1


def test_what_is_not_sealed_in_a_block_is_abandoned(store: blockkv.Store) -> None:
    before = store.stats()["free_bytes"]
    with store.reserve("k", 1 << 20) as chunk:
        chunk.append(content(600_000), durable=True)
    assert not store.contains("k")
    store.commit()
    assert store.stats()["free_bytes"] == before
    with pytest.raises(KeyError), store.reserve("k", 1 << 20) as chunk:
        raise KeyError
    for use in (lambda: chunk.append(b"x"), lambda: chunk.read(0, 1), lambda: chunk.seal()):
        with pytest.raises(blockkv.GrowthEnded):
            use()


# -- space -------------------------------------------------------------------------------------------------


def test_reserving_evicts_what_lies_together(open_on: Any) -> None:
    device = SimulatedDevice(40 << 20)
    blockkv.format(device, average_chunk="64KiB")
    store = open_on(device)
    unit = 1 << 20
    count = store.stats()["free_bytes"] // unit
    keys = [f"k{number}" for number in range(count)]
    store.put_many([(key, content(unit)) for key in keys])
    for key in keys[::3]:  # the others are older, two by two
        store.touch(key)
    chunk = store.reserve("grown", 3 * unit // 2)
    assert store.stats()["chunks_evicted"] == 2
    assert all(store.contains(key) for key in keys[::3])
    store.pin(keys[0])
    for key in keys[::2]:
        store.pin(key)
    with pytest.raises(blockkv.StoreFull, match=r"in \d+ pieces, the largest of"):
        store.reserve("more", 4 * unit)
    chunk.append(content(3 * unit // 2))
    chunk.seal()
    assert store.check(payload=True).ok


def test_a_store_that_may_not_evict_says_so(open_on: Any, device: SimulatedDevice) -> None:
    store = open_on(device, evict=False)
    chunk = store.reserve("k", store.stats()["free_bytes"] * 2 // 3)
    with pytest.raises(blockkv.StoreFull, match="evict=True"):
        store.reserve("more", store.stats()["free_bytes"] + 1)
    chunk.abandon()
    assert store.stats()["free_bytes"] == store.stats()["data_bytes"]


def test_puts_leave_a_growing_chunk_alone(open_on: Any) -> None:
    device = SimulatedDevice(24 << 20)
    blockkv.format(device, average_chunk="64KiB")
    store = open_on(device)
    chunk = store.reserve("grown", 4 << 20)
    chunk.append(content(2 << 20), durable=True)
    for number in range(60):
        store.put(f"k{number}", content(1 << 20, number))
    assert store.stats()["chunks_evicted"] > 10
    chunk.append(content(1 << 20, 1))
    chunk.seal()
    assert as_bytes(store.get("grown")) == as_bytes(content(2 << 20)) + as_bytes(content(1 << 20, 1))


# -- requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_bytes", [4 << 10, 256 << 10, 100_000, 3 << 20])
def test_writes_are_large(image_dir: Path, step_bytes: int) -> None:
    """At least 95 % of the bytes in requests of 128 KiB or more."""
    path = image_dir / "store.img"
    blockkv.format(path, size="96MiB")
    writes: list[int] = []
    recording = False

    def record(kind: OperationKind, offset: int, length_bytes: int) -> None:
        if recording and kind is OperationKind.WRITE:
            writes.append(length_bytes)

    total = 24 << 20
    with blockkv.open(RecordingDevice(path, record), commit_interval_ms=None) as store:
        chunk = store.reserve("k", total)
        data = content(total)
        recording = True
        for start in range(0, total, step_bytes):
            chunk.append(data[start : start + step_bytes])
        assert torch.equal(chunk.read(), data)
        chunk.seal()
        recording = False
        assert torch.equal(store.get("k"), data)
    assert sum(writes) >= total
    assert sum(length for length in writes if length >= RUN_BYTES) >= 0.95 * sum(writes)


def test_reading_all_is_one_run(image_dir: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="96MiB")
    with blockkv.open(path) as store:
        chunk = store.reserve("k", 16 << 20)
        data = content(10_000_000)
        chunk.append(data)
        before = store.stats()
        memory = blockkv.empty(10_000_000, torch.uint8)
        assert chunk.read(out=memory)
        after = store.stats()
        assert torch.equal(memory, data)
        chunk.seal()
    read_bytes = after["device_read_bytes"] - before["device_read_bytes"]
    assert read_bytes == 10_000_000 // BUFFER_BYTES * BUFFER_BYTES  # the tail is in memory
    assert after["device_requests"] - before["device_requests"] <= read_bytes / (512 << 10) + 2
    assert after["bounced_bytes"] == before["bounced_bytes"]


def test_a_chunk_longer_than_256_leaves(image_dir: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="256MiB")
    step = content(1_000_003)
    with blockkv.open(path) as store:
        for key, steps in (("short", 3), ("medium", 40), ("long", 70)):
            chunk = store.reserve(key, 80 << 20)
            for number in range(steps):
                chunk.append(step, durable=number % 30 == 29)
            chunk.seal(durable=True)
            assert torch.equal(store.get(key).view(steps, -1), step.expand(steps, -1))
    with blockkv.open(path) as store:
        assert store.check(payload=True).ok
        assert len(store) == 3


@pytest.mark.parametrize("capacity_mib", [1, 32, 33, 200])
@pytest.mark.parametrize("size_bytes", [100, 256 << 10, 7_000_000, 34 << 20, (65 << 20) + 12_345])
def test_leaves_are_those_of_the_payload(capacity_mib: int, size_bytes: int) -> None:
    data = memoryview(as_bytes(content(min(size_bytes, capacity_mib << 20))))
    leaves = GrowingLeaves(capacity_mib << 20, BUFFER_BYTES)
    whole = len(data) // BUFFER_BYTES * BUFFER_BYTES
    first = whole // 2 // BUFFER_BYTES * BUFFER_BYTES
    for start, stop in ((0, first), (first, whole)):
        if start < stop:
            leaves.add(data[start:stop])
            leaves.add_fine(leaf_checksums(data[start:stop], RUN_BYTES))
    assert leaves.of_all(data[whole:]) == leaf_checksums(data, leaf_bytes_for(len(data)))
    assert leaves.of_all(data[whole:]) == leaf_checksums(data, leaf_bytes_for(len(data))), "asked twice"


# -- faults ------------------------------------------------------------------------------------------------


def test_wrong_bytes_are_a_miss(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    chunk = store.reserve("k", 1 << 20)
    data = content(900_000)
    chunk.append(data)
    offset = store.info()["data_offset_bytes"]
    device.flip_bit(offset + 300_000, 3)
    assert chunk.read() is None
    out = bytearray(b"x" * 900_000)
    assert chunk.read(out=out) is False
    assert not any(out)
    assert torch.equal(chunk.read(0, 262_144), data[:262_144])
    assert torch.equal(chunk.read(400_000, 900_000), data[400_000:])
    assert store.stats()["get_checksum_mismatch"] == 2
    device.flip_bit(offset + 300_000, 3)
    assert torch.equal(chunk.read(), data)
    chunk.seal()
    assert torch.equal(store.get("k"), data)


def test_reads_that_fail(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    chunk = store.reserve("k", 1 << 20)
    chunk.append(content(600_000))
    for code, counter in ((errno.EIO, "get_device_error"), (errno.ETIMEDOUT, "get_transient_error")):
        device.set_plan(FaultPlan.fail(device.operation_count, code))
        assert chunk.read() is None
        assert store.stats()[counter] == 1
        assert torch.equal(chunk.read(), content(600_000))
    device.set_plan(FaultPlan.fail(device.operation_count, errno.ENODEV))
    with pytest.raises(blockkv.DeviceLost):
        chunk.read()
    chunk.abandon()


@pytest.mark.parametrize("step_bytes", [200_000, 600_000])
def test_writes_that_fail_end_the_growth(device: SimulatedDevice, open_on: Any, step_bytes: int) -> None:
    store = open_on(device)
    chunk = store.reserve("k", 4 << 20)
    chunk.append(content(step_bytes))
    chunk.append(content(step_bytes), durable=True)
    device.set_plan(FaultPlan((Fault(FaultKind.ERROR, on=OperationKind.WRITE, errno=errno.EIO),)))
    with pytest.raises(blockkv.DeviceError):
        append_often(chunk, content(step_bytes))
    for use in (lambda: chunk.append(b"x"), lambda: chunk.seal()):
        with pytest.raises(blockkv.DeviceError):
            use()
    assert as_bytes(chunk.read(0, 2 * step_bytes)) == 2 * as_bytes(content(step_bytes))
    assert as_bytes(store.get("k")) == 2 * as_bytes(content(step_bytes))
    chunk.abandon()
    store.commit()
    stats = store.stats()
    assert stats["quarantined_bytes"] in (BUFFER_BYTES, 600_000 // BUFFER_BYTES * BUFFER_BYTES)
    assert stats["free_bytes"] + stats["quarantined_bytes"] == stats["data_bytes"]
    assert store.check().ok


def test_a_beginning_that_was_dropped_ends_the_growth(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    chunk = store.reserve("k", 1 << 20)
    chunk.append(content(300_000), durable=True)
    device.flip_bit(store.info()["data_offset_bytes"] + 1000, 0)
    assert store.get("k") is None
    assert not store.contains("k")
    with pytest.raises(blockkv.DeviceError, match="did not verify"):
        chunk.append(content(100), durable=True)
    with pytest.raises(blockkv.DeviceError, match="did not verify"):
        chunk.seal()
    chunk.abandon()
    store.commit()
    stats = store.stats()
    assert stats["free_bytes"] + stats["quarantined_bytes"] == stats["data_bytes"]
    assert store.check().ok


def test_a_failed_flush_ends_all_writing(device: SimulatedDevice, open_on: Any) -> None:
    store = blockkv.open(device, commit_interval_ms=None)
    chunk = store.reserve("k", 1 << 20)
    chunk.append(content(300_000), durable=True)
    device.set_plan(FaultPlan((Fault(FaultKind.ERROR, on=OperationKind.FLUSH),)))
    with pytest.raises(blockkv.StoreReadOnly):
        chunk.append(content(1000, 1), durable=True)
    with pytest.raises(blockkv.StoreReadOnly):
        chunk.append(b"x")
    assert torch.equal(chunk.read(0, 300_000), content(300_000))
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()
    again = open_on(device.clone())
    assert torch.equal(again.get("k"), content(300_000))


def test_stores_open_for_reading_reserve_nothing(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device, read_only=True)
    with pytest.raises(blockkv.StoreReadOnly):
        store.reserve("k", 100)


# -- threads, arrays ---------------------------------------------------------------------------------------


def test_readers_and_a_writer_at_once(image_dir: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="96MiB")
    data = content(12 << 20)
    wrong: list[int] = []
    with blockkv.open(path) as store:
        chunk = store.reserve("k", len(data))
        chunk.append(data[:1000])
        done = threading.Event()

        def read() -> None:
            memory = blockkv.empty(len(data), torch.uint8)
            while not done.is_set():
                rows = len(chunk)
                if not (chunk.read(0, rows, out=memory[:rows]) and torch.equal(memory[:rows], data[:rows])):
                    wrong.append(rows)
                early = store.get("k")
                if early is not None and not torch.equal(early, data[: len(early)]):
                    wrong.append(len(early))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for number, start in enumerate(range(1000, len(data), 90_001)):
            chunk.append(data[start : start + 90_001], durable=number % 10 == 0)
        done.set()
        for reader in readers:
            reader.join()
        chunk.seal()
        assert torch.equal(store.get("k"), data)
    assert not wrong


@pytest.mark.parametrize("end", ["seal", "abandon"])
def test_appends_while_an_end_waits_for_readers(store: blockkv.Store, end: str) -> None:
    """What comes in then is of what is sealed, and none of it is on its way when space comes back."""
    chunk = store.reserve("k", 4 << 20)
    chunk.append(content(300_000))
    with chunk._lock:
        chunk._readers += 1  # a read that takes its time
    ending = threading.Thread(target=getattr(chunk, end))
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    chunk.append(content(700_001, seed=1))
    with chunk._lock:
        chunk._readers -= 1
        chunk._changed.notify_all()
    ending.join()
    with pytest.raises(blockkv.GrowthEnded):
        chunk.append(content(1))
    found = store.get("k")
    if end == "seal":
        assert as_bytes(found) == as_bytes(content(300_000)) + as_bytes(content(700_001, seed=1))
    else:
        assert found is None
        assert not chunk._in_flight
    assert store.check(payload=True).findings == ()


def test_on_an_array() -> None:
    devices = [SimulatedDevice(24 << 20, path=f"simulated {number}") for number in range(3)]
    blockkv.format(devices, average_chunk="64KiB")
    array = blockkv.open(devices, commit_interval_ms=None)
    chunks = {f"k{number}": array.reserve(f"k{number}", 2 << 20) for number in range(6)}
    for number, (key, chunk) in enumerate(chunks.items()):
        chunk.append(content(1_000_000, number), durable=number % 2 == 0)
        with pytest.raises(blockkv.InvalidArgument, match="growing"):
            array.put(key, b"other")
        with pytest.raises(blockkv.InvalidArgument, match="growing"):
            array.reserve(key, 100)
        with pytest.raises(blockkv.InvalidArgument, match="growing"):
            array.delete(key)
        assert torch.equal(chunk.read(), content(1_000_000, number))
    assert array.stats()["growing_chunks"] == 6
    for key in ("k0", "k1"):
        chunks[key].seal()
    entries = {key: array.entry(key) for key in ("k0", "k1")}
    assert len({entry.device for entry in entries.values() if entry is not None}) == 2
    array.put_many([(f"more{number}", content(1 << 20, number)) for number in range(40)])
    assert torch.equal(array.get("k1"), content(1_000_000, 1))
    with pytest.raises(blockkv.InvalidArgument, match="stored"):
        array.reserve("k1", 100)
    array.close()
    with blockkv.open([device.clone() for device in devices], commit_interval_ms=None) as array:
        assert [array.contains(f"k{number}") for number in range(6)] == [True, True, True, False, True, False]
        assert torch.equal(array.get("k4"), content(1_000_000, 4))
        assert array.check(payload=True).ok


def test_a_member_that_is_lost_takes_its_growing_chunks_along() -> None:
    devices = [SimulatedDevice(24 << 20, path=f"simulated {number}") for number in range(2)]
    blockkv.format(devices, average_chunk="64KiB")
    array = blockkv.open(devices, commit_interval_ms=None)
    chunks = [array.reserve(f"k{number}", 2 << 20) for number in range(2)]
    for chunk in chunks:
        chunk.append(content(600_000), durable=True)
    gone = 0 if array.entry("k0").device == "simulated 0" else 1  # type: ignore[union-attr]
    devices[0].set_plan(FaultPlan.stop(devices[0].operation_count))
    with pytest.raises(blockkv.DeviceLost):
        append_often(chunks[gone], content(300_000))
    assert array.stats()["members_lost"] == 1
    with pytest.raises(blockkv.DeviceLost):
        chunks[gone].append(b"x")
    chunks[1 - gone].append(content(300_000), durable=True)
    chunks[1 - gone].seal()
    assert array.contains(f"k{1 - gone}")
    assert not array.contains(f"k{gone}")
    grown = array.reserve(f"k{gone}", 1000)
    grown.append(b"anew")
    grown.seal()
    array.close()
