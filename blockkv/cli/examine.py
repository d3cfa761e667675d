"""Whether a machine and a device suit blockkv: what was found, what it means, what would help.

Invariants
  * nothing is changed and nothing is written: devices are opened for reading, what would help is text;
  * every observation stands by itself: one that cannot be made does not stop the others.

Not here: presentation and exit codes (`doctor.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import platform
import pwd
import resource
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockkv.cli import endurance as endurances
from blockkv.cli.byte_sizes import size_text
from blockkv.cli.image import Image
from blockkv.cli.udev_rule import GROUP, RULES, udev_rule
from blockkv.device import holders, nvme_admin
from blockkv.device.base import Limits
from blockkv.device.engine import NativeDevice, checksum_variant
from blockkv.device.namespace import Identity, identify, open_namespace, probe
from blockkv.device.placement import places_of
from blockkv.errors import BlockKVError, DeviceBusy, DeviceError, DeviceTooSmall, FormatError
from blockkv.format import geometry
from blockkv.format.geometry import RUN_BYTES
from blockkv.store.create import DEFAULT_AVERAGE_CHUNK_BYTES, occupants
from blockkv.store.reused import made_since

__all__ = ["Observation", "Verdict", "examine_device", "examine_host"]

OLDEST_KERNEL = (5, 15)
"""Before it, io_uring lacks what the engine asks for (IORING_FEAT_RSRC_TAGS and later fixes)."""
ENOUGH_MEMLOCK_BYTES = 1 << 30
"""Registered memory counts against RLIMIT_MEMLOCK: io_uring_register(2). 16 MiB are the engine's own; the
rest is for the memory of whoever puts and gets."""
IO_URING_SETUP = 425
"""The same on every architecture: asm-generic/unistd.h."""
IO_URING_PARAMS_BYTES = 120
CAP_IPC_LOCK, CAP_SYS_ADMIN = 14, 21
"""<linux/capability.h>"""
SECCOMP_FILTER = "2"
"""`Seccomp:` in /proc/self/status: proc_pid_status(5)."""
WORN_PERCENT = 90


class Verdict(enum.IntEnum):
    """How bad it is; the worst observation is the verdict."""

    GOOD = 0
    NOTE = 1
    """Good to know, and nothing to do."""
    WARNING = 2
    """It works, and could work better or is not well."""
    REFUSED = 3
    """Somebody else uses the device, or it holds something else."""
    UNUSABLE = 4


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing that was looked at."""

    topic: str
    verdict: Verdict
    found: str
    fixes: tuple[str, ...] = ()
    """Shell commands, as root, or comments, that change it. None of them was run."""


def examine_host() -> list[Observation]:
    """What the kernel, its settings and limits allow this process."""
    return [*_kernel(), *_io_uring(), *_memlock(), *_huge_pages(), *_checksums()]


def examine_device(path: str) -> list[Observation]:
    """What a device is, whether it may be used, and how well it suits."""
    try:
        identity = identify(path)
    except BlockKVError as error:
        return [Observation("device", Verdict.UNUSABLE, str(error))]
    observations = [_what_it_is(identity)]
    permission = _permission(identity)
    observations.append(permission)
    if permission.verdict is Verdict.UNUSABLE:
        return observations
    try:
        limits = probe(identity.path)
    except BlockKVError as error:
        return [*observations, Observation("device", Verdict.UNUSABLE, str(error))]
    for examined in (_use, _size, _backing, _queue, _drive, _engine):
        try:
            observations.extend(examined(identity, limits))
        except (BlockKVError, OSError) as error:
            observations.append(Observation("device", Verdict.WARNING, f"could not be looked at: {error}"))
    return observations


# -- the host ----------------------------------------------------------------------------------------------


def _kernel() -> Iterator[Observation]:
    release = platform.release()
    numbers = [int(word) for word in release.split("-")[0].split(".")[:2] if word.isdigit()]
    if tuple(numbers) < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        yield Observation(
            "kernel",
            Verdict.WARNING,
            f"Linux {release}: io_uring is used from {oldest} on, threads before",
            ("# install a kernel of 5.15 or later",),
        )
    else:
        yield Observation("kernel", Verdict.GOOD, f"Linux {release} on {platform.machine()}")


def _io_uring() -> Iterator[Observation]:
    code = ring_refusal()
    if not code:
        yield Observation("io_uring", Verdict.GOOD, "allowed")
        return
    reason = f"refused ({os.strerror(code)}); the engine will be threads, at several times the CPU"
    disabled = holders.read_text(holders.PROC / "sys/kernel/io_uring_disabled")
    if code == errno.EPERM and disabled in ("1", "2"):
        fixes = [
            "sysctl -w kernel.io_uring_disabled=0",
            "echo 'kernel.io_uring_disabled = 0' > /etc/sysctl.d/60-io-uring.conf",
        ]
        who = "everybody"
        if disabled == "1":
            group = holders.read_text(holders.PROC / "sys/kernel/io_uring_group")
            who = f"all but root and group {group}"
            fixes.insert(0, f"# or let this user in: sysctl -w kernel.io_uring_group={os.getegid()}")
        yield Observation(
            "io_uring",
            Verdict.WARNING,
            f"{reason}: sysctl kernel.io_uring_disabled is {disabled}, it is off for {who}",
            tuple(fixes),
        )
    elif _status_field("Seccomp") == SECCOMP_FILTER and code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        where = f" of the container ({_container()})" if _container() else ""
        yield Observation(
            "io_uring",
            Verdict.WARNING,
            f"{reason}: a seccomp filter{where} denies it",
            (
                "# allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile:",
                "# seccomp_profile.py PROFILE > FILE (it comes with blockkv)",
                "# docker run --security-opt seccomp=FILE; kubernetes: securityContext.seccompProfile",
            ),
        )
    elif code == errno.ENOSYS:
        yield Observation(
            "io_uring",
            Verdict.WARNING,
            f"{reason}: the kernel was built without it (CONFIG_IO_URING)",
            ("# use a kernel with CONFIG_IO_URING=y",),
        )
    else:
        yield Observation("io_uring", Verdict.WARNING, reason)


def ring_refusal() -> int:
    """The errno with which the kernel refuses a ring; 0 if it does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(IO_URING_PARAMS_BYTES)
    descriptor = libc.syscall(IO_URING_SETUP, 1, parameters)
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0


def _memlock() -> Iterator[Observation]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _has_capability(CAP_IPC_LOCK) or soft == resource.RLIM_INFINITY:
        why = "not limited" if soft == resource.RLIM_INFINITY else "not limited for this user (CAP_IPC_LOCK)"
        yield Observation("locked memory", Verdict.GOOD, why)
        return
    user = _user()
    fixes = (
        f"printf '%s\\n' '{user} soft memlock unlimited' '{user} hard memlock unlimited' "
        "> /etc/security/limits.d/60-blockkv.conf",
        "# systemd: LimitMEMLOCK=infinity; docker run --ulimit memlock=-1",
    )
    most = "none" if hard == resource.RLIM_INFINITY else size_text(hard)
    text = f"limited to {size_text(soft)} (hard limit: {most})"
    if soft < ENOUGH_MEMLOCK_BYTES:
        yield Observation(
            "locked memory",
            Verdict.WARNING,
            f"{text}: memory beyond that is not registered with the device, which costs CPU",
            fixes,
        )
    else:
        yield Observation("locked memory", Verdict.GOOD, text)


def _huge_pages() -> Iterator[Observation]:
    setting = holders.read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")) or ""
    if "[never]" in setting or not setting:
        yield Observation(
            "huge pages",
            Verdict.WARNING,
            "transparent huge pages are off: memory from blockkv.empty is on pages of 4 KiB, which costs CPU",
            ("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",),
        )
    else:
        yield Observation("huge pages", Verdict.GOOD, "transparent huge pages can be asked for")


def _checksums() -> Iterator[Observation]:
    variant = checksum_variant()
    verdict = Verdict.NOTE if variant == "baseline" and platform.machine() == "x86_64" else Verdict.GOOD
    yield Observation("checksums", verdict, f"XXH3 with {variant} instructions")


# -- the device --------------------------------------------------------------------------------------------


def _what_it_is(identity: Identity) -> Observation:
    names = {
        "namespace": "an NVMe namespace",
        "partition": f"a partition of {identity.disk}",
        "loop": f"a loop device over {identity.backing_file}",
        "file": "a file",
        "block": "a block device",
    }
    facts = [names[identity.kind]]
    facts += [text for text in (identity.model, identity.serial and f"serial {identity.serial}") if text]
    return Observation("device", Verdict.GOOD, f"{identity.path}: {', '.join(facts)}")


def _permission(identity: Identity) -> Observation:
    path, user = identity.path, _user()
    readable, writable = os.access(path, os.R_OK), os.access(path, os.W_OK)
    if readable and writable:
        return Observation("permission", Verdict.GOOD, f"{user} may read and write it")
    what = "only read" if readable else "not even read"
    status = Path(path).stat()
    if not stat.S_ISBLK(status.st_mode):
        fixes: tuple[str, ...] = (f"chown {shlex.quote(user)} {shlex.quote(path)}",)
    else:
        fixes = (
            f"groupadd --force --system {GROUP} && usermod --append --groups {GROUP} {shlex.quote(user)}",
            "# kv0 is a name of your choice, another one for each device: it will be /dev/blockkv/kv0",
            f"echo {shlex.quote(udev_rule(identity, 'kv0'))} >> {RULES}",
            f"udevadm control --reload && udevadm trigger {shlex.quote(path)}",
            f"# processes of {user} that run already are not in the group: end them, and log in again",
        )
    return Observation("permission", Verdict.UNUSABLE, f"{user} may {what} it", fixes)


def _use(identity: Identity, limits: Limits) -> Iterator[Observation]:
    found = occupants(identity.path, limits)
    used = [one for one in found if not one.overridable]
    for one in used:
        yield Observation("in use", Verdict.REFUSED, f"{one.what} ({one.where})", (one.clear_command,))
    if not used:
        try:
            descriptor, _, _ = open_namespace(identity.path, read_only=True, wait_s=0)
            os.close(descriptor)
            yield Observation("in use", Verdict.GOOD, "by nobody")
        except DeviceBusy as error:
            yield Observation("in use", Verdict.REFUSED, str(error))
    content = [one for one in found if one.overridable]
    if any(one.kind == "blockkv" for one in content):
        since = _made_since(identity)
        for one in since:
            what = f"made after the store that was there, which is not written to any more: {one.what}"
            yield Observation("content", Verdict.REFUSED, f"{what} ({one.where})", (one.clear_command,))
        if since:
            return
        yield Observation("content", Verdict.GOOD, "a blockkv store; `blockkv info` tells more")
    elif content:
        for one in content:
            yield Observation("content", Verdict.REFUSED, f"{one.what} ({one.where})", (one.clear_command,))
    else:
        yield Observation("content", Verdict.GOOD, "nothing at either end: `blockkv format` takes it")


def _made_since(identity: Identity) -> list[holders.Finding]:
    descriptor, canonical, limits = open_namespace(identity.path, read_only=True, lock=False)
    try:
        return made_since(canonical, descriptor, limits)
    finally:
        os.close(descriptor)


def _size(identity: Identity, limits: Limits) -> Iterator[Observation]:
    if limits.read_only:
        yield Observation("size", Verdict.UNUSABLE, f"{size_text(limits.size_bytes)}, and set read-only")
        return
    try:
        data = geometry.plan(limits.size_bytes, limits.lba_bytes, DEFAULT_AVERAGE_CHUNK_BYTES).data
    except DeviceTooSmall as error:
        yield Observation("size", Verdict.UNUSABLE, str(error))
        return
    store = None
    with contextlib.suppress(FormatError), Image.open(identity.path) as image:
        store = image.superblock()
    if store and store.geometry.device_bytes > limits.size_bytes and not _made_since(identity):
        path = shlex.quote(identity.path)
        yield Observation(
            "size",
            Verdict.UNUSABLE,
            f"{limits.size_bytes} bytes, and the store on it needs {store.geometry.device_bytes}: the device "
            "shrank, or this is a truncated copy; nothing opens that store here",
            (
                f"# give it {store.geometry.device_bytes} bytes again, or copy all of it",
                f"# or give the store up: blockkv format --force {path}",
                f"# or make it unreadable: blockkv wipe {path} --uuid {store.uuid_text}",
            ),
        )
        return
    found = f"{size_text(limits.size_bytes)}, of which {size_text(data.size_bytes)} for payload"
    yield Observation("size", Verdict.GOOD, found)
    gain = store and geometry.growable_bytes(store.geometry, limits.size_bytes, store.average_chunk_bytes)
    if store and gain:
        found = f"the device is larger than the store on it, which can grow by {size_text(gain)}"
        members = " with the other members of its array" if store.array else ""
        fix = f"# while nobody uses it{members}: blockkv grow {shlex.quote(identity.path)}"
        yield Observation("growth", Verdict.NOTE, found, (fix,))


def _backing(identity: Identity, limits: Limits) -> Iterator[Observation]:
    """Of loop devices and partitions: what lies below."""
    directory = holders.SYSFS / "block" / (identity.disk or "")
    if identity.kind == "loop" and holders.read_text(directory / "loop/dio") == "0":
        yield Observation(
            "loop device",
            Verdict.WARNING,
            "it goes through the page cache of its file, which costs memory and CPU",
            (f"losetup --direct-io=on {shlex.quote(identity.path)}",),
        )
    if identity.kind == "partition":
        start = holders.read_text(holders.SYSFS / "class/block" / Path(identity.path).name / "start")
        start_bytes = int(start) * 512 if start else 0  # in units of 512 bytes, whatever the LBA size
        if start_bytes % RUN_BYTES:
            yield Observation(
                "partition",
                Verdict.WARNING,
                f"it begins at byte {start_bytes}, no multiple of {RUN_BYTES}: requests straddle what the "
                "drive writes together",
                (f"# partition {identity.disk} anew, at multiples of 1 MiB",),
            )


def _queue(identity: Identity, limits: Limits) -> Iterator[Observation]:
    if limits.rotational:
        yield Observation("medium", Verdict.WARNING, "a rotating disk: blockkv is built for flash")
    if limits.volatile_write_cache:
        found = "volatile: durable puts flush, once for all of a call" + (", FUA" if limits.fua else "")
        yield Observation("write cache", Verdict.NOTE, found)
    else:
        yield Observation("write cache", Verdict.GOOD, "none, or protected: nothing has to be flushed")
    if limits.discard_granularity_bytes:
        found = f"in units of {size_text(limits.discard_granularity_bytes)}"
        yield Observation("discard", Verdict.GOOD, found)
    else:
        yield Observation(
            "discard", Verdict.NOTE, "not offered: the drive does not learn what is free, which costs writes"
        )
    if limits.memory_alignment_bytes > 64:  # where torch's own memory begins
        alignment = f"in multiples of {limits.memory_alignment_bytes} bytes"
        found = f"{alignment}: tensors that are not from blockkv.empty are copied"
        yield Observation("memory alignment", Verdict.NOTE, found)
    scheduler = holders.read_text(holders.SYSFS / "block" / (identity.disk or "") / "queue/scheduler") or ""
    if "[" in scheduler and "[none]" not in scheduler:
        chosen = scheduler.split("[")[1].split("]")[0]
        yield Observation(
            "scheduler",
            Verdict.WARNING,
            f"{chosen}: requests are sorted already, a scheduler only costs time",
            (f"echo none > /sys/block/{identity.disk}/queue/scheduler",),
        )


def _drive(identity: Identity, limits: Limits) -> Iterator[Observation]:
    """What an NVMe drive says of itself."""
    if not (identity.disk or "").startswith("nvme"):
        return
    descriptor = os.open(f"/dev/{identity.disk}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        drive = nvme_admin.ask(f"/dev/{identity.disk}", descriptor)
    except DeviceError as error:
        yield Observation(
            "drive", Verdict.NOTE, f"does not answer this user, so no format and no health: {error}"
        )
        return
    finally:
        os.close(descriptor)
    yield from _lba_format(identity, drive.namespace)
    namespace = drive.namespace
    atomic_bytes = max(namespace.atomic_write_lbas, drive.atomic_write_lbas) * namespace.lba_bytes
    yield Observation(
        "atomic writes",
        Verdict.GOOD,
        f"{size_text(atomic_bytes)} are not torn by a loss of power; none is relied on",
    )
    if namespace.write_granularity_bytes:
        fits = RUN_BYTES % namespace.write_granularity_bytes == 0
        text = (
            f"writes of {size_text(namespace.write_granularity_bytes)} at multiples of "
            f"{size_text(namespace.write_alignment_bytes)} are preferred; blockkv allocates "
            f"{size_text(RUN_BYTES)}"
        )
        yield Observation("granularity", Verdict.GOOD if fits else Verdict.NOTE, text)
    yield Observation("discarded LBAs", Verdict.NOTE, f"read as: {namespace.deallocated_reads}")
    yield _placement(identity, drive)
    if drive.health is not None:
        yield from _health(drive.health)
        yield from _endurance(drive)


def _lba_format(identity: Identity, namespace: nvme_admin.Namespace) -> Iterator[Observation]:
    current = namespace.formats[[one.index for one in namespace.formats].index(namespace.format_index)]
    metadata = f" + {current.metadata_bytes} of metadata" if current.metadata_bytes else ""
    text = f"{current.lba_bytes} bytes{metadata}"
    better = [
        one
        for one in namespace.formats
        if not one.metadata_bytes
        and 512 <= one.lba_bytes <= 4096
        and (one.relative_performance, -one.lba_bytes) < (current.relative_performance, -current.lba_bytes)
    ]
    if not better or current.lba_bytes == 4096 == better[0].lba_bytes:
        yield Observation("LBA format", Verdict.GOOD, text)
        return
    best = min(better, key=lambda one: (one.relative_performance, -one.lba_bytes))
    yield Observation(
        "LBA format",
        Verdict.WARNING,
        f"{text}; the drive offers {best.lba_bytes} bytes as format {best.index}"
        + (
            ", and says that it is faster" if best.relative_performance < current.relative_performance else ""
        ),
        (
            f"# erases everything on it: nvme format /dev/{identity.disk} --lbaf={best.index}",
            "# (package nvme-cli); take no partition along: the whole namespace is formatted",
        ),
    )


def _placement(identity: Identity, drive: nvme_admin.Drive) -> Observation:
    fdp = drive.fdp
    if fdp is None:
        offered = (
            "offered, off for this namespace or not shown to this user"
            if drive.fdp_supported
            else "not offered"
        )
        return Observation("FDP", Verdict.NOTE, offered)
    facts = [f"on, {len(fdp.handles)} placement handles"]
    if fdp.reclaim_unit_bytes:
        facts.append(f"reclaim units of {size_text(fdp.reclaim_unit_bytes)}")
    if fdp.host_bytes:
        facts.append(
            f"of {size_text(fdp.host_bytes)} from hosts the drive made {size_text(fdp.media_bytes)}, "
            f"{fdp.media_bytes / fdp.host_bytes:.2f} times as much"
        )
    places = places_of(fdp)
    if places.identifiers is None:
        return Observation("FDP", Verdict.NOTE, f"{', '.join(facts)}: {places.reason}")
    facts.append(f"{places.reason} by passthrough")
    node = f"/dev/{(identity.disk or '').replace('nvme', 'ng', 1)}"
    whole = "" if identity.kind == "namespace" else ", as a whole"
    fix = f"# open it as {node}{whole}: other engines name no placement handle"
    return Observation("FDP", Verdict.NOTE, ", ".join(facts), (fix,))


def _health(health: nvme_admin.Health) -> Iterator[Observation]:
    text = (
        f"{health.temperature_c} C, {health.used_percent} % of its life used, "
        f"{health.spare_percent} % spare, {health.written_bytes / 1e12:.1f} TB written, "
        f"{health.media_errors} media errors"
    )
    problems = list(health.warnings)
    if health.used_percent >= WORN_PERCENT:
        problems.append("it is worn")
    if health.spare_percent < health.spare_threshold_percent:
        problems.append("too little spare")
    verdict = Verdict.WARNING if problems else Verdict.GOOD
    yield Observation("health", verdict, f"{text}: {', '.join(problems)}" if problems else text)


def _endurance(drive: nvme_admin.Drive) -> Iterator[Observation]:
    """How long it will last, by its own account; wear itself is a matter of health."""
    endurance = endurances.of_drive(drive)
    assert endurance is not None
    rate = endurance.bytes_per_day
    left = endurances.days_left(endurance, rate, endurance.life_bytes)
    written = "mean of a day unknown" if rate is None else f"{rate / 1e9:,.0f} GB a day on the mean"
    media = (
        "not told"
        if endurance.amplification is None
        else f"{endurance.amplification:.2f} bytes for each of these"
    )
    life = f"{left:,.0f} days at that rate" if left is not None else "unknown"
    if not endurance.used_percent:
        life += ", less than 1 % is used"
    yield Observation(
        "endurance",
        Verdict.NOTE,
        f"{endurance.power_on_hours} hours on, {written}; its media: {media}; life left: {life}",
    )


def _engine(identity: Identity, limits: Limits) -> Iterator[Observation]:
    """Open it as a store would, but to read, and beside whoever else has it open."""
    descriptor, canonical, limits = open_namespace(identity.path, read_only=True, lock=False)
    try:
        device = NativeDevice(descriptor, canonical, limits, engine="io_uring")
    except DeviceError as error:
        yield Observation("engine", Verdict.WARNING, f"threads: {error}")
        return
    device.close()
    yield Observation("engine", Verdict.GOOD, "io_uring, with direct I/O")


# -- helpers -----------------------------------------------------------------------------------------------


def _status_field(name: str) -> str:
    text = holders.read_text(holders.PROC / "self/status") or ""
    return next((line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")), "")


def _has_capability(number: int) -> bool:
    effective = _status_field("CapEff")
    return bool(effective) and bool(int(effective, 16) >> number & 1)


def _container() -> str:
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else ""


def _user() -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())
