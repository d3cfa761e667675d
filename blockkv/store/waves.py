"""Batches in waves: how one call with any number of chunks keeps the device busy within bounds.

A wave is one batch for the device. A few are in flight in a long call, so the device never waits for the
Python between them, and memory in flight stays bounded. Whatever is raised meanwhile, a wave that was
started is waited for before its memory or its extents are let go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from blockkv.device.base import Batch, Direction, Priority
from blockkv.errors import BlockKVError
from blockkv.store.data_path import DataPath

WAVE_BYTES = 32 << 20
"""Payload of one batch: large enough to hide the turn-around, small enough to bound memory in flight."""
FIRST_WAVE_BYTES = 4 << 20
"""The first wave of a call is small, so that the device starts early; each next one is twice as large."""
WAVES_IN_FLIGHT = 4
SHORT_CALL_BYTES = 8 << 20
"""Payload of a call that is over sooner without waking other threads. In longer ones they save time."""
LOOKUP_KEYS = 256
"""Keys of a call that are looked up in one go: they are leased, or claimed, from then on."""
FIRST_LOOKUP_KEYS = 32
"""The first ones of a call: the device works on them while the next are looked at."""


def lookups(count: int) -> Iterator[tuple[int, int]]:
    """Which keys of a call are looked up in one go: from, up to."""
    first, end = 0, min(count, FIRST_LOOKUP_KEYS)
    while first < count:
        yield first, end
        first, end = end, min(count, end + LOOKUP_KEYS)


class Wave:
    """Chunks that travel in one batch. Subclasses have what belongs to each, in the order of transfers."""

    __slots__ = ("batch", "dropped", "payload_bytes", "refusal")

    def __init__(self, payload_bytes: int) -> None:
        self.batch: Batch
        """Made when the wave is started."""
        self.payload_bytes = payload_bytes
        self.refusal: BlockKVError | None = None
        """Why the device did not even start the batch."""
        self.dropped = False
        """Whether it was not given to the device, because that is allowed and would have taken too long."""


AnyWave = TypeVar("AnyWave", bound=Wave)


class WaveRun(ABC, Generic[AnyWave]):
    """Starts waves and completes them in order. Subclasses say what completion means."""

    direction: Direction
    priority: Priority

    def __init__(
        self,
        state: DataPath,
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
        self._is_short = False
        """Whether the calling thread does better to carry out the waves itself."""
        self._started_count = 0
        self._started_bytes = 0
        self._in_flight: deque[AnyWave] = deque()

    @abstractmethod
    def _complete(self, wave: AnyWave) -> None:
        """The wave is over: every transfer has its result, or `wave.refusal` says why none was started."""

    @abstractmethod
    def _fill(self, wave: AnyWave) -> None:
        """Put the wave's transfers into its batch, which is empty."""

    def _cut(self, sizes_bytes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """The next waves of chunks with so much payload: from, up to, payload. Start each before the next."""
        first, wave_bytes = 0, 0
        for end, size_bytes in enumerate(sizes_bytes, 1):
            wave_bytes += size_bytes
            if wave_bytes >= min(FIRST_WAVE_BYTES << self._started_count, WAVE_BYTES):
                yield first, end, wave_bytes
                first, wave_bytes = end, 0
        if first < len(sizes_bytes):
            yield first, len(sizes_bytes), wave_bytes

    def _judge_length(self, payload_bytes: int, count: int, count_in_all: int) -> None:
        """Look at how much the first chunks of a call have together, and how many there are."""
        if not self._started_count and self._then is None:
            self._is_short = payload_bytes * count_in_all <= SHORT_CALL_BYTES * count

    def _drain(self) -> None:
        """Complete everything in flight."""
        try:
            while self._in_flight:
                self._finish()
        finally:
            if self._in_flight:
                self._drain()

    def _start(self, wave: AnyWave) -> None:
        """Give a wave to the device; completes one where many are in flight."""
        self._started_count += 1
        wave.batch = Batch(self.direction, self.priority)
        self._started_bytes += wave.payload_bytes
        wave.batch.on_caller = self._is_short and self._started_bytes <= SHORT_CALL_BYTES
        wave.batch.deadline_ns = self._deadline_ns
        if self._then is None:
            self._in_flight.append(wave)
        else:
            wave.batch.on_done = lambda _: self._complete_and_tell(wave)
        wave.dropped = not self._admit(wave)
        if wave.dropped:
            return
        try:
            self._fill(wave)
            self._state.device.submit(wave.batch)
        except BlockKVError as error:
            wave.refusal = error
            if self._then is not None:
                self._complete_and_tell(wave)
        except BaseException as error:
            # No memory. Nothing is in flight; what the wave holds is given back, as for a refused one.
            wave.refusal = BlockKVError(f"the requests could not be made: {error!r}")
            raise
        if len(self._in_flight) >= WAVES_IN_FLIGHT:
            self._finish()

    def _admit(self, wave: AnyWave) -> bool:
        """Whether a wave may go to the device; may wait until it may."""
        return True

    def _finish(self) -> None:
        wave = self._in_flight.popleft()
        if wave.refusal is None and not wave.dropped:
            self._state.device.wait(wave.batch)
        self._complete(wave)

    def _complete_and_tell(self, wave: AnyWave) -> None:
        assert self._then is not None
        problem: BaseException | None = None
        try:
            self._complete(wave)
        except BaseException as error:
            problem = error
        self._then(problem)
