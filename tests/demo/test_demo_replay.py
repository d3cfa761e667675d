"""Traces: reading them, what they ask for, and content that cannot be mistaken."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

import blockkv
from blockkv.demo.replay import (
    BATCH_CHUNKS,
    ChunkPattern,
    Request,
    WrongContentError,
    footprint,
    read_trace,
    replay,
)
from blockkv.errors import InvalidArgument

torch = pytest.importorskip("torch")

CHUNK_BYTES = 16384


def requests_of(*hash_ids: tuple[int, ...]) -> list[Request]:
    return [Request(0, ids) for ids in hash_ids]


def test_the_shipped_trace() -> None:
    requests = read_trace(limit=1000)
    assert len(requests) == 1000
    asked = footprint(requests)
    # Counted independently of this code, from the published trace.
    assert (asked.reference_count, asked.distinct_count, asked.infinite_hit_count) == (27305, 21514, 5791)
    assert len(read_trace()) == 1024


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.xz"])
def test_a_trace_may_be_compressed(tmp_path: Path, suffix: str) -> None:
    text = json.dumps({"timestamp": 7, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}).encode()
    pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.xz": lzma.compress}[suffix]
    path = tmp_path / f"trace.{suffix}"
    path.write_bytes(pack(text + b"\n"))
    assert read_trace(path) == [Request(7, (1, 2))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no request"),
        (b"hello\n", "line 1"),
        (b'{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 1}\n', "line 2"),
        (b'{"timestamp": 1, "hash_ids": 5}\n', "line 1"),
        (b"[1]\n", "line 1"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_what_is_not_a_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=message):
        read_trace(path)


def test_a_truncated_archive_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.xz"
    path.write_bytes(lzma.compress(b'{"timestamp": 1, "hash_ids": [1]}\n' * 1000)[:-20])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(path)
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        read_trace(tmp_path / "missing")


def test_footprint_counts_prefix_hits_only() -> None:
    asked = footprint(requests_of((1, 2, 3), (1, 2, 4), (9, 2, 3)))
    assert (asked.request_count, asked.reference_count, asked.distinct_count) == (3, 9, 5)
    assert asked.infinite_hit_count == 2, "in the third request 2 and 3 do not follow a stored prefix"


def test_pattern_matches_its_own_key_only() -> None:
    pattern = ChunkPattern(CHUNK_BYTES)
    chunk = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    assert not pattern.matches("a", chunk)
    pattern.fill("a", chunk)
    assert pattern.matches("a", chunk)
    assert not pattern.matches("b", chunk)
    for position in (0, 8, CHUNK_BYTES // 2, CHUNK_BYTES - 1):
        chunk[position] ^= 1
        assert not pattern.matches("a", chunk), position
        chunk[position] ^= 1
    halves = torch.cat([chunk[CHUNK_BYTES // 2 :], chunk[: CHUNK_BYTES // 2]])
    assert not pattern.matches("a", halves), "the right words at the wrong place"


@pytest.mark.parametrize("chunk_bytes", [0, 4, 12345])
def test_pattern_needs_whole_words(chunk_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="multiple of 8"):
        ChunkPattern(chunk_bytes)


@pytest.fixture
def store_path(image_dir: Path) -> Path:
    path = image_dir / "store.img"
    blockkv.format(path, size=32 << 20, average_chunk=CHUNK_BYTES)
    return path


def test_replay_on_a_store_with_room_hits_what_an_infinite_one_would(store_path: Path) -> None:
    long = tuple(range(100, 100 + BATCH_CHUNKS + 5))
    requests = requests_of((1, 2, 3), (1, 2, 4), (9, 2, 3), long, long, (1, 2, 4))
    seen: list[tuple[int, int]] = []
    with blockkv.open(store_path) as store:
        report = replay(store, requests, CHUNK_BYTES, progress=lambda done, total: seen.append((done, total)))
    asked = footprint(requests)
    assert report.hit_count == asked.infinite_hit_count == 5 + len(long)
    assert report.put_count == asked.distinct_count
    assert report.reference_count == asked.reference_count
    assert report.checked_bytes == report.get_bytes == report.hit_count * CHUNK_BYTES
    assert report.failed_get_count == 0
    assert seen == [(number, 6) for number in range(1, 7)]
    document = json.loads(json.dumps(report.to_dict()))
    assert document["hit_rate"] == pytest.approx(report.hit_count / report.reference_count)
    assert document["put_gb_per_s"] > 0
    assert document["get_gb_per_s"] > 0


def test_replay_goes_on_when_the_store_evicts(store_path: Path) -> None:
    requests = requests_of(*((n * 50, *range(n * 50 + 1, n * 50 + 50)) for n in range(60)), tuple(range(50)))
    with blockkv.open(store_path) as store:
        report = replay(store, requests, CHUNK_BYTES)
        evicted = store.stats()["chunks_evicted"]
    assert evicted > 0, "60 x 50 chunks of 16 KiB are more than a store of 32 MiB holds"
    assert report.hit_count == 0, "the first request's chunks are long gone"
    assert report.put_count == 61 * 50


def test_replay_notices_content_that_is_not_the_keys_own(store_path: Path) -> None:
    with blockkv.open(store_path) as store:
        store.put("trace/5", torch.zeros(CHUNK_BYTES, dtype=torch.uint8))
        with pytest.raises(WrongContentError, match="trace/5"):
            replay(store, requests_of((5, 6)), CHUNK_BYTES)
