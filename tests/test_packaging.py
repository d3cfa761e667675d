"""What is published: a wheel that brings liburing along works where there is no compiler and no checkout."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMOKE = """
import sys, torch, blockkv
assert blockkv.__file__.startswith(sys.prefix), blockkv.__file__
blockkv.format("store.img", size="32MiB")
with blockkv.open("store.img") as store:
    assert store.info()["engine"] == "io_uring"
    tensor = torch.arange(300_000)
    store.put("key", tensor, durable=True)
    assert torch.equal(store.get("key"), tensor)
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "liburing" in line}
    assert libraries and all(one.startswith(sys.prefix) for one in libraries), libraries
assert blockkv.open("store.img", read_only=True).check(payload=True).ok
"""
EM_AARCH64 = 183
"""e_machine of an ELF file: elf(5)."""
PROFILE = "/usr/share/containers/seccomp.json"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [ROOT / "tools/build_wheel", directory], capture_output=True, text=True, check=False, cwd=directory
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_the_wheel_works_without_a_compiler(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert "-cp311-abi3-manylinux" in wheel.name
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    # What it depends on comes from here: only blockkv itself is new.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    environment = {"PATH": str(venv / "bin"), "HOME": str(tmp_path)}
    for command in (
        [venv / "bin/python", "-m", "pip", "-q", "install", "--no-deps", "--no-index", wheel],
        [venv / "bin/python", "-c", SMOKE],
        [venv / "bin/blockkv", "check", "store.img", "--payload"],
        [venv / "bin/blockkv", "doctor", "--json"],
        [venv / "bin/python", venv / "share/blockkv/seccomp_profile.py", PROFILE],
    ):
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    installed = {path.name for path in (venv / "share/blockkv").iterdir() if path.is_file()}
    assert installed == {path.name for path in (ROOT / "deploy").iterdir() if path.is_file()}


@pytest.mark.requires_root
def test_a_wheel_for_aarch64(tmp_path: Path) -> None:
    """That its core loads and computes the right checksums the tool has tried itself."""
    done = subprocess.run(
        [ROOT / "tools/build_wheel", "--aarch64", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"blockkv-.*-cp311-abi3-manylinux_2_\d+_aarch64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in name]
        assert len(libraries) == 2, "the core and liburing"
        for name in libraries:
            assert struct.unpack_from("<H", archive.read(name), 18) == (EM_AARCH64,)


def test_the_source_has_all_that_it_is_built_from(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    tracked = subprocess.run(
        [
            "git",
            "ls-files",
            "native",
            "blockkv",
            "deploy",
            "setup.py",
            "pyproject.toml",
            "LICENSE",
            "README.md",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.split()
    missing = [name for name in tracked if name not in names and os.path.exists(ROOT / name)]  # noqa: PTH110
    assert missing == []
