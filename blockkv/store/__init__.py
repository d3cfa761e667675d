"""The store: the only package that knows in which order things reach the device."""

from blockkv.store.create import format_device, parse_size
from blockkv.store.store import CheckReport, ChunkInfo, Store, StoreFuture, open_store

__all__ = ["CheckReport", "ChunkInfo", "Store", "StoreFuture", "format_device", "open_store", "parse_size"]
