"""More time for Ray's processes to start."""

from __future__ import annotations

import time
from typing import Any

from ray._private import services

from tests.children import START_S

_get_node = services.get_node


def get_node(*arguments: Any) -> Any:
    """Ray gives its processes 30 s to start, however busy the machine is."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return _get_node(*arguments)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def allow_slow_starts() -> None:
    """In a process that ends with its cluster."""
    services.get_node = get_node
