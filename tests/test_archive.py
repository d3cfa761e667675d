"""Chunks that are copied, dumped and loaded arrive as they were put, or are counted as lost."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv import archive
from blockkv.archive import END, Moved, copy, dump, load
from blockkv.catalog.wear import WriteBudget
from blockkv.errors import ArchiveError
from blockkv.testing import SimulatedDevice

MIB = 1 << 20


def content(size_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


CHUNKS: dict[str | bytes, Any] = {
    "bytes": content(100_001, 1),
    "kv": {"k": content(65536, 2).view(torch.bfloat16).view(8, -1, 64), "v": torch.ones(3, 5)},
    "list ü": [torch.arange(7), torch.tensor(2.5), torch.ones(1, dtype=torch.bool)],
    b"\x00\xff binary": content(4096, 3),
    "large": content(70 * MIB, 4),
    **{f"small {number}": content(1 + number * 37, number) for number in range(300)},
}


def new_store(size_mib: int = 192, **options: Any) -> blockkv.Store:
    device = SimulatedDevice(size_mib * MIB)
    blockkv.format(device, average_chunk="64KiB")
    return blockkv.open(device, **options)


@pytest.fixture
def source() -> Iterator[blockkv.Store]:
    with new_store() as store:
        assert all(store.put_many(list(CHUNKS.items())))
        yield store


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(equal(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    same_kind = found.dtype == expected.dtype and found.shape == expected.shape
    bits, wanted = (one.flatten().view(torch.uint8) for one in (found, expected))  # there are NaNs
    return same_kind and torch.equal(bits, wanted)


def assert_same(target: blockkv.Store, source: blockkv.Store) -> None:
    assert list(target.keys()) == list(source.keys()), "the order of eviction goes along"
    for key, expected in CHUNKS.items():
        assert equal(target.get(key), expected)
        theirs, ours = source.entry(key), target.entry(key)
        assert theirs is not None
        assert ours is not None
        assert ours.layout == theirs.layout
        assert ours.durable


def everything() -> Moved:
    size_bytes = sum(
        sum(one.nbytes for one in (value.values() if isinstance(value, dict) else value))
        if isinstance(value, dict | list)
        else value.nbytes
        for value in CHUNKS.values()
    )
    return Moved(chunks=len(CHUNKS), payload_bytes=size_bytes)


def test_a_copy_is_the_same(source: blockkv.Store) -> None:
    source.touch("small 5")
    told: list[tuple[int, int]] = []
    with new_store() as target:
        assert copy(source, target, progress=lambda *one: told.append(one)) == everything()
        assert_same(target, source)
        assert copy(source, target) == Moved(existing=len(CHUNKS)), "all of it can be done again"
    assert told[-1] == (len(CHUNKS) - 1, len(CHUNKS))


def test_an_archive_holds_everything_and_tar_lists_it(source: blockkv.Store, tmp_path: Path) -> None:
    file = tmp_path / "kv.tar"
    with file.open("wb") as opened:
        assert dump(source, opened) == everything()
    listed = subprocess.run(["tar", "tf", file], capture_output=True, text=True, check=True).stdout.split()
    assert len(listed) == len(CHUNKS) + 2
    with new_store() as target, file.open("rb") as opened:
        assert load(opened, target) == everything()
        assert_same(target, source)
        opened.seek(0)
        assert load(opened, target) == Moved(existing=len(CHUNKS))


def archive_of(source: blockkv.Store) -> bytes:
    file = io.BytesIO()
    dump(source, file)
    return file.getvalue()


@pytest.fixture
def small() -> Iterator[blockkv.Store]:
    with new_store(64) as store:
        store.put_many([(f"k{number}", content(5000, number)) for number in range(20)])
        yield store


def test_an_archive_that_was_cut_short_says_so(small: blockkv.Store) -> None:
    whole = archive_of(small)
    end = whole.index(END.encode())
    for length in [*range(1, end, 3333), end, end + 511]:
        with new_store(64) as target:
            with pytest.raises(ArchiveError, match=r"cut short|beyond chunk|no archive"):
                load(io.BytesIO(whole[:length]), target)
            for key in list(target.keys()):
                assert torch.equal(target.get(key), small.get(key)), "what came before the cut is right"


def test_every_damaged_byte_is_noticed_or_harmless(small: blockkv.Store) -> None:
    whole = archive_of(small)
    for position in range(0, len(whole), 977):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        with new_store(64) as target:
            try:
                moved = load(io.BytesIO(damaged), target)
            except ArchiveError:
                moved = None
            found = list(target.keys())
            for key in found:
                assert torch.equal(target.get(key), small.get(key))
            assert moved is None or moved.chunks == len(found) == 20 - moved.lost


def test_other_files_are_no_archives(tmp_path: Path) -> None:
    other = io.BytesIO()
    with tarfile.open(fileobj=other, mode="w") as archive:
        member = tarfile.TarInfo("some/file")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"abc"))
    newer = io.BytesIO()
    with tarfile.open(fileobj=newer, mode="w") as archive:
        member, text = tarfile.TarInfo("blockkv-archive.json"), json.dumps({"version": 2}).encode()
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    with new_store(64) as target:
        for content_, said in (
            (b"", "empty file"),
            (b"x" * 5000, "no archive|cannot be read"),
            (other.getvalue(), "no archive"),
            (newer.getvalue(), "version 2"),
        ):
            with pytest.raises(ArchiveError, match=said):
                load(io.BytesIO(content_), target)
        assert len(target) == 0


def test_members_that_lie_are_left_out(small: blockkv.Store) -> None:
    lying = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive_of(small))) as whole,
        tarfile.open(fileobj=lying, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for number, member in enumerate(whole.getmembers()):
            file = whole.extractfile(member)
            headers = dict(member.pax_headers)
            if number == 1:
                headers["BLOCKKV.key"] = "zz"
            elif number == 2:
                headers["BLOCKKV.layout"] = b'J["tensor",[["","uint8",[1099511627776]]]]'.hex()
            elif number == 3:
                headers["BLOCKKV.key"] = b"another".hex()
            elif number == 4:
                headers["BLOCKKV.key"] = ""
            elif number == 5:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
            member.pax_headers = headers
            archive.addfile(member, file if number != 5 else None)
    with new_store(64) as target:
        lying.seek(0)
        moved = load(lying, target)
        assert (moved.chunks, moved.lost) == (15, 5)
        assert target.get("another") is None


def test_what_cannot_be_read_is_left_out_and_counted(small: blockkv.Store) -> None:
    entry = small.entry("k7")
    assert entry is not None
    device = small._state.device
    assert isinstance(device, SimulatedDevice)
    start_bytes = small._state.geometry.unit_offset(entry.extents[0][0])
    device.flip_bit(start_bytes + 100, 3)
    with new_store(64) as target:
        moved = copy(small, target)
        assert (moved.chunks, moved.lost, moved.complete) == (19, 1, False)
        assert target.get("k7") is None


def test_a_smaller_target_keeps_what_was_used_last(source: blockkv.Store) -> None:
    with new_store(32) as target:
        moved = copy(source, target)
        assert (moved.lost, moved.refused) == (0, 0)
        assert moved.no_room == 1, "the large one"
        assert equal(target.get("small 299"), CHUNKS["small 299"])
    with new_store(32, evict=False) as target:
        target.put_many([(f"first {number}", content(MIB, number)) for number in range(25)])
        moved = copy(source, target)
        assert moved.no_room >= 1
        assert moved.chunks + moved.no_room == len(CHUNKS)
        assert target.lookup([f"first {number}" for number in range(25)]) == 25


@pytest.fixture
def many() -> Iterator[blockkv.Store]:
    with new_store(64) as store:
        store.put_many([(f"k{number:02}", content(MIB, number)) for number in range(39)])
        yield store


@pytest.mark.parametrize("by_archive", [False, True], ids=["copy", "load"])
@pytest.mark.parametrize("batch_bytes", [4 * MIB, 64 * MIB])
def test_a_smaller_target_stays_as_it_is_when_it_is_done_again(
    many: blockkv.Store, by_archive: bool, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "BATCH_BYTES", batch_bytes)
    file = archive_of(many)

    def move(target: blockkv.Store) -> Moved:
        return load(io.BytesIO(file), target) if by_archive else copy(many, target)

    with new_store(24) as target:
        moved = move(target)
        kept = list(target.keys())
        assert 10 < len(kept) < 30
        assert kept == list(many.keys())[-len(kept) :], "what was used last"
        gone = 39 - len(kept)
        assert moved == Moved(chunks=len(kept), payload_bytes=len(kept) * MIB, evicted=gone)
        assert not moved.complete
        for _ in range(3):
            assert move(target) == Moved(existing=len(kept), evicted=gone)
            assert list(target.keys()) == kept


@pytest.mark.parametrize("stopped_at", [6, 18, 30, 37])
@pytest.mark.parametrize("again", [False, True])
def test_a_smaller_target_after_an_interruption(
    many: blockkv.Store, stopped_at: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first command, and of one that was done again."""
    monkeypatch.setattr(archive, "BATCH_BYTES", 4 * MIB)

    def stop(done: int, _: int) -> None:
        if done == stopped_at:
            raise KeyboardInterrupt

    with new_store(24) as target:
        target.put_many([(f"other {number}", content(MIB, number)) for number in range(3)])
        if again:
            copy(many, target)
        with pytest.raises(KeyboardInterrupt):
            copy(many, target, progress=stop)
        moved = copy(many, target)
        kept = list(target.keys())
        assert kept == list(many.keys())[-len(kept) :], "what was used last"
        assert (moved.chunks + moved.existing, moved.evicted) == (len(kept), 39 - len(kept))
        assert all(torch.equal(target.get(key), many.get(key)) for key in kept)


def test_what_was_there_before_is_older(many: blockkv.Store) -> None:
    """Also where it is in another order than at the source."""
    keys = list(many.keys())
    with new_store(24) as target:
        target.put_many([(f"k{number:02}", content(MIB, number)) for number in range(38, 5, -3)])
        copy(many, target)
        kept = list(target.keys())
        assert kept == keys[-len(kept) :]


def test_what_the_target_does_not_want_is_counted(small: blockkv.Store) -> None:
    with new_store(64, write_budget=WriteBudget(1 << 30, lambda: 0.0)) as target:
        moved = copy(small, target)
        assert (moved.chunks, moved.refused, moved.complete) == (0, 20, False)
