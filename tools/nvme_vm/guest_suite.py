"""In the guest: run pytest, and report as JUnit XML.

    guest_suite.py [--scratch NSID] PYTEST_ARGUMENT...

With `--scratch` the tests get every other namespace as their devices, and files go to ext4 on that one: a
file system in memory has no direct I/O before Linux 6.6.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from guest_devices import namespaces

REPORT = Path("/dev/ttyS1")
RESULTS = Path("/tmp/results.xml")  # noqa: S108 - the guest is ours alone
SCRATCH = Path("/var/tmp")  # noqa: S108


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scratch", type=int)
    options, arguments = parser.parse_known_args()
    environment = os.environ | {"BLOCKKV_REQUIRE_ALL": "1"}
    if options.scratch:
        devices = namespaces()
        scratch = devices.pop(options.scratch)
        subprocess.run(["mkfs.ext4", "-q", scratch], check=True)
        subprocess.run(["mount", scratch, SCRATCH], check=True)
        environment["BLOCKKV_TEST_DEVICES"] = ":".join(map(str, devices.values()))
        environment["TMPDIR"] = str(SCRATCH)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={RESULTS}", *arguments]
    done = subprocess.run(command, env=environment, check=False)
    if RESULTS.exists():
        with RESULTS.open("rb") as results, REPORT.open("wb") as report:
            shutil.copyfileobj(results, report)
            report.write(b"\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
