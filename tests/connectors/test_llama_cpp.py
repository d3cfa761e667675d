"""llama.cpp on a store: the real library, models made on the spot; one process saves, another restores."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import run_in

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


@pytest.fixture
def device(image_dir: Path) -> str:
    path = image_dir / "store.img"
    blockkv.format(path, size="64MiB", average_chunk="64KiB")
    return str(path)


def runs(*told: Run) -> list[Run]:
    """In one process, one after the other."""
    found = run_in("llama_cpp", WORKERS / "llama_cpp_runs.py", json.dumps(told), XDG_CACHE_HOME=cache_home())
    assert isinstance(found, list)
    return found


def cache_home() -> str:
    return os.environ.get("BLOCKKV_TEST_CACHE", "/nonexistent")


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
    "whole, in a context of several sequences": {"sharing": True, "options": {"form": "whole"}},
    "chunks, sliding windows": {"model": "gemma3", "sharing": True, "llama": {"swa_full": True}},
    "whole, sliding windows": {"model": "gemma3", "llama": {"swa_full": False}},
}


def test_another_process_restores_it_bit_by_bit(models: dict[str, str], device: str) -> None:
    """Of 600 tokens 512 are in whole chunks, 599 can be of use; all logits after 512 are the same bits."""
    told = [
        sequence_run(models[one.get("model", "llama")], device, **{k: one[k] for k in one if k != "model"})
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


@pytest.mark.parametrize("form", ["chunks", "whole"])
def test_prompts_share_what_they_begin_with(models: dict[str, str], device: str, form: str) -> None:
    told = sequence_run(models["llama"], device, sharing=True, options={"form": form})
    other = {**told, "differs_from": 300, "split": 256}
    saved, reference = runs({**told, "save": True}, other)
    loaded, again = runs({**other, "load": True, "save": True}, {**other, "load": True})
    assert loaded["restored"] == (256 if form == "chunks" else 300)
    assert loaded["tokens"] == reference["tokens"]
    if form == "chunks":
        assert loaded["logits"] == reference["logits"]
        assert loaded["counters"]["chunks_saved"] == 2  # of four: the first two are there
        assert again["restored"] == SPLIT
    else:
        assert again["restored"] == 599
    assert again["tokens"] == reference["tokens"]
    assert saved["counters"]["loads"] == 0


@pytest.mark.parametrize("form", ["chunks", "whole"])
def test_a_flipped_byte_is_a_miss(models: dict[str, str], device: str, form: str) -> None:
    told = sequence_run(models["llama"], device, sharing=True, options={"form": form})
    (saved,) = runs({**told, "save": True})
    flip_a_byte(device, 256 if form == "chunks" else 0)
    (loaded,) = runs({**told, "load": True, "save": True})
    assert loaded["restored"] == (256 if form == "chunks" else 0)
    assert loaded["counters"]["load_misses"] == 1
    assert loaded["stats"]["get_checksum_mismatch"] == 1
    assert loaded["logits"] == saved["logits"]
    assert loaded["tokens"] == saved["tokens"]
    (again,) = runs({**told, "load": True})  # it was computed and stored anew
    assert again["restored"] == (SPLIT if form == "chunks" else 599)


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


@pytest.mark.parametrize("form", ["chunks", "whole"])
def test_what_differs_has_no_hits(models: dict[str, str], device: str, form: str) -> None:
    told = sequence_run(models["llama"], device, sharing=True, options={"form": form})
    others: dict[str, Run] = {
        "model": {"model": models["other"]},
        "K and V": {"llama": {"type_k": 0, "type_v": 0}},
        "flash attention": {"llama": {"flash_attn": True}},
        "RoPE": {"llama": {"rope_freq_base": 20000.0}},
        "long context": {"llama": {"n_ctx": 9000}},
        "tenant": {"options": {**told["options"], "salt": "somebody else"}},
    }
    (saved,) = runs({**told, "save": True})
    assert saved["saved"]
    loaded = runs(*({**told, **other, "load": True} for other in others.values()), {**told, "load": True})
    assert [one["restored"] for one in loaded[:-1]] == [0] * len(others)
    assert loaded[-1]["restored"]


def test_a_copy_of_the_model_is_the_same_model(models: dict[str, str], device: str, tmp_path: Path) -> None:
    told = sequence_run(models["llama"], device, sharing=True)
    shutil.copy(models["llama"], tmp_path / "elsewhere.gguf")
    runs({**told, "save": True})
    (loaded,) = runs({**told, "model": str(tmp_path / "elsewhere.gguf"), "load": True})
    assert loaded["restored"] == SPLIT


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
    assert found["stalled"]["waited_s"] < 1.5
    assert found["stalled"]["counters"]["loads_late"] == 1
    assert found["stalled"]["tokens"] == found["first"]["tokens"]
    assert found["again"]["restored"] == SPLIT


@pytest.mark.parametrize("sharing", [True, False])
def test_completions_go_on_from_what_is_stored(models: dict[str, str], device: str, sharing: bool) -> None:
    """The second prompt goes on from the first answer, in a context of its own: a conversation."""
    told = {
        "kind": "cache",
        "model": models["llama"],
        "device": device,
        "sharing": sharing,
        "prompts": [PROMPT, PROMPT + " Winston"],
        "fresh": True,
        "options": {"chunk_tokens": CHUNK_TOKENS},
    }
    (first,) = runs(told)
    (second,) = runs({**told, "attach": False})  # by set_cache alone
    assert first["cache_is_gone"]
    for before, after in zip(first["completions"], second["completions"], strict=True):
        assert after["tokens"] == before["tokens"]
        assert after["text"] == before["text"]
    was, conversation = first["completions"]
    again = second["completions"][0]
    assert was["counters"]["tokens_loaded"] == 0
    prompt_tokens = was["prompt_tokens"]
    whole = prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    assert conversation["counters"]["tokens_loaded"] == (whole if sharing else prompt_tokens)
    assert again["counters"]["tokens_loaded"] == (whole if sharing else prompt_tokens - 1)
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
