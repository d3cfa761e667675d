"""format --encrypt, --unlock, key-slots, wipe."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import answered, json_answer

import blockkv
from blockkv.encryption.secret import Secret, parse_unlock

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """--unlock sets it for the process, which here runs the other tests too."""
    monkeypatch.setenv("BLOCKKV_UNLOCK", "")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "kv.key"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def store(image_dir: Path, key_file: Path) -> Path:
    path = image_dir / "kv.img"
    answer = answered("format", path, "--size", "32MiB", "--encrypt", f"key-file:{key_file}")
    assert answer.out.endswith("for chunks, encrypted\n")
    with blockkv.open(path, unlock=SECRET) as opened:
        opened.put("prompt-1", torch.ones(5000, dtype=torch.uint8), durable=True)
    return path


def test_every_command_takes_it(store: Path, key_file: Path, tmp_path: Path) -> None:
    unlock = "--unlock", f"key-file:{key_file}"
    assert "prompt-1" in answered(*unlock, "ls", store).out
    assert json_answer(*unlock, "info", store)["encryption"]["key_slots"] == {"0": "secret"}
    assert json_answer(*unlock, "check", store)["ok"]
    answered(*unlock, "get", store, "prompt-1", tmp_path / "out.pt")
    answered(*unlock, "dump", store, tmp_path / "kv.tar")
    for what in ("superblock", "journal", "checkpoint"):
        json_answer(*unlock, "inspect", what, store)
    assert json_answer(*unlock, "inspect", "chunk", store, "prompt-1")["payload_bytes"] == 5000


def test_without_it(store: Path) -> None:
    error = json_answer("info", store, code=5)["error"]
    assert error["type"] == "WrongKey"
    assert "--unlock" in error["message"]
    found = json_answer("inspect", "superblock", store)["superblock"]
    assert (found["ephemeral"], found["key_slots"]) == (False, {"0": "secret"})
    assert json_answer("inspect", "journal", store, code=5)["error"]["type"] == "WrongKey"
    assert "names nothing" in json_answer("--unlock", "sesame", "ls", store, code=2)["error"]["message"]


def test_key_slots(store: Path, key_file: Path, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("correct horse\n")
    by_words, by_file = f"passphrase-file:{tmp_path / 'words'}", f"key-file:{key_file}"
    assert json_answer("--unlock", by_file, "key-slots", "add", store, by_words) == {"slots": [1]}
    rows = json_answer("key-slots", "list", store)
    assert [(row["slot"], row["kind"]) for row in rows] == [(0, "secret"), (1, "passphrase")]
    assert "Argon2id, 65536 KiB" in answered("key-slots", "list", store).out
    json_answer("--unlock", by_file, "key-slots", "remove", store, 0, code=2)
    json_answer("--unlock", by_words, "key-slots", "remove", store, 0)
    json_answer("--unlock", by_file, "ls", store, code=5)
    assert "prompt-1" in answered("--unlock", by_words, "ls", store).out


def test_what_is_unlocked_has_to_be_encrypted(image_dir: Path, key_file: Path, store: Path) -> None:
    """Who gives a key expects that nothing is written in plain text; a copy may go either way."""
    unlock = "--unlock", f"key-file:{key_file}"
    plain = image_dir / "plain.img"
    answered("format", plain, "--size", "32MiB")
    before = plain.read_bytes()
    commands = ["put", plain, "a", key_file], ["info", plain], ["check", plain, "--repair"], ["grow", plain]
    for words in commands:
        assert "is not encrypted" in json_answer(*unlock, *words, code=5)["error"]["message"]
    assert plain.read_bytes() == before
    assert json_answer(*unlock, "copy", store, plain)["chunks"] == 1
    answered("put", plain, "prompt-2", key_file)
    assert json_answer(*unlock, "copy", plain, store)["chunks"] == 1
    assert "prompt-2" in answered(*unlock, "ls", store).out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["ls", "serve"])
def test_waiting_for_a_secret_can_be_interrupted(
    store: Path, tmp_path: Path, number: signal.Signals, command: str
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    words = ["--unlock", f"key-file:{fifo}", command, str(store)]
    words += ["--socket", str(tmp_path / "kv.sock")] if command == "serve" else []
    process = subprocess.Popen([sys.executable, "-m", "blockkv", *words], stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while True:  # until it waits in open(2) for somebody to write
            assert time.monotonic() < deadline_s
            if Path(f"/proc/{process.pid}/wchan").read_text() == "wait_for_partner":
                break
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) in (130, -number)
    finally:
        process.kill()
        process.wait()
    with blockkv.open(store, unlock=SECRET) as opened:
        assert "prompt-1" in opened


def test_without_the_package_that_encrypts(store: Path, key_file: Path) -> None:
    script = (
        "import sys; sys.modules['cryptography'] = None; from blockkv.cli import main; "
        f"sys.argv = ['blockkv', '--unlock', 'key-file:{key_file}', 'ls', {str(store)!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'blockkv[encryption]'" in done.stderr


def test_what_is_written_is_for_nobody_else(store: Path, key_file: Path, tmp_path: Path) -> None:
    unlock = "--unlock", f"key-file:{key_file}"
    answered(*unlock, "get", store, "prompt-1", tmp_path / "chunk")
    answered(*unlock, "dump", store, tmp_path / "kv.tar")
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in ("chunk", "kv.tar")] == ["0o600"] * 2


@pytest.mark.requires_root
def test_no_payload_goes_to_a_device_by_mistake(
    store: Path, key_file: Path, loop_device: Callable[..., Path]
) -> None:
    other = loop_device(1 << 20)
    for command in (["get", store, "prompt-1", other], ["dump", store, other]):
        assert json_answer("--unlock", f"key-file:{key_file}", *command, code=2)["error"]
    assert not any(other.read_bytes())


def test_wipe(store: Path) -> None:
    answer = answered("wipe", store, code=3)
    assert "blockkv wipe" in answer.err
    uuid = json_answer("inspect", "superblock", store)["superblock"]["uuid"]
    assert f"blockkv wipe {store} --uuid {uuid}" in answer.err
    assert (
        json_answer("wipe", store, "--uuid", uuid.replace(uuid[0], "x"), code=5)["error"]["type"]
        == "WrongStore"
    )
    assert json_answer("wipe", store, "--uuid", uuid, "--method", "format", code=2)
    report = json_answer("wipe", store, "--uuid", uuid)
    assert (report["method"], report["store"]) == ("key", uuid)
    json_answer("info", store, code=5)
    json_answer("wipe", store, "--uuid", uuid, code=5)


def test_wipe_says_what_it_did(image_dir: Path) -> None:
    path = image_dir / "plain.img"
    uuid = blockkv.format(path, size="32MiB")["uuid"]
    said = answered("wipe", path, "--uuid", uuid).out
    assert "every LBA is overwritten" in said
    assert "32 MiB overwritten" in said
    assert not any(path.read_bytes())


def test_wipe_what_is_left_of_a_store(store: Path) -> None:
    os.truncate(store, 24 << 20)
    uuid = json_answer("inspect", "superblock", store)["superblock"]["uuid"]
    assert f"--uuid {uuid}" in answered("wipe", store, code=3).err
    said = answered("wipe", store, "--uuid", uuid).out
    assert "the key is destroyed" in said
    assert "what lay beyond, with copies of superblocks, is out of reach" in said
    json_answer("info", store, code=5)


def test_an_ephemeral_store(image_dir: Path) -> None:
    path = image_dir / "scratch.img"
    assert json_answer("format", path, "--size", "32MiB", "--encrypt", "ephemeral")["encryption"]["ephemeral"]
    assert "its chunks are gone with it" in json_answer("info", path, code=5)["error"]["message"]


def run_on_a_terminal(words: list[object], typed: list[str]) -> int:
    """The exit code of `blockkv WORDS...`, which asks on its terminal and is answered."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "blockkv", *map(str, words)],
        stdin=child,
        stdout=subprocess.DEVNULL,
        stderr=child,
        start_new_session=True,
    )
    os.close(child)
    for line in typed:
        seen = b""
        while not seen.rstrip().endswith((b"passphrase:", b"more:")):
            seen += os.read(parent, 1000)
        os.write(parent, line.encode() + b"\n")
    code = process.wait(60)
    os.close(parent)
    return code


def test_a_passphrase_that_is_asked_for(image_dir: Path) -> None:
    path = image_dir / "asked.img"
    formatting: list[object] = ["format", path, "--size", "32MiB", "--encrypt", "passphrase"]
    assert run_on_a_terminal(formatting, ["correct horse", "incorrect"]) == 2
    assert not path.exists()
    assert run_on_a_terminal(formatting, ["correct horse", "correct horse"]) == 0
    assert run_on_a_terminal(["--unlock", "passphrase", "info", path], ["wrong"]) == 5
    assert run_on_a_terminal(["--unlock", "passphrase", "info", path], ["correct horse"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "blockkv", "--unlock", "passphrase", "info", path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "nobody can be asked" in done.stderr) == (5, True)


def test_a_key_of_the_keyring(image_dir: Path) -> None:
    """In a process with a keyring of its own, which is gone with it."""
    script = f"""
import ctypes, sys
import blockkv
syscall = ctypes.CDLL(None, use_errno=True).syscall
add_key, keyctl = {{"x86_64": (248, 250), "aarch64": (217, 219)}}[__import__("platform").machine()]
assert syscall(ctypes.c_long(keyctl), ctypes.c_long(1), None) >= 0  # KEYCTL_JOIN_SESSION_KEYRING
data = bytes(range(32))
added = syscall(ctypes.c_long(add_key), b"user", b"blockkv:kv", data, ctypes.c_size_t(32), ctypes.c_long(-3))
assert added >= 0, ctypes.get_errno()
path = {str(image_dir / "ring.img")!r}
blockkv.format(path, size="32MiB", encrypt="keyring:blockkv:kv")
blockkv.open(path, unlock="keyring:blockkv:kv").close()
blockkv.open(path, unlock=data).close()
try:
    blockkv.open(path, unlock="keyring:another")
except blockkv.WrongKey as error:
    assert "no key of type" in str(error), error
else:
    sys.exit("opened")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_key_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(SECRET + b"\n")
    assert parse_unlock(f"key-file:{tmp_path / 'key'}") == Secret(SECRET + b"\n")
