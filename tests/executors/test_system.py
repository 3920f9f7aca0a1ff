"""Limits of the machine and of control groups, read from made-up /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from caudal.executors.system import available_memory, lockable_memory, usable_cpus

MIB = 1 << 20
GIB = 1 << 30


class Machine:
    """Files below a folder, and the functions under test on them."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")

    def write(self, path: str, content: str | int) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")

    @property
    def memory(self) -> int:
        return available_memory(self.proc, self.cgroups)

    @property
    def cpus(self) -> int:
        return usable_cpus(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    return Machine(tmp_path)


def v2_memory(machine: Machine, group: str, limit: int | str, used: int, cache: int = 0) -> None:
    machine.write(f"{group}/memory.max", limit)
    machine.write(f"{group}/memory.current", used)
    machine.write(f"{group}/memory.stat", f"anon 5\ninactive_file {cache}\nactive_file {cache}\nfile_dirty 7")


def test_without_control_groups_the_machine_decides(machine: Machine):
    assert machine.memory == 8 * GIB
    assert machine.cpus == 16


def test_a_system_that_does_not_tell(tmp_path: Path):
    assert available_memory(tmp_path, tmp_path) == 1 << 62


def test_version_2_limits_of_the_own_group_and_of_those_above(machine: Machine):
    machine.write("proc/self/cgroup", "0::/system.slice/caudal.service")
    v2_memory(machine, "cgroup/system.slice/caudal.service", 3 * GIB, GIB, 64 * MIB)
    assert machine.memory == 2 * GIB + 128 * MIB  # the page cache gives way
    v2_memory(machine, "cgroup/system.slice", 2 * GIB, GIB)
    assert machine.memory == GIB
    v2_memory(machine, "cgroup", "max", 7 * GIB)  # the root has no such files in truth; "max" is no limit
    assert machine.memory == GIB
    machine.write("cgroup/system.slice/caudal.service/memory.high", GIB + 512 * MIB)
    assert machine.memory == 512 * MIB + 128 * MIB
    v2_memory(machine, "cgroup/system.slice", GIB, 2 * GIB)  # over the limit
    assert machine.memory == 0
    v2_memory(machine, "cgroup/other.slice", 1, 1)
    v2_memory(machine, "cgroup/system.slice", "max", GIB)
    assert machine.memory == 512 * MIB + 128 * MIB


def test_version_2_in_a_container_whose_path_is_not_there(machine: Machine):
    machine.write("proc/self/cgroup", "0::/docker/0123456789ab")
    v2_memory(machine, "cgroup", GIB, 0)
    machine.write("cgroup/cpu.max", "300000 100000")
    assert (machine.memory, machine.cpus) == (GIB, 3)


def test_a_path_outside_of_the_namespace_is_not_followed(machine: Machine):
    machine.write("proc/self/cgroup", "0::/../../elsewhere")
    v2_memory(machine, "elsewhere", 1, 1)
    v2_memory(machine, "cgroup", GIB, 0)
    assert machine.memory == GIB


@pytest.mark.parametrize("mount", ["memory", "hugetlb,memory"])
def test_version_1_memory(machine: Machine, mount: str):
    machine.write("proc/self/cgroup", "12:cpuset:/a\n5:hugetlb,memory:/user/a\n1:name=systemd:/a\n0::/a")
    group = f"cgroup/{mount}/user/a"
    machine.write(f"{group}/memory.limit_in_bytes", 9223372036854771712)  # no limit
    machine.write(f"{group}/memory.usage_in_bytes", GIB)
    assert machine.memory == 8 * GIB
    machine.write(f"{group}/memory.limit_in_bytes", 2 * GIB)
    machine.write(f"{group}/memory.stat", f"inactive_file 1\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}")
    assert machine.memory == GIB + 2 * MIB
    machine.write(f"cgroup/{mount}/user/memory.limit_in_bytes", GIB)
    machine.write(f"cgroup/{mount}/user/memory.usage_in_bytes", GIB // 2)
    assert machine.memory == GIB // 2


def test_version_1_cpus(machine: Machine):
    machine.write("proc/self/cgroup", "3:cpu,cpuacct:/a/b")
    machine.write("cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", -1)
    machine.write("cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", 100000)
    assert machine.cpus == 16
    machine.write("cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", 250000)
    machine.write("cgroup/cpu,cpuacct/a/cpu.cfs_period_us", 100000)
    assert machine.cpus == 2


def test_version_2_cpus_of_the_own_group_and_of_those_above(machine: Machine):
    machine.write("proc/self/cgroup", "0::/a/b")
    machine.write("cgroup/a/b/cpu.max", "max 100000")
    assert machine.cpus == 16
    machine.write("cgroup/a/cpu.max", "450000 100000")
    assert machine.cpus == 4
    machine.write("cgroup/a/b/cpu.max", "50000 100000")
    assert machine.cpus == 1  # a part of one is one


def test_mixed_versions(machine: Machine):
    machine.write("proc/self/cgroup", "2:memory:/a\n0::/a")
    machine.write("cgroup/unified/a/cpu.max", "200000 100000")
    machine.write("cgroup/memory/a/memory.limit_in_bytes", GIB)
    machine.write("cgroup/memory/a/memory.usage_in_bytes", 0)
    assert machine.cpus == 2
    assert machine.memory == GIB


def test_lockable_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * MIB, GIB))
    machine.write("proc/self/status", "Name:\tx\nCapEff:\t0000000000000000")
    assert lockable_memory(machine.proc) == 8 * MIB
    machine.write("proc/self/status", "CapEff:\t0000000000004000")
    assert lockable_memory(machine.proc) == 1 << 62
    machine.write("proc/self/status", "CapEff:\t00000000ffffbfff")  # all but that one
    assert lockable_memory(machine.proc) == 8 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert lockable_memory(machine.proc) == 1 << 62


def test_the_real_machine():
    assert available_memory() > 0
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)
