"""The store: chunks of tensors by key on one namespace.

Life of a put::

    tensors -> segments -> claim the key -> extents from the allocator (evicting when full)
            -> data writes, leaf checksums meanwhile -> completions -> index and open commit group -> return
    durable: ... -> the group's journal pages and one flush -> return

Life of a get::

    index -> lease on the extents -> reads into the caller's memory -> checksum against the record -> return
    a mismatch, twice, or a device error: a miss, a counter, the record dropped, its extents quarantined

Invariants
  * a key is visible only after all its data writes completed;
  * an extent is reused only after the delete that freed it is durable and nobody reads it;
  * every transfer is waited for before its memory or its extents are let go, whatever is raised meanwhile.

Not here: the steps of a put (`puts`), of a get (`gets`), what they share (`state`, `waves`), chunks that grow
(`growing`), the order of metadata writes (`log`), opening (`recovery`), formatting (`create`), looking after
(`check`, `scrub`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from blockkv.catalog.admission import Admission
from blockkv.catalog.eviction import Eviction
from blockkv.catalog.index import Entry
from blockkv.catalog.layouts import Layout
from blockkv.catalog.wear import WriteBudget
from blockkv.device import namespace, passthrough
from blockkv.device.base import UNIT_BYTES, Device, Priority
from blockkv.device.engine import NativeDevice
from blockkv.encryption.secret import Unlock, Unlocker
from blockkv.encryption.volume_key import VolumeKey
from blockkv.errors import (
    BatchError,
    BlockKVError,
    DeviceBusy,
    DeviceError,
    DeviceReadOnly,
    InvalidArgument,
    StoreClosed,
    StoreReadOnly,
    WrongStore,
)
from blockkv.format.geometry import SLOTS_PER_COPY, growable_bytes
from blockkv.format.record import key_digest
from blockkv.format.superblock import Membership, Superblock
from blockkv.gpu.choice import choose
from blockkv.kv_layout import WHOLE, KVLayout, Part
from blockkv.logs import logger_for
from blockkv.space.allocator import Extent
from blockkv.store import part_gets
from blockkv.store.check import CheckReport, check_store
from blockkv.store.create import parse_size, superblock_facts
from blockkv.store.data_path import DataPath, Options
from blockkv.store.discards import DEFAULT_BYTES_PER_S as DEFAULT_DISCARD_BYTES_PER_S
from blockkv.store.extents import ChunkExtents
from blockkv.store.finding import Finding, tail_is_unfinished
from blockkv.store.gets import GetRun
from blockkv.store.growing import GrowingChunk, Guard, reserve
from blockkv.store.interrupts import interrupts
from blockkv.store.keeping import Policies, Stay, stay
from blockkv.store.kept_puts import put_kept
from blockkv.store.keys import Key, encode_key, encode_keys
from blockkv.store.latencies import Latencies, Latency
from blockkv.store.log import write_superblock
from blockkv.store.numbers import is_number
from blockkv.store.part_gets import Leased, PartBatch, PartCall, carry_out, lease, release
from blockkv.store.preloads import Preloads
from blockkv.store.puts import PutRun
from blockkv.store.recovery import Recovered, next_epoch, read_superblock, readable_slots, recover
from blockkv.store.reused import refuse_if_reused
from blockkv.store.scrub import DEFAULT_BYTES_PER_S, Scrub, ScrubReport
from blockkv.store.staging import Staging
from blockkv.store.state import GROWING, State
from blockkv.store.streams import DEFAULT_LOOKAHEAD_BYTES, Into, PartStream, StreamPool, is_whole
from blockkv.store.unlocking import unlock_device, unlock_superblock
from blockkv.store.watch import Watch
from blockkv.tensors import Occupied, Tensors, describe

__all__ = ["ChunkInfo", "Store", "StoreFuture", "open_store"]

STORE_THREADS = 8
"""Puts that the futures keep going at once. A put may have to wait for space or for a flush."""

BELONGS_TO_PARENT = "the store belongs to the parent process; open it there or after closing it there"
"""Why a store is closed in a forked child."""

LONGEST_INTERVAL_MS = 3_600_000
LONGEST_DEADLINE_S = 3600

KEYS_AT_A_TIME = 1024
"""How many keys a listing reads while it holds the lock."""

T = TypeVar("T")


class StoreFuture(Future[T]):
    """A `concurrent.futures.Future` that can also be awaited in asyncio.

    `cancel` works on a put or a preload that has not begun: the device has nothing of it, nor will it.
    """

    def __init__(self, withdraw: Callable[[], bool] | None = None) -> None:
        """`withdraw` takes it back, calls `withdrawn` and says whether it could, where that is possible."""
        super().__init__()
        self.withdraw = withdraw

    def cancel(self) -> bool:
        """Take it back; False where it has begun."""
        if self.withdraw is None:
            return super().cancel()
        return self.cancelled() or self.withdraw()

    def withdrawn(self) -> None:
        """It will not be carried out; inside."""
        super().cancel()
        self.set_running_or_notify_cancel()

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        return asyncio.wrap_future(self).__await__()


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What the store knows of one chunk. `extents` are (start, count) in 4 KiB units of the data zone."""

    key: str | bytes
    digest: bytes
    payload_bytes: int
    layout: Layout
    extents: tuple[Extent, ...]
    log_sequence: int
    durable: bool
    pins: int
    device: str
    """Path of the device that holds it."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A get in the background."""

    key: Key
    out: Any
    parts: Sequence[Part]
    """The one that is wanted, with `layout`; none of a whole chunk."""
    layout: KVLayout | None
    preload: bool
    deadline_ns: int


_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()
"""Stores to close at exit, to give up in a forked child, and to compare identities with."""


class Store:
    """An open store. Get one from `blockkv.open`; use it as a context manager or call `close`.

    Every method may be called from any thread. Keys are `str` or `bytes` of 1 to 4096 bytes; a `str` and its
    UTF-8 bytes are the same key. In a forked child every method raises StoreClosed.
    """

    def __init__(self, device: Device, recovered: Recovered, options: Options) -> None:
        self._state = State(device, recovered, options)
        self._recovery = recovered.report
        self._findings = recovered.findings
        self._idle = threading.Condition(self._state.lock)
        self._active_count = 0
        self._inside = threading.local()
        """`count` of the store's own operations that this thread is in: closing would wait for itself."""
        self._closed = ""
        self._latencies = Latencies()
        self._executor: ThreadPoolExecutor | None = None
        self._preloads = Preloads()
        self._stream_pool = StreamPool(self._go_inside)
        self._scrub: Scrub | None = None
        self._staging = Staging()
        self._growing: set[GrowingChunk] = set()
        if not self.read_only and options.commit_interval_ms is not None:
            self._state.log.start(options.commit_interval_ms / 1000)
            if self._state.discards is not None:
                self._state.discards.start()
        _open_stores.add(self)

    @property
    def _shared_lock(self) -> threading.RLock:
        return self._state.lock

    @property
    def _data(self) -> DataPath:
        """What gets run on."""
        return self._state

    @property
    def _where(self) -> str:
        """For messages: what the store is on."""
        return self._state.device.path

    # -- writing ---------------------------------------------------------------------------------------

    def put(
        self,
        key: Key,
        tensors: Tensors,
        durable: bool = False,
        *,
        droppable: bool = False,
        deadline_s: float | None = None,
        ttl_s: float | None = None,
        priority: int = 0,
    ) -> bool:
        """Store `tensors` under `key`.

        `tensors` is a CPU torch tensor of any dtype and stride, a sequence or a name -> tensor mapping of
        them (one chunk, in order), or a bytes-like object (kept as uint8). They must not change meanwhile.
        True when the chunk was written, False when the key was there already: chunks never change.

        Returns when the data writes completed: the chunk is readable now and durable within the commit
        interval. With `durable` returns when it is on media, also when it was there already.

        Where puts arrive faster than the device takes them they wait. One that is `droppable` is dropped
        instead, and so is, with `deadline_s`, what the device has not got so many seconds from now: False,
        and the counter `put_dropped`. Waiting for space or for durability has no deadline.

        A chunk that is new with this put is deleted `ttl_s` seconds later, and leaves before all of higher
        `priority`. Both are forgotten when the store is closed. What the admission policy does not want is
        not written: False, and the counter `put_refused`; what the write budget does not hold, likewise, and
        `put_over_budget`.

        Raises InvalidArgument (key, tensor), StoreFull, StoreReadOnly, StoreClosed, DeviceError.
        """
        with self._latencies.timed(put_kind(durable)):
            results, errors = self._put(
                [(key, tensors)], durable, droppable, due_ns(deadline_s), stay(ttl_s, priority)
            )
        if errors:
            raise errors[0]
        return results[0]

    def put_many(
        self,
        items: Mapping[Any, Tensors] | Iterable[tuple[Key, Tensors]],
        durable: bool = False,
        *,
        droppable: bool = False,
        deadline_s: float | None = None,
        ttl_s: float | None = None,
        priority: int = 0,
    ) -> list[bool]:
        """`put` for many chunks in one submission and, with `durable`, one flush for all.

        Takes (key, tensors) pairs or a mapping; returns one result per item, in order. Raises BatchError,
        after its neighbours were carried out, when some failed.
        """
        pairs = several_items(items)
        deadline_ns, stays = due_ns(deadline_s), stay(ttl_s, priority)
        with self._latencies.timed(put_kind(durable)):
            results, errors = self._put(pairs, durable, droppable, deadline_ns, stays)
        if errors:
            raise BatchError(results, errors)
        return results

    def submit_put(
        self,
        key: Key,
        tensors: Tensors,
        durable: bool = False,
        *,
        droppable: bool = False,
        deadline_s: float | None = None,
        ttl_s: float | None = None,
        priority: int = 0,
    ) -> StoreFuture[bool]:
        """`put` in the background, on one of a few threads. The future can be waited for or awaited."""
        deadline_ns, stays = due_ns(deadline_s), stay(ttl_s, priority)
        with self._shared_lock:
            self._check_open()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(STORE_THREADS, "blockkv-put", self._go_inside)
        future: StoreFuture[bool] = StoreFuture()
        self._latencies.time_future(put_kind(durable), future)

        def carry_out() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                results, errors = self._put([(key, tensors)], durable, droppable, deadline_ns, stays)
                if errors:
                    raise errors[0]
                future.set_result(results[0])
            except BaseException as error:
                future.set_exception(error)

        try:
            self._executor.submit(carry_out)
        except RuntimeError:
            raise StoreClosed(f"{self._where}: the store is being closed") from None
        return future

    def reserve(self, key: Key, capacity_bytes: int) -> GrowingChunk:
        """Begin a chunk that grows: append to it, read what it has, seal it. See `GrowingChunk`.

        Takes one contiguous extent for `capacity_bytes`, in whole runs, and 512 KiB for tails that are made
        durable; where none is free those chunks are evicted for it that were used longest ago and lie
        together. Nobody else gets it until the chunk is sealed or abandoned. Meanwhile the key can be
        neither put nor deleted; it is found once something is durable of it.

        Closing the store keeps what was durable and drops the rest, as a crash does. Raises InvalidArgument
        (the key is stored or growing already), StoreFull (saying what is in the way), StoreReadOnly,
        StoreClosed.
        """
        with self._operation(writing=True):
            return self._reserve(key, capacity_bytes, self._operation)

    def _reserve(self, key: Key, capacity_bytes: int, guard: Guard) -> GrowingChunk:
        grown = reserve(self._state, guard, self._staging, key, capacity_bytes, self._growing.discard)
        self._growing.add(grown)
        return grown

    def delete(self, key: Key, durable: bool = False) -> bool:
        """Remove a chunk; False when it was not there. With `durable` it stays removed after power loss.

        Raises InvalidArgument where it is growing.
        """
        digest = key_digest(encode_key(key))
        with self._operation(writing=True):
            log_sequence = self._delete(digest)
            if log_sequence and durable:
                self._state.log.commit(log_sequence)
        return log_sequence > 0

    def _delete(self, digest: bytes) -> int:
        """Remove a chunk. Returns the log sequence, 0 when it was not there. Raises InvalidArgument."""
        state = self._state
        with state.changing:
            if digest in state.reserved:
                raise InvalidArgument(GROWING)
            entry = state.index.get(digest)
            if entry is None:
                return 0
            state.counters["chunks_deleted"] += 1
            return state.delete(entry)

    def commit(self) -> None:
        """Make everything put or deleted so far durable. Raises StoreReadOnly when that is impossible."""
        with self._operation(writing=True):
            self._state.log.commit()

    def discard_freed(self) -> int:
        """Tell the device about all freed space, here and now and without a pause. Returns the bytes.

        For quiet hours, and for stores without a commit interval, which have no thread that does it. Space
        whose delete is not durable yet is left out. Raises InvalidArgument where the store was opened without
        `discard`.
        """
        with self._operation(writing=True):
            discards = self._state.discards
            if discards is None:
                raise InvalidArgument(f"{self._where}: open it with discard=True for that")
            return discards.catch_up()

    def checkpoint(self) -> None:
        """Write the index out, so that the next open need not replay the journal. Happens by itself too."""
        with self._operation(writing=True):
            self._state.log.checkpoint()

    # -- reading ---------------------------------------------------------------------------------------

    def get(
        self,
        key: Key,
        out: Any = None,
        *,
        part: Part | None = None,
        layout: KVLayout | None = None,
        preload: bool = False,
        deadline_s: float | None = None,
    ) -> Any:
        """Read a chunk, verified against its checksum.

        Without `out`: new tensors in the form they were put (a tensor, a list, a dict), or None for a miss.
        With `out`, tensors of the same form, dtypes and shapes (any strides) or a writable bytes-like object
        of the payload's size: True when it was filled, False for a miss, after which its content is
        unspecified but never another chunk's. Bytes that do not verify are a miss.

        With `preload` it is served after the gets without, and before puts. With `deadline_s` requests that
        the device has not got so many seconds from now are given up: a miss, and the counter `get_deadline`.

        With `layout`, which says what the payload is, only a `part` of it is read, and returned or filled: a
        tensor of the layout's axes in their order, cut to the part, or, where the layout has several arrays,
        those that the part has something of, by name. It is verified leaf by leaf; see docs/tensors.md.

        Raises LayoutMismatch (nothing was written to `out`), InvalidArgument, DeviceLost, StoreClosed.
        """
        outputs = None if out is None else [out]
        parts = wanted_parts(part, layout, 1)
        deadline_ns = due_ns(deadline_s)
        with self._latencies.timed("get"):
            results, errors = self._get_any([key], outputs, parts, layout, preload, deadline_ns)
        if errors:
            raise errors[0]
        return results[0]

    def get_many(
        self,
        keys: Iterable[Key],
        outs: Iterable[Any] | None = None,
        *,
        part: Part | Sequence[Part] | None = None,
        layout: KVLayout | None = None,
        preload: bool = False,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """`get` for many chunks in one submission; one result per key, in order.

        Every output needs memory of its own. With `layout` a `part` of each is read, the same one or one for
        each key; a key may then be given several times. Raises BatchError, after its neighbours were read,
        when some failed; a miss is not a failure.
        """
        wanted = several_keys(keys)
        outputs = None if outs is None else listed(outs, "outputs")
        if outputs is not None and len(outputs) != len(wanted):
            raise InvalidArgument(f"{len(wanted)} keys but {len(outputs)} outputs")
        parts = wanted_parts(part, layout, len(wanted))
        deadline_ns = due_ns(deadline_s)
        with self._latencies.timed("get"):
            results, errors = self._get_any(wanted, outputs, parts, layout, preload, deadline_ns)
        if errors:
            raise BatchError(results, errors)
        return results

    def submit_get(
        self,
        key: Key,
        out: Any = None,
        *,
        part: Part | None = None,
        layout: KVLayout | None = None,
        preload: bool = False,
        deadline_s: float | None = None,
    ) -> StoreFuture[Any]:
        """`get` in the background: no thread waits for it. The future can be waited for or awaited.

        Its callbacks run on the device's completion thread and must not block. A `preload` can be cancelled
        until it is handed to the device, which gets a few at a time; closing the store cancels those left.
        """
        deadline_ns = due_ns(deadline_s)
        wish = _Wish(key, out, wanted_parts(part, layout, 1), layout, preload, deadline_ns)
        with interrupts:
            self._enter()
            future: StoreFuture[Any] = StoreFuture()
            self._latencies.time_future("get", future)
            if preload:
                self._enqueue_preload(wish, future)
                return future
            future.set_running_or_notify_cancel()
            try:
                self._begin_get(wish, future)
            except BaseException:
                self._leave()
                raise
        return future

    def _enqueue_preload(self, wish: _Wish, future: StoreFuture[Any]) -> None:
        size_bytes = self._wished_bytes(wish)

        def begin() -> None:
            future.set_running_or_notify_cancel()
            try:
                self._begin_get(wish, future, lambda: self._preloads.ended(size_bytes))
            except BaseException as error:
                self._leave()
                future.set_exception(error)
                self._preloads.ended(size_bytes)

        def withdrawn() -> None:
            self._leave()
            future.withdrawn()

        ticket = self._preloads.add(size_bytes, begin, withdrawn)
        future.withdraw = lambda: self._preloads.withdraw(ticket)
        self._preloads.advance()

    def _wished_bytes(self, wish: _Wish) -> int:
        """About how much is read for it; 0 for what is not there, or cannot be."""
        try:
            if wish.layout is not None:
                return sum(one.size_bytes for one in wish.layout.selections(wish.parts[0]))
            entry = self.entry(wish.key)
        except BlockKVError:
            return 0
        return 0 if entry is None else entry.payload_bytes

    def _begin_get(
        self, wish: _Wish, future: StoreFuture[Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Start a get that has been entered; when it is over it is left, the future is set, `then` called."""
        data: DataPath | None = None

        def finish(problem: BaseException | None) -> None:
            self._leave()
            if problem is None and run.errors:
                survived = data is not None and self._outlives(data, run.errors[0])
                problem = None if survived else run.errors[0]
            if problem is not None:
                future.set_exception(problem)
            else:
                future.set_result(run.results[0])
            then()

        run: GetRun | PartCall
        if wish.layout is None:
            self._note_gets([wish.key])
            data = self._data
            run = GetRun(
                data,
                1,
                wish.out is not None,
                preload=wish.preload,
                deadline_ns=wish.deadline_ns,
                then=finish,
            )
            run.submit(wish.key, wish.out)
            return
        outputs = None if wish.out is None else [wish.out]
        run = call = PartCall(self, [wish.key], wish.parts, wish.layout, outputs)

        def settle() -> None:
            call.settle()
            finish(None)

        if call.reads:
            PartBatch(call.reads, priority_of(wish.preload), wish.deadline_ns).submit(settle)
        else:
            settle()

    def stream(
        self,
        keys: Iterable[Key],
        order: str = "layers",
        *,
        layout: KVLayout,
        part: Part = WHOLE,
        into: Into | None = None,
        lookahead_bytes: int = DEFAULT_LOOKAHEAD_BYTES,
        preload: bool = False,
        in_hand: int = 1,
    ) -> PartStream:
        """Read chunks of one layout part by part, in the order in which they are used: an iterator.

        `order` names the axes to go along, outermost first: "layers", "heads", "layers heads". Each step
        gives (number, tensors): a layer, and for each key its part of that layer, as `get` would; with
        several axes a tuple of numbers. The chunks begin to be read at once, ahead of what was handed over by
        at most `lookahead_bytes`. With `part` only that of each is read.

        The tensors are in memory of the stream, which is used again when the piece after them is asked for,
        and when it ends; or where `into` says, called with (number, position of the key) before that part is
        read.

        The prefix of `keys` that is stored, and not growing, is streamed. A chunk with a part that does not
        verify ends it: from then on there are tensors for the keys before it only, and `valid_keys` says how
        many those are.
        No miss and no device that is lost raises while one iterates; `problem` tells of the latter.

        The chunks are leased until the stream is exhausted or closed: it is a context manager. `preload`: as
        of `get`, until `promote`. Who works on several pieces at once says so with `in_hand` and uses `take`.

        Raises InvalidArgument (order, a look-ahead too small for one piece), LayoutMismatch, StoreClosed.
        """
        self._check_open()
        check_layout(layout)
        return PartStream(
            self,
            self._stream_pool,
            several_keys(keys),
            order,
            layout,
            part,
            into,
            lookahead_bytes,
            preload,
            in_hand,
        )

    def extents(self, key: Key) -> ChunkExtents | None:
        """Where a chunk lies, for whoever moves its bytes himself; None for a miss. See `ChunkExtents`.

        The chunk is leased until that is closed. One that grows is a miss. Raises InvalidArgument (the
        simulated device has no descriptor; the store is encrypted), DeviceError, StoreClosed.
        """
        with self._operation():
            (chunk,) = self._lease_chunks([key_digest(encode_key(key))])
            if chunk is None:
                return None
            if not is_whole(chunk):
                release([chunk])
                return None
            return ChunkExtents(self, key, chunk)

    # -- the catalog -----------------------------------------------------------------------------------

    def contains(self, key: Key) -> bool:
        """Whether the key is stored. RAM only; does not count as a use."""
        digest = key_digest(encode_key(key))
        self._check_open()
        with self._state.lock:
            self._state.expire()
            return digest in self._state.index

    def lookup(self, keys: Iterable[Key]) -> int:
        """How many of `keys`, from the first on, are stored without a gap. RAM only.

        For policies this is a request for that prefix: give all of its keys, also those that cannot be there.
        """
        self._check_open()
        wanted, length = several_keys(keys), 0
        if self._state.keeping is not None:
            self._looked_up(wanted)
        for key in wanted:
            if not self.contains(key):
                break
            length += 1
        return length

    def _looked_up(self, keys: Sequence[Key]) -> None:
        """Tell the policies of a request for a prefix."""
        digests = [key_digest(encode_key(key)) for key in keys]
        with self._state.lock:
            if self._state.keeping is not None:
                self._state.keeping.looked_up(digests)

    def touch(self, key: Key) -> bool:
        """Count a use: the chunk becomes the last to be evicted. False when it is not there."""
        with self._found(key) as entry:
            if entry is not None:
                self._state.index.touch(entry.digest)
                if self._state.keeping is not None:
                    self._state.keeping.used([entry.digest])
            return entry is not None

    def pin(self, key: Key) -> bool:
        """Keep a chunk from eviction until as many `unpin`; False when it is not there. Not persistent."""
        return self._pin(key, 1)

    def unpin(self, key: Key) -> bool:
        """Take back one `pin`; False when the chunk is not there or not pinned."""
        return self._pin(key, -1)

    def _pin(self, key: Key, change: int) -> bool:
        digest = key_digest(encode_key(key))
        self._check_open()
        with interrupts, self._state.lock:
            self._state.expire()
            index = self._state.index
            if change < 0 and digest in self._state.reserved and (entry := index.get(digest)) is not None:
                # A growing chunk holds one pin of its beginning, which is not the caller's.
                return index.pins(entry) > 1 and index.pin(digest, change)
            return index.pin(digest, change)

    def keys(self) -> Iterator[str | bytes]:
        """The keys as of now, first to be evicted first, each as it was given (str or bytes).

        Those that are deleted before the iterator comes to them are left out.
        """
        self._check_open()
        state = self._state
        with state.lock:
            digests = state.index.digests()

        def found() -> Iterator[str | bytes]:
            for first in range(0, len(digests), KEYS_AT_A_TIME):
                with state.lock:
                    entries = [state.index.get(one) for one in digests[first : first + KEYS_AT_A_TIME]]
                yield from (entry.key for entry in entries if entry is not None)

        return found()

    def watch(self) -> Watch:
        """Be told of every chunk that comes and goes, for whatever reason: for books that have to be exact.

        The first `Watch.take` gives all chunks that are there now, the following ones what has changed since.
        Nobody is called: ask when it suits. Close it, or use it as a context manager, when it is no longer
        asked.
        """
        watch = Watch()
        self._list_for(watch, self._begin_watch(watch))
        return watch

    def _begin_watch(self, watch: Watch, unheard: Iterable[bytes] = ()) -> list[bytes]:
        """Tell it of changes from now on. Returns the digests of what is there, for `_list_for`."""
        state = self._state
        with interrupts, state.lock:
            self._check_open()
            state.expire()
            digests = state.index.digests()
            watch.expect(digests, unheard)
            watch.attach(lambda: state.unwatch(watch))
            state.watches.append(watch)
        return digests

    def _list_for(self, watch: Watch, digests: Sequence[bytes]) -> None:
        state = self._state
        for first in range(0, len(digests), KEYS_AT_A_TIME):
            with state.lock:
                for digest in digests[first : first + KEYS_AT_A_TIME]:
                    entry = state.index.get(digest)
                    if entry is not None:
                        watch.list_one(digest, entry.key, entry.payload_bytes)

    def entry(self, key: Key) -> ChunkInfo | None:
        """What is known of a chunk, or None for a miss."""
        with self._found(key) as entry:
            if entry is None:
                return None
            return ChunkInfo(
                key=entry.key,
                digest=entry.digest,
                payload_bytes=entry.payload_bytes,
                layout=self._state.layouts[entry.layout_id],
                extents=entry.extents,
                log_sequence=entry.log_sequence,
                durable=entry.log_sequence <= self._state.log.durable_sequence,
                pins=self._state.index.pins(entry),
                device=self._state.device.path,
            )

    def __len__(self) -> int:
        return len(self._state.index)

    def __contains__(self, key: Key) -> bool:
        return self.contains(key)

    # -- memory ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def register(self, memory: Any) -> Iterator[bool]:
        """Register a contiguous tensor or writable buffer with the device while the context lasts.

        Transfers inside it save the kernel the page lookups. Yields False where that is not available; they
        work all the same. Raises DeviceError naming the limit when the kernel refuses (RLIMIT_MEMLOCK).
        """
        described = describe(memory)
        if described.copied_bytes or len(described.segments) != 1:
            raise InvalidArgument("only contiguous memory can be registered")
        self._check_open()
        handle = self._state.device.register(*described.segments[0])
        try:
            yield handle >= 0
        finally:
            if handle >= 0 and not self._closed:
                self._state.device.unregister(handle)
            del described

    # -- looking after ---------------------------------------------------------------------------------

    @property
    def read_only(self) -> bool:
        return bool(self._state.read_only_reason)

    @property
    def is_client(self) -> bool:
        """Whether another process has the catalog (`blockkv serve`): a lookup takes a round trip then."""
        return False

    @property
    def closed(self) -> bool:
        """Whether it was closed, or cannot be used any more."""
        return bool(self._closed)

    def stats(self) -> dict[str, Any]:
        """Counters since open and the present state; names are documented in docs/architecture.md."""
        state = self._state
        with state.lock:
            allocator, log = state.allocator, state.log
            figures: dict[str, Any] = {
                "chunks": len(state.index),
                "payload_bytes": state.index.payload_bytes,
                "record_bytes": state.index.record_bytes,
                "index_bytes": state.index.resident_bytes,
                "data_bytes": state.geometry.data.size_bytes,
                "free_bytes": (allocator.free_units + allocator.withheld_units) * UNIT_BYTES,
                "pending_free_bytes": allocator.pending_units * UNIT_BYTES,
                "quarantined_bytes": allocator.quarantined_units * UNIT_BYTES,
                "growing_chunks": len(state.reserved),
                "reserved_bytes": UNIT_BYTES
                * sum(count for extents in state.reserved.values() for _, count in extents),
                "append_staging_bytes": self._staging.resident_bytes,
                "free_extents": allocator.free_extent_count,
                "largest_free_bytes": allocator.largest_free * UNIT_BYTES,
                "journal_used": log.journal_used,
                "groups_committed": log.groups_committed,
                "journal_pages_written": log.pages_written,
                "checkpoints_written": log.checkpoints_written,
                "checkpoint_s": log.checkpoint_s,
                "scrub_sequence": log.scrub_sequence,
                "scrub_finished_at": state.scrub_finished_at,
                **{name: state.counters[name] for name in COUNTERS},
            }
            if state.write_budget is not None:
                figures["write_budget_left_bytes"] = state.write_budget.left_bytes()
        return figures | (state.device.counters() if not self._closed else {})

    def latencies(self) -> dict[str, Latency]:
        """How long calls have taken since open: "get", "put" and "durable_put", batches and futures too."""
        return self._latencies.read()

    def info(self) -> dict[str, Any]:
        """What this store is: path, identity, zones, device limits, engine and why, and how it was opened."""
        state = self._state
        superblock = state.log.superblock
        return {
            "path": state.device.path,
            **superblock_facts(superblock),
            "growable_bytes": growable_bytes(
                superblock.geometry, state.device.limits.size_bytes, superblock.average_chunk_bytes
            ),
            "generation": superblock.generation,
            "epoch": superblock.epoch,
            "engine": state.device.engine_name,
            "engine_reason": state.device.engine_reason,
            "placement": state.device.placement(),
            "accelerator": asdict(choose(state.options.verify or superblock.encryption is not None)),
            "memory": "through staging, where it is encrypted and decrypted"
            if superblock.encryption
            else "direct where it starts at a multiple of "
            f"{state.device.limits.memory_alignment_bytes} bytes, through registered staging elsewhere",
            "limits": asdict(state.device.limits),
            "options": {**asdict(state.options), "policies": state.options.policies.described()},
            "read_only_reason": state.read_only_reason or "",
            "write_failure": str(state.log.failure or ""),
            "recovery": asdict(self._recovery),
        }

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was wrong with the metadata when the store was opened, less what a repair has reported."""
        return tuple(self._findings)

    def check(
        self,
        payload: bool = False,
        *,
        repair: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> CheckReport:
        """Verify index and free map, with `payload` also every chunk's bytes. Reads and writes go on.

        Chunks that do not verify are dropped, as a get would, unless the store is open read-only. An open for
        writing has dealt with damaged metadata already; one that is read-only leaves it, and reports it here.

        With `repair` that report comes in any case, and all metadata is written again: a new checkpoint, and
        every superblock slot. Only what cannot be verified is dropped.

        `progress` is called with (bytes done, bytes to do). Raises DeviceLost, StoreReadOnly (`repair`).
        """
        found_at_open = self._findings if repair or self.read_only else []
        with self._operation(writing=repair):
            report = check_store(
                self._state, found_at_open, payload=payload, repair=repair, progress=progress
            )
        if repair:
            self._findings = []
        return report

    def scrub(
        self,
        bytes_per_s: float = DEFAULT_BYTES_PER_S,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> ScrubReport:
        """Read and verify every chunk, at most `bytes_per_s`, after everything else that wants the device.

        Goes on where an earlier scrub stopped, also one before a crash, to the end of the pass. Chunks that
        do not verify are dropped, as a get would. What is put meanwhile is left to the next pass.

        Ends early when the store is closed or `stop_scrub` is called. Raises InvalidArgument (a scrub is
        under way), DeviceLost, StoreClosed.
        """
        with self._operation():
            scrub = self._begin_scrub(bytes_per_s, progress)
            try:
                return scrub.run()
            finally:
                self._end_scrub()

    def start_scrub(
        self,
        bytes_per_s: float = DEFAULT_BYTES_PER_S,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> StoreFuture[ScrubReport]:
        """`scrub` in the background, on a thread of its own, where `progress` is called too.

        The future can be waited for, awaited, or ignored.
        """
        future: StoreFuture[ScrubReport] = StoreFuture()

        def carry_out() -> None:
            self._go_inside()
            report: ScrubReport | None = None
            problem: BaseException | None = None
            try:
                report = scrub.run()
            except BaseException as error:
                logger_for(self._where).error("the scrub ended: %s", error)
                problem = error
            finally:
                self._end_scrub()
                self._leave()
            if problem is not None:
                future.set_exception(problem)
            elif report is not None:
                future.set_result(report)

        future.set_running_or_notify_cancel()
        with interrupts:
            self._enter()
            try:
                scrub = self._begin_scrub(bytes_per_s, progress)
                threading.Thread(target=carry_out, name="blockkv-scrub", daemon=True).start()
            except BaseException:
                self._leave()
                raise
        return future

    def stop_scrub(self) -> None:
        """End the scrub under way after the few megabytes that it is reading; the next one goes on there."""
        with self._state.lock:
            if self._scrub is not None:
                self._scrub.stop()

    def _begin_scrub(self, bytes_per_s: float, progress: Callable[[int, int], None] | None) -> Scrub:
        scrub = Scrub(self._state, bytes_per_s, progress)
        with self._state.lock:
            if self._scrub is not None:
                raise InvalidArgument(
                    f"{self._state.device.path}: a scrub is under way; stop_scrub() ends it"
                )
            self._scrub = scrub
        return scrub

    def _end_scrub(self) -> None:
        with self._state.lock:
            self._scrub = None

    def close(self) -> None:
        """Wait for operations under way, make everything durable, write a checkpoint, let the device go.

        Idempotent. Raises StoreReadOnly when the last writes failed; the device is let go all the same.
        Raises InvalidArgument where it would wait for itself: in a `progress` callback, and in a callback
        that the future of a put runs on the thread of the store.
        """
        if getattr(self._inside, "count", 0):
            raise InvalidArgument(
                f"{self._state.device.path}: close was called from inside an operation of the store, which "
                "it would wait for; return from the callback first"
            )
        with interrupts:
            self._close()

    def _close(self) -> None:
        state = self._state
        if self._executor is not None and not self._closed:
            self._executor.shutdown()  # puts that were submitted are carried out
        self._preloads.withdraw_all()
        with state.lock:
            if self._closed:
                return
            self._closed = "the store was closed"
            if self._scrub is not None:
                self._scrub.stop()
            self._idle.wait_for(lambda: self._active_count == 0)
        self._stream_pool.end()
        for grown in list(self._growing):
            grown.close()
        for watch in list(state.watches):
            watch.close()
        state.stop()
        try:
            if not self.read_only:
                state.log.check_writable()
                state.log.commit()
                state.log.checkpoint(clean=True)
        finally:
            state.device.close()
            _open_stores.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<blockkv.Store {self._state.device.path} {len(self)} chunks{' closed' if self._closed else ''}>"
        )

    # -- inside ----------------------------------------------------------------------------------------

    def _put(
        self,
        items: list[tuple[Key, Tensors]],
        durable: bool,
        droppable: bool,
        deadline_ns: int,
        stays: Stay | None = None,
    ) -> tuple[list[bool], dict[int, BlockKVError]]:
        with self._operation(writing=True):
            if stays is None and self._state.keeping is None:
                run = PutRun(self._state, len(items), deadline_ns, droppable)
                run.run(items)
                results, errors, last_sequence = run.results, run.errors, run.last_sequence
            else:
                results, errors, last_sequence = put_kept(self._state, items, deadline_ns, droppable, stays)
            if durable:
                self._state.log.commit(last_sequence)
        return results, errors

    def _get(
        self,
        keys: Sequence[Key],
        outputs: Sequence[Any] | None,
        preload: bool,
        deadline_ns: int,
        occupied: Occupied | None = None,
    ) -> tuple[list[Any], dict[int, BlockKVError]]:
        data = self._data
        with self._operation():
            run = GetRun(
                data,
                len(keys),
                outputs is not None,
                preload=preload,
                deadline_ns=deadline_ns,
                occupied=occupied,
            )
            self._note_gets(keys)
            run.run(keys, outputs)
        errors = run.errors
        if errors:
            errors = {number: one for number, one in errors.items() if not self._outlives(data, one)}
        return run.results, errors

    def _note_gets(self, keys: Sequence[Key]) -> None:
        """Tell the policies, once what has expired is gone."""
        if self._state.keeping is not None:
            encoded, _ = encode_keys(keys)
            self._note_digests(list(map(key_digest, encoded)))

    def _note_digests(self, digests: Sequence[bytes]) -> None:
        with self._state.lock:
            self._state.expire()
            if self._state.keeping is not None:
                self._state.keeping.got(digests)

    def _get_any(
        self,
        keys: Sequence[Key],
        outputs: Sequence[Any] | None,
        parts: Sequence[Part],
        layout: KVLayout | None,
        preload: bool,
        deadline_ns: int,
    ) -> tuple[list[Any], dict[int, BlockKVError]]:
        """Whole chunks, or, with a layout, a part of each."""
        if layout is None:
            return self._get(keys, outputs, preload, deadline_ns)
        with self._operation():
            call = PartCall(self, keys, parts, layout, outputs)
            try:
                carry_out(call.reads, priority_of(preload), deadline_ns)
            finally:
                call.settle()
        return call.results, call.errors

    def _lease_chunks(self, digests: Sequence[bytes]) -> list[Leased | None]:
        """For reading parts of chunks, inside: see `blockkv.store.part_gets.ChunkSource`."""
        if self._state.keeping is not None:
            self._note_digests(digests)
        return lease(self._data, digests)

    def _outlives(self, state: DataPath, error: BlockKVError) -> bool:
        """Inside: see `blockkv.store.part_gets.ChunkSource`."""
        return False

    def _operation(self, writing: bool = False) -> _Operation:
        """Hold `close` and signal handlers back while it lasts. Raises StoreClosed or StoreReadOnly."""
        return _Operation(self, writing)

    def _go_inside(self) -> None:
        self._inside.count = getattr(self._inside, "count", 0) + 1

    def _enter(self, writing: bool = False) -> None:
        with self._state.lock:
            self._check_open()
            if writing:
                self._check_writable()
            self._active_count += 1

    def _leave(self) -> None:
        with self._state.lock:
            self._active_count -= 1
            if self._closed:
                self._idle.notify_all()

    @contextlib.contextmanager
    def _found(self, key: Key) -> Iterator[Entry | None]:
        digest = key_digest(encode_key(key))
        self._check_open()
        with interrupts, self._state.lock:
            self._state.expire()
            yield self._state.index.get(digest)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self._state.device.path}: {self._closed}")

    def _check_writable(self) -> None:
        if self._state.read_only_reason:
            raise StoreReadOnly(f"{self._state.device.path}: {self._state.read_only_reason}")
        self._state.log.check_writable()

    def _abandon(self, reason: str) -> None:
        """Refuse every further use, without touching the device."""
        self._closed = reason
        self._state.stop()
        _open_stores.discard(self)


class _Operation:
    """See `Store._operation`. Not a generator: every get and put goes through it."""

    __slots__ = ("_store", "_writing")

    def __init__(self, store: Store, writing: bool) -> None:
        self._store = store
        self._writing = writing

    def __enter__(self) -> None:
        interrupts.__enter__()
        try:
            self._store._enter(self._writing)
        except BaseException:
            interrupts.__exit__(None, None, None)
            raise
        self._store._go_inside()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._store._inside.count -= 1
            self._store._leave()
        finally:
            interrupts.__exit__(kind, error, trace)


COUNTERS = (
    "put_chunks",
    "put_bytes",
    "put_existing",
    "put_copied_bytes",
    "put_device_error",
    "put_dropped",
    "append_bytes",
    "append_read_bytes",
    "put_refused",
    "put_over_budget",
    "get_chunks",
    "get_bytes",
    "get_misses",
    "get_copied_bytes",
    "get_checksum_mismatch",
    "get_device_error",
    "get_device_lost",
    "get_transient_error",
    "get_deadline",
    "get_refused",
    "check_damaged",
    "discarded_bytes",
    "discard_failed",
    "chunks_deleted",
    "chunks_evicted",
    "chunks_expired",
    "bytes_evicted",
    "chunks_dropped_damaged",
    *part_gets.COUNTERS,
    "scrub_chunks",
    "scrub_bytes",
    "scrub_damaged",
    "scrub_transient_error",
    "scrub_passes",
)
"""Counters of `Store.stats`, named after the place where something was found."""


def due_ns(deadline_s: float | None) -> int:
    """The moment so many seconds from now, in `time.monotonic_ns`; 0 for None."""
    if deadline_s is None:
        return 0
    if not (is_number(deadline_s) and 0 <= deadline_s <= LONGEST_DEADLINE_S):
        raise InvalidArgument(f"deadline_s is {deadline_s!r}; use None, or 0 to {LONGEST_DEADLINE_S} seconds")
    return time.monotonic_ns() + int(deadline_s * 1e9) + 1


def left_s(deadline_ns: int) -> float | None:
    """Seconds until a moment that `due_ns` gave."""
    return max(0, deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else None


def put_kind(durable: bool) -> str:
    """What the latency of a put counts as."""
    return "durable_put" if durable else "put"


def priority_of(preload: bool) -> Priority:
    """The class of a get."""
    return Priority.PRELOAD if preload else Priority.LOAD


def wanted_parts(part: Part | Sequence[Part] | None, layout: KVLayout | None, count: int) -> list[Part]:
    """The part for each of `count` keys. Raises InvalidArgument."""
    if layout is None:
        if part is not None:
            raise InvalidArgument("a part was given without layout=, which says where in a chunk it is")
        return []
    check_layout(layout)
    if part is None or isinstance(part, Part):
        return [part or WHOLE] * count
    parts = listed(part, "parts")
    if not all(isinstance(one, Part) for one in parts):
        raise InvalidArgument(f"part is {part!r}; give a Part, or one for each key")
    if len(parts) != count:
        raise InvalidArgument(f"{count} keys but {len(parts)} parts")
    return parts


def check_layout(layout: object) -> None:
    """Raise InvalidArgument for what is no KV layout."""
    if not isinstance(layout, KVLayout):
        raise InvalidArgument(f"layout is {layout!r}; give a KVLayout")


def several_keys(keys: Iterable[Key]) -> list[Key]:
    """Keys as a list. Raises InvalidArgument for a single one, and for what holds none."""
    if isinstance(keys, (str, bytes)):
        raise InvalidArgument("one key was given where several are expected; put it into a list")
    return listed(keys, "keys")


def several_items(items: Mapping[Any, Tensors] | Iterable[tuple[Key, Tensors]]) -> list[tuple[Key, Tensors]]:
    """What `put_many` is given, as a list of pairs. Raises InvalidArgument."""
    pairs = listed(items.items() if isinstance(items, Mapping) else items, "(key, tensors) pairs")
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidArgument("put_many takes (key, tensors) pairs or a mapping of keys to tensors")
    return pairs


def listed(items: Iterable[T], what: str) -> list[T]:
    """`items` as a list. Raises InvalidArgument for what is none."""
    if not isinstance(items, Iterable):
        raise InvalidArgument(f"{items!r} is no list of {what}")
    return list(items)


def open_store(
    path: str | os.PathLike[str] | Device,
    *,
    read_only: bool = False,
    evict: bool = True,
    verify: bool = True,
    engine: Literal["auto", "io_uring", "threads", "passthrough"] = "auto",
    placement: bool = True,
    depth: int = 256,
    commit_interval_ms: float | None = 10.0,
    discard: bool = False,
    max_store_bytes: int = 256 << 20,
    discard_bytes_per_s: float = DEFAULT_DISCARD_BYTES_PER_S,
    eviction: str | Callable[[], Eviction] = "lru",
    admission: str | Callable[[], Admission] = "all",
    quotas: Mapping[str, int] | None = None,
    write_budget: int | str | WriteBudget | None = None,
    unlock: Unlock | None = None,
) -> Store:
    """Open a store that is no array. Options, and what is raised: `blockkv.store.array_open.open_any`."""
    policies = Policies(eviction, admission, quotas, as_budget(write_budget))
    options = check_options(
        evict, verify, discard, commit_interval_ms, max_store_bytes, discard_bytes_per_s, policies
    )
    unlocker = Unlocker(unlock)
    store: Store | None = None
    try:
        with interrupts:
            if isinstance(path, Device):
                store = open_on(path, read_only, options, unlocker, by_path=False)
            else:
                device = open_device(
                    path, read_only=read_only, engine=engine, placement=placement, depth=depth
                )
                try:
                    store = open_on(device, read_only, options, unlocker, by_path=True)
                except BaseException:
                    device.close()
                    raise
    except BaseException:
        if store is not None:  # an interrupt that waited: nobody would have it
            store.close()
        raise
    return store


def as_budget(write_budget: int | str | WriteBudget | None) -> WriteBudget | None:
    """The write budget of an open. Raises InvalidArgument."""
    if write_budget is None or isinstance(write_budget, WriteBudget):
        return write_budget
    return WriteBudget(parse_size(write_budget))


def check_options(
    evict: bool,
    verify: bool,
    discard: bool,
    commit_interval_ms: float | None,
    max_store_bytes: int,
    discard_bytes_per_s: float,
    policies: Policies | None = None,
) -> Options:
    """The options of an open. Raises InvalidArgument."""
    if not (
        commit_interval_ms is None
        or (is_number(commit_interval_ms) and 0 < commit_interval_ms <= LONGEST_INTERVAL_MS)
    ):
        raise InvalidArgument(
            f"commit_interval_ms is {commit_interval_ms!r}; use None, or a number up to {LONGEST_INTERVAL_MS}"
        )
    if not (is_number(max_store_bytes) and max_store_bytes >= 1):
        raise InvalidArgument(f"max_store_bytes is {max_store_bytes!r}; use a number, at least 1")
    if not (is_number(discard_bytes_per_s) and discard_bytes_per_s >= 1):
        raise InvalidArgument(f"discard_bytes_per_s is {discard_bytes_per_s!r}; use a number, at least 1")
    return Options(
        evict,
        verify,
        discard,
        commit_interval_ms,
        max_store_bytes,
        discard_bytes_per_s,
        policies or Policies(),
    )


def open_device(
    path: str | os.PathLike[str],
    *,
    read_only: bool,
    engine: Literal["auto", "io_uring", "threads", "passthrough"],
    depth: int,
    placement: bool = True,
) -> NativeDevice:
    """A device to open a store on, locked. Raises as `open_store` does."""
    if (block_device := passthrough.block_device_of(path)) is not None:
        if engine not in ("auto", "passthrough"):
            raise InvalidArgument(
                f"{os.fspath(path)} takes NVMe commands only, which engine {engine!r} does not send; "
                f"give {block_device}"
            )
        path, engine = block_device, "passthrough"
    descriptor, canonical, limits = namespace.open_namespace(path, read_only=read_only)
    if not read_only:
        try:
            refuse_if_reused(canonical, descriptor, limits)
        except BaseException:
            os.close(descriptor)
            raise
    return NativeDevice(descriptor, canonical, limits, engine=engine, depth=depth, placement=placement)


def open_on(
    device: Device,
    read_only: bool,
    options: Options,
    unlocker: Unlocker,
    *,
    by_path: bool,
    array: Membership | None = None,
    volume_key: VolumeKey | None = None,
) -> Store:
    """Open the store on `device`, as `open_store` does; `by_path`: it was opened by its path just now.

    `array` is the place that a member of one gets with this open. Without it a member opens read-only.
    With `volume_key` the device decrypts already.
    """
    if device.limits.read_only and not read_only:
        raise DeviceReadOnly(f"{device.path} is read-only; open it with read_only=True")
    if not read_only:
        device.flush()
    found, slot_findings = read_superblock(device)
    if found.array and not array and not read_only:
        raise WrongStore(
            f"{device.path} is member {found.array.member_index} of an array of {found.array.member_count} "
            f"({found.array.array_uuid_text}) and not written to alone: open all members together; "
            "read_only=True shows this one"
        )
    refuse_second_open(device, found, read_only=read_only, by_path=by_path)
    if volume_key:
        found = unlock_superblock(device.path, found, volume_key)
    else:
        found, _ = unlock_device(device, found, unlocker, read_only=read_only)
    recovered = recover(device, found)
    recovered.findings[:0] = slot_findings
    growth_was_cut_short = tail_is_unfinished(readable_slots(device, found.geometry.slot_offsets), found)
    if read_only:
        recovered.read_only_reason = "it was opened read-only"
    if not recovered.read_only_reason:
        recovered.superblock = replace(next_epoch(recovered), array=array)
        write_superblock(device, recovered.superblock)
    store = Store(device, recovered, options)
    damaged = recovered.report.checkpoint_pages_damaged or recovered.report.journal_damaged
    if not store.read_only and (damaged or growth_was_cut_short):
        try:
            if damaged:  # what cannot be read today may be tomorrow, with records of chunks long gone
                store.checkpoint()
            if growth_was_cut_short:
                store._state.log.renew_superblock(SLOTS_PER_COPY - 1)
        except StoreReadOnly as error:
            store._abandon(str(error))
            raise DeviceError(
                f"{device.path}: its metadata is damaged and cannot be rewritten: {error}"
            ) from error
    return store


def refuse_second_open(device: Device, found: Superblock, *, read_only: bool, by_path: bool) -> None:
    """Raise DeviceBusy or WrongStore where this process has the store open already.

    One store on two paths is a copy, and both would go on from the same state; two that only read may. A
    `Device` handed in by the caller may be a copy on purpose (a crash state), but is never shared.
    """
    for other in list(_open_stores):
        if other._closed:
            continue
        if other._state.device is device:
            raise DeviceBusy(f"{device.path} is open in this process already")
        if read_only and other.read_only:
            continue
        if by_path and other._state.log.superblock.uuid == found.uuid:
            raise WrongStore(
                f"{device.path} holds the store {found.uuid_text}, which is open on "
                f"{other._state.device.path}: one of them is a copy; close that one, or detach the copy"
            )


@atexit.register
def _close_all() -> None:
    for store in list(_open_stores):
        try:
            store.close()
        except BlockKVError as error:
            logger_for(store._where).error("closing at exit: %s", error)


def _abandon_all() -> None:
    for store in list(_open_stores):
        store._closed = BELONGS_TO_PARENT
        # A thread of the parent may have held it at the fork, and there is none here to let it go.
        store._state.lock = threading.RLock()


os.register_at_fork(after_in_child=_abandon_all)
