"""An engine as LMCache's server sees it: the client of LMCache's own benchmark, told what to do line by line.

Each line of the input is a JSON list, and is answered with a line of JSON::

    ["store", URL, FIRST, COUNT, KV_SHAPE, TP_SIZE]     store the tokens of so many sequences
    ["read", URL, FIRST, COUNT, KV_SHAPE, TP_SIZE]      look them up, clear where they go, and read

What is not there when it is read is stored, as an engine does once it has computed it. The answer has for
each sequence its chunks, the hits, and the checksums of what was stored or read, chunk by chunk.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

SEQUENCE_TOKENS = 1024


def serve(verb: str, url: str, first: int, count: int, shape: str, tp_size: int) -> dict[int, Any]:
    """Carry out one line."""
    config = BenchConfig(
        rpc_url=url,
        http_url="",
        mode="cpu",
        transfer_mode="auto",
        tp_size=tp_size,
        use_mla=False,
        num_tokens=SEQUENCE_TOKENS,
        kvcache_shape_spec=shape,
        num_blocks=1024,
        block_size=16,
    )
    client = ServerBenchClient(config, lambda text: print(text, file=sys.stderr))
    client.start()
    try:
        return {number: one_sequence(client, verb, number) for number in range(first, first + count)}
    finally:
        client.close()


def one_sequence(client: ServerBenchClient, verb: str, number: int) -> dict[str, Any]:
    """Look it up; store it, or read what there is and store the rest."""
    request = client.create_request(number, f"{verb}-{number}", verb)
    assert request is not None
    lookup = client.lookup(request)
    assert lookup.succeeded
    hit_tokens = lookup.hit_chunks * request.chunk_size if verb == "read" else 0
    if hit_tokens:
        client.zero_destination(request, 0, hit_tokens)
        read = client.retrieve(request, 0, hit_tokens)
        assert read is not None
        assert read.succeeded, read
    checksums = client.compute_checksums(request, 0, hit_tokens or request.num_full_tokens)
    stored = client.store(request, hit_tokens, request.num_full_tokens - hit_tokens)
    assert stored is None or stored.succeeded, stored
    client.end_session(request)
    return {"chunks": request.total_chunks, "hits": lookup.hit_chunks, "checksums": checksums or []}


def main() -> None:
    """Until the input ends."""
    for line in sys.stdin:
        print(json.dumps(serve(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
