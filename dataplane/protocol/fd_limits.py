"""Limits of open files. A service needs a few for each session, a client about fifteen; many systems limit a process to
1,024 unless it raises the limit."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator

from dataplane.errors import LimitError, ServiceUnavailableError

ENOUGH = 1 << 20
OF_A_CONTEXT = 20
"""Upper bound of the files that a ZMQ context opens with its first sockets. ZMQ aborts the process if none is left."""
OF_A_SERVER = 48
"""Upper bound of the files that a controller or storage unit opens before its first client. gRPC, too, aborts the
process if none is left."""


def allow_more() -> int:
    """Raise this process's soft limit of open files as far as allowed, up to `ENOUGH`. Return the new limit,
    `ENOUGH` if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH
    if soft >= most:
        return soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def share(divisor: int, most: int) -> int:
    """Return 1/`divisor` of this process's limit of open files; at least 1, at most `most`."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if soft == resource.RLIM_INFINITY else min(most, max(1, soft // divisor))


def require_enough() -> None:
    """Raise `LimitError` if this process cannot open enough files for a server."""
    free = _count_free(OF_A_SERVER)
    if free < OF_A_SERVER:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        hint = "Raise the limit: ulimit -n, LimitNOFILE= of systemd, docker run --ulimit nofile=."
        # got: the files that are open, and those that the server would open.
        raise LimitError(what="open files", got=limit - free + OF_A_SERVER, limit=limit, hint=hint)


def _count_free(most: int) -> int:
    """Return the number of files that this process can still open, at most `most`."""
    held: list[int] = []
    with contextlib.suppress(OSError):
        while len(held) < most:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    for descriptor in held:
        os.close(descriptor)
    return len(held)


@contextlib.contextmanager
def enough_for(address: str, *, least: int = 0) -> Iterator[None]:
    """Raise `ServiceUnavailableError` if the body, which opens connections to `address`, fails because the process
    cannot open more files; before the body if it can open fewer than `least`."""
    takes = "of which a session takes about fifteen"
    remedy = "raise the limit, or share a client between threads"

    def unavailable(shortage: str) -> Exception:
        return ServiceUnavailableError(address=address, why=f"{shortage}, {takes}; {remedy}")

    with enough_or(unavailable, least=least):
        yield


@contextlib.contextmanager
def enough_or(error: Callable[[str], Exception], *, least: int = 0) -> Iterator[None]:
    """Raise `error(description)` if the body fails for lack of open files, or if fewer than `least` can be opened."""
    try:
        if _count_free(least) < least:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # becomes `error` below
        yield
    except Exception as cause:
        # A failed connection has the lack of open files as its cause.
        if not (none_left(cause) or none_left(cause.__cause__)):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise error(f"this process cannot open more files (ulimit -n {limit})") from cause


def none_left(error: BaseException | None) -> bool:
    """Whether the error reports a lack of open files. (zmq.ZMQError has an errno, but is not an OSError.)"""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
