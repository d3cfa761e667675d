"""The tier under vLLM: its contract, called method by method, and whole engines in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, engine_python, run_in

WORKERS = Path(__file__).parent / "workers"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One process for each engine, which loads nothing and tells nobody; no threads that fight for two cores."""
SLOWEST_S = 500
"""Of one process: seconds on a machine that has nothing else to do, minutes on one that has."""
pytestmark = pytest.mark.timeout(SLOWEST_S * 3)
PROMPT_TOKENS, BLOCK_TOKENS = 300, 32
WHOLE = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS

Found = dict[str, Any]


def engine(scenario: str, model: str, directory: Path, device: Path) -> Found:
    found: Found = run_in(
        "vllm",
        WORKERS / "vllm_engine.py",
        scenario,
        model,
        str(directory),
        str(device),
        timeout_s=SLOWEST_S,
        **ENVIRONMENT,
    )
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Found]]:
    """Every engine that is started, two at a time; of each model one after the other, on one device."""
    engine_python("vllm")
    directory = tmp_path_factory.mktemp("vllm")
    found: dict[str, Future[Found]] = {
        name: Future() for name in ("cold", "trouble", "other", "hybrid cold", "hybrid warm", "chunks")
    }

    def blank(name: str) -> Path:
        path = directory / f"{name}.img"
        path.touch()
        os.truncate(path, 64 << 20)
        return path

    def carry_out(*steps: tuple[str, Callable[[], Found]]) -> None:
        for name, step in steps:
            try:
                found[name].set_result(step())
            except BaseException as error:
                found[name].set_exception(error)

    text, hybrid, copy = blank("text"), blank("hybrid"), directory / "copy.img"

    def llama(scenario: str, device: Path) -> Found:
        return engine(scenario, "llama", directory, device)

    threads = ThreadPoolExecutor(2)
    threads.submit(
        carry_out,
        ("cold", lambda: llama("cold", text)),
        ("other", lambda: llama("other", Path(shutil.copy(text, copy)))),
        ("trouble", lambda: llama("trouble", text)),
    )
    threads.submit(
        carry_out,
        ("hybrid cold", lambda: engine("cold", "hybrid", directory, hybrid)),
        ("hybrid warm", lambda: engine("warm", "hybrid", directory, hybrid)),
        ("chunks", lambda: engine("chunks", "hybrid", directory, blank("chunks"))),
    )
    return found


def same(one: Found, other: Found) -> bool:
    """Tokens, and the five likeliest of each step with their logarithms, to the last bit: where the engine
    had as many tokens left to compute. A matrix product of another shape may be summed in another order.
    """
    assert one["cached"] == other["cached"]
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


def alike(one: Found, other: Found) -> bool:
    """The same tokens, and the likeliest of each step as nearly as float32 gives them."""
    likeliest = [
        [max(float.fromhex(logarithm) for _token, logarithm in step) for step in found["logprobs"]]
        for found in (one, other)
    ]
    return bool(one["tokens"] == other["tokens"]) and likeliest[0] == pytest.approx(likeliest[1], abs=1e-4)


def test_contract(runs: object) -> None:
    """See workers/vllm_contract.py."""
    done = subprocess.run(
        [
            engine_python("vllm"),
            *("-m", "pytest", "--noconftest", "-c", os.devnull, "--rootdir", ROOT, "-p", "no:cacheprovider"),
            *("-q", "-W", "ignore", WORKERS / "vllm_contract.py"),
        ],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SLOWEST_S,
        check=False,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0


def test_another_process_goes_on_from_what_is_stored(runs: dict[str, Future[Found]]) -> None:
    cold, trouble = runs["cold"].result(), runs["trouble"].result()
    assert cold["first"]["cached"] == cold["second"]["cached"] == 0
    assert cold["metrics"]["tiering_write_bytes"] > 0
    assert trouble["first"]["cached"] == WHOLE
    assert same(trouble["first"], cold["first_again"])
    assert alike(trouble["first"], cold["first"])


def test_several_groups_of_layers_are_restored(runs: dict[str, Future[Found]]) -> None:
    cold, warm = runs["hybrid cold"].result(), runs["hybrid warm"].result()
    assert warm["first"]["cached"] == WHOLE
    assert same(warm["first"], cold["first_again"])
    assert alike(warm["first"], cold["first"])
    assert warm["metrics"]["tiering_read_bytes"] > 0


def test_chunks_of_several_blocks_are_restored(runs: dict[str, Future[Found]]) -> None:
    found = runs["chunks"].result()
    assert found["partly"]["cached"] == found["warm"]["cached"] == WHOLE
    assert same(found["partly"], found["again"])
    assert same(found["warm"], found["again"])
    assert alike(found["warm"], found["cold"])


def test_a_flipped_byte_is_a_miss_and_is_written_anew(runs: dict[str, Future[Found]]) -> None:
    cold, trouble = runs["cold"].result(), runs["trouble"].result()
    metrics = trouble["damaged_metrics"]
    assert trouble["damaged"]["cached"] < WHOLE
    assert alike(trouble["damaged"], cold["second"])
    assert metrics["blockkv_get_checksum_mismatch"] == 1
    assert metrics["blockkv_load_misses"] == 1
    assert metrics["tiering_promotion_job_failures"] == 1
    assert trouble["rewritten"]["cached"] == WHOLE
    assert same(trouble["rewritten"], cold["second_again"])


def test_a_reset_of_the_cache_leaves_the_device_alone(runs: dict[str, Future[Found]]) -> None:
    cold, trouble = runs["cold"].result(), runs["trouble"].result()
    assert trouble["after_reset"]["cached"] == WHOLE
    assert same(trouble["after_reset"], cold["first_again"])


def test_a_request_goes_on_without_a_device_that_stalls(runs: dict[str, Future[Found]]) -> None:
    cold, trouble = runs["cold"].result(), runs["trouble"].result()
    assert trouble["stalled"]["cached"] == 0
    assert same(trouble["stalled"], cold["first"])
    assert trouble["stalled"]["took_s"] > 1, "the deadline is a second here"
    assert trouble["still_stalled"]["cached"] == 0, "and the next one does not wait for it"
    assert same(trouble["still_stalled"], cold["second"])
    assert trouble["stalled_metrics"]["blockkv_stalled"] == 1
    assert trouble["stalled_metrics"]["blockkv_loads_late"] == 1
    assert trouble["second_after_stall"]["cached"] == WHOLE
    assert same(trouble["second_after_stall"], cold["second_again"])
    assert trouble["first_after_stall"]["cached"] == 0, "a miss until it is written anew"
    assert same(trouble["first_after_stall"], cold["first"])


def test_a_saturated_tier_drops_and_the_engine_lives(runs: dict[str, Future[Found]]) -> None:
    trouble = runs["trouble"].result()
    before, after = trouble["stalled_metrics"], trouble["saturated_metrics"]
    assert all(len(one["tokens"]) == 16 for one in trouble["saturating"])
    assert after["blockkv_stores_dropped"] > before["blockkv_stores_dropped"]


def test_the_example_runs(runs: dict[str, Future[Found]]) -> None:
    for run in runs.values():
        run.exception()
    done = subprocess.run(
        [engine_python("vllm"), ROOT / "examples" / "vllm_tier.py"],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SLOWEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "first process: 0 of 300 tokens" in done.stdout
    assert "second process: 288 of 300 tokens" in done.stdout


def test_another_dtype_finds_nothing(runs: dict[str, Future[Found]]) -> None:
    other = runs["other"].result()
    assert other["first"]["cached"] == 0
    assert other["chunks"] > 18, "what float32 has stored is there"
