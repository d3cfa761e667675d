"""The example of head-wise attention: the right result, within the memory it says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import blockkv

PROGRAM = Path(__file__).parents[2] / "examples" / "head_wise.py"


@pytest.fixture(scope="module")
def head_wise() -> ModuleType:
    specification = importlib.util.spec_from_file_location("head_wise", PROGRAM)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["head_wise"] = module
    specification.loader.exec_module(module)
    return module


def test_it_equals_full_attention_with_one_head_resident(head_wise: ModuleType, image_dir: Path) -> None:
    shape = head_wise.Shape()
    blockkv.format(image_dir / "store.img", size="128MiB")
    outcome = head_wise.run(image_dir / "store.img", shape)
    assert outcome.largest_difference < 1e-5
    assert outcome.kv_bytes == shape.layers * shape.heads * 2 * 4 * 256 * 64 * 4
    assert 0 < outcome.resident_kv_bytes <= outcome.kv_bytes / shape.heads + outcome.lookahead_bytes


def test_heads_that_are_no_whole_leaves_need_more_lookahead(head_wise: ModuleType, image_dir: Path) -> None:
    shape = head_wise.Shape(layers=3, heads=5, queries=1, dim=24, chunk_tokens=300, chunks=1)
    blockkv.format(image_dir / "store.img", size="64MiB")
    with pytest.raises(blockkv.InvalidArgument, match="lookahead_bytes"):
        head_wise.run(image_dir / "store.img", shape)


def test_the_program_runs() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert "largest difference" in done.stdout
