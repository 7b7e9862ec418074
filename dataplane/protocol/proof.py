"""How a service and its clients show each other that they know the service's secret, without showing it.

The service answers a client's random nonce with a proof, so a client knows whom it talks to before it sends anything.
Both derive the ticket of that instance (one start of a controller or of a storage unit) from the secret: the password
of ZMQ's handshake. An instance that is gone leaves a ticket that no later one takes.

The secret is the shared token or, where TLS is used without one, what the controller gives to holders of a certificate.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Self

NONCE_BYTES = 32
STRETCH_ROUNDS = 50_000
"""Whoever reaches a service can ask for proofs and try tokens against them: each guess costs this."""


@dataclass(frozen=True)
class Ticket:
    """What is shown to one instance. `instance` is public and tells a client of an earlier one from a stranger."""

    instance: str
    code: str = field(repr=False)

    @classmethod
    def of(cls, secret: str | None, *instance: str) -> Self | None:
        """For the instance that these words name; None without a secret: then nothing is asked for."""
        if not secret:
            return None
        public = hashlib.sha256("\0".join(instance).encode()).hexdigest()
        return cls(public, _mac(secret, "ticket", public.encode()).hex())


def proof_of(secret: str, nonce: bytes, instance: str, port: int) -> bytes:
    """What only those who know the secret can answer to `nonce`. With the port it is no proof for who passes on the
    question to a service elsewhere on the host."""
    assert len(nonce) == NONCE_BYTES
    return _mac(secret, "service", nonce + port.to_bytes(4, "big") + instance.encode())


def _mac(secret: str, purpose: str, message: bytes) -> bytes:
    return hmac.digest(_key(secret), purpose.encode() + b"\0" + message, "sha256")


@functools.lru_cache(maxsize=16)
def _key(secret: str) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"tq.v1", STRETCH_ROUNDS)
