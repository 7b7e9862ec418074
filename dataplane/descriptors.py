"""Open files: a service has a few for each session, a client about fifteen, and many systems let a process have 1,024
unless it asks for more."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

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
    try:
        yield
    except Exception as error:
        # zmq.ZMQError has an errno, but is no OSError.
        if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        why = (
            f"this process may have no more open files (ulimit -n {limit}), of which a session takes about fifteen "
            "and each of its calls at a time two; allow it more, or share a client between threads"
        )
        raise ServiceUnavailableError(address=address, why=why) from error
