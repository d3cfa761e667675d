"""AIBrix's own cache manager on a store, in two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import run_in

import blockkv

WORKER = Path(__file__).parent / "workers" / "aibrix_cache.py"
NAMESPACE = "AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE"


@pytest.fixture
def device(image_dir: Path) -> str:
    path = image_dir / "store.img"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    return str(path)


def run(device: str, do: str, namespace: str = "tiny", options: Any = None, **environment: str) -> Any:
    told = {
        "device": device,
        "do": do,
        "options": {"format": True, **(options or {})},
        "environment": {NAMESPACE: namespace, **environment},
    }
    return run_in("nixl", WORKER, json.dumps(told))


def test_another_process_finds_the_same_tokens(device: str) -> None:
    assert run(device, "put")["put"] == 96
    found = run(device, "get")
    assert (found["exists"], found["acquired"], found["equal"]) == (96, 96, 6)
    with_memory = run(device, "get", AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED="1")
    assert (with_memory["acquired"], with_memory["equal"]) == (96, 6)
    for other in ({"options": {"weights": "w2"}}, {"options": {"dtype": "bfloat16"}}, {"namespace": "other"}):
        assert run(device, "get", **other)["acquired"] == 0


def test_a_flipped_byte_ends_the_prefix(device: str) -> None:
    run(device, "put")
    with blockkv.open(device) as store, store.extents(list(store.keys())[3]) as chunk:
        offset_bytes = chunk.descriptors[0].offset_bytes + 1000
    with Path(device).open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte[0] ^ 1]))
    found = run(device, "get")
    assert (found["acquired"], found["equal"]) == (48, 3)
    assert found["stats"]["get_checksum_mismatch"] == 1


def test_what_keeps_models_apart_is_required(device: str) -> None:
    unnamed = run(device, "put", namespace="aibrix")
    assert unnamed["error"] == "InvalidArgument"
    assert NAMESPACE in unnamed["message"]
    without = run(device, "put", options={"weights": ""})
    assert without["error"] == "InvalidArgument"
    unformatted = run(device, "put", options={"device": device, "format": False})
    assert "error" not in unformatted  # the first one has formatted it
