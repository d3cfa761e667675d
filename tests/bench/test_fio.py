"""Running fio: what its report says, and that a run stays inside its range."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockkv.bench import fio
from blockkv.errors import BlockKVError, DeviceError

pytestmark = pytest.mark.requires_tool("fio")

SIZE_BYTES = 32 << 20
SHAPE = fio.Shape(128 << 10, 8)


@pytest.fixture
def image(image_dir: Path) -> Path:
    path = image_dir / "fio.img"
    path.write_bytes(b"\x5a" * SIZE_BYTES)
    return path


def test_a_run_bound_by_bytes_moves_exactly_those(image: Path) -> None:
    run = fio.run(image, "read", SHAPE, size_bytes=SIZE_BYTES, total_bytes=3 * SIZE_BYTES)
    assert run.moved_bytes == 3 * SIZE_BYTES
    assert run.gb_per_s == pytest.approx(run.moved_bytes / run.seconds / 1e9)
    assert run.gb_per_s > 0.05
    assert list(run.latency_us) == ["p50", "p99", "p99.9"]
    assert 0 < run.latency_us["p50"] <= run.latency_us["p99"] <= run.latency_us["p99.9"]


def test_a_run_bound_by_time_lasts_that_long_and_counts_its_cpu(image: Path) -> None:
    run = fio.run(image, "read", SHAPE, size_bytes=SIZE_BYTES, seconds=0.5)
    assert 0.4 < run.seconds < 5  # on a busy machine fio looks at its clock late
    # more than nothing, and no more than two cores can give
    assert 0 < run.cpu_s_per_gb * run.moved_bytes / 1e9 < 2 * run.seconds + 0.1


def test_writes_stay_inside_their_range(image: Path) -> None:
    offset_bytes = 8 << 20
    fio.run(image, "write", SHAPE, offset_bytes=offset_bytes, size_bytes=1 << 20, total_bytes=1 << 20)
    content = image.read_bytes()
    assert content[:offset_bytes] == b"\x5a" * offset_bytes
    assert content[offset_bytes : offset_bytes + (1 << 20)] != b"\x5a" * (1 << 20)
    assert content[offset_bytes + (1 << 20) :] == b"\x5a" * (SIZE_BYTES - offset_bytes - (1 << 20))


def test_an_error_of_fio_is_raised_with_its_message(image_dir: Path) -> None:
    with pytest.raises(DeviceError, match="absent"):
        fio.run(image_dir / "absent.img", "read", SHAPE, size_bytes=SIZE_BYTES, seconds=0.1)


def test_a_run_needs_one_bound(image: Path) -> None:
    with pytest.raises(BlockKVError, match="either"):
        fio.run(image, "read", SHAPE, size_bytes=SIZE_BYTES)


@pytest.mark.requires_root
def test_huge_pages_are_given_back() -> None:
    pool = Path("/proc/sys/vm/nr_hugepages")
    before = pool.read_text()
    with fio.reserved_huge_pages(8 << 20) as reserved:
        assert reserved == (int(pool.read_text()) >= 4)
    assert pool.read_text() == before


def test_shapes_read_as_people_write_them() -> None:
    assert [str(shape) for shape in fio.SHAPES] == ["128 KiB x 32", "512 KiB x 16", "1 MiB x 8"]


def test_a_verified_read_counts_what_is_not_right(image: Path) -> None:
    moved = {"size_bytes": SIZE_BYTES, "total_bytes": SIZE_BYTES}
    assert fio.run(image, "write", SHAPE, verify=True, **moved).verify_errors == 0
    assert fio.run(image, "read", SHAPE, verify=True, **moved).verify_errors == 0
    with image.open("r+b") as file:
        for request in (2, 5, 7):
            file.seek(request * SHAPE.request_bytes + 500)
            file.write(b"damage")
    assert fio.run(image, "read", SHAPE, verify=True, **moved).verify_errors == 3
