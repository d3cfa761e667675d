"""The shape of the package: imports point down the list of layers, in no circle, and nothing is left over.

Reads the source with `ast`, so an import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "blockkv"

ANYWHERE = {"blockkv.errors", "blockkv.device.base"}
"""Contracts rather than code: importable from every layer."""

LAYERS: list[set[str]] = [
    {"_native", "logs", "memory"},
    {"device"},
    {"catalog", "space", "format", "encryption"},
    {"store", "tensors", "kv_layout", "gpu"},
    {"serving", "tracing"},
    {"residency"},
    {"", "archive", "kv_size", "metrics", "prefix", "testing"},  # "" is blockkv/__init__.py: the public names
    {"cli", "connectors", "demo", "bench"},
    {"__main__"},
]
"""Lowest first; first component of the module name below `blockkv`."""

PUBLIC_ONLY = {"connectors", "demo", "bench"}
"""Written as a user would write them: they see the public API and their own package, nothing else."""
PUBLIC_MODULES = {
    "blockkv",
    "blockkv.errors",
    "blockkv.kv_size",
    "blockkv.metrics",
    "blockkv.prefix",
    "blockkv.testing",
}

ENTRY_POINTS = {"blockkv", "blockkv.metrics", "blockkv.testing", "blockkv.__main__"}
"""Reached by users rather than by other modules; those of pyproject.toml come on top."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def component(module: str) -> str:
    return module.removeprefix("blockkv").removeprefix(".").split(".")[0]


def layer(module: str) -> int:
    for rank, names in enumerate(LAYERS):
        if component(module) in names:
            return rank
    pytest.fail(f"{module} belongs to no layer; give it a place in LAYERS and in docs/architecture.md")


def imports(path: Path, package: str) -> Iterator[tuple[str, int]]:
    """Yield (imported module of ours, line), relative imports resolved from `package`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "blockkv":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.split(".")
                base = base[: len(base) - node.level + 1]
                source = ".".join(base + ([source] if source else []))
            if source.split(".")[0] != "blockkv":
                continue
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield name if name in modules() or name == "blockkv._native" else source, node.lineno


@cache
def graph() -> dict[str, dict[str, int]]:
    """Module -> imported module -> line of the import."""
    return {
        module: dict(imports(path, module if path.name == "__init__.py" else module.rpartition(".")[0]))
        for module, path in modules().items()
    }


def place(module: str, line: int) -> str:
    return f"{modules()[module].relative_to(ROOT)}:{line}"


def test_imports_point_down() -> None:
    wrong = [
        f"{place(module, line)}: {module} imports {target}, which lies above it"
        for module, targets in graph().items()
        for target, line in targets.items()
        if target not in ANYWHERE and layer(target) > layer(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_contracts_import_only_contracts() -> None:
    wrong = {module: targets for module in ANYWHERE if (targets := graph()[module].keys() - ANYWHERE)}
    assert not wrong


def test_no_import_cycles() -> None:
    """Depth-first search; a module met again while it is still being explored closes a circle."""
    done: set[str] = set()

    def explore(module: str, trail: list[str]) -> None:
        if module in trail:
            pytest.fail("import cycle: " + " -> ".join([*trail[trail.index(module) :], module]))
        if module in done:
            return
        for target in graph().get(module, ()):
            explore(target, [*trail, module])
        done.add(module)

    for module in modules():
        explore(module, [])


def test_users_of_the_api_see_only_the_api() -> None:
    wrong = [
        f"{place(module, line)}: {module} imports {target}, which is not public"
        for module, targets in graph().items()
        if component(module) in PUBLIC_ONLY
        for target, line in targets.items()
        if target not in PUBLIC_MODULES and component(target) != component(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_devices_touch_the_native_core() -> None:
    users = {module for module, targets in graph().items() if "blockkv._native" in targets}
    strangers = {module for module in users if layer(module) > layer("blockkv.store")}
    assert not strangers, f"above the store nothing calls C: {sorted(strangers)}"


def test_no_dead_modules() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    # An engine is told the name of its connector: whatever is public in the package is reached that way.
    connectors = {
        module for module in modules() if module.startswith("blockkv.connectors.") and module.count(".") == 2
    }
    alive = ENTRY_POINTS | connectors | {target.partition(":")[0] for target in scripts.values()}
    for targets in graph().values():
        alive |= targets.keys()
    for tool in (ROOT / "tools").glob("*.py"):
        alive |= dict(imports(tool, "")).keys()
    for module in list(alive):  # a package is alive with its modules
        while module:
            alive.add(module)
            module = module.rpartition(".")[0]
    dead = sorted(modules().keys() - alive)
    assert not dead, f"imported by nothing and no entry point: {dead}"
