"""Opening the store that an engine's configuration names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import blockkv
from blockkv.errors import InvalidArgument, NotFormatted

__all__ = ["open_store"]

Device = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def open_store(
    device: Device, *, format: bool, average_chunk: int | str = "1MiB", **options: Any
) -> blockkv.Store:
    """The store on a device, on several as an array, or behind the socket of `blockkv serve`.

    A device that is blank is formatted first where `format` says so, with this `average_chunk`; one that
    holds anything else is refused. `options` are those of `blockkv.open`.

    Raises NotFormatted (saying what to do), OccupiedError, DeviceBusy, DeviceError, InvalidArgument.
    """
    target: Any = device
    if not isinstance(device, (str, os.PathLike)) and isinstance(device, Sequence) and len(device) == 1:
        target = device[0]
    try:
        return blockkv.open(target, **options)
    except NotFormatted as error:
        if not format:
            raise NotFormatted(
                f'{error}; give "format": true for a blank device, or run blockkv format'
            ) from None
    except TypeError as error:
        raise InvalidArgument(f"options of the store: {error}") from error
    blockkv.format(target, average_chunk=average_chunk)
    return blockkv.open(target, **options)
