"""A disk that held a store and was given to something else is not written to as a store."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import blockkv
from blockkv.errors import NotFormatted, OccupiedError, StoreFull
from blockkv.format.geometry import MEBIBYTE, slot_offsets
from blockkv.store.enlarge import grow_device
from blockkv.store.key_slot_changes import add_key_slot
from blockkv.store.wipe import wipe_device

pytestmark = [
    pytest.mark.requires_root,
    pytest.mark.requires_tool("mkfs.ext4", "mkfs.xfs", "mkswap", "cryptsetup"),
    pytest.mark.requires_tool("pvcreate", "sfdisk", "wipefs"),
]

SIZE_BYTES = 304 * MEBIBYTE
USES = {
    "ext4": "mkfs.ext4 -q -F -E nodiscard {}",
    "xfs": "mkfs.xfs -q -f -K {}",
    "swap": "mkswap -f {}",
    "LVM2_member": "pvcreate -qq -ff -y {}",
    "crypto_LUKS": "cryptsetup luksFormat -q --type luks2 --pbkdf pbkdf2 --pbkdf-force-iterations 1000 {} -",
    "gpt": "sfdisk -q --wipe always {}",
    "dos": "sfdisk -q --wipe always {}",
}
INPUTS = {
    "crypto_LUKS": "secret",
    "gpt": "label: gpt\nsize=64MiB\nsize=64MiB\n",
    "dos": "label: dos\nsize=64MiB\n",
}


@pytest.fixture
def store_path(loop_device: Callable[..., Path]) -> Path:
    path = loop_device(SIZE_BYTES)
    blockkv.format(path, average_chunk="64KiB")
    with blockkv.open(path) as store:
        for number in range(8):
            store.put(f"chunk {number}", chunk(number))
    return path


def assert_right_or_missing(store: blockkv.Store) -> None:
    for number in range(8):
        found = store.get(f"chunk {number}")
        assert found is None or bytes(found.numpy()) == chunk(number)


def chunk(number: int) -> bytes:
    return bytes([number]) * 100_000


def give_to(path: Path, use: str) -> None:
    command = shlex.split(USES[use].format(path))
    subprocess.run(command, input=INPUTS.get(use), text=True, check=True, capture_output=True)


def content_of(path: Path) -> str:
    with path.open("rb") as device:
        return hashlib.file_digest(device, "sha256").hexdigest()


@pytest.mark.parametrize("use", USES)
def test_nothing_opens_it_for_writing(store_path: Path, use: str) -> None:
    with blockkv.open(store_path, read_only=True) as store:
        uuid = store.info()["uuid"]
    give_to(store_path, use)
    before = content_of(store_path)
    for attempt in (
        lambda: blockkv.open(store_path),
        lambda: blockkv.format(store_path),
        lambda: grow_device(store_path),
        lambda: add_key_slot(store_path, bytes(32)),
        lambda: wipe_device(store_path, uuid),
    ):
        with pytest.raises(OccupiedError) as caught:
            attempt()
        assert str(store_path) in str(caught.value)
        assert use in str(caught.value)
    with blockkv.open(store_path, read_only=True) as store:
        assert_right_or_missing(store)
    assert content_of(store_path) == before


@pytest.mark.parametrize("use", ["ext4", "gpt"])
def test_what_is_printed_clears_it(store_path: Path, use: str) -> None:
    give_to(store_path, use)
    for _ in range(4):
        try:
            with blockkv.open(store_path) as store:
                assert_right_or_missing(store)
            break
        except OccupiedError as error:
            line = str(error).splitlines()[1]
            subprocess.run(line.split("to clear it: ")[1], shell=True, check=True, capture_output=True)
    else:
        pytest.fail("it is still refused")


def test_bytes_nobody_knows(store_path: Path) -> None:
    """Whatever writes behind the first superblock is somebody else; the command takes no superblock away."""
    with store_path.open("r+b") as device:
        device.seek(slot_offsets(SIZE_BYTES)[2] + 8192)
        device.write(b"a header of a format without a name")
    with pytest.raises(OccupiedError, match=r"from byte 532480 to byte 532514.*") as caught:
        blockkv.open(store_path)
    command = str(caught.value).split("to clear it: ")[1]
    subprocess.run(command, shell=True, check=True, capture_output=True)
    with blockkv.open(store_path) as store:
        assert_right_or_missing(store)
        assert "chunk 7" in store
        assert not store.check().findings


@pytest.mark.parametrize("slot", range(8))
def test_bytes_behind_any_superblock(store_path: Path, slot: int) -> None:
    with store_path.open("r+b") as device:
        device.seek(slot_offsets(SIZE_BYTES)[slot] + 200_000)
        device.write(b"?")
    with pytest.raises(OccupiedError, match="bytes that are not zero"):
        blockkv.open(store_path)
    with blockkv.open(store_path, read_only=True) as store:
        assert "chunk 7" in store


def test_a_store_in_a_partition_is_none_of_the_disk(image_dir: Path) -> None:
    """Where the disk is no whole number of MiB its last one may begin where that of the partition does."""
    image, odd_bytes = image_dir / "disk.img", 400 << 10
    with image.open("wb") as file:
        file.truncate(64 * MEBIBYTE + odd_bytes)
    table = "label: gpt\nstart=1MiB, size=63MiB\n"
    subprocess.run(["sfdisk", "-q", image], input=table, text=True, check=True, capture_output=True)
    inside = ["losetup", "-f", "--show", "-o", str(MEBIBYTE), "--sizelimit", str(63 * MEBIBYTE), image]
    partition = subprocess.run(inside, text=True, check=True, capture_output=True).stdout.strip()
    try:
        blockkv.format(partition)
        with blockkv.open(partition) as store:
            store.put("a", b"a", durable=True)
    finally:
        subprocess.run(["losetup", "-d", partition], check=True)
    assert set(slot_offsets(64 * MEBIBYTE + odd_bytes)) & {
        MEBIBYTE + offset for offset in slot_offsets(63 * MEBIBYTE)
    }
    before = content_of(image)
    with pytest.raises(NotFormatted):
        blockkv.open(image)
    assert content_of(image) == before


def test_what_is_behind_the_store_is_not_on_it(image_dir: Path) -> None:
    """A copy on a larger disk, whose end still has the spare copy of a partition table."""
    image, larger = image_dir / "kv.img", image_dir / "larger.img"
    blockkv.format(image, size=64 * MEBIBYTE)
    with blockkv.open(image) as store:
        store.put("a", b"a", durable=True)
    with larger.open("wb") as file:
        file.truncate(80 * MEBIBYTE)
    table = "label: gpt\nsize=8MiB\n"
    subprocess.run(["sfdisk", "-q", larger], input=table, text=True, check=True, capture_output=True)
    with larger.open("r+b") as file:
        file.write(image.read_bytes())
    with blockkv.open(larger) as store:
        assert store.get("a") is not None
    assert grow_device(larger)["grown"]
    with blockkv.open(larger) as store:
        assert store.get("a") is not None


def test_payload_that_looks_like_something(store_path: Path) -> None:
    """libblkid looks for some signatures before the last MiB, where there are chunks."""
    signature = b"Promise Technology, Inc.".ljust(512, b"\0")
    with blockkv.open(store_path, evict=False) as store, contextlib.suppress(StoreFull):
        for number in range(1000):
            store.put(f"full {number}", signature * 4096)
    found = subprocess.run(["wipefs", "--no-act", store_path], text=True, check=True, capture_output=True)
    assert "promise" in found.stdout
    with store_path.open("r+b") as device:
        device.seek(slot_offsets(SIZE_BYTES)[1])
        device.write(b"\x5a" * 4096)
    with blockkv.open(store_path) as store:
        assert_right_or_missing(store)


def test_without_wipefs(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockkv.device.occupancy.WIPEFS", "wipefs-that-is-not-there")
    for slot, refused in ((3, False), (0, True)):
        with store_path.open("r+b") as device:
            device.seek(slot_offsets(SIZE_BYTES)[slot])
            device.write(b"\x5a" * 4096)
        if refused:
            with pytest.raises(OccupiedError, match="install util-linux"):
                blockkv.open(store_path)
        else:
            blockkv.open(store_path).close()


def test_damaged_superblocks_are_no_reason(store_path: Path) -> None:
    with store_path.open("r+b") as device:
        for slot in (0, 5):
            device.seek(slot_offsets(SIZE_BYTES)[slot])
            device.write(b"\x5a" * 4096)
    with blockkv.open(store_path) as store:
        assert_right_or_missing(store)
        assert "chunk 7" in store
