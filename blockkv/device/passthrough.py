"""The generic character device of an NVMe namespace: finding, opening and checking it.

/dev/ngXnY takes NVMe commands for the namespace that is /dev/nvmeXnY. The kernel checks nothing of what
they do: no partition bounds them, no mount or claim keeps them out. So the block device stays open beside it,
with the claim and the lock of every other engine, and whatever a command could get wrong is refused here:
metadata, protection information, an LBA size that is not the one the block device has.

Not here: the claim on the block device (`namespace`), the commands (`native/passthrough.c`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from blockkv.device import holders
from blockkv.device.base import UNIT_BYTES, Limits, opened_for_writing
from blockkv.device.namespace import path_text
from blockkv.device.nvme_admin import NVME_IOCTL_ID, Namespace, identify_namespace
from blockkv.errors import DeviceError

__all__ = ["Generic", "block_device_of", "check_format", "open_generic"]

LEAST_LBA_BYTES = 512

GENERIC_NAME = re.compile(r"ng(\d+n\d+)")
NAMESPACE_NAME = re.compile(r"nvme(\d+n\d+)")


@dataclass(frozen=True, slots=True)
class Generic:
    """An open character device. Whoever has it closes `descriptor`."""

    path: str
    descriptor: int
    nsid: int
    memory_boundary_bytes: int
    """Where pieces of memory may meet inside a command; 1: anywhere."""


def block_device_of(path: str | os.PathLike[str]) -> str | None:
    """The namespace's block device, where `path` is a generic character device; None where it is not one.

    Raises DeviceError where the kernel shows no such block device, InvalidArgument for what is no path.
    """
    given = path_text(path)
    try:
        status = Path(given).stat()
    except OSError:
        return None  # `namespace.resolve` says what is wrong with it
    if not stat.S_ISCHR(status.st_mode):
        return None
    link = holders.SYSFS / "dev" / "char" / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    found = GENERIC_NAME.fullmatch(link.resolve().name)
    if not found:
        return None
    node = f"/dev/nvme{found[1]}"
    if not (holders.SYSFS / "block" / f"nvme{found[1]}").exists():
        raise DeviceError(
            f"{given}: its namespace has no block device {node}; the kernel does not offer one for "
            "its format",
            errno.ENODEV,
        )
    return node


def open_generic(block_path: str, block_descriptor: int, limits: Limits) -> Generic:
    """Open the character device of the namespace whose block device is open, and check the namespace.

    Raises DeviceError for what is no whole NVMe namespace, may not be opened, or has a format with metadata,
    protection information or an LBA size other than 512 to 4096 bytes.
    """
    name = _generic_name(block_path, os.fstat(block_descriptor))
    path = f"/dev/{name}"
    number = holders.read_text(holders.SYSFS / "class" / "nvme-generic" / name / "dev")
    if number is None:
        raise DeviceError(
            f"{block_path}: the kernel ({platform.release()}) has no generic character device {name} for it; "
            "passthrough needs Linux 5.19 or later, so use another engine",
            errno.EOPNOTSUPP,
        )
    try:
        mode = os.O_RDWR if opened_for_writing(block_descriptor) else os.O_RDONLY
        descriptor = os.open(path, mode | os.O_CLOEXEC)
    except OSError as error:
        raise _open_error(path, number, error) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISCHR(status.st_mode) or _number_of(status) != number:
            raise DeviceError(f"{path} is not the character device {number} that it names", errno.ENODEV)
        nsid = fcntl.ioctl(descriptor, NVME_IOCTL_ID)
        if nsid != fcntl.ioctl(block_descriptor, NVME_IOCTL_ID):
            raise DeviceError(f"{path} is another namespace than {block_path}", errno.ENODEV)
        check_format(block_path, identify_namespace(path, descriptor, nsid), limits)
    except BaseException:
        os.close(descriptor)
        raise
    queue = holders.SYSFS / "block" / name.replace("ng", "nvme", 1) / "queue"
    mask = holders.read_text(queue / "virt_boundary_mask")
    # where the kernel does not tell: a page of the controller is 4 KiB
    return Generic(path, descriptor, nsid, int(mask) + 1 if mask is not None else UNIT_BYTES)


def _generic_name(block_path: str, status: os.stat_result) -> str:
    directory = holders.sysfs_directory(status.st_rdev) if stat.S_ISBLK(status.st_mode) else None
    if directory is not None and (directory / "partition").exists():
        raise DeviceError(
            f"{block_path} is a partition of {directory.parent.name}, and NVMe commands know no partitions; "
            f"give the whole namespace /dev/{directory.parent.name}, or use another engine",
            errno.EINVAL,
        )
    found = NAMESPACE_NAME.fullmatch(directory.name) if directory is not None else None
    if not found:
        raise DeviceError(
            f"{block_path} is no NVMe namespace, and passthrough sends NVMe commands; use another engine",
            errno.ENOTTY,
        )
    return f"ng{found[1]}"


def _number_of(status: os.stat_result) -> str:
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _open_error(path: str, number: str, error: OSError) -> DeviceError:
    reason = os.strerror(error.errno or 0)
    if error.errno == errno.ENOENT:
        hint = f"make it (`mknod {path} c {number.replace(':', ' ')}`), or give the container access to it"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = "run as root, or give this user read and write permission on it"
    else:
        hint = "use another engine"
    return DeviceError(f"{path} cannot be opened for passthrough ({reason}); {hint}", error.errno)


def check_format(path: str, found: Namespace, limits: Limits) -> None:
    """Raises DeviceError for a format that commands of plain data would get wrong."""
    remedy = (
        "use another engine, or a format of plain LBAs (`nvme id-ns -H` lists them, `nvme format` erases "
        "everything)"
    )
    if found.metadata_bytes:
        raise DeviceError(
            f"{path} is formatted with {found.metadata_bytes} bytes of metadata beside every LBA, and "
            f"passthrough moves none; {remedy}",
            errno.EINVAL,
        )
    if found.protection_type:
        raise DeviceError(
            f"{path} is formatted with protection information of type {found.protection_type}, and "
            f"passthrough makes none; {remedy}",
            errno.EINVAL,
        )
    if not LEAST_LBA_BYTES <= found.lba_bytes <= UNIT_BYTES:
        raise DeviceError(
            f"{path} has LBAs of {found.lba_bytes} bytes, and passthrough takes {LEAST_LBA_BYTES} to "
            f"{UNIT_BYTES}; {remedy}",
            errno.EINVAL,
        )
    size_bytes = found.lba_count * found.lba_bytes
    if found.lba_bytes != limits.lba_bytes or size_bytes < limits.size_bytes:
        raise DeviceError(
            f"{path}: the drive says {found.lba_count} LBAs of {found.lba_bytes} bytes, the kernel "
            f"{limits.size_bytes // limits.lba_bytes} of {limits.lba_bytes}; rescan it (`nvme ns-rescan`)",
            errno.EIO,
        )
