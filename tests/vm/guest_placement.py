"""Flexible Data Placement: which handle the drive has got what by, told by the drive itself.

What is left of a reclaim unit shrinks by what is written by its handle, and is a whole one when the drive
goes on in the next: so the bytes between two looks are known, but for a multiple of the size of a unit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import blockkv
from blockkv.cli import cli
from blockkv.device import nvme_admin
from blockkv.device.nvme_admin import Fdp

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/nvme_vm"))

from guest_devices import namespaces

MIB = 1 << 20
RECLAIM_UNIT_BYTES = 16 * MIB
CHUNK_BYTES = MIB + 5000
CHUNK_SPACE_BYTES = MIB + 2 * 4096
WITH_FOUR, WITH_TWO, WITH_ONE = 1, 2, 3


def drive_of(disk: Path) -> Fdp:
    with disk.open("rb") as file:
        fdp = nvme_admin.ask_fdp(str(disk), file.fileno())
    assert fdp is not None
    return fdp


def room_of(disk: Path) -> dict[int, int]:
    """By placement identifier, the bytes that its reclaim unit has room for."""
    lba_bytes = int(Path("/sys/block", disk.name, "queue/logical_block_size").read_text())
    return {one.identifier: one.room_lbas * lba_bytes for one in drive_of(disk).handles}


class Look:
    """What the drive has got since, by placement identifier."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._room = room_of(disk)
        self._host_bytes = drive_of(disk).host_bytes

    def written(self) -> dict[int, int]:
        now = room_of(self._disk)
        return {one: (before - now[one]) % RECLAIM_UNIT_BYTES for one, before in self._room.items()}

    def host_bytes(self) -> int:
        return drive_of(self._disk).host_bytes - self._host_bytes


def placing(nsid: int, controller: str = "placing") -> Path:
    disk = namespaces(controller)[nsid]
    blockkv.format(disk, force=True)
    return disk


def payload(key: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(key.split()[-1]))
    return torch.randint(0, 256, (CHUNK_BYTES,), dtype=torch.uint8, generator=generator)


def put(store: blockkv.Store, what: str, count: int, **stay: Any) -> None:
    keys = [f"{what} {number}" for number in range(count)]
    assert store.put_many([(key, payload(key)) for key in keys], **stay) == [True] * count


def put_everything(store: blockkv.Store) -> None:
    """Of each kind another number of chunks."""
    put(store, "data", 2)
    put(store, "priority", 3, priority=-1)
    put(store, "ttl", 1, ttl_s=3600.0)
    put(store, "kept", 1, priority=7)
    store.commit()


def assert_all_there(disk: Path, **options: Any) -> None:
    with blockkv.open(disk, **options) as store:
        keys = [*store.keys()]
        assert len(keys) == 7
        for key in keys:
            assert torch.equal(store.get(key), payload(str(key)))
        assert store.check(payload=True).ok


def handles_of(store: blockkv.Store) -> list[tuple[int, list[str], int]]:
    placement = store.info()["placement"]
    return [(one["identifier"], one["holds"], one["write_bytes"]) for one in placement["handles"]]


def test_the_drive_tells_its_handles() -> None:
    fdp = drive_of(placing(WITH_FOUR))
    assert [(one.identifier, one.reclaim_unit_handle) for one in fdp.handles] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert fdp.reclaim_unit_bytes == RECLAIM_UNIT_BYTES
    assert not fdp.has_groups
    assert fdp.media_bytes >= fdp.host_bytes > 0
    two = drive_of(placing(WITH_TWO))
    assert [(one.identifier, one.reclaim_unit_handle) for one in two.handles] == [(0, 4), (1, 5)]


def test_with_four_handles_each_kind_has_its_own() -> None:
    disk = placing(WITH_FOUR)
    with blockkv.open(disk, engine="passthrough", commit_interval_ms=None) as store:
        opened = {identifier: written for identifier, _, written in handles_of(store)}
        look = Look(disk)
        put_everything(store)
        stats = store.stats()
        found = {identifier: written - opened[identifier] for identifier, _, written in handles_of(store)}
        assert [(identifier, holds) for identifier, holds, _ in handles_of(store)] == [
            (0, ["data"]),
            (1, ["brief"]),
            (2, ["kept"]),
            (3, ["metadata"]),
        ]
        space = CHUNK_SPACE_BYTES
        assert (found[0], found[1], found[2]) == (2 * space, 4 * space, space)
        assert found[3] > 0
        # and so says the drive
        assert look.written() == found
        assert look.host_bytes() == sum(found.values())
        assert stats["device_write_bytes"] == sum(
            stats[f"{one}_write_bytes"] for one in ("data", "metadata", "brief", "kept")
        )
        before_growing = Look(disk)
        with store.reserve("grown 1", capacity_bytes=MIB) as grown:
            grown.append(torch.zeros(MIB, dtype=torch.uint8))
            grown.abandon()
        assert before_growing.written()[0] >= MIB
        look = Look(disk)
        store.checkpoint()
        written = look.written()
        assert written[3] > 0
        assert (written[0], written[1], written[2]) == (0, 0, 0), "checkpoints and superblocks are metadata"
    assert_all_there(disk, engine="passthrough")
    assert_all_there(disk)


def test_with_two_handles_what_is_gone_soon_is_apart() -> None:
    disk = placing(WITH_TWO)
    with blockkv.open(disk, engine="passthrough", commit_interval_ms=None) as store:
        look = Look(disk)
        put_everything(store)
        assert [holds for _, holds, _ in handles_of(store)] == [["data", "kept"], ["metadata", "brief"]]
        written = look.written()
        assert written[0] == 3 * CHUNK_SPACE_BYTES
        assert 0 < written[1] - 4 * CHUNK_SPACE_BYTES < MIB
    assert_all_there(disk, engine="passthrough")


@pytest.mark.parametrize(
    ("controller", "nsid", "options", "reason"),
    [
        ("placing", WITH_ONE, {"engine": "passthrough"}, "has one placement handle"),
        ("placing", WITH_FOUR, {"engine": "passthrough", "placement": False}, "switched off"),
        ("placing", WITH_FOUR, {}, "only passthrough names placement handles"),
        ("grouped", 1, {"engine": "passthrough"}, "has several reclaim groups"),
    ],
)
def test_without_placement_everything_goes_by_the_first_handle(
    controller: str, nsid: int, options: dict[str, Any], reason: str
) -> None:
    disk = placing(nsid, controller)
    with blockkv.open(disk, commit_interval_ms=None, **options) as store:
        look = Look(disk)
        put_everything(store)
        placement = store.info()["placement"]
        assert (placement["on"], placement["handles"]) == (False, [])
        assert reason in placement["reason"]
        written = look.written()
        first = min(written)
        assert written.pop(first) > 7 * CHUNK_SPACE_BYTES
        assert not any(written.values())
    assert_all_there(disk, **options)


def test_a_drive_without_placement_is_as_before() -> None:
    disk = namespaces()[max(nsid for nsid in namespaces() if nsid != scratch_nsid())]
    subprocess.run(["blkdiscard", "--force", "--zeroout", disk], check=True)
    blockkv.format(disk)
    with disk.open("rb") as file:
        assert nvme_admin.ask_fdp(str(disk), file.fileno()) is None
    with blockkv.open(disk, engine="passthrough") as store:
        put_everything(store)
        placement = store.info()["placement"]
        assert (placement["on"], placement["handles"]) == (False, [])
        assert "not offered" in placement["reason"]
    assert_all_there(disk, engine="passthrough")


def scratch_nsid() -> int:
    """The one that files are on: it is no device of the tests."""
    given = os.environ["BLOCKKV_TEST_DEVICES"].split(":")
    return next(nsid for nsid, disk in namespaces().items() if str(disk) not in given)


def answer(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """In this process: to import torch once more takes most of a minute here."""
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    document: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, document


def test_the_commands_say_it() -> None:
    disk = placing(WITH_FOUR)
    code, document = answer("inspect", "placement", disk)
    assert code == 0
    assert document["used"]
    assert document["reclaim_unit_bytes"] == RECLAIM_UNIT_BYTES
    assert document["media_bytes"] >= document["host_bytes"] > 0
    assert [(one["identifier"], one["holds"]) for one in document["handles"]] == [
        (0, ["data"]),
        (1, ["brief"]),
        (2, ["kept"]),
        (3, ["metadata"]),
    ]
    assert all(0 < one["room_bytes"] <= RECLAIM_UNIT_BYTES for one in document["handles"])
    code, document = answer("doctor", disk)
    assert code == 0
    (found,) = (one for one in document["observations"] if one["topic"] == "FDP")
    assert found["verdict"] == "note"
    assert found["found"].startswith("on, 4 placement handles, reclaim units of 16 MiB, of ")
    assert found["found"].endswith("4 of 4 placement handles of the namespace are used by passthrough")
    assert f"/dev/{disk.name.replace('nvme', 'ng')}" in found["fixes"][0]
    code, document = answer("inspect", "placement", namespaces()[1])
    assert (code, document["used"], document["handles"]) == (1, False, [])
