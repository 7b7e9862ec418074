"""`tq`, the command line: runs a service, inspects a running one, changes, saves, restores and checks it.

`serve` runs a service, `inspection` and `top` look inside, `changes` changes and saves, `doctor` checks;
`app` assembles the commands. They import slow modules only when they run.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script and return its exit code. Errors are printed as one line on standard error."""
    with _default_interrupt():
        from dataplane.cli.app import main as run
    return run(arguments)


@contextlib.contextmanager
def _default_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process without a traceback during the block. No effect outside the main thread, and if the
    program has its own handler."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel ends the process
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
