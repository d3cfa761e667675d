"""An owner to connect to: in this process, where a test looks inside, or in one of its own, which can die."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving_tools import WAIT_S, OwnerProcess, Serves, formatted

from blockkv.serving import client

LOOKUP_PATIENCE_S = client.LOOKUP_PATIENCE_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that a busy machine holds up for a second does not hang, and its look-ups are answered."""
    monkeypatch.setattr(client, "LOOKUP_PATIENCE_S", WAIT_S)


@pytest.fixture
def usual_patience(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of these tests, for owners that hang."""
    monkeypatch.setattr(client, "LOOKUP_PATIENCE_S", LOOKUP_PATIENCE_S)


@pytest.fixture
def serve(image_dir: Path, tmp_path: Path) -> Iterator[Serves]:
    """Owners in this process; all are closed after the test."""
    serves = Serves(image_dir, tmp_path)
    yield serves
    serves.end_all()


@pytest.fixture
def owner_process(image_dir: Path, tmp_path: Path) -> Iterator[Callable[..., OwnerProcess]]:
    """Starts `blockkv serve`, on an image of its own or on a device. What still runs is killed."""
    with contextlib.ExitStack() as stack:

        def start(device: Path | None = None, *words: object) -> OwnerProcess:
            path = device or formatted(image_dir / "owned.img", "64MiB")
            return stack.enter_context(OwnerProcess(path, tmp_path / "owned.sock", *words))

        yield start
