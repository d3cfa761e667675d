"""demo: the whole story with a small model, on devices and files; nothing is left behind."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import answered, json_answer

from blockkv.cli.exit_code import ExitCode

pytest.importorskip("transformers")

SMALL = (
    *("--requests", 60, "--chunk-bytes", "16KiB"),
    *("--layers", 2, "--prompt-tokens", 300, "--chunk-tokens", 32, "--kill-after", 192, "--generate", 4),
)
MAIN = [sys.executable, "-c", "from blockkv.cli import main; main()"]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / "blockkv"


@pytest.mark.requires_root
@pytest.mark.requires_tool("fio")
def test_demo_on_a_device(loop_device, capsys: pytest.CaptureFixture[str]) -> None:
    device = loop_device(64 << 20, 4096)
    document = json_answer("demo", device, *SMALL)
    assert document["ok"] is True

    resume = document["resume"]
    assert resume["identical"] is True
    assert resume["differing_steps"] == 0
    assert resume["durable_chunks_lost"] == 0
    assert resume["durable_tokens_at_kill"] >= 192
    assert resume["restored_tokens"] >= 192
    assert resume["restored_bytes"] == resume["restored_chunks"] * 2 * 2 * 2 * 32 * 128 * 4
    # Every prefill step after the restored prefix, and every generated token.
    assert resume["compared_steps"] == 10 - resume["restored_chunks"] + 4
    assert resume["prefill_s"] > 0
    assert resume["restore_s"] > 0

    trace = document["trace"]
    assert trace["request_count"] == 60
    assert trace["hit_count"] + trace["put_count"] <= trace["reference_count"]
    assert trace["failed_get_count"] == 0
    assert trace["checked_bytes"] == trace["get_bytes"] == trace["hit_count"] * 16384
    assert 0 < trace["hit_rate"] <= trace["infinite_hit_rate"]

    for op in ("put", "get"):
        assert document["speed"][op]["gb_per_s"] > 0
        assert document["speed"][op]["fio_gb_per_s"] > 0
    assert document["store"]["removed"] is False
    assert json_answer("check", device, "--payload")["ok"] is True

    from blockkv.cli.demo import _print

    _print(document)
    text = capsys.readouterr().out
    for words in ("identical to the last bit", "everything held", "ratio", "hit rate", "every byte its own"):
        assert words in text

    # Once more: now there is a store on the device, and it is not the demo's to overwrite.
    assert json_answer("demo", device, *SMALL, code=ExitCode.REFUSED)["error"]["type"] == "OccupiedError"


def test_demo_refuses_what_cannot_work(cache: Path) -> None:
    answer = answered("demo", "--kill-after", 4096, "--prompt-tokens", 4096, code=ExitCode.USAGE)
    assert "longer" in answer.err
    answered("demo", "--trace", cache / "missing", code=ExitCode.USAGE)
    document = json_answer("demo", "--size", "1MiB", "--skip-fio", code=ExitCode.DEVICE)
    assert document["error"]["type"] == "DeviceTooSmall"
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_demo_cleans_up_when_it_is_ended(cache: Path, number: signal.Signals) -> None:
    words = ["demo", "--size", "32MiB", "--skip-fio", *map(str, SMALL)]
    process = subprocess.Popen([*MAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (workers := workers_of(process.pid)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert out == b""
    assert b"Traceback" not in err
    assert list(cache.iterdir()) == []
    assert [path for path in cache.parent.iterdir() if path != cache] == []
    wait_for_the_end_of(workers)


def test_workers_of_a_killed_demo_end_and_the_next_one_removes_its_file(cache: Path) -> None:
    words = ["demo", "--size", "32MiB", "--skip-fio", *map(str, SMALL)]
    process = subprocess.Popen([*MAIN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (workers := workers_of(process.pid)):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert [path.name for path in cache.iterdir()] == [f"demo-{process.pid}.img"]
    wait_for_the_end_of(workers)
    answered("demo", "--size", "1MiB", "--skip-fio", code=ExitCode.DEVICE)
    assert list(cache.iterdir()) == []


def workers_of(process_index: int) -> list[int]:
    children = Path("/proc", str(process_index), "task", str(process_index), "children")
    try:
        return [int(word) for word in children.read_text().split()]
    except OSError:
        return []


def wait_for_the_end_of(workers: list[int]) -> None:
    """A worker that was being started when its parent ended is on its own, and notices at once."""
    deadline = time.monotonic() + 60
    while any(running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def running(process_index: int) -> bool:
    """Whether a process exists and is not a zombie that nobody has collected."""
    try:
        return "\nState:\tZ" not in Path("/proc", str(process_index), "status").read_text()
    except OSError:
        return False


def test_a_demo_on_a_file_whose_logits_differ_fails(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The comparison can fail: a resumed run with one wrong bit in its logits is called different."""
    from blockkv.cli.demo import _print
    from blockkv.demo import resume

    genuine = resume._run_to_end

    def one_wrong_bit(options, progress, label):
        done = genuine(options, progress, label)
        if options.role == "resumer":
            path = Path(options.logits_path)
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        return done

    monkeypatch.setattr(resume, "_run_to_end", one_wrong_bit)
    document = json_answer("demo", "--size", "16MiB", "--skip-fio", *SMALL, code=ExitCode.NEGATIVE)
    assert document["ok"] is False
    assert document["resume"]["identical"] is False
    assert document["resume"]["differing_steps"] == 1
    assert document["resume"]["durable_chunks_lost"] == 0
    assert document["speed"] == {"skipped": "--skip-fio was given"}
    assert document["trace"]["chunks_evicted"] > 0, "the trace asks for more than 16 MiB"
    assert list(cache.iterdir()) == []
    with contextlib.redirect_stdout(io.StringIO()) as text:
        _print(document)
    assert "DIFFERENT in 1 of" in text.getvalue()
    assert "SOMETHING DID NOT HOLD" in text.getvalue()
