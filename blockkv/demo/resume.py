"""Stage two of the demo: a process that stores its KV cache is killed, another one goes on from it.

The uninterrupted run, the killed run and the resuming run are three processes. Equal means equal bytes of
every logit at every step from the end of the restored prefix on. Needs neither torch nor transformers in
this process. Not here: what the processes do (`blockkv.demo.worker`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blockkv.demo.worker import WorkerOptions
from blockkv.errors import BlockKVError

LOGIT_BYTES = 4
VOCABULARY_COUNT = 256

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, done, total)."""


class WorkerFailedError(BlockKVError):
    """A process of the demo ended in another way than it should. The message holds its last words."""


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """What to prefill and when to kill. Counts are in tokens, except `layers` and `threads`."""

    prompt_tokens: int = 5000
    chunk_tokens: int = 256
    kill_after_tokens: int = 4096
    generate_tokens: int = 24
    layers: int = 8
    feed_forward: int = 2816
    threads: int = 0
    """Compute threads of each process; 0: one per core this process may use."""
    kill_delay_s: float = 0.4
    """From the last awaited durable chunk to the kill: the process is then deep in its next work."""


class _Worker:
    """A child process and the events it reports. Leaving the context kills it if it still runs."""

    def __init__(self, options: WorkerOptions) -> None:
        self.role = options.role
        package_root = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
            # A thread count chosen anew at run time would choose other kernels and other roundings.
            "MKL_DYNAMIC": "FALSE",
            "OMP_DYNAMIC": "FALSE",
            # Threads that spin while they wait take the cores from whoever else has work on this machine.
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self._errors = Path(options.logits_path).with_suffix(".stderr")
        with self._errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "blockkv.demo.worker", options.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """What the worker reports, until it closes its output. Raises WorkerFailedError when it says so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "failed":
                raise WorkerFailedError(
                    f"the {self.role} process failed: {event['type']}: {event['message']}"
                )
            yield event

    def failed(self, expected: str) -> WorkerFailedError:
        """The error to raise when the output ended without `expected`."""
        code = self.process.wait()
        words = self._errors.read_text(errors="replace").strip().splitlines()
        last = words[-1] if words else "it wrote nothing to stderr"
        return WorkerFailedError(
            f"the {self.role} process ended with code {code} before it reported {expected!r}: {last}"
        )


def _run_to_end(options: WorkerOptions, progress: Progress, label: str) -> dict[str, Any]:
    done: dict[str, Any] | None = None
    total = options.prompt_tokens + options.generate_tokens
    with _Worker(options) as worker:
        progress(f"{label}: loading the model", 0, total)
        for event in worker.events():
            if event["event"] == "prefill":
                progress(f"{label}: prefill", event["tokens"], total)
            elif event["event"] == "token":
                progress(f"{label}: generating", options.prompt_tokens + event["count"], total)
            elif event["event"] == "done":
                done = event
            elif event["event"] == "ready":
                parameters, digest = event["parameters"], event["model_digest"]
        if done is None or worker.process.wait() != 0:
            raise worker.failed("done")
    return {**done, "parameters": parameters, "model_digest": digest}


def _run_and_kill(options: WorkerOptions, plan: ResumeOptions, progress: Progress) -> dict[str, Any]:
    """Run the writer until enough is durable, then SIGKILL it at work; what it had reported by then."""
    awaited = plan.kill_after_tokens // plan.chunk_tokens
    durable: set[int] = set()
    with _Worker(options) as worker:
        progress("writer: loading the model", 0, plan.kill_after_tokens)
        events = worker.events()
        for event in events:
            if event["event"] == "durable":
                durable.add(event["chunk"])
                progress(
                    "writer: durable", min(len(durable), awaited) * plan.chunk_tokens, plan.kill_after_tokens
                )
            if durable.issuperset(range(awaited)):
                break
        else:
            raise worker.failed("durable")
        time.sleep(plan.kill_delay_s)
        if worker.process.poll() is not None:
            raise worker.failed("killed")
        worker.process.send_signal(signal.SIGKILL)
        code = worker.process.wait()
        # Reports that were already in the pipe are promises too.
        durable.update(event["chunk"] for event in events if event["event"] == "durable")
    if code != -signal.SIGKILL:
        raise WorkerFailedError(f"the writer process ended with code {code}, not by SIGKILL")
    return {"durable_chunks": len(durable), "durable_tokens": len(durable) * plan.chunk_tokens}


def resume_after_kill(
    store_path: str, plan: ResumeOptions, scratch: Path, progress: Progress
) -> dict[str, Any]:
    """Store, kill, resume, compare. `scratch` is an existing folder for the logits.

    Returns the figures of all three runs; `identical` says whether every compared logit was equal to the
    last bit, `durable_chunks_lost` how many chunks reported durable the new process did not get back.
    Raises WorkerFailedError when a process did not do its part.
    """
    common = WorkerOptions(
        role="",
        store_path=store_path,
        logits_path="",
        prompt_tokens=plan.prompt_tokens,
        chunk_tokens=plan.chunk_tokens,
        generate_tokens=plan.generate_tokens,
        layers=plan.layers,
        feed_forward=plan.feed_forward,
        threads=plan.threads or len(os.sched_getaffinity(0)),
    )
    roles = {
        role: replace(common, role=role, logits_path=str(scratch / f"{role}.logits"))
        for role in ("reference", "writer", "resumer")
    }
    reference = _run_to_end(roles["reference"], progress, "uninterrupted run")
    writer = _run_and_kill(roles["writer"], plan, progress)
    resumer = _run_to_end(roles["resumer"], progress, "resumed run")

    restored = resumer["restored_chunks"]
    row_bytes = VOCABULARY_COUNT * LOGIT_BYTES
    expected = Path(roles["reference"].logits_path).read_bytes()[restored * row_bytes :]
    actual = Path(roles["resumer"].logits_path).read_bytes()
    differing = sum(
        expected[offset : offset + row_bytes] != actual[offset : offset + row_bytes]
        for offset in range(0, max(len(expected), len(actual)), row_bytes)
    )
    restorable = (plan.prompt_tokens - 1) // plan.chunk_tokens
    prefill_s = reference["prefill_end_s"][restored - 1] if restored else 0.0
    restore_s = resumer["lookup_s"] + resumer["get_s"] + resumer["rebuild_s"]
    return {
        "model": {
            "parameters": reference["parameters"],
            "digest": reference["model_digest"],
            "layers": plan.layers,
        },
        "prompt_tokens": plan.prompt_tokens,
        "chunk_tokens": plan.chunk_tokens,
        "chunk_bytes": resumer["restored_bytes"] // restored if restored else 0,
        "durable_chunks_at_kill": writer["durable_chunks"],
        "durable_tokens_at_kill": writer["durable_tokens"],
        "durable_chunks_lost": max(0, min(writer["durable_chunks"], restorable) - restored),
        "restored_chunks": restored,
        "restored_tokens": restored * plan.chunk_tokens,
        "restored_bytes": resumer["restored_bytes"],
        "open_after_kill_s": resumer["open_s"],
        "lookup_s": resumer["lookup_s"],
        "get_s": resumer["get_s"],
        "rebuild_s": resumer["rebuild_s"],
        "restore_s": restore_s,
        "prefill_s": prefill_s,
        "prefill_over_restore": prefill_s / restore_s if restored else 0.0,
        "generated_tokens": plan.generate_tokens,
        "compared_steps": len(expected) // row_bytes,
        "differing_steps": differing,
        "identical": differing == 0 and restored > 0 and reference["generated"] == resumer["generated"],
    }
