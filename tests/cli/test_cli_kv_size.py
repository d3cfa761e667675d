"""`blockkv calibrate` and `blockkv size`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import answered, json_answer

import blockkv

CONFIG = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_size_of_a_configuration(config: Path) -> None:
    document = json_answer("size", config, "--context", 131072)
    assert document["bytes_per_token"] == 131072
    assert document["size_bytes"] == 16 << 30
    assert "load_s" not in document
    assert json_answer("size", config.parent)["size_bytes"] == 16 << 30
    assert "16 GiB" in answered("size", config).out


def test_size_of_numbers_and_whether_it_pays() -> None:
    numbers = ("size", "--layers", 32, "--kv-heads", 8, "--head-dim", 128, "--prefill", 15000)
    quick = json_answer(*numbers, "--bandwidth", 7, "--request-ms", 2)
    assert quick["pays"] is True
    assert quick["break_even_bytes_per_s"] == pytest.approx(1.966e9, rel=1e-3)
    assert quick["load_s"] == pytest.approx(0.002 + (16 << 30) / 7e9)
    slow = json_answer(*numbers, "--bandwidth", 1)
    assert (slow["pays"], slow["break_even_tokens"]) == (False, None)
    assert "it does not pay" in answered(*numbers, "--bandwidth", 1).out
    assert "pays from" in answered(*numbers).out


@pytest.mark.parametrize(
    "words", [(), ("--layers", 2), ("--layers", 2, "--kv-heads", 1), ("c", "--layers", 2)]
)
def test_size_needs_one_or_the_other(words: tuple[object, ...]) -> None:
    answered("size", *words, code=2)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        answered("size", path, code=2)
        answered("size", "--layers", 1, "--kv-heads", 1, "--head-dim", 1, "--calibration", path, code=2)
    answered("size", tmp_path / "missing.json", code=4)


def test_calibrate_leaves_the_store_as_it_was(image_dir: Path, config: Path, tmp_path: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="64MiB")
    with blockkv.open(path) as store:
        store.put("mine", b"x" * 1000)
    words = ("calibrate", path, "--chunk", "256KiB", "--rounds", 8)
    document = json_answer(*words, "--model", config, "--prefill", 15000)
    assert document["load_s"] >= 0
    assert document["load_s_per_byte"] > 0
    fitted = {one["size_bytes"] for one in document["samples"]}
    compared = {one["size_bytes"] for one in document["comparisons"]}
    assert len(compared) == 5
    assert not fitted & compared
    assert document["break_even_token_bytes_per_s"] == 131072 * 15000
    with blockkv.open(path) as store:
        assert list(store.keys()) == ["mine"]
        assert store.stats()["chunks_evicted"] == 0
    saved = tmp_path / "calibration.json"
    saved.write_text(json.dumps(document))
    loaded = json_answer("size", config, "--context", 4096, "--calibration", saved)
    expected_s = document["load_s"] + document["load_s_per_byte"] * 4096 * 131072
    assert loaded["load_s"] == pytest.approx(expected_s)


def test_calibrate_evicts_nothing(image_dir: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="32MiB")
    answer = answered("calibrate", path, code=6)
    assert "bytes free, and to calibrate takes 67108864: 32 chunks of 2097152 bytes" in answer.err
    with blockkv.open(path) as store:
        assert len(store) == 0


def test_calibrate_without_room_or_memory_is_one_line(image_dir: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="64MiB")
    answer = answered("calibrate", path, "--chunk", "1TiB", code=6)
    assert "delete chunks, or take smaller ones" in answer.err
    with blockkv.open(path) as store:
        for number in range(40):
            store.put(f"k{number}", bytes(1 << 20))
    answer = answered("calibrate", path, "--chunk", "1MiB", code=6)
    assert len(answer.err.splitlines()) == 1
    assert "to calibrate takes 33554432" in answer.err
