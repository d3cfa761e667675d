"""What is in `deploy/`, on NVMe namespaces: the udev rule by udev, the unit by systemd.

systemd is the first process of a namespace of processes: the guest has a first process of its own. It runs
the unit with all that this asks for: a user of its own, a device cgroup, a seccomp filter, a read-only root.
"""

from __future__ import annotations

import grp
import multiprocessing
import os
import pwd
import re
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import blockkv
from blockkv.device.namespace import probe

ROOT = Path(__file__).parents[2]
GIVEN_DEVICES = [Path(name) for name in os.environ["BLOCKKV_TEST_DEVICES"].split(":")]
PAGE = ROOT / "docs/deploying.md"
LEAST_BYTES = 64 << 20
WAIT_S = 100
"""The guest's instructions are translated."""
USER = "nobody"
SOCKET = Path("/run/blockkv/kv0/kv.sock")
LOG = Path("/run/blockkv.log")
REACHES = Path("/run/reaches.py")
"""Says which devices the unit may open."""
os.environ["SYSTEMD_IGNORE_CHROOT"] = "1"
"""The root of the guest's scripts is one, which is why systemd's tools would do nothing."""


def run(*command: str | Path, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def wait_for(what: str, condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def disk() -> Path:
    found = next(one for one in GIVEN_DEVICES if probe(one).size_bytes >= LEAST_BYTES)
    run("blkdiscard", "--force", "--zeroout", found)
    return found


@pytest.fixture(scope="module")
def udevd() -> Iterator[None]:
    daemon = subprocess.Popen(["/lib/systemd/systemd-udevd"], stderr=subprocess.DEVNULL)
    wait_for("udevd", Path("/run/udev/control").exists)
    run("udevadm", "trigger", "--settle", "--subsystem-match=block")
    yield
    daemon.terminate()
    daemon.wait()


def doctor_of_the_user(disk: Path) -> dict[str, Any]:
    """What `blockkv doctor` finds of the user's permission."""
    there, here = multiprocessing.Pipe()

    def examine() -> None:
        from blockkv.cli.examine import examine_device

        user = pwd.getpwnam(USER)
        os.initgroups(USER, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        found = {one.topic: one for one in examine_device(str(disk))}
        there.send((found["permission"].verdict.name, found["permission"].fixes))

    import blockkv.cli.examine  # noqa: F401  - the user may not be able to reach this Python

    child = multiprocessing.get_context("fork").Process(target=examine)
    child.start()
    verdict, fixes = here.recv()
    child.join()
    return {"verdict": verdict, "fixes": fixes}


def test_what_doctor_prints_lets_the_user_in_for_good(disk: Path, udevd: None) -> None:
    before = doctor_of_the_user(disk)
    assert before["verdict"] == "UNUSABLE"
    run("bash", "-ec", "\n".join(before["fixes"]))
    run("udevadm", "settle")
    assert doctor_of_the_user(disk)["verdict"] == "GOOD"
    status = disk.stat()
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert status.st_gid == grp.getgrnam("blockkv").gr_gid
    assert Path("/dev/blockkv/kv0").resolve() == disk
    others = [one for one in GIVEN_DEVICES if one != disk]
    assert all(one.stat().st_gid != status.st_gid for one in others), "the rule is for this namespace alone"
    # A new event, as after a boot: neither mode nor name is left over from before.
    disk.chmod(0o600)
    Path("/dev/blockkv/kv0").unlink()
    run("udevadm", "trigger", "--settle", "--action=add", disk)
    assert stat.S_IMODE(disk.stat().st_mode) == 0o660
    assert Path("/dev/blockkv/kv0").resolve() == disk


@pytest.fixture(scope="module")
def systemctl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """The manager, with no units but those it cannot do without and ours."""
    units = Path("/run/systemd/system")
    units.mkdir(parents=True, exist_ok=True)
    unit = (ROOT / "deploy/blockkv@.service").read_text()
    program = Path(sys.executable).with_name("blockkv")
    assert "/opt/blockkv/bin/blockkv" in unit
    (units / "blockkv@.service").write_text(unit.replace("/opt/blockkv/bin/blockkv", str(program)))
    (units / "quiet.target").write_text("[Unit]\nDefaultDependencies=no\n")
    # Without what this machine's root would start first, with a log that can be read here, and with this
    # Python, which may lie below somebody's home.
    (units / "blockkv@.service.d").mkdir()
    (units / "blockkv@.service.d/test.conf").write_text(
        "[Unit]\nDefaultDependencies=no\n[Service]\n"
        f"StandardOutput=append:{LOG}\nStandardError=append:{LOG}\n"
        f"ProtectHome=tmpfs\nBindReadOnlyPaths={sys.base_prefix} {ROOT}\n"
        f"ExecStartPre={sys.executable} {REACHES} {' '.join(map(str, GIVEN_DEVICES))}\n"
    )
    REACHES.write_text(
        "import os, sys\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        os.close(os.open(path, os.O_RDWR))\n"
        "        print('reaches', path)\n"
        "    except OSError as error:\n"
        "        print('not', path, error.strerror)\n"
    )
    log = (tmp_path_factory.mktemp("systemd") / "log").open("w")
    manager = subprocess.Popen(
        [
            *(
                "unshare",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--propagation=shared",
                "--cgroup",
            ),
            *("/lib/systemd/systemd", "--system", "--unit=quiet.target", "--log-target=console"),
        ],
        env=os.environ | {"container": "other"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    children = Path("/proc", str(manager.pid), "task", str(manager.pid), "children")
    wait_for("systemd", lambda: children.read_text())
    first = children.read_text().strip()

    def systemctl(*words: str, check: bool = True) -> str:
        return run("nsenter", "--target", first, "--pid", "systemctl", *words, check=check)

    try:
        wait_for("systemd", lambda: "quiet.target" in systemctl("list-units", check=False))
        yield systemctl
    finally:
        manager.kill()
        manager.wait()
        print(Path(log.name).read_text(), LOG.read_text() if LOG.exists() else "", sep="\n")


def test_the_unit_serves_the_device_to_the_group(
    disk: Path, udevd: None, systemctl: Callable[..., str]
) -> None:
    blockkv.format(disk, force=True)
    for one in GIVEN_DEVICES:
        if one != disk:
            one.chmod(0o666)  # so that nothing but the unit itself keeps it out
    systemctl("start", "blockkv@kv0")
    assert re.findall("^reaches (.*)$", LOG.read_text(), re.MULTILINE) == [str(disk)]
    group = grp.getgrnam("blockkv").gr_gid
    assert stat.S_IMODE(SOCKET.stat().st_mode) == 0o660
    assert SOCKET.stat().st_gid == group
    with blockkv.open(SOCKET) as store:
        assert store.put("key", b"k" * 3_000_000, durable=True)
        assert store.get("key") is not None
        assert store.info()["engine"] == "io_uring"
    status = status_of_the_owner()
    assert int(status["Uid"].split()[0]) == SOCKET.stat().st_uid != 0
    assert str(group) in status["Groups"].split()
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_the_unit_starts_it_again_and_ends_it_in_order(systemctl: Callable[..., str]) -> None:
    def epoch() -> int:
        with blockkv.open(SOCKET) as store:
            return int(store.info()["epoch"])

    def comes_back() -> bool:
        try:
            return epoch() > first
        except blockkv.BlockKVError:
            return False

    first = epoch()
    systemctl("kill", "--signal=SIGKILL", "blockkv@kv0")
    wait_for("the next owner", comes_back)
    with blockkv.open(SOCKET) as store:
        assert store.get("key") is not None
    systemctl("stop", "blockkv@kv0")
    shown = systemctl("show", "--property=Result,ActiveState", "blockkv@kv0").split()
    assert sorted(shown) == ["ActiveState=inactive", "Result=success"]
    assert not SOCKET.exists()


def test_an_encrypted_store_and_metrics_by_the_drop_ins_of_the_page(
    disk: Path, systemctl: Callable[..., str]
) -> None:
    drop_ins = re.findall(r"^```ini\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(drop_ins) == 2
    directory = Path("/run/systemd/system/blockkv@kv0.service.d")
    directory.mkdir()
    for number, text in enumerate(drop_ins):
        (directory / f"{number}.conf").write_text(text)
    Path("/etc/blockkv").mkdir()
    Path("/etc/blockkv/kv0.conf").write_text("OPTIONS=--metrics 9105\n")
    key = Path("/etc/blockkv/kv0.key")
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    blockkv.format(disk, encrypt=f"key-file:{key}", force=True)
    systemctl("daemon-reload")
    systemctl("start", "blockkv@kv0")
    with blockkv.open(SOCKET) as store:
        assert store.put("key", b"k" * 3_000_000, durable=True)
    with urllib.request.urlopen("http://127.0.0.1:9105/metrics") as answer:
        assert re.search(r"^blockkv_chunks\{.*\} 1\.0$", answer.read().decode(), re.MULTILINE)
    systemctl("stop", "blockkv@kv0")
    with blockkv.open(disk, unlock=f"key-file:{key}") as store:
        assert bytes(store.get("key").numpy()) == b"k" * 3_000_000


def status_of_the_owner() -> dict[str, str]:
    """/proc/PID/status of the one process that `blockkv serve` is."""
    for path in Path("/proc").glob("[0-9]*"):
        words = (path / "cmdline").read_bytes().split(b"\0")
        if b"serve" in words and b"--socket" in words:
            lines = (path / "status").read_text().splitlines()
            return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    raise LookupError("no owner runs")
