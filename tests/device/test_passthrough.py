"""NVMe passthrough without NVMe: names and refusals. The rest is `tests/vm/guest_passthrough.py`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import blockkv
from blockkv.device.base import Limits
from blockkv.device.engine import NativeDevice
from blockkv.device.namespace import open_namespace, probe
from blockkv.device.nvme_admin import Namespace
from blockkv.device.passthrough import block_device_of, check_format

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
PLAIN = Namespace(
    lba_count=256,
    lba_bytes=4096,
    metadata_bytes=0,
    protection_type=0,
    formats=(),
    format_index=0,
    deallocated_reads="zeros",
    atomic_write_lbas=0,
    write_granularity_bytes=0,
    write_alignment_bytes=0,
    discard_granularity_bytes=0,
    optimal_write_bytes=0,
    endurance_group=0,
)


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
