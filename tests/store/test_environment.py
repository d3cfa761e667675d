"""What the system does to a store: forks, signals, limits, filters, short memory and full disks."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import mmap
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seccomp_filter import IO_URING_ENTER, IO_URING_REGISTER, IO_URING_SETUP, forbid
from worker_processes import refused_in_child, use_in_worker

import blockkv
from blockkv.memory import aligned_memory
from blockkv.store.array_store import ArrayStore

SIZE_BYTES = 64 << 20
PATIENCE_S = 120
"""Far more than anything here takes: what hangs is told from what is slow."""
NOBODY = 65534


def payload(number: int, size_bytes: int = 50_000) -> torch.Tensor:
    return torch.randint(
        0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number)
    )


def exercise(store: blockkv.Store, first: int = 0, count: int = 10) -> None:
    """Put, get, delete; every byte right."""
    for number in range(first, first + count):
        store.put(f"e{number}", payload(number), durable=number % 4 == 0)
    for number in range(first, first + count):
        assert torch.equal(store.get(f"e{number}"), payload(number))
        assert torch.equal(store.submit_get(f"e{number}").result(PATIENCE_S), payload(number))
    assert store.delete(f"e{first}", durable=True)
    assert store.get(f"e{first}") is None


def in_child(action: Callable[[], Any]) -> Any:
    """What `action` returns in a forked process. Its exceptions fail the test, and so does a hang."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = {"result": action()}
        except BaseException:
            said = {"failure": traceback.format_exc()}
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], PATIENCE_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
        data = os.read(reading, 1 << 16)
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    assert data, f"the child ended with {status}" if ready else "the child hangs"
    said = json.loads(data)
    assert "failure" not in said, said["failure"]
    return said["result"]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """OpenMP does not survive a fork: a child that used its threads would wait for them for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def target(image_dir: Path) -> Path:
    path = image_dir / "store"
    blockkv.format(path, size=SIZE_BYTES, average_chunk="64KiB")
    return path


# -- fork --------------------------------------------------------------------------------------------------


def test_a_fork_is_refused_and_the_parent_goes_on(block_targets: Any) -> None:
    device = block_targets(SIZE_BYTES)
    blockkv.format(device, average_chunk="64KiB")
    with blockkv.open(device) as store:
        exercise(store)
        assert in_child(lambda: refused_in_child(store)) == []
        exercise(store, 100)
        assert store.check(payload=True).ok
    with blockkv.open(device) as store:
        assert torch.equal(store.get("e105"), payload(105))
        assert not store.contains("child")


def test_forks_while_everything_is_busy(target: Path) -> None:
    with blockkv.open(target, commit_interval_ms=1) as store:
        over = threading.Event()
        problems: list[BaseException] = []

        def keep_busy(number: int) -> None:
            step = 0
            try:
                while not over.is_set():
                    exercise(store, 1000 * number + 10 * (step % 20), 4)
                    step += 1
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=keep_busy, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        children = []
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(len(refused_in_child(store)))
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert statuses == [0] * 10
        assert problems == []
        assert store.check(payload=True).ok


def test_a_fork_while_another_thread_is_inside(target: Path) -> None:
    """No thread of the child will ever let the lock go."""
    with blockkv.open(target) as store:
        exercise(store)
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with store._state.lock:
                held.set()
                over.wait(PATIENCE_S)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(PATIENCE_S)
        try:
            assert in_child(lambda: refused_in_child(store)) == []
        finally:
            over.set()
            thread.join()


def test_a_fork_of_an_array_while_another_thread_is_inside(image_dir: Path) -> None:
    paths = [image_dir / "a", image_dir / "b"]
    blockkv.format(paths, size=SIZE_BYTES, average_chunk="64KiB")
    with blockkv.open(paths) as store:
        assert isinstance(store, ArrayStore)
        exercise(store)
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with store._operation(), store._lock:
                held.set()
                over.wait(PATIENCE_S)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(PATIENCE_S)
        try:
            assert in_child(lambda: refused_in_child(store)) == []
        finally:
            over.set()
            thread.join()
        exercise(store, 100)
        assert store.check(payload=True).ok


def test_a_child_that_lives_on_does_not_keep_the_store(block_targets: Any) -> None:
    device = block_targets(SIZE_BYTES)
    blockkv.format(device)
    store = blockkv.open(device)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent lets go
        os._exit(0)
    store.close()
    try:
        with blockkv.open(device) as again:
            exercise(again)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing(target: Path, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with blockkv.open(target) as store:
        exercise(store)
        process = context.Process(
            target=use_in_worker, args=(str(target), store if method == "fork" else None)
        )
        process.start()
        process.join(PATIENCE_S)
        assert process.exitcode == 0
        exercise(store, 50)
        assert store.check(payload=True).ok


def test_exits_of_a_child_write_nothing(target: Path) -> None:
    """The ordinary end of an interpreter closes stores; that of a child must leave its parent's alone."""
    script = """
import os, sys, blockkv
store = blockkv.open(sys.argv[1], commit_interval_ms=None)
store.put("lazy", b"x" * 1000)
before = store.info()["generation"], store.stats()["groups_committed"]
for ending in (lambda: os._exit(0), sys.exit):
    child = os.fork()
    if child == 0:
        ending()
    assert os.waitpid(child, 0)[1] == 0
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script, target], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with blockkv.open(target) as store:
        assert store.info()["recovery"]["was_clean"] is False
        assert not store.contains("lazy"), "a child committed what its parent had not"


# -- signals -----------------------------------------------------------------------------------------------

WRITER = """
import signal, sys, blockkv
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with blockkv.open(sys.argv[1], evict=False, commit_interval_ms=None) as store:
    store.put("durable", b"d" * 10_000, durable=True)
    print("ready", flush=True)
    for number in range(1_000_000):
        store.put(f"lazy {number}", bytes(1000 + number % 5))
        if number > 50:
            store.delete(f"lazy {number - 50}")
        store.get("durable")
"""


@pytest.mark.parametrize("disposition", ["default", "handler"])
def test_sigterm(target: Path, disposition: str) -> None:
    command = [sys.executable, "-c", WRITER, target, disposition]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (3 if disposition == "handler" else -signal.SIGTERM), complaints
    assert complaints == ""
    with blockkv.open(target) as store:
        assert store.info()["recovery"]["was_clean"] is (disposition == "handler")
        assert bytes(store.get("durable").numpy()) == b"d" * 10_000
        assert store.check(payload=True).ok


# -- io_uring forbidden ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_io_uring_forbidden(block_targets: Any, code: int) -> None:
    device = block_targets(SIZE_BYTES)
    blockkv.format(device)

    def act() -> list[str]:
        forbid(IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER, code=code)
        with pytest.raises(blockkv.DeviceError) as raised:
            blockkv.open(device, engine="io_uring")
        assert raised.value.errno == code
        with blockkv.open(device) as store:
            exercise(store)
            with store.register(blockkv.empty(1 << 20, torch.uint8)) as registered:
                assert not registered
            return [store.info()["engine"], store.info()["engine_reason"], str(raised.value)]

    engine, reason, refusal = in_child(act)
    assert engine == "threads"
    assert "seccomp" in reason
    assert os.strerror(code) in reason
    assert "engine='threads'" in refusal
    assert "seccomp" in refusal


@pytest.mark.parametrize("all_threads", [False, True])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_io_uring_forbidden_later(target: Path, code: int, all_threads: bool) -> None:
    """What the kernel has not got by then, and all that comes later, is read and written without a ring."""

    def act() -> str:
        with blockkv.open(target, engine="io_uring") as store:
            exercise(store)
            forbid(IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER, code=code, all_threads=all_threads)
            exercise(store, 100)
            futures = [store.submit_put(f"future {number}", bytes(3_000_000)) for number in range(8)]
            assert all(future.result(60) for future in futures)
            found = [store.submit_get(f"future {number}") for number in range(8)]
            assert all(future.result(60).numel() == 3_000_000 for future in found)
            store.checkpoint()
            assert store.check(payload=True).ok
            return str(store.info()["engine"])

    assert in_child(act) == "io_uring"


# -- limits ------------------------------------------------------------------------------------------------


@pytest.mark.requires_root
@pytest.mark.parametrize("limit_bytes", [0, 64 << 10])
def test_little_lockable_memory(target: Path, limit_bytes: int) -> None:
    """As an ordinary user, who has no capability to lock more."""
    for directory in (target.parent, target.parent.parent):
        directory.chmod(0o755)
    os.chown(target, NOBODY, NOBODY)

    def act() -> str:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with blockkv.open(target) as store:
            exercise(store)
            memory = blockkv.empty(8 << 20, torch.uint8)
            try:
                with store.register(memory) as registered:
                    told = f"registered: {registered}"
            except blockkv.DeviceError as error:
                told = str(error)
            store.put("big", memory)
            assert torch.equal(store.get("big"), memory)
            return told

    told = in_child(act)
    assert "RLIMIT_MEMLOCK" in told or told == "registered: False"


def test_no_descriptors_left(target: Path) -> None:
    """With every number of free descriptors an open succeeds, or ends with an error of ours."""

    def act() -> list[str]:
        with blockkv.open(target) as store:  # imports what is imported late
            exercise(store)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        taken: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        outcomes = []
        for _ in range(16):
            try:
                with blockkv.open(target) as store:
                    exercise(store, 100)
                    outcomes.append("opened")
            except blockkv.BlockKVError as error:
                outcomes.append(str(error))
            with contextlib.suppress(blockkv.BlockKVError):
                blockkv.format(target)
            os.close(taken.pop())
        return outcomes

    outcomes = in_child(act)
    refusals = [outcome for outcome in outcomes if outcome != "opened"]
    assert any("RLIMIT_NOFILE" in outcome for outcome in refusals), outcomes
    assert outcomes[-1] == "opened"
    with blockkv.open(target) as store:
        assert store.check(payload=True).ok


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_little_address_space(target: Path, engine: Any) -> None:
    """What does not fit into memory is refused by name; the store is as it was."""
    with blockkv.open(target) as store:
        store.put("large", payload(1, 24 << 20))
        exercise(store)

    def act() -> None:
        with blockkv.open(target, engine=engine) as store:
            exercise(store, 100)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (used + (12 << 20), resource.RLIM_INFINITY))
            for _ in range(3):
                with pytest.raises((MemoryError, blockkv.BlockKVError)):
                    store.get("large")
            exercise(store, 200, 4)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert torch.equal(store.get("large"), payload(1, 24 << 20))
            assert store.check(payload=True).ok

    in_child(act)


def test_memory_that_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot allocate"):
        aligned_memory(1 << 60)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """An empty cgroup that may use so much memory, of whichever version there is."""
    root = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes"
    if not root.is_dir():
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
        (root / "cgroup.subtree_control").write_text("+memory")
    group = root / f"blockkv-test.{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(limit_bytes))
        yield group
    finally:
        deadline = time.monotonic() + PATIENCE_S
        while group.exists() and time.monotonic() < deadline:
            try:
                group.rmdir()
            except OSError:  # the last process in it is still being reaped
                time.sleep(0.05)


@pytest.mark.requires_root
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_memory_pressure(loop_device: Any, engine: Any) -> None:
    """Much more goes through the store than may be in memory at once: nothing of it stays there."""
    device = loop_device(SIZE_BYTES, 4096)
    with device.open("r+b", buffering=0) as file:  # so that its image in memory is not charged to the child
        for _ in range(SIZE_BYTES >> 20):
            file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    blockkv.format(device, average_chunk="1MiB", force=True)
    with memory_cgroup(80 << 20) as group:

        def act() -> int:
            gc.disable()  # a collection would touch, and thereby copy, all that the parent had in memory
            (group / "cgroup.procs").write_text(str(os.getpid()))
            with blockkv.open(device, engine=engine) as store:
                for step in range(60):
                    value = payload(step, 3 << 20)
                    assert store.put(f"m{step}", value)
                    for number in range(max(0, step - 3), step):
                        found = store.get(f"m{number}")
                        assert found is None or torch.equal(found, payload(number, 3 << 20))
                assert store.check(payload=True).ok
                return int(store.stats()["chunks_evicted"])

        assert in_child(act) > 20


@pytest.mark.requires_root
def test_a_full_file_system(image_dir: Path) -> None:
    """A file with holes, on a file system without room for them."""
    mount_point = image_dir / "small"
    mount_point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", mount_point], check=True)
    try:
        path = mount_point / "store"
        with path.open("wb") as file:
            file.truncate(SIZE_BYTES)
        blockkv.format(path, average_chunk="64KiB", journal="1MiB")
        store = blockkv.open(path, commit_interval_ms=None, evict=False)
        there, refused = [], []
        for number in range(300):
            try:
                store.put(f"f{number}", payload(number, 200_000), durable=number % 10 == 0)
                there.append(number)
            except (blockkv.DeviceError, blockkv.StoreReadOnly, blockkv.StoreFull) as error:
                refused.append(error)
        assert len(there) > 20
        assert any("No space left" in str(error) for error in refused)
        for number in there:
            assert torch.equal(store.get(f"f{number}"), payload(number, 200_000))
        with contextlib.suppress(blockkv.StoreReadOnly):
            store.close()
        with pytest.raises(blockkv.DeviceError, match="bytes free"):
            blockkv.format(mount_point / "another", size=SIZE_BYTES)
        assert not (mount_point / "another").exists()
        with blockkv.open(path, read_only=True) as again:
            for number in (number for number in there if number % 10 == 0):
                assert torch.equal(again.get(f"f{number}"), payload(number, 200_000))
    finally:
        subprocess.run(["umount", "--lazy", mount_point], check=True)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_limit_on_file_sizes(target: Path, engine: Any) -> None:
    """RLIMIT_FSIZE: writes behind it fail with EFBIG, and the signal that comes with it is ignored."""

    def act() -> list[int]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        refused = 0
        store = None
        try:
            store = blockkv.open(target, engine=engine, commit_interval_ms=None)
            for number in range(100):
                try:
                    store.put(f"s{number}", payload(number, 500_000))
                except (blockkv.DeviceError, blockkv.StoreReadOnly):
                    refused += 1
                else:
                    assert torch.equal(store.get(f"s{number}"), payload(number, 500_000))
        except blockkv.DeviceError:  # the second copy of the superblock is at the end
            refused += 1
        if store is not None:
            with contextlib.suppress(blockkv.StoreReadOnly):
                store.close()
        return [refused]

    (refused,) = in_child(act)
    assert refused > 0
    with blockkv.open(target) as store:
        assert store.check(payload=True).ok


# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [5, None, 1.5, "", "with\0zero", [], object()])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(blockkv.InvalidArgument, match="path"):
        blockkv.open(path)
    with pytest.raises(blockkv.InvalidArgument, match="path"):
        blockkv.format(path)
    with pytest.raises(blockkv.InvalidArgument, match="path"):
        blockkv.format(path, size="64MiB")


@pytest.mark.filterwarnings("ignore:The given .* is not writable")
@pytest.mark.parametrize("size_bytes", [100, 4096, 50_000, 1 << 20])
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_outputs_in_read_only_memory(target: Path, tmp_path: Path, size_bytes: int, engine: Any) -> None:
    """A tensor does not say that its memory is read-only, and a copy to it would end the process."""
    content = tmp_path / "content"
    content.write_bytes(bytes(2 * size_bytes))
    with blockkv.open(target, engine=engine) as store, content.open("rb") as file:
        store.put("k", payload(1, size_bytes))
        mapped = mmap.mmap(file.fileno(), 2 * size_bytes, prot=mmap.PROT_READ)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        array = np.frombuffer(mapped, dtype=np.uint8, count=size_bytes)
        frozen = np.zeros(size_bytes, np.uint8)
        frozen.flags.writeable = False
        for out in (whole[:size_bytes], whole[1 : size_bytes + 1], whole[::2]):
            with pytest.raises(blockkv.InvalidArgument, match="read-only"):
                store.get("k", out=out)
            with pytest.raises(blockkv.InvalidArgument, match="read-only"):
                store.submit_get("k", out=out).result(PATIENCE_S)
        for buffer in (array, frozen, memoryview(mapped)[:size_bytes], bytes(size_bytes)):
            with pytest.raises(blockkv.LayoutMismatch, match="read-only"):
                store.get("k", out=buffer)
        writable = bytearray(size_bytes)
        assert store.get("k", out=writable)
        assert writable == payload(1, size_bytes).numpy().tobytes()
        assert content.read_bytes() == bytes(2 * size_bytes)
        del whole, out, array, buffer
