"""The C core under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer and valgrind."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
DRIVER = Path(__file__).parent / "driver.c"
SOURCES = [str(DRIVER), *(str(path) for path in sorted(NATIVE.glob("[!_]*.c")))]
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-std=gnu11")
COMPILER = os.environ.get("CC", "cc")


def build(target: Path, *flags: str) -> Path:
    command = [
        COMPILER,
        *WARNINGS,
        *flags,
        "-g",
        "-pthread",
        f"-I{NATIVE}",
        "-o",
        str(target),
        *SOURCES,
        "-luring",
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def has_sanitizer(directory: Path, *flags: str) -> bool:
    source = directory / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    command = [COMPILER, *flags, "-o", str(directory / "probe"), str(source)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def drive(image_dir: Path, command: list[str], rounds: int) -> None:
    done = subprocess.run(
        [*command, str(image_dir / "driver.img"), "1", str(rounds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize("optimisation", ["-O0", "-O3"])
def test_builds_without_warnings(tmp_path: Path, optimisation: str) -> None:
    build(tmp_path / "driver", optimisation)


def test_address_and_undefined(tmp_path: Path, image_dir: Path) -> None:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    if not has_sanitizer(tmp_path, *flags):
        pytest.skip("the compiler has no address and undefined-behaviour sanitizer")
    drive(image_dir, [str(build(tmp_path / "driver", "-O1", *flags))], rounds=8)


def test_threads(tmp_path: Path, image_dir: Path) -> None:
    if not has_sanitizer(tmp_path, "-fsanitize=thread"):
        pytest.skip("the compiler has no thread sanitizer")
    driver = str(build(tmp_path / "driver", "-O1", "-fsanitize=thread"))
    # the runtimes of current compilers do not know every address-space layout of current kernels
    plain = ["setarch", "-R"] if shutil.which("setarch") else []
    drive(image_dir, [*plain, driver], rounds=4)


@pytest.mark.requires_tool("valgrind")
def test_valgrind(tmp_path: Path, image_dir: Path) -> None:
    driver = str(build(tmp_path / "driver", "-O1"))
    drive(image_dir, ["valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full", driver], rounds=2)
