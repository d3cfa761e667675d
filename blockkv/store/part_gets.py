"""Reading parts of chunks: only the leaves that hold them, verified, into the caller's memory.

A chunk that is `Leased` can be read part by part until it is released; whoever holds it decides for how long.
The reads of one call, of any chunks and any parts, go to each device in one submission, wave by wave.

A leaf that does not match the record makes that part a miss, and its memory is zeroed. What the chunk is
worth is found out as for a whole get: all of it is read again into memory of ours, and only when that does
not verify the record is dropped and its extents are set aside.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from blockkv.catalog.index import Entry
from blockkv.catalog.layouts import Layout
from blockkv.device.base import UNIT_BYTES, Batch, Direction, Priority, device_error
from blockkv.errors import BlockKVError, DeviceLost
from blockkv.format.geometry import leaf_bytes_for
from blockkv.format.record import key_digest
from blockkv.kv_layout import KVLayout, Part
from blockkv.memory import aligned_memory, unwritable
from blockkv.space.allocator import Extent
from blockkv.store.data_path import DataPath
from blockkv.store.keys import Key, encode_key
from blockkv.store.part_plan import Copy, LeafSpan, PartPlan, check_stored, plan_part
from blockkv.store.verify import is_damage
from blockkv.tensors import (
    Described,
    Occupied,
    Pieces,
    Segment,
    allocate,
    describe_outputs,
    read_only_error,
    scatter,
)

__all__ = [
    "COUNTERS",
    "ChunkSource",
    "Leased",
    "PartBatch",
    "PartCall",
    "PartRead",
    "by_device",
    "carry_out",
    "lease",
    "release",
    "targets",
]


WAVE_BYTES = 32 << 20
"""Read in one batch, as for whole gets; a longer part is alone."""
WAVES_IN_FLIGHT = 4

COUNTERS = ("get_parts", "get_part_bytes", "part_read_bytes", "part_copied_bytes", "get_leaf_mismatch")
"""Counters of `Store.stats` for parts."""


@dataclass(frozen=True, slots=True)
class Leased:
    """A chunk whose extents stay what they are until `release`."""

    state: DataPath
    entry: Entry
    layout: Layout
    leaves: bytes

    def plan(self, kv_layout: KVLayout, part: Part) -> PartPlan:
        """How to read a part of it. Raises LayoutMismatch where it is no chunk of that layout."""
        check_stored(kv_layout, self.layout)
        verified = self.state.options.verify
        return plan_part(
            kv_layout, part, leaf_bytes_for(self.entry.payload_bytes) if verified else UNIT_BYTES
        )


def lease(state: DataPath, digests: Sequence[bytes]) -> list[Leased | None]:
    """Lease the chunks with these digests; None, and counted, for each that is not there. Counts as a use."""
    chunks: list[Leased | None] = [None] * len(digests)
    found, layouts = state.acquire(digests)
    with state.lock:
        for position, place, layout in zip(found.positions, found.places, layouts, strict=True):
            entry = state.index.at(place)
            chunks[position] = Leased(state, entry, layout, entry.leaves)
    return chunks


def release(chunks: Sequence[Leased | None]) -> None:
    """Give leases back; None among them is passed over."""
    held: dict[int, tuple[DataPath, array[int]]] = {}
    for chunk in chunks:
        if chunk is not None:
            held.setdefault(id(chunk.state), (chunk.state, array("I")))[1].append(chunk.entry.place)
    for state, places in held.values():
        with state.lock:
            state.release(places)


class ChunkSource(Protocol):
    """Where chunks come from: a store, or an array of them."""

    def _lease_chunks(self, digests: Sequence[bytes]) -> list[Leased | None]:
        """Lease the chunks with these digests; None, and counted, for each that is not there."""

    def _outlives(self, state: DataPath, error: BlockKVError) -> bool:
        """Whether a read that ended with `error` is only a miss, because others than `state` go on."""


@dataclass(slots=True)
class PartRead:
    """One part of one chunk on its way into memory."""

    position: int
    """For whoever asked."""
    chunk: Leased
    plan: PartPlan
    target: Described
    value: Any
    """What the asker gets."""
    failure: str = ""
    """The counter of what went wrong; "" for a hit, once it was carried out."""
    error: BlockKVError | None = None
    first_transfer: int = 0
    scratch_offset_bytes: int = 0
    scatter: list[int] = field(default_factory=list)
    """Where in the part each segment of the target begins."""


def targets(
    positions: Sequence[int], layouts: Sequence[Layout], outputs: Sequence[Any] | None
) -> tuple[Sequence[tuple[Any, Described] | None], dict[int, BlockKVError]]:
    """What is returned of each and where it is read to, and errors by position."""
    if outputs is None:
        values, pieces = allocate(layouts)
        return list(zip(values, _described(pieces), strict=True)), {}
    pieces, unfit = describe_outputs(outputs, layouts, Occupied())
    fit = iter(_described(pieces))
    found: list[tuple[Any, Described] | None] = [
        None if number in unfit else (True, next(fit)) for number in range(len(outputs))
    ]
    for number, target in enumerate(found):
        # Wherever it is aligned: the ends of a part are copied to where they do not end a sector.
        if target is not None and unwritable([address for address, _ in target[1].segments]):
            unfit[number] = read_only_error()
            found[number] = None
    return found, {positions[number]: error for number, error in unfit.items()}


def _described(pieces: Pieces) -> Sequence[Described]:
    """Each of them by itself."""
    if pieces.described:
        return pieces.described
    addresses, sizes = pieces.segments[::2], pieces.segments[1::2]
    ends = itertools.accumulate(pieces.segment_counts, initial=0)
    return [
        Described(layout, list(zip(addresses[first:end], sizes[first:end], strict=True)), size_bytes, [kept])
        for (first, end), layout, size_bytes, kept in zip(
            itertools.pairwise(ends), pieces.layouts, pieces.sizes_bytes, pieces.keepalive, strict=True
        )
    ]


class PartCall:
    """One call for parts of chunks: leases them, says what to read, and afterwards what came of it.

    `settle` must be called, once, when the reads are over. `results` and `errors` are by position then: the
    tensors (None for a miss) where no output was given, else whether it was filled.
    """

    def __init__(
        self,
        source: ChunkSource,
        keys: Sequence[Key],
        parts: Sequence[Part],
        kv_layout: KVLayout,
        outputs: Sequence[Any] | None,
    ) -> None:
        self._source = source
        self.results: list[Any] = [None if outputs is None else False] * len(keys)
        self.errors: dict[int, BlockKVError] = {}
        self.reads: list[PartRead] = []
        positions, digests = [], []
        for position, key in enumerate(keys):
            try:
                digests.append(key_digest(encode_key(key)))
            except BlockKVError as error:
                self.errors[position] = error
            else:
                positions.append(position)
        self._chunks = source._lease_chunks(digests)
        try:
            self._prepare(positions, parts, kv_layout, outputs)
        except BaseException:
            release(self._chunks)
            raise

    def _prepare(
        self,
        positions: Sequence[int],
        parts: Sequence[Part],
        kv_layout: KVLayout,
        outputs: Sequence[Any] | None,
    ) -> None:
        found: list[tuple[int, Leased, PartPlan]] = []
        for position, chunk in zip(positions, self._chunks, strict=True):
            try:
                if chunk is not None:
                    found.append((position, chunk, chunk.plan(kv_layout, parts[position])))
            except BlockKVError as error:
                self.errors[position] = error
        into, errors = targets(
            [position for position, _, _ in found],
            [plan.layout for _, _, plan in found],
            None if outputs is None else [outputs[position] for position, _, _ in found],
        )
        self.errors |= errors
        self.reads = [
            PartRead(position, chunk, plan, target[1], target[0])
            for (position, chunk, plan), target in zip(found, into, strict=True)
            if target is not None
        ]

    def settle(self) -> None:
        """Enter results and errors, and give the leases back."""
        release(self._chunks)
        for read in self.reads:
            if read.error is not None:
                if not self._source._outlives(read.chunk.state, read.error):
                    self.errors[read.position] = read.error
            elif not read.failure:
                self.results[read.position] = read.value


class PartBatch:
    """Reads of one device, in one submission. Call `submit`, and without `then` also `wait`, once each.

    Afterwards `failure` and `error` of each read say how it went. Leases are not touched.
    """

    def __init__(self, reads: Sequence[PartRead], priority: Priority, deadline_ns: int = 0) -> None:
        """`reads` are all of one state."""
        self.reads = reads
        self._state = reads[0].chunk.state
        self._priority = priority
        self._batch = Batch(Direction.READ, priority)
        self._batch.deadline_ns = deadline_ns
        self._refusal: BlockKVError | None = None
        self._scratch = memoryview(b"")
        self._hashed = self._state.options.verify

    def submit(self, then: Callable[[], None] | None = None) -> None:
        """Start; with `then` it is called when all is over, on a thread of the device that must not block."""
        batch, base_bytes = self._batch, self._state.geometry.data.offset_bytes
        scratch_bytes = sum(read.plan.scratch_bytes for read in self.reads)
        if scratch_bytes:
            self._scratch = aligned_memory(scratch_bytes)
            batch.keepalive.append(self._scratch)
        scratch_at = _address(self._scratch)
        offset = 0
        for read in self.reads:
            read.scratch_offset_bytes = offset
            offset += read.plan.scratch_bytes
            sizes = [size for _, size in read.target.segments]
            read.scatter = list(itertools.accumulate(sizes[:-1], initial=0))
            read.first_transfer = len(batch)
            entry = read.chunk.entry
            leaf_bytes = leaf_bytes_for(entry.payload_bytes) if self._hashed else 0
            for span in read.plan.leaf_spans:
                batch.add(
                    span.size_bytes,
                    _extents(entry.extents, base_bytes, span),
                    _segments(read, span, scratch_at),
                    leaf_bytes,
                )
            batch.keepalive.append(read.target.keepalive)
        if then is not None:
            batch.on_done = lambda _: self._ended(then)
        try:
            self._state.device.submit(batch)
        except BlockKVError as error:
            self._refusal = error
            if then is not None:
                self._ended(then)

    def wait(self) -> None:
        """Return when all is over."""
        if self._refusal is None:
            self._state.device.wait(self._batch)
        self._judge()
        self._complete()

    def _ended(self, then: Callable[[], None]) -> None:
        self._batch.on_done = None  # or they would hold each other, and whoever waits
        self._judge()

        def tell() -> None:
            try:
                self._complete()
            except Exception as error:
                for read in self.reads:
                    read.failure = read.failure or "get_refused"
                    read.error = read.error or BlockKVError(f"a part could not be handed over: {error!r}")
            then()

        if any(read.failure == "get_leaf_mismatch" for read in self.reads):
            # The chunk is read again, which the device's completion thread must not wait for.
            threading.Thread(target=tell, name="blockkv-verify", daemon=True).start()
        else:
            tell()

    def _judge(self) -> None:
        """Say of each read how it went, as far as the device and the leaves tell."""
        for read in self.reads:
            if self._refusal is not None:
                read.failure, read.error = "get_refused", self._refusal
                continue
            for number, span in enumerate(read.plan.leaf_spans, read.first_transfer):
                code = self._batch.result(number)
                if code:
                    self._blame(read, code)
                    break
                first, leaves = 8 * span.first_leaf, self._batch.leaves(number)
                if self._hashed and leaves != read.chunk.leaves[first : first + len(leaves)]:
                    read.failure = "get_leaf_mismatch"

    def _blame(self, read: PartRead, code: int) -> None:
        what = f"reading {read.plan.read_bytes} bytes of a chunk"
        error = device_error(self._state.device.path, what, code)
        if isinstance(error, DeviceLost):
            read.failure, read.error = "get_device_lost", error
        elif code == -errno.ETIME:
            read.failure = "get_deadline"
        else:
            read.failure = "get_device_error" if is_damage(code) else "get_transient_error"

    def _complete(self) -> None:
        hits = [read for read in self.reads if not read.failure]
        for read in self.reads:
            if read.failure:
                for address, size_bytes in read.target.segments:
                    ctypes.memset(address, 0, size_bytes)
                continue
            for copy in read.plan.copies:
                _copy(read, copy, self._scratch)
            scatter(read.target.scatter_back)
        self._scratch = memoryview(b"")
        damaged = self._damaged()
        state, counters = self._state, self._state.counters
        with state.changing:
            for entry in damaged:
                state.drop_damaged(entry)
            for read in self.reads:
                if read.failure:
                    counters[read.failure] += 1
                    counters["get_misses"] += 1
                counters["part_read_bytes"] += read.plan.read_bytes
            for read in hits:
                counters["get_parts"] += 1
                counters["get_part_bytes"] += read.plan.part_bytes
                counters["part_copied_bytes"] += read.plan.copied_bytes + read.target.copied_bytes

    def _damaged(self) -> list[Entry]:
        """The chunks that are none any more. What did not verify is read again for that."""
        state = self._state
        damaged = {read.chunk.entry for read in self.reads if read.failure == "get_device_error"}
        doubtful = {
            read.chunk.entry: read.chunk.layout
            for read in self.reads
            if read.failure == "get_leaf_mismatch" and read.chunk.entry not in damaged
        }
        again = state.confirm_damage(self._priority, list(doubtful.items()))
        return list(damaged.union(itertools.compress(doubtful, again)))


def carry_out(reads: Sequence[PartRead], priority: Priority, deadline_ns: int = 0) -> None:
    """Carry out reads of any devices; each then has its `failure` and `error`. Leases are not touched.

    Whatever is raised meanwhile, what the device has got is waited for.
    """
    in_flight: deque[PartBatch] = deque()
    try:
        for wave in in_waves(reads):
            batch = PartBatch(wave, priority, deadline_ns)
            batch.submit()
            in_flight.append(batch)
            if len(in_flight) >= WAVES_IN_FLIGHT:
                in_flight.popleft().wait()
    finally:
        while in_flight:
            in_flight.popleft().wait()


def in_waves(reads: Sequence[PartRead]) -> Iterator[list[PartRead]]:
    """`reads` in lists of one device and at most WAVE_BYTES each; a longer one is alone.

    Lists of different devices take turns.
    """
    turns = []
    for of_device in by_device(reads):
        waves: list[list[PartRead]] = []
        left = 0
        for read in of_device:
            if not waves or read.plan.read_bytes > left:
                waves.append([])
                left = WAVE_BYTES
            waves[-1].append(read)
            left -= read.plan.read_bytes
        turns.append(waves)
    for turn in itertools.zip_longest(*turns):
        yield from (wave for wave in turn if wave)


def by_device(reads: Sequence[PartRead]) -> list[list[PartRead]]:
    """`reads` in one list for each device."""
    found: dict[int, list[PartRead]] = {}
    for read in reads:
        found.setdefault(id(read.chunk.state), []).append(read)
    return list(found.values())


def _extents(extents: Sequence[Extent], base_bytes: int, span: LeafSpan) -> Iterator[tuple[int, int]]:
    """Where on the device a leaf span lies: (offset, bytes), in whole units."""
    skip, left = span.offset_bytes, -(-span.size_bytes // UNIT_BYTES) * UNIT_BYTES
    for start, count in extents:
        length = count * UNIT_BYTES
        if skip < length and left:
            taken = min(length - skip, left)
            yield base_bytes + start * UNIT_BYTES + skip, taken
            left -= taken
        skip -= min(skip, length)
    assert not left, "the extents of a chunk hold its payload"


def _segments(read: PartRead, span: LeafSpan, scratch_at: int) -> Iterator[Segment]:
    for piece in span.pieces:
        if piece.wanted:
            yield from _within(read, piece.offset_bytes, piece.size_bytes)
        else:
            yield scratch_at + read.scratch_offset_bytes + piece.offset_bytes, piece.size_bytes


def _within(read: PartRead, offset_bytes: int, size_bytes: int) -> Iterator[Segment]:
    """The memory of so many bytes of the part."""
    number = bisect_right(read.scatter, offset_bytes) - 1
    while size_bytes:
        address, length = read.target.segments[number]
        skip = offset_bytes - read.scatter[number]
        taken = min(length - skip, size_bytes)
        yield address + skip, taken
        offset_bytes += taken
        size_bytes -= taken
        number += 1


def _copy(read: PartRead, copy: Copy, scratch: memoryview) -> None:
    """Copy rows of the part out of scratch."""
    kind = f"u{copy.item_bytes}" if copy.item_bytes in (1, 2, 4, 8) else f"V{copy.item_bytes}"
    offset_bytes = read.scratch_offset_bytes + copy.scratch_offset_bytes
    rows: NDArray[Any] = np.ndarray(copy.shape, kind, scratch, offset_bytes, copy.strides_bytes)
    segments = list(_within(read, copy.part_offset_bytes, copy.size_bytes))
    if len(segments) == 1:
        np.copyto(_bytes_at(*segments[0]).view(kind).reshape(copy.shape), rows)
        return
    packed = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    start = 0
    for address, size_bytes in segments:
        _bytes_at(address, size_bytes)[:] = packed[start : start + size_bytes]
        start += size_bytes


def _bytes_at(address: int, size_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * size_bytes).from_address(address)), np.uint8)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0
