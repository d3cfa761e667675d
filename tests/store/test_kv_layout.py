"""Which bytes a part of a chunk is, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from layouts_drawn import layouts, parts, sliced

from blockkv.errors import InvalidArgument
from blockkv.kv_layout import WHOLE, KVLayout, Part

SIZES: dict[str, Any] = {"layers": 4, "kv": 2, "heads": 8, "tokens": 16, "dim": 32}


@settings(max_examples=300, deadline=None)
@given(layouts(), parts())
def test_ranges_are_what_numpy_takes(layout: KVLayout, part: Part) -> None:
    payload = np.random.default_rng(0).integers(0, 256, layout.payload_bytes, dtype=np.uint8)
    expected = sliced(layout, part, payload)
    if not expected:
        with pytest.raises(InvalidArgument, match="names nothing"):
            layout.ranges(part)
        return
    ranges = layout.ranges(part)
    found = b"".join(payload[start : start + size].tobytes() for start, size in ranges)
    assert found == b"".join(taken.tobytes() for taken in expected.values())
    ends = [start + size for start, size in ranges]
    assert all(end < start for end, (start, _) in zip(ends, ranges[1:], strict=False)), "merged and ascending"
    selections = layout.selections(part)
    assert {one.name: one.shape for one in selections} == {
        name: taken.shape[:-1] for name, taken in expected.items()
    }
    assert sum(one.size_bytes for one in selections) == len(found)
    for one in selections:
        last = max(start + one.span_bytes for start in one.starts())
        assert last == one.offset_bytes + one.hull_bytes


def test_one_head_of_a_head_major_layout_is_one_run() -> None:
    layout = KVLayout.of("heads layers kv tokens dim", "float16", **SIZES)
    assert layout.ranges(Part(heads=3)) == [(3 * layout.payload_bytes // 8, layout.payload_bytes // 8)]
    assert layout.ranges(Part(heads=np.int64(3))) == layout.ranges(Part(heads=3))


def test_layers_of_a_layer_major_layout_are_one_run() -> None:
    layout = KVLayout.of("layers kv tokens heads dim", "float16", **SIZES)
    layer_bytes = layout.payload_bytes // 4
    assert layout.ranges(Part(layers=range(1, 3))) == [(layer_bytes, 2 * layer_bytes)]
    assert layout.ranges(Part(layers=1, kv="v")) == [(layer_bytes + layer_bytes // 2, layer_bytes // 2)]
    assert layout.ranges(WHOLE) == [(0, layout.payload_bytes)]


def test_groups_of_a_hybrid_model() -> None:
    """Five layers with a window of 8 of 16 tokens to one with all, a state-space layer, and a latent one."""
    window = KVLayout.of(
        "layers kv tokens dim", "bfloat16", "window", layers=(0, 1, 3, 4), kv=2, tokens=range(8, 16), dim=4
    )
    full = KVLayout.of("layers kv tokens dim", "bfloat16", "full", layers=(2,), kv=2, tokens=16, dim=4)
    state = KVLayout.of("layers state", "float32", "state", layers=(5,), state=100)
    latent = KVLayout.of("layers tokens latent", "float8_e4m3fn", "latent", layers=(6,), tokens=16, latent=9)
    layout = window + full + state + latent
    assert layout.numbers("layers") == (0, 1, 2, 3, 4, 5, 6)
    assert layout.numbers("experts") == ()
    shapes = {
        layer: {one.name: one.shape for one in layout.selections(Part(layers=layer, tokens=range(4, 12)))}
        for layer in layout.numbers("layers")
    }
    assert shapes[3] == {"window": (1, 2, 4, 4)}, "of the eight tokens asked for, four are in the window"
    assert shapes[2] == {"full": (1, 2, 8, 4)}
    assert shapes[5] == {"state": (1, 100)}, "a state has no tokens: all of it"
    assert shapes[6] == {"latent": (1, 8, 9)}
    with pytest.raises(InvalidArgument, match="names nothing"):
        layout.ranges(Part(layers=0, tokens=range(4)))


def test_scales_go_with_their_values() -> None:
    values = KVLayout.of("layers kv heads tokens dim", "float8_e4m3fn", "values", **SIZES)
    scales = KVLayout.of("layers kv heads", "float32", "scales", layers=4, kv=2, heads=8)
    found = {one.name: one for one in (values + scales).selections(Part(layers=2, kv="k", heads=range(2, 4)))}
    assert found["values"].shape == (1, 1, 2, 16, 32)
    assert found["scales"].shape == (1, 1, 2)
    assert found["scales"].offset_bytes == values.payload_bytes + 4 * (2 * 2 * 8 + 2)


def test_the_rank_of_a_shard_keeps_the_numbers_of_the_model() -> None:
    layout = KVLayout.of("heads tokens dim", "float16", heads=range(8, 16), tokens=4, dim=2)
    assert layout.ranges(Part(heads=8)) == [(0, 16)]
    with pytest.raises(InvalidArgument, match="names nothing"):
        layout.ranges(Part(heads=0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Part(layers=range(0)),
        lambda: Part(layers=range(0, 4, 2)),
        lambda: Part(heads=True),
        lambda: Part(kv="q"),
        lambda: KVLayout.of("layers dim", "float16", layers=4),
        lambda: KVLayout.of("layers dim", "float16", layers=4, dim=0),
        lambda: KVLayout.of("layers dim", "float17", layers=4, dim=1),
        lambda: KVLayout.of("layers dim", "float16", layers=(3, 1), dim=1),
        lambda: KVLayout.of("kv dim", "float16", kv=3, dim=1),
        lambda: KVLayout.of("kv dim", "float16", kv="q", dim=1),
        lambda: KVLayout.of("dim", "float16", dim=1) + KVLayout.of("dim", "float16", dim=1),
        lambda: KVLayout(()),
    ],
)
def test_what_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(InvalidArgument):
        make().payload_bytes  # noqa: B018


def test_a_layout_says_what_it_is() -> None:
    assert str(KVLayout.of("layers dim", "float16", "k", layers=4, dim=2)) == (
        "KVLayout(k: float16[layers 4, dim 2])"
    )
