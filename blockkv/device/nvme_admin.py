"""What an NVMe drive says of itself: Identify, SMART and features, by admin commands that read.

Structures are those of the NVM Express Base Specification 2.0 (Identify Controller, figure 275; SMART /
Health, figure 207; Endurance Group Information, log 09h) and of the NVM Command Set Specification 1.0
(Identify Namespace, figure 97).

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
    "Health",
    "LbaFormat",
    "Namespace",
    "ask",
    "identify_namespace",
    "permission_hint",
]

NVME_IOCTL_ID = 0x4E40
NVME_IOCTL_ADMIN_CMD = 0xC0484E41
"""<linux/nvme_ioctl.h>: _IO('N', 0x40), the nsid; _IOWR('N', 0x41, struct nvme_passthru_cmd)."""
ADMIN_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
"""struct nvme_passthru_cmd: opcode, flags, reserved, nsid, cdw2-3, metadata, address, length of metadata and
of data, cdw10-15, timeout in ms, result."""
RESULT_OFFSET = 68

GET_LOG_PAGE, IDENTIFY, GET_FEATURES = 0x02, 0x06, 0x0A
IDENTIFY_NAMESPACE, IDENTIFY_CONTROLLER = 0x00, 0x01
IDENTIFY_BYTES = 4096
HEALTH_LOG, ENDURANCE_GROUP_LOG, LOG_BYTES = 0x02, 0x09, 512
FDP_FEATURE = 0x1D
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
class Drive:
    """Everything together."""

    model: str
    serial: str
    firmware: str
    volatile_write_cache: bool
    atomic_write_lbas: int
    """Of the controller: what a power failure does not tear, in LBAs of any namespace."""
    fdp_supported: bool
    fdp_enabled: bool
    namespace: Namespace
    health: Health | None
    """None where the drive does not tell."""
    endurance_group: EnduranceGroup | None
    """That of the namespace; None where the drive has none, or does not tell."""


def ask(path: str, descriptor: int) -> Drive:
    """Everything the drive says of itself and of the namespace that `descriptor` is.

    Raises DeviceError where the kernel does not let this user send admin commands, or the drive refuses.
    """
    try:
        nsid = fcntl.ioctl(descriptor, NVME_IOCTL_ID)
    except OSError as error:
        raise DeviceError(
            f"{path} is no NVMe namespace ({os.strerror(error.errno or 0)})", error.errno
        ) from None
    controller = identify_controller(path, descriptor)
    namespace = identify_namespace(path, descriptor, nsid)
    (attributes,) = struct.unpack_from("<I", controller, 96)
    (atomic_lbas,) = struct.unpack_from("<H", controller, 528)
    fdp_supported = bool(attributes >> 19 & 1)
    fdp_enabled = False
    if fdp_supported and namespace.endurance_group:
        with contextlib.suppress(DeviceError):
            _, result = _send(path, descriptor, GET_FEATURES, 0, FDP_FEATURE, namespace.endurance_group, 0)
            fdp_enabled = bool(result & 1)
    health = None
    with contextlib.suppress(DeviceError):
        health = parse_health(_log(path, descriptor, HEALTH_LOG))
    endurance_group = None
    if attributes >> 4 & 1 and namespace.endurance_group:
        with contextlib.suppress(DeviceError):
            log = _log(path, descriptor, ENDURANCE_GROUP_LOG, namespace.endurance_group)
            endurance_group = parse_endurance_group(log)
    return Drive(
        _text(controller[24:64]),
        _text(controller[4:24]),
        _text(controller[64:72]),
        bool(controller[525] & 1),
        atomic_lbas + 1,
        fdp_supported,
        fdp_enabled,
        namespace,
        health,
        endurance_group,
    )


def identify_controller(path: str, descriptor: int) -> bytes:
    """The Identify Controller data structure. Raises DeviceError as `ask`."""
    data, _ = _send(path, descriptor, IDENTIFY, 0, IDENTIFY_CONTROLLER, 0, IDENTIFY_BYTES)
    return data


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


def _log(path: str, descriptor: int, log: int, which: int = 0) -> bytes:
    """A log page of the controller, or of what `which` names."""
    dwords = LOG_BYTES // 4 - 1
    data, _ = _send(
        path, descriptor, GET_LOG_PAGE, ALL_NAMESPACES, log | dwords << 16, which << 16, LOG_BYTES
    )
    return data


def _send(
    path: str, descriptor: int, opcode: int, nsid: int, cdw10: int, cdw11: int, data_bytes: int
) -> tuple[bytes, int]:
    """The data and the result of an admin command that reads `data_bytes`."""
    with mmap.mmap(-1, max(data_bytes, mmap.PAGESIZE)) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view) if data_bytes else 0
        del view
        fields = (opcode, 0, 0, nsid, 0, 0, 0, address, 0, data_bytes, cdw10, cdw11, *([0] * 6))
        command = bytearray(ADMIN_COMMAND.pack(*fields))
        try:
            status = fcntl.ioctl(descriptor, NVME_IOCTL_ADMIN_CMD, command)
        except OSError as error:
            raise DeviceError(
                f"{path}: NVMe admin command {opcode:#04x} is refused ({os.strerror(error.errno or 0)}); "
                f"{permission_hint(path)}",
                error.errno,
            ) from None
        if status:
            raise DeviceError(
                f"{path}: NVMe admin command {opcode:#04x} failed with status {status:#x}", errno.EIO
            )
        return memory[:data_bytes], struct.unpack_from("<I", command, RESULT_OFFSET)[0]


def _text(field: bytes) -> str:
    return field.decode("ascii", "replace").strip(" \0")
