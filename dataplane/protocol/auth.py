"""What both ends derive from the service's token: the controller's key pair, and tickets for storage units.

The token itself is never sent to a ZMQ server. Connections to the controller use CURVE with a key pair that is derived
from the token. ZMQ's handshake never sends the public key of the server. So a client that completes the handshake
knows that key, and a server that completes it has the secret key: both have the token. The handshake also encrypts the
connection. Every holder of the token can therefore impersonate the controller.

A storage unit serves rows, which may be large, so its connections are encrypted only with `encrypt_rows`. Clients
present a ticket for its epoch in ZMQ's handshake (see `zap`).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any, Self

import zmq
from zmq.utils import z85

from dataplane.errors import AuthenticationError

STRETCH_ROUNDS = 50_000
"""PBKDF2 rounds, the cost of each guess of a token by a reader of the network."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, in z85 (40 characters each). The public key of a controller is a secret, too."""

    public: str = field(repr=False)
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """Return a random key pair. Raises ValueError if this ZMQ has no CURVE."""
        _require_curve()
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def _derived(cls, seed: bytes) -> Self:
        """Return the key pair whose secret key is `seed` (32 bytes)."""
        _require_curve()
        secret = z85.encode(seed)
        return cls(zmq.curve_public(secret).decode(), secret.decode())

    def serve(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` accept only peers that know `public`, at the endpoints that it binds from now on."""
        socket.curve_server = 1
        socket.curve_secretkey = self.secret.encode()


@functools.lru_cache(maxsize=16)
def controller_keys(token: str) -> KeyPair:
    """Return the key pair of a controller with this token. Raises ValueError if this ZMQ has no
    CURVE."""
    return KeyPair._derived(_mac(token, "controller", b""))


def encrypt(socket: zmq.Socket[Any], server_key: str, own: KeyPair | None = None) -> None:
    """Make `socket` connect only to servers that have the secret key of `server_key`, from now on. own: the client's
    key pair; None: a random one. Raises ValueError if this ZMQ has no CURVE."""
    own = own or KeyPair.new()
    socket.curve_publickey = own.public.encode()
    socket.curve_secretkey = own.secret.encode()
    socket.curve_serverkey = server_key.encode()


@dataclass(frozen=True)
class Ticket:
    """The credential for one epoch of a storage unit. `instance` names the epoch and is public; it distinguishes a
    client of an earlier epoch from an unknown peer."""

    instance: str
    code: str = field(repr=False)

    @classmethod
    def of(cls, token: str | None, arena_path: str, epoch: int) -> Self | None:
        """Return the ticket for an epoch of the unit with this arena. Return None without a token: no ticket is
        required then."""
        if not token:
            return None
        public = hashlib.sha256(f"{arena_path}\0{epoch}".encode()).hexdigest()
        return cls(public, _mac(token, "ticket", public.encode()).hex())

    def keys(self) -> KeyPair:
        """Return the key pair that authenticates a client with this ticket to a unit that encrypts."""
        return KeyPair._derived(hashlib.sha256(b"tq curve\0" + self.code.encode()).digest())


def _mac(token: str, purpose: str, message: bytes) -> bytes:
    return hmac.digest(_stretched(token), purpose.encode() + b"\0" + message, "sha256")


@functools.lru_cache(maxsize=16)
def _stretched(token: str) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", token.encode(), b"tq.v1", STRETCH_ROUNDS)


def check_token(token: str | None, shown: bytes, *, peer: str) -> None:
    """Raise `AuthenticationError` unless `shown`, which a caller of `peer` presented, is the token; None: accept every
    caller. Compares in constant time."""
    if token is not None and not hmac.compare_digest(shown, token.encode()):
        raise AuthenticationError(peer=peer, why="the token is wrong" if shown else "no token was given")


def _require_curve() -> None:
    """Raise ValueError if this ZMQ cannot encrypt."""
    if not zmq.has("curve"):
        raise ValueError(
            f"a token needs libzmq with CURVE, but libzmq {zmq.zmq_version()} was built without it; install a pyzmq "
            "wheel, which includes CURVE"
        )
