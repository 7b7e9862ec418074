"""Registry of listening sockets, which forked children close. Otherwise a child would hold the port after its parent
exits, and accept connections that no thread serves."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
from collections.abc import Iterable, Iterator

Place = int | str | bytes
"""A TCP port, or the path or abstract name of a Unix socket."""


@functools.cache
def _places() -> set[Place]:
    """Return the registry, a set that callers change. The first call registers the fork handler."""
    places: set[Place] = set()

    def in_child() -> None:
        """Runs in a forked child."""
        if places:
            _close_sockets_at(places)
            places.clear()

    os.register_at_fork(after_in_child=in_child)
    return places


def listens_at(places: Iterable[int | str]) -> None:
    """Make forked children close the sockets bound to these places, given as ports or ZMQ endpoints."""
    _places().update(map(place_of, places))


def listens_no_more_at(places: Iterable[int | str]) -> None:
    """Undo `listens_at`: forked children keep sockets that are bound to these places later."""
    _places().difference_update(map(place_of, places))


def place_of(endpoint: int | str) -> Place:
    """Return the place of a port, or of a ZMQ endpoint ("tcp://HOST:PORT", "ipc://PATH", "ipc://@ABSTRACT_NAME")."""
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


def bound_to(connection: socket.socket) -> Place | None:
    """Return the place to which the socket is bound, or None if it is neither an internet nor a Unix socket."""
    name = connection.getsockname()
    if isinstance(name, tuple):  # (address, port, ...) of an internet socket
        return int(name[1]) if connection.family in (socket.AF_INET, socket.AF_INET6) else None
    return name  # type: ignore[no-any-return]  # the path or abstract name of a Unix socket


def _close_sockets_at(places: set[Place]) -> None:
    """Close the sockets bound to these places. Their descriptor numbers are replaced by /dev/null, not freed, because
    libraries in the child still refer to these numbers."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor was closed
            with copied(int(name)) as connection:
                is_ours = connection is not None and bound_to(connection) in places
            if is_ours:
                os.dup2(null, int(name), inheritable=False)
    os.close(null)
