"""Runs `blockkv` in this process and takes its answer apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from blockkv.cli import cli


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str
    raw: bytes

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


def blockkv_command(*words: object, stdin: bytes | None = None) -> Answer:
    """`blockkv WORDS...`. An exception that gets out fails the test: only SystemExit may."""
    result = CliRunner().invoke(cli, [str(word) for word in words], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    out = result.stdout_bytes.decode(errors="replace")
    return Answer(result.exit_code, out, result.stderr, result.stdout_bytes)


def answered(*words: object, stdin: bytes | None = None, code: int = 0) -> Answer:
    """`blockkv_command` that has to end with `code`."""
    answer = blockkv_command(*words, stdin=stdin)
    assert answer.code == code, f"{words}: {answer}"
    return answer


def json_answer(*words: object, code: int = 0) -> Any:
    """The document of `blockkv WORDS... --json`."""
    return answered(*words, "--json", code=code).document


def flip(store: Path, offset_bytes: int, bit: int = 0) -> None:
    """Invert one bit on the device."""
    with store.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1 << bit]))


def damage(store: Path, key: str, at_byte: int) -> None:
    """Flip one bit of a chunk's payload on the device."""
    extent = json_answer("inspect", "chunk", store, key)["extents"][0]
    flip(store, extent["offset_bytes"] + at_byte)
