"""Comparing with peers: the arithmetic, that every byte is compared, that gets are cold, who is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import peer_compare  # noqa: E402
import peers.base  # noqa: E402
from peer_compare import OURS, Peers, Plan, Row, Sample, Worker  # noqa: E402
from peers import PEERS  # noqa: E402
from peers.base import Setup, arena, is_direct  # noqa: E402
from peers.files import BufferedFiles  # noqa: E402
from peers.worker import Work  # noqa: E402

MEBIBYTE = 1 << 20
PLAN = Plan([2 * MEBIBYTE, 32 * MEBIBYTE], 64 * MEBIBYTE, 200 * MEBIBYTE, 5, 1.0, "ordinary", 4)
FIGURES = {"gb_per_s", "gb_per_s_spread", "cpu_s_per_gb", "ratio", "ratio_spread"}


def samples(*speeds: float) -> list[Sample]:
    return [Sample(speed, 1 / speed) for speed in speeds]


def test_a_ratio_is_taken_round_by_round() -> None:
    found = peer_compare.figures(
        {OURS: {"get": samples(4, 2, 6)}, "other": {"get": samples(2, 2, 2), "put": []}}, "other", "get"
    )
    assert found == {
        "gb_per_s": 2,
        "gb_per_s_spread": [2, 2],
        "cpu_s_per_gb": 0.5,
        "ratio": 2.0,  # of 2, 1 and 3
        "ratio_spread": [1.0, 3.0],
    }


def test_there_are_no_figures_without_samples() -> None:
    assert peer_compare.figures({OURS: {"put": samples(1)}, "other": {}}, "other", "put") is None


def test_a_sample_is_bytes_over_time() -> None:
    assert Sample.of({"moved_bytes": 3e9, "wall_s": 2.0, "cpu_s": 0.6}) == Sample(1.5, pytest.approx(0.2))


def test_every_peer_comes_first_in_turn_and_none_is_left_out() -> None:
    orders = [peer_compare.turns(["a", "b", "c"], number) for number in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert orders[0] == ["a", "b", "c"]
    assert orders[1] == ["a", "c", "b"]


def test_a_set_is_whole_batches() -> None:
    assert PLAN.setup(2 * MEBIBYTE) == {
        "chunk_bytes": 2 * MEBIBYTE, "batch_chunks": 32, "chunk_count": 96, "threads": 4
    }  # fmt: skip
    assert PLAN.setup(512 * MEBIBYTE)["chunk_count"] == 1


def test_raw_peers_have_a_partition_each_and_files_share_one() -> None:
    sizes = PLAN.partition_sizes([OURS, "NIXL POSIX", "safetensors", "torch.save"])
    assert list(sizes) == [OURS, "NIXL POSIX", "files"]
    assert all(size > 2 * 192 * MEBIBYTE for size in sizes.values())
    assert PLAN.device_bytes([OURS]) == sizes[OURS] + 2 * MEBIBYTE


def test_headlines_name_what_was_measured() -> None:
    rows = [
        Row("safetensors", 2 * MEBIBYTE, figures={"get": {"ratio": 2.5}, "put": {"ratio": 9.0}}),
        Row("torch.save", 2 * MEBIBYTE, failure="no space"),
    ]
    assert peer_compare.headlines(rows) == [
        {"op": "get", "peer": "safetensors", "chunk_bytes": 2 * MEBIBYTE, "ratio": 2.5}
    ]


def test_a_peer_that_is_missing_is_named_with_what_would_bring_it() -> None:
    found = Peers({OURS: sys.executable}, {OURS: "1"}, {"NIXL POSIX": "no module"})
    document = peer_compare.document({}, PLAN, found, [])
    missing = document["peers"][1]
    assert missing["peer"] == "NIXL POSIX"
    assert missing["install"].startswith("pip install nixl")
    told = list(peer_compare.remarks([], found))
    assert told == [f"NIXL POSIX is not installed (no module); to have it: {missing['install']}"]


def test_every_peer_says_how_to_get_it() -> None:
    for peer in PEERS.values():
        assert "pip install" in peer.install()
        assert peer.what
        assert peer.place in ("partition", "directory")


# -- the worker --------------------------------------------------------------------------------------------


def request(place: Path, peer: str = "buffered files", **changes: object) -> dict[str, object]:
    setup = Setup(place, chunk_bytes=100_000, batch_chunks=3, chunk_count=7, threads=2)
    fields = {name: value for name, value in asdict(setup).items() if name != "place"}
    return {"do": "open", "peer": peer, "place": str(place), "memory": "ordinary", **fields, **changes}


class Uncached(BufferedFiles):
    """Says of files in memory that a get of them is cold."""

    def forget(self) -> None:
        """Nothing."""


class Liar(Uncached):
    """Loses one byte in the middle."""

    def read(self, path: Path, out: torch.Tensor) -> torch.Tensor:
        """Wrong."""
        super().read(path, out)
        out[len(out) // 2] ^= 1
        return out


@pytest.mark.parametrize("memory", ["ordinary", "huge"])
@pytest.mark.parametrize("name", ["O_DIRECT files", "safetensors", "torch.save", "torch.save, mmap"])
def test_files_come_back_as_they_were_put(
    image_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, memory: str
) -> None:
    monkeypatch.setattr(PEERS[name], "forget", Uncached.forget)
    work = Work(request(image_dir, name, memory=memory))
    for durable in (False, True):
        assert work.put(0, durable)["moved_bytes"] == 700_000
        assert work.get(0)["moved_bytes"] == 700_000
    work.peer.clear()
    assert not list(image_dir.iterdir())
    work.peer.close()


def test_a_store_comes_back_as_it_was_put(image_dir: Path) -> None:
    image = image_dir / "store.img"
    with image.open("wb") as file:
        file.truncate(32 * MEBIBYTE)
    work = Work(request(image, OURS))
    for durable in (False, True):
        assert work.put(0, durable)["moved_bytes"] == 700_000
        assert work.get(0)["moved_bytes"] == 700_000
    work.peer.clear()
    with pytest.raises(RuntimeError, match="missing"):
        work.get(0)
    work.peer.close()


def test_a_wrong_byte_is_noticed(image_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "liar", Liar)
    work = Work(request(image_dir, "liar"))
    work.put(0, durable=False)
    with pytest.raises(RuntimeError, match="bytes that were not put"):
        work.get(0)


def test_what_a_peer_did_not_read_is_noticed(image_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(Uncached):
        def get(self, chunks: Sequence[int], outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return super().get(chunks, outs) if chunks[0] == 0 and not self.idle else outs

        idle = False

    monkeypatch.setitem(PEERS, "idle", Idle)
    work = Work(request(image_dir, "idle", chunk_count=3))
    work.put(0, durable=False)
    work.get(0)
    Idle.idle = True
    with pytest.raises(RuntimeError, match="bytes that were not put"):
        work.get(0)


@pytest.mark.requires_root
@pytest.mark.requires_tool("mkfs.ext4")
def test_a_get_is_cold_or_refused(loop_device: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with peer_compare.file_system(loop_device(64 * MEBIBYTE)) as directory:
        work = Work(request(directory))
        work.put(0, durable=False)
        work.get(0)  # raises unless nothing of the files is in the page cache
        monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: None)
        monkeypatch.setattr(peers.base, "drop_every_cache", lambda: None)
        with pytest.raises(OSError, match="still in the page cache"):
            work.get(0)
        work.peer.close()


def test_time_counts_for_every_repetition(image_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "uncached", Uncached)
    work = Work(request(image_dir, "uncached"))
    done = work.put(0.05, durable=False)
    assert done["wall_s"] >= 0.05
    assert done["moved_bytes"] % 700_000 == 0


def test_an_arena_is_fit_for_direct_io() -> None:
    tensors = arena(3, 100_000)
    assert all(tensor.data_ptr() % 4096 == 0 and len(tensor) == 100_000 for tensor in tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [int(tensor[0]) for tensor in tensors] == [1, 2, 3]
    assert not is_direct(tensors[0])  # its length is no multiple of a page
    assert is_direct(arena(1, 8192)[0])


def test_a_worker_that_dies_says_why(tmp_path: Path) -> None:
    worker = Worker(sys.executable, tmp_path / "log")
    with pytest.raises(peer_compare.PeerFailedError, match="nowhere: No such file"):
        worker.ask(**request(tmp_path / "nowhere", OURS))
    worker.stop()


def test_a_python_without_the_tools_is_told(tmp_path: Path) -> None:
    worker = Worker("/bin/false", tmp_path / "log")
    with pytest.raises(peer_compare.PeerFailedError, match="ended with 1"):
        worker.ask(do="probe")
    worker.stop()


# -- the tool ----------------------------------------------------------------------------------------------


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup", "addpart", "delpart", "mkfs.ext4")
def test_the_tool_compares_on_one_device(tmp_path: Path) -> None:
    wanted = ["buffered files", "safetensors", "O_DIRECT files", "NIXL POSIX"]
    plot = tmp_path / "plot.png"
    command = [sys.executable, ROOT / "tools/peer_compare.py", "--paced", "--json", "--plot", plot]
    command += [
        "--chunk-mib",
        "1",
        "--batch-mib",
        "4",
        "--set-mib",
        "8",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
    ]
    for name in wanted:
        command += ["--peer", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["peers"][0]["peer"] == OURS
    assert {peer["peer"] for peer in document["peers"]} == {OURS, *wanted}
    rows = {row["peer"]: row for row in document["rows"]}
    for name in (OURS, "buffered files", "safetensors", "O_DIRECT files"):
        assert rows[name]["failure"] == ""
        for op in ("put", "get", "durable_put"):
            assert rows[name][op].keys() == FIGURES
            assert rows[name][op]["gb_per_s"] > 0
    assert rows[OURS]["get"]["ratio"] == 1
    assert {line["peer"] for line in document["headlines"]} >= {"safetensors"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "cold get" in done.stderr  # the table
    assert "blockkv-peers" not in Path("/proc/mounts").read_text()


@pytest.mark.requires_root
@pytest.mark.requires_tool("losetup", "addpart", "delpart", "mkfs.ext4")
def test_a_run_that_is_killed_leaves_nothing() -> None:
    command = [sys.executable, ROOT / "tools/peer_compare.py", "--paced", "--seconds", "60"]
    command += ["--chunk-mib", "1", "--batch-mib", "4", "--set-mib", "8", "--peer", "buffered files"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: is_mounted(process.pid))
        partition = next(line.split()[0] for line in mounts(process.pid) if "blockkv-peers." in line)
        assert not is_mounted(os.getpid())
        device = Path("/sys/block", Path(partition).name.rpartition("p")[0])
        assert (device / Path(partition).name).exists()
        process.kill()
    wait_until(lambda: not (device / "loop/backing_file").exists())
    wait_until(lambda: not (device / Path(partition).name).exists())  # the kernel's next step
    left = list(Path(tempfile.gettempdir()).glob(f"blockkv-peers.{process.pid}.*"))
    assert left
    with peer_compare.temporary_directory():
        assert not any(directory.exists() for directory in left)


def mounts(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/mounts").read_text().splitlines()


def is_mounted(process_id: int) -> bool:
    return any("blockkv-peers." in line for line in mounts(process_id))


def wait_until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.02)


def test_a_directory_of_a_process_that_lives_stays() -> None:
    with peer_compare.temporary_directory() as first, peer_compare.temporary_directory():
        assert first.exists()


def test_the_tool_wants_one_device() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/peer_compare.py", "--peer", OURS], capture_output=True, check=False
    )
    assert done.returncode == 2
