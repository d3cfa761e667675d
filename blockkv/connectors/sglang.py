"""SGLang's HiCache on a store: pages of the host pools, by SGLang's own hashes, under keys that are complete.

::

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "blockkv", "module_path": "blockkv.connectors.sglang", "class_name": "BlockKVHiCache",
      "interface_v1": 1, "device": "/dev/nvme1n1", "weights": "0e9e39f"}'

SGLang's key of a page is a hash over its tokens and those before. Whatever else the bytes depend on makes a
`blockkv.Family` for each host pool: model, weights, dtype, layout and geometry of the pool, and which share
of heads, layers or tokens this rank holds. The pools are registered with the device, and read and written
where they are; a page is one chunk, of as many tensors as the pool's layout has pieces a page.

Invariants
  * True is only answered for a page whose bytes are in the pool, verified, or in the store;
  * nothing that happens to the device is an exception to SGLang: it is a miss, or a page that was not kept;
  * a configuration that could mix caches up, or an option that is not known, is an exception at the start.

Not here: which pages are kept and for how long (SGLang's write policy, the store's eviction). All calls may
wait for the device, as SGLang's storage threads expect.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

import blockkv
from blockkv.connectors.memory import tensor_at
from blockkv.connectors.opening import open_store
from blockkv.connectors.weights import fingerprint, weight_files
from blockkv.errors import BatchError, BlockKVError, InvalidArgument

__all__ = ["BlockKVHiCache"]

FORMAT = "sglang 1"
"""Counts up when what is stored under a key changes."""
OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}
OPTIONS: dict[str, Any] = {
    "device": None,
    "format": False,
    "average_chunk": "1MiB",
    "weights": None,
    "model": None,
    "kv_cache_dtype": None,
    "durable": False,
    "load_deadline_s": 10.0,
    "store_deadline_s": None,
    "register": True,
    "eviction": None,
    "admission": None,
}
"""Ours, with what they are where they are not given."""
GEOMETRY = (
    *("layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "num_mamba_layers", "conv_state_shapes", "temporal_state_shape"),
    *("temporal_dtype",),
)
"""What the pools of SGLang have of their shape, each kind some of it."""
LONGEST_DEADLINE_S = 3600
"""Of a get or a put of the store."""
ANCHOR = str(PoolName.KV)
MARKER = torch.zeros(1, dtype=torch.uint8)
"""Stands for a page of a pool that holds nothing itself, and only says which pages the other pools have."""

log = logging.getLogger(__name__)

Page = list[torch.Tensor] | torch.Tensor


class BlockKVHiCache(HiCacheStorage):
    """A dynamic storage backend for HiCache: interface v0, v1 (`interface_v1`) and v2 for hybrid pools.

    Options, in the extra configuration: see docs/connectors/sglang.md. Raises what opening the device raises,
    and InvalidArgument.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """As SGLang's factory calls it; `kwargs` is what it was given besides, and unused."""
        del kwargs
        given = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._options = _options(given)
        self._zero_copy = bool(given.get("interface_v1", 0))
        self._model = self._options["model"] or storage_config.model_name
        if not self._model:
            raise InvalidArgument("SGLang says no model name; give the option model")
        self._pools: dict[str, _Pool] = {}
        self._registered = contextlib.ExitStack()
        self._trouble: set[str] = set()
        self._lock = threading.Lock()
        self._metrics: dict[str, list[float]] = {}
        self._forget_metrics()
        self._weights = self._options["weights"]
        files = [] if self._weights else _weights_of(storage_config.model_name or "")
        self._store = _open(self._options, storage_config)
        if files:
            try:
                self._weights = fingerprint(files, remembered_in=self._store)
            except BaseException:
                self._store.close()
                raise

    # -- pools -----------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the keys and values, which `exists` and the interfaces v0 and v1 are about."""
        super().register_mem_pool_host(mem_pool_host)
        self._add_pool(ANCHOR, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool, by name, for the interface v2."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != ANCHOR:
            self._add_pool(str(host_pool_name), host_pool)

    def _add_pool(self, name: str, host_pool: Any) -> None:
        zero_copy = self._zero_copy or name != ANCHOR
        pool = _Pool(name, host_pool, self._family, zero_copy)
        self._pools[name] = pool
        if self._options["register"]:
            for memory in pool.memory():
                try:
                    self._registered.enter_context(self._store.register(memory))
                except BlockKVError as error:
                    self._tell(
                        "the host pool is not registered with the device, and each request dearer", error
                    )
        log.info("pool %s: %s", name, pool.family)

    def _family(self, name: str, host_pool: Any, layout: str) -> blockkv.Family:
        config = self._config
        dtype = str(host_pool.dtype).removeprefix("torch.")
        if host_pool.dtype == torch.uint8 and not self._options["kv_cache_dtype"]:
            raise InvalidArgument(
                f"the pool {name} holds uint8, which may be fp8_e4m3, fp8_e5m2 or others: "
                "give the option kv_cache_dtype, as SGLang was given it"
            )
        replicated = config.is_mla_model and not _is_sharded(host_pool)
        shares = (
            f"cp {getattr(config, 'attn_cp_rank', 0)} of {getattr(config, 'attn_cp_size', 1)}, "
            f"dcp {getattr(config, 'dcp_rank', 0)} of {getattr(config, 'dcp_size', 1)}"
        )
        return blockkv.Family(
            model=str(self._model),
            weights=self._weights,
            dtype=f"{dtype}, {self._options['kv_cache_dtype'] or dtype}",
            layout=f"{FORMAT}, {layout}, {shares}",
            tensor_rank=0 if replicated else config.tp_rank,
            tensor_ranks=1 if replicated else config.tp_size,
            pipeline_rank=config.pp_rank,
            pipeline_ranks=config.pp_size,
        )

    # -- v0: SGLang copies between the pool and pages of its own ---------------------------------------

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Fill `target_location`, a page, or make one; None for a miss."""
        found = self.batch_get([key], None if target_location is None else [target_location])
        return found[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: list[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """`get` for many pages."""
        pool = self._anchor()
        if target_locations is None:
            return [page if isinstance(page, torch.Tensor) else None for page in self._read(pool.keys(keys))]
        pages: list[Page] = [page if page.numel() else MARKER.clone() for page in target_locations]
        filled = self._timed("prefetch", keys, pages, lambda: self._read(pool.keys(keys), pages))
        return [page if full is True else None for page, full in zip(target_locations, filled, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Put a page; True when it is in the store now."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """`set` for many pages; True when all are in the store now."""
        pages: list[Page] = [value if value.numel() else MARKER for value in values or []]
        if len(pages) != len(keys):
            raise InvalidArgument(f"{len(keys)} keys but {len(pages)} pages")
        return all(self._timed("backup", keys, pages, lambda: self._write(self._anchor().keys(keys), pages)))

    # -- v1: where the pages are -----------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Fill the pages at `host_indices` of the pool; for each key whether it was."""
        return self._get_pages([(self._anchor(), keys, host_indices)])[0]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Put the pages at `host_indices` of the pool; for each key whether it is in the store now."""
        return self._set_pages([(self._anchor(), keys, host_indices)])[0]

    def exists(self, key: str) -> bool:
        """Whether the page is in the store."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the pages, from the first on, are in the store."""
        try:
            return self._store.lookup(self._anchor().keys(keys))
        except BlockKVError as error:
            self._tell("nothing is found", error)
            return 0

    # -- v2: several pools -----------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that every pool can go on from, each by its hit policy."""
        pages = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        try:
            for transfer in pool_transfers or []:
                if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                    hits[transfer.name] = self._covered_by_groups(transfer)
                    continue
                able = self._restorable(transfer, keys[:pages])
                if able:
                    hits[transfer.name] = max(able)
                restorable &= able
        except BlockKVError as error:
            self._tell("nothing is found", error)
            return PoolTransferResult.empty()
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fill the pages of each transfer; for each pool, for each key whether it was."""
        return self._transfer(transfers, self._get_pages)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Put the pages of each transfer; for each pool, for each key whether it is in the store now."""
        return self._transfer(transfers, self._set_pages)

    # -- looking after ---------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Delete what this rank and this model stored, and nothing else."""
        prefixes = tuple(f"{pool.family.name}/" for pool in self._pools.values())
        try:
            own = [key for key in self._store.keys() if str(key).startswith(prefixes)]  # noqa: SIM118
            for key in own:
                self._store.delete(key)
            self._store.commit()
        except BlockKVError as error:
            self._tell("the storage was not cleared", error)
            return False
        return True

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call, pages and GB/s of each batch; None if not enabled."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            metrics = StorageMetrics(**self._metrics)
            self._forget_metrics()
        return metrics

    def close(self) -> None:
        """Close the store; every page is a miss afterwards. Twice is fine."""
        for end in (self._registered.close, self._store.close):
            try:
                end()
            except BlockKVError as error:
                self._tell("the store was not closed in order", error)

    # -- inside ----------------------------------------------------------------------------------------

    def _anchor(self) -> _Pool:
        if ANCHOR not in self._pools:
            raise InvalidArgument("no host pool was registered yet: whose pages these are is not known")
        return self._pools[ANCHOR]

    def _restorable(self, transfer: PoolTransfer, keys: Sequence[str]) -> AbstractSet[int]:
        """The lengths of prefixes of `keys` that a pool can go on from."""
        pool = self._pools.get(str(transfer.name))
        if pool is None:
            return set()
        there = [self._store.contains(key) for key in pool.keys(keys)]
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, (there.index(False) if False in there else len(there)) + 1))
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            needed = max(1, len(transfer.keys or ()))
            able, run = set(), 0
            for length, is_there in enumerate(there, 1):
                run = run + 1 if is_there else 0
                if run >= min(needed, length):
                    able.add(length)
            return able
        raise InvalidArgument(f"the hit policy {transfer.hit_policy} is not known")

    def _covered_by_groups(self, transfer: PoolTransfer) -> int:
        """How many pages the leading groups of keys cover of which every key is there."""
        pool, size = self._pools.get(str(transfer.name)), transfer.group_pages
        keys = transfer.keys or []
        if pool is None or size < 1:
            return 0
        groups = 0
        for first in range(0, len(keys) - len(keys) % size, size):
            if not all(map(self._store.contains, pool.keys(keys[first : first + size]))):
                break
            groups += 1
        return groups * int(transfer.block_pages)

    def _transfer(self, transfers: Sequence[PoolTransfer], carry_out: Any) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        wanted: list[tuple[str, _Pool, list[str], torch.Tensor]] = []
        for transfer in transfers:
            keys = list(transfer.keys or [])
            results[transfer.name] = [False] * len(keys)
            pool = self._pools.get(str(transfer.name))
            if pool is None or not pool.takes(keys, transfer.host_indices):
                self._tell(
                    f"nothing is moved: {transfer.name} is not registered, or its keys are not its pages"
                )
            elif keys:
                wanted.append((transfer.name, pool, keys, transfer.host_indices))
        if wanted:
            done = carry_out([(pool, keys, indices) for _, pool, keys, indices in wanted])
            results |= {name: found for (name, *_), found in zip(wanted, done, strict=True)}
        return results

    def _get_pages(self, wanted: Sequence[tuple[_Pool, list[str], torch.Tensor]]) -> list[list[bool]]:
        """Read pages into pools, all in one call."""
        keys, pages, counts = _gather(wanted, for_reading=True)
        filled = self._timed("prefetch", keys, pages, lambda: self._read(keys, pages))
        results, first = [], 0
        for (pool, _, indices), count in zip(wanted, counts, strict=True):
            found = [one is True for one in filled[first : first + count]]
            pool.arrived(indices, pages[first : first + count], found)
            results.append(found)
            first += count
        return results

    def _set_pages(self, wanted: Sequence[tuple[_Pool, list[str], torch.Tensor]]) -> list[list[bool]]:
        """Put pages of pools, all in one call."""
        keys, pages, counts = _gather(wanted, for_reading=False)
        kept = self._timed("backup", keys, pages, lambda: self._write(keys, pages))
        results, first = [], 0
        for count in counts:
            results.append(kept[first : first + count])
            first += count
        return results

    def _read(self, keys: Sequence[str], pages: Sequence[Page] | None = None) -> list[Any]:
        try:
            return self._store.get_many(keys, pages, deadline_s=self._options["load_deadline_s"])
        except BatchError as error:
            self._tell("pages are missing", error)
            return error.results
        except BlockKVError as error:
            self._tell("pages are missing", error)
            return [None if pages is None else False] * len(keys)

    def _write(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        try:
            written: Sequence[object] = self._store.put_many(
                list(zip(keys, pages, strict=True)),
                self._options["durable"],
                deadline_s=self._options["store_deadline_s"],
            )
        except BatchError as error:
            self._tell("pages are not kept", error)
            written = error.results
        except BlockKVError as error:
            self._tell("pages are not kept", error)
            return [False] * len(keys)
        try:
            return [new is True or self._store.contains(key) for key, new in zip(keys, written, strict=True)]
        except BlockKVError as error:
            self._tell("whether pages were there before is not known", error)
            return [new is True for new in written]

    def _timed(self, kind: str, keys: Sequence[str], pages: Sequence[Page], move: Any) -> list[Any]:
        begin = time.perf_counter()
        done: list[Any] = move()
        if self._config.enable_storage_metrics and keys:
            seconds = time.perf_counter() - begin
            moved = sum(_size_bytes(page) for page, full in zip(pages, done, strict=True) if full is True)
            with self._lock:
                self._metrics[f"{kind}_pgs"].append(len(keys))
                self._metrics[f"{kind}_bandwidth"].append(moved / 1e9 / max(seconds, 1e-9))
        return done

    def _forget_metrics(self) -> None:
        names = ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")
        self._metrics = {name: [] for name in names}

    def _tell(self, what: str, error: BlockKVError | None = None) -> None:
        """Log a kind of trouble, the first time."""
        kind = f"{what} {type(error).__name__}"
        with self._lock:
            known = kind in self._trouble
            self._trouble.add(kind)
        if not known:
            log.warning(
                "%s%s. This is said once; see what `blockkv check` says of the device, and the counters of "
                "`blockkv info`",
                what,
                f": {error}" if error is not None else "",
            )


class _Pool:
    """A host pool: the keys of its pages, and their memory."""

    def __init__(self, name: str, host_pool: Any, family_of: Any, zero_copy: bool) -> None:
        self._pool = host_pool
        self.page_size = int(getattr(host_pool, "page_size", 1) or 1)
        sizes = self._piece_bytes() if zero_copy else None
        self._zero_copy = sizes is not None
        if sizes is None:
            sizes = [host_pool.get_dummy_flat_data_page().nbytes]
        self._is_empty = not any(sizes)
        geometry = {field: getattr(host_pool, field, None) for field in GEOMETRY}
        tag = getattr(host_pool, "storage_format_tag", None)
        self.family: blockkv.Family = family_of(
            name,
            host_pool,
            f"{'pieces' if self._zero_copy else 'flat page'} of {sizes} bytes, pool {name} "
            f"{type(host_pool).__name__} {host_pool.layout} {tag}, page {self.page_size}, {geometry}",
        )

    def keys(self, keys: Iterable[str]) -> list[str]:
        """Those of the store for SGLang's."""
        return [f"{self.family.name}/{key}" for key in keys]

    def takes(self, keys: Sequence[str], indices: torch.Tensor | None) -> bool:
        """Whether these are indices of as many pages as there are keys."""
        return len(keys) * self.page_size == (0 if indices is None else indices.numel())

    def memory(self) -> list[torch.Tensor]:
        """Its buffers, where they are pieces of memory."""
        buffers = getattr(self._pool, "kv_buffer", None)
        if hasattr(self._pool, "get_hybrid_pool_buffer") and not self._is_empty:
            buffers = self._pool.get_hybrid_pool_buffer()
        found = buffers if isinstance(buffers, (list, tuple)) else [buffers]
        return [
            one
            for one in found
            if isinstance(one, torch.Tensor)
            and one.device.type == "cpu"
            and one.numel()
            and one.is_contiguous()
        ]

    def pages(self, indices: torch.Tensor, count: int, *, for_reading: bool) -> list[Page]:
        """The memory of `count` pages."""
        if self._is_empty:
            return [MARKER.clone() if for_reading else MARKER for _ in range(count)]
        if not self._zero_copy:
            if for_reading:
                return [self._pool.get_dummy_flat_data_page() for _ in range(count)]
            return [self._pool.get_data_page(first, flat=True) for first in self._firsts(indices)]
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        pieces = [tensor_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        if len(pieces) == count:
            return list(pieces)
        each = len(pieces) // count
        return [pieces[first : first + each] for first in range(0, len(pieces), each)]

    def arrived(self, indices: torch.Tensor, pages: Sequence[Page], found: Sequence[bool]) -> None:
        """Pages were filled: put them where they belong, unless they are there."""
        if not self._zero_copy and not self._is_empty:
            for first, page, full in zip(self._firsts(indices), pages, found, strict=True):
                if full:
                    self._pool.set_from_flat_data_page(first, page)

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        return [int(first) for first in indices[:: self.page_size]]

    def _piece_bytes(self) -> list[int] | None:
        """Sizes of the pieces of a page, or None where the pool does not say where they are."""
        if not hasattr(self._pool, "get_page_buffer_meta"):
            return None
        try:
            meta = self._pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (NotImplementedError, ValueError) as error:  # how pools say that of their layout
            log.info("pages of %s are copied: %s", type(self._pool).__name__, error)
            return None
        return [int(size) for size in meta[1]] if meta else []


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(given) - OF_SGLANG - set(OPTIONS))
    if unknown:
        raise InvalidArgument(
            f"unknown options: {', '.join(unknown)}; there are {', '.join(sorted(OPTIONS))}"
        )
    options = {name: given.get(name, default) for name, default in OPTIONS.items()}
    if not options["device"]:
        raise InvalidArgument("give the option device: a path, several, or the socket of `blockkv serve`")
    for name in ("format", "durable", "register"):
        if not isinstance(options[name], bool):
            raise InvalidArgument(f"{name} is {options[name]!r}; give true or false")
    for name in ("load_deadline_s", "store_deadline_s"):
        seconds = options[name]
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds <= LONGEST_DEADLINE_S):
            raise InvalidArgument(f"{name} is {seconds!r}; give seconds up to {LONGEST_DEADLINE_S}, or null")
    return options


def _weights_of(model: str) -> Sequence[Path]:
    """The files whose bytes stand for the weights."""
    if not Path(model).exists():
        raise InvalidArgument(
            f"the model {model} is no path here, so its weights have no fingerprint. SGLang's keys do not "
            "depend on them, and pages of other weights would be taken for these: give the option weights, "
            "the commit that they came with, or serve a model from a directory"
        )
    return weight_files(model)


def _open(options: Mapping[str, Any], config: HiCacheStorageConfig) -> blockkv.Store:
    ranks = {"tp_rank": config.tp_rank, "pp_rank": config.pp_rank, "dp_rank": config.dp_rank}
    given = options["device"]
    paths = [given] if isinstance(given, str) else list(given)
    try:
        named = [path.format(**ranks, cp_rank=config.attn_cp_rank) for path in paths]
    except (KeyError, IndexError, ValueError) as error:
        raise InvalidArgument(
            f"device {given!r}: {error}; there are {', '.join(ranks)} and cp_rank"
        ) from error
    if config.is_mla_model and config.tp_size > 1 and any("{tp_rank}" in path for path in paths):
        raise InvalidArgument(
            "the pages of this model are the same on all tensor-parallel ranks, and only one of them writes: "
            "give all ranks the same socket of `blockkv serve`, instead of a device each"
        )
    return open_store(
        named,
        format=options["format"],
        average_chunk=options["average_chunk"],
        **{name: options[name] for name in ("eviction", "admission") if options[name] is not None},
    )


def _is_sharded(host_pool: Any) -> bool:
    """Whether ranks hold shares of a pool also where the keys and values are the same on all of them."""
    names = [base.__name__ for base in type(host_pool).__mro__]
    return any(name.startswith(("MHA", "Mamba")) for name in names)


def _gather(
    wanted: Sequence[tuple[_Pool, list[str], torch.Tensor]], *, for_reading: bool
) -> tuple[list[str], list[Page], list[int]]:
    keys: list[str] = []
    pages: list[Page] = []
    for pool, names, indices in wanted:
        keys += pool.keys(names)
        pages += pool.pages(indices, len(names), for_reading=for_reading)
    return keys, pages, [len(names) for _, names, _ in wanted]


def _size_bytes(page: Page) -> int:
    return page.nbytes if isinstance(page, torch.Tensor) else sum(piece.nbytes for piece in page)
