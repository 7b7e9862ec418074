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
MAX_TRAFFIC_BYTES = 64 << 10  # maximum size of all that the server sends
RECEIVE_BYTES = 16 << 10  # maximum size of one read
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
"""Maximum time of a read before `time_left` is called again."""

TimeLeft = Callable[[], float]


class Http2Error(Exception):
    """The server does not behave like a gRPC server. Never leaves this package."""


class HungUpError(Http2Error):
    """The server closed the connection before it sent data."""


class BusyError(Http2Error):
    """A gRPC server ended the call with a transient error."""


def call(
    peer: socket.socket,
    method: str,
    message: bytes,
    *,
    authority: str,
    metadata: Mapping[str, str],
    time_left: TimeLeft,
) -> bytes:
    """Call the unary `method` ("/package.Service/Name") and return the reply message. `time_left()`, which is called
    often, returns the seconds left. Raises `Http2Error`, OSError (including TimeoutError), and the errors of
    `time_left`."""
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
        # The message in gRPC's framing: a byte for compression (0: none), four bytes for the length.
        connection.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        return _exchange(peer, connection, time_left)
    except H2Error as error:
        raise Http2Error(
            f"the server there does not speak HTTP/2, so it is another service; check the address ({error})"
        ) from error


def _exchange(peer: socket.socket, connection: H2Connection, time_left: TimeLeft) -> bytes:
    """Send over `peer` what `connection` has queued, receive the reply and return its message."""
    body = b""
    received_bytes = 0
    status = ""
    text = ""
    while received_bytes <= MAX_TRAFFIC_BYTES:
        peer.sendall(connection.data_to_send())  # first the request, then replies to the server's settings and pings
        arrived = _receive_some(peer, time_left)
        if not arrived:
            kind = Http2Error if received_bytes else HungUpError
            raise kind("it closed the connection")
        received_bytes += len(arrived)
        for event in connection.receive_data(arrived):
            body += _data_of(event)
            status = _header_of(event, "grpc-status") or status
            text = _header_of(event, "grpc-message") or text
            if len(body) > MAX_ANSWER_BYTES:
                raise Http2Error(f"its reply is too long (more than {MAX_ANSWER_BYTES:,} bytes); check the address")
            if isinstance(event, StreamEnded):
                return _message_in(body, status, text)
    raise Http2Error(f"its reply is too long (more than {MAX_TRAFFIC_BYTES:,} bytes); check the address")


def _receive_some(peer: socket.socket, time_left: TimeLeft) -> bytes:
    """Receive bytes; call `time_left` at least every `LOOK_S`. Raises TimeoutError when its time is over."""
    while True:
        left_s = time_left()
        peer.settimeout(max(min(left_s, LOOK_S), 0.001))
        try:
            return peer.recv(RECEIVE_BYTES)
        except TimeoutError:
            if left_s <= LOOK_S:  # no time was left for another read
                raise


def _data_of(event: Event) -> bytes:
    """Return the data of the event, b"" if it has none. Raises Http2Error if the server ended the call early."""
    if isinstance(event, StreamReset | ConnectionTerminated):
        kind = BusyError if event.error_code in PASSING_ENDS else Http2Error
        raise kind("it ended the call")
    return event.data if isinstance(event, DataReceived) and event.data is not None else b""


def _header_of(event: Event, wanted: str) -> str:
    """Return the value of a header of the event, "" if it is absent."""
    headers = event.headers if isinstance(event, ResponseReceived | TrailersReceived) else None
    for name, value in headers or ():
        if name in (wanted.encode(), wanted):  # h2 gives bytes here, but its types permit text
            return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return ""


def _message_in(body: bytes, status: str, text: str) -> bytes:
    """Return the single message in a gRPC body. status: the gRPC status, "" if none came; text: its text,
    percent-encoded by gRPC. Raises `BusyError` for a transient status without a message, `Http2Error` for an
    invalid body."""
    if not body and status in PASSING:  # the server sent no message, but a transient error
        shown = "".join(char if char.isprintable() else " " for char in unquote(text)[:MAX_TEXT])
        raise BusyError(f"it replied with gRPC status {status}" + (f": {shown.rstrip('.')}" if shown else ""))
    # A byte for compression (0: none), four bytes for the length, and the message.
    if len(body) < 5 or body[0] or len(body) != 5 + int.from_bytes(body[1:5], "big"):
        raise Http2Error("it sent no valid reply, so it may be another service; check the address")
    return body[5:]
