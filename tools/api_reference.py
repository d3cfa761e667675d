#!/usr/bin/env python3
"""Write docs/api.md, the API reference, from signatures and docstrings in the source.

Nothing is imported, so it takes a moment, and engines and accelerators need not be there. Of each module the
names in its `__all__` are taken, each once, where it comes first, functions before classes. What a class
inherits stands with its base. With --check nothing is written, and the exit status says if it is up to date.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "api.md"

MODULES = {
    "blockkv": "stores, chunks, keys",
    "blockkv.errors": "what is raised",
    "blockkv.kv_layout": "parts of chunks",
    "blockkv.prefix": "keys of prompts",
    "blockkv.residency": "a memory tier",
    "blockkv.gpu": "streams to an accelerator",
    "blockkv.archive": "chunks to other stores and files",
    "blockkv.metrics": "Prometheus",
    "blockkv.tracing": "OpenTelemetry",
    "blockkv.catalog.eviction": "who leaves",
    "blockkv.catalog.admission": "what is written",
    "blockkv.catalog.wear": "how much is written a day",
    "blockkv.kv_size": "how big a KV cache is, and whether loading pays",
    "blockkv.connectors.transformers": "transformers",
    "blockkv.connectors.llama_cpp": "llama.cpp",
    "blockkv.connectors.aibrix": "AIBrix",
    "blockkv.connectors.weights": "fingerprints of weights",
    "blockkv.testing": "devices and generators for tests",
}
"""In this order. Connectors that engines load by name, and nobody calls, are not among them."""

PREFACE = """# API reference

Public names with their docstrings, made by `tools/api_reference.py` from the source. The
[README](../README.md#in-python) has examples, the [glossary](glossary.md) the words. Lists in a class are its
fields and properties; a class without a constructor is made by whoever its text names, or from its fields.
What engines load by name is configured and not called: see [connectors.md](connectors.md).

| module | |
|---|---|
"""
SHOWN_DECORATORS = ("classmethod", "staticmethod", "contextmanager")
LINE_CHARS = 100

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function | ast.Assign | ast.AnnAssign


@cache
def source(module: str) -> ast.Module:
    """The source of a module, by its name with dots."""
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def public_names(module: str) -> list[str]:
    """What `__all__` lists, in order."""
    listed = definition(module, "__all__")
    assert isinstance(listed, ast.Assign)
    return [name for name in ast.literal_eval(listed.value) if not name.startswith("__")]


def definition(module: str, name: str) -> Definition:
    """Where a name is defined that a module has, through all imports. Raises KeyError."""
    for node in source(module).body:
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in map(ast.unparse, targets(node)):
            wrapped = node.value  # a decorated function
            if isinstance(wrapped, ast.Call) and len(wrapped.args) == 1 and name.islower():
                return definition(module, ast.unparse(wrapped.args[0]))
            return node
    for imported in ast.walk(source(module)):
        if isinstance(imported, ast.ImportFrom) and (imported.module or "").startswith("blockkv"):
            for alias in imported.names:
                if name == (alias.asname or alias.name):
                    return definition(str(imported.module), alias.name)
    raise KeyError(f"{module} has no {name}")


def targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """What is assigned to."""
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def prose(node: ast.Module | ast.ClassDef | Function) -> str:
    """A docstring as Markdown: code in it is indented, and announced by two colons."""
    text = re.sub(r"^::\n\n?", "", ast.get_docstring(node) or "", flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def documented(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Each statement of a body, with the text that stands below it."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        yield node, " ".join(str(after.value.value).split()) if is_text else ""  # type: ignore[union-attr]


def signature(function: Function, name: str, skipped: int) -> str:
    """How a function is called: `name`, its parameters but the first `skipped`, and what it returns."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    shown = [parameter(*pair) for pair in zip(positional, defaults, strict=True)][skipped:]
    if given.vararg or given.kwonlyargs:
        shown.append(f"*{parameter(given.vararg, None)}" if given.vararg else "*")
    shown += [parameter(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        shown.append(f"**{parameter(given.kwarg, None)}")
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and skipped < 2 else ""
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= LINE_CHARS:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){returns}"


def parameter(argument: ast.arg, default: ast.expr | None) -> str:
    """With annotation and default."""
    annotation = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    equals = " = " if annotation else "="
    return f"{argument.arg}{annotation}" + (f"{equals}{ast.unparse(default)}" if default else "")


def code(text: str) -> str:
    return f"```py\n{text}\n```\n"


def of_function(function: Function, name: str, *, method: bool) -> str:
    decorators = [ast.unparse(one).split(".")[-1] for one in function.decorator_list]
    lines = [f"@{one}\n" for one in decorators if one in SHOWN_DECORATORS]
    lines.append(signature(function, name.split(".")[-1], int(method)))
    return code("".join(lines)) + f"\n{prose(function)}\n"


def of_class(node: ast.ClassDef, name: str) -> str:
    """Docstring, fields and constructor, then what it can do."""
    short = name.split(".")[-1]
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    functions = [one for one in node.body if isinstance(one, Function)]
    head = f"class {short}{bases}"
    made = next((one for one in functions if one.name == "__init__"), None)
    if made is not None and "Get one from" not in prose(node) and "Made by" not in prose(node):
        head += "\n\n" + signature(made, short, 1).removesuffix(" -> None")
    parts = [code(head), prose(node)]
    parts.append("\n".join(f"- `{name}`" + (f": {text}" if text else "") for name, text in facts(node)))
    for function in functions:
        decorators = set(map(ast.unparse, function.decorator_list))
        inherited = node.bases and not ast.get_docstring(function)
        if not (function.name.startswith("_") or inherited or decorators & {"property", "overload"}):
            full = f"{short}.{function.name}"
            parts += [f"#### {full}", of_function(function, full, method="staticmethod" not in decorators)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def facts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Fields and properties of a class, each with its type and what it is."""
    for one, text in documented(node.body):
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one).startswith("_"):
            yield ast.unparse(one), text
        if isinstance(one, Function) and "property" in map(ast.unparse, one.decorator_list):
            kind = f": {ast.unparse(one.returns)}" if one.returns else ""
            yield f"{one.name}{kind}", " ".join(prose(one).split())


def of_errors() -> str:
    """The tree, and a line for each exception."""
    classes = [node for node in source("blockkv.errors").body if isinstance(node, ast.ClassDef)]
    rows = [f"| `{node.name}` | {' '.join(prose(node).split())} |" for node in classes]
    return "| exception | |\n|---|---|\n" + "\n".join(rows) + "\n"


def of_name(module: str, name: str, node: Definition) -> str:
    """One entry."""
    full = f"{module}.{name}"
    if isinstance(node, ast.ClassDef):
        body = of_class(node, full)
    elif isinstance(node, Function):
        body = of_function(node, full, method=False)
    else:
        value = ast.unparse(node)
        body = code(value if len(value) <= LINE_CHARS else f"{ast.unparse(targets(node)[0])} = ...")
    return f"### {full}\n\n{body}\n"


def render() -> str:
    """The document."""
    seen: set[ast.stmt] = set(source("blockkv.errors").body)
    rows, sections = [], []
    for module, what in MODULES.items():
        rows.append(f"| [{module}](#{module.replace('.', '')}) | {what} |\n")
        sections.append(f"\n## {module}\n\n{prose(source(module))}\n\n")
        if module == "blockkv.errors":
            sections.append(of_errors())
            continue
        found = {name: definition(module, name) for name in public_names(module)}
        for name, node in sorted(found.items(), key=lambda one: isinstance(one[1], ast.ClassDef)):
            if node not in seen:
                sections.append(of_name(module, name, node))
                seen.add(node)
    text = PREFACE + "".join(rows) + "".join(sections)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    if parser.parse_args().check:
        return int(DOCUMENT.read_text() != render())
    DOCUMENT.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
