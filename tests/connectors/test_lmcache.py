"""The connector of LMCache, in LMCache: its contract, its own benchmark, and its server that is killed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from engines import run_in

WORKERS = Path(__file__).parent / "workers"
CONTRACT = WORKERS / "lmcache_contract.py"
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


@cache
def contract_failures() -> dict[str, str]:
    """Of each check of the worker, all in one process: importing LMCache takes longer than they do."""
    failures: dict[str, str] = run_in("lmcache", CONTRACT, **QUIET)
    return failures


@pytest.mark.parametrize("check", re.findall(r"^def (check_\w+)", CONTRACT.read_text(), re.MULTILINE))
def test_contract(check: str) -> None:
    assert contract_failures()[check] == ""
