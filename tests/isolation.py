"""What a test process inherits, made the same on every machine: its own /dev/shm, and default signals for its children.

Several test processes run at the same time (`make test` starts some, another run may be beside it). Each looks for
files that its tests left in shared memory, so each has a /dev/shm of its own where the kernel allows that.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import zmq

SHARED_MEMORY = Path("/dev/shm")
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def default_signals() -> None:
    """Programs that are started in the background (`nohup make test &`) often ignore SIGINT, and so would every child
    that a test starts: exec resets a handled signal to its default, but not an ignored one."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def own_shared_memory() -> bool:
    """Mount an empty /dev/shm that only this process and its children see; False where that is not permitted. It is to
    be called before this process starts threads, which would keep the old one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    size = os.statvfs(SHARED_MEMORY)
    options = f"mode=1777,size={size.f_blocks * size.f_frsize}".encode()
    return bool(libc.mount(b"tests", bytes(SHARED_MEMORY), b"tmpfs", 0, options) == 0)


_OUTSIDE = frozenset(
    {"socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
)


class Outside:
    """Notices when this process opens a socket or starts a process. `notice` gets the name of what it did; what it
    raises, the call raises."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        # Coverage.py sets a trace function in each new thread. `sys.settrace` fails in one thread while an audit hook
        # runs for it in another.
        if "COVERAGE_RUN" not in os.environ:
            sys.addaudithook(self._audit)
        for name in ("bind", "connect"):
            self._watch(name)
        self._watch_processes()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _OUTSIDE:
            self._notice(event)

    def _watch(self, name: str) -> None:
        original = getattr(zmq.Socket, name)

        @functools.wraps(original)
        def watched(socket: zmq.Socket[bytes], address: str, *arguments: Any) -> Any:
            if not str(address).startswith("inproc:"):
                self._notice(f"zmq.{name}")
            return original(socket, address, *arguments)

        setattr(zmq.Socket, name, watched)

    def _watch_processes(self) -> None:
        """What `multiprocessing` spawns has no audit event."""
        original = BaseProcess.start

        @functools.wraps(original)
        def watched(process: BaseProcess) -> None:
            self._notice("multiprocessing")
            original(process)

        BaseProcess.start = watched  # type: ignore[method-assign]
