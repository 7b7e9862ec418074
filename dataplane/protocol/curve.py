"""CURVE, ZMQ's encryption, on the sockets of a service that uses TLS.

A server has a key pair while it runs, in memory only. Its public key is told over TLS and over the encrypted control
plane, and who does not know it cannot even begin to talk. Whether a client is one, its own key tells (see `zap`).
"""

from __future__ import annotations

from typing import Any

import zmq

from dataplane.errors import TlsError


class ServerKeys:
    """A new pair. `public` (40 characters of z85) is for clients. `TlsError` where this ZMQ has no CURVE."""

    def __init__(self) -> None:
        require_curve("a service with TLS")
        public, self._secret = zmq.curve_keypair()
        self.public = public.decode()

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Let only clients that know `public` through whatever `socket` binds from now on."""
        socket.curve_server = 1
        socket.curve_secretkey = self._secret


def encrypt(socket: zmq.Socket[Any], server_key: str, own_key: bytes | None = None) -> None:
    """Have `socket` talk to the server with this public key only, through whatever it connects to from now on, with
    the secret key `own_key` (z85; by default a new one). `TlsError` where this ZMQ has no CURVE."""
    require_curve("a client of a service with TLS")
    secret = own_key or zmq.curve_keypair()[1]
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(secret), secret
    socket.curve_serverkey = server_key.encode()


def require_curve(who: str) -> None:
    """`TlsError` unless this ZMQ can encrypt."""
    if not zmq.has("curve"):
        raise TlsError(
            address="ZMQ",
            why=f"{who} needs a libzmq with CURVE; the one here, {zmq.zmq_version()}, was built without. Install "
            "pyzmq from its wheels, which have it",
        )
