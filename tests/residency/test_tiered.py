"""A store with a memory tier is a store; what is in memory is what deserves it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import blockkv
from blockkv import MemoryBudget, Place, TieredStore
from blockkv.catalog.admission import SecondAsk
from blockkv.residency import Candidate, Estimate
from blockkv.testing import SimulatedDevice

MIB = 1 << 20


class Adjustable(MemoryBudget):
    """A budget that a test sets."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes, follow=False)
        self.budget_bytes = budget_bytes

    def estimate(self, own_bytes: int) -> Estimate:
        return Estimate(self.budget_bytes, "set", 0.0)


def content(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice(96 * MIB)
    blockkv.format(device, average_chunk="64KiB")
    return device


@pytest.fixture
def budget() -> Adjustable:
    return Adjustable(8 * MIB)


@pytest.fixture
def tier(device: SimulatedDevice, budget: Adjustable) -> Iterator[TieredStore]:
    store = blockkv.open(device, commit_interval_ms=None)
    with TieredStore(store, budget, interval_s=None) as tier:
        yield tier


# -- like a store ------------------------------------------------------------------------------------------


def test_outputs_that_share_memory_are_refused_wherever_the_chunks_are(tier: TieredStore) -> None:
    values = [content(50_000, seed) for seed in range(4)]
    keys = ["k0", "k1", "k2", "k3"]
    tier.store.put_many(list(zip(keys, values, strict=True)))
    assert tier.get("k0") is not None
    assert tier.get("k1") is not None  # the first two are in memory now, the others on the device
    for shared, filled in (((0, 1), 0), ((2, 3), 2), ((0, 2), 0)):
        outs = [torch.zeros(50_000, dtype=torch.uint8) for _ in keys]
        outs[shared[1]] = outs[shared[0]]
        with pytest.raises(blockkv.BatchError, match="overlaps") as caught:
            tier.get_many(keys, outs)
        assert list(caught.value.errors) == [shared[1]]
        assert torch.equal(outs[filled], values[filled])


def test_forms_dtypes_and_strides(tier: TieredStore) -> None:
    k, v = torch.randn(4, 8, 16), torch.randn(4, 8, 16).to(torch.bfloat16)
    odd = torch.arange(7, dtype=torch.uint8)
    values: dict[str, Any] = {
        "tensor": k,
        "list": [v, k],
        "dict": {"k": odd, "v": v},
        "strided": torch.randn(64, 64).t(),
        "bytes": b"some bytes",
    }
    assert tier.put_many(values) == [True] * 5
    assert tier.put_many(values) == [False] * 5
    assert all(map(tier.in_memory, values))
    assert torch.equal(tier.get("tensor"), k)
    assert [one.dtype for one in tier.get("list")] == [torch.bfloat16, torch.float32]
    assert torch.equal(tier.get("dict")["v"], v)
    with tier.borrow("dict") as found:
        assert torch.equal(found["v"], v)
    assert torch.equal(tier.get("strided"), values["strided"])
    assert bytes(tier.get("bytes").numpy()) == b"some bytes"
    out = torch.zeros(64, 64).t()
    assert tier.get("strided", out=out) is True
    assert torch.equal(out, values["strided"])
    with pytest.raises(blockkv.LayoutMismatch):
        tier.get("tensor", out=torch.zeros(3))
    outs = [torch.zeros_like(k), bytearray(10), torch.zeros(1)]
    assert tier.get_many(["tensor", "bytes", "nothing"], outs) == [True, True, False]
    assert torch.equal(outs[0], k)  # type: ignore[arg-type]
    assert tier.get("nothing") is None
    assert tier.lookup(["tensor", "list", "nothing", "dict"]) == 2
    assert set(tier.keys()) == set(values)
    assert len(tier) == 5
    assert tier.delete("list")
    assert not tier.delete("list")
    assert "list" not in tier
    assert tier.store.stats()["put_chunks"] == 0


def test_futures(tier: TieredStore) -> None:
    assert tier.submit_put("k", content(1000)).result() is True
    assert torch.equal(tier.submit_get("k").result(), content(1000))
    tier.store.put("direct", content(2000))
    assert torch.equal(tier.submit_get("direct").result(), content(2000))
    with pytest.raises(blockkv.LayoutMismatch):
        tier.submit_get("k", out=torch.zeros(3)).result()


def test_durable_puts_are_in_the_store(tier: TieredStore, device: SimulatedDevice) -> None:
    tier.put("durable", content(1000, 1), durable=True)
    tier.put("later", content(1000, 2))
    tier.put("never", content(1000, 3))
    assert tier.put("later", content(5), durable=True) is False
    assert tier.put_many([("many", content(1000, 4)), ("later", b"x")], durable=True) == [True, False]
    with blockkv.open(device.clone()) as crashed:
        assert set(crashed.keys()) == {"durable", "later", "many"}
        assert torch.equal(crashed.get("later"), content(1000, 2))
    assert tier.in_memory("durable")


def test_closing_writes_back(device: SimulatedDevice) -> None:
    refused: list[Candidate] = []

    def admit(candidate: Candidate) -> bool:
        refused.extend([candidate] * (candidate.key == b"k3"))
        return candidate.key != b"k3"

    with TieredStore(blockkv.open(device), 64 * MIB, admit=admit) as tier:
        for number in range(6):
            tier.put(f"k{number}", content(100_000, number), place=Place("request", number))
        growing = tier.reserve("growing", 1000)
        growing.append(b"x")
        borrowed = tier.borrow("k0")
        with borrowed, pytest.raises(blockkv.InvalidArgument, match="inside"):
            tier.close()
    tier.close()
    for use in (lambda: tier.get("k0"), lambda: growing.append(b"x"), lambda: tier.put("k", b"x")):
        with pytest.raises(blockkv.StoreClosed):
            use()
    assert [one.place for one in refused] == [Place("request", 3)]
    with blockkv.open(device.clone()) as store:
        # the first layers were put last: they are the last to be evicted
        assert list(store.keys()) == ["k5", "k4", "k2", "k1", "k0"]
        assert torch.equal(store.get("k4"), content(100_000, 4))


# -- who is in memory --------------------------------------------------------------------------------------


def layers_in_memory(tier: TieredStore, group: str, count: int) -> list[int]:
    return [layer for layer in range(count) if tier.in_memory(f"{group}/{layer}")]


def put_layers(tier: TieredStore, group: str, order: list[int]) -> None:
    for layer in order:
        assert tier.put(f"{group}/{layer}", content(2 * MIB, layer), place=Place(group, layer))


@pytest.mark.parametrize(
    "order", [list(range(10)), list(reversed(range(10))), [3, 9, 1, 7, 0, 5, 8, 2, 6, 4]]
)
def test_the_first_layers_stay(tier: TieredStore, order: list[int]) -> None:
    put_layers(tier, "r", order)
    assert layers_in_memory(tier, "r", 10) == [0, 1, 2, 3]
    for _ in range(3):
        for layer in range(10):
            assert torch.equal(tier.get(f"r/{layer}", place=Place("r", layer)), content(2 * MIB, layer))
    assert layers_in_memory(tier, "r", 10) == [0, 1, 2, 3]
    stats = tier.stats()
    assert (stats["memory_hits"], stats["direct_hits"]) == (12, 18)
    assert stats["memory_hit_bytes"] == 12 * 2 * MIB
    assert stats["memory_resident_bytes"] == 8 * MIB


def test_a_new_request_takes_over(tier: TieredStore) -> None:
    put_layers(tier, "old", list(range(4)))
    put_layers(tier, "new", list(range(3)))
    assert layers_in_memory(tier, "old", 4) == [0]
    assert layers_in_memory(tier, "new", 3) == [0, 1, 2]
    for layer in range(4):
        assert torch.equal(tier.get(f"old/{layer}", place=Place("old", layer)), content(2 * MIB, layer))
    # Its chunks are in the store; those of the new one are not, and a get has nothing written.
    assert layers_in_memory(tier, "new", 3) == [0, 1, 2]
    assert tier.stats()["write_backs"] == 3
    assert tier.store.lookup(f"old/{layer}" for layer in (1, 2, 3)) == 3


def test_recency_without_places(tier: TieredStore) -> None:
    for number in range(4):
        tier.put(f"k{number}", content(2 * MIB, number))
    tier.get("k0")
    tier.put("k4", content(2 * MIB, 4))
    assert [tier.in_memory(f"k{number}") for number in range(5)] == [True, False, True, True, True]
    tier.put("k5", content(2 * MIB, 5), durable=True)
    assert not tier.in_memory("k2")
    tier.get("k1")  # the one that is in the store already can leave without a write
    assert [tier.in_memory(f"k{number}") for number in range(6)] == [True, True, False, True, True, False]
    tier.get("k5")
    assert [tier.in_memory(f"k{number}") for number in range(6)] == [True, False, False, True, True, True]
    assert tier.stats()["write_backs"] == 2


def test_pinned_and_borrowed_stay(tier: TieredStore) -> None:
    for number in range(4):
        tier.put(f"k{number}", content(2 * MIB, number))
    assert tier.pin("k0")
    with tier.borrow("k1") as borrowed:
        tier.put_many([(f"more{number}", content(2 * MIB, number)) for number in range(8)])
        assert torch.equal(borrowed, content(2 * MIB, 1))
        assert tier.in_memory("k0")
        assert tier.in_memory("k1")
        assert tier.delete("k1")
        assert torch.equal(borrowed, content(2 * MIB, 1))
        assert not tier.contains("k1")
    assert tier.unpin("k0")
    assert tier.unpin("k0") is False
    tier.put_many([(f"last{number}", content(2 * MIB, number)) for number in range(4)])
    assert not tier.in_memory("k0")
    assert torch.equal(tier.get("k0"), content(2 * MIB))


def test_a_ranker_of_ones_own(device: SimulatedDevice) -> None:
    def odd_ones(candidate: Candidate) -> bool:
        return candidate.key[-1] % 2 == 1

    with TieredStore(blockkv.open(device), 8 * MIB, ranker=odd_ones, interval_s=None) as tier:
        for number in range(8):
            tier.put(f"k{number}", content(2 * MIB, number))
        assert [number for number in range(8) if tier.in_memory(f"k{number}")] == [1, 3, 5, 7]


@pytest.mark.parametrize("budget", [5.5, True, "1GiB"])
def test_what_is_no_budget(device: SimulatedDevice, budget: Any) -> None:
    with blockkv.open(device) as store, pytest.raises(blockkv.InvalidArgument, match="MemoryBudget"):
        TieredStore(store, budget)


def test_the_budget_is_followed(tier: TieredStore, budget: Adjustable) -> None:
    put_layers(tier, "r", list(range(8)))
    budget.budget_bytes = 5 * MIB
    assert tier.rebind().reason == "set"
    assert layers_in_memory(tier, "r", 8) == [0, 1]
    assert tier.stats()["memory_resident_bytes"] == 4 * MIB
    budget.budget_bytes = 0
    tier.rebind()
    assert tier.stats()["memory_resident_bytes"] == 0
    assert torch.equal(tier.get("r/0"), content(2 * MIB))
    budget.budget_bytes = 12 * MIB
    tier.rebind()
    for layer in range(8):
        tier.get(f"r/{layer}", place=Place("r", layer))
    assert layers_in_memory(tier, "r", 8) == [0, 1, 2, 3, 4, 5]


def test_it_is_followed_by_itself(device: SimulatedDevice, budget: Adjustable) -> None:
    with TieredStore(blockkv.open(device), budget, interval_s=0.01) as tier:
        tier.put("k", content(2 * MIB))
        budget.budget_bytes = 0
        while tier.in_memory("k"):
            threading.Event().wait(0.01)
        assert torch.equal(tier.get("k"), content(2 * MIB))


def in_the_store_and_in_memory(tier: TieredStore, how: str) -> None:
    tier.put("k", content(2 * MIB), durable=how == "put")
    if how == "got":
        tier.delete("k")
        tier.store.put("k", content(2 * MIB))
        tier.get("k")
    elif how == "put again":
        assert not tier.put("k", content(2 * MIB), durable=True)
    assert tier.in_memory("k")


@pytest.mark.parametrize("how", ["put", "put again", "got"])
def test_what_left_the_store_is_not_in_memory_either(tier: TieredStore, budget: Adjustable, how: str) -> None:
    """The store evicted it, or its time is over, or somebody else has deleted it."""
    for ask in (tier.get, tier.contains, tier.in_memory, tier.touch, tier.pin, tier.delete):
        in_the_store_and_in_memory(tier, how)
        assert tier.store.delete("k")
        assert not ask("k")
    in_the_store_and_in_memory(tier, how)
    assert tier.store.delete("k")
    budget.budget_bytes = 0
    tier.rebind()
    assert not tier.store.contains("k")


@pytest.mark.parametrize("how", ["put", "put again", "got"])
def test_what_was_put_anew_in_the_store_is_what_is_got(tier: TieredStore, how: str) -> None:
    in_the_store_and_in_memory(tier, how)
    assert tier.store.delete("k")
    tier.store.put("k", content(MIB, 7))
    assert not tier.put("k", content(2 * MIB))
    assert torch.equal(tier.get("k"), content(MIB, 7))
    assert [torch.equal(one, content(MIB, 7)) for one in tier.get_many(["k"])] == [True]


def test_a_time_to_live_ends_in_memory_too(device: SimulatedDevice) -> None:
    with TieredStore(blockkv.open(device), 8 * MIB) as tier:
        tier.store.put("k", content(MIB), ttl_s=0.2)
        assert tier.get("k") is not None
        while tier.store.contains("k"):
            threading.Event().wait(0.02)
        assert tier.get("k") is None
    with blockkv.open(device.clone()) as store:
        assert "k" not in store


def test_a_hit_in_memory_is_a_use_in_the_store(device: SimulatedDevice) -> None:
    with TieredStore(blockkv.open(device), 8 * MIB) as tier:
        tier.put("used", content(MIB), durable=True)
        for number in range(2 * tier.store.info()["data_bytes"] // (4 * MIB)):
            tier.store.put(f"{number}", content(4 * MIB, number))
            assert tier.get("used") is not None
        assert tier.store.contains("used")


def test_a_pinned_chunk_stays_in_memory(tier: TieredStore) -> None:
    in_the_store_and_in_memory(tier, "put")
    assert tier.pin("k")
    assert tier.store.delete("k")
    assert torch.equal(tier.get("k"), content(2 * MIB))
    assert tier.unpin("k")
    assert tier.get("k") is None


def test_what_cannot_be_written_back_is_lost_and_counted(device: SimulatedDevice) -> None:
    store = blockkv.open(device, evict=False)
    store.put("filler", content(store.stats()["largest_free_bytes"] - MIB))
    with TieredStore(store, 8 * MIB, interval_s=None) as tier:
        for number in range(6):
            tier.put(f"k{number}", content(2 * MIB, number))
        assert tier.stats()["write_backs_failed"] == 2
        assert tier.get("k0") is None
        assert torch.equal(tier.get("k5"), content(2 * MIB, 5))


class Refusing(SecondAsk):
    """Admits nothing."""

    def admits(self, digest: bytes) -> bool:
        return False


def test_what_the_store_refuses_is_not_in_it(device: SimulatedDevice, budget: Adjustable) -> None:
    store = blockkv.open(device, admission=Refusing)
    with TieredStore(store, budget, interval_s=None) as tier:
        tier.put("k", content(MIB))
        assert not tier.put("k", content(MIB), durable=True)
        with tier.reserve("grown", MIB) as chunk:
            chunk.append(content(MIB))
            chunk.seal(durable=True)
        assert set(tier.keys()) == {"k", "grown"}
        budget.budget_bytes = 0
        tier.rebind()
        assert tier.get("k") is None
        figures = tier.stats()
        assert (figures["write_backs"], figures["write_backs_refused"]) == (0, 2)


def test_an_admission_that_raises_holds_nothing(device: SimulatedDevice) -> None:
    asked = []

    def admit(candidate: Candidate) -> bool:
        asked.append(candidate.key)
        if len(asked) == 1:
            raise ZeroDivisionError
        return True

    with TieredStore(blockkv.open(device), 2 * MIB, admit=admit, interval_s=None) as tier:
        tier.put("k0", content(2 * MIB))
        with pytest.raises(ZeroDivisionError):
            tier.put("k1", content(2 * MIB))
        assert torch.equal(tier.get("k0"), content(2 * MIB))
        assert tier.put("k2", content(2 * MIB, 2))
        assert tier.delete("k0")
        assert torch.equal(tier.get("k2"), content(2 * MIB, 2))


# -- growing -----------------------------------------------------------------------------------------------


def test_growing_in_memory(tier: TieredStore, device: SimulatedDevice) -> None:
    rows = torch.randn(3000, 8, 16)
    with tier.reserve("k", 3 * MIB, place=Place("r", 0)) as chunk:
        assert chunk.in_memory
        assert chunk.append(rows[:1000]) == 1000
        assert chunk.append([rows[1000:1500], rows[1500:3000]]) == 3000
        assert torch.equal(chunk.read(), rows)
        assert torch.equal(chunk.read(7, 2000), rows[7:2000])
        with chunk.borrow(5, 100) as some:
            assert torch.equal(some, rows[5:100])
        with pytest.raises(blockkv.InvalidArgument):
            chunk.append(b"other rows")
        with pytest.raises(blockkv.CapacityExceeded):
            chunk.append(torch.zeros(6000, 8, 16))
        for use in (lambda: tier.put("k", b"x"), lambda: tier.delete("k"), lambda: tier.reserve("k", 5)):
            with pytest.raises(blockkv.InvalidArgument):
                use()
        assert not tier.contains("k")
        assert tier.get("k") is None
        chunk.seal()
    assert torch.equal(tier.get("k"), rows)
    assert tier.in_memory("k")
    assert tier.store.stats()["append_bytes"] == 0
    with pytest.raises(blockkv.GrowthEnded):
        chunk.read()
    other = tier.reserve("other", MIB)
    other.append(b"abc")
    other.seal(durable=True)
    with blockkv.open(device.clone()) as crashed:
        assert list(crashed.keys()) == ["other"]


def test_growing_chunks_leave_memory_and_go_on(tier: TieredStore, budget: Adjustable) -> None:
    rows = content(6 * MIB)
    chunks = [tier.reserve(f"k{layer}", 3 * MIB, place=Place("r", layer)) for layer in range(4)]
    assert [chunk.in_memory for chunk in chunks] == [True, True, False, False]
    for chunk in chunks:
        chunk.append(rows[:MIB])
    with chunks[1].borrow() as borrowed:
        budget.budget_bytes = 2 * MIB
        tier.rebind()
        assert [chunk.in_memory for chunk in chunks] == [False, True, False, False]
        assert torch.equal(borrowed, rows[:MIB])
    tier.rebind()
    assert not any(chunk.in_memory for chunk in chunks)
    for chunk in chunks:
        chunk.append(rows[MIB : MIB + 1000])
        assert torch.equal(chunk.read(), rows[: MIB + 1000])
        out = torch.zeros(MIB + 1000, dtype=torch.uint8)
        with chunk.borrow(out=out) as found:
            assert found is out
        assert torch.equal(out, rows[: MIB + 1000])
    with pytest.raises(blockkv.InvalidArgument, match="growing"):
        tier.put("k0", b"x")
    chunks[0].seal()
    chunks[1].abandon()
    assert torch.equal(tier.get("k0"), rows[: MIB + 1000])
    assert tier.put("k1", b"free again")
    assert tier.stats()["reserved_bytes"] > 0
    for chunk in chunks[2:]:
        chunk.abandon()
    assert tier.stats()["growing_chunks"] == 0


def test_a_durable_append_leaves_memory(tier: TieredStore, device: SimulatedDevice) -> None:
    chunk = tier.reserve("k", MIB)
    chunk.append(content(5000))
    chunk.append(content(5000, 1), durable=True)
    assert not chunk.in_memory
    with blockkv.open(device.clone()) as crashed:
        assert bytes(crashed.get("k").numpy()) == bytes(torch.cat([content(5000), content(5000, 1)]).numpy())
    assert len(tier.get("k")) == 10_000
    chunk.append(content(100))
    chunk.seal()
    assert len(tier.get("k")) == 10_100


def test_no_room_in_the_store(device: SimulatedDevice, budget: Adjustable) -> None:
    store = blockkv.open(device, evict=False)
    store.put("filler", content(store.stats()["largest_free_bytes"] - MIB))
    with TieredStore(store, budget, interval_s=None) as tier:
        chunk = tier.reserve("k", 4 * MIB)
        chunk.append(content(4 * MIB - 1))
        budget.budget_bytes = 0
        tier.rebind()
        assert chunk.in_memory
        assert torch.equal(chunk.read(), content(4 * MIB - 1))
        with pytest.raises(blockkv.StoreFull):
            chunk.append(content(1), durable=True)
        store.delete("filler")
        tier.rebind()
        assert not chunk.in_memory
        chunk.seal()
        assert torch.equal(tier.get("k"), content(4 * MIB - 1))


def test_what_had_no_room_leaves_once_there_is_some(device: SimulatedDevice, budget: Adjustable) -> None:
    store = blockkv.open(device, evict=False)
    store.put("filler", content(store.stats()["largest_free_bytes"] - MIB))
    with TieredStore(store, budget, interval_s=None) as tier:
        chunk = tier.reserve("k", 4 * MIB)
        chunk.append(content(MIB))
        with pytest.raises(blockkv.StoreFull):
            chunk.append(content(1), durable=True)
        store.delete("filler")
        chunk.append(content(MIB), durable=True)
        assert not chunk.in_memory
        assert tier.stats()["memory_chunks"] == 0
        chunk.seal()
        assert tier.delete("k")


# -- bounds, threads, an oracle ----------------------------------------------------------------------------

OVERLOAD = """
import sys, torch, blockkv
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
path, budget = sys.argv[1], int(sys.argv[2])
chunk = torch.empty(3 << 20, dtype=torch.uint8).random_(0, 256)
out = torch.empty_like(chunk)
blockkv.format(path, size="2GiB")
with blockkv.open(path) as store:
    store.put("warm", chunk)
    store.get("warm", out=out)
    before, most = resident(), 0
    tier = blockkv.TieredStore(store, budget)
    for number in range(10 * budget // chunk.nbytes):
        chunk[:8] = number % 251
        tier.put(number.to_bytes(8, "little"), chunk)
        growing = tier.reserve(b"growing %d" % number, 1 << 20)
        growing.append(chunk[:900_000])
        growing.seal()
        if number % 7 == 0:
            assert tier.get((number // 2).to_bytes(8, "little"), out=out)
            assert out[3] == number // 2 % 251
        most = max(most, resident())
    assert tier.stats()["memory_resident_bytes"] <= budget
    tier.close()
print(most - before)
"""


@pytest.mark.parametrize("budget_mib", [48, 96])
def test_resident_memory_is_bounded(image_dir: Path, budget_mib: int) -> None:
    """Ten times the budget goes through; the process grows by the budget and 64 MiB at most."""
    command = [sys.executable, "-c", OVERLOAD, str(image_dir / "store.img"), str(budget_mib * MIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (budget_mib + 64) * MIB


def test_threads(image_dir: Path) -> None:
    path = image_dir / "store.img"
    blockkv.format(path, size="256MiB")
    wrong: list[str] = []
    budget = Adjustable(12 * MIB)

    def work(worker: int) -> None:
        for round_number in range(60):
            number = (worker * 7 + round_number * 5) % 40
            key = f"k{number}"
            size = 100_000 + number * 20_000
            found = tier.get(key)
            if found is None:
                tier.put(key, content(size, number), place=Place(f"g{number % 3}", number))
            elif not torch.equal(found, content(size, number)):
                wrong.append(key)
            if round_number % 13 == worker:
                tier.delete(key)
            if round_number % 17 == 0:
                budget.budget_bytes = (2 + round_number % 12) * MIB
                tier.rebind()

    with TieredStore(blockkv.open(path), budget, interval_s=0.01) as tier:
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tier.store.check(payload=True).ok
    assert not wrong


class Tiered(RuleBasedStateMachine):
    """Beside a dictionary."""

    @initialize(budget_mib=st.integers(0, 40))
    def open(self, budget_mib: int) -> None:
        self.device = SimulatedDevice(96 * MIB)
        blockkv.format(self.device, average_chunk="64KiB")
        self.budget = Adjustable(budget_mib * MIB)
        self.start()
        self.oracle: dict[str, bytes] = {}
        self.growing: dict[str, tuple[Any, bytearray]] = {}
        self.seed = 0

    def start(self) -> None:
        store = blockkv.open(self.device, commit_interval_ms=None)
        self.tier = TieredStore(store, self.budget, interval_s=None)

    @rule(
        name=st.integers(0, 12),
        size=st.sampled_from([1, 5000, 300_000, 2 * MIB, 3 * MIB]),
        durable=st.booleans(),
        many=st.booleans(),
    )
    def put(self, name: int, size: int, durable: bool, many: bool) -> None:
        key = f"k{name}"
        self.seed += 1
        value = content(size, self.seed)
        place = Place(f"g{name % 3}", name)
        if key in self.growing:
            with pytest.raises(blockkv.InvalidArgument):
                self.tier.put(key, value)
            return
        if many:
            (fresh,) = self.tier.put_many([(key, value)], durable)
        else:
            fresh = self.tier.put(key, value, durable, place=place)
        assert fresh is (key not in self.oracle)
        self.oracle.setdefault(key, bytes(value.numpy()))

    @rule(names=st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True))
    def get_many(self, names: list[int]) -> None:
        found = self.tier.get_many([f"k{name}" for name in names])
        expected = [self.oracle.get(f"k{name}") for name in names]
        assert [None if one is None else bytes(one.numpy()) for one in found] == expected

    @rule(name=st.integers(0, 12))
    def delete(self, name: int) -> None:
        key = f"k{name}"
        if key in self.growing:
            return
        assert self.tier.delete(key) is (self.oracle.pop(key, None) is not None)

    @rule(name=st.integers(0, 12), size=st.sampled_from([1, 70_000, 400_000]))
    def grow(self, name: int, size: int) -> None:
        key = f"k{name}"
        if key in self.oracle:
            with pytest.raises(blockkv.InvalidArgument):
                self.tier.reserve(key, 100)
            return
        if key not in self.growing:
            self.growing[key] = self.tier.reserve(key, MIB, place=Place(f"g{name % 3}", name)), bytearray()
        chunk, rows = self.growing[key]
        self.seed += 1
        if len(rows) + size <= MIB:
            chunk.append(content(size, self.seed))
            rows += bytes(content(size, self.seed).numpy())
        assert bytes(chunk.read().numpy()) == rows

    @precondition(lambda self: self.growing)
    @rule(number=st.integers(0, 9), how=st.sampled_from(["seal", "durable", "abandon"]))
    def end(self, number: int, how: str) -> None:
        key = sorted(self.growing)[number % len(self.growing)]
        chunk, rows = self.growing.pop(key)
        if how == "abandon":
            chunk.abandon()
        else:
            chunk.seal(durable=how == "durable")
            self.oracle[key] = bytes(rows)

    @rule(budget_mib=st.integers(0, 40))
    def rebind(self, budget_mib: int) -> None:
        self.budget.budget_bytes = budget_mib * MIB
        self.tier.rebind()

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.growing = {}
        self.device = self.device.clone()
        self.start()

    @invariant()
    def bounded_and_complete(self) -> None:
        if not hasattr(self, "tier"):
            return
        stats = self.tier.stats()
        assert stats["memory_resident_bytes"] <= self.budget.budget_bytes
        assert len(self.tier) == len(self.oracle)
        assert self.tier.lookup(self.oracle) == len(self.oracle)
        assert set(self.tier.keys()) == set(self.oracle)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()


TestTiered = Tiered.TestCase
TestTiered.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


class Asked(Adjustable):
    """Remembers what it was asked with."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.asked: list[int] = []

    def estimate(self, own_bytes: int) -> Estimate:
        self.asked.append(own_bytes)
        return super().estimate(own_bytes)


def test_the_budget_is_asked_with_what_is_resident(device: SimulatedDevice) -> None:
    """Not with the capacity of growing chunks: with that the tier took what they had yet to touch, and the
    control group killed the process when they did.
    """
    budget = Asked(32 * MIB)
    store = blockkv.open(device, commit_interval_ms=None)
    with TieredStore(store, budget, interval_s=None) as tier, tier.reserve("k", 8 * MIB) as chunk:
        assert chunk.in_memory
        chunk.append(content(2 * MIB))
        tier.rebind()
        assert 2 * MIB <= budget.asked[-1] <= 4 * MIB
        chunk.append(content(6 * MIB))
        tier.rebind()
        assert budget.asked[-1] == 8 * MIB
        assert tier.stats()["memory_resident_bytes"] == 8 * MIB


def test_the_budget_is_asked_again_while_memory_is_handed_out(device: SimulatedDevice) -> None:
    """Not only once a second: in that time the tier, and with it the heap of the process, can grow by more
    than is kept free.
    """
    budget = Asked(32 * MIB)
    store = blockkv.open(device, commit_interval_ms=None)
    with TieredStore(store, budget, interval_s=None) as tier:
        budget.asked.clear()
        for number in range(24):
            tier.put(f"k{number}", content(2 * MIB, number))
        assert len(budget.asked) == 3
        assert budget.asked[-1] >= 30 * MIB
