"""Ports to be told beforehand."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

FIRST = 20_000


def free_ports(count: int = 1) -> int:
    """The first of so many neighbouring ports on loopback that are free, and that no socket is given by itself."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    chance = random.SystemRandom()
    for _ in range(100):
        first = chance.randrange(FIRST, max(given, FIRST + 2 * count) - count)
        try:
            with ExitStack() as held:
                for number in range(count):
                    held.enter_context(socket.create_server(("127.0.0.1", first + number)))
            return first
        except OSError:
            continue
    raise AssertionError("no ports")
