"""blockkv map: what is drawn is what is there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from command_line import answered, json_answer

import blockkv
from blockkv.serving.owner import Owner

MIB = 1 << 20


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "map.img"
    blockkv.format(path, size="64MiB", average_chunk="64KiB")
    return path


def test_an_empty_store(image: Path) -> None:
    (device,) = json_answer("map", image)["devices"]
    assert set(device["used_share"]) == {0.0}
    assert set(device["heat"]) == {None}
    assert (device["free_extents"], device["largest_free_bytes"]) == (1, device["data_bytes"])
    assert "0 of them in pieces" in answered("map", image).out


def test_cells_add_up_to_what_is_used(image: Path) -> None:
    with blockkv.open(image) as store:
        for number in range(200):
            store.put(f"k{number}", bytes(50_000 + number * 400))
        for number in range(0, 200, 2):
            store.delete(f"k{number}")
        store.commit()
        store.put("pieces", bytes(8 * MIB))
        store.touch("k1")
        stats = store.stats()
        entry = store.entry("pieces")
        assert entry is not None
    (device,) = json_answer("map", image)["devices"]
    assert device["chunks"] == 101
    cell_bytes = device["data_bytes"] / len(device["used_share"])
    assert sum(device["used_share"]) * cell_bytes == pytest.approx(device["used_bytes"], rel=1e-3)
    assert device["used_bytes"] == stats["data_bytes"] - stats["free_bytes"]
    assert device["free_extents"] == stats["free_extents"]
    assert device["largest_free_bytes"] == stats["largest_free_bytes"]
    assert device["chunks_in_pieces"] == (len(entry.extents) > 1)
    assert max(one for one in device["heat"] if one is not None) > 0.9
    assert all(0 <= share <= 1 for share in device["used_share"])


def test_colours_say_who_was_used_or_put_last(image: Path) -> None:
    with blockkv.open(image) as store:
        for number in range(10):
            store.put(f"k{number}", bytes(2 * MIB))
        store.touch("k0")
    by = {name: json_answer("map", image, "--by", name)["devices"][0][name] for name in ("heat", "age")}
    assert by["heat"][0] == 1.0
    assert by["age"][0] == 0.1
    assert by["age"][:300] != by["heat"][:300]


def test_the_picture(image: Path, tmp_path: Path) -> None:
    with blockkv.open(image) as store:
        store.put("k", bytes(20 * MIB))
    out = answered("map", image, "--png", tmp_path / "map.png").out
    assert out.count("█" * 64) >= 4
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_an_array_has_a_picture_for_each_member(image_dir: Path) -> None:
    members = [image_dir / "left.img", image_dir / "right.img"]
    blockkv.format(members, size="64MiB")
    with blockkv.open(members) as store:
        store.put_many([(f"k{number}", bytes(MIB)) for number in range(20)])
    devices = json_answer("map", ",".join(map(str, members)))["devices"]
    assert [device["path"] for device in devices] == list(map(str, members))
    assert sum(device["chunks"] for device in devices) == 20


def test_through_an_owner(image: Path, tmp_path: Path) -> None:
    owner = Owner(blockkv.open(image), tmp_path / "socket")
    thread = threading.Thread(target=owner.serve)
    thread.start()
    try:
        with blockkv.open(tmp_path / "socket") as client:
            client.put("k", bytes(MIB), durable=True)
        (device,) = json_answer("map", tmp_path / "socket")["devices"]
    finally:
        owner.stop()
        thread.join()
        owner.close()
    assert (device["chunks"], device["used_bytes"]) == (1, MIB)
