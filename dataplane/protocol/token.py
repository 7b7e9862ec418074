"""The check of the shared token by the gRPC server."""

from __future__ import annotations

import hmac

from dataplane.errors import AuthenticationError
from dataplane.protocol.proof import Ticket


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
