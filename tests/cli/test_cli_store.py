"""format and info: what they do, what they refuse, and with which exit code; whom a store in use refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import answered, blockkv_command, json_answer

import blockkv
from blockkv.cli.exit_code import ExitCode

STORE_BYTES = 16 << 20


def test_format_creates_a_file_and_shows_its_zones(image_dir: Path) -> None:
    path = image_dir / "new.img"
    answer = answered("format", path, "--size", "16MiB")
    assert path.stat().st_size == STORE_BYTES
    for zone in ("checkpoint A", "checkpoint B", "journal", "data"):
        assert zone in answer.out
    assert "formatted" in answer.out


def test_format_as_json(image_dir: Path) -> None:
    document = json_answer(
        "format", image_dir / "new.img", "--size", "16MiB", "--journal", "2MiB", "--label", "a"
    )
    assert document["formatted"] is True
    zones = {zone["name"]: zone for zone in document["zones"]}
    assert zones["journal"]["size_bytes"] == 2 << 20
    assert zones["data"]["offset_bytes"] % (1 << 20) == 0
    assert json_answer("info", image_dir / "new.img")["label"] == "a"


def test_the_zones_shown_are_the_zones_made(store: Path) -> None:
    shown = json_answer("format", store, "--average-chunk", "64KiB", "--force")["zones"]
    made = json_answer("inspect", "superblock", store)["superblock"]
    for zone in shown:
        name = zone["name"].lower().replace(" ", "_")
        assert zone["offset_bytes"] == made[f"{name}_offset_bytes"]
        assert zone["size_bytes"] == made[f"{name}_size_bytes"]


def test_dry_run_writes_nothing(image_dir: Path) -> None:
    new, blank = image_dir / "new.img", image_dir / "blank.img"
    assert json_answer("format", new, "--size", "16MiB", "--dry-run")["formatted"] is False
    assert not new.exists()
    blank.write_bytes(bytes(STORE_BYTES))
    answered("format", blank, "--dry-run")
    assert not any(blank.read_bytes())


def test_dry_run_refuses_what_format_would_refuse(store: Path) -> None:
    assert "blockkv" in answered("format", store, "--dry-run", code=ExitCode.REFUSED).err
    document = json_answer("format", store, "--dry-run", "--force")
    assert any("blockkv" in finding for finding in document["overwrites"])


def test_format_works_on_devices(block_targets) -> None:
    path = block_targets(STORE_BYTES)
    answered("format", path)
    assert json_answer("check", path)["ok"] is True


def test_format_refuses_a_store_until_forced(store: Path) -> None:
    before = json_answer("inspect", "superblock", store)["superblock"]["uuid"]
    answer = answered("format", store, code=ExitCode.REFUSED)
    assert "blockkv" in answer.err
    assert json_answer("inspect", "superblock", store)["superblock"]["uuid"] == before
    answered("format", store, "--force")
    assert json_answer("inspect", "superblock", store)["superblock"]["uuid"] != before


def test_format_refuses_other_content(image_dir: Path) -> None:
    path = image_dir / "data.img"
    path.write_bytes(b"precious" + bytes(STORE_BYTES - 8))
    assert json_answer("format", path, code=ExitCode.REFUSED)["error"]["type"] == "OccupiedError"
    assert path.read_bytes().startswith(b"precious")


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4", "mount")
def test_format_refuses_a_file_system_and_a_mount_even_when_forced(loop_device, tmp_path: Path) -> None:
    device = loop_device(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
    answer = answered("format", device, code=ExitCode.REFUSED)
    assert "ext4" in answer.err
    assert "wipefs" in answer.err
    subprocess.run(["mount", str(device), str(tmp_path)], check=True)
    try:
        assert str(tmp_path) in answered("format", device, "--force", code=ExitCode.REFUSED).err
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    answered("format", device, "--force")


@pytest.mark.parametrize(
    "command",
    [["format", "--force"], ["info"], ["ls"], ["check"], ["check", "--repair"], ["scrub"], ["rm", "key"]],
)
def test_a_store_in_use_is_refused(store: Path, command: list[str]) -> None:
    with blockkv.open(store):
        answer = answered(command[0], store, *command[1:], "--json", code=ExitCode.REFUSED)
    assert answer.document["error"]["type"] == "DeviceBusy"
    assert str(store) in answer.document["error"]["message"]


@pytest.mark.requires_root
def test_a_read_only_device_is_refused(loop_device) -> None:
    assert json_answer("format", loop_device(STORE_BYTES, 512, True), code=ExitCode.REFUSED)["error"][
        "type"
    ] in (
        "DeviceReadOnly",
        "DeviceBusy",
    )


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--size", "1MiB"], ExitCode.DEVICE),
        (["--size", "16000001"], ExitCode.USAGE),
        (["--size", "nonsense"], ExitCode.USAGE),
        (["--size", "16MiB", "--average-chunk", "1"], ExitCode.USAGE),
        (["--size", "16MiB", "--journal", "5000"], ExitCode.USAGE),
        (["--size", "16MiB", "--label", "x" * 65], ExitCode.USAGE),
        ([], ExitCode.DEVICE),
    ],
)
def test_format_refuses_impossible_options_and_leaves_no_file(
    image_dir: Path, options: list[str], code: ExitCode
) -> None:
    path = image_dir / "new.img"
    answered("format", path, *options, code=code)
    assert not path.exists()


def observed(path: Path) -> dict[str, Any]:
    """What the doctor says, by topic."""
    found = blockkv_command("doctor", path, "--json").document[
        "observations"
    ]  # the code is about the machine
    return {one["topic"]: one for one in found}


def test_grow(store: Path, payload: Path) -> None:
    answered("put", store, "k", payload)
    assert "nothing to gain" in answered("grow", store).out
    with store.open("r+b") as file:
        file.truncate(4 * STORE_BYTES)
    gain = json_answer("info", store)["growable_bytes"]
    assert gain > 2 * STORE_BYTES
    observations = observed(store)
    assert observations["growth"]["verdict"] == "note"
    assert "blockkv grow" in observations["growth"]["fixes"][0]
    slots = json_answer("inspect", "superblock", store)["slots"]
    assert max(slot["offset_bytes"] for slot in slots) < STORE_BYTES, "where the store ends"
    planned = json_answer("grow", store, "--dry-run")
    assert not planned["grown"]
    assert "would grow" in answered("grow", store, "--dry-run").out
    grown = json_answer("grow", store)
    assert grown == planned | {"grown": True}
    assert grown["data_bytes"] - grown["data_bytes_before"] == gain
    assert json_answer("info", store)["growable_bytes"] == 0
    assert json_answer("grow", store)["grown"] is False
    assert answered("get", store, "k").raw == payload.read_bytes()
    slots = json_answer("inspect", "superblock", store)["slots"]
    assert max(slot["offset_bytes"] for slot in slots) > 3 * STORE_BYTES
    assert "growth" not in observed(store)


def test_grow_says_in_text_what_it_did_and_refuses_with_the_usual_codes(store: Path) -> None:
    with store.open("r+b") as file:
        file.truncate(2 * STORE_BYTES)
    with blockkv.open(store):
        answered("grow", store, code=ExitCode.REFUSED)
    assert "grown by 16 MiB" in answered("grow", store).out
    with store.open("r+b") as file:
        file.truncate(STORE_BYTES)
    answered("grow", store, code=ExitCode.DEVICE)


def test_info(store: Path, payload: Path) -> None:
    answered("put", store, "key", payload)
    document = json_answer("info", store)
    assert document["label"] == "test store"
    assert document["stats"]["chunks"] == 1
    text = answered("info", store).out
    assert "test store" in text
    assert "MiB)" in text
