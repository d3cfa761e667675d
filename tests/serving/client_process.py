"""What clients of the tests do: client_process.py SOCKET WHAT ...; they tell on stdout how far they are."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

import blockkv


def content(number: int, size_bytes: int) -> torch.Tensor:
    """Bytes that follow from a number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def hold(store: blockkv.Store, *keys: str) -> None:
    """Pin keys, lease them in a stream, and wait for the end."""
    for key in keys:
        assert store.pin(key)
    layout = blockkv.KVLayout.of("layers tokens latent", "uint8", layers=4, tokens=16, latent=1024)
    stream = store.stream(list(keys), layout=layout)
    next(iter(stream))
    print("holding", flush=True)
    time.sleep(1000)


def write(store: blockkv.Store, count: str, size_bytes: str) -> None:
    """Put chunks, from one thread each; and tell when the device has got a request."""
    before = store.stats()["device_requests"]

    def put(number: int) -> None:
        store.put(f"torn/{number}", content(number, int(size_bytes)))
        print("put", number, flush=True)

    threads = [threading.Thread(target=put, args=(number,), daemon=True) for number in range(int(count))]
    for thread in threads:
        thread.start()
    print("writing", flush=True)
    while store.stats()["device_requests"] == before:
        time.sleep(0.01)
    print("under way", flush=True)
    for thread in threads:
        thread.join()
    time.sleep(1000)


def obey(store: blockkv.Store) -> None:
    """One command a line: put KEY NUMBER BYTES, get KEY NUMBER BYTES, commit."""
    print("ready", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        try:
            if command == "put":
                answer: object = store.put(words[0], content(int(words[1]), int(words[2])), durable=True)
            elif command == "get":
                found = store.get(words[0])
                answer = found is not None and torch.equal(found, content(int(words[1]), int(words[2])))
            else:
                answer = store.commit()
            print(answer, flush=True)
        except blockkv.BlockKVError as error:
            print(type(error).__name__, flush=True)


if __name__ == "__main__":
    socket, what, *words = sys.argv[1:]
    engine = words.pop() if words and words[-1] in ("io_uring", "threads") else "auto"
    client = blockkv.open(socket, engine=engine)  # type: ignore[arg-type]
    {"hold": hold, "write": write, "obey": obey}[what](client, *words)
