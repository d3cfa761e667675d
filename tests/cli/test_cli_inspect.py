"""inspect: every structure of a store in use, of a closed one, and of damaged images."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from command_line import Answer, answered, blockkv_command, damage, flip, json_answer

import blockkv
from blockkv.cli.exit_code import ExitCode

KINDS = ("superblock", "journal", "checkpoint", "extents")
PAGE_BYTES = 4096


@pytest.fixture
def live_store(store: Path):
    """A store that is open and has chunks in its journal only."""
    with blockkv.open(store) as opened:
        for number in range(5):
            opened.put(f"chunk/{number}", bytes([number]) * 70_000, durable=True)
        opened.delete("chunk/1", durable=True)
        yield store, opened


def test_superblock_of_a_store_in_use(live_store) -> None:
    store, opened = live_store
    document = json_answer("inspect", "superblock", store)
    assert [slot["slot_index"] for slot in document["slots"]] == list(range(8))
    assert sum(slot["valid"] for slot in document["slots"]) >= 2
    assert document["superblock"]["uuid"] == opened.info()["uuid"]
    assert document["superblock"]["label"] == "test store"
    assert document["superblock"]["clean"] is False
    assert document["error"] is None
    text = answered("inspect", "superblock", store).out
    assert opened.info()["uuid"] in text


def test_journal_of_a_store_in_use(live_store) -> None:
    store, _ = live_store
    document = json_answer("inspect", "journal", store, "--records", "--keys")
    assert document["record_counts"] == {"LAYOUT": 1, "PUT": 5, "DELETE": 1}
    assert document["page_count"] == len(document["pages"])
    assert document["end"]["reason"] == "END_OF_LOG"
    keys = [
        entry["key"] for page in document["pages"] for entry in page["content"] if entry["operation"] == "PUT"
    ]
    assert keys == [f"chunk/{number}" for number in range(5)]
    sequences = [page["sequence"] for page in document["pages"]]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert json_answer("inspect", "journal", store, "--limit", 2)["pages"] == [
        {name: value for name, value in page.items() if name != "content"} for page in document["pages"][:2]
    ]


def test_checkpoint_and_journal_change_places_at_a_checkpoint(live_store) -> None:
    store, opened = live_store
    assert json_answer("inspect", "checkpoint", store)["record_count"] == 0
    opened.checkpoint()
    document = json_answer("inspect", "checkpoint", store, "--records")
    assert document["record_counts"]["PUT"] == 4
    assert document["damaged_page_count"] == document["lost_record_count"] == 0
    assert len(document["records"]) == document["record_count"]
    assert json_answer("inspect", "journal", store)["page_count"] == 0
    assert "PUT" in answered("inspect", "checkpoint", store, "--records").out


@pytest.mark.parametrize("closed", [False, True])
def test_extents_are_those_the_store_reports(live_store, closed: bool) -> None:
    store, opened = live_store
    entries = map(opened.entry, opened.keys())
    expected = sorted((start, count) for entry in entries for start, count in entry.extents)
    if closed:
        opened.close()
    document = json_answer("inspect", "extents", store, "--keys")
    live = [item for item in document["extents"] if item["state"] == "live"]
    assert [(item["start_unit"], item["unit_count"]) for item in live] == expected
    assert {item["key"] for item in live} == {f"chunk/{number}" for number in (0, 2, 3, 4)}
    assert document["chunk_count"] == 4
    assert document["live_unit_count"] + document["free_unit_count"] == document["unit_count"]
    assert document["overlaps"] == []
    position = 0
    for item in document["extents"]:
        assert item["start_unit"] == position, "the map has no gap"
        position += item["unit_count"]
    assert position == document["unit_count"]
    assert "4 chunks in 4 extents" in answered("inspect", "extents", store, "--limit", 1).out


def test_chunk_of_a_store_in_use(live_store) -> None:
    store, opened = live_store
    document = json_answer("inspect", "chunk", store, "chunk/3")
    entry = opened.entry("chunk/3")
    assert document["verified"] is True
    assert document["digest"] == entry.digest.hex()
    assert document["payload_bytes"] == 70_000
    assert [(item["start_unit"], item["unit_count"]) for item in document["extents"]] == list(entry.extents)
    assert document["layout"] == "tensor(uint8[70000])"
    assert "payload_hex" not in document


def test_inspect_changes_nothing(store: Path, payload: Path) -> None:
    answered("put", store, "key", payload)
    before = store.read_bytes()
    for kind in KINDS:
        answered("inspect", kind, store)
    answered("inspect", "chunk", store, "key")
    assert store.read_bytes() == before


def test_payload_is_shown_only_when_told(store: Path) -> None:
    secret = b"the quick brown fox " * 100
    answered("put", store, "key", "-", stdin=secret)
    for words in (["extents"], ["journal", "--records"], ["checkpoint", "--records"], ["chunk"]):
        key = ["key"] if words == ["chunk"] else []
        for form in ([], ["--json"]):
            answer = answered("inspect", words[0], store, *key, *words[1:], *form)
            assert "quick" not in answer.out
            assert secret[:8].hex() not in answer.out
            assert secret[:8].hex(" ") not in answer.out
    assert "the quick brown " in answered("inspect", "chunk", store, "key", "--payload").out
    document = json_answer("inspect", "chunk", store, "key", "--payload", "--bytes", 20)
    assert bytes.fromhex(document["payload_hex"]) == secret[:20]


def test_keys_are_cut_unless_told_otherwise(store: Path) -> None:
    key = "prompt: tell me about my medical history"
    answered("put", store, key, "-", stdin=b"x")
    for kind, options in (("extents", []), ("checkpoint", ["--records"])):
        assert key not in answered("inspect", kind, store, *options).out
        assert key in answered("inspect", kind, store, *options, "--keys").out


def test_long_keys_are_whole_again(store: Path) -> None:
    key = "x" * 4096
    answered("put", store, key, "-", stdin=b"x")
    items = json_answer("inspect", "extents", store, "--keys")["extents"]
    assert key in [item.get("key") for item in items]


def test_a_missing_key(store: Path) -> None:
    assert json_answer("inspect", "chunk", store, "nothing", code=ExitCode.NEGATIVE) == {
        "key": "nothing",
        "found": False,
    }
    assert "not stored" in answered("inspect", "chunk", store, "nothing", code=ExitCode.NEGATIVE).err


def test_a_damaged_payload_names_the_leaf(store: Path, payload: Path) -> None:
    answered("put", store, "key", payload)
    damage(store, "key", at_byte=200_000)
    document = json_answer("inspect", "chunk", store, "key", code=ExitCode.NEGATIVE)
    assert document["verified"] is False
    assert document["leaf_bytes"] == 128 << 10
    assert document["leaf_count"] == 3
    assert document["damaged_leaves"] == [1]


def test_a_damaged_superblock_slot(store: Path) -> None:
    newest = max(
        json_answer("inspect", "superblock", store)["slots"],
        key=lambda slot: (slot["generation"] or 0, -slot["slot_index"]),
    )
    flip(store, newest["offset_bytes"] + 200)
    document = json_answer("inspect", "superblock", store)
    slot = document["slots"][newest["slot_index"]]
    assert (slot["valid"], slot["fault"]) == (False, "TORN")
    assert document["superblock"]["generation"] == newest["generation"], "its twin at the tail still counts"
    assert "torn or rotten" in answered("inspect", "superblock", store).out


def test_no_valid_superblock_at_all(store: Path) -> None:
    for slot in json_answer("inspect", "superblock", store)["slots"]:
        flip(store, slot["offset_bytes"] + 200)
    document = json_answer("inspect", "superblock", store, code=ExitCode.FORMAT)
    assert document["superblock"] is None
    assert document["error"]["type"] == "NotFormatted"
    answered("inspect", "superblock", store, code=ExitCode.FORMAT)
    for kind in ("journal", "checkpoint", "extents"):
        assert json_answer("inspect", kind, store, code=ExitCode.FORMAT)["error"]["type"] == "NotFormatted"


def test_a_damaged_journal_page(live_store) -> None:
    store, _ = live_store
    pages = json_answer("inspect", "journal", store)["pages"]
    flip(store, pages[2]["offset_bytes"] + 100)
    document = json_answer("inspect", "journal", store, code=ExitCode.NEGATIVE)
    assert document["end"]["reason"] == "DAMAGED"
    assert document["end"]["fault"] == "TORN"
    assert document["page_count"] == 2
    assert "damaged" in answered("inspect", "journal", store, code=ExitCode.NEGATIVE).out


def test_a_damaged_checkpoint_page(store: Path, payload: Path) -> None:
    answered("put", store, "key", payload)
    checkpoint = json_answer("inspect", "checkpoint", store)
    assert checkpoint["page_count"] == 3  # layouts, chunks, layouts
    flip(store, checkpoint["offset_bytes"] + 4096 + 100)
    document = json_answer("inspect", "checkpoint", store, code=ExitCode.NEGATIVE)
    assert document["damaged_page_count"] == 1
    assert document["lost_record_count"] == 1
    assert json_answer("inspect", "extents", store)["chunk_count"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_image(store: Path, payload: Path, kind: str) -> None:
    """The tail is gone, and with it half of the data zone; the head still tells everything."""
    answered("put", store, "key", payload)
    with store.open("r+b") as file:
        file.truncate(8 << 20)
    answered("inspect", kind, store)


def test_a_chunk_beyond_the_end_of_a_truncated_image(store: Path, payload: Path) -> None:
    answered("put", store, "key", payload)
    data_offset_bytes = json_answer("inspect", "superblock", store)["superblock"]["data_offset_bytes"]
    with store.open("r+b") as file:
        file.truncate(data_offset_bytes + (128 << 10))
    document = json_answer("inspect", "chunk", store, "key", code=ExitCode.NEGATIVE)
    assert document["damaged_leaves"] == [1, 2]


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_never_breaks_inspection(store: Path, payload: Path, seed: int) -> None:
    """Whatever is on the device, inspection ends with an answer and one of its exit codes."""
    for number in range(4):
        answered("put", store, f"key/{number}", payload)
    zones = json_answer("inspect", "superblock", store)["superblock"]
    dice = random.Random(seed)
    spans = [(0, 1 << 20)] + [
        (zones[f"{name}_offset_bytes"], 16 * PAGE_BYTES)
        for name in ("checkpoint_a", "checkpoint_b", "journal")
    ]
    with store.open("r+b") as file:
        for _ in range(dice.choice((1, 10, 200))):
            start, size_bytes = dice.choice(spans)
            file.seek(start + dice.randrange(size_bytes // PAGE_BYTES) * PAGE_BYTES + dice.randrange(400))
            file.write(dice.randbytes(dice.choice((1, 8, 100))))
    for words in [[kind] for kind in KINDS] + [["chunk", "key/1"]]:
        answer: Answer = blockkv_command("inspect", words[0], store, *words[1:], "--json")
        assert answer.code in (ExitCode.OK, ExitCode.NEGATIVE, ExitCode.FORMAT), answer
        assert isinstance(answer.document, dict)


@pytest.mark.parametrize("content", [b"", b"\0", b"x" * 5000, bytes(1 << 20), b"blockkv\0" * 1000])
def test_files_that_are_no_store(image_dir: Path, content: bytes) -> None:
    path = image_dir / "other.img"
    path.write_bytes(content)
    for kind in KINDS:
        answer = blockkv_command("inspect", kind, path, "--json")
        assert answer.code in (ExitCode.DEVICE, ExitCode.FORMAT), answer
        assert isinstance(answer.document, dict)


def test_what_is_on_no_drive_has_no_placement_handles(store: Path) -> None:
    answer = blockkv_command(
        "inspect",
        "placement",
        store,
        "--json",
    )
    assert answer.code == ExitCode.USAGE
    assert "nothing else has placement handles" in answer.document["error"]["message"]
