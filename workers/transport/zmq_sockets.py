"""ZMQ sockets between processes of a job, and the messages that come through them: a head of a known type, and for some
types a frame of bytes after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from dataplane.core.addresses import bracketed, split_address
from dataplane.core.zmq_io import arrived, readable

Socket = zmq.Socket[bytes]
M = TypeVar("M")
_log = logging.getLogger(__name__)


def open_socket(context: zmq.Context[Socket], kind: int, *, linger_ms: int = 0) -> Socket:
    """Whose queues have any length: what may wait in them is bounded by what its users have under way."""
    socket = context.socket(kind)
    for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, linger_ms)):
        socket.set(option, value)
    return socket


def poller(*sockets: zmq.Socket[Any]) -> zmq.Poller:
    """Of what comes through these."""
    found = zmq.Poller()
    for each in sockets:
        found.register(each, zmq.POLLIN)
    return found


def end_silent(socket: Socket, every_ms: int, silence_ms: int) -> None:
    """Have ZMQ's own threads send heartbeats, and end connections of which nothing came for `silence_ms`."""
    socket.set(zmq.HEARTBEAT_IVL, every_ms)
    socket.set(zmq.HEARTBEAT_TIMEOUT, silence_ms)


def connect(socket: Socket, address: str) -> None:
    """To "host:port"."""
    url = url_of(address)
    if "[" in url:
        socket.set(zmq.IPV6, 1)
    socket.connect(url)


def url_of(address: str) -> str:
    """Of "host:port", as ZMQ writes it."""
    host, port = split_address(address)
    return f"tcp://{bracketed(host)}:{port}"


def events(monitor: zmq.Socket[Any]) -> Iterator[tuple[int, int]]:
    """What became of a socket's connections since: the events, and their values."""
    while readable(monitor):
        event: dict[str, Any] = dict(recv_monitor_message(monitor))
        yield event["event"], event["value"]


def received(
    socket: Socket, decode: Callable[[Any], M], reader: str, followed: tuple[type, ...] = ()
) -> Iterator[tuple[bytes, M, list[zmq.Frame]]]:
    """The messages that are there: their route (of a ROUTER), what they say, and their frames without the route. What
    is none of ours is dropped. reader: names who reads, for the log; followed: the types that a frame follows."""
    for frames in arrived(socket):
        route = frames.pop(0).bytes if socket.type == zmq.ROUTER else b""
        try:
            message = decode(frames[0].buffer if frames else b"")
            if len(frames) != 1 + isinstance(message, followed):
                raise msgspec.DecodeError(f"{type(message).__name__} in {len(frames)} frames")
        except msgspec.DecodeError as error:
            _log.warning("a message that is none of ours came to %s, and was dropped: %s", reader, error)
            continue
        yield route, message, frames


def frame(body: Any) -> zmq.Frame:
    """Bytes that are sent from where they are; they must stay as they are."""
    try:
        return zmq.Frame(body, copy=False, track=False)
    except OSError:
        # What is not copied takes pyzmq a descriptor or two, the first time.
        return zmq.Frame(body, copy=True)
