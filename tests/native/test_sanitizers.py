"""The C core under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer and valgrind."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
DRIVER = Path(__file__).parent / "driver.c"
INDEX_DRIVER = Path(__file__).parent / "index_driver.c"
SOURCES = [str(path) for path in sorted(NATIVE.glob("[!_]*.c"))]
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-std=gnu11")
COMPILER = os.environ.get("CC", "cc")


def build(target: Path, *flags: str, driver: Path = DRIVER) -> Path:
    command = [
        COMPILER,
        *WARNINGS,
        *flags,
        "-g",
        "-pthread",
        f"-I{NATIVE}",
        "-o",
        str(target),
        str(driver),
        *SOURCES,
        "-luring",
        "-ldl",
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def has_sanitizer(directory: Path, *flags: str) -> bool:
    source = directory / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    command = [COMPILER, *flags, "-o", str(directory / "probe"), str(source)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def drive(image_dir: Path, command: list[str], rounds: int) -> None:
    run([*command, str(image_dir / "driver.img"), "1", str(rounds)])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize("optimisation", ["-O0", "-O3"])
def test_builds_without_warnings(tmp_path: Path, optimisation: str) -> None:
    build(tmp_path / "driver", optimisation)
    build(tmp_path / "index_driver", optimisation, driver=INDEX_DRIVER)


def test_address_and_undefined(tmp_path: Path, image_dir: Path) -> None:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    if not has_sanitizer(tmp_path, *flags):
        pytest.skip("the compiler has no address and undefined-behaviour sanitizer")
    drive(image_dir, [str(build(tmp_path / "driver", "-O1", *flags))], rounds=8)
    run([str(build(tmp_path / "index_driver", "-O1", *flags, driver=INDEX_DRIVER)), "1", "8"])


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
    valgrind = ["valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full"]
    drive(image_dir, [*valgrind, driver], rounds=2)
    run([*valgrind, str(build(tmp_path / "index_driver", "-O1", driver=INDEX_DRIVER)), "2", "1"])
