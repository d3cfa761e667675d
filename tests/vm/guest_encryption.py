"""Encrypted stores through NVMe commands, and what the drive itself erases."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

import blockkv
from blockkv.device.namespace import probe

GIVEN_DEVICES = [Path(name) for name in os.environ["BLOCKKV_TEST_DEVICES"].split(":")]
LEAST_BYTES = 32 << 20
SECRET = bytes(range(32))
PATTERN = bytes(range(100, 132))


@pytest.fixture(params=[512, 4096])
def namespace(request: pytest.FixtureRequest) -> Path:
    for disk in GIVEN_DEVICES:
        found_bytes = int(Path("/sys/block", disk.name, "queue/logical_block_size").read_text())
        if found_bytes == request.param and LEAST_BYTES <= probe(disk).size_bytes <= 2 * LEAST_BYTES:
            subprocess.run(["blkdiscard", "--force", "--zeroout", disk], check=True, capture_output=True)
            return disk
    raise LookupError(f"no namespace with LBAs of {request.param}")


def test_an_encrypted_store(namespace: Path) -> None:
    payload = torch.frombuffer(bytearray(PATTERN * 20_001), dtype=torch.uint8)
    blockkv.format(namespace, average_chunk="64KiB", encrypt=SECRET)
    with blockkv.open(namespace, unlock=SECRET, engine="passthrough") as store:
        store.put_many(
            [(f"k{size}", payload[:size]) for size in (1, 5000, 70_000, len(payload))], durable=True
        )
    with blockkv.open(namespace, unlock=SECRET, engine="passthrough") as store:
        for size in (1, 5000, 70_000, len(payload)):
            assert torch.equal(store.get(f"k{size}"), payload[:size])
    assert PATTERN not in namespace.read_bytes()


def test_the_drive_erases_the_namespace(namespace: Path) -> None:
    uuid = blockkv.format(namespace, average_chunk="64KiB")["uuid"]
    with blockkv.open(namespace) as store:
        store.put("k", torch.frombuffer(bytearray(PATTERN * 1000), dtype=torch.uint8), durable=True)
    assert PATTERN in namespace.read_bytes()
    report = blockkv.wipe(namespace, uuid)
    assert report.method == "format", report
    assert "Format NVM" in report.what
    assert not any(namespace.read_bytes())
    with pytest.raises(blockkv.NotFormatted):
        blockkv.open(namespace)
