"""The identity of this process, and a check whether a process on this host still runs."""

from __future__ import annotations

import os
from pathlib import Path

from dataplane.core.addresses import boot_id
from workers.directory.wire import Process


def this_host() -> str:
    """Return a string that is equal in two processes only if they share the boot of a kernel and the pid namespace."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def this_process() -> Process:
    return Process(host=this_host(), pid=os.getpid(), started=_state(os.getpid())[1])


def has_ended(process: Process) -> bool:
    """Return whether the process has certainly ended. False for a process of another host, whose state is unknown
    here, and if this process lacks the permission to look."""
    try:
        if process.host != this_host():
            return False
        state, started = _state(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    # "Z" and "X" are dead processes. With another start time, the pid is that of another process.
    return state in "ZX" or started != process.started


def _state(pid: int) -> tuple[str, int]:
    """Return the kernel's state letter of the process, and its start time in clock ticks since the boot."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # The fields follow the command's name, which is in parentheses and may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()  # from field 3, the state; the start time is field 22 (see proc(5))
    return fields[0], int(fields[19])
