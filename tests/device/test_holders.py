"""Describing what is stacked on a device, and what is left when sysfs is not there.

The trees are those of sysfs on Linux 6.1 with LVM, dm-crypt, a plain mapping and RAID over an NVMe
namespace; arrays and mappings themselves need drivers that not every kernel has.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from device_tools import LoopDevices, file_system, mounted, run

from blockkv.device import holders
from blockkv.device.base import Limits
from blockkv.device.namespace import identify, probe
from blockkv.device.occupancy import refuse_if_occupied
from blockkv.errors import DeviceBusy

MIB = 1 << 20


def write_tree(root: Path, attributes: dict[str, str]) -> None:
    for name, value in attributes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(value + "\n")


@pytest.fixture
def sysfs(tmp_path: Path, loop_device: LoopDevices, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A sysfs in which a real device of ours is an NVMe namespace: (its directory, its node)."""
    device = loop_device(MIB)
    number = device.stat().st_rdev
    disk = tmp_path / "devices" / "nvme0n1"
    (disk / "holders").mkdir(parents=True)
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk)
    write_tree(disk, {"dev": f"{os.major(number)}:{os.minor(number)}"})
    monkeypatch.setattr(holders, "SYSFS", tmp_path)
    return disk, device


@pytest.mark.requires_root
@pytest.mark.parametrize(
    ("name", "attributes", "what", "command"),
    [
        (
            "dm-0",
            {"dm/name": "my--vg-my--lv", "dm/uuid": "LVM-oJ6G8A"},
            "LVM logical volume my--vg-my--lv (dm-0)",
            "vgchange -an my-vg",
        ),
        (
            "dm-0",
            {"dm/name": "vault", "dm/uuid": "CRYPT-LUKS2-a83d7d0b-vault"},
            "encrypted mapping vault (dm-0)",
            "cryptsetup close vault",
        ),
        (
            "dm-3",
            {"dm/name": "mpatha", "dm/uuid": "mpath-eui.01000000010000005cd2e4"},
            "multipath device mpatha (dm-3), which is the one to use instead",
            "multipath -f mpatha",
        ),
        ("dm-1", {"dm/name": "plain", "dm/uuid": ""}, "device-mapper device plain", "dmsetup remove plain"),
        ("md0", {"md/level": "raid1"}, "RAID array /dev/md0 (raid1)", "mdadm --stop /dev/md0"),
        ("bcache0", {"bcache/state": "1"}, "bcache device", "echo 1 > /sys/block/bcache0/bcache/stop"),
        ("drbd1", {"size": "0"}, "device /dev/drbd1 built on it", "stop /dev/drbd1 with the tool"),
    ],
    ids=["lvm", "crypt", "multipath", "plain", "md", "bcache", "other"],
)
def test_a_stacked_device(
    sysfs: tuple[Path, Path], name: str, attributes: dict[str, str], what: str, command: str
) -> None:
    disk, node = sysfs
    holder = disk.parent / name
    write_tree(holder, {"dev": "65535:1", **attributes})
    (disk / "holders" / name).symlink_to(holder)
    with pytest.raises(DeviceBusy) as caught:
        refuse_if_occupied(node, force=True)
    assert what in str(caught.value)
    assert command in str(caught.value)


@pytest.mark.requires_root
def test_what_is_mounted_on_top_comes_first(sysfs: tuple[Path, Path], loop_device: LoopDevices) -> None:
    disk, node = sysfs
    upper = loop_device(16 * MIB)
    run("mkfs.ext4", "-q", upper)
    number = upper.stat().st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    holder = disk.parent / "dm-0"
    (holder / "holders").mkdir(parents=True)
    write_tree(holder, {"dev": name, "dm/name": "a-b", "dm/uuid": "LVM-x"})
    (disk / "holders" / "dm-0").symlink_to(holder)
    (disk.parents[1] / "dev" / "block" / name).symlink_to(holder)
    with mounted(upper) as directory:
        found = holders.uses(node.stat())
    assert [finding.clear_command for finding in found] == [f"umount {directory}", "vgchange -an a"]


@pytest.mark.requires_root
def test_nvme_identity(sysfs: tuple[Path, Path]) -> None:
    disk, node = sysfs
    controller = {
        "device/model": "KIOXIA KCMYXRUG3T84                     ",
        "device/serial": "2DC0A00X0RJ3    ",
    }
    numbers = {"nsid": "1", "wwid": "eui.0100000001000000", "eui": "00 00 00 00 00 00 00 00"}
    write_tree(disk, {**controller, **numbers, "nguid": "01000000-0100-0000-8ce3-8ee21a9b6c01"})
    identity = identify(node)
    assert (identity.kind, identity.disk, identity.nsid) == ("namespace", "nvme0n1", 1)
    assert (identity.model, identity.serial) == ("KIOXIA KCMYXRUG3T84", "2DC0A00X0RJ3")
    assert identity.nguid == "01000000-0100-0000-8ce3-8ee21a9b6c01"
    assert identity.wwid == "eui.0100000001000000"
    assert identity.eui64 is None  # all zeros: the drive has none


@pytest.mark.requires_root
@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_without_sysfs_the_limits_are_safe_ones(
    tmp_path: Path, loop_device: LoopDevices, monkeypatch: pytest.MonkeyPatch, sector_bytes: int
) -> None:
    device = loop_device(MIB, sector_bytes)
    monkeypatch.setattr(holders, "SYSFS", tmp_path)
    assert probe(device) == Limits(MIB, sector_bytes, sector_bytes, 4096, True, False, 0, False, False)
    assert identify(device).kind == "block"


@pytest.mark.requires_root
def test_mounts_lists_ours() -> None:
    with file_system("tmpfs") as directory:
        (mount,) = (m for m in holders.mounts() if m.mount_point == str(directory) and not m.process_index)
        assert (mount.file_system, mount.device) == ("tmpfs", directory.stat().st_dev)


def test_openers_names_this_process(image_dir: Path) -> None:
    path = image_dir / "file"
    path.touch()
    assert holders.openers(path.stat()) == []
    with path.open("r+b"):
        (name,) = holders.openers(path.stat())
    assert name.startswith(f"pid {os.getpid()} (")
    assert name.endswith(", this process)")


def test_many_openers_are_cut_short() -> None:
    assert holders.describe([f"pid {n}" for n in range(6)]) == "pid 0, pid 1, pid 2, pid 3 and 2 more"
    assert "cannot be seen" in holders.describe([])
