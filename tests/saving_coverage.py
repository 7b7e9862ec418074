"""A plugin of coverage.py, for `make coverage`: Ray ends its actors without letting Python finish, so they write what
was measured twice a second."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from coverage import Coverage

_EVERY_S = 0.5


def coverage_init(registry: Any, options: Any) -> None:
    """Called by coverage.py in each process that it measures."""
    if any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
        threading.Thread(target=_save_repeatedly, daemon=True).start()


def _save_repeatedly() -> None:
    while True:
        time.sleep(_EVERY_S)
        measuring = Coverage.current()
        if measuring is not None:
            measuring.save()
