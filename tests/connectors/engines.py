"""Running a script in an engine's own environment, on this checkout."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def engine_python(name: str) -> Path:
    """The Python that has the engine; skips where it is not installed, and fails in CI."""
    python = ROOT / ".engines" / name / "bin" / "python"
    if not (python.parents[1] / "installed").exists():
        required = os.environ.get("CI") == "true" or os.environ.get("BLOCKKV_REQUIRE_ALL") == "1"
        (pytest.fail if required else pytest.skip)(f"run `tools/engines {name}` first")
    return python


def run_in(name: str, script: Path, *arguments: str, timeout_s: float = 240, **environment: str) -> Any:
    """Run `script` in the engine's Python; what it prints last, a line of JSON."""
    done = subprocess.run(
        [engine_python(name), script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{script.name} {arguments}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])
