"""A store with something in every structure, and what is where in it, for the tests that damage it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch

import blockkv
from blockkv.format.geometry import slot_offsets
from blockkv.format.journal import page_index
from blockkv.format.page import PAGE_BYTES, PageKind, decode_page
from blockkv.format.record import Operation, decode, iterate_records
from blockkv.format.superblock import Superblock, choose, examine
from blockkv.store import store as store_module
from blockkv.testing import Crash, SimulatedDevice, crash_clone

SIZE_BYTES = 16 << 20
CHECKPOINTED = [f"c{number}" for number in range(100)]
JOURNALED = [f"j{number}" for number in range(6)]
KEYS = [*CHECKPOINTED, *JOURNALED]


def payload(key: str) -> torch.Tensor:
    """Content fixed by the key, of a length that depends on it too."""
    dice = random.Random(key)
    return torch.frombuffer(bytearray(dice.randbytes(dice.choice((900, 4096, 5000)))), dtype=torch.uint8)


def open_copy(device: SimulatedDevice, **options: object) -> blockkv.Store:
    """Open a device that may be a copy of one that is open; what crashed is not closed at exit."""
    store_module._open_stores.clear()
    return blockkv.open(device, commit_interval_ms=None, **options)  # type: ignore[arg-type]


def exact(store: blockkv.Store, keys: Iterable[str]) -> bool:
    """Whether all of `keys` give the bytes that were put."""
    wanted = list(keys)
    return all(
        found is not None and torch.equal(found, payload(key))
        for key, found in zip(wanted, store.get_many(wanted), strict=True)
    )


def slots_of(device: SimulatedDevice) -> list[bytes]:
    """The bytes of the eight superblock slots."""
    return [device.peek(offset, PAGE_BYTES) for offset in slot_offsets(device.limits.size_bytes)]


@dataclass
class Sample:
    """A store that was killed: `device` holds a checkpoint of several pages and journal pages after it."""

    device: SimulatedDevice
    superblock: Superblock
    slot_offsets: tuple[int, ...]
    places: dict[str, int]
    """Device offset of each chunk's payload."""

    def copy(self) -> SimulatedDevice:
        return self.device.clone()

    @property
    def checkpoint_pages(self) -> list[int]:
        """Offsets of the pages of the current checkpoint."""
        start = self.superblock.checkpoint_zone.offset_bytes
        return [start + index * PAGE_BYTES for index in range(self.superblock.checkpoint_page_count)]

    @property
    def idle_area_bytes(self) -> int:
        """Offset of the checkpoint area that is not in use."""
        return self.superblock.geometry.checkpoints[1 - self.superblock.checkpoint_area].offset_bytes

    @property
    def journal_pages(self) -> list[int]:
        """Offsets of the journal pages that a recovery replays."""
        geometry = self.superblock.geometry
        first = self.superblock.replay_from_sequence
        return [
            geometry.journal_offset(page_index(first + number, geometry.journal_pages))
            for number in range(len(JOURNALED))
        ]

    def keys_in(self, page_offset: int, kind: PageKind) -> set[str]:
        """The keys of the PUT records in a page."""
        data = self.device.peek(page_offset, PAGE_BYTES)
        sequence = int.from_bytes(data[48:56], "little")
        page = decode_page(data, kind=kind, store_id=self.superblock.uuid, sequence=sequence)
        views = iterate_records(page.body, page.record_count, self.superblock.geometry.data_units)
        return {decode(view[3]).key.decode() for view in views if view[0] == Operation.PUT}  # type: ignore[union-attr]


def sample() -> Sample:
    """Make one. A few checkpoints before, so that every slot and both areas have been in use."""
    device = SimulatedDevice(SIZE_BYTES)
    blockkv.format(device, average_chunk="4KiB", journal="1MiB")
    store = open_copy(device)
    for _ in range(8):
        store.checkpoint()
    store.put_many([(key, payload(key)) for key in [*CHECKPOINTED, "gone"]])
    store.checkpoint()
    store.checkpoint()
    store.delete("gone")
    for key in JOURNALED:
        store.put(key, payload(key), durable=True)
    places = {}
    for key in KEYS:
        info = store.entry(key)
        assert info is not None
        places[key] = store.info()["data_offset_bytes"] + info.extents[0][0] * 4096
    killed = crash_clone(device, random.Random(1), Crash.PROCESS_KILL).clone()
    made = Sample(killed, choose(slots_of(killed)), slot_offsets(SIZE_BYTES), places)
    assert len(made.checkpoint_pages) >= 3
    assert all(isinstance(slot, Superblock) for slot in examine(slots_of(killed)))
    return made
