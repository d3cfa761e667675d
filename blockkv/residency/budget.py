"""How much memory the tier may have: what is really free, asked again while running.

The least of three answers counts, each less `keep_free_bytes` and with what the tier has already added, which
is what is charged for it: not what it has mapped and nobody has touched.

    control group   its limit (memory.max and memory.high; version 1: memory.limit_in_bytes) less what is
                    charged to it but page cache; for the group of this process and every one above it
    machine         MemAvailable of /proc/meminfo
    configuration   `ceiling_bytes`

While tasks wait for memory (pressure stall information, `some avg10`) the tier is to give back an eighth of
what it has, each time it is asked. Whose tasks: those of the groups above; those of the whole machine where
it is short of memory, for else they belong to other groups, at limits of their own.

Sources: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and accounting/psi.rst of Linux.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockkv.errors import InvalidArgument
from blockkv.store.numbers import is_number

__all__ = ["Estimate", "MemoryBudget"]

KEEP_FREE_BYTES = 64 << 20
"""For what the process needs besides: staging of the store, the index, buffers of its callers."""
PRESSURE_PERCENT = 10.0
"""Share of the last ten seconds in which some task waited for memory, from which on the tier shrinks."""
SHRINK_SHARE = 8
SHORT_SHARE = 8
"""A machine is short of memory when less than an eighth of it is available."""
UNLIMITED_BYTES = 1 << 62
"""Version 1 writes a limit that is none as the largest multiple of a page."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the tier may have now, and which answer it was that counted."""

    budget_bytes: int
    reason: str
    pressure_percent: float


class MemoryBudget:
    """Asks the kernel how much memory there is for the tier.

    A fixed budget is one with `follow=False`: `ceiling_bytes`, whatever happens. Raises InvalidArgument where
    that is not given.
    """

    def __init__(
        self,
        ceiling_bytes: int | None = None,
        *,
        keep_free_bytes: int = KEEP_FREE_BYTES,
        pressure_percent: float = PRESSURE_PERCENT,
        follow: bool = True,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        if ceiling_bytes is None and not follow:
            raise InvalidArgument("a budget that does not follow what is free needs ceiling_bytes")
        if ceiling_bytes is not None and not (is_number(ceiling_bytes) and ceiling_bytes >= 0):
            raise InvalidArgument(f"ceiling_bytes is {ceiling_bytes!r}; use 0 or more")
        self._ceiling_bytes = ceiling_bytes
        self._keep_free_bytes = keep_free_bytes
        self._pressure_percent = pressure_percent
        self._follow = follow
        self._proc = proc
        self._cgroups = cgroups

    def estimate(self, own_bytes: int) -> Estimate:
        """What the tier, which has `own_bytes` resident now, may have. Costs a few reads of small files."""
        if not self._follow:
            assert self._ceiling_bytes is not None
            return Estimate(self._ceiling_bytes, "fixed", 0.0)
        pressure = self._pressure()
        answers = [
            (max(0, own_bytes + free_bytes - self._keep_free_bytes), source)
            for free_bytes, source in self._free()
        ]
        if self._ceiling_bytes is not None:
            answers.append((self._ceiling_bytes, "ceiling"))
        if pressure >= self._pressure_percent:
            answers.append((own_bytes - own_bytes // SHRINK_SHARE, "pressure"))
        budget_bytes, reason = min(answers, default=(0, "nothing is known of the memory"))
        return Estimate(budget_bytes, reason, pressure)

    def _free(self) -> Iterator[tuple[int, str]]:
        """(bytes that could be taken, who says so)."""
        for name, group in self._groups():
            yield from (
                (max(0, limit_bytes - used_bytes), f"{name} {group}")
                for limit_bytes, used_bytes in [_limit_and_use(group)]
                if limit_bytes < UNLIMITED_BYTES
            )
        available_bytes = self._meminfo().get("MemAvailable")
        if available_bytes is not None:
            yield available_bytes, "MemAvailable"

    def _meminfo(self) -> dict[str, int]:
        """Bytes by name."""
        words = (line.replace(":", " ").split() for line in _lines(self._proc / "meminfo"))
        return {name: int(kibibytes) << 10 for name, kibibytes, *_ in words}

    def _groups(self) -> Iterator[tuple[str, Path]]:
        """The control groups that may limit this process, its own first."""
        for line in _lines(self._proc / "self" / "cgroup"):
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                root = self._cgroups / "memory"
            elif number == "0" and not (self._cgroups / "memory").is_dir():
                root = self._cgroups
            else:
                continue
            group = root / path.strip("/")
            while True:
                yield "cgroup", group
                if group == root or root not in group.parents:
                    break
                group = group.parent

    def _pressure(self) -> float:
        roots = (self._cgroups, self._cgroups / "memory")  # the root group's is the machine's
        files = [group / "memory.pressure" for _, group in self._groups() if group not in roots]
        memory = self._meminfo()
        if memory.get("MemAvailable", 0) < memory.get("MemTotal", 0) // SHORT_SHARE:
            files.append(self._proc / "pressure" / "memory")
        return max(map(_some_avg10, files), default=0.0)


def _limit_and_use(group: Path) -> tuple[int, int]:
    """The limit of one group, and what it uses that cannot be reclaimed at once: all but page cache."""
    limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limit_bytes = min((one for one in limits if one is not None), default=UNLIMITED_BYTES)
    if limit_bytes >= UNLIMITED_BYTES:
        return limit_bytes, 0  # what it uses takes the kernel long to sum up
    used_bytes = _number(group / "memory.current")
    if used_bytes is None:
        used_bytes = _number(group / "memory.usage_in_bytes") or 0
    cached = {"inactive_file", "active_file"}
    if any(line.startswith("total_inactive_file ") for line in _lines(group / "memory.stat")):
        cached = {"total_inactive_file", "total_active_file"}  # version 1: with all groups below
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in cached:
            used_bytes -= int(value)
    return limit_bytes, max(0, used_bytes)


def _some_avg10(file: Path) -> float:
    for line in _lines(file):
        if line.startswith("some "):
            return float(line.split("avg10=")[1].split()[0])
    return 0.0


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no file, or it says "max"."""
    for line in _lines(file):
        with contextlib.suppress(ValueError):
            return int(line)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
