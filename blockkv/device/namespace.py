"""Finding, probing and opening what a store lives on: NVMe namespace, partition, loop device or file.

Invariants
  * a writer is alone: O_EXCL keeps out mounts, swap, md, device-mapper and other writers of a block
    device; flock keeps out other writers of a file, in this process too, under whatever name. Of several
    that come at once one gets in: who finds another on his way lets go and tries again;
  * a reader comes in under no name while somebody writes;
  * limits are asked for (sysfs, statx, ioctl). Where the kernel does not tell, the value is the one that
    is right for every device, and a comment says why;
  * nothing here writes to a device or existing file, except `create_file` told to overwrite.

Not here: what the device holds (`occupancy`), who uses it (`holders`), I/O (`engine`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import re
import shlex
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from blockkv.device import holders
from blockkv.device.base import UNIT_BYTES, Limits
from blockkv.errors import (
    BlockKVError,
    DeviceBusy,
    DeviceError,
    DeviceReadOnly,
    DeviceTooSmall,
    InvalidArgument,
    OccupiedError,
)

__all__ = ["Identity", "create_file", "identify", "open_namespace", "probe", "resolve"]

MAX_TRANSFER_BYTES = 512 * 1024
"""Larger requests are split by the kernel and handed to worker threads (io_uring; arXiv 2512.04859)."""

LOCK_WAIT_S = 2.0
"""io_uring requests keep the files of a killed process open until they complete, and udev probes a
device for a moment under a shared lock after each writer closed it."""
LOCK_RETRY_S = 0.02

BLKROGET = 0x125E
BLKSSZGET = 0x1268
"""<linux/fs.h>. Both take an int."""

FLOCK_FORMAT = "hhqqi4x"
"""struct flock of fcntl(2): type, whence, start, length, and a process that must be 0."""

STATX_DIOALIGN = 0x2000
AT_EMPTY_PATH = 0x1000
"""<linux/stat.h>, <linux/fcntl.h>."""
STATX_BYTES = 256
STATX_MASK_OFFSET = 0
STATX_DIO_MEM_ALIGN_OFFSET = 152

F = TypeVar("F", bound=Callable[..., Any])

NVME_NAMESPACE = re.compile(r"nvme\d+n\d+")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a device is and what it calls itself. Fields are None where it does not say."""

    path: str
    kind: str
    """"namespace" (a whole NVMe namespace), "partition", "loop", "file", or "block" (any other disk)."""
    major: int
    minor: int
    """Device number; of the file system for a file."""
    disk: str | None = None
    """Kernel name of the whole disk, e.g. "nvme0n1". None for a file."""
    model: str | None = None
    serial: str | None = None
    nguid: str | None = None
    eui64: str | None = None
    wwid: str | None = None
    nsid: int | None = None
    backing_file: str | None = None
    """Of a loop device."""


def path_text(path: object) -> str:
    """A path as text. Raises InvalidArgument for what is none."""
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
        os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        raise InvalidArgument(
            f"{path!r} is no path; give that of a block device or file, or a blockkv Device"
        ) from None
    if not text or "\0" in text:
        raise InvalidArgument(f"{text!r} is no path: it is empty or has a zero byte in it")
    return text


def told(function: F) -> F:
    """Make a DeviceError of what the system refuses a function of a path, open files for example."""

    @wraps(function)
    def run(path: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(path, *arguments, **options)
        except BlockKVError:
            raise
        except OSError as error:
            hint = "raise RLIMIT_NOFILE (`ulimit -n`)" if error.errno == errno.EMFILE else "see `ulimit -a`"
            raise DeviceError(f"{path_text(path)}: {error}; {hint}", error.errno) from error

    return cast("F", run)


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the canonical absolute path of a block device or regular file, symbolic links followed.

    Raises DeviceError (with errno) for a path that is missing, may not be reached, or is anything else.
    """
    given = path_text(path)
    try:
        canonical = os.path.realpath(given, strict=True)
        status = Path(canonical).stat()
    except OSError as error:
        hint = {
            errno.ENOENT: "give an existing device or file; `blockkv format --size` makes a file, and "
            "`blockkv serve` a socket",
            errno.ELOOP: "its symbolic links form a circle",
            errno.EACCES: "a directory on the way may not be searched by this user",
        }.get(error.errno or 0, "check the path")
        raise DeviceError(f"{given}: {os.strerror(error.errno or 0)}; {hint}", error.errno) from None
    _check_type(canonical, status)
    return canonical


@told
def probe(path: str | os.PathLike[str]) -> Limits:
    """Ask the kernel what a device or file can do. Opens it for reading, for a moment, without a lock.

    Raises DeviceError where it cannot be opened or cannot do direct I/O.
    """
    canonical = resolve(path)
    descriptor = _open(canonical, os.O_RDONLY)
    try:
        return _limits(canonical, descriptor, writable=os.access(canonical, os.W_OK))
    finally:
        os.close(descriptor)


def identify(path: str | os.PathLike[str]) -> Identity:
    """Say what a device is, from sysfs alone: the device itself is not opened.

    Raises DeviceError as `resolve` does.
    """
    canonical = resolve(path)
    status = Path(canonical).stat()
    if stat.S_ISREG(status.st_mode):
        return Identity(canonical, "file", os.major(status.st_dev), os.minor(status.st_dev))
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    directory = holders.sysfs_directory(status.st_rdev)
    if directory is None:  # sysfs is not mounted, as in some containers
        return Identity(canonical, "block", major, minor)
    is_partition = (directory / "partition").exists()
    disk = directory.parent if is_partition else directory
    is_loop = (disk / "loop").is_dir()
    if is_partition:
        kind = "partition"
    elif is_loop:
        kind = "loop"
    else:
        kind = "namespace" if NVME_NAMESPACE.fullmatch(disk.name) else "block"
    nsid = _attribute(disk, "nsid")
    return Identity(
        canonical,
        kind,
        major,
        minor,
        disk=disk.name,
        model=_attribute(disk, "device/model"),
        # virtio-blk has its serial number on the disk, NVMe on the controller or subsystem
        serial=_attribute(disk, "device/serial") or _attribute(disk, "serial"),
        nguid=_attribute(disk, "nguid"),
        eui64=_attribute(disk, "eui"),
        wwid=_attribute(disk, "wwid") or _attribute(disk, "device/wwid"),
        nsid=int(nsid) if nsid is not None else None,
        backing_file=_attribute(disk, "loop/backing_file"),
    )


@told
def open_namespace(
    path: str | os.PathLike[str],
    *,
    read_only: bool = False,
    create_size: int | None = None,
    lock: bool = True,
    wait_s: float | None = None,
) -> tuple[int, str, Limits]:
    """Open for direct I/O and return (file descriptor, canonical path, limits). The caller closes it.

    A writer is exclusive against every other writer, mount and holder, or fails; the lock lives as long
    as the descriptor and its duplicates. A reader takes a shared lock, so that several can look at a
    store nobody writes; with `lock=False` it takes none, and works on a store that is in use.
    `create_size` (bytes) makes a regular file of that size where there is none, or an empty one; an
    existing file that is not empty is opened as it is. `wait_s` bounds the wait for a lock (default:
    LOCK_WAIT_S).

    Raises DeviceBusy (says who holds it), DeviceReadOnly, DeviceTooSmall (no bytes at all), DeviceError,
    InvalidArgument. Nothing is written to an existing device or file.
    """
    if not read_only and not lock:
        raise InvalidArgument(f"{os.fspath(path)}: only a reader may open without a lock")
    if create_size is not None:
        if read_only:
            raise InvalidArgument(f"{os.fspath(path)}: a reader cannot create a file of {create_size} bytes")
        _create_if_absent(path, create_size)
    canonical = _usual_node(resolve(path))
    wait_s = LOCK_WAIT_S if wait_s is None else wait_s
    deadline = time.monotonic() + wait_s
    pause_s = LOCK_RETRY_S
    while True:
        with _turn(deadline, canonical):
            descriptor, found = _open_alone(deadline, canonical, read_only=read_only, lock=lock)
        if not found:
            break
        os.close(descriptor)
        # A mount does not go away by waiting. Another opener may have found us as we found him.
        if any(one.kind != "open" for one in found) or time.monotonic() >= deadline:
            _refuse_in_use(canonical, found)
        time.sleep(random.uniform(0, pause_s))  # noqa: S311  or both would do that for ever
        pause_s = min(2 * pause_s, wait_s / 4)
    try:
        is_device = stat.S_ISBLK(os.fstat(descriptor).st_mode)
        limits = _limits(canonical, descriptor, writable=not read_only or os.access(canonical, os.W_OK))
        if limits.read_only and not read_only:
            raise DeviceReadOnly(
                f"{canonical} is set read-only; open it with read_only=True, or make it writable "
                f"(`blockdev --setrw {shlex.quote(canonical)}`)",
                errno.EROFS,
            )
        if limits.size_bytes == 0:
            raise DeviceTooSmall(
                f"{canonical} has no bytes: "
                + ("nothing is attached to it" if is_device else "create it with a size")
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, canonical, limits


@told
def create_file(
    path: str | os.PathLike[str], size_bytes: int, *, overwrite: bool = False, wait_s: float = LOCK_WAIT_S
) -> str:
    """Make a regular file of `size_bytes` zeros with all its space allocated; return its canonical path.

    Allocated now so that a full file system fails here rather than a later write. Mode 0600, because
    KV cache reveals prompts. The file and its directory entry are durable on return. A missing or empty
    file is filled; any other only with `overwrite`, which discards its content. A failed call removes
    the file if it made it.

    Raises OccupiedError (a file that is not empty), DeviceBusy (somebody has it locked, or a loop device
    is over it), DeviceReadOnly, DeviceError (no space, not a file, not a place for files),
    InvalidArgument (size).
    """
    given = path_text(path)
    if size_bytes <= 0 or size_bytes % UNIT_BYTES:
        raise InvalidArgument(
            f"{given}: a size of {size_bytes} bytes is not a positive multiple of {UNIT_BYTES}"
        )
    parent = Path(os.path.realpath(Path(given).parent))
    _refuse_device_directory(given, parent)
    is_new = not os.path.lexists(given)
    canonical = str(parent / Path(given).name) if is_new else resolve(given)
    if not is_new and stat.S_ISBLK(Path(canonical).stat().st_mode):
        raise InvalidArgument(f"{canonical} is a block device: it has a size already")
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if is_new else 0)
    try:
        descriptor = os.open(canonical, flags, 0o600)
    except OSError as error:
        raise _open_error(canonical, error, writing=True) from None
    try:
        _lock_before(time.monotonic() + wait_s, canonical, descriptor, shared=False)
        status = os.fstat(descriptor)
        if status.st_size and not overwrite:
            raise OccupiedError(
                f"{canonical} exists and holds {status.st_size} bytes; "
                f"to clear it: rm {shlex.quote(canonical)}"
            )
        _refuse_in_use(canonical, holders.uses(status))
        _allocate(canonical, descriptor, size_bytes)
        os.fsync(descriptor)
        _sync_directory(parent)
    except BaseException:
        if is_new:
            Path(canonical).unlink()
        raise
    finally:
        os.close(descriptor)
    return canonical


def _create_if_absent(path: str | os.PathLike[str], size_bytes: int) -> None:
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        create_file(path, size_bytes)
        return
    except OSError:
        return  # `resolve` names it
    if stat.S_ISBLK(status.st_mode):
        raise InvalidArgument(f"{os.fspath(path)} is a block device: it has a size already")
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        create_file(path, size_bytes)


def _allocate(path: str, descriptor: int, size_bytes: int) -> None:
    os.ftruncate(descriptor, 0)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        os.ftruncate(descriptor, 0)  # some file systems keep what they got before they ran out
        space = os.fstatvfs(descriptor)
        raise DeviceError(
            f"{path}: allocating {size_bytes} bytes failed: {os.strerror(error.errno or 0)}; "
            f"its file system has {space.f_bavail * space.f_frsize} bytes free",
            error.errno,
        ) from None


def _refuse_device_directory(given: str, parent: Path) -> None:
    """Refuse to create files in /dev: a mistyped device name would fill memory and look like a device."""
    try:
        status = parent.stat()
        in_dev = parent.is_relative_to("/dev") and status.st_dev == Path("/dev").stat().st_dev
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise DeviceError(
            f"{given}: its directory {parent} cannot be used: {os.strerror(error.errno or 0)}", error.errno
        ) from None
    if in_dev:
        raise DeviceError(f"{given}: no such device, and {parent} is no place for a file", errno.ENOENT)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_type(path: str, status: os.stat_result) -> None:
    mode = status.st_mode
    if stat.S_ISBLK(mode) or stat.S_ISREG(mode):
        return
    name, code = "something unknown", errno.EINVAL
    hint = "give a block device or a regular file"
    if stat.S_ISDIR(mode):
        name, code = "a directory", errno.EISDIR
        hint = "give a file in it, or the block device"
    elif stat.S_ISCHR(mode):
        name, code = "a character device", errno.ENOTBLK
        generic = re.fullmatch(r"/dev/ng(\d+n\d+)", path)
        controller = re.fullmatch(r"/dev/(nvme\d+)", path)
        if generic:
            hint = f"it is the passthrough node of /dev/nvme{generic[1]}: give that"
        elif controller:
            hint = f"it is an NVMe controller: give one of its namespaces, such as {path}n1"
    elif stat.S_ISFIFO(mode):
        name = "a FIFO"
    elif stat.S_ISSOCK(mode):
        name = "a socket"
    raise DeviceError(f"{path} is {name}; {hint}", code)


def _usual_node(path: str) -> str:
    """The node in /dev of a block device that was named by another one: locks are on nodes."""
    status = Path(path).stat()
    if not stat.S_ISBLK(status.st_mode):
        return path
    usual = holders.device_node(status.st_rdev)
    with contextlib.suppress(OSError):
        found = Path(usual).stat()
        if stat.S_ISBLK(found.st_mode) and found.st_rdev == status.st_rdev and os.access(usual, os.R_OK):
            return usual
    return path


@contextlib.contextmanager
def _turn(deadline: float, path: str) -> Iterator[None]:
    """Of several loop devices over the same bytes one is opened at a time: none refuses for another's sake
    that is then refused for its own. Left out where the file below cannot be opened. Raises DeviceBusy.
    """
    status = Path(path).stat()
    place = holders.backing_range(status)
    descriptor = -1
    if place is not None:
        with contextlib.suppress(OSError):
            descriptor = os.open(place[0], os.O_RDWR | os.O_CLOEXEC)
    if place is None or descriptor < 0:
        yield
        return
    try:
        file, start, end = place
        wanted = struct.pack(FLOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        while not _try_lock(descriptor, wanted):
            if time.monotonic() >= deadline:
                raise _held_error(path, status, holders.openers(file.stat()))
            time.sleep(LOCK_RETRY_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, wanted: bytes) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except BlockingIOError:
        return False
    return True


def _open_alone(
    deadline: float, path: str, *, read_only: bool, lock: bool
) -> tuple[int, list[holders.Finding]]:
    """A descriptor with its claim and lock, and who is in the way all the same."""
    status = Path(path).stat()
    flags = os.O_RDONLY if read_only else os.O_RDWR
    if not read_only:
        # Before any claim: what loses anyway must not be in the way of who would win.
        _refuse_in_use(path, holders.uses(status))
        if stat.S_ISBLK(status.st_mode):
            # on a block device O_EXCL without O_CREAT asks the kernel for the claim that mount, md, swap
            # and device-mapper take: open(2)
            flags |= os.O_EXCL
    descriptor = _open_before(deadline, path, flags)
    try:
        status = os.fstat(descriptor)
        _check_type(path, status)
        if lock:
            _lock_before(deadline, path, descriptor, shared=read_only)
        if not read_only:
            return descriptor, holders.uses(status) + holders.backing_uses(status)
        return descriptor, holders.writers(path, status) if lock else []
    except BaseException:
        os.close(descriptor)
        raise


def _open(path: str, flags: int) -> int:
    # The path is canonical, so a symbolic link there now was swapped in after `resolve`.
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _open_error(path, error, writing=flags & os.O_ACCMODE != os.O_RDONLY) from None


def _open_before(deadline: float, path: str, flags: int) -> int:
    while True:
        try:
            return _open(path, flags)
        except DeviceBusy:
            status = Path(path).stat()
            _refuse_in_use(path, holders.uses(status))  # a mount does not go away by waiting
            if time.monotonic() >= deadline:
                raise _held_error(path, status, holders.openers(status)) from None
        time.sleep(LOCK_RETRY_S)


def _lock_before(deadline: float, path: str, descriptor: int, *, shared: bool) -> None:
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    while True:
        try:
            fcntl.flock(descriptor, operation)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                status = os.fstat(descriptor)
                names = holders.lockers(status) or holders.openers(status)
                raise _held_error(path, status, names) from None
        except OSError as error:
            raise DeviceError(
                f"{path}: its file system cannot lock files (flock: {os.strerror(error.errno or 0)}); "
                "put the store on a local disk",
                error.errno,
            ) from None
        time.sleep(LOCK_RETRY_S)


def _held_error(path: str, status: os.stat_result, names: list[str]) -> DeviceBusy:
    return DeviceBusy(
        f"{path} is held by {holders.describe(names)}; close it there first (`fuser -v {shlex.quote(path)}` "
        "lists who has it open)",
        errno.EBUSY,
    )


def _refuse_in_use(path: str, findings: list[holders.Finding]) -> None:
    if findings:
        raise DeviceBusy(f"{path} is in use: " + "; then ".join(map(str, findings)), errno.EBUSY)


def _open_error(path: str, error: OSError, *, writing: bool) -> DeviceError:
    """Turn the errno of open(2) into the exception and the next step."""
    code = error.errno
    if code == errno.EBUSY:
        return DeviceBusy(f"{path} is in use", code)
    if code == errno.ETXTBSY:
        return DeviceBusy(
            f"{path} is an active swap file or a running program; `swapoff {shlex.quote(path)}`", code
        )
    if code == errno.EINVAL:
        return DeviceError(
            f"{path}: its file system ({_file_system(path)}) has no direct I/O (O_DIRECT); "
            "use a block device, or a file on ext4, XFS, Btrfs or tmpfs (Linux 6.6 and later)",
            code,
        )
    reason = os.strerror(code or 0)
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        if writing and code == errno.EROFS:
            return DeviceReadOnly(
                f"{path}: {reason}; open it with read_only=True, or remount it read-write", code
            )
        if writing and os.access(path, os.R_OK):
            return DeviceReadOnly(
                f"{path} may be read but not written by user {os.geteuid()} ({reason}); open it with "
                f"read_only=True, or get write permission ({_permission_hint(path)})",
                code,
            )
        return DeviceError(
            f"{path} may not be opened by user {os.geteuid()} ({reason}); {_permission_hint(path)}", code
        )
    if code in (errno.ENXIO, errno.ENODEV, errno.ENOMEDIUM):
        return DeviceError(
            f"{path}: no device behind this node ({reason}); `lsblk` lists those there are", code
        )
    return DeviceError(f"{path}: open failed: {reason}", code)


def _permission_hint(path: str) -> str:
    try:
        status = Path(path).stat()
    except OSError:
        return "check its permissions"
    if stat.S_ISBLK(status.st_mode):
        if os.geteuid() == 0:
            return "a device cgroup forbids it: give the container access to the device"
        return "run as root, or as a member of the device's group, usually disk"
    mode = stat.S_IMODE(status.st_mode)
    return f"it belongs to user {status.st_uid}, mode {mode:04o}; `lsattr` shows if it is immutable"


def _file_system(path: str) -> str:
    try:
        device = Path(path).stat().st_dev
    except OSError:
        return "unknown"
    return next((mount.file_system for mount in holders.mounts() if mount.device == device), "unknown")


def _limits(path: str, descriptor: int, *, writable: bool) -> Limits:
    status = os.fstat(descriptor)
    alignment = _direct_io_alignment(descriptor)
    if alignment == (0, 0):
        raise DeviceError(
            f"{path}: direct I/O is not possible on this file (statx reports alignment 0; encryption, "
            "verity, or data journalling such as `chattr +j`); use another file or file system",
            errno.EINVAL,
        )
    size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
    os.lseek(descriptor, 0, os.SEEK_SET)
    limits = (
        _device_limits(descriptor, status, size_bytes, alignment, writable)
        if stat.S_ISBLK(status.st_mode)
        else _file_limits(status, size_bytes, alignment, writable)
    )
    for name, value in (("LBA size", limits.lba_bytes), ("memory alignment", limits.memory_alignment_bytes)):
        if UNIT_BYTES % value:
            raise DeviceError(
                f"{path}: {name} of {value} bytes is not supported; it must divide {UNIT_BYTES}"
            )
    return limits


def _device_limits(
    descriptor: int,
    status: os.stat_result,
    size_bytes: int,
    alignment: tuple[int, int] | None,
    writable: bool,
) -> Limits:
    directory = holders.sysfs_directory(status.st_rdev)
    lba_bytes = _ioctl_int(descriptor, BLKSSZGET)
    is_read_only = not writable or _ioctl_int(descriptor, BLKROGET) != 0
    if directory is None:
        # No sysfs, as in some containers. A page is the least any driver takes whole; a volatile cache
        # only costs flushes; FUA and discard are optional.
        return Limits(size_bytes, lba_bytes, lba_bytes, UNIT_BYTES, True, False, 0, False, is_read_only)
    # a partition has no queue: that of its disk serves it
    queue = (directory.parent if (directory / "partition").exists() else directory) / "queue"
    dma_alignment = _number(queue, "dma_alignment")  # a mask; since Linux 6.0
    if alignment is not None:
        memory_alignment_bytes = alignment[0]
    elif dma_alignment is not None:
        memory_alignment_bytes = dma_alignment + 1
    else:
        memory_alignment_bytes = lba_bytes  # before statx told, direct I/O asked for this much: open(2)
    sizes = [_number(queue, name) for name in ("max_sectors_kb", "max_hw_sectors_kb")]
    # a page is the least any driver takes whole
    limit_bytes = min((size * 1024 for size in sizes if size is not None), default=UNIT_BYTES)
    max_transfer_bytes = min(MAX_TRANSFER_BYTES, limit_bytes) // UNIT_BYTES * UNIT_BYTES
    granularity_bytes = _number(queue, "discard_granularity") or 0
    return Limits(
        size_bytes=size_bytes,
        lba_bytes=lba_bytes,
        memory_alignment_bytes=memory_alignment_bytes,
        max_transfer_bytes=max(UNIT_BYTES, max_transfer_bytes),
        # "write through" is the only answer that lets flushes go; anything else needs them
        volatile_write_cache=holders.read_text(queue / "write_cache") != "write through",
        fua=_number(queue, "fua") == 1,
        discard_granularity_bytes=max(granularity_bytes, lba_bytes)
        if _number(queue, "discard_max_bytes")
        else 0,
        rotational=_number(queue, "rotational") == 1,
        read_only=is_read_only or _number(directory, "ro") == 1,
    )


def _file_limits(
    status: os.stat_result, size_bytes: int, alignment: tuple[int, int] | None, writable: bool
) -> Limits:
    # tmpfs and kernels before 6.1 do not tell: a page is a multiple of every LBA size in use
    memory_bytes, offset_bytes = alignment or (UNIT_BYTES, UNIT_BYTES)
    directory = holders.sysfs_directory(status.st_dev)
    disk = directory and (directory.parent if (directory / "partition").exists() else directory)
    return Limits(
        size_bytes=size_bytes,
        lba_bytes=max(512, offset_bytes),
        memory_alignment_bytes=memory_bytes,
        max_transfer_bytes=MAX_TRANSFER_BYTES,  # the file system splits by extent and device by itself
        # Even above a disk without a volatile cache: the first write to allocated space changes file
        # system metadata, which only fsync makes durable.
        volatile_write_cache=True,
        fua=False,
        # Punching holes would give back the space `create_file` reserved, and a later write could then
        # find the file system full.
        discard_granularity_bytes=0,
        rotational=disk is not None and _number(disk / "queue", "rotational") == 1,
        read_only=not writable,
    )


def _direct_io_alignment(descriptor: int) -> tuple[int, int] | None:
    """(memory, offset) alignment of direct I/O in bytes as statx tells it; None where it does not.

    (0, 0) means that this file cannot do direct I/O: statx(2), STATX_DIOALIGN, Linux 6.1.
    """
    statx = _statx()
    if statx is None:
        return None
    reply = ctypes.create_string_buffer(STATX_BYTES)
    if statx(descriptor, b"", AT_EMPTY_PATH, STATX_DIOALIGN, reply) != 0:
        return None
    (mask,) = struct.unpack_from("=I", reply, STATX_MASK_OFFSET)
    if not mask & STATX_DIOALIGN:
        return None
    memory_bytes, offset_bytes = struct.unpack_from("=II", reply, STATX_DIO_MEM_ALIGN_OFFSET)
    return memory_bytes, offset_bytes


@cache
def _statx() -> ctypes._NamedFuncPointer | None:
    """The C library's statx; Python has none before 3.15, glibc since 2.28."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        function = library.statx
    except AttributeError:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def _ioctl_int(descriptor: int, request: int) -> int:
    (value,) = struct.unpack("=i", fcntl.ioctl(descriptor, request, bytes(4)))
    return int(value)


def _number(directory: Path, name: str) -> int | None:
    text = holders.read_text(directory / name)
    return int(text) if text is not None and text.isdigit() else None


def _attribute(directory: Path, name: str) -> str | None:
    """A sysfs identity; drives that have none report it empty or as zeros."""
    text = holders.read_text(directory / name)
    return text if text and text.strip("0-. ") else None
