"""What is known of dtypes without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import blockkv
from blockkv.catalog.layouts import ITEM_BYTES, TensorSpec


def test_item_sizes_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES
    assert TensorSpec("", "bfloat16", (3, 5)).size_bytes == 30
    assert TensorSpec("", "uint16", (3, 5)).size_bytes == 30  # not in the table


def test_a_store_is_recovered_without_torch(image_dir: Path) -> None:
    """Whoever serves a catalog starts again in the time that Python takes, and holds no torch in memory."""
    path = image_dir / "store.img"
    blockkv.format(path, size="16MiB")
    with blockkv.open(path) as store:
        store.put("key", {"k": torch.ones(3).bfloat16(), "v": torch.ones(4)}, durable=True)
        crashed = image_dir / "crashed.img"
        crashed.write_bytes(path.read_bytes())
    code = (
        "import sys, blockkv\n"
        f"with blockkv.open({str(crashed)!r}) as store:\n"
        "    assert not store.info()['recovery']['was_clean']\n"
        "    assert store.contains('key')\n"
        "    assert store.check(payload=True).ok\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
