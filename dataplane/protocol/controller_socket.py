"""The socket of a client or storage unit for a controller."""

from __future__ import annotations

import zmq

from dataplane.errors import AuthenticationError
from dataplane.protocol import zmq_frames
from dataplane.protocol.auth import controller_keys, encrypt
from dataplane.protocol.zap import HANDSHAKE_MS

Socket = zmq.Socket[bytes]

FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""The events of a socket whose handshake failed."""
REJECTIONS = 2
"""Number of rejected handshakes after which a token counts as wrong. A service that ends rejects one, too."""


def is_rejected(took_s: float) -> bool:
    """Whether a handshake that failed after `took_s` was rejected: a busy service ends handshakes after a while."""
    return took_s < HANDSHAKE_MS / 2000


def wrong_token(address: str) -> AuthenticationError:
    """Return the error after `REJECTIONS` by the controller at `address`."""
    why = "the token is wrong, or the server there is not the service"
    return AuthenticationError(peer=f"the controller at {address}", why=why)


def unconnected_dealer(context: zmq.Context[Socket], endpoint: str, token: str | None) -> Socket:
    """Return a socket that is prepared for `endpoint` of a controller with this token, not yet connected."""
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.linger = 0
        dealer.set(zmq.MAXMSGSIZE, zmq_frames.MAX_FRAME_BYTES)
        if token:
            encrypt(dealer, controller_keys(token).public)
        if "[" in endpoint:  # an IPv6 address
            dealer.set(zmq.IPV6, 1)
    except BaseException:
        dealer.close()
        raise
    return dealer


def dealer_socket(context: zmq.Context[Socket], endpoint: str, token: str | None = None) -> Socket:
    """Return a socket that is connected to `endpoint`."""
    dealer = unconnected_dealer(context, endpoint, token)
    dealer.connect(endpoint)
    return dealer
