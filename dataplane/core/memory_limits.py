"""How much memory or disk a file in a given directory may still take: the file system, the cgroup and the machine."""

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


@dataclass(frozen=True, kw_only=True)
class AvailableMemory:
    """`free_bytes` may still be taken; `limit` names what bounds it, for a person."""

    free_bytes: int
    limit: str


def available_memory(directory: str | Path) -> AvailableMemory:
    """The tightest of the file system's free space and, where files there are memory, of the cgroup's and machine's."""
    stat = os.statvfs(directory)
    limits = [AvailableMemory(free_bytes=stat.f_bavail * stat.f_frsize, limit="free space of its file system")]
    if file_system(directory) in MEMORY_FILE_SYSTEMS:
        limits += memory_limits()
    return min(limits, key=lambda each: each.free_bytes)


def memory_limits() -> list[AvailableMemory]:
    """What the cgroups and the machine leave this process."""
    return [*cgroup_limits(), *_machine_limit()]


def cgroup_limits() -> list[AvailableMemory]:
    """What each cgroup around this process leaves it; empty where there is no limit. Reads v2 and v1 alike."""
    found: list[AvailableMemory] = []
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _walk(CGROUP_ROOT, path, _v2_limit)
            found += _walk(CGROUP_ROOT / "unified", path, _v2_limit)
        elif "memory" in controllers.split(","):
            found += _walk(CGROUP_ROOT / "memory", path, _v1_limit)
    return found


def _walk(root: Path, path: str, read: Callable[[Path], AvailableMemory | None]) -> list[AvailableMemory]:
    """Every cgroup from `path` up to `root`: each limits all below it. In a container only the upper ones are seen."""
    inner = PurePosixPath(path.lstrip("/"))
    folders = [root / part for part in (inner, *inner.parents)]
    return [each for each in (read(folder) for folder in dict.fromkeys(folders)) if each is not None]


def _v2_limit(folder: Path) -> AvailableMemory | None:
    return _limit_in(folder, "memory.max", "memory.current", ("inactive_file", "active_file"))


def _v1_limit(folder: Path) -> AvailableMemory | None:
    return _limit_in(
        folder, "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    )


def _limit_in(folder: Path, limit_name: str, usage_name: str, reclaimable: tuple[str, ...]) -> AvailableMemory | None:
    limit, usage = _number(folder / limit_name), _number(folder / usage_name)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
    # Page cache counts as used but goes when memory is wanted. Shared memory is not on these two lists.
    cache = sum(int(stat.get(name, 0)) for name in reclaimable)
    free = max(0, limit - max(0, usage - cache))
    return AvailableMemory(free_bytes=free, limit=f"the cgroup's memory limit of {limit:,} bytes")


def _machine_limit() -> list[AvailableMemory]:
    for line in _lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            return [AvailableMemory(free_bytes=int(line.split()[1]) * 1024, limit="memory available on this machine")]
    return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    """Lines of a file of the kernel's; none where it is missing or not for us."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
