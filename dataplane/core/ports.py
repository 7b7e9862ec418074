"""Checks for ports in use, and lookup of the process that uses a port."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from dataplane.core.addresses import join_address, resolve_host
from dataplane.errors import PortTakenError

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"
"""The state of a listening socket in these tables."""


def require_free_port(host: str, port: int) -> None:
    """Raise `PortTakenError` if the port of `host` is in use, and OSError if listening fails for another reason."""
    address = resolve_host(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Ports with closed connections that the kernel still remembers count as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise cannot_listen(host, port, error.errno) from error


def cannot_listen(host: str, port: int, number: int | None) -> OSError:
    """Return the error to raise after listening failed with errno `number` (None: unknown): `PortTakenError` if the
    port is in use."""
    address = join_address(host, port)
    if number == errno.EADDRINUSE:
        return PortTakenError(address=address, holder=_describe_holder(port))
    return OSError(number, f"cannot listen on {address}: {os.strerror(number or 0)}")


def _describe_holder(port: int) -> str:
    """Describe the process that has a socket on the port in this network namespace. Without permission to find the
    process, name its user; return "" if neither can be found. Listening sockets are preferred."""
    sockets = sorted(_sockets_at(port), key=lambda entry: entry[0] != _LISTEN)  # False sorts first
    if not sockets:
        return ""
    _, user, inode = sockets[0]  # a listening socket, if there is one
    pid = _process_with(f"socket:[{inode}]")
    if pid is None:
        return f"a process of user {user}"
    return f"process {pid} ({_name_of(pid)})"


def _sockets_at(port: int) -> Iterator[tuple[str, str, str]]:
    """Yield state, user id and inode of each socket on the port."""
    for table in _TABLES:
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                # Number, local address, remote address, state, three fields, user id, one field, inode, more fields.
                _, local_address, _, state, _, _, _, user, _, inode, *_ = line.split()
                local_port = int(local_address.rpartition(":")[2], 16)
                if local_port == port and inode != "0":  # 0: no process has the socket any longer
                    yield state, user, inode


def _process_with(link: str) -> int | None:
    """Return the id of the first process with a descriptor that links to `link`, such as "socket:[5]". Processes
    without read permission are skipped."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            folder = f"/proc/{name}/fd"
            with contextlib.suppress(OSError):
                if any(_link_of(f"{folder}/{number}") == link for number in os.listdir(folder)):
                    return int(name)
    return None


def _link_of(descriptor: str) -> str:
    """Return the target of a link in /proc/PID/fd, or ""."""
    with contextlib.suppress(OSError):  # the descriptor was closed
        return os.readlink(descriptor)
    return ""


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return "already exited"
