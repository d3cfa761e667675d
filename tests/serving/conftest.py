"""An owner to connect to: in this process, where a test looks inside, or in one of its own, which can die."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_tools import OwnerProcess, formatted

import blockkv
from blockkv.serving.owner import Owner


class Serves:
    """Starts owners in this process; `path` of each is its socket."""

    def __init__(self, images: Path, sockets: Path) -> None:
        self._images = images
        self._sockets = sockets
        self._threads: dict[Owner, threading.Thread] = {}
        self._count = 0

    def __call__(self, size: str = "64MiB", device: Path | None = None, **options: Any) -> Owner:
        path = device or formatted(self._images / f"{self._count}.img", size)
        owner = Owner(blockkv.open(path, **options), self._sockets / f"{self._count}.sock")
        self._count += 1
        self._threads[owner] = threading.Thread(target=owner.serve)
        self._threads[owner].start()
        return owner

    def end(self, owner: Owner) -> None:
        """As SIGTERM does."""
        owner.stop()
        self._threads.pop(owner).join()
        owner.close()

    def end_all(self) -> None:
        for owner in list(self._threads):
            self.end(owner)


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
