"""This machine: memory, files, ports."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator

from dataplane.cli.checks.finding import Finding, careful
from dataplane.cli.formatting import counted, readable
from dataplane.config import MIB
from dataplane.core.addresses import boot_id, reachable_host
from dataplane.core.memory_limits import MEMORY_FILE_SYSTEMS, cgroup_limits
from dataplane.core.ports import require_free_port
from dataplane.core.private_dir import leave, own_directory, own_path

ENOUGH_BYTES = 256 * MIB
"""Less shared memory or less free memory than this is of little use."""
ENOUGH_FILES = 4096
"""A service has a few open files for each session, a client about fifteen."""
_REACH_S = 5.0
_NAMED = 3
_BLOCK_BYTES = 512
"""Of `st_blocks`."""
_OTHER_DIRECTORY = "name a local directory that is there and can be written with --arena-dir"
_MORE_SHM = (
    "give it more: `mount -o remount,size=16g /dev/shm`, in a container `docker run --shm-size=16g` or an emptyDir of "
    "medium Memory at /dev/shm; or name another local directory with --arena-dir"
)


def machine(arena_dir: str, port: int) -> Iterator[Finding]:
    """All of it; port: that a service is to have (0: any)."""
    yield from careful("system", _system, "run it on Linux, with /proc")
    yield from careful("shared memory", lambda: _shared_memory(arena_dir), _OTHER_DIRECTORY)
    yield from careful("memory limit", _memory_limit, "see that /proc and /sys/fs/cgroup can be read")
    yield from _directory(arena_dir)
    yield from careful("arenas", lambda: _arenas(arena_dir), _OTHER_DIRECTORY)
    yield from _open_files()
    yield from careful("loopback", _loopback, "bring the interface up: `ip link set lo up`")
    yield from _ports(port)


def _system() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(what="system", found=f"{sys.platform}, Python {version}, boot {boot_id()[:8]}")


def _shared_memory(arena_dir: str) -> Iterator[Finding]:
    from dataplane.core.file_locks import file_system
    from dataplane.storage.arena import default_capacity

    held = os.statvfs(arena_dir)
    total, free = held.f_blocks * held.f_frsize, held.f_bavail * held.f_frsize
    kind = file_system(arena_dir)
    found = f"{arena_dir} ({kind}): {readable(free)} free of {readable(total)}"
    if free < ENOUGH_BYTES:
        yield Finding(what="shared memory", found=f"{found}: little", mend=_MORE_SHM)
    else:
        memory = "" if kind in MEMORY_FILE_SYSTEMS else ", not memory: slower, but it outlives the machine"
        default = f"; a unit takes {readable(default_capacity(arena_dir))} unless told otherwise"
        yield Finding(what="shared memory", found=found + memory + default)


def _memory_limit() -> Iterator[Finding]:
    limits = cgroup_limits()
    if not limits:
        yield Finding(what="memory limit", found="no cgroup limits this process")
        return
    least = min(limits, key=lambda limit: limit.free_bytes)
    found = f"{readable(least.free_bytes)} left of {least.limit}; arenas count"
    mend = "" if least.free_bytes >= ENOUGH_BYTES else "raise the container's memory limit, or stop what uses it"
    yield Finding(what="memory limit", found=found, mend=mend)


def _directory(arena_dir: str) -> Iterator[Finding]:
    what = "this user's directory"
    try:
        path = own_directory(arena_dir)
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        leave(arena_dir)
    except PermissionError as error:
        yield Finding(
            what=what, found=str(error), mend="remove it, or have it and what is above it belong to this user"
        )
    except OSError as error:
        yield Finding(what=what, found=str(error), mend=_OTHER_DIRECTORY)
    else:
        yield Finding(what=what, found=f"{path}, mode {mode:04o}")


def _arenas(arena_dir: str) -> Iterator[Finding]:
    """What units that were killed have left there."""
    from dataplane.storage.arena import leftovers

    folder = own_path(arena_dir)
    left = leftovers(folder) if folder.is_dir() else []
    if not left:
        yield Finding(what="arenas", found=f"{folder}: none is left of a storage unit that was killed")
        return
    nbytes = 0
    for path in left:
        with contextlib.suppress(FileNotFoundError):
            nbytes += path.stat().st_blocks * _BLOCK_BYTES
    names = ", ".join(path.name for path in left[:_NAMED]) + (", ..." if len(left) > _NAMED else "")
    found = f"{folder}: storage units that were killed left {counted(len(left), 'arena')} ({readable(nbytes)}): {names}"
    mend = "the next storage unit that starts there removes them (`tq serve`, or `tq doctor` without an address)"
    yield Finding(what="arenas", found=found, mend=mend)


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "without limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    found = f"{soft:,} for a process, {most} at most (tq serve takes what it may)"
    few = hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES
    mend = "raise it: `ulimit -Hn 65536`, LimitNOFILE= of systemd, or docker run --ulimit nofile=65536" if few else ""
    yield Finding(what="open files", found=found, mend=mend)


def _ports(port: int) -> Iterator[Finding]:
    host = "127.0.0.1"
    try:
        for number in (port, port + 1) if port else (0,):
            require_free_port(host, number)
    except OSError as error:
        yield Finding(
            what="ports",
            found=str(error),
            mend=f"stop what listens there (`ss -ltnp 'sport = :{port}'`), or choose other ports",
        )
        return
    free = f"{port} and {port + 1} are free" if port else "can listen on loopback"
    try:
        free += f"; others would call this machine {reachable_host('0.0.0.0')}"
    except (OSError, ValueError) as error:
        free += f"; {error}"
    yield Finding(what="ports", found=free)


def _loopback() -> Iterator[Finding]:
    """One can listen on an interface that is down."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname(), timeout=_REACH_S).close()
    yield Finding(what="loopback", found="this machine reaches itself at 127.0.0.1")
