"""Batches in waves: how one call with any number of chunks keeps the device busy within bounds.

A wave is one batch for the device. A few are in flight in a long call, so the device never waits for the
Python between them, and memory in flight stays bounded. Whatever is raised meanwhile, a wave that was
started is waited for before its memory or its extents are let go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from blockkv.device.base import Batch, Direction, Priority
from blockkv.errors import BlockKVError
from blockkv.store.state import State

WAVE_BYTES = 32 << 20
"""Payload of one batch: large enough to hide the turn-around, small enough to bound memory in flight."""
FIRST_WAVE_BYTES = 4 << 20
"""The first wave of a call is small, so that the device starts early; each next one is twice as large."""
WAVES_IN_FLIGHT = 4
LOOKUP_KEYS = 256
"""Keys of a call that are looked up in one go: they are leased, or claimed, from then on."""

Item = TypeVar("Item")


class Wave(Generic[Item]):
    """Chunks that travel in one batch; item i is transfer i."""

    __slots__ = ("batch", "dropped", "items", "payload_bytes", "refusal")

    def __init__(self, direction: Direction, priority: Priority, deadline_ns: int) -> None:
        self.batch = Batch(direction, priority)
        self.batch.deadline_ns = deadline_ns
        self.items: list[Item] = []
        self.payload_bytes = 0
        self.refusal: BlockKVError | None = None
        """Why the device did not even start the batch."""
        self.dropped = False
        """Whether it was not given to the device, because that is allowed and would have taken too long."""


class WaveRun(ABC, Generic[Item]):
    """Collects transfers into waves and completes them in order. Subclasses say what completion means."""

    direction: Direction
    priority: Priority

    def __init__(
        self,
        state: State,
        deadline_ns: int = 0,
        then: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """What the device has not got at `deadline_ns` (`time.monotonic_ns`; 0: never) it gets no more.

        With `then` the run is asynchronous: a started wave is completed on the device's completion thread,
        which then calls it with what went wrong, if anything.
        """
        self._state = state
        self._deadline_ns = deadline_ns
        self._then = then
        self._started_count = 0
        self._wave: Wave[Item] = self._new_wave()
        self._in_flight: deque[Wave[Item]] = deque()

    @abstractmethod
    def _complete(self, wave: Wave[Item]) -> None:
        """The wave is over: every transfer has its result, or `wave.refusal` says why none was started."""

    @property
    def _busy(self) -> bool:
        return bool(self._wave.items or self._in_flight)

    @abstractmethod
    def _fill(self, batch: Batch, items: list[Item]) -> None:
        """Make transfer i of an empty batch that of item i."""

    def _enqueue(self, item: Item, payload_bytes: int) -> None:
        wave = self._wave
        wave.items.append(item)
        wave.payload_bytes += payload_bytes
        if wave.payload_bytes >= min(FIRST_WAVE_BYTES << self._started_count, WAVE_BYTES):
            self._start()
            if len(self._in_flight) >= WAVES_IN_FLIGHT:
                self._finish()

    def _drain(self) -> None:
        """Start what was collected and complete everything in flight."""
        try:
            if self._wave.items:
                self._start()
        finally:
            while self._in_flight:
                self._finish()

    def _start(self) -> None:
        wave, self._wave = self._wave, self._new_wave()
        self._started_count += 1
        if self._then is None:
            self._in_flight.append(wave)
        else:
            wave.batch.on_done = lambda _: self._complete_and_tell(wave)
        wave.dropped = not self._admit(wave.payload_bytes)
        if wave.dropped:
            return
        try:
            self._fill(wave.batch, wave.items)
            self._state.device.submit(wave.batch)
        except BlockKVError as error:
            wave.refusal = error
            if self._then is not None:
                self._complete_and_tell(wave)
        except BaseException as error:
            # No memory. Nothing is in flight; what the wave holds is given back, as for a refused one.
            wave.refusal = BlockKVError(f"the requests could not be made: {error!r}")
            raise

    def _admit(self, payload_bytes: int) -> bool:
        """Whether a wave of that size may go to the device; may wait until it may."""
        return True

    def _new_wave(self) -> Wave[Item]:
        return Wave(self.direction, self.priority, self._deadline_ns)

    def _finish(self) -> None:
        wave = self._in_flight.popleft()
        if wave.refusal is None and not wave.dropped:
            self._state.device.wait(wave.batch)
        self._complete(wave)

    def _complete_and_tell(self, wave: Wave[Item]) -> None:
        assert self._then is not None
        problem: BaseException | None = None
        try:
            self._complete(wave)
        except BaseException as error:
            problem = error
        self._then(problem)
