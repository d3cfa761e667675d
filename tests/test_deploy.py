"""What is in `deploy/` is what the tools take it for, and does what the documents say.

That udev and systemd do with it what they should, on an NVMe namespace: `tests/vm/guest_deploy.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seccomp_profile_filter import apply_profile

import blockkv
import blockkv.cli.examine
from blockkv.cli import cli
from blockkv.cli.udev_rule import udev_rule
from blockkv.device.namespace import Identity, identify
from blockkv.errors import InvalidArgument

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DEFAULT_PROFILE = Path("/usr/share/containers/seccomp.json")
"""Podman's, of the package golang-github-containers-common."""
MOST_EXPOSED = 1.0
"""Of 10, as systemd weighs it. What is left are the device, the group and the socket."""


# -- systemd -----------------------------------------------------------------------------------------------


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """An instance of the template, with a program that exists."""
    path = tmp_path / "blockkv@kv0.service"
    text = (DEPLOY / "blockkv@.service").read_text()
    path.write_text(text.replace("/opt/blockkv/bin/blockkv", str(Path(sys.executable).with_name("blockkv"))))
    return path


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)


@pytest.mark.requires_tool("systemd-analyze")
def test_systemd_knows_every_directive(unit: Path) -> None:
    done = analyze("verify", "--man=no", unit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("NoNewPrivileges", "NoNewPrivilege"))
    assert "NoNewPrivilege" in analyze("verify", "--man=no", unit).stderr


@pytest.mark.requires_tool("systemd-analyze")
def test_the_unit_has_the_least_privileges(unit: Path) -> None:
    done = analyze("security", "--offline=yes", f"--threshold={MOST_EXPOSED * 10:.0f}", unit)
    assert done.returncode == 0, done.stdout


def test_the_unit_runs_a_command_that_there_is(unit: Path) -> None:
    text = unit.read_text().replace("\\\n", " ").replace("%i", "kv0")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words = shlex.split(line.replace("$OPTIONS", "--eviction prefix --scrub 50MiB/s"))
    context = cli.commands[words[1]].make_context(words[1], words[2:])
    assert context.params["store_path"] == "/dev/blockkv/kv0"
    assert context.params["mode"] == 0o660
    assert f"DeviceAllow={context.params['store_path']} rw" in text
    assert context.params["socket_at"].startswith("/run/blockkv/kv0/")
    assert "RuntimeDirectory=blockkv/kv0" in text
    assert f"SupplementaryGroups={context.params['group']}" in text


# -- udev --------------------------------------------------------------------------------------------------


def test_the_rule_is_the_one_that_doctor_prints() -> None:
    lines = (DEPLOY / "60-blockkv.rules").read_text().splitlines()
    (rule,) = [line for line in lines if not line.startswith("#")]
    (wwid,) = re.findall(r'wwid}=="([^"]+)"', rule)
    example = Identity("/dev/nvme1n1", "namespace", 259, 1, disk="nvme1n1", wwid=wwid)
    assert udev_rule(example, "kv0") == rule


@pytest.mark.requires_root
@pytest.mark.requires_tool("udevadm")
def test_udev_takes_the_rule(loop_device: Callable[..., Path], tmp_path: Path) -> None:
    """A loop device says nothing of itself that lasts: here it is matched by its name in the kernel."""
    device = loop_device(16 << 20)
    done = subprocess.run(
        [sys.executable, "-m", "blockkv", "doctor", device, "--udev-rule", "kv7"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == udev_rule(identify(device), "kv7") + "\n"
    assert f'KERNEL=="{device.name}"' in done.stdout


def test_a_rule_needs_a_device_and_a_name(tmp_path: Path) -> None:
    image = tmp_path / "store.img"
    blockkv.format(image, size="16MiB")
    with pytest.raises(InvalidArgument, match="is a file"):
        udev_rule(identify(image), "kv0")
    device = Identity("/dev/nvme1n1", "namespace", 259, 1, disk="nvme1n1", wwid="eui.1")
    for name in ("", "a b", "../sda", 'a"', ".."):
        with pytest.raises(InvalidArgument, match="is no name for a device"):
            udev_rule(device, name)


# -- containers --------------------------------------------------------------------------------------------


def in_a_container(profile: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What a store and `blockkv doctor` find in a process with this profile."""
    there, here = multiprocessing.Pipe()

    def run() -> None:
        apply_profile(profile)
        found = {one.topic: one for one in blockkv.cli.examine.examine_host()}["io_uring"]
        with blockkv.open(directory / "store.img") as store:
            store.put("key", b"k" * 100_000, durable=True)
            assert store.get("key") is not None
            there.send({"doctor": found.found, "fixes": found.fixes, "engine": store.info()["engine"]})

    blockkv.format(directory / "store.img", size="16MiB", force=True)
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    there.close()
    found: dict[str, Any] = here.recv()
    child.join()
    return found


def test_the_seccomp_profile_lets_io_uring_in(image_dir: Path) -> None:
    default = json.loads(DEFAULT_PROFILE.read_text())
    before = in_a_container(default, image_dir)
    assert before["engine"] == "threads"
    assert "a seccomp filter" in before["doctor"]
    assert any("seccomp_profile.py" in fix for fix in before["fixes"])
    tool = [sys.executable, DEPLOY / "seccomp_profile.py", DEFAULT_PROFILE]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    changed = json.loads(done.stdout)
    assert in_a_container(changed, image_dir) == {"doctor": "allowed", "fixes": (), "engine": "io_uring"}
    assert changed["syscalls"][:-1] == default["syscalls"], "nothing else is allowed"


def test_a_profile_that_forbids_io_uring_by_name() -> None:
    tool = runpy.run_path(str(DEPLOY / "seccomp_profile.py"))
    forbidding = {"names": ["io_uring_setup", "bpf"], "action": "SCMP_ACT_ERRNO"}
    only = {"names": ["io_uring_enter"], "action": "SCMP_ACT_ERRNO"}
    profile = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [forbidding, only]}
    assert tool["with_io_uring"](profile)["syscalls"] == [
        {"names": ["bpf"], "action": "SCMP_ACT_ERRNO"},
        {"names": tool["IO_URING"], "action": "SCMP_ACT_ALLOW"},
    ]
    for wrong in ({}, {"defaultAction": "SCMP_ACT_ALLOW"}, {"syscalls": []}):
        with pytest.raises(ValueError, match="no seccomp profile"):
            tool["with_io_uring"](wrong)


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions, by name and what follows."""
    text = (DEPLOY / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


def test_the_image_is_built_from_what_is_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [rest.split()[:-1] for name, rest in dockerfile() if name == "COPY" and "--from" not in rest]
    names = [name for group in copied for name in group]
    assert names
    for name in names:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, f"{name} is not sent to the builder"
    tracked = subprocess.run(
        ["git", "ls-files", "native", "blockkv"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert all(Path(path).parts[0] in names for path in tracked)
    assert [rest for name, rest in dockerfile() if name == "USER"] == ["blockkv"]


def test_the_image_has_everything_but_torch(tmp_path: Path) -> None:
    (line,) = [rest for name, rest in dockerfile() if name == "RUN" and "tomllib" in rest]
    (program,) = re.findall(r'python -c "(.*?)" >', line)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["encryption"], *extras["metrics"]}
    missing = wanted - set(done.stdout.split())
    assert [re.split("[<>=]", one)[0] for one in missing] == ["torch"]


def test_the_owner_needs_no_torch(image_dir: Path) -> None:
    """Nor do the commands that look after a store."""
    (image_dir / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    store = image_dir / "store.img"
    blockkv.format(store, size="64MiB")
    with blockkv.open(store) as here:
        here.put_many([(f"key-{number}", os.urandom(300_000)) for number in range(8)])
    environment = os.environ | {"PYTHONPATH": str(image_dir)}
    start = [sys.executable, "-m", "blockkv"]

    def command(*words: str | Path) -> None:
        done = subprocess.run([*start, *words], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)

    command("check", store, "--payload")
    for name in ("scrub", "map", "ls", "info"):
        command(name, store)
    socket = image_dir / "kv.sock"
    serve = [*start, "serve", store, "--socket", socket, "--scrub", "1GiB/s"]
    with subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith("serving")
        with blockkv.open(socket) as client:
            assert client.put("of a client", b"c" * 300_000, durable=True)
            assert client.get("key-3").numel() == 300_000
        command("info", socket)
        owner.terminate()
        assert owner.wait() == 0
