"""What a store may show after a crash, from what the workload said it began and what it saw return.

Each key belongs to one thread, so the steps on it have an order. After a crash a key may show the state after
any of its steps, from the last one known to be durable on. That includes steps that had only begun. An
eviction, which nobody announces, may make any chunk absent that is not pinned.

Shares no code with blockkv.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

__all__ = ["Oracle"]

ABSENT = None


@dataclass(slots=True)
class _Key:
    states: list[int | None] = field(default_factory=lambda: [ABSENT])
    """Versions in the order of the steps; the first state is before all of them."""
    returned: int = 0
    """Index of the last state whose step returned."""
    floor: int = 0
    """Index of the earliest state that a crash may show."""
    is_pinned: bool = False

    def begin(self, state: int | None) -> None:
        self.states.append(state)

    def possible(self) -> list[int | None]:
        states = self.states[self.floor :]
        return states if self.is_pinned or ABSENT in states else [*states, ABSENT]

    def settle(self, state: int | None) -> None:
        """An open showed this state: the steps behind it never happened, and it stays."""
        while len(self.states) - 1 > self.floor and self.states[-1] != state:
            self.states.pop()
        if self.states[-1] != state:
            self.states.append(state)
        self.floor = self.returned = len(self.states) - 1


class Oracle:
    """Takes in the workload's words one by one. `violations` is what an open in the guest showed wrongly."""

    def __init__(self) -> None:
        self.keys: defaultdict[str, _Key] = defaultdict(_Key)
        self.is_formatted = False
        self.violations: list[str] = []
        self.durable_count = 0
        self.open_count = 0
        self._commits: dict[str, list[tuple[_Key, int]]] = {}

    def hear(self, text: str) -> None:
        verb, *words = text.split()
        match verb:
            case "put":
                self.keys[words[0]].begin(int(words[1]))
            case "delete":
                self.keys[words[0]].begin(ABSENT)
            case "is-put" | "is-deleted" | "durable":
                for word in words:
                    key = self.keys[word]
                    key.returned = len(key.states) - 1
                    if verb == "durable":
                        key.floor = key.returned
                        self.durable_count += 1
            case "commit":
                self._commits[words[0]] = [(key, key.returned) for key in self.keys.values()]
            case "committed":
                for key, returned in self._commits.pop(words[0]):
                    key.floor = max(key.floor, returned)
                    self.durable_count += 1
            case "pinned":
                self.keys[words[0]].is_pinned = True
            case "unpin":
                self.keys[words[0]].is_pinned = False
            case "open":
                self._commits.clear()
                self.open_count += 1
            case "found" | "missing":
                state = int(words[1]) if verb == "found" else ABSENT
                self.violations += self.judge_key(words[0], state)
                self.keys[words[0]].settle(state)
                self.keys[words[0]].is_pinned = False
            case "formatted":
                self.is_formatted = True
            case "wrong" | "failed":
                self.violations.append(f"in the guest: {text}")

    def judge_key(self, name: str, state: int | None) -> list[str]:
        """What is wrong with a key that shows this state, in words."""
        possible = self.keys[name].possible()
        if state in possible:
            return []
        kind = "lost" if state is ABSENT else "phantom"
        return [f"{kind}: {name} shows {state}; it may show {possible}"]

    def judge(self, found: dict[str, int | None]) -> list[str]:
        """What is wrong with a store that holds these versions."""
        problems = []
        for name in sorted({*self.keys, *found}):
            problems += self.judge_key(name, found.get(name))
        return problems
