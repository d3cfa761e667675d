"""The adapter that LMCache's store and prefetch controllers call, each on a thread of its own.

Stores and loads go to `BackgroundJobs`, from and to LMCache's own memory, which is registered with the
device. Lookups are answered in the call, from the index in memory, or in the background where another process
has that. One of three descriptors tells that something has ended; by then LMCache has been told what came,
went and was used.

Invariants
  * no `submit_*` waits for the device, and whatever goes wrong after it has returned is a failed store or a
    miss;
  * a store that is acknowledged hits after a crash (unless the option `durable` is false);
  * an object goes only into memory of the dtypes and shapes that it came from.

Not here: names (`names`), counting (`books`), how long what was found stays (`locks`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

import blockkv
from blockkv.connectors.jobs import BackgroundJobs, Outcome
from blockkv.connectors.lmcache.books import Books
from blockkv.connectors.lmcache.config import BlockKVL2AdapterConfig, open_store
from blockkv.connectors.lmcache.locks import Locks
from blockkv.connectors.lmcache.names import Namespace, is_serialized
from blockkv.connectors.memory import tensor_at, tensor_of
from blockkv.errors import BlockKVError, InvalidArgument

__all__ = ["BlockKVL2Adapter"]

UNBOUNDED_BYTES = 1 << 62

COUNTERS = (
    "lookup_hits",
    "lookup_misses",
    "lookup_other_layout",
    "load_hits",
    "load_misses",
    "stores_failed",
    "keys_recovered",
)
"""Of `report_status`, in keys; `stores_failed` in tasks."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that LMCache has submitted."""

    keys: Sequence[ObjectKey]
    positions: Sequence[int]
    """Those of keys that were looked for: the others have no chunk that fits."""


class BlockKVL2Adapter(L2AdapterInterface):
    """LMCache's objects in a blockkv store. Made by LMCache; thread-safe."""

    def __init__(
        self,
        config: BlockKVL2AdapterConfig | Mapping[str, Any],
        l1_memory_desc: L1MemoryDesc | None = None,
    ) -> None:
        """Raises ValueError (options), and what `blockkv.open` raises."""
        if not isinstance(config, BlockKVL2AdapterConfig):
            config = BlockKVL2AdapterConfig.from_dict(config)
        self._options = config
        self._names = Namespace(config.weights, config.layout)
        with contextlib.ExitStack() as stack:
            self._store = stack.enter_context(open_store(config))
            super().__init__(max_capacity_bytes=int(self._store.stats()["data_bytes"]))
            watch = stack.enter_context(self._store.watch())
            self._is_registered = stack.enter_context(_registered(self._store, l1_memory_desc))
            self._store_ended = stack.enter_context(create_event_notifier())
            self._lookup_ended = stack.enter_context(create_event_notifier())
            self._load_ended = stack.enter_context(create_event_notifier())
            self._ends = stack.pop_all()
        self._books = Books(watch, self._names, self._notify_keys_stored, self._notify_keys_deleted)
        self._locks = Locks(self._store, config.lock_s)
        self._lock = threading.Lock()
        self._closed = False
        self._next_task = 0
        self._loads: dict[int, _Load] = {}
        """Under way."""
        self._ended_stores: dict[int, L2StoreResult] = {}
        self._ended_lookups: dict[int, Bitmap] = {}
        self._ended_loads: dict[int, Bitmap] = {}
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._told: set[str] = set()
        self._asking: ThreadPoolExecutor | None = None
        """Asks the owner of the store, one thing after the other, where that is another process."""
        if self._store.is_client:
            self._asking = ThreadPoolExecutor(1, "blockkv-lookups")
        self._has_policies = bool(self._asking) or (config.eviction, config.admission) != ("lru", "all")
        l1_bytes = l1_memory_desc.size if l1_memory_desc is not None else UNBOUNDED_BYTES
        self._jobs = BackgroundJobs(
            self._store,
            load_deadline_s=config.load_deadline_s,
            store_deadline_s=config.store_deadline_s,
            # LMCache keeps an object's memory until its load has ended; only a deadline ends one before.
            staged=config.load_deadline_s is not None,
            load_threads=config.load_threads,
            store_threads=config.store_threads,
            max_store_bytes=int(config.max_store_bytes or l1_bytes),
            ended=self._job_ended,
        )

    # -- events ----------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Readable when a store has ended."""
        return int(self._store_ended.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup has ended."""
        return int(self._lookup_ended.fileno())

    def get_load_event_fd(self) -> int:
        """Readable when a load has ended."""
        return int(self._load_ended.fileno())

    def _job_ended(self, outcome: Outcome) -> None:
        """On a thread that has moved bytes: tell LMCache of everything, and then that there is a result."""
        if outcome.is_load:
            self._end_load(outcome)
        else:
            self._end_store(outcome)

    # -- stores ----------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store objects. A task fails as a whole, also where a model has no fingerprint of its weights."""
        task = self._begin(keys, objects)
        try:
            chunks = [
                self._names.chunk(key, self._names.layout_of_object(obj))
                for key, obj in zip(keys, objects, strict=True)
            ]
            if not all(chunks):
                raise InvalidArgument("its model has no fingerprint of the weights")
            buffers = [_bytes_of(obj) for obj in objects]
        except BlockKVError as error:
            self._end_store(Outcome(task, False, (False,), 0, 0.0, str(error)))
        else:
            self._locks.expire()
            self._jobs.submit_store(task, chunks, buffers, durable=self._options.durable)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Tasks that have ended. What they stored, and what left for it, has been told by then."""
        with self._lock:
            ended, self._ended_stores = self._ended_stores, {}
        return ended

    def _end_store(self, outcome: Outcome) -> None:
        self._books.settle()
        if not outcome.all_done:
            self._count("stores_failed")
            self._tell_once("a store failed", outcome.reason or "it was not admitted")
        with self._lock:
            self._ended_stores[outcome.job] = L2StoreResult(outcome.all_done, outcome.bytes_moved)
        self._store_ended.notify()

    # -- lookups ---------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look for objects of these layouts; where a group has none, of any, and the load decides."""
        task = self._begin(keys)
        self._ask(self._look_up, task, list(keys), dict(group_layout_descs))
        return task

    def _look_up(self, task: int, keys: Sequence[ObjectKey], descs: Mapping[int, MemoryLayoutDesc]) -> None:
        found, hits = Bitmap(len(keys)), 0
        try:
            self._locks.expire()
            layouts = {
                group: self._names.layout_of(desc.shapes, desc.dtypes) for group, desc in descs.items()
            }
            if self._has_policies:
                self._tell_policies(keys, layouts)
            for position, key in enumerate(keys):
                if self._find_and_lock(key, layouts.get(key.object_group_id, "")):
                    found.set(position)
                    hits += 1
        except Exception as error:
            self._tell_once("a lookup failed", error)
        self._count("lookup_hits", hits)
        self._count("lookup_misses", len(keys) - hits)
        with self._lock:
            self._ended_lookups[task] = found
        self._lookup_ended.notify()

    def _tell_policies(self, keys: Sequence[ObjectKey], layouts: Mapping[int, str]) -> None:
        """Of a request for a prefix: LMCache asks for all ranks and object groups of it at once."""
        prefixes: dict[tuple[int, int], list[str]] = {}
        for key in keys:
            layout = layouts.get(key.object_group_id)
            if layout and (chunk := self._names.chunk(key, layout)):
                prefixes.setdefault((key.kv_rank, key.object_group_id), []).append(chunk)
        for chunks in prefixes.values():
            self._store.lookup(chunks)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which keys were found, and are locked; once."""
        with self._lock:
            return self._ended_lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Never fails."""
        self._ask(self._locks.unlock, list(keys))

    def _ask(self, call: Callable[..., None], *arguments: Any) -> None:
        """Ask the index: here and now, or in the background where another process has it."""
        if self._asking is None:
            call(*arguments)
            return
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._asking.submit(call, *arguments)

    def _find_and_lock(self, key: ObjectKey, layout: str) -> bool:
        if layout:
            chunk = self._names.chunk(key, layout)
            if not chunk:
                return False
            if self._locks.lock(key, chunk):
                if self._asking is not None and self._books.of_chunk(chunk) is None:
                    self._books.settle()  # another process has stored it; the load needs its size
                return True
        others = [one for one in self._books.of_key(key) if one.layout != layout]
        if layout and others:
            # LMCache looks for serialized objects as they were before; the option says how they are made.
            others = [one for one in others if self._names.layout and is_serialized(one.layout)]
            if not others:
                self._count("lookup_other_layout")
                self._tell_once(
                    "an object that is looked for is stored with other dtypes or shapes, and is a miss",
                    f"wanted {layout} of {key.model_name!r}; where LMCache serializes, say how in layout",
                )
        return any(self._locks.lock(key, one.chunk) for one in reversed(others))

    # -- loads -----------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Fill objects; what is not there in their layout, or larger than them, is a miss."""
        task = self._begin(keys, objects)
        chunks: list[str] = []
        buffers: list[torch.Tensor] = []
        positions: list[int] = []
        try:
            for position, (key, obj) in enumerate(zip(keys, objects, strict=True)):
                chunk = self._names.chunk(key, self._names.layout_of_object(obj))
                memory = _bytes_of(obj)
                size_bytes = self._size_of(chunk) if chunk else 0
                if 0 < size_bytes <= memory.nbytes:
                    chunks.append(chunk)
                    buffers.append(memory[:size_bytes])
                    positions.append(position)
        except BlockKVError as error:
            self._tell_once("a load failed", error)
            chunks, buffers, positions = [], [], []
        with self._lock:
            self._loads[task] = _Load(list(keys), positions)
        self._jobs.submit_load(task, chunks, buffers)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which objects were filled, once; None until the load has ended."""
        with self._lock:
            return self._ended_loads.pop(task_id, None)

    def _end_load(self, outcome: Outcome) -> None:
        with self._lock:
            load = self._loads.pop(outcome.job)
        filled = Bitmap(len(load.keys))
        accessed = []
        for position, is_filled in zip(load.positions, outcome.done, strict=True):
            if is_filled:
                filled.set(position)
                accessed.append(load.keys[position])
        self._count("load_hits", len(accessed))
        self._count("load_misses", len(load.keys) - len(accessed))
        if outcome.reason:
            self._tell_once("a load failed", outcome.reason)
        if len(accessed) < len(load.keys):
            self._books.settle()  # what did not verify is gone
        if accessed:
            try:
                self._notify_keys_accessed(accessed)
            except Exception:
                log.exception("LMCache could not be told of %d keys that were loaded", len(accessed))
        with self._lock:
            self._ended_loads[outcome.job] = filled
        self._load_ended.notify()

    def _size_of(self, chunk: str) -> int:
        """Payload of a chunk; 0 where there is none."""
        if (stored := self._books.of_chunk(chunk)) is not None:
            return stored.size_bytes
        if self._asking is not None:
            return 0  # it was not found by a lookup, and its owner may take long to say more
        entry = self._store.entry(chunk)
        return 0 if entry is None else entry.payload_bytes

    # -- what is there ---------------------------------------------------------------------------------

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        """Called once LMCache has made this; from here on it knows who tells it of recovered keys."""
        super().set_backend_identity(name, shared)
        self._books.settle()
        self._count("keys_recovered", len(self._books) - self._counters["keys_recovered"])

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Tell it of everything that is there already, and then of what comes and goes."""
        self._books.settle()
        self._books.tell_all(listener.on_l2_keys_stored)
        super().register_listener(listener)

    def get_usage(self) -> AdapterUsage:
        """As of now."""
        self._books.settle()
        return super().get_usage()

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete what nobody has locked."""
        self._locks.expire()
        self._books.settle()
        try:
            for key in keys:
                for stored in self._books.of_key(key):
                    entry = self._store.entry(stored.chunk)
                    if entry is not None and not entry.pins:  # by whoever shares the store
                        self._store.delete(stored.chunk)
        except BlockKVError as error:
            self._tell_once("deleting failed", error)
        self._books.settle()

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """What is stored, in the order of the names of chunks. Raises ValueError."""
        if page_size <= 0:
            raise ValueError(f"page_size is {page_size}; use at least 1")
        if cursor is not None and self._names.object_of(cursor) is None:
            raise ValueError(f"{cursor!r} is no cursor of this adapter")
        self._books.settle()
        page, goes_on = self._books.page(model_name, page_size, cursor or "")
        return KeyListPage(
            entries=tuple(
                KeyEntry(key=one.key.to_encoded_object_key(), size_bytes=one.size_bytes) for one in page
            ),
            next_page_token=page[-1].chunk if goes_on else None,
        )

    # -- looking after ---------------------------------------------------------------------------------

    def get_memory_tags(self) -> Any:
        """For LMCache 0.5.7 and later; those before have no such tags and do not ask."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.LOCAL)

    def report_status(self) -> dict[str, Any]:
        """For GET /status: health, what is there, and counters since start."""
        status: dict[str, Any] = {"type": type(self).__name__, "device": self._options.where}
        if self._closed:
            return {"is_healthy": False, **status, "problem": "closed"}
        self._locks.expire()
        usage = self.get_usage()
        try:
            figures, problem = self._store.stats(), self._why_no_writes()
        except BlockKVError as error:
            return {"is_healthy": False, **status, "problem": str(error)}
        return {
            "is_healthy": not problem,
            **status,
            "problem": problem,
            "stored_object_count": len(self._books),
            "total_bytes_used": usage.total_bytes_used,
            "max_capacity_bytes": usage.total_capacity_bytes,
            "locked_key_count": len(self._locks),
            "locks_expired": self._locks.expired,
            "inflight_task_count": self._jobs.pending(),
            "l1_is_registered": self._is_registered,
            **self._counters,
            "jobs": dict(self._jobs.counters),
            "store": {name: value for name, value in figures.items() if isinstance(value, int | float)},
        }

    def close(self) -> None:
        """End; stores that have not begun fail. A device that hangs is left open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._asking is not None:
            self._asking.shutdown(cancel_futures=True)
        if not self._jobs.close():
            log.error("%s does not answer; it is left open", self._options.where)
            return
        try:
            self._ends.close()
        except BlockKVError as error:
            log.error("closing: %s", error)

    # -- inside ----------------------------------------------------------------------------------------

    def _begin(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj] | None = None) -> int:
        """A new task. Raises RuntimeError (closed), ValueError."""
        if objects is not None and len(objects) != len(keys):
            raise ValueError(f"{len(keys)} keys but {len(objects)} objects")
        with self._lock:
            if self._closed:
                raise RuntimeError("the adapter is closed")
            task = self._next_task
            self._next_task += 1
        return task

    def _why_no_writes(self) -> str:
        """Why the store takes no more; "" while it does."""
        info = self._store.info()
        members = info.get("members", [info])
        problems = [
            one.get("read_only_reason")
            or one.get("write_failure")
            or (one["state"] if one.get("state", "present") != "present" else "")
            for one in members
        ]
        return str(problems[0]) if all(problems) else ""

    def _count(self, counter: str, count: int = 1) -> None:
        with self._lock:
            self._counters[counter] += count

    def _tell_once(self, what: str, why: object) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("%s: %s: %s; told once, see report_status", self._options.where, what, why)


@contextlib.contextmanager
def _registered(store: blockkv.Store, l1: L1MemoryDesc | None) -> Iterator[bool]:
    """LMCache's memory registered with the device while it lasts; False where that could not be."""
    with contextlib.ExitStack() as stack:
        available = False
        if l1 is not None:
            # The rest of an L1 that grows is not there yet.
            memory = tensor_at(l1.ptr, l1.stable_registration_size or l1.size)
            try:
                available = stack.enter_context(store.register(memory))
            except BlockKVError as error:
                log.warning("L1 is not registered, which makes requests dearer: %s", error)
        yield available


def _bytes_of(obj: MemoryObj) -> torch.Tensor:
    """The logical bytes of an object, without a copy. Raises InvalidArgument for memory of an accelerator."""
    raw = obj.raw_data
    if not isinstance(raw, torch.Tensor):
        return tensor_of(obj.byte_array)
    if raw.device.type != "cpu":
        raise InvalidArgument(f"an object is on {raw.device}; give LMCache an L1 in the memory of the CPU")
    return raw.view(-1).view(torch.uint8)[: obj.get_size()]
