"""NVMe passthrough without NVMe: formats, names and refusals. The rest is `tests/vm/guest_passthrough.py`."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

import blockkv
from blockkv.device.base import Limits
from blockkv.device.engine import NativeDevice
from blockkv.device.namespace import open_namespace, probe
from blockkv.device.passthrough import LbaFormat, block_device_of, check_format, parse_identify

MIB = 1 << 20
LIMITS = Limits(
    size_bytes=MIB,
    lba_bytes=4096,
    memory_alignment_bytes=4,
    max_transfer_bytes=512 * 1024,
    volatile_write_cache=True,
    fua=True,
    discard_granularity_bytes=4096,
)
PLAIN = LbaFormat(lba_count=256, lba_bytes=4096, metadata_bytes=0, protection_type=0)


def identify_data(
    formats: dict[int, tuple[int, int]], formatted: int, protection: int = 0, lba_count: int = 256
) -> bytes:
    """Identify Namespace: `formats` are (metadata bytes, LBA shift) by index."""
    data = bytearray(4096)
    struct.pack_into("<QQQ", data, 0, lba_count, lba_count, lba_count)
    data[25], data[26], data[29] = max(formats), formatted, protection
    for index, (metadata_bytes, lba_shift) in formats.items():
        struct.pack_into("<HBB", data, 128 + 4 * index, metadata_bytes, lba_shift, 0)
    return bytes(data)


def test_the_format_in_use_is_read() -> None:
    formats = {0: (0, 9), 1: (8, 9), 4: (0, 12), 5: (64, 12)}
    assert parse_identify(identify_data(formats, 0)) == replace(PLAIN, lba_bytes=512)
    assert parse_identify(identify_data(formats, 4)) == PLAIN
    # bit 4: metadata at the end of the data; it does not belong to the index
    assert parse_identify(identify_data(formats, 5 | 1 << 4)) == replace(PLAIN, metadata_bytes=64)
    assert parse_identify(identify_data(formats, 1, protection=0b1001)) == LbaFormat(256, 512, 8, 1)
    # bits 5 and 6 are the upper part of the index
    assert parse_identify(identify_data({0x23: (0, 13)}, 0x43)) == replace(PLAIN, lba_bytes=8192)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metadata_bytes": 8}, "8 bytes of metadata beside every LBA"),
        ({"protection_type": 2}, "protection information of type 2"),
        ({"lba_bytes": 8192}, "LBAs of 8192 bytes"),
        ({"lba_bytes": 1}, "LBAs of 1 bytes"),
        ({"lba_bytes": 512, "lba_count": 2048}, "2048 LBAs of 512 bytes, the kernel 256 of 4096"),
        ({"lba_count": 255}, "255 LBAs of 4096 bytes, the kernel 256 of 4096"),
    ],
)
def test_formats_that_plain_commands_would_get_wrong(changes: dict[str, int], words: str) -> None:
    check_format("/dev/nvme9n9", PLAIN, LIMITS)
    with pytest.raises(blockkv.DeviceError, match=words):
        check_format("/dev/nvme9n9", replace(PLAIN, **changes), LIMITS)


def test_a_file_and_a_loop_device_are_no_namespaces(image_dir: Path, block_targets) -> None:
    target = block_targets(8 * MIB)
    blockkv.format(target)
    with pytest.raises(blockkv.DeviceError, match="is no NVMe namespace"):
        blockkv.open(target, engine="passthrough")
    # and nothing is left open or locked
    with blockkv.open(target) as store:
        assert store.info()["engine"] != "passthrough"


def test_a_refused_device_is_closed_once(image_dir: Path) -> None:
    image = image_dir / "file.img"
    image.write_bytes(bytes(MIB))
    descriptor, canonical, limits = open_namespace(image)
    with pytest.raises(blockkv.DeviceError):
        NativeDevice(descriptor, canonical, limits, engine="passthrough")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert probe(image) == limits


def test_other_paths_name_no_character_device_of_a_namespace(image_dir: Path) -> None:
    image = image_dir / "file.img"
    image.touch()
    for path in (image, image_dir, "/dev/null", "/dev/ng99n99", image_dir / "absent"):
        assert block_device_of(path) is None
    with pytest.raises(blockkv.InvalidArgument):
        block_device_of("")
