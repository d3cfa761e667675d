"""docs/api.md is what the source says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import blockkv
from blockkv import errors

ROOT = Path(__file__).parents[1]


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools" / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == tool().render(), "run tools/api_reference.py"


def test_every_public_name_is_in_it() -> None:
    lines = (ROOT / "docs" / "api.md").read_text().splitlines()
    names = [name for name in blockkv.__all__ if not name.startswith("__")]
    missing = [
        name
        for name in names
        if f"### blockkv.{name}" not in lines
        and not (name in errors.__all__ and any(line.startswith(f"| `{name}` |") for line in lines))
    ]
    assert not missing


def test_names_are_followed_to_where_they_are_defined() -> None:
    found = tool().render()
    assert "\nopen(\n    path: Target | Sequence[Target],\n    *,\n    degraded: bool = False," in found
    assert "\n#### Store.put\n" in found
