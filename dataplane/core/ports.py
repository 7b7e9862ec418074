"""Ports: checks whether one is in use, lookup of the process that uses it, and the registry of listening sockets,
which forked children close. Otherwise a child would hold the port after its parent exits, and accept connections that
no thread serves."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import stat
from collections.abc import Iterable, Iterator
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


Address = int | str | bytes
"""A TCP port, or the path or abstract name of a Unix socket."""


@functools.cache
def _registry() -> set[Address]:
    """Return the registry, a set that callers change. The first call registers the fork handler."""
    addresses: set[Address] = set()

    def in_child() -> None:
        """Runs in a forked child."""
        if addresses:
            _close_sockets_at(addresses)
            addresses.clear()

    os.register_at_fork(after_in_child=in_child)
    return addresses


def listens_at(addresses: Iterable[int | str]) -> None:
    """Make forked children close the sockets bound to these addresses, given as ports or ZMQ endpoints."""
    _registry().update(map(bound_address, addresses))


def listens_no_more_at(addresses: Iterable[int | str]) -> None:
    """Undo `listens_at`: forked children keep sockets that are bound to these addresses later."""
    _registry().difference_update(map(bound_address, addresses))


def bound_address(endpoint: int | str) -> Address:
    """Return the address of a port, or of a ZMQ endpoint ("tcp://HOST:PORT", "ipc://PATH", "ipc://@ABSTRACT_NAME")."""
    if isinstance(endpoint, int):
        return endpoint
    scheme, _, name = endpoint.partition("://")
    if scheme == "ipc":
        return b"\0" + name[1:].encode() if name.startswith("@") else name
    return int(name.rpartition(":")[2])


@contextlib.contextmanager
def copied(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield a duplicate of the socket with this descriptor number, or None if the number is not a socket. The duplicate
    is closed afterwards; the socket stays open."""
    with contextlib.ExitStack() as closing:
        copy = None
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                number = os.dup(descriptor)
                try:
                    copy = closing.enter_context(socket.socket(fileno=number))
                except OSError:  # the number was reused for another file
                    os.close(number)
        yield copy


def bound_to(connection: socket.socket) -> Address | None:
    """Return the address to which the socket is bound, or None if it is neither an internet nor a Unix socket."""
    name = connection.getsockname()
    if isinstance(name, tuple):  # (address, port, ...) of an internet socket
        return int(name[1]) if connection.family in (socket.AF_INET, socket.AF_INET6) else None
    return name  # type: ignore[no-any-return]  # the path or abstract name of a Unix socket


def _close_sockets_at(addresses: set[Address]) -> None:
    """Close the sockets bound to these addresses. Their descriptor numbers are replaced by /dev/null, not freed,
    because libraries in the child still refer to these numbers."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor was closed
            with copied(int(name)) as connection:
                is_ours = connection is not None and bound_to(connection) in addresses
            if is_ours:
                os.dup2(null, int(name), inheritable=False)
    os.close(null)
