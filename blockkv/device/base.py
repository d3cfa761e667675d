"""The device protocol: what the store asks of anything that holds bytes.

A `Batch` is a set of transfers handed over in one call. A transfer moves one contiguous range of a
chunk's payload between memory segments and device extents and computes its leaf checksums. The store
builds batches; a `Device` carries them out. Two implementations exist: the native engine on a real
namespace or file, and the simulated device with injected faults. The store cannot tell them apart.

Invariants of a transfer
  * segments cover exactly `payload_bytes`, in payload order;
  * extents cover exactly `payload_bytes` rounded up to `UNIT_BYTES`, in payload order; every extent
    starts and ends on a multiple of `UNIT_BYTES`;
  * a write zeroes the device bytes from the end of the payload to the end of the last extent;
  * leaf i is XXH3-64 (seed 0) of payload bytes [i * leaf_bytes, (i + 1) * leaf_bytes), the last one short;
    `leaf_bytes` 0 asks for no checksums;
  * memory must stay valid and, for writes, unchanged until the batch is done. The batch keeps what is
    in `keepalive` alive for that long.

Not here: comparing checksums with a record, retry policy, order of writes (`blockkv.store`).
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import mmap
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from blockkv.errors import DeviceError, DeviceLost, InvalidArgument, StoreClosed

UNIT_BYTES = 4096
"""Allocation unit and metadata page size. Every LBA size in use (512, 4096) divides it."""

TRANSFER_FIELDS = 6
"""64-bit words of one transfer in `Batch.transfers`; see `native/engine.h`, `struct bkv_transfer`."""


class Direction(enum.IntEnum):
    READ = 0
    WRITE = 1


class Priority(enum.IntEnum):
    """Classes of work, served in this order: a waiting load never queues behind stores.

    A device may let the later ones have a little before that, so that loads without end stop nobody.
    """

    LOAD = 0
    PRELOAD = 1
    STORE = 2


class Placement(enum.IntEnum):
    """How long what is written will live: a drive that is told keeps apart what does not die together."""

    DATA = 0
    METADATA = 1
    """Journal, checkpoints and superblocks: written over in place, again and again."""
    BRIEF = 2
    """Chunks that leave before others: with a time to live, or a priority below 0."""
    KEPT = 3
    """Chunks that leave after others: with a priority above 0."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device can do, as found by asking it (sysfs, statx), never guessed."""

    size_bytes: int
    lba_bytes: int
    """Logical block size: offsets and lengths are multiples of it."""
    memory_alignment_bytes: int
    """Direct I/O needs memory addresses to be multiples of this (statx stx_dio_mem_align)."""
    max_transfer_bytes: int
    """Largest request the device takes whole, at most 512 KiB: larger ones go to kernel worker threads."""
    volatile_write_cache: bool
    """True where a completed write may be lost at power failure until a flush completes."""
    fua: bool
    discard_granularity_bytes: int
    """0 where the device does not discard."""
    rotational: bool = False
    read_only: bool = False
    """Whether the device, or the file for this user, cannot be written to, however it was opened."""


class Batch:
    """Transfers to carry out in one call. Build with `add`, hand to `Device.submit`, once.

    After completion `results[i]` is 0 or a negative errno for transfer i, and `leaves(i)` its computed
    leaf checksums. Packed arrays rather than objects: the native engine reads them in place.
    """

    __slots__ = (
        "deadline_ns",
        "direction",
        "extents",
        "keepalive",
        "leaf_values",
        "native",
        "on_caller",
        "on_done",
        "placement",
        "priority",
        "segments",
        "transfers",
    )

    def __init__(self, direction: Direction, priority: Priority) -> None:
        self.direction = direction
        self.priority = priority
        self.transfers = array("Q")
        self.extents = array("Q")
        self.segments = array("Q")
        self.leaf_values = array("Q")
        self.keepalive: list[object] = []
        self.on_done: Callable[[Batch], None] | None = None
        """Called once, on the device's completion thread, after the batch is done. Must not block."""
        self.deadline_ns = 0
        """`time.monotonic_ns` after which nothing more of it is handed to the device: what was not ends with
        ETIME. 0 for never."""
        self.on_caller = False
        """Whether the thread that calls `submit` and `wait` may carry it out there: it is short, waited for
        soon, and meanwhile that thread does not wait for others that use the device."""
        self.placement = Placement.DATA
        """Of a write. Devices that cannot place ignore it."""
        self.native: object = None
        """The device's own state for this batch while it is in flight."""

    def __len__(self) -> int:
        return len(self.transfers) // TRANSFER_FIELDS

    def add(
        self,
        payload_bytes: int,
        extents: Iterable[tuple[int, int]],
        segments: Iterable[tuple[int, int]],
        leaf_bytes: int = 0,
    ) -> int:
        """Add one transfer and return its position.

        `extents` are (device offset, bytes); `segments` are (memory address, bytes).
        """
        # This runs once a chunk of a put: every line counts.
        transfers, all_extents, all_segments = self.transfers, self.extents, self.segments
        first_extent, first_segment = len(all_extents) // 2, len(all_segments) // 2
        for pair in extents:
            all_extents.extend(pair)
        for pair in segments:
            all_segments.extend(pair)
        first_leaf = len(self.leaf_values)
        leaf_count = -(-payload_bytes // leaf_bytes) if leaf_bytes else 0
        if leaf_count:
            self.leaf_values.frombytes(bytes(8 * leaf_count))
        position = len(transfers) // TRANSFER_FIELDS
        transfers.extend(
            (
                payload_bytes,
                first_extent | (len(all_extents) // 2 - first_extent) << 32,
                first_segment | (len(all_segments) // 2 - first_segment) << 32,
                first_leaf | leaf_count << 32,
                leaf_bytes,
                0,  # result (low 32 bits, two's complement), then flags: zero
            )
        )
        return position

    def result(self, position: int) -> int:
        """0, or the negative errno transfer `position` ended with. Valid once the batch is done."""
        value = self.transfers[position * TRANSFER_FIELDS + 5] & 0xFFFFFFFF
        return value - (1 << 32) if value & 0x80000000 else value

    def failed(self) -> list[tuple[int, int]]:
        """(position, negative errno) of every transfer that did not succeed. Valid once the batch is done."""
        if not any(self.transfers[TRANSFER_FIELDS - 1 :: TRANSFER_FIELDS]):
            return []
        codes = [(position, self.result(position)) for position in range(len(self))]
        return [(position, code) for position, code in codes if code]

    def set_result(self, position: int, value: int) -> None:
        """For devices only: record the outcome of one transfer."""
        self.transfers[position * TRANSFER_FIELDS + 5] = value & 0xFFFFFFFF

    def leaves(self, position: int) -> bytes:
        """The computed leaf checksums of transfer `position`, 8 little-endian bytes each."""
        packed = self.transfers[position * TRANSFER_FIELDS + 3]
        first, count = packed & 0xFFFFFFFF, packed >> 32
        return self.leaf_values[first : first + count].tobytes()


class Device(ABC):
    """A namespace, partition, loop device or regular file, open and ours alone."""

    path: str
    limits: Limits
    cipher_key: bytes = b""
    """What `encrypt` was given: whoever else uses the device needs it. Empty where nothing is encrypted."""

    @property
    @abstractmethod
    def engine_name(self) -> str:
        """One of "io_uring", "threads", "passthrough", "simulated"."""

    @property
    @abstractmethod
    def engine_reason(self) -> str:
        """Why this engine was chosen, for `store.info()`."""

    def placement(self) -> dict[str, Any]:
        """Where what is written goes on the drive, for `store.info()`: see `blockkv.device.placement`."""
        return {"on": False, "reason": "the device has no placement", "handles": []}

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Start carrying out `batch`. Returns at once; never raises for an I/O error (see `Batch.result`).

        With `batch.on_done` set, completion is announced by calling it on the device's completion
        thread; without it the submitter must call `wait`, exactly once.
        """

    @abstractmethod
    def wait(self, batch: Batch) -> None:
        """Return when every transfer of `batch` is done. Releases the GIL; not interruptible, because
        memory the device may still write to must not be given back.
        """

    @abstractmethod
    def flush(self) -> None:
        """Make every write that completed before this call durable.

        Raises DeviceError. A failed flush is never retried: the kernel may have dropped the writes.
        """

    @abstractmethod
    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        """Tell the device the range holds nothing of value. A no-op without discard support.

        Raises DeviceError. What a later read returns is unspecified; discard is not erasure.
        """

    @abstractmethod
    def register(self, address: int, length_bytes: int) -> int:
        """Pin a memory range so that transfers inside it skip per-request page lookups.

        Returns a handle for `unregister`, or -1 where registration is not available (the transfers
        still work). Raises DeviceError when the kernel refuses, naming the limit (RLIMIT_MEMLOCK).
        """

    @abstractmethod
    def unregister(self, handle: int) -> None:
        """Undo `register`. The range must not be in flight."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Counters of the engine since open, e.g. `device_read_bytes`, `bounced_bytes`, `ring_enters`."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight, then release everything. Idempotent."""

    def encrypt(self, cipher_key: bytes, from_bytes: int, to_bytes: int) -> None:
        """From here on the units in [from, to) are encrypted with AES-256-XTS: `native/cipher.h`.

        Whoever has opened the device calls it, before anybody else uses it; again to replace the key.
        `cipher_key` is 64 bytes. Raises DeviceError where AES cannot be had, InvalidArgument.
        """
        raise InvalidArgument(f"{self.path} cannot be encrypted")

    def open_reader(self) -> int:
        """A descriptor of what this is on, for others, who close it: open for reading alone, with O_DIRECT.

        Raises InvalidArgument where there is none, DeviceError where it cannot be had.
        """
        raise InvalidArgument(f"{self.path} is no device that others could read")

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Read metadata: whole units. Raises DeviceError."""
        target = mmap.mmap(-1, length_bytes)
        self._run_one(Direction.READ, offset_bytes, target)
        return target[:]

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Write metadata: whole units. Durable only after `flush`. Raises DeviceError."""
        source = mmap.mmap(-1, len(data))
        source[:] = data
        self._run_one(Direction.WRITE, offset_bytes, source)

    def _run_one(self, direction: Direction, offset_bytes: int, memory: mmap.mmap) -> None:
        """Move metadata to or from whole pages of memory: aligned, so that nothing is copied on the way."""
        length_bytes = len(memory)
        view = ctypes.c_char.from_buffer(memory)
        batch = Batch(direction, Priority.LOAD)
        batch.placement = Placement.METADATA
        batch.on_caller = True
        batch.keepalive.append(view)
        batch.add(length_bytes, [(offset_bytes, length_bytes)], [(ctypes.addressof(view), length_bytes)])
        self.submit(batch)
        self.wait(batch)
        code = batch.result(0)
        if code == -errno.ESHUTDOWN:
            raise StoreClosed(f"{self.path} is closed")
        if code:
            what = f"{direction.name.lower()} of {length_bytes} bytes at {offset_bytes}"
            raise device_error(self.path, what, code)


def device_error(path: str, what: str, code: int) -> DeviceError:
    """The exception for a negative errno. A namespace that went away answers ENODEV or ENXIO."""
    kind = DeviceLost if -code in (errno.ENODEV, errno.ENXIO) else DeviceError
    return kind(f"{path}: {what} failed: {os.strerror(-code)} (errno {-code})", -code)


def opened_for_writing(descriptor: int) -> bool:
    """Whether an open file takes writes."""
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
