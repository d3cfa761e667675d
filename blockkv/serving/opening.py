"""`blockkv.open`: a device, an array, or the socket of an owner, by what the path is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from blockkv.errors import InvalidArgument
from blockkv.serving.client import ClientStore
from blockkv.serving.wire import socket_path
from blockkv.store import Store
from blockkv.store import open_any as open_here
from blockkv.tracing import tracing_wanted

__all__ = ["open_any"]

P = ParamSpec("P")

CLIENT_OPTIONS = ("read_only", "engine", "depth", "max_store_bytes")
"""Those of `open_any` that a client has itself; all others are the owner's."""


def _or_served(opens: Callable[P, Store]) -> Callable[P, Store]:
    """The same function, which also takes the socket of an owner."""
    signature = inspect.signature(opens)

    @functools.wraps(opens)
    def run(*given: P.args, **options: P.kwargs) -> Store:
        as_wanted: Callable[[Store], Store] = tracing_wanted()
        for name in options:
            if name not in signature.parameters:
                raise TypeError(f"blockkv.open() has no option {name!r}")
        path = given[0] if given else options.get("path")
        socket_at = socket_path(path)
        if socket_at is None:
            return as_wanted(opens(*given, **options))
        wanted: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if name == "path":
                continue
            value = options.get(name, parameter.default)
            if name in CLIENT_OPTIONS:
                wanted[name] = value
            elif value != parameter.default:
                raise InvalidArgument(
                    f"{socket_at}: {name} is for the owner of the store; give it to `blockkv serve`"
                )
        return as_wanted(ClientStore(socket_at, **wanted))

    return run


open_any = _or_served(open_here)
