"""Which way leads to the accelerator of this machine, and why. Nothing is chosen silently.

    none      there is no accelerator that we could copy to
    staging   the device reads into pinned host memory; what is verified there is copied asynchronously
    gds       the device reads into the accelerator's memory (GPUDirect Storage, through kvikio)

With GDS the bytes never meet the host, so nobody compares them with their checksums: it is the way for stores
that are open with `verify=False` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockkv.gpu import gds

__all__ = ["Way", "choose"]

DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/nvhost-ctrl"))
"""One of them is there where NVIDIA's driver is: asked first, because torch takes seconds to import."""


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes get to the accelerator."""

    name: Literal["none", "staging", "gds"]
    reason: str


def choose(verify: bool = True) -> Way:
    """The way for a store that verifies what it reads, or not."""
    if not any(path.exists() for path in DRIVER_FILES):
        return Way("none", "there is no NVIDIA driver: /dev/nvidiactl is missing")
    import torch

    if not torch.cuda.is_available():
        return Way("none", f"torch {torch.__version__} sees no CUDA device")
    if verify:
        return Way(
            "staging", "what is read is verified on the host; GDS would bring it past that (verify=False)"
        )
    refusal = gds.refusal()
    if refusal:
        return Way("staging", f"no GDS: {refusal}")
    return Way("gds", "kvikio has GPUDirect Storage, and nothing is verified")
