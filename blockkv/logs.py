"""What blockkv logs: messages that begin with the store, and fields for those who want no text.

Every record that concerns a store has the attribute `store`, and others of `FIELDS` where they apply:
whatever formats records as JSON finds them there. `JsonFormatter` is ours, for `blockkv serve`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

from blockkv.errors import BlockKVError

__all__ = ["FIELDS", "JsonFormatter", "described", "logger_for"]

FIELDS = ("store", "client", "error", "errno", "key_digest", "chunk_bytes", "chunks")
"""Attributes of records beside those that Python's have; see docs/deploying.md."""


def logger_for(
    store: str, logger: str = "blockkv", *, error: BaseException | None = None, **fields: Any
) -> _StoreLogger:
    """A logger whose messages begin with `store`, a path; its records have that and `fields` as attributes.

    `error` becomes the fields `error` and `errno`; its text belongs into the message (`described`).
    """
    fields = {"store": store, **fields}
    if error is not None:
        fields |= {"error": type(error).__name__, "errno": getattr(error, "errno", None)}
    return _StoreLogger(logging.getLogger(logger), {k: v for k, v in fields.items() if v is not None})


class _StoreLogger(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: object, stacklevel: int = 1, **options: Any) -> None:
        """As of a logger; the place in the source that a record names is the caller's."""
        assert self.extra is not None
        super().log(level, f"%s: {msg}", self.extra["store"], *args, stacklevel=stacklevel + 1, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": self.extra}


def described(error: BaseException) -> str:
    """An exception in a sentence: what it says; what it is, where that does not speak for itself."""
    if isinstance(error, (BlockKVError, OSError)):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, pid, and fields that apply."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line. Never raises for a field: what JSON does not know is its `str`."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        error = record.exc_info[1] if record.exc_info else None
        if error is None and isinstance(record.args, tuple):
            error = next((one for one in record.args if isinstance(one, BaseException)), None)
        if error is not None:
            document |= {"error": type(error).__name__, "errno": getattr(error, "errno", None)}
        document |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in document.items() if value is not None}, default=str)
