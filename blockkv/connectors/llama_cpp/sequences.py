"""Sequences of a llama.cpp context, saved in a store and restored from it.

Two forms:

chunks
    A sequence is cut into chunks of `chunk_tokens` tokens, each under the hash of all tokens up to its end:
    what two prompts begin with is stored once, and a prompt finds whatever it shares with earlier ones. A
    chunk is made and read back by way of a sequence of its own, the scratch: `llama_memory_seq_cp` of a range
    to it and from it.
whole
    A sequence is one chunk, and small marks at every `chunk_tokens` tokens lead to it: a prompt that shares a
    beginning gets the whole state, which is then cut.

Chunks need a context whose sequences share one buffer and leave one free: `kv_unified=True` and `n_seq_max`
>= 2, see `sharing_context`. With separate buffers llama.cpp ends the process on the first copy of a range
("seq_cp() is only supported for full KV buffers"), so such a context is refused before. So are recurrent and
hybrid models and DeepSeek 4, whose states are no rows of tokens.

Invariants
  * only what the store has verified reaches `llama_state_seq_set_data`, which accepts wrong bytes;
  * after a restore the sequence holds exactly the tokens that were reported, or none: positions are compared;
  * a chunk is stored only after its own bytes say that it has every position it is named after;
  * whatever the store raises is a miss, or a save that did not happen, and counted.

Not here: what the bytes depend on (`fingerprint`), how they lie (`states`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, Literal

import llama_cpp
import numpy as np
import torch
from numpy.typing import NDArray

import blockkv
from blockkv.connectors.llama_cpp.fingerprint import Context, family_of
from blockkv.connectors.llama_cpp.states import HEADER_BYTES, cells_of
from blockkv.errors import BlockKVError, InvalidArgument

__all__ = ["Sequences", "sharing_context", "why_no_chunks"]

DEFAULT_CHUNK_TOKENS = 256
AHEAD_BYTES = 64 << 20
"""How far chunks are read ahead of the one that is handed to llama.cpp, and put at a time."""
KEPT_BYTES = 256 << 20
"""Memory that is kept from one call to the next; what one call takes may be more."""
LONGEST_DEADLINE_S = 3600
FULL_COPIES_ONLY = frozenset(("deepseek4",))
"""Architectures whose `seq_cp` ends the process for a range (src/llama-kv-cache-dsv4.cpp)."""
COUNTERS = (
    "loads",
    "loads_hit",
    "tokens_asked",
    "tokens_loaded",
    "chunks_loaded",
    "load_misses",
    "load_errors",
    "loads_late",
    "loads_refused",
    "saves",
    "chunks_saved",
    "bytes_saved",
    "chunks_incomplete",
    "save_errors",
)

log = logging.getLogger(__name__)

Tokens = Sequence[int] | NDArray[np.integer]


@contextlib.contextmanager
def sharing_context(sequences: int = 2) -> Iterator[None]:
    """A `llama_cpp.Llama` made inside has one buffer for `sequences` sequences, as chunks need.

    `Llama` has no parameters for that; this changes the defaults that it starts from, for as long as it lasts
    and for every thread.
    """
    if sequences < 2:
        raise InvalidArgument(f"{sequences} sequences: one of them is the scratch, so there are at least 2")
    bindings = llama_cpp.llama_cpp
    defaults = bindings.llama_context_default_params

    def unified() -> Any:
        params = defaults()
        params.kv_unified, params.n_seq_max = True, sequences
        return params

    bindings.llama_context_default_params = unified
    try:
        yield
    finally:
        bindings.llama_context_default_params = defaults


def why_no_chunks(context: Context) -> str:
    """Why sequences of this context cannot be stored in chunks; "" where they can."""
    if context.sequences < 2:
        return "it was made for one sequence (n_seq_max=1), and chunks need another one as scratch"
    if not context.is_unified:
        return "its sequences have separate buffers (kv_unified=False), between which no ranges can be copied"
    if not context.can_cut:
        return "its model is recurrent or hybrid: one state stands for all tokens"
    if llama_cpp.llama_model_has_encoder(context.model) or llama_cpp.llama_model_is_diffusion(context.model):
        return "its model attends to later tokens too"
    if context.architecture in FULL_COPIES_ONLY:
        return f"{context.architecture} copies whole sequences only"
    return ""


class Sequences:
    """Saves and restores sequences of one context. Used by the thread that uses the context.

    ::

        sequences = Sequences(store, Context.of(llama))
        sequences.save(tokens)                       # what the context has evaluated
        restored = sequences.load(prompt)            # so many tokens need not be evaluated
    """

    def __init__(
        self,
        store: blockkv.Store,
        context: Context,
        *,
        form: Literal["auto", "chunks", "whole"] = "auto",
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        scratch: int | None = None,
        weights: str = "",
        salt: str = "",
        durable: bool = False,
        load_deadline_s: float | None = 30.0,
    ) -> None:
        """`scratch` is a sequence of the context that nobody else uses, the last one unless given.

        `form` "auto" stores chunks where the context allows it. `weights` takes the place of the digest of
        the model's files, which are otherwise read once; `salt` keeps tenants apart. With `durable` a save
        returns when it is on media. A load that takes longer than `load_deadline_s` is over with what has
        come by then.

        Raises InvalidArgument: for chunks where llama.cpp would not survive them, and for numbers that make
        no sense.
        """
        if form not in ("auto", "chunks", "whole"):
            raise InvalidArgument(f"form is {form!r}; use 'auto', 'chunks' or 'whole'")
        if chunk_tokens < 1:
            raise InvalidArgument(f"chunk_tokens is {chunk_tokens}; use at least 1")
        if load_deadline_s is not None and not 0 < load_deadline_s <= LONGEST_DEADLINE_S:
            raise InvalidArgument(
                f"load_deadline_s is {load_deadline_s}; use seconds up to {LONGEST_DEADLINE_S}, or None"
            )
        refusal = why_no_chunks(context)
        if form == "chunks" and refusal:
            raise InvalidArgument(
                f"this context cannot be stored in chunks: {refusal}. Make it with kv_unified=True and "
                "n_seq_max >= 2 (`sharing_context` does), or use form='whole'"
            )
        self.form = "whole" if refusal or form == "whole" else "chunks"
        self.chunk_tokens = chunk_tokens
        self.store = store
        self.context = context
        self.family = family_of(context, self.form, weights=weights, salt=salt)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._memory = context.memory
        self._scratch = context.sequences - 1 if scratch is None else scratch
        if self.form == "chunks":
            self._check_sequence(self._scratch)
        self._buffers = _Buffers()
        self._durable = durable
        self._load_deadline_s = load_deadline_s
        self._logged: set[str] = set()

    # -- saving ----------------------------------------------------------------------------------------

    def save(self, tokens: Tokens, sequence: int = 0) -> int:
        """Store what `sequence` holds, the states of `tokens`. Returns how many of them are stored now.

        In chunks: those of its whole chunks, of which only new ones are written. Whole: all of them, and the
        sequence must hold no others. Raises InvalidArgument where the sequence does not have these tokens;
        what fails on the device is counted and logged, and not raised.
        """
        self._check_sequence(sequence)
        ids = np.ascontiguousarray(tokens, np.int32)
        newest = int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence))
        expected = newest >= len(ids) - 1 if self.form == "chunks" else newest == len(ids) - 1
        if not len(ids) or not expected:
            raise InvalidArgument(
                f"sequence {sequence} ends at position {newest}, and {len(ids)} tokens were given"
            )
        self.counters["saves"] += 1
        try:
            return (
                self._save_chunks(ids, sequence) if self.form == "chunks" else self._save_whole(ids, sequence)
            )
        except BlockKVError as error:
            self.counters["save_errors"] += 1
            self._log_once("a sequence was not stored", error)
            return 0

    def save_quietly(self, tokens: Tokens, sequence: int = 0) -> int:
        """`save` for an engine, which must not be stopped: 0 also where the sequence has not these tokens."""
        try:
            return self.save(tokens, sequence)
        except InvalidArgument as error:
            self.counters["save_errors"] += 1
            self._log_once("a sequence was not stored", error)
            return 0

    def _save_chunks(self, ids: NDArray[np.int32], sequence: int) -> int:
        keys = blockkv.prefix_keys(ids, self.chunk_tokens, self.family)
        waiting: list[tuple[str, torch.Tensor]] = []
        stored = 0
        for number, key in enumerate(keys):
            if not self.store.contains(key):
                chunk = self._cut_out(sequence, number * self.chunk_tokens)
                if chunk is None:
                    break
                waiting.append((key, chunk))
                if sum(one.nbytes for _, one in waiting) >= AHEAD_BYTES:
                    self._put(waiting)
                    waiting = []
            stored = (number + 1) * self.chunk_tokens
        if waiting:
            self._put(waiting)
        elif self._durable:
            self.store.commit()
        return stored

    def _cut_out(self, sequence: int, first: int) -> torch.Tensor | None:
        """The state of one chunk; None where the context has not all of it any more."""
        last = first + self.chunk_tokens
        with self._using_scratch(sequence):
            llama_cpp.llama_memory_seq_cp(self._memory, sequence, self._scratch, first, last)
            state = self._state_of(self._scratch)
        caches = cells_of(_view(state)[HEADER_BYTES:])
        if caches and _is_run(caches[0].positions, first, last):
            window = self.context.window_tokens
            for cells in caches[1:]:
                if not _is_run(cells.positions, max(first, last - window) if window else first, last):
                    break
            else:
                return state
        self.counters["chunks_incomplete"] += 1
        self._log_once(
            f"the context has not all of tokens {first} to {last} any more, or in an unknown form; "
            "they and what follows are not stored (with a sliding window use swa_full=True, or form='whole')",
            None,
        )
        return None

    def _save_whole(self, ids: NDArray[np.int32], sequence: int) -> int:
        key = self._whole_keys(ids)[-1]
        if not self.store.contains(key):
            state = self._state_of(sequence, room_bytes=4 + ids.nbytes)
            front = state[: 4 + ids.nbytes].numpy()
            front[:4] = np.frombuffer(len(ids).to_bytes(4, "little"), np.uint8)
            front[4:] = ids.view(np.uint8)
            self._put([(key, state)])
        elif self._durable:
            self.store.commit()
        self._mark(blockkv.prefix_keys(ids, self.chunk_tokens, self.family), key)
        return len(ids)

    def _mark(self, places: Sequence[str], key: str) -> None:
        """Let the marks at these places lead to `key`, where they lead to nothing that is stored."""
        target = torch.frombuffer(bytearray(key.encode()), dtype=torch.uint8)
        found = self.store.get_many(places) if places else []
        missing = []
        for place, old in zip(places, found, strict=True):
            if old is not None:
                if self.store.contains(_target(old)):
                    continue
                self.store.delete(place)
            missing.append((place, target))
        if missing:
            self.store.put_many(missing, self._durable)

    def _put(self, chunks: list[tuple[str, torch.Tensor]]) -> None:
        written = self.store.put_many(chunks, self._durable)
        for _, chunk in chunks:
            self._buffers.give_back(chunk)
        self.counters["chunks_saved"] += sum(written)
        self.counters["bytes_saved"] += sum(
            chunk.nbytes for (_, chunk), new in zip(chunks, written, strict=True) if new
        )

    def _state_of(self, sequence: int, room_bytes: int = 0) -> torch.Tensor:
        """The state of a sequence, behind so many bytes of room. Raises InvalidArgument."""
        ctx = self.context.ctx
        size_bytes = int(llama_cpp.llama_state_seq_get_size(ctx, sequence))
        buffer = self._buffers.take(room_bytes + size_bytes)
        written = int(
            llama_cpp.llama_state_seq_get_data(
                ctx, _bytes_at(buffer.data_ptr() + room_bytes), size_bytes, sequence
            )
        )
        if written != size_bytes:
            raise InvalidArgument(f"llama.cpp gave {written} of {size_bytes} bytes of sequence {sequence}")
        return buffer

    def state(self, sequence: int, count: int) -> memoryview:
        """The state of a sequence of so many tokens, with llama.cpp's header. Raises InvalidArgument."""
        self._check_sequence(sequence)
        newest = int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence))
        if newest != count - 1 or not count:
            raise InvalidArgument(
                f"sequence {sequence} ends at position {newest}, and {count} tokens were given"
            )
        return _view(self._state_of(sequence))

    # -- loading ---------------------------------------------------------------------------------------

    def stored(self, tokens: Tokens) -> int:
        """How many of `tokens` a `load` would find, by the index; of whole sequences at least so many."""
        ids = np.ascontiguousarray(tokens, np.int32)
        try:
            if self.form == "chunks":
                return self.store.lookup(self._chunk_keys(ids)) * self.chunk_tokens
            found = self._find_whole(ids)
            return found[1] if found else 0
        except BlockKVError as error:
            self._log_once("a look-up failed", error)
            return 0

    def load(self, tokens: Tokens, sequence: int = 0, *, keep: int = 0) -> int:
        """Restore the longest stored beginning of `tokens` into `sequence`, whose content goes.

        Returns how many tokens the sequence holds afterwards, from position 0 on: always fewer than were
        given, for logits come from evaluating the last one. With `keep` it has the first so many already, and
        only what comes after them is read, in chunks; it keeps them in any case.
        """
        self._check_sequence(sequence)
        ids = np.ascontiguousarray(tokens, np.int32)
        self.counters["loads"] += 1
        self.counters["tokens_asked"] += len(ids)
        try:
            if self.form == "chunks":
                restored = self._load_chunks(ids, sequence, keep)
            else:
                restored = self._load_whole(ids, sequence, keep)
        except BlockKVError as error:
            self.counters["load_errors"] += 1
            self._log_once("a sequence could not be restored", error)
            restored = self._settled(sequence, 0)
        self.counters["loads_hit"] += restored > keep
        self.counters["tokens_loaded"] += max(0, restored - keep)
        return restored

    def restore(self, sequence: int, state: torch.Tensor, count: int) -> bool:
        """Give a sequence a state of `count` tokens that is known to be right. False, and it is empty, where
        llama.cpp does not take it.
        """
        self._check_sequence(sequence)
        return self._set(sequence, state, 0) and self._settled(sequence, count) == count

    def _chunk_keys(self, ids: NDArray[np.int32]) -> list[str]:
        """Of the chunks that may be restored: the last token is always left to be evaluated."""
        return blockkv.prefix_keys(ids[: max(0, len(ids) - 1)], self.chunk_tokens, self.family)

    def _load_chunks(self, ids: NDArray[np.int32], sequence: int, keep: int) -> int:
        keys = self._chunk_keys(ids)
        count, first = self.store.lookup(keys), keep // self.chunk_tokens
        if count <= first:
            return self._settled(sequence, keep)
        restored = self._settled(sequence, first * self.chunk_tokens)
        first = restored // self.chunk_tokens  # 0 where the context has lost what it was to keep
        with self._using_scratch(sequence), contextlib.closing(self._read(keys[first:count])) as states:
            for state in states:
                if state is None or not self._set(self._scratch, state, 0):
                    break
                llama_cpp.llama_memory_seq_cp(self._memory, self._scratch, sequence, -1, -1)
                llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)
                restored += self.chunk_tokens
                self.counters["chunks_loaded"] += 1
        return self._settled(sequence, restored)

    def _load_whole(self, ids: NDArray[np.int32], sequence: int, keep: int) -> int:
        found = self._find_whole(ids)
        if found is None or found[1] <= keep:
            return self._settled(sequence, keep)
        with contextlib.closing(self._read([found[0]])) as states:
            state = next(states)
        if state is None:
            return self._settled(sequence, keep)
        content = state.numpy()
        count = int.from_bytes(content[:4].tobytes(), "little")
        start = 4 + 4 * count
        saved = content[4:start].view(np.int32)
        common = _common(saved, ids[: len(ids) - 1])
        if not self.context.can_cut and common != count:
            return self._settled(sequence, keep)
        if not self._set(sequence, state, start):
            return self._settled(sequence, 0)
        self._buffers.give_back(state)
        self.counters["chunks_loaded"] += 1
        return self._settled(sequence, common)

    def _find_whole(self, ids: NDArray[np.int32]) -> tuple[str, int] | None:
        """The key of the stored sequence that shares most with `ids`, and how many tokens at least."""
        usable = ids[: max(0, len(ids) - 1)]
        marked = self._find_marked(usable) if self.context.can_cut else None
        least = marked[1] if marked else 0
        # One that goes on for a chunk and more has a mark there. One that cannot be cut has to end in time,
        # and a mark beyond its end may lead to another one.
        most = least + self.chunk_tokens if self.context.can_cut else len(usable)
        exact = self._whole_keys(usable[:most])
        for number in range(len(exact), least, -1):
            if self.store.contains(exact[number - 1]):
                return exact[number - 1], number
        return marked

    def _find_marked(self, ids: NDArray[np.int32]) -> tuple[str, int] | None:
        """The same by the marks alone."""
        places = blockkv.prefix_keys(ids, self.chunk_tokens, self.family)
        for number in range(len(places), 0, -1):
            if self.store.contains(places[number - 1]):
                mark = self.store.get(places[number - 1], deadline_s=self._load_deadline_s)
                if mark is not None and self.store.contains(_target(mark)):
                    return _target(mark), number * self.chunk_tokens
        return None

    def _whole_keys(self, ids: NDArray[np.int32]) -> list[str]:
        """For every token the key that a sequence has which ends with it."""
        keys = blockkv.prefix_keys(ids, 1, self.family)
        return [f"{key}/whole" for key in keys] if self.chunk_tokens == 1 else keys

    def _read(self, keys: Sequence[str]) -> Generator[torch.Tensor | None, None, None]:
        """The chunks of `keys` in order, read ahead; None, and no more, for one that did not come."""
        due = None if self._load_deadline_s is None else time.monotonic() + self._load_deadline_s
        underway: deque[tuple[torch.Tensor, Any]] = deque()
        waiting = deque(keys)
        while waiting or underway:
            while waiting and sum(buffer.nbytes for buffer, _ in underway) < AHEAD_BYTES:
                info = self.store.entry(waiting[0])
                if info is None:
                    break
                buffer = self._buffers.take(info.payload_bytes)
                left_s = None if due is None else max(0.001, due - time.monotonic())
                underway.append((buffer, self.store.submit_get(waiting.popleft(), buffer, deadline_s=left_s)))
            if not underway:  # evicted since it was looked up
                self.counters["load_misses"] += 1
                yield None
                return
            buffer, future = underway.popleft()
            try:
                # The device may never answer. It writes to memory of ours, which the future holds until then.
                filled = future.result(None if due is None else max(0.001, due - time.monotonic()))
            except (TimeoutError, CancelledError):
                self.counters["loads_late"] += 1
                self._log_once(f"a load took longer than {self._load_deadline_s} s", None)
                filled = False
            if not filled:
                self.counters["load_misses"] += 1
                yield None
                return
            yield buffer
            self._buffers.give_back(buffer)

    def _set(self, sequence: int, state: torch.Tensor, start: int) -> bool:
        """Hand a verified state to llama.cpp. False, and the sequence is empty, where it does not take it."""
        size_bytes = state.nbytes - start
        taken = llama_cpp.llama_state_seq_set_data(
            self.context.ctx, _bytes_at(state.data_ptr() + start), size_bytes, sequence
        )
        if int(taken) == size_bytes:
            return True
        self.counters["loads_refused"] += 1
        self._log_once(
            "llama.cpp did not take a state: is the context smaller than the sequence, or full of others?",
            None,
        )
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        return False

    def _settled(self, sequence: int, count: int) -> int:
        """Cut the sequence to its first `count` tokens; empty it, and 0, where it has not exactly those."""
        memory, window = self._memory, self.context.window_tokens
        if count and llama_cpp.llama_memory_seq_pos_max(memory, sequence) >= count:
            self._cut(sequence, count)
        if count:
            newest = int(llama_cpp.llama_memory_seq_pos_max(memory, sequence))
            oldest = int(llama_cpp.llama_memory_seq_pos_min(memory, sequence))
            # Positions that no token to come can see may be gone: before the window, or of a recurrent state.
            begins = max(0, count - window + 1) if window else 0
            if newest == count - 1 and (0 <= oldest <= begins or not self.context.can_cut):
                return count
        llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
        return 0

    def _cut(self, sequence: int, count: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, count, -1)

    # -- inside ----------------------------------------------------------------------------------------

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self.context.sequences:  # llama.cpp ends the process for others
            raise InvalidArgument(f"sequence {sequence}: this context has 0 to {self.context.sequences - 1}")

    @contextlib.contextmanager
    def _using_scratch(self, sequence: int) -> Iterator[None]:
        """Use the scratch, which is empty before and afterwards. Raises InvalidArgument where it is not."""
        if sequence == self._scratch:
            raise InvalidArgument(f"sequence {sequence} is the scratch; nothing of its own is in it")
        if llama_cpp.llama_memory_seq_pos_max(self._memory, self._scratch) >= 0:
            raise InvalidArgument(
                f"sequence {self._scratch}, the scratch, holds tokens: give scratch= one that nobody uses"
            )
        try:
            yield
        finally:
            llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)

    def _log_once(self, what: str, error: BaseException | None) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log.warning("%s%s; llama.cpp goes on without", what, f": {error}" if error else "")


class _Buffers:
    """Memory that the device reaches directly, kept for the next time: new pages cost more than reading them.

    What is given back is not used by anybody any more; what a device may still write to is not given back.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, size_bytes: int) -> torch.Tensor:
        """So many bytes, of any content."""
        fitting = [one for one in self._free if size_bytes <= one.nbytes <= 2 * size_bytes]
        if not fitting:
            return blockkv.empty(size_bytes, torch.uint8)
        best = min(fitting, key=lambda one: int(one.nbytes))
        self._free = [one for one in self._free if one is not best]
        return best[:size_bytes]

    def give_back(self, buffer: torch.Tensor) -> None:
        base = buffer if buffer._base is None else buffer._base
        self._free.append(base)
        while sum(one.nbytes for one in self._free) > KEPT_BYTES:
            self._free.pop(0)


def _is_run(positions: NDArray[np.int32], first: int, last: int) -> bool:
    """Whether these are the positions from `first` to before `last`, or more of them before `first`."""
    found = np.sort(positions)
    return len(found) >= last - first and bool(
        (found == np.arange(last - len(found), last, dtype=np.int32)).all()
    )


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # numpy declares no buffer before Python 3.12


def _target(mark: torch.Tensor) -> str:
    return bytes(mark.numpy()).decode()


def _bytes_at(address: int) -> Any:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
