"""A seccomp filter in the calling process, as a container has one."""

from __future__ import annotations

import ctypes
import platform
import struct

IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427
"""The same on every architecture: asm-generic/unistd.h."""
SECCOMP = {"x86_64": 317, "aarch64": 277}
PR_SET_NO_NEW_PRIVS, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 38, 1, 1
BPF_LOAD_WORD, BPF_JUMP_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06
SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000


def forbid(*numbers: int, code: int, all_threads: bool = False) -> None:
    """Let these system calls fail with `code`, in this thread and its future children, for good."""
    lines = [struct.pack("HBBI", BPF_LOAD_WORD, 0, 0, 0)]  # the number of the system call
    for place, number in enumerate(numbers):
        lines.append(struct.pack("HBBI", BPF_JUMP_EQUAL, len(numbers) - place, 0, number))
    lines.append(struct.pack("HBBI", BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW))
    lines.append(struct.pack("HBBI", BPF_RETURN, 0, 0, SECCOMP_RET_ERRNO | code))
    code_memory = ctypes.create_string_buffer(b"".join(lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code_memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    flags = SECCOMP_FILTER_FLAG_TSYNC if all_threads else 0
    assert libc.syscall(SECCOMP[platform.machine()], SECCOMP_SET_MODE_FILTER, flags, program) == 0
