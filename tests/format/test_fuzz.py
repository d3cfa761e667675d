"""Hostile images: a slice of what `tools/fuzz.py` does, and everything it found."""

from __future__ import annotations

import importlib.util
import json
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from format_samples import page, put, with_checksum

import blockkv
from blockkv.catalog.layouts import TEXT_LIMIT_BYTES, Layout, torch_dtype
from blockkv.format import record
from blockkv.format.page import COUNTER_LIMIT, PageFault, PageKind, PageRejected, decode_page
from blockkv.testing import SimulatedDevice

TOOL = Path(__file__).parents[2] / "tools" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_slice_of_random_inputs(fuzz: ModuleType) -> None:
    broken = fuzz.run_random(100, seed=20)
    assert broken is None, broken.hex()


def test_the_edits_reach_past_the_checksums(fuzz: ModuleType) -> None:
    """A fuzzer whose every image is refused at the door would find nothing behind it."""
    opened = refused = changed = 0
    for number in range(60):
        data = fuzz.random_input(fuzz.random.Random(f"reach.{number}"), "open")
        device = fuzz.edit(fuzz.Source(data[1:]))
        try:
            with blockkv.open(device, read_only=True) as store:
                opened += 1
                recovery = store.info()["recovery"]
                changed += recovery["checkpoint_pages_damaged"] or recovery["journal_damaged"]
        except blockkv.BlockKVError:
            refused += 1
    assert opened > 20
    assert refused > 3
    assert changed > 3


def test_a_missing_check_is_noticed(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of extents, hostile records would reach the free map."""
    monkeypatch.setattr(record, "_check_extents", lambda *_: 16)

    def run_many() -> None:
        for number in range(5000):
            fuzz.run_one(fuzz.random_input(fuzz.random.Random(f"missing.{number}"), "records"))

    with pytest.raises(fuzz.Broken, match="outside the data zone"):
        run_many()


# -- what was found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["sequence", "epoch"])
def test_pages_with_counters_beyond_the_limit(field: str) -> None:
    data = bytearray(page(PageKind.JOURNAL))
    at = {"sequence": 48, "epoch": 56}[field]
    data[at : at + 8] = COUNTER_LIMIT.to_bytes(8, "little")
    sequence = int.from_bytes(data[48:56], "little")
    with pytest.raises(PageRejected) as raised:
        decode_page(
            with_checksum(data), kind=PageKind.JOURNAL, store_id=bytes(data[16:32]), sequence=sequence
        )
    assert raised.value.fault is PageFault.MALFORMED


@pytest.mark.parametrize("raw", [put(COUNTER_LIMIT)[0], record.encode_delete(COUNTER_LIMIT, bytes(32))])
def test_records_with_counters_beyond_the_limit(raw: bytes) -> None:
    with pytest.raises(record.RecordMalformed, match="log sequence"):
        list(record.iterate_records(raw, 1, 1 << 20))


def test_layout_numbers_that_leave_none() -> None:
    body = b'J["tensor",[["","uint8",[1]]]]'
    assert list(record.iterate_records(record.encode_layout(1, record.MAX_LAYOUT_ID, body), 1, 1))
    with pytest.raises(record.RecordMalformed, match="LAYOUT"):
        list(record.iterate_records(record.encode_layout(1, record.MAX_LAYOUT_ID + 1, body), 1, 1))


@pytest.mark.parametrize("layout_id", [1 << 31, (1 << 32) - 1])
def test_chunks_whose_layout_number_is_large(fuzz: ModuleType, layout_id: int) -> None:
    """It became negative once, in a column of signed numbers."""
    image = fuzz.images()[1].copy()
    for part in image.pages:
        part.records = [
            raw[:4] + layout_id.to_bytes(4, "little") + raw[8:] if raw[2] == record.Operation.PUT else raw
            for raw in part.records
        ]
    fuzz.put_together(image, 0)
    with blockkv.open(image.device) as store:
        assert len(store) == 0
        assert store.info()["recovery"]["chunks_dropped_no_layout"] > 10
        assert store.check(payload=True).ok


@pytest.mark.parametrize(
    "text",
    [
        '["tensor",[["","uint8",[1e999]]]]',
        '["tensor",[["","uint8",["5"]]]]',
        '["tensor",[["","uint8","55"]]]',
        '["tensor",[["","uint8",[true]]]]',
        '["tensor",[["","uint8",[0]]]]',
        '["tensor",[["","uint8",[9223372036854775808]]]]',
        '["tensor",[["","uint8",[' + "1," * 64 + "1]]]]",
        '["tensor",[[1,"uint8",[1]]]]',
        '["tensor",[["","uint8"]]]',
        '["tensor",{"a":1}]',
        "[" * 30_000,
        "5",
    ],
)
def test_layouts_that_make_no_sense(text: str) -> None:
    for body in (b"J" + text.encode(), b"Z" + zlib.compress(text.encode())):
        with pytest.raises(ValueError, match="layout"):
            Layout.decode(body)


def test_a_layout_does_not_expand_to_megabytes() -> None:
    items = [["", "uint8", [1]]] * 60_000
    text = json.dumps(["list", items], separators=(",", ":")).encode()
    body = b"Z" + zlib.compress(text, 9)
    assert len(body) < 5000
    with pytest.raises(ValueError, match=str(TEXT_LIMIT_BYTES)):
        Layout.decode(body)


def test_names_of_dtypes_import_nothing() -> None:
    with pytest.raises(blockkv.InvalidArgument, match="no dtype"):
        torch_dtype("onnx")
    assert torch_dtype("bfloat16") is torch.bfloat16


def test_what_cannot_be_described_is_refused_by_put() -> None:
    """It was accepted once, and gone after the next open: its layout deflated well, and inflated too far."""
    device = SimulatedDevice(16 << 20)
    blockkv.format(device)
    most = (TEXT_LIMIT_BYTES - 20) // len('["","uint8",[1]],')
    with blockkv.open(device) as store:
        with pytest.raises(blockkv.InvalidArgument, match="several chunks"):
            store.put("too many", [torch.zeros(1, dtype=torch.uint8)] * 60_000)
        assert store.put("many", [torch.zeros(1, dtype=torch.uint8)] * most, durable=True)
    with blockkv.open(device.clone()) as store:
        assert len(store.get("many")) == most
