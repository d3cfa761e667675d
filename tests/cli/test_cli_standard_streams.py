"""Commands that are started without standard input, output or error, as daemons and cron may do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import answered

import blockkv
from blockkv.cli.exit_code import ExitCode


def ended(closed: str, *words: object) -> subprocess.CompletedProcess[str]:
    """`blockkv WORDS...`, started by a shell with what `closed` says."""
    script = f'exec "$@" {closed}'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "blockkv", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_device_is_none_of_them(image_dir: Path, closed: str) -> None:
    path = image_dir / "store.img"
    path.touch()
    os.truncate(path, 16 << 20)
    done = ended(closed, "format", path)
    assert done.returncode == 0, done
    with blockkv.open(path) as store:
        assert len(store) == 0


def test_what_is_read_from_or_written_to_them(store: Path, image_dir: Path) -> None:
    done = ended("<&-", "put", store, "key", "-")
    assert (done.returncode, done.stderr) == (
        ExitCode.USAGE,
        "blockkv: - is empty; there is nothing to store\n",
    )
    done = ended("<&-", "load", store, "-")
    assert (done.returncode, len(done.stderr.splitlines())) == (ExitCode.FORMAT, 1)
    done = ended("<&-", "format", image_dir / "other", "--size", "16MiB", "--encrypt", "passphrase")
    assert (done.returncode, done.stderr) == (
        ExitCode.FORMAT,
        "blockkv: nobody can be asked for the passphrase here: use passphrase-file:PATH\n",
    )
    answered("put", store, "key", "-", stdin=b"value")
    done = ended(">&-", "get", store, "key", "-")
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
