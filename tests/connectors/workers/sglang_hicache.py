"""SGLang's storage on blockkv, with SGLang's own pools and controllers.

    sglang_hicache.py save DIRECTORY       what `load`, another process, has to find
    sglang_hicache.py load DIRECTORY
    sglang_hicache.py checks DIRECTORY     everything that one process can show

Prints a line of JSON: by name of a check "ok", or what went wrong.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang_importable  # noqa: F401
import torch
from sglang.srt.managers import cache_controller as controllers
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller as hybrids
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.utils import get_hash_str
from sglang_pools import (
    PAGE_TOKENS,
    attach,
    buffers,
    fill,
    hybrid,
    mamba_pool,
    mha_pool,
    mla_pool,
    page_of,
)

import blockkv
from blockkv.errors import BlockKVError, InvalidArgument
from blockkv.testing import OperationKind, RecordingDevice, StallingDevice

sys.path.insert(0, str(Path(__file__).parents[1]))
from stored_bytes import flip_byte

TOKENS = list(range(10 * PAGE_TOKENS))
HASHES = get_hash_str(TOKENS, None, page_size=PAGE_TOKENS)
ASKED = TOKENS[: 9 * PAGE_TOKENS + 5] + [7] * (PAGE_TOKENS - 5)
"""Another prompt, which differs in its tenth page."""
TARGET = 12 * PAGE_TOKENS
"""Where in the pool pages are loaded to."""
WAYS = [
    ("layer_first", 0),
    ("page_first", 0),
    ("page_first_direct", 0),
    ("page_first", 1),
    ("page_first_direct", 1),
    ("layer_first", 1),
]
CHECKS: dict[str, Callable[[Path], None]] = {}


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """One of `checks`; it gets a directory of its own."""
    CHECKS[function.__name__] = function
    return function


def image(directory: Path, name: str = "kv", size_bytes: int = 96 << 20) -> Path:
    """A file that holds nothing yet."""
    path = directory / f"{name}.img"
    if not path.exists():
        path.touch()
        os.truncate(path, size_bytes)
    return path


def options(directory: Path, name: str = "kv", **others: Any) -> dict[str, Any]:
    return {
        "device": str(image(directory, name)),
        "format": True,
        "average_chunk": "64KiB",
        "weights": "commit 1",
        "interface_v1": 1,
        **others,
    }


def operations_of(controller: Any) -> Any:
    """The module whose operations a controller takes."""
    return hybrids if isinstance(controller, hybrids.HybridCacheController) else controllers


def request_of(controller: Any, tokens: list[int], **others: Any) -> Any:
    """An operation that looks for these tokens."""
    if operations_of(controller) is controllers:
        return controllers.PrefetchOperation("request", tokens)
    handle = type("Handle", (), {"rid": "request"})()
    return hybrids.PrefetchOperation(handle, tokens, **others)


def backup(controller: Any, count: int = len(TOKENS), first: int = 0) -> int:
    """Store pages that begin at index `first` of the pool; how many tokens are there then."""
    operation = operations_of(controller).StorageOperation(
        torch.arange(first, first + count), TOKENS[:count], hash_value=HASHES[: count // PAGE_TOKENS]
    )
    controller._page_backup(operation)
    return operation.completed_tokens


def hits(controller: Any, tokens: list[int] = ASKED) -> int:
    """How many tokens the controller finds."""
    return controller._storage_hit_query(request_of(controller, tokens))[1]


def prefetch(controller: Any, tokens: list[int] = ASKED) -> int:
    """Find and load to TARGET; how many tokens arrived."""
    operation = request_of(controller, tokens)
    operation.hash_value, count = controller._storage_hit_query(operation)
    operation.host_indices = torch.arange(TARGET, TARGET + count)
    return controller._page_transfer(operation) * PAGE_TOKENS


def pages(pool: Any, first: int, count: int) -> list[torch.Tensor]:
    return [page_of(pool, first + number * PAGE_TOKENS) for number in range(count)]


def assert_arrived(pool: Any, reference: Any, count: int = 9) -> None:
    for number, (mine, theirs) in enumerate(
        zip(pages(pool, TARGET, count), pages(reference, 0, count), strict=True)
    ):
        assert torch.equal(mine, theirs), f"page {number} of {count}"


@contextmanager
def attached(pool: Any, given: dict[str, Any], **changes: Any) -> Iterator[Any]:
    controller = attach(pool, given, **changes)
    try:
        yield controller
    finally:
        controller.storage_backend.close()


def raises(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    said = ""
    try:
        call()
    except kind as error:
        said = str(error)
    assert words in said, f"no {kind.__name__} with {words!r}, but {said!r}"


# -- two processes -----------------------------------------------------------------------------------------


def save(directory: Path) -> dict[str, str]:
    """Store ten pages in every way, and a hybrid model's."""
    found = {}
    for layout, interface in WAYS:
        pool = mha_pool(layout)
        fill(pool, 1)
        with attached(pool, options(directory, f"{layout}{interface}", interface_v1=interface)) as controller:
            assert backup(controller) == len(TOKENS)
        found[f"{layout}, v{interface}"] = "ok"
    for layout, interface in (("page_first", 1), ("layer_first", 0)):
        group = hybrid(layout)
        for entry in group.entries:
            fill(entry.host_pool, 1)
        name = f"hybrid{layout}{interface}"
        with attached(group, options(directory, name, interface_v1=interface)) as controller:
            assert hybrid_backup(controller) == len(TOKENS)
        found[name] = "ok"
    return found


def load(directory: Path) -> dict[str, str]:
    """Find nine of them: the tenth page of the prompt is another."""
    found = {}
    for layout, interface in WAYS:
        pool, reference = mha_pool(layout), mha_pool(layout)
        fill(pool, 2)
        fill(reference, 1)
        given = options(directory, f"{layout}{interface}", interface_v1=interface, format=False)
        with attached(pool, given) as controller:
            assert hits(controller) == 9 * PAGE_TOKENS
            assert prefetch(controller) == 9 * PAGE_TOKENS
            assert_arrived(pool, reference)
            before = buffers(pool)[0].clone()
            assert hits(controller, [5, *ASKED[1:]]) == 0
            assert torch.equal(before, buffers(pool)[0])
        found[f"{layout}, v{interface}"] = "ok"
    for layout, interface in (("page_first", 1), ("layer_first", 0)):
        group, reference = hybrid(layout), hybrid(layout)
        for mine, theirs in zip(group.entries, reference.entries, strict=True):
            fill(mine.host_pool, 2)
            fill(theirs.host_pool, 1)
        name = f"hybrid{layout}{interface}"
        with attached(group, options(directory, name, interface_v1=interface, format=False)) as controller:
            hybrid_load(controller, reference, TOKENS, 10)
            # The states are those after ten pages: a prompt of nine has none to go on from.
            assert hybrid_query(controller, ASKED)[1] == 0
        found[name] = "ok"
    return found


# -- hybrid pools ------------------------------------------------------------------------------------------

WINDOW_PAGES = 3


def hybrid_transfers() -> list[PoolTransfer]:
    """Of the pools beside the keys and values, as the tree makes them for the end of ten pages."""
    return [
        PoolTransfer(
            PoolName.SWA,
            host_indices=torch.arange(WINDOW_PAGES * PAGE_TOKENS),
            keys=HASHES[-WINDOW_PAGES:],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        ),
        PoolTransfer(
            PoolName.MAMBA,
            host_indices=torch.tensor([2]),
            keys=HASHES[-1:],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        ),
        PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV),
    ]


def hybrid_backup(controller: Any) -> int:
    operation = hybrids.StorageOperation(
        torch.arange(len(TOKENS)), TOKENS, hash_value=HASHES, pool_transfers=hybrid_transfers()
    )
    controller._page_backup(operation)
    stored = operation.pool_storage_result.extra_pool_hit_pages
    assert stored == {PoolName.SWA: WINDOW_PAGES, PoolName.MAMBA: 1, PoolName.INDEXER: 10}, stored
    return operation.completed_tokens


def hybrid_query(controller: Any, tokens: list[int]) -> tuple[Any, int]:
    operation = request_of(controller, tokens, pool_transfers=hybrid_transfers())
    operation.hash_value, count = controller._storage_hit_query(operation)
    operation.storage_hit_count = count
    return operation, count


def hybrid_load(controller: Any, reference: Any, tokens: list[int], count: int) -> None:
    operation, found = hybrid_query(controller, tokens)
    assert found == count * PAGE_TOKENS, f"{found} tokens"
    operation.host_indices = torch.arange(TARGET, TARGET + found)
    swa, mamba, _ = operation.pool_transfers
    swa.host_indices = torch.arange(4 * PAGE_TOKENS, (4 + WINDOW_PAGES) * PAGE_TOKENS)
    mamba.host_indices = torch.tensor([5])
    controller._page_transfer(operation)
    acks = [
        controller.prefetch_sync_queue.get_nowait() for _ in range(controller.prefetch_sync_queue.qsize())
    ]
    assert max(ack.completed_tokens or 0 for ack in acks) == found
    assert acks[-1].pool_hits == {PoolName.SWA: WINDOW_PAGES, PoolName.MAMBA: 1}, acks[-1].pool_hits
    mine, theirs = (
        {str(one.name): one.host_pool for one in group.entries}
        for group in (controller.mem_pool_host, reference)
    )
    assert_arrived(mine["kv"], theirs["kv"], count)
    assert_arrived(mine["indexer"], theirs["indexer"], count)
    for number in range(WINDOW_PAGES):
        assert torch.equal(
            page_of(mine["swa"], (4 + number) * PAGE_TOKENS), page_of(theirs["swa"], number * PAGE_TOKENS)
        )
    assert torch.equal(page_of(mine["mamba"], 5), page_of(theirs["mamba"], 2))


@check
def hybrid_pools_that_do_not_say_where_pages_are_are_copied(directory: Path) -> None:
    group, reference = hybrid("page_first", side_states=True), hybrid("page_first", side_states=True)
    with attached(group, options(directory)) as controller:
        assert hybrid_backup(controller) == len(TOKENS)
        for entry in group.entries:
            fill(entry.host_pool, 2)
        hybrid_load(controller, reference, TOKENS, 10)


@check
def each_pool_limits_the_prefix_by_its_policy(directory: Path) -> None:
    group = hybrid("page_first")
    with attached(group, options(directory)) as controller:
        backend = controller.storage_backend
        backup(controller)
        none = PoolTransfer(PoolName.INDEXER)
        assert backend.batch_exists_v2(HASHES, [none]).kv_hit_pages == 0

        def put(name: PoolName, numbers: list[int]) -> None:
            size = group.get_pool(name).page_size
            transfer = PoolTransfer(
                name, host_indices=torch.arange(len(numbers) * size), keys=[HASHES[n] for n in numbers]
            )
            assert backend.batch_set_v2([transfer]) == {name: [True] * len(numbers)}

        put(PoolName.INDEXER, [0, 1, 2, 3, 4, 5, 6, 8])
        found = backend.batch_exists_v2(HASHES, [none])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (7, [1, 2, 3, 4, 5, 6, 7]), found
        assert found.extra_pool_hit_pages == {PoolName.KV: 10, PoolName.INDEXER: 7}

        put(PoolName.SWA, [0, 2, 3, 4, 6])
        window = PoolTransfer(PoolName.SWA, keys=HASHES[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = backend.batch_exists_v2(HASHES, [window])
        assert found.restorable_prefix_pages == [1, 4, 5], found
        found = backend.batch_exists_v2(HASHES[:4], [window, none])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 4]), found
        assert backend.batch_exists_v2(HASHES[:3], [window]).kv_hit_pages == 1

        put(PoolName.MAMBA, [3])
        state = PoolTransfer(PoolName.MAMBA, keys=HASHES[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert backend.batch_exists_v2(HASHES, [window, state]).restorable_prefix_pages == [4]

        groups = PoolTransfer(
            PoolName.INDEXER,
            keys=HASHES,
            hit_policy=PoolHitPolicy.BLOCK_GROUPS,
            block_pages=4,
            group_pages=2,
        )
        found = backend.batch_exists_v2(HASHES, [groups])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages[PoolName.INDEXER]) == (10, 12), found

        # pages and keys that do not match, and pools that nobody registered, move nothing
        wrong = PoolTransfer(PoolName.SWA, host_indices=torch.arange(64), keys=HASHES[:2])
        absent = PoolTransfer(PoolName.DRAFT, host_indices=torch.arange(64), keys=HASHES[:1])
        for move in (backend.batch_get_v2, backend.batch_set_v2):
            assert move([wrong, absent]) == {PoolName.SWA: [False, False], PoolName.DRAFT: [False]}
        absent.hit_policy = PoolHitPolicy.ALL_PAGES
        assert backend.batch_exists_v2(HASHES, [absent]).kv_hit_pages == 0


@check
def an_anchor_that_holds_nothing_says_what_the_others_hold(directory: Path) -> None:
    for interface in (0, 1):
        pool = LogicalHostPool(32 * PAGE_TOKENS, PAGE_TOKENS)
        with attached(
            pool, options(directory, f"a{interface}", interface_v1=interface, kv_cache_dtype="fp8_e4m3")
        ) as controller:
            assert hits(controller) == 0
            assert backup(controller) == len(TOKENS)
            assert (hits(controller), prefetch(controller)) == (9 * PAGE_TOKENS, 9 * PAGE_TOKENS)


# -- families ----------------------------------------------------------------------------------------------


@check
def others_find_nothing(directory: Path) -> None:
    own: dict[str, Any] = {"tp_size": 2, "pp_size": 2, "attn_cp_size": 2}
    with attached(mha_pool("page_first"), options(directory), **own) as controller:
        backup(controller)
        assert hits(controller) == 9 * PAGE_TOKENS
    others: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "weights": (mha_pool("page_first"), {"weights": "commit 2"}, {}),
        "model": (mha_pool("page_first"), {}, {"model_name": "meta/llama-b"}),
        "dtype": (mha_pool("page_first", dtype=torch.float16, dim=128), {}, {}),
        "dtype of the same size": (mha_pool("page_first", dtype=torch.int32), {}, {}),
        "layout": (mha_pool("page_first_direct"), {}, {}),
        "interface": (mha_pool("page_first"), {"interface_v1": 0}, {}),
        "heads": (mha_pool("page_first", heads=1, dim=128), {}, {}),
        "layers": (mha_pool("page_first", layers=8, heads=1), {}, {}),
        "tensor rank": (mha_pool("page_first"), {}, {"tp_rank": 1}),
        "tensor ranks": (mha_pool("page_first"), {}, {"tp_size": 4}),
        "pipeline rank": (mha_pool("page_first"), {}, {"pp_rank": 1}),
        "context rank": (mha_pool("page_first"), {}, {"attn_cp_rank": 1}),
        "fp8": (mha_pool("page_first"), {"kv_cache_dtype": "fp8_e5m2"}, {}),
    }
    for what, (pool, changed, config) in others.items():
        with attached(pool, options(directory, **changed), **{**own, **config}) as controller:
            assert hits(controller) == 0, what
            assert prefetch(controller) == 0, what
    with attached(mha_pool("page_first"), options(directory), **own, dp_rank=1) as controller:
        assert hits(controller) == 9 * PAGE_TOKENS, "replicas compute the same"


@check
def ranks_share_what_is_the_same_on_all_of_them(directory: Path) -> None:
    shared = {"is_mla_model": True, "tp_size": 2}
    for layout in ("page_first", "layer_first", "page_first_direct"):
        pool, reference = mla_pool(layout), mla_pool(layout)
        given = options(directory, layout)
        with attached(pool, given, **shared) as controller:
            assert not controller.backup_skip
            backup(controller)
        with attached(pool, given, **shared, tp_rank=1) as controller:
            assert controller.backup_skip
            fill(pool, 2)
            assert prefetch(controller) == 9 * PAGE_TOKENS
            assert_arrived(pool, reference)
            # States are shares also beside pools that are not.
            backend = controller.storage_backend
            backend.register_mem_host_pool_v2(mamba_pool(), PoolName.MAMBA)
            backend.register_mem_host_pool_v2(mla_pool(layout), PoolName.INDEXER)
            ranks = {name: one.family.tensor_ranks for name, one in backend._pools.items()}
            assert ranks == {"kv": 1, "indexer": 1, "mamba": 2}, ranks


@check
def clear_deletes_its_own(directory: Path) -> None:
    with attached(mha_pool("page_first"), options(directory, weights="other")) as controller:
        backup(controller)
    group = hybrid("page_first")
    with attached(group, options(directory)) as controller:
        hybrid_backup(controller)
        controller.storage_backend.clear()
        assert hybrid_query(controller, TOKENS)[1] == 0
    with attached(mha_pool("page_first"), options(directory, weights="other")) as controller:
        assert hits(controller) == 9 * PAGE_TOKENS
        assert len(controller.storage_backend._store) == 10


# -- faults ------------------------------------------------------------------------------------------------


@check
def a_flipped_byte_is_a_miss_and_a_counter(directory: Path) -> None:
    for layout, interface in WAYS:
        name = f"{layout}{interface}"
        pool, reference = mha_pool(layout), mha_pool(layout)
        with attached(pool, options(directory, name, interface_v1=interface)) as controller:
            backup(controller)
            backend = controller.storage_backend
            key = backend._anchor().keys([HASHES[6]])[0]
            flip_byte(image(directory, name), backend._store, key, 3000)
            assert hits(controller) == 9 * PAGE_TOKENS, "nobody has looked at it yet"
            assert prefetch(controller) == 6 * PAGE_TOKENS
            assert_arrived(pool, reference, 6)
            assert backend._store.stats()["get_checksum_mismatch"] == 1
            assert hits(controller) == 6 * PAGE_TOKENS
            assert backup(controller) == len(TOKENS), "it is put anew"
            assert prefetch(controller) == 9 * PAGE_TOKENS
            assert_arrived(pool, reference)


@check
def injected_failures_and_delays_are_survived(directory: Path) -> None:
    """SGLang's own injector wraps the backend; whatever arrives is right."""
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.002"
    try:
        pool, reference = mha_pool("page_first"), mha_pool("page_first")
        group, group_reference = hybrid("page_first"), hybrid("page_first")
        both = [attach(pool, options(directory)), attach(group, options(directory, "hybrid"))]
        assert type(both[0].storage_backend).__name__ == "HiCacheStorageFailureInjector"
        outcomes = set()
        for _ in range(40):
            stored, arrived = backup(both[0]), prefetch(both[0])
            outcomes.add((stored, arrived))
            assert_arrived(pool, reference, arrived // PAGE_TOKENS)
            buffers(pool)[0][:, TARGET:] = 0
        assert len(outcomes) > 1
        whole = 0
        for _ in range(60):
            try:
                hybrid_backup(both[1])
                hybrid_load(both[1], group_reference, TOKENS, 10)
                whole += 1
            except AssertionError:
                while both[1].prefetch_sync_queue.qsize():
                    both[1].prefetch_sync_queue.get_nowait()
        assert whole, "never once went everything through"
        for controller in both:
            controller.storage_backend.get_stats()
            controller.storage_backend.clear()
            controller.storage_backend.close()
    finally:
        del os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"]
        del os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"]


@check
def a_device_that_fails_is_a_miss_and_no_exception(directory: Path) -> None:
    gone = threading.Event()

    class Broken(RecordingDevice):
        """Fails everything once `gone` is set."""

        def submit(self, batch: Any) -> None:
            if gone.is_set():
                raise blockkv.DeviceError("unplugged", 5)
            super().submit(batch)

    path = image(directory)
    blockkv.format(path, average_chunk="64KiB")
    pool = hybrid("page_first")
    controller = attach(pool, options(directory))
    backend = controller.storage_backend
    backend._registered.close()
    backend._store.close()
    device = Broken(path, lambda kind, offset, length: None)
    backend._store = blockkv.open(device)
    try:
        hybrid_backup(controller)
        gone.set()
        with said() as lines:
            for _ in range(3):
                assert backend.batch_get_v1(HASHES[:2], torch.arange(2 * PAGE_TOKENS)) == [False, False]
                assert backend.batch_set_v1(["new1", "new2"], torch.arange(2 * PAGE_TOKENS)) == [False, False]
                assert backend.get("new1", torch.zeros(4)) is None
                assert not backend.set("new1", torch.zeros(4))
                transfers = hybrid_transfers()[:2]
                assert not any(itertools.chain(*backend.batch_set_v2(new(transfers)).values()))
                assert not any(itertools.chain(*backend.batch_get_v2(transfers).values()))
        assert 0 < len(lines) <= 6, lines
        assert "said once" in lines[0]
    finally:
        gone.clear()
        backend.close()
    assert hits(controller) == 0, "closed, everything is a miss"
    assert backend.batch_exists_v2(HASHES, hybrid_transfers()).kv_hit_pages == 0
    assert backend.batch_get_v1(HASHES[:1], torch.arange(PAGE_TOKENS)) == [False]
    assert backend.batch_set_v1(HASHES[:1], torch.arange(PAGE_TOKENS)) == [False]
    assert backend.clear() is False
    backend.close()


@check
def a_device_that_stalls_holds_only_those_who_wait_for_it(directory: Path) -> None:
    pool, reference = mha_pool("page_first"), mha_pool("page_first")
    controller = attach(pool, options(directory))
    backend = controller.storage_backend
    backend._registered.close()
    backend._store.close()
    device = StallingDevice()
    blockkv.format(device, average_chunk="64KiB")
    backend._store = blockkv.open(device)
    try:
        assert backup(controller) == len(TOKENS)
        device.gate.clear()
        arrived: list[int] = []
        loader = threading.Thread(target=lambda: arrived.append(prefetch(controller)))
        loader.start()
        loader.join(0.3)
        assert not arrived
        begin = time.perf_counter()
        assert hits(controller) == 9 * PAGE_TOKENS, "a look takes no device"
        assert time.perf_counter() - begin < 15
        device.gate.set()
        loader.join(30)
        assert arrived == [9 * PAGE_TOKENS]
        assert_arrived(pool, reference)
    finally:
        device.gate.set()
        backend.close()


def new(transfers: list[PoolTransfer]) -> list[PoolTransfer]:
    """The same with keys that are not stored."""
    return [
        PoolTransfer(one.name, one.host_indices, keys=[f"new{number}" for number in range(len(one.keys))])
        for one in transfers
    ]


@contextmanager
def said() -> Iterator[list[str]]:
    """What our module logs meanwhile."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("blockkv.connectors.sglang")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@check
def a_full_store_evicts_and_stays_right(directory: Path) -> None:
    path = image(directory, "small", 24 << 20)
    blockkv.format(path, average_chunk="64KiB")
    pool, reference = mha_pool("page_first"), mha_pool("page_first")
    with attached(pool, options(directory, "small")) as controller:
        backend = controller.storage_backend
        for number in range(30):
            names = [f"{number}-{page}" for page in range(10)]
            assert all(backend.batch_set_v1(names, torch.arange(len(TOKENS))))
            assert backend.batch_exists(names) == 10
        assert backend._store.stats()["chunks_evicted"] > 0
        assert backend.batch_get_v1(names, torch.arange(TARGET, TARGET + len(TOKENS))) == [True] * 10
        assert_arrived(pool, reference, 10)


@check
def threads_may_call_at_once(directory: Path) -> None:
    pool, reference = mha_pool("page_first", pages=64), mha_pool("page_first", pages=64)
    failures: list[BaseException] = []
    with attached(pool, options(directory)) as controller:
        backup(controller)

        def load(number: int) -> None:
            try:
                first = TARGET + number * 10 * PAGE_TOKENS
                for _ in range(20):
                    assert controller.storage_backend.batch_exists(HASHES) == 10
                    indices = torch.arange(first, first + len(TOKENS))
                    assert all(controller.storage_backend.batch_get_v1(HASHES, indices))
                for mine, theirs in zip(pages(pool, first, 10), pages(reference, 0, 10), strict=True):
                    assert torch.equal(mine, theirs)
            except BaseException as error:
                failures.append(error)

        def store() -> None:
            try:
                for number in range(40):
                    names = [f"{number}-{page}" for page in range(4)]
                    assert all(controller.storage_backend.batch_set_v1(names, torch.arange(4 * PAGE_TOKENS)))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
        threads.append(threading.Thread(target=store))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


@check
def memory_is_moved_where_it_is(directory: Path) -> None:
    """The device writes into the pool and reads from it, through registered memory, without a copy."""
    for layout in ("page_first", "page_first_direct"):
        pool = mha_pool(layout, layers=8, heads=8, pages=24)  # a piece is a MiB
        with attached(pool, options(directory, layout)) as controller:
            store = controller.storage_backend._store
            backup(controller)
            prefetch(controller)
            stats = store.stats()
            assert stats["put_copied_bytes"] == stats["get_copied_bytes"] == 0
            assert stats["bounced_bytes"] <= 64 << 10, "metadata, and no payload"
            assert stats["fixed_requests"] >= 19, stats
            assert stats["direct_bytes"] >= 19 * pages(pool, 0, 1)[0].nbytes


@check
def metrics_are_told_once(directory: Path) -> None:
    with attached(mha_pool("page_first"), options(directory)) as controller:
        backup(controller)
        prefetch(controller)
        stats = controller.storage_backend.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([10], [9])
        assert stats.backup_bandwidth[0] > 0 < stats.prefetch_bandwidth[0]
        assert controller.storage_backend.get_stats().backup_pgs == []
    with attached(mha_pool("page_first"), options(directory), enable_storage_metrics=False) as controller:
        prefetch(controller)
        assert controller.storage_backend.get_stats() is None


# -- configuration -----------------------------------------------------------------------------------------


@check
def bad_configurations_are_exceptions_at_the_start(directory: Path) -> None:
    pool = mha_pool("page_first")

    def start(changes: dict[str, Any], **config: Any) -> Callable[[], object]:
        given = {
            name: value for name, value in {**options(directory), **changes}.items() if value is not None
        }
        return lambda: attach(pool, given, **config)

    raises(InvalidArgument, "unknown options: devise", start({"devise": "x"}))
    raises(InvalidArgument, "option device", start({"device": None}))
    for seconds in (0, -1, 3601, float("nan"), "10", True):
        raises(InvalidArgument, "load_deadline_s", start({"load_deadline_s": seconds}))
    raises(InvalidArgument, "durable", start({"durable": "false"}))
    raises(InvalidArgument, "option weights", start({"weights": None}))
    raises(InvalidArgument, "no weights are there", start({"weights": None}, model_name=str(directory)))
    raises(InvalidArgument, "option model", start({}, model_name=""))
    raises(BlockKVError, "absent.img", start({"device": str(directory / "absent.img")}))
    raises(blockkv.NotFormatted, "kv.img", start({"format": False}))
    raises(InvalidArgument, "cp_rank", start({"device": "{rank}.img"}))
    raises(
        InvalidArgument,
        "the same socket",
        start({"device": "kv-{tp_rank}.img"}, is_mla_model=True, tp_size=2),
    )
    occupied = image(directory, "occupied")
    with occupied.open("r+b") as file:
        file.write(b"something")
    raises(BlockKVError, "occupied.img", start({"device": str(occupied)}))
    assert occupied.read_bytes()[:9] == b"something"
    bytes_pool = mha_pool("page_first", dtype=torch.uint8)
    raises(InvalidArgument, "kv_cache_dtype", lambda: attach(bytes_pool, options(directory)))
    with attached(bytes_pool, options(directory, kv_cache_dtype="fp8_e4m3")):
        raises(blockkv.DeviceBusy, "kv.img", start({}))
    with attached(pool, options(directory)) as controller:
        assert backup(controller) == len(TOKENS), "a start that failed leaves nothing open"


@check
def ranks_have_devices_of_their_own(directory: Path) -> None:
    for rank in range(2):
        image(directory, f"kv-{rank}")
    given = options(directory, device=str(directory / "kv-{tp_rank}.img"))
    ranks = [attach(mha_pool("page_first"), given, tp_size=2, tp_rank=rank) for rank in range(2)]
    for controller in ranks:
        assert backup(controller) == len(TOKENS)
        assert hits(controller) == 9 * PAGE_TOKENS
        controller.storage_backend.close()


@check
def weights_are_known_by_their_files(directory: Path) -> None:
    given = {**options(directory), "weights": None}
    models = [directory / name for name in ("first", "second")]
    for number, model in enumerate(models):
        model.mkdir()
        (model / "model.safetensors").write_bytes(bytes([number]) * 1000)
    for _ in range(2):
        with attached(mha_pool("page_first"), given, model_name=str(models[0])) as controller:
            assert backup(controller) == len(TOKENS)
    with attached(
        mha_pool("page_first"), {**given, "model": str(models[0])}, model_name=str(models[1])
    ) as other:
        assert hits(other) == 0, "the same name and other weights"
        (models[1] / "model.safetensors").write_bytes(bytes(1000))
    with attached(
        mha_pool("page_first"), {**given, "model": str(models[0])}, model_name=str(models[1])
    ) as same:
        assert hits(same) == 9 * PAGE_TOKENS


@contextmanager
def owner(device: Path, socket: Path) -> Iterator[subprocess.Popen[str]]:
    """`blockkv serve`."""
    command = [sys.executable, "-m", "blockkv", "serve", str(device), "--socket", str(socket), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "{\n"
            yield process
        finally:
            process.kill()


@check
def ranks_share_a_device_through_its_owner(directory: Path) -> None:
    device, socket = image(directory), directory / "owner.sock"
    blockkv.format(device, average_chunk="64KiB")
    given = options(directory, device=str(socket), durable=True)  # the owner is going to be killed
    with owner(device, socket) as process:
        mla = [
            attach(mla_pool("page_first"), given, is_mla_model=True, tp_size=2, tp_rank=rank)
            for rank in range(2)
        ]
        mha = [attach(mha_pool("page_first"), given, tp_size=2, tp_rank=rank) for rank in range(2)]
        assert backup(mla[0]) == len(TOKENS)
        fill(mla[1].storage_host_pool, 2)
        assert prefetch(mla[1]) == 9 * PAGE_TOKENS
        assert_arrived(mla[1].storage_host_pool, mla_pool("page_first"))
        fill(mha[1].storage_host_pool, 3)
        for controller in mha:
            assert hits(controller) == 0, "shares of heads are each rank's own"
            assert backup(controller) == len(TOKENS)
        for controller in mha:
            pool = controller.storage_host_pool
            assert prefetch(controller) == 9 * PAGE_TOKENS
            for mine, theirs in zip(pages(pool, TARGET, 9), pages(pool, 0, 9), strict=True):
                assert torch.equal(mine, theirs)
        process.kill()
        process.wait()
        assert hits(mha[0]) in (0, 9 * PAGE_TOKENS)
        assert mha[0].storage_backend.batch_set_v1(["new"], torch.arange(PAGE_TOKENS)) == [False]
    with owner(device, socket):
        deadline_s = time.monotonic() + 60
        for controller in mha:  # each connects again by itself
            while not controller.storage_backend.batch_set_v1(["new"], torch.arange(PAGE_TOKENS))[0]:
                assert time.monotonic() < deadline_s, "it has not connected again"
                time.sleep(0.05)
        assert prefetch(mha[1]) == 9 * PAGE_TOKENS
        for controller in (*mla, *mha):
            controller.storage_backend.close()


@check
def several_devices_are_an_array(directory: Path) -> None:
    members = [str(image(directory, name)) for name in "ab"]
    with attached(mha_pool("page_first"), options(directory, device=members)) as controller:
        assert backup(controller) == len(TOKENS)
        assert prefetch(controller) == 9 * PAGE_TOKENS
        assert_arrived(controller.storage_host_pool, mha_pool("page_first"))


@check
def durable_is_on_media_when_it_is_acknowledged(directory: Path) -> None:
    for durable in (False, True):
        kinds: list[OperationKind] = []
        name = f"durable{durable}"
        controller = attach(mha_pool("page_first"), options(directory, name, durable=durable))
        backend = controller.storage_backend
        backend._registered.close()
        backend._store.close()

        def record(kind: OperationKind, offset: int, length: int, seen: list[OperationKind] = kinds) -> None:
            seen.append(kind)

        device = RecordingDevice(image(directory, name), record)
        backend._store = blockkv.open(device, commit_interval_ms=None)
        kinds.clear()
        backup(controller)
        assert (OperationKind.FLUSH in kinds) is durable
        backend.close()


def checks(directory: Path) -> dict[str, str]:
    """All of them, or those that are named behind the directory."""
    found = {}
    for name, function in CHECKS.items():
        if sys.argv[3:] and name not in sys.argv[3:]:
            continue
        own = directory / name
        own.mkdir()
        try:
            function(own)
            found[name] = "ok"
        except Exception:
            found[name] = traceback.format_exc()
        for path in own.glob("*.img"):
            path.unlink()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    print(json.dumps({"save": save, "load": load, "checks": checks}[sys.argv[1]](Path(sys.argv[2]))))
