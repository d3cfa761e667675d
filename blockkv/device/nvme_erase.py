"""Format NVM: the NVMe command that erases a namespace (NVM Express Base Specification 2.0, 5.14).

Invariant: only what was asked for is erased. A drive that would erase its other namespaces with this one is
refused (FNA of Identify Controller, bits 0 and 1).

Not here: whether it may be erased (`blockkv.store.wipe`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from blockkv.device import nvme_admin
from blockkv.errors import DeviceError

__all__ = ["Eraser", "eraser_of"]

FORMAT_NVM = 0x80
USER_DATA_ERASE, CRYPTOGRAPHIC_ERASE = 1, 2
"""Secure Erase Settings."""
TIMEOUT_MS = 30 * 60 * 1000
"""A large drive may take minutes to overwrite itself."""
OACS_OFFSET, FNA_OFFSET, NAMESPACES_OFFSET = 256, 524, 516


@dataclass(frozen=True, slots=True)
class Eraser:
    """How a namespace can be erased."""

    path: str
    nsid: int
    format_index: int
    cryptographic: bool
    """The drive encrypts everything, and forgets its key."""

    def erase(self, descriptor: int) -> None:
        """Erase the namespace. Raises DeviceError; what is on it is undefined then."""
        setting = CRYPTOGRAPHIC_ERASE if self.cryptographic else USER_DATA_ERASE
        index = self.format_index
        cdw10 = index & 0x0F | setting << 9 | (index >> 4 & 0x3) << 12
        fields = (FORMAT_NVM, 0, 0, self.nsid, 0, 0, 0, 0, 0, 0, cdw10, *([0] * 5), TIMEOUT_MS, 0)
        command = bytearray(nvme_admin.ADMIN_COMMAND.pack(*fields))
        try:
            status = fcntl.ioctl(descriptor, nvme_admin.NVME_IOCTL_ADMIN_CMD, command)
        except OSError as error:
            raise DeviceError(
                f"{self.path}: Format NVM is refused ({os.strerror(error.errno or 0)}); "
                f"{nvme_admin.permission_hint(self.path)}",
                error.errno,
            ) from None
        if status:
            raise DeviceError(f"{self.path}: Format NVM failed with status {status:#x}", errno.EIO)


def eraser_of(path: str, descriptor: int) -> Eraser | str:
    """How the whole namespace that `descriptor` is can be erased, or why it cannot."""
    try:
        nsid = fcntl.ioctl(descriptor, nvme_admin.NVME_IOCTL_ID)
        if _is_partition(descriptor):
            return "it is no whole namespace"
        controller = nvme_admin.identify_controller(path, descriptor)
        namespace = nvme_admin.identify_namespace(path, descriptor, nsid)
    except OSError as error:
        return f"it takes no NVMe commands ({os.strerror(error.errno or 0)})"
    if not struct.unpack_from("<H", controller, OACS_OFFSET)[0] >> 1 & 1:
        return "the drive does not have Format NVM"
    (namespaces,) = struct.unpack_from("<I", controller, NAMESPACES_OFFSET)
    attributes = controller[FNA_OFFSET]
    if attributes & 0x3 and namespaces > 1:
        return f"the drive would erase all of its namespaces, up to {namespaces}, with this one"
    return Eraser(path, nsid, namespace.format_index, bool(attributes >> 2 & 1))


def _is_partition(descriptor: int) -> bool:
    number = os.fstat(descriptor).st_rdev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/partition").exists()
