"""One gRPC call over a socket that is there already, in the few lines of HTTP/2 that this takes.

Clients never load gRPC (see `opening`), and yet must ask the gRPC door of a service with TLS for its keys. They make
that one small unary call themselves. What the answer's headers say is not read, so the method must tell its errors in
its answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_ANSWER_BYTES = 32 << 10
"""More is no answer of ours; the window that HTTP/2 begins with is larger."""
MAX_FRAME_BYTES = 16 << 10
MAX_FRAMES = 256

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_HEAD = struct.Struct(">HBBBI")
"""Of a frame: its length in two parts, type, flags, stream."""


class Http2Error(Exception):
    """What answers does not speak as a gRPC server does. Never leaves this package."""


def call(
    peer: socket.socket, method: str, message: bytes, *, authority: str, metadata: Mapping[str, str], rest: Rest
) -> bytes:
    """The message that answers unary `method` ("/package.Service/Name"). Before each read, `rest()` says how many
    seconds that may take. Raises `Http2Error`, OSError (TimeoutError among them)."""
    headers = {
        ":method": "POST",
        ":scheme": "https",
        ":path": method,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        **metadata,
    }
    body = b"\0" + len(message).to_bytes(4, "big") + message
    peer.sendall(
        PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, b"".join(_field(name, value) for name, value in headers.items()))
        + _frame(_DATA, _END_STREAM, 1, body)
    )
    return _message(_answer(peer, rest))


Rest = Callable[[], float]


def _answer(peer: socket.socket, rest: Rest) -> bytes:
    """The body of the answer on stream 1, whole."""
    body = b""
    for _ in range(MAX_FRAMES):
        kind, flags, stream, payload = _receive(peer, rest)
        if kind == _SETTINGS and not flags & _ACK:
            peer.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            peer.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY or (kind == _RST_STREAM and stream == 1):
            raise Http2Error("it ended the call")
        elif kind in (_DATA, _HEADERS) and stream == 1:
            if kind == _DATA:
                body += _without_padding(payload) if flags & _PADDED else payload
            if flags & _END_STREAM:
                return body
        if len(body) > MAX_ANSWER_BYTES:
            break
    raise Http2Error("its answer is too long")


def _without_padding(payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]] if payload else b""


def _message(body: bytes) -> bytes:
    """The one message in a gRPC body."""
    if len(body) < 5 or body[0] or len(body) != 5 + int.from_bytes(body[1:5], "big"):
        raise Http2Error("it gave no answer")
    return body[5:]


def _receive(peer: socket.socket, rest: Rest) -> tuple[int, int, int, bytes]:
    high, low, kind, flags, stream = _HEAD.unpack(_exactly(peer, _HEAD.size, rest))
    length = high << 8 | low
    if length > MAX_FRAME_BYTES:
        raise Http2Error("what answers does not speak HTTP/2")
    return kind, flags, stream & 0x7FFFFFFF, _exactly(peer, length, rest)


def _exactly(peer: socket.socket, nbytes: int, rest: Rest) -> bytes:
    found = b""
    while len(found) < nbytes:
        peer.settimeout(max(rest(), 0.001))
        part = peer.recv(nbytes - len(found))
        if not part:
            raise Http2Error("it hung up")
        found += part
    return found


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def _field(name: str, value: str) -> bytes:
    """A header that no table keeps (HPACK: literal, never indexed)."""
    return b"\x10" + b"".join(_length(len(text)) + text for text in (name.encode(), value.encode()))


def _length(value: int) -> bytes:
    """HPACK's integers behind a prefix of 7 bits."""
    if value < 127:
        return bytes([value])
    value, found = value - 127, b"\x7f"
    while value >= 128:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])
