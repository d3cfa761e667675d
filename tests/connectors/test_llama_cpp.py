"""llama.cpp on a store: the real library, models made on the spot; one process saves, another restores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, engine_python, run_in

import blockkv

WORKERS = Path(__file__).parent / "workers"
CHUNK_TOKENS = 128
SPLIT = 512
PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 6

Run = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("models")
    made = {
        "llama": ("llama", 1, 4),
        "other": ("llama", 2, 4),
        "gemma3": ("gemma3", 1, 7),
        "mamba": ("mamba", 1, 2),
    }
    for name, words in made.items():
        run_in("llama_cpp", WORKERS / "llama_cpp_model.py", str(directory / name), *map(str, words))
    return {name: str(directory / name) for name in made}


Devices = dict[str, str]


@pytest.fixture
def device(image_dir: Path) -> str:
    return formatted(image_dir / "store.img")


@pytest.fixture
def devices(image_dir: Path) -> Devices:
    """One for each form, so that both are tried in the same processes."""
    return {form: formatted(image_dir / f"{form}.img") for form in ("chunks", "whole")}


def formatted(path: Path) -> str:
    blockkv.format(path, size="64MiB", average_chunk="64KiB")
    return str(path)


def runs(*told: Run) -> list[Run]:
    """In one process, one after the other."""
    script, home = WORKERS / "llama_cpp_runs.py", str(Path(told[0]["model"]).parent)
    found = run_in("llama_cpp", script, json.dumps(told), XDG_CACHE_HOME=home)
    assert isinstance(found, list)
    return found


def sequence_run(model: str, device: str, **more: Any) -> Run:
    options = {"chunk_tokens": CHUNK_TOKENS, **more.pop("options", {})}
    return {
        "kind": "sequences",
        "model": model,
        "device": device,
        "count": 600,
        "split": SPLIT,
        "options": options,
        **more,
    }


VARIANTS: dict[str, Run] = {
    "chunks": {"sharing": True},
    "chunks, quantised, flash attention": {
        "sharing": True,
        "llama": {"type_k": 8, "type_v": 8, "flash_attn": True},
    },
    "whole": {},
    "whole, in a context of several sequences": {
        "sharing": True,
        "options": {"form": "whole", "chunk_tokens": CHUNK_TOKENS},
    },
    "chunks, sliding windows": {"model": "gemma3", "sharing": True, "llama": {"swa_full": True}},
    "whole, sliding windows": {"model": "gemma3", "llama": {"swa_full": False}},
}


def test_another_process_restores_it_bit_by_bit(models: dict[str, str], device: str) -> None:
    """Of 600 tokens 512 are in whole chunks, and 599 can be of use; the logits after 512 are equal."""
    told = [
        sequence_run(models["llama"], device) | one | {"model": models[one.get("model", "llama")]}
        for one in VARIANTS.values()
    ]
    saved = runs(*({**one, "save": True} for one in told))
    loaded = runs(*({**one, "load": True} for one in told))
    for name, first, second in zip(VARIANTS, saved, loaded, strict=True):
        assert "error" not in first, (name, first)
        assert first["saved"] == (SPLIT if first["form"] == "chunks" else 600), name
        assert first["form"] == ("chunks" if name.startswith("chunks") else "whole"), name
        assert second["restored"] == (SPLIT if second["form"] == "chunks" else 599), (name, second)
        assert second["tokens"] == first["tokens"], name
        if second["form"] == "chunks":
            assert second["logits"] == first["logits"], name


def test_a_recurrent_state_is_restored_whole_or_not(models: dict[str, str], device: str) -> None:
    told = sequence_run(models["mamba"], device, count=SPLIT, split=SPLIT - 1)
    longer = {**told, "count": 600, "split": SPLIT}
    # The same beginning, evaluated in the same pieces.
    (saved, reference) = runs({**told, "split": 1, "save": True}, longer)
    assert saved["form"] == "whole"
    assert saved["saved"] == SPLIT
    loaded, cut = runs({**longer, "load": True}, {**longer, "count": 300, "split": 256, "load": True})
    assert loaded["restored"] == SPLIT
    assert loaded["tokens"] == reference["tokens"]
    assert cut["restored"] == 0  # such a state has no beginning


def test_a_context_that_sees_images_is_left_alone(models: dict[str, str], device: str) -> None:
    (found,) = runs({**sequence_run(models["llama"], device, sharing=True, options={}), "kind": "images"})
    assert "error" not in found, found
    assert found["with_handler"] == 0
    assert found["without"] > 0
    assert "images" in found["miss"]
    assert "images" in found["refused"]


def both_forms(models: dict[str, str], devices: Devices) -> list[Run]:
    return [
        sequence_run(models["llama"], device, sharing=True, options={"form": form})
        for form, device in devices.items()
    ]


def test_prompts_share_what_they_begin_with(models: dict[str, str], devices: Devices) -> None:
    told = both_forms(models, devices)
    others = [{**one, "differs_from": 300, "split": 256} for one in told]
    *_, reference = runs(*({**one, "save": True} for one in told), others[0])
    loading = [{**one, "load": True, "save": True} for one in others]
    chunks, whole, chunks_again, whole_again = runs(*loading, *loading)
    assert chunks["restored"] == 256
    assert whole["restored"] == 300  # the whole of another one, cut
    assert chunks["logits"] == reference["logits"]
    assert chunks["counters"]["chunks_saved"] == 2  # of four: the first two are there
    assert chunks_again["restored"] == SPLIT
    assert whole_again["restored"] == 599
    for one in (chunks, whole, chunks_again, whole_again):
        assert one["tokens"] == reference["tokens"]


def test_a_flipped_byte_is_a_miss(models: dict[str, str], devices: Devices) -> None:
    told = both_forms(models, devices)
    saved = runs(*({**one, "save": True} for one in told))
    flip_a_byte(devices["chunks"], 256)
    flip_a_byte(devices["whole"], 0)
    loaded = runs(*({**one, "load": True, "save": True} for one in told))
    again = runs(*({**one, "load": True} for one in told))
    for before, after in zip(saved, loaded, strict=True):
        assert after["restored"] == (256 if after["form"] == "chunks" else 0)
        assert after["counters"]["load_misses"] == 1
        assert after["stats"]["get_checksum_mismatch"] == 1
        assert after["logits"] == before["logits"]
        assert after["tokens"] == before["tokens"]
    assert [one["restored"] for one in again] == [SPLIT, 599]  # it was computed and stored anew


def flip_a_byte(device: str, tokens_before: int) -> None:
    """In the middle of the largest chunk, or of the one after so many tokens."""
    with blockkv.open(device, read_only=True) as store:
        base = store.info()["data_offset_bytes"]
        entries = [store.entry(key) for key in store.keys()]  # noqa: SIM118
    found = [one for one in entries if one is not None]
    largest = max(one.payload_bytes for one in found)
    wanted = [one for one in found if one.payload_bytes == largest]
    chunk = wanted[tokens_before // CHUNK_TOKENS]  # as they were put
    start, count = chunk.extents[len(chunk.extents) // 2]
    with Path(device).open("r+b") as file:
        file.seek(base + start * 4096 + count * 4096 // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def test_what_differs_has_no_hits(models: dict[str, str], devices: Devices, tmp_path: Path) -> None:
    shutil.copy(models["llama"], tmp_path / "elsewhere.gguf")
    told = both_forms(models, devices)
    others: list[Run] = [
        {"model": models["other"]},
        {"llama": {"type_k": 0, "type_v": 0}},
        {"llama": {"flash_attn": True}},
        {"llama": {"rope_freq_base": 20000.0}},
        {"llama": {"n_ctx": 9000}},  # longer than it was trained on
        {"options": {"salt": "another tenant"}},
    ]
    loading = [
        {**one, **other, "load": True, "options": {**one["options"], **other.get("options", {})}}
        for one in told
        for other in others
    ]
    same = [{**one, "load": True, "model": str(tmp_path / "elsewhere.gguf")} for one in told]
    saved = runs(*({**one, "save": True} for one in told))
    assert all(one["saved"] for one in saved)
    loaded = runs(*loading, *same)
    assert [one["restored"] for one in loaded] == [0] * len(loading) + [SPLIT, 599]


def test_contexts_that_llama_cpp_would_not_survive_are_refused(models: dict[str, str], device: str) -> None:
    chunks = {"options": {"form": "chunks"}}
    one, recurrent = runs(
        sequence_run(models["llama"], device, **chunks),
        sequence_run(models["mamba"], device, sharing=True, **chunks),
    )
    assert one["error"] == recurrent["error"] == "InvalidArgument"
    assert "n_seq_max" in one["message"]
    assert "recurrent" in recurrent["message"]


def test_a_context_that_is_too_small_goes_on_without(models: dict[str, str], device: str) -> None:
    told = sequence_run(models["llama"], device)
    small = {**told, "llama": {"n_ctx": 256}, "count": 200, "split": 128}
    (_, reference) = runs({**told, "save": True}, small)
    (loaded,) = runs({**small, "load": True})
    assert loaded["restored"] == 0
    assert loaded["counters"]["loads_refused"] == 1
    assert loaded["tokens"] == reference["tokens"]


def test_a_device_that_stalls_is_a_miss_after_the_deadline(models: dict[str, str]) -> None:
    told = {**sequence_run(models["llama"], "", sharing=True), "kind": "stall"}
    told["options"] = {"chunk_tokens": SPLIT}
    (found,) = runs(told)
    assert found["stalled"]["restored"] == 0
    assert found["stalled"]["waited_s"] < 15
    assert found["stalled"]["counters"]["loads_late"] == 1
    assert found["stalled"]["tokens"] == found["first"]["tokens"]
    assert found["again"]["restored"] == SPLIT


def test_completions_go_on_from_what_is_stored(models: dict[str, str], devices: Devices) -> None:
    """The second prompt goes on from the first one, in a context of its own: a conversation."""
    told = [
        {
            "kind": "cache",
            "model": models["llama"],
            "device": device,
            "sharing": form == "chunks",
            "prompts": [PROMPT, PROMPT + " Winston"],
            "fresh": True,
            "options": {"chunk_tokens": CHUNK_TOKENS},
        }
        for form, device in devices.items()
    ]
    first = runs(*told)
    second = runs(*({**one, "attach": False} for one in told))  # by set_cache alone
    assert all(one["cache_is_gone"] for one in first)
    count = first[0]["completions"][0]["prompt_tokens"]
    whole_chunks = count // CHUNK_TOKENS * CHUNK_TOKENS
    for one, other, expected in zip(
        first, second, ((whole_chunks, whole_chunks), (count, count - 1)), strict=True
    ):
        for before, after in zip(one["completions"], other["completions"], strict=True):
            assert after["tokens"] == before["tokens"]
            assert after["text"] == before["text"]
        was, conversation = one["completions"]
        again = other["completions"][0]
        assert was["counters"]["tokens_loaded"] == 0
        assert (conversation["counters"]["tokens_loaded"], again["counters"]["tokens_loaded"]) == expected
        assert again["size"] > 0


def test_slot_files_come_and_go(models: dict[str, str], device: str, tmp_path: Path) -> None:
    told = {**sequence_run(models["llama"], device, sharing=True, split=256), "kind": "slots"}
    slot, session = {"path": str(tmp_path / "slot.bin")}, {"path": str(tmp_path / "all.bin"), "session": True}
    theirs, their_session = (
        {"path": str(tmp_path / "their.bin")},
        {
            "path": str(tmp_path / "their.session"),
            "session": True,
        },
    )
    exported = runs(
        *({**told, **one, "do": "export"} for one in (slot, session)),
        *({**told, **one, "do": "export_llama"} for one in (theirs, their_session)),
    )
    assert exported[0]["bytes"] == Path(slot["path"]).stat().st_size
    assert Path(slot["path"]).read_bytes() == Path(theirs["path"]).read_bytes()
    assert Path(session["path"]).read_bytes() == Path(their_session["path"]).read_bytes()
    imported = runs(
        *({**told, **one, "do": "import"} for one in (slot, session)),
        *({**told, **one, "do": "import", "trusted": True} for one in (theirs, their_session)),
        *({**told, **one, "do": "import_llama"} for one in (slot, session)),
        {**told, **theirs, "do": "import"},
        {**told, **slot, "do": "import", "model": models["other"], "trusted": True},
        {**told, **slot, "do": "import", "llama": {"type_k": 8}},
    )
    for one in imported[:6]:
        assert one["equal"]
        assert one["tokens"] == exported[0]["tokens"]
    assert [one["stored"] for one in imported[:4]] == [SPLIT] * 4
    assert [one["error"] for one in imported[6:]] == ["InvalidArgument", "InvalidArgument", "InvalidArgument"]
    assert "trusted" in imported[6]["message"]
    assert "weights" in imported[7]["message"]
    assert "dtype" in imported[8]["message"]


def test_processes_share_a_store_that_another_one_owns(
    models: dict[str, str], devices: Devices, tmp_path: Path
) -> None:
    """By `blockkv serve`: one saves and one loads, both at its socket; the form is of no matter."""
    for form, device in devices.items():
        socket = tmp_path / f"{form}.sock"
        owner = subprocess.Popen(
            [sys.executable, "-m", "blockkv", "serve", device, "--socket", socket, "--json"],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline().strip() == b"{"
            told = sequence_run(models["llama"], str(socket), sharing=True, options={"form": form})
            (saved,) = runs({**told, "save": True})
            (loaded,) = runs({**told, "load": True})
        finally:
            owner.terminate()
            owner.communicate(timeout=30)
        assert loaded["restored"] == (SPLIT if form == "chunks" else 599)
        assert loaded["tokens"] == saved["tokens"]


def test_the_digest_is_of_every_byte_and_computed_once(models: dict[str, str], tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        shutil.copy(models["llama"], tmp_path / name)
    told = {"kind": "digest", "model": str(tmp_path / "m-00001-of-00002.gguf")}
    (first,) = runs(told)
    assert first["computed"] == 2
    other = tmp_path / "m-00002-of-00002.gguf"
    content = bytearray(other.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    again, once_more = runs(told, told)
    assert again["computed"] == 1
    assert again["digest"] != first["digest"]
    assert once_more == {"digest": again["digest"], "computed": 0}


def test_the_example_computes_a_prompt_once(models: dict[str, str], tmp_path: Path) -> None:
    device = tmp_path / "kv.img"
    with device.open("wb") as file:
        file.truncate(64 << 20)
    said = [
        run_example("examples/llama_cpp_cache.py", models["llama"], str(device), PROMPT) for _ in range(2)
    ]
    assert said[0][0] == said[1][0]
    assert said[0][-1].startswith("0 of 616 tokens")
    assert said[1][-1].startswith("512 of 616 tokens")


def run_example(script: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [engine_python("llama_cpp"), ROOT / script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(Path(arguments[1]).parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_damaged_slot_file_is_refused(models: dict[str, str], device: str, tmp_path: Path) -> None:
    path = tmp_path / "slot.bin"
    told = {**sequence_run(models["llama"], device, split=256), "kind": "slots", "path": str(path)}
    runs({**told, "do": "export"})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    cut = tmp_path / "cut.bin"
    cut.write_bytes(content[: len(content) // 2])
    flipped, short = runs(
        {**told, "do": "import"}, {**told, "do": "import", "path": str(cut), "trusted": True}
    )
    assert flipped["error"] == short["error"] == "InvalidArgument"
    assert "damaged" in flipped["message"]
    assert "damaged" in short["message"]
    (damage,) = runs({"kind": "damage", "model": models["llama"], "path": str(path), "times": 400})
    assert damage["refused"] > 20
    assert damage["unknown"] > 100
    assert (damage["positions"], damage["layers"]) == (True, 4)
