"""What is logged: for people and for programs, with fields; and how `blockkv serve` writes it."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import blockkv
from blockkv.cli.log_output import log_output
from blockkv.errors import DeviceError
from blockkv.logs import FIELDS, JsonFormatter, described, logger_for

PATH = "/dev/100%d-safe"
"""A percent sign in the name of a store is no format."""


def formatted(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    document: dict[str, Any] = json.loads(line)
    return document


def test_messages_begin_with_the_store_and_records_have_fields(caplog: pytest.LogCaptureFixture) -> None:
    logger_for(PATH, key_digest="00ff", chunk_bytes=5, client=None).warning("a chunk of %d bytes", 5)
    (record,) = caplog.records
    assert record.getMessage() == f"{PATH}: a chunk of 5 bytes"
    assert record.filename == Path(__file__).name
    found = formatted(record)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning",
        "logger": "blockkv",
        "message": f"{PATH}: a chunk of 5 bytes",
        "pid": os.getpid(),
        "store": PATH,
        "key_digest": "00ff",
        "chunk_bytes": 5,
    }


def test_errors_are_fields_however_they_are_told(caplog: pytest.LogCaptureFixture) -> None:
    error = DeviceError("no bytes", errno.EIO)
    logger_for(PATH).error("failed: %s", error)
    logger_for(PATH, error=MemoryError()).error("failed: %s", described(MemoryError()))
    try:
        raise error
    except DeviceError:
        logger_for(PATH).exception("failed")
    told, named, raised = map(formatted, caplog.records)
    assert (told["error"], told["errno"]) == ("DeviceError", errno.EIO)
    assert named["error"] == "MemoryError"
    assert "errno" not in named
    assert (raised["error"], raised["errno"]) == ("DeviceError", errno.EIO)
    assert raised["traceback"].startswith("Traceback")


def test_exceptions_are_described_in_words() -> None:
    assert described(DeviceError("it is gone", errno.ENODEV)) == "it is gone"
    assert described(MemoryError()) == "MemoryError"
    assert described(KeyError("key")) == "KeyError: 'key'"
    assert described(OSError(errno.EIO, "Input/output error")) == "[Errno 5] Input/output error"


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs/deploying.md").read_text().split("## Logs")[1]
    assert [name for name in FIELDS if f"`{name}`" not in text] == []


def test_a_thread_that_ends_by_an_exception_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of a thread")

    with log_output("json", "error"):
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        logging.getLogger("blockkv").warning("below the level")
    found = json.loads(capsys.readouterr().err)
    assert (found["error"], found["level"]) == ("ZeroDivisionError", "error")
    assert "of a thread" in found["traceback"]


def test_lines_for_the_journal_have_priorities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as journal:
        status = os.fstat(journal.fileno())
        monkeypatch.setattr(sys, "stderr", journal)
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        with log_output("text", "debug"):
            logger_for("s").debug("one\ntwo")
            logger_for("s").info("three")
            logger_for("s").warning("four")
            logger_for("s").error("five")
        with log_output("json", "info"):
            logger_for("s").error("six")
        journal.seek(0)
        *lines, last = journal.read().splitlines()
    assert lines == ["<7>s: one", "<7>two", "<6>s: three", "<4>s: four", "<3>s: five"]
    assert json.loads(last.removeprefix("<3>"))["message"] == "s: six"


def serve(store: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "blockkv", "serve", store, "--socket", f"{store}.sock", *options]
    environment = {name: value for name, value in os.environ.items() if name != "JOURNAL_STREAM"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_serve_writes_json(image_dir: Path) -> None:
    store = image_dir / "store.img"
    blockkv.format(store, size="32MiB")
    with serve(store, "--log-format", "json") as owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        begun = json.loads(owner.stderr.readline())
        assert begun["message"].startswith(f"serving {store} at {store}.sock")
        assert (begun["level"], begun["pid"], begun["store"]) == ("info", owner.pid, f"{store}.sock")
        with serve(store, "--log-format", "json", "--wait-s", "0") as second:
            assert second.wait() == 3
            assert second.stdout is not None
            assert second.stderr is not None
            refused = json.loads(second.stderr.read())
            assert second.stdout.read() == ""
        assert (refused["level"], refused["error"], refused["store"]) == ("error", "DeviceBusy", str(store))
        with serve(store, "--log-format", "json", "--quota", "everything") as third:
            assert third.wait() == 2
            assert third.stderr is not None
            assert "is none; give FAMILY=SIZE" in json.loads(third.stderr.read())["message"]
        owner.send_signal(signal.SIGTERM)
        assert owner.wait() == 0
        assert [json.loads(line)["level"] for line in owner.stderr] == ["info"]
        assert owner.stdout.read() == ""


def test_serve_writes_text(image_dir: Path) -> None:
    store = image_dir / "store.img"
    blockkv.format(store, size="32MiB")
    with serve(store, "--log-level", "warning") as owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        assert owner.stdout.readline().startswith("serving")
        owner.terminate()
        assert owner.wait() == 0
        assert owner.stderr.read() == "", "nothing went wrong"
