"""Chunks that grow: what decoding does to the keys and values of every layer, step by step.

::

    reserve   one contiguous extent, room for the capacity and behind it two places for a tail
    append    -> staging; a full buffer is written where it belongs, and stays readable until it has landed
              durable: -> the tail to one of its two places -> completions (-> FLUSH, where a record of a
              shorter beginning is on media) -> record into the open group -> the group durable
    seal      -> the tail where it belongs -> completions (-> FLUSH, likewise) -> record of the chunk into the
              open group; what was not used comes back when that is durable

Invariants
  * no unit that a record names is written again before a record that does not name it is durable: the two
    places for a tail take turns, everything else is written once;
  * a record that takes the place of another one is logged when its payload is on media, so that recovery,
    which believes the newest record of a key or none, finds the payload of whichever it finds;
  * what is read is verified, against checksums in memory, or comes from staging;
  * a beginning that is in the index is pinned and replaced only while nobody reads it.

Not here: finding the extent (`contiguous`), leaves of a payload of unknown length (`leaves`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from blockkv.catalog.index import Entry
from blockkv.device.base import UNIT_BYTES, Batch, Direction, Priority, device_error
from blockkv.errors import (
    BlockKVError,
    DeviceError,
    DeviceLost,
    GrowthEnded,
    InvalidArgument,
    StoreClosed,
)
from blockkv.format.geometry import (
    LEAF_BYTES,
    MAX_EXTENT_UNITS,
    MAX_LEAVES,
    RUN_UNITS,
    unit_count,
)
from blockkv.format.record import encode_layout, encode_put, key_digest, put_bytes_at_most
from blockkv.memory import aligned_memory, unwritable
from blockkv.space.allocator import Extent
from blockkv.store.contiguous import reserve_extent
from blockkv.store.keys import Key, encode_key
from blockkv.store.leaves import GrowingLeaves
from blockkv.store.rows import Rows
from blockkv.store.staging import BUFFER_BYTES, Staging
from blockkv.store.state import GROWING, State
from blockkv.store.verify import is_damage, root_checksum
from blockkv.tensors import Segment, Tensors, allocate, describe, describe_output, read_only_error, scatter

if TYPE_CHECKING:
    import torch

__all__ = ["STORED_ALREADY", "GrowingChunk", "Guard", "reserve"]

BUFFER_UNITS = BUFFER_BYTES // UNIT_BYTES
DIRECT_BYTES = 2 * BUFFER_BYTES
"""An append that brings so much at once is written from the caller's memory, as far as it fills buffers."""
BUFFERS_IN_FLIGHT = 2
"""Buffers of one growing chunk that the device has at most; the next append waits for the oldest."""
STORED_ALREADY = "a chunk is stored under this key already; delete it, or use another key"

Guard = Callable[[bool], AbstractContextManager[None]]
"""What every method runs in: given whether it writes, holds `close` back, or raises why it must not run."""


@dataclass(slots=True)
class _Target:
    """Memory that rows are read into."""

    segments: list[Segment]
    keepalive: object
    scatter_back: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """(caller's tensor, our stand-in for it), where that is too finely strided."""


@dataclass(slots=True)
class _Read:
    """One range of rows on its way to a caller."""

    value: Any
    target: _Target
    batch: Batch
    pieces: list[tuple[int, int]]
    """Payload ranges of the transfers of the batch: whole leaves, or up to what has landed."""
    copies: list[tuple[int, list[Segment], int]]
    """(address in memory of ours, where it goes, number of the transfer it comes with)"""


class GrowingChunk:
    """A chunk that is appended to. Get one from `Store.reserve`; `seal`, or `abandon`, ends it.

    Its payload consists of rows: the first dimension of what is appended, tokens for keys and values. All
    tensors that are appended have one dtype, and one shape but for that; bytes-like objects are rows of one
    byte. Sealed, it is one tensor of all rows.

    Methods may be called from any thread. After the end they raise GrowthEnded, after `Store.close`
    StoreClosed. As a context manager it abandons at the end of the block what was not sealed.
    """

    def __init__(
        self,
        state: State,
        guard: Guard,
        staging: Staging,
        key: Key,
        capacity_bytes: int,
        ended: Callable[[GrowingChunk], None],
    ) -> None:
        """For `reserve`: the key is in `State.reserved` already. Raises StoreFull."""
        self.key = key
        self.capacity_bytes = capacity_bytes
        self._state = state
        self._guard = guard
        self._staging = staging
        self._tell_end = ended
        self._encoded_key = encode_key(key)
        self._digest = key_digest(self._encoded_key)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when a read is over."""
        self._record_bytes = _record_bytes_at_most(capacity_bytes, len(self._encoded_key))
        self._main_units = -(-unit_count(capacity_bytes) // RUN_UNITS) * RUN_UNITS
        self._tail_units = min(BUFFER_UNITS, self._main_units)
        self._start, self._units = reserve_extent(
            state, self._main_units + 2 * self._tail_units, self._record_bytes
        )
        with state.lock:
            state.reserved[self._digest] = ((self._start, self._units),)
        self._rows = Rows()
        self._landed_bytes = 0
        self._in_flight: deque[tuple[Batch, int]] = deque()
        """Writes of buffers, oldest first, and their buffers."""
        self._buffer = 0
        """The buffer of the tail; 0 while there is none."""
        self._tail_bytes = 0
        self._leaves = GrowingLeaves(capacity_bytes, BUFFER_BYTES)
        self._entry: Entry | None = None
        """The beginning that is durable, as it is in the index."""
        self._tail_turn = 0
        self._readers = 0
        self._pinned = False
        self._failure: DeviceError | None = None
        self._failed: set[Extent] = set()
        """Units that could not be written."""
        self._ended: type[BlockKVError] | None = None
        """What is raised since it is not growing any more, and with which words."""
        self._ended_how = ""

    # -- what it has -----------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Payload so far."""
        return self._landed_bytes + len(self._in_flight) * BUFFER_BYTES + self._tail_bytes

    @property
    def durable_bytes(self) -> int:
        """Of these, from the beginning on, what survives a crash."""
        return 0 if self._entry is None else self._entry.payload_bytes

    def __len__(self) -> int:
        """Rows so far."""
        return self.size_bytes // self._rows.row_bytes

    def __repr__(self) -> str:
        return f"<blockkv.GrowingChunk {self.size_bytes} of {self.capacity_bytes} bytes>"

    # -- writing ---------------------------------------------------------------------------------------

    def append(self, tensors: Tensors, durable: bool = False) -> int:
        """Append rows: those of one tensor, or of several, one after the other. Returns how many there are.

        They are copied, or written when this returns, and may change then. They can be read at once; on media
        they are when the chunk is sealed, or with `durable` when this returns, together with all before. That
        costs a flush, or two, and writes the tail of up to BUFFER_BYTES once more: for every few steps, not
        for every one. What is durable is found under the key by `Store.get`, also after a crash.

        Raises InvalidArgument (other rows than before), CapacityExceeded, DeviceError (from now on: it can
        only be read, and abandoned), StoreReadOnly, GrowthEnded, StoreClosed.
        """
        described = describe(tensors)
        with self._guard(True), self._lock:
            self._check()
            self._rows.accept(described, self.size_bytes, self.capacity_bytes)
            try:
                for address, size_bytes in described.segments:
                    self._take(address, size_bytes)
            except BaseException as error:
                self._failure = self._failure or DeviceError(
                    f"an append was cut short: {error!r}; abandon it"
                )
                raise
            with self._state.lock:
                self._state.counters["append_bytes"] += described.payload_bytes
            self._check()
            sequence = self._make_durable() if durable else 0
            rows = len(self)
        if sequence:
            self._state.log.commit(sequence)
        return rows

    def seal(self, durable: bool = False) -> None:
        """Make it an ordinary chunk, which never changes, and give back what was reserved and not used.

        As after a put it can be read at once and is durable within the commit interval, with `durable` when
        this returns. Waits for reads under way. Raises InvalidArgument where nothing was appended, and as
        `append`.
        """
        with self._guard(True):
            with self._lock:
                self._wait_for_readers()
                self._check()
                size_bytes = self.size_bytes
                if not size_bytes:
                    raise InvalidArgument("nothing was appended; there is nothing to seal")
                self._drain()
                if self._tail_bytes:
                    self._write_tail(self._start + self._landed_bytes // UNIT_BYTES)
                self._check()
                if self._entry is not None:
                    self._state.log.flush_payload()
                extent = self._start, unit_count(size_bytes)
                with self._state.changing:
                    entry = self._publish(size_bytes, (extent,))
                    unused = (self._start + extent[1], self._units - extent[1])
                    self._state.defer([unused], entry.log_sequence)
                    self._state.counters["put_chunks"] += 1
                    self._state.counters["put_bytes"] += size_bytes
                    self._end(GrowthEnded, "the growing chunk was sealed; get it from the store")
                    self._state.keep_quotas()
            if durable:
                self._state.log.commit(entry.log_sequence)

    def abandon(self) -> None:
        """Forget it, also what was durable of it, and give back its space. Nothing happens after the end.

        Waits for reads under way. Raises StoreReadOnly, StoreClosed.
        """
        with self._lock:
            if self._ended is not None:
                return
        with self._guard(True), self._lock:
            self._wait_for_readers()
            if self._ended is not None:
                return
            self._settle()
            state = self._state
            with state.changing:
                rest = state.reserved[self._digest]
                sequence = 0
                if self._entry is not None and state.index.holds(self._entry):
                    sequence = state.delete(self._entry)
                for extent in rest:
                    self._give_back(extent, sequence)
                self._end(GrowthEnded, "the growing chunk was abandoned")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.abandon()
        except BlockKVError:
            # What ended the block says more; and a store that is closed or read-only has let go of it.
            if error is None and self._ended is None:
                raise

    # -- reading ---------------------------------------------------------------------------------------

    def read(self, start: int = 0, stop: int | None = None, out: Any = None, *, preload: bool = False) -> Any:
        """Rows [start, stop), by default all there are, verified. What was written is read in one run.

        Without `out` a new tensor, or None where the device did not give the bytes that were appended. With
        `out`, a tensor of their dtype and shape or a writable bytes-like object of their size: True when it
        was filled, else False, and its content is unspecified.

        With `preload` it is served after reads without, and before writes. Raises InvalidArgument (no such
        rows, or `out` does not fit), DeviceLost, GrowthEnded, StoreClosed.
        """
        with self._guard(False):
            with self._lock:
                read = self._begin_read(start, stop, out, Priority.PRELOAD if preload else Priority.LOAD)
                self._readers += 1
            try:
                if len(read.batch):
                    self._state.device.submit(read.batch)
                    self._state.device.wait(read.batch)
                exact = self._finish_read(read)
            finally:
                with self._lock:
                    self._readers -= 1
                    self._changed.notify_all()
        if out is not None:
            return exact
        return read.value if exact else None

    def _begin_read(self, start: int, stop: int | None, out: Any, priority: Priority) -> _Read:
        """Copy what is in staging; make the batch that reads the rest."""
        self._check_growing()
        first, end = self._rows.range_of(start, stop, self.size_bytes)
        layout = self._rows.layout(end - first)
        if out is None:
            (value,), given = allocate([layout])
            target = _Target(given.segments_of(0), given.keepalive)
        else:
            value, described = True, describe_output(out, layout)
            target = _Target(described.segments, described.keepalive, described.scatter_back or ())
            copied_to = [tensor.data_ptr() for tensor, _ in target.scatter_back]
            if unwritable([*(address for address, _ in target.segments), *copied_to]):
                raise read_only_error()
        batch = Batch(Direction.READ, priority)
        batch.keepalive.append(target.keepalive)
        read = _Read(value, target, batch, [], [])
        written_end = min(end, self._landed_bytes)
        if first < written_end:
            self._add_transfers(read, first, written_end)
        for offset, address, size_bytes in self._staged():
            low, high = max(first, offset), min(end, offset + size_bytes)
            if low < high:
                _copy(address + low - offset, _cut(target.segments, low - first, high - low))
        return read

    def _add_transfers(self, read: _Read, first: int, end: int) -> None:
        """Transfers for payload [first, end), which has landed. Leaves wanted in part are bounced."""
        middle = -(-first // LEAF_BYTES) * LEAF_BYTES, end // LEAF_BYTES * LEAF_BYTES
        bounce = memoryview(b"")
        if middle[0] > first or middle[1] < end:
            bounce = aligned_memory(2 * LEAF_BYTES)
            read.batch.keepalive.append(bounce)
        used = 0
        for low, high in ((first, min(middle[0], end)), middle, (max(middle[1], middle[0]), end)):
            if low >= high:
                continue
            leaf_low = low // LEAF_BYTES * LEAF_BYTES
            leaf_high = min(-(-high // LEAF_BYTES) * LEAF_BYTES, self._landed_bytes)
            target = list(_cut(read.target.segments, low - first, high - low))
            if (low, high) != (leaf_low, leaf_high):
                address = ctypes.addressof(ctypes.c_char.from_buffer(bounce, used))
                used += LEAF_BYTES
                read.copies.append((address + low - leaf_low, target, len(read.pieces)))
                target = [(address, leaf_high - leaf_low)]
            read.pieces.append((leaf_low, leaf_high))
            read.batch.add(
                leaf_high - leaf_low, [(self._offset(leaf_low), leaf_high - leaf_low)], target, LEAF_BYTES
            )

    def _staged(self) -> Iterator[tuple[int, int, int]]:
        """(offset in the payload, address, bytes) of what is in memory."""
        offset = self._landed_bytes
        for _, buffer in self._in_flight:
            yield offset, buffer, BUFFER_BYTES
            offset += BUFFER_BYTES
        if self._tail_bytes:
            yield offset, self._buffer, self._tail_bytes

    def _finish_read(self, read: _Read) -> bool:
        state = self._state
        failed = dict(read.batch.failed())
        failure = ""
        for number, (start, stop) in enumerate(read.pieces):
            code = failed.get(number, 0)
            if code:
                error = device_error(
                    state.device.path, f"reading {stop - start} bytes of a growing chunk", code
                )
                if isinstance(error, DeviceLost):
                    raise error
                failure = "get_device_error" if is_damage(code) else "get_transient_error"
            elif state.options.verify and read.batch.leaves(number) != self._leaves.fine(start, stop):
                failure = "get_checksum_mismatch"
            if failure:
                break
        if not failure:
            for address, target, _ in read.copies:
                _copy(address, target)
            scatter(read.target.scatter_back)
        else:
            for address, size_bytes in read.target.segments:
                ctypes.memset(address, 0, size_bytes)
        with state.lock:
            if failure:
                state.counters[failure] += 1
                state.counters["get_misses"] += 1
            else:
                state.counters["append_read_bytes"] += sum(
                    size_bytes for _, size_bytes in read.target.segments
                )
        return not failure

    # -- inside, under the lock ------------------------------------------------------------------------

    def _check_growing(self) -> None:
        if self._ended is not None:
            raise self._ended(self._ended_how)

    def _check(self) -> None:
        self._check_growing()
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _take(self, address: int, size_bytes: int) -> None:
        """Take over a piece of payload; write what fills a buffer."""
        while size_bytes:
            if not self._tail_bytes and size_bytes >= DIRECT_BYTES:
                done = size_bytes // BUFFER_BYTES * BUFFER_BYTES
                self._write_direct(address, done)
            else:
                done = min(size_bytes, BUFFER_BYTES - self._tail_bytes)
                self._buffer = self._buffer or self._staging.take()
                ctypes.memmove(self._buffer + self._tail_bytes, address, done)
                self._tail_bytes += done
                if self._tail_bytes == BUFFER_BYTES:
                    self._write_buffer()
            address += done
            size_bytes -= done

    def _write_buffer(self) -> None:
        """Start to write the buffer that is full."""
        while len(self._in_flight) >= BUFFERS_IN_FLIGHT:
            self._land()
        self._leaves.add(_view(self._buffer, BUFFER_BYTES))
        end = self._landed_bytes + len(self._in_flight) * BUFFER_BYTES
        batch = self._submit(self._buffer, BUFFER_BYTES, self._offset(end), LEAF_BYTES)
        self._in_flight.append((batch, self._buffer))
        self._buffer = self._tail_bytes = 0

    def _write_direct(self, address: int, size_bytes: int) -> None:
        """Write whole buffers from the caller's memory."""
        self._drain()
        self._leaves.add(_view(address, size_bytes))
        batch = self._submit(address, size_bytes, self._offset(self._landed_bytes), LEAF_BYTES)
        self._finish_write(batch, (self._unit(self._landed_bytes), size_bytes // UNIT_BYTES))
        self._leaves.add_fine(batch.leaves(0))
        self._landed_bytes += size_bytes

    def _write_tail(self, unit: int) -> None:
        """Write the tail, padded, to units from `unit` on."""
        batch = self._submit(self._buffer, self._tail_bytes, self._state.geometry.unit_offset(unit), 0)
        self._finish_write(batch, (unit, unit_count(self._tail_bytes)))

    def _submit(self, address: int, size_bytes: int, offset_bytes: int, leaf_bytes: int) -> Batch:
        batch = Batch(Direction.WRITE, Priority.STORE)
        batch.keepalive.append(self._staging)
        extent = offset_bytes, unit_count(size_bytes) * UNIT_BYTES
        batch.add(size_bytes, [extent], [(address, size_bytes)], leaf_bytes)
        try:
            self._state.device.submit(batch)
        except DeviceError as error:
            self._failure = error
            raise
        self._state.wear(extent[1])
        return batch

    def _drain(self) -> None:
        """Return when all writes have landed. Raises DeviceError."""
        while self._in_flight:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest write; what could not be written stays in memory."""
        batch, buffer = self._in_flight[0]
        self._finish_write(batch, (self._unit(self._landed_bytes), BUFFER_UNITS))
        self._in_flight.popleft()
        self._staging.give(buffer)
        self._leaves.add_fine(batch.leaves(0))
        self._landed_bytes += BUFFER_BYTES

    def _finish_write(self, batch: Batch, extent: Extent) -> None:
        self._state.device.wait(batch)
        code = batch.result(0)
        if code:
            with self._state.lock:
                self._state.counters["put_device_error"] += extent not in self._failed
            self._failed.add(extent)
            self._failure = device_error(
                self._state.device.path, f"writing {extent[1] * UNIT_BYTES} bytes of a growing chunk", code
            )
            raise self._failure

    def _settle(self) -> None:
        """Return when no write is under way any more, whatever became of it."""
        unit = self._unit(self._landed_bytes)
        for batch, _ in self._in_flight:
            with contextlib.suppress(DeviceError):
                self._finish_write(batch, (unit, BUFFER_UNITS))
            unit += BUFFER_UNITS

    def _make_durable(self) -> int:
        """Bring everything to media but the record, and log that. Returns its log sequence."""
        self._drain()
        if self._entry is not None and self._entry.payload_bytes == self.size_bytes:
            return self._entry.log_sequence
        extents = [(self._start, self._landed_bytes // UNIT_BYTES)] if self._landed_bytes else []
        if self._tail_bytes:
            unit = self._start + self._main_units + self._tail_turn * self._tail_units
            self._write_tail(unit)
            extents.append((unit, unit_count(self._tail_bytes)))
        self._check()
        if self._entry is not None:
            self._state.log.flush_payload()
        with self._state.changing:
            old = self._entry
            entry = self._publish(self.size_bytes, extents)
            if old is None:
                self._pinned = self._state.index.pin(self._digest, 1)
            self._state.reserved[self._digest] = tuple(self._beside(extents))
        self._tail_turn = self._other_place()
        return entry.log_sequence

    def _other_place(self) -> int:
        """Where the next tail goes that is made durable: not over the last one."""
        return 1 - self._tail_turn

    def _publish(self, size_bytes: int, extents: Sequence[Extent]) -> Entry:
        """Log a record of the first `size_bytes` and put it into the index. The state is being changed."""
        state, old = self._state, self._entry
        while old is not None and state.index.holds(old) and state.index.leases(old):
            state.changed.wait()
        if old is not None and not state.index.holds(old):
            self._failure = DeviceError(
                f"{state.device.path}: what was durable of a growing chunk did not verify and was dropped; "
                "abandon it"
            )
            raise self._failure
        layout = self._rows.layout(size_bytes)
        leaves = self._leaves.of_all(_view(self._buffer, self._tail_bytes))
        layout_id, is_new = state.layouts.acquire(layout)
        if is_new:
            state.log.append([encode_layout(state.log.next_log_sequences(), layout_id, layout.body)])
        records = encode_put(
            state.log.next_log_sequences(),
            self._digest,
            size_bytes,
            layout_id,
            root_checksum(self._digest, size_bytes, layout, leaves),
            extents,
            leaves,
            self._encoded_key,
            isinstance(self.key, str),
        )
        self._entry = state.replace(old, records)
        return self._entry

    def _wait_for_readers(self) -> None:
        """Return when no read is under way, and none can begin before the lock is let go.

        Meanwhile others append, or end it: nothing that was found out before holds any more.
        """
        self._changed.wait_for(lambda: not self._readers)

    def _give_back(self, extent: Extent, log_sequence: int) -> None:
        """Let an extent go, once `log_sequence` is durable; what of it could not be written is set aside."""
        start, end = extent[0], sum(extent)
        for bad, count in sorted(self._failed):
            low, high = max(start, bad), min(end, bad + count)
            if low < high:
                self._let_go(start, low, log_sequence)
                self._state.allocator.quarantine([(low, high - low)])
                start = high
        self._let_go(start, end, log_sequence)

    def _let_go(self, start: int, end: int, log_sequence: int) -> None:
        if start < end and log_sequence:
            self._state.defer([(start, end - start)], log_sequence)
        elif start < end:
            self._state.allocator.release([(start, end - start)])

    def _end(self, kind: type[BlockKVError], how: str) -> None:
        """Nothing is under way; give back what is not the state's."""
        self._ended, self._ended_how = kind, how
        while self._in_flight:
            self._staging.give(self._in_flight.pop()[1])
        if self._buffer:
            self._staging.give(self._buffer)
            self._buffer = self._tail_bytes = 0
        with self._state.lock:
            del self._state.reserved[self._digest]
            self._state.reserved_record_bytes -= self._record_bytes
            if self._pinned and self._entry is not None and self._state.index.holds(self._entry):
                self._state.index.pin(self._digest, -1)
            self._state.changed.notify_all()
        self._tell_end(self)

    def close(self) -> None:
        """For the store, when it is closed: what was durable stays, the rest is gone, as after a crash."""
        with self._lock:
            if self._ended is None:
                self._settle()
                self._end(StoreClosed, f"{self._state.device.path}: the store was closed")

    def _offset(self, payload_offset: int) -> int:
        return self._state.geometry.unit_offset(self._unit(payload_offset))

    def _unit(self, payload_offset: int) -> int:
        return self._start + payload_offset // UNIT_BYTES

    def _beside(self, extents: Sequence[Extent]) -> Iterator[Extent]:
        """What was reserved less these, which are in order."""
        start = self._start
        for first, count in extents:
            if start < first:
                yield start, first - start
            start = first + count
        if start < self._start + self._units:
            yield start, self._start + self._units - start


def check_capacity(capacity_bytes: object) -> None:
    """Raise InvalidArgument for what no growing chunk can have as its capacity."""
    limit_bytes = (MAX_EXTENT_UNITS - 3 * BUFFER_UNITS) * UNIT_BYTES
    if not (isinstance(capacity_bytes, int) and 0 < capacity_bytes <= limit_bytes):
        raise InvalidArgument(f"capacity_bytes is {capacity_bytes!r}; use 1 to {limit_bytes}")


def reserve(
    state: State,
    guard: Guard,
    staging: Staging,
    key: Key,
    capacity_bytes: int,
    ended: Callable[[GrowingChunk], None],
) -> GrowingChunk:
    """Carry out `Store.reserve`; `ended` is called when the chunk is not growing any more."""
    check_capacity(capacity_bytes)
    digest = key_digest(encode_key(key))
    with state.lock:
        while digest in state.claims:
            state.changed.wait()
        if digest in state.reserved:
            raise InvalidArgument(GROWING)
        if digest in state.index:
            raise InvalidArgument(STORED_ALREADY)
        state.reserved[digest] = ()
    try:
        return GrowingChunk(state, guard, staging, key, capacity_bytes, ended)
    except BaseException:
        with state.lock:
            del state.reserved[digest]
            state.changed.notify_all()
        raise


def _record_bytes_at_most(capacity_bytes: int, key_bytes: int) -> int:
    """What the records of a chunk of any length up to that can take; the longest has not the most leaves."""
    return max(
        put_bytes_at_most(size_bytes, key_bytes)
        for size_bytes in (capacity_bytes, min(capacity_bytes, LEAF_BYTES * MAX_LEAVES))
    )


def _view(address: int, size_bytes: int) -> memoryview:
    """Memory at an address, as bytes."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _cut(segments: Sequence[Segment], offset_bytes: int, size_bytes: int) -> Iterator[Segment]:
    """The part of a list of segments from an offset in its content on."""
    for address, length in segments:
        if offset_bytes >= length:
            offset_bytes -= length
            continue
        taken = min(length - offset_bytes, size_bytes)
        if taken:
            yield address + offset_bytes, taken
        size_bytes -= taken
        offset_bytes = 0
        if not size_bytes:
            return


def _copy(address: int, target: Sequence[Segment] | Iterator[Segment]) -> None:
    """Copy what is at an address into segments, one after the other."""
    for place, size_bytes in target:
        ctypes.memmove(place, address, size_bytes)
        address += size_bytes
