"""check and scrub: what they find, what they say, what they put right, and with which exit code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import answered, damage, flip, json_answer

import blockkv
from blockkv.cli.exit_code import ExitCode


@pytest.fixture
def filled(store: Path, payload: Path) -> Path:
    """A store with the chunks "good" and "bad"."""
    answered("put", store, "good", payload)
    answered("put", store, "bad", payload)
    return store


def test_check_of_a_sound_store(store: Path, payload: Path) -> None:
    answered("put", store, "key", payload)
    document = json_answer("check", store, "--payload")
    assert document == {
        "ok": True,
        "repaired": False,
        "chunks": 1,
        "payload_bytes": 300_001,
        "payload_checked": True,
        "findings": [],
        "damaged_keys": [],
    }
    assert answered("check", store).out == "ok: 1 chunks, 293 KiB; checked metadata\n"


def test_check_finds_damaged_payload(filled: Path) -> None:
    damage(filled, "bad", at_byte=200_000)
    before = filled.read_bytes()
    document = json_answer("check", filled, "--payload", code=ExitCode.NEGATIVE)
    assert document["ok"] is False
    assert document["damaged_keys"] == ["bad"]
    (finding,) = document["findings"]
    assert (finding["structure"], finding["key"], finding["remedy"]) == ("chunk", "bad", "drops the chunk")
    text = answered("check", filled, "--payload", code=ExitCode.NEGATIVE).out
    assert (
        f"chunk bad at byte {finding['offset_bytes']}: its bytes are not those that were put; --repair"
        in text
    )
    assert text.endswith("NOT ok: 2 chunks, 585.9 KiB; checked payload and metadata\n")
    assert json_answer("check", filled)["ok"] is True, "without --payload the payload is not read"
    assert filled.read_bytes() == before


def test_repair_drops_what_cannot_be_verified_and_says_so(filled: Path, payload: Path) -> None:
    damage(filled, "bad", at_byte=200_000)
    flip(filled, 262_144 + 90)
    text = answered("check", filled, "--payload", "--repair", code=ExitCode.NEGATIVE).out.splitlines()
    assert text[0].startswith("superblock slot 1 at byte 262144: has a wrong checksum")
    assert text[2:] == ["dropped: bad", "repaired: 1 chunks, 585.9 KiB; checked payload and metadata"]
    assert json_answer("check", filled, "--payload")["findings"] == []
    assert json_answer("check", filled, "--payload", "--repair")["findings"] == []
    answered("get", filled, "bad", code=ExitCode.NEGATIVE)
    assert answered("get", filled, "good").raw == payload.read_bytes()


def test_check_finds_damaged_metadata(filled: Path) -> None:
    page = json_answer("inspect", "checkpoint", filled)["offset_bytes"] + 4096  # behind that of the layouts
    flip(filled, page + 400)
    findings = json_answer("check", filled, code=ExitCode.NEGATIVE)["findings"]
    assert [finding["structure"] for finding in findings] == ["checkpoint page", "checkpoint"]
    assert findings[0]["offset_bytes"] == page
    assert json_answer("check", filled, "--repair", code=ExitCode.NEGATIVE)["findings"] == findings
    assert json_answer("check", filled)["chunks"] == 0


@pytest.mark.requires_root
def test_a_device_set_read_only_is_checked_and_not_repaired(loop_device) -> None:
    device = loop_device(16 << 20)
    answered("format", device)
    subprocess.run(["blockdev", "--setro", device], check=True)
    try:
        assert json_answer("check", device, "--payload")["ok"] is True
        error = json_answer("check", device, "--repair", code=ExitCode.REFUSED)["error"]
        assert error["type"] == "DeviceReadOnly"
    finally:
        subprocess.run(["blockdev", "--setrw", device], check=True)


def test_scrub_drops_what_does_not_verify(filled: Path) -> None:
    document = json_answer("scrub", filled)
    assert document["ok"]
    assert document["finished"]
    assert document["chunks"] == 2
    damage(filled, "bad", at_byte=200_000)
    answer = answered("scrub", filled, "--rate", "1GiB/s", code=ExitCode.NEGATIVE)
    assert answer.out == "dropped: bad\nNOT ok: 2 chunks, 585.9 KiB\n"
    assert json_answer("scrub", filled)["chunks"] == 1
    assert json_answer("check", filled, "--payload")["ok"]


def test_scrub_tells_of_metadata_that_was_damaged(filled: Path) -> None:
    page = json_answer("inspect", "checkpoint", filled)["offset_bytes"] + 4096  # behind that of the layouts
    flip(filled, page + 400)
    document = json_answer("scrub", filled, code=ExitCode.NEGATIVE)
    assert document["ok"] is False
    assert document["chunks"] == 0
    assert [one["structure"] for one in document["findings"]] == ["checkpoint page", "checkpoint"]
    assert json_answer("scrub", filled)["ok"] is True, "the open of the first one wrote a checkpoint"


@pytest.mark.parametrize("rate", ["0", "fast", "-1", "1MiB/h"])
def test_scrub_refuses_a_rate_that_is_none(filled: Path, rate: str) -> None:
    answered("scrub", filled, "--rate", rate, code=ExitCode.USAGE)


def test_scrub_goes_on_where_another_one_stopped(store: Path) -> None:
    with blockkv.open(store) as opened:
        opened.put_many([(f"k{number}", bytes(100_000)) for number in range(5)])
        stopped = opened.scrub(200_000, progress=lambda done, total: opened.stop_scrub())
        assert not stopped.finished
    assert json_answer("inspect", "superblock", store)["superblock"]["scrub_sequence"] > 0
    answer = answered("scrub", store)
    assert answer.out == "ok: 4 chunks, 390.6 KiB, the rest of a scrub that was cut short\n"
    assert json_answer("inspect", "superblock", store)["superblock"]["scrub_sequence"] == 0
    assert json_answer("scrub", store)["chunks"] == 5
