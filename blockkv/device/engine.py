"""The native engine: `Device` on an already opened descriptor, through the C core in `native/`.

What this file adds to the C core: the choice of backend and the words for it, Python objects kept alive
while the device may still touch their memory, callbacks on one completion thread, exceptions, and safety
after fork.

Three backends carry out the same plan. io_uring is the fast one; where the kernel refuses it (sysctl
kernel.io_uring_disabled, a container's seccomp filter, a memlock limit) threads with preadv and pwritev do.
Passthrough sends NVMe commands through io_uring, past the block layer; it is never chosen, only asked for.

Not here: opening, probing and locking the device (`blockkv.device.namespace`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from blockkv import memory
from blockkv._native import ffi, lib
from blockkv.device import nvme_admin, passthrough
from blockkv.device.base import Batch, Device, Limits, Placement, device_error, opened_for_writing
from blockkv.device.placement import Places, find_places
from blockkv.errors import DeviceError, DeviceReadOnly, InvalidArgument, StoreClosed
from blockkv.logs import logger_for

__all__ = ["NativeDevice", "checksum_variant", "leaf_checksum", "leaf_checksums"]

EngineName = Literal["auto", "io_uring", "threads", "passthrough"]

DEFAULT_DEPTH = 256
"""Requests in flight. Tutti saw mass waits at depth 64; 256 of 256 KiB are 9 ms of a 7 GB/s drive."""
DEFAULT_STAGING_BYTES = 16 << 20
DEFAULT_MAX_SEGMENTS = 127
"""Scatter-gather segments of one NVMe request (drivers/nvme/host/pci.c: NVME_MAX_SEGS, less one)."""

_open_devices: weakref.WeakSet[NativeDevice] = weakref.WeakSet()


def leaf_checksum(data: Any) -> int:
    """XXH3-64 (seed 0) of a contiguous buffer."""
    view = ffi.from_buffer(data)
    return int(lib.bkv_checksum(view, len(view)))


def leaf_checksums(data: Any, leaf_bytes: int) -> bytes:
    """XXH3-64 of every `leaf_bytes` of a buffer, 8 little-endian bytes each, the last leaf short."""
    if leaf_bytes < 1:
        raise InvalidArgument(f"leaf_bytes is {leaf_bytes}; want at least 1")
    view = ffi.from_buffer(data)
    values = bytearray(8 * -(-len(view) // leaf_bytes))
    lib.bkv_checksum_leaves(view, len(view), leaf_bytes, ffi.from_buffer("uint64_t[]", values))
    return bytes(values)


def checksum_variant() -> str:
    """The instruction set the checksums use here: "avx512", "avx2" or "baseline"."""
    return _text(lib.bkv_checksum_variant())


class NativeDevice(Device):
    """A device carried by the C engine. Owns `fd` from construction on: `close` closes it.

    `fd` must be open with O_DIRECT; what is open for reading alone refuses writes. `depth` is the number of
    requests kept in flight; `workers` the number of threads for checksums and copies (default: one less
    than the CPUs, at most 4); `staging_bytes` bounds the memory through which misaligned buffers go. With
    "passthrough" `fd` is the block device of a whole NVMe namespace, whose character device is opened here;
    with `placement` writes name the placement handles that it has (`blockkv.device.placement`).

    A `lifeline` is another descriptor that the device owns. The kernel closes the last copy of it after the
    last request of this device has completed, also when the process was killed: who holds the other end,
    the reading end of a pipe for example, knows then that nothing is in flight. Not for "passthrough".

    Raises DeviceError when the engine asked for is refused, InvalidArgument for options out of range. Use
    of the object in a forked child raises StoreClosed: the ring belongs to the parent.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        limits: Limits,
        *,
        engine: EngineName = "auto",
        depth: int = DEFAULT_DEPTH,
        workers: int | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        lifeline: int = -1,
        placement: bool = True,
    ) -> None:
        self.path = path
        self.limits = limits
        self.is_shared = lifeline >= 0
        """Whether others have copies of the descriptor: the lock is theirs too, and stays after `close`."""
        self._fd = fd
        self._lifeline = lifeline
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._in_flight: dict[int, Batch] = {}
        self._last_token = 0
        self._completion_thread: threading.Thread | None = None
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._writable = not limits.read_only and opened_for_writing(fd)
        self._generic: passthrough.Generic | None = None
        self._places = Places("only passthrough names placement handles")
        try:
            options = _options(fd, path, limits, depth, workers, staging_bytes) | {"lifeline_fd": lifeline}
            if engine == "passthrough":
                if lifeline >= 0:
                    raise InvalidArgument(f"{path}: engine='passthrough' takes no lifeline")
                self._generic = passthrough.open_generic(path, fd, limits)
                if placement:
                    self._places = find_places(self._generic.path, self._generic.descriptor)
                else:
                    self._places = Places("switched off")
                opened = _open_passthrough(path, options, self._generic, self._places)
            else:
                opened = _open_engine(path, options, engine)
            self._engine, self._engine_name, self._engine_reason = opened
        except BaseException:
            self._close_descriptors()
            raise
        _open_devices.add(self)
        memory.watch_arenas(self)

    @property
    def engine_name(self) -> str:
        return self._engine_name

    @property
    def engine_reason(self) -> str:
        return self._engine_reason

    def placement(self) -> dict[str, Any]:
        return self._places.described(self.counters())

    def submit(self, batch: Batch) -> None:
        """See `Device.submit`. Raises InvalidArgument, with nothing started, for an inconsistent batch."""
        self._check_process()
        if batch.native is not None:
            raise InvalidArgument("this batch was submitted before; build a new one")
        if batch.direction and not self._writable:
            how = "is read-only" if self.limits.read_only else "was opened read-only"
            raise DeviceReadOnly(f"{self.path} {how}", errno.EROFS)
        announced = batch.on_done is not None
        flight = _Flight(batch)
        with self._lock:
            self._last_token += 1
            flight.token = self._last_token
            if announced and self._completion_thread is None and not self._closed:
                self._completion_thread = _start_completion_thread(self.path, self._engine, self._in_flight)
        # named, so that the arrays stay locked until C has copied them
        extents = ffi.from_buffer("struct bkv_extent[]", batch.extents)
        segments = ffi.from_buffer("struct bkv_segment[]", batch.segments)
        request = ffi.new(
            "struct bkv_request *",
            {
                "transfers": flight.transfers,
                "extents": extents,
                "segments": segments,
                "leaf_values": flight.leaf_values,
                "transfer_count": len(batch),
                "extent_count": len(batch.extents) // 2,
                "segment_count": len(batch.segments) // 2,
                "leaf_count": len(batch.leaf_values),
                "token": flight.token if announced else 0,
                "deadline_ns": batch.deadline_ns,
                "direction": batch.direction,
                "priority": batch.priority,
                "on_caller": batch.on_caller,
                "placement": batch.placement,
            },
        )
        failure = ffi.new("struct bkv_failure *")
        handle = ffi.new("struct bkv_batch **")
        if not announced:
            flight.handle = handle  # before it is filled in: what interrupts us here must not lose the batch
        batch.native = flight
        self._in_flight[flight.token] = batch
        code = lib.bkv_engine_submit(self._engine.pointer, request, handle, failure)
        if code:
            self._in_flight.pop(flight.token, None)
            batch.native = None
            if code == -errno.ESHUTDOWN:
                raise self._closed_error()
            if code == -errno.EINVAL:
                raise InvalidArgument(f"{self.path}: {_text(failure.message)}")
            raise device_error(self.path, _text(failure.message), code)

    def wait(self, batch: Batch) -> None:
        self._check_process()
        flight = batch.native
        if not isinstance(flight, _Flight) or batch.on_done is not None:
            raise InvalidArgument("wait is for batches that were submitted without on_done")
        handle = flight.claim()
        if handle is not None:
            lib.bkv_engine_wait(self._engine.pointer, handle)
            self._in_flight.pop(flight.token, None)
            flight.release()

    def flush(self) -> None:
        self._check_process()
        self._check(lib.bkv_engine_flush(self._engine.pointer), "flush")
        self._check_length()

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        self._check_process()
        if not self.limits.discard_granularity_bytes or not length_bytes:
            return
        code = lib.bkv_engine_discard(self._engine.pointer, offset_bytes, length_bytes)
        if code == -errno.EINVAL:
            raise InvalidArgument(
                f"{self.path}: discard of {length_bytes} bytes at {offset_bytes} is refused; the device has"
                f" {self.limits.size_bytes} bytes in units of {self.limits.lba_bytes}"
            )
        if code != -errno.EOPNOTSUPP:
            self._check(code, f"discard of {length_bytes} bytes at {offset_bytes}")

    def encrypt(self, cipher_key: bytes, from_bytes: int, to_bytes: int) -> None:
        self._check_process()
        if len(cipher_key) != lib.BKV_CIPHER_KEY_BYTES:
            raise InvalidArgument(f"{self.path}: a cipher key of {len(cipher_key)} bytes")
        failure = ffi.new("struct bkv_failure *")
        code = lib.bkv_engine_encrypt(self._engine.pointer, cipher_key, from_bytes, to_bytes, failure)
        if code == -errno.EINVAL:
            raise InvalidArgument(f"{self.path}: {_text(failure.message)}")
        if code == -errno.ELIBACC:
            raise DeviceError(
                f"{self.path} is encrypted: {_text(failure.message)}; install OpenSSL 3 (Debian: libssl3)",
                errno.ELIBACC,
            )
        self._check(code, _text(failure.message))
        self.cipher_key = cipher_key

    def register(self, address: int, length_bytes: int) -> int:
        self._check_process()
        handle = int(lib.bkv_engine_register(self._engine.pointer, address, length_bytes))
        if handle in (-errno.EOPNOTSUPP, -errno.ENOSPC):
            return -1
        if handle in (-errno.ENOMEM, -errno.EPERM):
            raise DeviceError(
                f"{self.path}: cannot pin {length_bytes} bytes at {address:#x}: {os.strerror(-handle)}; "
                "raise RLIMIT_MEMLOCK (ulimit -l) or register less",
                -handle,
            )
        self._check(handle if handle < 0 else 0, f"registering {length_bytes} bytes at {address:#x}")
        return handle

    def unregister(self, handle: int) -> None:
        """Undo `register`. Nothing happens for -1, or after `close`, which gave everything back."""
        self._check_process()
        if handle == -1:
            return
        code = lib.bkv_engine_unregister(self._engine.pointer, handle)
        if code == -errno.EINVAL:
            raise InvalidArgument(f"{self.path}: {handle} is not a handle from register")
        if code != -errno.ESHUTDOWN:
            self._check(code, f"unregistering handle {handle}")

    def arena_added(self, address: int, size_bytes: int) -> None:
        """For `blockkv.memory`: what is refused here only makes requests dearer."""
        if os.getpid() == self._process_id:
            lib.bkv_engine_arena_add(self._engine.pointer, address, size_bytes)

    def arena_removed(self, address: int) -> None:
        """For `blockkv.memory`. Nothing of it is in flight: batches keep their memory alive."""
        if os.getpid() == self._process_id:
            lib.bkv_engine_arena_remove(self._engine.pointer, address)

    def counters(self) -> dict[str, int]:
        """Counters since open. Valid after `close`.

        `device_requests` counts requests issued; of these `fixed_requests` used registered memory and
        `coalesced_requests` carried more than one transfer. `direct_bytes` and `bounced_bytes` split the
        payload by the way it went. `isolated_requests` repeat the parts of a failed coalesced request.
        """
        self._check_process()
        counters = ffi.new("struct bkv_counters *")
        lib.bkv_engine_counters(self._engine.pointer, counters)
        return {name: int(getattr(counters, name)) for name in _COUNTER_NAMES}

    def share(self) -> int:
        """A copy of the descriptor, for another process. It shares the claim and the lock, which last until
        the last copy is closed; the caller says with `is_shared` when none is left.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                raise self._closed_error()
            self.is_shared = True
            return fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 0)

    def open_reader(self) -> int:
        self._check_process()
        with self._lock:
            if self._closed:
                raise self._closed_error()
            try:
                # Not by its path, which may lead elsewhere by now.
                return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                what = os.strerror(error.errno or 0)
                raise DeviceError(f"{self.path} cannot be opened once more: {what}", error.errno) from error

    def close(self) -> None:
        """Wait for what is in flight and for its callbacks, then release everything. Idempotent.

        Called from `on_done` it returns while later callbacks are still due. No-op in a forked child.
        """
        if os.getpid() != self._process_id:
            return
        with self._lock:
            mine, self._closed = not self._closed, True
            thread = self._completion_thread
        self._wait_for_own()
        lib.bkv_engine_close(self._engine.pointer)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if not mine:
            return
        # The kernel may hold on to the file for a moment (a ring is torn down later); the lock must not wait.
        if not self.is_shared:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close_descriptors()
        for token, batch in list(self._in_flight.items()):
            flight = batch.native
            handle = flight.claim() if isinstance(flight, _Flight) else None
            if handle is not None:  # done, and nobody waits for it yet; a later wait returns at once
                lib.bkv_engine_wait(self._engine.pointer, handle)
                self._in_flight.pop(token, None)
        _open_devices.discard(self)

    def __del__(self) -> None:
        if hasattr(self, "_engine") and not self._closed:
            self.close()

    def _wait_for_own(self) -> None:
        """Carry out what this thread was to carry out itself, and was kept from: by Ctrl-C, say.

        Nobody else does, and the engine is not closed before it is done.
        """
        mine = threading.get_ident()
        for batch in list(self._in_flight.values()):
            flight = batch.native
            if batch.on_caller and isinstance(flight, _Flight) and flight.thread == mine:
                self.wait(batch)

    def _close_descriptors(self) -> None:
        if self._generic is not None:
            # What others read meanwhile through the page cache is there as it was at their first look.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._generic.descriptor)
        os.close(self._fd)
        if self._lifeline >= 0:
            os.close(self._lifeline)

    def _abandon(self) -> None:
        """In a forked child: let go of the descriptors, or the device would stay busy after the parent."""
        self._closed = True
        lib.bkv_engine_abandon(self._engine.pointer)

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise StoreClosed(
                f"{self.path} was opened by process {self._process_id} and this is its fork {os.getpid()}; "
                "open it after forking, or start workers with the spawn method"
            )

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"{self.path} is closed")

    def _check_length(self) -> None:
        """A write behind the end of a file that was cut short succeeds: only its length tells."""
        with self._lock:
            if self._closed or not self._is_file:
                return
            size_bytes = os.fstat(self._fd).st_size
        if size_bytes < self.limits.size_bytes:
            raise DeviceError(
                f"{self.path} was truncated to {size_bytes} bytes while it was open with "
                f"{self.limits.size_bytes}; restore it from a copy, or remove it and format anew",
                errno.EIO,
            )

    def _check(self, code: int, what: str) -> None:
        if code == -errno.ESHUTDOWN:
            raise self._closed_error()
        if code:
            raise device_error(self.path, what, code)


class _Engine:
    """Owns the C object: freed when neither the device nor its completion thread needs it any more."""

    __slots__ = ("_free", "_process_id", "pointer")

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self._process_id = os.getpid()
        self._free: Callable[[Any], None] = lib.bkv_engine_free

    def __del__(self) -> None:
        if os.getpid() == self._process_id:
            self._free(self.pointer)


class _Flight:
    """What a batch in flight holds on to: its arrays, locked in place while C may write to them."""

    __slots__ = ("_claim", "_waiting", "handle", "leaf_values", "thread", "token", "transfers")

    def __init__(self, batch: Batch) -> None:
        self.token = 0
        self.thread = threading.get_ident()
        self.handle: Any = None
        """Where C has its batch until it is freed; None where nobody has to wait for it."""
        self._waiting: int | None = None
        self.transfers: Any = ffi.from_buffer("struct bkv_transfer[]", batch.transfers)
        self.leaf_values: Any = ffi.from_buffer("uint64_t[]", batch.leaf_values)
        self._claim = threading.Lock()

    def claim(self) -> Any:
        """Where the C batch is, for the one thread that waits for it, which frees it; None for all others.

        That thread may ask again: something may have kept it from waiting.
        """
        mine = threading.get_ident()
        with self._claim:
            if self._waiting not in (None, mine) or self.handle is None or self.handle[0] == ffi.NULL:
                return None
            self._waiting = mine
        return self.handle

    def release(self) -> None:
        self.transfers = self.leaf_values = None


def _start_completion_thread(path: str, engine: _Engine, in_flight: dict[int, Batch]) -> threading.Thread:
    """Starts the thread that announces finished batches. It must not hold on to the device."""

    def run() -> None:
        while token := lib.bkv_engine_next(engine.pointer):
            batch = in_flight.pop(token)
            flight = batch.native
            assert isinstance(flight, _Flight)
            assert batch.on_done is not None
            flight.release()
            try:
                batch.on_done(batch)
            except Exception:
                logger_for(path).exception("on_done of a batch raised")
            del batch, flight

    thread = threading.Thread(target=run, name="blockkv-done", daemon=True)
    thread.start()
    return thread


def _options(
    fd: int, path: str, limits: Limits, depth: int, workers: int | None, staging_bytes: int
) -> dict[str, Any]:
    for name, value, most in (
        ("depth", depth, int(lib.BKV_MAX_DEPTH)),
        ("workers", 1 if workers is None else workers, int(lib.BKV_MAX_WORKERS)),
    ):
        if not (isinstance(value, int) and 1 <= value <= most):
            raise InvalidArgument(f"{path}: {name} is {value!r}; want a whole number from 1 to {most}")
    cpus = len(os.sched_getaffinity(0))
    return {
        "fd": fd,
        "passthrough_fd": -1,
        "nsid": 0,
        "memory_boundary_bytes": 0,
        "size_bytes": limits.size_bytes,
        "lba_bytes": limits.lba_bytes,
        "memory_alignment_bytes": limits.memory_alignment_bytes,
        "max_transfer_bytes": limits.max_transfer_bytes,
        "max_segments": _max_segments(fd),
        "depth": depth,
        "workers": max(1, min(4, cpus - 1)) if workers is None else workers,
        "staging_bytes": staging_bytes,
    }


def _max_segments(fd: int) -> int:
    """Scatter-gather segments the device takes in one request, from sysfs; for a file, what NVMe takes."""
    status = os.fstat(fd)
    if stat.S_ISBLK(status.st_mode):
        device = Path(f"/sys/dev/block/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}")
        # a partition has its disk's queue
        for queue in (device / "queue", device.resolve().parent / "queue"):
            with contextlib.suppress(OSError, ValueError):
                return int((queue / "max_segments").read_text())
    return DEFAULT_MAX_SEGMENTS


def _open_engine(path: str, options: dict[str, Any], wanted: EngineName) -> tuple[_Engine, str, str]:
    if wanted == "threads":
        return _start(path, options, lib.BKV_BACKEND_THREADS), "threads", "asked for"
    if wanted not in ("auto", "io_uring"):
        raise InvalidArgument(f"engine is {wanted!r}; want 'auto', 'io_uring', 'threads' or 'passthrough'")
    try:
        engine = _start(path, options, lib.BKV_BACKEND_IO_URING)
    except DeviceError as refusal:
        reason = _refusal(refusal)
        if wanted == "io_uring":
            raise DeviceError(f"{path}: {reason}; use engine='threads' or 'auto'", refusal.errno) from None
        logger_for(path).warning("%s; falling back to threads", reason)
        return _start(path, options, lib.BKV_BACKEND_THREADS), "threads", reason
    return engine, "io_uring", f"available on Linux {platform.release()}"


def _open_passthrough(
    path: str, options: dict[str, Any], generic: passthrough.Generic, places: Places
) -> tuple[_Engine, str, str]:
    identifiers = places.identifiers
    commands = {
        "is_placed": identifiers is not None,
        "placement_identifiers": [(identifiers or {}).get(one, 0) for one in Placement],
        "passthrough_fd": generic.descriptor,
        "nsid": generic.nsid,
        "memory_boundary_bytes": generic.memory_boundary_bytes,
    }
    try:
        engine = _start(path, options | commands, lib.BKV_BACKEND_PASSTHROUGH)
    except DeviceError as refusal:
        reason = _refusal(refusal)
        if refusal.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
            reason += f": passthrough needs Linux 5.19 or later, and this is {platform.release()}"
        elif refusal.errno == errno.EACCES:
            reason += f": {nvme_admin.permission_hint(generic.path)}"
        raise DeviceError(f"{generic.path}: {reason}; or use another engine", refusal.errno) from None
    return (
        engine,
        "passthrough",
        f"asked for; NVMe commands through {generic.path} on Linux {platform.release()}",
    )


def _start(path: str, options: dict[str, Any], backend: int) -> _Engine:
    failure = ffi.new("struct bkv_failure *")
    pointer = lib.bkv_engine_open(ffi.new("struct bkv_options *", {**options, "backend": backend}), failure)
    if pointer != ffi.NULL:
        return _Engine(pointer)
    message = _text(failure.message)
    if failure.code == -errno.EINVAL and not message.startswith("io_uring"):
        raise InvalidArgument(f"{path}: {message}")
    raise DeviceError(message, -failure.code)


def _refusal(refusal: DeviceError) -> str:
    """Why io_uring was refused, and the knob that would change it."""
    code = refusal.errno or 0
    reason = f"{refusal.message} was refused: {os.strerror(code)} (errno {code})"
    if code == errno.EPERM:
        disabled = "unknown"
        with contextlib.suppress(OSError):
            disabled = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
        if disabled in ("1", "2"):
            return f"{reason}: sysctl kernel.io_uring_disabled is {disabled}, set it to 0"
        return f"{reason}: a seccomp filter denies it, allow io_uring_setup in the container's profile"
    if code == errno.ENOSYS:
        return f"{reason}: the kernel was built without io_uring, or a seccomp filter hides it"
    if code == errno.ENOMEM:
        return f"{reason}: raise RLIMIT_MEMLOCK (ulimit -l)"
    return reason


def _text(chars: Any) -> str:
    return bytes(ffi.string(chars)).decode()


def _abandon_all() -> None:
    for device in list(_open_devices):
        device._abandon()


_COUNTER_NAMES = tuple(name for name, _ in ffi.typeof("struct bkv_counters").fields)

os.register_at_fork(after_in_child=_abandon_all)
