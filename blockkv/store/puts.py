"""Carrying out puts: claim keys, find space, write, make visible what was written."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from blockkv.device.base import UNIT_BYTES, Batch, Direction, Priority, device_error
from blockkv.errors import BlockKVError, StoreFull
from blockkv.format.geometry import leaf_bytes_for
from blockkv.format.record import key_digest, put_bytes_at_most
from blockkv.space.allocator import Extent
from blockkv.store.interrupts import interrupts
from blockkv.store.keys import Key, encode_key
from blockkv.store.state import State
from blockkv.store.verify import device_extents, root_checksum
from blockkv.store.waves import Wave, WaveRun
from blockkv.tensors import Described, Tensors, describe

SPACE_WAIT_S = 5.0
"""How long a put waits for readers and other writers to give back the only space that is left."""


@dataclass(slots=True)
class _Put:
    """One chunk on its way to the device."""

    position: int
    key: bytes
    key_is_text: bool
    digest: bytes
    described: Described
    record_bytes: int
    extents: tuple[Extent, ...]


class PutRun(WaveRun[_Put]):
    """One put or put_many call. `results` and `errors` are by position once `run` returned."""

    direction = Direction.WRITE
    priority = Priority.STORE

    def __init__(self, state: State, count: int) -> None:
        super().__init__(state)
        self.results = [False] * count
        self.errors: dict[int, BlockKVError] = {}
        self.last_sequence = 0
        """The newest log sequence of any of the keys, written or found: all are durable when it is."""
        self._own: set[bytes] = set()
        self._postponed: list[tuple[bytes, int, Key, Tensors]] = []

    def run(self, items: Iterable[tuple[Key, Tensors]]) -> None:
        """Carry out all items. Only what is no single key's fault is raised (StoreReadOnly)."""
        try:
            for position, (key, value) in enumerate(items):
                interrupts.deliver()
                self._add(position, key, value)
        finally:
            self._drain()
        while self._postponed:
            # Another thread was writing these keys. We hold nothing ourselves now, so waiting is safe.
            digest, position, key, value = self._postponed.pop()
            with self._state.lock:
                while digest in self._state.claims:
                    self._state.changed.wait()
            try:
                self._add(position, key, value)
            finally:
                self._drain()

    def _add(self, position: int, key: Key, value: Tensors) -> None:
        state = self._state
        try:
            encoded = encode_key(key)
        except BlockKVError as error:
            self.errors[position] = error
            return
        digest = key_digest(encoded)
        with state.lock:
            entry = state.index.get(digest)
            if entry is not None:
                state.counters["put_existing"] += 1
                state.index.touch(digest)
                self.last_sequence = max(self.last_sequence, entry.log_sequence)
                return
            if digest in state.claims:
                if digest not in self._own:
                    self._postponed.append((digest, position, key, value))
                return
            state.claims.add(digest)
        self._own.add(digest)
        try:
            described = describe(value)
            record_bytes = put_bytes_at_most(described.payload_bytes, len(encoded))
            extents = self._allocate(described.payload_bytes, record_bytes)
        except BaseException as error:
            self._own.discard(digest)
            with state.lock:
                state.claims.remove(digest)
                state.changed.notify_all()
            if not isinstance(error, BlockKVError):
                raise
            self.errors[position] = error
            return
        put = _Put(position, encoded, isinstance(key, str), digest, described, record_bytes, extents)
        self._enqueue(put, described.payload_bytes)

    def _fill(self, batch: Batch, items: list[_Put]) -> None:
        for put in items:
            described = put.described
            batch.keepalive.append(described.keepalive)
            batch.add(
                described.payload_bytes,
                device_extents(self._state.geometry, put.extents),
                described.segments,
                leaf_bytes_for(described.payload_bytes),
            )

    def _allocate(self, payload_bytes: int, record_bytes: int) -> tuple[Extent, ...]:
        """Extents for a chunk, evicting as needed; reserves `record_bytes` of the next checkpoint."""
        state = self._state
        units = -(-payload_bytes // UNIT_BYTES)
        if units > state.geometry.data_units:
            raise StoreFull(
                f"a chunk of {payload_bytes} bytes can never fit: the data zone of {state.device.path} has "
                f"{state.geometry.data.size_bytes} bytes"
            )
        if state.layouts.exhausted:
            raise StoreFull(f"{state.device.path} has no numbers left for layouts; format it anew")
        deadline = time.monotonic() + SPACE_WAIT_S
        while True:
            with state.changing:
                extents = state.allocator.allocate(units) if state.record_room(record_bytes) else None
                if extents is not None:
                    state.reserved_record_bytes += record_bytes
                    return extents
                coming = state.evict(units) if state.options.evict else 0
                coming += state.allocator.pending_units
            if coming:
                state.log.commit()
                continue
            if self._busy:
                # Our own chunks can be evicted once they are written.
                self._drain()
                continue
            with state.lock:
                patience_s = deadline - time.monotonic()
                others_write = len(state.claims) > len(self._own)
                if patience_s <= 0 or not (others_write or state.any_leased()):
                    raise self._full(units, record_bytes)
                state.changed.wait(min(patience_s, 0.1))

    def _full(self, units: int, record_bytes: int) -> StoreFull:
        state = self._state
        if not state.record_room(record_bytes):
            return StoreFull(
                f"{state.device.path} holds {len(state.index)} chunks and its checkpoint area has no room "
                "for another record; delete chunks, allow eviction, or format with a smaller --average-chunk"
            )
        advice = (
            "everything else is pinned, being read or written, or quarantined"
            if state.options.evict
            else "delete chunks or open with evict=True"
        )
        return StoreFull(
            f"{state.device.path} has {state.allocator.free_units * UNIT_BYTES} bytes free and "
            f"{units * UNIT_BYTES} are needed; {advice}"
        )

    def _complete(self, wave: Wave[_Put]) -> None:
        state, batch = self._state, wave.batch
        roots = [
            root_checksum(put.digest, put.described.payload_bytes, put.described.layout, batch.leaves(number))
            for number, put in enumerate(wave.items)
        ]
        with state.changing:
            for number, put in enumerate(wave.items):
                state.reserved_record_bytes -= put.record_bytes
                code = batch.result(number)
                if wave.refusal is not None:
                    state.allocator.release(put.extents)
                    self.errors[put.position] = wave.refusal
                elif code:
                    state.allocator.quarantine(put.extents)
                    state.counters["put_device_error"] += 1
                    self.errors[put.position] = device_error(
                        state.device.path, f"writing a chunk of {put.described.payload_bytes} bytes", code
                    )
                else:
                    self._publish(put, batch.leaves(number), roots[number])
                state.claims.remove(put.digest)
                self._own.discard(put.digest)
            state.changed.notify_all()

    def _publish(self, put: _Put, leaves: bytes, root: bytes) -> None:
        state, described = self._state, put.described
        self.last_sequence = state.insert(
            digest=put.digest,
            key=put.key,
            key_is_text=put.key_is_text,
            payload_bytes=described.payload_bytes,
            layout=described.layout,
            root=root,
            extents=put.extents,
            leaves=leaves,
        )
        self.results[put.position] = True
        state.counters["put_chunks"] += 1
        state.counters["put_bytes"] += described.payload_bytes
        state.counters["put_copied_bytes"] += described.copied_bytes
