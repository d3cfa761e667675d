"""Carrying out gets: look up, lease, read into the caller's memory, verify, give the lease back.

What does not verify is a miss, and the memory it was read into is zeroed so that nobody mistakes it for the
chunk. Where it does not verify in memory of our own either, the record is dropped and its extents are set
aside; a caller who writes to the memory meanwhile loses no chunk.

Many keys go through the index and to the device in one call each; Python touches a key to look at what was
asked for and at the tensors it goes into.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from blockkv.device.base import Direction, Priority, device_error
from blockkv.errors import BlockKVError, DeviceLost
from blockkv.format.record import key_digest
from blockkv.memory import unwritable
from blockkv.store.data_path import DataPath
from blockkv.store.interrupts import interrupts
from blockkv.store.keys import Key, encode_keys
from blockkv.store.verify import WRONG_BYTES, is_damage
from blockkv.store.waves import Wave, WaveRun, lookups
from blockkv.tensors import Occupied, Pieces, allocate, describe_outputs, read_only_error, scatter


class GetWave(Wave):
    """Chunks that are read together."""

    __slots__ = ("extents", "outcomes", "pieces", "places", "positions", "values")

    def __init__(
        self,
        payload_bytes: int,
        positions: Sequence[int],
        places: array[int],
        extents: int,
        values: Sequence[Any],
        pieces: Pieces,
    ) -> None:
        super().__init__(payload_bytes)
        self.positions = positions
        """Of the keys in the call."""
        self.places = places
        """Of the chunks in the index; they are leased."""
        self.extents = extents
        """How many they have together."""
        self.values = values
        """What the call returns."""
        self.pieces = pieces
        """Where they are read to."""
        self.outcomes: dict[int, int] | None = None
        """Once the device is done: what has not arrived as it was put, with an errno or WRONG_BYTES."""


class GetRun(WaveRun[GetWave]):
    """One get or get_many call. `results` and `errors` are by position once `run` returned.

    A result is the tensors (None for a miss) where no output was given, else whether it was filled.
    """

    direction = Direction.READ

    def __init__(
        self,
        state: DataPath,
        count: int,
        into_outputs: bool,
        *,
        preload: bool = False,
        deadline_ns: int = 0,
        then: Callable[[BaseException | None], None] | None = None,
        occupied: Occupied | None = None,
    ) -> None:
        """`occupied` is shared by runs that carry out one call together."""
        self.priority = Priority.PRELOAD if preload else Priority.LOAD
        super().__init__(state, deadline_ns, then)
        self.results: list[Any] = [False if into_outputs else None] * count
        self.errors: dict[int, BlockKVError] = {}
        self._into_outputs = into_outputs
        self._occupied = occupied or (Occupied() if count > 1 else None)
        """Memory of outputs, which must not meet that of others."""

    def run(self, keys: Sequence[Key], outputs: Sequence[Any] | None) -> None:
        """Carry out all gets; one key's fault never stops its neighbours."""
        try:
            for first, end in lookups(len(keys)):
                interrupts.deliver()
                self._add(first, keys[first:end], outputs)
        finally:
            self._drain()

    def submit(self, key: Key, output: Any) -> None:
        """Start the only get of an asynchronous run; `then` is called once, possibly before this returns."""
        assert self._then is not None
        self._add(0, [key], [output] if self._into_outputs else None)
        if not self._started_count:
            self._then(None)

    def _add(self, first: int, keys: Sequence[Key], outputs: Sequence[Any] | None) -> None:
        """Look up and start the gets from position `first` on."""
        state = self._state
        positions: Sequence[int] = range(first, first + len(keys))
        encoded, errors = encode_keys(keys)
        if errors:
            self.errors |= {first + number: error for number, error in errors.items()}
            positions = [position for position in positions if position not in self.errors]
        digests = list(map(key_digest, encoded))
        found, layouts = state.acquire(digests, self._deadline_ns)
        places, extent_counts = found.places, found.extent_counts
        if len(places) < len(positions):
            positions = [positions[number] for number in found.positions]
        started = 0
        try:
            if outputs is None:
                values, pieces = allocate(layouts)
            else:
                outs = [outputs[position] for position in positions]
                pieces, errors = describe_outputs(outs, layouts, self._occupied)
                if errors:
                    self.errors |= {positions[number]: error for number, error in errors.items()}
                    self._let_go(array("I", [places[number] for number in errors]))
                    fit = [number for number in range(len(places)) if number not in errors]
                    positions = [positions[number] for number in fit]
                    places = array("I", [places[number] for number in fit])
                    extent_counts = array("I", [extent_counts[number] for number in fit])
                values = [True] * len(positions)
            self._judge_length(sum(pieces.sizes_bytes), len(keys), len(self.results))
            for begin, end, payload_bytes in self._cut(pieces.sizes_bytes):
                wave = GetWave(
                    payload_bytes,
                    positions[begin:end],
                    places[begin:end],
                    sum(extent_counts[begin:end]),
                    values[begin:end],
                    pieces.cut(begin, end),
                )
                started = end
                self._start(wave)
        finally:
            self._let_go(places[started:])

    def _let_go(self, places: array[int]) -> None:
        if places:
            with self._state.lock:
                self._state.release(places)

    def _fill(self, wave: GetWave) -> None:
        state, batch, pieces = self._state, wave.batch, wave.pieces
        batch.segments = pieces.segments
        batch.keepalive.append(pieces.keepalive)
        base_bytes = state.geometry.data.offset_bytes
        with state.lock:
            state.index.add_transfers(
                batch, wave.places, wave.extents, pieces.segment_counts, base_bytes, state.options.verify
            )

    def _complete_and_tell(self, wave: GetWave) -> None:
        if WRONG_BYTES not in self._outcomes(wave).values():
            super()._complete_and_tell(wave)
            return
        # It is read again, which the device's completion thread must not wait for.
        tell = threading.Thread(
            target=super()._complete_and_tell, args=(wave,), name="blockkv-verify", daemon=True
        )
        tell.start()

    def _complete(self, wave: GetWave) -> None:
        pieces = wave.pieces
        failures = self._failures(wave)
        damaged = self._damaged(wave, failures) if failures else set()
        payload_bytes, copied_bytes = wave.payload_bytes, 0
        for number in failures:
            payload_bytes -= pieces.sizes_bytes[number]
            _zero(pieces, number)
        try:
            for number, described in enumerate(pieces.described):
                if number not in failures:
                    copied_bytes += described.copied_bytes
                    scatter(described.scatter_back)
            for number, position in enumerate(wave.positions):
                if number not in failures:
                    self.results[position] = wave.values[number]
        finally:
            self._settle(wave, failures, damaged, payload_bytes, copied_bytes)

    def _settle(
        self,
        wave: GetWave,
        failures: dict[int, str],
        damaged: set[int],
        payload_bytes: int,
        copied_bytes: int,
    ) -> None:
        """Give the leases back, and count."""
        state = self._state
        with state.changing:
            for number, failure in failures.items():
                if number in damaged:
                    state.drop_damaged(state.index.at(wave.places[number]))
                state.counters[failure] += 1
                state.counters["get_misses"] += 1
            state.counters["get_chunks"] += len(wave.places) - len(failures)
            state.counters["get_bytes"] += payload_bytes
            if copied_bytes:
                state.counters["get_copied_bytes"] += copied_bytes
            state.release(wave.places)

    def _outcomes(self, wave: GetWave) -> dict[int, int]:
        """What has not arrived as it was put: a negative errno, or WRONG_BYTES. The wave is over."""
        if wave.outcomes is None:
            wave.outcomes = {}
            state, batch = self._state, wave.batch
            if wave.refusal is None and not state.options.verify:
                wave.outcomes = dict(batch.failed())
            elif wave.refusal is None:
                layout_checksums = b"".join([layout.digest for layout in wave.pieces.layouts])
                with state.lock:
                    inexact = state.index.inexact(batch, wave.places, layout_checksums)
                wave.outcomes = {number: batch.result(number) or WRONG_BYTES for number in inexact}
        return wave.outcomes

    def _failures(self, wave: GetWave) -> dict[int, str]:
        """Which chunks of a wave are no hits, each with the counter of what went wrong."""
        if wave.refusal is not None:
            self.errors |= dict.fromkeys(wave.positions, wave.refusal)
            return dict.fromkeys(range(len(wave.places)), "get_refused")
        return {number: self._judge(wave, number, code) for number, code in self._outcomes(wave).items()}

    def _damaged(self, wave: GetWave, failures: dict[int, str]) -> set[int]:
        """Which chunks of a wave are none any more. What did not verify is read again for that."""
        damaged = {number for number, failure in failures.items() if failure == "get_device_error"}
        doubtful = [number for number, failure in failures.items() if failure == "get_checksum_mismatch"]
        if not doubtful:
            return damaged
        state = self._state
        with state.lock:
            chunks = [
                (state.index.at(wave.places[number]), wave.pieces.layouts[number]) for number in doubtful
            ]
        again = state.confirm_damage(self.priority, chunks)
        return damaged.union(itertools.compress(doubtful, again))

    def _judge(self, wave: GetWave, number: int, code: int) -> str:
        if code == WRONG_BYTES:
            return "get_checksum_mismatch"
        size_bytes = wave.pieces.sizes_bytes[number]
        error = device_error(self._state.device.path, f"reading a chunk of {size_bytes} bytes", code)
        if isinstance(error, DeviceLost):
            self.errors[wave.positions[number]] = error
            return "get_device_lost"
        if code == -errno.EFAULT and _unwritable(wave.pieces, number):
            self.errors[wave.positions[number]] = read_only_error()
            return "get_refused"
        if code == -errno.ETIME:
            return "get_deadline"
        return "get_device_error" if is_damage(code) else "get_transient_error"


def _unwritable(pieces: Pieces, number: int) -> bool:
    return bool(unwritable([address for address, _ in pieces.segments_of(number)]))


def _zero(pieces: Pieces, number: int) -> None:
    """Leave nothing of another chunk in memory that was to hold this one."""
    segments = pieces.segments_of(number)
    kept = set(unwritable([address for address, _ in segments]))
    for position, (address, size_bytes) in enumerate(segments):
        if position not in kept:
            ctypes.memset(address, 0, size_bytes)
