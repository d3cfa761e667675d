"""A device in memory that fails the way real ones do, with one seed fixing everything.

What it models
  * A volatile write cache. A completed write is visible at once and durable only after a flush that was
    submitted after the write completed. Until then every unflushed tear unit (`tear_bytes`, 512 by
    default) keeps all the versions it had since the last covering flush, and a power cut keeps any one
    of them, chosen separately for each tear unit: lost, reordered and torn writes in one rule.
  * Writes in flight. The requests of a batch that has not completed may have landed in any part; no
    flush covers them.
  * Power cuts and process kills. `crash_clone` makes an independent device holding one state such an
    event could leave behind, from a device that keeps running. After a kill the cache survives, still
    unflushed: a later power cut can lose what the killed process wrote.
  * Faults of a `FaultPlan`: errors, short, torn, lost and misdirected requests, bit rot, flushes that
    lie or fail, latency, and a stop at operation N.
  * Discard: an unordered write of zeros, of garbage, or of nothing.

An operation is one contiguous request (one extent of one transfer), one flush or one discard; operations
are numbered from 0 in the order in which the device carries them out.

When completion is announced
  * by default: `submit` carries the whole batch out and calls `on_done` before it returns. Deterministic,
    no threads; the submitter must not hold a lock that its `on_done` takes, unless it is reentrant.
  * `deferred=True`: a batch stays in flight until `wait(batch)` or `complete()` is called; its requests
    are then carried out in an order drawn from the seed.
  * `threads=True`: a daemon thread does what `complete()` does and calls `on_done`; `wait` sleeps.

Not here: what a store should make of any of this.
"""

from __future__ import annotations

import ctypes
import enum
import errno as errnos
import random
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from blockkv.device.base import TRANSFER_FIELDS, UNIT_BYTES, Batch, Device, Direction, Limits, device_error
from blockkv.errors import DeviceError, DeviceReadOnly, DeviceTooSmall, InvalidArgument, StoreClosed

if TYPE_CHECKING:
    from blockkv.device.unit_cipher import UnitCipher

__all__ = [
    "Crash",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "Operation",
    "OperationKind",
    "SimulatedDevice",
    "mixtures",
]

_ZERO_UNIT = bytes(UNIT_BYTES)
_LOG_OPERATIONS = 65536

Versions = list[tuple[int, bytes]]
"""Contents a unit had since the last covering flush: (number of the operation, 4096 bytes), oldest first."""


class OperationKind(enum.Enum):
    READ = "R"
    WRITE = "W"
    FLUSH = "F"
    DISCARD = "D"


class Crash(enum.Enum):
    """How the machine stopped."""

    POWER_CUT = "power cut"
    """The cache is gone: every unflushed tear unit keeps any one of its versions."""
    PROCESS_KILL = "process kill"
    """Completed writes stay, in the cache; those in flight landed in any part."""


class FaultKind(enum.Enum):
    ERROR = "error"
    """The operation fails with `errno`. A failed write may have landed in any part; the writes a failed
    flush should have covered are not covered by a later one (the kernel reports such a loss once), and
    after a process kill each has landed or not."""
    SHORT = "short"
    """The first `done_bytes` of a request are carried out, then the device stops."""
    TORN = "torn"
    """A write reports success; each of its tear units landed or did not."""
    LOST = "lost"
    """A write reports success and changes nothing."""
    MISDIRECTED = "misdirected"
    """A read or write reports success, but was carried out at `target_offset_bytes` (drawn if None)."""
    ROT = "rot"
    """Just before the operation, `bit_count` bits at rest flip inside `rot_offset_bytes` + `rot_length_bytes`
    (inside the operation's own range if None)."""
    LYING_FLUSH = "lying flush"
    """A flush reports success and makes nothing durable; an honest one later does."""
    LATENCY = "latency"
    """The operation takes `latency_us` longer, then proceeds."""
    STOP = "stop"
    """The device stops during the operation: what is in flight landed in any part, everything from here
    on fails with ENODEV."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule: which operations, how often, and what happens to them.

    An operation matches when it satisfies every condition that is set: its number is `operation`, its
    kind is `on`, its range overlaps `within` (offset, bytes), and the dice say so (`probability`).
    Of the matches, the first `skip_count` pass unharmed; after `fire_count` hits (None: no limit) the
    rule is spent.
    """

    kind: FaultKind
    operation: int | None = None
    on: OperationKind | None = None
    within: tuple[int, int] | None = None
    probability: float = 1.0
    skip_count: int = 0
    fire_count: int | None = 1
    errno: int = errnos.EIO
    done_bytes: int = 0
    target_offset_bytes: int | None = None
    rot_offset_bytes: int | None = None
    rot_length_bytes: int | None = None
    bit_count: int = 1
    latency_us: int = 0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Everything that will go wrong with one device. The seed fixes every choice a fault leaves open."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @classmethod
    def fail(cls, operation: int, errno: int = errnos.EIO, seed: int = 0) -> FaultPlan:
        """Operation number `operation`, whatever it is, fails with `errno`."""
        return cls((Fault(FaultKind.ERROR, operation=operation, errno=errno),), seed)

    @classmethod
    def stop(cls, operation: int, seed: int = 0) -> FaultPlan:
        """The device stops during operation number `operation`."""
        return cls((Fault(FaultKind.STOP, operation=operation),), seed)

    @classmethod
    def lying(cls, probability: float = 1.0, seed: int = 0) -> FaultPlan:
        """Flushes report success and, with `probability` each, make nothing durable."""
        return cls((Fault(FaultKind.LYING_FLUSH, probability=probability, fire_count=None),), seed)


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the log. `outcome` is "" for plain success, an errno name, or the name of a fault."""

    sequence: int
    kind: OperationKind
    offset_bytes: int
    length_bytes: int
    outcome: str = ""

    def __str__(self) -> str:
        where = "" if self.kind is OperationKind.FLUSH else f" {self.offset_bytes:#x}+{self.length_bytes}"
        return f"{self.sequence}{self.kind.value}{where}{'!' + self.outcome if self.outcome else ''}"


@dataclass(slots=True)
class _Request:
    """One extent of one transfer while it is in flight."""

    position: int
    offset_bytes: int
    length_bytes: int
    data: bytes
    payload_offset_bytes: int

    def units(self) -> Iterator[tuple[int, bytes]]:
        """The 4 KiB units a write changes: (unit number, new content). Nothing for a read."""
        first = self.offset_bytes // UNIT_BYTES
        if len(self.data) == UNIT_BYTES:
            yield first, self.data
            return
        for index in range(len(self.data) // UNIT_BYTES):
            yield first + index, self.data[index * UNIT_BYTES : (index + 1) * UNIT_BYTES]


class _InFlight:
    """The device's side of a submitted batch."""

    __slots__ = ("batch", "done", "requests")

    def __init__(self, batch: Batch, requests: list[_Request], threaded: bool) -> None:
        self.batch = batch
        self.requests = requests
        self.done = threading.Event() if threaded else None


def mixtures(versions: list[bytes], tear_bytes: int = 512) -> Iterator[bytes]:
    """Every page a crash can leave of one that had `versions`: len(versions) ** (page / tear_bytes) of them.

    Two versions of a 4 KiB page torn at 512 bytes give 256, the first being `versions[0]` and the last
    `versions[-1]`, whole.
    """
    length_bytes = len(versions[0])
    tear_count = length_bytes // tear_bytes
    for code in range(len(versions) ** tear_count):
        pieces = []
        for index in range(tear_count):
            code, choice = divmod(code, len(versions))
            pieces.append(versions[choice][index * tear_bytes : (index + 1) * tear_bytes])
        yield b"".join(pieces)


_APPLIES_TO = {
    FaultKind.ERROR: frozenset(OperationKind),
    FaultKind.SHORT: frozenset((OperationKind.READ, OperationKind.WRITE)),
    FaultKind.TORN: frozenset((OperationKind.WRITE,)),
    FaultKind.LOST: frozenset((OperationKind.WRITE,)),
    FaultKind.MISDIRECTED: frozenset((OperationKind.READ, OperationKind.WRITE)),
    FaultKind.ROT: frozenset(OperationKind),
    FaultKind.LYING_FLUSH: frozenset((OperationKind.FLUSH,)),
    FaultKind.LATENCY: frozenset(OperationKind),
    FaultKind.STOP: frozenset(OperationKind),
}


class _Temper:
    """How one crash treats the cache.

    Independent fair dice alone would leave almost every unit torn and almost never a whole page beside a
    lost one, so each crash first draws its temper: all new, all old, a cut in time, or a mixture whose
    odds are drawn too. Any combination of versions stays possible in a mixture.
    """

    __slots__ = ("_cut", "_garbage", "_keep", "_rng", "_tear_bytes", "_torn")

    def __init__(
        self, rng: random.Random, tear_bytes: int, garbage: float, oldest_operation: int, next_operation: int
    ) -> None:
        self._rng = rng
        self._tear_bytes = tear_bytes
        self._garbage = garbage
        self._cut: int | None = None
        self._torn = 0.0
        self._keep = 0.0
        style = rng.random()
        if style < 0.06:
            self._keep = 1.0
        elif style < 0.12:
            self._keep = 0.0
        elif style < 0.3:
            self._cut = rng.randrange(oldest_operation, next_operation + 1)
        else:
            self._keep = rng.random()
            self._torn = rng.choice((0.05, 0.2, 0.5, 1.0))

    def mix(self, durable: bytes, versions: Versions) -> bytes:
        """One content `durable`, later overwritten by `versions`, can have after the crash."""
        rng = self._rng
        if self._cut is not None:
            content = durable
            for sequence, version in versions:
                if sequence < self._cut:
                    content = version
                elif sequence == self._cut:
                    return self._tear([content, version])
            return content
        if self._torn and rng.random() < self._torn:
            return self._tear([durable, *[version for _, version in versions]])
        if rng.random() < self._keep:
            return versions[-1][1]
        choice = rng.randrange(len(versions))
        return versions[choice - 1][1] if choice else durable

    def _tear(self, contents: list[bytes]) -> bytes:
        rng, tear_bytes = self._rng, self._tear_bytes
        count = UNIT_BYTES // tear_bytes
        style = rng.random()
        if style < 0.4:
            choices = [rng.randrange(len(contents)) for _ in range(count)]
        else:
            first, second = rng.randrange(len(contents)), rng.randrange(len(contents))
            if style < 0.7:  # all but one tear unit: what completes a page torn in an earlier crash
                choices = [first] * count
                choices[rng.randrange(count)] = second
            else:
                split = rng.randrange(count + 1)
                choices = [first] * split + [second] * (count - split)
        return b"".join(
            [
                rng.randbytes(tear_bytes)
                if self._garbage and rng.random() < self._garbage
                else contents[choice][index * tear_bytes : (index + 1) * tear_bytes]
                for index, choice in enumerate(choices)
            ]
        )


def _pairs(words: array[int], packed: int) -> Iterator[tuple[int, int]]:
    """The (first, second) pairs a transfer names by `first index | count << 32`."""
    first, count = packed & 0xFFFFFFFF, packed >> 32
    for index in range(first, first + count):
        yield words[2 * index], words[2 * index + 1]


class SimulatedDevice(Device):
    """A device in memory with a volatile write cache and injected faults.

    `size_bytes` is a multiple of 4096; unwritten space reads as zeros and costs nothing. `lba_bytes` is
    512 or 4096. `tear_bytes` (512 to 4096) is the grain at which an unflushed write can be torn.
    `strict` asserts the rules only a single-threaded submitter can keep: no flush while a write is in
    flight, no request that overlaps a write in flight, nothing in flight at close.
    `sleep` is called with seconds to carry out latency faults.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        lba_bytes: int = 4096,
        tear_bytes: int = 512,
        volatile_write_cache: bool = True,
        discard_granularity_bytes: int = UNIT_BYTES,
        max_transfer_bytes: int = 512 * 1024,
        memory_alignment_bytes: int = 4,
        read_only: bool = False,
        seed: int = 0,
        plan: FaultPlan | None = None,
        deferred: bool = False,
        threads: bool = False,
        strict: bool = False,
        path: str = "simulated",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if size_bytes <= 0 or size_bytes % UNIT_BYTES:
            raise InvalidArgument(f"size_bytes is {size_bytes}; use a positive multiple of {UNIT_BYTES}")
        if lba_bytes not in (512, 4096):
            raise InvalidArgument(f"lba_bytes is {lba_bytes}; it must be 512 or 4096")
        if tear_bytes < 512 or UNIT_BYTES % tear_bytes:
            raise InvalidArgument(f"tear_bytes is {tear_bytes}; it must be 512, 1024, 2048 or 4096")
        if discard_granularity_bytes % UNIT_BYTES:
            raise InvalidArgument(
                f"discard_granularity_bytes is {discard_granularity_bytes}; use 0 or a multiple of 4096"
            )
        self.path = path
        self.limits = Limits(
            size_bytes=size_bytes,
            lba_bytes=lba_bytes,
            memory_alignment_bytes=memory_alignment_bytes,
            max_transfer_bytes=max_transfer_bytes,
            volatile_write_cache=volatile_write_cache,
            fua=False,
            discard_granularity_bytes=discard_granularity_bytes,
            read_only=read_only,
        )
        self.seed = seed
        self.tear_bytes = tear_bytes
        self.deferred = deferred or threads
        self.threads = threads
        self.strict = strict
        self._sleep = sleep
        self.before_operation: Callable[[OperationKind], None] | None = None
        """Called before every operation, with the device as a crash at this point would find it: take
        `crash_clone`s here. Not inherited by clones."""
        self._durable: dict[int, bytes] = {}  # unit number -> 4096 bytes; absent: zeros
        self._current: dict[int, bytes] = {}  # what a read sees
        self._unflushed: dict[int, Versions] = {}  # the next flush covers these
        self._uncoverable: dict[int, Versions] = {}  # a flush that should have covered these failed
        self._start()
        self.set_plan(plan)

    def _start(self) -> None:
        self._rng = random.Random(self.seed)  # noqa: S311  dice, not secrets
        self._in_flight: list[_InFlight] = []
        self._adrift: dict[int, Versions] = {}  # writes a stop caught in flight: they landed in any part
        self._stopped = False
        self._closed = False
        self._registered: dict[int, tuple[int, int]] = {}
        self._next_handle = 0
        self._cipher: UnitCipher | None = None  # of whoever has opened it: clones are opened anew
        self._next_operation = 0
        self._log: deque[Operation] = deque(maxlen=_LOG_OPERATIONS)
        self._counters = dict.fromkeys(
            (
                "device_read_bytes",
                "device_write_bytes",
                "device_read_count",
                "device_write_count",
                "device_flush_count",
                "device_discard_count",
                "device_discard_bytes",
                "faults_injected",
            ),
            0,
        )
        # Reentrant: `on_done` runs inside `submit` and may submit again.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    # --- the device protocol ---

    @property
    def engine_name(self) -> str:
        return "simulated"

    @property
    def engine_reason(self) -> str:
        return f"simulated device in memory, seed {self.seed}"

    def submit(self, batch: Batch) -> None:
        with self._lock:
            self._check_open()
            if batch.native is not None:
                raise InvalidArgument(f"{self.path}: a batch can be submitted once")
            if batch.direction == Direction.WRITE and self.limits.read_only:
                raise DeviceReadOnly(f"{self.path} is read-only", errnos.EROFS)
            flight = _InFlight(batch, self._requests(batch), self.threads)
            batch.native = flight
            if self.strict:
                self._check_overlap(flight)
            self._in_flight.append(flight)
            if self.threads:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="blockkv-simulated", daemon=True)
                    self._thread.start()
                self._work.notify_all()
                return
            if self.deferred:
                return
            self._carry_out(flight)
        self._announce(flight)

    def wait(self, batch: Batch) -> None:
        flight = batch.native
        if not isinstance(flight, _InFlight) or batch.on_done is not None:
            raise InvalidArgument(f"{self.path}: wait() is for batches that were submitted without on_done")
        if flight.done is not None:
            flight.done.wait()
        else:
            with self._lock:
                pending = flight in self._in_flight
                if pending:
                    self._carry_out(flight)
            if pending:
                self._announce(flight)

    def complete(self, count: int | None = None) -> int:
        """Deferred mode: complete up to `count` batches in flight (None: all), in an order from the seed.

        Returns how many were completed; their `on_done` runs here.
        """
        completed = 0
        while count is None or completed < count:
            with self._lock:
                if not self._in_flight:
                    break
                flight = self._in_flight[self._rng.randrange(len(self._in_flight))]
                self._carry_out(flight)
            self._announce(flight)
            completed += 1
        return completed

    def flush(self) -> None:
        with self._lock:
            self._check_open()
            if self.strict:
                writes = sum(flight.batch.direction == Direction.WRITE for flight in self._in_flight)
                assert not writes, f"flush with {writes} write batches in flight, which it does not cover"
            fault = self._begin(OperationKind.FLUSH, 0, 0)
            if self._stopped:
                self._record(OperationKind.FLUSH, 0, 0, "ENODEV")
                raise self._error("flush", errnos.ENODEV)
            self._counters["device_flush_count"] += 1
            if fault is not None and fault.kind is FaultKind.LYING_FLUSH:
                self._record(OperationKind.FLUSH, 0, 0, "lied")
                return
            if fault is not None and fault.kind is FaultKind.ERROR:
                for unit, versions in self._unflushed.items():
                    self._uncoverable.setdefault(unit, []).extend(versions)
                self._unflushed.clear()
                self._record(OperationKind.FLUSH, 0, 0, errnos.errorcode[fault.errno])
                raise self._error("flush", fault.errno)
            durable = self._durable
            for unit, versions in self._unflushed.items():
                durable[unit] = versions[-1][1]
                self._uncoverable.pop(unit, None)
            self._unflushed.clear()
            self._record(OperationKind.FLUSH, 0, 0)

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        with self._lock:
            self._check_open()
            granularity = self.limits.discard_granularity_bytes
            if not granularity:
                return
            if self.limits.read_only:
                raise self._error("discard", errnos.EROFS)
            if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > self.limits.size_bytes:
                raise self._error("discard", errnos.EINVAL)
            fault = self._begin(OperationKind.DISCARD, offset_bytes, length_bytes)
            sequence = self._next_operation
            first = -(-offset_bytes // granularity) * granularity // UNIT_BYTES
            last = (offset_bytes + length_bytes) // granularity * granularity // UNIT_BYTES
            if self._stopped:
                if fault is not None:
                    for unit in range(first, last):
                        self._adrift.setdefault(unit, []).append((sequence, _ZERO_UNIT))
                self._record(OperationKind.DISCARD, offset_bytes, length_bytes, "ENODEV")
                raise self._error("discard", errnos.ENODEV)
            if fault is not None and fault.kind is FaultKind.ERROR:
                self._record(OperationKind.DISCARD, offset_bytes, length_bytes, errnos.errorcode[fault.errno])
                raise self._error("discard", fault.errno)
            self._counters["device_discard_count"] += 1
            self._counters["device_discard_bytes"] += length_bytes
            for unit in range(first, last):
                dice = self._rng.random()
                if dice < 0.6:
                    self._put_unit(unit, _ZERO_UNIT, sequence)
                elif dice < 0.8:
                    self._put_unit(unit, self._rng.randbytes(UNIT_BYTES), sequence)
            self._record(OperationKind.DISCARD, offset_bytes, length_bytes)

    def register(self, address: int, length_bytes: int) -> int:
        with self._lock:
            handle = self._next_handle
            self._next_handle += 1
            self._registered[handle] = (address, length_bytes)
            return handle

    def encrypt(self, cipher_key: bytes, from_bytes: int, to_bytes: int) -> None:
        from blockkv.device.unit_cipher import UnitCipher

        with self._lock:
            self._cipher = UnitCipher(cipher_key, from_bytes, to_bytes)
            self.cipher_key = cipher_key

    def unregister(self, handle: int) -> None:
        with self._lock:
            if handle != -1 and self._registered.pop(handle, None) is None:
                raise InvalidArgument(f"{self.path}: unregister({handle}): not a registered range")

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            assert not (self.strict and self._in_flight), f"{len(self._in_flight)} batches in flight at close"
        if self.threads:
            with self._lock:
                self._closed = True
                self._work.notify_all()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
        else:
            self.complete()
            self._closed = True

    # --- crashes ---

    @property
    def stopped(self) -> bool:
        """True once a STOP or SHORT fault hit: every later operation fails with ENODEV."""
        return self._stopped

    def stop(self) -> None:
        """Stop now: what is in flight landed in any part, later operations fail with ENODEV."""
        with self._lock:
            self._stopped = True

    def crash_clone(
        self,
        rng: random.Random,
        crash: Crash = Crash.POWER_CUT,
        *,
        garbage: float = 0.0,
        plan: FaultPlan | None = None,
    ) -> SimulatedDevice:
        """A new device holding one state that `crash`, right now, could leave. This one is not disturbed.

        `garbage` is the probability that a torn tear unit holds random bytes instead of any version.
        The clone completes inline, carries `plan`, numbers its operations from 0 and takes its seed
        from `rng`. Costs a shallow copy of the unit table plus the unflushed units: tens of
        microseconds for a small store.
        """
        with self._lock:
            landing = {unit: list(versions) for unit, versions in self._adrift.items()}
            for flight in self._in_flight:
                for request in flight.requests:
                    for unit, content in request.units():
                        landing.setdefault(unit, []).append((self._next_operation, content))
            if crash is Crash.PROCESS_KILL:
                clone = self._sibling(rng, dict(self._durable), dict(self._current))
                # The clone numbers its operations from 0; what it inherits came before.
                now = self._next_operation + 1
                for unit, versions in self._unflushed.items():
                    clone._unflushed[unit] = [(sequence - now, content) for sequence, content in versions]
                temper = _Temper(rng, self.tear_bytes, garbage, now, now + 1)
                # What a failed flush lost shows once nobody remembers that it was ever written.
                for unit in [unit for unit in self._uncoverable if unit not in self._unflushed]:
                    old = self._durable.get(unit, _ZERO_UNIT)
                    clone._put_unit(unit, temper.mix(old, self._uncoverable[unit]), -1)
                for unit, versions in landing.items():
                    clone._put_unit(unit, temper.mix(self._current.get(unit, _ZERO_UNIT), versions), -1)
            else:
                image = dict(self._durable)
                history = {unit: list(versions) for unit, versions in self._uncoverable.items()}
                for source in (self._unflushed, landing):
                    for unit, versions in source.items():
                        history[unit] = history[unit] + versions if unit in history else versions
                oldest = min((versions[0][0] for versions in history.values()), default=0)
                temper = _Temper(rng, self.tear_bytes, garbage, oldest, self._next_operation)
                for unit, versions in history.items():
                    image[unit] = temper.mix(image.get(unit, _ZERO_UNIT), versions)
                clone = self._sibling(rng, image, dict(image))
        clone.set_plan(plan)
        return clone

    def clone(self, plan: FaultPlan | None = None) -> SimulatedDevice:
        """An exact, independent copy of what a read sees now, all of it durable."""
        with self._lock:
            copy = self._sibling(None, dict(self._current), dict(self._current))
        copy.set_plan(plan)
        return copy

    def _sibling(
        self, rng: random.Random | None, durable: dict[int, bytes], current: dict[int, bytes]
    ) -> SimulatedDevice:
        # Past __init__, which validates: hundreds of thousands of these are made in a run.
        other = SimulatedDevice.__new__(SimulatedDevice)
        other.path = self.path
        other.limits = self.limits
        other.seed = self.seed if rng is None else rng.getrandbits(32)
        other.tear_bytes = self.tear_bytes
        other.deferred = False
        other.threads = False
        other.strict = self.strict
        other._sleep = self._sleep
        other.before_operation = None
        other._durable = durable
        other._current = current
        other._unflushed = {}
        other._uncoverable = {}
        other._start()
        return other

    # --- inspection and damage at rest ---

    def set_plan(self, plan: FaultPlan | None) -> None:
        """Replace the faults still to come. Operation numbers in the plan count from the device's start."""
        with self._lock:
            self._faults = list(plan.faults) if plan is not None else []
            self._hits = [0] * len(self._faults)
            self._fault_rng = random.Random(plan.seed if plan is not None else 0)  # noqa: S311

    @property
    def operation_count(self) -> int:
        """Operations carried out so far; also the number the next one gets."""
        return self._next_operation

    @property
    def unflushed_units(self) -> int:
        """4 KiB units a power cut could still change."""
        with self._lock:
            return len(self._unflushed.keys() | self._uncoverable.keys())

    def operations(self) -> list[Operation]:
        """The log: the last 65,536 operations, oldest first."""
        with self._lock:
            return list(self._log)

    def timeline(self, last: int | None = None) -> str:
        """The log (its last `last` operations) on one line: `0R 0x0+4096 1W 0x100000+8192!torn 2F`."""
        operations = self.operations()
        return " ".join(map(str, operations if last is None else operations[len(operations) - last :]))

    def peek(self, offset_bytes: int, length_bytes: int) -> bytes:
        """What a read would return, without an operation and without faults. Any alignment."""
        with self._lock:
            first, last = offset_bytes // UNIT_BYTES, -(-(offset_bytes + length_bytes) // UNIT_BYTES)
            data = b"".join([self._current.get(unit, _ZERO_UNIT) for unit in range(first, last)])
        start = offset_bytes - first * UNIT_BYTES
        return data[start : start + length_bytes]

    def poke(self, offset_bytes: int, data: bytes) -> None:
        """Change the medium itself: durable at once, no operation, no faults. Any alignment."""
        with self._lock:
            self._check_range(offset_bytes, len(data))
            first, last = offset_bytes // UNIT_BYTES, -(-(offset_bytes + len(data)) // UNIT_BYTES)
            whole = bytearray(self.peek(first * UNIT_BYTES, (last - first) * UNIT_BYTES))
            start = offset_bytes - first * UNIT_BYTES
            whole[start : start + len(data)] = data
            for index, unit in enumerate(range(first, last)):
                content = bytes(whole[index * UNIT_BYTES : (index + 1) * UNIT_BYTES])
                self._durable[unit] = self._current[unit] = content
                self._unflushed.pop(unit, None)
                self._uncoverable.pop(unit, None)

    def flip_bit(self, offset_bytes: int, bit_index: int) -> None:
        """Bit rot: invert bit `bit_index` (0 the least significant) of one byte, in every version of it."""
        with self._lock:
            self._check_range(offset_bytes, 1)
            unit, at = divmod(offset_bytes, UNIT_BYTES)

            def flipped(content: bytes) -> bytes:
                changed = bytearray(content)
                changed[at] ^= 1 << bit_index
                return bytes(changed)

            self._durable[unit] = flipped(self._durable.get(unit, _ZERO_UNIT))
            self._current[unit] = flipped(self._current.get(unit, _ZERO_UNIT))
            for source in (self._unflushed, self._uncoverable):
                if unit in source:
                    source[unit] = [(sequence, flipped(content)) for sequence, content in source[unit]]

    def written_units(self) -> list[int]:
        """Numbers of the 4 KiB units that do not read as zeros, ascending."""
        with self._lock:
            return sorted(unit for unit, content in self._current.items() if content != _ZERO_UNIT)

    # --- carrying out ---

    def _error(self, verb: str, errno: int) -> DeviceError:
        return device_error(self.path, verb, -errno)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.path} is closed")

    def _check_range(self, offset_bytes: int, length_bytes: int) -> None:
        if offset_bytes < 0 or offset_bytes + length_bytes > self.limits.size_bytes:
            raise DeviceTooSmall(
                f"{self.path}: bytes {offset_bytes} to {offset_bytes + length_bytes} lie outside its "
                f"{self.limits.size_bytes} bytes"
            )

    def _requests(self, batch: Batch) -> list[_Request]:
        """The requests of a batch, one per extent; for writes with the bytes as they are now."""
        requests = []
        for position in range(len(batch)):
            base = position * TRANSFER_FIELDS
            payload_bytes, packed_extents, packed_segments = batch.transfers[base : base + 3]
            extents = list(_pairs(batch.extents, packed_extents))
            segments = list(_pairs(batch.segments, packed_segments))
            total_bytes = sum(length for _, length in extents)
            if sum(length for _, length in segments) != payload_bytes:
                raise InvalidArgument(
                    f"transfer {position}: segments hold {sum(length for _, length in segments)} bytes, "
                    f"the payload {payload_bytes}"
                )
            if total_bytes != -(-payload_bytes // UNIT_BYTES) * UNIT_BYTES:
                raise InvalidArgument(
                    f"transfer {position}: extents hold {total_bytes} bytes, the payload of {payload_bytes} "
                    f"rounded up to {UNIT_BYTES} does not"
                )
            data = b""
            if batch.direction == Direction.WRITE:
                data = b"".join([ctypes.string_at(address, length) for address, length in segments])
                self._store_leaves(batch, position, data)
                data += bytes(total_bytes - payload_bytes)
            done_bytes = 0
            for offset_bytes, length_bytes in extents:
                if offset_bytes % UNIT_BYTES or length_bytes % UNIT_BYTES or not length_bytes:
                    raise InvalidArgument(
                        f"transfer {position}: extent {offset_bytes}+{length_bytes} is not whole units"
                    )
                piece = data[done_bytes : done_bytes + length_bytes] if data else b""
                if self._cipher:
                    piece = self._cipher.encrypt(offset_bytes, piece)
                requests.append(_Request(position, offset_bytes, length_bytes, piece, done_bytes))
                done_bytes += length_bytes
        return requests

    def _check_overlap(self, flight: _InFlight) -> None:
        for other in self._in_flight:
            if Direction.WRITE not in (flight.batch.direction, other.batch.direction):
                continue
            for mine in flight.requests:
                for theirs in other.requests:
                    assert (
                        mine.offset_bytes + mine.length_bytes <= theirs.offset_bytes
                        or theirs.offset_bytes + theirs.length_bytes <= mine.offset_bytes
                    ), f"{mine.offset_bytes}+{mine.length_bytes} overlaps a request in flight"

    def _carry_out(self, flight: _InFlight) -> None:
        """Carry out every request, lock held."""
        batch = flight.batch
        reading = batch.direction == Direction.READ
        received: dict[int, list[tuple[int, bytes]]] = {}
        waiting = list(flight.requests)
        if self.deferred:
            self._rng.shuffle(waiting)
        results = [0] * len(batch)
        for request in waiting:
            if batch.deadline_ns and time.monotonic_ns() >= batch.deadline_ns:
                code = -errnos.ETIME
            elif reading:
                code, data = self._read_request(request)
                if self._cipher:
                    data = self._cipher.decrypt(request.offset_bytes, data)
                received.setdefault(request.position, []).append((request.payload_offset_bytes, data))
            else:
                code = self._write_request(request)
            if code and not results[request.position]:
                results[request.position] = code
        for position, code in enumerate(results):
            if reading and not code:
                self._deliver(batch, position, received.get(position, []))
            batch.set_result(position, code)
        self._in_flight.remove(flight)

    def _read_request(self, request: _Request) -> tuple[int, bytes]:
        offset_bytes, length_bytes = request.offset_bytes, request.length_bytes
        fault = self._begin(OperationKind.READ, offset_bytes, length_bytes)
        outcome = ""
        if self._stopped:
            self._record(OperationKind.READ, offset_bytes, length_bytes, "ENODEV")
            return -errnos.ENODEV, b""
        if offset_bytes + length_bytes > self.limits.size_bytes:
            self._record(OperationKind.READ, offset_bytes, length_bytes, "EIO")
            return -errnos.EIO, b""
        if fault is not None:
            if fault.kind is FaultKind.ERROR:
                self._record(OperationKind.READ, offset_bytes, length_bytes, errnos.errorcode[fault.errno])
                return -fault.errno, b""
            if fault.kind is FaultKind.MISDIRECTED:
                offset_bytes = self._target(fault, length_bytes)
                outcome = f"misdirected to {offset_bytes:#x}"
        self._counters["device_read_count"] += 1
        self._counters["device_read_bytes"] += length_bytes
        self._record(OperationKind.READ, request.offset_bytes, length_bytes, outcome)
        first = offset_bytes // UNIT_BYTES
        if length_bytes == UNIT_BYTES:
            return 0, self._current.get(first, _ZERO_UNIT)
        units = range(first, first + length_bytes // UNIT_BYTES)
        return 0, b"".join([self._current.get(unit, _ZERO_UNIT) for unit in units])

    def _write_request(self, request: _Request) -> int:
        offset_bytes, length_bytes = request.offset_bytes, request.length_bytes
        fault = self._begin(OperationKind.WRITE, offset_bytes, length_bytes)
        sequence = self._next_operation
        if self._stopped:
            if fault is not None and fault.kind is FaultKind.SHORT:
                self._put_prefix(request, fault.done_bytes, sequence)
            else:
                for unit, content in request.units():
                    self._adrift.setdefault(unit, []).append((sequence, content))
            self._record(OperationKind.WRITE, offset_bytes, length_bytes, "ENODEV")
            return -errnos.ENODEV
        if offset_bytes + length_bytes > self.limits.size_bytes:
            self._record(OperationKind.WRITE, offset_bytes, length_bytes, "ENOSPC")
            return -errnos.ENOSPC
        code, outcome, shift = 0, "", 0
        temper = None
        if fault is not None:
            if fault.kind is FaultKind.ERROR:
                code, outcome = -fault.errno, errnos.errorcode[fault.errno]
                temper = _Temper(self._rng, self.tear_bytes, 0.0, sequence, sequence + 1)
            elif fault.kind is FaultKind.TORN:
                outcome = "torn"
                temper = _Temper(self._rng, self.tear_bytes, 0.0, sequence, sequence + 1)
            elif fault.kind is FaultKind.MISDIRECTED:
                target_bytes = self._target(fault, length_bytes)
                shift = (target_bytes - offset_bytes) // UNIT_BYTES
                outcome = f"misdirected to {target_bytes:#x}"
            elif fault.kind is FaultKind.LOST:
                self._record(OperationKind.WRITE, offset_bytes, length_bytes, "lost")
                return 0
        for unit, content in request.units():
            if temper is not None:
                content = temper.mix(self._current.get(unit, _ZERO_UNIT), [(sequence, content)])
            self._put_unit(unit + shift, content, sequence)
        self._counters["device_write_count"] += 1
        self._counters["device_write_bytes"] += length_bytes
        self._record(OperationKind.WRITE, offset_bytes, length_bytes, outcome)
        return code

    def _put_prefix(self, request: _Request, done_bytes: int, sequence: int) -> None:
        for unit, content in request.units():
            length_bytes = min(done_bytes, UNIT_BYTES)
            if length_bytes <= 0:
                break
            old = self._current.get(unit, _ZERO_UNIT)
            self._put_unit(unit, content[:length_bytes] + old[length_bytes:], sequence)
            done_bytes -= UNIT_BYTES

    def _put_unit(self, unit: int, content: bytes, sequence: int) -> None:
        self._current[unit] = content
        if not self.limits.volatile_write_cache:
            self._durable[unit] = content
            return
        versions = self._unflushed.get(unit)
        if versions is None:
            self._unflushed[unit] = [(sequence, content)]
        else:
            versions.append((sequence, content))

    def _deliver(self, batch: Batch, position: int, received: list[tuple[int, bytes]]) -> None:
        base = position * TRANSFER_FIELDS
        payload_bytes = batch.transfers[base]
        received.sort()
        data = received[0][1] if len(received) == 1 else b"".join([piece for _, piece in received])
        done_bytes = 0
        for address, length_bytes in _pairs(batch.segments, batch.transfers[base + 2]):
            piece = data if len(data) == length_bytes else data[done_bytes : done_bytes + length_bytes]
            ctypes.memmove(address, piece, length_bytes)
            done_bytes += length_bytes
        self._store_leaves(batch, position, data[:payload_bytes])

    @staticmethod
    def _store_leaves(batch: Batch, position: int, payload: bytes) -> None:
        base = position * TRANSFER_FIELDS
        leaf_bytes = batch.transfers[base + 4]
        if leaf_bytes:
            first = batch.transfers[base + 3] & 0xFFFFFFFF
            for index, start in enumerate(range(0, len(payload), leaf_bytes)):
                leaf = payload[start : start + leaf_bytes]
                batch.leaf_values[first + index] = xxhash.xxh3_64_intdigest(leaf)

    def _announce(self, flight: _InFlight) -> None:
        # After the lock is released: `on_done` may take the store's locks.
        if flight.batch.on_done is not None:
            flight.batch.on_done(flight.batch)
        if flight.done is not None:
            flight.done.set()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._in_flight:
                    if self._closed:
                        return
                    self._work.wait()
                flight = self._in_flight[self._rng.randrange(len(self._in_flight))]
                self._carry_out(flight)
            self._announce(flight)

    # --- faults ---

    def _begin(self, kind: OperationKind, offset_bytes: int, length_bytes: int) -> Fault | None:
        """The fault, if any, that decides the outcome of the operation about to be carried out."""
        if self.before_operation is not None and not self._stopped:
            self.before_operation(kind)
        if not self._faults or self._stopped:
            return None
        decisive = None
        for index, fault in enumerate(self._faults):
            if fault.operation is not None and fault.operation != self._next_operation:
                continue
            if fault.on is not None and fault.on is not kind:
                continue
            if fault.within is not None:
                start, span = fault.within
                if offset_bytes + length_bytes <= start or start + span <= offset_bytes:
                    continue
            if kind not in _APPLIES_TO[fault.kind]:
                continue
            if fault.probability < 1.0 and self._fault_rng.random() >= fault.probability:
                continue
            self._hits[index] += 1
            hits = self._hits[index] - fault.skip_count
            if hits <= 0 or (fault.fire_count is not None and hits > fault.fire_count):
                continue
            self._counters["faults_injected"] += 1
            if fault.kind is FaultKind.LATENCY:
                self._sleep(fault.latency_us / 1e6)
            elif fault.kind is FaultKind.ROT:
                start = offset_bytes if fault.rot_offset_bytes is None else fault.rot_offset_bytes
                span = length_bytes if fault.rot_length_bytes is None else fault.rot_length_bytes
                for _ in range(fault.bit_count if span else 0):
                    self.flip_bit(start + self._fault_rng.randrange(span), self._fault_rng.randrange(8))
            else:
                if fault.kind in (FaultKind.STOP, FaultKind.SHORT):
                    self._stopped = True
                decisive = fault if decisive is None else decisive
        return decisive

    def _target(self, fault: Fault, length_bytes: int) -> int:
        if fault.target_offset_bytes is not None:
            return fault.target_offset_bytes
        last_unit = (self.limits.size_bytes - length_bytes) // UNIT_BYTES
        return self._fault_rng.randrange(last_unit + 1) * UNIT_BYTES

    def _record(self, kind: OperationKind, offset_bytes: int, length_bytes: int, outcome: str = "") -> None:
        self._log.append(Operation(self._next_operation, kind, offset_bytes, length_bytes, outcome))
        self._next_operation += 1
