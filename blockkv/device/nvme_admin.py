"""What an NVMe drive says of itself: Identify, SMART, features and data placement, by commands that read.

Structures are those of the NVM Express Base Specification 2.0 (Identify Controller, figure 275; SMART /
Health, figure 207; Endurance Group Information, log 09h), of the NVM Command Set Specification 1.0 (Identify
Namespace, figure 97) and of TP4146 (Flexible Data Placement, FDP; in the Base Specification since 2.1).

Invariant: no command here changes anything on the drive. Not here: what a store makes of the answers
(`examine`), and the commands that move payload (`native/passthrough.c`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
from dataclasses import dataclass

from blockkv.errors import DeviceError

__all__ = [
    "Drive",
    "EnduranceGroup",
    "Fdp",
    "Health",
    "LbaFormat",
    "Namespace",
    "PlacementHandle",
    "ask",
    "ask_fdp",
    "identify_namespace",
    "permission_hint",
]

NVME_IOCTL_ID = 0x4E40
NVME_IOCTL_ADMIN_CMD = 0xC0484E41
NVME_IOCTL_IO_CMD = 0xC0484E43
"""<linux/nvme_ioctl.h>: _IO('N', 0x40), the nsid; _IOWR('N', 0x41 or 0x43, struct nvme_passthru_cmd)."""
ADMIN_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
"""struct nvme_passthru_cmd: opcode, flags, reserved, nsid, cdw2-3, metadata, address, length of metadata and
of data, cdw10-15, timeout in ms, result."""
RESULT_OFFSET = 68

GET_LOG_PAGE, IDENTIFY, GET_FEATURES = 0x02, 0x06, 0x0A
IDENTIFY_NAMESPACE, IDENTIFY_CONTROLLER = 0x00, 0x01
IDENTIFY_BYTES = 4096
HEALTH_LOG, ENDURANCE_GROUP_LOG, LOG_BYTES = 0x02, 0x09, 512
FDP_FEATURE = 0x1D
FDP_CONFIGURATIONS_LOG, FDP_STATISTICS_LOG = 0x20, 0x22
FDP_STATISTICS_BYTES = 64
FDP_CONFIGURATIONS_MOST_BYTES = 1 << 20
IO_MANAGEMENT_RECEIVE = 0x12
RECLAIM_UNIT_HANDLE_STATUS = 0x01
HANDLE_STATUS = struct.Struct("<HHIQ16x")
"""Reclaim Unit Handle Status Descriptor: placement identifier, reclaim unit handle, seconds that its reclaim
unit may stay open, LBAs that it has room for."""
HANDLE_STATUS_HEADER_BYTES = 16
ALL_NAMESPACES = 0xFFFFFFFF
DATA_UNIT_BYTES = 512_000
"""What SMART counts reads and writes in: a thousand units of 512 bytes."""
BILLION = 10**9
"""What the endurance group log counts bytes in."""
KELVIN = 273


@dataclass(frozen=True, slots=True)
class LbaFormat:
    """One of the formats that a namespace can have."""

    index: int
    lba_bytes: int
    metadata_bytes: int
    """Of each LBA."""
    relative_performance: int
    """0: the best, to 3, degraded."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """From Identify Namespace. Granularities are 0 where the drive does not say."""

    lba_count: int
    lba_bytes: int
    metadata_bytes: int
    protection_type: int
    """0: no protection information."""
    formats: tuple[LbaFormat, ...]
    format_index: int
    deallocated_reads: str
    """What a deallocated LBA reads as: "zeros", "ones" or "not told"."""
    atomic_write_lbas: int
    """What a power failure does not tear; 0 where only the controller says."""
    write_granularity_bytes: int
    write_alignment_bytes: int
    discard_granularity_bytes: int
    optimal_write_bytes: int
    endurance_group: int


@dataclass(frozen=True, slots=True)
class Health:
    """From the SMART / Health log page."""

    critical_warning: int
    temperature_c: int
    spare_percent: int
    spare_threshold_percent: int
    used_percent: int
    """Of the life that the vendor expects; may go past 100."""
    read_bytes: int
    written_bytes: int
    power_on_hours: int
    unsafe_shutdowns: int
    media_errors: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """The bits of the critical warning, in words."""
        names = (
            "available spare is low",
            "temperature out of range",
            "reliability degraded",
            "media is read-only",
            "backup of volatile memory failed",
            "persistent memory region is unreliable",
        )
        return tuple(name for bit, name in enumerate(names) if self.critical_warning >> bit & 1)


@dataclass(frozen=True, slots=True)
class EnduranceGroup:
    """From the Endurance Group Information log page. 0 where the drive does not say."""

    written_bytes: int
    """By the host."""
    media_bytes: int
    """Written to the media: by the host, and by the drive for itself."""


@dataclass(frozen=True, slots=True)
class PlacementHandle:
    """One of the handles that a namespace may write by."""

    identifier: int
    """What a write names: reclaim group and number of the handle together."""
    reclaim_unit_handle: int
    """Of the endurance group; namespaces may share it."""
    room_lbas: int
    """What may be written before the drive goes on in another reclaim unit."""


@dataclass(frozen=True, slots=True)
class Fdp:
    """Flexible Data Placement of a namespace for which it is on. Bytes are those of its endurance group since
    then, and 0 where the drive does not tell this user.
    """

    handles: tuple[PlacementHandle, ...]
    """By identifier. A write that names none goes by the first."""
    reclaim_unit_bytes: int
    host_bytes: int
    """Written by hosts, metadata of LBAs included."""
    media_bytes: int
    """Written to the media for that: what hosts wrote and what the drive moved."""

    @property
    def has_groups(self) -> bool:
        """Whether there are several reclaim groups: each handle is there once in every one."""
        return len({one.reclaim_unit_handle for one in self.handles}) < len(self.handles)


@dataclass(frozen=True, slots=True)
class Drive:
    """Everything together."""

    model: str
    serial: str
    firmware: str
    volatile_write_cache: bool
    atomic_write_lbas: int
    """Of the controller: what a power failure does not tear, in LBAs of any namespace."""
    fdp_supported: bool
    fdp: Fdp | None
    """None where it is off for the namespace."""
    namespace: Namespace
    health: Health | None
    """None where the drive does not tell."""
    endurance_group: EnduranceGroup | None
    """That of the namespace; None where the drive has none, or does not tell."""


def ask(path: str, descriptor: int) -> Drive:
    """Everything the drive says of itself and of the namespace that `descriptor` is.

    Raises DeviceError where the kernel does not let this user send admin commands, or the drive refuses.
    """
    nsid = _nsid(path, descriptor)
    controller = identify_controller(path, descriptor)
    namespace = identify_namespace(path, descriptor, nsid)
    (atomic_lbas,) = struct.unpack_from("<H", controller, 528)
    fdp, health = None, None
    with contextlib.suppress(DeviceError):
        fdp = _fdp_of(path, descriptor, nsid, controller, namespace)
    with contextlib.suppress(DeviceError):
        health = parse_health(_log(path, descriptor, HEALTH_LOG))
    endurance_group = None
    if _attributes(controller) >> 4 & 1 and namespace.endurance_group:
        with contextlib.suppress(DeviceError):
            log = _log(path, descriptor, ENDURANCE_GROUP_LOG, namespace.endurance_group)
            endurance_group = parse_endurance_group(log)
    return Drive(
        _text(controller[24:64]),
        _text(controller[4:24]),
        _text(controller[64:72]),
        bool(controller[525] & 1),
        atomic_lbas + 1,
        _offers_fdp(controller),
        fdp,
        namespace,
        health,
        endurance_group,
    )


def identify_controller(path: str, descriptor: int) -> bytes:
    """The Identify Controller data structure. Raises DeviceError as `ask`."""
    data, _ = _send(path, descriptor, IDENTIFY, 0, IDENTIFY_CONTROLLER, 0, IDENTIFY_BYTES)
    return data


def ask_fdp(path: str, descriptor: int) -> Fdp | None:
    """Flexible Data Placement of a namespace; None where it is not offered, or off.

    Raises DeviceError as `ask`.
    """
    nsid = _nsid(path, descriptor)
    controller = identify_controller(path, descriptor)
    return _fdp_of(path, descriptor, nsid, controller, identify_namespace(path, descriptor, nsid))


def _nsid(path: str, descriptor: int) -> int:
    try:
        return fcntl.ioctl(descriptor, NVME_IOCTL_ID)
    except OSError as error:
        raise DeviceError(
            f"{path} is no NVMe namespace ({os.strerror(error.errno or 0)})", error.errno
        ) from None


def _attributes(controller: bytes) -> int:
    return int(struct.unpack_from("<I", controller, 96)[0])


def _offers_fdp(controller: bytes) -> bool:
    return bool(_attributes(controller) >> 19 & 1)


def _fdp_of(path: str, descriptor: int, nsid: int, controller: bytes, namespace: Namespace) -> Fdp | None:
    group = namespace.endurance_group
    # A command that a drive does not know would leave an entry in its error log: none is sent on spec.
    if not _offers_fdp(controller) or not group:
        return None
    setting = None
    with contextlib.suppress(DeviceError):  # since Linux 6.2 other users may ask the rest, but not this
        _, setting = _send(path, descriptor, GET_FEATURES, 0, FDP_FEATURE, group, 0)
        if not setting & 1:
            return None
    handles = _placement_handles(path, descriptor, nsid)
    unit_bytes = host_bytes = media_bytes = 0
    if setting is not None:
        with contextlib.suppress(DeviceError):
            head = _log(path, descriptor, FDP_CONFIGURATIONS_LOG, group, 16, 0)
            size_bytes = min(struct.unpack_from("<I", head, 4)[0], FDP_CONFIGURATIONS_MOST_BYTES)
            log = _log(path, descriptor, FDP_CONFIGURATIONS_LOG, group, size_bytes // 4 * 4, 0)
            unit_bytes = parse_reclaim_unit_bytes(log, setting >> 8 & 0xFF)
        with contextlib.suppress(DeviceError):
            log = _log(path, descriptor, FDP_STATISTICS_LOG, group, FDP_STATISTICS_BYTES, 0)
            host_bytes, media_bytes = parse_fdp_statistics(log)
    return Fdp(handles, unit_bytes, host_bytes, media_bytes)


def _placement_handles(path: str, descriptor: int, nsid: int) -> tuple[PlacementHandle, ...]:
    """By I/O Management Receive, which changes nothing."""
    data_bytes = IDENTIFY_BYTES
    while True:
        data, _ = _send(
            *(path, descriptor, IO_MANAGEMENT_RECEIVE, nsid, RECLAIM_UNIT_HANDLE_STATUS, data_bytes // 4 - 1),
            data_bytes,
            NVME_IOCTL_IO_CMD,
        )
        wanted_bytes = HANDLE_STATUS_HEADER_BYTES + HANDLE_STATUS.size * struct.unpack_from("<H", data, 14)[0]
        if wanted_bytes <= data_bytes:
            return parse_placement_handles(data)
        data_bytes = wanted_bytes


def parse_placement_handles(data: bytes) -> tuple[PlacementHandle, ...]:
    """From the Reclaim Unit Handle Status data structure."""
    (count,) = struct.unpack_from("<H", data, 14)
    body = data[HANDLE_STATUS_HEADER_BYTES : HANDLE_STATUS_HEADER_BYTES + count * HANDLE_STATUS.size]
    found = [
        PlacementHandle(identifier, handle, room)
        for identifier, handle, _, room in HANDLE_STATUS.iter_unpack(body)
    ]
    return tuple(sorted(found, key=lambda one: one.identifier))


def parse_reclaim_unit_bytes(log: bytes, index: int) -> int:
    """Nominal size of a reclaim unit, from the FDP Configurations log page; 0 where `index` is not in it."""
    offset = 16
    for _ in range(index):
        if offset + 2 > len(log):
            return 0
        offset += struct.unpack_from("<H", log, offset)[0]
    return int(struct.unpack_from("<Q", log, offset + 16)[0]) if offset + 24 <= len(log) else 0


def parse_fdp_statistics(log: bytes) -> tuple[int, int]:
    """Bytes written by hosts and to the media, from the FDP Statistics log page."""
    return int.from_bytes(log[:16], "little"), int.from_bytes(log[16:32], "little")


def identify_namespace(path: str, descriptor: int, nsid: int) -> Namespace:
    """Identify Namespace. Raises DeviceError as `ask`."""
    data, _ = _send(path, descriptor, IDENTIFY, nsid, IDENTIFY_NAMESPACE, 0, IDENTIFY_BYTES)
    return parse_namespace(data)


def parse_namespace(data: bytes) -> Namespace:
    """From the Identify Namespace data structure."""
    (lba_count,) = struct.unpack_from("<Q", data)
    features, format_count, formatted, protection = data[24], data[25] + 1, data[26], data[29]
    index = formatted & 0x0F | (formatted & 0x60) >> 1
    formats = []
    for number in range(max(format_count, index + 1)):
        metadata_bytes, lba_shift, performance = struct.unpack_from("<HBB", data, 128 + 4 * number)
        if lba_shift or number == index:
            formats.append(LbaFormat(number, 1 << lba_shift, metadata_bytes, performance & 0x03))
    current = next(one for one in formats if one.index == index)
    atomic_lbas = struct.unpack_from("<H", data, 36)[0] + 1 if features >> 1 & 1 else 0
    # OPTPERF: NPWG, NPWA, NPDG, NPDA and NOWS are told, as numbers of LBAs less one
    write, alignment, discard, _, optimal = (
        (count + 1) * current.lba_bytes if features >> 4 & 1 else 0
        for count in struct.unpack_from("<5H", data, 64)
    )
    return Namespace(
        lba_count,
        current.lba_bytes,
        current.metadata_bytes,
        protection & 0x07,
        tuple(formats),
        index,
        {1: "zeros", 2: "ones"}.get(data[33] & 0x07, "not told"),
        atomic_lbas,
        write,
        alignment,
        discard,
        optimal,
        endurance_group=struct.unpack_from("<H", data, 102)[0],
    )


def parse_health(log: bytes) -> Health:
    """From the SMART / Health Information log page."""
    warning, kelvin, spare, threshold, used = struct.unpack_from("<BHBBB", log)
    counts = {offset: int.from_bytes(log[offset : offset + 16], "little") for offset in range(32, 176, 16)}
    return Health(
        warning,
        kelvin - KELVIN,
        spare,
        threshold,
        used,
        counts[32] * DATA_UNIT_BYTES,
        counts[48] * DATA_UNIT_BYTES,
        counts[128],
        counts[144],
        counts[160],
    )


def parse_endurance_group(log: bytes) -> EnduranceGroup:
    """From the Endurance Group Information log page."""
    written, media = (int.from_bytes(log[offset : offset + 16], "little") for offset in (64, 80))
    return EnduranceGroup(written * BILLION, media * BILLION)


def permission_hint(path: str) -> str:
    """Who may send NVMe commands: drivers/nvme/host/ioctl.c, nvme_cmd_allowed, since Linux 6.2."""
    return (
        f"NVMe commands need CAP_SYS_ADMIN before Linux 6.2 (this is {platform.release()}), and later read "
        f"and write permission on {path} and a controller that reports the effects of its commands"
    )


def _log(
    path: str,
    descriptor: int,
    log: int,
    which: int = 0,
    size_bytes: int = LOG_BYTES,
    nsid: int = ALL_NAMESPACES,
) -> bytes:
    """A log page of the controller, or of what `which` names."""
    dwords = size_bytes // 4 - 1
    data, _ = _send(
        *(path, descriptor, GET_LOG_PAGE, nsid, log | (dwords & 0xFFFF) << 16),
        dwords >> 16 | which << 16,
        size_bytes,
    )
    return data


def _send(
    path: str,
    descriptor: int,
    opcode: int,
    nsid: int,
    cdw10: int,
    cdw11: int,
    data_bytes: int,
    request: int = NVME_IOCTL_ADMIN_CMD,
) -> tuple[bytes, int]:
    """The data and the result of a command that reads `data_bytes`: an admin command, or an I/O command."""
    what = "admin command" if request == NVME_IOCTL_ADMIN_CMD else "I/O command"
    with mmap.mmap(-1, max(data_bytes, mmap.PAGESIZE)) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view) if data_bytes else 0
        del view
        fields = (opcode, 0, 0, nsid, 0, 0, 0, address, 0, data_bytes, cdw10, cdw11, *([0] * 6))
        command = bytearray(ADMIN_COMMAND.pack(*fields))
        try:
            status = fcntl.ioctl(descriptor, request, command)
        except OSError as error:
            raise DeviceError(
                f"{path}: NVMe {what} {opcode:#04x} is refused ({os.strerror(error.errno or 0)}); "
                f"{permission_hint(path)}",
                error.errno,
            ) from None
        if status:
            raise DeviceError(f"{path}: NVMe {what} {opcode:#04x} failed with status {status:#x}", errno.EIO)
        return memory[:data_bytes], struct.unpack_from("<I", command, RESULT_OFFSET)[0]


def _text(field: bytes) -> str:
    return field.decode("ascii", "replace").strip(" \0")
