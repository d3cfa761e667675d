"""The native engine around the bytes: errors, callbacks, priorities, registration, fallback, fork, close."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from device_tools import file_system, in_child, read_only_user
from engine_tools import ENGINES, MIB, Memory, batch_of, engine_on, one_extent, run, thread_names

from blockkv.device.base import UNIT_BYTES, Batch, Direction, Priority
from blockkv.device.engine import NativeDevice
from blockkv.device.namespace import open_namespace, probe
from blockkv.errors import DeviceBusy, DeviceError, DeviceLost, DeviceReadOnly, InvalidArgument, StoreClosed

NOBODY = 65534

engines = pytest.mark.parametrize("engine", ENGINES)

LOADS_LIMIT = 1000
"""More than are needed until others have their turns, and an end where they have none."""


def image_of(directory: Path, size_bytes: int, name: str = "image.img") -> Path:
    image = directory / name
    with image.open("wb") as file:
        file.truncate(size_bytes)
    return image


def open_descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def units(memory: Memory, offsets: list[int], shift: int = 0) -> list[tuple[int, list, list]]:
    """One transfer of one unit for every device offset, from successive memory."""
    return [
        (UNIT_BYTES, one_extent(offset, UNIT_BYTES), [(memory.at(number * UNIT_BYTES + shift), UNIT_BYTES)])
        for number, offset in enumerate(offsets)
    ]


# ---------------------------------------------------------------------------------------------- errors


@engines
@pytest.mark.parametrize("shift", [0, 5])
def test_only_the_transfer_past_a_truncated_end_fails(image_dir: Path, engine: str, shift: int) -> None:
    """One coalesced request, cut short by the end of the file: its parts are tried one by one."""
    image = image_of(image_dir, 3 * UNIT_BYTES)
    image.write_bytes(b"\x01" * UNIT_BYTES + b"\x02" * UNIT_BYTES + b"\x03" * UNIT_BYTES)
    memory = Memory(MIB)
    with engine_on(image, engine, size_bytes=MIB) as device:
        batch = batch_of(
            Direction.READ, units(memory, [n * UNIT_BYTES for n in range(5)], shift), leaf_bytes=UNIT_BYTES
        )
        assert run(device, batch) == [0, 0, 0, -errno.ENODEV, -errno.ENODEV]
        assert memory.read(shift, 5 * UNIT_BYTES) == image.read_bytes() + bytes(2 * UNIT_BYTES)
        assert batch.leaves(3) == bytes(8)
        counters = device.counters()
        assert counters["short_transfers"] == 1
        assert counters["isolated_requests"] == 5
        with pytest.raises(DeviceLost, match="at 16384"):
            device.read(4 * UNIT_BYTES, UNIT_BYTES)
        assert device.read(UNIT_BYTES, UNIT_BYTES) == b"\x02" * UNIT_BYTES


@engines
@pytest.mark.requires_root
def test_a_full_backing_store_is_an_error_of_that_transfer(engine: str) -> None:
    """ENOSPC at a valid offset, as thin volumes give it."""
    memory = Memory(4 * MIB)
    memory.fill(b"\x07" * memory.size_bytes)
    with file_system("tmpfs", "-o", "size=1m") as directory:
        image = image_of(directory, 8 * MIB)
        with engine_on(image, engine) as device:
            chunk = 768 << 10
            transfers = [
                (chunk, one_extent(number * chunk, chunk), [(memory.at(number * chunk), chunk)])
                for number in range(4)
            ]
            assert run(device, batch_of(Direction.WRITE, transfers[:1])) == [0]
            results = run(device, batch_of(Direction.WRITE, transfers))
            assert results[0] == 0  # its pages are there already
            assert results.count(-errno.ENOSPC) >= 2
            with pytest.raises(DeviceError, match="No space left") as caught:
                device.write(6 * MIB, bytes(MIB))
            assert caught.value.errno == errno.ENOSPC
            assert device.read(0, chunk) == b"\x07" * chunk


@engines
def test_media_errors_of_a_device_stay_with_their_transfer(loop_device, image_dir: Path, engine: str) -> None:
    """A loop device answers EIO where its backing file ends."""
    path = loop_device(MIB, 4096)
    os.truncate(image_dir / "loop-0.img", 6 * UNIT_BYTES)
    memory = Memory(MIB)
    with engine_on(path, engine) as device:
        offsets = [n * UNIT_BYTES for n in range(8)]
        results = run(device, batch_of(Direction.READ, units(memory, offsets)))
        assert results == [0] * 6 + [-errno.EIO] * 2
        with pytest.raises(DeviceError, match="read of 4096 bytes at 28672") as caught:
            device.read(7 * UNIT_BYTES, UNIT_BYTES)
        assert caught.value.errno == errno.EIO


@engines
def test_a_device_that_lost_its_size_is_gone(loop_device, image_dir: Path, engine: str) -> None:
    """As the kernel leaves a namespace that went away: reads find nothing, writes find no space."""
    path = loop_device(MIB, 4096)
    with engine_on(path, engine) as device:
        os.truncate(image_dir / "loop-0.img", 0)
        subprocess.run(["losetup", "--set-capacity", path], check=True)
        with pytest.raises(DeviceLost, match="read of 4096 bytes at 0"):
            device.read(0, UNIT_BYTES)
        with pytest.raises(DeviceLost, match="write of 4096 bytes at 8192"):
            device.write(2 * UNIT_BYTES, bytes(UNIT_BYTES))


@engines
def test_memory_that_is_not_ours_is_an_error_not_a_crash(image_dir: Path, engine: str) -> None:
    with engine_on(image_of(image_dir, MIB), engine) as device:
        batch = batch_of(Direction.READ, [(8192, [(0, 8192)], [(0x7000, 8192)])])
        assert run(device, batch) == [-errno.EFAULT]


def test_a_read_only_device_refuses_writes(image_dir: Path) -> None:
    with engine_on(image_of(image_dir, MIB), read_only=True) as device:
        with pytest.raises(DeviceReadOnly):
            device.write(0, bytes(UNIT_BYTES))
        assert device.read(0, UNIT_BYTES) == bytes(UNIT_BYTES)


# -------------------------------------------------------------------------------------------- callbacks


@engines
def test_callbacks_come_once_each_on_one_thread(image_dir: Path, engine: str) -> None:
    count = 200
    memory = Memory(count * UNIT_BYTES)
    seen: list[tuple[int, str]] = []
    finished = threading.Event()
    with engine_on(image_of(image_dir, count * UNIT_BYTES), engine) as device:
        assert "blockkv-done" not in [thread.name for thread in threading.enumerate()]
        for number in range(count):
            segments = [(memory.at(number * UNIT_BYTES), UNIT_BYTES)]
            extents = one_extent(number * UNIT_BYTES, UNIT_BYTES)
            batch = batch_of(Direction(number % 2), [(UNIT_BYTES, extents, segments)], Priority(number % 3))

            def done(batch: Batch, number: int = number) -> None:
                seen.append((number, threading.current_thread().name))
                assert batch.result(0) == 0
                if len(seen) == count:
                    finished.set()

            batch.on_done = done
            device.submit(batch)
        assert finished.wait(30)
    assert sorted(number for number, _ in seen) == list(range(count))
    assert {name for _, name in seen} == {"blockkv-done"}


@engines
def test_a_callback_may_submit_and_may_raise(image_dir: Path, engine: str, caplog) -> None:
    memory = Memory(UNIT_BYTES)
    links: list[int] = []
    finished = threading.Event()

    def link(_: Batch) -> None:
        links.append(len(links))
        if len(links) == 20:
            finished.set()
        else:
            submit()
        if len(links) == 3:
            raise ValueError("from the third callback")

    def submit() -> None:
        batch = batch_of(Direction.READ, [(UNIT_BYTES, [(0, UNIT_BYTES)], [(memory.at(0), UNIT_BYTES)])])
        batch.on_done = link
        device.submit(batch)

    with caplog.at_level(logging.ERROR), engine_on(image_of(image_dir, MIB), engine) as device:
        submit()
        assert finished.wait(30)
    assert [record for record in caplog.records if "on_done of a batch raised" in record.message]


def test_wait_and_submit_are_for_once(image_dir: Path) -> None:
    memory = Memory(UNIT_BYTES)
    described = [(UNIT_BYTES, [(0, UNIT_BYTES)], [(memory.at(0), UNIT_BYTES)])]
    with engine_on(image_of(image_dir, MIB)) as device:
        batch = batch_of(Direction.READ, described)
        with pytest.raises(InvalidArgument, match="without on_done"):
            device.wait(batch)
        assert run(device, batch) == [0]
        with pytest.raises(InvalidArgument, match="submitted before"):
            device.submit(batch)
        announced = batch_of(Direction.READ, described)
        finished = threading.Event()
        announced.on_done = lambda _: finished.set()
        device.submit(announced)
        with pytest.raises(InvalidArgument, match="without on_done"):
            device.wait(announced)
        assert finished.wait(10)


@contextmanager
def slow_writes(path: Path, bytes_per_second: int) -> Iterator[None]:
    """Hold what this process writes to a device down to a rate, with the blkio (or io) cgroup controller."""
    device = path.stat().st_rdev
    number = f"{os.major(device)}:{os.minor(device)}"
    version_1 = Path("/sys/fs/cgroup/blkio")
    if version_1.is_dir():
        root, file, line = version_1, "blkio.throttle.write_bps_device", f"{number} {bytes_per_second}"
    else:
        root, file, line = Path("/sys/fs/cgroup"), "io.max", f"{number} wbps={bytes_per_second}"
        (root / "cgroup.subtree_control").write_text("+io")
    lines = [entry.split(":", 2) for entry in Path("/proc/self/cgroup").read_text().splitlines()]
    controller = "blkio" if root == version_1 else ""
    home = root / next(place for _, names, place in lines if names == controller).lstrip("/")
    group = root / f"blockkv-test.{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(line)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@pytest.mark.requires_root
@engines
def test_loads_overtake_stores(loop_device, engine: str) -> None:
    """With one request in flight at a time, everything else waits in the queue of its class.

    The stores take two seconds, so that they are not over before the others are submitted.
    """
    memory = Memory(MIB)
    order: list[str] = []
    finished = threading.Semaphore(0)
    path = loop_device(64 * MIB, 4096)
    with slow_writes(path, 16 * MIB), engine_on(path, engine, depth=1) as device:

        def submit(name: str, direction: Direction, priority: Priority, pieces: int) -> None:
            batch = batch_of(
                direction,
                [(MIB, [(piece * 2 * MIB, MIB)], [(memory.at(0), MIB)]) for piece in range(pieces)],
                priority,
            )

            def done(_: Batch) -> None:
                order.append(name)
                finished.release()

            batch.on_done = done
            device.submit(batch)

        submit("store", Direction.WRITE, Priority.STORE, 30)
        submit("second store", Direction.WRITE, Priority.STORE, 1)
        submit("preload", Direction.READ, Priority.PRELOAD, 1)
        submit("load", Direction.READ, Priority.LOAD, 1)
        for _ in range(4):
            assert finished.acquire(timeout=30)
    assert order == ["load", "preload", "store", "second store"]


@engines
def test_loads_that_never_end_leave_something_to_the_others(image_dir: Path, engine: str) -> None:
    memory = Memory(16 * MIB)
    loads = 0
    one_is_over = threading.Semaphore(0)
    others_are_over = threading.Event()
    with engine_on(image_of(image_dir, 32 * MIB), engine, depth=2) as device:

        def load() -> None:
            batch = batch_of(Direction.READ, [(MIB, [(0, MIB)], [(memory.at(0), MIB)])] * 64)
            batch.on_done = go_on
            device.submit(batch)

        def go_on(_: Batch) -> None:
            nonlocal loads
            loads += 1
            if loads < LOADS_LIMIT and not others_are_over.is_set():
                load()

        def submit(direction: Direction, priority: Priority) -> None:
            segments = [(memory.at(MIB), 8 * MIB)]
            batch = batch_of(direction, [(8 * MIB, [(8 * MIB, 8 * MIB)], segments)], priority)
            batch.on_done = lambda _: one_is_over.release()
            device.submit(batch)

        for _ in range(4):
            load()
        submit(Direction.WRITE, Priority.STORE)
        submit(Direction.READ, Priority.PRELOAD)
        for _ in range(2):
            assert one_is_over.acquire(timeout=60)
        others_are_over.set()
    assert loads < LOADS_LIMIT


def test_a_load_is_served_while_stores_hold_all_the_staging(loop_device) -> None:
    memory = Memory(32 * MIB)
    with engine_on(loop_device(32 * MIB, 4096), depth=2, staging_bytes=MIB) as device:
        store = batch_of(
            Direction.WRITE, [(16 * MIB, [(0, 16 * MIB)], [(memory.at(1), 16 * MIB)])], Priority.STORE
        )
        load = batch_of(
            Direction.READ, [(8 * MIB, [(16 * MIB, 8 * MIB)], [(memory.at(17 * MIB + 1), 8 * MIB)])]
        )
        device.submit(store)
        device.submit(load)
        device.wait(load)
        device.wait(store)
        assert (store.result(0), load.result(0)) == (0, 0)


@pytest.mark.requires_root
def test_an_arrival_wakes_a_reactor_that_waits_for_many(loop_device) -> None:
    """A load must not wait until most of the stores before it are done."""
    memory = Memory(17 * MIB)
    path = loop_device(32 * MIB, 4096)
    with slow_writes(path, 4 * MIB), engine_on(path) as device:
        segments = [(memory.at(0), 16 * MIB)]
        store = batch_of(Direction.WRITE, [(16 * MIB, [(0, 16 * MIB)], segments)], Priority.STORE)
        device.submit(store)
        time.sleep(0.1)
        enters = device.counters()["ring_enters"]
        started = time.monotonic()
        for _ in range(5):
            assert run(device, batch_of(Direction.READ, units(memory, [20 * MIB]))) == [0]
        assert time.monotonic() - started < 2  # of four
        assert device.counters()["device_write_bytes"] < 14 * MIB
        assert device.counters()["ring_enters"] - enters <= 15
        device.wait(store)
        assert store.result(0) == 0


# ----------------------------------------------------------------------------------------- registration


def test_requests_inside_a_registered_region_are_fixed(loop_device) -> None:
    memory = Memory(4 * MIB)
    memory.fill(random.Random(3).randbytes(MIB))
    with engine_on(loop_device(4 * MIB, 4096)) as device:

        def fixed_requests(direction: Direction, at: int) -> int:
            before = device.counters()["fixed_requests"]
            assert run(device, batch_of(direction, [(MIB, [(0, MIB)], [(memory.at(at), MIB)])])) == [0]
            return device.counters()["fixed_requests"] - before

        assert fixed_requests(Direction.WRITE, 0) == 0
        handle = device.register(memory.at(0), 2 * MIB)
        other = device.register(memory.at(3 * MIB), MIB)
        assert handle != other
        assert min(handle, other) >= 0
        assert fixed_requests(Direction.WRITE, 0) == 2
        assert fixed_requests(Direction.READ, MIB) == 2
        assert memory.read(MIB, MIB) == memory.read(0, MIB)
        assert fixed_requests(Direction.READ, 3 * MIB) == 2
        assert fixed_requests(Direction.READ, 3 * MIB // 2) == 1  # the second half is outside
        device.unregister(handle)
        assert fixed_requests(Direction.READ, 0) == 0
        assert fixed_requests(Direction.READ, 3 * MIB) == 2
        with pytest.raises(InvalidArgument, match="not a handle"):
            device.unregister(handle)
        with pytest.raises(InvalidArgument, match="not a handle"):
            device.unregister(100000)
        device.unregister(-1)
        assert device.register(memory.at(0), MIB) == handle
    device.unregister(handle)  # close gave it back


def test_registering_what_is_not_memory_says_so(image_dir: Path) -> None:
    with engine_on(image_of(image_dir, MIB)) as device:
        for address, length in ((0x7000, 4096), (0, 4096), ((1 << 64) - 4096, 8192)):
            with pytest.raises(DeviceError, match=f"registering {length} bytes"):
                device.register(address, length)


def test_the_table_of_regions_is_bounded(image_dir: Path) -> None:
    memory = Memory(UNIT_BYTES)
    with engine_on(image_of(image_dir, MIB)) as device:
        handles = [device.register(memory.at(0), UNIT_BYTES) for _ in range(300)]
        assert len(set(handles)) == 257  # 256 regions, and -1
        assert handles[256:] == [-1] * 44


def test_threads_do_not_register(image_dir: Path) -> None:
    memory = Memory(MIB)
    with engine_on(image_of(image_dir, MIB), "threads") as device:
        assert device.register(memory.at(0), MIB) == -1
        device.unregister(-1)


@pytest.mark.requires_root
def test_a_memlock_limit_names_the_knob_and_staging_works_without(image_dir: Path) -> None:
    image = image_of(image_dir, MIB)
    memory = Memory(8 * MIB)
    for directory in (image_dir.parent, image_dir):
        directory.chmod(0o755)
    image.chmod(0o666)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        read_only_user(NOBODY)
        with engine_on(image) as device:
            segments = [(memory.at(1), 300000)]
            assert run(device, batch_of(Direction.WRITE, [(300000, one_extent(0, 300000), segments)])) == [0]
            counters = device.counters()
            assert (counters["bounced_transfers"], counters["fixed_requests"]) == (1, 0)
            device.register(memory.at(0), 8 * MIB)

    kind, message = in_child(child)
    assert kind == "DeviceError", message
    assert "RLIMIT_MEMLOCK" in message


# --------------------------------------------------------------------------------------------- fallback

REFUSED = """
import ctypes, errno, logging, os, struct, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from engine_tools import Memory, batch_of, engine_on, run
from blockkv.device.base import Direction
from blockkv.errors import DeviceError

# a seccomp filter, as container runtimes install it: io_uring_setup (425 everywhere) answers with an errno
program = b"".join(struct.pack("<HBBI", *step) for step in (
    (0x20, 0, 0, 0),                            # load the number of the system call
    (0x15, 0, 1, 425),                          # not io_uring_setup: skip one
    (0x06, 0, 0, 0x00050000 | {code}),          # SECCOMP_RET_ERRNO
    (0x06, 0, 0, 0x7FFF0000),                   # SECCOMP_RET_ALLOW
))
steps = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0          # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(Program(4, ctypes.addressof(steps)))) == 0  # PR_SET_SECCOMP

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
with engine_on({image!r}, "auto") as device:
    memory = Memory(8192)
    memory.fill(b"kv" * 4096)
    assert run(device, batch_of(Direction.WRITE, [(8192, [(0, 8192)], [(memory.at(0), 8192)])])) == [0]
    assert device.read(0, 8192) == b"kv" * 4096
    print(device.engine_name, "|", device.engine_reason)
try:
    with engine_on({image!r}, "io_uring"):
        pass
except DeviceError as error:
    print("explicit |", error.errno, "|", error)
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EPERM, "a seccomp filter denies it"), (errno.ENOSYS, "a seccomp filter hides it")],
)
def test_refused_io_uring_falls_back_to_threads(image_dir: Path, code: int, words: str) -> None:
    disabled = Path("/proc/sys/kernel/io_uring_disabled")
    if disabled.exists() and disabled.read_text().strip() != "0":
        words = "io_uring_disabled" if code == errno.EPERM else words
    image = image_of(image_dir, MIB)
    script = REFUSED.format(tests=str(Path(__file__).parent), image=str(image), code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert words in warnings[0]
    assert "falling back to threads" in warnings[0]
    chosen = next(line for line in lines if line.startswith("threads |"))
    assert "io_uring_setup was refused" in chosen
    assert words in chosen
    explicit = next(line for line in lines if line.startswith("explicit |"))
    assert f"| {code} |" in explicit
    assert words in explicit


@engines
def test_the_choice_is_visible(image_dir: Path, engine: str) -> None:
    with engine_on(image_of(image_dir, MIB), engine) as device:
        assert device.engine_name == engine
        assert device.engine_reason
        assert ("blockkv-ring" in thread_names()) == (engine == "io_uring")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 0}, "depth is 0"),
        ({"depth": 5000}, "depth is 5000"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": 65}, "workers is 65"),
        ({"staging_bytes": 4096}, "staging_bytes is 4096"),
        ({"lba_bytes": 8192}, "lba_bytes is 8192"),
        ({"memory_alignment_bytes": 3}, "memory_alignment_bytes is 3"),
        ({"max_transfer_bytes": 512}, "max_transfer_bytes is 512"),
        ({"engine": "sqpoll"}, "engine is 'sqpoll'"),
    ],
)
def test_options_out_of_range_are_named_and_nothing_leaks(image_dir: Path, options: dict, words: str) -> None:
    image = image_of(image_dir, MIB)
    before = open_descriptors()
    with pytest.raises(InvalidArgument, match=words), engine_on(image, **options):
        pass
    assert open_descriptors() == before
    assert not [name for name in thread_names() if name.startswith("blockkv")]


# ---------------------------------------------------------------------------------------- flush, discard


@engines
def test_discard_empties_what_it_names(loop_device, engine: str) -> None:
    # an administrator's limit of 0 sticks to the number of a loop device: take one without
    devices = (loop_device(4 * MIB, 4096) for _ in range(16))
    path = next(device for device in devices if probe(device).discard_granularity_bytes)
    with engine_on(path, engine) as device:
        device.write(0, b"\xaa" * (4 * MIB))
        device.flush()
        device.discard(MIB, MIB)
        device.discard(0, 0)
        assert device.read(0, 4 * MIB) == b"\xaa" * MIB + bytes(MIB) + b"\xaa" * (2 * MIB)
        counters = device.counters()
        assert (counters["flushes"], counters["discards"]) == (1, 1)
        with pytest.raises(InvalidArgument, match="the device has 4194304 bytes"):
            device.discard(3 * MIB, 2 * MIB)


def test_discard_on_files_punches_holes_where_asked_to(image_dir: Path) -> None:
    image = image_of(image_dir, 2 * MIB)
    with engine_on(image, discard_granularity_bytes=UNIT_BYTES) as device:
        device.write(0, b"\xaa" * MIB)
        used = image.stat().st_blocks
        device.discard(0, MIB // 2)
        assert device.read(0, MIB) == bytes(MIB // 2) + b"\xaa" * (MIB // 2)
        assert image.stat().st_blocks < used
        assert image.stat().st_size == 2 * MIB
    with engine_on(image, discard_granularity_bytes=0) as device:
        device.discard(MIB // 2, MIB // 2)
        assert device.counters()["discards"] == 0
        assert device.read(MIB // 2, UNIT_BYTES) == b"\xaa" * UNIT_BYTES


# ------------------------------------------------------------------------------------- fork, signals, end


@engines
def test_a_forked_child_is_refused_and_the_parent_goes_on(loop_device, engine: str) -> None:
    path = loop_device(MIB, 4096)
    memory = Memory(UNIT_BYTES)
    with engine_on(path, engine) as device:
        device.write(0, b"p" * UNIT_BYTES)

        def use_in_child() -> None:
            targets = [os.path.realpath(name) for name in Path("/proc/self/fd").iterdir()]
            assert str(path) not in targets
            assert not [name for name in targets if "io_uring" in name]
            device.close()
            batch = batch_of(Direction.READ, [(UNIT_BYTES, [(0, UNIT_BYTES)], [(memory.at(0), UNIT_BYTES)])])
            for call in (
                lambda: device.submit(batch),
                lambda: device.wait(batch),
                lambda: device.read(0, UNIT_BYTES),
                device.flush,
                device.counters,
                lambda: device.register(memory.at(0), UNIT_BYTES),
                lambda: device.discard(0, UNIT_BYTES),
            ):
                with pytest.raises(StoreClosed, match="this is its fork"):
                    call()
            gc.collect()

        assert in_child(use_in_child) == ("", "")
        assert device.read(0, UNIT_BYTES) == b"p" * UNIT_BYTES
        device.write(0, b"q" * UNIT_BYTES)
        assert device.read(0, UNIT_BYTES) == b"q" * UNIT_BYTES


@engines
def test_the_engine_takes_no_signals(image_dir: Path, engine: str) -> None:
    with engine_on(image_of(image_dir, MIB), engine) as device:
        device.read(0, UNIT_BYTES)
        checked = 0
        for task in Path("/proc/self/task").iterdir():
            if not (task / "comm").read_text().startswith("blockkv-"):
                continue
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            mask = int(status["SigBlk"], 16)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
                assert mask >> (number - 1) & 1
            checked += 1
        assert checked >= 2


def test_staging_stays_out_of_core_dumps_and_children(image_dir: Path) -> None:
    def staging_like() -> int:
        flags, size, found = "", 0, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line.startswith("Size:"):
                size = int(line.split()[1]) * 1024
            elif line.startswith("VmFlags:"):
                flags = line.split()[1:]
                found += size == 24 * MIB and "dd" in flags and "dc" in flags
        return found

    assert staging_like() == 0
    with engine_on(image_of(image_dir, MIB), staging_bytes=24 * MIB):
        assert staging_like() == 1
    assert staging_like() == 0


@engines
def test_close_waits_for_what_is_in_flight(loop_device, engine: str) -> None:
    memory = Memory(8 * MIB)
    memory.fill(b"\x5a" * memory.size_bytes)
    path = loop_device(64 * MIB, 4096)
    called: list[int] = []
    with engine_on(path, engine, depth=2, discard_granularity_bytes=UNIT_BYTES) as device:
        batches = []
        for number in range(8):
            extents, segments = [(number * 8 * MIB, 8 * MIB)], [(memory.at(0), 8 * MIB)]
            batch = batch_of(Direction.WRITE, [(8 * MIB, extents, segments)], leaf_bytes=131072)
            if number % 2:
                batch.on_done = lambda batch: called.append(batch.result(0))
            device.submit(batch)
            batches.append(batch)
        waiter = threading.Thread(target=device.wait, args=(batches[6],))
        waiter.start()
        device.close()
        waiter.join(10)
        assert not waiter.is_alive()
        assert called == [0] * 4
        assert [batch.result(0) for batch in batches] == [0] * 8
        device.wait(batches[0])  # done before close returned
        device.close()
        for call in (
            lambda: device.read(0, UNIT_BYTES),
            lambda: device.submit(Batch(Direction.READ, Priority.LOAD)),
            device.flush,
            lambda: device.discard(0, UNIT_BYTES),
            lambda: device.register(memory.at(0), UNIT_BYTES),
        ):
            with pytest.raises(StoreClosed, match="is closed"):
                call()
        assert device.counters()["device_write_bytes"] == 64 * MIB
    with engine_on(path, engine) as device:
        assert set(device.read(60 * MIB, MIB)) == {0x5A}


@engines
def test_nothing_holds_the_device_after_close(loop_device, engine: str) -> None:
    """A ring is torn down in the background: what it had registered must be let go of before that."""
    path = loop_device(MIB, 4096)
    memory = Memory(MIB)
    for _ in range(10):
        with engine_on(path, engine) as device:
            fcntl.flock(device._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            device.register(memory.at(0), MIB)
            device.write(0, bytes(MIB))
        descriptor = os.open(path, os.O_RDWR | os.O_EXCL)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)


@engines
def test_close_from_a_callback(image_dir: Path, engine: str) -> None:
    memory = Memory(UNIT_BYTES)
    closed = threading.Event()
    with engine_on(image_of(image_dir, MIB), engine) as device:
        batch = batch_of(Direction.READ, [(UNIT_BYTES, [(0, UNIT_BYTES)], [(memory.at(0), UNIT_BYTES)])])

        def done(_: Batch) -> None:
            device.close()
            closed.set()

        batch.on_done = done
        device.submit(batch)
        assert closed.wait(10)
        with pytest.raises(StoreClosed):
            device.read(0, UNIT_BYTES)


@engines
def test_a_forgotten_device_gives_everything_back(image_dir: Path, engine: str) -> None:
    image = image_of(image_dir, MIB)
    before = open_descriptors()
    descriptor = os.open(image, os.O_RDWR | os.O_DIRECT)
    device = NativeDevice(descriptor, str(image), probe(image), engine=engine)  # type: ignore[arg-type]
    finished = threading.Event()
    memory = Memory(UNIT_BYTES)
    batch = batch_of(Direction.READ, [(UNIT_BYTES, [(0, UNIT_BYTES)], [(memory.at(0), UNIT_BYTES)])])
    batch.on_done = lambda _: finished.set()
    device.submit(batch)
    assert finished.wait(10)
    del device, batch
    gc.collect()
    deadline = time.monotonic() + 10
    while [name for name in thread_names() if name.startswith("blockkv")] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [name for name in thread_names() if name.startswith("blockkv")]
    assert open_descriptors() == before


@pytest.mark.parametrize("count", [50])
def test_opening_and_closing_leaks_nothing(image_dir: Path, count: int) -> None:
    image = image_of(image_dir, MIB)
    memory = Memory(MIB)
    before = open_descriptors()
    for number in range(count):
        with engine_on(image, ENGINES[number % 2]) as device:
            device.register(memory.at(0), MIB)
            device.submit(
                batch_of(Direction.WRITE, [(5000, [(0, 8192)], [(memory.at(1), 5000)])], leaf_bytes=512)
            )
    assert open_descriptors() == before
    assert not [name for name in thread_names() if name.startswith("blockkv")]


# ------------------------------------------------------------------------------- shared with processes


@engines
def test_a_lifeline_ends_with_the_device_and_with_its_process(engine: str, image_dir: Path) -> None:
    """The other end hears of it: not before everything is closed, and soon afterwards."""
    image = image_of(image_dir, MIB)
    receiver, lifeline = os.pipe()
    heard = select.poll()
    heard.register(receiver, 0)
    with engine_on(image, engine, lifeline=lifeline) as device:
        device.write(0, bytes(UNIT_BYTES))
        assert not heard.poll(50)
        child = os.fork()
        if child == 0:  # has let go of its copy
            time.sleep(20)
            os._exit(0)
        try:
            device.close()
            assert heard.poll(5000)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    os.close(receiver)


def test_a_shared_descriptor_keeps_the_lock_until_its_last_copy_is_closed(image_dir: Path) -> None:
    image = image_of(image_dir, MIB)
    descriptor, path, limits = open_namespace(image)
    device = NativeDevice(descriptor, path, limits)
    copy = device.share()
    device.close()
    with pytest.raises(DeviceBusy):
        open_namespace(image, wait_s=0.1)
    os.close(copy)
    os.close(open_namespace(image)[0])
    with pytest.raises(StoreClosed):
        device.share()


def test_passthrough_takes_no_lifeline(image_dir: Path) -> None:
    receiver, lifeline = os.pipe()
    with (
        pytest.raises(InvalidArgument, match="lifeline"),
        engine_on(image_of(image_dir, MIB), "passthrough", lifeline=lifeline),
    ):
        pass
    assert os.read(receiver, 1) == b""
    os.close(receiver)
