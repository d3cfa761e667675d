"""Rows: what the payload of a growing chunk consists of, and how its tensors have to be alike."""

from __future__ import annotations

from blockkv.catalog.layouts import Layout, TensorSpec
from blockkv.errors import CapacityExceeded, InvalidArgument
from blockkv.tensors import Described

__all__ = ["Rows"]


class Rows:
    """dtype and shape of the rows of one chunk, as the first append says."""

    def __init__(self) -> None:
        self.row_bytes = 1
        self._kind: tuple[str, tuple[int, ...]] | None = None

    def accept(self, described: Described, used_bytes: int, capacity_bytes: int) -> None:
        """Check what is to be appended. Raises InvalidArgument (other rows), CapacityExceeded."""
        if used_bytes + described.payload_bytes > capacity_bytes:
            raise CapacityExceeded(
                f"{capacity_bytes} bytes were reserved and {used_bytes} are in use; "
                f"{described.payload_bytes} more do not fit: seal it, and reserve more next time"
            )
        known = self._kind
        for spec in described.layout.specs:
            if not spec.shape:
                raise InvalidArgument("a tensor without dimensions has no rows; give it one")
            kind = spec.dtype, spec.shape[1:]
            known = known or kind
            if kind != known:
                raise InvalidArgument(
                    f"rows are {known[0]}{list(known[1])}; {kind[0]}{list(kind[1])} cannot be appended"
                )
        first = described.layout.specs[0]
        self._kind, self.row_bytes = known, first.size_bytes // first.shape[0]

    def range_of(self, start: int, stop: int | None, size_bytes: int) -> tuple[int, int]:
        """Rows [start, stop) of `size_bytes` of payload as bytes. Raises InvalidArgument for others."""
        count = size_bytes // self.row_bytes
        stop = count if stop is None else stop
        if not 0 <= start < stop <= count:
            raise InvalidArgument(f"there are rows 0 to {count}; {start} to {stop} are not among them")
        return start * self.row_bytes, stop * self.row_bytes

    def layout(self, size_bytes: int) -> Layout:
        """Of one tensor with all rows of so many bytes, at least one."""
        assert self._kind is not None
        dtype, shape = self._kind
        return Layout("tensor", (TensorSpec("", dtype, (size_bytes // self.row_bytes, *shape)),))
