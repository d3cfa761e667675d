"""AIBrix's KV cache offloading (`aibrix_kvcache`) on a store, as its L2 cache.

::

    from blockkv.connectors import aibrix

    aibrix.install(device="/dev/nvme1n1", weights="0e9e39f", dtype="bfloat16")
    # AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND=BLOCKKV, AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE=llama-3.1-8b
    manager = BaseKVCacheManager(config)

`aibrix_kvcache` has no entry for connectors of others: `Connector.create` is a chain of names. `install` puts
one before it that knows one name more. It has to run in every process that makes a cache manager, before it
is made.

What the key of AIBrix leaves out (`conn_id` has the namespace, the shares of heads and layers, the layout and
the tokens a block; no model, no weights, no dtype) is in ours: `weights` and `dtype` are required, and the
default namespace, which says nothing of the model, is refused.

Invariants
  * AIBrix gives a region back when its own time-out is over, whatever the connector does. The device
    therefore
    writes to memory of ours; it is copied while the region is held;
  * a region that is put is copied before anything waits: it may be another one's content later;
  * whatever the store raises is NOT_FOUND or ERROR to AIBrix, logged once.

Read in aibrix_kvcache 0.8.0: `l2/connectors/connector.py`, `l2/l2_cache.py`, `cache_manager.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from aibrix_kvcache import envs
from aibrix_kvcache.l2.connectors import Connector, ConnectorConfig, ConnectorFeature
from aibrix_kvcache.memory import MemoryRegion
from aibrix_kvcache.status import Status, StatusCodes

import blockkv
from blockkv.connectors.opening import open_store
from blockkv.errors import BatchError, BlockKVError, InvalidArgument, StoreFull

__all__ = ["BACKEND_NAME", "BlockKVConnector", "Installed", "install"]

BACKEND_NAME = "BLOCKKV"
DEFAULT_NAMESPACE = "aibrix"
"""What AIBrix uses where nobody has set one: every model that does has it."""
LONGEST_KEY_BYTES = 256
"""Longer ones, which raw token keys are, are hashed."""

log = logging.getLogger(__name__)


class Installed:
    """What `install` did. A context manager; `uninstall` takes it back."""

    def __init__(self, store: blockkv.Store, owns: bool, before: Callable[..., Any]) -> None:
        self.store = store
        self._owns = owns
        self._before: Callable[..., Any] | None = before

    def uninstall(self) -> None:
        """Close the store, where it was opened here; no manager may be using it any more. Idempotent."""
        if self._before is not None:
            Connector.create = staticmethod(self._before)
            self._before = None
            if self._owns:
                self.store.close()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(
    *,
    weights: str,
    dtype: str,
    device: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    store: blockkv.Store | None = None,
    format: bool = False,
    load_deadline_s: float | None = 5.0,
) -> Installed:
    """Let AIBrix find the back end "BLOCKKV", in the store on `device` or in one that is open.

    `weights` is a fingerprint of the weights, a commit or a digest, and `dtype` what is in the cache
    ("bfloat16", "fp8_e4m3, scale per head"). With `format` a device that holds no store is formatted, if it
    is blank. A load whose requests the device has not got after `load_deadline_s` is a miss.

    Raises InvalidArgument, NotFormatted, OccupiedError, DeviceError, DeviceBusy.
    """
    if not weights or not dtype:
        raise InvalidArgument(
            "weights and dtype must be given: AIBrix does not tell, and its keys have neither"
        )
    if (device is None) == (store is None):
        raise InvalidArgument("give a device, or a store that is open, and not both")
    if store is None:
        assert device is not None
        opened = open_store(device, format=format)
    else:
        opened = store
    before = Connector.create

    def create(config: ConnectorConfig, **options: Any) -> Connector[Any, Any]:
        if config.backend_name != BACKEND_NAME:
            return before(config, **options)
        return BlockKVConnector(config, opened, weights, dtype, load_deadline_s)

    Connector.create = staticmethod(create)
    return Installed(opened, store is None, before)


class BlockKVConnector(Connector[bytes, torch.Tensor]):
    """One connector of AIBrix. `Connector.create` makes it once `install` was called."""

    def __init__(
        self,
        config: ConnectorConfig,
        store: blockkv.Store,
        weights: str,
        dtype: str,
        load_deadline_s: float | None = 5.0,
    ) -> None:
        """Raises InvalidArgument for the default namespace."""
        if config.namespace in ("", DEFAULT_NAMESPACE):
            raise InvalidArgument(
                f"the namespace is {config.namespace!r}, AIBrix's default, which tells no model: set "
                "AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE to one for each model"
            )
        self.family = blockkv.Family(
            model=f"aibrix_kvcache {config.namespace}",
            weights=weights,
            dtype=dtype,
            layout=f"{config.block_spec_signature} {config.key_builder_signature} {config.layout_signature} "
            f"compressed {envs.AIBRIX_KV_CACHE_OL_L2_CACHE_COMPRESSION!r}",
            salt=config.partition_id,
        )
        self.counters = dict.fromkeys(("gets", "hits", "puts", "put_errors", "get_errors"), 0)
        self._store = store
        self._gets = _Together(config.executor, self._read)
        self._puts = _Together(config.executor, self._write)
        self._load_deadline_s = load_deadline_s
        self._logged: set[str] = set()

    @classmethod
    def from_envs(cls, conn_id: str, executor: Executor, **_: Any) -> BlockKVConnector:
        """Not from the environment alone: weights and dtype are not in it. Raises InvalidArgument."""
        raise InvalidArgument("call blockkv.connectors.aibrix.install(...) before the cache manager is made")

    @property
    def name(self) -> str:
        return "blockkv"

    @property
    def feature(self) -> ConnectorFeature:
        """Not `mput_mget`: 0.8.0 then counts hits behind a miss, and takes as many blocks from the front."""
        return ConnectorFeature()

    def open(self) -> Status:
        return Status.ok()

    def close(self) -> Status:
        return Status.ok()  # the store is whoever's who has installed it

    async def exists(self, key: bytes) -> Status:
        try:
            return Status.ok() if self._store.contains(self._key(key)) else Status(StatusCodes.NOT_FOUND)
        except BlockKVError as error:
            return self._failed("a look-up", error)

    async def get(self, key: bytes, mr: MemoryRegion) -> Status:
        """Fill the region. What is not there, or did not verify, is NOT_FOUND."""
        self.counters["gets"] += 1
        mr.ref_up()  # AIBrix gives it back when it is out of patience
        try:
            out = torch.empty(mr.length, dtype=torch.uint8)
            if not await self._gets.add((key, out)):
                return Status(StatusCodes.NOT_FOUND)
            mr.slab[mr.addr : mr.addr + mr.length].copy_(out)
        finally:
            mr.ref_down()
        self.counters["hits"] += 1
        return Status.ok()

    async def put(self, key: bytes, mr: MemoryRegion) -> Status:
        """Store the region. A full store is OUT_OF_MEMORY, other failures are ERROR."""
        self.counters["puts"] += 1
        content = mr.slab[mr.addr : mr.addr + mr.length].to("cpu", copy=True)
        status: Status = await self._puts.add((self._key(key), content))
        return status

    async def delete(self, key: bytes) -> Status:
        try:
            self._store.delete(self._key(key))
        except BlockKVError as error:
            return self._failed("a delete", error)
        return Status.ok()

    def _read(self, items: Sequence[tuple[bytes, torch.Tensor]]) -> list[bool]:
        keys, outs = [self._key(key) for key, _ in items], [out for _, out in items]
        try:
            return self._store.get_many(keys, outs, deadline_s=self._load_deadline_s)
        except BatchError as error:  # a chunk of another size, for one
            self.counters["get_errors"] += len(error.errors)
            self._failed("a get", error)
            return [result is True for result in error.results]
        except BlockKVError as error:
            self.counters["get_errors"] += len(keys)
            self._failed("a get", error)
            return [False] * len(keys)

    def _write(self, items: Sequence[tuple[str, torch.Tensor]]) -> list[Status]:
        try:
            self._store.put_many(items)
        except BatchError as error:
            self.counters["put_errors"] += len(error.errors)
            return [
                self._failed("a put", error.errors[number]) if number in error.errors else Status.ok()
                for number in range(len(items))
            ]
        except BlockKVError as error:
            self.counters["put_errors"] += len(items)
            return [self._failed("a put", error)] * len(items)
        return [Status.ok()] * len(items)

    def _key(self, key: bytes | str) -> str:
        encoded = key.encode() if isinstance(key, str) else bytes(key)
        if len(encoded) > LONGEST_KEY_BYTES:
            return f"{self.family.name}/#{hashlib.blake2b(encoded, digest_size=32).hexdigest()}"
        return f"{self.family.name}/{encoded.hex()}"

    def _failed(self, what: str, error: BlockKVError) -> Status:
        if what not in self._logged:
            self._logged.add(what)
            log.warning("%s failed: %s; AIBrix computes instead", what, error)
        code = StatusCodes.OUT_OF_MEMORY if isinstance(error, StoreFull) else StatusCodes.ERROR
        return Status(code, str(error))


class _Together:
    """Carries out what is asked for in one turn of the event loop in one call, on another thread.

    AIBrix asks for every block of a batch by itself; the store is fast with many at once.
    """

    def __init__(self, executor: Executor, call: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._executor = executor
        self._call = call
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []

    def add(self, item: Any) -> asyncio.Future[Any]:
        """What the call gives for this item. On the thread of the event loop, as everything here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._start, loop)
        self._waiting.append((item, future))
        return future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        taken, self._waiting = self._waiting, []
        call = loop.run_in_executor(self._executor, self._call, [item for item, _ in taken])

        def done(finished: asyncio.Future[Sequence[Any]]) -> None:
            error = None if finished.cancelled() else finished.exception()
            for number, (_, future) in enumerate(taken):
                if future.done():
                    continue  # whoever waited for it was cancelled
                if finished.cancelled():
                    future.cancel()
                elif error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(finished.result()[number])

        call.add_done_callback(done)
