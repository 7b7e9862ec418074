"""Available memory or disk space for files in a directory: limits of the file system, the cgroups and the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dataplane.core.file_locks import file_system

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_UNLIMITED = 1 << 60
"""A larger limit means no limit: cgroup v1 then shows a number near 2^63."""


@dataclass(frozen=True, kw_only=True)
class AvailableMemory:
    """`free_bytes` are available; `limit` is a readable description of the limit."""

    free_bytes: int
    limit: str


def available_memory(directory: str | Path) -> AvailableMemory:
    """Return the tightest limit: free space of the file system and, for in-memory file systems, the limits of the
    cgroups and the machine."""
    stat = os.statvfs(directory)
    limits = [AvailableMemory(free_bytes=stat.f_bavail * stat.f_frsize, limit="free space of its file system")]
    if file_system(directory) in MEMORY_FILE_SYSTEMS:
        limits += memory_limits()
    return min(limits, key=lambda limit: limit.free_bytes)


def memory_limits() -> list[AvailableMemory]:
    """Return the available memory under each limit of the cgroups and the machine."""
    return [*cgroup_limits(), *_machine_limit()]


def cgroup_limits() -> list[AvailableMemory]:
    """Return the available memory of each cgroup that contains this process; empty without limits. Supports cgroup v2
    and v1."""
    limits: list[AvailableMemory] = []
    for line in _read_lines(PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)  # number of the hierarchy, controllers, path of the cgroup
        if controllers == "":  # cgroup v2, which a hybrid setup mounts at "unified"
            limits += _limits_upwards(CGROUP_ROOT, path, _v2_limit)
            limits += _limits_upwards(CGROUP_ROOT / "unified", path, _v2_limit)
        elif "memory" in controllers.split(","):
            limits += _limits_upwards(CGROUP_ROOT / "memory", path, _v1_limit)
    return limits


def _limits_upwards(root: Path, path: str, read: Callable[[Path], AvailableMemory | None]) -> list[AvailableMemory]:
    """Return the limits of the cgroups from `path` up to `root`: each cgroup limits all cgroups below it. A container
    may see only the upper ones. read: returns the limit of the cgroup in a folder, or None."""
    relative = PurePosixPath(path.lstrip("/"))
    limits = [read(root / folder) for folder in (relative, *relative.parents)]
    return [limit for limit in limits if limit is not None]


def _v2_limit(folder: Path) -> AvailableMemory | None:
    return _limit_in(folder, "memory.max", "memory.current", ("inactive_file", "active_file"))


def _v1_limit(folder: Path) -> AvailableMemory | None:
    return _limit_in(
        folder, "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    )


def _limit_in(folder: Path, limit_name: str, usage_name: str, reclaimable: tuple[str, ...]) -> AvailableMemory | None:
    """Return the available memory of one cgroup, or None if it has no limit that this process can read. reclaimable:
    the keys in its memory.stat of memory that the kernel reclaims on demand."""
    limit = _read_number(folder / limit_name)
    usage = _read_number(folder / usage_name)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    stat = dict(line.split()[:2] for line in _read_lines(folder / "memory.stat"))
    # Page cache counts as used, but the kernel reclaims it on demand. These two lists exclude shared memory.
    cache = sum(int(stat.get(name, 0)) for name in reclaimable)
    free = max(0, limit - max(0, usage - cache))
    return AvailableMemory(free_bytes=free, limit=f"the cgroup's memory limit of {limit:,} bytes")


def _machine_limit() -> list[AvailableMemory]:
    """Return the available memory of the machine; empty if the kernel does not show it."""
    for line in _read_lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            return [AvailableMemory(free_bytes=int(line.split()[1]) * 1024, limit="memory available on this machine")]
    return []


def _read_number(path: Path) -> int | None:
    """Return the number in a kernel file; None if it is missing or has a word, such as "max"."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a kernel file; empty if it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
