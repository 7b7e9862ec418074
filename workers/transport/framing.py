"""Messages in a stream of bytes: a header (`HEADER`: bytes of the body, bytes of the payload), a body and a payload."""

from __future__ import annotations

import struct
from collections import deque
from itertools import islice
from socket import socket
from typing import NamedTuple

HEADER = struct.Struct("<IQ")
MAX_REQUEST_BYTES = 64 << 20
"""Of a request's body. An answer's may have as many as the header can say: a batch of many small items has."""
MAX_ANSWER_BYTES = (1 << 32) - 1
READ_BYTES = 64 << 10
PARTS = 64
"""So many buffers are sent in one call, which takes no more than 1024."""


class Message(NamedTuple):
    """A body as it came, and the bytes of payload that follow it."""

    body: bytes
    payload_bytes: int


def framed(body: bytes, payload_bytes: int = 0) -> bytes:
    """Header and body."""
    return HEADER.pack(len(body), payload_bytes) + body


class Splitter:
    """Cuts a stream of bytes into messages. `feed` what came, then take messages until there is none; the payload of
    one must be taken from `rest` (and the stream) before the next. limit_bytes: of a body."""

    def __init__(self, limit_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Message | None:
        """ValueError where the stream is no stream of messages."""
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return None
        body_bytes, payload_bytes = HEADER.unpack_from(buffer)
        if body_bytes > self._limit_bytes:
            raise ValueError(f"a message of {body_bytes:,} bytes; at most {self._limit_bytes:,} are taken")
        end = HEADER.size + body_bytes
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[HEADER.size : end])
        del buffer[:end]
        return Message(body, payload_bytes)

    def rest(self, target: memoryview) -> memoryview:
        """Move what has come already of a payload to the start of `target`; what is left of that."""
        count = min(len(target), len(self._buffer))
        target[:count] = memoryview(self._buffer)[:count]
        del self._buffer[:count]
        return target[count:]


def send_some(sock: socket, pending: deque[memoryview]) -> None:
    """Send as much of what is pending, in one call, as the socket takes now; BlockingIOError if that is nothing."""
    if len(pending) == 1:
        sent = sock.send(pending[0])
    else:
        sent = sock.sendmsg(islice(pending, PARTS))
    while pending and sent >= len(pending[0]):
        sent -= len(pending.popleft())
    if sent:
        pending[0] = pending[0][sent:]
