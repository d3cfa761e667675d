"""Carrying out puts: claim keys, find space, write, make visible what was written.

Many chunks go to the free map, the device and the index in one call each; small ones of a call are placed one
behind the other, so that they are written together.

`Puts` has the steps that are the same wherever the catalog is; `PutRun` takes the others on a catalog of this
process, and `blockkv.serving.client_puts` on that of another one.
"""

from __future__ import annotations

import errno
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from blockkv.catalog.index import add_put_transfers
from blockkv.device.base import Direction, Placement, Priority, device_error
from blockkv.errors import BlockKVError, InvalidArgument
from blockkv.format.geometry import unit_count
from blockkv.format.record import key_digest, put_bytes_at_most
from blockkv.space.allocator import Extent
from blockkv.store.data_path import DataPath
from blockkv.store.interrupts import interrupts
from blockkv.store.keys import Key, encode_keys
from blockkv.store.room import displace, make_room, place
from blockkv.store.state import GROWING, State
from blockkv.store.waves import Wave, WaveRun, lookups
from blockkv.tensors import Pieces, Tensors, describe_many

Item = tuple[Key, Tensors]

_units = lru_cache(unit_count)
_record_bytes = lru_cache(put_bytes_at_most)


@dataclass(slots=True)
class Columns:
    """Chunks on their way to the device, column by column."""

    positions: Sequence[int]
    """Of the items in the call."""
    keys: list[bytes]
    keys_are_text: bytes
    digests: list[bytes]
    pieces: Pieces
    units: list[int]
    record_bytes: list[int]
    """What the records of each take at most."""

    def cut(self, first: int, end: int) -> Columns:
        """Those from `first` up to `end`."""
        return Columns(
            self.positions[first:end],
            self.keys[first:end],
            self.keys_are_text[first:end],
            self.digests[first:end],
            self.pieces.cut(first, end),
            self.units[first:end],
            self.record_bytes[first:end],
        )

    def chosen(self, numbers: Sequence[int]) -> Columns:
        """Some of them, in this order."""
        return Columns(
            [self.positions[number] for number in numbers],
            [self.keys[number] for number in numbers],
            bytes([self.keys_are_text[number] for number in numbers]),
            [self.digests[number] for number in numbers],
            self.pieces.chosen(numbers),
            [self.units[number] for number in numbers],
            [self.record_bytes[number] for number in numbers],
        )


class PutWave(Wave):
    """Chunks that are written together."""

    __slots__ = ("extents", "puts")

    def __init__(self, payload_bytes: int, puts: Columns, extents: list[tuple[Extent, ...]]) -> None:
        super().__init__(payload_bytes)
        self.puts = puts
        self.extents = extents


class Puts(WaveRun[PutWave]):
    """One put or put_many call. `results` and `errors` are by position once `run` returned."""

    direction = Direction.WRITE
    priority = Priority.STORE

    def __init__(self, state: DataPath, count: int, deadline_ns: int = 0, droppable: bool = False) -> None:
        super().__init__(state, deadline_ns)
        self._droppable = droppable
        self.results = [False] * count
        self.errors: dict[int, BlockKVError] = {}
        self.last_sequence = 0
        """The newest log sequence of any of the keys, written or found: all are durable when it is."""
        self._own: set[bytes] = set()
        """Digests of the keys that this call has claimed."""
        self._postponed: deque[tuple[bytes, int]] = deque()
        """Keys that were claimed already, by another thread or earlier in this call, and their positions."""

    # -- where the catalog is --------------------------------------------------------------------------

    @abstractmethod
    def _claim(self, positions: Sequence[int], items: Sequence[Item]) -> Columns:
        """The items that are ours to write."""

    @abstractmethod
    def _give_up(self, digests: Collection[bytes]) -> None:
        """Let others write keys that this call had claimed."""

    @abstractmethod
    def _wait_for_others(self, digest: bytes) -> None:
        """Return when a key that was claimed already may be free. Nothing is claimed or in flight."""

    @abstractmethod
    def _place(self, puts: Columns, first: int) -> list[tuple[Extent, ...]]:
        """Extents for the chunks from `first` on, as many as there is space for as it is."""

    @abstractmethod
    def _allocate(self, puts: Columns, number: int) -> tuple[Extent, ...]:
        """Extents for one chunk, evicting as needed."""

    @abstractmethod
    def _displace(self, puts: Columns, extents: Sequence[tuple[Extent, ...]]) -> None:
        """Give back the extents of chunks that are not going to be written."""

    # -- everywhere ------------------------------------------------------------------------------------

    def run(self, items: Sequence[Item]) -> None:
        """Carry out all items. Only what is no single key's fault is raised (StoreReadOnly)."""
        for first, end in lookups(len(items)):
            self._carry_out(range(first, end), items, last=end == len(items))
        while self._postponed:
            # We hold nothing ourselves now, so waiting for others is safe.
            digest, position = self._postponed.popleft()
            self._wait_for_others(digest)
            self._carry_out([position], items, last=True)

    def _carry_out(self, positions: Sequence[int], items: Sequence[Item], *, last: bool) -> None:
        """Add these items; with `last`, or whatever is raised, nothing is in flight or claimed afterwards."""
        try:
            interrupts.deliver()
            self._add(positions, items)
        except BaseException:
            last = True
            raise
        finally:
            if last:
                try:
                    self._drain()
                finally:
                    self._give_up(self._own.copy())

    def _add(self, positions: Sequence[int], items: Sequence[Item]) -> None:
        """Claim the keys that are not there yet, find space for their chunks, start to write them."""
        puts = self._claim(positions, items)
        self._judge_length(sum(puts.pieces.sizes_bytes), len(positions), len(items))
        first = 0
        while first < len(puts.positions):
            extents = self._place(puts, first)
            if not extents:
                try:
                    extents = [self._allocate(puts, first)]
                except BlockKVError as error:
                    self.errors[puts.positions[first]] = error
                    self._give_up([puts.digests[first]])
                    first += 1
                    continue
            placed, started = first + len(extents), first
            try:
                for begin, end, payload_bytes in self._cut(puts.pieces.sizes_bytes[first:placed]):
                    wave = PutWave(payload_bytes, puts.cut(first + begin, first + end), extents[begin:end])
                    started = first + end
                    self._start(wave)
            finally:
                if started < placed:
                    self._displace(puts.cut(started, placed), extents[started - first :])
            first = placed

    def _columns(
        self,
        positions: Sequence[int],
        items: Sequence[Item],
        keys: list[bytes],
        digests: list[bytes],
        pieces: Pieces,
    ) -> Columns:
        return Columns(
            positions,
            keys,
            bytes([isinstance(items[position][0], str) for position in positions]),
            digests,
            pieces,
            list(map(_units, pieces.sizes_bytes)),
            list(map(_record_bytes, pieces.sizes_bytes, map(len, keys))),
        )

    def _admit(self, wave: PutWave) -> bool:
        """Wait until the puts under way leave room for it, or say that it takes too long."""
        state, payload_bytes = self._state, wave.payload_bytes
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

    def _fill(self, wave: PutWave) -> None:
        batch, pieces = wave.batch, wave.puts.pieces
        batch.segments = pieces.segments
        batch.keepalive.append(pieces.keepalive)
        base_bytes = self._state.geometry.data.offset_bytes
        add_put_transfers(batch, pieces.sizes_bytes, wave.extents, pieces.segment_counts, base_bytes)


class PutRun(Puts):
    """`Puts` where the catalog is in this process."""

    _state: State

    def __init__(
        self,
        state: State,
        count: int,
        deadline_ns: int = 0,
        droppable: bool = False,
        placement: Placement = Placement.DATA,
    ) -> None:
        super().__init__(state, count, deadline_ns, droppable)
        self._placement = placement
        self._charged_units: dict[bytes, int] = {}
        """Of chunks that the write budget was charged for and that are not written yet."""
        self._over_budget = False

    def _fill(self, wave: PutWave) -> None:
        super()._fill(wave)
        wave.batch.placement = self._placement

    def _claim(self, positions: Sequence[int], items: Sequence[Item]) -> Columns:
        state = self._state
        given = [items[position] for position in positions]
        keys, errors = encode_keys([key for key, _ in given])
        if errors:
            self.errors |= {positions[number]: error for number, error in errors.items()}
            positions = [position for position in positions if position not in self.errors]
        digests = list(map(key_digest, keys))
        chosen: list[int] = []
        with state.lock:
            for number, (place, digest) in enumerate(zip(state.index.find(digests), digests, strict=True)):
                if digest in state.reserved:
                    self.errors[positions[number]] = InvalidArgument(GROWING)
                elif place:
                    state.counters["put_existing"] += 1
                    state.index.touch(digest)
                    self.last_sequence = max(self.last_sequence, state.index.at(place).log_sequence)
                elif digest in state.claims:
                    self._postponed.append((digest, positions[number]))
                else:
                    state.claims.add(digest)
                    self._own.add(digest)
                    chosen.append(number)
        pieces, errors = describe_many([items[positions[number]][1] for number in chosen])
        if errors:
            self.errors |= {positions[chosen[number]]: error for number, error in errors.items()}
            self._give_up([digests[chosen[number]] for number in errors])
            chosen = [one for number, one in enumerate(chosen) if number not in errors]
        if len(chosen) < len(positions):
            positions = [positions[number] for number in chosen]
            keys = [keys[number] for number in chosen]
            digests = [digests[number] for number in chosen]
        return self._affordable(self._columns(positions, items, keys, digests, pieces))

    def _affordable(self, puts: Columns) -> Columns:
        """Those from the first on that the write budget lets in. The others are not stored."""
        if self._state.write_budget is None:
            return puts
        with self._state.lock:
            count = 0
            if self._over_budget:  # earlier in this call: what comes behind a gap is worth little
                self._state.counters["put_over_budget"] += len(puts.units)
            else:
                count = self._state.afford(puts.units)
            self._charged_units.update(zip(puts.digests[:count], puts.units[:count], strict=True))
        if count == len(puts.units):
            return puts
        self._over_budget = True
        self._give_up(puts.digests[count:])
        return puts.cut(0, count)

    def _give_up(self, digests: Collection[bytes]) -> None:
        if digests:
            with self._state.lock:
                self._state.claims.difference_update(digests)
                self._own.difference_update(digests)
                if self._charged_units:
                    self._state.refund(sum(self._charged_units.pop(digest, 0) for digest in digests))
                self._state.changed.notify_all()

    def _wait_for_others(self, digest: bytes) -> None:
        with self._state.lock:
            while digest in self._state.claims:
                self._state.changed.wait()

    def _place(self, puts: Columns, first: int) -> list[tuple[Extent, ...]]:
        return place(self._state, puts.units[first:], puts.record_bytes[first:])

    def _displace(self, puts: Columns, extents: Sequence[tuple[Extent, ...]]) -> None:
        displace(self._state, puts.record_bytes, extents)

    def _allocate(self, puts: Columns, number: int) -> tuple[Extent, ...]:
        def wait_for_own() -> bool:
            # Our own chunks can be evicted once they are written.
            waited = bool(self._in_flight)
            self._drain()
            return waited

        return make_room(
            self._state,
            puts.units[number],
            puts.record_bytes[number],
            f"a chunk of {puts.pieces.sizes_bytes[number]} bytes",
            own_claims=lambda: len(self._own),
            wait_for_own=wait_for_own,
        )

    def _complete(self, wave: PutWave) -> None:
        state, batch, puts = self._state, wave.batch, wave.puts
        failed = dict(batch.failed()) if wave.refusal is None and not wave.dropped else {}
        with state.changing:
            state.reserved_record_bytes -= sum(puts.record_bytes)
            if not wave.dropped:
                state.store_bytes -= wave.payload_bytes
            if wave.refusal is not None:
                self.errors |= dict.fromkeys(puts.positions, wave.refusal)
            if wave.refusal is not None or wave.dropped:
                for extents in wave.extents:
                    state.allocator.release(extents)
                state.counters["put_dropped"] += len(wave.extents) if wave.dropped else 0
            else:
                for number, code in failed.items():
                    self._fail(wave, number, code)
                self._publish(wave, [n for n in range(len(wave.extents)) if n not in failed])
            self._give_up(puts.digests)

    def _fail(self, wave: PutWave, number: int, code: int) -> None:
        state = self._state
        if code == -errno.ETIME:
            state.allocator.release(wave.extents[number])
            state.counters["put_dropped"] += 1
            return
        state.allocator.quarantine(wave.extents[number])
        self._charged_units.pop(wave.puts.digests[number], 0)
        state.counters["put_device_error"] += 1
        what = f"writing a chunk of {wave.puts.pieces.sizes_bytes[number]} bytes"
        self.errors[wave.puts.positions[number]] = device_error(state.device.path, what, code)

    def _publish(self, wave: PutWave, numbers: Sequence[int]) -> None:
        """Make the chunks of these transfers visible. The caller holds the lock."""
        if not numbers:
            return
        state, puts = self._state, wave.puts
        pieces = puts.pieces
        self.last_sequence = state.insert(
            wave.batch,
            numbers,
            digests=[puts.digests[number] for number in numbers],
            keys=[puts.keys[number] for number in numbers],
            keys_are_text=bytes([puts.keys_are_text[number] for number in numbers]),
            layouts=[pieces.layouts[number] for number in numbers],
            record_bytes_at_most=sum(puts.record_bytes),
        )
        for number in numbers:
            self.results[puts.positions[number]] = True
            self._charged_units.pop(puts.digests[number], 0)
        state.counters["put_chunks"] += len(numbers)
        state.counters["put_bytes"] += sum([pieces.sizes_bytes[number] for number in numbers])
        if pieces.described:
            state.counters["put_copied_bytes"] += sum(
                pieces.described[number].copied_bytes for number in numbers
            )
