"""Authentication of the peers of a storage unit in ZMQ's handshake, before any message of a peer is received.

Without encryption the mechanism is PLAIN: the user name is the instance, the password is the ticket's code. With CURVE
the client's key pair is derived from the ticket, so its public key authenticates the client. A server asks its ZAP
handler (RFC 27) about each peer.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import zmq
from zmq.utils import z85

from dataplane.core.limited_log import LimitedLog
from dataplane.core.ports import bound_address, bound_to, copied
from dataplane.core.zmq_io import readable, receive_event
from dataplane.protocol.auth import KeyPair, Ticket, encrypt
from dataplane.protocol.fd_limits import share

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"  # where ZMQ looks for a handler
DOMAIN = b"tq"
HANDSHAKE_MS = 10_000
"""Timeout of the handshake, after which the connection is closed."""
EVENTS_PER_TURN = 256
HELD_BYTES = 1 << 30
"""Maximum memory that ZMQ may hold for connections in the handshake of one port: a frame of each."""

TAKEN = b"200"
REFUSED = b"400"
ANOTHER_INSTANCE = b"500"
"""Status for a client of an earlier instance, so that the client requests the ticket of this one."""


class Admission:
    """The ZAP handler, in a separate thread, for all guarded sockets of `context`: it accepts peers with `ticket`.

    name: the guarded server's name, for the log. keys: use CURVE. on_refused: called in that thread for each peer
    without the ticket; must not block. Call `close` before the context is terminated.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        ticket: Ticket,
        keys: KeyPair | None = None,
        *,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._on_refused = on_refused
        self._keys = keys
        self._ticket = ticket
        # The public key of a client with this ticket.
        self._curve_key = b"" if keys is None else z85.decode(ticket.keys().public.encode())
        self._rejected = LimitedLog(log)
        self._socket: zmq.Socket[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="tq-zap", daemon=True)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable once the thread must end; -1: closed
        try:
            self._socket = context.socket(zmq.REP)
            self._socket.linger = 0
            self._socket.bind(ENDPOINT)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Require authentication at the endpoints that `socket` binds from now on."""
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if self._keys is not None:
            self._keys.serve(socket)
        else:
            socket.set(zmq.PLAIN_SERVER, 1)

    def complain(self, peer: str, why: str) -> None:
        """Log a rejected peer. Callable from any thread."""
        self._rejected.write(logging.WARNING, f"{self._name} rejected {peer}: {why}")

    def close(self) -> None:
        """Stop the thread and close the handler's socket. Idempotent."""
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        if self._socket is not None:
            self._socket.close(linger=0)
        os.close(self._wake)
        self._wake = -1

    def _run(self) -> None:
        """Reply to ZMQ's requests until `close`. This is the body of the thread."""
        handler = self._socket
        assert handler is not None
        poller = zmq.Poller()
        poller.register(handler, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while self._wake not in dict(poller.poll()):
            with contextlib.suppress(zmq.Again):  # the poll may end without a request
                version, request_id, *request = handler.recv_multipart(zmq.NOBLOCK)
                code, text = self._decide(request)
                handler.send_multipart([version, request_id, code, text, b"", b""])  # without user id and metadata

    def _decide(self, request: list[bytes]) -> tuple[bytes, bytes]:
        """Return the status and its text for one peer. Never raises, because ZMQ waits for the reply. request: domain,
        address, identity, mechanism and credentials of the peer (RFC 27)."""
        try:
            code = self._status(request[3], request[4:])
            address = request[1].decode(errors="replace") or "this host"
        except Exception:
            log.exception("%s failed to authenticate a peer, and rejects it", self._name)
            return REFUSED, b"refused"
        if code == REFUSED:
            self._on_refused()
            self.complain(f"a peer at {address}", "wrong token")
        return code, b"" if code == TAKEN else b"refused"

    def _status(self, mechanism: bytes, shown: list[bytes]) -> bytes:
        """Return the status for the credentials that a peer presented: its public key with CURVE, its user name and
        password with PLAIN."""
        ticket = self._ticket
        if mechanism == b"CURVE":
            return TAKEN if hmac.compare_digest(shown[0], self._curve_key) else REFUSED
        if mechanism != b"PLAIN":  # a peer without credentials
            return REFUSED
        if hmac.compare_digest(shown[1], ticket.code.encode()):  # `shown`: instance and code
            return TAKEN
        # A wrong code for this instance comes from a wrong token. For another instance the code may be right.
        return REFUSED if shown[0] == ticket.instance.encode() else ANOTHER_INSTANCE


class Handshakes:
    """Limits the connections of a guarded ROUTER that are in the handshake, because ZMQ buffers a
    frame of each. Those above the limit are closed at once. Used by the thread that reads the
    socket's monitor.

    endpoints: the socket's endpoints, as ZMQ names them. frame_bytes: the maximum size of a frame.
    """

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    """The events that the monitor must report."""

    def __init__(self, endpoints: Iterable[str], frame_bytes: int) -> None:
        self._addresses = frozenset(map(bound_address, endpoints))
        self._most = share(8, HELD_BYTES // frame_bytes)  # an eighth of this process's open files
        # When open connections were accepted, by descriptor, and when handshakes succeeded, in the
        # last `HANDSHAKE_MS`, oldest first. ZMQ does not report which connection succeeded; the
        # difference of the numbers is that of the connections in the handshake.
        self._accepted: dict[int, float] = {}
        self._succeeded: deque[float] = deque()

    def note(self, event: int, descriptor: int) -> None:
        """Count one event of the monitor; close an accepted connection above the limit."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._succeeded.append(time.monotonic())
            return
        self._accepted.pop(descriptor, None)
        if event != zmq.EVENT_ACCEPTED:
            return
        now = time.monotonic()
        self._accepted[descriptor] = now
        earliest = now - HANDSHAKE_MS / 1000
        while next(iter(self._accepted.values())) < earliest:
            del self._accepted[next(iter(self._accepted))]
        while self._succeeded and self._succeeded[0] < earliest:
            self._succeeded.popleft()
        if len(self._accepted) - len(self._succeeded) > self._most:
            # The descriptor may have been closed, and reused for another file.
            with copied(descriptor) as copy, contextlib.suppress(OSError):
                if copy is not None and bound_to(copy) in self._addresses:
                    copy.shutdown(sockets.SHUT_RDWR)

    def take_events(self, monitor: zmq.Socket[Any]) -> None:
        """Count pending events, at most `EVENTS_PER_TURN`. Does not block."""
        for _ in range(EVENTS_PER_TURN):
            if not readable(monitor):
                return
            self.note(*receive_event(monitor))


def present(socket: zmq.Socket[Any], ticket: Ticket | None, curve_key: str = "") -> None:
    """Make `socket` present `ticket` (None: no ticket) to the servers it connects to from now on. curve_key: encrypt
    for the server with this public key ("": no encryption). Raises ValueError if this ZMQ has no CURVE."""
    if curve_key:
        encrypt(socket, curve_key, None if ticket is None else ticket.keys())
    elif ticket is not None:
        socket.set(zmq.PLAIN_USERNAME, ticket.instance.encode())
        socket.set(zmq.PLAIN_PASSWORD, ticket.code.encode())
