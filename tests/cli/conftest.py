"""Fixtures of the command-line tests."""

from pathlib import Path

import pytest
from command_line import answered

STORE_BYTES = 16 << 20


@pytest.fixture
def store(image_dir: Path) -> Path:
    """A freshly formatted store in a file."""
    path = image_dir / "store.img"
    answered("format", path, "--size", STORE_BYTES, "--average-chunk", "64KiB", "--label", "test store")
    return path


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    """A file of 300,001 bytes that do not repeat."""
    path = tmp_path / "payload.bin"
    path.write_bytes(b"".join(number.to_bytes(4, "big") for number in range(75_001))[:300_001])
    return path
