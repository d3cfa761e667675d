"""Processes that own and that are clients, for the tests of serving."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import blockkv
from blockkv.errors import BlockKVError
from blockkv.serving.owner import Owner

WAIT_S = 20.0


def formatted(path: Path, size: str) -> Path:
    """A new store in a file."""
    blockkv.format(path, size=size, average_chunk="64KiB")
    return path


def wait_until(happens: Callable[[], object], what: str, wait_s: float = WAIT_S) -> None:
    """Return when something has happened; it fails the test when it does not."""
    deadline_s = time.monotonic() + wait_s
    while not happens():
        assert time.monotonic() < deadline_s, f"waited {wait_s} s for this: {what}"
        time.sleep(0.005)


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

    @property
    def owners(self) -> list[Owner]:
        return list(self._threads)

    def end(self, owner: Owner) -> None:
        """As SIGTERM does."""
        owner.stop()
        self._threads.pop(owner).join()
        owner.close()

    def end_all(self) -> None:
        for owner in self.owners:
            self.end(owner)


class Process:
    """A child that says a line when it is ready."""

    def __init__(self, *words: object) -> None:
        self.words = [str(word) for word in words]
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *self.words], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait; the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        code = self._process.wait(WAIT_S)
        for stream in (self._process.stdout, self._process.stdin):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return code

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class OwnerProcess(Process):
    """`blockkv serve`."""

    def __init__(self, device: Path, socket: Path, *words: object) -> None:
        self.device = device
        self.socket = socket
        super().__init__("-m", "blockkv", "serve", device, "--socket", socket, "--json", *words)
        assert self.line() == "{"

    def again(self) -> None:
        """Start it again."""
        self._process = self._start()
        assert self.line() == "{"

    def __enter__(self) -> OwnerProcess:
        return self


CLIENT = Path(__file__).with_name("client_process.py")


@contextlib.contextmanager
def client_process(socket: Path, what: str, *words: object) -> Iterator[Process]:
    """A process that is a client: see `client_process.py`."""
    with Process(CLIENT, socket, what, *words) as process:
        yield process


def connected(store: blockkv.Store) -> Callable[[], bool]:
    """Whether a client has its owner."""

    def is_connected() -> bool:
        with contextlib.suppress(BlockKVError):
            return bool(store.stats()["owner_connected"])
        return False

    return is_connected
