"""Connections to a ZMQ port whose handshake has not succeeded: it is not known whether their peers have the ticket.

ZMQ keeps what such a peer sends until a frame is whole, so their number is bounded, and more tightly the number of
those that have sent much. ZMQ does not tell which handshakes have succeeded, but the kernel tells how much each peer
has received: to one that has shown the ticket, more than to any other.
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
"""At once. After a break of the network all clients connect again, with several connections each."""
HELD_BYTES = 32 << 20
"""What ZMQ may keep for those that have sent more than `SHORT_BYTES`, one frame each."""
SHORT_BYTES = 4096
"""More than a handshake."""
LOOK_S = 0.05
"""How often their byte counts are read; at most a tenth of the time goes into that."""
EVENTS = 256
"""Of the monitor, taken at a time."""
LATE_S = 5.0
"""How long after `zap.HANDSHAKE_MS` ZMQ may take to end a handshake."""
PLAIN_BYTES, CURVE_BYTES = 64 + 26, 64 + 170 + 26
"""A peer receives more than that (RFC 23: the greeting; with CURVE, WELCOME; an ERROR of at most 12 bytes) only once it
has shown the ticket: then comes READY, of 30 bytes or more."""

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""
_TCP_INFO = struct.Struct("=120xQQ")
"""Of Linux's `struct tcp_info`, `tcpi_bytes_acked` and `tcpi_bytes_received`."""


@dataclass(slots=True)
class _Connection:
    inode: int
    peer: str
    """Who is at the other end, for the log."""
    since: float
    is_tcp: bool
    is_trusted: bool
    """A process of this user or root, which could read the token."""


class Unauthenticated:
    """Of one ROUTER. Used by the thread that reads its monitor: `began` and `ended` for each of the monitor's events,
    in their order (`take_events` does that), `hang_up` after each wait of at most `pause_ms`; `spoke` for messages,
    where users other than this process's may connect over a Unix-domain socket.

    endpoints: where the socket is bound, as ZMQ names them. frame_bytes: the longest frame that it takes. curve: peers
    talk CURVE, not PLAIN.
    """

    def __init__(self, endpoints: Iterable[str], frame_bytes: int, *, curve: bool) -> None:
        self._places = frozenset(map(place_of, endpoints))
        self._most = share(8, MOST)
        self._most_long = max(1, HELD_BYTES // frame_bytes)
        self._handshake_bytes = CURVE_BYTES if curve else PLAIN_BYTES
        self._silent: dict[int, _Connection] = {}  # oldest first
        self._looked = self._took_s = 0.0

    def take_events(self, monitor: zmq.Socket[Any]) -> None:
        """Of a monitor that tells which connections begin and end, those that are there. Does not block."""
        for _ in range(EVENTS):
            if not readable(monitor):
                return
            told = recv_monitor_message(monitor)
            (self.began if told["event"] == zmq.EVENT_ACCEPTED else self.ended)(int(told["value"]))

    def began(self, descriptor: int) -> None:
        """A peer has connected."""
        self._silent.pop(descriptor, None)
        connection = self._look_at(descriptor)
        if connection is not None:
            self._silent[descriptor] = connection

    def spoke(self, descriptor: int) -> None:
        """A message has come through this connection."""
        self._silent.pop(descriptor, None)

    def ended(self, descriptor: int) -> str:
        """The connection is gone. Who was at the other end, if its handshake did not succeed; "" where that is not
        known."""
        connection = self._silent.pop(descriptor, None)
        return "" if connection is None else connection.peer

    def pause_ms(self, most: int | None) -> int | None:
        """How long to wait before `hang_up` is called again: `most` at most (None: for ever)."""
        if not self._silent:
            return most
        mine = 1 + int(1000 * self._pause_s())
        return mine if most is None else min(most, mine)

    def _pause_s(self) -> float:
        return max(LOOK_S, 10 * self._took_s)

    def hang_up(self) -> None:
        """End those that are too many, the oldest first. Does not block."""
        began = time.monotonic()
        if not self._silent or began - self._looked < self._pause_s():
            return
        long = []
        for descriptor, connection in list(self._silent.items()):
            acked, received = _counts(descriptor) if connection.is_tcp else (0, 0)
            old = began - connection.since > zap.HANDSHAKE_MS / 1000 + LATE_S  # or ZMQ had hung up
            if old or acked > self._handshake_bytes:
                del self._silent[descriptor]
            elif received > SHORT_BYTES or not (connection.is_tcp or connection.is_trusted):
                long.append(descriptor)
        self._end(long[: max(0, len(long) - self._most_long)])
        self._end(list(itertools.islice(self._silent, max(0, len(self._silent) - self._most))))
        self._looked = time.monotonic()
        self._took_s = self._looked - began

    def _end(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            # The number may be another file's by now; that of the copy cannot change.
            with copied(descriptor) as copy, contextlib.suppress(OSError):
                inode = self._silent.pop(descriptor).inode
                if copy is not None and os.fstat(copy.fileno()).st_ino == inode:
                    copy.shutdown(socket.SHUT_RDWR)

    def _look_at(self, descriptor: int) -> _Connection | None:
        """None if it is gone, and its number nobody's or another file's."""
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


def _counts(descriptor: int) -> tuple[int, int]:
    """How many bytes the peer has acknowledged, and sent; 0 where that cannot be told."""
    try:
        looked = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    except OSError:  # it is gone
        return 0, 0
    try:
        told = looked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return 0, 0
    finally:
        looked.detach()
    return _TCP_INFO.unpack(told) if len(told) == _TCP_INFO.size else (0, 0)
