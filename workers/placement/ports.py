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
    """Holds ports on the node it is on until they are released or its process ends.

    A held port has a bound socket that does not listen, so the kernel gives it to no one else; its worker binds it all
    the same, if like torch, gRPC, ZMQ, asyncio and http.server it sets SO_REUSEADDR (or SO_REUSEPORT).
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def hold(self, count: int, highest: int = HIGHEST) -> list[int]:
        """`count` free ports up to `highest`, held from now on. No keeper on this node gives out any of them meanwhile.
        ValueError for a `highest` below `LOWEST`, OSError where all ports up to it are in use, `OpenFilesError` where
        this process may have no more of them."""
        if highest < LOWEST:
            raise ValueError(f"ports up to {highest} were asked for; those below {LOWEST} are not given out")
        new: list[socket.socket] = []
        try:
            with OpenFilesError.of(f"holding {count} ports"):
                for _ in range(count):
                    new.append(_free(highest))
        except BaseException:
            for sock in new:
                sock.close()
            raise
        ports = [int(sock.getsockname()[1]) for sock in new]
        self._held.update(zip(ports, new, strict=True))
        return ports

    def release(self, ports: Iterable[int]) -> None:
        """Hold these no longer. Ports that are not held are skipped."""
        for port in ports:
            sock = self._held.pop(port, None)
            if sock is not None:
                sock.close()

    def close(self) -> None:
        """Hold none any longer. Idempotent."""
        self.release(list(self._held))


def _free(highest: int) -> socket.socket:
    """The kernel's choice, or, where that is too high, the first free one of all up to `highest`, in random order."""
    chosen = _bound(0)
    if chosen.getsockname()[1] <= highest:
        return chosen
    chosen.close()
    for port in random.sample(range(LOWEST, highest + 1), highest + 1 - LOWEST):
        try:
            return _bound(port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise OSError(errno.EADDRINUSE, f"all ports from {LOWEST} to {highest} are in use on this node")


def _bound(port: int) -> socket.socket:
    """A socket that is bound to the port, alone: with SO_REUSEPORT set before, another keeper could have it, too."""
    dual = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        sock.close()
        raise
    return sock
