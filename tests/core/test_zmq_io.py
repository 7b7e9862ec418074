"""ZMQ sockets: tcp ports to bind, and what has come."""

from __future__ import annotations

import pytest
import zmq

from dataplane.core.zmq_io import arrived, bind_tcp, send

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_free_port_is_bound_and_what_has_come_is_read(ip: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as ours, context.socket(zmq.PUSH) as theirs:
        theirs.linger = ours.linger = 0
        port = bind_tcp(ours, ip)
        assert list(arrived(ours)) == []
        theirs.set(zmq.IPV6, 1)
        theirs.connect(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")
        send(theirs, [b"first", b"message"])
        assert ours.poll(60_000)
        assert [[frame.bytes for frame in frames] for frames in arrived(ours)] == [[b"first", b"message"]]


def test_a_port_that_is_taken_is_an_error() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as first, context.socket(zmq.PULL) as second:
        port = bind_tcp(first, "127.0.0.1")
        with pytest.raises(zmq.ZMQError):
            bind_tcp(second, "127.0.0.1", port)
