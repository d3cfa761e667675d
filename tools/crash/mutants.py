"""Known protocol bugs, patched into the store for as long as a context lasts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from blockkv.catalog.index import Index
from blockkv.device.base import UNIT_BYTES, Batch
from blockkv.format import journal as journal_module
from blockkv.format import superblock as superblock_module
from blockkv.format.journal import EndReason, Replay
from blockkv.store import create as create_module
from blockkv.store import log as log_module
from blockkv.store import recovery as recovery_module
from blockkv.store import store as store_module
from blockkv.store.gets import GetRun
from blockkv.store.growing import GrowingChunk
from blockkv.store.log import Log
from blockkv.store.puts import PutRun
from blockkv.store.state import State
from crash.history import formatted

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A protocol bug. `patch` installs it for as long as the context lasts."""

    name: str
    patch: Callable[[], contextlib.AbstractContextManager[object]]
    profile: str = "power"


def replaced(
    owner: object, name: str, make: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[object]:
    """Replace an attribute by what `make` returns for the original."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def without_flushes(device: Any) -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(device, "flush", return_value=None)


def acknowledge_before_flush() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def write_pages(self: Log, group: Any) -> None:
            self._device.flush()  # for the group before
            with without_flushes(self._device):
                original(self, group)

        return write_pages

    return replaced(Log, "_write_pages", make)


def flush_before_pages_complete() -> contextlib.AbstractContextManager[object]:
    def make_write_pages(original: Any) -> Any:
        def write_pages(self: Log, group: Any) -> None:
            device, wait = self._device, self._device.wait

            def flush_then_wait(batch: Batch) -> None:
                type(device).flush(device)
                wait(batch)

            with without_flushes(device), mock.patch.object(device, "wait", flush_then_wait):
                original(self, group)

        return write_pages

    return replaced(Log, "_write_pages", make_write_pages)


@contextlib.contextmanager
def flush_before_data_completes() -> Iterator[None]:
    late: list[tuple[Any, Batch]] = []

    def wait_for_late() -> None:
        while late:
            device, batch = late.pop()
            device.wait(batch)

    def make_finish(original: Any) -> Any:
        def finish(self: PutRun) -> None:
            wave = self._in_flight.popleft()
            if wave.refusal is None:
                late.append((self._state.device, wave.batch))
            self._complete(wave)

        return finish

    def make_write_pages(original: Any) -> Any:
        def write_pages(self: Log, group: Any) -> None:
            original(self, group)
            wait_for_late()

        return write_pages

    def make_start(original: Any) -> Any:
        def start(self: GetRun, wave: Any) -> None:
            wait_for_late()
            original(self, wave)

        return start

    with (
        mock.patch.object(PutRun, "_finish", make_finish(None)),
        replaced(Log, "_write_pages", make_write_pages),
        mock.patch.object(GetRun, "_start", make_start(GetRun._start)),
    ):
        yield


def no_verification_on_get() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(Index, "inexact", return_value=[])


def unsealed_tail_trusted() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(recovery_module, "_verify_unsealed", return_value=[])


def superblock_before_checkpoint_flushed() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def write_checkpoint(self: Log, *arguments: Any) -> Any:
            with without_flushes(self._device):
                return original(self, *arguments)

        return write_checkpoint

    return replaced(Log, "_write_checkpoint", make)


def checkpoint_over_active_area() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def write_checkpoint(self: Log, *arguments: Any) -> Any:
            current = self.superblock
            self.superblock = dataclasses.replace(current, checkpoint_area=1 - current.checkpoint_area)
            try:
                return original(self, *arguments)
            finally:
                self.superblock = current

        return write_checkpoint

    return replaced(Log, "_write_checkpoint", make)


@contextlib.contextmanager
def one_superblock_slot() -> Iterator[None]:
    def write_superblock(device: Any, found: Any) -> None:
        device.write(found.geometry.slot_offsets[0], found.encode(0))
        device.flush()

    with (
        mock.patch.object(superblock_module, "slots_of", return_value=(0, 4)),
        mock.patch.object(log_module, "write_superblock", write_superblock),
        mock.patch.object(store_module, "write_superblock", write_superblock),
        mock.patch.object(create_module, "write_superblock", write_superblock),
        fresh_format(),
    ):
        yield


@contextlib.contextmanager
def fresh_format() -> Iterator[None]:
    """Devices formatted by a mutant are not for anybody else."""
    formatted.cache_clear()
    try:
        yield
    finally:
        formatted.cache_clear()


def reuse_before_delete_is_durable() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(State, "defer", lambda self, extents, group: self.allocator.release(extents))


def discard_before_delete_is_durable() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def delete(self: State, entry: Any) -> Any:
            group = original(self, entry)
            for start, count in entry.extents:
                self.device.discard(self.geometry.unit_offset(start), count * UNIT_BYTES)
            return group

        return delete

    return replaced(State, "delete", make)


class AnyEpoch(int):
    """An epoch that passes every comparison."""

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = lambda self, other: True
    __hash__ = int.__hash__


def no_predecessor_and_no_epoch() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def decode_page(data: Any, *, link: bytes | None = None, **asked: Any) -> Any:
            page = original(data, **asked)
            return page if link is None else dataclasses.replace(page, epoch=AnyEpoch(page.epoch))

        return decode_page

    return replaced(journal_module, "decode_page", make)


class NeverDecreasing(Replay):
    """A replay that accepts any page whose epoch is not below that of the page before."""

    def __init__(self, read_page: Any, found: Any, *arguments: Any) -> None:
        lax = dataclasses.replace(found, epoch=found.epoch + 1, epoch_start_sequence=1 << 61)
        super().__init__(read_page, lax, *arguments)

    @property
    def end(self) -> Any:
        return dataclasses.replace(super().end, reason=EndReason.END_OF_LOG)


def epoch_never_decreases() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(recovery_module, "Replay", NeverDecreasing)


def dropped_put_not_deleted() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def recover(*arguments: Any, **options: Any) -> Any:
            recovered = original(*arguments, **options)
            recovered.dropped.clear()
            return recovered

        return recover

    return replaced(store_module, "recover", make)


def growth_replaced_before_flush() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(Log, "flush_payload", return_value=None)


def growth_tail_over_the_durable_one() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(GrowingChunk, "_other_place", return_value=0)


def growth_gives_back_at_once() -> contextlib.AbstractContextManager[object]:
    def make(original: Any) -> Any:
        def end(self: GrowingChunk, *arguments: Any) -> None:
            for extent in self._state.allocator.pending_extents():
                self._state.device.discard(
                    self._state.geometry.unit_offset(extent[0]), extent[1] * UNIT_BYTES
                )
            original(self, *arguments)

        return end

    return replaced(GrowingChunk, "_end", make)


MUTANTS = (
    Mutant("acknowledge-before-flush", acknowledge_before_flush),
    Mutant("flush-before-pages-complete", flush_before_pages_complete),
    Mutant("flush-before-data-completes", flush_before_data_completes),
    Mutant("no-verification-on-get", no_verification_on_get, "rot"),
    Mutant("unsealed-tail-trusted", unsealed_tail_trusted),
    Mutant("superblock-before-checkpoint-flushed", superblock_before_checkpoint_flushed),
    Mutant("checkpoint-over-active-area", checkpoint_over_active_area),
    Mutant("one-superblock-slot", one_superblock_slot),
    Mutant("reuse-before-delete-is-durable", reuse_before_delete_is_durable),
    Mutant("discard-before-delete-is-durable", discard_before_delete_is_durable),
    Mutant("no-predecessor-and-no-epoch", no_predecessor_and_no_epoch),
    Mutant("epoch-never-decreases", epoch_never_decreases),
    Mutant("dropped-put-not-deleted", dropped_put_not_deleted),
    Mutant("growth-replaced-before-flush", growth_replaced_before_flush),
    Mutant("growth-tail-over-the-durable-one", growth_tail_over_the_durable_one),
    Mutant("growth-gives-back-at-once", growth_gives_back_at_once),
)
"""`no flush at open` is not among them: the superblock that every open writes is followed by a flush before
anything is acknowledged, so leaving out the first one breaks no promise."""
