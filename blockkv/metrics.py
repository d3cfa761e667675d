"""What a store does, for Prometheus: `store.stats()` under documented names, and an endpoint to scrape.

::

    from blockkv.metrics import serve_metrics

    with blockkv.open("/dev/nvme1n1") as store, serve_metrics(store, port=9105):
        ...                                  # curl http://127.0.0.1:9105/metrics

Needs the package prometheus-client (`pip install blockkv[metrics]`). Who has a registry already registers a
`StoreCollector` with it.

Invariants
  * every number of `stats()` is a metric, and has the value it has there: nothing is counted a second time;
  * a scrape reads memory only, and a store that was closed meanwhile gives no metrics instead of an error.

Names and meanings: docs/metrics.md.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import blockkv
from blockkv.errors import InvalidArgument
from blockkv.store.latencies import Latency

__all__ = ["COUNTERS", "GAUGES", "LATENCY", "StoreCollector", "metric_name", "serve_metrics"]

PREFIX = "blockkv_"
LATENCY = "blockkv_call_seconds"
"""A histogram, with the label `operation`: "get", "put" or "durable_put"."""

GAUGES = {
    "chunks": "Chunks that are stored.",
    "payload_bytes": "Their payload.",
    "record_bytes": "What their records take in a checkpoint.",
    "index_bytes": "Memory of the index.",
    "data_bytes": "Size of the data zone.",
    "free_bytes": "Free space.",
    "free_extents": "In how many pieces the free space is.",
    "largest_free_bytes": "The largest of those pieces.",
    "write_budget_left_bytes": "What puts may write now; below 0 they wait a debt out. Only with a budget.",
    "pending_free_bytes": "Space of deleted chunks whose delete is not durable yet.",
    "quarantined_bytes": "Space set aside after an error.",
    "growing_chunks": "Chunks that are growing.",
    "reserved_bytes": "Space of growing chunks that is not in the index.",
    "append_staging_bytes": "Memory of the buffers in which appends collect.",
    "arena_bytes": "Memory from blockkv.empty that is registered with the device.",
    "journal_used": "Share of the journal that a recovery would replay.",
    "scrub_sequence": "Log sequence up to which the scrub under way has verified; 0: none is under way.",
    "scrub_finished_at": "When the last scrub came to its end; 0: none has since open.",
    "members_present": "Members of the array that are there.",
    "owner_connected": "1: the owner of the served store is there.",
    "leased_chunks": "Chunks that this client has leased from the owner.",
    "clients": "Clients that are connected to the owner.",
    "clients_letting_go": "Clients that are gone and have requests that have not ended.",
    "client_leases": "Chunks that clients have leased.",
    "client_puts": "Chunks that clients are putting.",
}
"""Of `stats()`, what goes up and down."""

COUNTERS = {
    "put_chunks": "Chunks written.",
    "put_bytes": "Payload written.",
    "put_existing": "Puts of keys that were there.",
    "put_copied_bytes": "Payload gathered by a copy, because of the strides of tensors.",
    "put_refused": "Puts that the admission policy did not want.",
    "put_over_budget": "Puts that the write budget did not hold.",
    "put_device_error": "Puts that failed on a write.",
    "put_dropped": "Puts that were allowed to be dropped, or had a deadline, and came too late.",
    "append_bytes": "Bytes appended to growing chunks.",
    "append_read_bytes": "Bytes read from growing chunks.",
    "get_chunks": "Chunks read and verified: hits.",
    "get_bytes": "Payload read and verified.",
    "get_copied_bytes": "Payload scattered by a copy, because of the strides of tensors.",
    "get_misses": "Misses, for whatever reason.",
    "get_checksum_mismatch": "Misses: the bytes were not those that were put.",
    "get_device_error": "Misses: the device could not read them.",
    "get_transient_error": "Misses: the device could not read them just now.",
    "get_deadline": "Misses: the device had not got all requests by the deadline.",
    "get_device_lost": "Gets that failed because the namespace was gone.",
    "get_refused": "Gets that failed because the device did not accept the batch.",
    "get_parts": "Parts of chunks read and verified.",
    "get_part_bytes": "Bytes of those parts.",
    "part_read_bytes": "What had to be read for those parts: whole leaves.",
    "part_copied_bytes": "Bytes of parts that were copied.",
    "get_leaf_mismatch": "Parts of which a leaf was not what was put.",
    "chunks_deleted": "Chunks removed by a caller.",
    "chunks_evicted": "Chunks removed to make room.",
    "bytes_evicted": "Payload removed to make room.",
    "chunks_expired": "Chunks removed at the end of their time to live.",
    "chunks_dropped_damaged": "Chunks dropped because they did not verify.",
    "check_damaged": "Damaged chunks found by a check.",
    "scrub_chunks": "Chunks read by scrubs.",
    "scrub_bytes": "Payload read by scrubs.",
    "scrub_damaged": "Of those, chunks that did not verify.",
    "scrub_transient_error": "Of those, chunks that could not be read just now.",
    "scrub_passes": "Scrubs that came to their end.",
    "discarded_bytes": "Freed space that the device was told of.",
    "discard_failed": "Discards that failed.",
    "groups_committed": "Commit groups.",
    "journal_pages_written": "Pages of the journal that they took.",
    "checkpoints_written": "Checkpoints.",
    "checkpoint_s": "Time in checkpoints.",
    "members_lost": "Members of the array lost since open.",
    "get_member_lost": "Misses of chunks that went with a lost member.",
    "get_owner_lost": "Misses because the owner was gone or did not answer.",
    "lookup_owner_lost": "Lookups that missed for the same reason.",
    "clients_accepted": "Clients that connected to the owner since it began.",
    "device_read_bytes": "Bytes read from the device.",
    "device_write_bytes": "Bytes written to the device, metadata included.",
    "metadata_write_bytes": "Of those, metadata.",
    "data_write_bytes": "Of those, chunks of the usual priority, without a time to live.",
    "brief_write_bytes": "Of those, chunks with a time to live, or a priority below 0.",
    "kept_write_bytes": "Of those, chunks with a priority above 0.",
    "device_requests": "Requests to the device.",
    "direct_bytes": "Bytes moved from or to the memory of callers directly.",
    "bounced_bytes": "Bytes moved through staging.",
    "bounced_transfers": "Transfers that went through staging.",
    "fixed_requests": "Requests in registered memory.",
    "coalesced_requests": "Requests that carry neighbours together.",
    "isolated_requests": "Requests repeated one by one after one of such neighbours failed.",
    "short_transfers": "Requests that were answered in part.",
    "resubmitted": "Requests issued again.",
    "expired_requests": "Requests never issued, because of a deadline.",
    "ring_enters": "System calls to submit and wait.",
    "flushes": "Flushes of the device.",
    "discards": "Discards.",
    "hashed_bytes": "Bytes put through the checksum.",
}
"""Of `stats()`, what only grows while a store is open."""

UNITS = {
    "checkpoint_s": "checkpoint_seconds",
    "journal_used": "journal_used_ratio",
    "scrub_finished_at": "scrub_finished_timestamp_seconds",
}
"""Names that Prometheus' rules want otherwise: base units, written out."""


def metric_name(name: str) -> str:
    """The metric of a number of `stats()`: "get_bytes" is "blockkv_get_bytes_total"."""
    return PREFIX + UNITS.get(name, name) + ("" if name in GAUGES else "_total")


class Measured(Protocol):
    """A store, or the owner of one that is served."""

    @property
    def closed(self) -> bool: ...

    @property
    def read_only(self) -> bool: ...

    def stats(self) -> dict[str, Any]: ...

    def info(self) -> dict[str, Any]: ...

    def latencies(self) -> dict[str, Latency]: ...


class StoreCollector:
    """A collector for a prometheus_client registry, of one store. Keeps nothing but the store."""

    def __init__(self, store: Measured, /, **labels: str) -> None:
        """`labels` go with every metric, beside `store`, the store's path; give those that tell stores apart.

        Raises InvalidArgument for a label that is taken.
        """
        if taken := labels.keys() & {"store"}:
            raise InvalidArgument(f"the label {taken.pop()!r} says which store it is; use another name")
        self._store = store
        info = store.info()
        paths = info["path"] if isinstance(info["path"], str) else ",".join(info["path"])
        self._labels = {"store": paths, **labels}
        self._facts = {
            "version": blockkv.__version__,
            "uuid": str(info.get("uuid", "")),
            "label": str(info.get("label", "")),
            "engine": str(info.get("engine", "")),
        }

    def collect(self) -> Iterator[Any]:
        """The metrics as of now; none of a closed store."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        if self._store.closed:
            return
        stats, read_only, latencies = self._store.stats(), self._store.read_only, self._store.latencies()
        names, values = list(self._labels), list(self._labels.values())
        which = [*names, *self._facts]
        facts = GaugeMetricFamily(f"{PREFIX}info", "Which store this is; always 1.", labels=which)
        facts.add_metric([*values, *self._facts.values()], 1)
        yield facts
        mode = GaugeMetricFamily(f"{PREFIX}read_only", "1: it takes no more puts.", labels=names)
        mode.add_metric(values, int(read_only))
        yield mode
        calls = HistogramMetricFamily(LATENCY, "How long calls take.", labels=[*names, "operation"])
        for operation, latency in latencies.items():
            bounds = [*(str(bound / 1e6) for bound in latency.upper_bounds_us()), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(latency.counts), strict=True))
            calls.add_metric([*values, operation], buckets, latency.total_s)
        yield calls
        for kind, meanings in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name in meanings.keys() & stats.keys():
                family = kind(metric_name(name), meanings[name], labels=names)
                family.add_metric(values, stats[name])
                yield family


@contextlib.contextmanager
def serve_metrics(store: Measured, port: int, address: str = "127.0.0.1", **labels: str) -> Iterator[int]:
    """Answer scrapes at http://address:port/metrics while the context lasts; gives the port.

    Port 0 takes a free one. Whoever reaches the address reads the numbers, of which none tells a key or a
    byte of payload. Raises InvalidArgument where prometheus-client is missing, OSError where the port is
    taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise InvalidArgument("metrics need prometheus-client: pip install 'blockkv[metrics]'") from error
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, **labels))
    server, thread = start_http_server(port, address, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
