"""Checking an open store, and putting right what is wrong with it.

What is wrong with the metadata was found when the store was opened (`recovery`); here the rest is looked at:
whether index and free map agree, and with `payload` whether every chunk is what its record says.

A repair drops what cannot be verified and nothing else, as an open and a get do, then writes a checkpoint and
four superblocks: every slot is valid again. Each of these steps is one the store takes anyway, so a crash in
between costs nothing, and repeating a repair changes nothing.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

from blockkv.format.geometry import SLOTS_PER_COPY
from blockkv.store.finding import Finding, Remedy, chunk_finding
from blockkv.store.interrupts import interrupts
from blockkv.store.scrub import Progress, sweep
from blockkv.store.state import State
from blockkv.store.verify import WRONG_BYTES, is_damage

__all__ = ["CheckReport", "check_store"]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Outcome of `Store.check`."""

    chunks: int
    """That were stored when the check began."""
    payload_bytes: int
    payload_checked: bool
    repaired: bool
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def damaged_keys(self) -> tuple[str | bytes, ...]:
        """Chunks that did not verify: dropped where the store is open for writing, else to be dropped."""
        return tuple(one.key for one in self.findings if one.key is not None and one.remedy is Remedy.DROP)

    @property
    def problems(self) -> tuple[str, ...]:
        """What index and free map say that cannot both be true: a fault of the program, not of the device."""
        return tuple(str(one) for one in self.findings if one.remedy is Remedy.REOPEN)


def check_store(
    state: State,
    found_at_open: list[Finding],
    *,
    payload: bool,
    repair: bool,
    progress: Progress | None,
) -> CheckReport:
    """Carry out `Store.check`. `found_at_open` is what is still wrong with the metadata on the device."""
    findings = list(found_at_open)
    with state.lock:
        chunk_count = len(state.index)
        digests, _ = state.index.by_log_sequence(0) if payload else ([], 0)
        total_bytes = state.index.payload_bytes
        findings += _disagreements(state)
    if payload:
        writable = not state.read_only_reason
        done_bytes = 0
        for wave in sweep(state, digests, drop=writable):
            for entry, outcome in wave:
                done_bytes += entry.payload_bytes
                if not outcome:
                    continue
                error = f"{os.strerror(-outcome)} (errno {-outcome})" if outcome != WRONG_BYTES else ""
                if is_damage(outcome):
                    what = f"cannot be read: {error}" if error else "its bytes are not those that were put"
                    findings.append(chunk_finding(entry, state.geometry, what))
                    with state.lock:
                        state.counters["check_damaged"] += 1
                else:
                    what = f"cannot be read just now: {error}"
                    findings.append(chunk_finding(entry, state.geometry, what, Remedy.KEEP))
            if progress is not None:
                progress(done_bytes, total_bytes)
            interrupts.deliver()
    if repair:
        state.log.checkpoint()
        state.log.renew_superblock(SLOTS_PER_COPY)
    return CheckReport(chunk_count, total_bytes, payload, repair, tuple(findings))


def _disagreements(state: State) -> list[Finding]:
    """What index and free map say that cannot both be true. The caller holds the lock."""
    index = state.index
    found = []
    if not (state.claims or index.any_leased):
        try:
            reserved = itertools.chain.from_iterable(state.reserved.values())
            state.allocator.check([*map(tuple, index.extents().tolist()), *reserved])
        except AssertionError as error:
            found.append(Finding("free map", str(error), Remedy.REOPEN))
    record_bytes, payload_bytes = index.sums()
    for name, stored, summed in (
        ("record", index.record_bytes, record_bytes),
        ("payload", index.payload_bytes, payload_bytes),
    ):
        if stored != summed:
            what = f"its chunks have {summed} {name} bytes, and it counts {stored}"
            found.append(Finding("index", what, Remedy.REOPEN))
    return found
