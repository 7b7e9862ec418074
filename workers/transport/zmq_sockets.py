"""ZMQ sockets between processes of a job. A message is a frame with a struct of a known type, and for some types a
second frame of bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils import garbage
from zmq.utils.monitor import recv_monitor_message

from dataplane.core.addresses import bracketed, split_address
from dataplane.core.zmq_io import arrived, readable
from dataplane.protocol.fd_limits import OF_A_CONTEXT
from workers.errors import OpenFilesError

Socket = zmq.Socket[bytes]
M = TypeVar("M")
_log = logging.getLogger(__name__)


def open_socket(context: zmq.Context[Socket], kind: int, *, linger_ms: int = 0) -> Socket:
    """Open a socket without a limit on its queues: callers bound what they have in flight."""
    socket = context.socket(kind)
    for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, linger_ms)):
        socket.set(option, value)
    return socket


def poller(*sockets: zmq.Socket[Any]) -> zmq.Poller:
    """Return a poller of these sockets for incoming messages."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    return poller


def end_silent(socket: Socket, every_ms: int, silence_ms: int) -> None:
    """Send ZMQ heartbeats every `every_ms`, and close connections that are silent for `silence_ms`."""
    socket.set(zmq.HEARTBEAT_IVL, every_ms)
    socket.set(zmq.HEARTBEAT_TIMEOUT, silence_ms)


def connect(socket: Socket, address: str) -> None:
    """Connect to "host:port"."""
    url = url_of(address)
    if "[" in url:  # an IPv6 address
        socket.set(zmq.IPV6, 1)
    socket.connect(url)


def url_of(address: str) -> str:
    """Return the ZMQ URL of "host:port"."""
    host, port = split_address(address)
    return f"tcp://{bracketed(host)}:{port}"


def events(monitor: zmq.Socket[Any]) -> Iterator[tuple[int, int]]:
    """Yield (event, value) of each unread connection event of a monitored socket."""
    while readable(monitor):
        event: dict[str, Any] = dict(recv_monitor_message(monitor))
        yield event["event"], event["value"]


def received(
    socket: Socket, decode: Callable[[Any], M], reader: str, followed: tuple[type, ...] = ()
) -> Iterator[tuple[bytes, M, list[zmq.Frame]]]:
    """Yield route (of a ROUTER), message, and frames without the route, of each message that has arrived. Malformed
    messages are logged and dropped. reader: name of the receiver, for the log; followed: message types that have a
    second frame."""
    for frames in arrived(socket):
        route = frames.pop(0).bytes if socket.type == zmq.ROUTER else b""  # a ROUTER prepends the sender's identity
        try:
            message = decode(frames[0].buffer if frames else b"")
            expected_frames = 2 if isinstance(message, followed) else 1
            if len(frames) != expected_frames:
                raise msgspec.DecodeError(
                    f"{type(message).__name__} has {len(frames)} frames, expected {expected_frames}"
                )
        except msgspec.DecodeError as error:
            _log.warning("Malformed message to %s dropped: %s", reader, error)
            continue
        yield route, message, frames


def frame(body: Any) -> zmq.Frame:
    """Return a frame that sends `body`, without a copy if possible. `body` must not change until the frame is sent."""
    # The first frame without a copy opens a ZMQ context in pyzmq, which aborts the process if no descriptor is left.
    least = 0 if garbage.gc.is_alive() else OF_A_CONTEXT
    try:
        with OpenFilesError.of("frames without a copy", least=least):
            return zmq.Frame(body, copy=False, track=False)
    except OpenFilesError:
        return zmq.Frame(body, copy=True)
