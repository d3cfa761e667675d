"""Damage behind the store's back on real targets, and what a store leaves alone: the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv.device.base import Batch
from blockkv.tensors import Occupied
from blockkv.testing import SimulatedDevice

SIZE_BYTES = 96 << 20


def payload(number: int, size_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip one bit of the device with ordinary direct I/O, as a rotten sector would."""
    page = mmap.mmap(-1, 4096)
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        start = offset // 4096 * 4096
        assert os.preadv(descriptor, [page], start) == 4096
        page[offset - start] = page[offset - start] ^ (1 << bit)
        assert os.pwritev(descriptor, [page], start) == 4096
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size_bytes", [100, 4096, 50_001, 131_072, 3 << 20])
def test_any_flipped_payload_bit_is_a_miss(block_targets: Any, size_bytes: int) -> None:
    target = block_targets(SIZE_BYTES)
    blockkv.format(target, average_chunk="64KiB")
    rng = random.Random(size_bytes)
    keys = [f"k{number}" for number in range(8)]
    with blockkv.open(target) as store:
        store.put_many([(key, payload(number, size_bytes)) for number, key in enumerate(keys)], durable=True)
        places = {}
        base = store.info()["data_offset_bytes"]
        for key in keys:
            info = store.entry(key)
            assert info is not None
            offset = rng.choice((0, size_bytes - 1, rng.randrange(size_bytes)))
            for start, count in info.extents:
                if offset < count * 4096:
                    places[key] = base + start * 4096 + offset
                    break
                offset -= count * 4096
    for key in keys[::2]:
        flip(target, places[key], rng.randrange(8))
    with blockkv.open(target) as store:
        for number, key in enumerate(keys):
            out = torch.full((size_bytes,), 0x55, dtype=torch.uint8)
            if number % 2:
                assert store.get(key, out=out)
                assert torch.equal(out, payload(number, size_bytes))
            else:
                assert store.get(key, out=out) is False
                assert not out.any(), "what did not verify must not be left in the caller's memory"
        stats = store.stats()
        assert stats["get_checksum_mismatch"] == 4
        assert stats["quarantined_bytes"] >= 4 * size_bytes
        assert [store.contains(key) for key in keys] == [bool(number % 2) for number in range(8)]
        assert store.check(payload=True).ok
        assert store.put(keys[0], payload(0, size_bytes), durable=True)
    with blockkv.open(target) as store:
        assert torch.equal(store.get(keys[0]), payload(0, size_bytes))
        assert not store.contains(keys[2])


def test_outputs_that_share_memory_cost_no_chunk(block_targets: Any) -> None:
    target = block_targets(SIZE_BYTES)
    blockkv.format(target)
    size_bytes = 2 << 20
    keys = [f"k{number}" for number in range(4)]
    with blockkv.open(target) as store:
        store.put_many([(key, payload(number, size_bytes)) for number, key in enumerate(keys)], durable=True)
        memory = blockkv.empty(2 * size_bytes, torch.uint8)
        outs = [memory[start : start + size_bytes] for start in (0, 4096, size_bytes, 0)]
        with pytest.raises(blockkv.BatchError) as caught:
            store.get_many(keys, outs)
        assert caught.value.results == [True, False, True, False]
        assert sorted(caught.value.errors) == [1, 3]
        assert "overlaps" in str(caught.value.errors[1])
        assert torch.equal(outs[0], payload(0, size_bytes))
        assert torch.equal(outs[2], payload(2, size_bytes))
        assert store.lookup(keys) == 4


def test_finely_strided_outputs_that_share_memory(store: blockkv.Store) -> None:
    """They are filled through stand-ins of ours, and what counts is where the bytes end up."""
    values = [payload(number, 6400).view(80, 80) for number in range(3)]
    keys = ["k0", "k1", "k2"]
    store.put_many(list(zip(keys, values, strict=True)))
    store.put("both", values[:2])
    memory = torch.zeros(80, 80, dtype=torch.uint8)
    with pytest.raises(blockkv.LayoutMismatch, match="overlap"):
        store.get("both", out=[memory.t(), memory.t()])
    for first, second in ((memory.t(), memory.t()), (memory.t(), memory), (memory, memory.t())):
        with pytest.raises(blockkv.BatchError, match="overlap") as caught:
            store.get_many(keys, [first, second, torch.empty(80, 80, dtype=torch.uint8)])
        assert caught.value.results == [True, False, True]
        assert torch.equal(first, values[0])
    # Between each other's elements there is room.
    memory = torch.zeros(3, 80, 160, dtype=torch.uint8)
    outs = [memory[0, :, ::2], memory[0, :, 1::2], memory[2].view(160, 80)[::2]]
    assert store.get_many(keys, outs) == [True] * 3
    assert all(map(torch.equal, outs, values))
    with pytest.raises(blockkv.BatchError, match="overlap") as caught:
        store.get_many(keys, [*outs[:2], memory[0, :, :80]])
    assert caught.value.results == [True, True, False]


def test_occupied_memory_is_told_to_the_byte() -> None:
    """Ranges and strided tensors in one piece of memory, against a set of all bytes that are taken."""
    rng = random.Random(1)
    base = torch.zeros(200, dtype=torch.int16)
    elements = torch.arange(len(base))

    def strided() -> torch.Tensor:
        while True:
            sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
            strides = [rng.choice((1, 2, 3, 4, 5, 8, 10, 16, 30)) for _ in sizes]
            end = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
            if end <= len(base):
                start = rng.randint(0, len(base) - end)
                if (
                    len(elements.as_strided(sizes, strides, start).unique())
                    == elements[:end].as_strided(sizes, strides).numel()
                ):
                    return base.as_strided(sizes, strides, start)

    taken_count = 0
    for _ in range(600):
        occupied, taken = Occupied(), set()
        for _ in range(rng.randint(1, 6)):
            tensors = [strided() for _ in range(rng.randint(0, 2))]
            starts = [rng.randrange(400) for _ in range(rng.randint(0, 1))]
            wanted = [place for start in starts for place in range(start, min(start + 9, 400))]
            for tensor in tensors:
                numbers = elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                wanted += [2 * one + half for one in numbers.flatten().tolist() for half in (0, 1)]
            free = len(set(wanted)) == len(wanted) and taken.isdisjoint(wanted)
            address = base.data_ptr()
            ranges = [(address + start, address + min(start + 9, 400)) for start in starts]
            assert occupied.take(ranges, tensors) is free
            taken |= set(wanted) if free else set()
            taken_count += free
    assert taken_count > 600


def test_strided_outputs_of_a_long_call_are_not_taken_for_each_other(store: blockkv.Store) -> None:
    """The stand-ins of the first waves are gone when the last ones are made, often at the same addresses."""
    value = payload(0, 256 << 10).view(512, 512)
    keys = [f"k{number}" for number in range(16)]
    store.put_many([(key, value) for key in keys])
    outs = [torch.empty_like(value).t() for _ in range(400)]
    assert store.get_many([keys[number % 16] for number in range(400)], outs) == [True] * 400
    assert all(torch.equal(out, value) for out in outs)


@pytest.mark.parametrize("kind", ["inference", "autograd"])
def test_strided_outputs_of_any_thread(kind: str, store: blockkv.Store) -> None:
    value = torch.rand(80, 80)
    store.put("k", value)
    with torch.inference_mode(kind == "inference"):
        memory = torch.zeros(80, 80, requires_grad=kind == "autograd")
    for get in (store.get, lambda key, out: store.submit_get(key, out).result(60)):
        assert get("k", out=memory.t())
        assert torch.equal(memory.t(), value)
    assert not store._state.any_leased()


def test_a_get_that_cannot_hand_over_keeps_no_lease(
    store: blockkv.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(targets: Any) -> None:
        raise RuntimeError("torch says no")

    store.put("k", torch.rand(80, 80))
    monkeypatch.setattr("blockkv.store.gets.scatter", refuse)
    with pytest.raises(RuntimeError, match="torch says no"):
        store.get("k", out=torch.zeros(80, 80).t())
    assert not store._state.any_leased()


class MeddlingDevice(SimulatedDevice):
    """While `meddle` is left, what arrives is changed at once, as by a caller who uses the memory."""

    meddle = 0

    def _deliver(self, batch: Batch, position: int, received: list[tuple[int, bytes]]) -> None:
        super()._deliver(batch, position, received)
        if self.meddle:
            self.meddle -= 1
            batch.leaf_values[0] ^= 1


@pytest.mark.parametrize("threads", [False, True])
def test_memory_that_others_write_to_costs_no_chunk(
    threads: bool, open_on: Any, caplog: pytest.LogCaptureFixture
) -> None:
    device = MeddlingDevice(32 << 20, threads=threads)
    blockkv.format(device)
    store = open_on(device)
    value = payload(0, 100_000)
    store.put("k", value)
    out = torch.empty_like(value)
    for get in (store.get, lambda key, out: store.submit_get(key, out).result(60)):
        device.meddle = 1
        assert get("k", out) is False
        assert not out.any()
        assert "stays" in caplog.text
        caplog.clear()
        assert get("k", out)
        assert torch.equal(out, value)
    stats = store.stats()
    assert (stats["get_checksum_mismatch"], stats["chunks_dropped_damaged"]) == (2, 0)
    info = store.entry("k")
    assert info is not None
    device.flip_bit(store.info()["data_offset_bytes"] + info.extents[0][0] * 4096, 3)
    assert store.submit_get("k", out).result(60) is False
    assert not store.contains("k")


def test_check_finds_what_is_damaged(block_targets: Any) -> None:
    target = block_targets(SIZE_BYTES)
    blockkv.format(target)
    with blockkv.open(target) as store:
        store.put_many([(f"k{number}", payload(number, 300_000)) for number in range(20)], durable=True)
        info = store.entry("k7")
        assert info is not None
        place = store.info()["data_offset_bytes"] + info.extents[0][0] * 4096 + 12_345
    flip(target, place, 3)
    with blockkv.open(target) as store:
        assert store.check().ok
        report = store.check(payload=True)
        assert report.damaged_keys == ("k7",)
        assert not report.ok
        assert not store.contains("k7")
        assert store.check(payload=True).ok


class _CacheStat(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    ]


def cached_pages(path: Path) -> int:
    """Pages of the file or device in the page cache: cachestat(2), Linux 6.5, or mincore(2) before it."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        span, stat = (ctypes.c_uint64 * 2)(0, 0), _CacheStat()
        if libc.syscall(451, descriptor, ctypes.byref(span), ctypes.byref(stat), 0) == 0:
            return int(stat.cache)
        length = os.lseek(descriptor, 0, os.SEEK_END)
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(length), 1, 1, descriptor, ctypes.c_long(0))
        vector = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), vector) == 0
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))
        return sum(byte & 1 for byte in vector)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["loop", "file"])
def test_puts_and_gets_leave_the_page_cache_alone(kind: str, loop_device: Any, tmp_path: Path) -> None:
    # A file on tmpfs is page cache; only a real file system can show the difference.
    target = loop_device(SIZE_BYTES, 4096) if kind == "loop" else tmp_path / "store.img"
    blockkv.format(target, size=None if kind == "loop" else SIZE_BYTES)
    with blockkv.open(target) as store:
        before = cached_pages(target)
        values = [(f"k{number}", payload(number, 1 << 20)) for number in range(30)]
        store.put_many(values, durable=True)
        store.checkpoint()
        assert all(torch.equal(store.get(key), value) for key, value in values)
        assert all(store.get(key, out=torch.empty((1 << 20) + 1, dtype=torch.uint8)[1:]) for key, _ in values)
        assert cached_pages(target) <= before
    with target.open("rb") as buffered:  # the probe does see pages, or the comparison shows nothing
        buffered.read(8 << 20)
        assert cached_pages(target) >= 2048


def test_a_store_from_the_future_is_refused(image_dir: Path) -> None:
    target = image_dir / "future.img"
    blockkv.format(target, size=SIZE_BYTES)
    import dataclasses

    from blockkv.format import superblock

    slots = []
    image = bytearray(target.read_bytes())
    with blockkv.open(target, read_only=True) as store:
        offsets = store._state.geometry.slot_offsets
        newest = store._state.log.superblock
    future = dataclasses.replace(newest, generation=newest.generation + 1, incompat=1 << 40)
    for slot in superblock.slots_of(future.generation):
        slots.append((offsets[slot], future.encode(slot)))
    for offset, data in slots:
        image[offset : offset + 4096] = data
    target.write_bytes(image)
    before = target.read_bytes()
    with pytest.raises(blockkv.VersionTooNew, match="upgrade"):
        blockkv.open(target)
    assert target.read_bytes() == before
    read_only = dataclasses.replace(newest, generation=newest.generation + 1, ro_compat=1 << 40)
    for slot in superblock.slots_of(read_only.generation):
        image[offsets[slot] : offsets[slot] + 4096] = read_only.encode(slot)
    target.write_bytes(image)
    before = target.read_bytes()
    with blockkv.open(target) as store:
        assert store.read_only
        with pytest.raises(blockkv.StoreReadOnly, match="upgrade"):
            store.put("k", b"v")
    assert target.read_bytes() == before


def test_a_second_opener_is_refused(block_targets: Any) -> None:
    target = block_targets(SIZE_BYTES)
    blockkv.format(target)
    with blockkv.open(target) as store:
        store.put("k", b"v", durable=True)
        with pytest.raises(blockkv.DeviceBusy):
            blockkv.open(target)
        with pytest.raises(blockkv.DeviceBusy):
            blockkv.format(target, force=True)
        assert store.check(payload=True).ok
    with blockkv.open(target) as store:
        assert store.contains("k")


def test_a_copy_of_an_open_store_is_refused(image_dir: Path) -> None:
    original, copy = image_dir / "a.img", image_dir / "b.img"
    blockkv.format(original, size=SIZE_BYTES)
    copy.write_bytes(original.read_bytes())
    with blockkv.open(original), pytest.raises(blockkv.WrongStore, match=r"a\.img"):
        blockkv.open(copy)


@pytest.mark.requires_root
def test_read_only_devices(loop_device: Any) -> None:
    device = loop_device(SIZE_BYTES, 512, read_only=True)
    with pytest.raises(blockkv.DeviceReadOnly):
        blockkv.open(device)
    with pytest.raises(blockkv.DeviceReadOnly):
        blockkv.format(device)


def test_too_small(image_dir: Path) -> None:
    target = image_dir / "small.img"
    with pytest.raises(blockkv.DeviceTooSmall, match="1048576"):
        blockkv.format(target, size="1MiB")
    assert not target.exists()
    target.write_bytes(bytes(1 << 20))
    with pytest.raises(blockkv.DeviceTooSmall):
        blockkv.format(target)
    with pytest.raises(blockkv.NotFormatted):
        blockkv.open(target)
    assert target.read_bytes() == bytes(1 << 20)


@pytest.mark.requires_root
@pytest.mark.requires_tool("sfdisk", "mkfs.ext4")
def test_forced_format_leaves_no_trace_of_what_was_there(loop_device: Any) -> None:
    device = loop_device(SIZE_BYTES + 512 * 3, 512)
    for command, text in (
        (["sfdisk", "-q", device], "label: gpt\n,,L\n"),
        (["mkfs.ext4", "-qF", device], ""),
    ):
        subprocess.run(command, input=text, text=True, check=True, capture_output=True)
        with pytest.raises(blockkv.OccupiedError):
            blockkv.format(device)
        blockkv.format(device, force=True)
        left = subprocess.run(["wipefs", "--no-act", device], capture_output=True, text=True, check=True)
        assert left.stdout == ""
        with blockkv.open(device) as store:
            assert store.put("k", b"v", durable=True)
