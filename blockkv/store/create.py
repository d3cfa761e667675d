"""Making a store: the only code that may write to a device that holds something else.

Order: refuse what is occupied (by path, and again on the exclusively opened descriptor) -> zero all eight
superblock slots, the newest last, each flushed -> zero the rest of both ends -> discard the data zone ->
first superblock. Cut short anywhere, the device holds the old store whole or reads as not formatted; never
half of either store. For an array the first is done for all of its members, then the rest one by one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from blockkv.device import namespace, occupancy
from blockkv.device.base import Device, Limits
from blockkv.device.engine import NativeDevice
from blockkv.encryption.secret import Passphrase, Secret, Unlock, parse_unlock
from blockkv.encryption.volume_key import NO_SLOTS, VolumeKey, only_slot, wrap
from blockkv.errors import DeviceBusy, DeviceError, DeviceLost, DeviceReadOnly, InvalidArgument
from blockkv.format import geometry, superblock
from blockkv.format.geometry import MEBIBYTE, PAGE_BYTES, SLOTS_PER_COPY, Geometry
from blockkv.format.superblock import Encryption, Membership, Superblock
from blockkv.store.interrupts import interrupts
from blockkv.store.log import write_superblock

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)B?\s*", re.IGNORECASE)

DEFAULT_AVERAGE_CHUNK_BYTES = 1 << 20
EPHEMERAL = "ephemeral"


def parse_size(size: int | str, what: str = "size") -> int:
    """Bytes from a number or a text such as "4KiB", "64M" (binary too), "1.5GiB". Raises InvalidArgument."""
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if not match or len(match[1]) > 18:
        raise InvalidArgument(
            f'{what} {size!r} is not a number of bytes; write for example 4096, "64KiB" or "1GiB"'
        )
    number, prefix, _ = match.groups()
    return int(float(number) * 1024 ** " KMGTP".index(prefix.upper() or " "))


Target = str | os.PathLike[str] | Device
"""What can be formatted: a path, or a device."""


def format_device(
    path: Target | Sequence[Target],
    size: int | str | None = None,
    average_chunk: int | str = DEFAULT_AVERAGE_CHUNK_BYTES,
    label: str | None = None,
    force: bool = False,
    journal: int | str | None = None,
    encrypt: Unlock | None = None,
) -> dict[str, Any]:
    """Make an empty store on a namespace, partition, loop device or regular file, and describe it.

    Several paths make an array: one store on all of them, to be opened with all of them. Nothing is written
    to any before all may be written to.

    `size` creates the regular file when there is none (an empty one is grown); devices are used whole.
    `average_chunk` fixes how many chunks the store can hold, like the bytes-per-inode ratio of mke2fs; it
    cannot be changed later. `journal` is the size of the journal ring, 64 MiB or a sixteenth by default.
    `force` overrides content (signatures, partition tables, an older store, other data), never a use.

    `encrypt`: what the store is to be opened with, as text ("key-file:PATH", "passphrase-file:PATH",
    "keyring:DESCRIPTION", "passphrase": asked for), a secret of at least 32 bytes, or a `Passphrase`. All
    but the superblocks is encrypted then, with AES-256-XTS. "ephemeral": with a key that is never written
    down, so that every open for writing finds an empty store, and nobody ever finds what was in it.

    Raises DeviceBusy (mounted, held, open elsewhere), OccupiedError, DeviceReadOnly, DeviceTooSmall,
    DeviceError, InvalidArgument. Nothing was written then.
    """
    average_chunk_bytes = parse_size(average_chunk, "average chunk")
    journal_bytes = None if journal is None else parse_size(journal, "journal")
    size_bytes = None if size is None else parse_size(size)
    if not isinstance(label, str | None):
        raise InvalidArgument(f"label is {label!r}; give a text, or None")
    paths = several(path)
    secret = None if encrypt is None or encrypt == EPHEMERAL else parse_unlock(encrypt, new=True)
    with interrupts, contextlib.ExitStack() as stack:
        devices = [
            stack.enter_context(_ready(one, size_bytes, average_chunk_bytes, journal_bytes, force=force))
            for one in paths
        ]
        places = _places(len(devices))
        firsts = [
            _first_superblock(
                device,
                geometry.plan(
                    device.limits.size_bytes, device.limits.lba_bytes, average_chunk_bytes, journal_bytes
                ),
                average_chunk_bytes,
                label,
                place,
            )
            for device, place in zip(devices, places, strict=True)
        ]
        if encrypt is not None:
            firsts = [_encrypted(first, secret) for first in firsts]
        interrupts.deliver()
        for device, first in zip(devices, firsts, strict=True):
            _write_store(device, first)
    facts = [
        {"path": device.path, **superblock_facts(first)}
        for device, first in zip(devices, firsts, strict=True)
    ]
    if places[0] is None:
        return facts[0]
    return {**array_facts(firsts[0], len(devices)), "members": facts}


def several(path: object) -> list[Any]:
    """One path or device, or several, as a list.

    Raises InvalidArgument for none and for too many, DeviceBusy where two are the same device or file.
    """
    paths = [path] if isinstance(path, str | bytes | os.PathLike | Device) else path
    if not isinstance(paths, Sequence):
        raise InvalidArgument(f"{path!r} is neither a path nor a list of paths")
    if not 1 <= len(paths) <= superblock.MAX_MEMBERS:
        raise InvalidArgument(f"{len(paths)} paths; an array has 2 to {superblock.MAX_MEMBERS} members")
    seen: dict[object, str] = {}
    for one in paths:
        name = one.path if isinstance(one, Device) else namespace.path_text(one)
        which = _which(one)
        if which in seen:
            what = (
                f"{name} was given twice" if name == seen[which] else f"{seen[which]} and {name} are the same"
            )
            raise DeviceBusy(
                f"{what}; an array needs a device or file of its own for each member", errno.EBUSY
            )
        seen[which] = name
    return list(paths)


def _which(path: Any) -> object:
    """The same for paths that lead to one device or file."""
    if isinstance(path, Device):
        return id(path)
    name = namespace.path_text(path)
    with contextlib.suppress(OSError):
        status = Path(name).stat()
        is_device = stat.S_ISBLK(status.st_mode)
        return ("device", status.st_rdev) if is_device else (status.st_dev, status.st_ino)
    return os.path.realpath(name)


def _places(count: int) -> list[Membership | None]:
    if count == 1:
        return [None]
    identity = uuid.uuid4().bytes
    return [Membership(identity, count, index, 1, (1 << count) - 1) for index in range(count)]


@contextlib.contextmanager
def _ready(
    path: Target,
    size_bytes: int | None,
    average_chunk_bytes: int,
    journal_bytes: int | None,
    *,
    force: bool,
) -> Iterator[Device]:
    """The device, ours alone, found to be free. What was created for it is removed where an error follows."""
    if isinstance(path, Device):
        yield path
        return
    created = size_bytes is not None and _create_file(path, size_bytes)
    try:
        with contextlib.closing(_opened(path, average_chunk_bytes, journal_bytes, force=force)) as device:
            yield device
    except BaseException:
        if created:
            Path(path).unlink()
        raise


@namespace.told
def _opened(
    path: str | os.PathLike[str], average_chunk_bytes: int, journal_bytes: int | None, *, force: bool
) -> NativeDevice:
    limits = namespace.probe(path)
    occupied = partial(
        occupancy.refuse_if_occupied,
        path,
        force=force,
        magic=superblock.MAGIC,
        magic_offsets=_magic_offsets(limits),
    )
    geometry.plan(limits.size_bytes, limits.lba_bytes, average_chunk_bytes, journal_bytes)
    occupied()
    descriptor, canonical, limits = namespace.open_namespace(path)
    try:
        occupied(descriptor=descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return NativeDevice(descriptor, canonical, limits)


def occupants(path: str | os.PathLike[str], limits: Limits) -> list[occupancy.Finding]:
    """What `format_device` would refuse a device for, a store told from other content."""
    return occupancy.occupancy(path, magic=superblock.MAGIC, magic_offsets=_magic_offsets(limits))


def _magic_offsets(limits: Limits) -> list[int]:
    """Where the magic of superblocks stands, if there are any."""
    within = superblock.SUPERBLOCK.offsets["magic"]
    return [offset + within for offset in geometry.slot_offsets(limits.size_bytes)]


def superblock_facts(found: Superblock) -> dict[str, Any]:
    """What a superblock says about its store, for `format` and `Store.info`."""
    shape = found.geometry
    return {
        "uuid": found.uuid_text,
        "label": found.label,
        "format_version": superblock.FORMAT_VERSION,
        "device_bytes": shape.device_bytes,
        "lba_bytes": shape.lba_bytes,
        "average_chunk_bytes": found.average_chunk_bytes,
        "checkpoint_area_bytes": shape.checkpoint_a.size_bytes,
        "journal_bytes": shape.journal.size_bytes,
        "data_offset_bytes": shape.data.offset_bytes,
        "data_bytes": shape.data.size_bytes,
        "encryption": _encryption_facts(found.encryption),
        **(
            {"array": asdict(found.array) | {"array_uuid": found.array.array_uuid_text}}
            if found.array
            else {}
        ),
    }


def _encryption_facts(encryption: Encryption | None) -> dict[str, Any] | None:
    if encryption is None:
        return None
    slots = {
        str(index): slot.kind.name.lower() for index, slot in enumerate(encryption.slots) if slot is not None
    }
    return {"cipher": "aes-256-xts", "ephemeral": encryption.ephemeral, "key_slots": slots}


def array_facts(found: Superblock, member_count: int) -> dict[str, Any]:
    """What the superblock of one member says about its array."""
    assert found.array is not None
    return {"array_uuid": found.array.array_uuid_text, "label": found.label, "member_count": member_count}


def _create_file(path: str | os.PathLike[str], size_bytes: int) -> bool:
    """Make the regular file if it is missing or empty; True if a new one was made."""
    target = Path(namespace.path_text(path))
    existed = os.path.lexists(target)
    if existed and not target.is_file():
        raise InvalidArgument(f"{target} exists and is not a regular file; a size is for creating files only")
    if existed and target.stat().st_size:
        if target.stat().st_size != size_bytes:
            raise InvalidArgument(
                f"{target} exists with {target.stat().st_size} bytes, not {size_bytes}; leave out the size "
                "to use it as it is, or remove it first"
            )
        return False
    namespace.create_file(target, size_bytes)
    return not existed


def _first_superblock(
    device: Device,
    shape: Geometry,
    average_chunk_bytes: int,
    label: str | None,
    array: Membership | None,
) -> Superblock:
    """The superblock of generation 1. Raises for whatever does not fit, before any write."""
    if device.limits.read_only:
        raise DeviceReadOnly(f"{device.path} is read-only")
    first = Superblock(
        uuid=uuid.uuid4().bytes,
        generation=1,
        epoch=1,
        geometry=shape,
        checkpoint_area=0,
        checkpoint_id=os.urandom(16),
        checkpoint_page_count=0,
        checkpoint_record_count=0,
        log_sequence=0,
        replay_from_sequence=1,
        replay_predecessor=os.urandom(16),
        epoch_start_sequence=1,
        clean=True,
        average_chunk_bytes=average_chunk_bytes,
        label=label or "",
        array=array,
    )
    assert len(first.encode(superblock.slots_of(1)[0])) == PAGE_BYTES  # refuses a label that does not fit
    return first


def _encrypted(first: Superblock, secret: Passphrase | Secret | None) -> Superblock:
    """The same of a store with a volume key of its own, which `secret` opens; None: nothing does."""
    key = VolumeKey.new(first.uuid)
    slots = only_slot(wrap(key, secret)) if secret else NO_SLOTS
    return replace(first, encryption=Encryption(slots, ephemeral=secret is None, mac_key=key.mac_key))


def begin_anew(device: Device, found: Superblock) -> tuple[Superblock, VolumeKey]:
    """Make the ephemeral store on `device` an empty one with a new key; the rest stays as it was.

    Its chunks are lost already: nobody has their key. Cut short anywhere, the device holds an ephemeral
    store. Raises DeviceError.
    """
    assert found.encryption is not None
    key = VolumeKey.new(found.uuid)
    shape = geometry.plan(
        device.limits.size_bytes,
        device.limits.lba_bytes,
        found.average_chunk_bytes,
        found.geometry.journal.size_bytes,
    )
    first = replace(
        _first_superblock(device, shape, found.average_chunk_bytes, found.label, found.array),
        uuid=found.uuid,
        generation=found.generation + 1,
        epoch=found.epoch,  # what was leased in it is void
        encryption=replace(found.encryption, mac_key=key.mac_key),
    )
    if shape.device_bytes != found.geometry.device_bytes:
        _zero_tail(device, shape, but=found.geometry.slot_offsets)
        device.flush()
    device.discard(shape.data.offset_bytes, shape.data.size_bytes)
    return _write_superblocks(device, first), key


def _write_store(device: Device, first: Superblock) -> Superblock:
    """Returns the newest superblock that it has written."""
    shape = first.geometry
    for offset in _newest_last(device, shape.slot_offsets):
        device.write(offset, bytes(PAGE_BYTES))
        device.flush()
    # The rest of both ends too: partition tables and file systems keep spare copies of what they are there,
    # and their tools would restore them over ours.
    device.write(0, bytes(MEBIBYTE))
    _zero_tail(device, shape)
    device.discard(shape.data.offset_bytes, shape.data.size_bytes)
    return _write_superblocks(device, first)


def _zero_tail(device: Device, shape: Geometry, but: Sequence[int] = ()) -> None:
    """All from its first slot to the end of the device, without the slots that are in `but`."""
    end = device.limits.size_bytes // PAGE_BYTES * PAGE_BYTES
    for offset, following in pairwise([*shape.slot_offsets[SLOTS_PER_COPY:], end]):
        start = offset + PAGE_BYTES * (offset in but)
        device.write(start, bytes(following - start))


def _write_superblocks(device: Device, first: Superblock) -> Superblock:
    """Returns the newest that it has written."""
    write_superblock(device, first)
    if first.array is not None or first.encryption is not None:
        # What it says behind its first sector stands in every slot from now on: no later write can be torn
        # into a mixture there.
        for _ in range(SLOTS_PER_COPY - 1):
            first = replace(first, generation=first.generation + 1)
            write_superblock(device, first)
    return first


def _newest_last(device: Device, slot_offsets: Sequence[int]) -> list[int]:
    """The slots in the order to zero them.

    While the newest superblock stands, the old store is whole. An older one, left behind alone, would name a
    checkpoint and journal pages that have been overwritten since.
    """
    slots = []
    for offset in slot_offsets:
        try:
            slots.append(device.read(offset, PAGE_BYTES))
        except DeviceLost:
            raise
        except DeviceError:
            slots.append(b"")
    generations = [getattr(found, "generation", 0) for found in superblock.examine(slots)]
    return [offset for _, offset in sorted(zip(generations, slot_offsets, strict=True))]
