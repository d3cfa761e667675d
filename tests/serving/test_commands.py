"""The command line takes the socket of an owner for a store."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from serving_tools import OwnerProcess, Serves, formatted

import blockkv
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


def test_metrics_of_an_owner_are_its_stats(
    owner_process: Callable[..., OwnerProcess], image_dir: Path
) -> None:
    owner = owner_process(None, "--metrics", "0")
    document = json.loads("{" + "".join(iter(lambda: owner.line() + "\n", "}\n")) + "}")
    with blockkv.open(owner.socket) as client, urllib.request.urlopen(document["metrics"]) as answer:
        assert client.put("key", b"k" * 200_000, durable=True)
        assert answer.status == 200
    with blockkv.open(owner.socket) as client, urllib.request.urlopen(document["metrics"]) as answer:
        stats = client.stats()
        found = {
            one.name: one.value
            for family in text_string_to_metric_families(answer.read().decode())
            for one in family.samples
            if one.labels.get("store") == str(owner.device) and one.name != "blockkv_call_seconds_bucket"
        }
    assert found["blockkv_chunks"] == stats["chunks"] == 1
    assert found["blockkv_payload_bytes"] == stats["payload_bytes"] == 200_000
    assert found["blockkv_clients"] == 1
    assert found["blockkv_clients_accepted_total"] == 2
    port = document["metrics"].split(":")[-1].split("/")[0]
    other = formatted(image_dir / "other.img", "16MiB")
    result = command("serve", other, "--socket", f"{other}.sock", "--metrics", port, code=4)
    assert f"metrics cannot be had at 127.0.0.1:{port}".encode() in result
    assert owner.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("endpoint", ["", "here", "127.0.0.1:", "127.0.0.1:65536", "-1"])
def test_what_is_no_endpoint(endpoint: str, image_dir: Path) -> None:
    store = formatted(image_dir / "store.img", "16MiB")
    assert b"has no port" in command(
        "serve", store, "--socket", f"{store}.sock", "--metrics", endpoint, code=2
    )
