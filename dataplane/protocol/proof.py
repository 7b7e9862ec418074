"""Mutual proof of a service and its clients that they have the service's secret, without sending the secret.

The service replies to a client's random nonce with a proof, so a client verifies the service before it sends any data.
Both derive from the secret the ticket of that instance (one start of a controller or storage unit), which is the
password of ZMQ's handshake. A later instance rejects the ticket of an earlier one.

The secret is the shared token. With TLS and without a token, the controller gives clients with a certificate a secret.

`Secret` is the check of the shared token by the gRPC server.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Self

from dataplane.errors import AuthenticationError

NONCE_BYTES = 32
STRETCH_ROUNDS = 50_000
"""PBKDF2 rounds, the cost of each guess. A peer that reaches the service can request proofs and test tokens on them."""


@dataclass(frozen=True)
class Ticket:
    """The credential for one instance. `instance` is public; it distinguishes a client of an earlier instance from an
    unknown peer."""

    instance: str
    code: str = field(repr=False)

    @classmethod
    def of(cls, secret: str | None, *instance: str) -> Self | None:
        """Return the ticket for the instance that these words name. Return None without a secret: no ticket is required
        then."""
        if not secret:
            return None
        public = hashlib.sha256("\0".join(instance).encode()).hexdigest()
        return cls(public, _mac(secret, "ticket", public.encode()).hex())


def proof_of(secret: str, nonce: bytes, instance: str, port: int) -> bytes:
    """Return the proof for `nonce`, which requires the secret. It includes the port, so a peer cannot forward the nonce
    to a service at another port of the host and use that proof."""
    assert len(nonce) == NONCE_BYTES
    return _mac(secret, "service", nonce + port.to_bytes(4, "big") + instance.encode())


def _mac(secret: str, purpose: str, message: bytes) -> bytes:
    return hmac.digest(_key(secret), purpose.encode() + b"\0" + message, "sha256")


@functools.lru_cache(maxsize=16)
def _key(secret: str) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"tq.v1", STRETCH_ROUNDS)


class Secret:
    """The service's token and the `ticket` of this instance; the server accepts either. Without a token it accepts
    every caller (endpoints bind loopback only)."""

    def __init__(self, token: str | None, ticket: Ticket | None = None) -> None:
        self._token = None if token is None else token.encode()
        self._code = None if ticket is None else ticket.code.encode()

    def check(self, shown: bytes, *, peer: str) -> None:
        """Raise AuthenticationError unless `shown` is the token or the ticket's code. Compares in constant time."""
        if self._token is None or hmac.compare_digest(shown, self._token):  # None: every caller is accepted
            return
        if self._code is not None and hmac.compare_digest(shown, self._code):
            return
        raise AuthenticationError(peer=peer, why="the token is wrong" if shown else "no token was given")
