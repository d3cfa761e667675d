"""The virtual machine: a real kernel and its NVMe driver on QEMU's emulated NVMe controllers.

QEMU translates instructions (TCG): nested virtualisation is rarely available, and a boot takes seconds
anyway. The guest sees this machine's root read-only, so what is installed here runs there. What it prints
comes line by line; what it writes to /dev/ttyS1 is its report.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from guest_system import VIRTIOFSD, GuestSystem

__all__ = ["DETACHABLE", "RECLAIM_GROUPS", "REMOVABLE", "Machine", "MachineError", "Namespace"]

REMOVABLE = ("removable-1", "removable-2")
"""The controllers that `Machine.remove_controller` may take out, once each."""
DETACHABLE = "detachable"
"""The controller whose namespaces the guest may detach and attach."""
RECLAIM_GROUPS = {"placing": 1, "grouped": 2}
"""The controllers with Flexible Data Placement, and how many reclaim groups they have."""
RECLAIM_UNIT_MIB, RECLAIM_UNIT_HANDLES = 16, 8
GUEST_LOST = 125
SOCKET_WAIT_S = 20.0
MDTS = 7
"""The largest transfer as a power of two of 4 KiB pages: 512 KiB, as common drives have it."""


class MachineError(Exception):
    """The virtual machine did not start, or ended before its script did."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Namespace `nsid` of a controller, on an image file or on the NBD export of a UNIX socket."""

    source: Path
    nsid: int
    lba_bytes: int
    controller: str = "fixed"
    is_nbd: bool = False
    metadata_bytes: int = 0
    """Beside every LBA."""
    protection_type: int = 0
    """Of the information in the metadata; 0: it is nobody's."""
    reclaim_unit_handles: str = ""
    """Of a controller in `RECLAIM_GROUPS`: those that the namespace writes by, such as 0-3."""

    def arguments(self) -> list[str]:
        node = f"{self.controller}-{self.nsid}"
        if self.is_nbd:
            storage: dict[str, Any] = {"driver": "nbd", "server": {"type": "unix", "path": str(self.source)}}
        else:
            storage = {
                "driver": "raw",
                "file": {"driver": "file", "filename": str(self.source), "discard": "unmap"},
            }
        node_options = {"node-name": node, "discard": "unmap", **storage}
        device = (
            f"nvme-ns,bus={self.controller},drive={node},nsid={self.nsid},"
            f"logical_block_size={self.lba_bytes},physical_block_size={self.lba_bytes},"
            f"ms={self.metadata_bytes},pi={self.protection_type}"
        )
        if self.reclaim_unit_handles:
            device += f",fdp.ruhs={self.reclaim_unit_handles}"
        return ["-blockdev", json.dumps(node_options), "-device", device]


class Machine:
    """Starts on construction and runs one script to its end. A context manager: nothing outlives it.

    `kernel_arguments` go to the guest's kernel. Every line the guest prints goes to `on_line`.
    """

    def __init__(
        self,
        system: GuestSystem,
        namespaces: Sequence[Namespace],
        script: Sequence[Sequence[str]],
        *,
        memory_mib: int = 2048,
        kernel_arguments: Sequence[str] = (),
        on_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="blockkv-vm.")
        self._on_line = on_line
        self.last_lines: list[str] = []
        try:
            self._start(system, namespaces, script, memory_mib, kernel_arguments)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout_s: float) -> int:
        """Wait until the script ended; returns its exit status. Raises MachineError."""
        try:
            self._qemu.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise MachineError(self._describe(f"the script did not end within {timeout_s:.0f} s")) from None
        self._reader.join()
        for line in reversed(self.report()):
            if line.startswith("exit "):
                status = int(line.removeprefix("exit "))
                if status == GUEST_LOST:
                    break
                return status
        raise MachineError(self._describe("the guest stopped without an exit status"))

    def watch(self, event: threading.Event, timeout_s: float) -> None:
        """Wait for what the guest is to bring about. Raises MachineError when it has stopped or is late."""
        deadline = time.monotonic() + timeout_s
        while not event.wait(1.0):
            if self._qemu.poll() is not None:
                self._reader.join()
                raise MachineError(self._describe("the guest stopped by itself"))
            if time.monotonic() > deadline:
                raise MachineError(self._describe(f"not there within {timeout_s:.0f} s"))

    def report(self) -> list[str]:
        """What the guest wrote to its second serial port so far."""
        return self._report_path.read_text(errors="replace").replace("\r", "").splitlines()

    def kill(self) -> None:
        """Pull the plug: the guest gets no chance to write anything."""
        self._qemu.kill()
        self._qemu.wait()

    def remove_controller(self, name: str) -> None:
        """Ask the guest to let go of a removable controller, as the button beside a drive's slot does."""
        self._monitor("device_del", id=name)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._directory.cleanup()

    def _start(
        self,
        system: GuestSystem,
        namespaces: Sequence[Namespace],
        script: Sequence[Sequence[str]],
        memory_mib: int,
        kernel_arguments: Sequence[str],
    ) -> None:
        directory = Path(self._directory.name)
        root_socket, self._monitor_path = directory / "root.sock", directory / "monitor.sock"
        self._report_path = directory / "report"
        self._report_path.touch()
        script_path = directory / "script"
        script_path.write_text("set -e\n" + "".join(f"{shlex.join(command)}\n" for command in script))
        shared = ["-o", "source=/", "-o", "cache=always", "-o", "sandbox=chroot", "-o", "no_posix_lock"]
        self._spawn([str(VIRTIOFSD), f"--socket-path={root_socket}", *shared])
        self._wait_for(root_socket)
        append = [
            *("console=ttyS0", "panic=-1", "quiet", "mitigations=off", "random.trust_cpu=on"),
            # a namespace is one disk, also where its subsystem could have more controllers
            "nvme_core.multipath=N",
            *kernel_arguments,
            f"blockkv.script={script_path}",
            f"blockkv.modules={system.modules}",
        ]
        memory = f"memory-backend-memfd,id=memory,size={memory_mib}M,share=on"
        arguments = [
            *("-machine", "q35,memory-backend=memory", "-accel", "tcg,thread=multi", "-cpu", "max"),
            *("-smp", "2", "-m", f"{memory_mib}M", "-object", memory),
            *("-display", "none", "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-serial", "stdio", "-serial", f"file:{self._report_path}"),
            *("-qmp", f"unix:{self._monitor_path},server=on,wait=off"),
            *("-kernel", str(system.kernel), "-initrd", str(system.initramfs), "-append", " ".join(append)),
            *("-chardev", f"socket,id=root,path={root_socket}"),
            *("-device", "vhost-user-fs-pci,chardev=root,tag=host"),
        ]
        for slot, name in enumerate(REMOVABLE, 1):
            arguments += ["-device", f"pcie-root-port,id=slot-of-{name},slot={slot}"]
        for name in dict.fromkeys(namespace.controller for namespace in namespaces):
            place = f",bus=slot-of-{name}" if name in REMOVABLE else ""
            if name == DETACHABLE:
                # QEMU attaches and detaches namespaces of a subsystem only
                arguments += ["-device", f"nvme-subsys,id=subsystem,nqn={name}"]
                place = ",subsys=subsystem"
            if name in RECLAIM_GROUPS:
                fdp = (
                    f"fdp=on,fdp.runs={RECLAIM_UNIT_MIB}M,fdp.nruh={RECLAIM_UNIT_HANDLES},"
                    f"fdp.nrg={RECLAIM_GROUPS[name]}"
                )
                arguments += ["-device", f"nvme-subsys,id=subsystem-{name},nqn={name},{fdp}"]
                place = f",subsys=subsystem-{name}"
            arguments += ["-device", f"nvme,id={name},serial=blockkv-{name},mdts={MDTS}{place}"]
        for namespace in namespaces:
            arguments += namespace.arguments()
        self._qemu = self._spawn([*system.qemu, *arguments])
        self._reader = threading.Thread(target=self._read_console, daemon=True)
        self._reader.start()

    def _spawn(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # a Ctrl-C is for us: we then end them
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._processes.append(process)
        return process

    def _wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + SOCKET_WAIT_S
        while not path.exists():
            process = self._processes[-1]
            if process.poll() is not None or time.monotonic() > deadline:
                assert process.stdout is not None
                process.kill()
                raise MachineError(f"{process.args[0]!s} did not start: {process.stdout.read().strip()}")  # type: ignore[index]
            time.sleep(0.01)

    def _read_console(self) -> None:
        assert self._qemu.stdout is not None
        for line in self._qemu.stdout:
            line = line.rstrip("\r\n")
            self.last_lines = [*self.last_lines[-39:], line]
            self._on_line(line)

    def _describe(self, what: str) -> str:
        return "\n".join([f"{what}; it printed at last:", *self.last_lines])

    def _monitor(self, command: str, **arguments: str) -> None:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.settimeout(SOCKET_WAIT_S)
            connection.connect(str(self._monitor_path))
            replies = _json_lines(connection)
            next(replies)  # the greeting
            for request in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                connection.sendall(json.dumps(request).encode())
                reply = next(reply for reply in replies if "event" not in reply)
                if "error" in reply:
                    raise MachineError(f"QEMU refuses {command}: {reply['error']}")


def _json_lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with connection.makefile() as lines:
        for line in lines:
            yield json.loads(line)


def _die_with_parent() -> None:
    """In the child, before exec: a killed harness leaves no virtual machine behind."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
