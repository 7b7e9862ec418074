"""The ZMQ server: what a command costs in messages and conversions, and in what order ends of connections are told."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from dataplane.client.rpc import handshake, pending_calls
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.client.rpc.handshake import Socket, dealer_socket
from dataplane.config import DataPlaneConfig
from dataplane.controller import zmq_server
from dataplane.controller.controller import Controller
from dataplane.controller.requests import Facts, Reply
from dataplane.controller.zmq_server import ZmqServer
from dataplane.core import zmq_io
from dataplane.ledger import commands as c
from dataplane.protocol import codec, zmq_frames
from tests.tls_hello import hello

pytestmark = pytest.mark.integration

WAIT_MS = 20_000
CALLS = 20


class Taken:
    """A handler that keeps what it is given."""

    min_heartbeat_s = 0.0

    def __init__(self) -> None:
        self.items: list[c.Input] = []

    def handle(self, item: c.Input, reply: Reply | None, *, caller: object) -> None:
        self.items.append(item)


@pytest.fixture
def server() -> Iterator[ZmqServer]:
    server = ZmqServer("127.0.0.1", 0)
    server.introduce(Facts(address="here:1", epoch=1, host="host", endpoints=server.endpoints, heartbeat_s=1.0))
    yield server
    server.close()


@pytest.fixture
def dealer(server: ZmqServer) -> Iterator[Socket]:
    context: zmq.Context[Socket] = zmq.Context()
    dealer = dealer_socket(context, server.endpoints[0])
    yield dealer
    dealer.close()
    context.term()


def seal(number: int) -> list[bytes]:
    return zmq_frames.request(c.Call(session=3, number=number, watermark=1, command=c.Seal(partition="p")))


def test_one_message_is_handled_at_a_time(server: ZmqServer, dealer: Socket) -> None:
    taken = Taken()
    assert not server.serve(taken)
    for number in (1, 2):
        dealer.send_multipart(seal(number))
    for count in (1, 2):
        assert server.socket.poll(WAIT_MS)
        assert server.serve(taken)
        assert len(taken.items) == count
    assert not server.serve(taken)


def test_the_end_of_a_connection_is_told_after_what_came_through_it(server: ZmqServer, dealer: Socket) -> None:
    taken = Taken()
    dealer.send_multipart(zmq_frames.request(c.Heartbeat(session=3)))
    for number in (1, 2):
        dealer.send_multipart(seal(number))
    dealer.close(linger=WAIT_MS)
    while not any(isinstance(item, c.SessionSilent) for item in taken.items):
        assert server.monitor.poll(WAIT_MS)
        server.notice_disconnects(taken)
    assert [type(item) for item in taken.items] == [c.Heartbeat, c.Call, c.Call, c.SessionSilent]


def test_the_end_of_a_connection_is_not_told_before_what_came_just_before_it(
    server: ZmqServer, dealer: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes in the middle of a look."""
    taken = Taken()
    real, told = zmq_server.receive_event, list[tuple[int, int]]()

    def ends_now(_: Any) -> bool:
        if not dealer.closed:
            dealer.send_multipart(zmq_frames.request(c.Heartbeat(session=3)))
            dealer.close(linger=WAIT_MS)
            while not told or told[-1][0] != zmq.EVENT_DISCONNECTED:
                assert server.monitor.poll(WAIT_MS)
                told.append(real(server.monitor))
        return bool(told)

    monkeypatch.setattr(zmq_server, "readable", ends_now)
    monkeypatch.setattr(zmq_server, "receive_event", lambda _: told.pop(0))
    server.notice_disconnects(taken)
    assert [type(item) for item in taken.items] == [c.Heartbeat, c.SessionSilent]


def test_the_end_of_an_earlier_connection_with_the_same_descriptor_is_not_the_end_of_a_session(
    server: ZmqServer, dealer: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Taken()
    dealer.send_multipart(zmq_frames.request(c.Heartbeat(session=3)))
    assert server.socket.poll(WAIT_MS)
    assert server.serve(taken)
    (descriptor,) = server._session_of
    events: list[tuple[int, int]] = []
    monkeypatch.setattr(zmq_server, "readable", lambda _: bool(events))
    monkeypatch.setattr(zmq_server, "receive_event", lambda _: events.pop(0))

    def told_of(*kinds: int) -> list[type]:
        taken.items.clear()
        events.extend((kind, descriptor) for kind in kinds)
        server.notice_disconnects(taken)
        return [type(item) for item in taken.items]

    # A client probes the port, closes that connection and connects again. Its heartbeat is read before these events.
    assert told_of(zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED) == []
    # No heartbeat came since. So the connection that ended is the session's, whoever has the descriptor now.
    assert told_of(zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED) == [c.SessionSilent]


def test_a_call_is_one_message_and_one_conversion_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()  # of what was done; whole once the controller has ended

    def count(module: Any, name: str, what: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            counts[what] += 1
            return result

        monkeypatch.setattr(module, name, counted)

    for module, name in ((pending_calls, "RESEND_S"), (handshake, "IPC_WAIT_S"), (handshake, "REPEAT_S")):
        monkeypatch.setattr(module, name, 600.0)  # nothing is said twice, nor once more by TCP, on a slow machine
    quiet = DataPlaneConfig(port=0, heartbeat_s=600.0, session_timeout_s=6000.0)
    with Controller(quiet) as controller:
        client = ControllerChannel.open(DataPlaneConfig(address=controller.address, heartbeat_s=600.0))
        client.call(c.Units())
        count(zmq_server, "receive", "requests received")
        count(zmq_server, "send", "replies sent")
        count(codec, "decode", "requests read")
        count(codec, "to_pb", "replies written")
        count(zmq_io, "send", "requests sent")
        count(zmq_io, "receive", "replies received")
        count(codec, "call_to_pb", "requests written")
        count(codec, "decode_result", "replies read")
        for _ in range(CALLS):
            client.call(c.Units())
        monkeypatch.undo()
        client.close()
    assert counts == dict.fromkeys(
        (
            "requests written",
            "requests sent",
            "requests received",
            "requests read",
            "replies written",
            "replies sent",
            "replies received",
            "replies read",
        ),
        CALLS,
    )


def test_a_tls_handshake_is_named_in_the_log(server: ZmqServer, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.sendall(hello())
        assert server.socket.poll(WAIT_MS)
        assert server.serve(Taken())
    (line,) = caplog.messages
    assert line.startswith("Rejected a request: it looks like a TLS handshake")


def test_bytes_of_another_protocol_are_escaped_in_the_log(
    server: ZmqServer, dealer: Socket, caplog: pytest.LogCaptureFixture
) -> None:
    dealer.send_multipart([b"\xc2\x1b[2J" * 100, b""])
    assert server.socket.poll(WAIT_MS)
    assert server.serve(Taken())
    (line,) = caplog.messages
    assert line.startswith(r"Rejected a request: not a request of this protocol: it begins with b'\xc2\x1b[2J\xc2")
    assert len(line) < 150


def test_a_crowd_finds_space_in_the_queue_of_the_port() -> None:
    """A client connects twice: a thousand that come in one second must not be turned away by the kernel."""
    server = ZmqServer("127.0.0.1", 0)
    try:
        most = int(Path("/proc/sys/net/core/somaxconn").read_text())
        assert queue_of_port(server.port) == min(4096, most)
    finally:
        server.close()


def queue_of_port(port: int) -> int:
    """How many connections to a port of this process may wait to be taken."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue  # a copy of it would stay open
            with socket.socket(fileno=os.dup(int(name))) as listener:
                if listener.family == socket.AF_INET and listener.getsockname()[1] == port:
                    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
                    return int.from_bytes(info[28:32], "little")  # tcpi_sacked: of a listener its backlog
    raise AssertionError(f"nothing of this process listens on port {port}")
