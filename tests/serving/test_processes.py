"""Owners and clients that die, hang and fork: what they had comes back when nothing of it is under way."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from client_process import content
from serving_tools import OwnerProcess, Process, client_process, connected, wait_until

import blockkv
from blockkv.bench.device import PacedDevice, _limit, paced_device
from blockkv.errors import BlockKVError, DeviceBusy, DeviceError, OwnerLost

ROOT = Path(__file__).parents[2]
MEBIBYTE = 1 << 20

StartOwner = Callable[..., OwnerProcess]


@pytest.fixture
def slow_device() -> Iterator[PacedDevice]:
    """What is written to it is on its way until it is told to go on: requests outlive whoever is killed."""
    with paced_device(128 * MEBIBYTE, 400 * MEBIBYTE, 400 * MEBIBYTE) as device, device.joined():
        blockkv.format(device.path, average_chunk="64KiB", force=True)
        yield device
        go_on(device)


def hold(device: PacedDevice) -> None:
    """From now on nothing is written."""
    _limit(device.cgroup, device.path, device.read_bytes_per_s, 1)


def go_on(device: PacedDevice) -> None:
    """What was held is written."""
    _limit(device.cgroup, device.path, device.read_bytes_per_s, device.write_bytes_per_s)


def wait_for_requests(writer: Process) -> None:
    """The kernel has got something that a client process writes."""
    assert writer.line() == "writing"
    assert writer.line() == "under way"
    time.sleep(0.5)  # and not only its ring


def test_leases_and_pins_end_with_their_process(owner_process: StartOwner) -> None:
    owner = owner_process()
    with blockkv.open(owner.socket) as store:
        keys = [f"key {number}" for number in range(5)]
        store.put_many([(key, content(number, 4 * 16 * 1024)) for number, key in enumerate(keys)])
        with client_process(owner.socket, "hold", *keys) as holder:
            assert holder.line() == "holding"
            figures = store.stats()
            assert (figures["clients"], figures["client_leases"]) == (2, 5)
            info = store.entry("key 0")
            assert info is not None
            assert info.pins == 1
            assert store.delete("key 1")  # as a reader has it, its space stays
            store.commit()
            holder.end()
        wait_until(lambda: store.stats()["clients"] == 1, "the killed client is seen to be gone")
        wait_until(lambda: not store.stats()["clients_letting_go"], "and has let go")
        figures = store.stats()
        assert (figures["client_leases"], figures["client_puts"]) == (0, 0)
        info = store.entry("key 0")
        assert info is not None
        assert info.pins == 0
        assert store.put("key 1", content(9, 100))


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup")
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_space_of_a_killed_writer_is_free_when_its_writes_have_ended(
    slow_device: PacedDevice, owner_process: StartOwner, engine: str
) -> None:
    """The process is gone long before its writes are. Nobody gets their extents until then."""
    owner = owner_process(slow_device.path)
    hold(slow_device)
    with (
        blockkv.open(owner.socket) as store,
        client_process(owner.socket, "write", 4, 5 * MEBIBYTE, engine) as writer,
    ):
        wait_for_requests(writer)
        wait_until(lambda: store.stats()["client_puts"] == 4, "all of its puts have begun")
        writer.send(signal.SIGKILL)
        if engine == "io_uring":  # the other one's threads end only with their writes
            writer.end()
            wait_until(lambda: store.stats()["clients"] == 1, "the killed client is seen to be gone")
            time.sleep(0.2)
            assert store.stats()["clients_letting_go"] == 1
        figures = store.stats()
        assert figures["client_puts"] == 4
        assert figures["free_bytes"] == figures["data_bytes"] - 4 * 5 * MEBIBYTE
        assert not any(store.contains(f"torn/{number}") for number in range(4))
        go_on(slow_device)
        wait_until(lambda: store.stats()["clients"] == 1, "the killed client is seen to be gone")
        wait_until(lambda: not store.stats()["clients_letting_go"], "its writes have ended")
        figures = store.stats()
        assert figures["client_puts"] == 0
        assert figures["free_bytes"] == figures["data_bytes"]
        for number in range(4):
            assert store.put(f"torn/{number}", content(number, 4096))


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup")
def test_nobody_has_the_device_while_a_client_of_a_dead_owner_writes(
    slow_device: PacedDevice, owner_process: StartOwner
) -> None:
    """Neither another owner nor mount or mkfs, which ask for the same claim."""
    owner = owner_process(slow_device.path)

    def is_free() -> bool:
        with contextlib.suppress(OSError):
            os.close(os.open(slow_device.path, os.O_RDONLY | os.O_EXCL))
            return True
        return False

    hold(slow_device)
    with client_process(owner.socket, "write", 4, 5 * MEBIBYTE) as writer:
        wait_for_requests(writer)
        owner.end()
        writer.end()
        for _ in range(20):
            assert not is_free()
            time.sleep(0.01)
        go_on(slow_device)
        wait_until(is_free, "the last write has ended")
    with blockkv.open(slow_device.path) as store:
        assert store.check(payload=True).ok


def test_a_client_that_hangs_keeps_the_device_from_the_next_owner(owner_process: StartOwner) -> None:
    """It may have writes under way that nobody sees; the message says who it is."""
    owner = owner_process()
    with blockkv.open(owner.socket) as store:
        store.put("key 0", content(0, 4 * 16 * 1024), durable=True)
    with client_process(owner.socket, "hold", "key 0") as holder:
        assert holder.line() == "holding"
        holder.send(signal.SIGSTOP)
        owner.end()
        with pytest.raises(DeviceBusy, match=rf"pid {holder.pid} "):
            blockkv.open(owner.device)
        holder.send(signal.SIGCONT)
        wait_until(lambda: _opens(owner.device), "it has let go of the device by itself")
        assert holder.end() == -signal.SIGKILL


def _opens(device: Path) -> bool:
    try:
        blockkv.open(device).close()
    except DeviceBusy:
        return False
    return True


def test_clients_go_on_when_their_owner_is_back(owner_process: StartOwner) -> None:
    owner = owner_process()
    with (
        blockkv.open(owner.socket) as store,
        client_process(owner.socket, "obey") as other,
    ):
        assert other.line() == "ready"
        other.say("put theirs 1 70000")
        assert other.line() == "True"
        assert store.put("ours", content(2, 70000), durable=True)
        memory = blockkv.empty((70000,), torch.uint8)
        with store.register(memory):
            for _ in range(2):
                owner.end()
                assert store.get("ours") is None
                assert store.lookup(["ours"]) == 0
                assert not store.contains("ours")
                with pytest.raises(OwnerLost):
                    store.put("more", b"x")
                with pytest.raises(OwnerLost):
                    store.delete("ours")
                assert store.submit_get("ours").result(10) is None
                assert store.stats()["owner_connected"] == 0
                owner.again()
                wait_until(connected(store), "it is connected again")
                assert store.get("ours", memory)
                assert torch.equal(memory, content(2, 70000))
                assert store.stats()["get_owner_lost"] > 0

        def finds_what_it_put() -> bool:
            other.say("get theirs 1 70000")
            return other.line() == "True"

        wait_until(finds_what_it_put, "the other client finds what it put")


def test_a_watch_goes_on_with_the_next_owner(owner_process: StartOwner) -> None:
    """What went away with the one is told as gone, what others put meanwhile as stored."""
    owner = owner_process(None, "--commit-interval-ms", 3_600_000)
    with blockkv.open(owner.socket) as store:
        store.put_many([("a", bytes(10)), ("b", bytes(20)), ("c", bytes(30))], durable=True)
        store.put("lazy", bytes(40))
        watch = store.watch()
        assert {change.key for change in watch.take()} == {"a", "b", "c", "lazy"}
        owner.end()
        assert watch.take() == []
        with blockkv.open(owner.device) as direct:
            direct.delete("b")
            direct.delete("c")
            direct.put_many([("c", bytes(31)), ("d", bytes(50))])
        owner.again()
        wait_until(connected(store), "it is connected again")
        changes = watch.take()
        assert {(one.key, one.payload_bytes) for one in changes if not one.stored} == {
            ("b", 20),
            ("c", 30),
            ("lazy", 40),
        }
        assert {(one.key, one.payload_bytes) for one in changes if one.stored} == {("c", 31), ("d", 50)}
        store.put("e", bytes(60))
        assert watch.take() == [blockkv.Change("e", 60, True)]
        with pytest.raises(OwnerLost):
            store.commit()


def test_a_clean_end_of_the_owner_loses_nothing(owner_process: StartOwner) -> None:
    owner = owner_process(None, "--commit-interval-ms", 3_600_000)
    with blockkv.open(owner.socket) as store:
        store.put("lazy", content(1, 5000))
        assert owner.end(signal.SIGTERM) == 0
        assert not owner.socket.exists()
        owner.again()
        wait_until(connected(store), "it is connected again")
        assert torch.equal(store.get("lazy"), content(1, 5000))
        store.commit()  # nothing was lost, and the client can tell
        assert store.info()["recovery"]["was_clean"]


def test_a_commit_tells_once_of_what_went_away_with_an_owner(owner_process: StartOwner) -> None:
    owner = owner_process(None, "--commit-interval-ms", 3_600_000)
    with blockkv.open(owner.socket) as store:
        store.put("durable", content(1, 5000), durable=True)
        store.put("lazy", content(2, 5000))
        owner.end()
        owner.again()
        wait_until(connected(store), "it is connected again")
        assert store.contains("durable")
        assert not store.contains("lazy")
        with pytest.raises(OwnerLost, match="may not have been durable"):
            store.commit()
        store.commit()
        store.put("lazy", content(2, 5000))
        store.commit()
        owner.end()
        owner.again()
        wait_until(connected(store), "it is connected again")
        store.commit()
        assert torch.equal(store.get("lazy"), content(2, 5000))


def stop(process: Process) -> None:
    """SIGSTOP, and it has stopped."""
    process.send(signal.SIGSTOP)
    status = Path(f"/proc/{process.pid}/status")
    wait_until(lambda: "State:\tT" in status.read_text(), "it has stopped")


@pytest.mark.usefixtures("usual_patience")
def test_an_owner_that_does_not_answer_is_a_miss_in_time(owner_process: StartOwner) -> None:
    """In a second, and then at once: not in the half minute that others are waited for."""
    owner = owner_process()
    with blockkv.open(owner.socket) as store:
        store.put("key", content(1, 5000))
        stop(owner)
        begin_s = time.monotonic()
        assert store.lookup(["key"]) == 0
        first_s = time.monotonic() - begin_s
        begin_s = time.monotonic()
        for _ in range(100):
            assert store.lookup(["key"]) == 0
        more_s = time.monotonic() - begin_s
        assert store.get("key", deadline_s=0.2) is None
        assert first_s < 15
        assert more_s < 15
        owner.send(signal.SIGCONT)
        wait_until(lambda: store.lookup(["key"]) == 1, "it answers again")
        assert torch.equal(store.get("key"), content(1, 5000))
        wait_until(lambda: store.stats()["client_leases"] == 0, "the late answer's lease has come back")


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup")
def test_two_puts_of_a_key_of_which_one_hangs(slow_device: PacedDevice, owner_process: StartOwner) -> None:
    owner = owner_process(slow_device.path)
    hold(slow_device)
    with (
        blockkv.open(owner.socket) as store,
        client_process(owner.socket, "write", 1, 20 * MEBIBYTE) as writer,
    ):
        wait_for_requests(writer)
        stop(writer)
        go_on(slow_device)
        assert not store.contains("torn/0")
        begin_s = time.monotonic()
        assert store.put("torn/0", content(0, 20 * MEBIBYTE))
        assert time.monotonic() - begin_s < 60
        writer.send(signal.SIGCONT)
        assert writer.line() == "put 0"
        assert torch.equal(store.get("torn/0"), content(0, 20 * MEBIBYTE))
        wait_until(lambda: not store.stats()["client_puts"], "the second one has ended")
        figures = store.stats()
        assert figures["quarantined_bytes"] == 0
        assert figures["data_bytes"] - figures["free_bytes"] - figures["pending_free_bytes"] == 20 * MEBIBYTE


def test_a_put_with_a_deadline_is_dropped_in_time(owner_process: StartOwner) -> None:
    owner = owner_process()
    with blockkv.open(owner.socket) as store:
        store.put("key", content(1, 5000))
        stop(owner)
        begin_s = time.monotonic()
        assert store.put("late", content(2, 5000), deadline_s=0.3) is False
        assert time.monotonic() - begin_s < 15
        owner.send(signal.SIGCONT)
        wait_until(lambda: store.lookup(["key"]) == 1, "it answers again")
        wait_until(lambda: not store.stats()["client_puts"], "what was granted too late has come back")
        assert store.put("late", content(2, 5000))
        assert torch.equal(store.get("late"), content(2, 5000))
        assert store.stats()["put_dropped"] == 1


@pytest.mark.usefixtures("usual_patience")
def test_what_others_cannot_send_holds_up_nobody(owner_process: StartOwner) -> None:
    """Requests larger than the socket takes, while the owner hangs: look-ups give up as soon as without."""
    owner = owner_process()
    with blockkv.open(owner.socket) as store:
        store.put("key", content(1, 5000))
        stop(owner)

        def put() -> None:
            with contextlib.suppress(BlockKVError):
                store.put_many([(f"{number:4000}", b"x") for number in range(600)])

        threads = [threading.Thread(target=put, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        begin_s = time.monotonic()
        assert store.lookup(["key"]) == 0
        assert time.monotonic() - begin_s < 15
        owner.send(signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert store.put("again", content(2, 5000))  # records of such keys leave room for no others
        assert store.lookup(["again"]) == 1


def test_a_forked_child_keeps_nothing_open(owner_process: StartOwner) -> None:
    """It has no copy of the lifeline, the device or the connection: its parent's end is seen."""
    owner = owner_process()
    code = (
        "import os, sys, time, blockkv\n"
        f"store = blockkv.open({str(owner.socket)!r})\n"
        "store.put('key', b'x' * 5000)\n"
        "child = os.fork()\n"
        "if not child:\n    os.close(1)\n    time.sleep(60)\n    os._exit(0)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    child = int(done.stdout)
    try:
        with blockkv.open(owner.socket) as store:
            wait_until(
                lambda: store.stats()["clients"] == 1 and not store.stats()["clients_letting_go"],
                "the parent is seen to be gone",
            )
    finally:
        os.kill(child, signal.SIGKILL)


def test_another_store_at_the_same_socket_is_not_taken_for_the_first(
    owner_process: StartOwner, image_dir: Path
) -> None:
    owner = owner_process()
    with blockkv.open(owner.socket) as store:
        store.put("key", b"x", durable=True)
        owner.end(signal.SIGTERM)
        blockkv.format(owner.device, force=True)
        owner.again()
        time.sleep(1.5)
        assert store.get("key") is None
        with pytest.raises(OwnerLost):
            store.put("key", b"y")
        assert store.stats()["owner_connected"] == 0
    with blockkv.open(owner.socket) as fresh:
        assert len(fresh) == 0


def test_a_socket_that_is_left_behind_is_taken_over_and_a_live_one_is_not(
    owner_process: StartOwner, image_dir: Path, tmp_path: Path
) -> None:
    owner = owner_process()
    other = image_dir / "other.img"
    blockkv.format(other, size="16MiB")
    words = [sys.executable, "-m", "blockkv", "serve", other, "--socket", owner.socket, "--wait-s", "0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert f"served already, by pid {owner.pid}" in done.stderr
    owner.end()
    assert owner.socket.exists()
    owner.again()
    (tmp_path / "file").write_text("mine")
    words[-3] = tmp_path / "file"
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "is no socket" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_who_may_connect(owner_process: StartOwner) -> None:
    owner = owner_process(None, "--mode", "0660", "--group", "daemon")
    status = owner.socket.stat()
    assert status.st_mode & 0o777 == 0o660
    assert status.st_gid == 1
    code = (
        "import os, torch, blockkv.serving.opening; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        f"blockkv.open({str(owner.socket)!r})"
    )
    if os.geteuid() == 0:
        for parent in owner.socket.parents:
            if parent.owner() == "root" and len(parent.parts) > 2:
                parent.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Permission denied" in done.stderr
        group = code.replace("os.setgid(65534)", "os.setgid(1)") + ".put('key', b'x')"
        subprocess.run([sys.executable, "-c", group], check=True)
        with blockkv.open(owner.socket) as store:
            assert store.contains("key")


def test_systemd_is_told(image_dir: Path, tmp_path: Path, owner_process: StartOwner) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        os.environ["NOTIFY_SOCKET"] = str(tmp_path / "notify")
        try:
            owner = owner_process()
        finally:
            del os.environ["NOTIFY_SOCKET"]
        assert manager.recv(100) == b"READY=1"
        assert owner.end(signal.SIGTERM) == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_operations_under_way_when_the_owner_dies(owner_process: StartOwner) -> None:
    """Whatever the moment: an answer, a miss or OwnerLost, and right bytes."""
    owner = owner_process()
    problems: list[BaseException] = []
    done = threading.Event()
    with blockkv.open(owner.socket) as store:
        store.put_many([(f"key {number}", content(number, 200_000)) for number in range(20)], durable=True)

        def run(number: int) -> None:
            try:
                for turn in itertools.count():
                    if done.is_set():
                        return
                    with contextlib.suppress(OwnerLost):  # eight keys: nothing may have to be evicted
                        store.put(f"fresh {number} {turn % 8}", content(number, 300_000))
                    found = store.get(f"key {number}")
                    assert found is None or torch.equal(found, content(number, 200_000))
                    future = store.submit_get(f"key {number + 1}", preload=True)
                    found = future.result(20)
                    assert found is None or torch.equal(found, content(number + 1, 200_000))
                    with contextlib.suppress(OwnerLost):
                        store.commit()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(0.4)
            owner.end()
            owner.again()
        done.set()
        for thread in threads:
            thread.join()
        assert not problems
        wait_until(connected(store), "it is connected again")
        with contextlib.suppress(OwnerLost):
            store.commit()  # it may have to tell of the last puts
        for number in range(20):
            assert torch.equal(store.get(f"key {number}"), content(number, 200_000))
        figures = store.stats()
        assert (figures["client_leases"], figures["client_puts"]) == (0, 0)


def test_the_soak_finds_nothing(image_dir: Path) -> None:
    """A quarter of a minute of it; ten minutes by hand."""
    words = [sys.executable, ROOT / "tools" / "serve_soak.py", "--minutes", "0.25", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_store_that_cannot_be_served_says_why(image_dir: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "blockkv", "serve", image_dir / "none", "--socket", tmp_path / "s"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "none" in done.stderr
    assert not (tmp_path / "s").exists()
    with pytest.raises(DeviceError):
        blockkv.open(f"unix:{tmp_path / 's'}")
