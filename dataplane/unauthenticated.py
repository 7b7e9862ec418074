"""Connections to a ZMQ port that no message has come from yet, so that their peers may not know the ticket.

ZMQ keeps what such a peer sends until a frame is whole, so their number is bounded, and more tightly the number of
those that have sent much. ZMQ does not tell which handshakes have succeeded; but the monitor's event for a new
connection and each message have its descriptor (`zmq.SRCFD`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dataplane import zap
from dataplane.host import join_address
from dataplane.listeners import bound_to, copied, place_of

MOST = 16_384
"""At once. After a break of the network all clients connect again, twice and more; most have nothing to say then."""
HELD_BYTES = 32 << 20
"""What ZMQ may keep for those that have sent more than `SHORT_BYTES`, one frame each."""
SHORT_BYTES = 4096
"""More than a handshake and the first message that nearly all clients send."""
LOOK_S = 0.05
"""How often it is looked how much they have sent; at most a tenth of the time goes into that."""

LATE_S = 5.0
"""How much later than it is to ZMQ may end a handshake."""

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""
_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` of Linux's `struct tcp_info`."""


@dataclass(slots=True)
class _Connection:
    inode: int
    peer: str
    """Who is at the other end, for the log."""
    since: float
    is_tcp: bool
    is_trusted: bool
    """A process of this user or root, which could read the token."""
    long_since: int | None = None
    """How many messages had been read when it was first seen to have sent much."""


class Unauthenticated:
    """Of one ROUTER. Used by the thread that receives from it and reads its monitor: `began` and `ended` for each of
    the monitor's events, in their order, `spoke` for each message, `hang_up` after each wait of at most `pause_ms`.

    endpoints: where the socket is bound, as ZMQ names them. frame_bytes: the longest frame that it takes.
    """

    def __init__(self, endpoints: Iterable[str], frame_bytes: int) -> None:
        self._places = frozenset(map(place_of, endpoints))
        self._most = min(MOST, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._most_long = max(1, HELD_BYTES // frame_bytes)
        self._silent: dict[int, _Connection] = {}  # oldest first
        self._spoke: set[int] = set()
        self._read = 0
        self._looked = self._took_s = 0.0

    def began(self, descriptor: int) -> None:
        """A peer has connected."""
        if descriptor in self._spoke:  # its first message was read before this event
            return
        self._silent.pop(descriptor, None)
        connection = self._look_at(descriptor)
        if connection is not None:
            self._silent[descriptor] = connection

    def spoke(self, descriptor: int) -> None:
        """A message has come through this connection."""
        self._read += 1
        self._spoke.add(descriptor)
        self._silent.pop(descriptor, None)

    def ended(self, descriptor: int) -> str:
        """The connection is gone. Who was at the other end, if it has sent no message; "" where that is not known."""
        self._spoke.discard(descriptor)
        connection = self._silent.pop(descriptor, None)
        return "" if connection is None else connection.peer

    @property
    def pause_ms(self) -> int | None:
        """How long to wait at most before `hang_up` is called again; None: for ever."""
        return 1 + int(1000 * max(LOOK_S, 10 * self._took_s)) if self._silent else None

    def hang_up(self, *, drained: bool) -> None:
        """End those that are too many, the oldest first. Does not block. drained: no message is waiting to be read."""
        began = time.monotonic()
        self._trust_those_before(began - zap.HANDSHAKE_MS / 1000 - LATE_S)
        if not self._silent:
            return
        self._end(list(itertools.islice(self._silent, max(0, len(self._silent) - self._most))))
        if began - self._looked >= max(LOOK_S, 10 * self._took_s):
            long = [descriptor for descriptor, each in self._silent.items() if self._is_long(descriptor, each, drained)]
            self._end(long[: max(0, len(long) - self._most_long)])
            self._looked = time.monotonic()
            self._took_s = self._looked - began

    def _trust_those_before(self, instant: float) -> None:
        """They have shown the ticket: ZMQ would have hung up on them."""
        while self._silent:
            descriptor, oldest = next(iter(self._silent.items()))
            if oldest.since > instant:
                return
            del self._silent[descriptor]

    def _is_long(self, descriptor: int, connection: _Connection, drained: bool) -> bool:
        """Whether it has sent much that is no message. One that is whole may wait to be read, but not for long: ZMQ
        takes one of each connection in turn."""
        if not _sent_much(descriptor, connection):
            return False
        if connection.long_since is None:
            connection.long_since = self._read
        return drained or self._read - connection.long_since > len(self._spoke) + len(self._silent)

    def _end(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            connection = self._silent.pop(descriptor)
            # The number may be another file's by now; that of the copy cannot change.
            with copied(descriptor) as copy, contextlib.suppress(OSError):
                if copy is not None and os.fstat(copy.fileno()).st_ino == connection.inode:
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


def _sent_much(descriptor: int, connection: _Connection) -> bool:
    """Where that is not known, it may have."""
    if not connection.is_tcp:
        return not connection.is_trusted
    try:
        looked = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    except OSError:
        return False
    try:
        told = looked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    except OSError:  # it is gone
        return False
    finally:
        looked.detach()
    return len(told) < _RECEIVED.size or _RECEIVED.unpack(told)[0] > SHORT_BYTES
