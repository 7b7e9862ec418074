"""Open files: a service has a few for each session, a client about fifteen, and many systems let a process have 1,024
unless it asks for more."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator

from dataplane.errors import LimitError, ServiceUnavailableError

ENOUGH = 1 << 20
OF_A_CONTEXT = 20
"""More than a context of ZMQ takes with its first sockets. Where its threads find none it ends the whole process."""
OF_A_SERVER = 48
"""More than a controller or a storage unit takes before its first client comes. gRPC, too, ends the process."""


def allow_more() -> int:
    """Let this process have as many as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def share(part: int, most: int) -> int:
    """One `part`th (1/part) of the open files that this process may have now; at least 1, `most` at most."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if soft == resource.RLIM_INFINITY else min(most, max(1, soft // part))


def require_enough() -> None:
    """`LimitError` unless there are enough for a server."""
    free = _free(OF_A_SERVER)
    if free < OF_A_SERVER:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        hint = "Allow this process more: ulimit -n, LimitNOFILE= of systemd, docker run --ulimit nofile=."
        raise LimitError(what="open files", got=limit - free + OF_A_SERVER, limit=limit, hint=hint)


def _free(most: int) -> int:
    """How many more this process may open now, `most` if there are more."""
    held: list[int] = []
    with contextlib.suppress(OSError):
        while len(held) < most:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    for descriptor in held:
        os.close(descriptor)
    return len(held)


@contextlib.contextmanager
def enough_for(address: str, *, least: int = 0) -> Iterator[None]:
    """`ServiceUnavailableError` that says so where there are too few for what is opened towards `address`: to begin
    with, fewer than `least`."""
    takes = "of which a session takes about fifteen and each of its calls at a time two"
    remedy = "allow it more, or share a client between threads"

    def unavailable(none_left: str) -> Exception:
        return ServiceUnavailableError(address=address, why=f"{none_left}, {takes}; {remedy}")

    with enough_or(unavailable, least=least):
        yield


@contextlib.contextmanager
def enough_or(error: Callable[[str], Exception], *, least: int = 0) -> Iterator[None]:
    """Where there are too few, to begin with fewer than `least`: the error that is made of how that is to be said."""
    try:
        if _free(least) < least:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        yield
    except Exception as cause:
        # What could not be connected to has the exhaustion as its cause.
        if not (none_left(cause) or none_left(cause.__cause__)):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise error(f"this process may have no more open files (ulimit -n {limit})") from cause


def none_left(error: BaseException | None) -> bool:
    """Whether it says that there are too few. (zmq.ZMQError has an errno, but is no OSError.)"""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
