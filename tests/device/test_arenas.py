"""Memory from `blockkv.empty` is registered as it is used, and let go before it is unmapped."""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import blockkv
from blockkv import memory

MIB = 1 << 20
SLICE_BYTES = 32 * MIB
LONG_BYTES = 12 * MIB
"""More than the calling thread carries out itself, which does without registered memory."""


@pytest.fixture
def store(image_dir: Path) -> Iterator[blockkv.Store]:
    blockkv.format(image_dir / "store.img", size="512MiB")
    with blockkv.open(image_dir / "store.img", engine="io_uring") as opened:
        yield opened


def arena(size_bytes: int) -> torch.Tensor:
    return blockkv.empty(size_bytes, torch.uint8)


def test_only_what_takes_part_is_registered(store: blockkv.Store) -> None:
    tensor = arena(5 * SLICE_BYTES)
    assert store.stats()["arena_bytes"] == 0
    part = tensor[SLICE_BYTES : SLICE_BYTES + LONG_BYTES]
    part.copy_(torch.randint(0, 256, (LONG_BYTES,), dtype=torch.uint8))
    assert store.put("k", part)
    assert store.stats()["arena_bytes"] == SLICE_BYTES
    assert store.stats()["fixed_requests"] >= 8
    out = tensor[3 * SLICE_BYTES : 3 * SLICE_BYTES + LONG_BYTES]
    assert store.get("k", out=out)
    assert torch.equal(out, part)
    assert store.stats()["arena_bytes"] == 2 * SLICE_BYTES


def test_small_and_other_memory_is_not(store: blockkv.Store) -> None:
    store.put("a", arena(MIB))
    store.put("b", torch.ones(LONG_BYTES, dtype=torch.uint8))
    assert store.stats()["arena_bytes"] == 0


def test_an_arena_that_is_gone_is_not_mistaken_for_the_next_one(store: blockkv.Store) -> None:
    """The kernel would go on with the old pages; new memory comes to lie at the same address."""
    seen = set()
    for number in range(12):
        tensor = arena(LONG_BYTES)
        seen.add(tensor.data_ptr())
        tensor.fill_(number)
        assert store.put(f"k{number}", tensor)
        tensor.zero_()
        assert store.get(f"k{number}", out=tensor)
        assert bool((tensor == number).all())
        del tensor
        gc.collect()
        assert store.stats()["arena_bytes"] == 0
    assert len(seen) < 12


def test_views_keep_an_arena(store: blockkv.Store) -> None:
    view = arena(16 * MIB)[4 * MIB :].view(torch.float16)
    gc.collect()
    view.fill_(3)
    assert store.put("k", view)
    assert store.stats()["arena_bytes"] == 16 * MIB
    assert store.get("k", out=view)


def test_arenas_from_before_and_of_several_stores(image_dir: Path) -> None:
    tensor = arena(LONG_BYTES)
    stores = []
    for name in ("a", "b"):
        blockkv.format(image_dir / name, size="64MiB")
        stores.append(blockkv.open(image_dir / name, engine="io_uring"))
    for store in stores:
        store.put("k", tensor)
        assert store.stats()["arena_bytes"] == LONG_BYTES
    stores[0].close()
    del tensor
    gc.collect()
    assert stores[1].stats()["arena_bytes"] == 0
    stores[1].close()
    assert not memory._arenas


def test_arenas_that_end_while_a_watcher_is_told_of_them() -> None:
    arenas = [arena(2 * MIB) for _ in range(4)]
    addresses = [one.data_ptr() for one in arenas]
    told: list[int] = []

    class Watcher:
        def arena_added(self, address: int, size_bytes: int) -> None:
            told.append(address)
            arenas.clear()

        def arena_removed(self, address: int) -> None:
            told.append(-address)

    watcher = Watcher()
    memory.watch_arenas(watcher)
    assert told[0] == addresses[0]
    assert sorted(told[1:]) == sorted(-address for address in addresses)


def test_requests_across_slices_work(store: blockkv.Store) -> None:
    tensor = arena(2 * SLICE_BYTES + MIB)
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    for start in (SLICE_BYTES - 4096 * 3, SLICE_BYTES - 100, 77):
        part = tensor[start : start + SLICE_BYTES // 2]
        assert store.put(f"{start}", part)
        assert torch.equal(store.get(f"{start}"), part)


def test_threads_make_use_and_drop_arenas(store: blockkv.Store) -> None:
    problems: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for number in range(30):
            tensor = arena(rng.choice((2, 9, 12)) * MIB)
            tensor.fill_(rng.randrange(256))
            key = f"{seed}-{number}"
            store.put(key, tensor)
            if not torch.equal(store.get(key), tensor):
                problems.append(key)
            store.delete(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    gc.collect()
    assert store.stats()["arena_bytes"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_memlock_limit_only_makes_requests_dearer(image_dir: Path) -> None:
    """Root may pin what it likes; so this is done by another user."""
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB")
    os.chown(target, 65534, 65534)
    image_dir.chmod(0o755)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 * MIB, 1 * MIB))
            with blockkv.open(target) as store:
                tensor = arena(LONG_BYTES)  # no arithmetic on it: torch's threads stayed in the parent
                store.put("k", tensor)
                back = store.get("k", out=tensor)
                status = 0 if back and store.stats()["arena_bytes"] == 0 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
