"""TCP ports of one node, each held for one worker."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from workers.errors import OpenFilesError


class PortKeeper:
    """Holds ports on the node it is on until they are released or its process ends.

    A held port has a bound socket that does not listen, so the kernel gives it to no one else; its worker binds it all
    the same, if like torch, gRPC, ZMQ, asyncio and http.server it sets SO_REUSEADDR (or SO_REUSEPORT).
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def hold(self, count: int) -> list[int]:
        """`count` free ports, held from now on. No keeper on this node gives out any of them meanwhile.
        `OpenFilesError` where this process may have no more of them."""
        new: list[socket.socket] = []
        try:
            with OpenFilesError.of(f"holding {count} ports"):
                for _ in range(count):
                    new.append(_bound())
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


def _bound() -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("", 0))
    except BaseException:
        sock.close()
        raise
    return sock
