"""The HTTP server: what it takes, what it refuses, and that it ends."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.config import DataPlaneConfig
from dataplane.core.addresses import split_address
from dataplane.protocol.http import server as server_module
from dataplane.protocol.http.messages import HttpError, HttpRequest, Parameters, Response, as_json, plain
from dataplane.protocol.http.server import MAX_BODY_BYTES, MAX_HEAD_BYTES, HttpServer
from dataplane.protocol.tls import server_context
from tests.restarts import wait_until
from tests.secure import tls
from tests.web_client import WAIT_S, ask, context, raw

pytestmark = pytest.mark.integration


def echo(request: HttpRequest) -> Response:
    if request.path == "/defect":
        raise ZeroDivisionError("of all things")
    if request.path == "/refused":
        raise HttpError(HTTPStatus.IM_A_TEAPOT, "short and stout", X_Handle="yes")
    return as_json({"path": request.path, "query": request.query, "body": request.body.decode(), "way": request.method})


@pytest.fixture(autouse=True, scope="module")
def _busy_machine() -> Iterator[None]:
    """A client that a busy machine delays is not hung up on."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_module, "READ_S", WAIT_S)
        yield


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with HttpServer(echo, "127.0.0.1", 0) as server:
        yield server.address


def test_a_request_is_what_its_site_makes_of_it(address: str) -> None:
    got = ask(address, "/a/b?x=1&y=%C3%A4%20&z=")
    assert got.json == {"path": "/a/b", "query": {"x": "1", "y": "ä ", "z": ""}, "body": "", "way": "GET"}
    assert got.headers["content-type"] == "application/json"
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["cross-origin-resource-policy"] == "same-origin", "pages of others cannot even embed it"
    assert "frame-ancestors 'none'" in got.headers["content-security-policy"]
    assert got.headers["connection"] == "close"


def test_a_refusal_says_what_its_site_says(address: str) -> None:
    got = ask(address, "/refused")
    assert (got.status, got.headers["x-handle"]) == (418, "yes")
    assert got.json["message"] == "short and stout"


def test_a_defect_is_logged_and_no_secret_of_its_own_goes_out(address: str, caplog: pytest.LogCaptureFixture) -> None:
    got = ask(address, "/defect")
    assert got.status == 500
    assert "of all things" not in got.text
    assert "of all things" in caplog.text
    assert ask(address, "/").status == 200


def test_a_body_is_read_to_its_length(address: str) -> None:
    assert ask(address, "/", "POST", body=b"token=x").json["body"] == "token=x"


def test_a_head_is_answered_without_a_body(address: str) -> None:
    got = ask(address, "/", "HEAD")
    assert (got.status, got.body) == (200, b"")


REFUSED: list[tuple[bytes, int]] = [
    (b"\r\n\r\n", 400),
    (b"GET\r\n\r\n", 400),
    (b"GET / HTTP/9.9.9\r\n\r\n", 400),
    (b"GET / HTTP/3.0\r\n\r\n", 505),
    (b"GET / HTTP/x\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    (b"GET http://[::1/x HTTP/1.1\r\n\r\n", 400),
    (b"GET /?x=%ff HTTP/1.1\r\n\r\n", 400),
    (b"GET /?x=1&x=2 HTTP/1.1\r\n\r\n", 400),
    (b"GET /?" + b"&".join(b"p%d=1" % n for n in range(40)) + b" HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n", 431),
    (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nX: " + b"y" * (4 * MAX_HEAD_BYTES), 431),
    (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411),
    (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), 413),
    (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n", 413),
]


@pytest.mark.parametrize(("sent", "status"), REFUSED, ids=[f"{sent[:24]!r}-{len(sent)}" for sent, _ in REFUSED])
def test_what_is_malformed_or_too_large_is_refused(address: str, sent: bytes, status: int) -> None:
    got = raw(address, sent)
    if not got:  # what was not read made the kernel reset the connection before the answer
        assert len(sent) > MAX_HEAD_BYTES
        return
    head, _, body = got.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert {"error", "message"} == set(json.loads(body))
    assert ask(address, "/").status == 200


def test_who_hangs_up_in_the_middle_costs_nothing(address: str) -> None:
    for sent in (b"", b"GET / HT", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"):
        with socket.create_connection(split_address(address)) as peer:
            peer.sendall(sent)
    assert ask(address, "/").status == 200


def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_S", 0.2)
    with (
        HttpServer(echo, "127.0.0.1", 0) as server,
        socket.create_connection(split_address(server.address), timeout=WAIT_S) as peer,
    ):
        peer.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):  # it was hung up on before that was read
            assert peer.recv(1) == b""


def test_who_sends_one_byte_at_a_time_is_hung_up_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_S", 0.3)
    with (
        HttpServer(echo, "127.0.0.1", 0) as server,
        socket.create_connection(split_address(server.address), timeout=WAIT_S) as peer,
    ):
        end = time.monotonic() + WAIT_S
        peer.settimeout(0.01)
        while time.monotonic() < end:
            try:
                peer.sendall(b"x")
                if peer.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        pytest.fail("it was listened to for ever")


def test_more_at_once_than_are_taken_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "AT_ONCE", 2)
    monkeypatch.setattr(server_module, "COMPLAIN_S", 3600.0)
    came, go = threading.Semaphore(0), threading.Event()

    def slow(request: HttpRequest) -> Response:
        came.release()
        assert go.wait(WAIT_S)
        return plain("done")

    with HttpServer(slow, "127.0.0.1", 0) as server, caplog.at_level(logging.WARNING):
        got: list[int] = []
        threads = [threading.Thread(target=lambda: got.append(ask(server.address, "/").status)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert came.acquire(timeout=WAIT_S)
        assert came.acquire(timeout=WAIT_S)
        for _ in range(3):
            assert raw(server.address, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 ")
        go.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert got == [200, 200]
        wait_until(lambda: server._slots._value == 2, "both places are free")
        assert ask(server.address, "/").status == 200
    assert [record.getMessage() for record in caplog.records if record.name == server_module.__name__] == [
        "HTTP request rejected: more than 2 concurrent requests (1 rejected so far)"
    ]


def test_who_draws_a_handshake_out_gives_its_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UNREAD", 1)
    secured = server_context(DataPlaneConfig(**tls()).tls)
    with (
        HttpServer(echo, "127.0.0.1", 0, context=secured) as server,
        socket.create_connection(split_address(server.address), timeout=WAIT_S) as slow,
    ):
        slow.sendall(b"\x16\x03\x01")
        wait_until(lambda: server._open, "the slow one's turn")
        assert ask(server.address, "/", context=context()).status == 200
        assert slow.recv(1) == b""


def test_who_says_nothing_keeps_nobody_from_health() -> None:
    count = 2 * server_module.UNREAD
    with HttpServer(echo, "127.0.0.1", 0) as server, contextlib.ExitStack() as ends:
        where = split_address(server.address)
        silent = [ends.enter_context(socket.create_connection(where, timeout=WAIT_S)) for _ in range(count)]
        assert ask(server.address, server_module.HEALTH_PATH).status == 200
        assert len(server._unread) <= server_module.UNREAD
        assert silent[0].recv(1) == b"", "the first to come is the first to go"
        silent[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert silent[-1].recv(12) == b"HTTP/1.1 200"


def test_health_is_told_while_every_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "AT_ONCE", 1)
    came, go = threading.Semaphore(0), threading.Event()

    def slow(request: HttpRequest) -> Response:
        if request.path != server_module.HEALTH_PATH:
            came.release()
            assert go.wait(WAIT_S)
        return plain("done")

    with HttpServer(slow, "127.0.0.1", 0) as server:
        asking = threading.Thread(target=ask, args=(server.address, "/"))
        asking.start()
        try:
            assert came.acquire(timeout=WAIT_S)
            assert ask(server.address, "/").status == 503
            assert ask(server.address, server_module.HEALTH_PATH).status == 200
        finally:
            go.set()
            asking.join(WAIT_S)


@settings(max_examples=200, deadline=None)
@given(
    sent=st.binary(max_size=300) | st.builds(lambda a, b: b"GET /" + a + b" HTTP/1.1\r\n" + b, st.binary(), st.binary())
)
def test_any_bytes_are_answered_or_hung_up_on(address: str, sent: bytes) -> None:
    got = raw(address, sent + b"\r\n\r\n")
    assert got == b"" or re.match(rb"HTTP/1.1 [2345]\d\d ", got)
    assert b"500" not in got[:12], "a defect"


def test_stopping_hangs_up_on_whoever_is_there() -> None:
    server = HttpServer(echo, "127.0.0.1", 0).start()
    with socket.create_connection(split_address(server.address), timeout=WAIT_S) as peer:
        peer.sendall(b"GET /")
        server.stop()
        server.stop()
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split_address(server.address), timeout=WAIT_S)


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with HttpServer(echo, "127.0.0.1", 0) as server:
        port = split_address(server.address)[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            HttpServer(echo, "127.0.0.1", port).start()


def test_it_answers_at_an_ipv6_address() -> None:
    with HttpServer(echo, "::1", 0) as server:
        assert server.address.startswith("[::1]:")
        assert ask(server.address, "/").status == 200


def parameters(**query: str) -> Parameters:
    return Parameters(HttpRequest(method="GET", path="/api/x", query=query), "name", "count")


def test_parameters_are_what_was_asked_for() -> None:
    asked = parameters(name="a b", count="7")
    assert (asked.text("name"), asked.number("count")) == ("a b", 7)
    assert parameters().number("count", 5) == 5


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: parameters(nme="x"), "/api/x has no parameter 'nme'; valid parameters: name, count"),
        (lambda: parameters().text("name"), "/api/x requires the parameter 'name'"),
        (lambda: parameters(count="-1").number("count"), "count='-1': expected a whole number"),
        (lambda: parameters(count="1e9").number("count"), "expected a whole number"),
        (lambda: parameters(count="\u0663").number("count"), "expected a whole number"),
        (lambda: parameters(count="9" * 30).number("count"), "expected a whole number"),
        (lambda: parameters(count="11").number("count", most=10), "at most 10"),
    ],
)
def test_parameters_that_are_wrong_are_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("(", "\\(")):
        make()
