"""A secondary tier for vLLM's KV offloading: what leaves the tier in memory is kept on a blockkv device.

::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "BlockKVTier", "module_path": "blockkv.connectors.vllm",
                             "device": "/dev/nvme1n1"}]}}'

See docs/connectors/vllm.md. vLLM 0.28 to 0.33.

Invariants
  * no method waits for the device: look-ups are answered from the store's index (where another process has
    it, they are RETRY until it has answered), all else goes to the background. `drain_jobs` and `shutdown`
    wait, as they are meant to;
  * each job is reported exactly once, and from then on nothing here touches its rows of the primary tier;
  * between a hit and its load the chunk is pinned, so that it is not evicted; the pin is given back after the
    load, when the request has finished, or after `lease_s`;
  * a chunk that could not be loaded is a miss from then on, until it has been written anew: the scheduler
    would ask for it for ever;
  * keys begin with the name of a `Family` of everything vLLM leaves out of them, see `family_of`.

Not here: which chunks leave (the store decides), and what a chunk is (vLLM does; a row is bytes here).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadKey,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

import blockkv
from blockkv.connectors.jobs import BackgroundJobs, Outcome
from blockkv.connectors.leases import Found, Lease, Leases
from blockkv.connectors.memory import tensor_of
from blockkv.connectors.opening import open_store
from blockkv.connectors.weights import fingerprint, weight_files
from blockkv.errors import BlockKVError, DeviceError, InvalidArgument

__all__ = ["BlockKVTier", "family_of"]

FORMAT_VERSION = 1
"""Of what is stored under a key: one row of the primary tier, as it is."""
XXHASH_KEY_BYTES = 20
"""A 16-byte hash and the group: prefix hashes that start from a random number, unless PYTHONHASHSEED is set.
vllm/v1/core/kv_cache_utils.py."""
SHARE_OF_PRIMARY = 4
"""Stores may hold on to one in so many rows of the primary tier, where `max_store_bytes` says nothing."""
FINGERPRINT_PATIENCE_S = 10.0
"""How long the start waits for the fingerprint of the weights; it goes on in the background."""
SHUTDOWN_PATIENCE_S = 5.0
"""How long stores that wait are given when the engine ends."""
SWEEP_EVERY_S = 1.0
"""How often leases are looked through and the store is asked for its counters."""
REPEAT_MESSAGE_S = 60.0
MOST_ERRANDS = 256
EVENTS_AT_A_TIME = 512
"""KV events that one step of the scheduler makes of what has changed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """What may be said of the tier in `secondary_tiers`, besides `type`, `module_path` and `backpressure`."""

    device: str | Sequence[str]
    """Path of a device, of several that are one array, or of the socket of `blockkv serve`. `{dp}` in it is
    replaced by the index of the data parallel replica: each needs a device of its own."""
    format: bool = False
    """Format a device that is blank. One that holds anything is never formatted."""
    weights: str = ""
    """Fingerprint of the weights. Computed from the files where the model is a path on this machine."""
    salt: str = ""
    """Whatever else the results depend on, or must be kept apart by."""
    weights_change: bool = False
    """The weights are replaced while the engine runs: what was stored before a reset of the cache is not used
    after it."""
    load_deadline_s: float = 10.0
    """A load that has taken so long has failed."""
    store_deadline_s: float = 60.0
    """A store that has not begun after so long is dropped."""
    direct: bool = False
    """Loads go straight to the primary tier's memory. It is cheaper, but a load that the device has got ends
    only when the device answers."""
    lease_s: float = 60.0
    """How long a chunk that was hit, and is not loaded, is kept from eviction."""
    max_store_bytes: int = 0
    """Stores beyond so much waiting are dropped. 0: a quarter of the primary tier, at most 1 GiB."""
    load_threads: int = 2
    store_threads: int = 2
    enable_kv_events: bool = False
    """Publish what is stored and removed as KV events, where vLLM publishes any."""
    locality: str | None = None
    """LOCAL or REMOTE, for those events and for requests that choose their tiers."""
    store_options: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords of `blockkv.open`, such as `{"discard": true}`."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TierOptions:
        """Raises InvalidArgument for an option that is unknown, missing or of the wrong kind."""
        known = {one.name: one for one in dataclasses.fields(cls)}
        if unknown := sorted(given.keys() - known.keys()):
            raise InvalidArgument(
                f"BlockKVTier has no option {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )
        if not given.get("device"):
            raise InvalidArgument(
                'BlockKVTier needs "device": a path, a list of them, or a socket of blockkv serve'
            )
        paths = [given["device"]] if isinstance(given["device"], str) else given["device"]
        if not (isinstance(paths, Sequence) and all(isinstance(one, str) for one in paths)):
            raise InvalidArgument(f"device is {given['device']!r}; use a path, or a list of paths")
        plain = cls(device="-")
        for name in given.keys() - {"device", "locality"}:
            value, default = given[name], getattr(plain, name)
            kinds = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, kinds) or isinstance(value, bool) is not isinstance(default, bool):
                raise InvalidArgument(f"{name} is {value!r}; use a value like {default!r}")
        options = cls(**given)
        for name in ("load_deadline_s", "store_deadline_s", "lease_s"):
            if getattr(options, name) <= 0:
                raise InvalidArgument(f"{name} is {getattr(options, name)}; use seconds above 0")
        if options.locality not in (None, *Locality.__members__):
            raise InvalidArgument(f"locality is {options.locality!r}; use LOCAL or REMOTE")
        return options

    def paths(self, data_parallel_index: int) -> list[str]:
        """The device or devices, for one data parallel replica."""
        given = [self.device] if isinstance(self.device, str) else list(self.device)
        return [one.replace("{dp}", str(data_parallel_index)) for one in given]


def family_of(config: Any, row_bytes: int, weights: str, salt: str = "") -> blockkv.Family:
    """Everything but the tokens that a row depends on, as far as vLLM tells a tier.

    `config` is vLLM's OffloadingConfig. In the family are the model's name, its weights, the dtype of the
    cache, the kind of machine, vLLM's minor version, the layout of pages and rows, block and chunk sizes, all
    groups with their layers and windows, and all parallel sizes and ranks but those of data parallelism.
    """
    parallel = config.parallel
    layout = {
        "format": FORMAT_VERSION,
        "engine": "vllm " + ".".join(vllm.__version__.split(".")[:2]),
        "platform": current_platform.device_type,
        "row_bytes": row_bytes,
        "worker_bytes_per_block": config.worker_kv_bytes_per_block,
        "kv_cache_layout": getattr(config, "kv_cache_layout", None) or os.environ.get("VLLM_KV_CACHE_LAYOUT"),
        "canonical_layout": config.canonical_layout,
        "replicated_layout": config.replicated_layout,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [dataclasses.asdict(one) for one in config.groups],
        "parallel": {
            name: getattr(parallel, name)
            for name in ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        },
    }
    return blockkv.Family(
        model=config.model.name,
        weights=weights,
        dtype=config.model.dtype,
        layout=json.dumps(layout, sort_keys=True),
        tensor_ranks=parallel.tp_size,
        pipeline_ranks=parallel.pp_size,
        salt=salt,
    )


@dataclass(slots=True)
class _Job:
    keys: list[Any]
    is_load: bool
    leases: Sequence[Lease] = ()
    """Of a load, those that were there when it began."""


COUNTED = {
    "loads_late": "Loads that were not done within load_deadline_s.",
    "load_misses": "Chunks that were asked for and could not be loaded.",
    "stores_late": "Store jobs of which a part was dropped: it had not begun within store_deadline_s.",
    "stores_dropped": "Chunks not stored, because too much was waiting or the device stalled.",
    "stores_failed": "Chunks that could not be stored.",
    "lookups_refused": "Look-ups that missed because the device stalled or the weights were not known yet.",
    "rewritten": "Chunks that could not be loaded once and were written anew.",
    "leases_expired": "Chunks that were hit and neither loaded nor given up within lease_s.",
}
STORE_COUNTED = {
    "get_checksum_mismatch": "Chunks that were damaged: their bytes were not those that were stored.",
    "get_device_error": "Chunks that the device could not read.",
    "get_device_lost": "Reads of a device that was gone.",
    "put_device_error": "Chunks that the device could not write.",
    "chunks_evicted": "Chunks that left to make room.",
    "chunks_dropped_damaged": "Chunks dropped because they were damaged.",
}
STORE_GAUGES = {
    "chunks": "Chunks on the device, of all that use it.",
    "payload_bytes": "Their size.",
    "data_bytes": "Size of the device's data zone.",
    "free_bytes": "Free space of it.",
}
GAUGES = {
    "leased": "Chunks pinned between a hit and its load.",
    "failed": "Chunks that are a miss until they are written anew.",
    "stalled": "1 while the device holds something that is past its deadline.",
}
PREFIX = "vllm:kv_offload_blockkv_"
ANSWERS = {Found.YES: LookupResult.HIT, Found.NO: LookupResult.MISS, Found.LATER: LookupResult.RETRY}


class BlockKVTier(SecondaryTierManager):
    """See the module, and `TierOptions` for what can be configured."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Called by vLLM. Raises BlockKVError where the tier could not do its work, saying what to change."""
        detector = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **detector)
        self._options = chosen = TierOptions.of(options)
        self._config = offloading_spec.config
        self.locality = Locality(chosen.locality) if chosen.locality else None
        if not primary_kv_view.nbytes:
            raise InvalidArgument("cpu_bytes_to_use has no room for a single chunk; make it larger")
        self._row_bytes = len(primary_kv_view[:1].cast("B"))
        self._rows = tensor_of(primary_kv_view).view(-1, self._row_bytes)

        self._jobs_in: dict[int, _Job] = {}
        self._refused: list[JobResult] = []
        self._failed: set[Any] = set()
        self._sweep_due_s = 0.0
        self._counters = dict.fromkeys(COUNTED, 0)
        self._reported: dict[str, int] = {}
        self._store_stats: Mapping[str, Any] = {}
        self._messages: dict[str, float] = {}
        self._changes: deque[blockkv.Change] = deque()

        paths = chosen.paths(self._config.parallel.data_parallel_index)
        self._device_label = ",".join(paths)
        self._resets = 0
        self._shut = False
        self._weights = chosen.weights
        self._family = ""
        """What keys begin with; nothing is found or stored as long as it is empty."""
        files = [] if chosen.weights else self._weight_files()
        self._name_family()
        self._store = open_store(paths, format=chosen.format, **chosen.store_options)
        self._held = contextlib.ExitStack()
        self._registered = False
        try:
            self._register()
            self._watch: blockkv.Watch | None = None
            if chosen.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
                if self._store.is_client:
                    raise InvalidArgument(
                        "enable_kv_events: only the process that owns the store is told what comes and goes"
                    )
                self._watch = self._held.enter_context(self._store.watch())
            self._leases = Leases(self._store, chosen.lease_s)
            self._errands = _Errands(self._messages_once)
            self._jobs = BackgroundJobs(
                self._store,
                load_deadline_s=chosen.load_deadline_s,
                store_deadline_s=chosen.store_deadline_s,
                staged=not chosen.direct,
                load_threads=chosen.load_threads,
                store_threads=chosen.store_threads,
                max_store_bytes=chosen.max_store_bytes
                or max(self._row_bytes, min(1 << 30, self._rows.nbytes // SHARE_OF_PRIMARY)),
            )
        except BaseException:
            self._held.close()
            self._store.close()
            raise
        if not self._weights:
            identified = self._errands.run("fingerprint", lambda: self._identify(files))
            if not identified.wait(FINGERPRINT_PATIENCE_S):
                log.info(
                    "blockkv: still reading the weights for their fingerprint; until then nothing is cached"
                )

    # -- what is called while the scheduler waits --------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """No preference: chunks are offered as they come."""
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """HIT, and the chunk stays for a while; or MISS. From memory."""
        family = self._family
        if not family or self._jobs.stalled:
            self._counters["lookups_refused"] += 1
            return LookupResult.MISS
        if key in self._failed:
            return LookupResult.MISS
        try:
            return ANSWERS[self._leases.find(f"{family}/{key.hex()}", req_context.req_id)]
        except BlockKVError as error:
            self._messages_once("look-ups fail", error)
            return LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        """Fill the rows in the background."""
        keys, rows = self._take(job_metadata)
        names = [f"{self._family}/{key.hex()}" for key in keys]
        leases = self._leases.begin_load(names)
        self._jobs_in[job_metadata.job_id] = _Job(keys, is_load=True, leases=leases)
        self._jobs.submit_load(job_metadata.job_id, names, rows)

    def submit_store(self, job_metadata: Any) -> None:
        """Write the rows in the background; those that are there already are not written again."""
        keys, rows = self._take(job_metadata)
        if not self._family or self._jobs.stalled:
            self._counters["stores_dropped"] += len(keys)
            self._refused.append(_result(job_id=job_metadata.job_id, success=False, transfer_bytes=0))
            return
        if keys and len(keys[0]) == XXHASH_KEY_BYTES and not os.environ.get("PYTHONHASHSEED"):
            self._messages_once(
                "nothing will be found after a restart",
                "the prefix hashes of --prefix-caching-hash-algo xxhash* begin with a random number; "
                "set PYTHONHASHSEED, or use sha256",
            )
        names = [f"{self._family}/{key.hex()}" for key in keys]
        rewrite = [name for key, name in zip(keys, names, strict=True) if key in self._failed]
        self._jobs_in[job_metadata.job_id] = _Job(keys, is_load=False)
        self._jobs.submit_store(job_metadata.job_id, names, rows, rewrite=rewrite)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """All that have ended since the last call."""
        results, self._refused = self._refused, []
        for outcome in self._jobs.finished():
            job = self._jobs_in.pop(outcome.job)
            done = [key for key, one in zip(job.keys, outcome.done, strict=True) if one]
            if job.is_load:
                self._load_ended(job, outcome)
            else:
                self._store_ended(job, outcome, done)
            results.append(
                _result(
                    job_id=outcome.job,
                    success=outcome.all_done,
                    successful_keys=tuple(done) if done and job.is_load and not outcome.all_done else None,
                    transfer_time=outcome.duration_s,
                    transfer_bytes=outcome.bytes_moved,
                )
            )
        return results

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Count a use of the chunks, soon."""
        if self._family:
            names = [f"{self._family}/{key.hex()}" for key in keys]
            self._errands.run("touch", lambda: self._touch(names))

    def on_request_finished(self, req_context: Any) -> None:
        """Give back what was hit for it and is not being loaded."""
        self._leases.end_request(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Once in a while: give back old leases, look at the store's counters."""
        now_s = time.monotonic()
        if now_s < self._sweep_due_s:
            return
        self._sweep_due_s = now_s + SWEEP_EVERY_S
        self._leases.sweep()
        self._counters["leases_expired"] = self._leases.expired
        self._errands.run("stats", self._look_at_store)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What was stored and removed, by whomever; at first everything that was there. A few at a time."""
        begins, told = f"{self._family}/", 0
        while self._family and self._changes and told < EVENTS_AT_A_TIME:
            stored, keys = self._changes[0].stored, []
            while self._changes and self._changes[0].stored is stored and told < EVENTS_AT_A_TIME:
                name = self._changes.popleft().key
                told += 1
                if isinstance(name, str) and name.startswith(begins):
                    keys.append(OffloadKey(bytes.fromhex(name[len(begins) :])))
            if keys:
                yield _with_known(
                    OffloadingEvent,
                    keys=keys,
                    medium=self.medium,
                    removed=not stored,
                    locality=self.locality,
                    ownership="blockkv",
                    removal_expected=True,
                )

    # -- waiting on purpose ------------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Wait until every job has ended: called to reset the primary tier."""
        self._jobs.drain()
        if self._options.weights_change:
            self._leases.release_all()
            self._failed.clear()
            self._resets += 1
            self._name_family()

    def shutdown(self) -> None:
        """Give what waits a few seconds to be stored, end the rest and close the store.

        Raises RuntimeError where the device does not answer: the primary tier's memory must stay then.
        """
        if self._shut:
            return
        if not self._jobs.stalled:
            self._jobs.drain(SHUTDOWN_PATIENCE_S)
        if not self._jobs.close():
            raise RuntimeError(
                f"blockkv: {self._device_label} does not answer, and may still write to memory"
            )
        self._errands.close()
        self._leases.close()
        self._shut = True
        self._held.close()
        self._rows = torch.empty(0)
        self._store.close()

    # -- metrics -----------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Counters and gauges of this tier, one series for each device."""
        definitions: dict[str, Any] = {}
        for names, kind in (
            (COUNTED | STORE_COUNTED, OffloadingCounterMetadata),
            (STORE_GAUGES | GAUGES, OffloadingGaugeMetadata),
        ):
            for name, text in names.items():
                definitions[PREFIX + name] = kind(documentation=text, labelnames=("device",))
        return definitions

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What has changed since the last call, and the present state."""
        stats = OffloadingConnectorStats()
        label = (self._device_label,)
        store_stats = self._store_stats
        jobs = self._jobs.counters
        counted = {name: value + jobs.get(name, 0) for name, value in self._counters.items()}
        counted |= {name: store_stats.get(name, 0) for name in STORE_COUNTED}
        for name, value in counted.items():
            if value != self._reported.get(name, 0):
                stats.increase_counter(PREFIX + name, value - self._reported.get(name, 0), label)
                self._reported[name] = value
        gauges = {name: store_stats[name] for name in STORE_GAUGES if name in store_stats}
        gauges |= {
            "leased": len(self._leases),
            "failed": len(self._failed),
            "stalled": int(self._jobs.stalled),
        }
        for name, value in gauges.items():
            stats.set_gauge(PREFIX + name, value, label)
        return stats

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Labels of vLLM's info metric, from 0.33 on."""
        return ("blockkv_device", "blockkv_family", "blockkv_engine", "blockkv_direct", "blockkv_registered")

    def config_info(self) -> Mapping[str, str | int | float | bool]:
        """Where chunks go and what their keys begin with."""
        engine = self._store.info().get("engine", "")
        values = (self._device_label, self._family, engine, self._options.direct, self._registered)
        return dict(zip(self.config_info_keys({}), values, strict=True))

    # -- inside ------------------------------------------------------------------------------------------

    def _weight_files(self) -> list[Any]:
        name = self._config.model.name
        if not os.path.exists(name):  # noqa: PTH110 - it may be no path at all
            raise InvalidArgument(
                f"BlockKVTier: the model {name} is not a path, so its weights have no fingerprint here: "
                'give "weights" (the commit that they came with), or the path of a downloaded model'
            )
        return weight_files(name)

    def _identify(self, files: Sequence[Any]) -> None:
        self._weights = fingerprint(files, self._store)
        self._name_family()

    def _name_family(self) -> None:
        """Nothing is found from now on but what has the present configuration."""
        if self._weights:
            salt = f"{self._options.salt}/{os.urandom(16).hex()}" if self._resets else self._options.salt
            self._family = family_of(self._config, self._row_bytes, self._weights, salt).name

    def _register(self) -> None:
        try:
            self._registered = self._held.enter_context(self._store.register(self._rows))
        except DeviceError as error:
            log.warning("blockkv: the primary tier is not registered, which costs some CPU: %s", error)

    def _take(self, job_metadata: Any) -> tuple[list[Any], list[torch.Tensor]]:
        """Its keys, and the rows that they are for."""
        rows = getattr(job_metadata, "chunk_ids", None)
        if rows is None:
            rows = job_metadata.block_ids  # vLLM 0.28
        return list(job_metadata.keys), [self._rows[int(one)] for one in rows]

    def _load_ended(self, job: _Job, outcome: Outcome) -> None:
        self._failed.update(key for key, landed in zip(job.keys, outcome.done, strict=True) if not landed)
        self._leases.end_load(job.leases)
        if not outcome.all_done:
            self._messages_once(
                "loads fail, what they were for is computed again",
                outcome.reason or "the chunks are damaged or gone",
            )

    def _store_ended(self, job: _Job, outcome: Outcome, done: Sequence[Any]) -> None:
        self._counters["rewritten"] += sum(key in self._failed for key in done)
        self._failed.difference_update(done)
        if not outcome.all_done:
            self._counters["stores_failed"] += len(job.keys) - len(done)
            self._messages_once("stores fail or are dropped", outcome.reason or "refused")

    def _touch(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.touch(name)

    def _look_at_store(self) -> None:
        self._store_stats = self._store.stats()
        if self._watch is not None and len(self._changes) < EVENTS_AT_A_TIME:
            self._changes.extend(self._watch.take())

    def _messages_once(self, what: str, why: object) -> None:
        """To the log, but not over and over."""
        now_s = time.monotonic()
        if now_s >= self._messages.get(what, 0):
            self._messages[what] = now_s + REPEAT_MESSAGE_S
            log.warning("blockkv %s: %s: %s", self._device_label, what, why)


class _Errands:
    """One thread for what is short, but not short enough for the scheduler."""

    def __init__(self, complain: Any) -> None:
        self._complain = complain
        self._queue: queue.SimpleQueue[tuple[str, Any, threading.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry_out, name="blockkv-errands", daemon=True)
        self._thread.start()

    def run(self, name: str, errand: Any) -> threading.Event:
        """Do it soon; the event says when it is done. Left out where too many wait: none has to be."""
        done = threading.Event()
        if self._queue.qsize() < MOST_ERRANDS:
            self._queue.put((name, errand, done))
        return done

    def close(self, timeout_s: float = 10) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _carry_out(self) -> None:
        while (taken := self._queue.get()) is not None:
            name, errand, done = taken
            try:
                errand()
            except Exception as error:
                self._complain(f"{name} failed", error)
            done.set()


def _result(**values: Any) -> JobResult:
    return _with_known(JobResult, **values)


def _with_known(kind: Any, **values: Any) -> Any:
    """One of vLLM's records, with those of the values that this vLLM knows."""
    known = kind.__dataclass_fields__
    return kind(**{name: value for name, value in values.items() if name in known})
