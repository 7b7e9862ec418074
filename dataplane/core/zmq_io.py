"""Messages of several frames through ZMQ sockets, in as few calls as there are frames.

pyzmq's own `send_multipart` and `recv_multipart` check every frame first and ask for an option after each, which costs
more than the frames do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)


def send(socket: zmq.Socket[Any], frames: Sequence[bytes], flags: int = 0) -> None:
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


def readable(socket: zmq.Socket[Any]) -> bool:
    """Whether a message is there."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)
