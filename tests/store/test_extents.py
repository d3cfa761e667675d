"""Extents for others to move: they hold still, they verify, and nothing can be written through them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv.errors import InvalidArgument, StoreClosed
from blockkv.testing import SimulatedDevice


def moved(chunk: blockkv.ChunkExtents) -> torch.Tensor:
    """What is there, read with direct I/O by nobody of ours."""
    memory = blockkv.empty(chunk.size_bytes, torch.uint8)
    view = memoryview(memory.numpy())
    position = 0
    for fd, offset_bytes, length_bytes in chunk.descriptors:
        assert os.preadv(fd, [view[position : position + length_bytes]], offset_bytes) == length_bytes
        position += length_bytes
    assert position == chunk.size_bytes
    return memory


VALUES: dict[str, Any] = {
    "tensor": torch.randn(3, 100, 70),
    "dict": {"k": torch.randn(5, 7).half(), "v": torch.randint(0, 255, (4097,), dtype=torch.uint8)},
    # The second one lies at an odd offset.
    "list": [torch.arange(3, dtype=torch.uint8), torch.randn(1000, 300), torch.randn(8).bfloat16()],
    "bytes": os.urandom(10_001),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(other, bytes):
        return bytes(one.numpy()) == other
    if isinstance(other, dict):
        return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in other)
    if isinstance(other, list):
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(one, other)


def test_what_others_read_there_is_the_chunk(block_targets: Any) -> None:
    target = block_targets(64 << 20)
    blockkv.format(target, force=True)
    with blockkv.open(target) as store:
        store.put_many(VALUES)
        for key, value in VALUES.items():
            with store.extents(key) as chunk:
                memory = moved(chunk)
                assert chunk.verify(memory)
                assert chunk.verify(memory[: chunk.payload_bytes])
                assert not memory[chunk.payload_bytes :].any()
                assert equal(chunk.tensors(memory), value)
                assert chunk.leaf_bytes * len(chunk.leaves) // 8 >= chunk.payload_bytes
        assert store.extents("elsewhere") is None
        assert store.stats()["get_misses"] == 1


def test_a_chunk_in_pieces(image_dir: Path) -> None:
    blockkv.format(image_dir / "a.img", size="32MiB", average_chunk="64KiB")
    with blockkv.open(image_dir / "a.img", evict=False) as store:
        count = 0
        while store.stats()["largest_free_bytes"] > 512 << 10:
            store.put(f"{count}", torch.zeros(256 << 10, dtype=torch.uint8))
            count += 1
        for number in range(0, count, 2):
            store.delete(f"{number}")
        store.commit()
        value = torch.randint(256, (2 << 20,), dtype=torch.uint8)
        store.put("in pieces", value)
        with store.extents("in pieces") as chunk:
            assert len(chunk.descriptors) > 4
            assert torch.equal(chunk.tensors(moved(chunk)), value)


def test_nothing_is_reused_while_it_is_leased(image_dir: Path) -> None:
    path = image_dir / "a.img"
    blockkv.format(path, size="32MiB")
    value = torch.randint(256, (4 << 20,), dtype=torch.uint8)
    with blockkv.open(path) as store:
        store.put("leased", value)
        store.put("deleted", value + 1)
        with store.extents("leased") as leased, store.extents("deleted") as deleted:
            store.delete("deleted", durable=True)
            for number in range(60):  # ten times what is left; `leased` is the least recently used
                store.put(f"{number}", torch.full((1 << 20,), number, dtype=torch.uint8))
            assert store.stats()["chunks_evicted"] > 30
            assert torch.equal(leased.tensors(moved(leased)), value)
            assert torch.equal(deleted.tensors(moved(deleted)), value + 1)
            assert store.contains("leased")
        for number in range(60, 120):
            store.put(f"{number}", torch.full((1 << 20,), number, dtype=torch.uint8))
        assert not store.contains("leased")


def test_nothing_can_be_written_through_them(image_dir: Path) -> None:
    blockkv.format(image_dir / "a.img", size="32MiB")
    with blockkv.open(image_dir / "a.img") as store:
        store.put("k", torch.ones(4096, dtype=torch.uint8))
        with store.extents("k") as chunk:
            ((fd, offset_bytes, _),) = chunk.descriptors
            with pytest.raises(OSError, match="descriptor") as raised:
                os.pwrite(fd, bytes(4096), offset_bytes)
            assert raised.value.errno == errno.EBADF
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)
        chunk.close()
        with pytest.raises(StoreClosed):
            _ = chunk.descriptors


def test_what_went_wrong_on_the_way_is_no_hit_and_stays(image_dir: Path) -> None:
    blockkv.format(image_dir / "a.img", size="32MiB")
    with blockkv.open(image_dir / "a.img") as store:
        value = torch.randint(256, (1 << 20,), dtype=torch.uint8)
        store.put("k", value)
        with store.extents("k") as chunk:
            memory = moved(chunk)
            memory[777] ^= 1
            assert not chunk.verify(memory)
            assert chunk.tensors(memory) is None
            with pytest.raises(InvalidArgument, match="has 1048576"):
                chunk.verify(memory[:100])
            with pytest.raises(InvalidArgument, match="contiguous"):
                chunk.verify(memory[::2])
        assert torch.equal(store.get("k"), value)


def test_what_is_damaged_is_dropped(image_dir: Path) -> None:
    path = image_dir / "a.img"
    blockkv.format(path, size="32MiB")
    with blockkv.open(path) as store:
        store.put("k", torch.ones(1 << 20, dtype=torch.uint8), durable=True)
        with store.extents("k") as chunk:
            with path.open("r+b") as file:
                file.seek(chunk.descriptors[0].offset_bytes + 70_000)
                file.write(b"\0")
            assert chunk.tensors(moved(chunk)) is None
        assert not store.contains("k")
        assert store.stats()["get_checksum_mismatch"] == 1
        assert store.stats()["quarantined_bytes"] == 1 << 20
        assert store.extents("k") is None


def test_the_extents_of_an_array(image_dir: Path) -> None:
    paths = [image_dir / f"{one}.img" for one in "abc"]
    blockkv.format(paths, size="32MiB")
    with blockkv.open(paths) as store:
        values = {f"{one}": torch.randint(256, (1 << 20,), dtype=torch.uint8) for one in range(6)}
        store.put_many(values)
        places = set()
        for key, value in values.items():
            with store.extents(key) as chunk:
                places.add(os.fstat(chunk.descriptors[0].fd).st_ino)
                assert torch.equal(chunk.tensors(moved(chunk)), value)
        assert len(places) == 3
        assert store.extents("elsewhere") is None


def test_another_process_may_read_them(image_dir: Path) -> None:
    blockkv.format(image_dir / "a.img", size="32MiB")
    with blockkv.open(image_dir / "a.img") as store:
        store.put("k", b"abcd" * 1024)
        with store.extents("k") as chunk:
            fd, offset_bytes, length_bytes = chunk.descriptors[0]
            program = (
                "import mmap, os, sys\nmemory = mmap.mmap(-1, 4096)\n"
                f"os.preadv({fd}, [memory], {offset_bytes})\nsys.stdout.buffer.write(memory[:{length_bytes}])"
            )
            done = subprocess.run(
                [sys.executable, "-c", program], pass_fds=[fd], capture_output=True, check=True
            )
            assert chunk.verify(done.stdout)


def test_what_has_no_extents_to_give(store: blockkv.Store, image_dir: Path) -> None:
    store.put("k", b"1234")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="no device that others could read"):
            store.extents("k")
    store.delete("k", durable=True)
    assert store.stats()["pending_free_bytes"] == 0  # no lease is left
    blockkv.format(image_dir / "a.img", size="32MiB")
    with blockkv.open(image_dir / "a.img") as other, other.reserve("grows", 1 << 20) as grown:
        grown.append(torch.ones(4096), durable=True)
        assert other.extents("grows") is None
        grown.append(torch.ones(4096), durable=True)
    with pytest.raises(StoreClosed):
        other.extents("k")


def test_the_lease_ends_with_the_store(image_dir: Path) -> None:
    blockkv.format(image_dir / "a.img", size="32MiB")
    with blockkv.open(image_dir / "a.img") as store:
        store.put("k", torch.ones(4096, dtype=torch.uint8))
        chunk = store.extents("k")
    memory = moved(chunk)
    assert chunk.verify(memory)
    memory[0] = 0
    assert not chunk.verify(memory)
    chunk.close()


def test_forgotten_ones_give_back_their_descriptor(image_dir: Path) -> None:
    blockkv.format(image_dir / "a.img", size="32MiB")
    with blockkv.open(image_dir / "a.img") as store:
        store.put("k", torch.ones(4096, dtype=torch.uint8))
        forgotten = [store.extents("k")]
        fd = forgotten[0].descriptors[0].fd
        with pytest.warns(ResourceWarning, match="not closed"):
            forgotten.clear()
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)


def test_the_simulated_device_is_the_only_one_without(device: SimulatedDevice) -> None:
    with pytest.raises(InvalidArgument):
        device.open_reader()
