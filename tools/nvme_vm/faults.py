"""Faults of a drive under the real driver: media errors, a drive that hangs, a namespace that goes away.

The tests are pytest's, in the guest (`tests/vm/guest_faults.py`); they arm faults by what they say to the
control namespace.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from guest_system import GuestSystem
from machine import DETACHABLE, REMOVABLE, Machine, Namespace
from nbd_server import ControlDisk, Export, Fault, NbdServer, VolatileDisk
from suite import ROOT, TIMEOUT_S, SuiteFigures, read_results
from workspace import workspace

__all__ = ["run_faults"]

DISK_BYTES = 64 << 20
LBA_BYTES = 4096
IO_TIMEOUT_S = 4
"""Of the guest's driver (30 s by default), so that a hang of seconds makes it abort and reset."""
TESTS = "tests/vm/guest_faults.py"
GUEST_SUITE = Path(__file__).with_name("guest_suite.py")


class Drives:
    """What the guest may ask for: `fail DRIVE KIND OFFSET LENGTH`, `heal DRIVE`, `silent DRIVE SECONDS`,
    `touched DRIVE` (how many requests met a fault), `remove CONTROLLER` (a removable one).
    """

    def __init__(self) -> None:
        names = ("data", DETACHABLE, *REMOVABLE)
        self.by_name = {name: VolatileDisk(name, bytearray(DISK_BYTES), recorded=False) for name in names}
        self.remove: Callable[[str], None] = lambda _: None

    def obey(self, text: str) -> str:
        verb, *words = text.split()
        if verb == "remove":
            # QEMU may need an answer from this server before it can let go
            threading.Thread(target=self.remove, args=words, daemon=True).start()
            return ""
        drive = self.by_name[words[0]]
        if verb == "fail":
            drive.faults.append(Fault(words[1], int(words[2]), int(words[3])))
        elif verb == "heal":
            drive.faults.clear()
        elif verb == "silent":
            drive.silent_until = time.monotonic() + float(words[1])
        elif verb == "touched":
            return str(sum(fault.touched_count for fault in drive.faults))
        return ""


def run_faults(system: GuestSystem, tests: list[str], say: Callable[[str], None]) -> SuiteFigures:
    """Run the fault tests in one boot. Raises MachineError."""
    drives = Drives()
    exports: list[Export] = [
        drives.by_name["data"],
        ControlDisk("control", drives.obey),
        *(drives.by_name[name] for name in (DETACHABLE, *REMOVABLE)),
    ]
    with (
        workspace() as directory,
        NbdServer(directory, exports, random.Random(0)) as server,  # noqa: S311
    ):
        namespaces = [
            Namespace(server.paths["data"], 1, LBA_BYTES, is_nbd=True),
            Namespace(server.paths["control"], 2, 512, is_nbd=True),
            *(
                Namespace(server.paths[name], 1, LBA_BYTES, name, is_nbd=True)
                for name in (DETACHABLE, *REMOVABLE)
            ),
        ]
        python = str(ROOT / ".venv/bin/python")
        script = [["cd", str(ROOT)], [python, str(GUEST_SUITE), *(tests or [TESTS])]]
        arguments = [f"nvme_core.io_timeout={IO_TIMEOUT_S}"]
        with Machine(system, namespaces, script, kernel_arguments=arguments, on_line=say) as machine:
            drives.remove = machine.remove_controller
            status = machine.wait(TIMEOUT_S)
            return read_results(machine.report(), status)
