"""A process on a host that starts players there by forking, so that none of them costs an import of torch.

It is forked itself, by a process that has no threads. A line that it gets is `{"start": [name, folder, role,
arguments]}`, answered by the process's number, or `{"reap": pid}`, answered by its exit code once it has ended.
Whatever it started is killed when it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import traceback
from typing import Any

from tests.faults import workers_roles
from tests.faults.hosts import Host, end_with_parent

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000


class Launcher:
    """Its remote control. name: of the host where players take themselves to be, without a `host` of its own."""

    def __init__(self, name: str, host: Host | None) -> None:
        self.lives_on = "" if host is not None else name
        self.address = "127.0.0.1" if host is None else host.address
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _serve(theirs, host)
        theirs.close()
        self._lines = ours.makefile("rw")
        ours.close()

    def ask(self, order: dict[str, Any]) -> int:
        self._lines.write(json.dumps(order) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        assert answer, "a launcher ended"
        return int(answer)

    def end(self) -> None:
        """Its players end, too."""
        self._lines.close()
        os.waitpid(self._pid, 0)


def _serve(orders: socket.socket, host: Host | None) -> None:
    """Until the orders end. Never returns."""
    try:
        end_with_parent()
        if host is not None:
            _enter(host)
        lines = orders.makefile("rw")
        for line in lines:
            lines.write(f"{_obey(json.loads(line))}\n")
            lines.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _enter(host: Host) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name, kind in (("net", _CLONE_NEWNET), ("mnt", _CLONE_NEWNS)):
        with open(f"/proc/{host.pid}/ns/{name}", "rb") as namespace:
            if libc.setns(namespace.fileno(), kind):
                raise OSError(ctypes.get_errno(), f"setns {name}")


def _obey(order: dict[str, Any]) -> int:
    if "reap" in order:
        return os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])
    pid = os.fork()
    if pid == 0:
        _live(*order["start"])
    return pid


def _live(name: str, folder: str, role: str, arguments: list[Any]) -> None:
    """The whole run of a player. Never returns."""
    try:
        end_with_parent()
        workers_roles.play(name, folder, role, arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
