"""`tq`: run the service from a shell, look into a running one, change, save, restore and measure it.

A verb a file, assembled in `app`. What takes long to import is imported by the verb that needs it, when it runs.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script: the exit code, after one line on standard error where it is not 0."""
    with _nothing_to_end():
        from dataplane.cli.app import main as run
    return run(arguments)


@contextlib.contextmanager
def _nothing_to_end() -> Iterator[None]:
    """Ctrl-C ends the process as the system does it, without a traceback."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
