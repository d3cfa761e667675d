"""Streams: the parts of many chunks in the order in which a model computes, each as soon as it is verified.

    with store.stream(keys, "layers", layout=layout, lookahead_bytes=64 << 20) as stream:
        for layer, tensors in stream:          # tensors[i]: that layer of keys[i]
            attend(layer, tensors)
    usable = stream.valid_keys                 # what of the prefix has come whole

Invariants
  * all chunks of the prefix are leased until the stream ends, so nothing of it is evicted half-way;
  * what was asked for and not yet handed over takes at most `lookahead_bytes`, scratch included;
  * a key whose part is missing, growing or does not verify, and all keys behind it, are left out from then
    on. Nothing is raised for it: the prefix is shorter, as it is for a miss.

Not here: reading a part (`part_gets`), which leaves it needs (`part_plan`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from blockkv import memory
from blockkv.catalog.layouts import Layout, torch_dtype
from blockkv.device.base import Priority
from blockkv.errors import BlockKVError, InvalidArgument
from blockkv.format.record import key_digest
from blockkv.kv_layout import KVLayout, Part
from blockkv.store.interrupts import interrupts
from blockkv.store.keys import Key, encode_key
from blockkv.store.part_gets import ChunkSource, Leased, PartBatch, PartRead, by_device, release, targets
from blockkv.store.part_plan import PartPlan
from blockkv.tensors import TENSOR_ALIGNMENT_BYTES, Described

__all__ = ["DEFAULT_LOOKAHEAD_BYTES", "Into", "PartStream", "StreamPool", "Taken", "is_whole"]

DEFAULT_LOOKAHEAD_BYTES = 64 << 20
"""What a drive of 7 GB/s delivers in 9 ms: more than a queue of 32 MiB, so that it never runs empty."""
KEPT_BYTES = 256 << 20
"""Memory of streams that are over, kept for the next ones."""
ORDERABLE = ("layers", "kv", "tokens", "heads")
TOLERATED_EXCESS = 9 / 8
"""Of bytes read to bytes wanted. Above it pieces that share leaves are read together."""
PLACE_BYTES = 4096
"""Each key's part begins on a multiple of it in our memory: what direct I/O asks for on any device."""

Into = Callable[[Any, int], Any]
"""Called with the numbers of a piece and the position of a key: where that part goes."""


class StreamSource(ChunkSource, Protocol):
    """What a stream needs of a store: that it stays open while the device works."""

    def _enter(self) -> None:
        """An operation begins. Raises StoreClosed."""

    def _leave(self) -> None:
        """It is over."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is handed over at once: `numbers` along the axes of the order."""

    numbers: tuple[int, ...]
    part: Part


@dataclass(slots=True)
class _Shelf:
    """Memory for one group of pieces at a time; none where it goes into the caller's."""

    tensor: Any = None
    places: dict[Layout, list[tuple[dict[str, Any], Described]]] = field(default_factory=dict)
    """For each layout of a part what is read for each key, made when it is first needed."""


@dataclass(slots=True)
class _Group:
    """Pieces that are read together, because they share leaves."""

    pieces: list[_Piece]
    part: Part
    plan: PartPlan
    cost_bytes: int
    """Memory that it takes until it is handed over, for all keys."""
    shelf: _Shelf | None = None
    reads: list[PartRead] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    pending_count: int = 0
    """Submissions of it that are not over."""
    hold_count: int = 0
    """Of its pieces that were handed over, how many are not given back; one more while others are to come."""


class StreamPool:
    """What the streams of a store share: memory, and a thread that asks for what comes next.

    Memory of streams that are over is kept for those to come: making it, and making it known to the device,
    takes longer than reading the first layers. Any thread may use it.
    """

    def __init__(self, go_inside: Callable[[], None]) -> None:
        """`go_inside` is called on the thread first: it says that closing the store would wait for it."""
        self._go_inside = go_inside
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._thread: threading.Thread | None = None
        self._ended = False

    def take(self, size_bytes: int) -> Any:
        """Bytes of any content, at least that many."""
        with self._lock:
            fits = [one for one in self._kept if size_bytes <= one.nbytes <= 2 * size_bytes]
            if fits:
                best = min(fits, key=lambda one: int(one.nbytes))
                self._kept = [one for one in self._kept if one is not best]
                return best
        return memory.empty(size_bytes, _byte_dtype())

    def give_back(self, tensor: Any) -> None:
        """What `take` gave is not used any more. The oldest is let go where that is too much."""
        with self._lock:
            self._kept.append(tensor)
            while sum(one.nbytes for one in self._kept) > KEPT_BYTES:
                self._kept.pop(0)

    def start(self) -> None:
        """Have the thread, from the first stream on."""
        with self._lock:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="blockkv-stream", daemon=True)
                self._thread.start()

    def soon(self, call: Callable[[], None]) -> None:
        """Call it on the thread of the pool; at once where that has ended."""
        with self._lock:
            at_once = self._ended
            if not at_once:
                self._calls.put(call)
        if at_once:
            call()

    def after_all(self, call: Callable[[], None]) -> None:
        """Call it on the thread of the pool, unless that has ended: for finalizers, which run in the middle
        of anything and must not wait for a lock.
        """
        if not self._ended:
            self._calls.put(call)

    def end(self) -> None:
        """The store is closed."""
        with self._lock:
            self._kept.clear()
            self._ended = True
            self._calls.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # An executor would do, and takes as long to be told of a call as a layer takes to be handed over.
        self._go_inside()
        while (call := self._calls.get()) is not None:
            call()
            del call


@dataclass(slots=True)
class Taken:
    """A piece in the hands of a caller until it is given back."""

    number: Any
    """Along the order; a tuple of several axes."""
    tensors: list[Any]
    """For each valid key its part."""
    _give_back: Callable[[], None] | None

    def give_back(self) -> None:
        """Its memory is used again from now on. Idempotent; any thread may call it."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class PartStream(Iterator[tuple[Any, list[Any]]]):
    """Hands over (number, tensors) in order; see `Store.stream`. Close it, or use it as a context manager.

    Used by one thread at a time; `close` may be called from any other.
    """

    def __init__(
        self,
        source: StreamSource,
        pool: StreamPool,
        keys: Sequence[Key],
        order: str,
        layout: KVLayout,
        part: Part,
        into: Into | None,
        lookahead_bytes: int,
        preload: bool,
        in_hand: int,
    ) -> None:
        if in_hand < 1:
            raise InvalidArgument(f"in_hand is {in_hand}; a caller has one piece in hand at least")
        self._source = source
        self._pool = pool
        self._memory: Any = None
        self._layout = layout
        self._into = into
        self._priority = Priority.PRELOAD if preload else Priority.LOAD
        self._condition = threading.Condition()
        self._closed = False
        self._current: _Group | None = None
        """Whose pieces are handed over."""
        self._current_piece_index = 0
        self._previous: _Group | None = None
        """Of what `__next__` gave last."""
        self._in_hand_limit = in_hand
        self._out_count = 0
        """Groups that the caller has something of."""
        self._waiting: deque[_Group] = deque()
        self._started: deque[_Group] = deque()
        self._feeding = False
        self._asking_thread = 0
        """The thread that is in `into`."""
        self._ahead_limit = 0
        self._shelves: list[_Shelf] = []
        self._chunks: list[Leased] = []
        self._axes = _axes(order)
        self.problem: BlockKVError | None = None
        """What ended the stream beside missing and damaged chunks: a lost device, a closed store."""
        self.peak_bytes = 0
        """The most that was asked for and not handed over yet, at any time."""
        self.memory_bytes = 0
        """What it has for the pieces, in hand and ahead; scratch for the edges of leaves comes on top."""
        digests = [key_digest(encode_key(key)) for key in keys]
        pieces = _pieces(layout, part, self._axes)
        pool.start()
        found = source._lease_chunks(digests)
        self._chunks = list(itertools.takewhile(is_whole, found))  # type: ignore[arg-type]
        release(found[len(self._chunks) :])
        self._valid_keys = len(self._chunks)
        try:
            groups = self._grouped(pieces, lookahead_bytes) if self._chunks else []
            self._ahead_limit = len(groups)
            self._waiting.extend(groups)
            self._shelves = self._make_shelves(groups, lookahead_bytes)
            self._feed(1)
            self._feed_soon()
        except BaseException:
            self.close()
            raise

    @property
    def valid_keys(self) -> int:
        """How many keys, from the first on, are stored and have verified so far: what the prefix is worth.

        Final when the stream is over.
        """
        return self._valid_keys

    def promote(self) -> None:
        """What is read from now on is served as a load, not as a preload: somebody waits for it."""
        self._priority = Priority.LOAD

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, list[Any]]:
        """The next piece: its number along the order (a tuple of several axes), and each valid key's part.

        Memory of ours is used again once the piece after it is asked for, and when the stream is closed.
        """
        if self._previous is not None:
            self._let_go(self._previous)
        self._previous = self._take()
        if self._previous is None:
            self.close()
            raise StopIteration
        return self._handed_over(self._previous)

    def take(self) -> Taken | None:
        """The next piece, to be given back; None at the end, after which the stream is still to be closed.

        For whoever wants several in hands: as many, of whole leaves, as `in_hand` of `Store.stream` says.
        Raises InvalidArgument where there are so many already.
        """
        group = self._take()
        if group is None:
            return None
        return Taken(*self._handed_over(group), functools.partial(self._let_go, group))

    def _take(self) -> _Group | None:
        """Step to the next piece: the group that has it."""
        group = self._current
        if group is not None and self._current_piece_index + 1 == len(group.pieces):
            self._let_go(group)
            group = self._current = None
        if group is None:
            group = self._current = self._next_group()
            self._current_piece_index = 0
        else:
            self._current_piece_index += 1
        if group is None or not self._valid_keys:
            return None
        with self._condition:
            group.hold_count += 1
        return group

    def _handed_over(self, group: _Group) -> tuple[Any, list[Any]]:
        """The current piece."""
        piece = group.pieces[self._current_piece_index]
        tensors = [self._cut(group, piece, value) for value in group.values[: self._valid_keys]]
        return _said(piece.numbers), tensors

    @property
    def in_hand_limit(self) -> int:
        """How many pieces a caller may have in hand."""
        return self._in_hand_limit

    @property
    def is_ready(self) -> bool:
        """Whether the next piece is there, so that nobody waits for it."""
        with self._condition:
            group = self._current
            if group is not None and self._current_piece_index + 1 < len(group.pieces):
                return True
            return bool(self._started) and not self._started[0].pending_count

    @property
    def ahead_limit(self) -> int:
        """How many submissions may be ahead of what was handed over, within the bound in bytes."""
        return self._ahead_limit

    @ahead_limit.setter
    def ahead_limit(self, count: int) -> None:
        self._ahead_limit = max(1, count)
        self._feed_soon()

    @property
    def memory(self) -> Any:
        """Where the pieces are put, as bytes; None where that is the caller's, or the stream is closed."""
        return self._memory

    def close(self) -> None:
        """Wait for what the device is reading, start nothing more, give the leases back. Idempotent.

        Raises InvalidArgument in `into`, which it would wait for.
        """
        with self._condition:
            if self._asking_thread == threading.get_ident():
                raise InvalidArgument(
                    "close was called from inside `into` of the stream; return from that first"
                )
            self._closed = True
            self._condition.wait_for(lambda: not any(group.pending_count for group in self._started))
            chunks, self._chunks = self._chunks, []
            pooled, self._memory = self._memory, None
            self._started.clear()
        if pooled is not None:
            self._pool.give_back(pooled)
        release(chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Wherever the collector runs, locks may be held that closing waits for.
        if not getattr(self, "_closed", True):
            self._pool.after_all(self.close)

    # -- inside ----------------------------------------------------------------------------------------

    def _next_group(self) -> _Group | None:
        """Wait for the next group."""
        with self._condition:
            if self._out_count >= self._in_hand_limit:
                raise InvalidArgument(f"{self._out_count} pieces are in hand; give one back before another")
            self._condition.wait_for(self._is_decided)
            if self._closed or not self._valid_keys or not self._started:
                return None
            group = self._started.popleft()
            group.hold_count = 1
            self._out_count += 1
        self._feed_soon()
        return group

    def _let_go(self, group: _Group) -> None:
        # Nothing more can be asked for because of this: the shelf is kept for what the caller takes next.
        with self._condition:
            group.hold_count -= 1
            if group.hold_count:
                return
            assert group.shelf is not None
            self._shelves.append(group.shelf)
            self._out_count -= 1

    def _is_decided(self) -> bool:
        """Whether the next group is there, or it is sure that there will be none."""
        if self._closed or not self._valid_keys:
            return True
        if self._started:
            return not self._started[0].pending_count
        return not self._waiting

    def _feed_soon(self) -> None:
        """Have what there is memory for asked for, on a thread that nobody waits for."""
        with self._condition:
            if self._feeding or not self._has_room():
                return
            self._feeding = True
        self._pool.soon(self._feed_on)

    def _feed_on(self) -> None:
        while True:
            try:
                self._feed(len(self._waiting))
            except BaseException as error:  # or nobody would ask for the layers of other streams any more
                self._end(
                    error if isinstance(error, BlockKVError) else BlockKVError(f"into failed: {error!r}")
                )
            with self._condition:
                if not self._has_room():
                    self._feeding = False
                    return

    def _has_room(self) -> bool:
        # Some shelves are for what the caller has, or may have, in hands.
        free = len(self._shelves) - (self._in_hand_limit - self._out_count)
        if not self._waiting or not self._valid_keys or self._closed:
            return False
        return free > 0 and len(self._started) < self._ahead_limit

    def _feed(self, count: int) -> None:
        """Ask for at most `count` groups, as far as there is memory. On one thread at a time."""
        for _ in range(count):
            with self._condition:
                if not self._has_room():
                    return
                group = self._waiting.popleft()
                group.shelf = self._shelves.pop()
                group.pending_count = 1  # until all of it is asked for, so that `close` waits for that
                self._started.append(group)
                asked_bytes = sum(one.cost_bytes for one in self._started)
                self.peak_bytes = max(self.peak_bytes, asked_bytes)
            try:
                self._submit(group)
            finally:
                self._over(group)

    def _submit(self, group: _Group) -> None:
        chunks = self._chunks[: self._valid_keys]
        found = self._places(group, len(chunks))
        group.values = [value for value, _ in found]
        group.reads = [
            PartRead(position, chunk, group.plan, described, None)
            for position, (chunk, (_, described)) in enumerate(zip(chunks, found, strict=True))
        ]
        batches = [PartBatch(reads, self._priority) for reads in by_device(group.reads)]
        with interrupts:
            for batch in batches:
                try:
                    self._source._enter()
                except BlockKVError as error:
                    self._end(error)
                    return
                with self._condition:
                    group.pending_count += 1
                batch.submit(lambda batch=batch: self._arrived(group, batch))  # type: ignore[misc]

    def _arrived(self, group: _Group, batch: PartBatch) -> None:
        for read in batch.reads:
            if read.error is not None and not self._source._outlives(read.chunk.state, read.error):
                self._end(read.error)
            elif read.failure:
                with self._condition:
                    self._valid_keys = min(self._valid_keys, read.position)
                    self._condition.notify_all()
        self._source._leave()
        self._over(group)

    def _over(self, group: _Group) -> None:
        with self._condition:
            group.pending_count -= 1
            self._condition.notify_all()

    def _end(self, error: BlockKVError) -> None:
        with self._condition:
            self.problem = self.problem or error
            self._valid_keys = 0
            self._condition.notify_all()

    def _places(self, group: _Group, count: int) -> list[tuple[Any, Described]]:
        """For each key what is handed over of the group, and where it is read to."""
        if self._into is not None:
            (piece,) = group.pieces
            self._asking_thread = threading.get_ident()
            try:
                outputs = [self._into(_said(piece.numbers), position) for position in range(count)]
            finally:
                self._asking_thread = 0
            found, errors = targets(range(count), [group.plan.layout] * count, outputs)
            for error in errors.values():
                raise error
            return [
                (output, target[1])
                for output, target in zip(outputs, found, strict=True)
                if target is not None
            ]
        assert group.shelf is not None
        layout = group.plan.layout
        if layout not in group.shelf.places:
            place_bytes = _place_bytes(layout)
            group.shelf.places[layout] = [
                _place(layout, group.shelf.tensor, position * place_bytes)
                for position in range(len(self._chunks))
            ]
        return group.shelf.places[layout][:count]

    def _cut(self, group: _Group, piece: _Piece, value: Any) -> Any:
        """One piece of what was read together for a key."""
        if self._into is not None:
            return value
        tensors = value
        if len(group.pieces) > 1:
            axis = self._axes[-1]
            tensors = {}
            for array in self._layout.arrays:
                name = array.name if len(self._layout.arrays) > 1 else ""
                dim = next((number for number, one in enumerate(array.axes) if one.name == axis), None)
                if name not in value:
                    continue
                if dim is None:
                    tensors[name] = value[name]
                    continue
                first = array.axes[dim].positions(group.part.along(axis)).start
                wanted = array.axes[dim].positions(piece.part.along(axis))
                if wanted:
                    tensors[name] = value[name].narrow(dim, wanted.start - first, len(wanted))
        return tensors if len(self._layout.arrays) > 1 else next(iter(tensors.values()))

    def _grouped(self, pieces: Sequence[_Piece], lookahead_bytes: int) -> list[_Group]:
        """The pieces in groups as small as they can be without reading much twice."""
        best = self._groups_of(pieces, 1)
        dearest = max(group.cost_bytes for group in best)
        if dearest > lookahead_bytes:
            raise InvalidArgument(
                f"lookahead_bytes is {lookahead_bytes}; one piece of these {len(self._chunks)} chunks takes "
                f"{dearest}: give at least that, or fewer keys"
            )
        wanted_bytes = sum(group.plan.part_bytes for group in best)
        size = 2
        while (
            self._into is None
            and self._axes[-1] != "kv"
            and _read_bytes(best) > wanted_bytes * TOLERATED_EXCESS
            and size < 2 * len(pieces)
        ):
            groups = self._groups_of(pieces, size)
            if 2 * max(group.cost_bytes for group in groups) > lookahead_bytes:
                break
            if _read_bytes(groups) < _read_bytes(best):
                best = groups
            size *= 2
        return best

    def _groups_of(self, pieces: Sequence[_Piece], size: int) -> list[_Group]:
        groups = []
        for _, alike in itertools.groupby(pieces, lambda piece: piece.numbers[:-1]):
            row = list(alike)
            for first in range(0, len(row), size):
                together = row[first : first + size]
                part = together[0].part
                if len(together) > 1:
                    ends = together[0].numbers[-1], together[-1].numbers[-1] + 1
                    part = part.narrowed(self._axes[-1], range(*ends))
                plan = self._chunks[0].plan(self._layout, part)
                cost_bytes = len(self._chunks) * (_place_bytes(plan.layout) + plan.scratch_bytes)
                groups.append(_Group(together, part, plan, cost_bytes))
        for chunk in self._chunks:
            chunk.plan(self._layout, groups[0].part)  # refuses what is no chunk of the layout
        return groups

    def _make_shelves(self, groups: Sequence[_Group], lookahead_bytes: int) -> list[_Shelf]:
        if not groups:
            return []
        dearest = max(group.cost_bytes for group in groups)
        count = min(lookahead_bytes // dearest, len(groups)) + self._in_hand_limit
        if self._into is not None:
            return [_Shelf() for _ in range(count)]
        shelf_bytes = len(self._chunks) * max(_place_bytes(group.plan.layout) for group in groups)
        self.memory_bytes = count * shelf_bytes
        self._memory = self._pool.take(self.memory_bytes)
        return [
            _Shelf(shelf) for shelf in self._memory[: self.memory_bytes].view(count, shelf_bytes).unbind(0)
        ]


def is_whole(chunk: Leased | None) -> bool:
    """Whether it is there, and not growing: a lease as long as a stream would hold up durable appends."""
    return chunk is not None and not chunk.state.grows(chunk.entry.digest)


def _axes(order: str) -> list[str]:
    axes = order.split() if isinstance(order, str) else []
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(ORDERABLE):
        raise InvalidArgument(f"order={order!r}; use one or more of {', '.join(ORDERABLE)}, outermost first")
    return axes


def _pieces(layout: KVLayout, part: Part, axes: Sequence[str]) -> list[_Piece]:
    """All pieces of `part`, in order. Raises InvalidArgument where there are none."""
    choices = []
    for axis in axes:
        wanted = part.along(axis)
        among = (wanted,) if isinstance(wanted, int) else wanted
        choices.append([number for number in layout.numbers(axis) if among is None or number in among])
    found = []
    for numbers in itertools.product(*choices):
        one = part
        for axis, number in zip(axes, numbers, strict=True):
            one = one.narrowed(axis, number)
        with contextlib.suppress(InvalidArgument):  # a layer of a hybrid model need not have every head
            layout.selections(one)
            found.append(_Piece(numbers, one))
    if not found:
        raise InvalidArgument(f"{part} has nothing along {' '.join(axes)} in {layout}")
    return found


def _said(numbers: tuple[int, ...]) -> Any:
    return numbers[0] if len(numbers) == 1 else numbers


def _read_bytes(groups: Sequence[_Group]) -> int:
    return sum(group.plan.read_bytes for group in groups)


def _place_bytes(layout: Layout) -> int:
    """Memory for one key's part, every array of it aligned."""
    return _round_up(
        sum(_round_up(spec.size_bytes, TENSOR_ALIGNMENT_BYTES) for spec in layout.specs), PLACE_BYTES
    )


def _place(layout: Layout, shelf: Any, offset_bytes: int) -> tuple[dict[str, Any], Described]:
    """Tensors for a part, by array, from `offset_bytes` of a shelf on."""
    tensors, segments = {}, []
    for spec in layout.specs:
        raw = shelf[offset_bytes : offset_bytes + spec.size_bytes]
        tensors[spec.name] = raw.view(torch_dtype(spec.dtype)).view(spec.shape)
        segments.append((raw.data_ptr(), spec.size_bytes))
        offset_bytes += _round_up(spec.size_bytes, TENSOR_ALIGNMENT_BYTES)
    return tensors, Described(layout, segments, layout.payload_bytes, [shelf])


def _byte_dtype() -> Any:
    import torch

    return torch.uint8


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
