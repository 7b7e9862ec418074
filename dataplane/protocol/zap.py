"""Who may talk through a ZMQ socket, decided in ZMQ's own handshake, before any message of a peer is taken.

In the clear the mechanism is PLAIN: the instance as user name, the ticket's code as password. With CURVE the client's
key pair is made from the ticket, so that its public half shows who knows it. A server asks its ZAP handler (RFC 27).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from dataplane.protocol.curve import ServerKeys, encrypt
from dataplane.protocol.proof import Ticket

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"tq"
HANDSHAKE_MS = 10_000
"""Who has not shown the ticket by then is hung up on."""
COMPLAIN_S = 10.0
"""How often the log says that peers were refused: whoever connects could fill a disk with it."""

TAKEN = b"200"
REFUSED = b"400"
ANOTHER_INSTANCE = b"500"
"""Told to who means an earlier instance, so that it asks for the ticket of this one."""


class Admission:
    """Answers, in a thread of its own, for all sockets of `context` that it guards; nobody is let in until `admit`.

    name: of what is guarded, for the log. keys: peers talk CURVE. on_refused: called in that thread for each peer that
    does not know the secret; returns at once. `close` before the context is terminated.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        keys: ServerKeys | None = None,
        *,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._on_refused = on_refused
        self._keys = keys
        self._ticket: Ticket | None = None
        self._curve_key = b""
        self._refused = 0
        self._complained = -math.inf
        self._guard = threading.Lock()
        self._socket: zmq.Socket[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="tq-zap", daemon=True)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._socket = context.socket(zmq.REP)
            self._socket.linger = 0
            self._socket.bind(ENDPOINT)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Let only who is admitted through whatever `socket` binds from now on."""
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if self._keys is not None:
            self._keys.guard(socket)
        else:
            socket.set(zmq.PLAIN_SERVER, 1)

    def admit(self, ticket: Ticket | None) -> None:
        """From now on who shows this ticket is let in, and nobody else. Any thread."""
        self._curve_key = b"" if ticket is None else z85.decode(zmq.curve_public(_secret_key(ticket)))
        self._ticket = ticket

    def complain(self, peer: str, why: str) -> None:
        """Say in the log, not too often, that a peer was refused. Any thread."""
        with self._guard:
            self._refused += 1
            if time.monotonic() - self._complained < COMPLAIN_S:
                return
            self._complained = time.monotonic()
        log.warning("%s refused %s: %s (%d refused so far)", self._name, peer, why, self._refused)

    def close(self) -> None:
        """Idempotent."""
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close(linger=0)
        os.close(self._wake)
        self._wake = -1

    def _run(self) -> None:
        handler = self._socket
        assert handler is not None
        poller = zmq.Poller()
        poller.register(handler, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while self._wake not in dict(poller.poll()):
            with contextlib.suppress(zmq.Again):
                version, request, *rest = handler.recv_multipart(zmq.NOBLOCK)
                code, text = self._judged(rest)
                handler.send_multipart([version, request, code, text, b"", b""])

    def _judged(self, asked: list[bytes]) -> tuple[bytes, bytes]:
        """The status for one peer. It must never fail: ZMQ waits for the answer."""
        try:
            code = self._status(asked[3], asked[4:])
            address = asked[1].decode(errors="replace") or "this host"
        except Exception:
            log.exception("%s could not judge a peer", self._name)
            return REFUSED, b"refused"
        if code == REFUSED:
            self._on_refused()
            self.complain(f"a peer at {address}", "it does not know the token")
        return code, b"" if code == TAKEN else b"refused"

    def _status(self, mechanism: bytes, shown: list[bytes]) -> bytes:
        ticket = self._ticket
        if ticket is None:
            return REFUSED
        if mechanism == b"CURVE":
            return TAKEN if hmac.compare_digest(shown[0], self._curve_key) else REFUSED
        if mechanism != b"PLAIN":
            return REFUSED
        if hmac.compare_digest(shown[1], ticket.code.encode()):
            return TAKEN
        return REFUSED if shown[0] == ticket.instance.encode() else ANOTHER_INSTANCE


def present(socket: zmq.Socket[Any], ticket: Ticket | None, curve_key: str = "") -> None:
    """Have `socket` show `ticket` (None: nothing) to whatever it connects to from now on, encrypted for the server with
    the public key `curve_key` ("": in the clear). `TlsError` where this ZMQ has no CURVE."""
    if curve_key:
        encrypt(socket, curve_key, None if ticket is None else _secret_key(ticket))
    elif ticket is not None:
        socket.set(zmq.PLAIN_USERNAME, ticket.instance.encode())
        socket.set(zmq.PLAIN_PASSWORD, ticket.code.encode())


def _secret_key(ticket: Ticket) -> bytes:
    """The CURVE key, in z85, that all clients of the instance have."""
    return z85.encode(hashlib.sha256(b"tq curve\0" + ticket.code.encode()).digest())
