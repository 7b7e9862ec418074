"""Open files: a service has a few for each session, a client about fifteen, and many systems let a process have 1,024
unless it asks for more."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator

from dataplane.errors import ServiceUnavailableError

ENOUGH = 1 << 20
OF_A_CONTEXT = 12
"""More than a context of ZMQ takes when its first socket is made."""


def allow_more() -> int:
    """Let this process have as many as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def require_enough() -> None:
    """OSError unless there are enough for a context of ZMQ, which ends the whole process where its threads find none.
    Call it before the first socket of each is made."""
    held: list[int] = []
    try:
        for _ in range(OF_A_CONTEXT):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise OSError(error.errno, f"{_too_few()}; allow it more") from error
    finally:
        for descriptor in held:
            os.close(descriptor)


def _too_few() -> str:
    return f"this process may have no more open files (ulimit -n {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"


@contextlib.contextmanager
def enough_for(address: str) -> Iterator[None]:
    """`ServiceUnavailableError` that says so where there are too few for what is opened towards `address`."""
    takes = "of which a session takes about fifteen and each of its calls at a time two"
    remedy = "allow it more, or share a client between threads"

    def unavailable(none_left: str) -> Exception:
        return ServiceUnavailableError(address=address, why=f"{none_left}, {takes}; {remedy}")

    with enough_or(unavailable):
        yield


@contextlib.contextmanager
def enough_or(error: Callable[[str], Exception]) -> Iterator[None]:
    """Where there are too few: the error that is made of how that is to be said."""
    try:
        yield
    except Exception as cause:
        # What could not be connected to has the exhaustion as its cause.
        if not (none_left(cause) or none_left(cause.__cause__)):
            raise
        raise error(_too_few()) from cause


def none_left(error: BaseException | None) -> bool:
    """Whether it says that there are too few. (zmq.ZMQError has an errno, but is no OSError.)"""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
