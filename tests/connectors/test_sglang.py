"""SGLang's HiCache on a store, in SGLang's own environment: `workers/sglang_hicache.py` has what is shown.

Host pools, storage factory, controllers, hashes and the injector of failures are SGLang's, on the CPU. A
server, and what moves pages between the pools and a GPU, need one.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, engine_python, run_in

WORKER = Path(__file__).parent / "workers" / "sglang_hicache.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", WORKER.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("sglang")
    yield path
    for left in path.rglob("*.img"):
        left.unlink()


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> Any:
    return run_in("sglang", WORKER, "checks", str(directory))


def test_another_process_finds_the_pages_in_every_layout_and_interface(directory: Path) -> None:
    saved = run_in("sglang", WORKER, "save", str(directory))
    assert len(saved) == 8
    assert set(saved.values()) == {"ok"}
    assert run_in("sglang", WORKER, "load", str(directory)) == saved


@pytest.mark.parametrize("name", CHECKS)
def test_it(outcomes: Any, name: str) -> None:
    assert outcomes[name] == "ok", outcomes[name]


def test_every_check_ran(outcomes: Any) -> None:
    assert set(outcomes) == set(CHECKS)
    assert len(CHECKS) >= 15


def test_the_example_runs() -> None:
    python = engine_python("sglang")
    done = subprocess.run(
        [python, ROOT / "examples" / "sglang_hicache.py"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "torch_extensions"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "9 of 10 pages found and loaded, equal to what was stored" in done.stdout


def test_the_page_says_what_there_is() -> None:
    """Every option is in the table of docs/connectors/sglang.md."""
    source = (ROOT / "blockkv" / "connectors" / "sglang.py").read_text()
    page = (ROOT / "docs" / "connectors" / "sglang.md").read_text()
    names = re.findall(r'^    "(\w+)": ', source[source.index("OPTIONS: dict") :].partition("}")[0], re.M)
    assert len(names) >= 12
    assert [name for name in names if f"`{name}`" not in page] == []
