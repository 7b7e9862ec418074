"""Checks of this machine: memory, files, ports."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator

from dataplane.cli.checks.finding import Finding, run_check
from dataplane.cli.formatting import counted, readable
from dataplane.config import MIB
from dataplane.core.addresses import boot_id, reachable_host
from dataplane.core.memory_limits import MEMORY_FILE_SYSTEMS, cgroup_limits
from dataplane.core.ports import require_free_port
from dataplane.core.private_dir import leave, own_directory, own_path

ENOUGH_BYTES = 256 * MIB
"""Minimum of free shared memory and free memory for a passing check."""
ENOUGH_FILES = 4096
"""Minimum open-file limit. A service has a few open files per session, a client about fifteen."""
_REACH_S = 5.0
"""Time limit of a connection over loopback."""
_NAMED = 3
"""Number of leftover arenas that a finding names."""
_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""
_OTHER_DIRECTORY = "pass an existing, writable local directory with --arena-dir"
_MORE_SHM = (
    "enlarge it: `mount -o remount,size=16g /dev/shm`, in a container `docker run --shm-size=16g` or an emptyDir of "
    "medium Memory at /dev/shm; or pass another local directory with --arena-dir"
)


def machine(arena_dir: str, port: int) -> Iterator[Finding]:
    """Run all checks of the machine. port: planned port of a service (0: any)."""
    yield from run_check("system", _check_system, "run it on Linux, with /proc")
    yield from run_check("shared memory", lambda: _check_shared_memory(arena_dir), _OTHER_DIRECTORY)
    yield from run_check("memory limit", _check_memory_limit, "make /proc and /sys/fs/cgroup readable")
    yield from _check_directory(arena_dir)
    yield from run_check("arenas", lambda: _check_arenas(arena_dir), _OTHER_DIRECTORY)
    yield from _check_open_files()
    yield from run_check("loopback", _check_loopback, "bring the interface up: `ip link set lo up`")
    yield from _check_ports(port)


def _check_system() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(what="system", found=f"{sys.platform}, Python {version}, boot {boot_id()[:8]}")


def _check_shared_memory(arena_dir: str) -> Iterator[Finding]:
    """Check the free space of the file system that has the arenas."""
    from dataplane.core.file_locks import file_system
    from dataplane.storage.arena import default_capacity
    from dataplane.storage.capacity import growing_arenas

    usage = os.statvfs(arena_dir)
    total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    kind = file_system(arena_dir)
    found = f"{arena_dir} ({kind}): {readable(free)} free of {readable(total)}"
    if free < ENOUGH_BYTES:
        yield Finding(what="shared memory", found=f"{found}: too little", mend=_MORE_SHM)
    else:
        memory = "" if kind in MEMORY_FILE_SYSTEMS else ", not memory: slower, but it survives a machine crash"
        promised = sum(growing_arenas(arena_dir).values())
        others = f"; running storage units may still take {readable(promised)}" if promised else ""
        default = readable(default_capacity(arena_dir, promised_bytes=promised))
        found += f"{memory}{others}; the default capacity of a unit is {default}"
        yield Finding(what="shared memory", found=found)


def _check_memory_limit() -> Iterator[Finding]:
    """Check the free memory under the tightest cgroup limit of this process."""
    limits = cgroup_limits()
    if not limits:
        yield Finding(what="memory limit", found="no cgroup limits this process")
        return
    tightest = min(limits, key=lambda limit: limit.free_bytes)
    found = f"{readable(tightest.free_bytes)} left of {tightest.limit}, which includes arenas"
    mend = "" if tightest.free_bytes >= ENOUGH_BYTES else "raise the container's memory limit, or stop processes in it"
    yield Finding(what="memory limit", found=found, mend=mend)


def _check_directory(arena_dir: str) -> Iterator[Finding]:
    """Check that this user can create a private directory for arenas, then leave it."""
    what = "this user's directory"
    try:
        path = own_directory(arena_dir)
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        leave(arena_dir)  # removes it if it is empty
    except PermissionError as error:
        yield Finding(what=what, found=str(error), mend="remove it, or make this user the owner of it and its parents")
    except OSError as error:
        yield Finding(what=what, found=str(error), mend=_OTHER_DIRECTORY)
    else:
        yield Finding(what=what, found=f"{path}, mode {mode:04o}")


def _check_arenas(arena_dir: str) -> Iterator[Finding]:
    """Check for arenas that killed storage units left in the directory."""
    from dataplane.storage.arena import leftovers

    folder = own_path(arena_dir)
    left = leftovers(folder) if folder.is_dir() else []
    if not left:
        yield Finding(what="arenas", found=f"{folder}: no leftover arenas of killed storage units")
        return
    nbytes = 0
    for path in left:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            nbytes += path.stat().st_blocks * _BLOCK_BYTES
    names = ", ".join(path.name for path in left[:_NAMED]) + (", ..." if len(left) > _NAMED else "")
    found = f"{folder}: killed storage units left {counted(len(left), 'arena')} ({readable(nbytes)}): {names}"
    mend = "the next storage unit that starts there removes them (`tq serve`, or `tq doctor` without an address)"
    yield Finding(what="arenas", found=found, mend=mend)


def _check_open_files() -> Iterator[Finding]:
    """Check the hard limit of open files, up to which a service raises its own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard_text = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    found = f"limit {soft:,} per process, hard limit {hard_text} (tq serve raises its limit by itself)"
    low = hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES
    mend = "raise it: `ulimit -Hn 65536`, LimitNOFILE= of systemd, or docker run --ulimit nofile=65536" if low else ""
    yield Finding(what="open files", found=found, mend=mend)


def _check_ports(port: int) -> Iterator[Finding]:
    """Check that the ports `port` and `port` + 1 are free, or for port 0 that a service can listen at all."""
    host = "127.0.0.1"
    try:
        for number in (port, port + 1) if port else (0,):  # 0: the system chooses a free port
            require_free_port(host, number)
    except OSError as error:
        yield Finding(
            what="ports",
            found=str(error),
            mend=f"stop the process that listens there (`ss -ltnp 'sport = :{port}'`), or choose other ports",
        )
        return
    found = f"{port} and {port + 1} are free" if port else "can listen on loopback"
    try:
        found += f"; other hosts would use the address {reachable_host('0.0.0.0')}"
    except (OSError, ValueError) as error:
        found += f"; {error}"
    yield Finding(what="ports", found=found)


def _check_loopback() -> Iterator[Finding]:
    """Connect over loopback: listening alone also works on an interface that is down."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname(), timeout=_REACH_S).close()
    yield Finding(what="loopback", found="a connection to 127.0.0.1 works")
