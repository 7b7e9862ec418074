"""ZMQ sockets: tcp ports to bind, and messages of several frames in as few calls as there are frames.

pyzmq's own `send_multipart` and `recv_multipart` check every frame first and ask for an option after each, which costs
more than the frames do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from dataplane.core.addresses import bracketed

NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)


def bind_tcp(socket: zmq.Socket[Any], ip: str, port: int = 0) -> int:
    """Bind that port of an address of this host, a free one for 0: the port. `zmq.ZMQError` where it cannot be had."""
    if ":" in ip:
        socket.set(zmq.IPV6, 1)
    socket.bind(f"tcp://{bracketed(ip)}:{port or '*'}")
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def send(socket: zmq.Socket[Any], frames: Sequence[bytes | zmq.Frame], flags: int = 0) -> None:
    """One message, whole or not at all: `zmq.Again` if it would block where `flags` say not to."""
    for frame in frames[:-1]:
        socket.send(frame, flags | _MORE)
    socket.send(frames[-1], flags)


def receive(socket: zmq.Socket[Any], flags: int = 0) -> list[zmq.Frame]:
    """One message; what it came over can be asked of its frames. `zmq.Again` if there is none and `flags` say not to
    block."""
    frames = [socket.recv(flags, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(copy=False))
    return frames


def arrived(socket: zmq.Socket[Any]) -> Iterator[list[zmq.Frame]]:
    """The messages that are there, one after another; does not block."""
    while True:
        try:
            frames = receive(socket, NOBLOCK)
        except zmq.Again:
            return
        yield frames


def readable(socket: zmq.Socket[Any]) -> bool:
    """Whether a message is there."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)
