"""The store: the only package that knows in which order things reach the device."""

from blockkv.store.array_open import open_any
from blockkv.store.array_store import ArrayStore
from blockkv.store.check import CheckReport
from blockkv.store.create import format_device, parse_size
from blockkv.store.enlarge import grow_device
from blockkv.store.extents import ChunkExtents, DeviceExtent
from blockkv.store.finding import Finding
from blockkv.store.growing import GrowingChunk
from blockkv.store.latencies import Latency
from blockkv.store.scrub import ScrubReport
from blockkv.store.store import ChunkInfo, Store, StoreFuture
from blockkv.store.watch import Change, Watch

__all__ = [
    "ArrayStore",
    "Change",
    "CheckReport",
    "ChunkExtents",
    "ChunkInfo",
    "DeviceExtent",
    "Finding",
    "GrowingChunk",
    "Latency",
    "ScrubReport",
    "Store",
    "StoreFuture",
    "Watch",
    "format_device",
    "grow_device",
    "open_any",
    "parse_size",
]
