"""Parts of chunks: the right bytes, no more read than must be, and what does not verify is a miss."""

from __future__ import annotations

import errno
import mmap
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layouts_drawn import layouts, parts, sliced

import blockkv
from blockkv import KVLayout, Part
from blockkv.catalog.layouts import torch_dtype
from blockkv.format.geometry import leaf_bytes_for
from blockkv.testing import Fault, FaultKind, FaultPlan, SimulatedDevice

LARGEST_BYTES = 3 << 20
LEAF_BYTES = 128 << 10
HEADS_FIRST = KVLayout.of(
    "heads layers kv tokens dim", "float16", heads=8, layers=2, kv=2, tokens=128, dim=128
)
LAYERS_FIRST = KVLayout.of(
    "layers kv heads tokens dim", "float16", heads=8, layers=4, kv=2, tokens=64, dim=64
)


@pytest.fixture(scope="module", params=[True, False], ids=["verified", "not verified"])
def shared(request: pytest.FixtureRequest) -> Iterator[blockkv.Store]:
    device = SimulatedDevice(64 << 20)
    blockkv.format(device, average_chunk="64KiB")
    with blockkv.open(device, commit_interval_ms=None, verify=request.param) as store:
        yield store


def payload(size_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def bits(value: torch.Tensor) -> bytes:
    packed = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    return bytes(packed.view(-1).view(torch.uint8).numpy())


def empty_like(shape: tuple[int, ...], dtype: torch.dtype, form: str) -> torch.Tensor:
    """Memory for a tensor: side by side, misaligned, or far apart."""
    if form == "side by side":
        return torch.zeros(shape, dtype=dtype)
    if form == "misaligned":
        count = int(np.prod(shape))
        return torch.zeros(count + 1, dtype=dtype)[1:].view(shape)
    return (
        torch.zeros((*shape, 2), dtype=dtype)[..., 0]
        if form == "strided"
        else torch.zeros((shape[0], 3, *shape[1:]), dtype=dtype)[:, 1]
    )


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(
    layout=layouts(4, 9000),
    part=parts(),
    form=st.sampled_from(["new", "side by side", "misaligned", "strided", "rows apart"]),
    opaque=st.booleans(),
)
def test_a_part_is_what_numpy_takes(
    shared: blockkv.Store, layout: KVLayout, part: Part, form: str, opaque: bool
) -> None:
    assume(layout.payload_bytes <= LARGEST_BYTES)
    content = payload(layout.payload_bytes)
    expected = sliced(layout, part, content)
    assume(expected)
    key = repr((layout, opaque))
    shared.put(key, content if opaque else tensors_of(layout, content))
    selections = {one.name: one for one in layout.selections(part)}
    out: Any = None
    if form != "new":
        out = {name: empty_like(one.shape, torch_dtype(one.dtype), form) for name, one in selections.items()}
        if len(layout.arrays) == 1:
            (out,) = out.values()
    before = shared.stats()
    found = shared.get(key, out=out, part=part, layout=layout)
    if form != "new":
        assert found is True
        found = out
    if len(layout.arrays) == 1:
        found = {layout.arrays[0].name: found}
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.shape == selections[name].shape
        assert tensor.dtype == torch_dtype(selections[name].dtype)
        assert bits(tensor) == expected[name].tobytes()
    read = shared.stats()["device_read_bytes"] - before["device_read_bytes"]
    ranges = layout.ranges(part)
    grain = leaf_bytes_for(layout.payload_bytes) if shared.info()["options"]["verify"] else 4096
    assert read <= sum(size + 2 * grain for _, size in ranges)
    touched = {
        leaf for start, size in ranges for leaf in range(start // grain, (start + size - 1) // grain + 1)
    }
    assert read <= len(touched) * grain


def tensors_of(layout: KVLayout, content: np.ndarray) -> dict[str, torch.Tensor]:
    found, start = {}, 0
    for array in layout.arrays:
        raw = torch.from_numpy(content[start : start + array.size_bytes].copy())
        found[array.name] = raw.view(torch_dtype(array.dtype)).view(array.shape)
        start += array.size_bytes
    return found


def test_one_head_of_eight_reads_an_eighth(store: blockkv.Store) -> None:
    whole = torch.randn(8, 2, 2, 128, 128).half()
    large = KVLayout.of("heads layers kv tokens dim", "float16", heads=8, layers=8, kv=2, tokens=256, dim=128)
    store.put("large", torch.randn(8, 8, 2, 256, 128).half())
    store.put("k", whole)
    for key, layout in (("k", HEADS_FIRST), ("large", large)):
        before = store.stats()["device_read_bytes"]
        assert store.get(key, part=Part(heads=3), layout=layout) is not None
        read = store.stats()["device_read_bytes"] - before
        assert read <= 0.15 * layout.payload_bytes
    assert torch.equal(store.get("k", part=Part(heads=3), layout=HEADS_FIRST), whole[3:4])


def test_many_parts_of_many_chunks_in_one_call(store: blockkv.Store) -> None:
    whole = {f"k{number}": torch.randn(4, 2, 8, 64, 64).half() for number in range(3)}
    store.put_many(whole)
    keys = ["k0", "nothing", "k1", "k0", "k2"]
    wanted = [Part(layers=number % 4, kv="v") for number in range(5)]
    found = store.get_many(keys, part=wanted, layout=LAYERS_FIRST)
    assert found[1] is None
    for number, key in enumerate(keys):
        if key in whole:
            assert torch.equal(found[number], whole[key][number % 4 : number % 4 + 1, 1:2])
    outs = [torch.zeros(4, 2, 1, 64, 64).half() for _ in keys]
    assert store.get_many(keys, outs, part=Part(heads=5), layout=LAYERS_FIRST) == [
        True,
        False,
        True,
        True,
        True,
    ]
    assert torch.equal(outs[4], whole["k2"][:, :, 5:6])
    stats = store.stats()
    assert stats["get_parts"] == 8
    assert stats["get_misses"] == 2
    assert stats["get_part_bytes"] == 4 * 64 * 64 * 2 * (8 + 8)
    assert not store._state.any_leased()


@pytest.mark.parametrize("background", [False, True])
def test_a_damaged_leaf_is_a_miss_for_its_parts_and_the_chunk_is_dropped(
    device: SimulatedDevice, open_on: Any, background: bool
) -> None:
    whole = torch.randn(8, 2, 2, 128, 128).half()
    store = open_on(device)
    store.put("k", whole, durable=True)
    entry = store.entry("k")
    start = store.info()["data_offset_bytes"] + entry.extents[0][0] * 4096
    head_bytes = whole.nbytes // 8
    device.flip_bit(start + 3 * head_bytes + 17, 5)
    assert store.get("k", part=Part(heads=range(3)), layout=HEADS_FIRST) is not None
    out = torch.full((2, 2, 2, 128, 128), 7.0).half()
    if background:
        hit = store.submit_get("k", out, part=Part(heads=range(3, 5)), layout=HEADS_FIRST).result()
    else:
        hit = store.get("k", out, part=Part(heads=range(3, 5)), layout=HEADS_FIRST)
    assert hit is False
    assert not out.any(), "what did not verify must not be left in the caller's memory"
    stats = store.stats()
    assert stats["get_leaf_mismatch"] == stats["chunks_dropped_damaged"] == stats["get_misses"] == 1
    assert stats["quarantined_bytes"] == whole.nbytes
    assert store.get("k", part=Part(heads=0), layout=HEADS_FIRST) is None
    assert store.put("k", whole)


def test_a_chunk_whose_part_was_misread_once_stays(device: SimulatedDevice, open_on: Any) -> None:
    whole = torch.randn(8, 2, 2, 128, 128).half()
    store = open_on(device)
    store.put("k", whole, durable=True)
    store.put("other", torch.randn(8, 2, 2, 128, 128).half(), durable=True)
    entry = store.entry("other")
    elsewhere = store.info()["data_offset_bytes"] + entry.extents[0][0] * 4096
    astray = Fault(FaultKind.MISDIRECTED, operation=device.operation_count, target_offset_bytes=elsewhere)
    device.set_plan(FaultPlan((astray,)))
    assert store.get("k", part=Part(heads=1), layout=HEADS_FIRST) is None
    assert store.stats()["get_leaf_mismatch"] == 1
    assert store.stats()["chunks_dropped_damaged"] == 0
    found = store.get("k", part=Part(heads=1), layout=HEADS_FIRST)
    assert torch.equal(found, whole[1:2])


def test_media_errors_drop_the_chunk_and_passing_ones_do_not(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    store.put_many([(key, torch.randn(8, 2, 2, 128, 128).half()) for key in "ab"], durable=True)
    for code, counter, there in (
        (errno.ENOMEM, "get_transient_error", True),
        (errno.EIO, "get_device_error", False),
    ):
        device.set_plan(FaultPlan.fail(device.operation_count, code))
        assert store.get("a", part=Part(heads=1), layout=HEADS_FIRST) is None
        assert store.stats()[counter] == 1
        assert store.contains("a") is there
    assert store.get("b", part=Part(heads=1), layout=HEADS_FIRST) is not None


def test_a_lost_device_is_told(device: SimulatedDevice, open_on: Any) -> None:
    store = open_on(device)
    store.put("a", torch.randn(8, 2, 2, 128, 128).half(), durable=True)
    device.set_plan(FaultPlan.fail(device.operation_count, errno.ENODEV))
    with pytest.raises(blockkv.DeviceLost):
        store.get("a", part=Part(heads=1), layout=HEADS_FIRST)
    device.set_plan(FaultPlan.fail(device.operation_count, errno.ENODEV))
    with pytest.raises(blockkv.DeviceLost):
        store.submit_get("a", part=Part(heads=1), layout=HEADS_FIRST).result()
    assert not store._state.any_leased()


def test_layouts_that_do_not_fit_are_refused(store: blockkv.Store) -> None:
    store.put("k", torch.randn(4, 10).half())
    store.put("two", [torch.randn(10).half(), torch.randn(10)])
    with pytest.raises(blockkv.LayoutMismatch, match="88 bytes; the chunk has 80"):
        store.get("k", layout=KVLayout.of("layers dim", "float16", layers=4, dim=11))
    with pytest.raises(blockkv.LayoutMismatch, match="bfloat16"):
        store.get("k", layout=KVLayout.of("layers dim", "bfloat16", layers=4, dim=10))
    half, single = (KVLayout.of("dim", kind, kind, dim=10) for kind in ("float16", "float32"))
    assert [*store.get("two", layout=half + single)] == ["float16", "float32"]
    with pytest.raises(blockkv.LayoutMismatch, match="float32"):
        store.get("two", layout=single + half)
    right = KVLayout.of("layers dim", "float16", layers=4, dim=10)
    with pytest.raises(blockkv.InvalidArgument, match="names nothing"):
        store.get("k", part=Part(layers=4), layout=right)
    with pytest.raises(blockkv.InvalidArgument, match="layout="):
        store.get("k", part=Part(layers=1))
    no_parts: Any = ["layers=1", "layers=2"]
    with pytest.raises(blockkv.InvalidArgument, match="give a Part"):
        store.get_many(["k", "k"], part=no_parts, layout=right)
    with pytest.raises(blockkv.InvalidArgument, match="2 keys but 1 parts"):
        store.get_many(["k", "two"], part=[Part()], layout=right)
    with pytest.raises(blockkv.LayoutMismatch):
        store.get("k", torch.zeros(1, 10), part=Part(layers=1), layout=right)
    shared = torch.zeros(1, 10).half()
    with pytest.raises(blockkv.BatchError, match="overlap"):
        store.get_many(["k", "k"], [shared, shared], part=Part(layers=1), layout=right)
    with pytest.raises(blockkv.InvalidArgument):
        store.get("", part=Part(layers=1), layout=right)
    assert not store._state.any_leased()


@pytest.mark.parametrize("aligned", [True, False])
def test_memory_that_is_mapped_read_only_is_refused(
    store: blockkv.Store, image_dir: Path, aligned: bool
) -> None:
    store.put("k", torch.zeros(8, 2, 2, 128, 128).half())
    (image_dir / "file").write_bytes(bytes(1 << 20))
    with (image_dir / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)[0 if aligned else 64 :]
    out = memory[: 128 << 10].view(torch.float16).view(1, 2, 2, 128, 128)
    with pytest.raises(blockkv.InvalidArgument, match="read-only"):
        store.get("k", out, part=Part(heads=1), layout=HEADS_FIRST)
    assert not store._state.any_leased()


def test_an_array_reads_parts_from_all_members() -> None:
    devices = [SimulatedDevice(32 << 20, path=f"device-{index}") for index in range(3)]
    blockkv.format(devices, average_chunk="64KiB")
    whole = {f"k{number}": torch.randn(4, 2, 8, 64, 64).half() for number in range(9)}
    with blockkv.open(devices, commit_interval_ms=None) as store:
        store.put_many(whole, durable=True)
        assert len({store.entry(key).device for key in whole}) == 3
        keys = [*whole, "nothing"]
        found = store.get_many(keys, part=Part(layers=2, heads=1), layout=LAYERS_FIRST)
        assert found[-1] is None
        for key, tensor in zip(whole, found, strict=False):
            assert torch.equal(tensor, whole[key][2:3, :, 1:2])
        future = store.submit_get("k3", part=Part(kv="k"), layout=LAYERS_FIRST)
        assert torch.equal(future.result(), whole["k3"][:, :1])
        gone = store.entry("k0").device
        lost = [key for key in whole if store.entry(key).device == gone]
        next(device for device in devices if device.path == gone).stop()
        found = store.get_many(keys, part=Part(layers=2), layout=LAYERS_FIRST)
        assert [value is None for value in found] == [key in lost or key == "nothing" for key in keys]
        assert store.stats()["get_member_lost"] == len(lost)
        assert store.submit_get("k0", part=Part(layers=2), layout=LAYERS_FIRST).result() is None


def test_a_real_device_scatters_parts_into_pages(block_targets: Any) -> None:
    """K and V of 16 chunks go to pages of a pool that lie anywhere, straight from the device."""
    target = block_targets(64 << 20)
    blockkv.format(target, average_chunk="64KiB")
    layout = KVLayout.of("layers kv tokens heads dim", "float16", layers=4, kv=2, tokens=64, heads=8, dim=128)
    whole = torch.randn(16, 4, 2, 64, 8, 128).half()
    with blockkv.open(target, commit_interval_ms=None) as store:
        store.put_many([(f"k{number}", whole[number]) for number in range(16)])
        pool = blockkv.empty((2, 40, 64, 8, 128), torch.float16)
        pages = random.Random(1).sample(range(40), 16)
        bounced = store.stats()["bounced_bytes"]
        for which, word in enumerate("kv"):
            outs = [pool[which, page].view(1, 1, 64, 8, 128) for page in pages]
            kept = store.get_many(
                [f"k{number}" for number in range(16)], outs, part=Part(layers=2, kv=word), layout=layout
            )
            assert all(kept)
        for number, page in enumerate(pages):
            assert torch.equal(pool[:, page], whole[number, 2])
        assert store.stats()["bounced_bytes"] == bounced, "aligned pages need no copy"
        assert store.stats()["part_copied_bytes"] == 0
