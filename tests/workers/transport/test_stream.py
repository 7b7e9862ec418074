"""Streams of messages: how they are cut, and parts that come and go slowly."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.transport import stream as stream_module
from workers.transport.framing import Message, Splitter, framed, send_some
from workers.transport.stream import Endpoint, Stream

PIECE = 1000
PIECES = 3
BODIES = [b"", b"a", b"body" * 10]


@given(st.lists(st.sampled_from(BODIES), max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_messages_come_out_of_a_stream_however_it_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(framed(body) for body in bodies)
    splitter, found, at = Splitter(), [], 0
    for turn in range(len(stream) + 1):
        size = cuts[turn % len(cuts)]
        splitter.feed(stream[at : at + size])
        at += size
        while (message := splitter.next()) is not None:
            found.append(message.body)
    assert found == bodies


def test_a_payload_is_taken_between_messages() -> None:
    splitter, target = Splitter(), bytearray(7)
    splitter.feed(framed(b"first", 5) + b"12345" + framed(b"second"))
    assert splitter.next() == Message(b"first", 5)
    assert not splitter.rest(memoryview(target)[:5])
    assert splitter.next() == Message(b"second", 0)
    splitter.feed(b"67")
    assert len(splitter.rest(memoryview(target)[5:])) == 0
    assert target == b"1234567"


def test_the_rest_of_a_payload_that_has_not_come_is_left() -> None:
    splitter, target = Splitter(), bytearray(5)
    splitter.feed(b"123")
    left = splitter.rest(memoryview(target))
    left[:] = b"45"
    assert target == b"12345"


def test_a_stream_that_is_none_is_refused() -> None:
    splitter = Splitter()
    splitter.feed(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="exceeds the limit"):
        splitter.next()


def test_endpoints_are_strings_and_back() -> None:
    endpoint = Endpoint(host="boot", name="name", address="127.0.0.1:1", token="t")
    assert Endpoint.parse(str(endpoint)) == endpoint
    with pytest.raises(ValueError, match="not the endpoint"):
        Endpoint.parse("127.0.0.1:1")


@pytest.mark.integration
def test_more_buffers_are_sent_than_the_kernel_takes_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pending = deque(memoryview(b"%04d" % number) for number in range(3000))
        while pending:
            send_some(ours, pending)
        assert theirs.recv(12_000, socket.MSG_WAITALL) == b"".join(b"%04d" % number for number in range(3000))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, socket.socket]]:
    """A stream, and the other end of its connection."""
    monkeypatch.setattr(stream_module, "SILENT_S", 600.0)
    ours, theirs = socket.socketpair()
    with theirs:
        stream = Stream(ours)
        yield stream, theirs
        stream.close()


def _piece_by_piece(stream: Stream, theirs: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another piece comes whenever one is waited for in time."""
    real = stream.wait

    def wait(until: float) -> None:
        assert until > time.monotonic(), "it is waited for no longer"
        theirs.sendall(bytes(PIECE))
        real(until)

    theirs.sendall(bytes(PIECE))
    monkeypatch.setattr(stream, "wait", wait)


@pytest.mark.integration
def test_what_comes_slowly_is_waited_for_while_it_comes(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    _piece_by_piece(*ends, monkeypatch)
    ends[0].receive_into(memoryview(bytearray(PIECES * PIECE)), -math.inf)


@pytest.mark.integration
def test_what_is_dropped_may_come_slowly_too(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, theirs = ends
    _piece_by_piece(stream, theirs, monkeypatch)
    stream.skip(PIECES * PIECE, -math.inf)
    theirs.sendall(b"next")
    assert stream.sock.recv(PIECE) == b"next"


@pytest.mark.integration
def test_what_goes_slowly_is_sent_while_it_goes(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, theirs = ends
    came = 0
    real = stream._wait_for

    def wait(event: int, until: float) -> None:
        nonlocal came
        assert until > time.monotonic(), "it is sent no longer"
        with contextlib.suppress(BlockingIOError):
            while True:
                came += len(theirs.recv(1 << 20, socket.MSG_DONTWAIT))
        real(event, until)

    monkeypatch.setattr(stream, "_wait_for", wait)
    stream.send([bytes(10 << 20)], -math.inf)
    assert came
