"""What worker processes do with a store of their parent. Imports little: it is started anew for each."""

from __future__ import annotations

from collections.abc import Callable

import blockkv


def refused_in_child(store: blockkv.Store) -> list[str]:
    """Every method of a parent's store, tried in a child: the names of those that were not refused."""
    attempts: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("e1"),
        "get_many": lambda: store.get_many(["e1"]),
        "submit_get": lambda: store.submit_get("e1"),
        "put": lambda: store.put("child", b"x"),
        "put_many": lambda: store.put_many([("child", b"x")]),
        "submit_put": lambda: store.submit_put("child", b"x"),
        "delete": lambda: store.delete("e1"),
        "commit": store.commit,
        "checkpoint": store.checkpoint,
        "check": store.check,
        "contains": lambda: store.contains("e1"),
        "lookup": lambda: store.lookup(["e1"]),
        "keys": store.keys,
        "pin": lambda: store.pin("e1"),
        "touch": lambda: store.touch("e1"),
        "entry": lambda: store.entry("e1"),
    }
    accepted = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except blockkv.StoreClosed as error:
            assert "parent" in str(error) or "fork" in str(error)  # noqa: PT017
        else:
            accepted.append(name)
    store.close()
    return accepted


def use_in_worker(path: str, inherited: blockkv.Store | None) -> None:
    """The store is refused, by its path too. An exception becomes the exit code."""
    if inherited is not None:
        assert refused_in_child(inherited) == []
    try:
        blockkv.open(path)
    except blockkv.DeviceBusy:
        return
    raise AssertionError("it was opened twice")
