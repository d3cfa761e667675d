"""Where the log of a command that runs for long goes: standard error, for people or for programs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator

from blockkv.logs import JsonFormatter

__all__ = ["FORMATS", "LEVELS", "log_output"]

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
"""Of syslog, by level: sd-daemon(3)."""


@contextlib.contextmanager
def log_output(form: str, level: str) -> Iterator[None]:
    """Records of blockkv from `level` on go to stderr while it lasts, as `form` (`FORMATS`) says.

    So does what ends a thread. Where stderr is systemd's journal, each line has its priority in front.
    """
    handler = logging.StreamHandler(sys.stderr)
    in_journal = _is_journal()
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(
            logging.Formatter("%(message)s" if in_journal else "%(asctime)s %(levelname)s %(message)s")
        )
    if in_journal:
        handler.setFormatter(_WithPriority(handler.formatter))
    logger = logging.getLogger("blockkv")
    level_before, hook_before = logger.level, threading.excepthook

    def tell(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
            what = (ended.exc_type, ended.exc_value, ended.exc_traceback)
            logger.error("a thread of blockkv ended: %s", ended.exc_type.__name__, exc_info=what)

    logger.addHandler(handler)
    logger.setLevel(level.upper())
    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = hook_before
        logger.setLevel(level_before)
        logger.removeHandler(handler)


def _is_journal() -> bool:
    """Whether stderr goes to the journal: systemd.exec(5), JOURNAL_STREAM."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class _WithPriority(logging.Formatter):
    """The text of another formatter, each line with its priority: the journal takes lines apart."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        priority = next(number for level, number in PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in self._inner.format(record).splitlines())
