"""One gRPC call without gRPC: what servers may answer, and what none of ours does."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded

from dataplane.client.rpc.handshake import is_slow
from dataplane.errors import ServiceUnavailableError
from dataplane.protocol import http2, server_keys, tls

WAIT_S = 60.0
SETTINGS, PING, HEADERS, DATA, RST, GOAWAY = 4, 6, 1, 0, 3, 7
MESSAGE = b"\0" + (5).to_bytes(4, "big") + b"hello"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


BEGIN = frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, b"\x88")
END = frame(HEADERS, 5, 1, b"\x88")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def call(near: socket.socket, authority: str = "host:1", **metadata: str) -> bytes:
    return http2.call(
        near, "/package.Service/Method", b"ask", authority=authority, metadata=metadata, time_left=lambda: WAIT_S
    )


@pytest.mark.parametrize(
    "answer",
    [
        BEGIN + frame(DATA, 0, 1, MESSAGE) + END,
        BEGIN + frame(DATA, 1, 1, MESSAGE),
        BEGIN + frame(DATA, 0, 1, MESSAGE[:3]) + frame(PING, 0, 0, b"8 bytes!") + frame(DATA, 0, 1, MESSAGE[3:]) + END,
        BEGIN + frame(DATA, 8, 1, b"\x04" + MESSAGE + bytes(4)) + END,
        BEGIN + frame(8, 0, 0, b"\0\0\0\1") + frame(0xAB, 0, 0, b"unknown") + frame(DATA, 0, 1, MESSAGE) + END,
    ],
    ids=["usual", "ended by its data", "in parts", "padded", "with other frames"],
)
def test_an_answer_is_read_however_it_is_cut(pair: tuple[socket.socket, socket.socket], answer: bytes) -> None:
    near, far = pair
    far.sendall(answer)
    assert call(near) == b"hello"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed the connection"),
        (BEGIN[:-1], "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "closed the connection"),
        (BEGIN + END, "no valid reply"),
        (BEGIN + frame(DATA, 1, 1, MESSAGE[:-1]), "no valid reply"),
        (BEGIN + frame(DATA, 1, 1, b"\1" + MESSAGE[1:]), "no valid reply"),
        (BEGIN + frame(DATA, 9, 1, b""), "does not speak HTTP/2"),
        (BEGIN + frame(DATA, 0, 3, b"of another stream"), "does not speak HTTP/2"),
        (BEGIN + frame(RST, 0, 1, bytes(4)), "ended the call"),
        (BEGIN + frame(GOAWAY, 0, 0, bytes(8)), "ended the call"),
        (BEGIN + frame(DATA, 0, 1, bytes(16000)) * 3, "too long"),
        (frame(8, 0, 0, b"\0\0\0\1") * 6000, "too long"),
    ],
)
def test_what_is_no_answer_of_ours_is_an_error(
    pair: tuple[socket.socket, socket.socket], answer: bytes, why: str
) -> None:
    near, far = pair
    sender = threading.Thread(target=lambda: (far.sendall(answer), far.shutdown(socket.SHUT_WR)))
    sender.start()
    with pytest.raises(http2.Http2Error, match=why):
        call(near)
    near.close()
    sender.join(WAIT_S)


def test_silence_ends_in_time(pair: tuple[socket.socket, socket.socket]) -> None:
    near, _ = pair
    with pytest.raises(TimeoutError):
        http2.call(near, "/m", b"", authority="a", metadata={}, time_left=lambda: 0.01)


def test_long_headers_and_the_message_arrive(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.sendall(BEGIN + frame(DATA, 1, 1, MESSAGE))
    call(near, authorization="Bearer " + "t" * 300)
    server = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
    server.initiate_connection()
    asked, sent = server.receive_data(far.recv(1 << 16)), {}
    for event in asked:
        if isinstance(event, RequestReceived):
            sent = dict(event.headers or [])
    assert (sent["authorization"], sent[":path"]) == ("Bearer " + "t" * 300, "/package.Service/Method")
    assert [event.data for event in asked if isinstance(event, DataReceived)] == [b"\0\0\0\0\3ask"]


@pytest.mark.parametrize("end", [frame(RST, 0, 1, bytes([0, 0, 0, 7])), frame(GOAWAY, 0, 0, bytes([0] * 7 + [2]))])
def test_a_server_that_ends_the_call_for_now_is_busy(pair: tuple[socket.socket, socket.socket], end: bytes) -> None:
    """As gRPC does, with an internal error, where for ten seconds it was too busy to read what was sent."""
    near, far = pair
    far.sendall(BEGIN + end)
    with pytest.raises(http2.BusyError, match="it ended the call"):
        call(near)


@pytest.mark.parametrize("end", [frame(RST, 0, 1, bytes([0, 0, 0, 1])), frame(GOAWAY, 0, 0, bytes([0] * 7 + [1]))])
def test_a_server_that_does_not_like_the_call_is_none_of_ours(
    pair: tuple[socket.socket, socket.socket], end: bytes
) -> None:
    near, far = pair
    far.sendall(BEGIN + end)
    with pytest.raises(http2.Http2Error, match="it ended the call") as caught:
        call(near)
    assert not isinstance(caught.value, http2.BusyError)


def test_a_server_that_is_busy_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.sendall(BEGIN + frame(HEADERS, 5, 1, b"\0\x0bgrpc-status\x0214"))
    with pytest.raises(http2.BusyError, match="gRPC status 14"):
        call(near)


def test_the_text_of_a_status_is_told_in_part_and_changes_no_terminal(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    far.settimeout(WAIT_S)
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    text = "too%20many%3A%205%25 %1B[2J" + "x" * 1000 + "."
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(call, near)
        while not any(isinstance(event, StreamEnded) for event in server.receive_data(far.recv(1 << 16))):
            pass
        headers = {":status": "200", "grpc-status": "8", "grpc-message": text}
        server.send_headers(1, list(headers.items()), end_stream=True)
        far.sendall(server.data_to_send())
        with pytest.raises(http2.BusyError, match=r"gRPC status 8: too many: 5%  \[2Jx{200,300}$"):
            asked.result(WAIT_S)


def test_a_service_that_was_busy_until_the_end_has_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception] = [http2.BusyError("it replied with gRPC status 8: too many"), TimeoutError("timed out")]
    monkeypatch.setattr(server_keys, "_request_keys", raiser(answers))
    monkeypatch.setattr(server_keys, "BUSY_S", 0.001)
    with pytest.raises(ServiceUnavailableError, match=r"a server is listening, but it replied.*too many") as caught:
        server_keys.keys_of("host:1", None, None, deadline=time.monotonic() + WAIT_S)
    assert is_slow(caught.value)
    assert not answers


def raiser(errors: list[Exception]) -> Callable[..., None]:
    def ask(*_: object) -> None:
        raise errors.pop(0)

    return ask


def test_keys_are_asked_for_again_while_the_service_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def ask(address: str, files: object, nonce: bytes, rest: object) -> tuple[bytes, str]:
        asked.append(nonce)
        if len(asked) % 3:
            raise http2.BusyError("it replied with gRPC status 14")
        return b"", ""

    monkeypatch.setattr(server_keys, "_request_keys", ask)
    monkeypatch.setattr(server_keys, "BUSY_S", 0.001)
    assert server_keys.keys_of("host:1", None, None, deadline=time.monotonic() + WAIT_S) == server_keys.OPEN
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(ServiceUnavailableError, match="but it replied with gRPC status 14") as caught:
        server_keys.keys_of("host:1", None, None, deadline=time.monotonic())
    assert is_slow(caught.value)


EOF = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
EOF.reason = ""


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), EOF, http2.Http2Error("it closed")])
def test_a_client_that_stood_still_and_was_hung_up_on_asks_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    answers: list[Exception | bytes] = [error, b""]

    def answer(*_: object, **__: object) -> bytes:
        nonlocal now
        now += server_keys.HANDSHAKE_S
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(server_keys, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None))
    monkeypatch.setattr(server_keys, "dial", lambda *_: socket.socket())
    monkeypatch.setattr(server_keys, "dialed", lambda _: "")
    monkeypatch.setattr(http2, "call", answer)
    assert server_keys.keys_of("host:1", None, None, deadline=WAIT_S) == server_keys.OPEN
    assert not answers


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), EOF, http2.HungUpError("it closed")])
def test_who_is_hung_up_on_at_once_asks_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a service that has as many connections as it takes."""
    asked: list[bytes] = []

    def ask(address: str, files: object, nonce: bytes, rest: object) -> tuple[bytes, str]:
        asked.append(nonce)
        if len(asked) % 3:
            raise error
        return b"", ""

    monkeypatch.setattr(server_keys, "_request_keys", ask)
    monkeypatch.setattr(server_keys, "BUSY_S", 0.001)
    monkeypatch.setattr(tls, "diagnose", lambda *_: None)
    assert server_keys.keys_of("host:1", None, None, deadline=time.monotonic() + WAIT_S) == server_keys.OPEN
    assert len(asked) == 3
    with pytest.raises(ServiceUnavailableError, match="it closes the connection at once: it may have reached"):
        server_keys.keys_of("host:1", None, None, deadline=time.monotonic())
