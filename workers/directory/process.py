"""This process, and whether another on this host still runs."""

from __future__ import annotations

import os
from pathlib import Path

from dataplane.core.addresses import boot_id
from workers.directory.wire import Process


def this_host() -> str:
    """Equal in two processes only if they see the same process numbers: one boot of one kernel, one pid namespace."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def this_process() -> Process:
    return Process(host=this_host(), pid=os.getpid(), started=_state(os.getpid())[1])


def has_ended(process: Process) -> bool:
    """Whether it certainly has. False for one of another host, of which nothing can be told from here,
    and where this process cannot look."""
    try:
        if process.host != this_host():
            return False
        state, started = _state(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in "ZX" or started != process.started


def _state(pid: int) -> tuple[str, int]:
    """The kernel's letter for what it does, and when it was started, in clock ticks since the boot."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
