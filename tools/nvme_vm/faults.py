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
from machine import DETACHABLE, REMOVABLE, Machine, MachineError, Namespace
from nbd_server import ControlDisk, Export, Fault, NbdServer, VolatileDisk
from suite import ROOT, TIMEOUT_S, SuiteFigures, read_results
from workspace import workspace

__all__ = ["run_faults"]

DISK_BYTES = 64 << 20
LBA_BYTES = 4096
IO_TIMEOUT_S = 4
"""Of the guest's driver (30 s by default), so that a hang of seconds makes it abort and reset."""
TESTS = "tests/vm/guest_faults.py"
HANG_TEST = f"{TESTS}::test_a_drive_that_hangs_and_comes_back"
HANG_TIMEOUT_S = 420.0
HANG_BOOTS = 3
"""After a reset of QEMU's controller Linux 6.1 sometimes leaves requests waiting for ever, in
`__bio_queue_enter`: about once in seven, whatever is in user space. So this test has boots of its own."""
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
    """Run the fault tests, or those that are given. Raises MachineError."""
    if tests:
        return _boot(system, tests, say, TIMEOUT_S)
    figures = _boot(system, [TESTS, f"--deselect={HANG_TEST}"], say, TIMEOUT_S)
    for boot in range(1, HANG_BOOTS + 1):
        try:
            hang = _boot(system, [HANG_TEST], say, HANG_TIMEOUT_S)
            break
        except MachineError as error:
            if boot == HANG_BOOTS:
                raise
            say(f"the guest's driver did not come back from a reset; again in a new boot: {error}")
    figures.tests += hang.tests
    figures.failed += hang.failed
    figures.seconds += hang.seconds
    figures.failures += hang.failures
    return figures


def _boot(
    system: GuestSystem, tests: list[str], say: Callable[[str], None], timeout_s: float
) -> SuiteFigures:
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
        script = [["cd", str(ROOT)], [python, str(GUEST_SUITE), *tests]]
        arguments = [f"nvme_core.io_timeout={IO_TIMEOUT_S}"]
        with Machine(system, namespaces, script, kernel_arguments=arguments, on_line=say) as machine:
            drives.remove = machine.remove_controller
            status = machine.wait(timeout_s)
            return read_results(machine.report(), status)
