"""Binding of ZMQ sockets to TCP ports, and multipart messages with one call per frame.

pyzmq's `send_multipart` and `recv_multipart` check every frame and query a socket option after each frame, which costs
more than the transfer of the frames.

Also a file descriptor that wakes a poll, and conversion of poll timeouts.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from dataplane.core.addresses import bracketed

NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE)
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
_EVENT = struct.Struct("=Hi")


def bind_tcp(socket: zmq.Socket[Any], ip: str, port: int = 0) -> int:
    """Bind the socket to `port` (0: any free port) of a local IP address and return the port. Raises `zmq.ZMQError` if
    binding fails."""
    if ":" in ip:
        socket.set(zmq.IPV6, 1)
    socket.bind(f"tcp://{bracketed(ip)}:{port or '*'}")
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def send(socket: zmq.Socket[Any], frames: Sequence[bytes | zmq.Frame], flags: int = 0) -> None:
    """Send one message, completely or not at all. Raises `zmq.Again` if it would block and `flags` contain NOBLOCK."""
    for frame in frames[:-1]:
        socket.send(frame, flags | _MORE)
    socket.send(frames[-1], flags)


def receive(socket: zmq.Socket[Any], flags: int = 0) -> list[zmq.Frame]:
    """Receive one message as frames, which have the metadata of its connection. Raises `zmq.Again` if no message is
    available and `flags` contain NOBLOCK."""
    frames = [socket.recv(flags, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(copy=False))  # does not block: a message arrives as a whole
    return frames


def arrived(socket: zmq.Socket[Any]) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that have arrived. Does not block."""
    while True:
        try:
            frames = receive(socket, NOBLOCK)
        except zmq.Again:
            return
        yield frames


def receive_event(monitor: zmq.Socket[Any]) -> tuple[int, int]:
    """Receive one event of a socket's monitor, as its number and its value. pyzmq's `recv_monitor_message` takes 80 us
    for its enums."""
    description, _ = monitor.recv_multipart()
    event, value = _EVENT.unpack(description)
    return event, value


def readable(socket: zmq.Socket[Any]) -> bool:
    """Whether a message has arrived."""
    return bool(int(socket.get(EVENTS)) & POLLIN)


LONGEST_MS = 1 << 30
"""Maximum timeout of one poll, which takes 31 bits. Callers with longer waits poll again."""


def poll_ms(left_s: float) -> int:
    """Convert `left_s` seconds to a poll timeout in milliseconds: rounded up, at least 0, at most `LONGEST_MS`."""
    return math.ceil(1000 * max(0.0, min(LONGEST_MS / 1000, left_s)))


class Waker:
    """Wakes a poll from any thread. `fd` is readable from a call of `wake` until `clear`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Make `fd` readable. Does nothing after `close`."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make `fd` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
