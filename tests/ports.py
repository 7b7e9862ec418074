"""Ports to be told beforehand."""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path

FIRST = 20_000
SLICES = 8


def free_ports(count: int = 1) -> int:
    """The first of `count` neighbouring ports on loopback that are free, that no socket is given by itself, and that
    the other test processes of this run do not choose."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    each = max((given - FIRST) // SLICES, 500)
    start = FIRST + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SLICES * each
    chance = random.SystemRandom()
    for _ in range(100):
        first = chance.randrange(start, start + each - count)
        try:
            with ExitStack() as held:
                for number in range(count):
                    held.enter_context(socket.create_server(("127.0.0.1", first + number)))
            return first
        except OSError:
            continue
    raise AssertionError("no ports")
