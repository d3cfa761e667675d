"""How long a drive will last, from what it says of itself and how much is written.

What a drive does not tell is None here, and never guessed. The formulas, their sources and what they leave
out: docs/operating.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from blockkv.device import namespace, nvme_admin
from blockkv.errors import BlockKVError

__all__ = ["Endurance", "days_left", "of_device", "of_drive"]

DAY_HOURS = 24


@dataclass(frozen=True, slots=True)
class Endurance:
    """What a drive tells of its wear."""

    written_bytes: int
    """By the host, over the drive's life, whoever it was."""
    used_percent: int
    """Of the life that the vendor expects; may go past 100."""
    power_on_hours: int
    amplification: float | None
    """Bytes that its media were written for each byte of the host, over its life."""

    @property
    def bytes_per_day(self) -> float | None:
        """The mean of the drive's life; None in its first day."""
        if self.power_on_hours < DAY_HOURS:
            return None
        return self.written_bytes * DAY_HOURS / self.power_on_hours

    @property
    def life_bytes(self) -> float | None:
        """What may be written over its life if all of it wears as what has been written; None below 1 %."""
        return self.written_bytes * 100 / self.used_percent if self.used_percent else None


def days_left(endurance: Endurance, bytes_per_day: float | None, life_bytes: float | None) -> float | None:
    """Days until `life_bytes` are written; None where a number is not known, or nothing is written."""
    if not bytes_per_day or life_bytes is None:
        return None
    return max(0.0, life_bytes - endurance.written_bytes) / bytes_per_day


def of_drive(drive: nvme_admin.Drive) -> Endurance | None:
    """From the answers of a drive; None where it has no SMART log."""
    health, group = drive.health, drive.endurance_group
    if health is None:
        return None
    amplification = None
    if group is not None and group.written_bytes and group.media_bytes:
        amplification = group.media_bytes / group.written_bytes
    return Endurance(health.written_bytes, health.used_percent, health.power_on_hours, amplification)


def of_device(path: str) -> tuple[Endurance | None, str]:
    """The endurance of the drive that a path is on, and else why it is not known."""
    try:
        identity = namespace.identify(path)
        if not (identity.disk or "").startswith("nvme"):
            return None, "it is not on an NVMe drive"
        descriptor = os.open(f"/dev/{identity.disk}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            endurance = of_drive(nvme_admin.ask(f"/dev/{identity.disk}", descriptor))
        finally:
            os.close(descriptor)
    except (BlockKVError, OSError) as error:
        return None, str(error)
    return endurance, "" if endurance else "the drive has no SMART log"
