"""An encrypted store that is served: clients decrypt what they read, with the key that the owner has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from serving_tools import OwnerProcess, Serves, wait_until

import blockkv
from blockkv.errors import InvalidArgument

SECRET = bytes(range(32))
PATTERN = bytes(range(100, 132))
PAYLOAD = torch.frombuffer(bytearray(PATTERN * 20_001), dtype=torch.uint8)


def test_clients_read_and_write(image_dir: Path, serve: Serves) -> None:
    device = image_dir / "encrypted.img"
    blockkv.format(device, size="64MiB", average_chunk="64KiB", encrypt=SECRET)
    owner = serve(device=device, unlock=SECRET)
    with blockkv.open(owner.path) as one, blockkv.open(owner.path) as other:
        one.put_many(
            [(f"k{size}", PAYLOAD[:size]) for size in (1, 5000, 100_000, len(PAYLOAD))], durable=True
        )
        for size in (1, 5000, 100_000, len(PAYLOAD)):
            assert torch.equal(other.get(f"k{size}"), PAYLOAD[:size])
        assert other.info()["encryption"]["cipher"] == "aes-256-xts"
        with pytest.raises(InvalidArgument, match="is encrypted"):
            other.extents("k1")
    assert torch.equal(owner.store.get("k5000"), PAYLOAD[:5000])
    with pytest.raises(InvalidArgument, match="unlock is for the owner"):
        blockkv.open(owner.path, unlock=SECRET)
    serve.end(owner)
    assert PATTERN not in device.read_bytes()


def test_an_ephemeral_store_begins_anew_with_its_owner(
    image_dir: Path, owner_process: Callable[..., OwnerProcess]
) -> None:
    device = image_dir / "ephemeral.img"
    blockkv.format(device, size="64MiB", average_chunk="64KiB", encrypt="ephemeral")
    owner = owner_process(device)
    with blockkv.open(owner.socket) as client:
        client.put("k", PAYLOAD, durable=True)
        assert torch.equal(client.get("k"), PAYLOAD)
        owner.end()
        wait_until(lambda: client.get("k") is None, "the owner is gone")
        owner.again()
        wait_until(lambda: _put(client), "the client is connected again")
        assert client.get("k") is None
        assert torch.equal(client.get("again"), PAYLOAD[:5000])
    assert PATTERN not in device.read_bytes()


def _put(client: blockkv.Store) -> bool:
    try:
        client.put("again", PAYLOAD[:5000], durable=True)
    except blockkv.OwnerLost:
        return False
    return True
