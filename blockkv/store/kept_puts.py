"""A put where policies, priorities, expiry or quotas have a say: who may come in, and who leaves for it.

Not here: the put itself (`blockkv.store.puts`), which knows nothing of all this.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockkv.device.base import Placement
from blockkv.errors import BlockKVError
from blockkv.format.record import key_digest
from blockkv.store.keeping import Stay
from blockkv.store.keys import Key, encode_keys
from blockkv.store.puts import PutRun
from blockkv.store.state import State
from blockkv.tensors import Tensors

__all__ = ["put_kept"]


def put_kept(
    state: State,
    items: Sequence[tuple[Key, Tensors]],
    deadline_ns: int,
    droppable: bool,
    stays: Stay | None,
) -> tuple[list[bool], dict[int, BlockKVError], int]:
    """Results and errors of a put by position, and the newest log sequence of any of the keys."""
    encoded, unfit = encode_keys([key for key, _ in items])
    digests = list(map(key_digest, encoded))
    fit = [number for number in range(len(items)) if number not in unfit]
    with state.lock:
        state.expire()
        keeping = state.keep()
        admitted = keeping.admitted(digests)
        if stays is not None:
            keeping.begin_put(digests, stays)
        refused = {number for number, wanted in zip(fit, admitted, strict=True) if not wanted}
        state.counters["put_refused"] += len(refused)
    wanted = [number for number in range(len(items)) if number not in refused]
    placement = stays.placement if stays is not None else Placement.DATA
    run = PutRun(state, len(wanted), deadline_ns, droppable, placement)
    try:
        run.run([items[number] for number in wanted])
    finally:
        with state.lock:
            keeping.end_put(digests)
            keeping.used(digests)
            state.keep_quotas()
    results = [False] * len(items)
    for number, result in zip(wanted, run.results, strict=True):
        results[number] = result
    return results, {wanted[number]: error for number, error in run.errors.items()}, run.last_sequence
