"""Binding of ZMQ sockets to TCP ports, and multipart messages with one call per frame.

pyzmq's `send_multipart` and `recv_multipart` check every frame and query a socket option after each frame, which costs
more than the transfer of the frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from dataplane.core.addresses import bracketed

NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
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
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)
