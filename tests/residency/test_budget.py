"""How much memory there is, as made-up /proc and /sys say."""

from __future__ import annotations

from pathlib import Path

import pytest

import blockkv
from blockkv.residency import Estimate, MemoryBudget

MIB = 1 << 20


class Machine:
    """Files a kernel would show."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroups = root / "cgroup"
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {1000 << 10} kB\n")
        self.write("proc/pressure/memory", pressure(0.0))
        self.root = root

    def write(self, name: str, text: str) -> None:
        path = (self.proc.parent / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def estimate(self, own_mib: int = 0, ceiling_mib: int | None = None) -> Estimate:
        ceiling_bytes = None if ceiling_mib is None else ceiling_mib * MIB
        budget = MemoryBudget(ceiling_bytes, keep_free_bytes=50 * MIB, proc=self.proc, cgroups=self.cgroups)
        return budget.estimate(own_mib * MIB)


def pressure(percent: float) -> str:
    rest = "avg60=0.00 avg300=0.00 total=0"
    return f"some avg10={percent:.2f} {rest}\nfull avg10=0.00 {rest}\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_it_is_what_is_available(machine: Machine) -> None:
    assert machine.estimate() == Estimate(950 * MIB, "MemAvailable", 0.0)
    assert machine.estimate(own_mib=300).budget_bytes == 1250 * MIB
    assert machine.estimate(ceiling_mib=700) == Estimate(700 * MIB, "ceiling", 0.0)


def test_version_2_counts_every_group_above(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/service/engine\n")
    machine.write("cgroup/service/memory.max", f"{800 * MIB}\n")
    machine.write("cgroup/service/memory.high", "max\n")
    machine.write("cgroup/service/memory.current", f"{500 * MIB}\n")
    machine.write(
        "cgroup/service/memory.stat", f"anon 1\ninactive_file {100 * MIB}\nactive_file {50 * MIB}\n"
    )
    machine.write("cgroup/service/engine/memory.max", "max\n")
    machine.write("cgroup/service/engine/memory.current", f"{100 * MIB}\n")
    found = machine.estimate(own_mib=10)
    assert found.budget_bytes == (10 + 800 - (500 - 150) - 50) * MIB
    assert found.reason.startswith("cgroup")
    machine.write("cgroup/service/engine/memory.high", f"{200 * MIB}\n")
    assert machine.estimate(own_mib=10).budget_bytes == (10 + 200 - 100 - 50) * MIB
    machine.write("cgroup/service/engine/memory.high", f"{20 * MIB}\n")
    assert machine.estimate(own_mib=10).budget_bytes == 0


def test_version_1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/\n")
    machine.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("cgroup/memory/job/memory.limit_in_bytes", f"{400 * MIB}\n")
    machine.write("cgroup/memory/job/memory.usage_in_bytes", f"{150 * MIB}\n")
    machine.write(
        "cgroup/memory/job/memory.stat",
        f"inactive_file 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file {30 * MIB}\n",
    )
    assert machine.estimate().budget_bytes == (400 - 100 - 50) * MIB


def test_pressure_shrinks_what_there_is(machine: Machine) -> None:
    machine.write("proc/pressure/memory", pressure(30.0))
    assert machine.estimate(own_mib=80).reason == "MemAvailable", "others, for there is enough"
    machine.write(
        "proc/meminfo", f"MemTotal: {9000 << 10} kB\nMemAvailable: {1000 << 10} kB\nHugePages_Total: 0\n"
    )
    assert machine.estimate(own_mib=80) == Estimate(70 * MIB, "pressure", 30.0)
    machine.write("proc/pressure/memory", pressure(9.9))
    assert machine.estimate(own_mib=80).reason == "MemAvailable"


def test_pressure_in_a_group(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/service/engine\n")
    machine.write("cgroup/memory.pressure", pressure(90.0))
    assert machine.estimate(own_mib=80).pressure_percent == 0.0
    machine.write("cgroup/service/memory.pressure", pressure(40.0))
    assert machine.estimate(own_mib=80) == Estimate(70 * MIB, "pressure", 40.0)


def test_a_fixed_budget_follows_nothing(machine: Machine) -> None:
    budget = MemoryBudget(5 * MIB, follow=False, proc=machine.proc)
    assert budget.estimate(0) == Estimate(5 * MIB, "fixed", 0.0)
    for wrong in ({"follow": False}, {"ceiling_bytes": -1}):
        with pytest.raises(blockkv.InvalidArgument):
            MemoryBudget(**wrong)  # type: ignore[arg-type]


def test_this_machine_answers() -> None:
    found = MemoryBudget(keep_free_bytes=0).estimate(0)
    assert 0 < found.budget_bytes < 1 << 50
    assert found.reason
