"""Standard input, output and error where the command was started without them, as daemons and cron may do."""

from __future__ import annotations

import os
import sys

__all__ = ["open_standard_streams"]


def open_standard_streams() -> None:
    """Open those that are closed on /dev/null, before anything else is opened.

    A device would become one of them otherwise: what is printed would go to it, and programs that are started
    (wipefs) would get another file in its place.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == descriptor, "the lowest that is free is taken, and those below are open"
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
