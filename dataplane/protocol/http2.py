"""One unary gRPC call over a socket that is there already.

Clients never load gRPC (see `client.rpc.handshake`), and yet must ask the gRPC server of a service for its keys. Of the
answer's headers only the status and its text are read, so the method must tell its errors in its answer.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

MAX_ANSWER_BYTES = 32 << 10
"""More is no answer of ours; the window that HTTP/2 begins with is larger."""
MAX_TRAFFIC_BYTES = 64 << 10
RECEIVE_BYTES = 16 << 10
PASSING = frozenset({"1", "2", "4", "8", "13", "14"})
"""gRPC statuses of a server that is busy or is just starting: cancelled, unknown, deadline, exhausted, internal,
unavailable."""
PASSING_ENDS = frozenset(
    {
        ErrorCodes.NO_ERROR,
        ErrorCodes.INTERNAL_ERROR,
        ErrorCodes.REFUSED_STREAM,
        ErrorCodes.CANCEL,
        ErrorCodes.ENHANCE_YOUR_CALM,
    }
)
"""What such a server ends a call or a connection with: gRPC with an internal error where it was too busy to read what
the connection began with."""
MAX_TEXT = 300
"""Characters of a status's text that an error repeats, at most."""
LOOK_S = 0.1
"""How long a read waits before `rest` is called again."""

Rest = Callable[[], float]


class Http2Error(Exception):
    """What answers does not speak as a gRPC server does. Never leaves this package."""


class HungUpError(Http2Error):
    """What answers hung up before it said anything."""


class BusyError(Http2Error):
    """A gRPC server ended the call as it may not do the next time."""


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
        return _answer(peer, connection, rest)
    except H2Error as error:
        raise Http2Error(f"what answers does not speak HTTP/2: {error}") from error


def _answer(peer: socket.socket, connection: H2Connection, rest: Rest) -> bytes:
    """The message of the answer."""
    body, received, status, text = b"", 0, "", ""
    while received <= MAX_TRAFFIC_BYTES:
        peer.sendall(connection.data_to_send())
        arrived = _arrived(peer, rest)
        if not arrived:
            raise (Http2Error if received else HungUpError)("it hung up")
        received += len(arrived)
        for event in connection.receive_data(arrived):
            body += _data(event)
            status = _header(event, "grpc-status") or status
            text = _header(event, "grpc-message") or text
            if len(body) > MAX_ANSWER_BYTES:
                raise Http2Error("its answer is too long")
            if isinstance(event, StreamEnded):
                return _message(body, status, text)
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
        raise (BusyError if event.error_code in PASSING_ENDS else Http2Error)("it ended the call")
    return event.data if isinstance(event, DataReceived) and event.data is not None else b""


def _header(event: Event, wanted: str) -> str:
    """What the event's headers say under that name, "" if nothing."""
    headers = event.headers if isinstance(event, ResponseReceived | TrailersReceived) else None
    for name, value in headers or ():
        if name in (wanted.encode(), wanted):
            return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return ""


def _message(body: bytes, status: str, text: str) -> bytes:
    """The one message in a gRPC body. text: the status's, as gRPC sends it."""
    if not body and status in PASSING:
        told = "".join(each if each.isprintable() else " " for each in unquote(text)[:MAX_TEXT])
        raise BusyError(f"it answered with gRPC status {status}" + (f": {told.rstrip('.')}" if told else ""))
    if len(body) < 5 or body[0] or len(body) != 5 + int.from_bytes(body[1:5], "big"):
        raise Http2Error("it gave no answer")
    return body[5:]
