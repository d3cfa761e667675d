"""ls, put, get and rm."""

from __future__ import annotations

import io
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import answered, damage, json_answer

import blockkv
from blockkv.cli import cli
from blockkv.cli.exit_code import ExitCode


def test_put_then_get_gives_the_same_bytes(store: Path, payload: Path, tmp_path: Path) -> None:
    assert json_answer("put", store, "key", payload) == {
        "key": "key",
        "stored": True,
        "payload_bytes": 300_001,
    }
    out = tmp_path / "out.bin"
    document = json_answer("get", store, "key", out)
    assert document["found"] is True
    assert document["payload_bytes"] == 300_001
    assert out.read_bytes() == payload.read_bytes()
    for words in (["get", store, "key"], ["get", store, "key", "-"]):
        answer = answered(*words)
        assert answer.raw == payload.read_bytes()
        assert answer.err == ""


def test_put_works_on_devices(block_targets, payload: Path) -> None:
    path = block_targets(16 << 20)
    answered("format", path)
    answered("put", path, "key", payload)
    assert answered("get", path, "key").raw == payload.read_bytes()


def test_put_from_stdin(store: Path) -> None:
    answered("put", store, "key", "-", stdin=b"from a pipe")
    assert answered("get", store, "key").raw == b"from a pipe"


def test_put_of_a_stored_key_changes_nothing_and_says_so(store: Path, payload: Path) -> None:
    answered("put", store, "key", payload)
    answer = answered("put", store, "key", "-", stdin=b"other")
    assert "already" in answer.out
    assert json_answer("put", store, "key", payload)["stored"] is False
    assert answered("get", store, "key").raw == payload.read_bytes()


def test_put_of_nothing_and_of_a_missing_file(store: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert "empty" in answered("put", store, "key", tmp_path / "empty", code=ExitCode.USAGE).err
    assert "missing" in answered("put", store, "key", tmp_path / "missing", code=ExitCode.DEVICE).err
    assert json_answer("ls", store) == {"chunks": []}


def test_put_of_more_than_the_store_holds(store: Path, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(32 << 20))
    assert (
        json_answer("put", store, "key", tmp_path / "large", code=ExitCode.FULL)["error"]["type"]
        == "StoreFull"
    )


def test_get_of_a_missing_key_exits_1_and_writes_no_file(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = answered("get", store, "nothing", out, code=ExitCode.NEGATIVE)
    assert "not stored" in answer.err
    document = json_answer("get", store, "nothing", out, code=ExitCode.NEGATIVE)
    assert document == {"key": "nothing", "found": False, "reason": "not stored"}
    assert not out.exists()


def test_get_never_gives_damaged_bytes(store: Path, payload: Path, tmp_path: Path) -> None:
    answered("put", store, "key", payload)
    damage(store, "key", at_byte=1000)
    answer = answered("get", store, "key", tmp_path / "out", code=ExitCode.NEGATIVE)
    assert "verification" in answer.err
    assert not (tmp_path / "out").exists()


class Halting(io.RawIOBase):
    """Takes 1000 bytes at a time and says so, as an unbuffered pipe does that is full."""

    def __init__(self) -> None:
        self.taken = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.taken += bytes(data[:1000])
        return min(len(data), 1000)


def test_get_writes_all_of_it_where_stdout_is_unbuffered(
    store: Path, payload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered("put", store, "k", payload)
    pipe = Halting()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=pipe, flush=lambda: None))
    with pytest.raises(SystemExit) as ended:
        cli.main(["get", str(store), "k"])
    assert ended.value.code == 0
    assert pipe.taken == payload.read_bytes()
    assert not pipe.closed


def test_get_to_stdout_and_json_do_not_mix(store: Path) -> None:
    assert json_answer("get", store, "key", code=ExitCode.USAGE)["error"]["type"] == "UsageError"


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8"])
def test_arrays_keep_dtype_and_shape(store: Path, tmp_path: Path, dtype: str) -> None:
    array = np.arange(60).astype(dtype).reshape(3, 4, 5)
    np.save(tmp_path / "in.npy", array)
    answered("put", store, "key", tmp_path / "in.npy", "--npy")
    answered("get", store, "key", tmp_path / "out.npy", "--npy")
    result = np.load(tmp_path / "out.npy")
    assert result.dtype == array.dtype
    assert np.array_equal(result, array)
    assert np.array_equal(np.load(io.BytesIO(answered("get", store, "key", "--npy").raw)), array)
    assert answered("get", store, "key").raw == array.tobytes()
    with blockkv.open(store) as opened:
        assert torch.equal(opened.get("key"), torch.from_numpy(array))


def test_what_numpy_cannot_hold_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "not.npy").write_bytes(b"not an array")
    answered("put", store, "key", tmp_path / "not.npy", "--npy", code=ExitCode.USAGE)
    with blockkv.open(store) as opened:
        opened.put("bf16", torch.ones(8, dtype=torch.bfloat16))
        opened.put("pair", [torch.ones(8), torch.ones(4)])
    assert "bfloat16" in answered("get", store, "bf16", "--npy", code=ExitCode.USAGE).err
    assert "single" in answered("get", store, "pair", "--npy", code=ExitCode.USAGE).err
    assert len(answered("get", store, "bf16").raw) == 16
    assert len(answered("get", store, "pair").raw) == 48


def test_ls_shows_keys_sizes_tensors_and_extents(store: Path) -> None:
    with blockkv.open(store) as opened:
        opened.put("model/1", {"k": torch.ones(2, 3), "v": torch.ones(4, dtype=torch.float16)})
        opened.put(b"\xff\x01", bytes(200_000))
        opened.put("other", torch.ones(5))
    chunks = {chunk["key"]: chunk for chunk in json_answer("ls", store)["chunks"]}
    assert list(chunks) == ["model/1", "hex:ff01", "other"]
    assert chunks["model/1"]["payload_bytes"] == 32
    assert chunks["model/1"]["form"] == "dict"
    assert chunks["model/1"]["tensors"] == [
        {"name": "k", "dtype": "float32", "shape": [2, 3]},
        {"name": "v", "dtype": "float16", "shape": [4]},
    ]
    assert sum(extent["unit_count"] for extent in chunks["hex:ff01"]["extents"]) == 49
    assert chunks["other"]["durable"] is True
    text = answered("ls", store).out
    assert "float32[2, 3]" in text
    assert "hex:ff01" in text
    assert len(text.splitlines()) == 4


def test_ls_prefix_and_limit(store: Path) -> None:
    with blockkv.open(store) as opened:
        for number in range(5):
            opened.put(f"a/{number}", b"x")
            opened.put(f"b/{number}", b"x")
    keys = [chunk["key"] for chunk in json_answer("ls", store, "--prefix", "b/", "--limit", 3)["chunks"]]
    assert keys == ["b/0", "b/1", "b/2"]
    assert answered("ls", store, "--prefix", "nothing").out == ""


def test_binary_keys(store: Path) -> None:
    answered("put", store, "hex:00ff", "-", stdin=b"binary")
    assert answered("get", store, "hex:00ff").raw == b"binary"
    assert json_answer("ls", store)["chunks"][0]["key"] == "hex:00ff"
    answered("get", store, "hex:0", code=ExitCode.USAGE)
    answered("rm", store, "hex:zz", code=ExitCode.USAGE)


def test_keys_that_are_too_long_or_empty(store: Path) -> None:
    answered("get", store, "", code=ExitCode.USAGE)
    answered("put", store, "x" * 4097, "-", stdin=b"x", code=ExitCode.USAGE)


def test_rm(store: Path) -> None:
    for key in ("a", "b", "c"):
        answered("put", store, key, "-", stdin=b"x")
    assert answered("rm", store, "a").out == "a: deleted\n"
    document = json_answer("rm", store, "a", "b", code=ExitCode.NEGATIVE)
    assert document == {"keys": [{"key": "a", "deleted": False}, {"key": "b", "deleted": True}]}
    assert [chunk["key"] for chunk in json_answer("ls", store)["chunks"]] == ["c"]
    answered("rm", store, code=ExitCode.USAGE)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files cannot become longer than 64 KiB: writing fails halfway, as on a full file system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command", [["get", "key"], ["dump"]])
def test_a_file_that_cannot_be_written_is_named_and_removed(
    store: Path, payload: Path, tmp_path: Path, request: pytest.FixtureRequest, command: list[str]
) -> None:
    answered("put", store, "key", payload)
    request.getfixturevalue("small_files")
    name, *key = command
    out = tmp_path / "out"
    for _ in range(2):
        answer = answered(name, store, *key, out, code=ExitCode.DEVICE)
        assert answer.err == f"blockkv: {out}: File too large\n"
        assert not out.exists()


def test_a_file_that_was_there_is_not_removed(
    store: Path, payload: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    answered("put", store, "key", payload)
    request.getfixturevalue("small_files")
    out = tmp_path / "out"
    out.touch()
    answered("get", store, "key", out, code=ExitCode.DEVICE)
    assert out.exists()
