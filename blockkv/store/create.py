"""Making a store: the only code that may write to a device that holds something else.

Order: refuse what is occupied (by path, and again on the exclusively opened descriptor) -> zero all eight
superblock slots, the newest last, each flushed -> zero the rest of both ends -> discard the data zone ->
first superblock. Cut short anywhere, the device holds the old store whole or reads as not formatted; never
half of either store.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from blockkv.device import namespace, occupancy
from blockkv.device.base import Device
from blockkv.device.engine import NativeDevice
from blockkv.errors import DeviceError, DeviceLost, DeviceReadOnly, InvalidArgument
from blockkv.format import geometry, superblock
from blockkv.format.geometry import MEBIBYTE, PAGE_BYTES, SLOTS_PER_COPY
from blockkv.format.superblock import Superblock
from blockkv.store.log import write_superblock

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)B?\s*", re.IGNORECASE)


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


@namespace.told
def format_device(
    path: str | os.PathLike[str] | Device,
    size: int | str | None = None,
    average_chunk: int | str = "1MiB",
    label: str | None = None,
    force: bool = False,
    journal: int | str | None = None,
) -> dict[str, Any]:
    """Make an empty store on a namespace, partition, loop device or regular file, and describe it.

    `size` creates the regular file when there is none (an empty one is grown); devices are used whole.
    `average_chunk` fixes how many chunks the store can hold, like the bytes-per-inode ratio of mke2fs; it
    cannot be changed later. `journal` is the size of the journal ring, 64 MiB or a sixteenth by default.
    `force` overrides content (signatures, partition tables, an older store, other data), never a use.

    Raises DeviceBusy (mounted, held, open elsewhere), OccupiedError, DeviceReadOnly, DeviceTooSmall,
    DeviceError, InvalidArgument. Nothing was written then.
    """
    average_chunk_bytes = parse_size(average_chunk, "average chunk")
    journal_bytes = None if journal is None else parse_size(journal, "journal")
    if isinstance(path, Device):
        return _write_store(path, average_chunk_bytes, journal_bytes, label)
    created = size is not None and _create_file(path, parse_size(size))
    try:
        limits = namespace.probe(path)
        magic_offset = superblock.SUPERBLOCK.offsets["magic"]
        slots = geometry.slot_offsets(limits.size_bytes)
        occupied = partial(
            occupancy.refuse_if_occupied,
            path,
            force=force,
            magic=superblock.MAGIC,
            magic_offsets=[offset + magic_offset for offset in slots],
        )
        geometry.plan(limits.size_bytes, limits.lba_bytes, average_chunk_bytes, journal_bytes)
        occupied()
        descriptor, canonical, limits = namespace.open_namespace(path)
        try:
            occupied(descriptor=descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        device = NativeDevice(descriptor, canonical, limits)
        with contextlib.closing(device):
            return _write_store(device, average_chunk_bytes, journal_bytes, label)
    except BaseException:
        if created:
            Path(path).unlink()
        raise


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
    }


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


def _write_store(
    device: Device, average_chunk_bytes: int, journal_bytes: int | None, label: str | None
) -> dict[str, Any]:
    limits = device.limits
    if limits.read_only:
        raise DeviceReadOnly(f"{device.path} is read-only")
    shape = geometry.plan(limits.size_bytes, limits.lba_bytes, average_chunk_bytes, journal_bytes)
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
    )
    encoded = first.encode(superblock.slots_of(1)[0])  # refuses a label that does not fit, before any write
    assert len(encoded) == PAGE_BYTES
    for offset in _newest_last(device, shape.slot_offsets):
        device.write(offset, bytes(PAGE_BYTES))
        device.flush()
    # The rest of both ends too: partition tables and file systems keep spare copies of what they are there,
    # and their tools would restore them over ours.
    tail_offset = shape.slot_offsets[SLOTS_PER_COPY]
    device.write(0, bytes(MEBIBYTE))
    device.write(tail_offset, bytes((limits.size_bytes - tail_offset) // PAGE_BYTES * PAGE_BYTES))
    device.discard(shape.data.offset_bytes, shape.data.size_bytes)
    write_superblock(device, first)
    return {"path": device.path, **superblock_facts(first)}


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
