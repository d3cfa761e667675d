"""The model of a drive: the known result for random writes, the best case, discards, and its invariant."""

from __future__ import annotations

import math

import numpy as np
import pytest

from blockkv.bench.ftl import LEAST_FREE_UNITS, Ftl
from blockkv.errors import InvalidArgument

UNIT_PAGES = 128
UNIT_BYTES = UNIT_PAGES * 4096


def drive(units: int, over_provisioning: float) -> Ftl:
    return Ftl(units * UNIT_BYTES, over_provisioning, UNIT_BYTES)


def fill(ftl: Ftl) -> None:
    ftl.write(0, ftl.logical_pages * ftl.page_bytes)


def random_writes(ftl: Ftl, pages: int, rng: np.random.Generator) -> None:
    """Uniform; eight distinct pages at a time, which among tens of thousands is as good as one."""
    for _ in range(pages // 8):
        ftl.write_pages(rng.choice(ftl.logical_pages, 8, replace=False, shuffle=False))


def analytic(flash_per_data: float) -> float:
    """Desnoyers 2014: A = a / (a + W(-a e^-a)); the Lambert function by Newton's method."""
    argument = -flash_per_data * math.exp(-flash_per_data)
    w = -0.5
    for _ in range(100):
        w -= (w * math.exp(w) - argument) / (math.exp(w) * (1 + w))
    return flash_per_data / (flash_per_data + w)


def test_the_analytic_result_is_the_published_one() -> None:
    """The same equation solved for A, without the Lambert function: 1 - 1/A = e^(-a / A)."""
    for flash_per_data in (1.07, 1.15, 1.28, 1.6):
        amplification = analytic(flash_per_data)
        assert 1 - 1 / amplification == pytest.approx(math.exp(-flash_per_data / amplification))


@pytest.mark.parametrize("over_provisioning", [0.15, 0.3, 0.6])
def test_uniform_random_writes_amplify_as_the_analysis_says(over_provisioning: float) -> None:
    ftl = drive(150, over_provisioning)
    rng = np.random.default_rng(5)
    fill(ftl)
    random_writes(ftl, 3 * ftl.logical_pages, rng)
    ftl.reset_counters()
    random_writes(ftl, 3 * ftl.logical_pages, rng)
    ftl.check()
    usable_pages = (ftl.unit_count - LEAST_FREE_UNITS) * ftl.unit_pages
    assert ftl.write_amplification == pytest.approx(analytic(usable_pages / ftl.logical_pages), rel=0.03)


def test_sequential_overwriting_costs_nothing() -> None:
    ftl = drive(50, 0.1)
    for _ in range(5):
        for first in range(0, ftl.logical_pages, 100):
            ftl.write(first * 4096, min(100, ftl.logical_pages - first) * 4096)
    assert ftl.write_amplification == 1
    assert ftl.erase_count > 3 * 50
    ftl.check()


def test_what_was_discarded_is_not_written_again() -> None:
    rng = np.random.default_rng(6)
    amplification = {}
    for discarded in (False, True):
        ftl = drive(60, 0.1)
        fill(ftl)
        half = ftl.logical_pages // 2
        if discarded:
            ftl.discard(half * 4096, (ftl.logical_pages - half) * 4096)
        for _ in range(4 * half // 8):
            ftl.write_pages(rng.choice(half, 8, replace=False))
        ftl.check()
        amplification[discarded] = ftl.write_amplification
    assert amplification[True] < 1.2 < amplification[False]


def brief_and_lasting(streams: int) -> Ftl:
    """Two rings written over by turns, of 4 units and of all the rest; in two streams or in one."""
    ftl = Ftl(60 * UNIT_BYTES, 0.1, UNIT_BYTES, streams=streams)
    brief_pages, step = 4 * UNIT_PAGES, 16
    brief, lasting = 0, brief_pages
    for number in range(3 * ftl.logical_pages // step):
        if number == 2 * ftl.logical_pages // step:
            ftl.reset_counters()
        ftl.write_pages(np.arange(brief, brief + step), streams - 1)
        ftl.write_pages(np.arange(lasting, lasting + step))
        brief = (brief + step) % brief_pages
        lasting = lasting + step if lasting + step < ftl.logical_pages else brief_pages
    ftl.check()
    return ftl


def test_what_does_not_die_together_costs_nothing_apart() -> None:
    together, apart = brief_and_lasting(1), brief_and_lasting(2)
    assert together.unit_count == apart.unit_count
    assert apart.write_amplification == 1
    assert together.write_amplification > 1.5


def test_a_stream_goes_on_in_a_unit_of_its_own() -> None:
    ftl = Ftl(8 * UNIT_BYTES, 0.5, UNIT_BYTES, streams=3)
    for stream in (0, 1, 2, 1, 0):
        ftl.write(stream * UNIT_BYTES, UNIT_BYTES // 2, stream)
    ftl.check()
    assert sorted(ftl._valid[ftl._valid > 0]) == [UNIT_PAGES // 2] * 3
    with pytest.raises(IndexError):
        ftl.write(0, 4096, 3)


def test_a_part_of_a_page_is_written_whole_and_not_discarded() -> None:
    ftl = drive(4, 0.1)
    ftl.write(4095, 2)
    assert ftl.host_pages == 2
    ftl.discard(1, 4096 + 4095)
    assert ftl.discarded_pages == 1
    ftl.check()


def test_counts_are_bytes_since_the_last_reset() -> None:
    ftl = drive(10, 0.1)
    fill(ftl)
    ftl.reset_counters()
    ftl.write(0, 3 * 4096)
    assert ftl.counters() == {
        "host_bytes": 3 * 4096,
        "copied_bytes": 0,
        "discarded_bytes": 0,
        "erase_count": 0,
        "write_amplification": 1.0,
    }


def test_a_drive_without_over_provisioning_goes_on() -> None:
    ftl = drive(20, 0.0)
    rng = np.random.default_rng(7)
    fill(ftl)
    random_writes(ftl, ftl.logical_pages, rng)
    ftl.check()
    assert ftl.write_amplification > 2


@pytest.mark.parametrize(
    ("logical_bytes", "erase_unit_bytes", "over_provisioning"),
    [
        (UNIT_BYTES, 4096, 0.1),
        (UNIT_BYTES, 10_000, 0.1),
        (4096, UNIT_BYTES, 0.1),
        (UNIT_BYTES, UNIT_BYTES, -1),
    ],
)
def test_what_is_no_drive_is_refused(
    logical_bytes: int, erase_unit_bytes: int, over_provisioning: float
) -> None:
    with pytest.raises(InvalidArgument, match="bytes"):
        Ftl(logical_bytes, over_provisioning, erase_unit_bytes)
