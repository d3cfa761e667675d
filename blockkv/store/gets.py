"""Carrying out gets: look up, lease, read into the caller's memory, verify, give the lease back.

What does not verify is a miss: the record is dropped, its extents are set aside, and the memory it was
read into is zeroed so that nobody mistakes it for the chunk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blockkv.catalog.index import Entry
from blockkv.device.base import Direction, Priority, device_error
from blockkv.errors import BlockKVError, DeviceLost
from blockkv.format.record import key_digest
from blockkv.store.interrupts import interrupts
from blockkv.store.keys import Key, encode_key
from blockkv.store.state import State
from blockkv.store.verify import is_damage, root_checksum
from blockkv.store.waves import Wave, WaveRun
from blockkv.tensors import Described, allocate, describe_output


@dataclass(slots=True)
class _Get:
    position: int
    entry: Entry
    described: Described
    value: Any
    failure: str = ""
    """The counter of what went wrong, or "" for a hit."""


class GetRun(WaveRun[_Get]):
    """One get or get_many call. `results` and `errors` are by position once `run` returned.

    A result is the tensors (None for a miss) where no output was given, else whether it was filled.
    """

    direction = Direction.READ
    priority = Priority.LOAD

    def __init__(
        self,
        state: State,
        count: int,
        into_outputs: bool,
        then: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        super().__init__(state, then)
        self.results: list[Any] = [False if into_outputs else None] * count
        self.errors: dict[int, BlockKVError] = {}
        self._into_outputs = into_outputs

    def run(self, keys: Sequence[Key], outputs: Sequence[Any] | None) -> None:
        """Carry out all gets; one key's fault never stops its neighbours."""
        try:
            for position, key in enumerate(keys):
                interrupts.deliver()
                self._add(position, key, outputs[position] if outputs is not None else None)
        finally:
            self._drain()

    def submit(self, key: Key, output: Any) -> None:
        """Start the only get of an asynchronous run; `then` is called once, possibly before this returns."""
        assert self._then is not None
        self._add(0, key, output)
        if self._wave.items:
            self._start()
        elif not self._started_count:
            self._then(None)

    def _add(self, position: int, key: Key, output: Any) -> None:
        state = self._state
        try:
            digest = key_digest(encode_key(key))
        except BlockKVError as error:
            self.errors[position] = error
            return
        with state.lock:
            entry = state.index.get(digest)
            if entry is None:
                state.counters["get_misses"] += 1
                return
            state.index.touch(digest)
            state.lease(entry)
            layout = state.layouts[entry.layout_id]
        try:
            if self._into_outputs:
                value, described = True, describe_output(output, layout)
            else:
                value, described = allocate(layout)
        except BaseException as error:
            with state.lock:
                state.release(entry)
            if not isinstance(error, BlockKVError):
                raise
            self.errors[position] = error
            return
        get = _Get(position, entry, described, value)
        self._enqueue(get, described, entry.extents, hashed=state.options.verify)

    def _complete(self, wave: Wave[_Get]) -> None:
        state = self._state
        for number, get in enumerate(wave.items):
            code = wave.batch.result(number)
            if wave.refusal is not None:
                self.errors[get.position] = wave.refusal
                get.failure = "get_refused"
            elif code:
                error = device_error(
                    state.device.path, f"reading a chunk of {get.entry.payload_bytes} bytes", code
                )
                if isinstance(error, DeviceLost):
                    self.errors[get.position] = error
                    get.failure = "get_device_lost"
                else:
                    get.failure = "get_device_error" if is_damage(code) else "get_transient_error"
            elif state.options.verify and not self._verifies(get, wave.batch.leaves(number)):
                get.failure = "get_checksum_mismatch"
            else:
                for target, stand_in in get.described.scatter_back or ():
                    target.copy_(stand_in)
                self.results[get.position] = get.value
            if get.failure:
                for address, size_bytes in get.described.segments:
                    ctypes.memset(address, 0, size_bytes)
        with state.changing:
            for get in wave.items:
                if get.failure in ("get_checksum_mismatch", "get_device_error"):
                    state.drop_damaged(get.entry)
                state.release(get.entry)
                if get.failure:
                    state.counters[get.failure] += 1
                    state.counters["get_misses"] += 1
                else:
                    state.counters["get_chunks"] += 1
                    state.counters["get_bytes"] += get.entry.payload_bytes
                    state.counters["get_copied_bytes"] += get.described.copied_bytes

    def _verifies(self, get: _Get, leaves: bytes) -> bool:
        entry = get.entry
        return root_checksum(entry.digest, entry.payload_bytes, get.described.layout, leaves) == entry.root
