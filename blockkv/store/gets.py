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
import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blockkv.catalog.layouts import Layout
from blockkv.device.base import Batch, Direction, Priority, device_error
from blockkv.errors import BlockKVError, DeviceLost, InvalidArgument
from blockkv.format.record import key_digest
from blockkv.store.interrupts import interrupts
from blockkv.store.keys import Key, encode_key
from blockkv.store.state import State
from blockkv.store.verify import Verifier, is_damage
from blockkv.store.waves import LOOKUP_KEYS, Wave, WaveRun
from blockkv.tensors import Described, allocate, describe_output, overlapping, read_only

logger = logging.getLogger("blockkv")


@dataclass(slots=True)
class _Get:
    position: int
    place: int
    layout: Layout
    described: Described
    value: Any


class GetRun(WaveRun[_Get]):
    """One get or get_many call. `results` and `errors` are by position once `run` returned.

    A result is the tensors (None for a miss) where no output was given, else whether it was filled.
    """

    direction = Direction.READ

    def __init__(
        self,
        state: State,
        count: int,
        into_outputs: bool,
        *,
        preload: bool = False,
        deadline_ns: int = 0,
        then: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.priority = Priority.PRELOAD if preload else Priority.LOAD
        super().__init__(state, deadline_ns, then)
        self.results: list[Any] = [False if into_outputs else None] * count
        self.errors: dict[int, BlockKVError] = {}
        self._into_outputs = into_outputs

    def run(self, keys: Sequence[Key], outputs: Sequence[Any] | None) -> None:
        """Carry out all gets; one key's fault never stops its neighbours."""
        try:
            for first in range(0, len(keys), LOOKUP_KEYS):
                interrupts.deliver()
                self._add(first, keys[first : first + LOOKUP_KEYS], outputs)
        finally:
            self._drain()

    def submit(self, key: Key, output: Any) -> None:
        """Start the only get of an asynchronous run; `then` is called once, possibly before this returns."""
        assert self._then is not None
        self._add(0, [key], [output] if self._into_outputs else None)
        if self._wave.items:
            self._start()
        elif not self._started_count:
            self._then(None)

    def _add(self, first: int, keys: Sequence[Key], outputs: Sequence[Any] | None) -> None:
        """Look up and enqueue the gets from position `first` on."""
        state = self._state
        positions: list[int] = []
        digests: list[bytes] = []
        for position, key in enumerate(keys, first):
            try:
                digests.append(key_digest(encode_key(key)))
            except BlockKVError as error:
                self.errors[position] = error
            else:
                positions.append(position)
        with state.lock:
            places = state.index.acquire(digests)
            found = array("I", filter(None, places))
            _, layout_ids, _ = state.index.sizes(found)
            layouts = [state.layouts[layout_id] for layout_id in layout_ids]
            state.counters["get_misses"] += len(places) - len(found)
        if len(found) < len(places):
            positions = [position for position, place in zip(positions, places, strict=True) if place]
        taken = 0
        try:
            targets = self._targets(positions, layouts, outputs)
            for position, place, layout, target in zip(positions, found, layouts, targets, strict=True):
                taken += 1
                if target is None:
                    self._let_go([place])
                else:
                    value, described = target
                    self._enqueue(_Get(position, place, layout, described, value), described.payload_bytes)
        finally:
            self._let_go(found[taken:])

    def _targets(
        self, positions: Sequence[int], layouts: Sequence[Layout], outputs: Sequence[Any] | None
    ) -> Sequence[tuple[Any, Described] | None]:
        """For each get what it returns and where it is read to; None, with an error, where that cannot be."""
        if outputs is None:
            return allocate(layouts)
        targets: list[tuple[Any, Described] | None] = []
        for position, layout in zip(positions, layouts, strict=True):
            try:
                targets.append((True, describe_output(outputs[position], layout)))
            except BlockKVError as error:
                self.errors[position] = error
                targets.append(None)
        for unfit, complaint in (
            (read_only, "is memory that is mapped read-only; give memory that can be written to"),
            (overlapping, "overlaps that of another key of the call; every chunk needs memory of its own"),
        ):
            usable = [number for number, target in enumerate(targets) if target is not None]
            for index in unfit([target[1] for target in targets if target is not None]):
                number = usable[index]
                self.errors[positions[number]] = InvalidArgument(f"out= {complaint}")
                targets[number] = None
        return targets

    def _let_go(self, places: Sequence[int]) -> None:
        if places:
            with self._state.lock:
                self._state.release(places)

    def _fill(self, batch: Batch, items: list[_Get]) -> None:
        state = self._state
        segment_counts = array("I")
        for get in items:
            segments = get.described.segments
            segment_counts.append(len(segments))
            for segment in segments:
                batch.segments.extend(segment)
            batch.keepalive.append(get.described.keepalive)
        places = array("I", [get.place for get in items])
        base_bytes = state.geometry.data.offset_bytes
        with state.lock:
            state.index.add_transfers(batch, places, segment_counts, base_bytes, state.options.verify)

    def _complete_and_tell(self, wave: Wave[_Get]) -> None:
        if not self._inexact(wave):
            super()._complete_and_tell(wave)
            return
        # It is read again, which the device's completion thread must not wait for.
        tell = threading.Thread(
            target=super()._complete_and_tell, args=(wave,), name="blockkv-verify", daemon=True
        )
        tell.start()

    def _complete(self, wave: Wave[_Get]) -> None:
        state = self._state
        failures = self._failures(wave)
        damaged = self._damaged(wave, failures)
        payload_bytes = copied_bytes = 0
        for number, get in enumerate(wave.items):
            if number in failures:
                for address, size_bytes in get.described.segments:
                    ctypes.memset(address, 0, size_bytes)
                continue
            for target, stand_in in get.described.scatter_back or ():
                target.copy_(stand_in)
            self.results[get.position] = get.value
            payload_bytes += get.described.payload_bytes
            copied_bytes += get.described.copied_bytes
        with state.changing:
            for number, failure in failures.items():
                if number in damaged:
                    state.drop_damaged(state.index.at(wave.items[number].place))
                state.counters[failure] += 1
                state.counters["get_misses"] += 1
            state.counters["get_chunks"] += len(wave.items) - len(failures)
            state.counters["get_bytes"] += payload_bytes
            state.counters["get_copied_bytes"] += copied_bytes
            state.release([get.place for get in wave.items])

    def _failures(self, wave: Wave[_Get]) -> dict[int, str]:
        """Which items of a wave are no hits, each with the counter of what went wrong."""
        batch = wave.batch
        if wave.refusal is not None:
            for get in wave.items:
                self.errors[get.position] = wave.refusal
            return dict.fromkeys(range(len(wave.items)), "get_refused")
        failures = {number: self._judge(wave.items[number], code) for number, code in batch.failed()}
        return failures | dict.fromkeys(self._inexact(wave), "get_checksum_mismatch")

    def _inexact(self, wave: Wave[_Get]) -> list[int]:
        """Which items of a wave the device has read, and not as they were put."""
        state, batch = self._state, wave.batch
        if wave.refusal is not None or not state.options.verify:
            return []
        layout_checksums = b"".join([get.layout.digest for get in wave.items])
        places = array("I", [get.place for get in wave.items])
        with state.lock:
            exact = state.index.verify(batch, places, layout_checksums)
        if all(exact):
            return []
        failed = dict(batch.failed())
        return [number for number, is_exact in enumerate(exact) if not is_exact and number not in failed]

    def _damaged(self, wave: Wave[_Get], failures: dict[int, str]) -> set[int]:
        """Which items of a wave are no chunks any more. What did not verify is read again for that."""
        damaged = {number for number, failure in failures.items() if failure == "get_device_error"}
        doubtful = [number for number, failure in failures.items() if failure == "get_checksum_mismatch"]
        if not doubtful:
            return damaged
        state = self._state
        with state.lock:
            chunks = [
                (state.index.at(wave.items[number].place), wave.items[number].layout) for number in doubtful
            ]
        outcomes = [0] * len(chunks)
        try:
            outcomes = Verifier(state.device, state.geometry, self.priority).verify(chunks)
        except (BlockKVError, MemoryError) as error:
            logger.warning("%s: chunks cannot be read again just now: %r", state.device.path, error)
        for number, outcome in zip(doubtful, outcomes, strict=True):
            if is_damage(outcome):
                damaged.add(number)
            else:
                logger.warning(
                    "%s: a chunk of %d bytes did not verify and stays, for the device may have it right: is "
                    "the memory it was read into written to by others?",
                    state.device.path,
                    wave.items[number].described.payload_bytes,
                )
        return damaged

    def _judge(self, get: _Get, code: int) -> str:
        size_bytes = get.described.payload_bytes
        error = device_error(self._state.device.path, f"reading a chunk of {size_bytes} bytes", code)
        if isinstance(error, DeviceLost):
            self.errors[get.position] = error
            return "get_device_lost"
        if code == -errno.ETIME:
            return "get_deadline"
        return "get_device_error" if is_damage(code) else "get_transient_error"
