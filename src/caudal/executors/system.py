"""What this process may use of the machine: memory, memory that it may lock, and CPUs.

Limits come from the machine and from the process's control groups: /proc/self/cgroup names its group in each
hierarchy (version 2: one for all, version 1: one for each controller), and the groups above limit it too. See
https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html. In a container the named path is
often not there, because the hierarchy's root is the container's own group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_CAP_IPC_LOCK = 14  # its number in linux/capability.h: may lock any amount of memory
_UNLIMITED = 1 << 62  # bytes; version 1 writes "no limit" as a number a little below 2^63


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that can be allocated without swapping: of the machine, or of a control group if that is less.

    On systems that do not tell (other than Linux), a large number: allocation itself then decides.
    """
    limits = [_meminfo_available(proc)]
    limits += [_available_v2(group) for group in _groups("", proc, cgroups)]
    limits += [_available_v1(group) for group in _groups("memory", proc, cgroups)]
    return min((limit for limit in limits if limit is not None), default=_UNLIMITED)


def lockable_memory(proc: Path = _PROC) -> int:
    """Bytes that this process may lock (RLIMIT_MEMLOCK), a large number with the capability CAP_IPC_LOCK."""
    import resource

    for line in _lines(proc / "self" / "status"):
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return _UNLIMITED
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def usable_cpus(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """CPUs that this process may use, at least 1: of its affinity mask, or whole ones of a control group's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas: list[tuple[str, str]] = []  # microseconds of CPU time in a period of microseconds
    for group in _groups("", proc, cgroups):
        quotas += [(words[0], words[1]) for line in _lines(group / "cpu.max") if len(words := line.split()) == 2]
    for group in _groups("cpu", proc, cgroups):
        quotas += zip(_lines(group / "cpu.cfs_quota_us"), _lines(group / "cpu.cfs_period_us"), strict=False)
    for quota, period in quotas:
        if quota.isdigit() and int(period) > 0:  # not "max" or -1: no limit
            cpus = min(cpus, int(quota) // int(period))
    return max(1, cpus)


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """The folders of this process's group and those above it, up to the root of the hierarchy of a version 1
    controller, or of version 2 for ""."""
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller:
            # Mounted under the names of all its controllers, or under the one name.
            roots = [cgroups / controllers, cgroups / controller] if controller in controllers.split(",") else []
        else:
            # Beside version 1, version 2 is mounted at `unified`.
            roots = [cgroups, cgroups / "unified"] if number == "0" and not controllers else []
        inside = ".." not in Path(path).parts  # else the group is not below what this process sees as the root
        for root in roots:
            group = root / path.lstrip("/") if inside else root
            yield from (group, *(parent for parent in group.parents if parent.is_relative_to(root)))


def _meminfo_available(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _available_v2(group: Path) -> int | None:
    # Above `high` the group is slowed down so much that it may as well stop.
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(group / name)) is not None]
    used = _number(group / "memory.current")
    if not limits or used is None:
        return None
    return max(0, min(limits) - used + _page_cache(group, ("inactive_file", "active_file")))


def _available_v1(group: Path) -> int | None:
    limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    return max(0, limit - used + _page_cache(group, ("total_inactive_file", "total_active_file")))


def _page_cache(group: Path, names: tuple[str, ...]) -> int:
    """Bytes of the page cache, which count as used but give way."""
    words = [line.split() for line in _lines(group / "memory.stat")]
    return sum(int(word[1]) for word in words if len(word) == 2 and word[0] in names)


def _number(path: Path) -> int | None:
    """The number in a file; None if it is not there or says `max`."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
