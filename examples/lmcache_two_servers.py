#!/usr/bin/env python3
"""Two LMCache servers on two hosts, each with a blockkv device of its own, that read from each other.

    python examples/lmcache_two_servers.py       as root, with the Python that has lmcache, nixl and blockkv

The hosts are network namespaces with a cable between them. LMCache's coordinator tells the servers of each
other; each then asks the other's memory for what it has not (adapter `p2p`), and NIXL moves it, here by UCX
over TCP. blockkv is what each of them has on its own disk.

What a server reads from its peer comes out of that one's memory (L1). What it has on its device only, it
brings into memory when it is asked to: POST /cache/prefetches.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_server import ENVIRONMENT, MODEL, PATIENCE_S, PROMPT_TOKENS, Engine, Server, blank_file

LEFT, RIGHT = f"left-{os.getpid()}", f"right-{os.getpid()}"
HOSTS = {LEFT: "10.231.77.1", RIGHT: "10.231.77.2"}
COORDINATOR = f"http://{HOSTS[LEFT]}:9300"
PORT, CHANNEL_PORT = 5555, 5600
PROMPTS = 6


def ip(*words: str) -> None:
    """iproute2."""
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Two namespaces and a cable."""
    with contextlib.ExitStack() as stack:
        for name in HOSTS:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip("link", "add", LEFT, "netns", LEFT, "type", "veth", "peer", "name", RIGHT, "netns", RIGHT)
        for name, address in HOSTS.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield


def within(name: str) -> list[str]:
    """A command that runs another one on that host."""
    return ["ip", "netns", "exec", name]


def start(name: str, life: int, device: str, log: Path) -> Server:
    """A server on that host. Each life has a name of its own, for what a peer knew of the last is void."""
    address = HOSTS[name]
    return Server(
        device,
        log,
        *("--instance-id", f"{name} {life}"),
        *("--p2p-advertise-url", f"{address}:{CHANNEL_PORT}"),
        *("--coordinator-url", COORDINATOR, "--coordinator-advertise-ip", address),
        *("--coordinator-heartbeat-interval", "1"),
        address=address,
        port=PORT,
        within=within(name),
        environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": name},
    )


def peers_of(status: Any) -> list[str]:
    """Whom a server reads from, by its GET /status."""
    if isinstance(status, dict):
        if "p2p_peers" in status:
            return list(status["p2p_peers"])
        return [name for value in status.values() for name in peers_of(value)]
    return []


def prefetch(server: Server, numbers: range) -> int:
    """Have a server bring prompts from its device into its memory; how many chunks that were."""
    from lmcache.cli.commands.bench.server_bench.helpers import _build_token_ids

    found = 0
    for number in numbers:
        asked = {
            "model_name": MODEL,
            "world_size": 1,
            "token_ids": list(_build_token_ids(number, PROMPT_TOKENS)),
        }
        job = server.get("/cache/prefetches", asked)
        until = time.monotonic() + PATIENCE_S
        while (state := server.get(f"/cache/prefetches/{job['request_id']}"))["status"] != "completed":
            assert time.monotonic() < until, state
            time.sleep(0.05)
        found += state["found_keys"]
    return found


def hits(read: list[tuple[int, str]]) -> int:
    """Of all prompts."""
    return sum(count for count, _ in read)


def digests(read: list[tuple[int, str]]) -> list[str]:
    """Of each prompt."""
    return [digest for _, digest in read]


def main() -> None:
    """The whole story."""
    servers: dict[str, Server] = {}
    with (
        tempfile.TemporaryDirectory(prefix="blockkv-lmcache-", dir="/var/tmp") as directory,
        hosts(),
        contextlib.ExitStack() as stack,
    ):
        logs = Path(directory)
        devices = {name: blank_file(logs / f"{name}.img", 256 << 20) for name in HOSTS}
        with (logs / "coordinator.log").open("wb") as log:
            command = [sys.executable, "-m", "lmcache.cli.main", "coordinator", "--host", HOSTS[LEFT]]
            command += ["--instance-timeout", "4", "--health-check-interval", "1"]
            coordinator = subprocess.Popen([*within(LEFT), *command], stdout=log, stderr=log, env=ENVIRONMENT)
        stack.callback(coordinator.wait)
        stack.callback(coordinator.kill)
        for name in HOSTS:
            servers[name] = start(name, 1, devices[name], logs / f"{name}.log")
        stack.callback(lambda: [one.kill() for one in servers.values()])
        servers[LEFT].wait_for(lambda status: peers_of(status) == [f"{RIGHT} 1"])
        servers[RIGHT].wait_for(lambda status: peers_of(status) == [f"{LEFT} 1"])
        print("two servers, each knows of the other")

        right = stack.enter_context(Engine(servers[RIGHT]))
        with Engine(servers[LEFT]) as left:
            computed = left.run(0, PROMPTS)
        servers[LEFT].settled(4 * PROMPTS)
        print(f"left, {PROMPTS} prompts of 4 chunks: {hits(computed)} hits; computed, and on the left device")
        read = right.run(0, 3)
        same = digests(read) == digests(computed[:3])
        print(f"right, 3 of them: {hits(read)} hits, {'every byte right' if same else 'WRONG BYTES'}")
        print(f"on the right device: {servers[RIGHT].tier()['stored_object_count']} chunks")

        servers[LEFT].kill()
        print("the left server is killed, and starts again with nothing in memory")
        servers[LEFT] = start(LEFT, 2, devices[LEFT], logs / f"{LEFT}.log")
        servers[RIGHT].wait_for(lambda status: peers_of(status) == [f"{LEFT} 2"])
        print(f"recovered on the left device: {servers[LEFT].tier()['keys_recovered']} chunks")
        early = right.run(3, 1)
        print(f"right, a prompt that only the left device has: {hits(early)} hits")
        with Engine(servers[LEFT]) as left:
            again = left.run(0, 3)
            print(f"left, the first prompts, from its device: {hits(again)} hits")
            print(f"left brings others into its memory: {prefetch(servers[LEFT], range(4, 6))} chunks")
            late = right.run(4, 2)
            same = same and digests(late) == digests(computed[4:6])
        # Whether LMCache's peers find their way back to each other after a restart is up to them.
        print(f"right, those: {hits(late)} hits, {'every byte right' if same else 'WRONG BYTES'}")
        if not same or hits(read) != 12 or hits(again) != 12:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
