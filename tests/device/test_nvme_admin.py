"""What an NVMe drive says of itself, from its bytes. With a drive: `tests/vm/guest_doctor.py`."""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from blockkv.device import nvme_admin
from blockkv.device.nvme_admin import (
    EnduranceGroup,
    Fdp,
    Health,
    LbaFormat,
    PlacementHandle,
    ask,
    ask_fdp,
    parse_endurance_group,
    parse_fdp_statistics,
    parse_health,
    parse_namespace,
    parse_placement_handles,
    parse_reclaim_unit_bytes,
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


def handle_status(*handles: tuple[int, int, int]) -> bytes:
    """Reclaim Unit Handle Status: (placement identifier, reclaim unit handle, LBAs left)."""
    data = bytearray(16)
    struct.pack_into("<H", data, 14, len(handles))
    for identifier, handle, room in handles:
        data += struct.pack("<HHIQ", identifier, handle, 77, room) + bytes(16)
    return bytes(data)


def configurations(*units_bytes: int) -> bytes:
    """FDP Configurations: descriptors of different lengths, for reclaim units of these sizes."""
    body = b""
    for number, unit_bytes in enumerate(units_bytes, 1):
        handles = 4 * number
        descriptor = struct.pack(
            "<HBBIHHIQI", 64 + 4 * handles, 0x80, 0, 1, handles, handles - 1, 8, unit_bytes, 9
        )
        body += descriptor.ljust(64, b"\0") + b"\1\0\0\0" * handles
    return struct.pack("<HBBI8x", len(units_bytes) - 1, 0, 0, 16 + len(body)) + body


def test_placement_handles_are_in_the_order_of_their_identifiers() -> None:
    found = parse_placement_handles(handle_status((2, 7, 10), (0, 5, 1 << 40), (1, 6, 0)) + bytes(100))
    assert found == (PlacementHandle(0, 5, 1 << 40), PlacementHandle(1, 6, 0), PlacementHandle(2, 7, 10))
    assert parse_placement_handles(handle_status()) == ()
    assert parse_placement_handles(bytes(4096)) == ()


def test_the_size_of_a_reclaim_unit_is_that_of_the_configuration_in_use() -> None:
    log = configurations(1 << 30, 6 << 30, 13 << 30)
    assert [parse_reclaim_unit_bytes(log, index) for index in range(3)] == [1 << 30, 6 << 30, 13 << 30]
    assert parse_reclaim_unit_bytes(log, 3) == 0
    assert parse_reclaim_unit_bytes(log[:100], 1) == 0
    assert parse_reclaim_unit_bytes(b"", 0) == 0


def test_statistics_are_counts_of_16_bytes() -> None:
    log = (1 << 70).to_bytes(16, "little") + (1 << 71).to_bytes(16, "little") + bytes(32)
    assert parse_fdp_statistics(log) == (1 << 70, 1 << 71)


@dataclass
class Drive:
    """Answers commands as one with FDP does. What is `refused` ends as it does for a user who may not."""

    offers: bool = True
    group: int = 1
    on: bool = True
    handles: bytes = handle_status((0, 4, 100), (1, 5, 200))
    refused: set[int] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)

    def send(
        self,
        path: str,
        descriptor: int,
        opcode: int,
        nsid: int,
        cdw10: int,
        cdw11: int,
        data_bytes: int,
        request: int = nvme_admin.NVME_IOCTL_ADMIN_CMD,
    ) -> tuple[bytes, int]:
        self.asked.append(opcode)
        if opcode in self.refused:
            raise DeviceError(f"{path}: refused", errno.EACCES)
        if opcode == nvme_admin.IO_MANAGEMENT_RECEIVE:
            assert (request, nsid, cdw10) == (nvme_admin.NVME_IOCTL_IO_CMD, 3, 1)
            assert cdw11 == data_bytes // 4 - 1
            return self.handles[:data_bytes].ljust(data_bytes, b"\0"), 0
        assert request == nvme_admin.NVME_IOCTL_ADMIN_CMD
        if opcode == nvme_admin.GET_FEATURES:
            assert (cdw10, cdw11) == (0x1D, self.group)
            return b"", 1 << 8 | self.on
        if opcode == nvme_admin.GET_LOG_PAGE:
            assert cdw11 >> 16 == self.group
            assert ((cdw11 & 0xFFFF) << 16 | cdw10 >> 16) == data_bytes // 4 - 1
            statistics = (1000).to_bytes(16, "little") + (1500).to_bytes(16, "little") + bytes(32)
            log = {0x20: configurations(1 << 20, 1 << 30), 0x22: statistics}[cdw10 & 0xFF]
            return log[:data_bytes], 0
        data = bytearray(4096)
        if cdw10 == nvme_admin.IDENTIFY_CONTROLLER:
            struct.pack_into("<I", data, 96, self.offers << 19)
        else:
            data = identify_data({0: (0, 12, 0)}, 0)
            struct.pack_into("<H", data, 102, self.group)
        return bytes(data), 0

    def fdp(self, monkeypatch: pytest.MonkeyPatch) -> Fdp | None:
        monkeypatch.setattr(nvme_admin, "_send", self.send)
        monkeypatch.setattr(nvme_admin, "_nsid", lambda path, descriptor: 3)
        return ask_fdp("/dev/ng9n3", -1)


def test_what_a_drive_with_placement_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Drive().fdp(monkeypatch)
    handles = (PlacementHandle(0, 4, 100), PlacementHandle(1, 5, 200))
    assert found == Fdp(handles, 1 << 30, host_bytes=1000, media_bytes=1500)
    assert not found.has_groups
    several = Drive(handles=handle_status((0, 4, 1), (1, 5, 1), (0x8000, 4, 1), (0x8001, 5, 1)))
    grouped = several.fdp(monkeypatch)
    assert grouped is not None
    assert grouped.has_groups


@pytest.mark.parametrize("drive", [Drive(offers=False), Drive(group=0), Drive(on=False)])
def test_a_drive_without_it_is_not_asked_what_it_does_not_know(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert drive.fdp(monkeypatch) is None
    assert nvme_admin.IO_MANAGEMENT_RECEIVE not in drive.asked
    assert (nvme_admin.GET_FEATURES in drive.asked) == (drive.offers and drive.group > 0)


def test_handles_are_told_to_who_may_not_ask_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {nvme_admin.GET_FEATURES, nvme_admin.GET_LOG_PAGE}
    found = Drive(refused=refused).fdp(monkeypatch)
    assert found is not None
    assert ([one.identifier for one in found.handles], found.reclaim_unit_bytes, found.host_bytes) == (
        [0, 1],
        0,
        0,
    )
    with pytest.raises(DeviceError):
        Drive(refused={nvme_admin.IO_MANAGEMENT_RECEIVE}).fdp(monkeypatch)


def test_more_handles_than_one_answer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(handles=handle_status(*((number, number, 1) for number in range(300))))
    found = drive.fdp(monkeypatch)
    assert found is not None
    assert [one.identifier for one in found.handles] == list(range(300))
    assert drive.asked.count(nvme_admin.IO_MANAGEMENT_RECEIVE) == 2
