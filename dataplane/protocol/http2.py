"""One unary gRPC call over an existing socket.

Clients never load gRPC (see `client.rpc.handshake`), but must request keys from a service's gRPC server. Only the
status and its text are read from the reply's headers, so the method must return its errors in the reply message.
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
"""Maximum size of a reply; smaller than the initial HTTP/2 window."""
MAX_TRAFFIC_BYTES = 64 << 10
RECEIVE_BYTES = 16 << 10
PASSING = frozenset({"1", "2", "4", "8", "13", "14"})
"""gRPC statuses of a server that is busy or starting: cancelled, unknown, deadline, exhausted, internal, unavailable.
"""
PASSING_ENDS = frozenset(
    {
        ErrorCodes.NO_ERROR,
        ErrorCodes.INTERNAL_ERROR,
        ErrorCodes.REFUSED_STREAM,
        ErrorCodes.CANCEL,
        ErrorCodes.ENHANCE_YOUR_CALM,
    }
)
"""HTTP/2 error codes of such a server. gRPC ends a connection with an internal error if it was too busy to read the
beginning of the connection."""
MAX_TEXT = 300
"""Maximum number of characters of a status's text in an error."""
LOOK_S = 0.1
"""Maximum time of a read before `rest` is called again."""

Rest = Callable[[], float]


class Http2Error(Exception):
    """The server does not behave like a gRPC server. Never leaves this package."""


class HungUpError(Http2Error):
    """The server closed the connection before it sent data."""


class BusyError(Http2Error):
    """A gRPC server ended the call with a transient error."""


def call(
    peer: socket.socket, method: str, message: bytes, *, authority: str, metadata: Mapping[str, str], rest: Rest
) -> bytes:
    """Call the unary `method` ("/package.Service/Name") and return the reply message. `rest()`, which is called often,
    returns the seconds left. Raises `Http2Error`, OSError (including TimeoutError), and the errors of `rest`."""
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
        raise Http2Error(f"the server there does not speak HTTP/2: {error}") from error


def _answer(peer: socket.socket, connection: H2Connection, rest: Rest) -> bytes:
    """Receive the reply and return its message."""
    body, received, status, text = b"", 0, "", ""
    while received <= MAX_TRAFFIC_BYTES:
        peer.sendall(connection.data_to_send())
        arrived = _arrived(peer, rest)
        if not arrived:
            raise (Http2Error if received else HungUpError)("it closed the connection")
        received += len(arrived)
        for event in connection.receive_data(arrived):
            body += _data(event)
            status = _header(event, "grpc-status") or status
            text = _header(event, "grpc-message") or text
            if len(body) > MAX_ANSWER_BYTES:
                raise Http2Error("its reply is too long")
            if isinstance(event, StreamEnded):
                return _message(body, status, text)
    raise Http2Error("its reply is too long")


def _arrived(peer: socket.socket, rest: Rest) -> bytes:
    """Receive bytes; call `rest` at least every `LOOK_S`. Raises TimeoutError when its time is over."""
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
    """Return the value of a header of the event, "" if it is absent."""
    headers = event.headers if isinstance(event, ResponseReceived | TrailersReceived) else None
    for name, value in headers or ():
        if name in (wanted.encode(), wanted):
            return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return ""


def _message(body: bytes, status: str, text: str) -> bytes:
    """Return the single message in a gRPC body. text: the status's text, percent-encoded by gRPC."""
    if not body and status in PASSING:
        told = "".join(each if each.isprintable() else " " for each in unquote(text)[:MAX_TEXT])
        raise BusyError(f"it replied with gRPC status {status}" + (f": {told.rstrip('.')}" if told else ""))
    if len(body) < 5 or body[0] or len(body) != 5 + int.from_bytes(body[1:5], "big"):
        raise Http2Error("it sent no valid reply")
    return body[5:]
