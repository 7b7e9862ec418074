"""Logical nodes of one machine that take themselves for hosts of their own."""

from __future__ import annotations

import os

from dataplane.core import addresses

VARIABLE = "TQ_TEST_HOST"


def live_there() -> None:
    """What a worker process begins with: it is on the host that its node is said to be. A Ray `runtime_env` names this
    as "worker_process_setup_hook"; it comes before anything else of `dataplane` is imported."""
    name = os.environ.get(VARIABLE)
    if name:
        addresses.boot_id = lambda: name
