"""Who is using a device or file right now: mounts, swap, stacked devices, loop devices, processes.

Asks the kernel only (/proc, /sys, one loop ioctl), opens nothing for writing and holds nothing. A use
found here is never a matter of `--force`: writing below a mounted file system or a running array
corrupts it under its owner.

Not here: what is written *on* the device (`occupancy`), and opening it (`namespace`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Finding",
    "Mount",
    "backing_range",
    "backing_uses",
    "claim_finding",
    "describe",
    "device_node",
    "lockers",
    "mounts",
    "openers",
    "sysfs_directory",
    "uses",
    "writers",
]

SYSFS = Path("/sys")
PROC = Path("/proc")

LOOP_GET_STATUS64 = 0x4C05
"""<linux/loop.h>. The reply starts with lo_device, lo_inode, lo_rdevice, lo_offset, lo_sizelimit (u64)."""
LOOP_INFO64_BYTES = 232

OPENERS_SHOWN_COUNT = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason not to write to a device."""

    kind: str
    """In use: "mounted", "swap", "holder", "loop", "open". Content: "signature", "partition-table",
    "partition", "blockkv", "data", "unprobed"."""
    what: str
    """Of the finding itself, e.g. "ext4 file system mounted on /mnt"."""
    where: str
    """The device it is on, or the offsets it stands at."""
    clear_command: str
    """Shell command that removes the finding, as root."""
    overridable: bool
    """True for content, which `force` may overwrite; False for use."""

    def __str__(self) -> str:
        return f"{self.what} ({self.where}); to clear it: {self.clear_command}"


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of a mountinfo file."""

    device: int
    """st_dev of the file system; anonymous, so no device number, for btrfs."""
    file_system: str
    source: str
    mount_point: str
    process_index: int
    """A process that sees this mount: 0 is our own mount namespace, else a pid in the other one."""


def read_text(path: Path) -> str | None:
    """A sysfs or procfs attribute without its newline; None where the kernel does not have or show it."""
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return None


def sysfs_directory(device: int) -> Path | None:
    """The sysfs directory of a device number (`st_rdev`), or None where sysfs does not know it."""
    link = SYSFS / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    return link.resolve() if link.exists() else None


def device_node(device: int) -> str:
    """The usual path of a device number, e.g. "/dev/nvme0n1"."""
    directory = sysfs_directory(device)
    if directory is None:
        return f"/dev/block/{os.major(device)}:{os.minor(device)}"
    return f"/dev/{directory.name.replace('!', '/')}"  # sysfs writes the / of cciss/c0d0 as !


def device_number(directory: Path) -> int | None:
    """The inverse of `sysfs_directory`."""
    text = read_text(directory / "dev")
    if text is None:
        return None
    major, _, minor = text.partition(":")
    return os.makedev(int(major), int(minor))


def partitions(directory: Path) -> list[Path]:
    """The sysfs directories of the partitions the kernel knows on a disk."""
    return sorted(entry.parent for entry in directory.glob("*/partition"))


def mounts() -> list[Mount]:
    """Every mount this process may see, in its own mount namespace and in those of other processes."""
    found = list(_read_mounts(PROC / "self" / "mountinfo", 0))
    seen = {_mount_namespace(PROC / "self")}
    for process in _processes():
        namespace = _mount_namespace(process)
        if namespace is not None and namespace not in seen:
            seen.add(namespace)
            found.extend(_read_mounts(process / "mountinfo", int(process.name)))
    return found


def openers(status: os.stat_result) -> list[str]:
    """Processes that have the device or file open, as "pid 1234 (python3)", those that may write first.

    For a device also those that have its disk or one of its partitions open. Only what /proc shows us:
    as an ordinary user that is one's own processes.
    """
    devices = _family(status.st_rdev) if stat.S_ISBLK(status.st_mode) else set()
    writers: list[str] = []
    readers: list[str] = []
    for process in _processes():
        try:
            descriptors = [entry for entry in (process / "fd").iterdir() if _leads_to(entry, status, devices)]
        except OSError:
            continue
        if not descriptors:
            continue
        flags = [read_text(process / "fdinfo" / entry.name) or "" for entry in descriptors]
        writable = any(_opened_for_writing(text) for text in flags)
        (writers if writable else readers).append(process_name(int(process.name)))
    return writers + readers


def lockers(status: os.stat_result) -> list[str]:
    """Processes that took a flock on the file or device node, as in `openers`, and are there.

    None where one has handed its descriptor to others and is gone: see `openers` then.
    """
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    names = []
    for line in (read_text(PROC / "locks") or "").splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted and _is_there(fields[4]):
            names.append(process_name(int(fields[4])))
    return names


def _is_there(process_index: str) -> bool:
    # One that is in another PID namespace is shown as 0.
    return process_index == "0" or (PROC / process_index).exists()


def process_name(process_index: int) -> str:
    """E.g. "pid 1234 (python3)"."""
    name = read_text(PROC / str(process_index) / "comm") or "gone, or in another PID namespace"
    return f"pid {process_index} ({name}{', this process' if process_index == os.getpid() else ''})"


def describe(names: list[str]) -> str:
    """Join process names for a message; says so where there are none to be seen."""
    if not names:
        return "a process that cannot be seen from here (another user, container or mount namespace)"
    shown = ", ".join(names[:OPENERS_SHOWN_COUNT])
    rest = len(names) - OPENERS_SHOWN_COUNT
    return shown + (f" and {rest} more" if rest > 0 else "")


def uses(status: os.stat_result) -> list[Finding]:
    """What uses a device or file, through any number of layers, the topmost use first.

    `status` is from stat of a device node or regular file. Covers the partitions of a disk, the disk of
    a partition, md, device-mapper and other stacked devices, loop devices over it, and all that is
    mounted or swapped on any of them. Empty when nothing was found; an exclusive open is the final word.
    """
    return list(dict.fromkeys(_uses(status, mounts(), set())))


def _uses(
    status: os.stat_result, all_mounts: list[Mount], visited: set[tuple[int, int]]
) -> Iterator[Finding]:
    if stat.S_ISBLK(status.st_mode):
        yield from _device_uses(status.st_rdev, all_mounts, visited)
        return
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    yield from _swap_uses(status)
    yield from _loop_uses(status, all_mounts, visited)


def _device_uses(device: int, all_mounts: list[Mount], visited: set[tuple[int, int]]) -> Iterator[Finding]:
    for relative in sorted(_family(device), key=lambda number: (number != device, number)):
        yield from _direct_uses(relative, sysfs_directory(relative), all_mounts, visited)


def _direct_uses(
    device: int, directory: Path | None, all_mounts: list[Mount], visited: set[tuple[int, int]]
) -> Iterator[Finding]:
    if (device, 0) in visited:
        return
    visited.add((device, 0))
    node = device_node(device)
    if directory is not None:
        for holder in sorted((directory / "holders").glob("*")):
            number = device_number(holder)
            if number is not None:
                yield from _device_uses(number, all_mounts, visited)
            yield _holder_finding(holder.resolve(), node)
    try:
        status = Path(node).stat()
    except OSError:
        status = None
    if status is not None and stat.S_ISBLK(status.st_mode) and status.st_rdev == device:
        yield from _loop_uses(status, all_mounts, visited)
        yield from _swap_uses(status)
    for mount in all_mounts:
        if mount.device == device or device in _devices_of(mount):
            yield _mount_finding(mount, node)


def _mount_finding(mount: Mount, node: str) -> Finding:
    command = f"umount {shlex.quote(mount.mount_point)}"
    what = f"{mount.file_system} file system mounted on {mount.mount_point}"
    if mount.process_index:
        command = f"nsenter -t {mount.process_index} -m {command}"
        what += f" in the mount namespace of {process_name(mount.process_index)}"
    return Finding("mounted", what, f"on {node}", command, overridable=False)


def _devices_of(mount: Mount) -> set[int]:
    """The device numbers below a mount whose st_dev does not tell: btrfs, which numbers itself."""
    if os.major(mount.device) != 0 or not mount.source.startswith("/dev/"):
        return set()
    try:
        status = Path(mount.source).stat()
    except OSError:
        return set()
    if not stat.S_ISBLK(status.st_mode):
        return set()
    for file_system in (SYSFS / "fs" / "btrfs").glob("*-*/devices"):
        members = {device_number(member) for member in file_system.iterdir()}
        if status.st_rdev in members:
            return {member for member in members if member is not None}
    return {status.st_rdev}


def _holder_finding(holder: Path, node: str) -> Finding:
    path = f"/dev/{holder.name.replace('!', '/')}"
    name = read_text(holder / "dm" / "name")
    uuid = read_text(holder / "dm" / "uuid") or ""
    if name is not None:
        what = f"device-mapper device {name} ({holder.name})"
        if uuid.startswith("LVM-"):
            what = f"LVM logical volume {name} ({holder.name})"
            command = f"vgchange -an {shlex.quote(_volume_group(name))}"
        elif uuid.startswith("CRYPT-"):
            what = f"encrypted mapping {name} ({holder.name})"
            command = f"cryptsetup close {shlex.quote(name)}"
        elif uuid.startswith("mpath-"):
            what = f"multipath device {name} ({holder.name}), which is the one to use instead"
            command = f"multipath -f {shlex.quote(name)}"
        else:
            command = f"dmsetup remove {shlex.quote(name)}"
    elif (holder / "md").is_dir():
        what = f"RAID array {path} ({read_text(holder / 'md' / 'level') or 'unknown level'})"
        command = f"mdadm --stop {path}"
    elif (holder / "bcache").is_dir():
        what = f"bcache device {path}"
        command = f"echo 1 > /sys/block/{holder.name}/bcache/stop"
    else:
        what = f"device {path} built on it"
        command = f"stop {path} with the tool that made it (`lsblk {node}` shows the stack)"
    return Finding("holder", what, f"on {node}", command, overridable=False)


def _volume_group(name: str) -> str:
    """Device-mapper joins group and volume with one hyphen and doubles the hyphens inside either."""
    group = re.split(r"(?<!-)-(?!-)", name, maxsplit=1)[0]
    return group.replace("--", "-")


def _swap_uses(status: os.stat_result) -> Iterator[Finding]:
    for line in (read_text(PROC / "swaps") or "").splitlines()[1:]:
        path = _unescape(line.split()[0])
        if _is_same(Path(path), status):
            yield Finding(
                "swap", "active swap", f"on {path}", f"swapoff {shlex.quote(path)}", overridable=False
            )


def _loop_uses(
    status: os.stat_result, all_mounts: list[Mount], visited: set[tuple[int, int]]
) -> Iterator[Finding]:
    for loop in loops_over(status):
        number = device_number(loop)
        if number is None or (number, 0) in visited:
            continue
        yield from _device_uses(number, all_mounts, visited)
        path = read_text(loop / "loop" / "backing_file") or "it"
        yield Finding(
            "loop",
            f"loop device /dev/{loop.name}",
            f"over {path}",
            f"losetup -d /dev/{loop.name}",
            overridable=False,
        )


def backing_uses(status: os.stat_result) -> list[Finding]:
    """Other ways into the storage below a loop device that somebody is using.

    An exclusive open of a loop device says nothing about its backing file: a second loop device over the
    same bytes, or a program with the file itself open, would write below us. Empty for other devices.
    """
    directory = sysfs_directory(status.st_rdev) if stat.S_ISBLK(status.st_mode) else None
    if directory is None:
        return []
    loop = directory.parent if (directory / "partition").exists() else directory
    path, number = backing_path(loop), device_number(loop)
    if path is None or number is None:
        return []
    try:
        backing = path.stat()
    except OSError:
        return []
    visited = {(relative, 0) for relative in _family(number)}
    all_mounts = mounts()
    if stat.S_ISBLK(backing.st_mode):
        found = list(_device_uses(backing.st_rdev, all_mounts, visited)) or claim_finding(str(path))
        return found + backing_uses(backing)
    found = []
    for other in loops_over(backing):
        other_number = device_number(other)
        if other_number is not None and other_number != number and _overlap(loop, other):
            found += list(_device_uses(other_number, all_mounts, visited)) or claim_finding(
                f"/dev/{other.name}"
            )
    return found + claim_finding(str(path))


def writers(path: str, status: os.stat_result) -> list[Finding]:
    """Who may be writing what a reader is about to read, under any of its names.

    A claim on it or its disk, on a loop device over it, and on what is below it if it is a loop device.
    """
    found = claim_finding(path) + backing_uses(status)
    for loop in loops_over(status):
        found += claim_finding(f"/dev/{loop.name}")
    return found


def backing_range(status: os.stat_result) -> tuple[Path, int, int] | None:
    """The file, and the bytes of it, from and to, that a loop device or its partition is made of."""
    directory = sysfs_directory(status.st_rdev) if stat.S_ISBLK(status.st_mode) else None
    if directory is None:
        return None
    loop = directory.parent if (directory / "partition").exists() else directory
    path = backing_path(loop)
    return None if path is None else (path, *_backing_range(loop))


def claim_finding(path: str) -> list[Finding]:
    """Find out whether a writer holds a device (O_EXCL) or file (flock), by asking for it for a moment.

    What claims it without being a process: mounts, swap, devices built on it; else one finding, of kind
    "open". Empty also where the path may not be opened at all.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        status = os.fstat(descriptor)
        # O_EXCL without O_CREAT is defined for block devices only: open(2)
        if stat.S_ISBLK(status.st_mode):
            os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EWOULDBLOCK):
            return []
    else:
        return []
    finally:
        os.close(descriptor)
    claims = [one for one in uses(status) if one.kind in ("mounted", "swap", "holder")]
    if claims:
        return claims
    names = lockers(status) or openers(status)
    command = f"stop that program (`fuser -v {shlex.quote(path)}` lists who has it open)"
    return [Finding("open", f"held by {describe(names)}", f"on {path}", command, overridable=False)]


def _overlap(loop: Path, other: Path) -> bool:
    """Whether two loop devices over one file share any byte of it."""
    first_start, first_end = _backing_range(loop)
    second_start, second_end = _backing_range(other)
    return first_start < second_end and second_start < first_end


def _backing_range(loop: Path) -> tuple[int, int]:
    start = int(read_text(loop / "loop" / "offset") or 0)
    return start, start + 512 * int(read_text(loop / "size") or 0)  # sysfs sizes are in 512 bytes, always


def loops_over(status: os.stat_result) -> list[Path]:
    """The sysfs directories of the loop devices whose backing file or device this is."""
    return [
        entry.parents[1]
        for entry in sorted((SYSFS / "block").glob("loop*/loop/backing_file"))
        if _is_backed_by(entry.parents[1], status)
    ]


def backing_path(loop: Path) -> Path | None:
    """The backing file of a loop device, by the name the kernel knows it under; None if it is unlinked."""
    text = read_text(loop / "loop" / "backing_file")
    return Path(text) if text and not text.endswith(" (deleted)") else None


def _is_backed_by(loop: Path, status: os.stat_result) -> bool:
    # The ioctl names the inode itself; the path in sysfs may be unlinked or belong to another mount
    # namespace, but is all that is left where we may not open the loop device.
    try:
        descriptor = os.open(f"/dev/{loop.name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        path = backing_path(loop)
        return path is not None and _is_same(path, status)
    try:
        reply = fcntl.ioctl(descriptor, LOOP_GET_STATUS64, bytes(LOOP_INFO64_BYTES))
    except OSError as error:
        if error.errno == errno.ENXIO:  # detached meanwhile
            return False
        raise
    finally:
        os.close(descriptor)
    device, inode, special = struct.unpack_from("=QQQ", reply)
    if stat.S_ISBLK(status.st_mode):
        return bool(special == status.st_rdev)
    return bool(special == 0 and (device, inode) == (status.st_dev, status.st_ino))


def _is_same(path: Path, status: os.stat_result) -> bool:
    """Whether `path` leads to the same file, or to the same device under any node."""
    return _leads_to(path, status, {status.st_rdev})


def _leads_to(path: Path, status: os.stat_result, devices: set[int]) -> bool:
    """Whether `path` leads to the file with that status, or, if that is a device, to one of `devices`."""
    try:
        other = path.stat()
    except OSError:
        return False
    if stat.S_ISBLK(status.st_mode):
        return stat.S_ISBLK(other.st_mode) and other.st_rdev in devices
    return (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino)


def _family(device: int) -> set[int]:
    """A device, the disk it is part of and its partitions: an exclusive open of one excludes the others."""
    directory = sysfs_directory(device)
    if directory is None:
        return {device}
    relatives = [*partitions(directory), *([directory.parent] if (directory / "partition").exists() else [])]
    return {device, *(number for number in map(device_number, relatives) if number is not None)}


def _processes() -> list[Path]:
    return [entry for entry in PROC.iterdir() if entry.name.isdigit()]


def _mount_namespace(process: Path) -> str | None:
    try:
        return str((process / "ns" / "mnt").readlink())
    except OSError:
        return None


def _read_mounts(path: Path, process_index: int) -> Iterator[Mount]:
    for line in (read_text(path) or "").splitlines():
        # proc_pid_mountinfo(5): id parent major:minor root mount-point options [tags] - type source options
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(tail) < 2:
            continue
        major, _, minor = fields[2].partition(":")
        device = os.makedev(int(major), int(minor))
        yield Mount(device, tail[0], _unescape(tail[1]), _unescape(fields[4]), process_index)


def _unescape(text: str) -> str:
    """Undo the octal escapes (space, tab, newline, backslash) of /proc/*/mountinfo and /proc/swaps."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _opened_for_writing(fdinfo: str) -> bool:
    match = re.search(r"^flags:\s*([0-7]+)", fdinfo, re.MULTILINE)
    return match is not None and int(match[1], 8) & os.O_ACCMODE != os.O_RDONLY
