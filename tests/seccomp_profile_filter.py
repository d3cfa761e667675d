"""A container's seccomp profile in the calling process: what a runtime makes of its JSON, by libseccomp."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

ACTIONS = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
EPERM = 1


def apply_profile(profile: dict[str, Any]) -> None:
    """For good, in this thread and its future children, as for a container without capabilities.

    Rules with a comparison of arguments are left out: they forbid more and allow less than the runtime does.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_rule_add_array.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    ]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    default = action_of(profile["defaultAction"], profile.get("defaultErrnoRet", EPERM))
    context = library.seccomp_init(default)
    assert context
    for rule in profile["syscalls"]:
        includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
        if includes.get("caps") or rule.get("args"):
            continue
        if ARCHITECTURES[platform.machine()] not in includes.get("arches", ARCHITECTURES.values()):
            continue
        if ARCHITECTURES[platform.machine()] in excludes.get("arches", ()):
            continue
        action = action_of(rule["action"], rule.get("errnoRet", EPERM))
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if action != default and number >= 0:
                assert library.seccomp_rule_add_array(context, action, number, 0, None) == 0, name
    assert library.seccomp_load(context) == 0


def action_of(name: str, code: int) -> int:
    return ACTIONS[name] | (code if name == "SCMP_ACT_ERRNO" else 0)
