"""The socket of a client or storage unit for a controller's ZMQ server, one port above the service's address."""

from __future__ import annotations

import zmq

from dataplane.core.addresses import dial, join_address, split_address
from dataplane.protocol import zmq_frames
from dataplane.protocol.server_keys import OPEN, ConnectionKeys, unreached
from dataplane.protocol.zap import present

Socket = zmq.Socket[bytes]


def unconnected_dealer(context: zmq.Context[Socket], endpoint: str, keys: ConnectionKeys) -> Socket:
    """Return a socket that is prepared for `endpoint`, not yet connected."""
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.linger = 0
        dealer.set(zmq.MAXMSGSIZE, zmq_frames.MAX_FRAME_BYTES)
        present(dealer, keys.ticket, keys.curve_key)
        if "[" in endpoint:  # an IPv6 address
            dealer.set(zmq.IPV6, 1)
    except BaseException:
        dealer.close()
        raise
    return dealer


def dealer_socket(context: zmq.Context[Socket], endpoint: str, keys: ConnectionKeys = OPEN) -> Socket:
    """Return a socket that is connected to `endpoint`."""
    dealer = unconnected_dealer(context, endpoint, keys)
    dealer.connect(endpoint)
    return dealer


def zmq_address_of(address: str) -> str:
    """Return the address of the ZMQ server of the service at `address`: one port above."""
    host, port = split_address(address)
    return join_address(host, port + 1)


def probe(address: str, zmq_address: str, timeout_s: float) -> None:
    """Raise `ServiceUnavailableError` unless a server listens at `zmq_address`, the ZMQ server of the service at
    `address`."""
    try:
        dial(zmq_address, timeout_s).close()
    except OSError as error:
        raise unreached(address, f"its ZMQ server {zmq_address}", error) from error
