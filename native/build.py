"""Builds `blockkv._native`, the C core, as a cffi API-mode extension.

The declarations come from the C headers themselves, so that Python and C cannot disagree about a struct.
Needs a C11 compiler, liburing (2.3 or later) and `xxhash.h` (0.8 or later; header only, nothing is linked).
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

NATIVE = Path(__file__).resolve().parent
SOURCES = sorted(path.name for path in NATIVE.glob("[!_]*.c"))
PUBLIC_HEADERS = ("engine.h", "checksum.h", "record.h", "index.h", "memory.h")


def declarations(header: str) -> str:
    """The C declarations of a header, without preprocessor lines."""
    text = (NATIVE / header).read_text(encoding="utf-8")
    return re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)


def relative(path: Path) -> str:
    """Relative to the directory of setup.py, as setuptools wants sources."""
    return str(path.relative_to(NATIVE.parent))


ffibuilder = FFI()
ffibuilder.cdef("struct iovec { ...; };")
for name in PUBLIC_HEADERS:
    ffibuilder.cdef(declarations(name))
ffibuilder.set_source(
    "blockkv._native",
    "\n".join(f'#include "{name}"' for name in PUBLIC_HEADERS),
    sources=[relative(NATIVE / name) for name in SOURCES],
    depends=[relative(path) for path in sorted(NATIVE.glob("*.h"))],
    include_dirs=[relative(NATIVE)],
    libraries=["uring", "dl"],
    extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
