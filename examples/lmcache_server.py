#!/usr/bin/env python3
"""LMCache's server on a blockkv device: it is killed, and its successor has what it had.

    python examples/lmcache_server.py [DEVICE]      with the Python that has lmcache and blockkv

DEVICE is a blank device or one with a store; without one it is a file that goes away again. What an engine
would do is done by the client of `lmcache bench server`, which runs on a CPU: it stores the KV cache of a few
prompts, and reads it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MODEL = "test-model"
"""What that client calls its model."""
SHAPE = "(2,1024,16,4,64):float16:4"
"""Keys and values, blocks, tokens a block, heads, head size; type; layers: 1 MiB a chunk of 256 tokens."""
PROMPT_TOKENS = 1024
ENVIRONMENT = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
PATIENCE_S = 180.0


class Server:
    """`lmcache server` with blockkv as its L2, on a port of its own."""

    def __init__(
        self,
        device: str,
        log: Path,
        *more: str,
        address: str = "127.0.0.1",
        port: int = 0,
        within: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """`within`: a command that runs others somewhere else. `more`: options of `lmcache server`."""
        self.within = within
        self._log = log
        port = port or free_port()
        self.http = f"http://{address}:{free_port() if not within else 8080}"
        self.url = f"tcp://{address}:{port}"
        params = {"device": device, "format": True, "weights": {MODEL: "made of nothing"}}
        adapter = {
            "type": "plugin",
            "module_path": "blockkv.connectors.lmcache",
            "class_name": "BlockKVL2Adapter",
            "adapter_params": params,
        }
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [
                    *within,
                    *(sys.executable, "-m", "lmcache.cli.main", "server"),
                    *("--host", address, "--port", str(port)),
                    *("--http-host", address, "--http-port", self.http.rpartition(":")[2]),
                    *("--l1-size-gb", "0.25", "--eviction-policy", "LRU"),
                    *("--supported-transfer-mode", "auto", "--l2-adapter", json.dumps(adapter)),
                    *more,
                ],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **(environment or {})},
            )

    def wait_for(self, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What GET /status says of it, once that is good."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                status = self.get("/status")
                if good(status):
                    return status
            time.sleep(0.1)
        raise SystemExit(f"the server did not get there:\n{self._log.read_text()[-3000:]}")

    def get(self, path: str, body: object = None) -> Any:
        """The answer of its HTTP API."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310  an http address that we have made
            self.http + path, data, {"Content-Type": "application/json"}
        )
        if self.within:
            asked = [*self.within, sys.executable, __file__, "--get", self.http + path, json.dumps(body)]
            return json.loads(subprocess.run(asked, check=True, capture_output=True).stdout)
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return json.loads(answer.read())

    def wait_until_up(self) -> None:
        """Until it answers."""
        self.wait_for(lambda status: True)

    def tier(self) -> dict[str, Any]:
        """What our adapter says of itself."""
        adapters = self.wait_for(lambda status: True)["storage_manager"]["l2_adapters"]
        return next(one for one in adapters if one["type"] == "BlockKVL2Adapter")

    def settled(self, chunks: int) -> dict[str, Any]:
        """The same, once at least so many chunks are on the device."""
        until = time.monotonic() + PATIENCE_S
        while (tier := self.tier())["stored_object_count"] < chunks or tier["inflight_task_count"]:
            if time.monotonic() > until:
                raise SystemExit(f"not stored: {tier}")
            time.sleep(0.1)
        return tier

    def kill(self) -> None:
        """As kill -9 does."""
        self._process.kill()
        self._process.wait()


class Engine:
    """An engine that is attached to a server: another process, on the same host."""

    def __init__(self, server: Server) -> None:
        self._process = subprocess.Popen(
            [*server.within, sys.executable, __file__, "--engine", server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENVIRONMENT,
        )

    def run(self, first: int, count: int) -> list[tuple[int, str]]:
        """Ask for so many prompts, read what is there, and store the rest.

        For each prompt: how many of its chunks were there, and a digest of all it has now.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([first, count]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("[["):  # LMCache prints, too
                return [(hits, digest) for hits, digest in json.loads(line)]
        raise SystemExit("the engine ended")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def serve_as_engine(url: str) -> None:
    """What `Engine` runs."""
    from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
    from lmcache.cli.commands.bench.server_bench.config import BenchConfig

    config = BenchConfig(
        rpc_url=url,
        http_url="",
        mode="cpu",
        transfer_mode="auto",
        tp_size=1,
        use_mla=False,
        num_tokens=PROMPT_TOKENS,
        kvcache_shape_spec=SHAPE,
        num_blocks=1024,
        block_size=16,
    )
    client = ServerBenchClient(config, lambda text: print(text, file=sys.stderr))
    client.start()
    for line in sys.stdin:
        first, count = json.loads(line)
        found = []
        for number in range(first, first + count):
            request = client.create_request(number, f"prompt-{number}-{time.monotonic_ns()}", "prompt")
            assert request is not None
            lookup = client.lookup(request)
            tokens = lookup.hit_chunks * request.chunk_size
            client.zero_destination(request, 0, tokens)
            client.retrieve(request, 0, tokens)
            client.store(request, tokens, request.num_full_tokens - tokens)
            checksums = client.compute_checksums(request, 0, request.num_full_tokens) or []
            client.end_session(request)
            digest = hashlib.sha256("".join(checksums).encode()).hexdigest()[:16]
            found.append((lookup.hit_chunks, digest))
        print(json.dumps(found), flush=True)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def blank_file(path: Path, size_bytes: int) -> str:
    """A file to use as a device."""
    with path.open("wb") as file:
        file.truncate(size_bytes)
    return str(path)


def main(device: str = "") -> None:
    """The whole story."""
    with tempfile.TemporaryDirectory(prefix="blockkv-lmcache-", dir="/var/tmp") as directory:
        device = device or blank_file(Path(directory, "device.img"), 256 << 20)
        log = Path(directory, "server.log")
        server = Server(device, log)
        try:
            server.wait_until_up()
            with Engine(server) as engine:
                computed = engine.run(0, 4)
            print(f"4 prompts of 4 chunks: {sum(hits for hits, _ in computed)} hits; computed and stored")
            tier = server.settled(16)
            print(f"on the device: {tier['stored_object_count']} chunks, {tier['total_bytes_used']} bytes")
            server.kill()
            print("killed with -9; another server on the same device:")
            server = Server(device, log)
            server.wait_until_up()
            tier = server.tier()
            print(f"recovered: {tier['keys_recovered']} chunks, {tier['total_bytes_used']} bytes")
            with Engine(server) as engine:
                read = engine.run(0, 4)
            print(f"the same prompts: {sum(hits for hits, _ in read)} hits")
            same = [digest for _, digest in read] == [digest for _, digest in computed]
            print("every byte is as it was computed" if same else "WRONG BYTES")
            if not same or any(hits != 4 for hits, _ in read):
                raise SystemExit(1)
        finally:
            server.kill()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--engine", url]:
            serve_as_engine(url)
        case ["--get", url, body]:
            request = urllib.request.Request(url, None if body == "null" else body.encode())  # noqa: S310
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
                print(answer.read().decode())
        case given:
            main(*given)
