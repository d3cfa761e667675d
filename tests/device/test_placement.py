"""Which placement handle gets what, without a drive. With one: `tests/vm/guest_placement.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

import blockkv
from blockkv.device.base import Placement
from blockkv.device.nvme_admin import Fdp, PlacementHandle
from blockkv.device.placement import assign, places_of
from blockkv.store.keeping import Stay
from blockkv.testing import OperationKind, RecordingDevice, SimulatedDevice

DATA, METADATA, BRIEF, KEPT = Placement.DATA, Placement.METADATA, Placement.BRIEF, Placement.KEPT


def drive(*handles: tuple[int, int]) -> Fdp:
    return Fdp(tuple(PlacementHandle(*one, room_lbas=1) for one in handles), 0, 0, 0)


@pytest.mark.parametrize(
    ("identifiers", "assigned"),
    [
        ([7], {DATA: 7, METADATA: 7, BRIEF: 7, KEPT: 7}),
        ([0, 1], {DATA: 0, METADATA: 1, BRIEF: 1, KEPT: 0}),
        ([0, 1, 2], {DATA: 0, METADATA: 1, BRIEF: 1, KEPT: 2}),
        ([0, 1, 5, 9], {DATA: 0, METADATA: 9, BRIEF: 1, KEPT: 5}),
        ([0, 1, 2, 3, 4, 5], {DATA: 0, METADATA: 3, BRIEF: 1, KEPT: 2}),
    ],
)
def test_what_goes_where(identifiers: list[int], assigned: dict[Placement, int]) -> None:
    assert assign(identifiers) == assigned


@pytest.mark.parametrize(
    ("fdp", "reason"),
    [
        (None, "FDP is not offered"),
        (drive((0, 4)), "one placement handle"),
        (drive((0, 4), (1, 5), (0x8000, 4), (0x8001, 5)), "several reclaim groups"),
    ],
)
def test_nothing_is_placed_where_nothing_can_be_kept_apart(fdp: Fdp | None, reason: str) -> None:
    places = places_of(fdp)
    assert places.identifiers is None
    assert reason in places.reason
    assert places.described({}) == {"on": False, "reason": places.reason, "handles": []}


def test_bytes_are_told_by_handle() -> None:
    places = places_of(drive((0, 4), (1, 5), (2, 6)))
    counters = {
        "data_write_bytes": 1,
        "metadata_write_bytes": 20,
        "brief_write_bytes": 300,
        "kept_write_bytes": 4000,
    }
    assert places.described(counters) == {
        "on": True,
        "reason": "3 of 3 placement handles of the namespace are used",
        "handles": [
            {"identifier": 0, "holds": ["data"], "write_bytes": 1},
            {"identifier": 1, "holds": ["metadata", "brief"], "write_bytes": 320},
            {"identifier": 2, "holds": ["kept"], "write_bytes": 4000},
        ],
    }


@pytest.mark.parametrize(
    ("stay", "placement"),
    [
        (Stay(), DATA),
        (Stay(priority=1), KEPT),
        (Stay(priority=-1), BRIEF),
        (Stay(ttl_s=5.0), BRIEF),
        (Stay(ttl_s=5.0, priority=9), BRIEF),
    ],
)
def test_how_long_a_chunk_is_expected_to_live(stay: Stay, placement: Placement) -> None:
    assert stay.placement is placement


Record = list[tuple[OperationKind, int, int, Placement]]


def test_every_write_of_a_store_says_what_it_is() -> None:
    record: Record = []

    def keep(kind: OperationKind, *rest: object) -> None:
        if kind is OperationKind.WRITE:
            record.append((kind, *rest))  # type: ignore[arg-type]

    device = RecordingDevice(SimulatedDevice(32 << 20), keep, placements=True)
    blockkv.format(device)
    assert {placement for *_, placement in record} == {METADATA}
    with blockkv.open(device, commit_interval_ms=None) as store:
        info = store.info()
        data_offset, data_bytes = info["data_offset_bytes"], store.stats()["data_bytes"]
        store.put("data", bytes(100_000))
        store.put_many([("brief", bytes(110_000))], priority=-1)
        store.put("ttl", bytes(120_000), ttl_s=3600.0)
        store.submit_put("kept", bytes(130_000), priority=1, durable=True).result(60)
        with store.reserve("grown", 1 << 20) as grown:
            grown.append(bytes(300_000))
            grown.seal()
        store.delete("data", durable=True)
        store.checkpoint()
        placed = {}
        for key in ("brief", "ttl", "kept", "grown"):
            entry = store.entry(key)
            assert entry is not None
            places = {
                placement
                for _, offset, length, placement in record
                for start, count in entry.extents
                if offset < data_offset + 4096 * (start + count)
                and data_offset + 4096 * start < offset + length
            }
            placed[key] = places
    assert placed == {"brief": {BRIEF}, "ttl": {BRIEF}, "kept": {KEPT}, "grown": {DATA}}
    for _, offset, length, placement in record:
        in_data = data_offset <= offset and offset + length <= data_offset + data_bytes
        assert (placement is METADATA) != in_data
    assert info["placement"]["on"] is False


def test_the_engine_counts_by_kind(image_dir: Path) -> None:
    image = image_dir / "store.img"
    blockkv.format(image, size="32MiB")
    with blockkv.open(image, commit_interval_ms=None, placement=False) as store:
        before = store.stats()
        store.put("data", bytes(8192))
        store.put("brief", bytes(3 * 4096 - 1), priority=-3)
        store.put("kept", bytes(4 * 4096), priority=3)
        store.commit()
        after = store.stats()
        assert store.info()["placement"] == {
            "on": False,
            "reason": "only passthrough names placement handles",
            "handles": [],
        }
    grown = {
        name: after[f"{name}_write_bytes"] - before[f"{name}_write_bytes"]
        for name in ("data", "brief", "kept")
    }
    assert grown == {"data": 2 * 4096, "brief": 3 * 4096, "kept": 4 * 4096}
    metadata_bytes = after["metadata_write_bytes"] - before["metadata_write_bytes"]
    assert metadata_bytes > 0
    written_bytes = after["device_write_bytes"] - before["device_write_bytes"]
    assert metadata_bytes + sum(grown.values()) == written_bytes
