"""docs/troubleshooting.md has an entry for whatever a user can be told, and none that is stale.

Messages are found in the source: what is given to an exception of `blockkv.errors` or to a logger from
WARNING on, what is kept to be told later, findings, and what `blockkv doctor` does not find good. Their
literal text counts, with "…" for the rest. An entry is a code span in the first column of a table of messages
or findings. It stands for every message that has its pieces between "…", in order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "blockkv"
DOCUMENT = PACKAGE.parent / "docs" / "troubleshooting.md"

CALLS = """
    bench/ catalog/ connectors/jobs connectors/leases connectors/memory demo/ device/base device/engine
    format/ gpu/ kv_layout memory metrics prefix residency/ serving/client store/array_store store/extents
    store/growing store/puts store/rows store/scrub store/store store/streams tensors
"""
"""Modules of which InvalidArgument is about an argument of a call from Python: a programmer's affair."""
BY_CLASS: dict[str, tuple[str, ...]] = {
    "InvalidArgument": tuple(CALLS.split()),
    "LayoutMismatch": ("",),
    "BatchError": ("",),
    "FormatError": ("format/", "space/"),
    **dict.fromkeys(("FieldRejected", "PageRejected", "RecordMalformed", "SuperblockRejected"), ("format/",)),
    "Malformed": ("serving/",),
    "ValueError": ("connectors/lmcache/config",),
}
"""Where an entry with the name of the class will do."""
ALSO = {"connectors/lmcache/": {"RuntimeError", "ValueError"}, "connectors/vllm": {"RuntimeError"}}
"""What else is raised for users, by module."""
LOGGED = {"warning", "error", "exception", "critical", "warn"}
HANDED_ON = {"Finding", "chunk_finding", "store_full", "_end"}
HANDED_ON |= {"_log_once", "_messages_once", "_tell", "_tell_once"}
"""Functions that raise, log or report what they are given."""
KEPT = {"_closed", "_ended_how", "_owed", "lost", "reason"}
"""Attributes whose text is told later."""


class Message(NamedTuple):
    where: str
    kind: str
    text: str

    @property
    def by_class(self) -> bool:
        return self.where.startswith(BY_CLASS.get(self.kind, ()))


def text_of(node: ast.AST, names: Mapping[str, str]) -> str:
    """The literal text in an expression, with what is known of names in it; "…" for what is not literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdrg]", "…", node.value)
    if isinstance(node, ast.Name):
        return names.get(node.id, "…")
    children = [node.body, node.orelse] if isinstance(node, ast.IfExp) else ast.iter_child_nodes(node)
    parts = [text_of(one, names) for one in children if isinstance(one, ast.expr)]
    return ("" if isinstance(node, ast.JoinedStr | ast.BinOp) else "…").join(parts) if parts else "…"


def names_in(scope: ast.AST, names: Mapping[str, str], exceptions: set[str]) -> dict[str, str]:
    """What the names assigned in a scope may stand for: all of their texts; of exceptions `class NAME`."""
    found: dict[str, str] = {}
    for node in ast.walk(scope):
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AugAssign(ast.Name(name), _, value):
                text = text_of(value, names)
                found[name] = f"{found[name]}…{text}" if name in found else text
                mentioned = {one.id for one in ast.walk(value) if isinstance(one, ast.Name)} & exceptions
                found |= {f"class {name}": one for one in mentioned}
    return found


def messages_in(
    node: ast.AST, names: Mapping[str, str], where: str, exceptions: set[str]
) -> Iterator[Message]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names = {**names, **names_in(node, names, exceptions)}
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *rest]):
            at, kind = f"{where}:{node.lineno}", names.get(f"class {name}", name)
            if kind in exceptions or (name in LOGGED and ast.unparse(node.func).startswith(("log", "warn"))):
                yield Message(at, kind, text_of(first, names))
            elif name in HANDED_ON:
                yield Message(at, name, "…".join(text_of(one, names) for one in node.args))
            elif name == "Observation" and ast.unparse(rest[0]) not in ("Verdict.GOOD", "Verdict.NOTE"):
                yield Message(at, name, text_of(rest[1], names))
        case ast.Assign(targets=[target], value=value):
            if KEPT & {one.attr for one in ast.walk(target) if isinstance(one, ast.Attribute)}:
                yield Message(f"{where}:{node.lineno}", "kept", text_of(value, names))
    for child in ast.iter_child_nodes(node):
        yield from messages_in(child, names, where, exceptions)


@cache
def messages() -> list[Message]:
    """Everything but what the simulated device says, which is for tests."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "simulated.py"]
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(paths)}
    classes = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    exceptions = {"BlockKVError"}
    while more := {one.name for one in classes if exceptions & {*map(ast.unparse, one.bases)}} - exceptions:
        exceptions |= more
    assigned = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.Assign)]
    constants = {name: text for node in assigned for name, text in names_in(node, {}, set()).items()}
    found: list[Message] = []
    for where, tree in trees.items():
        names = dict(constants)
        for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
            local = names_in(function, {}, set())
            returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
            names[function.name] = "…".join(text_of(one, local) for one in returned)
        also = set().union(*(kinds for module, kinds in ALSO.items() if where.startswith(module)))
        found += messages_in(tree, names, where, exceptions | also)
    return [one for one in found if one.by_class or says_something(one.text)]


def says_something(text: str) -> bool:
    """Whether it is more than what others have said, or a single word."""
    words = re.findall("[a-z]+", text)
    return len(words) > 1 or (bool(words) and ":" in text)


@cache
def entries() -> list[str]:
    """The code spans in the first column of the tables of messages and findings."""
    table = re.compile(r"^\| (?:message|finding) \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
    rows = [row for body in table.findall(DOCUMENT.read_text()) for row in body.splitlines()]
    return [span for row in rows for span in re.findall("`(.+?)`", row.split("|")[1])]


@cache
def pattern(entry: str) -> re.Pattern[str]:
    return re.compile(".*?".join(re.escape(piece.strip()) for piece in entry.split("…")), re.DOTALL)


def stands_for(entry: str, message: Message) -> bool:
    return (message.by_class and message.kind == entry) or pattern(entry).search(message.text) is not None


def test_every_message_has_an_entry() -> None:
    assert len(messages()) > 400, "the messages are not found in the source any more"
    missing = [one for one in messages() if not any(stands_for(entry, one) for entry in entries())]
    assert not missing, "\n".join(f"{one.where}: {one.kind}: {one.text}" for one in missing)


def test_every_entry_has_a_message() -> None:
    stale = [entry for entry in entries() if not any(stands_for(entry, one) for one in messages())]
    assert not stale, "\n".join(stale)


def test_entries_say_enough_to_be_found_by() -> None:
    assert [entry for entry in entries() if len(re.findall(r"\w", entry)) < 5] == []
