"""Unauthenticated connections to a ZMQ port: their handshake has not succeeded, so their peers may lack the ticket.

ZMQ buffers data of such a peer until a frame is complete. Their number is therefore limited, and the number of those
that have sent much data is limited more strictly. ZMQ does not report successful handshakes. The kernel, however,
reports the bytes that each peer has received, and only a peer that has presented the ticket receives more than the
handshake.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dataplane.core.addresses import join_address
from dataplane.core.listeners import bound_to, copied, place_of
from dataplane.core.zmq_io import readable
from dataplane.protocol import zap
from dataplane.protocol.fd_limits import share

MOST = 16_384
"""Maximum number of unauthenticated connections. After a network failure all clients reconnect, with several each."""
HELD_BYTES = 32 << 20
"""Maximum memory that ZMQ may hold for connections that sent more than `SHORT_BYTES`, one frame each."""
SHORT_BYTES = 4096
"""Upper bound of the bytes of a handshake."""
LOOK_S = 0.05
"""Minimum interval between reads of the byte counts; they take at most a tenth of the time."""
EVENTS = 256
"""Maximum number of monitor events that are handled at a time."""
LATE_S = 5.0
"""Maximum delay after `zap.HANDSHAKE_MS` until ZMQ ends a handshake."""
PLAIN_BYTES, CURVE_BYTES = 64 + 26, 64 + 170 + 26
"""Maximum bytes sent to a peer without a valid ticket (RFC 23: the greeting; with CURVE, WELCOME; an ERROR of at most
12 bytes). A peer with the ticket receives READY, of 30 bytes or more."""

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""
_TCP_INFO = struct.Struct("=120xQQ")
"""Of Linux's `struct tcp_info`, `tcpi_bytes_acked` and `tcpi_bytes_received`."""


@dataclass(slots=True)
class _Connection:
    """An unauthenticated connection. inode: of its socket, to recognize a reused descriptor. since: when it was
    accepted, by time.monotonic()."""

    inode: int
    peer: str
    """The peer's address, for the log."""
    since: float
    is_tcp: bool
    is_trusted: bool
    """Whether the peer is a process of this user or root, which could read the token."""


class Unauthenticated:
    """The unauthenticated connections of one ROUTER. Used by the thread that reads the socket's monitor. Call `began`
    and `ended` for each monitor event, in order (`take_events` does that), and `hang_up` after each wait of at most
    `pause_ms`. Call `spoke` for each message if other users may connect over a Unix-domain socket.

    endpoints: the socket's endpoints, as ZMQ names them. frame_bytes: the maximum frame size. curve: peers use CURVE
    instead of PLAIN.
    """

    def __init__(self, endpoints: Iterable[str], frame_bytes: int, *, curve: bool) -> None:
        self._places = frozenset(map(place_of, endpoints))  # where the connections of this socket are bound
        # Maximum number of connections (at most an eighth of the files that this process may open), and of those among
        # them that sent more than `SHORT_BYTES`: ZMQ may hold a frame of each.
        self._most = share(8, MOST)
        self._most_long = max(1, HELD_BYTES // frame_bytes)
        self._handshake_bytes = CURVE_BYTES if curve else PLAIN_BYTES
        self._unproven: dict[int, _Connection] = {}  # not known to be authenticated; by descriptor, oldest first
        self._looked = self._took_s = 0.0  # when the byte counts were read last, and how long that took

    def take_events(self, monitor: zmq.Socket[Any]) -> None:
        """Handle pending events, at most `EVENTS`, of a monitor that reports accepted and closed connections. Does not
        block."""
        for _ in range(EVENTS):
            if not readable(monitor):
                return
            event = recv_monitor_message(monitor)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.began(descriptor)
            else:
                self.ended(descriptor)

    def began(self, descriptor: int) -> None:
        """Record a new connection, unless it is already closed."""
        self._unproven.pop(descriptor, None)  # an earlier connection; the new one goes to the end of the dict
        connection = self._describe(descriptor)
        if connection is not None:
            self._unproven[descriptor] = connection

    def spoke(self, descriptor: int) -> None:
        """Drop a connection that has delivered a message and so is authenticated."""
        self._unproven.pop(descriptor, None)

    def ended(self, descriptor: int) -> str:
        """Drop a closed connection. Return the peer's address if the handshake did not succeed; "" otherwise or if the
        address is unknown."""
        connection = self._unproven.pop(descriptor, None)
        return "" if connection is None else connection.peer

    def pause_ms(self, most: int | None) -> int | None:
        """Return the time until the next call of `hang_up`, at most `most` (None: no limit)."""
        if not self._unproven:
            return most
        own_ms = 1 + int(1000 * self._pause_s())
        return own_ms if most is None else min(most, own_ms)

    def _pause_s(self) -> float:
        return max(LOOK_S, 10 * self._took_s)

    def hang_up(self) -> None:
        """Drop the authenticated connections from the record, and close the oldest of the others above the limits. Does
        not block. No-op before `pause_ms` has passed."""
        began = time.monotonic()
        if not self._unproven or began - self._looked < self._pause_s():
            return
        long = []  # connections for which ZMQ may hold a whole frame
        for descriptor, connection in list(self._unproven.items()):
            acked, received = _byte_counts(descriptor) if connection.is_tcp else (0, 0)
            # ZMQ closes a connection whose handshake takes longer, so an old one is authenticated.
            old = began - connection.since > zap.HANDSHAKE_MS / 1000 + LATE_S
            if old or acked > self._handshake_bytes:  # authenticated
                del self._unproven[descriptor]
            elif received > SHORT_BYTES or not (connection.is_tcp or connection.is_trusted):  # no counts: not TCP
                long.append(descriptor)
        self._shut_down(long[: max(0, len(long) - self._most_long)])
        # Counted only now: the call before has dropped some.
        self._shut_down(list(itertools.islice(self._unproven, max(0, len(self._unproven) - self._most))))
        self._looked = time.monotonic()
        self._took_s = self._looked - began

    def _shut_down(self, descriptors: Iterable[int]) -> None:
        """Shut down these connections and drop them. ZMQ then closes them."""
        for descriptor in descriptors:
            # The descriptor may have been reused for another file; the copy's inode shows that.
            with copied(descriptor) as copy, contextlib.suppress(OSError):
                inode = self._unproven.pop(descriptor).inode
                if copy is not None and os.fstat(copy.fileno()).st_ino == inode:
                    copy.shutdown(socket.SHUT_RDWR)

    def _describe(self, descriptor: int) -> _Connection | None:
        """Return the connection of a descriptor; None if it is closed or the descriptor belongs to another file."""
        with copied(descriptor) as copy, contextlib.suppress(OSError):
            if copy is None or bound_to(copy) not in self._places:
                return None
            inode, now = os.fstat(copy.fileno()).st_ino, time.monotonic()
            if copy.family == socket.AF_UNIX:
                _, user, _ = _CREDENTIALS.unpack(
                    copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                return _Connection(inode, "this host", now, is_tcp=False, is_trusted=user in (0, os.geteuid()))
            name = copy.getpeername()
            return _Connection(inode, join_address(name[0], name[1]), now, is_tcp=True, is_trusted=False)
        return None


def _byte_counts(descriptor: int) -> tuple[int, int]:
    """Return how many bytes the peer has acknowledged, and how many it has sent; (0, 0) if that is unknown."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    except OSError:  # the connection is closed
        return 0, 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return 0, 0
    finally:
        connection.detach()  # the descriptor belongs to ZMQ, which closes it
    return _TCP_INFO.unpack(info) if len(info) == _TCP_INFO.size else (0, 0)
