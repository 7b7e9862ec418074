"""The shared token, as both doors check it."""

from __future__ import annotations

import hmac

from dataplane.errors import AuthenticationError


class Secret:
    """The service's token, or none: then every caller is taken (doors bind loopback only)."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def check(self, shown: bytes, *, peer: str) -> None:
        """AuthenticationError unless `shown` is the token; takes as long for any wrong one of the same length."""
        if self._token is None or hmac.compare_digest(shown, self._token):
            return
        raise AuthenticationError(peer=peer, why="the token is wrong" if shown else "no token was given")
