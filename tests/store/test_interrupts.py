"""Ctrl-C at any moment of any operation: nothing is lost, nothing leaks, the store goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import blockkv
from blockkv.store.gets import GetRun
from blockkv.store.puts import PutRun

ROUNDS = 250


@pytest.fixture
def alarms() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(operation: Any, delay_s: float) -> bool:
    """Run `operation` with a Ctrl-C due after `delay_s`; whether it came before the end."""
    try:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        operation()
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(0)  # an alarm that came at the last moment is handled here
    except KeyboardInterrupt:
        return True
    return False


def test_interrupts_neither_lose_nor_leak(image_dir: Path, alarms: None) -> None:
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB", average_chunk="64KiB")
    rng = random.Random(7)
    value = torch.arange(30_000, dtype=torch.int32)
    caught = 0
    with blockkv.open(target, commit_interval_ms=1) as store:
        free_bytes = store.stats()["free_bytes"]
        safe = []
        for number in range(ROUNDS):
            keys = [f"{number}.{part}" for part in range(3)]
            operation = rng.choice(
                (
                    lambda keys=keys: store.put_many([(key, value) for key in keys]),
                    lambda keys=keys: store.put_many([(key, value) for key in keys], durable=True),
                    lambda: store.get_many(safe[-5:]),
                    lambda number=number: store.delete(f"{number - 1}.0", durable=True),
                    store.commit,
                    store.checkpoint,
                )
            )
            caught += interrupted(operation, rng.uniform(2e-5, 1.5e-3))
            assert store.put(f"safe {number}", value[: number + 1], durable=True)
            safe.append(f"safe {number}")
        assert caught > ROUNDS // 10
        assert store.check(payload=True).ok
        assert all(tensor is not None for tensor in store.get_many(safe))
        for key in list(store.keys()):
            store.delete(key)
        store.commit()
        assert store.stats()["free_bytes"] == free_bytes
        assert store.put("last", value, durable=True)


@pytest.mark.parametrize("members", [1, 2])
def test_an_open_that_was_interrupted_leaves_no_store(
    image_dir: Path, alarms: None, monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    """Whenever the Ctrl-C came: what cannot be returned is closed."""
    paths: Any = [image_dir / f"{index}.img" for index in range(members)]
    paths = paths if members > 1 else paths[0]
    blockkv.format(paths, size="16MiB")
    recover = blockkv.store.store.recover

    def interrupted_recover(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return recover(*arguments)

    monkeypatch.setattr("blockkv.store.store.recover", interrupted_recover)
    with pytest.raises(KeyboardInterrupt):
        blockkv.open(paths)
    monkeypatch.undo()
    for round_ in range(60):
        with contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, round_ * 0.0002)
            blockkv.open(paths).close()
        signal.setitimer(signal.ITIMER_REAL, 0)
    with blockkv.open(paths) as store:
        assert store.put("a", b"a")


def test_interrupted_formats_end_and_let_the_device_go(image_dir: Path, alarms: None) -> None:
    target = image_dir / "store.img"
    blockkv.format(target, size="16MiB")
    rng = random.Random(5)
    caught = sum(
        interrupted(lambda: blockkv.format(target, force=True), rng.uniform(0.0001, 0.02)) for _ in range(100)
    )
    assert caught > 10
    blockkv.format(target, force=True)
    with blockkv.open(target) as store:
        assert store.put("k", b"x")


def test_interrupted_commits_keep_their_word(image_dir: Path) -> None:
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB", average_chunk="64KiB")
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            store = blockkv.open(target, commit_interval_ms=None)
            rng = random.Random(3)
            for number in range(ROUNDS):
                store.put(f"k{number}", b"%d" % number * 100)
                interrupted(store.commit, rng.uniform(2e-5, 6e-4))
                store.commit()
                info = store.entry(f"k{number}")
                assert info is not None
                assert info.durable
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            sys.stderr.flush()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with blockkv.open(target) as store:
        assert not store.info()["recovery"]["journal_damaged"]
        for number in range(ROUNDS):
            found = store.get(f"k{number}")
            assert found is not None
            assert bytes(found.numpy()) == b"%d" % number * 100


def test_handlers_that_do_not_raise_do_not_cut_a_batch_short(image_dir: Path) -> None:
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB")
    calls: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: calls.append(number))
    try:
        with blockkv.open(target) as store:
            signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-3)
            assert all(store.put_many([(f"k{number}", b"x" * 50_000) for number in range(400)]))
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert len(store) == 400
    finally:
        signal.signal(signal.SIGALRM, before)
    assert calls
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_change_cut_short_ends_writing(image_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What signals cannot do any more, lack of memory still can: then the store fails closed."""
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB")
    store = blockkv.open(target, commit_interval_ms=None)
    store.put("k", b"before", durable=True)
    monkeypatch.setattr(store._state, "insert", lambda *_, **__: exec("raise MemoryError"))
    with pytest.raises(MemoryError):
        store.put("new", b"x")
    assert bytes(store.get("k").numpy()) == b"before"
    with pytest.raises(blockkv.StoreReadOnly, match="MemoryError"):
        store.put("other", b"x")
    with pytest.raises(blockkv.StoreReadOnly):
        store.close()
    with blockkv.open(target) as store:
        assert list(store.keys()) == ["k"]


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf"), 1e30])
def test_commit_interval_is_checked(image_dir: Path, interval: float) -> None:
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB")
    with pytest.raises(blockkv.InvalidArgument, match="commit_interval_ms"):
        blockkv.open(target, commit_interval_ms=interval)


@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": 10**9}, {"engine": "x"}])
def test_refused_engine_options_close_the_device_once(image_dir: Path, options: dict[str, Any]) -> None:
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB")
    with pytest.raises(blockkv.InvalidArgument):
        blockkv.open(target, **options)
    blockkv.open(target).close()


def test_text_that_is_no_text(image_dir: Path) -> None:
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB")
    with blockkv.open(target) as store:
        with pytest.raises(blockkv.InvalidArgument, match="bytes"):
            store.put("\ud800", b"x")
        with pytest.raises(blockkv.InvalidArgument, match="list"):
            store.get_many("abc")
        with pytest.raises(blockkv.InvalidArgument, match="pairs"):
            store.put_many(["abc"])  # type: ignore[list-item]


def test_a_wave_that_could_not_be_made_leaves_nothing_claimed(
    image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = image_dir / "store.img"
    blockkv.format(target, size="64MiB")
    with blockkv.open(target) as store:
        store.put("there", b"before")
        for run in (PutRun, GetRun):
            with monkeypatch.context() as patch:
                patch.setattr(run, "_fill", lambda *_: exec("raise MemoryError"))
                with pytest.raises(MemoryError):
                    store.put_many([("a", b"1"), ("b", b"2")]) if run is PutRun else store.get("there")
        state = store._state
        assert not state.claims
        assert state.store_bytes == state.reserved_record_bytes == 0
        assert not state.any_leased()
        assert store.put("a", b"1")
        assert store.check(payload=True).ok
