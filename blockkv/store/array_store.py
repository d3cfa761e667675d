"""An array: several stores, its members, that are one store to whoever uses it.

Each member has a device, a log and an index of its own. A chunk lies whole in one of them; which one is
decided when it is put, by the room that the members have and what they are writing. A call with many chunks
runs on all members at once, and a durable one waits for one flush of each.

Invariants
  * a key is in one member at most: whoever puts it has claimed it in the array;
  * a key whose delete is not durable yet goes back to the member that deleted it. In one log the delete comes
    before the put; in two logs a crash could keep the put and take back the delete;
  * once a member is lost nothing is put or deleted before all others know of the next term, without it
    (`array_term`);
  * nothing is acknowledged as durable that is not durable in a member of the newest term.

A member whose metadata cannot be written is not lost: what it holds is read, and puts go to the others.

Not here: opening (`array_open`), everything a store does by itself (`store`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from blockkv.errors import (
    BatchError,
    BlockKVError,
    DeviceLost,
    InvalidArgument,
    StoreClosed,
    StoreFull,
    StoreReadOnly,
)
from blockkv.format.record import key_digest
from blockkv.kv_layout import KVLayout, Part
from blockkv.logs import logger_for
from blockkv.store.array_term import set_of
from blockkv.store.check import CheckReport
from blockkv.store.data_path import DataPath
from blockkv.store.finding import Finding, Remedy
from blockkv.store.growing import STORED_ALREADY, GrowingChunk
from blockkv.store.interrupts import interrupts
from blockkv.store.keeping import Stay
from blockkv.store.keys import Key, encode_key
from blockkv.store.latencies import Latencies
from blockkv.store.member import Member
from blockkv.store.numbers import is_number
from blockkv.store.part_gets import Leased
from blockkv.store.preloads import Preloads
from blockkv.store.scrub import DEFAULT_BYTES_PER_S, Progress, ScrubReport
from blockkv.store.state import GROWING
from blockkv.store.store import (
    BELONGS_TO_PARENT,
    ChunkInfo,
    Store,
    StoreFuture,
    due_ns,
    left_s,
    several_keys,
)
from blockkv.store.streams import StreamPool
from blockkv.store.watch import Watch
from blockkv.tensors import Occupied, Tensors

__all__ = ["ArrayStore"]

MEMBER_THREADS = 32
"""Calls on members that go on at once, for each of puts and gets."""
PLACED_LIMIT_BYTES = 1 << 30
"""When this much has been placed, it counts half from then on: what was long ago does not matter."""
PATIENCE_S = 0.2
"""How often a check or scrub looks for signals while its members work."""

LARGEST_OF_MEMBERS = ("largest_free_bytes", "journal_used", "scrub_sequence", "scrub_finished_at")
"""Figures of `Store.stats` of which the array has the largest; of all others it has the sum."""
STATE_OF_MEMBERS = (
    "chunks",
    "payload_bytes",
    "record_bytes",
    "data_bytes",
    "free_bytes",
    "pending_free_bytes",
    "quarantined_bytes",
    "growing_chunks",
    "reserved_bytes",
    "append_staging_bytes",
    "free_extents",
)
"""Figures that say what is there: like the largest, they are those of members that are not lost."""

COUNTERS = ("put_existing", "get_misses", "get_member_lost", "members_lost")
"""Counters of `ArrayStore.stats` beyond the sums of the members."""

T = TypeVar("T")


@dataclass(slots=True)
class _Put:
    """One chunk on its way to a member."""

    position: int
    key: Key
    value: Tensors
    digest: bytes
    payload_bytes: int
    full: set[int] = field(default_factory=set)
    """Members that had no room for it."""
    refusal: StoreFull | None = None


@dataclass(frozen=True, slots=True)
class _Wish:
    """How the chunks of one call are to be put."""

    durable: bool
    droppable: bool
    deadline_ns: int
    """In `time.monotonic_ns`; 0: none."""
    stays: Stay | None


class _Stopped(Exception):
    """Ends a check of a member whose array has been interrupted."""


class ArrayStore(Store):
    """An open array. Get one from `blockkv.open` with several paths.

    A `Store` in every method, with the same promises. What differs: `keys` gives the chunks of one member
    after the other, and `stats` and `info` say more. Losing a member makes its chunks misses, with a warning
    and counters (`members_lost`, `get_member_lost`). DeviceLost comes only when no member is left, and once
    from `commit` or `close` where changes that were not durable went away with a member.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        missing: Sequence[int] = (),
        outdated: Sequence[int] = (),
        ambiguous: Iterable[bytes] = (),
    ) -> None:
        """`missing`: not there. `outdated`: left out, because what they hold does not count.
        `ambiguous`: digests of keys that two members hold, which only damage explains; they are misses.
        """
        self._members = tuple(members)
        self._missing = tuple(missing)
        self._outdated = tuple(outdated)
        self._ambiguous = frozenset(ambiguous)
        self._term = max(member.membership.term for member in members)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when claims are given up and when an operation is over."""
        self._claims: set[bytes] = set()
        """Digests of keys being put."""
        self._counters: Counter[str] = Counter()
        self._losses = 0
        self._losses_told = 0
        """Of the losses, those that all other members know of on media."""
        self._term_lock = threading.Lock()
        self._scrub_told: _JointProgress | None = None
        """The progress of the scrub under way."""
        self._owed = ""
        """What the next commit has to say of changes that were lost with a member."""
        self._active_count = 0
        self._inside = threading.local()
        self._closed = ""
        self._latencies = Latencies()
        self._executor: ThreadPoolExecutor | None = None
        self._preloads = Preloads()
        self._stream_pool = StreamPool(self._go_inside)
        self._writers = ThreadPoolExecutor(MEMBER_THREADS, "blockkv-member-put", self._go_inside)
        self._readers = ThreadPoolExecutor(MEMBER_THREADS, "blockkv-member-get", self._go_inside)
        _open_arrays.add(self)

    @property
    def _shared_lock(self) -> threading.RLock:
        return self._lock

    @property
    def _where(self) -> str:
        return self._paths

    # -- writing ---------------------------------------------------------------------------------------

    def reserve(self, key: Key, capacity_bytes: int) -> GrowingChunk:
        """`Store.reserve` on one member. When that is lost, DeviceLost: what was appended is gone."""
        digest = key_digest(encode_key(key))
        put = _Put(0, key, b"", digest, capacity_bytes)
        own: set[bytes] = set()
        with self._operation(writing=True):
            try:
                while True:
                    member = self._assign_growing(put, own)
                    try:
                        self._begin_term_if_due()
                        guard = functools.partial(self._growing_on, member)
                        return member.reserve(key, capacity_bytes, guard)
                    except StoreFull as error:
                        if not self._may_go_elsewhere(member, put):
                            raise
                        put.full.add(member.index)
                        put.refusal = error
                    except BlockKVError as error:
                        if not self._lose_if_gone(member, error):
                            raise
                    finally:
                        with self._lock:
                            member.queued_bytes -= capacity_bytes
            finally:
                self._give_up(own, set(own))

    def _assign_growing(self, put: _Put, own: set[bytes]) -> Member:
        """The member for a chunk that is to grow; its key is claimed."""
        errors: dict[int, BlockKVError] = {}
        assigned, _ = self._assign([put], own, False, errors)
        if errors:
            raise errors[0]
        if not assigned:
            raise InvalidArgument(STORED_ALREADY)
        (member,) = assigned
        return member

    @contextlib.contextmanager
    def _growing_on(self, member: Member, writing: bool) -> Iterator[None]:
        """What is done to a chunk that grows on `member` runs in this."""
        with self._operation():
            if writing:
                self._begin_term_if_due()
            try:
                with member.operation(writing):
                    yield
            except BlockKVError as error:
                self._lose_if_gone(member, error)
                raise
            finally:
                if writing:
                    member.acknowledge_lazily()

    def delete(self, key: Key, durable: bool = False) -> bool:
        digest = key_digest(encode_key(key))
        with self._operation(writing=True):
            if any(member.grows(digest) for member in self._present):
                raise InvalidArgument(GROWING)
            member = self._holder(digest)
            deleted = False
            if member is not None:
                try:
                    deleted = member.store.delete(key, durable)
                    if not durable:
                        member.acknowledge_lazily()
                except BlockKVError as error:
                    if not self._lose_if_gone(member, error):
                        raise
                    deleted = True  # with everything else on that member: the next term says so
            self._begin_term_if_due()
        return deleted

    def commit(self) -> None:
        with self._operation(writing=True):
            self._on_writable(lambda member: member.store.commit())

    def checkpoint(self) -> None:
        with self._operation(writing=True):
            self._on_writable(lambda member: member.store.checkpoint())

    def discard_freed(self) -> int:
        discarded = [0]
        with self._operation(writing=True):
            self._on_writable(lambda member: discarded.append(member.store.discard_freed()))
        return sum(discarded)

    # -- reading ---------------------------------------------------------------------------------------

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
        if layout is not None or part is not None:
            return super().submit_get(
                key, out, part=part, layout=layout, preload=preload, deadline_s=deadline_s
            )
        due_ns(deadline_s)  # refuses what is none, also where no member is asked
        future: StoreFuture[Any] = StoreFuture()
        self._latencies.time_future("get", future)
        miss = None if out is None else False
        digest = key_digest(encode_key(key))

        def finish(inner: Future[Any]) -> None:
            assert member is not None
            if inner.cancelled():
                self._leave()
                future.withdrawn()
                return
            error = inner.exception()
            if isinstance(error, BlockKVError) and self._lose_if_gone(member, error):
                self._count("get_member_lost")
                error = None if self._present else error
                result = miss
            else:
                result = None if error else inner.result()
            self._leave()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        with interrupts:
            self._enter()
            try:
                member = self._holder(digest)
                inner: StoreFuture[Any] | None = None
                if member is not None:
                    inner = member.store.submit_get(key, out, preload=preload, deadline_s=deadline_s)
            except BaseException:
                self._leave()
                raise
            if inner is not None:
                future.withdraw = inner.cancel
                inner.add_done_callback(finish)
            else:
                self._count_miss(digest)
                self._leave()
                future.set_result(miss)
        return future

    # -- the catalog -----------------------------------------------------------------------------------

    def contains(self, key: Key) -> bool:
        self._check_open()
        return self._holder(key_digest(encode_key(key))) is not None

    def lookup(self, keys: Iterable[Key]) -> int:
        self._check_open()
        wanted, length = several_keys(keys), 0
        for member in self._present:
            member.looked_up(wanted)
        for key in wanted:
            if self._holder(key_digest(encode_key(key))) is None:
                break
            length += 1
        return length

    def touch(self, key: Key) -> bool:
        store = self._store_of(key)
        return store is not None and store.touch(key)

    def pin(self, key: Key) -> bool:
        store = self._store_of(key)
        return store is not None and store.pin(key)

    def unpin(self, key: Key) -> bool:
        store = self._store_of(key)
        return store is not None and store.unpin(key)

    def keys(self) -> Iterator[str | bytes]:
        """The keys as of now, one member after the other; of each first to be evicted first."""
        self._check_open()
        listed = [member.store.keys() for member in self._present]
        return (key for keys in listed for key in keys if not self._is_ambiguous(key))

    def watch(self) -> Watch:
        """`Store.watch`, of all members. When one is lost its chunks are gone."""
        watch = Watch()
        with interrupts, self._lock:
            self._check_open()
            listed = [(member, member.begin_watch(watch, self._ambiguous)) for member in self._present]
        for member, digests in listed:
            member.list_for(watch, digests)
        return watch

    def entry(self, key: Key) -> ChunkInfo | None:
        store = self._store_of(key)
        return None if store is None else store.entry(key)

    def __len__(self) -> int:
        twice = sum(member.holds(digest) for digest in self._ambiguous for member in self._present)
        return sum(len(member.store) for member in self._present) - twice

    # -- memory ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def register(self, memory: Any) -> Iterator[bool]:
        self._check_open()
        with contextlib.ExitStack() as stack:
            available = [stack.enter_context(member.store.register(memory)) for member in self._present]
            yield all(available)

    # -- looking after ---------------------------------------------------------------------------------

    @property
    def read_only(self) -> bool:
        return all(member.store.read_only for member in self._members)

    def stats(self) -> dict[str, Any]:
        """Counters since open and the present state, of all members together."""
        figures: dict[str, Any] = {}
        for member in self._members:
            for name, value in member.store.stats().items():
                if member.lost and name in LARGEST_OF_MEMBERS + STATE_OF_MEMBERS:
                    value = 0
                so_far = figures.get(name, 0)
                figures[name] = max(so_far, value) if name in LARGEST_OF_MEMBERS else so_far + value
        with self._lock:
            for name in COUNTERS:
                figures[name] = figures.get(name, 0) + self._counters[name]
        figures["members_present"] = len(self._present)
        return figures

    def info(self) -> dict[str, Any]:
        """What this array is: identity, term, and the `info` of each member that is there."""
        of_members = {member.index: member.store.info() for member in self._members}
        first = of_members[self._members[0].index]
        place = self._members[0].membership
        members = []
        for index in range(place.member_count):
            document: dict[str, Any] = {"member_index": index, "state": self._state_of(index)}
            members.append(document | of_members.get(index, {}))
        return {
            "path": self._paths,
            "array_uuid": place.array_uuid_text,
            "label": first["label"],
            "format_version": first["format_version"],
            "term": self._term,
            "data_bytes": sum(member.data_bytes for member in self._present),
            "options": first["options"],
            "members": members,
        }

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = [
            Finding("member", f"is {self._state_of(index)}", Remedy.RETURN, index) for index in self._absent()
        ]
        for member in self._members:
            found += [replace(one, device=member.path) for one in member.store.findings]
        return tuple(found)

    def check(
        self, payload: bool = False, *, repair: bool = False, progress: Progress | None = None
    ) -> CheckReport:
        """`Store.check` of all members at once. A member that is not there, or lost, is a finding.

        `progress` is called on threads of the store, one at a time.
        """
        with self._operation(writing=repair):
            told = _JointProgress(progress, self._present)
            reports = self._on_present(
                lambda member: member.store.check(payload, repair=repair, progress=told.of(member)), told
            )
        findings = [one for one in self.findings if one.structure == "member"]
        for member, report in reports:
            findings += [replace(one, device=member.path) for one in report.findings]
        return CheckReport(
            sum(report.chunks for _, report in reports),
            sum(report.payload_bytes for _, report in reports),
            payload,
            repair,
            tuple(findings),
        )

    def scrub(
        self, bytes_per_s: float = DEFAULT_BYTES_PER_S, *, progress: Progress | None = None
    ) -> ScrubReport:
        """`Store.scrub` of all members at once, which share `bytes_per_s`.

        `progress` is called on threads of the store, one at a time.
        """
        with self._operation():
            told = self._begin_scrub_of_all(bytes_per_s, progress)
            return self._scrub_all(bytes_per_s, told)

    def start_scrub(
        self, bytes_per_s: float = DEFAULT_BYTES_PER_S, *, progress: Progress | None = None
    ) -> StoreFuture[ScrubReport]:
        future: StoreFuture[ScrubReport] = StoreFuture()

        def carry_out() -> None:
            self._go_inside()
            report: ScrubReport | None = None
            problem: BaseException | None = None
            try:
                report = self._scrub_all(bytes_per_s, told)
            except BaseException as error:
                logger_for(self._where).error("the scrub ended: %s", error)
                problem = error
            finally:
                self._leave()
            if problem is not None:
                future.set_exception(problem)
            elif report is not None:
                future.set_result(report)

        future.set_running_or_notify_cancel()
        with interrupts:
            self._enter()
            try:
                told = self._begin_scrub_of_all(bytes_per_s, progress)
                threading.Thread(target=carry_out, name="blockkv-scrub", daemon=True).start()
            except BaseException:
                self._leave()
                raise
        return future

    def stop_scrub(self) -> None:
        with self._lock:
            if self._scrub_told is not None:
                self._scrub_told.stop()

    def _begin_scrub_of_all(self, bytes_per_s: float, progress: Progress | None) -> _JointProgress:
        if not (is_number(bytes_per_s) and bytes_per_s > 0):
            raise InvalidArgument(f"a scrub of {bytes_per_s!r} bytes a second would never end")
        with self._lock:
            if self._scrub_told is not None:
                raise InvalidArgument(f"{self._paths}: a scrub is under way; stop_scrub() ends it")
            self._scrub_told = _JointProgress(
                progress, self._present, stop=lambda one: one.store.stop_scrub()
            )
            return self._scrub_told

    def _scrub_all(self, bytes_per_s: float, told: _JointProgress) -> ScrubReport:
        share = bytes_per_s / max(1, len(self._present))
        try:
            reports = self._on_present(
                lambda member: member.store.scrub(share, progress=told.of(member)), told
            )
        finally:
            with self._lock:
                self._scrub_told = None
        return _joint_scrub([report for _, report in reports])

    def close(self) -> None:
        if getattr(self._inside, "count", 0):
            raise InvalidArgument(
                f"{self._paths}: close was called from inside an operation of the store, which it would wait "
                "for; return from the callback first"
            )
        with interrupts:
            self._close()

    def _close(self) -> None:
        if self._executor is not None and not self._closed:
            self._executor.shutdown()  # puts that were submitted are carried out
        for store in (self, *(member.store for member in self._members)):
            store._preloads.withdraw_all()
        with self._lock:
            if self._closed:
                return
            self._closed = "the store was closed"
            self.stop_scrub()
            self._changed.wait_for(lambda: self._active_count == 0)
        self._writers.shutdown()
        self._readers.shutdown()
        self._stream_pool.end()
        problems: list[BlockKVError] = []
        for member in self._members:
            try:
                member.store.close()
            except BlockKVError as error:
                if member.lost or self._lose_if_gone(member, error):
                    logger_for(member.path).warning("closing what is lost: %s", error)
                else:
                    problems.append(error)
        if problems:
            raise problems[0]
        self._pay_debt()

    def __repr__(self) -> str:
        return f"<blockkv.ArrayStore {self._paths} {len(self)} chunks{' closed' if self._closed else ''}>"

    # -- members ---------------------------------------------------------------------------------------

    @property
    def _present(self) -> list[Member]:
        return [member for member in self._members if not member.lost]

    @property
    def _paths(self) -> str:
        return ", ".join(member.path for member in self._members)

    def _holder(self, digest: bytes) -> Member | None:
        """The member that holds the key."""
        for member in self._members:
            if not member.lost and member.holds(digest):
                return None if digest in self._ambiguous else member
        return None

    def _store_of(self, key: Key) -> Store | None:
        digest = key_digest(encode_key(key))
        self._check_open()
        member = self._holder(digest)
        return None if member is None else member.store

    def _is_ambiguous(self, key: Key) -> bool:
        return bool(self._ambiguous) and key_digest(encode_key(key)) in self._ambiguous

    def _absent(self) -> list[int]:
        lost = [member.index for member in self._members if member.lost]
        return sorted([*self._missing, *self._outdated, *lost])

    def _state_of(self, index: int) -> str:
        for member in self._members:
            if member.index == index:
                return f"lost: {member.lost}" if member.lost else "present"
        return "missing" if index in self._missing else "outdated: others were written to without it"

    def _lose_if_gone(self, member: Member, error: BlockKVError) -> bool:
        """Whether `error` says that the device of `member` is gone; then it is not used any more."""
        gone = isinstance(error, DeviceLost) or (isinstance(error, StoreReadOnly) and member.device_is_gone)
        if gone:
            self._lose(member, error)
        return gone or bool(member.lost)

    def _lose(self, member: Member, error: BlockKVError) -> None:
        with self._lock:
            if member.lost:
                return
            member.lost = str(error)
            member.end_watches()
            self._losses += 1
            self._counters["members_lost"] += 1
            if member.owes:
                self._owed = (
                    f"{member.path} was lost with changes that were not durable yet; what the other members "
                    "hold is durable"
                )
            logger_for(member.path, chunks=len(member.store)).warning(
                "lost, with %d chunks, which are misses from now on: %s",
                len(member.store),
                error,
            )

    def _begin_term_if_due(self) -> None:
        """Return once no member counts that was lost. Raises DeviceLost when none is left."""
        if self._losses_told == self._losses:
            return
        with self._term_lock:
            while True:
                with self._lock:
                    losses, present = self._losses, self._present
                    if self._losses_told == losses:
                        return
                if not present:
                    raise self._all_lost()
                self._term += 1
                members = set_of(member.index for member in present)
                for member in present:
                    try:
                        member.begin_term(self._term, members)
                    except BlockKVError as error:
                        self._lose(member, error)
                with self._lock:
                    if self._losses == losses:
                        self._losses_told = losses

    def _all_lost(self) -> DeviceLost:
        return DeviceLost(f"{self._paths}: no member is left: {self._members[-1].lost}")

    def _pay_debt(self) -> None:
        with self._lock:
            owed, self._owed = self._owed, ""
        if owed:
            raise DeviceLost(owed)

    # -- puts ------------------------------------------------------------------------------------------

    def _put(
        self,
        items: list[tuple[Key, Tensors]],
        durable: bool,
        droppable: bool,
        deadline_ns: int,
        stays: Stay | None = None,
    ) -> tuple[list[bool], dict[int, BlockKVError]]:
        wish = _Wish(durable, droppable, deadline_ns, stays)
        results = [False] * len(items)
        errors: dict[int, BlockKVError] = {}
        with self._operation(writing=True):
            waiting = []
            for position, (key, value) in enumerate(items):
                try:
                    digest = key_digest(encode_key(key))
                except BlockKVError as error:
                    errors[position] = error
                    continue
                waiting.append(_Put(position, key, value, digest, _rough_bytes(value)))
            own: set[bytes] = set()
            try:
                while waiting:
                    assigned, postponed = self._assign(waiting, own, wish.durable, errors)
                    self._begin_term_if_due()
                    waiting = self._carry_out(assigned, own, wish, results, errors) + postponed
            finally:
                self._give_up(own, set(own))
        return results, errors

    def _assign(
        self, puts: list[_Put], own: set[bytes], durable: bool, errors: dict[int, BlockKVError]
    ) -> tuple[dict[Member, list[_Put]], list[_Put]]:
        """Claim the keys and choose a member for each; puts of keys that are claimed already are postponed.

        Waits where all are claimed by others: nothing is claimed by this call then.
        """
        while True:
            assigned: dict[Member, list[_Put]] = {}
            postponed: list[_Put] = []
            settled = False
            now: set[bytes] = set()
            with self._lock:
                for put in puts:
                    digest = put.digest
                    if digest in now or (digest in self._claims and digest not in own):
                        postponed.append(put)
                        continue
                    now.add(digest)
                    try:
                        member = self._member_for(put, durable)
                    except BlockKVError as error:
                        errors[put.position] = error
                        member = None
                    if member is None:
                        settled = True
                        self._give_up(own, {digest} & own)
                        continue
                    self._claims.add(digest)
                    own.add(digest)
                    member.queued_bytes += put.payload_bytes
                    assigned.setdefault(member, []).append(put)
                if assigned or settled or not postponed:
                    return assigned, postponed
                self._changed.wait()

    def _member_for(self, put: _Put, durable: bool) -> Member | None:
        """The member to put it on; None when it is there and nothing is left to do. Raises why there is none.

        Under the lock.
        """
        for member in self._present:
            if member.device_is_gone:
                self._lose(member, DeviceLost(f"{member.path}: the device went away"))
        deleter: Member | None = None
        for member in self._present:
            held, deleted = member.claims(put.digest)
            if held:
                if member.writable:
                    return member
                info = member.store.entry(put.key)
                if info is not None and (info.durable or not durable):
                    self._counters["put_existing"] += 1
                    return None
            if held or deleted:
                deleter = member
        if deleter is not None:
            if deleter.writable and deleter.index not in put.full:
                return deleter
            raise StoreReadOnly(
                f"{deleter.path} takes no more writes, and what it has of this key cannot be made durable or "
                "deleted any more"
            )
        return self._place(put)

    def _place(self, put: _Put) -> Member:
        candidates = [member for member in self._present if member.writable and member.index not in put.full]
        if not candidates:
            if put.refusal is not None:
                raise put.refusal
            if not self._present:
                raise self._all_lost()
            raise StoreReadOnly(f"{self._paths}: no member takes writes")

        def load(member: Member) -> float:
            busy_bytes = member.queued_bytes + member.placed_bytes + put.payload_bytes
            return busy_bytes / max(1, member.room_bytes)

        chosen = min(candidates, key=load)
        chosen.placed_bytes += put.payload_bytes
        if sum(member.placed_bytes for member in self._members) > PLACED_LIMIT_BYTES:
            for member in self._members:
                member.placed_bytes //= 2
        return chosen

    def _carry_out(
        self,
        assigned: dict[Member, list[_Put]],
        own: set[bytes],
        wish: _Wish,
        results: list[bool],
        errors: dict[int, BlockKVError],
    ) -> list[_Put]:
        """Put on all members at once. Returns what has to go to another one; its keys stay claimed."""
        calls = [functools.partial(_put_on, member, puts, wish) for member, puts in assigned.items()]
        try:
            outcomes = self._at_once(self._writers, calls)
        finally:
            with self._lock:
                for member, puts in assigned.items():
                    member.queued_bytes -= sum(put.payload_bytes for put in puts)
        again: list[_Put] = []
        done: set[bytes] = set()
        for (member, puts), outcome in zip(assigned.items(), outcomes, strict=True):
            for put, result in zip(puts, outcome, strict=True):
                if member.lost or (isinstance(result, BlockKVError) and self._lose_if_gone(member, result)):
                    again.append(put)
                    continue
                if not isinstance(result, BlockKVError):
                    results[put.position] = result
                elif isinstance(result, StoreFull) and self._may_go_elsewhere(member, put):
                    put.full.add(member.index)
                    put.refusal = result
                    again.append(put)
                    continue
                else:
                    errors[put.position] = result
                done.add(put.digest)
            if not wish.durable:
                member.acknowledge_lazily()
        self._give_up(own, done)
        return again

    def _may_go_elsewhere(self, member: Member, put: _Put) -> bool:
        """Make what `member` has deleted of this key durable, so that another one may have it."""
        held, deleted = member.claims(put.digest)
        if deleted and not held:
            try:
                member.store.commit()
            except BlockKVError as error:
                self._lose_if_gone(member, error)
                return bool(member.lost)
        return not held

    def _give_up(self, own: set[bytes], digests: set[bytes]) -> None:
        if digests:
            with self._lock:
                self._claims -= digests
                own -= digests
                self._changed.notify_all()

    # -- gets ------------------------------------------------------------------------------------------

    def _get(
        self,
        keys: Sequence[Key],
        outputs: Sequence[Any] | None,
        preload: bool,
        deadline_ns: int,
        occupied: Occupied | None = None,
    ) -> tuple[list[Any], dict[int, BlockKVError]]:
        miss = None if outputs is None else False
        results: list[Any] = [miss] * len(keys)
        errors: dict[int, BlockKVError] = {}
        with self._operation():
            if not self._present:
                raise self._all_lost()
            wanted: dict[Member, list[int]] = {}
            for position, key in enumerate(keys):
                try:
                    digest = key_digest(encode_key(key))
                except BlockKVError as error:
                    errors[position] = error
                    continue
                member = self._holder(digest)
                if member is None:
                    self._count_miss(digest)
                else:
                    wanted.setdefault(member, []).append(position)
            occupied = occupied or (Occupied() if len(keys) > 1 else None)
            calls = [
                functools.partial(
                    _get_on,
                    member,
                    [keys[position] for position in positions],
                    None if outputs is None else [outputs[position] for position in positions],
                    preload,
                    deadline_ns,
                    occupied,
                )
                for member, positions in wanted.items()
            ]
            outcomes = self._at_once(self._readers, calls)
            for (member, positions), outcome in zip(wanted.items(), outcomes, strict=True):
                for position, result in zip(positions, outcome, strict=True):
                    if not isinstance(result, BlockKVError):
                        results[position] = result
                    elif self._lose_if_gone(member, result):
                        self._count("get_member_lost")
                    else:
                        errors[position] = result
            if not self._present:
                raise self._all_lost()
        return results, errors

    def _lease_chunks(self, digests: Sequence[bytes]) -> list[Leased | None]:
        if not self._present:
            raise self._all_lost()
        chunks: list[Leased | None] = [None] * len(digests)
        wanted: dict[Member, list[int]] = {}
        for number, digest in enumerate(digests):
            member = self._holder(digest)
            if member is None:
                self._count_miss(digest)
            else:
                wanted.setdefault(member, []).append(number)
        for member, numbers in wanted.items():
            found = member.store._lease_chunks([digests[number] for number in numbers])
            for number, chunk in zip(numbers, found, strict=True):
                chunks[number] = chunk
        return chunks

    def _outlives(self, state: DataPath, error: BlockKVError) -> bool:
        member = next(one for one in self._members if one.has(state))
        gone = self._lose_if_gone(member, error)
        if gone:
            self._count("get_member_lost")
        return gone and bool(self._present)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters[name] += 1

    def _count_miss(self, digest: bytes) -> None:
        with self._lock:
            self._counters["get_misses"] += 1
            if any(member.lost and member.holds(digest) for member in self._members):
                self._counters["get_member_lost"] += 1

    # -- on all members --------------------------------------------------------------------------------

    def _at_once(self, pool: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Carry out all calls, the first on this thread. Raises what one of them did, when all are over."""
        futures = [pool.submit(call) for call in calls[1:]]
        try:
            first = [call() for call in calls[:1]]
        finally:
            wait_for(futures)
        return first + [future.result() for future in futures]

    def _on_writable(self, call: Callable[[Member], None]) -> None:
        """For `commit` and `checkpoint`: on every member that takes writes or still owes some."""

        def on(member: Member) -> BlockKVError | None:
            try:
                call(member)
            except BlockKVError as error:
                return error
            return None

        members = [one for one in self._present if one.writable or one.owes or one.device_is_gone]
        outcomes = self._at_once(self._writers, [functools.partial(on, member) for member in members])
        problems = [
            error
            for member, error in zip(members, outcomes, strict=True)
            if error is not None and not self._lose_if_gone(member, error)
        ]
        self._begin_term_if_due()
        if problems:
            raise problems[0]
        self._pay_debt()

    def _on_present(self, call: Callable[[Member], T], told: _JointProgress) -> list[tuple[Member, T]]:
        """For `check` and `scrub`: on every member, on other threads; handlers of signals run meanwhile.

        Members that are lost meanwhile are left out. `told` is stopped where the caller is interrupted.
        """
        members = self._present
        # Threads of their own: these calls take hours, and gets would wait for those of the store.
        with ThreadPoolExecutor(max(1, len(members)), "blockkv-member-care", self._go_inside) as threads:
            futures = [threads.submit(call, member) for member in members]
            try:
                while wait_for(futures, PATIENCE_S).not_done:
                    interrupts.deliver()
            except BaseException:
                told.stop()
                wait_for(futures)
                raise
        done: list[tuple[Member, T]] = []
        problem: BaseException | None = None
        for member, future in zip(members, futures, strict=True):
            error = future.exception()
            if error is None:
                done.append((member, future.result()))
            elif not (isinstance(error, BlockKVError) and self._lose_if_gone(member, error)):
                problem = problem or error
        if problem is not None:
            raise problem
        if not done:
            raise self._all_lost()
        return done

    # -- inside ----------------------------------------------------------------------------------------

    def _enter(self, writing: bool = False) -> None:
        with self._lock:
            self._check_open()
            if writing and self.read_only:
                raise StoreReadOnly(f"{self._paths}: it was opened read-only")
            self._active_count += 1

    def _leave(self) -> None:
        with self._lock:
            self._active_count -= 1
            if self._closed:
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self._paths}: {self._closed}")


_open_arrays: weakref.WeakSet[ArrayStore] = weakref.WeakSet()
"""To give up in a forked child."""


class _JointProgress:
    """One progress callback for members that work at once."""

    def __init__(
        self,
        progress: Progress | None,
        members: Sequence[Member],
        stop: Callable[[Member], None] | None = None,
    ) -> None:
        """`stop` ends the work of one member; without it an exception does."""
        self._progress = progress
        self._stop = stop
        self._lock = threading.Lock()
        self._stopped = False
        self._done_bytes = dict.fromkeys(members, 0)
        self._total_bytes = {member: member.store.stats()["payload_bytes"] for member in members}

    def stop(self) -> None:
        """End the members' work, at their next step at the latest."""
        self._stopped = True
        if self._stop is not None:
            for member in self._done_bytes:
                self._stop(member)

    def _end(self, member: Member) -> None:
        if self._stop is None:
            raise _Stopped
        self._stop(member)

    def of(self, member: Member) -> Progress:
        """The callback for one member."""

        def progress(done_bytes: int, total_bytes: int) -> None:
            if self._stopped:
                self._end(member)
            with self._lock:
                self._done_bytes[member], self._total_bytes[member] = done_bytes, total_bytes
                if self._progress is not None:
                    self._progress(sum(self._done_bytes.values()), sum(self._total_bytes.values()))

        return progress


def _put_on(member: Member, puts: Sequence[_Put], wish: _Wish) -> list[bool | BlockKVError]:
    pairs, stays = [(put.key, put.value) for put in puts], wish.stays or Stay()
    try:
        return list(
            member.store.put_many(
                pairs,
                wish.durable,
                droppable=wish.droppable,
                deadline_s=left_s(wish.deadline_ns),
                ttl_s=stays.ttl_s,
                priority=stays.priority,
            )
        )
    except BatchError as error:
        return [error.errors.get(number, bool(result)) for number, result in enumerate(error.results)]
    except BlockKVError as error:
        return [error] * len(puts)


def _get_on(
    member: Member,
    keys: Sequence[Key],
    outputs: Sequence[Any] | None,
    preload: bool,
    deadline_ns: int,
    occupied: Occupied | None,
) -> list[Any]:
    try:
        results, errors = member.store._get(keys, outputs, preload, deadline_ns, occupied)
    except BlockKVError as error:
        return [error] * len(keys)
    return [errors.get(number, result) for number, result in enumerate(results)]


def _joint_scrub(reports: Sequence[ScrubReport]) -> ScrubReport:
    return ScrubReport(
        all(report.finished for report in reports),
        any(report.resumed for report in reports),
        sum(report.chunks for report in reports),
        sum(report.payload_bytes for report in reports),
        tuple(key for report in reports for key in report.damaged_keys),
        tuple(one for report in reports for one in report.unread),
    )


def _rough_bytes(value: Any) -> int:
    """Payload of a value to put; 0 for what cannot be put, which its member will say."""
    if isinstance(value, Mapping):
        return sum(map(_rough_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_rough_bytes, value))
    try:
        return int(value.nbytes) if hasattr(value, "nbytes") else len(value)
    except (TypeError, ValueError):
        return 0


def _abandon_all() -> None:
    for array in list(_open_arrays):
        array._closed = BELONGS_TO_PARENT
        # A thread of the parent may have held it at the fork, and there is none here to let it go.
        array._lock = threading.RLock()


os.register_at_fork(after_in_child=_abandon_all)
