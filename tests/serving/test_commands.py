"""The command line takes the socket of an owner for a store."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from serving_tools import Serves

from blockkv.cli import cli


def command(*words: object, code: int = 0) -> bytes:
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output_bytes if code else result.stdout_bytes


def test_what_cannot_be_served(serve: Serves, tmp_path: Path, image_dir: Path) -> None:
    socket = serve().path
    members = f"{image_dir / 'a.img'},{image_dir / 'b.img'}"
    command("format", members, "--size", "16MiB")
    for path, why in ((members, b"an array cannot be served"), (socket, b"has an owner")):
        result = command("serve", path, "--socket", tmp_path / "other.sock", code=2)
        assert why in result
        assert not (tmp_path / "other.sock").exists()
    command("ls", members)


def test_commands_on_a_socket(serve: Serves, tmp_path: Path) -> None:
    socket = serve().path
    content = bytes(range(256)) * 500
    (tmp_path / "content").write_bytes(content)
    assert json.loads(command("put", socket, "key", tmp_path / "content", "--json"))["stored"] is True
    assert command("get", socket, "key") == content
    assert [row["key"] for row in json.loads(command("ls", f"unix:{socket}", "--json"))["chunks"]] == ["key"]
    info = json.loads(command("info", socket, "--json"))
    assert info["socket"] == socket
    assert info["stats"]["chunks"] == 1
    command("get", socket, "missing", code=1)
    command("check", socket, code=2)
    command("rm", socket, "key")
    assert json.loads(command("ls", socket, "--json"))["chunks"] == []
