"""What a process listens on, so that its forked children do not: a child that kept a listening socket would hold the
port when its parent is gone, and take connections that nobody serves."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
from collections.abc import Iterable, Iterator

Place = int | str | bytes
"""A TCP port, or the path or abstract name of a socket of the host."""


@functools.cache
def _places() -> set[Place]:
    places: set[Place] = set()

    def in_child() -> None:
        if places:
            _close_sockets_at(places)
            places.clear()

    os.register_at_fork(after_in_child=in_child)
    return places


def listens_at(places: Iterable[int | str]) -> None:
    """From now on forked children close what is bound there: ports, or endpoints as ZMQ names them."""
    _places().update(map(place_of, places))


def listens_no_more_at(places: Iterable[int | str]) -> None:
    """Children may keep what another part of the program opens there later."""
    _places().difference_update(map(place_of, places))


def place_of(named: int | str) -> Place:
    """Where a port, or an endpoint as ZMQ names it, is."""
    if isinstance(named, int):
        return named
    scheme, _, rest = named.partition("://")
    if scheme == "ipc":
        return b"\0" + rest[1:].encode() if rest.startswith("@") else rest
    return int(rest.rpartition(":")[2])


@contextlib.contextmanager
def copied(descriptor: int) -> Iterator[socket.socket | None]:
    """A copy of the socket that has this number now: None if no socket has it."""
    with contextlib.ExitStack() as ends:
        copy = None
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                number = os.dup(descriptor)
                try:
                    copy = ends.enter_context(socket.socket(fileno=number))
                except OSError:  # it is another file by now
                    os.close(number)
        yield copy


def bound_to(connection: socket.socket) -> Place | None:
    """Where the socket is bound: its own end."""
    name = connection.getsockname()
    if isinstance(name, tuple):
        return int(name[1]) if connection.family in (socket.AF_INET, socket.AF_INET6) else None
    return name  # type: ignore[no-any-return]


def _close_sockets_at(places: set[Place]) -> None:
    """The numbers stay taken, by /dev/null: libraries whose threads the child does not have believe they own them."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            with copied(int(name)) as connection:
                is_ours = connection is not None and bound_to(connection) in places
            if is_ours:
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)
