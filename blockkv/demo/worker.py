"""The processes of the demo's second stage; run as `python -m blockkv.demo.worker '<json options>'`.

  reference  prefills and generates without a store: what the logits must be
  writer     prefills, stores every chunk durably, and goes on until it is killed
  resumer    finds the longest stored prefix, restores it, goes on to the end

Each prints one JSON object a line on stdout, `{"event": ...}`. A worker ends when its stdin closes, so it
cannot outlive its parent. Not here: starting, killing and comparing them (`blockkv.demo.resume`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockkv.prefix import Family, prefix_keys

if TYPE_CHECKING:
    from blockkv.demo.model import ByteLlama


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told. `role` is "reference", "writer" or "resumer"."""

    role: str
    store_path: str
    logits_path: str
    prompt_tokens: int
    chunk_tokens: int
    generate_tokens: int
    layers: int
    feed_forward: int
    threads: int

    def to_json(self) -> str:
        """The command-line argument of the worker."""
        return json.dumps(asdict(self))


def prompt_text() -> bytes:
    """The text that is prefilled; see `blockkv/data/README.md` for its source."""
    return (resources.files("blockkv") / "data" / "ecclesiastes.txt").read_bytes()


def report(event: str, **values: Any) -> None:
    """Tell the parent. One write a line: lines of two threads never mix."""
    line = json.dumps({"event": event, **values}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


class _Run:
    """One worker's model, prompt and keys, and the logits it sees."""

    def __init__(self, options: WorkerOptions) -> None:
        import torch

        from blockkv.demo.model import ByteLlama, Geometry, tokenize

        torch.set_num_threads(options.threads)
        torch.use_deterministic_algorithms(True)
        self.options = options
        self.model: ByteLlama = ByteLlama(Geometry(layers=options.layers, feed_forward=options.feed_forward))
        self.tokens = tokenize(prompt_text()[: options.prompt_tokens])
        family = Family("demo", self.model.digest, dtype="float32", layout="lkhtd")
        self.keys = prefix_keys(self.tokens, options.chunk_tokens, family)
        self.chunk_shape = self.model.geometry.chunk_shape(options.chunk_tokens)
        self.logits: list[torch.Tensor] = []
        self.prefill_end_s: list[float] = []
        report("ready", parameters=self.model.parameter_count, model_digest=self.model.digest.hex())

    def finish(self, cache: Any, start: int) -> dict[str, Any]:
        """Prefill from `start`, generate greedily, save all logits; what happened, for the parent."""
        options = self.options
        begin = time.perf_counter()
        last = None
        for _, end, last in self.model.prefill(self.tokens, cache, start, options.chunk_tokens):
            self.logits.append(last.clone())
            self.prefill_end_s.append(time.perf_counter() - begin)
            report("prefill", tokens=end)
        assert last is not None, "the last chunk is never restored, so there is one to prefill"
        begin = time.perf_counter()
        generated = []
        for _ in range(options.generate_tokens):
            generated.append(int(last.argmax()))
            last = self.model.forward(generated[-1:], cache)
            self.logits.append(last.clone())
            report("token", count=len(generated))
        generate_s = time.perf_counter() - begin
        self._save_logits()
        return {
            "prefill_end_s": self.prefill_end_s,
            "generate_s": generate_s,
            "generated": generated,
            "logits_count": len(self.logits),
        }

    def _save_logits(self) -> None:
        import torch

        Path(self.options.logits_path).write_bytes(torch.stack(self.logits).numpy().tobytes())


def _reference(run: _Run) -> None:
    report("done", **run.finish(run.model.empty_cache(), 0))


def _writer(run: _Run) -> None:
    import blockkv

    options = run.options
    with blockkv.open(options.store_path) as store:
        cache = run.model.empty_cache()
        for first, end, last in run.model.prefill(run.tokens, cache, 0, options.chunk_tokens):
            if end - first < options.chunk_tokens:
                continue
            index = first // options.chunk_tokens
            chunk = blockkv.empty(run.chunk_shape, last.dtype)
            run.model.extract(cache, first, end, chunk)

            def announce(future: Future[bool], index: int = index) -> None:
                error = future.exception()
                if error is not None:
                    report("failed", type=type(error).__name__, message=str(error))
                else:
                    report("durable", chunk=index)

            # The put overlaps the next chunk's prefill; the callback runs once it is on media.
            store.submit_put(run.keys[index], chunk, durable=True).add_done_callback(announce)
        # Still at work when the kill comes, however late that is.
        for _ in range(100_000):
            last = run.model.forward([int(last.argmax())], cache)
    report("failed", type="RuntimeError", message="the writer came to its end before it was killed")


def _resumer(run: _Run) -> None:
    import torch

    import blockkv

    options = run.options
    # The last chunk of the prompt is computed even if it is stored: its logits start the generation.
    restorable = (len(run.tokens) - 1) // options.chunk_tokens
    open_store = blockkv.open  # imports the store now, so that opening is timed alone
    begin = time.perf_counter()
    with open_store(options.store_path) as store:
        open_s = time.perf_counter() - begin

        begin = time.perf_counter()
        found = store.lookup(run.keys[:restorable])
        lookup_s = time.perf_counter() - begin

        begin = time.perf_counter()
        chunks = blockkv.empty((max(found, 1), *run.chunk_shape), torch.float32)
        hits = store.get_many(run.keys[:found], [chunks[index] for index in range(found)])
        restored = next((index for index, hit in enumerate(hits) if not hit), found)
        get_s = time.perf_counter() - begin

        begin = time.perf_counter()
        cache = run.model.restore(chunks[:restored]) if restored else run.model.empty_cache()
        rebuild_s = time.perf_counter() - begin
    report("restored", chunks=restored)
    start = restored * options.chunk_tokens
    report(
        "done",
        found_chunks=found,
        restored_chunks=restored,
        restored_bytes=chunks[:restored].nbytes,
        open_s=open_s,
        lookup_s=lookup_s,
        get_s=get_s,
        rebuild_s=rebuild_s,
        **run.finish(cache, start),
    )


def _end_with_parent() -> None:
    # Not through sys.stdin: its lock, held by a daemon thread, aborts the interpreter at exit.
    while os.read(0, 4096):
        pass
    os._exit(125)


def main() -> None:
    """Run the role named in the options given as JSON in argv[1]."""
    options = WorkerOptions(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    role = {"reference": _reference, "writer": _writer, "resumer": _resumer}[options.role]
    try:
        role(_Run(options))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        report("failed", type=type(error).__name__, message=str(error))
        raise


if __name__ == "__main__":
    main()
