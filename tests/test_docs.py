"""The documents say what is so: every example runs, every command, option, link and path exists."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import click
import pytest

import blockkv
from blockkv.cli import cli
from blockkv.cli.exit_code import MEANINGS
from blockkv.metrics import serve_metrics
from blockkv.serving.owner import Owner

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
SHELL_FENCES = {"sh", "bash", "shell", "console"}


def fences(document: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(document.read_text()) if language in languages]


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def run(command: list[str] | str, directory: Path, *, codes: Container[int] = (0,)) -> None:
    """Run in `directory` with this interpreter's programs first on PATH; fail with what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=directory,
        shell=isinstance(command, str),
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in codes, f"{command}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


@documents
def test_python_examples_run(document: Path, image_dir: Path) -> None:
    examples = fences(document, "python")
    if not examples:
        return
    script = image_dir / "examples.py"
    script.write_text("\n".join(examples))
    run([sys.executable, "-W", "error", str(script)], image_dir)


@documents
def test_shell_examples_run(document: Path, image_dir: Path) -> None:
    """Those that name a drive: below. Those of the tools are only looked at; tests/bench runs them."""
    for example in fences(document, *SHELL_FENCES):
        if not re.search(r"/dev/nvme|^make |^tools/", example, re.MULTILINE):
            run(f"set -e\n{example}", image_dir)


@documents
def test_shell_examples_run_on_devices(
    document: Path, image_dir: Path, loop_device: Callable[..., Path]
) -> None:
    """Loop devices stand in for drives, with a store on each that is not formatted first."""
    examples = [one for one in fences(document, *SHELL_FENCES) if "/dev/nvme" in one]
    lines = [line.removeprefix("$ ") for one in examples for line in one.splitlines()]
    lines = [line for line in lines if line.startswith("blockkv ")]
    drives = dict.fromkeys(re.findall(r"/dev/nvme\w+", "\n".join(lines)))
    stand_ins = {drive: str(loop_device(64 << 20)) for drive in drives}
    for drive, device in stand_ins.items():
        if f"blockkv format {drive}" not in lines:
            blockkv.format(device)
    with contextlib.ExitStack() as stack:
        for line in lines:
            for drive, device in stand_ins.items():
                line = re.sub(rf"{drive}\b", device, line)
            line = line.replace("/run/", f"{image_dir}/").replace("--group inference", "--group root")
            words = shlex.split(line, comments=True)
            if words[1] == "serve":
                stack.enter_context(serving(words))
            elif words[1] == "top":
                with blockkv.open(next(iter(stand_ins.values()))) as store, serve_metrics(store, 0) as port:
                    run([*words[:2], words[2].replace("9105", str(port)), *words[3:], "--once"], image_dir)
            else:
                # what doctor says of a loop device in a virtual machine is not the example's
                run(words, image_dir, codes=(0, 1) if words[1] == "doctor" else (0,))


@contextlib.contextmanager
def serving(words: list[str]) -> Iterator[None]:
    """An owner that has said what it serves."""
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline().startswith("serving")
            yield
        finally:
            owner.terminate()
            assert owner.wait() == 0


def commands(document: Path) -> list[list[str]]:
    """Every command line in shell fences and code spans that starts with a program of ours."""
    text = document.read_text()
    lines = [line for example in fences(document, *SHELL_FENCES) for line in example.splitlines()]
    lines += CODE_SPAN.findall(FENCE.sub("", text))
    return [
        shlex.split(line.removeprefix("$ "), comments=True)
        for line in lines
        if re.match(r"(blockkv|make) [a-z]|tools/\w", line.removeprefix("$ "))
    ]


@documents
def test_commands_exist(document: Path) -> None:
    for words in commands(document):
        program, arguments = words[0], words[1:]
        if program == "make":
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert arguments[0] in targets, f"make {arguments[0]}"
        elif program == "blockkv":
            check_options(resolve(arguments), words)
        elif program.startswith("tools/connector_bench/"):  # they need an engine, which is not here
            sources = [ROOT / program, ROOT / "tools/bench_tool.py", ROOT / "tools/connector_bench/rounds.py"]
            shown = "".join(source.read_text() for source in sources)
            for option in options_in(words):
                assert option in shown, f"{program} has no {option}"
        elif program.endswith(".py"):
            shown = subprocess.run(
                [sys.executable, ROOT / program, "--help"], capture_output=True, text=True, check=True
            ).stdout
            for option in options_in(words):
                assert option in shown, f"{program} has no {option}"
        else:
            assert os.access(ROOT / program, os.X_OK), f"{program} is no program"


def resolve(arguments: list[str]) -> click.Command:
    """The command that these words name, through groups."""
    command: click.Command = cli
    words = iter(arguments)
    while isinstance(command, click.Group):
        name = next(words, "")
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"blockkv has no command {name!r}"
        command = found
    return command


def options_in(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--[a-z]", word)]


def check_options(command: click.Command, words: list[str]) -> None:
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    for option in options_in(words):
        assert option in known, f"{shlex.join(words)}: no option {option}"


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in target:
            file, _, section = target.partition("#")
            path = document.parent / file if file else document
            assert path.exists(), target
            assert not section or section in anchors(path), target


def anchors(document: Path) -> set[str]:
    """The names a Markdown viewer gives to headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_paths_exist(document: Path) -> None:
    for span in CODE_SPAN.findall(FENCE.sub("", document.read_text())):
        if re.fullmatch(r"(blockkv|native|tests|tools|docs)/[\w./]+", span):
            assert (ROOT / span).exists(), f"{span} does not exist"


def test_exit_codes_are_those_of_the_command_line() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [(int(code), text) for code, text in rows] == [(int(c), text) for c, text in MEANINGS.items()]


def test_every_command_is_named_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    missing = [name for name in cli.commands if f"blockkv {name}" not in text]
    assert not missing


def test_glossary_is_sorted_and_gives_each_word_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text().split("## Suffixes")[0]
    words = re.findall(r"^\| (\S[^|]*?) \|", text, re.MULTILINE)[1:]
    words = [word for word in words if not word.startswith("---")]
    assert words == sorted(set(words), key=str.lower)


def test_architecture_names_every_part() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "blockkv"
    parts = [*(path.parent for path in package.glob("*/__init__.py")), *package.glob("*.py")]
    missing = [name for part in parts if f"`{(name := str(part.relative_to(ROOT)))}`" not in text]
    assert not missing


def test_every_counter_is_explained(image_dir: Path) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    explained = set(re.findall(r"`(\w+)`", text.split("## Counters")[1].split("\n## ")[0]))
    images = [image_dir / "a.img", image_dir / "b.img"]
    blockkv.format(images, size="32MiB")
    with blockkv.open(images, write_budget="1TiB") as store:
        found = set(store.stats())
    blockkv.format(image_dir / "served.img", size="32MiB")
    owner = Owner(blockkv.open(image_dir / "served.img"), image_dir / "served.sock")
    serving = threading.Thread(target=owner.serve)
    serving.start()
    with blockkv.open(image_dir / "served.sock") as store:
        found |= set(store.stats())
    owner.stop()
    serving.join()
    owner.close()
    found = {name for name in found if name.removeprefix("owner_") not in found - {name}}
    assert found - explained == set()
    assert explained - found <= {"check", "owner_put_chunks"}
