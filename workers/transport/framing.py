"""Messages in a byte stream: a header (`HEADER`: sizes of body and payload), the body and the payload."""

from __future__ import annotations

import struct
from collections import deque
from itertools import islice
from socket import socket
from typing import NamedTuple

HEADER = struct.Struct("<IQ")
MAX_REQUEST_BYTES = 64 << 20
"""Limit of a request's body."""
MAX_ANSWER_BYTES = (1 << 32) - 1
"""Limit of a response's body, set by the header's format. A batch of many small items has a large body."""
READ_BYTES = 64 << 10
"""How many bytes one call reads at most from a socket, except for payloads."""
PARTS = 64
"""How many buffers are sent in one call. The kernel accepts at most 1024."""


class Message(NamedTuple):
    """A body, and the size of the payload that follows it in the stream."""

    body: bytes
    payload_bytes: int


def framed(body: bytes, payload_bytes: int = 0) -> bytes:
    """Return header and body."""
    return HEADER.pack(len(body), payload_bytes) + body


class Splitter:
    """Splits a byte stream into messages. Call `feed` with received bytes, then `next` until it returns None. Read a
    message's payload from `rest` (and then from the stream) before the next message. limit_bytes: of a body. `_buffer`:
    the bytes that were fed and not returned yet."""

    def __init__(self, limit_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Message | None:
        """Remove and return the next message whose body is complete, or None. ValueError if its body exceeds the
        limit."""
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return None
        body_bytes, payload_bytes = HEADER.unpack_from(buffer)
        if body_bytes > self._limit_bytes:
            raise ValueError(f"message body of {body_bytes:,} bytes exceeds the limit of {self._limit_bytes:,}")
        end = HEADER.size + body_bytes
        if len(buffer) < end:  # the rest of the body has not arrived yet
            return None
        body = bytes(memoryview(buffer)[HEADER.size : end])
        del buffer[:end]
        return Message(body, payload_bytes)

    def rest(self, target: memoryview) -> memoryview:
        """Move fed payload bytes, up to its length, to the start of `target`. Return the part of `target` that is still
        to be filled."""
        count = min(len(target), len(self._buffer))
        target[:count] = memoryview(self._buffer)[:count]
        del self._buffer[:count]
        return target[count:]


def send_some(sock: socket, pending: deque[memoryview]) -> None:
    """Send as much of `pending` as the socket takes in one call, and remove it from `pending`. BlockingIOError if it
    takes nothing."""
    if len(pending) == 1:
        sent = sock.send(pending[0])
    else:
        sent = sock.sendmsg(islice(pending, PARTS))
    # Drop the buffers that were sent completely, and the sent part of the next one.
    while pending and sent >= len(pending[0]):
        sent -= len(pending.popleft())
    if sent:
        pending[0] = pending[0][sent:]
