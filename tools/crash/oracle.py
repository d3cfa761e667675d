"""What a store may hold, now and after a crash: no code in common with the store."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Event", "Oracle", "Violation", "short"]


class Violation(Exception):
    """The store broke a promise."""


@dataclass(slots=True)
class Event:
    """Key `key` changed to `version` (None: deleted), or perhaps did not (`maybe`).

    One that `replaces` the version before is made when its payload is on media already: wherever it survived,
    so did that.
    """

    key: str
    version: int | None
    maybe: bool = False
    replaces: bool = False


class Oracle:
    """What the store may hold, now and after a crash.

    `events` happened in this order since `base` was on media; the first `durable_count` of them were
    acknowledged as durable. A crash may cut the events at any later point. The payload of a put that was not
    acknowledged as durable may be missing even where the put survived: then the key is absent.
    """

    def __init__(self, base: dict[str, int | None]) -> None:
        self.base = base
        self.live = dict(base)
        """What a reader sees now; exact between operations."""
        self.events: list[Event] = []
        self.durable_count = 0

    def all_durable(self) -> None:
        """Everything done so far was acknowledged as durable."""
        self.base = dict(self.live)
        self.events = []
        self.durable_count = 0

    def key_durable(self, key: str, version: int | None) -> None:
        """That `key` has `version`, and with it everything before, was acknowledged as durable."""
        for position, event in enumerate(self.events):
            if event.key == key and event.version == version == self.live[key]:
                event.maybe = False
                self.durable_count = max(self.durable_count, position + 1)

    def judge(self, found: dict[str, int | None]) -> None:
        """Raise Violation unless some cut explains `found`."""
        complaint = ""
        for cut in range(len(self.events), self.durable_count - 1, -1):
            allowed = self.allowed(cut)
            wrong = [key for key in found if found[key] not in allowed[key]]
            if not wrong:
                return
            complaint = complaint or ", ".join(
                f"{short(key)} is version {found[key]} instead of {allowed[key]}" for key in wrong
            )
        raise Violation(f"no prefix of the log covers what was acknowledged and explains this: {complaint}")

    def allowed(self, cut: int) -> dict[str, set[int | None]]:
        """Per key the versions (None: absent) that may be found if the log was cut after `cut` events."""
        allowed: dict[str, set[int | None]] = {key: {version} for key, version in self.base.items()}
        for position, event in enumerate(self.events[:cut]):
            if not event.maybe:
                allowed[event.key] = set()
            allowed[event.key].add(event.version)
            if position >= self.durable_count and not event.replaces:
                allowed[event.key].add(None)
        return allowed


def short(key: str) -> str:
    return key[:5].rstrip("x")
