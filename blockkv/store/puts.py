"""Carrying out puts: claim keys, find space, write, make visible what was written.

Many chunks go to the free map, the device and the index in one call each; small ones of a call are placed one
behind the other, so that they are written together.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from blockkv.device.base import UNIT_BYTES, Batch, Direction, Priority, device_error
from blockkv.errors import BlockKVError, StoreFull
from blockkv.format.geometry import LEAF_BYTES, leaf_bytes_for
from blockkv.format.record import key_digest, put_bytes_at_most
from blockkv.space.allocator import Extent
from blockkv.store.interrupts import interrupts
from blockkv.store.keys import Key, encode_key
from blockkv.store.state import State
from blockkv.store.waves import LOOKUP_KEYS, Wave, WaveRun
from blockkv.tensors import Described, Tensors, describe

SPACE_WAIT_S = 5.0
"""How long a put waits for readers and other writers to give back the only space that is left."""

Item = tuple[Key, Tensors]


@dataclass(slots=True)
class _Put:
    """One chunk on its way to the device."""

    position: int
    key: bytes
    key_is_text: bool
    digest: bytes
    described: Described
    record_bytes: int
    """What its records take at most."""
    extents: tuple[Extent, ...] = ()

    @property
    def units(self) -> int:
        return -(-self.described.payload_bytes // UNIT_BYTES)


class PutRun(WaveRun[_Put]):
    """One put or put_many call. `results` and `errors` are by position once `run` returned."""

    direction = Direction.WRITE
    priority = Priority.STORE

    def __init__(self, state: State, count: int, deadline_ns: int = 0, droppable: bool = False) -> None:
        super().__init__(state, deadline_ns)
        self._droppable = droppable
        self.results = [False] * count
        self.errors: dict[int, BlockKVError] = {}
        self.last_sequence = 0
        """The newest log sequence of any of the keys, written or found: all are durable when it is."""
        self._own: set[bytes] = set()
        """Digests of the keys that this call has claimed."""
        self._postponed: deque[tuple[bytes, int, Item]] = deque()
        """Keys that were claimed already, by another thread or earlier in this call."""

    def run(self, items: Sequence[Item]) -> None:
        """Carry out all items. Only what is no single key's fault is raised (StoreReadOnly)."""
        for first in range(0, len(items), LOOKUP_KEYS):
            self._carry_out(list(enumerate(items[first : first + LOOKUP_KEYS], first)), last=False)
        self._carry_out([], last=True)
        while self._postponed:
            # We hold nothing ourselves now, so waiting for others is safe.
            digest, position, item = self._postponed.popleft()
            with self._state.lock:
                while digest in self._state.claims:
                    self._state.changed.wait()
            self._carry_out([(position, item)], last=True)

    def _carry_out(self, items: list[tuple[int, Item]], *, last: bool) -> None:
        """Add the items; with `last`, or whatever is raised, nothing is in flight or claimed afterwards."""
        try:
            interrupts.deliver()
            self._add(items)
        except BaseException:
            last = True
            raise
        finally:
            if last:
                try:
                    self._drain()
                finally:
                    self._give_up(self._own.copy())

    def _add(self, items: list[tuple[int, Item]]) -> None:
        """Claim the keys that are not there yet, find space for their chunks, enqueue them."""
        puts = self._described(self._claim(items))
        placed = self._place(puts)
        taken = 0
        try:
            for put in puts[:placed]:
                taken += 1
                self._enqueue(put, put.described.payload_bytes)
        finally:
            self._displace(puts[taken:placed])
        for put in puts[placed:]:
            try:
                put.extents = self._allocate(put)
            except BlockKVError as error:
                self.errors[put.position] = error
                self._give_up([put.digest])
            else:
                self._enqueue(put, put.described.payload_bytes)

    def _claim(self, items: list[tuple[int, Item]]) -> list[tuple[int, Item, bytes, bytes]]:
        """(position, item, encoded key, digest) of the items that are ours to write."""
        state = self._state
        wanted: list[tuple[int, Item, bytes, bytes]] = []
        for position, item in items:
            try:
                encoded = encode_key(item[0])
            except BlockKVError as error:
                self.errors[position] = error
            else:
                wanted.append((position, item, encoded, key_digest(encoded)))
        claimed = []
        with state.lock:
            places = state.index.find([digest for _, _, _, digest in wanted])
            for place, one in zip(places, wanted, strict=True):
                position, item, _, digest = one
                if place:
                    state.counters["put_existing"] += 1
                    state.index.touch(digest)
                    self.last_sequence = max(self.last_sequence, state.index.at(place).log_sequence)
                elif digest in state.claims:
                    self._postponed.append((digest, position, item))
                else:
                    state.claims.add(digest)
                    self._own.add(digest)
                    claimed.append(one)
        return claimed

    def _described(self, claimed: list[tuple[int, Item, bytes, bytes]]) -> list[_Put]:
        puts = []
        for position, (key, value), encoded, digest in claimed:
            try:
                described = describe(value)
            except BlockKVError as error:
                self.errors[position] = error
                self._give_up([digest])
            else:
                record_bytes = put_bytes_at_most(described.payload_bytes, len(encoded))
                puts.append(_Put(position, encoded, isinstance(key, str), digest, described, record_bytes))
        return puts

    def _give_up(self, digests: Collection[bytes]) -> None:
        """Let others write keys that this call had claimed."""
        if digests:
            with self._state.lock:
                self._state.claims.difference_update(digests)
                self._own.difference_update(digests)
                self._state.changed.notify_all()

    def _place(self, puts: list[_Put]) -> int:
        """Give extents to the first chunks, as many as there is space for as it is. Returns how many."""
        state = self._state
        with state.changing:
            if state.layouts.exhausted:
                return 0
            room_bytes, fitting = state.record_room_bytes, 0
            for put in puts:
                room_bytes -= put.record_bytes
                if room_bytes < 0:
                    break
                fitting += 1
            found = state.allocator.allocate_many([put.units for put in puts[:fitting]])
            for put, extents in zip(puts, found, strict=False):
                put.extents = extents
                state.reserved_record_bytes += put.record_bytes
        return len(found)

    def _displace(self, puts: list[_Put]) -> None:
        if puts:
            with self._state.changing:
                for put in puts:
                    self._state.allocator.release(put.extents)
                    self._state.reserved_record_bytes -= put.record_bytes

    def _admit(self, payload_bytes: int) -> bool:
        """Wait until the puts under way leave room for so many bytes more, or say that it takes too long."""
        state = self._state
        while True:
            with state.lock:
                if (
                    not state.store_bytes
                    or state.store_bytes + payload_bytes <= state.options.max_store_bytes
                ):
                    state.store_bytes += payload_bytes
                    return True
                if self._droppable:
                    return False
                if len(self._in_flight) == 1:  # the wave in question: none of our own to wait for
                    patience_s = None
                    if self._deadline_ns:
                        patience_s = (self._deadline_ns - time.monotonic_ns()) / 1e9
                        if patience_s <= 0:
                            return False
                    state.changed.wait(patience_s)
                    continue
            self._finish()

    def _fill(self, batch: Batch, items: list[_Put]) -> None:
        base_bytes = self._state.geometry.data.offset_bytes
        for put in items:
            described = put.described
            payload_bytes = described.payload_bytes
            extents = [(base_bytes + start * UNIT_BYTES, count * UNIT_BYTES) for start, count in put.extents]
            batch.keepalive.append(described.keepalive)
            leaf_bytes = LEAF_BYTES if payload_bytes <= LEAF_BYTES else leaf_bytes_for(payload_bytes)
            batch.add(payload_bytes, extents, described.segments, leaf_bytes)

    def _allocate(self, put: _Put) -> tuple[Extent, ...]:
        """Extents for a chunk, evicting as needed; reserves its part of the next checkpoint."""
        state, units, record_bytes = self._state, put.units, put.record_bytes
        if units > state.geometry.data_units:
            raise StoreFull(
                f"a chunk of {put.described.payload_bytes} bytes can never fit: the data zone of "
                f"{state.device.path} has {state.geometry.data.size_bytes} bytes"
            )
        if state.layouts.exhausted:
            raise StoreFull(f"{state.device.path} has no numbers left for layouts; format it anew")
        deadline = time.monotonic() + SPACE_WAIT_S
        while True:
            with state.changing:
                has_room = record_bytes <= state.record_room_bytes
                extents = state.allocator.allocate(units) if has_room else None
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
        if record_bytes > state.record_room_bytes:
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
        started = wave.refusal is None and not wave.dropped
        failed = dict(batch.failed()) if started else {}
        with state.changing:
            state.reserved_record_bytes -= sum(put.record_bytes for put in wave.items)
            if not wave.dropped:
                state.store_bytes -= wave.payload_bytes
            if started:
                for number, code in failed.items():
                    self._fail(wave.items[number], code)
                self._publish(batch, [n for n in range(len(wave.items)) if n not in failed], wave)
            else:
                for put in wave.items:
                    state.allocator.release(put.extents)
                    if wave.refusal is not None:
                        self.errors[put.position] = wave.refusal
                state.counters["put_dropped"] += len(wave.items) if wave.dropped else 0
            self._give_up([put.digest for put in wave.items])

    def _fail(self, put: _Put, code: int) -> None:
        state = self._state
        if code == -errno.ETIME:
            state.allocator.release(put.extents)
            state.counters["put_dropped"] += 1
            return
        state.allocator.quarantine(put.extents)
        state.counters["put_device_error"] += 1
        self.errors[put.position] = device_error(
            state.device.path, f"writing a chunk of {put.described.payload_bytes} bytes", code
        )

    def _publish(self, batch: Batch, numbers: list[int], wave: Wave[_Put]) -> None:
        """Make the chunks of these transfers visible. The caller holds the lock."""
        state, puts = self._state, [wave.items[number] for number in numbers]
        if not puts:
            return
        self.last_sequence = state.insert(
            batch,
            numbers,
            digests=[put.digest for put in puts],
            keys=[put.key for put in puts],
            keys_are_text=bytes([put.key_is_text for put in puts]),
            layouts=[put.described.layout for put in puts],
            record_bytes_at_most=sum(put.record_bytes for put in puts),
        )
        for put in puts:
            self.results[put.position] = True
        state.counters["put_chunks"] += len(puts)
        state.counters["put_bytes"] += sum(put.described.payload_bytes for put in puts)
        state.counters["put_copied_bytes"] += sum(put.described.copied_bytes for put in puts)
