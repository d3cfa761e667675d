"""The connector of LMCache, in LMCache: its contract, its own benchmark, and its server that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, engine_python, run_in

import blockkv

WORKERS = Path(__file__).parent / "workers"
CONTRACT, CLIENT = WORKERS / "lmcache_contract.py", WORKERS / "lmcache_client.py"
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
KV_SHAPE = "(2,1024,16,4,64):float16:4"
"""1 MiB for a chunk of 256 tokens, and four chunks a sequence."""


@cache
def contract_failures() -> dict[str, str]:
    """Of each check of the worker, all in one process: importing LMCache takes longer than they do."""
    failures: dict[str, str] = run_in("lmcache", CONTRACT, **QUIET)
    return failures


@pytest.mark.parametrize("check", re.findall(r"^def (check_\w+)", CONTRACT.read_text(), re.MULTILINE))
def test_contract(check: str) -> None:
    assert contract_failures()[check] == ""


def test_what_was_acknowledged_survives_kills_and_usage_is_exact() -> None:
    told = run_in("lmcache", WORKERS / "lmcache_kills.py", "4", str(random.randrange(1 << 30)), **QUIET)
    assert told["acknowledged"] > 100
    assert min(told["chunks"]) > 0


@pytest.mark.parametrize(
    ("kind", "class_name", "more"),
    [("plugin", "BlockKVL2Adapter", {}), ("native_plugin", "BlockKVConnector", {"layout": "uint8"})],
)
def test_its_own_benchmark_verifies_what_it_loads(
    kind: str, class_name: str, more: dict[str, str], tmp_path: Path
) -> None:
    blockkv.format(tmp_path / "device.img", size="128MiB")
    done = subprocess.run(
        [
            engine_python("lmcache").parent / "lmcache",
            *("bench", "l2", "--no-skip-verify", "--rounds", "2", "--lookup-max-hit-rate", "0.5"),
            "--l2-adapter",
            adapter(tmp_path / "device.img", kind=kind, class_name=class_name, **more),
        ],
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "All 32 keys data verified OK" in done.stdout
    assert re.findall(r"Total success: *(\d+)", done.stdout) == ["64", "32", "64"]
    assert "Rounds timed out:                                              0" in done.stdout


def test_a_server_that_is_killed_under_load_has_its_keys(tmp_path: Path) -> None:
    """And then: a flipped bit is a miss, stored anew; other dtypes, ranks or weights hit nothing."""
    device = tmp_path / "device.img"
    blockkv.format(device, size="512MiB")
    with Client() as client, Client() as load:
        with Server(device) as server:
            stored = client.ask("store", server, 0, 6)
            assert all(one["hits"] == 0 for one in stored.values())
            acknowledged = server.settled(24)
            assert acknowledged["total_bytes_used"] == 24 << 20
            load.tell("store", server, 100, 100)  # with all of them there would be nothing to evict
            server.wait_for(lambda status: status["stored_object_count"] > 40)
            server.kill()
        places = places_of_chunks(device)

        with Server(device) as server:
            status = server.adapter()
            assert status["keys_recovered"] == status["stored_object_count"] == len(places) > 40
            sizes = [one["size_bytes"] for one in server.objects()]
            assert status["total_bytes_used"] == sum(sizes) == status["store"]["payload_bytes"]
            read = client.ask("read", server, 0, 6)
            assert all(one["hits"] == one["chunks"] == 4 for one in read.values())
            assert all(one["checksums"] == stored[number]["checksums"] for number, one in read.items())
            assert server.settled(0)["locked_key_count"] == 0
            assert server.adapter()["load_hits"] == 24  # L1 keeps nothing here

            flip(device, places[0])
            again = client.ask("read", server, 0, 6)
            assert [one["hits"] < 4 for one in again.values()].count(True) == 1
            for number, one in again.items():  # what was read is right, and the rest was computed
                assert one["checksums"] == stored[number]["checksums"][: len(one["checksums"])]
            status = server.settled(0)
            assert status["store"]["chunks_dropped_damaged"] == 1
            assert status["is_healthy"]
            assert all(one["hits"] == 4 for one in client.ask("read", server, 0, 6).values())

            bfloat16 = KV_SHAPE.replace("float16", "bfloat16")
            for shape, tp_size in ((bfloat16, 1), (KV_SHAPE, 2)):
                assert all(
                    one["hits"] == 0 for one in client.ask("read", server, 0, 2, shape, tp_size).values()
                )
            assert all(one["hits"] == 4 for one in client.ask("read", server, 0, 2).values())

        with Server(device, "other weights") as server:
            assert all(one["hits"] == 0 for one in client.ask("read", server, 0, 2).values())


def test_the_example_of_a_server() -> None:
    said = example("lmcache_server.py")
    assert "recovered: 16 chunks, 16777216 bytes" in said
    assert "the same prompts: 16 hits" in said
    assert "every byte is as it was computed" in said


@pytest.mark.requires_root
@pytest.mark.requires_tool("ip")
def test_the_example_of_two_servers() -> None:
    said = example("lmcache_two_servers.py")
    assert "right, 3 of them: 12 hits, every byte right" in said
    assert "recovered on the left device: 24 chunks" in said
    assert "left, the first prompts, from its device: 12 hits" in said
    assert "WRONG BYTES" not in said


def example(name: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [engine_python("lmcache"), ROOT / "examples" / name],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


# -- LMCache's server ------------------------------------------------------------------------------------


def adapter(
    device: Path, weights: str = "w", kind: str = "plugin", class_name: str = "BlockKVL2Adapter", **more: str
) -> str:
    """For --l2-adapter."""
    params = {"device": str(device), "weights": weights, **more}
    return json.dumps(
        {
            "type": kind,
            "module_path": "blockkv.connectors.lmcache",
            "class_name": class_name,
            "adapter_params": params,
        }
    )


class Server:
    """`lmcache server`, which leaves nothing in L1 that is in L2."""

    def __init__(self, device: Path, weights: str = "w") -> None:
        self._log = device.with_name("server.log").open("ab")
        self._port, self._http_port = free_port(), free_port()
        self._process = subprocess.Popen(
            [
                engine_python("lmcache").parent / "lmcache",
                *("server", "--host", "127.0.0.1", "--port", str(self._port)),
                *("--http-port", str(self._http_port), "--disable-observability"),
                *("--l1-size-gb", "0.25", "--supported-transfer-mode", "auto", "--eviction-policy", "LRU"),
                *("--l2-store-policy", "skip_l1", "--l2-adapter", adapter(device, weights)),
            ],
            env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Server:
        self.wait_for(lambda status: True, patience_s=120)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def adapter(self) -> dict[str, Any]:
        """What our adapter says of itself in GET /status."""
        (status,) = self._get("/status")["storage_manager"]["l2_adapters"]
        return dict(status)

    def objects(self) -> list[dict[str, Any]]:
        """What GET /cache/objects lists."""
        return list(self._get("/cache/objects?tier=l2&page_size=1000")["entries"])

    def wait_for(self, good: Callable[[dict[str, Any]], bool], patience_s: float = 60) -> dict[str, Any]:
        """The first status that is good."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            assert self._process.poll() is None, Path(self._log.name).read_text()[-4000:]
            with contextlib.suppress(OSError):
                status = self.adapter()
                if good(status):
                    return status
            time.sleep(0.05)
        raise AssertionError(f"not in {patience_s} s: {Path(self._log.name).read_text()[-4000:]}")

    def settled(self, chunks: int) -> dict[str, Any]:
        """The status once at least so many chunks are stored and nothing is under way."""
        return self.wait_for(
            lambda status: status["stored_object_count"] >= chunks and not status["inflight_task_count"]
        )

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}{path}", timeout=10) as answer:
            return json.loads(answer.read())


class Client:
    """`lmcache_client.py`, which is killed in the end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [engine_python("lmcache"), CLIENT],
            env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(
        self, verb: str, server: Server, first: int, count: int, shape: str = KV_SHAPE, tp_size: int = 1
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, server.url, first, count, shape, tp_size]) + "\n")
        self._process.stdin.flush()

    def ask(self, *told: Any) -> Any:
        """What it answers, by sequence."""
        self.tell(*told)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # LMCache prints, too
                return json.loads(line)
        raise AssertionError("the client ended")


def flip(device: Path, place: int) -> None:
    """One bit."""
    with device.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def places_of_chunks(device: Path) -> list[int]:
    """A byte of each chunk on the device, the oldest first."""
    with blockkv.open(device, read_only=True) as store:
        start = store.info()["data_offset_bytes"]
        entries = [entry for key in store.keys() if (entry := store.entry(key)) is not None]  # noqa: SIM118
    entries.sort(key=lambda entry: entry.log_sequence)
    return [start + entry.extents[0][0] * 4096 + entry.payload_bytes // 3 for entry in entries]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
