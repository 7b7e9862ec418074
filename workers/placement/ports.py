"""TCP ports of one node, each held for one worker."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable

from workers.errors import OpenFilesError

LOWEST = 1024
HIGHEST = 65535


class PortKeeper:
    """Holds ports on its node until they are released or its process ends.

    A held port has a bound socket that does not listen, so the kernel assigns the port to no other socket. The
    worker can still bind it if it sets SO_REUSEADDR (or SO_REUSEPORT), as torch, gRPC, ZMQ, asyncio and http.server
    do.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}  # the bound socket of each held port

    def hold(self, count: int, highest: int = HIGHEST) -> list[int]:
        """Hold `count` free ports up to `highest` and return them. No other keeper on this node returns them until
        they are released. ValueError for a `highest` below `LOWEST`, OSError if fewer than `count` are free,
        `OpenFilesError` if this process has reached its limit of open files."""
        if highest < LOWEST:
            raise ValueError(f"cannot hold ports up to {highest}: ports below {LOWEST} are never assigned")
        sockets: list[socket.socket] = []
        try:
            with OpenFilesError.of(f"holding {count} ports"):
                for _ in range(count):
                    sockets.append(_bind_free(highest))
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        ports = [int(sock.getsockname()[1]) for sock in sockets]
        self._held.update(zip(ports, sockets, strict=True))
        return ports

    def release(self, ports: Iterable[int]) -> None:
        """Release these ports. Ports that are not held are skipped."""
        for port in ports:
            sock = self._held.pop(port, None)
            if sock is not None:
                sock.close()

    def close(self) -> None:
        """Release all ports. Idempotent."""
        self.release(list(self._held))


def _bind_free(highest: int) -> socket.socket:
    """Return a socket bound to a port that the kernel chooses, or if that port is above `highest`, to the first free
    port of a random order of all ports up to `highest`."""
    sock = _bind(0)  # 0: the kernel chooses the port
    if sock.getsockname()[1] <= highest:
        return sock
    sock.close()
    for port in random.sample(range(LOWEST, highest + 1), highest + 1 - LOWEST):
        try:
            return _bind(port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # in use, or reserved by the system
                raise
    raise OSError(errno.EADDRINUSE, f"all ports from {LOWEST} to {highest} are in use on this node")


def _bind(port: int) -> socket.socket:
    """Return a socket bound to the port. SO_REUSEPORT is set after the bind, so that no other keeper can bind the
    same port."""
    dual_stack = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if dual_stack else socket.AF_INET)
    try:
        if dual_stack:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # hold the port for IPv4, too
        sock.bind(("", port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        sock.close()
        raise
    return sock
