"""Encrypted beside plain: the document of the tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "encryption_bench.py"


def test_the_tool_prints_a_document(image_dir: Path) -> None:
    image = image_dir / "kv.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    words = ["--force", "--rounds=1", "--seconds=0.1", "--chunk-mib=2", "--batch-mib=4", "--json", "--plot"]
    done = subprocess.run(
        [sys.executable, TOOL, image, *words, image_dir / "plot.png"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(row["op"], row["chunk_bytes"]) for row in document["rows"]] == [
        ("put", 2 << 20),
        ("get", 2 << 20),
    ]
    for row in document["rows"]:
        assert row["ratio"] > 0
        assert row["encrypted"]["cpu_s_per_gb"] > row["plain"]["cpu_s_per_gb"] / 10
    assert (image_dir / "plot.png").stat().st_size > 1000
