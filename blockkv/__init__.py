"""blockkv: KV-cache chunks straight on a raw NVMe namespace.

::

    import blockkv

    blockkv.format("/dev/nvme1n1")
    with blockkv.open("/dev/nvme1n1") as store:
        store.put("prefix-1", {"k": k, "v": v}, durable=True)
        kv = store.get("prefix-1")              # None for a miss; verified otherwise

See `Store` for everything a store does, and `blockkv.errors` for what can be raised.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from blockkv.errors import (
    BatchError,
    BlockKVError,
    CapacityExceeded,
    DeviceBusy,
    DeviceError,
    DeviceLost,
    DeviceReadOnly,
    DeviceTooSmall,
    FormatError,
    GrowthEnded,
    InvalidArgument,
    LayoutMismatch,
    NotFormatted,
    OccupiedError,
    OwnerLost,
    StoreClosed,
    StoreFull,
    StoreReadOnly,
    VersionTooNew,
    WrongKey,
    WrongStore,
)

if TYPE_CHECKING:
    from blockkv.encryption.secret import Passphrase
    from blockkv.kv_layout import KVLayout, Part
    from blockkv.memory import empty
    from blockkv.prefix import Family, PrefixChain, prefix_keys
    from blockkv.residency import MemoryBudget, Place, TieredStore
    from blockkv.serving.opening import open_any as open
    from blockkv.store import (
        ArrayStore,
        Change,
        CheckReport,
        ChunkExtents,
        ChunkInfo,
        DeviceExtent,
        Finding,
        GrowingChunk,
        Latency,
        ScrubReport,
        Store,
        StoreFuture,
        Watch,
    )
    from blockkv.store import format_device as format
    from blockkv.store import grow_device as grow
    from blockkv.store.key_slot_changes import add_key_slot, key_slots, remove_key_slot
    from blockkv.store.wipe import WipeReport
    from blockkv.store.wipe import wipe_device as wipe

__all__ = [
    "ArrayStore",
    "BatchError",
    "BlockKVError",
    "CapacityExceeded",
    "Change",
    "CheckReport",
    "ChunkExtents",
    "ChunkInfo",
    "DeviceBusy",
    "DeviceError",
    "DeviceExtent",
    "DeviceLost",
    "DeviceReadOnly",
    "DeviceTooSmall",
    "Family",
    "Finding",
    "FormatError",
    "GrowingChunk",
    "GrowthEnded",
    "InvalidArgument",
    "KVLayout",
    "Latency",
    "LayoutMismatch",
    "MemoryBudget",
    "NotFormatted",
    "OccupiedError",
    "OwnerLost",
    "Part",
    "Passphrase",
    "Place",
    "PrefixChain",
    "ScrubReport",
    "Store",
    "StoreClosed",
    "StoreFull",
    "StoreFuture",
    "StoreReadOnly",
    "TieredStore",
    "VersionTooNew",
    "Watch",
    "WipeReport",
    "WrongKey",
    "WrongStore",
    "__version__",
    "add_key_slot",
    "empty",
    "format",
    "grow",
    "key_slots",
    "open",
    "prefix_keys",
    "remove_key_slot",
    "wipe",
]

__version__ = "0.1.0"

# The first import of the subpackage blockkv.format, whoever does it, binds that name here, over the function.
# So it happens now, and the name is given back to `__getattr__`.
importlib.import_module("blockkv.format")
del globals()["format"]

_LAZY = {
    "ArrayStore": ("blockkv.store", "ArrayStore"),
    "Change": ("blockkv.store", "Change"),
    "CheckReport": ("blockkv.store", "CheckReport"),
    "ChunkExtents": ("blockkv.store", "ChunkExtents"),
    "ChunkInfo": ("blockkv.store", "ChunkInfo"),
    "DeviceExtent": ("blockkv.store", "DeviceExtent"),
    "Family": ("blockkv.prefix", "Family"),
    "Finding": ("blockkv.store", "Finding"),
    "GrowingChunk": ("blockkv.store", "GrowingChunk"),
    "KVLayout": ("blockkv.kv_layout", "KVLayout"),
    "Latency": ("blockkv.store", "Latency"),
    "MemoryBudget": ("blockkv.residency", "MemoryBudget"),
    "Part": ("blockkv.kv_layout", "Part"),
    "Passphrase": ("blockkv.encryption.secret", "Passphrase"),
    "Place": ("blockkv.residency", "Place"),
    "PrefixChain": ("blockkv.prefix", "PrefixChain"),
    "ScrubReport": ("blockkv.store", "ScrubReport"),
    "Store": ("blockkv.store", "Store"),
    "StoreFuture": ("blockkv.store", "StoreFuture"),
    "TieredStore": ("blockkv.residency", "TieredStore"),
    "Watch": ("blockkv.store", "Watch"),
    "WipeReport": ("blockkv.store.wipe", "WipeReport"),
    "add_key_slot": ("blockkv.store.key_slot_changes", "add_key_slot"),
    "empty": ("blockkv.memory", "empty"),
    "format": ("blockkv.store", "format_device"),
    "grow": ("blockkv.store", "grow_device"),
    "key_slots": ("blockkv.store.key_slot_changes", "key_slots"),
    "open": ("blockkv.serving.opening", "open_any"),
    "prefix_keys": ("blockkv.prefix", "prefix_keys"),
    "remove_key_slot": ("blockkv.store.key_slot_changes", "remove_key_slot"),
    "wipe": ("blockkv.store.wipe", "wipe_device"),
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; commands that only look at metadata do without it.
    if name not in _LAZY:
        raise AttributeError(f"module 'blockkv' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
