"""CURVE, ZMQ's encryption, for the sockets of a service that uses TLS.

A server creates a key pair at its start and keeps it in memory only. Clients receive its public key over TLS and over
the encrypted control plane; no handshake succeeds without that key. The client's key authenticates it (see `zap`).
"""

from __future__ import annotations

from typing import Any

import zmq

from dataplane.errors import TlsError


class ServerKeys:
    """A new key pair. `public` (40 characters of z85) is for clients. Raises `TlsError` if this ZMQ has no CURVE."""

    def __init__(self) -> None:
        require_curve("a service with TLS")
        public, self._secret = zmq.curve_keypair()
        self.public = public.decode()

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Require encryption with `public` at the endpoints that `socket` binds from now on."""
        socket.curve_server = 1
        socket.curve_secretkey = self._secret


def encrypt(socket: zmq.Socket[Any], server_key: str, own_key: bytes | None = None) -> None:
    """Make `socket` connect only to the server with the public key `server_key`, from now on. own_key: the client's
    secret key (z85; by default a new one). Raises `TlsError` if this ZMQ has no CURVE."""
    require_curve("a client of a service with TLS")
    secret = own_key or zmq.curve_keypair()[1]
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(secret), secret
    socket.curve_serverkey = server_key.encode()


def require_curve(who: str) -> None:
    """Raise `TlsError` if this ZMQ cannot encrypt."""
    if not zmq.has("curve"):
        raise TlsError(
            address="ZMQ",
            why=f"{who} needs libzmq with CURVE, but libzmq {zmq.zmq_version()} was built without it. Install a "
            "pyzmq wheel, which includes CURVE",
        )
