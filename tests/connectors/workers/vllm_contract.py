"""What vLLM may expect of the tier, called as its manager calls it. Run by pytest in the engine's Python."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm
from vllm.v1.kv_offload import config as offloading
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import blockkv
from blockkv.connectors import vllm as connector
from blockkv.connectors.vllm import BlockKVTier, family_of
from blockkv.connectors.weights import fingerprint, weight_files
from blockkv.errors import BlockKVError, InvalidArgument, NotFormatted
from blockkv.testing import StallingDevice

ROW_BYTES = 128 << 10
ROWS = 64
ROW_FIELD = "chunk_ids" if "chunk_ids" in TransferJob.__dataclass_fields__ else "block_ids"  # vLLM 0.28


def known(kind: Any, **values: Any) -> Any:
    return kind(**{name: value for name, value in values.items() if name in kind.__dataclass_fields__})


CONFIG = known(
    offloading.OffloadingConfig,
    groups=(
        known(
            offloading.OffloadingGroupConfig,
            tokens_per_block=32,
            layer_names=("model.layers.0.attn", "model.layers.1.attn"),
            group_id=0,
        ),
    ),
    worker_kv_bytes_per_block=ROW_BYTES,
    enable_kv_cache_events=True,
    extra_config={},
    engine_id="e",
    model=known(offloading.OffloadingModelConfig, name="tiny", dtype="bfloat16"),
    cache=known(offloading.OffloadingCacheConfig, tokens_per_hash=32, blocks_per_chunk=1),
    parallel=known(
        offloading.OffloadingParallelConfig,
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    ),
    kv_cache_layout="LBHNC",
)


class Engine:
    """One tier on a primary tier's memory, and what the manager knows of it."""

    def __init__(
        self, config: Any = CONFIG, rows: int = ROWS, row_bytes: int = ROW_BYTES, **options: Any
    ) -> None:
        memory = mmap.mmap(-1, rows * row_bytes or 4096)
        self.rows = np.frombuffer(memory, np.int8, rows * row_bytes).reshape(rows, row_bytes)
        self.view = memoryview(self.rows)
        self.spec = SimpleNamespace(
            config=config,
            extra_config={},
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True, self_describing_kv_events=False),
        )
        tier = {
            "type": "BlockKVTier",
            "module_path": "blockkv.connectors.vllm",
            "weights": "w",
            **options,
        }
        self.tier: BlockKVTier = SecondaryTierFactory.create_secondary_tier(tier, self.view, self.spec)
        self.submitted: set[int] = set()
        self.results: dict[int, Any] = {}
        self.next_job = 0

    def lookup(self, key: bytes, request: str = "r") -> bool:
        result = self.tier.lookup(key, ReqContext(request))
        assert result in (LookupResult.HIT, LookupResult.MISS)
        return result is LookupResult.HIT

    def found(self, keys: list[bytes], request: str = "r") -> list[bool]:
        """Asked step by step, as the scheduler does as long as any answer is RETRY."""
        until = time.monotonic() + 20
        answers: dict[bytes, LookupResult] = {}
        while len(answers) < len(keys):
            assert time.monotonic() < until
            for key in [one for one in keys if one not in answers]:
                answer = self.tier.lookup(key, ReqContext(request))
                if answer is not LookupResult.RETRY:
                    answers[key] = answer
            time.sleep(0.002)
        return [answers[key] is LookupResult.HIT for key in keys]

    def finds(self, keys: list[bytes], request: str = "r") -> bool:
        """Asked until all are found: NO may also say that an owner has not answered within a second."""
        until = time.monotonic() + 60
        while not all(self.found(keys, request)):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def submit(self, keys: list[bytes], rows: list[int], load: bool, request: str = "r") -> int:
        self.next_job += 1
        job = TransferJob(
            job_id=self.next_job,
            keys=keys,
            is_promotion=load,
            req_context=ReqContext(request),
            **{ROW_FIELD: np.array(rows, dtype=np.int32)},
        )
        self.submitted.add(self.next_job)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.next_job

    def poll(self) -> None:
        for result in self.tier.get_finished_jobs():
            assert result.job_id in self.submitted, "an unknown job"
            assert result.job_id not in self.results, "reported twice"
            self.results[result.job_id] = result

    def ended(self, job: int, timeout_s: float = 20) -> Any:
        until = time.monotonic() + timeout_s
        while job not in self.results:
            assert time.monotonic() < until, f"job {job} does not end"
            self.poll()
            time.sleep(0.001)
        return self.results[job]

    def store(self, keys: list[bytes], rows: list[int] | None = None) -> Any:
        return self.ended(self.submit(keys, list(range(len(keys))) if rows is None else rows, load=False))

    def load(self, keys: list[bytes], rows: list[int]) -> Any:
        return self.ended(self.submit(keys, rows, load=True))

    def fill(self, seed: int = 0) -> np.ndarray:
        """Random rows; a copy of them."""
        self.rows[:] = np.random.default_rng(seed).integers(-128, 127, self.rows.shape, dtype=np.int8)
        return self.rows.copy()

    def metrics(self, *, stalled: bool = False) -> dict[str, float]:
        """Of all so far. The simulated device does not even tell its counters while it is `stalled`."""
        if not stalled:
            self.tier._look_at_store()
        stats = self.tier.get_stats()
        for name, values in stats.data["data"].items():
            (value,) = values.values()
            short = name.removeprefix(connector.PREFIX)
            counted = stats.data["types"][name] == "counter"
            self.totals[short] = value + (self.totals.get(short, 0) if counted else 0)
        return self.totals

    totals: dict[str, float] = {}  # noqa: RUF012


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "kv.img"
    blockkv.format(path, size="64MiB")
    return path


@pytest.fixture
def start(image: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def one(**options: Any) -> Engine:
        engine = Engine(**{"device": str(image)} | options)
        engine.totals = {}
        engines.append(engine)
        return engine

    yield one
    for engine in engines:
        engine.tier.shutdown()


@pytest.fixture
def stalling(monkeypatch: pytest.MonkeyPatch) -> Iterator[StallingDevice]:
    device = StallingDevice()
    blockkv.format(device, average_chunk="64KiB")
    monkeypatch.setattr(connector, "open_store", lambda paths, **options: blockkv.open(device))
    yield device
    device.gate.set()


def keys_of(count: int, group: int = 0, seed: int = 0) -> list[bytes]:
    generator = random.Random(seed)
    return [bytes(make_offload_key(generator.randbytes(32), group)) for _ in range(count)]


def flip_byte(path: Path, store: blockkv.Store, name: str) -> None:
    entry = store.entry(name)
    assert entry is not None
    place = int(store.info()["data_offset_bytes"]) + entry.extents[0][0] * 4096 + 1000
    with path.open("r+b", buffering=0) as device:
        device.seek(place)
        byte = device.read(1)
        device.seek(place)
        device.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 40])
def test_what_was_stored_comes_back(start: Callable[..., Engine], count: int, direct: bool) -> None:
    engine = start(direct=direct)
    there = engine.fill()
    keys = keys_of(count)
    stored = engine.store(keys)
    assert stored.success
    assert getattr(stored, "transfer_bytes", count * ROW_BYTES) == count * ROW_BYTES
    assert engine.store(keys).success
    engine.rows[:] = 0
    assert all(engine.lookup(key) for key in keys)
    assert not any(engine.lookup(key) for key in keys_of(3, group=1))
    places = list(range(ROWS))[::-1][:count]
    assert engine.load(keys, places).success
    for key_number, place in enumerate(places):
        assert np.array_equal(engine.rows[place], there[key_number])
    untouched = sorted(set(range(ROWS)) - set(places))
    assert not engine.rows[untouched].any()
    assert engine.metrics()["leased"] == 0


def test_another_process_finds_it(start: Callable[..., Engine]) -> None:
    engine = start()
    there, keys = engine.fill(), keys_of(9)
    engine.store(keys)
    engine.tier.shutdown()
    later = start()
    assert all(later.lookup(key) for key in keys)
    assert later.load(keys, list(range(9))).success
    assert np.array_equal(later.rows[:9], there[:9])


def test_damage_is_a_miss_until_it_is_written_anew(start: Callable[..., Engine], image: Path) -> None:
    engine = start()
    there, keys = engine.fill(), keys_of(5)
    engine.store(keys)
    tier = engine.tier
    flip_byte(image, tier._store, f"{tier._family}/{keys[3].hex()}")
    assert all(engine.lookup(key) for key in keys), "nobody knows yet"
    result = engine.load(keys, list(range(10, 15)))
    assert not result.success
    assert list(result.successful_keys) == [key for number, key in enumerate(keys) if number != 3]
    for number in (0, 1, 2, 4):
        assert np.array_equal(engine.rows[10 + number], there[number])
    assert [engine.lookup(key) for key in keys] == [True, True, True, False, True]
    assert engine.metrics()["get_checksum_mismatch"] == 1
    assert engine.metrics()["load_misses"] == 1
    assert engine.store(keys).success
    assert all(engine.lookup(key) for key in keys)
    assert engine.load(keys, list(range(20, 25))).success
    assert np.array_equal(engine.rows[20:25], there[:5])
    assert engine.metrics()["rewritten"] == 1


def test_what_failed_for_no_fault_of_the_chunk_is_written_anew(start: Callable[..., Engine]) -> None:
    """The chunk is there all the time, with other bytes than those that are stored again."""
    engine = start()
    engine.fill()
    keys = keys_of(2)
    engine.store(keys)
    failing = engine.tier._jobs._store
    engine.tier._jobs._store = SimpleNamespace(get_many=lambda keys, outs: [False] * len(keys))
    assert not engine.load(keys, [8, 9]).success
    engine.tier._jobs._store = failing
    assert not any(engine.lookup(key) for key in keys)
    other = engine.fill(seed=1)
    assert engine.store(keys).success
    assert all(engine.lookup(key) for key in keys)
    assert engine.load(keys, [8, 9]).success
    assert np.array_equal(engine.rows[8:10], other[:2])


def test_every_job_is_reported_once(start: Callable[..., Engine], image: Path) -> None:
    engine = start(max_store_bytes=8 * ROW_BYTES)
    engine.fill()
    generator = random.Random(3)
    keys = keys_of(60)
    for step in range(300):
        count = generator.randrange(6)
        chosen, rows = generator.sample(keys, count), generator.sample(range(ROWS), count)
        engine.submit(chosen, rows, load=generator.random() < 0.5)
        if step % 50 == 10:
            stored = [key for key in keys if engine.lookup(key, "x")]
            if stored:
                name = f"{engine.tier._family}/{stored[0].hex()}"
                if engine.tier._store.entry(name):
                    flip_byte(image, engine.tier._store, name)
        if generator.random() < 0.3:
            engine.poll()
    engine.tier.drain_jobs()
    engine.poll()
    assert engine.results.keys() == engine.submitted
    engine.tier.on_request_finished(ReqContext("x"))
    engine.poll()
    assert engine.metrics()["leased"] == 0
    assert engine.metrics()["stores_dropped"] > 0


def test_nothing_waits_for_a_device_that_stalls(
    start: Callable[..., Engine], stalling: StallingDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start(load_deadline_s=1.0, load_threads=2)
    there, keys = engine.fill(), keys_of(32)
    assert engine.store(keys).success
    for key in keys:
        assert engine.lookup(key)
    engine.rows[32:] = 7
    stalling.gate.clear()
    times: dict[str, list[float]] = {
        "lookup": [],
        "submit_load": [],
        "submit_store": [],
        "get_finished_jobs": [],
    }

    def timed(name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        result = call(*arguments, **options)
        times[name].append(time.perf_counter() - begun)
        return result

    begun = time.monotonic()
    loads = []
    for step in range(256):
        row = step % 32
        loads.append(timed("submit_load", engine.submit, [keys[row]], [32 + row], load=True))
        timed("submit_store", engine.submit, keys_of(1, seed=1000 + step), [row], load=False)
        timed("lookup", engine.lookup, keys[row])
        timed("get_finished_jobs", engine.poll)
    for job in loads:
        assert not engine.ended(job).success
    waited = time.monotonic() - begun
    assert 0.9 < waited < 20
    assert engine.metrics(stalled=True)["stalled"] == 1
    assert not engine.lookup(keys_of(1, seed=9)[0])
    assert not engine.store(keys_of(1, seed=10)).success, "refused at once, or its row would be held as well"
    stalling.gate.set()
    engine.tier.drain_jobs()
    engine.poll()
    assert engine.results.keys() == engine.submitted
    assert (engine.rows[32:] == 7).all(), "late loads wrote to rows that were given back"
    assert engine.metrics()["stalled"] == 0
    assert not engine.lookup(keys[0]), "until it is written anew"
    assert engine.store(keys).success
    assert engine.lookup(keys[0])
    assert engine.load(keys, list(range(32))).success
    assert np.array_equal(engine.rows[:32], there[:32])
    with capsys.disabled():
        for name, taken in times.items():
            p99 = statistics.quantiles(taken, n=100)[98]
            print(f"stalled {name}: p50 {statistics.median(taken) * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us")
            assert p99 < 0.5, "a wait for the device is a second here"


def test_stores_beyond_the_bound_are_dropped(start: Callable[..., Engine], stalling: StallingDevice) -> None:
    engine = start(max_store_bytes=4 * ROW_BYTES)
    engine.fill()
    stalling.gate.clear()
    jobs = [engine.submit(keys_of(1, seed=step), [step], load=False) for step in range(12)]
    engine.poll()
    assert [engine.results[job].success for job in jobs[4:]] == [False] * 8
    assert engine.metrics(stalled=True)["stores_dropped"] == 8
    stalling.gate.set()
    assert all(engine.ended(job).success for job in jobs[:4])
    assert not engine.lookup(keys_of(1, seed=11)[0])


def test_what_was_hit_stays_until_it_is_loaded(start: Callable[..., Engine], image: Path) -> None:
    """The store holds about 350 rows; 600 others come in between."""
    engine = start(store_threads=1)
    there, keys = engine.fill(), keys_of(4)
    engine.store(keys)
    assert engine.lookup(keys[0], "loads")
    assert engine.lookup(keys[1], "finishes")
    assert not engine.lookup(keys_of(1, seed=1)[0])
    for batch in range(20):
        assert engine.store(keys_of(30, seed=batch + 2), list(range(30))).success
    engine.rows[:] = 0
    assert engine.metrics()["chunks_evicted"] > 0
    assert not engine.lookup(keys[2])
    assert engine.tier._store.contains(f"{engine.tier._family}/{keys[1].hex()}")
    assert engine.load(keys[:1], [50]).success
    assert np.array_equal(engine.rows[50], there[0])
    engine.tier.on_request_finished(ReqContext("finishes"))
    engine.poll()
    assert engine.metrics()["leased"] == 0
    for batch in range(20):
        engine.store(keys_of(30, seed=batch + 50), list(range(30)))
    assert not engine.lookup(keys[0])
    assert not engine.lookup(keys[1])


def test_a_lease_ends_by_itself(start: Callable[..., Engine]) -> None:
    engine = start(lease_s=0.05)
    engine.fill()
    keys = keys_of(2)
    engine.store(keys)
    assert all(engine.lookup(key) for key in keys)
    assert engine.metrics()["leased"] == 2
    time.sleep(0.1)
    engine.tier._sweep_due_s = 0
    engine.tier.on_schedule_end(None)
    assert engine.metrics()["leased"] == 0
    assert engine.metrics()["leases_expired"] == 2
    assert not engine.tier._store.unpin(f"{engine.tier._family}/{keys[0].hex()}"), "nobody holds a pin"


def variants() -> dict[str, Any]:
    replace = dataclasses.replace
    group, parallel = CONFIG.groups[0], CONFIG.parallel
    changed = {
        "dtype": replace(CONFIG, model=replace(CONFIG.model, dtype="float16")),
        "model": replace(CONFIG, model=replace(CONFIG.model, name="tiny2")),
        "hash": replace(CONFIG, cache=replace(CONFIG.cache, tokens_per_hash=16)),
        "chunk": replace(CONFIG, cache=replace(CONFIG.cache, blocks_per_chunk=2)),
        "layers": replace(CONFIG, groups=(replace(group, layer_names=("a", "b")),)),
        "groups": replace(CONFIG, groups=(group, group)),
        "block": replace(CONFIG, groups=(replace(group, tokens_per_block=16),)),
        "tp rank": replace(CONFIG, parallel=replace(parallel, tp_size=2, world_size=2, rank=1)),
        "tp size": replace(CONFIG, parallel=replace(parallel, tp_size=2, world_size=2)),
        "pp": replace(CONFIG, parallel=replace(parallel, pp_size=2, world_size=2)),
        "pcp": replace(CONFIG, parallel=replace(parallel, pcp_size=2, world_size=2)),
        "dcp": replace(CONFIG, parallel=replace(parallel, dcp_size=2)),
        "canonical": replace(CONFIG, canonical_layout=True),
        "replicated": replace(CONFIG, replicated_layout=True),
        "bytes": replace(CONFIG, worker_kv_bytes_per_block=ROW_BYTES // 2),
    }
    if hasattr(CONFIG, "kv_cache_layout"):
        changed["layout"] = replace(CONFIG, kv_cache_layout="LBNHC")
    if hasattr(group, "sliding_window_size_in_chunks"):
        changed["window"] = replace(CONFIG, groups=(replace(group, sliding_window_size_in_chunks=4),))
    return changed


def test_other_configurations_find_nothing(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    engine.fill()
    keys = keys_of(6)
    engine.store(keys)
    engine.tier.shutdown()
    names = {family_of(CONFIG, ROW_BYTES, "w").name}
    for name, config in variants().items():
        other = start(config=config)
        assert not any(other.lookup(key) for key in keys), name
        names.add(other.tier._family)
        other.tier.shutdown()
    for options in ({"weights": "v"}, {"salt": "tenant"}, {"row_bytes": ROW_BYTES * 2}):
        other = start(**options)
        assert not any(other.lookup(key) for key in keys), options
        names.add(other.tier._family)
        other.tier.shutdown()
    assert len(names) == len(variants()) + 4
    same = start(config=dataclasses.replace(CONFIG, engine_id="other", extra_config={"x": 1}))
    assert all(same.lookup(key) for key in keys)
    same.tier.shutdown()
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    assert family_of(CONFIG, ROW_BYTES, "w").name not in names


def test_a_reset_forgets_where_weights_change(start: Callable[..., Engine]) -> None:
    keys = keys_of(3)
    for options, stays in (({}, True), ({"weights_change": True}, False)):
        engine = start(**options)
        engine.fill()
        engine.store(keys)
        assert engine.lookup(keys[0])
        engine.tier.drain_jobs()
        engine.poll()
        assert engine.lookup(keys[0]) is stays
        assert engine.store(keys).success
        assert engine.lookup(keys[0])
        engine.tier.shutdown()


def test_bad_configurations_end_the_start(image: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no option devcie"):
        Engine(devcie=str(image))
    with pytest.raises(InvalidArgument, match='needs "device"'):
        Engine()
    with pytest.raises(InvalidArgument, match="device is 7"):
        Engine(device=7)
    with pytest.raises(InvalidArgument, match="cpu_bytes_to_use"):
        Engine(device=str(image), rows=0)
    with pytest.raises(InvalidArgument, match="load_deadline_s is -1"):
        Engine(device=str(image), load_deadline_s=-1)
    with pytest.raises(InvalidArgument, match="format is 1"):
        Engine(device=str(image), format=1)
    with pytest.raises(InvalidArgument, match="locality"):
        Engine(device=str(image), locality="NEAR")
    with pytest.raises(InvalidArgument, match="no_such"):
        Engine(device=str(image), store_options={"no_such": 1})
    with pytest.raises(BlockKVError, match=r"absent\.img"):
        Engine(device=str(tmp_path / "absent.img"))
    with pytest.raises(InvalidArgument, match="is not a path"):
        Engine(device=str(image), weights="", config=CONFIG)
    blank = tmp_path / "blank.img"
    blank.write_bytes(bytes(64 << 20))
    with pytest.raises(NotFormatted, match='"format": true'):
        Engine(device=str(blank))
    engine = Engine(device=str(blank), format=True)
    with pytest.raises(BlockKVError, match="open"):
        Engine(device=str(blank))
    engine.tier.shutdown()
    Engine(device=str(image), format=True).tier.shutdown()
    occupied = tmp_path / "occupied.img"
    occupied.write_bytes(os.urandom(64 << 20))
    with pytest.raises(BlockKVError):
        Engine(device=str(occupied), format=True)


def model_files(path: Path) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(os.urandom(3 << 20))
    (path / "config.json").write_text(json.dumps({"rope_theta": 10000}))
    (path / "tokenizer.json").write_text("{}")
    return path


def test_weights_have_a_fingerprint(tmp_path: Path, image: Path) -> None:
    path = model_files(tmp_path / "model")
    with blockkv.open(image) as store:
        first = fingerprint(weight_files(path), store)
        assert fingerprint(weight_files(path)) == first
        (path / "tokenizer.json").write_text("{ }")
        assert fingerprint(weight_files(path), store) == first
        seen = {first}
        with (path / "model.safetensors").open("r+b") as file:
            file.seek(2_000_000)
            byte = file.read(1)
            file.seek(2_000_000)
            file.write(bytes([byte[0] ^ 1]))
        found = (path / "model.safetensors").stat()
        os.utime(path / "model.safetensors", ns=(found.st_atime_ns, found.st_mtime_ns - 10**9))
        seen.add(fingerprint(weight_files(path), store))
        (path / "config.json").write_text(json.dumps({"rope_theta": 20000}))
        seen.add(fingerprint(weight_files(path), store))
        assert len(seen) == 3
        assert fingerprint(weight_files(path)) in seen
        assert len(store) == 3
    with pytest.raises(InvalidArgument, match="no weights"):
        weight_files(tmp_path)


def test_a_model_with_a_path_needs_no_fingerprint_given(start: Callable[..., Engine], tmp_path: Path) -> None:
    path = model_files(tmp_path / "model")
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, name=str(path)))
    engine = start(config=config, weights="")
    engine.fill()
    keys = keys_of(3)
    assert engine.store(keys).success
    engine.tier.shutdown()
    same = start(config=config, weights="")
    assert all(same.lookup(key) for key in keys)
    same.tier.shutdown()
    (path / "model.safetensors").write_bytes(os.urandom(3 << 20))
    other = start(config=config, weights="")
    assert not any(other.lookup(key) for key in keys)


def test_nothing_is_found_or_stored_while_the_weights_are_read(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_files(tmp_path / "model")
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, name=str(path)))
    read = threading.Event()
    monkeypatch.setattr(connector, "FINGERPRINT_PATIENCE_S", 0.05)
    monkeypatch.setattr(connector, "fingerprint", lambda files, store: (read.wait(60), "f")[1])
    engine = start(config=config, weights="")
    engine.fill()
    keys = keys_of(2)
    assert not engine.store(keys).success
    assert not engine.lookup(keys[0])
    assert engine.metrics()["lookups_refused"] == 1
    read.set()
    until = time.monotonic() + 60
    while not engine.tier._family:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert engine.store(keys).success
    assert engine.lookup(keys[0])


def test_events_tell_what_comes_and_goes(start: Callable[..., Engine]) -> None:
    def told(engine: Engine) -> list[tuple[bool, set[bytes]]]:
        engine.tier._look_at_store()
        return [(event.removed, {bytes(key) for key in event.keys}) for event in engine.tier.take_events()]

    silent = start()
    silent.fill()
    silent.store(keys_of(1, seed=5))
    assert told(silent) == []
    silent.tier.shutdown()

    engine = start(enable_kv_events=True, locality="LOCAL")
    engine.fill()
    old, keys = keys_of(1, seed=5), keys_of(4)
    assert told(engine) == [(False, set(old))], "what an earlier process has stored is announced"
    engine.store(keys)
    engine.tier._look_at_store()
    (event,) = engine.tier.take_events()
    assert (event.removed, set(event.keys), event.medium.value) == (False, set(keys), "STORAGE")
    assert event.locality is not None
    family, engine.tier._family = engine.tier._family, ""  # as while the weights are read
    engine.tier._store.delete(f"{family}/{keys[1].hex()}")
    assert told(engine) == []
    engine.tier._family = family
    engine.tier._store.put("of another", b"x")
    assert told(engine) == [(True, {keys[1]})]
    assert told(engine) == []


def test_metrics_are_declared_and_counted_once(start: Callable[..., Engine], image: Path) -> None:
    engine = start()
    engine.fill()
    engine.store(keys_of(7))
    engine.tier._look_at_store()
    stats = engine.tier.get_stats()
    declared = BlockKVTier.build_metric_definitions({})
    assert set(stats.data["data"]) <= set(declared)
    assert all(values.keys() == {(str(image),)} for values in stats.data["data"].values())
    assert stats.data["data"][connector.PREFIX + "chunks"][str(image),] == 7
    engine.tier._counters["rewritten"] += 2
    assert engine.metrics()["rewritten"] == 2
    assert connector.PREFIX + "rewritten" not in engine.tier.get_stats().data["data"]
    info = engine.tier.config_info()
    assert tuple(info) == BlockKVTier.config_info_keys({})
    assert info["blockkv_family"] == engine.tier._family


def test_hashes_that_change_with_the_process_are_named(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [bytes(make_offload_key(os.urandom(16), 0)) for _ in range(3)]
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    engine = start()
    engine.store(short)
    assert "PYTHONHASHSEED" not in caplog.text
    monkeypatch.delenv("PYTHONHASHSEED")
    engine.store(short)
    engine.store(short)
    assert caplog.text.count("PYTHONHASHSEED") == 1


def test_the_primary_tier_is_registered_and_let_go(start: Callable[..., Engine]) -> None:
    engine = start(direct=True)
    engine.fill()
    keys = keys_of(20)
    engine.store(keys)
    engine.load(keys, list(range(20)))
    info = engine.tier.config_info()
    assert info["blockkv_registered"] is (info["blockkv_engine"] == "io_uring")
    assert engine.tier._store.stats()["bounced_bytes"] < ROW_BYTES, "rows are read and written in place"
    engine.tier.shutdown()
    engine.tier.shutdown()
    engine.view.release()


@contextlib.contextmanager
def served(image: Path, socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`blockkv serve`, ready."""
    owner = subprocess.Popen([sys.executable, "-m", "blockkv", "serve", str(image), "--socket", str(socket)])
    try:
        until = time.monotonic() + 30
        while True:
            try:
                blockkv.open(socket).close()
                break
            except BlockKVError:
                assert owner.poll() is None, "the owner has ended"
                assert time.monotonic() < until
                time.sleep(0.05)
        yield owner
    finally:
        owner.kill()
        owner.wait()


def test_engines_share_a_device_through_its_owner(image: Path, tmp_path: Path) -> None:
    socket = tmp_path / "s"
    keys = keys_of(6)
    with served(image, socket) as owner:
        first, second = Engine(device=str(socket)), Engine(device=str(socket))
        there = first.fill()
        assert first.store(keys).success
        assert second.finds(keys)
        assert second.found(keys_of(2, seed=8)) == [False] * 2
        assert second.load(keys, list(range(6))).success
        assert np.array_equal(second.rows[:6], there[:6])
        assert second.finds(keys[:1], "gives up")
        second.tier.on_request_finished(ReqContext("gives up"))
        second.poll()
        assert len(second.tier._leases) == 0

        os.kill(owner.pid, signal.SIGSTOP)
        while Path(f"/proc/{owner.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.01)
        begun = time.perf_counter()
        for key in keys:
            second.tier.lookup(key, ReqContext("r"))
        assert time.perf_counter() - begun < 0.9, "an owner that does not answer is not waited for"
        assert second.found(keys) == [False] * 6
        owner.kill()
        owner.wait()
        begun = time.monotonic()
        assert second.found(keys) == [False] * 6
        assert time.monotonic() - begun < 15
        assert not first.store(keys_of(1, seed=9)).success
    with served(image, socket):
        assert second.finds(keys)
        second.rows[:] = 0
        assert second.load(keys, list(range(6))).success
        assert np.array_equal(second.rows[:6], there[:6])
        first.tier.shutdown()
        second.tier.shutdown()


def test_events_need_a_store_of_ones_own(image: Path, tmp_path: Path) -> None:
    with served(image, tmp_path / "s"):
        with pytest.raises(InvalidArgument, match="enable_kv_events"):
            Engine(device=str(tmp_path / "s"), enable_kv_events=True)
        Engine(device=str(tmp_path / "s")).tier.shutdown()


def test_a_replica_has_a_device_of_its_own(tmp_path: Path) -> None:
    for replica in range(2):
        blockkv.format(tmp_path / f"kv{replica}.img", size="64MiB")
    parallel = dataclasses.replace(CONFIG.parallel, data_parallel_index=1, data_parallel_size=2)
    pattern = str(tmp_path / "kv{dp}.img")
    first = Engine(device=pattern)
    second = Engine(device=[pattern], config=dataclasses.replace(CONFIG, parallel=parallel))
    assert first.tier._store.info()["path"] != second.tier._store.info()["path"]
    assert first.tier._family == second.tier._family
    first.tier.shutdown()
    second.tier.shutdown()
