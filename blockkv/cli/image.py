"""A device or image seen from outside: read-only, without a lock, believing nothing.

Works on a store that is in use and on a dead one. Every read is direct, so it shows what is on the device
and not what a page cache remembers. What cannot be read is zero bytes, as recovery takes it; nothing here
raises for damage. Not here: presentation (`blockkv.cli.inspect`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from blockkv.device import namespace, passthrough
from blockkv.errors import BlockKVError, FormatError
from blockkv.format import record
from blockkv.format.checkpoint import CheckpointReader
from blockkv.format.geometry import PAGE_BYTES, UNIT_BYTES, slot_offsets
from blockkv.format.journal import Replay, page_index
from blockkv.format.record import DeleteRecord, KeyTailRecord, LayoutRecord, PutRecord, RecordView
from blockkv.format.superblock import Superblock, SuperblockRejected, choose, examine

if TYPE_CHECKING:
    from blockkv.device.unit_cipher import UnitCipher

READ_BYTES = 1 << 20
LIVE_ATTEMPTS = 5
"""A store in use moves on while we read. Its superblock tells whether it did; then we look again."""


class Image:
    """An open device or file. Use as a context manager through `Image.open`."""

    def __init__(self, descriptor: int, path: str, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._descriptor = descriptor
        self._buffer = mmap.mmap(-1, READ_BYTES)
        self._cipher: UnitCipher | None = None

    @classmethod
    @contextmanager
    def open(cls, path: str) -> Iterator[Self]:
        """Open `path` for looking. Raises DeviceError when it cannot be opened."""
        path = passthrough.block_device_of(path) or path
        descriptor, canonical, limits = namespace.open_namespace(path, read_only=True, lock=False)
        try:
            yield cls(descriptor, canonical, limits.size_bytes)
        finally:
            os.close(descriptor)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """`length_bytes` (whole pages) at `offset_bytes`; pages that cannot be read are zeros."""
        pieces = []
        for start in range(offset_bytes, offset_bytes + length_bytes, READ_BYTES):
            wanted = min(READ_BYTES, offset_bytes + length_bytes - start)
            piece = self._read_at(start, wanted)
            if len(piece) < wanted and wanted > PAGE_BYTES:
                # One unreadable sector costs its page, not the whole piece.
                piece = b"".join(
                    self._read_at(page, PAGE_BYTES).ljust(PAGE_BYTES, b"\0")
                    for page in range(start, start + wanted, PAGE_BYTES)
                )
            piece = piece.ljust(wanted, b"\0")
            pieces.append(self._cipher.decrypt(start, piece) if self._cipher else piece)
        return b"".join(pieces)

    def _read_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        try:
            count = os.preadv(self._descriptor, [memoryview(self._buffer)[:length_bytes]], offset_bytes)
        except OSError:
            return b""
        return self._buffer[:count]

    def slots(self) -> list[tuple[int, bytes]]:
        """(device offset, bytes) of the eight superblock slots, also where the device has grown since."""
        slots = self._slots_at(slot_offsets(self.size_bytes))
        with contextlib.suppress(FormatError):
            place = choose([data for _, data in slots]).geometry
            if place.device_bytes < self.size_bytes:
                return self._slots_at(place.slot_offsets)
        return slots

    def _slots_at(self, offsets: Iterable[int]) -> list[tuple[int, bytes]]:
        return [(offset, self.read(offset, PAGE_BYTES)) for offset in offsets]

    def examine_slots(self) -> list[Superblock | SuperblockRejected]:
        """What each slot holds."""
        return examine([data for _, data in self.slots()])

    def superblock(self) -> Superblock:
        """The superblock a store would be opened with. Raises NotFormatted or VersionTooNew."""
        return choose([data for _, data in self.slots()])

    def _unlock(self, superblock: Superblock) -> None:
        """From here on what is read is decrypted, if it is encrypted. Raises WrongKey."""
        if superblock.encryption is None or self._cipher is not None:
            return
        from blockkv.device.unit_cipher import UnitCipher
        from blockkv.encryption.secret import Unlocker
        from blockkv.store.unlocking import unlock_superblock, volume_key_of

        key, _ = volume_key_of(self.path, superblock, Unlocker())
        unlock_superblock(self.path, superblock, key)
        zone = superblock.geometry.encrypted_zone
        self._cipher = UnitCipher(key.cipher_key, zone.offset_bytes, zone.end_bytes)

    def replay(self, superblock: Superblock) -> Replay:
        """The journal from the anchor on. Raises WrongKey."""
        self._unlock(superblock)
        geometry = superblock.geometry
        return Replay(
            lambda sequence: self.read(
                geometry.journal_offset(page_index(sequence, geometry.journal_pages)), PAGE_BYTES
            ),
            superblock,
        )

    def checkpoint(self, superblock: Superblock) -> CheckpointReader:
        """The records of the current checkpoint. Raises WrongKey."""
        self._unlock(superblock)
        start = superblock.checkpoint_zone.offset_bytes
        # The page count is the image's word; beyond its end there is nothing to read.
        end = min(start + superblock.checkpoint_page_count * PAGE_BYTES, self.size_bytes)
        return CheckpointReader(
            (self.read(offset, min(READ_BYTES, end - offset)) for offset in range(start, end, READ_BYTES)),
            superblock,
        )

    def contents(self) -> Contents:
        """Checkpoint and journal together: what the store holds. Raises as `superblock`, and WrongKey."""
        superblock = self.superblock()
        for _ in range(LIVE_ATTEMPTS):
            found = self._contents(superblock)
            newer = self.superblock()
            if newer.generation == superblock.generation:
                return found
            superblock = newer
        raise BlockKVError(
            f"{self.path}: the store wrote {LIVE_ATTEMPTS} checkpoints while it was looked at; retry"
        )

    def _contents(self, superblock: Superblock) -> Contents:
        found = Contents(superblock)
        reader = self.checkpoint(superblock)
        for view in reader:
            found.apply(view)
        found.damaged_checkpoint_pages = reader.damaged_pages
        for page in self.replay(superblock):
            for view in page.records:
                # The checkpoint was taken while the log went on: what it includes may be named once more.
                if view[1] > superblock.log_sequence:
                    found.apply(view)
        return found

    def payload(self, superblock: Superblock, chunk: PutRecord) -> Iterator[bytes]:
        """The payload of `chunk` in pieces, read from its extents and not verified.

        Ends early at the end of the device, whatever the record claims.
        """
        remaining = chunk.payload_bytes
        for start_unit, unit_count in chunk.extents:
            begin = superblock.geometry.unit_offset(start_unit)
            end = min(begin + unit_count * UNIT_BYTES, self.size_bytes // PAGE_BYTES * PAGE_BYTES)
            for offset in range(begin, end, READ_BYTES):
                piece = self.read(offset, min(READ_BYTES, end - offset))[:remaining]
                remaining -= len(piece)
                yield piece


@dataclass(slots=True)
class Contents:
    """The index as it is on the device. A store would first verify the chunks that were not flushed yet."""

    superblock: Superblock
    chunks: dict[bytes, PutRecord] = field(default_factory=dict)
    """By key digest, in log order."""
    keys: dict[bytes, bytes] = field(default_factory=dict)
    layouts: dict[int, bytes] = field(default_factory=dict)
    """Encoded layouts by id."""
    damaged_checkpoint_pages: int = 0

    def apply(self, view: RecordView) -> None:
        """Carry out one accepted record."""
        decoded = record.decode(view[3])
        match decoded:
            case PutRecord():
                self.chunks.pop(decoded.digest, None)
                self.chunks[decoded.digest] = decoded
                self.keys[decoded.digest] = decoded.key
            case KeyTailRecord():
                if decoded.digest in self.chunks:
                    self.keys[decoded.digest] = self.chunks[decoded.digest].key + decoded.tail
            case DeleteRecord():
                self.chunks.pop(decoded.digest, None)
                self.keys.pop(decoded.digest, None)
            case LayoutRecord():
                self.layouts[decoded.layout_id] = decoded.body
