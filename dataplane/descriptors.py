"""Open files: a service has a few for each session, a client about fifteen, and many systems let a process have 1,024
unless it asks for more."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Callable, Iterator

from dataplane.errors import ServiceUnavailableError

ENOUGH = 1 << 20


def allow_more() -> int:
    """Let this process have as many as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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
        if not none_left(cause):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise error(f"this process may have no more open files (ulimit -n {limit})") from cause


def none_left(error: BaseException | None) -> bool:
    """Whether it says that there are too few. (zmq.ZMQError has an errno, but is no OSError.)"""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
