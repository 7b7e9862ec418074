"""One unary gRPC call over a socket that is there already.

Clients never load gRPC (see `opening`), and yet must ask the gRPC door of a service for its keys. What the
answer's headers say is not read, so the method must tell its errors in its answer.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, StreamEnded, StreamReset
from h2.exceptions import H2Error

MAX_ANSWER_BYTES = 32 << 10
"""More is no answer of ours; the window that HTTP/2 begins with is larger."""
MAX_TRAFFIC_BYTES = 64 << 10
RECEIVE_BYTES = 16 << 10
LOOK_S = 0.1
"""How long a read waits before `rest` is called again."""

Rest = Callable[[], float]


class Http2Error(Exception):
    """What answers does not speak as a gRPC server does. Never leaves this package."""


def call(
    peer: socket.socket, method: str, message: bytes, *, authority: str, metadata: Mapping[str, str], rest: Rest
) -> bytes:
    """The message that answers unary `method` ("/package.Service/Name"). `rest()`, which is called often, says how many
    seconds are left. Raises `Http2Error`, OSError (TimeoutError among them), what `rest` raises."""
    headers = {
        ":method": "POST",
        ":scheme": "https" if isinstance(peer, ssl.SSLSocket) else "http",
        ":path": method,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        **metadata,
    }
    connection = H2Connection(H2Configuration(client_side=True, validate_inbound_headers=False))
    try:
        connection.initiate_connection()
        stream = connection.get_next_available_stream_id()
        connection.send_headers(stream, list(headers.items()))
        connection.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        return _message(_answer(peer, connection, rest))
    except H2Error as error:
        raise Http2Error(f"what answers does not speak HTTP/2: {error}") from error


def _answer(peer: socket.socket, connection: H2Connection, rest: Rest) -> bytes:
    """The body of the answer, whole."""
    body, received = b"", 0
    while received <= MAX_TRAFFIC_BYTES:
        peer.sendall(connection.data_to_send())
        arrived = _arrived(peer, rest)
        if not arrived:
            raise Http2Error("it hung up")
        received += len(arrived)
        for event in connection.receive_data(arrived):
            body += _data(event)
            if len(body) > MAX_ANSWER_BYTES:
                raise Http2Error("its answer is too long")
            if isinstance(event, StreamEnded):
                return body
    raise Http2Error("its answer is too long")


def _arrived(peer: socket.socket, rest: Rest) -> bytes:
    while True:
        left_s = rest()
        peer.settimeout(max(min(left_s, LOOK_S), 0.001))
        try:
            return peer.recv(RECEIVE_BYTES)
        except TimeoutError:
            if left_s <= LOOK_S:
                raise


def _data(event: Event) -> bytes:
    if isinstance(event, StreamReset | ConnectionTerminated):
        raise Http2Error("it ended the call")
    return event.data if isinstance(event, DataReceived) and event.data is not None else b""


def _message(body: bytes) -> bytes:
    """The one message in a gRPC body."""
    if len(body) < 5 or body[0] or len(body) != 5 + int.from_bytes(body[1:5], "big"):
        raise Http2Error("it gave no answer")
    return body[5:]
