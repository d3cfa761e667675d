"""Exit codes: one per thing a script would do differently about it. `blockkv --help` prints this table."""

from __future__ import annotations

import enum

from blockkv import errors


class ExitCode(enum.IntEnum):
    """What the process ends with. Shells report a signal as 128 + its number; Ctrl-C is 130."""

    OK = 0
    NEGATIVE = 1
    USAGE = 2
    REFUSED = 3
    DEVICE = 4
    FORMAT = 5
    FULL = 6
    FAILED = 7
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done; the answer is yes",
    ExitCode.NEGATIVE: "the answer is no: no such key, problems found, outputs differ",
    ExitCode.USAGE: "an argument cannot be accepted; nothing was done",
    ExitCode.REFUSED: "refused: occupied, busy, or read-only",
    ExitCode.DEVICE: "the device, a file or the process that serves failed, is missing or too small",
    ExitCode.FORMAT: "not a store, another store, or written by a later version",
    ExitCode.FULL: "no space for the chunk",
    ExitCode.FAILED: "anything else went wrong",
    ExitCode.INTERRUPTED: "interrupted",
}

# The first that fits counts: subclasses stand before their bases.
_BY_ERROR: list[tuple[type[BaseException], ExitCode]] = [
    (errors.OccupiedError, ExitCode.REFUSED),
    (errors.DeviceBusy, ExitCode.REFUSED),
    (errors.DeviceReadOnly, ExitCode.REFUSED),
    (errors.StoreReadOnly, ExitCode.REFUSED),
    (errors.DeviceError, ExitCode.DEVICE),
    (errors.OwnerLost, ExitCode.DEVICE),
    (errors.FormatError, ExitCode.FORMAT),
    (errors.StoreFull, ExitCode.FULL),
    (errors.InvalidArgument, ExitCode.USAGE),
    (OSError, ExitCode.DEVICE),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
]


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a command that ended with `error`. A batch ends like the first of its failures."""
    if isinstance(error, errors.BatchError):
        error = next(iter(error.errors.values()))
    for kind, code in _BY_ERROR:
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED
