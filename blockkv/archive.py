"""Chunks on their way out of a store: into another one, or into a file that any store can take.

::

    copy(source, target)                        # both open
    with open("kv.tar", "wb") as file: dump(store, file)
    with open("kv.tar", "rb") as file: load(file, store)

An archive is a tar file in the format of POSIX.1-2001 (pax), so that every system can list it::

    blockkv-archive.json    {"version": 1}
    chunks/<key digest>     the payload; its pax header has key, layout and checksum
    blockkv-end.json        {"chunks": N}: without it the archive was cut short

Invariants
  * a chunk arrives with the bytes it was put with, or not at all: what a store gives is verified, and what
    an archive gives is compared with the checksum of key, layout and payload;
  * chunks go in the order in which they would be evicted, so that the target knows it too, and a smaller
    one keeps those used last;
  * what is there already is not written again but used in its turn, so that all of it can be done again, and
    a smaller target ends up with the same chunks.

Not carried: priorities, times to live, pins, chunks that grow. Not here: what a store needs to be opened.
"""

from __future__ import annotations

import io
import json
import logging
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch
from xxhash import xxh3_128

from blockkv.catalog.layouts import Layout
from blockkv.errors import ArchiveError, BatchError, StoreFull
from blockkv.format.record import key_digest
from blockkv.logs import logger_for
from blockkv.memory import empty
from blockkv.store import Store
from blockkv.store.keys import encode_key
from blockkv.tensors import bytes_of, values_over

__all__ = ["Moved", "copy", "dump", "load"]

VERSION = 1
HEADER, END, CHUNKS = "blockkv-archive.json", "blockkv-end.json", "chunks/"
BATCH_BYTES = 64 << 20
BUFFER_BYTES = 4 << 20
ALIGNMENT_BYTES = 4096
NOTE_LIMIT_BYTES = 1 << 16
"""Of what is no chunk in an archive, which is not trusted."""

Progress = Callable[[int, int], None]
"""Called with (chunks done, chunks in all); 0 in all where nobody knows."""

logger = logging.getLogger("blockkv")


@dataclass(slots=True)
class Moved:
    """What became of the chunks: each is counted once."""

    chunks: int = 0
    """That have arrived, and are there."""
    payload_bytes: int = 0
    """Of those."""
    existing: int = 0
    """That the target had already, and has."""
    evicted: int = 0
    """That the target had or got, and that left it again for those after them: it is too small for all."""
    no_room: int = 0
    """That the target did not take: they are too large, or it is full and evicts nothing."""
    refused: int = 0
    """That the target did not take: its admission policy, its write budget."""
    lost: int = 0
    """That the source had listed and could not give: damaged, unreadable, or evicted meanwhile."""

    @property
    def complete(self) -> bool:
        """Whether everything is at the target now."""
        return not (self.evicted or self.no_room or self.refused or self.lost)


@dataclass(slots=True)
class _Chunk:
    key: str | bytes
    layout: Layout
    payload: memoryview


def copy(source: Store, target: Store, *, progress: Progress | None = None) -> Moved:
    """Put the chunks of one store into another one; durable when it returns.

    Both may be stores, arrays or clients of an owner. What cannot be read is left out, logged and counted, so
    that this also saves what an ailing drive still gives. Raises StoreReadOnly, StoreClosed, DeviceError
    (of the target), DeviceLost.
    """
    moved = Moved()
    arrivals = _Arrivals(target, moved)
    for batch in _read(source, moved, progress):
        arrivals.add(batch)
    target.commit()
    arrivals.count()
    return moved


def dump(store: Store, file: BinaryIO, *, progress: Progress | None = None) -> Moved:
    """Write the chunks of a store to a file, a pipe or a socket, from where it stands.

    Unreadable chunks as in `copy`. Raises OSError (of the file), StoreClosed, DeviceLost.
    """
    moved = Moved()
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BUFFER_BYTES) as archive:
        _add_note(archive, HEADER, {"version": VERSION})
        for batch in _read(store, moved, progress):
            for chunk in batch:
                _add_chunk(archive, chunk)
                moved.chunks += 1
                moved.payload_bytes += len(chunk.payload)
        _add_note(archive, END, {"chunks": moved.chunks})
    return moved


def load(file: BinaryIO, store: Store, *, progress: Progress | None = None) -> Moved:
    """Put the chunks of an archive, read from where the file stands, into a store; durable when it returns.

    Raises ArchiveError for what is no archive, is damaged between chunks or was cut short: chunks before that
    are in the store then. A chunk that is damaged itself is left out and counted as lost. Raises as `copy`
    for the store.
    """
    moved = Moved()
    arrivals = _Arrivals(store, moved)
    try:
        for batch in _unpack(file, int(store.stats()["data_bytes"]), moved, progress):
            arrivals.add(batch)
    finally:
        store.commit()
    arrivals.count()
    return moved


class _Batch:
    """Chunks in memory that the next ones use again."""

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self._memory = bytes_of(empty(BATCH_BYTES, torch.uint8))
        self._end = 0

    def place(self, size_bytes: int) -> memoryview | None:
        """Memory for a payload; None where there is no more until `clear`."""
        if self._end + size_bytes > len(self._memory):
            if self.chunks:
                return None
            self._memory = bytes_of(empty(size_bytes, torch.uint8))
        first, self._end = self._end, self._end - (-size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        return self._memory[first : first + size_bytes]

    def clear(self) -> None:
        self.chunks.clear()
        self._end = 0


def _read(source: Store, moved: Moved, progress: Progress | None) -> Iterator[Sequence[_Chunk]]:
    """What a store has, batch by batch; a batch is gone with the next one."""
    keys = list(source.keys())
    batch = _Batch()
    for number, key in enumerate(keys):
        info = source.entry(key)
        if info is None:
            moved.lost += 1
            continue
        memory = batch.place(info.payload_bytes)
        if memory is None:
            yield _filled(source, batch, moved)
            batch.clear()
            memory = batch.place(info.payload_bytes)
            assert memory is not None
        batch.chunks.append(_Chunk(info.key, info.layout, memory))
        if progress is not None:
            progress(number, len(keys))
    yield _filled(source, batch, moved)


def _filled(source: Store, batch: _Batch, moved: Moved) -> list[_Chunk]:
    """The chunks of a batch that could be read."""
    try:
        found = source.get_many([one.key for one in batch.chunks], [one.payload for one in batch.chunks])
    except BatchError as error:
        found = [one is True for one in error.results]
        logger_for(source._where).warning("chunks are left out: %s", error)
    moved.lost += len(batch.chunks) - sum(found)
    return [chunk for chunk, is_there in zip(batch.chunks, found, strict=True) if is_there]


class _Arrivals:
    """Chunks that come to a target, in order, and what becomes of them."""

    def __init__(self, target: Store, moved: Moved) -> None:
        self._target = target
        self._moved = moved
        self._before = _digests(target)
        self._came: dict[bytes, int] = {}
        """Payload bytes by digest, of those that were put or were there."""

    def add(self, chunks: Sequence[_Chunk]) -> None:
        """Put those that are not there, use those that are."""
        absent: list[_Chunk] = []
        for chunk in chunks:
            digest = _digest(chunk.key)
            if digest in self._before:
                # In its turn: used any earlier, it would leave for chunks that go before it.
                self._put(absent)
                absent = []
                if self._target.touch(chunk.key):
                    self._came[digest] = len(chunk.payload)
                    continue
            absent.append(chunk)
        self._put(absent)

    def count(self) -> None:
        """See what is there in the end."""
        after = _digests(self._target)
        for digest, payload_bytes in self._came.items():
            if digest not in after:
                self._moved.evicted += 1
            elif digest in self._before:
                self._moved.existing += 1
            else:
                self._moved.chunks += 1
                self._moved.payload_bytes += payload_bytes

    def _put(self, chunks: Sequence[_Chunk]) -> None:
        if not chunks:
            return
        errors: Mapping[int, Exception] = {}
        try:
            results = self._target.put_many(
                [(chunk.key, values_over(chunk.payload, chunk.layout)) for chunk in chunks]
            )
        except BatchError as error:
            if not all(isinstance(one, StoreFull) for one in error.errors.values()):
                raise
            results, errors = [one is True for one in error.results], error.errors
        for number, (chunk, written) in enumerate(zip(chunks, results, strict=True)):
            digest = _digest(chunk.key)
            if number in errors:
                self._moved.no_room += 1
            elif written or digest in self._came:
                self._came[digest] = len(chunk.payload)
            elif self._target.contains(chunk.key):  # somebody else has put it meanwhile
                self._before.add(digest)
                self._came[digest] = len(chunk.payload)
            else:
                self._moved.refused += 1


def _digests(store: Store) -> set[bytes]:
    return set(map(_digest, store.keys()))


def _digest(key: str | bytes) -> bytes:
    return key_digest(_raw(key))


# -- archives ----------------------------------------------------------------------------------------------


def _raw(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def _checksum(chunk: _Chunk) -> str:
    key, layout = _raw(chunk.key), chunk.layout.body
    state = xxh3_128(len(key).to_bytes(4, "little") + key + len(layout).to_bytes(4, "little") + layout)
    state.update(chunk.payload)
    return state.hexdigest()


def _add_chunk(archive: tarfile.TarFile, chunk: _Chunk) -> None:
    key = _raw(chunk.key)
    member = tarfile.TarInfo(CHUNKS + key_digest(key).hex())
    member.size = len(chunk.payload)
    member.pax_headers = {
        "BLOCKKV.key": key.hex(),
        "BLOCKKV.key_is_text": str(int(isinstance(chunk.key, str))),
        "BLOCKKV.layout": chunk.layout.body.hex(),
        "BLOCKKV.xxh3_128": _checksum(chunk),
    }
    archive.addfile(member, io.BytesIO(chunk.payload))


def _add_note(archive: tarfile.TarFile, name: str, note: dict[str, int]) -> None:
    text = json.dumps(note).encode()
    member = tarfile.TarInfo(name)
    member.size = len(text)
    archive.addfile(member, io.BytesIO(text))


def _unpack(
    file: BinaryIO, limit_bytes: int, moved: Moved, progress: Progress | None
) -> Iterator[Sequence[_Chunk]]:
    """What an archive has, batch by batch; a batch is gone with the next one."""
    seen = 0
    batch = _Batch()
    try:
        with tarfile.open(fileobj=file, mode="r|", bufsize=BUFFER_BYTES) as archive:
            _check_header(archive, archive.next())
            while (member := archive.next()) is not None and member.name != END:
                seen += 1
                chunk = _described(member)
                if chunk is None or member.size > limit_bytes:
                    logger.warning("%s in the archive is no chunk that fits; it is left out", member.name)
                    moved.lost += 1
                    continue
                memory = batch.place(member.size)
                if memory is None:
                    yield batch.chunks
                    batch.clear()
                    memory = batch.place(member.size)
                    assert memory is not None
                if _is_filled(archive, member, chunk, memory):
                    batch.chunks.append(chunk)
                else:
                    logger.warning("%s in the archive is damaged; it is left out", member.name)
                    moved.lost += 1
                if progress is not None:
                    progress(seen, 0)
            yield batch.chunks
            if member is None or _note(archive, member).get("chunks") != seen:
                raise ArchiveError(f"the archive was cut short: it has no end after chunk {seen}")
    except tarfile.TarError as error:
        raise ArchiveError(f"the archive cannot be read beyond chunk {seen}: {error}") from error


def _check_header(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> None:
    version = _note(archive, member).get("version") if member is not None and member.name == HEADER else None
    if not isinstance(version, int):
        raise ArchiveError("this is no archive of blockkv: give what `blockkv dump` wrote")
    if version > VERSION:
        raise ArchiveError(f"the archive is of version {version}, and this blockkv reads up to {VERSION}")


def _note(archive: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, object]:
    content = archive.extractfile(member) if member.isreg() and member.size <= NOTE_LIMIT_BYTES else None
    try:
        note = json.loads(content.read()) if content is not None else None
    except (RecursionError, ValueError):
        note = None
    return note if isinstance(note, dict) else {}


def _described(member: tarfile.TarInfo) -> _Chunk | None:
    """A chunk by its header, without its payload; None where that is none."""
    fields = member.pax_headers
    try:
        key = bytes.fromhex(fields["BLOCKKV.key"])
        layout = Layout.decode(bytes.fromhex(fields["BLOCKKV.layout"]))
        is_text = fields["BLOCKKV.key_is_text"] == "1"
        chunk = _Chunk(key.decode() if is_text else key, layout, memoryview(b""))
        encode_key(chunk.key)
        fits = member.isreg() and member.size == layout.payload_bytes
    except (KeyError, ValueError):  # InvalidArgument is one
        return None
    return chunk if fits else None


def _is_filled(archive: tarfile.TarFile, member: tarfile.TarInfo, chunk: _Chunk, memory: memoryview) -> bool:
    """Read the payload; whether it is what was written."""
    content = archive.extractfile(member)
    assert content is not None
    if content.readinto(memory) != len(memory):  # type: ignore[attr-defined]  # it is a BufferedReader
        raise tarfile.ReadError("unexpected end of data")
    chunk.payload = memory
    return _checksum(chunk) == member.pax_headers.get("BLOCKKV.xxh3_128")
