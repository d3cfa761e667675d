"""The ladder of refusals before a format, with real content and real use on real devices.

Each case proves the same things: the finding is named with its place and command, force does what it may
and no more, nothing is written, and the command clears what it says it clears.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from device_tools import LoopDevices, digest, in_child, mounted, read_only_user, run, shell, tool, unchanged

from blockkv.device.namespace import create_file, identify, open_namespace
from blockkv.device.occupancy import Finding, occupancy, refuse_if_occupied
from blockkv.errors import DeviceBusy, DeviceError, OccupiedError

MIB = 1 << 20
NOBODY = 65534
MAGIC = b"\x8bBLOCKKV"


def make_md_member(device: Path) -> None:
    """Write a version 1.2 RAID superblock, 4 KiB from the start (<linux/raid/md_p.h>, mdp_superblock_1).

    By hand, because mdadm makes none without the md driver; mdadm then has to agree that it is one.
    """
    sectors = int(tool("blockdev", "--getsize64", device)) // 512
    superblock = bytearray(260)
    array, member = bytes(range(16)), bytes(range(16, 32))
    struct.pack_into(
        "<IIII16s32sQiiQIi",
        superblock,
        0,
        0xA92B4EFC,
        1,
        0,
        0,
        array,
        b"host:0",
        1,
        1,
        0,
        sectors - 2048,
        0,
        2,
    )
    struct.pack_into("<QQQQII16s", superblock, 128, 2048, sectors - 2048, 8, 0, 0, 0, member)
    struct.pack_into("<QQQII", superblock, 192, 1, 1, (1 << 64) - 1, 0, 2)
    struct.pack_into("<HH", superblock, 256, 0, 1)
    total = sum(struct.unpack("<65I", superblock))
    struct.pack_into("<I", superblock, 216, ((total & 0xFFFFFFFF) + (total >> 32)) & 0xFFFFFFFF)
    put(device, 4096, superblock)
    assert "- correct" in tool("mdadm", "--examine", device)


def make_luks(device: Path) -> None:
    command = "cryptsetup luksFormat --batch-mode --type luks2 --pbkdf pbkdf2 --pbkdf-force-iterations 1000"
    subprocess.run([*command.split(), str(device), "-"], input=b"secret", check=True, capture_output=True)


def make_partition_table(device: Path, label: str) -> None:
    script = f"label: {label}\nstart=2048, size=2MiB\n"
    subprocess.run(["sfdisk", "-q", str(device)], input=script, text=True, check=True, capture_output=True)


def put(path: Path, offset_bytes: int, content: bytes | bytearray) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        file.write(content)
        os.fsync(file.fileno())


def kinds(path: Path, **options: object) -> list[str]:
    return [finding.kind for finding in occupancy(path, **options)]  # type: ignore[arg-type]


def assert_use(path: Path, what: str, command: str) -> list[Finding]:
    """The path is in use: both a plain and a forced check refuse with these words, and write nothing."""
    with unchanged(path):
        for force in (False, True):
            with pytest.raises(DeviceBusy) as caught:
                refuse_if_occupied(path, force=force)
            message = str(caught.value)
            assert str(path) in message
            assert "cannot be forced" in message
            assert what in message
            assert command in message
        found = occupancy(path)
    assert any(what in finding.what and finding.clear_command == command for finding in found)
    assert not any(finding.overridable for finding in found if what in finding.what)
    return found


def assert_content(path: Path, what: str, where: str, command: str) -> list[Finding]:
    """The path holds something: refused without force, listed with it, nothing written either way."""
    with unchanged(path):
        with pytest.raises(OccupiedError) as caught:
            refuse_if_occupied(path)
        overridden = refuse_if_occupied(path, force=True)
    message = str(caught.value)
    for words in (str(path), what, where, command):
        assert words in message
    assert all(finding.overridable for finding in overridden)
    return overridden


# content

SIGNATURES = [
    pytest.param("ext4", 16, lambda d: run("mkfs.ext4", "-q", "-L", "photos", d), "byte 1080", id="ext4"),
    pytest.param("xfs", 300, lambda d: run("mkfs.xfs", "-q", "-f", d), "byte 0", id="xfs"),
    pytest.param("swap", 16, lambda d: run("mkswap", d), "byte 4086", id="swap"),
    pytest.param("crypto_LUKS", 32, make_luks, "byte 0, 16384", id="luks"),
    pytest.param("LVM2_member", 16, lambda d: run("pvcreate", "-qq", d), "byte 536", id="lvm"),
    pytest.param("linux_raid_member", 16, make_md_member, "byte 4096", id="md"),
]
COMMANDS = {
    "crypto_LUKS": "cryptsetup erase {0} && wipefs -a {0}",
    "LVM2_member": "pvremove {0}",
    "linux_raid_member": "mdadm --zero-superblock {0}",
}


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4", "mkfs.xfs", "mkswap", "cryptsetup", "pvcreate", "mdadm", "wipefs")
@pytest.mark.parametrize(("name", "size_mib", "make", "where"), SIGNATURES)
def test_a_signature(
    loop_device: LoopDevices, name: str, size_mib: int, make: Callable[[Path], object], where: str
) -> None:
    device = loop_device(size_mib * MIB)
    assert occupancy(device) == []
    make(device)
    command = COMMANDS.get(name, "wipefs -a {0}").format(device)
    found = assert_content(device, f"{name} signature", where, command)
    assert [finding.kind for finding in found if finding.kind != "data"] == ["signature"]
    if name == "ext4":
        assert "label photos" in found[0].what
    clear(device, found)


def clear(path: Path, found: list[Finding]) -> None:
    """Run the commands the findings name; the device must then be free."""
    for finding in found:
        shell(finding.clear_command)
    assert occupancy(path) == []


@pytest.mark.requires_root
@pytest.mark.requires_tool("sfdisk", "wipefs")
@pytest.mark.parametrize("sector_bytes", [512, 4096])
@pytest.mark.parametrize("label", ["gpt", "dos"])
def test_a_partition_table(loop_device: LoopDevices, label: str, sector_bytes: int) -> None:
    device = loop_device(16 * MIB, sector_bytes)
    make_partition_table(device, label)
    where = f"byte {sector_bytes}, {16 * MIB - sector_bytes}" if label == "gpt" else "byte 510"
    found = assert_content(device, f"{label} partition table", where, f"wipefs -a {device}")
    assert {finding.kind for finding in found} == {"partition-table", "data"}
    clear(device, found)


@pytest.mark.requires_root
@pytest.mark.requires_tool("addpart")
def test_a_partition_the_kernel_knows(loop_device: LoopDevices) -> None:
    device = loop_device(8 * MIB)
    run("addpart", device, 1, 2048, 4096)
    (finding,) = assert_content(
        device, f"partition {device}p1, {2 * MIB} bytes", f"at byte {MIB}", f"partx --delete --nr 1 {device}"
    )
    assert finding.kind == "partition"
    assert occupancy(Path(f"{device}p1")) == []
    shell(finding.clear_command)
    assert occupancy(device) == []


@pytest.mark.parametrize("offset_bytes", [0, 12345, MIB - 1, 7 * MIB, 8 * MIB - 1])
def test_bytes_of_unknown_origin(block_targets: Callable[[int], Path], offset_bytes: int) -> None:
    path = block_targets(8 * MIB)
    put(path, offset_bytes, b"\x01")
    (finding,) = assert_content(
        path,
        "bytes that are not zero",
        f"from byte {offset_bytes} to byte {offset_bytes}",
        f"dd if=/dev/zero of={path}",
    )
    assert finding.kind == "data"
    put(path, 4 * MIB, b"\x01")  # in between nobody looks, and clearing touches only what it names
    shell(finding.clear_command)
    assert occupancy(path) == []
    with path.open("rb") as file:
        file.seek(4 * MIB)
        assert file.read(1) == b"\x01"


def test_both_ends_are_named(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(4 * MIB)
    put(path, 100, b"ab")
    put(path, 4 * MIB - 3, b"c")
    assert [finding.where for finding in occupancy(path)] == [
        "from byte 100 to byte 101",
        f"from byte {4 * MIB - 3} to byte {4 * MIB - 3}",
    ]


@pytest.mark.parametrize("size_bytes", [4096, MIB, MIB + 4096, 2 * MIB - 4096])
def test_small_targets(block_targets: Callable[[int], Path], size_bytes: int) -> None:
    path = block_targets(size_bytes)
    assert occupancy(path) == []
    put(path, size_bytes - 1, b"\x01")
    (finding,) = occupancy(path)
    assert finding.where == f"from byte {size_bytes - 1} to byte {size_bytes - 1}"
    shell(finding.clear_command)
    assert occupancy(path) == []


@pytest.mark.requires_root
def test_a_size_of_whole_sectors_only(loop_device: LoopDevices) -> None:
    """The last 512 bytes of an odd device are looked at too, also by direct I/O."""
    device = loop_device(3 * MIB + 512)
    put(device, 3 * MIB + 511, b"\x01")
    with exclusive(device) as descriptor:
        (finding,) = occupancy(device, descriptor=descriptor)
    assert finding.where == f"from byte {3 * MIB + 511} to byte {3 * MIB + 511}"


@contextmanager
def exclusive(path: Path) -> Iterator[int]:
    descriptor, _, _ = open_namespace(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_an_empty_file_is_free(image_dir: Path) -> None:
    (image_dir / "empty").touch()
    assert occupancy(image_dir / "empty") == []


def test_a_blockkv_store(block_targets: Callable[[int], Path]) -> None:
    """Recognised by any one of its superblocks; without the magic its bytes are just bytes."""
    path = block_targets(8 * MIB)
    places = (16, 256 * 1024 + 16, 16 - MIB)
    put(path, 7 * MIB + 16, MAGIC)
    with unchanged(path):
        with pytest.raises(
            OccupiedError, match=rf"a blockkv store.* byte {7 * MIB + 16}\).* dd if=/dev/zero of={path}"
        ):
            refuse_if_occupied(path, magic=MAGIC, magic_offsets=places)
        (finding,) = refuse_if_occupied(path, force=True, magic=MAGIC, magic_offsets=places)
        assert finding.kind == "blockkv"
        assert kinds(path) == ["data"]
        assert kinds(path, magic=MAGIC, magic_offsets=(0, 16, 8 * MIB - 1, 9 * MIB, -9 * MIB)) == ["data"]
    put(path, 16, MAGIC)
    (finding,) = occupancy(path, magic=MAGIC, magic_offsets=places)
    assert finding.where == f"superblocks at byte 16, {7 * MIB + 16}"
    clear(path, [finding])


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4")
def test_a_file_system_over_a_store_is_not_hidden_by_it(loop_device: LoopDevices) -> None:
    device = loop_device(16 * MIB)
    run("mkfs.ext4", "-q", device)
    put(device, 15 * MIB, MAGIC)
    assert kinds(device, magic=MAGIC, magic_offsets=(-MIB,)) == ["signature", "blockkv"]


def test_without_wipefs_it_says_so(
    block_targets: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = block_targets(MIB)
    monkeypatch.setattr("blockkv.device.occupancy.WIPEFS", "wipefs-that-is-not-installed")
    (finding,) = assert_content(path, "not installed", "in the whole device", "install util-linux")
    assert finding.kind == "unprobed"


# use


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4")
@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_a_mounted_file_system(loop_device: LoopDevices, sector_bytes: int) -> None:
    device = loop_device(16 * MIB, sector_bytes)
    run("mkfs.ext4", "-q", device)
    with mounted(device, "-o", "ro") as directory:
        command = f"umount {directory}"
        found = assert_use(device, f"ext4 file system mounted on {directory}", command)
        assert [finding.kind for finding in found] == ["mounted", "signature", "data"]
        # and so is the file below the device, which would have to be detached next
        found = assert_use(Path(identify(device).backing_file or ""), f"mounted on {directory}", command)
        assert [(finding.kind, finding.clear_command) for finding in found[:2]] == [
            ("mounted", command),
            ("loop", f"losetup -d {device}"),
        ]
        shell(command)
    assert kinds(device) == ["signature", "data"]


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4")
def test_a_mount_point_with_a_space(loop_device: LoopDevices, image_dir: Path) -> None:
    device = loop_device(16 * MIB)
    run("mkfs.ext4", "-q", device)
    directory = image_dir / "my data\\"
    directory.mkdir()
    run("mount", device, directory)
    finding = occupancy(device)[0]
    assert str(directory) in finding.what
    shell(finding.clear_command)
    assert kinds(device) == ["signature", "data"]


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.btrfs")
def test_every_member_of_a_mounted_btrfs(loop_device: LoopDevices) -> None:
    """Btrfs numbers its mounts itself, and only one member is named in mountinfo."""
    members = [loop_device(128 * MIB) for _ in range(2)]
    run("mkfs.btrfs", "-q", "-f", *members)
    with mounted(members[0], "-o", "ro") as directory:
        for member in members:
            assert_use(member, f"btrfs file system mounted on {directory}", f"umount {directory}")


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4", "addpart")
def test_a_mounted_partition_holds_its_disk(loop_device: LoopDevices) -> None:
    disk = loop_device(32 * MIB)
    run("addpart", disk, 1, 2048, 16 * 2048)
    run("addpart", disk, 2, 20 * 2048, 2 * 2048)
    first, second = Path(f"{disk}p1"), Path(f"{disk}p2")
    run("mkfs.ext4", "-q", first)
    with mounted(first, "-o", "ro") as directory:
        for path in (disk, first):
            assert_use(path, f"mounted on {directory}", f"umount {directory}")
        assert occupancy(second) == []  # its neighbour is nobody's business
    run("partx", "--delete", disk)


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4", "unshare")
def test_a_mount_in_another_namespace(loop_device: LoopDevices, image_dir: Path) -> None:
    """As inside a container: nothing in our own mountinfo."""
    device = loop_device(16 * MIB)
    run("mkfs.ext4", "-q", device)
    (directory := image_dir / "inside").mkdir()
    script = f"mount {device} {directory} && echo mounted && exec sleep 60"
    other = subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "mounted\n"
        assert not os.path.ismount(directory)
        what = f"mounted on {directory} in the mount namespace of pid {other.pid} (sleep)"
        found = assert_use(device, what, f"nsenter -t {other.pid} -m umount {directory}")
        with pytest.raises(DeviceBusy, match=f"pid {other.pid}"):
            open_namespace(device)
        shell(found[0].clear_command)
        assert kinds(device) == ["signature", "data"]
    finally:
        other.terminate()
        other.communicate()


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkswap", "swapon")
def test_active_swap(loop_device: LoopDevices) -> None:
    device = loop_device(4 * MIB)
    run("mkswap", device)
    run("swapon", device)
    try:
        assert_use(device, "active swap", f"swapoff {device}")
    finally:
        run("swapoff", device)
    assert kinds(device) == ["signature", "data"]


@pytest.mark.requires_root
def test_a_loop_device_over_it(loop_device: LoopDevices) -> None:
    lower = loop_device(4 * MIB)
    upper = Path(tool("losetup", "--find", "--show", lower))
    image = Path(identify(lower).backing_file or "")
    try:
        assert_use(lower, f"loop device {upper}", f"losetup -d {upper}")
        found = assert_use(image, f"loop device {lower}", f"losetup -d {lower}")
        assert [finding.clear_command for finding in found] == [f"losetup -d {upper}", f"losetup -d {lower}"]
        with exclusive(upper):
            assert kinds(lower) == ["loop"]
    finally:
        run("losetup", "--detach", upper)
    assert occupancy(lower) == []


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4")
def test_another_loop_device_over_the_same_file(loop_device: LoopDevices) -> None:
    device = loop_device(16 * MIB)
    other = Path(tool("losetup", "--find", "--show", identify(device).backing_file))
    assert occupancy(device) == []
    run("mkfs.ext4", "-q", other)
    with mounted(other, "-o", "ro") as directory:
        assert_use(device, f"mounted on {directory}", f"umount {directory}")
    with exclusive(other):
        assert kinds(device) == ["open", "signature", "data"]
    run("losetup", "--detach", other)


def test_an_open_store(block_targets: Callable[[int], Path]) -> None:
    path = block_targets(MIB)
    with exclusive(path) as descriptor:
        with pytest.raises(DeviceBusy, match=rf"held by pid {os.getpid()} \(.*fuser -v {path}"):
            refuse_if_occupied(path, force=True)
        # to whom holds it, it is free
        assert refuse_if_occupied(path, descriptor=descriptor) == []
        put_direct(descriptor, b"\x01")
        assert kinds(path, descriptor=descriptor) == ["data"]
    with subprocess.Popen(["sleep", "60"], stdin=path.open("rb")) as reader:  # merely reading is no use
        assert kinds(path) == ["data"]
        reader.kill()


def put_direct(descriptor: int, first: bytes) -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[: len(first)] = first
        os.pwrite(descriptor, memory, 0)


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4")
def test_the_second_look_sees_what_came_between(loop_device: LoopDevices, image_dir: Path) -> None:
    """Free at the first look, formatted by someone else, then opened by us: refused before any write."""
    device = loop_device(16 * MIB)
    assert refuse_if_occupied(device) == []
    run("mkfs.ext4", "-q", device)
    with exclusive(device) as descriptor:
        before = digest(device)
        with pytest.raises(OccupiedError, match="ext4 signature"):
            refuse_if_occupied(device, descriptor=descriptor)
        assert digest(device) == before
        assert subprocess.run(["mount", device, image_dir], capture_output=True, check=False).returncode != 0


def test_the_answer_is_about_the_open_file(image_dir: Path) -> None:
    """Not about what stands under its name by now."""
    path = Path(create_file(image_dir / "store", MIB))
    with exclusive(path) as descriptor:
        path.rename(image_dir / "moved")
        path.write_bytes(b"something else")
        assert occupancy(path, descriptor=descriptor) == []
        assert kinds(path) == ["data"]


@pytest.mark.requires_root
def test_a_device_that_may_not_be_read(loop_device: LoopDevices) -> None:
    device = loop_device(MIB)

    def act() -> None:
        read_only_user(NOBODY)
        occupancy(device)

    kind, message = in_child(act)
    assert kind == "DeviceError"
    assert "run as root" in message


@pytest.mark.parametrize("path", ["/dev", "/dev/null", "/nonexistent/store"])
def test_what_is_no_device(path: str) -> None:
    with pytest.raises(DeviceError):
        occupancy(path)


@pytest.mark.requires_root
def test_it_is_quick_and_reads_only_the_ends(loop_device: LoopDevices) -> None:
    device = loop_device(1 << 40)
    before = sectors_read(device)  # counted since boot, for whoever had the loop device
    started = time.monotonic()
    assert occupancy(device) == []
    assert time.monotonic() - started < 20  # all of it would take minutes
    assert (sectors_read(device) - before) * 512 < 16 * MIB


def sectors_read(device: Path) -> int:
    return int(Path("/sys/block", device.name, "stat").read_text().split()[2])
