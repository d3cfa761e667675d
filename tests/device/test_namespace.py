"""Probing, identifying and opening: on files, loop devices with both LBA sizes, and partitions of them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from device_tools import LoopDevices, file_system, in_child, mounted, read_only_user, run, tool, unchanged

from blockkv.device.base import Limits
from blockkv.device.namespace import create_file, identify, open_namespace, probe, resolve
from blockkv.errors import (
    BlockKVError,
    DeviceBusy,
    DeviceError,
    DeviceReadOnly,
    DeviceTooSmall,
    InvalidArgument,
    OccupiedError,
)

MIB = 1 << 20
NOBODY = 65534


@contextmanager
def opened(path: Path | str, **options: object) -> Iterator[int]:
    descriptor, _, _ = open_namespace(path, wait_s=0.05, **options)  # type: ignore[arg-type]
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refusal(path: Path | str, **options: object) -> BlockKVError:
    """Open and give back the refusal; the wait is short because these do not go away."""
    with pytest.raises(BlockKVError) as caught, opened(path, **options):
        pass
    return caught.value


@pytest.fixture
def file(image_dir: Path) -> Path:
    return Path(create_file(image_dir / "store", MIB))


@pytest.fixture
def disk_dir() -> Iterator[Path]:
    """A directory on the disk file system, whose limits differ from those of memory."""
    with tempfile.TemporaryDirectory(prefix="blockkv-test.", dir="/var/tmp") as name:
        yield Path(name)


# resolve


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda path: path.mkdir(), errno.EISDIR, "directory"),
        (lambda path: os.mkfifo(path), errno.EINVAL, "FIFO"),
        (lambda path: path.symlink_to("/dev/null"), errno.ENOTBLK, "/dev/null is a character device"),
        (lambda path: path.symlink_to(path), errno.ELOOP, "circle"),
        (lambda path: path.symlink_to("absent"), errno.ENOENT, "No such file"),
        (lambda path: None, errno.ENOENT, "No such file"),
    ],
    ids=["directory", "fifo", "character-device", "circle", "dangling", "missing"],
)
def test_resolve_refuses_what_is_no_device(
    image_dir: Path, make: Callable[[Path], object], code: int, words: str
) -> None:
    path = image_dir / "thing"
    make(path)
    for function in (resolve, probe, identify, open_namespace):
        with pytest.raises(DeviceError, match=words) as caught:
            function(path)
        assert caught.value.errno == code
    assert "\n" not in str(caught.value)


def test_resolve_follows_links_to_one_name(file: Path, image_dir: Path) -> None:
    (image_dir / "first").symlink_to(file)
    (image_dir / "second").symlink_to("first")
    assert resolve(image_dir / "second") == str(file)
    assert resolve(os.path.relpath(file)) == str(file)


# probe


@pytest.mark.requires_root
@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_limits_of_a_loop_device(loop_device: LoopDevices, sector_bytes: int) -> None:
    device = loop_device(8 * MIB, sector_bytes)
    queue = Path("/sys/block", device.name, "queue")
    limits = probe(device)
    assert limits == Limits(
        size_bytes=int(tool("blockdev", "--getsize64", device)),
        lba_bytes=int(tool("blockdev", "--getss", device)),
        memory_alignment_bytes=int((queue / "dma_alignment").read_text()) + 1,
        max_transfer_bytes=min(512, int((queue / "max_sectors_kb").read_text())) * 1024,
        volatile_write_cache=(queue / "write_cache").read_text().strip() == "write back",
        fua=(queue / "fua").read_text().strip() == "1",
        discard_granularity_bytes=int((queue / "discard_granularity").read_text()),
        rotational=False,
        read_only=False,
    )
    assert (limits.size_bytes, limits.lba_bytes) == (8 * MIB, sector_bytes)


@pytest.mark.requires_root
def test_limits_follow_the_queue(loop_device: LoopDevices) -> None:
    device = loop_device(8 * MIB, 4096)
    queue = Path("/sys/block", device.name, "queue")
    settings = {"write_cache": "write through", "max_sectors_kb": "130", "rotational": "1"}
    defaults = {name: (queue / name).read_text() for name in settings}
    try:
        for name, value in settings.items():
            (queue / name).write_text(value)
        limits = probe(device)
    finally:
        for name, value in defaults.items():  # they would outlive the detached device
            (queue / name).write_text(value)
    assert not limits.volatile_write_cache
    assert limits.max_transfer_bytes == 128 * 1024  # whole pages
    assert limits.rotational


@pytest.mark.requires_root
def test_a_device_that_cannot_discard_says_so() -> None:
    """A loop device discards by punching holes, and ramfs has none."""
    with file_system("ramfs") as directory:
        (directory / "image").write_bytes(bytes(MIB))
        device = attach_again(directory / "image")
        try:
            assert probe(device).discard_granularity_bytes == 0
        finally:
            run("losetup", "--detach", device)


@pytest.mark.requires_root
@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_reported_alignment_is_what_the_kernel_takes(loop_device: LoopDevices, sector_bytes: int) -> None:
    """One request at the limits succeeds, half the LBA size fails."""
    with opened(loop_device(8 * MIB, sector_bytes)) as descriptor, mmap.mmap(-1, MIB) as memory:
        limits = probe(f"/proc/self/fd/{descriptor}")
        offset = limits.memory_alignment_bytes
        view = memoryview(memory)
        assert (
            os.preadv(descriptor, [view[offset : offset + limits.lba_bytes]], limits.lba_bytes)
            == sector_bytes
        )
        with pytest.raises(OSError, match="Invalid argument"):
            os.preadv(descriptor, [view[: limits.lba_bytes // 2]], 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.preadv(descriptor, [view[: limits.lba_bytes]], limits.lba_bytes // 2)
        view.release()


@pytest.mark.requires_root
def test_a_partition_inherits_the_queue_of_its_disk(loop_device: LoopDevices) -> None:
    disk = loop_device(8 * MIB, 4096)
    with partition_of(disk, start_bytes=MIB, size_bytes=2 * MIB) as partition:
        limits, whole = probe(partition), probe(disk)
        assert limits.size_bytes == 2 * MIB
        assert limits.lba_bytes == 4096
        assert limits.max_transfer_bytes == whole.max_transfer_bytes
        assert limits.discard_granularity_bytes == whole.discard_granularity_bytes == 4096
        assert limits.volatile_write_cache == whole.volatile_write_cache
        identity = identify(partition)
        assert (identity.kind, identity.disk) == ("partition", disk.name)
        assert identity.backing_file == identify(disk).backing_file
        with opened(partition):
            message = str(refusal(disk))
            assert "is held by" in message
            assert f"pid {os.getpid()}" in message


@contextmanager
def partition_of(disk: Path, start_bytes: int, size_bytes: int) -> Iterator[Path]:
    """Have the kernel make partition 1 of a disk, without a table on it."""
    run("addpart", disk, 1, start_bytes // 512, size_bytes // 512)
    try:
        yield Path(f"{disk}p1")
    finally:
        run("delpart", disk, 1)


def test_limits_of_a_file_in_memory(file: Path) -> None:
    """tmpfs does not tell its alignment: a page fits every device."""
    assert probe(file) == Limits(MIB, 4096, 4096, 512 * 1024, True, False, 0, False, False)


def test_limits_of_a_file_on_disk(disk_dir: Path) -> None:
    path = create_file(disk_dir / "store", MIB)
    limits = probe(path)
    assert limits.size_bytes == MIB
    assert limits.lba_bytes in (512, 4096)
    assert 4096 % limits.memory_alignment_bytes == 0
    assert limits.max_transfer_bytes == 512 * 1024
    assert (limits.volatile_write_cache, limits.fua, limits.discard_granularity_bytes) == (True, False, 0)
    with opened(path) as descriptor, mmap.mmap(-1, 4096) as memory:
        assert os.preadv(descriptor, [memory], limits.lba_bytes) == 4096


@pytest.mark.requires_root
@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_a_file_has_the_alignment_of_the_disk_below(loop_device: LoopDevices, sector_bytes: int) -> None:
    """statx tells it on ext4."""
    device = loop_device(32 * MIB, sector_bytes)
    run("mkfs.ext4", "-q", device)
    with mounted(device) as directory:
        limits = probe(create_file(directory / "store", MIB))
        assert limits.lba_bytes == sector_bytes
        assert limits.memory_alignment_bytes == probe(device).memory_alignment_bytes


@pytest.mark.requires_root
def test_a_file_that_journals_its_data_is_refused(loop_device: LoopDevices) -> None:
    """open(2) takes O_DIRECT there and the kernel goes through the page cache all the same."""
    device = loop_device(32 * MIB)
    run("mkfs.ext4", "-q", device)
    with mounted(device, "-o", "data=journal") as directory:
        path = create_file(directory / "store", MIB)
        assert "direct I/O is not possible" in str(refusal(path))
        with pytest.raises(DeviceError, match="direct I/O is not possible"):
            probe(path)


@pytest.mark.requires_root
def test_a_file_system_without_direct_io_is_refused() -> None:
    with file_system("ramfs") as directory:
        (directory / "store").write_bytes(bytes(MIB))
        error = refusal(directory / "store")
    assert isinstance(error, DeviceError)
    assert "ramfs" in str(error)
    assert "O_DIRECT" in str(error)


@pytest.mark.requires_root
def test_a_file_on_overlay_is_as_good_as_the_file_below(image_dir: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (image_dir / name).mkdir()
    layers = f"lowerdir={image_dir}/lower,upperdir={image_dir}/upper,workdir={image_dir}/work"
    run("mount", "-t", "overlay", "overlay", "-o", layers, image_dir / "merged")
    try:
        path = create_file(image_dir / "merged" / "store", MIB)
        with opened(path) as descriptor, mmap.mmap(-1, 4096) as memory:
            assert os.pwritev(descriptor, [memory], 4096) == 4096
            assert isinstance(refusal(path), DeviceBusy)
        assert probe(path).lba_bytes == 4096
    finally:
        run("umount", image_dir / "merged")


# identify


@pytest.mark.requires_root
def test_identity_of_a_loop_device(loop_device: LoopDevices) -> None:
    device = loop_device(MIB)
    identity = identify(device)
    number = device.stat().st_rdev
    assert (identity.kind, identity.disk) == ("loop", device.name)
    assert (identity.major, identity.minor) == (os.major(number), os.minor(number))
    assert identity.backing_file == tool("losetup", "--noheadings", "--output", "BACK-FILE", device)
    assert (identity.nguid, identity.eui64, identity.nsid, identity.serial) == (None, None, None, None)


def test_identity_of_a_file(file: Path) -> None:
    identity = identify(file)
    assert (identity.kind, identity.path, identity.disk) == ("file", str(file), None)
    assert (identity.major, identity.minor) == (os.major(file.stat().st_dev), os.minor(file.stat().st_dev))


# opening, alone


def test_open_gives_a_direct_close_on_exec_descriptor(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(4 * MIB)
    descriptor, canonical, limits = open_namespace(path)
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        assert flags & os.O_DIRECT
        assert flags & os.O_ACCMODE == os.O_RDWR
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert (canonical, limits.size_bytes) == (str(path), 4 * MIB)
        assert not limits.read_only
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    finally:
        os.close(descriptor)


def test_a_second_opener_in_this_process_is_refused(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(MIB)
    with opened(path), unchanged(path):
        error = refusal(path)
        assert isinstance(error, DeviceBusy)
        assert error.errno == errno.EBUSY
        assert f"pid {os.getpid()}" in str(error)
        assert "this process" in str(error)
    with opened(path):  # and free again
        pass


def test_a_second_opener_in_another_process_is_refused(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(MIB)
    with opened(path) as descriptor, unchanged(path):

        def act() -> None:
            os.close(descriptor)  # fork copied it
            open_namespace(path, wait_s=0.05)

        kind, message = in_child(act)
    assert kind == "DeviceBusy"
    assert f"pid {os.getpid()} (" in message
    assert "this process" not in message
    assert str(path) in message


def test_every_name_of_a_file_is_the_same_file(file: Path, image_dir: Path) -> None:
    (image_dir / "hard").hardlink_to(file)
    (image_dir / "soft").symlink_to(file)
    with opened(file):
        for name in ("hard", "soft"):
            assert isinstance(refusal(image_dir / name), DeviceBusy)
            kind, _ = in_child(lambda name=name: open_namespace(image_dir / name, wait_s=0.05))
            assert kind == "DeviceBusy"


@pytest.mark.requires_root
def test_every_node_of_a_device_is_the_same_device(loop_device: LoopDevices) -> None:
    """A device node elsewhere has an inode of its own: flock does not see it, O_EXCL does."""
    device = loop_device(MIB)
    node = Path(tempfile.mkdtemp(dir="/dev")) / "other"
    os.mknod(node, stat.S_IFBLK | 0o600, device.stat().st_rdev)
    try:
        with opened(device):
            assert isinstance(refusal(node), DeviceBusy)
    finally:
        node.unlink()
        node.parent.rmdir()


def test_of_racing_threads_one_wins(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(MIB)
    for _ in range(5):
        barrier = threading.Barrier(6)
        outcomes: list[int | DeviceBusy] = []

        def race(barrier: threading.Barrier = barrier, outcomes: list[int | DeviceBusy] = outcomes) -> None:
            barrier.wait()
            try:
                outcomes.append(open_namespace(path, wait_s=0)[0])
            except DeviceBusy as error:
                outcomes.append(error)

        threads = [threading.Thread(target=race) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [outcome for outcome in outcomes if isinstance(outcome, int)]
        for winner in winners:
            os.close(winner)
        assert len(winners) == 1
        assert len(outcomes) == 6


def test_a_lock_that_goes_away_in_time_is_waited_for(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(MIB)
    holder, _, _ = open_namespace(path)
    timer = threading.Timer(0.2, os.close, [holder])
    started = time.monotonic()
    timer.start()
    descriptor, _, _ = open_namespace(path, wait_s=60)
    assert time.monotonic() - started >= 0.15
    timer.join()
    os.close(descriptor)


def test_the_lock_of_a_killed_process_is_free(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(MIB)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        open_namespace(path)
        os.write(writer, b"x")
        signal.pause()
    assert os.read(reader, 1) == b"x"
    assert f"pid {child} (" in str(refusal(path))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    with opened(path):
        pass


# readers


def test_readers_share_and_exclude_writers(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(MIB)
    with opened(path, read_only=True), opened(path, read_only=True) as second:
        assert fcntl.fcntl(second, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert isinstance(refusal(path), DeviceBusy)


def test_an_inspector_without_lock_works_on_a_live_store(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(MIB)
    with opened(path):
        assert isinstance(refusal(path, read_only=True), DeviceBusy)
        descriptor, _, limits = open_namespace(path, read_only=True, lock=False)
        assert not limits.read_only  # that is the device's own state
        os.close(descriptor)
    with opened(path, read_only=True, lock=False), opened(path):  # and is in nobody's way
        pass


def test_only_readers_go_without_a_lock(file: Path) -> None:
    assert isinstance(refusal(file, lock=False), InvalidArgument)


@pytest.mark.requires_root
def test_a_mounted_device_may_be_inspected(loop_device: LoopDevices) -> None:
    device = loop_device(32 * MIB)
    run("mkfs.ext4", "-q", device)
    with mounted(device), opened(device, read_only=True, lock=False):
        pass


# who may write


@pytest.mark.requires_root
def test_a_read_only_device_is_refused_to_writers(loop_device: LoopDevices) -> None:
    device = loop_device(MIB, read_only=True)
    with unchanged(device):
        error = refusal(device)
    assert isinstance(error, DeviceReadOnly)
    assert "--setrw" in str(error)
    assert probe(device).read_only
    descriptor, _, limits = open_namespace(device, read_only=True)
    assert limits.read_only
    os.close(descriptor)


@pytest.mark.requires_root
def test_a_read_only_file_system_is_refused_to_writers(loop_device: LoopDevices) -> None:
    device = loop_device(32 * MIB)
    run("mkfs.ext4", "-q", device)
    with mounted(device) as directory:
        create_file(directory / "store", MIB)
    with mounted(device, "-o", "ro") as directory:
        error = refusal(directory / "store")
        assert isinstance(error, DeviceReadOnly)
        assert error.errno == errno.EROFS
        assert "remount" in str(error)
        assert probe(directory / "store").read_only
        assert isinstance(refusal(directory / "new", create_size=MIB), DeviceReadOnly)


@pytest.mark.requires_root
def test_permissions(image_dir: Path, loop_device: LoopDevices) -> None:
    path = Path(create_file(image_dir / "store", MIB))
    for directory in (image_dir, image_dir.parent):
        directory.chmod(0o755)
    device = loop_device(MIB)

    def attempt(target: Path) -> tuple[str, str]:
        def act() -> None:
            read_only_user(NOBODY)
            open_namespace(target)

        return in_child(act)

    kind, message = attempt(path)
    assert kind == "DeviceError"
    assert f"user {NOBODY}" in message
    assert "mode 0600" in message

    path.chmod(0o644)
    kind, message = attempt(path)
    assert kind == "DeviceReadOnly"
    assert "read_only=True" in message

    kind, message = attempt(device)
    assert kind == "DeviceError"
    assert "root" in message


@pytest.mark.requires_root
def test_an_immutable_file_is_refused_to_writers(loop_device: LoopDevices) -> None:
    device = loop_device(32 * MIB)
    run("mkfs.ext4", "-q", device)
    with mounted(device) as directory:
        path = Path(create_file(directory / "store", MIB))
        run("chattr", "+i", path)
        error = refusal(path)
        run("chattr", "-i", path)
    assert isinstance(error, DeviceReadOnly)
    assert "lsattr" in str(error)


# in use


@pytest.mark.requires_root
@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_a_mounted_device_is_refused_at_once(loop_device: LoopDevices, sector_bytes: int) -> None:
    device = loop_device(32 * MIB, sector_bytes)
    run("mkfs.ext4", "-q", device)
    with mounted(device, "-o", "ro") as directory, unchanged(device):
        started = time.monotonic()
        with pytest.raises(DeviceBusy) as caught:
            open_namespace(device, wait_s=60)
        assert time.monotonic() - started < 30  # waiting is for locks
        assert f"mounted on {directory}" in str(caught.value)
        assert f"umount {directory}" in str(caught.value)
        with pytest.raises(DeviceBusy) as caught:
            open_namespace(device, read_only=True)
        assert f"umount {directory}" in str(caught.value)
        assert "pid" not in str(caught.value)
    with opened(device):
        pass


@pytest.mark.requires_root
def test_the_backing_file_of_a_loop_device_is_refused(loop_device: LoopDevices) -> None:
    device = loop_device(MIB)
    path = Path(identify(device).backing_file or "")
    with unchanged(path):
        error = refusal(path)
    assert isinstance(error, DeviceBusy)
    assert f"losetup -d {device}" in str(error)
    with opened(path, read_only=True):  # reading harms nobody
        pass


@pytest.mark.requires_root
def test_two_loop_devices_over_the_same_bytes_are_one(loop_device: LoopDevices) -> None:
    first = loop_device(4 * MIB)
    path = identify(first).backing_file or ""
    same = attach_again(path)
    with opened(first), unchanged(first):
        error = refusal(same)
        assert isinstance(error, DeviceBusy)
        assert f"on {first}" in str(error)
    with opened(same):  # nobody holds the other one now
        pass
    run("losetup", "--detach", same)


@pytest.mark.requires_root
def test_loop_devices_over_different_bytes_are_independent(image_dir: Path) -> None:
    path = image_dir / "image"
    path.write_bytes(bytes(4 * MIB))
    low = attach_again(path, "--sizelimit", 2 * MIB)
    high = attach_again(path, "--offset", 2 * MIB)
    with opened(low), opened(high):
        pass


@pytest.mark.requires_root
def test_a_loop_device_over_a_file_somebody_has_locked_is_refused(image_dir: Path) -> None:
    path = create_file(image_dir / "store", MIB)
    with opened(path):
        device = attach_again(path)
        error = refusal(device)
        assert isinstance(error, DeviceBusy)
        assert f"on {path}" in str(error)


@pytest.mark.requires_root
def test_a_loop_device_over_an_unlinked_file_is_usable(loop_device: LoopDevices) -> None:
    device = loop_device(MIB)
    Path(identify(device).backing_file or "").unlink()
    with opened(device):
        pass


def attach_again(path: Path | str, *options: object) -> Path:
    return Path(tool("losetup", "--find", "--show", *options, path))


@pytest.mark.requires_root
def test_swap_is_refused(loop_device: LoopDevices) -> None:
    device = loop_device(4 * MIB)
    run("mkswap", device)
    run("swapon", device)
    try:
        error = refusal(device)
    finally:
        run("swapoff", device)
    assert isinstance(error, DeviceBusy)
    assert f"swapoff {device}" in str(error)


@pytest.mark.requires_root
def test_a_swap_file_is_refused(disk_dir: Path) -> None:
    path = Path(create_file(disk_dir / "swap", 4 * MIB))
    run("dd", "if=/dev/zero", f"of={path}", "bs=1M", "count=4", "conv=notrunc,fsync")
    run("mkswap", path)
    run("swapon", path)
    try:
        error = refusal(path)
    finally:
        run("swapoff", path)
    assert isinstance(error, DeviceBusy)
    assert f"swapoff {path}" in str(error)


# sizes and new files


def test_an_empty_file_is_too_small(image_dir: Path) -> None:
    (image_dir / "empty").touch()
    assert isinstance(refusal(image_dir / "empty"), DeviceTooSmall)


@pytest.mark.requires_root
def test_a_detached_loop_device_has_no_bytes(loop_device: LoopDevices) -> None:
    device = loop_device(MIB)
    run("losetup", "--detach", device)
    error = refusal(device)
    assert isinstance(error, DeviceError)
    assert "attached" in str(error) or "no device" in str(error)


def test_create_file_allocates_all_of_it(disk_dir: Path) -> None:
    path = Path(create_file(disk_dir / "store", 3 * MIB))
    status = path.stat()
    assert status.st_size == 3 * MIB
    assert status.st_blocks * 512 >= 3 * MIB
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert path.read_bytes() == bytes(3 * MIB)


@pytest.mark.requires_root
def test_create_file_that_does_not_fit_leaves_nothing() -> None:
    with file_system("tmpfs", "-o", "size=4M") as directory:
        with pytest.raises(
            DeviceError, match=r"allocating 8388608 bytes failed.* 4194304 bytes free"
        ) as caught:
            create_file(directory / "store", 8 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert not list(directory.iterdir())
        (empty := directory / "empty").touch()
        with pytest.raises(DeviceError):
            create_file(empty, 8 * MIB)
        assert empty.stat().st_size == 0  # it was there before


def test_create_file_does_not_overwrite_unless_told(image_dir: Path) -> None:
    path = image_dir / "letters"
    path.write_bytes(b"dear all")
    with pytest.raises(OccupiedError, match=r"holds 8 bytes.* rm "):
        create_file(path, MIB)
    assert path.read_bytes() == b"dear all"
    create_file(path, MIB, overwrite=True)
    assert path.read_bytes() == bytes(MIB)


def test_create_file_does_not_overwrite_what_is_open(file: Path) -> None:
    with opened(file), pytest.raises(DeviceBusy):
        create_file(file, MIB, overwrite=True, wait_s=0)


@pytest.mark.parametrize("size_bytes", [0, -4096, 4095])
def test_create_file_takes_whole_units(image_dir: Path, size_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match=str(size_bytes)):
        create_file(image_dir / "store", size_bytes)
    assert not list(image_dir.iterdir())


def test_a_mistyped_device_does_not_become_a_file() -> None:
    path = Path("/dev/nvme77n1-typo")
    with pytest.raises(DeviceError, match="no such device"):
        open_namespace(path, create_size=MIB)
    assert not path.exists()


def test_create_file_in_a_missing_directory(image_dir: Path, disk_dir: Path) -> None:
    for directory in (image_dir, disk_dir):
        with pytest.raises(DeviceError, match="cannot be used: No such file"):
            create_file(directory / "absent" / "store", MIB)


def test_open_creates_only_where_nothing_is(image_dir: Path) -> None:
    path = image_dir / "store"
    with opened(path, create_size=MIB) as descriptor:
        assert os.fstat(descriptor).st_size == MIB
        os.pwritev(descriptor, [mmap.mmap(-1, 4096)], 0)
    with opened(path, create_size=2 * MIB) as descriptor:
        assert os.fstat(descriptor).st_size == MIB  # as it is
    assert isinstance(refusal(path, create_size=MIB, read_only=True), InvalidArgument)


@pytest.mark.requires_root
def test_a_device_is_not_created(loop_device: LoopDevices) -> None:
    assert isinstance(refusal(loop_device(MIB), create_size=MIB), InvalidArgument)


def test_a_failed_open_leaks_nothing(file: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with opened(file):
        before = count()
        refusal(file)
        assert count() == before


def test_run_helper_reports_failures() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run("false")
