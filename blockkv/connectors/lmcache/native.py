"""LMCache's `native_plugin` door: six methods and one descriptor, the same store behind it.

::

    lmcache server --l2-adapter '{"type": "native_plugin", "module_path": "blockkv.connectors.lmcache",
        "class_name": "BlockKVConnector", "max_capacity_gb": 900, "adapter_params": {"device": "/dev/nvme1n1",
        "weights": {"llama-3.1-8b": "0e9e39f2"}, "layout": "bfloat16, 32 layers, 8 heads of 128"}}'

Prefer the adapter. Through this door LMCache does not tell of its memory, so that nothing is registered; it
keeps locks to itself, so that what was found may leave before it is loaded, which is a miss; it counts what
it has stored since it started, and nothing of what is there already or has left.

Invariants
  * the same as of the adapter for what goes wrong: a failed store, a miss;
  * objects are exchanged under one `layout` only, which has to be given: nothing else tells dtypes and shapes
    here;
  * chunks of this door and of the adapter are not each other's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lmcache.v1.platform import create_event_notifier

from blockkv.connectors.jobs import BackgroundJobs, Outcome
from blockkv.connectors.lmcache.config import BlockKVL2AdapterConfig, open_store
from blockkv.connectors.lmcache.names import Namespace
from blockkv.connectors.memory import tensor_of
from blockkv.errors import BlockKVError

__all__ = ["BlockKVConnector"]

UNNAMED = "the weights of its model have no fingerprint"

Completion = tuple[int, bool, str, list[bool] | None]
"""Task; whether it succeeded; why not; an answer for each key."""

log = logging.getLogger(__name__)


class BlockKVConnector:
    """Made by LMCache. Thread-safe."""

    def __init__(self, **options: Any) -> None:
        """Options as of the adapter. Raises ValueError, and what `blockkv.open` raises."""
        self._options = BlockKVL2AdapterConfig.from_dict(options)
        if not self._options.layout:
            raise ValueError(
                "give layout, the dtypes and shapes of objects: through this door nothing tells them"
            )
        self._names = Namespace(self._options.weights, "native_plugin")
        self._store = open_store(self._options)
        self._ended = create_event_notifier()
        self._lock = threading.Lock()
        self._next_task = 0
        self._answered: list[Completion] = []
        self._jobs = BackgroundJobs(
            self._store,
            load_deadline_s=self._options.load_deadline_s,
            store_deadline_s=self._options.store_deadline_s,
            staged=self._options.load_deadline_s is not None,
            load_threads=self._options.load_threads,
            store_threads=self._options.store_threads,
            max_store_bytes=int(self._options.max_store_bytes or 1 << 62),
            ended=self._job_ended,
        )

    def event_fd(self) -> int:
        """Readable when something has ended."""
        return int(self._ended.fileno())

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Fill each view with what is stored under its key; answers for each whether it was."""
        task = self._new_task()
        chunks = self._chunks(keys)
        if chunks is None:
            self._answer(task, False, UNNAMED, [False] * len(keys))
        else:
            self._jobs.submit_load(task, chunks, [tensor_of(view) for view in memoryviews])
        return task

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Store each view under its key: all of them, or it has failed."""
        task = self._new_task()
        chunks = self._chunks(keys)
        if chunks is None:
            self._answer(task, False, UNNAMED, None)
        else:
            buffers = [tensor_of(view) for view in memoryviews]
            self._jobs.submit_store(task, chunks, buffers, durable=self._options.durable)
        return task

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Whether each is stored. It counts as a use, so that it is among the last to leave before its
        load.
        """
        return self._ask(keys, self._store.touch)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Remove each; answers whether it was there."""
        return self._ask(keys, self._store.delete)

    def drain_completions(self) -> list[Completion]:
        """What has ended since the last call."""
        self._ended.consume()
        with self._lock:
            ended, self._answered = self._answered, []
        return ended

    def close(self) -> None:
        """End; stores that have not begun fail. A device that hangs is left open."""
        if not self._jobs.close():
            log.error("%s does not answer; it is left open", self._options.where)
            return
        try:
            self._store.close()
        except BlockKVError as error:
            log.error("closing: %s", error)
        self._ended.close()

    def _ask(self, keys: Sequence[str], call: Callable[[str], bool]) -> int:
        """From the index in memory, here and now."""
        task = self._new_task()
        chunks = self._chunks(keys)
        answers, problem = [False] * len(keys), UNNAMED
        if chunks is not None:
            try:
                answers, problem = [call(chunk) for chunk in chunks], ""
            except BlockKVError as error:
                problem = str(error)
        self._answer(task, not problem, problem, answers)
        return task

    def _job_ended(self, outcome: Outcome) -> None:
        answers = list(outcome.done) if outcome.is_load else None
        self._answer(outcome.job, outcome.all_done, outcome.reason, answers)

    def _answer(self, *completion: *Completion) -> None:
        with self._lock:
            self._answered.append(completion)
        self._ended.notify()

    def _chunks(self, keys: Sequence[str]) -> list[str] | None:
        """None where the weights of one of the models were not named."""
        families = [self._names.family(key.partition("@")[0], self._options.layout) for key in keys]
        if not all(families):
            return None
        return [f"{family}/{key}" for family, key in zip(families, keys, strict=True)]

    def _new_task(self) -> int:
        with self._lock:
            task = self._next_task
            self._next_task += 1
        return task
