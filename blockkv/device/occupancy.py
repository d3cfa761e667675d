"""What a device holds already: the check between `format` and somebody's data.

`occupancy` lists every reason not to format a device, worst first; `refuse_if_occupied` turns the list
into an exception. Use (mounts, swap, arrays, other openers) is never overridable. Content (signatures,
partition tables, a blockkv store, any bytes at all) is, by `force`.

Invariants
  * the check writes nothing: it opens read-only and runs `wipefs --no-act`;
  * it can be repeated on the descriptor of an exclusive open, which closes the gap between looking and
    writing: nobody else can mount or format the device from then on.

Not here: clearing anything. The operator runs the command a finding names.
"""

from __future__ import annotations

import json
import mmap
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence

from blockkv.device.base import UNIT_BYTES
from blockkv.device.holders import (
    Finding,
    backing_uses,
    claim_finding,
    device_node,
    device_number,
    partitions,
    read_text,
    sysfs_directory,
    uses,
)
from blockkv.device.namespace import resolve
from blockkv.errors import DeviceBusy, DeviceError, OccupiedError

__all__ = ["Finding", "nonzero", "occupancy", "readable", "recognised", "refuse_if_occupied"]

EDGE_BYTES = 1 << 20
"""Looked through for non-zero bytes at either end: file systems, arrays and volume managers keep their
superblocks there, also those libblkid does not know."""

PARTITION_TABLES = frozenset(
    ("gpt", "dos", "PMBR", "atari", "bsd", "mac", "minix", "sgi", "solaris-x86", "sun", "ultrix", "unixware")
)
"""Types libblkid gives to partition tables (libblkid/src/partitions)."""

CLEAR_COMMANDS = {
    "LVM2_member": "pvremove {path}",
    "linux_raid_member": "mdadm --zero-superblock {path}",
    "ddf_raid_member": "mdadm --zero-superblock {path}",
    "isw_raid_member": "mdadm --zero-superblock {path}",
    "crypto_LUKS": "cryptsetup erase {path} && wipefs -a {path}",
    "zfs_member": "zpool labelclear -f {path}",
    "ceph_bluestore": "ceph-volume lvm zap {path}",
}
"""By libblkid type, where a better tool exists than wipefs: it knows about copies and about members."""

WIPEFS = "wipefs"
WIPEFS_TIMEOUT_S = 60


def occupancy(
    path: str | os.PathLike[str],
    *,
    magic: bytes = b"",
    magic_offsets: Sequence[int] = (),
    descriptor: int | None = None,
) -> list[Finding]:
    """Return every reason not to write to a device or file, uses before content; empty if it is free.

    `magic` marks a blockkv superblock and `magic_offsets` are where it stands if there is one, in bytes,
    negative from the end of the device. `descriptor`, of an exclusive open of the same path, makes the
    answer final: it is about that very device, and its own hold does not count as a use.

    Raises DeviceError where the device cannot be read. Costs a few ms, one process and 2 MiB of reads.
    """
    canonical = resolve(path)
    opened = _open_to_look(canonical) if descriptor is None else descriptor
    try:
        status = os.fstat(opened)
        found = uses(status) + backing_uses(status)
        if not found and descriptor is None:
            found = claim_finding(canonical)
        size_bytes = os.lseek(opened, 0, os.SEEK_END)
        content = list(_partition_findings(canonical, status))
        content += _signature_findings(canonical, opened)
        content += _store_findings(canonical, opened, size_bytes, magic, magic_offsets)
        if not any(finding.kind == "blockkv" for finding in content):
            # also beside a signature: the tools that remove one leave the rest of its structures behind
            content += _data_findings(canonical, opened, size_bytes)
        return found + content
    finally:
        if descriptor is None:
            os.close(opened)


def refuse_if_occupied(
    path: str | os.PathLike[str],
    *,
    force: bool = False,
    magic: bytes = b"",
    magic_offsets: Sequence[int] = (),
    descriptor: int | None = None,
) -> list[Finding]:
    """Raise unless the device may be written to; return what `force` is about to overwrite.

    Arguments as for `occupancy`. Call it twice: by path before anything is opened for writing, and with
    the descriptor of the exclusive open just before the first write.

    Raises DeviceBusy for a use, with or without `force`; OccupiedError for content without `force`; each
    message names what was found, where, and the command that clears it. DeviceError as `occupancy`.
    """
    found = occupancy(path, magic=magic, magic_offsets=magic_offsets, descriptor=descriptor)
    name = os.fspath(path)
    fixed = [finding for finding in found if not finding.overridable]
    if fixed:
        raise DeviceBusy(_list(f"{name} is in use, which cannot be forced:", fixed))
    if found and not force:
        raise OccupiedError(_list(f"{name} is occupied; clear it, or use force to overwrite:", found))
    return found


def recognised(path: str, descriptor: int, ranges: Sequence[tuple[int, int]]) -> list[Finding]:
    """Signatures and partition tables that libblkid knows in some (start, end) ranges of bytes.

    Where there is a table, its partitions too. Raises DeviceError where libblkid cannot be asked.
    """
    found = _signature_findings(path, descriptor, ranges)
    if any(finding.kind == "partition-table" for finding in found):
        found += _partition_findings(path, os.fstat(descriptor))
    return found


def nonzero(path: str, content: bytes, offset_bytes: int) -> Iterator[Finding]:
    """Of `content`, which was read at `offset_bytes`: that there is something other than zeros."""
    if content != bytes(len(content)):
        stripped = content.lstrip(b"\0")
        end = offset_bytes + len(content)
        last = offset_bytes + len(content.rstrip(b"\0")) - 1
        where = f"from byte {end - len(stripped)} to byte {last}"
        clear = _zero_command(path, offset_bytes, end)
        yield Finding("data", "bytes that are not zero", where, clear, overridable=True)


def readable(path: str, descriptor: int, offset_bytes: int, length_bytes: int) -> bytes:
    """What is there, with zeros for what cannot be read. Short only at the end of the device."""
    try:
        return _read(path, descriptor, offset_bytes, length_bytes)
    except DeviceError:
        if length_bytes <= UNIT_BYTES:
            return bytes(length_bytes)
        end = offset_bytes + length_bytes
        return b"".join(
            readable(path, descriptor, at, min(UNIT_BYTES, end - at))
            for at in range(offset_bytes, end, UNIT_BYTES)
        )


def _list(title: str, findings: list[Finding]) -> str:
    return "\n".join([title, *(f"  {finding}" for finding in findings)])


def _open_to_look(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DeviceError(
            f"{path} cannot be read to see what it holds: {os.strerror(error.errno or 0)}; run as root, or "
            "as a user who may read it",
            error.errno,
        ) from None


def _partition_findings(path: str, status: os.stat_result) -> Iterator[Finding]:
    directory = sysfs_directory(status.st_rdev) if stat.S_ISBLK(status.st_mode) else None
    if directory is None:
        return
    for partition in partitions(directory):
        number = device_number(partition)
        if number is None:
            continue
        start_bytes = 512 * int(read_text(partition / "start") or 0)  # sysfs counts in 512 bytes, always
        size_bytes = 512 * int(read_text(partition / "size") or 0)
        index = int(read_text(partition / "partition") or 0)
        yield Finding(
            "partition",
            f"partition {device_node(number)}, {size_bytes} bytes",
            f"at byte {start_bytes}",
            f"partx --delete --nr {index} {shlex.quote(path)}",
            overridable=True,
        )


def _signature_findings(
    path: str, descriptor: int, ranges: Sequence[tuple[int, int]] | None = None
) -> list[Finding]:
    """What libblkid recognises (in the ranges), one finding per type, in the words of `wipefs`."""
    # administration tools are often not on the PATH of ordinary users
    tool = shutil.which(WIPEFS, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
    if tool is None:
        return [
            Finding(
                "unprobed",
                "wipefs (util-linux) is not installed: known signatures were not looked for",
                "in the whole device",
                "install util-linux",
                overridable=True,
            )
        ]
    # through the descriptor, so that the answer is about the device that is open, whatever the path is now
    command = [tool, "--no-act", "--json", f"/proc/self/fd/{descriptor}"]
    try:
        done = subprocess.run(
            command,
            pass_fds=(descriptor,),
            capture_output=True,
            text=True,
            check=False,
            timeout=WIPEFS_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,  # an interrupt from the terminal is for us
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"{path}: wipefs did not answer in {WIPEFS_TIMEOUT_S} s; is the device hung?"
        ) from None
    if done.returncode != 0:
        raise DeviceError(f"{path}: wipefs failed: {done.stderr.strip()}; check the device and util-linux")
    signatures = json.loads(done.stdout)["signatures"] if done.stdout.strip() else []
    by_type: dict[str, list[dict[str, str | None]]] = {}
    for signature in signatures:
        if ranges is None or any(start <= _offset_of(signature) < end for start, end in ranges):
            by_type.setdefault(signature["type"], []).append(signature)
    return [_signature_finding(path, name, same) for name, same in by_type.items()]


def _offset_of(signature: dict[str, str | None]) -> int:
    return int(signature["offset"] or "0", 16)


def _signature_finding(path: str, name: str, signatures: list[dict[str, str | None]]) -> Finding:
    first = signatures[0]
    details = [f"{key} {value}" for key in ("label", "uuid") if (value := first[key])]
    offsets = ", ".join(str(_offset_of(signature)) for signature in signatures)
    if name == "LVM2_member":
        details.append(f"vgremove its volume group first, if it has one: pvs {shlex.quote(path)}")
    is_table = name in PARTITION_TABLES
    return Finding(
        "partition-table" if is_table else "signature",
        f"{name} {'partition table' if is_table else 'signature'}"
        + (f" ({', '.join(details)})" if details else ""),
        f"at byte {offsets}",
        CLEAR_COMMANDS.get(name, "wipefs -a {path}").format(path=shlex.quote(path)),
        overridable=True,
    )


def _store_findings(
    path: str, descriptor: int, size_bytes: int, magic: bytes, magic_offsets: Sequence[int]
) -> list[Finding]:
    if not magic:
        return []
    absolute = sorted({offset + size_bytes if offset < 0 else offset for offset in magic_offsets})
    places = [
        offset
        for offset in absolute
        if 0 <= offset <= size_bytes - len(magic) and _read(path, descriptor, offset, len(magic)) == magic
    ]
    if not places:
        return []
    where = f"superblocks at byte {', '.join(map(str, places))}"
    # its superblocks all stand at the ends, and without them it is no store
    clear = " && ".join(_zero_command(path, *edge) for edge in _edges(size_bytes))
    return [Finding("blockkv", "a blockkv store", where, clear, overridable=True)]


def _data_findings(path: str, descriptor: int, size_bytes: int) -> Iterator[Finding]:
    for start, end in _edges(size_bytes):
        content = _read(path, descriptor, start, end - start)
        yield from nonzero(path, content, start)


def _edges(size_bytes: int) -> list[tuple[int, int]]:
    """(start, end) of the first and the last MiB, in one where they meet."""
    if size_bytes <= 2 * EDGE_BYTES:
        return [(0, size_bytes)] if size_bytes else []
    return [(0, EDGE_BYTES), ((size_bytes - EDGE_BYTES) // UNIT_BYTES * UNIT_BYTES, size_bytes)]


def _zero_command(path: str, start: int, end: int) -> str:
    return (
        f"dd if=/dev/zero of={shlex.quote(path)} bs=1M conv=notrunc "
        f"iflag=count_bytes count={end - start} oflag=seek_bytes seek={start}"
    )


def _read(path: str, descriptor: int, offset_bytes: int, length_bytes: int) -> bytes:
    """Read any range, short only at the end, also through a descriptor with O_DIRECT."""
    start = offset_bytes // UNIT_BYTES * UNIT_BYTES
    end = -(-(offset_bytes + length_bytes) // UNIT_BYTES) * UNIT_BYTES
    content = bytearray()
    with mmap.mmap(-1, end - start) as buffer:  # page-aligned, as direct I/O needs
        while start < end:
            try:
                count = os.preadv(descriptor, [memoryview(buffer)[: end - start]], start)
            except OSError as error:
                raise DeviceError(
                    f"{path}: reading {end - start} bytes at {start} failed: "
                    f"{os.strerror(error.errno or 0)}; `dmesg` and `smartctl -a` tell about the drive",
                    error.errno,
                ) from None
            content += buffer[:count]
            start += count
            if count == 0 or count % UNIT_BYTES:  # the end of the device or file
                break
    skip = offset_bytes % UNIT_BYTES
    return bytes(content[skip : skip + length_bytes])
