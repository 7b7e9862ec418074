"""Connections of one ZMQ socket to the processes that a worker sends to."""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from dataplane.core.zmq_io import send
from workers.transport.zmq_sockets import Socket, connect, open_socket, received, url_of

LINGER_MS = 1000
LINKS_MOST = 1 << 10
"""Limit of open connections. Beyond it idle connections are closed, least recently used first."""
LINKS_SHARE = 4
"""Connections use at most 1/`LINKS_SHARE` of the descriptors that this process may have."""
_SCANNED = 16
"""To close n idle connections, the n + `_SCANNED` least recently used ones are checked."""

M = TypeVar("M")


@dataclass
class _Link:
    """A connection. route: its identity, by which the ROUTER socket addresses it; peer: name of the peer; endpoint: its
    "host:port"; url: the same for ZMQ."""

    route: bytes
    peer: str
    endpoint: str
    url: str


class Links:
    """Connections of one thread. A connection is opened for the first message to a peer. Each has its own identity,
    so late responses from a closed connection are not taken for responses from a new one.

    most: limit of open connections; connections in use may exceed it. `_by_peer`, `_by_route` and `_by_url` have the
    same connections, by peer, by identity and by URL. `_numbers`: for the identities.
    """

    def __init__(self, context: zmq.Context[Socket], *, most: int | None = None) -> None:
        self.socket = open_socket(context, zmq.ROUTER, linger_ms=LINGER_MS)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # a send without a route raises EHOSTUNREACH, see `_try_send`
        self._most = _default_limit() if most is None else most
        self._numbers = itertools.count(1)
        self._by_peer: OrderedDict[str, _Link] = OrderedDict()  # least recently used first
        self._by_route: dict[bytes, _Link] = {}
        self._by_url: dict[str, _Link] = {}

    def __len__(self) -> int:
        return len(self._by_peer)

    def send(self, peer: str, endpoint: str, frames: Sequence[Any], idle: Callable[[str], bool]) -> None:
        """Send to `peer` at `endpoint`. idle(peer): whether no request to that peer is pending; idle connections may
        be closed to stay within the limit."""
        link = self._by_peer.get(peer)
        if link is not None and link.endpoint != endpoint:
            self.cut(peer)  # the peer has a new endpoint
            link = None
        if link is None:
            self._make_space(idle)
            link = self._connect(peer, endpoint)
        self._by_peer.move_to_end(peer)
        if not self._try_send(link, frames):
            # Open a new connection, because ZMQ never reconnects to a port on which a process with another protocol has
            # once responded. If the new connection has no route either, the message is dropped.
            self.cut(peer)
            self._try_send(self._connect(peer, endpoint), frames)

    def others(self, peer: str, endpoint: str) -> bool:
        """Return whether there is a connection to `endpoint` that was opened for another peer than `peer`."""
        link = self._by_url.get(url_of(endpoint))
        return link is not None and link.peer != peer

    def send_to_all(self, frames: Sequence[Any]) -> None:
        """Send to every connected peer. Peers without a route are skipped."""
        for link in self._by_peer.values():
            self._try_send(link, frames)

    def _try_send(self, link: _Link, frames: Sequence[Any]) -> bool:
        """Send to a peer. Return False if ZMQ has no route to it."""
        try:
            send(self.socket, (link.route, *frames))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def received(
        self, decode: Callable[[Any], M], reader: str, followed: tuple[type, ...]
    ) -> Iterator[tuple[str, M, list[zmq.Frame]]]:
        """Yield peer, message and frames of each response that has arrived. See `zmq_sockets.received`."""
        for route, answer, frames in received(self.socket, decode, reader, followed):
            link = self._by_route.get(route)
            if link is not None:  # else the connection was closed meanwhile
                yield link.peer, answer, frames

    def cut(self, peer: str) -> None:
        """Close the connection to `peer`, if any. Unsent messages are dropped."""
        link = self._by_peer.pop(peer, None)
        if link is not None:
            del self._by_route[link.route], self._by_url[link.url]
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disconnect(link.url)

    def _connect(self, peer: str, endpoint: str) -> _Link:
        """Open a connection to `peer` and return it."""
        url = url_of(endpoint)
        if url in self._by_url:
            # The port was reused, so the connection to its previous owner is obsolete.
            self.cut(self._by_url[url].peer)
        link = _Link(b"to-%d" % next(self._numbers), peer, endpoint, url)
        self.socket.set(zmq.CONNECT_ROUTING_ID, link.route)  # the identity of the next connection
        connect(self.socket, endpoint)
        self._by_peer[peer], self._by_route[link.route], self._by_url[url] = link, link, link
        return link

    def _make_space(self, idle: Callable[[str], bool]) -> None:
        """Close idle ones of the least recently used connections, so that one more is allowed. Others stay open."""
        excess = len(self) + 1 - self._most
        if excess > 0:
            oldest = list(itertools.islice(self._by_peer, excess + _SCANNED))
            idle_peers = [peer for peer in oldest if idle(peer)]
            for peer in idle_peers[:excess]:
                self.cut(peer)


def _default_limit() -> int:
    """Return the limit of open connections that the descriptors of this process allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LINKS_MOST if soft == resource.RLIM_INFINITY else min(LINKS_MOST, soft // LINKS_SHARE)
