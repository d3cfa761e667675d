"""What no call can accept is an InvalidArgument, which BlockKVError catches, and never an error of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import blockkv
from blockkv import InvalidArgument, KVLayout, MemoryBudget, Passphrase, Place, TieredStore
from blockkv.testing import SimulatedDevice

FAMILY = blockkv.Family(model="m", weights="w", dtype="float16", layout="l")
OTHER: Any = object()

CALLS: dict[str, Callable[[], Any]] = {
    "quotas": lambda: blockkv.open("store", quotas=OTHER),
    "quotas by number": lambda: blockkv.open("store", quotas={5: 1}),  # type: ignore[dict-item]
    "label": lambda: blockkv.format(SimulatedDevice(16 << 20), label=1.5),  # type: ignore[arg-type]
    "label without an encoding": lambda: blockkv.format(SimulatedDevice(16 << 20), label="\ud800"),
    "path without an encoding": lambda: blockkv.open("\ud800"),
    "order": lambda: KVLayout.of(None, "float16", layers=2),  # type: ignore[arg-type]
    "axis": lambda: KVLayout.of("layers", "float16", layers=None),  # type: ignore[arg-type]
    "axis of texts": lambda: KVLayout.of("layers", "float16", layers=("a", "b")),  # type: ignore[arg-type]
    "endless axis": lambda: KVLayout.of("layers", "float16", layers=1 << 70),
    "family": lambda: blockkv.prefix_keys([1, 2], 1, None),  # type: ignore[arg-type]
    "chunk_tokens": lambda: blockkv.prefix_keys([1, 2], 1.5, FAMILY),  # type: ignore[arg-type]
    "many chunk_tokens": lambda: blockkv.prefix_keys([1, 2], 1 << 70, FAMILY),
    "dtype": lambda: blockkv.empty(2, dtype=1.5),  # type: ignore[arg-type]
    "shape": lambda: blockkv.empty(None),  # type: ignore[arg-type]
    "large shape": lambda: blockkv.empty(1 << 70),
    "ceiling_bytes": lambda: MemoryBudget("1GiB"),  # type: ignore[arg-type]
    "passphrase": lambda: Passphrase(1.5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", CALLS)
def test_calls(what: str) -> None:
    with pytest.raises(InvalidArgument):
        CALLS[what]()


TIER_CALLS: dict[str, Callable[[TieredStore], Any]] = {
    "place of a put": lambda tier: tier.put("a", b"x", place=OTHER),
    "place of a get": lambda tier: tier.get("a", place=OTHER),
    "place of a growing chunk": lambda tier: tier.reserve("g", 4096, place=OTHER),
    **{
        f"capacity {bad!r}": lambda tier, bad=bad: tier.reserve("g", bad)  # type: ignore[misc]
        for bad in (float("nan"), float("inf"), "", None, 1.5, 0, 1 << 70)
    },
    "items": lambda tier: tier.put_many(OTHER),
    "pairs": lambda tier: tier.put_many([OTHER]),
    "outputs": lambda tier: tier.get_many(["a"], outs=OTHER),
}


@pytest.mark.parametrize("what", TIER_CALLS)
def test_calls_of_a_tier(image_dir: Path, what: str) -> None:
    blockkv.format(image_dir / "store", size="16MiB")
    with TieredStore(blockkv.open(image_dir / "store"), 4 << 20, interval_s=None) as tier:
        with pytest.raises(InvalidArgument):
            TIER_CALLS[what](tier)
        assert tier.put("a", b"x", place=Place("request"))


def test_a_place_of_ones_own_is_looked_at(image_dir: Path) -> None:
    blockkv.format(image_dir / "store", size="16MiB")
    store = blockkv.open(image_dir / "store")
    with (
        TieredStore(store, 4 << 20, interval_s=None, place_of=lambda key: OTHER) as tier,
        pytest.raises(InvalidArgument, match="place is"),
    ):
        tier.put("a", b"x")
