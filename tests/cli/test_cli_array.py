"""Arrays on the command line: their members are separated by commas."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import answered, json_answer


@pytest.fixture
def members(image_dir: Path) -> list[Path]:
    paths = [image_dir / name for name in ("a.img", "b.img", "c.img")]
    answered("format", joined(paths), "--size", "16MiB", "--average-chunk", "64KiB", "--label", "three")
    return paths


def joined(paths: list[Path]) -> str:
    return ",".join(map(str, paths))


def test_format_shows_every_member(image_dir: Path) -> None:
    array = joined([image_dir / "a", image_dir / "b"])
    plan = json_answer("format", array, "--size", "16MiB", "--dry-run")
    assert [one["formatted"] for one in plan["members"]] == [False, False]
    document = json_answer("format", array, "--size", "16MiB")
    assert [one["array"]["member_index"] for one in document["members"]] == [0, 1]
    assert {one["array"]["array_uuid"] for one in document["members"]} == {document["array_uuid"]}
    assert all(one["zones"] for one in document["members"])
    answered("format", array, code=3)
    assert "on 2 members of an array" in answered("format", array, "--force").out


def test_chunks_go_in_and_out(members: list[Path], payload: Path, tmp_path: Path) -> None:
    array = joined(members)
    for number in range(6):
        answered("put", array, f"key-{number}", payload)
    shown = json_answer("ls", joined(members[::-1]))["chunks"]
    assert len(shown) == 6
    assert {one["device"] for one in shown} == set(map(str, members))
    assert answered("ls", array).out.count(str(members[0])) == 2
    answered("get", array, "key-3", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == payload.read_bytes()
    info = json_answer("info", array)
    assert info["label"] == "three"
    assert [one["state"] for one in info["members"]] == ["present"] * 3
    assert "members.2.state" in answered("info", array).out
    assert json_answer("check", array, "--payload", "--repair")["chunks"] == 6
    assert json_answer("scrub", array)["chunks"] == 6
    answered("rm", array, "key-1", "key-2")
    assert len(json_answer("ls", array)["chunks"]) == 4


def test_one_member_is_read_alone_and_not_written(members: list[Path], payload: Path) -> None:
    answered("put", joined(members), "key", payload)
    assert json_answer("info", members[1])["array"]["member_index"] == 1
    assert json_answer("inspect", "superblock", members[1])["superblock"]["array_member_count"] == 3
    shown = [one for path in members for one in json_answer("ls", path)["chunks"]]
    assert len(shown) == 1
    for words in (["put", members[0], "more", payload], ["rm", members[0], "key"], ["scrub", members[0]]):
        assert "open all members together" in answered(*words, code=5).err
    assert "open all members together" in answered("check", members[0], "--repair", code=5).err


def test_a_missing_member_has_to_be_allowed(
    members: list[Path], payload: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(6):
        answered("put", joined(members), f"key-{number}", payload)
    assert "2 missing" in answered("ls", joined(members[:2]), code=5).err
    members[2].rename(members[2].with_name("away"))
    answered("ls", joined(members), code=4)
    for there in (members, members[:2]):
        assert len(json_answer("ls", joined(there), "--degraded")["chunks"]) == 4
    checked = answered("check", joined(members[:2]), "--degraded", code=1)
    assert "member 2: is missing; --repair cannot help" in checked.out
    answered("put", joined(members[:2]), "more", payload, "--degraded")
    members[2].with_name("away").rename(members[2])
    assert json_answer("info", joined(members))["members"][2]["state"].startswith("outdated")
    answered("put", joined(members), "back", payload)
    assert any("its 2 chunks are dropped" in message for message in caplog.messages)
    assert len(json_answer("ls", joined(members))["chunks"]) == 6


def test_a_comma_in_the_name_of_a_file(image_dir: Path) -> None:
    path = image_dir / "one,two"
    path.write_bytes(bytes(16 << 20))
    answered("format", path)
    assert json_answer("ls", path)["chunks"] == []
