"""Policies, priorities, expiry and quotas in a store: what comes in, what leaves, what stays."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import blockkv
from blockkv.catalog.admission import SecondAsk
from blockkv.catalog.eviction import Eviction, Lru, PrefixAware
from blockkv.errors import InvalidArgument, StoreFull

CHUNK_BYTES = 256 << 10


class Clock:
    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


class NewestFirst(Eviction):
    """The chunk that came last leaves."""

    def __init__(self) -> None:
        self.stored: dict[bytes, None] = {}
        self.asked_for: list[Sequence[bytes]] = []

    def asked(self, digests: Sequence[bytes]) -> None:
        self.asked_for.append(digests)

    def inserted(self, digest: bytes) -> None:
        self.stored[digest] = None

    def used(self, digest: bytes) -> None:
        pass

    def removed(self, digest: bytes) -> None:
        self.stored.pop(digest, None)

    def victims(self) -> Iterator[bytes]:
        return reversed(list(self.stored))


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "store.img"
    blockkv.format(path, size="32MiB", average_chunk=CHUNK_BYTES)
    return path


def payload(key: str) -> bytes:
    return (key.encode() * CHUNK_BYTES)[:CHUNK_BYTES]


def capacity(store: blockkv.Store) -> int:
    return int(store.stats()["data_bytes"]) // CHUNK_BYTES


def fill(store: blockkv.Store, family: str, count: int, **options: Any) -> list[str]:
    keys = [f"{family}/{number}" for number in range(count)]
    for key in keys:
        store.put(key, payload(key), **options)
    return keys


def held(store: blockkv.Store, keys: Sequence[str]) -> list[str]:
    """Those that are there; their bytes are right."""
    found = [key for key in keys if key in store]
    for key in found:
        assert store.get(key).numpy().tobytes() == payload(key)
    return found


def with_clock(store: blockkv.Store) -> Clock:
    clock = Clock()
    keeping = store._state.keep()
    keeping._clock = clock
    return clock


# -- eviction ----------------------------------------------------------------------------------------------


def test_a_store_without_policies_keeps_nothing_of_the_kind(image: Path) -> None:
    with blockkv.open(image) as store:
        fill(store, "a", capacity(store) + 8)
        assert store._state.keeping is None
        policies = store.info()["options"]["policies"]
        assert policies["write_budget_bytes_per_day"] is None
        assert (policies["eviction"], policies["admission"], policies["quotas"]) == ("lru", "all", {})


def test_a_policy_of_ones_own_decides(image: Path) -> None:
    policy = NewestFirst()
    with blockkv.open(image, eviction=lambda: policy) as store:
        count = capacity(store)
        first = fill(store, "a", count)
        more = fill(store, "b", 8)
        assert held(store, first)[:8] == first[:8]
        assert len(policy.stored) == len(store)
        assert len(held(store, more)) < 8


def test_what_is_pinned_or_read_stays_whatever_a_policy_says(image: Path) -> None:
    with blockkv.open(image, eviction=NewestFirst) as store:
        count = capacity(store)
        keys = fill(store, "a", count)
        assert store.pin(keys[-1])
        with store._found(keys[-2]) as entry:
            assert entry is not None
            store._state.lease(entry)
        more = fill(store, "b", 4)
        assert held(store, keys[-2:]) == keys[-2:]
        assert more[-1] in store


def test_where_a_policy_knows_no_more_the_least_recently_used_leaves(image: Path) -> None:
    class Silent(NewestFirst):
        def victims(self) -> Iterator[bytes]:
            return iter(())

    with blockkv.open(image, eviction=Silent) as store:
        keys = fill(store, "a", capacity(store))
        fill(store, "b", 1)
        assert keys[0] not in store
        assert keys[-1] in store


def test_the_lru_of_the_simulation_is_that_of_the_index(image_dir: Path) -> None:
    survivors = []
    for name, options in (("index", {}), ("policy", {"eviction": Lru})):
        path = image_dir / f"{name}.img"
        blockkv.format(path, size="32MiB", average_chunk=CHUNK_BYTES)
        pick = random.Random(3)
        with blockkv.open(path, **options) as store:
            for _ in range(2 * capacity(store)):
                key = f"k/{pick.randrange(2 * capacity(store))}"
                if pick.random() < 0.3:
                    store.get(key)
                else:
                    store.put(key, payload(key))
            survivors.append(sorted(map(str, store.keys())))
    assert survivors[0] == survivors[1]


def test_prefix_aware_eviction_lets_long_pastes_leave_first(image: Path) -> None:
    with blockkv.open(image, eviction="prefix") as store:
        count = capacity(store)
        chat, paste = [f"chat/{n}" for n in range(3)], [f"paste/{n}" for n in range(count - 3)]
        for keys in (chat, paste):
            assert store.lookup(keys) == 0
            store.put_many([(key, payload(key)) for key in keys])
        fill(store, "new", 4)
        assert held(store, chat[:-1]) == chat[:-1], "the last one is seldom asked for again"
        left = held(store, paste)
        assert left == paste[: len(left)], "what is left is a prefix"
        assert len(left) < len(paste)


def test_a_policy_knows_what_was_there_at_open(image: Path) -> None:
    with blockkv.open(image) as store:
        keys = fill(store, "a", capacity(store))
        store.touch(keys[0])
    policy = Lru()
    with blockkv.open(image, eviction=lambda: policy) as store:
        assert len(list(policy.victims())) == len(store)
        fill(store, "b", 1)
        assert keys[0] in store
        assert keys[1] not in store


# -- admission ---------------------------------------------------------------------------------------------


def test_asking_twice_is_visible_and_can_be_left_out(image: Path) -> None:
    with blockkv.open(image, admission="twice") as store:
        keys = [f"a/{n}" for n in range(3)]
        items = [(key, payload(key)) for key in keys]
        assert store.lookup(keys) == 0
        assert store.put_many(items) == [False] * 3
        assert store.stats()["put_refused"] == 3
        with_clock(store).now_s += 60
        assert store.lookup(keys) == 0
        assert store.put_many(items) == [True] * 3
        assert held(store, keys) == keys
        assert store.stats()["put_refused"] == 3
    with blockkv.open(image, admission="all") as store:
        assert store.put("b/0", payload("b/0"))
        assert store.info()["options"]["policies"]["admission"] == "all"


def test_puts_are_asks_where_nothing_is_looked_up(image: Path) -> None:
    with blockkv.open(image, admission=SecondAsk) as store:
        assert [store.put("a/0", payload("a/0")) for _ in range(3)] == [False, True, False]
        assert store.stats()["put_existing"] == 1


def test_a_prefix_that_is_polled_for_is_one_request(image: Path) -> None:
    with blockkv.open(image, admission="twice") as store:
        clock = with_clock(store)
        for _ in range(5):
            clock.now_s += 1
            assert store.lookup(["a/0", "a/1"]) == 0
        assert store.put("a/0", payload("a/0")) is False
        clock.now_s += 60
        store.lookup(["a/0", "a/1"])
        assert store.put("a/0", payload("a/0")) is True


def test_one_bad_key_of_a_call_is_no_fault_of_the_others(image: Path) -> None:
    with blockkv.open(image, admission="twice") as store:
        store.put("a/0", payload("a/0"))
        with pytest.raises(blockkv.BatchError) as caught:
            store.put_many([("", b"x"), ("a/0", payload("a/0")), ("a/1", b"x")])
        assert caught.value.results == [False, True, False]
        assert list(caught.value.errors) == [0]


def test_adaptive_admission_writes_less_where_nothing_comes_back(image: Path) -> None:
    with blockkv.open(image, admission="adaptive") as store:
        for number in range(40):
            keys = [f"{number}/{n}" for n in range(16)]
            store.lookup(keys)
            store.put_many([(key, payload(key)) for key in keys])
        stats = store.stats()
        assert stats["put_refused"] > stats["put_chunks"]
        assert stats["put_chunks"] >= capacity(store)


# -- how long things stay ----------------------------------------------------------------------------------


def test_a_time_to_live_ends(image: Path) -> None:
    with blockkv.open(image) as store:
        clock = with_clock(store)
        store.put("a/0", payload("a/0"), ttl_s=10)
        store.put("a/1", payload("a/1"), ttl_s=30)
        fill(store, "b", 1)
        clock.now_s += 9.9
        assert held(store, ["a/0", "a/1", "b/0"]) == ["a/0", "a/1", "b/0"]
        clock.now_s += 0.2
        assert store.get("a/0") is None
        assert store.lookup(["a/1", "a/0"]) == 1
        assert store.stats()["chunks_expired"] == 1
        clock.now_s += 30
        assert not store.pin("a/1")
        assert held(store, ["a/0", "a/1", "b/0"]) == ["b/0"]
        assert store.check(payload=True).findings == ()


def test_a_put_after_the_end_is_a_new_chunk(image: Path) -> None:
    with blockkv.open(image) as store:
        clock = with_clock(store)
        assert store.put("a/0", payload("a/0"), ttl_s=10)
        clock.now_s += 11
        assert store.put("a/0", payload("a/0"), ttl_s=10)
        clock.now_s += 9
        assert "a/0" in store
        assert not store.put("a/0", payload("a/0"), ttl_s=1000), "it is there, and stays as it was put"
        clock.now_s += 2
        assert "a/0" not in store


def test_the_lower_priority_leaves_first(image: Path) -> None:
    with blockkv.open(image) as store:
        count = capacity(store)
        high = fill(store, "high", 4, priority=5)
        usual = fill(store, "usual", count - 8)
        low = fill(store, "low", 4, priority=-1)
        fill(store, "new", 2)
        assert held(store, high) == high
        assert len(held(store, low)) <= 2
        assert held(store, usual) == usual


def test_the_highest_priority_leaves_too_when_nothing_else_is_there(image: Path) -> None:
    with blockkv.open(image) as store:
        high = fill(store, "high", capacity(store), priority=5)
        fill(store, "new", 2, priority=5)
        assert len(held(store, high)) < len(high)


@pytest.mark.parametrize("eviction", ["lru", "prefix"])
def test_a_family_above_its_quota_loses_its_own(image: Path, eviction: str) -> None:
    quota_bytes = 5 * CHUNK_BYTES
    with blockkv.open(image, eviction=eviction, quotas={"a": quota_bytes}) as store:
        other = fill(store, "b", 10)
        mine = fill(store, "a", 20)
        assert len(held(store, mine)) == 5
        assert held(store, other) == other
    with blockkv.open(image, eviction=eviction, quotas={"a": 2 * CHUNK_BYTES}) as store:
        fill(store, "a", 1)
        assert len(held(store, mine)) == 2
        assert held(store, other) == other
        assert store._state.keep().used_bytes() == {"a": 2 * CHUNK_BYTES}


def test_what_is_above_its_quota_alone_evicts_nobody_else(image: Path) -> None:
    with blockkv.open(image, quotas={"a": 5 * CHUNK_BYTES}) as store:
        keys = fill(store, "a", 5)
        store.put("a/huge", bytes(6 * CHUNK_BYTES))
        assert held(store, keys) == keys
        assert "a/huge" not in store


def test_a_quota_counts_what_was_sealed(image: Path) -> None:
    with blockkv.open(image, quotas={"a": 2 * CHUNK_BYTES}) as store:
        for number in range(4):
            chunk = store.reserve(f"a/{number}", CHUNK_BYTES)
            chunk.append(payload(f"a/{number}"), durable=number % 2 == 0)
            chunk.seal()
        assert held(store, [f"a/{number}" for number in range(4)]) == ["a/2", "a/3"]


@pytest.mark.parametrize("moment", ["asked", "inserted", "used", "removed", "victims", "admits", "evicting"])
def test_a_policy_that_raises_is_done_without(image: Path, moment: str) -> None:
    class Admitting(SecondAsk):
        def admits(self, digest: bytes) -> bool:
            return True

    def raising(*_: object) -> None:
        raise ZeroDivisionError

    eviction, admission = Lru(), Admitting()
    with blockkv.open(image, eviction=lambda: eviction, admission=lambda: admission) as store:
        fill(store, "a", 4)
        setattr(admission if moment in ("admits", "evicting") else eviction, moment, raising)
        assert store.lookup(["a/0", "a/1"]) == 2
        assert store.get("a/0") is not None
        assert store.delete("a/3")
        keys = fill(store, "b", capacity(store) + 8)
        assert keys[-1] in held(store, keys)
        assert not store.info()["write_failure"]
    with blockkv.open(image) as store:
        assert keys[-1] in held(store, keys)
        assert not store.check(payload=True).findings


def test_a_quota_evicts_nothing_pinned(image: Path) -> None:
    with blockkv.open(image, quotas={"a": CHUNK_BYTES}) as store:
        fill(store, "a", 1)
        store.pin("a/0")
        fill(store, "a", 3)
        assert held(store, ["a/0", "a/1", "a/2"]) == ["a/0"]


def test_nothing_is_lost_but_what_was_evicted(image: Path) -> None:
    """All of it at once, with a crash-like reopening in between."""
    pick = random.Random(11)
    with blockkv.open(image, eviction="prefix", admission="adaptive", quotas={"a": 8 * CHUNK_BYTES}) as store:
        clock = with_clock(store)
        for number in range(150):
            clock.now_s += 7
            keys = [f"{pick.choice('abc')}/{pick.randrange(40)}-{n}" for n in range(pick.randrange(1, 6))]
            stored = store.lookup(keys)
            for key, chunk in zip(keys, store.get_many(keys[:stored]), strict=False):
                assert chunk.numpy().tobytes() == payload(key)
            options = {"ttl_s": pick.choice((None, 50.0)), "priority": pick.choice((0, 0, 1))}
            store.put_many([(key, payload(key)) for key in dict.fromkeys(keys[stored:])], **options)
            if number % 10 == 0:
                store.delete(pick.choice(keys))
        keeping = store._state.keep()
        assert keeping.used_bytes()["a"] <= 8 * CHUNK_BYTES
        assert keeping._priority_counts.total() == len(keeping._priorities)
        assert set(keeping._expires_s) <= set(store._state.index.digests())
        assert set(keeping._priorities) <= set(store._state.index.digests())
        assert store.check(payload=True).findings == ()


# -- arrays, and what is refused ---------------------------------------------------------------------------


def test_an_array_has_policies_in_every_member(image_dir: Path) -> None:
    paths = [image_dir / "a.img", image_dir / "b.img"]
    blockkv.format(paths, size="32MiB", average_chunk=CHUNK_BYTES)
    with blockkv.open(paths, eviction="prefix", admission="twice") as store:
        keys = [f"a/{n}" for n in range(8)]
        items = [(key, payload(key)) for key in keys]
        assert store.lookup(keys) == 0
        assert store.put_many(items) == [False] * 8
        for member in store._members:  # type: ignore[attr-defined]
            with_clock(member.store).now_s += 60
            assert isinstance(member.store._state.keeping._eviction, PrefixAware)
        assert store.lookup(keys) == 0
        assert store.put_many(items, ttl_s=30) == [True] * 8
        assert store.stats()["put_refused"] == 8
        for member in store._members:  # type: ignore[attr-defined]
            member.store._state.keeping._clock.now_s += 31
        assert store.lookup(keys) == 0
        assert store.stats()["chunks_expired"] == 8


def test_the_members_of_an_array_share_a_quota(image_dir: Path) -> None:
    paths = [image_dir / "a.img", image_dir / "b.img"]
    blockkv.format(paths, size="32MiB", average_chunk=CHUNK_BYTES)
    with blockkv.open(paths, quotas={"a": 8 * CHUNK_BYTES}) as store:
        for number in range(30):
            store.put(f"a/{number}", payload(f"a/{number}"))
        kept = list(store.keys())
        assert 4 <= len(kept) <= 8
        assert "a/29" in kept


@pytest.mark.parametrize(
    "options",
    [
        {"eviction": "mru"},
        {"admission": "none"},
        {"eviction": 5},
        {"quotas": {"a/b": 1}},
        {"quotas": {"a": 0}},
        {"quotas": {"a": "5MiB"}},
    ],
)
def test_what_is_no_policy_is_refused(image: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        blockkv.open(image, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"ttl_s": 0},
        {"ttl_s": -1},
        {"ttl_s": float("nan")},
        {"ttl_s": "9"},
        {"priority": 1.5},
        {"priority": 2**40},
    ],
)
def test_what_is_no_stay_is_refused(image: Path, options: dict[str, Any]) -> None:
    with blockkv.open(image) as store, pytest.raises(InvalidArgument):
        store.put("a/0", b"x", **options)


def test_without_eviction_a_policy_evicts_nothing(image: Path) -> None:
    with blockkv.open(image, evict=False, eviction="prefix") as store:
        keys = fill(store, "a", capacity(store))
        with pytest.raises(StoreFull):
            store.put("b/0", payload("b/0"))
        assert held(store, keys) == keys
