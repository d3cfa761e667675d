#!/usr/bin/env python3
"""Allow io_uring in a container's seccomp profile.

    seccomp_profile.py /usr/share/containers/seccomp.json > blockkv-seccomp.json
    docker run --security-opt seccomp=blockkv-seccomp.json ...

Reads the profile that your runtime has by default, and writes the same one with three system calls more.
Podman keeps its profile in the file above; Docker's is built in, and in its source: default.json in
profiles/seccomp of the repository moby/moby, or in seccomp of moby/profiles. Needs Python 3 and nothing else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

IO_URING = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
ALLOW = "SCMP_ACT_ALLOW"


def with_io_uring(profile: dict[str, Any]) -> dict[str, Any]:
    """The profile, in which nothing else is said of io_uring any more. Raises ValueError for what is none."""
    rules = profile.get("syscalls")
    if not isinstance(rules, list) or not str(profile.get("defaultAction", "")).startswith("SCMP_ACT_"):
        raise ValueError("is no seccomp profile: it has no defaultAction and syscalls")
    others = []
    for rule in rules:
        names = [name for name in rule.get("names", [rule.get("name")]) if name not in IO_URING]
        if names:
            others.append(rule | {"names": names} if "names" in rule else rule)
    return profile | {"syscalls": [*others, {"names": IO_URING, "action": ALLOW}]}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    try:
        profile = with_io_uring(json.loads(Path(sys.argv[1]).read_text()))
    except (OSError, ValueError, AttributeError) as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(profile, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
