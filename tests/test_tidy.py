"""House rules a linter does not know: words, docstrings, line lengths, nothing from one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAX_LINE_CHARS = 120
"""Of C, shell and make; Ruff holds Python to its own limit."""
LINES_LIMITED = {".c", ".h", ".sh", ""}

UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")

BANNED_NAMES = {"block", "blocks"}
"""Means an engine's KV block, a device block and a metadata unit: say LBA, page, run, extent, chunk."""

ONE_MACHINE = re.compile(
    r"(?<![\w.])/(work|root|home|Users)/"
    r"|\bpypi\.(org|python)|python"
    + r"hosted\.org|registry\.npm"
    + r"js|deb\.debian\.org|download\.pyto"
    + r"rch"
)


@cache
def files() -> list[Path]:
    """Every file of the project: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = sorted(set(listed.stdout.decode().split("\0")) - {""})
    return [ROOT / name for name in names if (ROOT / name).is_file()]


@cache
def texts() -> dict[Path, str]:
    found = {}
    for path in files():
        content = path.read_bytes()
        if b"\0" not in content:
            found[path] = content.decode("utf-8")
    return found


def matches(pattern: re.Pattern[str], text: str) -> list[int]:
    """Line numbers on which `pattern` matches."""
    return [number for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def report(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def at(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def test_nothing_is_left_unfinished() -> None:
    report([at(path, n, "unfinished") for path, text in texts().items() for n in matches(UNFINISHED, text)])


def test_nothing_belongs_to_one_machine() -> None:
    report(
        [
            at(path, n, "a path or host of one machine")
            for path, text in texts().items()
            if path != Path(__file__) and path.name != "LICENSE"
            for n in matches(ONE_MACHINE, text)
        ]
    )


def test_line_lengths() -> None:
    report(
        [
            at(path, n, f"{len(line)} characters, the limit is {MAX_LINE_CHARS}")
            for path, text in texts().items()
            if path.suffix in LINES_LIMITED and path.name != "LICENSE"
            for n, line in enumerate(text.splitlines(), 1)
            if len(line) > MAX_LINE_CHARS
        ]
    )


def test_banned_names() -> None:
    found = []
    for path, text in texts().items():
        if path.suffix == ".py":
            with path.open("rb") as file:
                found += [
                    at(path, token.start[0], f"`{token.string}` as a name")
                    for token in tokenize.tokenize(file.readline)
                    if token.type == tokenize.NAME and token.string in BANNED_NAMES
                ]
        elif path.suffix in {".c", ".h"}:
            code = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", keep_newlines, text, flags=re.DOTALL)
            pattern = re.compile(r"\b(" + "|".join(BANNED_NAMES) + r")\b")
            found += [at(path, n, "banned name") for n in matches(pattern, code)]
    report(found)


def keep_newlines(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def python_sources() -> dict[Path, ast.Module]:
    folders = {"blockkv", "native", "tools", "examples", "tests"}
    return {
        path: ast.parse(text)
        for path, text in texts().items()
        if path.suffix == ".py" and (path.relative_to(ROOT).parts[0] in folders or path.parent == ROOT)
    }


def test_every_module_says_what_it_is() -> None:
    missing = [at(path, 1, "no module docstring") for path, tree in python_sources().items() if not doc(tree)]
    report(missing)


def test_every_c_file_says_what_it_is() -> None:
    """A file with a header of the same name says it there."""

    def opens_with_comment(path: Path) -> bool:
        return texts().get(path, "").lstrip().startswith("/*")

    report(
        [
            at(path, 1, "does not open with a comment that says what it is, nor does its header")
            for path in texts()
            if path.suffix in {".c", ".h"}
            and not (opens_with_comment(path) or opens_with_comment(path.with_suffix(".h")))
        ]
    )


def test_every_public_function_is_documented() -> None:
    """What implements a documented method inherits its docstring; the name of a property says what it is."""
    trees = {path: tree for path, tree in python_sources().items() if path.is_relative_to(ROOT / "blockkv")}
    inherited = {
        node.name
        for tree in trees.values()
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and doc(node)
    }
    found = []
    for path, tree in trees.items():
        owners: list[ast.Module | ast.ClassDef] = [tree]
        owners += [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner in owners:
            if isinstance(owner, ast.ClassDef):
                if owner.name.startswith("_"):
                    continue
                if not doc(owner) and not is_enum(owner):
                    found.append(at(path, owner.lineno, f"class {owner.name} has no docstring"))
            for node in owner.body:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                    continue
                derived = isinstance(owner, ast.ClassDef) and bool(owner.bases) and node.name in inherited
                if not doc(node) and not derived and not needs_none(node):
                    found.append(at(path, node.lineno, f"{node.name}() has no docstring"))
    report(found)


def doc(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return (ast.get_docstring(node) or "").strip()


def is_enum(node: ast.ClassDef) -> bool:
    """The name of an enum is its docstring."""
    return any("Enum" in ast.unparse(base) for base in node.bases)


def needs_none(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.endswith(("overload", "property", ".setter")) for name in names)


def test_tests_mirror_the_package() -> None:
    folders = {
        path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    parts = {path.name for path in (ROOT / "blockkv").iterdir() if path.is_dir()} | {"native", "store", "vm"}
    assert folders <= parts, f"tests for parts that do not exist: {sorted(folders - parts)}"


def test_modules_of_the_tests_have_unique_names() -> None:
    """Pytest imports them, and they import each other, by base name."""
    tests = [path for path in files() if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"]
    names = [path.name for path in tests if path.name != "conftest.py"]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
