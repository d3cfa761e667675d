"""Every exception blockkv raises.

::

    BlockKVError                 anything blockkv reports; catch this to catch all of it
    ├── DeviceError (OSError)    the device, or the path to it, failed; `errno` is set where there is one
    │   ├── DeviceBusy           somebody else holds it: mounted, a holder above it, or a second opener
    │   ├── DeviceTooSmall       smaller than a store, or smaller than when it was formatted
    │   ├── DeviceLost           the namespace went away; every later operation fails with this
    │   └── DeviceReadOnly       write access was needed and the device or its permissions refuse it
    ├── FormatError              what is on the device cannot be used as a store
    │   ├── NotFormatted         no valid superblock
    │   ├── VersionTooNew        written by a later version, or with a feature this one does not know
    │   ├── ArchiveError         what was to be loaded is no archive, or not all of one
    │   ├── WrongStore           a different store than the one asked for, or one store on two open devices
    │   └── WrongKey             encrypted, and the key does not fit
    ├── OccupiedError            the device holds something else; says what and which command would clear it
    ├── StoreFull                no space (data or metadata) and eviction was refused or could not help
    │   └── CapacityExceeded     more was appended to a growing chunk than was reserved for it
    ├── GrowthEnded              a growing chunk was used after it was sealed or abandoned
    ├── StoreReadOnly            the store cannot accept writes; says since when and why
    ├── OwnerLost                the process that serves the store is gone; works again when it is back
    ├── StoreClosed              used after close(), or in a forked child
    ├── InvalidArgument (ValueError)  a key, tensor, size or option that cannot be accepted
    │   └── LayoutMismatch       `out=` has another shape, dtype or size than the stored chunk
    └── BatchError               some keys of a batch failed; `results` and `errors` say which

A miss is not an error: it is `None`, `False`, or a shorter prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "ArchiveError",
    "BatchError",
    "BlockKVError",
    "CapacityExceeded",
    "DeviceBusy",
    "DeviceError",
    "DeviceLost",
    "DeviceReadOnly",
    "DeviceTooSmall",
    "FormatError",
    "GrowthEnded",
    "InvalidArgument",
    "LayoutMismatch",
    "NotFormatted",
    "OccupiedError",
    "OwnerLost",
    "StoreClosed",
    "StoreFull",
    "StoreReadOnly",
    "VersionTooNew",
    "WrongKey",
    "WrongStore",
]


class BlockKVError(Exception):
    """Base of every blockkv exception. Catch it to handle all of them."""


class DeviceError(BlockKVError, OSError):
    """A device operation failed. `errno` is the kernel's code, or None where there was none."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        OSError.__init__(self, errno, message) if errno is not None else OSError.__init__(self, message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class DeviceBusy(DeviceError):
    """The device is mounted, has a holder above it, or is open elsewhere."""


class DeviceTooSmall(DeviceError):
    """The device is smaller than what has to fit on it."""


class DeviceLost(DeviceError):
    """The namespace disappeared while it was open. Close the store; no durable chunk is lost."""


class DeviceReadOnly(DeviceError):
    """The device is read-only, or its permissions are."""


class FormatError(BlockKVError):
    """What is on the device cannot be used as a blockkv store."""


class NotFormatted(FormatError):
    """No valid blockkv superblock was found."""


class VersionTooNew(FormatError):
    """The store was written by a later version, or uses a feature this version does not know."""


class WrongStore(FormatError):
    """Another store than the one expected, or the same store reachable through two open devices."""


class WrongKey(FormatError):
    """The store is encrypted and the key given does not open it."""


class ArchiveError(FormatError):
    """What was to be loaded is no archive, or not all of one. Chunks before the damage are in the store."""


class OccupiedError(BlockKVError):
    """The device holds something else. The message names it and the command that would clear it."""


class StoreFull(BlockKVError):
    """Neither free space nor eviction can make room for the chunk."""


class CapacityExceeded(StoreFull):
    """What was to be appended does not fit into what was reserved. Nothing of it was appended."""


class GrowthEnded(BlockKVError):
    """The growing chunk was sealed or abandoned; read a sealed one from the store."""


class StoreReadOnly(BlockKVError):
    """The store does not accept writes; the message says why."""


class OwnerLost(BlockKVError):
    """The owner of the catalog is gone, or does not answer. What was not durable may have gone with it.

    Gets are misses meanwhile. Go on using the store: it connects again when the owner is back.
    """


class StoreClosed(BlockKVError):
    """The store was closed, or belongs to the parent of this forked process."""


class InvalidArgument(BlockKVError, ValueError):
    """An argument cannot be accepted; nothing was done."""


class LayoutMismatch(InvalidArgument):
    """`out=` does not have the layout the chunk was stored with. Nothing was written to it."""


class BatchError(BlockKVError):
    """Some keys of a batch failed; their neighbours were carried out.

    `results` has one entry per key in order, with the failed ones as if they had missed;
    `errors` maps the position of each failed key to its exception.
    """

    def __init__(self, results: Sequence[object], errors: Mapping[int, BlockKVError]) -> None:
        first = next(iter(errors.items()))
        super().__init__(
            f"{len(errors)} of {len(results)} keys failed; the first is number {first[0]}: {first[1]}"
        )
        self.results = list(results)
        self.errors = dict(errors)
