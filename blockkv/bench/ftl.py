"""What a drive makes of a store's writes and discards: a page-mapped flash translation layer, as a model.

Flash is written page by page and erased an erase unit at a time, hundreds of pages. The drive writes every
page to where it is just writing and maps it there; what was mapped before becomes invalid. When erased units
run short it takes the one with the fewest valid pages (greedy), writes these again and erases it. Pages
written, by the host and again, per page of the host are its write amplification. What it needs room for is
spare: more flash than it shows (over-provisioning), and what the host discarded.

What is written again goes to an erase unit of its own, apart from what the host writes, as drives do. What
the host writes in several streams goes to an erase unit for each, as with Flexible Data Placement; once it is
written again it is all together, as with that one's "initially isolated" handles.

Invariant: a logical page is mapped to one physical page or to none, and the valid count of an erase unit is
the number of pages mapped into it. Pure: no device, no clock. Not here: wear levelling, bad units, caching.

For uniform random writes of single pages it approaches, with many pages an erase unit, A = a / (a + W(-a
e^-a)) with a = flash / data and W the Lambert function (Desnoyers, Analytic Models of SSD Write Performance,
ACM Transactions on Storage 10(2), 2014).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockkv.errors import InvalidArgument

__all__ = ["Ftl"]

Pages = NDArray[np.int64]

PAGE_BYTES = 4096
LEAST_FREE_UNITS = 2
"""Erased units kept back where the host has one stream: one for that, one for what is written again."""
UNMAPPED = -1


class Ftl:
    """The mapping of one drive of `logical_bytes`, empty at first.

    It has `over_provisioning` more flash than that (0.07: as decimal and binary gigabytes differ), and at
    least the erase units it cannot do without: two, and two for each of the `streams` that a write can name.
    Raises InvalidArgument for sizes that make no drive.
    """

    def __init__(
        self,
        logical_bytes: int,
        over_provisioning: float = 0.07,
        erase_unit_bytes: int = 4 << 20,
        page_bytes: int = PAGE_BYTES,
        streams: int = 1,
    ) -> None:
        if page_bytes < 1 or erase_unit_bytes % page_bytes or erase_unit_bytes < 2 * page_bytes:
            raise InvalidArgument(
                f"an erase unit of {erase_unit_bytes} bytes is not two pages of {page_bytes} bytes or more"
            )
        if logical_bytes < erase_unit_bytes or over_provisioning < 0:
            raise InvalidArgument(
                f"{logical_bytes} bytes with {over_provisioning:.0%} over-provisioning are no drive with "
                f"erase units of {erase_unit_bytes} bytes"
            )
        self.page_bytes = page_bytes
        self.unit_pages = erase_unit_bytes // page_bytes
        self.logical_pages = -(-logical_bytes // page_bytes)
        self._least_free_units = LEAST_FREE_UNITS + streams - 1
        least_units = -(-self.logical_pages // self.unit_pages) + self._least_free_units + streams + 1
        self.unit_count = max(
            least_units, round(self.logical_pages * (1 + over_provisioning) / self.unit_pages)
        )
        self._physical: Pages = np.full(self.logical_pages, UNMAPPED, np.int64)
        self._logical: Pages = np.full(self.unit_count * self.unit_pages, UNMAPPED, np.int64)
        self._valid: Pages = np.zeros(self.unit_count, np.int64)
        self._closed = np.zeros(self.unit_count, bool)
        self._free = deque(range(self.unit_count))
        self._hosts = [_OpenUnit(self._free.popleft()) for _ in range(streams)]
        self._again = _OpenUnit(self._free.popleft())
        self.reset_counters()

    def reset_counters(self) -> None:
        """Count from here on: what a filled drive does is not what a new one does."""
        self.host_pages = 0
        self.copied_pages = 0
        self.discarded_pages = 0
        self.erase_count = 0

    @property
    def write_amplification(self) -> float:
        """Pages written to flash per page the host wrote, since the last reset; 1 when it wrote none."""
        return (self.host_pages + self.copied_pages) / self.host_pages if self.host_pages else 1.0

    def counters(self) -> dict[str, Any]:
        """Counts since the last reset."""
        return {
            "host_bytes": self.host_pages * self.page_bytes,
            "copied_bytes": self.copied_pages * self.page_bytes,
            "discarded_bytes": self.discarded_pages * self.page_bytes,
            "erase_count": self.erase_count,
            "write_amplification": self.write_amplification,
        }

    def write(self, offset_bytes: int, length_bytes: int, stream: int = 0) -> None:
        """The host writes a range. A page of which it writes a part is written whole."""
        end = -(-(offset_bytes + length_bytes) // self.page_bytes)
        self.write_pages(np.arange(offset_bytes // self.page_bytes, end), stream)

    def write_pages(self, pages: Pages, stream: int = 0) -> None:
        """The host writes these pages, no page twice, in this order."""
        self._invalidate(pages)
        self.host_pages += len(pages)
        self._append(self._hosts[stream], pages)

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        """The host discards a range; pages that are not wholly inside stay."""
        first = -(-offset_bytes // self.page_bytes)
        pages = np.arange(first, (offset_bytes + length_bytes) // self.page_bytes)
        self.discarded_pages += len(pages)
        self._invalidate(pages)
        self._physical[pages] = UNMAPPED

    def check(self) -> None:
        """Assert the invariant. Costs time in proportion to the flash."""
        mapped = np.flatnonzero(self._physical != UNMAPPED)
        assert (self._logical[self._physical[mapped]] == mapped).all(), "a page is mapped to another's place"
        assert (self._logical != UNMAPPED).sum() == len(mapped), "a page is valid in two places"
        by_unit = (self._logical != UNMAPPED).reshape(self.unit_count, self.unit_pages).sum(axis=1)
        assert (by_unit == self._valid).all(), "valid counts do not add up"

    def _invalidate(self, pages: Pages) -> None:
        physical = self._physical[pages]
        physical = physical[physical != UNMAPPED]
        self._logical[physical] = UNMAPPED
        np.subtract.at(self._valid, physical // self.unit_pages, 1)

    def _append(self, into: _OpenUnit, pages: Pages) -> None:
        """Map pages that are valid nowhere, in this order, to where `into` is just writing."""
        done = 0
        while done < len(pages):
            if into.used_pages == self.unit_pages:
                self._closed[into.unit] = True
                self._renew(into)
            taken = pages[done : done + self.unit_pages - into.used_pages]
            start = into.unit * self.unit_pages + into.used_pages
            self._logical[start : start + len(taken)] = taken
            self._physical[taken] = np.arange(start, start + len(taken))
            self._valid[into.unit] += len(taken)
            into.used_pages += len(taken)
            done += len(taken)

    def _renew(self, into: _OpenUnit) -> None:
        """Give a stream that is full the next erased unit. Only the host's make room first."""
        while into is not self._again and len(self._free) <= self._least_free_units:
            self._collect()
        into.unit = self._free.popleft()
        into.used_pages = 0

    def _collect(self) -> None:
        victim = int(np.where(self._closed, self._valid, self.unit_pages + 1).argmin())
        assert self._valid[victim] < self.unit_pages, "nothing to gain: no erase unit has an invalid page"
        of_victim = self._logical[victim * self.unit_pages : (victim + 1) * self.unit_pages]
        pages = of_victim[of_victim != UNMAPPED]
        of_victim[:] = UNMAPPED
        self._valid[victim] = 0
        self._closed[victim] = False
        self.copied_pages += len(pages)
        self._append(self._again, pages)
        self._free.append(victim)
        self.erase_count += 1


class _OpenUnit:
    """Where a stream of writes goes."""

    __slots__ = ("unit", "used_pages")

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.used_pages = 0
