"""Which units of the data zone are free, and which to hand out next.

Every unit is exactly one of
    free          may be handed out
    live          belongs to a chunk (or to a put in progress)
    pending       belonged to a deleted chunk; free once the delete is durable (`defer`, `settle`)
    quarantined   on bad media, out of use until the store is opened again
    withheld      free, but not handed out while the device discards it (`withhold`, `give_back`)

Free space is kept as maximal extents: neighbours are always merged. The free map is never stored; after an
open it is the complement of the live extents.

Placement
  * Chunks of a run (32 units, 128 KiB) or more start on a run boundary: one extent where any is long enough
    (the tightest), else as few as possible, the longest first.
  * Smaller chunks go to the tightest hole in runs that are already broken, so that they share runs and
    whole runs stay whole; only then is a run broken, and only without either are they divided.

Not here: I/O, locking (callers serialise), and when a delete is durable (`blockkv.store`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from blockkv.errors import FormatError
from blockkv.format.geometry import MAX_EXTENT_UNITS, MAX_EXTENTS, RUN_UNITS

__all__ = ["Allocator", "Extent"]

Extent = tuple[int, int]
"""(start_unit, count_units)."""

_RUN_MASK = RUN_UNITS - 1


class Allocator:
    """The free map of a data zone of `data_units` units, all free at first. See `from_live`.

    `allocate` and `release` cost a few microseconds an extent, hardly growing with the size of the store.
    Giving back what is not live is a bug of the caller; `check` finds every case of it, the assertions on the
    way find most.
    """

    def __init__(self, data_units: int) -> None:
        self.data_units = data_units
        self.free_units = 0
        self.pending_units = 0
        self.quarantined_units = 0
        self.withheld_units = 0
        # Free extents by their start and by their end.
        self._counts: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        # Free extents with a whole run, by length: the units from their first run boundary to their end.
        # There are few different lengths (at most the square root of twice the data units), so a plain sorted
        # list of them is the fastest. Dicts serve as ordered sets: what is handed out must follow from the
        # history alone, and the newest member is found in constant time.
        self._by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        # Holes, the free parts of broken runs, by size; bit n is set while there are holes of n units.
        self._holes: list[dict[int, None]] = [{} for _ in range(RUN_UNITS)]
        self._hole_sizes = 0
        self._pending: dict[int, list[Extent]] = {}
        self._quarantined: list[Extent] = []
        self._withheld: list[Extent] = []
        # A byte a grain: whether any of its units came back since they were withheld. Empty unless asked for.
        self._grain_units = RUN_UNITS
        self._freed_grains = bytearray()
        if data_units:
            self._add(0, data_units)
            self.free_units = data_units

    @classmethod
    def from_live(cls, data_units: int, live_extents: NDArray[np.int64] | Sequence[Extent]) -> Allocator:
        """The free map beside `live_extents`, in any order: rows of (start, units).

        Raises FormatError when two of them overlap, or one is not inside the data zone, naming them.
        """
        flat = np.asarray(live_extents, np.int64).reshape(-1, 2)
        starts, counts = flat[np.argsort(flat[:, 0], kind="stable")].T
        ends = starts + counts
        for index in np.flatnonzero((starts < 0) | (counts <= 0) | (ends > data_units))[:1]:
            raise FormatError(
                f"extent of {counts[index]} units at {starts[index]} is not inside {data_units} data units"
            )
        for index in np.flatnonzero(starts[1:] < ends[:-1])[:1]:
            raise FormatError(
                f"extents overlap: {counts[index]} units at {starts[index]} "
                f"and {counts[index + 1]} units at {starts[index + 1]}"
            )
        allocator = cls(0)
        allocator.data_units = data_units
        free_starts = np.concatenate(([0], ends))
        free_ends = np.concatenate((starts, [data_units]))
        is_free = free_starts < free_ends
        allocator._add_many(free_starts[is_free], free_ends[is_free])
        return allocator

    @property
    def live_units(self) -> int:
        """Units that belong to chunks."""
        used = self.data_units - self.free_units - self.pending_units
        return used - self.quarantined_units - self.withheld_units

    @property
    def largest_free(self) -> int:
        """Units of the largest chunk that would get a single extent."""
        if self._lengths:
            return self._lengths[-1]
        return max(self._hole_sizes.bit_length() - 1, 0)

    @property
    def free_extent_count(self) -> int:
        """How many pieces the free space is in."""
        return len(self._counts)

    def free_extents(self) -> Iterator[Extent]:
        """The free extents, ascending."""
        return iter(sorted(self._counts.items()))

    def allocate(self, units: int) -> tuple[Extent, ...] | None:
        """Extents of `units` units in total, in the order the payload fills them; they are live now.

        None when free units are too few or too scattered: a chunk has at most `MAX_EXTENTS` extents, and one
        of a run or more consists of whole runs except for its last extent.
        """
        assert units >= 0, f"{units} units"
        if units > self.free_units:
            return None
        if not units:
            return ()
        extents = self._allocate_small(units) if units < RUN_UNITS else self._allocate_large(units)
        if extents is None:
            return None
        self.free_units -= units
        if units > MAX_EXTENT_UNITS:
            extents = _split(extents)
            if len(extents) > MAX_EXTENTS:
                self.release(extents)
                return None
        return tuple(extents)

    def allocate_many(self, sizes: Sequence[int]) -> list[tuple[Extent, ...]]:
        """Extents for chunks that are written together, from the first on, up to one that gets none.

        Those smaller than a run lie one behind the other in whole runs, where there are as many: they are
        written in few requests, and leave whole runs behind when they leave together.
        """
        small = sum(units for units in sizes if units < RUN_UNITS)
        strip: list[Extent] = []
        if RUN_UNITS <= small <= MAX_EXTENT_UNITS:
            strip.extend(self.allocate(small) or ())
        found: list[tuple[Extent, ...]] = []
        for units in sizes:
            extents = _cut(strip, units) if strip and units < RUN_UNITS else self.allocate(units)
            if extents is None and strip:
                # What lies there for chunks that come later must not be in the way of this one.
                self.release(strip)
                strip.clear()
                extents = self.allocate(units)
            if extents is None:
                break
            found.append(extents)
        self.release(strip)
        return found

    def release(self, extents: Iterable[Extent]) -> None:
        """Live extents become free at once: for puts that failed before anything referred to them."""
        for start, count in extents:
            self._give_back(start, count)

    def defer(self, extents: Iterable[Extent], token: int) -> None:
        """Live extents become pending, until `settle` is called with `token` or more.

        The token is whatever orders deletes and their durability: the log sequence of the DELETE record.
        """
        waiting = self._pending.setdefault(token, [])
        for start, count in extents:
            self._assert_not_free(start, count)
            waiting.append((start, count))
            self.pending_units += count
        assert self.live_units >= 0, "more units deferred than live"

    def settle(self, token: int) -> int:
        """Everything deferred with this token or a smaller one becomes free. Returns the units freed."""
        settled = sorted(waiting for waiting in self._pending if waiting <= token)
        units = 0
        for waiting in settled:
            # Chunks that were put together often leave together: what lies side by side comes back as one.
            for start, count in _joined(self._pending.pop(waiting)):
                self.pending_units -= count
                units += count
                self._give_back(start, count)
        return units

    def quarantine(self, extents: Iterable[Extent]) -> None:
        """Live extents are taken out of use until the store is opened again: their media failed."""
        for start, count in extents:
            self._assert_not_free(start, count)
            self._quarantined.append((start, count))
            self.quarantined_units += count
        assert self.live_units >= 0, "more units quarantined than live"

    def remember_freed(self, grain_units: int) -> None:
        """From now on remember which space came back, for `withhold`: a byte for every `grain_units`."""
        assert grain_units > 0, f"grain of {grain_units} units"
        self._grain_units = grain_units
        self._freed_grains = bytearray(self.data_units // grain_units)

    def longest_free(self, first: int, limit: int) -> list[int]:
        """Where free extents with a whole run start, the longest first: `limit` from number `first` on."""
        starts = (start for length in reversed(self._lengths) for start in self._by_length[length])
        return list(islice(starts, first, first + limit))

    def withhold(self, owner: int, limit_units: int) -> Extent | None:
        """Take space that came back, whole grains and at most `limit_units`, from the free extent at `owner`.

        It is not handed out until `give_back`, and does not count as having come back then. None where no
        free extent starts there (any more), or holds no such space.
        """
        grain_units = self._grain_units
        first = -(-owner // grain_units)
        end = min((owner + self._counts.get(owner, 0)) // grain_units, len(self._freed_grains))
        first = self._freed_grains.find(1, first, end)
        end = min(end, first + limit_units // grain_units)
        if first < 0 or first >= end:
            return None
        unfreed = self._freed_grains.find(0, first, end)
        if unfreed >= 0:
            end = unfreed
        self._freed_grains[first:end] = bytes(end - first)
        extent = first * grain_units, (end - first) * grain_units
        self._carve(owner, *extent)
        self.free_units -= extent[1]
        self.withheld_units += extent[1]
        self._withheld.append(extent)
        return extent

    def give_back(self, extent: Extent) -> None:
        """What was withheld is free again."""
        self._withheld.remove(extent)
        self.withheld_units -= extent[1]
        self._make_free(*extent)

    def pending_extents(self) -> Iterator[Extent]:
        """The extents that wait for their delete to be durable."""
        return (extent for extents in self._pending.values() for extent in extents)

    def check(self, live_extents: Iterable[Extent] | None = None) -> None:
        """Assert every invariant; with `live_extents` also that each unit is accounted for exactly once.

        Costs time in proportion to the number of extents.
        """
        fresh = Allocator(0)
        fresh.data_units = self.data_units
        end = -1
        for start, count in self.free_extents():
            assert start > end, f"free extent at {start} overlaps or touches the one that ends at {end}"
            assert count > 0, f"free extent of {count} units at {start}"
            fresh._add(start, count)
            end = start + count
        assert end <= self.data_units, f"free extent ends at {end} of {self.data_units} units"
        assert self._starts == fresh._starts, "end index does not match the free extents"
        assert self._by_length == fresh._by_length, "length index does not match the free extents"
        assert self._lengths == sorted(self._by_length), "lengths do not match the length index"
        assert self._holes == fresh._holes, "hole index does not match the free extents"
        assert self._hole_sizes == fresh._hole_sizes, "hole sizes do not match the holes"
        assert self.free_units == sum(self._counts.values()), "free units do not add up"
        assert self.pending_units == sum(count for _, count in self.pending_extents()), (
            "pending do not add up"
        )
        assert self.quarantined_units == sum(count for _, count in self._quarantined), (
            "quarantined do not add up"
        )
        assert self.withheld_units == sum(count for _, count in self._withheld), "withheld do not add up"
        assert self.live_units >= 0, f"{self.live_units} live units"
        live = list(live_extents) if live_extents is not None else []
        end = 0
        for start, count in sorted(
            [*self.free_extents(), *self.pending_extents(), *self._quarantined, *self._withheld, *live]
        ):
            assert start >= end, f"extent of {count} units at {start} overlaps the one that ends at {end}"
            assert live_extents is None or start == end, f"units {end} to {start} are nowhere"
            end = start + count
        assert live_extents is None or end == self.data_units, f"units from {end} on are nowhere"

    def _allocate_small(self, units: int) -> list[Extent]:
        if self._hole_sizes >> units:
            return [self._take_hole(units)]
        if self._lengths:
            return [self._break_run(units)]
        extents = []
        while units:
            # Only holes are left, each too small: the largest first.
            taken = min(units, self._hole_sizes.bit_length() - 1)
            extents.append(self._take_hole(taken))
            units -= taken
        return extents

    def _allocate_large(self, units: int) -> list[Extent] | None:
        lengths = self._lengths
        if lengths and units <= lengths[-1]:
            return [self._take_aligned(lengths[bisect_left(lengths, units)], units)]
        # No extent is long enough: the whole runs of the longest ones, then the rest from the tightest fit.
        # Nothing is taken before it is certain that there is enough.
        rest = units
        pieces: list[int] = []
        unused = False
        for length in reversed(lengths):
            members = len(self._by_length[length])
            runs = length & ~_RUN_MASK
            taken = min(members, -(-(rest - length) // runs)) if rest > length else 0
            rest -= taken * runs
            pieces.extend([length] * taken)
            unused = taken < members
            if unused or len(pieces) >= MAX_EXTENTS:
                break
        from_hole = rest < RUN_UNITS and self._hole_sizes >> rest
        if len(pieces) >= MAX_EXTENTS or not (unused or from_hole):
            return None
        extents = [self._take_aligned(length, length & ~_RUN_MASK) for length in pieces]
        if from_hole:
            extents.append(self._take_hole(rest))
        else:
            extents.append(self._take_aligned(lengths[bisect_left(lengths, rest)], rest))
        return extents

    def _take_aligned(self, length: int, units: int) -> Extent:
        """The first `units` from the first run boundary on, of a free extent indexed under `length`."""
        owner = _newest(self._by_length[length])
        start = owner + (-owner & _RUN_MASK)
        self._carve(owner, start, units)
        return start, units

    def _take_hole(self, units: int) -> Extent:
        """Part of the tightest hole, at the side where it does not touch free whole runs."""
        sizes = self._hole_sizes >> units
        size = units + (sizes & -sizes).bit_length() - 1
        hole = _newest(self._holes[size])
        if hole in self._counts:
            owner = start = hole
        else:
            owner = self._starts[hole + size]
            start = hole + size - units
        self._carve(owner, start, units)
        return start, units

    def _break_run(self, units: int) -> Extent:
        """Part of a whole run of the shortest extent, at a side where it leaves one remainder if possible."""
        owner = _newest(self._by_length[self._lengths[0]])
        start = owner + (-owner & _RUN_MASK)
        end = owner + self._counts[owner]
        if start != owner and not end & _RUN_MASK:
            start = end - units
        self._carve(owner, start, units)
        return start, units

    def _carve(self, owner: int, start: int, units: int) -> None:
        """Remove `units` at `start` from the free extent that starts at `owner`."""
        end = owner + self._remove(owner)
        if start > owner:
            self._add(owner, start - owner)
        if start + units < end:
            self._add(start + units, end - start - units)

    def _give_back(self, start: int, count: int) -> None:
        self._make_free(start, count)
        if self._freed_grains:
            first, end = start // self._grain_units, -(-(start + count) // self._grain_units)
            end = min(end, len(self._freed_grains))
            self._freed_grains[first:end] = b"\1" * (end - first)

    def _make_free(self, start: int, count: int) -> None:
        self._assert_not_free(start, count)
        self.free_units += count
        end = start + count
        if end in self._counts:
            count += self._remove(end)
        if start in self._starts:
            start = self._starts[start]
            count += self._remove(start)
        self._add(start, count)

    def _assert_not_free(self, start: int, count: int) -> None:
        assert 0 <= start < start + count <= self.data_units, f"{count} units at {start} do not exist"
        # Exact and cheap rather than complete: what lies strictly inside a free extent is found by `check`.
        assert start not in self._counts, f"{count} units at {start} are free already"
        assert start + count not in self._starts, f"{count} units at {start} are free already"

    def _add(self, start: int, count: int) -> None:
        """Record a free extent that touches no other."""
        end = start + count
        self._counts[start] = count
        self._starts[end] = start
        front = -start & _RUN_MASK
        if front >= count:
            self._add_hole(start, count)
            return
        if front:
            self._add_hole(start, front)
        length = count - front
        if length >= RUN_UNITS:
            members = self._by_length.get(length)
            if members is None:
                self._by_length[length] = {start: None}
                insort(self._lengths, length)
            else:
                members[start] = None
        if end & _RUN_MASK:
            self._add_hole(end & ~_RUN_MASK, end & _RUN_MASK)

    def _add_many(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """`_add` for all extents of an empty allocator at once: a large store opens ten times faster."""
        counts = ends - starts
        self.free_units = int(counts.sum())
        self._counts = dict(zip(starts.tolist(), counts.tolist(), strict=True))
        self._starts = dict(zip(ends.tolist(), starts.tolist(), strict=True))
        fronts = np.minimum(-starts & _RUN_MASK, counts)
        lengths = counts - fronts
        tails = np.where(lengths > 0, ends & _RUN_MASK, 0)
        sizes = np.concatenate((fronts, tails))
        for size, holes in _group(sizes, np.concatenate((starts, ends - tails))):
            if size:
                self._holes[size] = holes
                self._hole_sizes |= 1 << size
        has_run = lengths >= RUN_UNITS
        self._by_length = dict(_group(lengths[has_run], starts[has_run]))
        self._lengths = list(self._by_length)

    def _remove(self, start: int) -> int:
        """Forget a free extent. Returns its units."""
        count = self._counts.pop(start)
        end = start + count
        del self._starts[end]
        front = -start & _RUN_MASK
        if front >= count:
            self._remove_hole(start, count)
            return count
        if front:
            self._remove_hole(start, front)
        length = count - front
        if length >= RUN_UNITS:
            members = self._by_length[length]
            del members[start]
            if not members:
                del self._by_length[length]
                del self._lengths[bisect_left(self._lengths, length)]
        if end & _RUN_MASK:
            self._remove_hole(end & ~_RUN_MASK, end & _RUN_MASK)
        return count

    def _add_hole(self, start: int, size: int) -> None:
        self._holes[size][start] = None
        self._hole_sizes |= 1 << size

    def _remove_hole(self, start: int, size: int) -> None:
        holes = self._holes[size]
        del holes[start]
        if not holes:
            self._hole_sizes &= ~(1 << size)


def _group(keys: NDArray[np.int64], members: NDArray[np.int64]) -> Iterator[tuple[int, dict[int, None]]]:
    """The members of each key, as an ordered set; keys ascending."""
    order = np.argsort(keys, kind="stable")
    ordered_keys = keys[order]
    firsts = np.flatnonzero(np.diff(ordered_keys, prepend=-1))
    ordered = members[order].tolist()
    for first, end in pairwise([*firsts.tolist(), len(ordered)]):
        yield int(ordered_keys[first]), dict.fromkeys(ordered[first:end])


def _newest(members: dict[int, None]) -> int:
    # Not next(reversed(members)): that walks over every entry deleted from the end since the last resize,
    # popitem drops them for good.
    start, _ = members.popitem()
    members[start] = None
    return start


def _cut(strip: list[Extent], units: int) -> tuple[Extent, ...]:
    """The next `units` of what was allocated for several chunks together."""
    start, count = strip[0]
    if units < count:
        strip[0] = start + units, count - units
        return ((start, units),)
    taken = []
    while units:
        start, count = strip[0]
        piece = min(count, units)
        taken.append((start, piece))
        units -= piece
        if piece == count:
            del strip[0]
        else:
            strip[0] = start + piece, count - piece
    return tuple(taken)


def _joined(extents: list[Extent]) -> Iterator[Extent]:
    """Extents of which none overlap, ascending, with neighbours as one."""
    extents.sort()
    start = end = 0
    for next_start, count in extents:
        assert next_start >= end, f"{count} units at {next_start} are deferred twice"
        if next_start > end:
            if start < end:
                yield start, end - start
            start = next_start
        end = next_start + count
    if start < end:
        yield start, end - start


def _split(extents: list[Extent]) -> list[Extent]:
    """The same extents with none longer than a record can express."""
    return [
        (start + offset, min(count - offset, MAX_EXTENT_UNITS))
        for start, count in extents
        for offset in range(0, count, MAX_EXTENT_UNITS)
    ]
