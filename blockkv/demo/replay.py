"""A KV-cache trace against an open store: longest stored prefix -> get, the rest -> put, every byte checked.

Trace format (Mooncake, FAST '25): one JSON object a line with `timestamp` (ms), `input_length`,
`output_length` (tokens) and `hash_ids`, one id per 512-token prefix. A chunk's content is derived from its
key, so a chunk that is not the one asked for, or not at its place, cannot pass.
Not here: opening and formatting the store, showing progress.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import lzma
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import blockkv
from blockkv.errors import BlockKVError, InvalidArgument

if TYPE_CHECKING:
    import torch

SHIPPED_TRACE = "mooncake_conversation_1024.jsonl.xz"
BATCH_CHUNKS = 64
"""Chunks of one get_many or put_many call: enough to fill the device's queue, little enough memory."""
PERCENTILES = (50, 90, 99, 99.9)
WORD_BYTES = 8
PATTERN_SEED = 0x626C6F636B6B76


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace: its arrival in ms and the ids of its prefix chunks, in order."""

    timestamp_ms: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a trace asks for, whatever the store: counts of chunks."""

    request_count: int
    reference_count: int
    distinct_count: int
    infinite_hit_count: int
    """Prefix hits of a store that never evicts: no policy can do better."""

    @property
    def infinite_hit_rate(self) -> float:
        """Hits of a store that never evicts, per reference."""
        return self.infinite_hit_count / max(self.reference_count, 1)


class WrongContentError(BlockKVError):
    """A chunk came back with bytes that are not its own. The message names the key."""


def read_trace(path: str | Path | None = None, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of the trace at `path` (plain, .gz or .xz), or of the one that ships.

    Raises InvalidArgument naming file and line for anything that is not a trace.
    """
    name = str(path) if path is not None else SHIPPED_TRACE
    requests = []
    with _open_trace(path) as file:
        try:
            for number, line in enumerate(itertools.islice(file, limit), 1):
                requests.append(_parse(line, name, number))
        except (EOFError, lzma.LZMAError, OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{name} cannot be read as a trace: {error}") from error
    if not requests:
        raise InvalidArgument(f"{name} holds no request")
    return requests


def _open_trace(path: str | Path | None) -> io.TextIOBase:
    if path is None:
        packed = (resources.files("blockkv") / "data" / SHIPPED_TRACE).read_bytes()
        return io.StringIO(lzma.decompress(packed).decode())
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(Path(path).suffix, open)
    try:
        file: io.TextIOBase = opener(path, "rt", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"trace {path} cannot be opened: {error.strerror}") from error
    return file


def _parse(line: str, name: str, number: int) -> Request:
    try:
        fields = json.loads(line)
        return Request(int(fields["timestamp"]), tuple(int(value) for value in fields["hash_ids"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{name}, line {number}: not a request with `timestamp` and `hash_ids` ({error!r})"
        ) from error


def footprint(requests: Iterable[Request]) -> Footprint:
    """Count what `requests` ask for and what an infinite store would find."""
    seen: set[int] = set()
    request_count = reference_count = hits = 0
    for request in requests:
        request_count += 1
        reference_count += len(request.hash_ids)
        hits += sum(1 for _ in itertools.takewhile(seen.__contains__, request.hash_ids))
        seen.update(request.hash_ids)
    return Footprint(request_count, reference_count, len(seen), hits)


class ChunkPattern:
    """Content derived from keys: word i of a chunk is a fixed random word i, xor a digest of the key."""

    def __init__(self, chunk_bytes: int) -> None:
        if chunk_bytes < WORD_BYTES or chunk_bytes % WORD_BYTES:
            raise InvalidArgument(
                f"chunk size {chunk_bytes} is not a positive multiple of {WORD_BYTES} bytes"
            )
        words = chunk_bytes // WORD_BYTES
        self._base = np.random.default_rng(PATTERN_SEED).integers(0, 1 << 64, words, dtype=np.uint64)
        self._scratch = np.empty_like(self._base)

    @staticmethod
    def _key_word(key: str) -> np.uint64:
        digest = hashlib.blake2b(key.encode(), digest_size=WORD_BYTES).digest()
        return np.uint64(int.from_bytes(digest, "little"))

    def fill(self, key: str, chunk: torch.Tensor) -> None:
        """Write the content of `key` into `chunk`, a contiguous uint8 tensor of the pattern's size."""
        np.bitwise_xor(self._base, self._key_word(key), out=chunk.numpy().view(np.uint64))

    def matches(self, key: str, chunk: torch.Tensor) -> bool:
        """Whether `chunk` holds exactly the content of `key`."""
        np.bitwise_xor(chunk.numpy().view(np.uint64), self._key_word(key), out=self._scratch)
        return bool(np.array_equal(self._scratch, self._base))


@dataclass(slots=True)
class ReplayReport:
    """What a replay saw. Times are of the store's calls alone, not of filling and checking content."""

    chunk_bytes: int = 0
    request_count: int = 0
    reference_count: int = 0
    hit_count: int = 0
    """References served by the store, content checked."""
    put_count: int = 0
    """Chunks stored (a key that was still there counts as a reference, not as a put)."""
    failed_get_count: int = 0
    """Chunks that `lookup` had promised and `get` did not give."""
    checked_bytes: int = 0
    get_s: float = 0.0
    put_s: float = 0.0
    lookup_s: float = 0.0
    cpu_s: float = 0.0
    """Processor seconds of the whole process, all threads, inside the store's calls."""
    wall_s: float = 0.0
    get_call_s: list[float] = field(default_factory=list)
    """How long each `get_many` took, of up to `BATCH_CHUNKS` chunks."""
    prefix_s: list[float] = field(default_factory=list)
    """How long each request that had a stored prefix waited for it: its lookup and all its gets."""

    @property
    def hit_rate(self) -> float:
        """Hits per reference."""
        return self.hit_count / max(self.reference_count, 1)

    @property
    def get_bytes(self) -> int:
        """Bytes read from the store."""
        return self.hit_count * self.chunk_bytes

    @property
    def put_bytes(self) -> int:
        """Bytes written to the store."""
        return self.put_count * self.chunk_bytes

    def to_dict(self) -> dict[str, Any]:
        """All figures and the rates derived from them, ready for JSON. GB is 10^9 bytes."""
        moved_gb = (self.get_bytes + self.put_bytes) / 1e9
        return {
            **{
                name: getattr(self, name) for name in self.__slots__ if name not in ("get_call_s", "prefix_s")
            },
            "get_call_ms": percentiles_ms(self.get_call_s),
            "prefix_ms": percentiles_ms(self.prefix_s),
            "hit_rate": self.hit_rate,
            "get_bytes": self.get_bytes,
            "put_bytes": self.put_bytes,
            "get_gb_per_s": self.get_bytes / 1e9 / self.get_s if self.get_s else 0.0,
            "put_gb_per_s": self.put_bytes / 1e9 / self.put_s if self.put_s else 0.0,
            "cpu_s_per_gb": self.cpu_s / moved_gb if moved_gb else 0.0,
        }


def percentiles_ms(durations_s: Sequence[float]) -> dict[str, float]:
    """The median, 90, 99 and 99.9 % and the longest, in milliseconds; empty when there was none."""
    if not durations_s:
        return {}
    found = np.percentile(durations_s, PERCENTILES) * 1000
    names = [f"p{percentile:g}" for percentile in PERCENTILES]
    return {**dict(zip(names, found.tolist(), strict=True)), "max": max(durations_s) * 1000}


def replay_and_report(
    store: blockkv.Store,
    requests: Sequence[Request],
    chunk_bytes: int,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """`replay`, with what the trace asks for and what it did to the store: evictions and bytes on the
    device.
    """
    asked = footprint(requests)
    before = store.stats()
    report = replay(store, requests, chunk_bytes, progress=progress)
    after = store.stats()
    counted = {
        name: after.get(name, 0) - before.get(name, 0)
        for name in ("chunks_evicted", "bytes_evicted", "device_write_bytes", "device_read_bytes")
    }
    return {
        **report.to_dict(),
        **counted,
        "distinct_count": asked.distinct_count,
        "footprint_bytes": asked.distinct_count * chunk_bytes,
        "infinite_hit_rate": asked.infinite_hit_rate,
    }


def replay(
    store: blockkv.Store,
    requests: Sequence[Request],
    chunk_bytes: int,
    *,
    family: str = "trace",
    progress: Callable[[int, int], None] | None = None,
) -> ReplayReport:
    """Replay `requests` in order, as fast as the store allows, one request at a time.

    `chunk_bytes` stands for the KV of 512 tokens; keys are "<family>/<hash id>". `progress` gets (requests
    done, requests in all). Memory: `BATCH_CHUNKS` chunks.
    Raises WrongContentError at the first byte that is not the key's own, and whatever the store raises.
    """
    report = ReplayReport(chunk_bytes=chunk_bytes)
    pattern = ChunkPattern(chunk_bytes)
    arena = _arena(chunk_bytes)
    begin = time.perf_counter()
    for request in requests:
        keys = [f"{family}/{hash_id}" for hash_id in request.hash_ids]
        report.request_count += 1
        report.reference_count += len(keys)
        started = time.perf_counter()
        found = store.lookup(keys)
        lookup_s = time.perf_counter() - started
        report.lookup_s += lookup_s
        earlier_s = report.get_s
        for batch in _batches(keys[:found]):
            _get(store, batch, arena, pattern, report)
        if found:
            report.prefix_s.append(lookup_s + report.get_s - earlier_s)
        for batch in _batches(keys[found:]):
            _put(store, batch, arena, pattern, report)
        if progress is not None:
            progress(report.request_count, len(requests))
    report.wall_s = time.perf_counter() - begin
    return report


def _arena(chunk_bytes: int) -> list[torch.Tensor]:
    import torch

    return list(blockkv.empty((BATCH_CHUNKS, chunk_bytes), torch.uint8))


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), BATCH_CHUNKS):
        yield keys[start : start + BATCH_CHUNKS]


def _get(
    store: blockkv.Store,
    keys: Sequence[str],
    arena: list[torch.Tensor],
    pattern: ChunkPattern,
    report: ReplayReport,
) -> None:
    outs = arena[: len(keys)]
    started, cpu_started = time.perf_counter(), time.process_time()
    hits = store.get_many(keys, outs)
    report.get_call_s.append(time.perf_counter() - started)
    report.get_s += report.get_call_s[-1]
    report.cpu_s += time.process_time() - cpu_started
    for key, chunk, hit in zip(keys, outs, hits, strict=True):
        if not hit:
            report.failed_get_count += 1
            continue
        if not pattern.matches(key, chunk):
            raise WrongContentError(
                f"chunk {key!r} came back with {report.chunk_bytes} bytes that are not its own"
            )
        report.hit_count += 1
        report.checked_bytes += report.chunk_bytes


def _put(
    store: blockkv.Store,
    keys: Sequence[str],
    arena: list[torch.Tensor],
    pattern: ChunkPattern,
    report: ReplayReport,
) -> None:
    chunks = arena[: len(keys)]
    for key, chunk in zip(keys, chunks, strict=True):
        pattern.fill(key, chunk)
    started, cpu_started = time.perf_counter(), time.process_time()
    stored = store.put_many(list(zip(keys, chunks, strict=True)))
    report.put_s += time.perf_counter() - started
    report.cpu_s += time.process_time() - cpu_started
    report.put_count += sum(stored)
