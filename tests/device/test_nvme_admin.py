"""What an NVMe drive says of itself, from its bytes. With a drive: `tests/vm/guest_doctor.py`."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from blockkv.device.nvme_admin import (
    EnduranceGroup,
    Health,
    LbaFormat,
    ask,
    parse_endurance_group,
    parse_health,
    parse_namespace,
)
from blockkv.errors import DeviceError


def identify_data(formats: dict[int, tuple[int, int, int]], formatted: int, protection: int = 0) -> bytearray:
    """Identify Namespace: `formats` are (metadata bytes, LBA shift, relative performance) by index."""
    data = bytearray(4096)
    struct.pack_into("<QQQ", data, 0, 256, 256, 256)
    data[25], data[26], data[29] = max(formats), formatted, protection
    for index, one in formats.items():
        struct.pack_into("<HBB", data, 128 + 4 * index, *one)
    return data


def test_the_format_in_use_is_read() -> None:
    formats = {0: (0, 9, 2), 1: (8, 9, 0), 4: (0, 12, 0), 5: (64, 12, 0)}
    found = parse_namespace(bytes(identify_data(formats, 0)))
    assert (found.lba_count, found.lba_bytes, found.metadata_bytes, found.format_index) == (256, 512, 0, 0)
    assert found.formats == (
        LbaFormat(0, 512, 0, 2),
        LbaFormat(1, 512, 8, 0),
        LbaFormat(4, 4096, 0, 0),
        LbaFormat(5, 4096, 64, 0),
    ), "formats 2 and 3 are not there"
    # bit 4: metadata at the end of the data; it does not belong to the index
    found = parse_namespace(bytes(identify_data(formats, 5 | 1 << 4)))
    assert (found.lba_bytes, found.metadata_bytes) == (4096, 64)
    found = parse_namespace(bytes(identify_data(formats, 1, protection=0b1001)))
    assert (found.lba_bytes, found.metadata_bytes, found.protection_type) == (512, 8, 1)
    # bits 5 and 6 are the upper part of the index
    assert parse_namespace(bytes(identify_data({0x23: (0, 13, 0)}, 0x43))).lba_bytes == 8192


def test_what_is_not_told_is_not_made_up() -> None:
    data = identify_data({0: (0, 12, 0)}, 0)
    struct.pack_into("<H", data, 36, 15)
    struct.pack_into("<5H", data, 64, 31, 7, 3, 0, 63)
    silent = parse_namespace(bytes(data))
    assert (silent.atomic_write_lbas, silent.write_granularity_bytes, silent.optimal_write_bytes) == (0, 0, 0)
    assert silent.deallocated_reads == "not told"
    data[24], data[33] = 0b10010, 0b001
    struct.pack_into("<H", data, 102, 3)
    told = parse_namespace(bytes(data))
    assert told.atomic_write_lbas == 16
    assert (told.write_granularity_bytes, told.write_alignment_bytes) == (32 * 4096, 8 * 4096)
    assert (told.discard_granularity_bytes, told.optimal_write_bytes) == (4 * 4096, 64 * 4096)
    assert told.deallocated_reads == "zeros"
    assert told.endurance_group == 3


def test_health() -> None:
    log = bytearray(512)
    struct.pack_into("<BHBBB", log, 0, 0b1001, 273 + 41, 97, 10, 103)
    for offset, count in ((32, 5), (48, 1 << 70), (128, 4000), (144, 2), (160, 7)):
        log[offset : offset + 16] = count.to_bytes(16, "little")
    health = parse_health(bytes(log))
    assert health == Health(0b1001, 41, 97, 10, 103, 2_560_000, (1 << 70) * 512_000, 4000, 2, 7)
    assert health.warnings == ("available spare is low", "media is read-only")


def test_endurance_group() -> None:
    log = bytearray(512)
    for offset, count in ((32, 9), (48, 8), (64, 5), (80, 1 << 70), (96, 7)):
        log[offset : offset + 16] = count.to_bytes(16, "little")
    assert parse_endurance_group(bytes(log)) == EnduranceGroup(5 * 10**9, (1 << 70) * 10**9)


def test_a_file_is_no_drive(image_dir: Path) -> None:
    image = image_dir / "file.img"
    image.write_bytes(bytes(4096))
    with image.open("rb") as file, pytest.raises(DeviceError, match="is no NVMe namespace"):
        ask(str(image), file.fileno())
