"""The recording device: a store runs on it as on what is below, and everything it writes is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import blockkv
from blockkv.testing import OperationKind, RecordingDevice, SimulatedDevice

Record = list[tuple[OperationKind, int, int]]


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "store.img"
    blockkv.format(path, size="32MiB")
    return path


def recorder() -> tuple[Record, RecordingDevice]:
    record: Record = []
    device = SimulatedDevice(16 << 20)
    return record, RecordingDevice(device, lambda *operation: record.append(operation))


def bytes_of(record: Record, kind: OperationKind) -> int:
    return sum(length for found, _, length in record if found is kind)


def test_a_store_on_a_path_keeps_its_chunks(image: Path) -> None:
    record: Record = []
    payload = bytes(range(256)) * 1000
    with blockkv.open(RecordingDevice(image, lambda *operation: record.append(operation))) as store:
        assert store.put("a", payload, durable=True)
        assert bytes(store.get("a").numpy()) == payload
        assert store.info()["engine"] in ("io_uring", "threads")
        extents = store.entry("a").extents
        data_offset = store.info()["data_offset_bytes"]
    for start, count in extents:
        assert (OperationKind.WRITE, data_offset + start * 4096, count * 4096) in record
    assert (OperationKind.FLUSH, 0, 0) in record
    with blockkv.open(image) as store:
        assert bytes(store.get("a").numpy()) == payload


def test_what_is_told_is_what_the_device_counts(image: Path) -> None:
    record: Record = []
    with blockkv.open(RecordingDevice(image, lambda *operation: record.append(operation))) as store:
        store.put_many([(str(number), bytes(100_000)) for number in range(20)], durable=True)
        assert bytes_of(record, OperationKind.WRITE) == store.stats()["device_write_bytes"]


def test_a_path_that_is_open_is_refused(image: Path) -> None:
    with blockkv.open(image), pytest.raises(blockkv.DeviceBusy):
        RecordingDevice(image, lambda *operation: None)


@pytest.mark.parametrize("keep", [False, True])
def test_discards_are_told_and_passed_on_unless_kept(keep: bool) -> None:
    record: Record = []
    below = SimulatedDevice(16 << 20)
    blockkv.format(below)
    before = below.counters()["device_discard_bytes"]
    device = RecordingDevice(below, lambda *operation: record.append(operation), keep_discards=keep)
    with blockkv.open(device, discard=True, commit_interval_ms=None) as store:
        store.put("a", bytes(200_000))
        store.delete("a", durable=True)
        discarded_bytes = store.discard_freed()
    assert discarded_bytes >= 200_000
    assert bytes_of(record, OperationKind.DISCARD) == discarded_bytes
    assert below.counters()["device_discard_bytes"] - before == (0 if keep else discarded_bytes)


def test_registered_memory_and_limits_are_those_of_the_device_below() -> None:
    record, device = recorder()
    blockkv.format(device)
    assert device.limits.size_bytes == 16 << 20
    assert device.engine_name == "simulated"
    assert device.engine_reason
    with blockkv.open(device) as store, store.register(bytearray(8192)) as registered:
        assert registered in (False, True)
    assert record
