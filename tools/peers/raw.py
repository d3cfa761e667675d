"""Adapters that store on a partition itself, with no file system."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch

from peers.base import PAGE_BYTES, Peer, Setup, Staging
from peers.files import DIRECT_FLAGS, view

MEBIBYTE = 1 << 20
NIXL_AGENT = "blockkv-peer"
LMCACHE_HEADER_BYTES = 4096
LMCACHE_METADATA_BYTES = 16 * MEBIBYTE
"""Room for its index; 256 MiB by default, of which a comparison needs little."""


class RawPeer(Peer):
    """Chunk i has slot i of the partition; what is not aligned goes through aligned memory."""

    place = "partition"
    durable = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.slot_bytes = -(-setup.chunk_bytes // PAGE_BYTES) * PAGE_BYTES

    def open(self, payloads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Allocate what stands for its own memory, where the caller's is not fit."""
        self.staging = Staging(payloads)

    def clear(self) -> None:
        """Slots are written again as they are."""


class BlockKV(Peer):
    name = "blockkv"
    what = "put_many and get_many, checksums verified"
    place = "partition"
    module = "blockkv"
    packages = ("blockkv",)
    durable = True

    def open(self, payloads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Format, open, and write the store full once: formatting discarded what the partition held."""
        import blockkv

        blockkv.format(self.setup.place, average_chunk=self.setup.chunk_bytes, force=True)
        self._store = blockkv.open(self.setup.place)
        number = 0
        while not self._store.stats()["chunks_evicted"]:
            self.put(range(number, number + len(payloads)), payloads, durable=False)
            number += len(payloads)
        self.clear()

    def put(self, chunks: Sequence[int], payloads: Sequence[torch.Tensor], durable: bool) -> None:
        """One call."""
        stored = self._store.put_many(zip(map(str, chunks), payloads, strict=True), durable=durable)
        if not all(stored):
            raise RuntimeError("a chunk was there already")

    def get(self, chunks: Sequence[int], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One call."""
        if not all(self._store.get_many(map(str, chunks), outs)):
            raise RuntimeError("a chunk is missing")
        return outs

    def clear(self) -> None:
        """Delete every chunk, and have their space back."""
        for key in list(self._store.keys()):
            self._store.delete(key)
        self._store.commit()

    def settle(self) -> None:
        """Commit what was put."""
        self._store.commit()

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class LMCacheEngine(RawPeer):
    name = "LMCache io_uring engine"
    what = (
        "RawBlockDevice.batched_write and batched_read, O_DIRECT, registered buffers; no index, no checksum"
    )
    module = "lmcache_rust_raw_block_io"
    packages = ("lmcache-rust-raw-block-io==0.5.7rc2",)

    def open(self, payloads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Open the device and register the memory that is written from and read into."""
        super().open(payloads, outs)
        from lmcache_rust_raw_block_io import RawBlockDevice

        self._device = RawBlockDevice(
            str(self.setup.place), True, use_odirect=True, use_iouring=True, io_engine="io_uring"
        )
        fixed = self.staging.tensors or [*payloads, *outs]
        self._device.register_fixed_buffers(
            [tensor.data_ptr() for tensor in fixed], [tensor.numel() for tensor in fixed]
        )

    def put(self, chunks: Sequence[int], payloads: Sequence[torch.Tensor], durable: bool) -> None:
        """One batch."""
        sources = self.staging.before_put(payloads)
        self._wait(self._device.batched_write(*self._where(chunks, sources)))

    def get(self, chunks: Sequence[int], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One batch."""
        targets = self.staging.before_get(outs)
        self._wait(self._device.batched_read(*self._where(chunks, targets)))
        self.staging.after_get(outs)
        return outs

    def _where(
        self, chunks: Sequence[int], memory: Sequence[torch.Tensor]
    ) -> tuple[list[int], list[memoryview], list[int]]:
        offsets = [chunk * self.slot_bytes for chunk in chunks]
        return offsets, [view(tensor) for tensor in memory], [self.setup.chunk_bytes] * len(memory)

    def _wait(self, batch: int) -> None:
        done, errors = self._device.wait_iouring(batch)
        if errors or not all(done):
            raise OSError(f"LMCache's engine failed: {errors}")

    def close(self) -> None:
        """Close the device."""
        self._device.close()


class LMCacheCore(RawPeer):
    name = "LMCache raw_block"
    what = "RawBlockCore.put_many and load_many_into, io_uring, O_DIRECT, zero copy; no checksum of payload"
    module = "lmcache.v1.storage_backend.raw_block.core"
    packages = ("lmcache==0.5.6", "lmcache-rust-raw-block-io==0.5.7rc2")
    engine: ClassVar[str] = "io_uring"
    store_workers: ClassVar[int] = 1
    load_workers: ClassVar[int] = 1

    def open(self, payloads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """The core with the defaults of its adapter, and slots that just fit."""
        super().open(payloads, outs)
        from lmcache.v1.storage_backend.raw_block.core import RawBlockCore, RawBlockCoreConfig

        config = RawBlockCoreConfig(
            device_path=str(self.setup.place),
            capacity_bytes=0,
            block_align=PAGE_BYTES,
            header_bytes=LMCACHE_HEADER_BYTES,
            slot_bytes=LMCACHE_HEADER_BYTES + self.slot_bytes,
            use_odirect=True,
            enable_zero_copy=True,
            meta_total_bytes=LMCACHE_METADATA_BYTES,
            meta_magic=b"LMCIDX01",
            meta_version=1,
            meta_checkpoint_interval_sec=60,
            meta_idle_quiet_ms=100,
            meta_enable_periodic=True,
            meta_verify_on_load=True,
            load_checkpoint_on_init=False,
            io_engine=self.engine,
        )
        self._core = RawBlockCore(config, key_namespace="object")
        self._pool = ThreadPoolExecutor(max(self.store_workers, self.load_workers))
        self._stored: list[str] = []

    def put(self, chunks: Sequence[int], payloads: Sequence[torch.Tensor], durable: bool) -> None:
        """A call for each worker, as its adapter would make."""
        from lmcache.v1.storage_backend.raw_block.key_codec import encode_object_key

        keys = [encode_object_key(_object_key(chunk)) for chunk in chunks]
        objects = _objects(self.staging.before_put(payloads))
        workers = min(self.store_workers, len(keys))
        parts = [(keys[first::workers], objects[first::workers]) for first in range(workers)]
        for done in self._pool.map(lambda part: self._core.put_many(*part), parts):
            if not all(done.results):
                raise OSError(f"LMCache's core stored {sum(done.results)} of {len(done.results)} chunks")
            self._stored += done.stored_keys

    def get(self, chunks: Sequence[int], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A call for each worker, as its adapter would make."""
        from lmcache.v1.storage_backend.raw_block.key_codec import encode_object_key

        keys = [encode_object_key(_object_key(chunk)).encoded for chunk in chunks]
        objects = _objects(self.staging.before_get(outs))
        workers = min(self.load_workers, len(keys))
        parts = [(keys[first::workers], objects[first::workers]) for first in range(workers)]
        for done in self._pool.map(lambda part: self._core.load_many_into(*part), parts):
            if not all(done):
                raise OSError(f"LMCache's core loaded {sum(done)} of {len(done)} chunks")
        self.staging.after_get(outs)
        return outs

    def clear(self) -> None:
        """Delete every chunk."""
        self._core.delete_many(self._stored, force=True)
        self._stored = []

    def close(self) -> None:
        """Close the core, which writes its index."""
        self._pool.shutdown()
        self._core.close()


class LMCacheCorePosix(LMCacheCore):
    name = "LMCache raw_block, posix"
    what = "the same with its default engine, preadv and pwritev, on as many threads as its adapter has"
    engine = "posix"
    # defaults of num_store_workers and num_load_workers, lmcache/v1/distributed/l2_adapters/, 0.5.6
    store_workers = 2
    load_workers = 4


def _object_key(chunk: int) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=chunk.to_bytes(8, "big"), model_name="peer", kv_rank=0)


def _objects(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """LMCache's memory objects over the given memory, which stays the caller's."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    return [
        TensorMemoryObj(
            tensor,
            MemoryObjMetadata(
                shape=tensor.shape,
                dtype=tensor.dtype,
                address=tensor.data_ptr(),
                phy_size=tensor.numel(),
                ref_count=1,
                fmt=MemoryFormat.BINARY,
                shapes=[tensor.shape],
                dtypes=[tensor.dtype],
            ),
            parent_allocator=None,
        )
        for tensor in tensors
    ]


class NixlPosix(RawPeer):
    name = "NIXL POSIX"
    what = (
        "nixl_agent with the POSIX backend on io_uring, O_DIRECT, the device as a file; no index, no checksum"
    )
    module = "nixl._api"
    packages = ("nixl==1.5.1",)
    durable = True

    def open(self, payloads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """An agent, and both ends registered."""
        super().open(payloads, outs)
        from nixl._api import nixl_agent, nixl_agent_config

        self._descriptor = os.open(self.setup.place, os.O_RDWR | DIRECT_FLAGS)
        self._agent = nixl_agent(NIXL_AGENT, nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {"use_uring": "true", "use_aio": "false"})
        memory = self.staging.tensors or [*payloads, *outs]
        size_bytes = self.setup.chunk_count * self.slot_bytes
        self._agent.register_memory([(0, size_bytes, self._descriptor, "")], "FILE")
        self._agent.register_memory([(t.data_ptr(), t.numel(), 0, "") for t in memory], "DRAM")

    def put(self, chunks: Sequence[int], payloads: Sequence[torch.Tensor], durable: bool) -> None:
        """One transfer; with `durable` an fsync of the device."""
        self._transfer("WRITE", chunks, self.staging.before_put(payloads))
        if durable:
            os.fsync(self._descriptor)

    def get(self, chunks: Sequence[int], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One transfer."""
        self._transfer("READ", chunks, self.staging.before_get(outs))
        self.staging.after_get(outs)
        return outs

    def _transfer(self, direction: str, chunks: Sequence[int], memory: Sequence[torch.Tensor]) -> None:
        agent = self._agent
        chunk_bytes = self.setup.chunk_bytes
        at_device = [(chunk * self.slot_bytes, chunk_bytes, self._descriptor) for chunk in chunks]
        handle = agent.initialize_xfer(
            direction,
            agent.get_xfer_descs([(t.data_ptr(), t.numel(), 0) for t in memory], "DRAM"),
            agent.get_xfer_descs(at_device, "FILE"),
            NIXL_AGENT,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            os.sched_yield()  # it has no call that waits
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"NIXL's transfer ended as {state}")

    def close(self) -> None:
        """Close the device; the agent goes with the process."""
        os.close(self._descriptor)
