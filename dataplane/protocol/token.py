"""The shared token, as the gRPC server checks it."""

from __future__ import annotations

import hmac

from dataplane.errors import AuthenticationError
from dataplane.protocol.proof import Ticket


class Secret:
    """The service's token and the `ticket` of this instance, either of which opens the server; without a token every
    caller is taken (endpoints bind loopback only)."""

    def __init__(self, token: str | None, ticket: Ticket | None = None) -> None:
        self._token = None if token is None else token.encode()
        self._code = None if ticket is None else ticket.code.encode()

    def check(self, shown: bytes, *, peer: str) -> None:
        """AuthenticationError unless `shown` is one of them; takes as long for any wrong one of the same length."""
        if self._token is None or hmac.compare_digest(shown, self._token):
            return
        if self._code is not None and hmac.compare_digest(shown, self._code):
            return
        raise AuthenticationError(peer=peer, why="the token is wrong" if shown else "no token was given")
