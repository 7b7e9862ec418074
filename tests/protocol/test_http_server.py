"""The HTTP server: what it takes, what it refuses, and that it ends."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.config import DataPlaneConfig
from dataplane.core.addresses import split_address
from dataplane.protocol import http as server_module
from dataplane.protocol.http import (
    MAX_HEAD_BYTES,
    HttpRequest,
    HttpServer,
    Parameters,
    Response,
    as_json,
    plain,
)
from dataplane.protocol.tls import server_context
from tests.secure import tls
from tests.web_client import WAIT_S, ask, context, raw

pytestmark = pytest.mark.integration


def echo(request: HttpRequest) -> Response:
    return as_json({"path": request.path, "query": request.query})


def defect(request: HttpRequest) -> Response:
    raise ZeroDivisionError("of all things")


SITE = {"/": echo, "/a/b": echo, "/defect": defect}


@pytest.fixture(autouse=True, scope="module")
def _busy_machine() -> Iterator[None]:
    """A client that a busy machine delays is not hung up on."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_module, "READ_S", WAIT_S)
        yield


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with HttpServer(SITE, "127.0.0.1", 0) as server:
        yield server.address


def test_a_request_is_what_its_site_makes_of_it(address: str) -> None:
    got = ask(address, "/a/b?x=1&y=%C3%A4%20&z=")
    assert got.json == {"path": "/a/b", "query": {"x": "1", "y": "ä ", "z": ""}}
    assert got.headers["content-type"] == "application/json"
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["cross-origin-resource-policy"] == "same-origin", "pages of others cannot even embed it"
    assert "frame-ancestors 'none'" in got.headers["content-security-policy"]
    assert got.headers["connection"] == "close"


def test_a_defect_is_logged_and_no_secret_of_its_own_goes_out(address: str, caplog: pytest.LogCaptureFixture) -> None:
    got = ask(address, "/defect")
    assert got.status == 500
    assert "of all things" not in got.text
    assert "of all things" in caplog.text
    assert ask(address, "/").status == 200


REFUSED: list[tuple[bytes, int]] = [
    (b"\r\n\r\n", 0),
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
    (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 0),
    (b"GET / HTTP/1.1\r\nX: " + b"y" * (4 * MAX_HEAD_BYTES), 0),
    (b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 501),
]


@pytest.mark.parametrize(("sent", "status"), REFUSED, ids=[f"{sent[:24]!r}-{len(sent)}" for sent, _ in REFUSED])
def test_what_is_malformed_or_too_large_is_refused(address: str, sent: bytes, status: int) -> None:
    got = raw(address, sent)
    if not status:  # hung up on
        assert got == b""
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
        HttpServer(SITE, "127.0.0.1", 0) as server,
        socket.create_connection(split_address(server.address), timeout=WAIT_S) as peer,
    ):
        peer.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):  # it was hung up on before that was read
            assert peer.recv(1) == b""


def test_who_sends_one_byte_at_a_time_is_hung_up_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_S", 0.3)
    with (
        HttpServer(SITE, "127.0.0.1", 0) as server,
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


@pytest.mark.parametrize("secure", [False, True])
def test_slow_clients_keep_nobody_out(secure: bool) -> None:
    """Nor do handshakes that are drawn out."""
    secured = server_context(DataPlaneConfig(**tls()).tls) if secure else None
    with HttpServer(SITE, "127.0.0.1", 0, context=secured) as server, contextlib.ExitStack() as ends:
        slow = []
        for _ in range(2 * server_module.CONNECTIONS):
            slow.append(ends.enter_context(socket.create_connection(split_address(server.address), timeout=WAIT_S)))
            slow[-1].sendall(b"\x16\x03\x01" if secure else b"GET / HT")
        assert ask(server.address, "/", context=context() if secure else None).status == 200
        assert len(server._open) <= server_module.CONNECTIONS
        with contextlib.suppress(ConnectionResetError):
            assert slow[0].recv(1) == b"", "the first to come is the first to go"
        if not secure:
            slow[-1].sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
            assert slow[-1].recv(12) == b"HTTP/1.1 200"


def test_a_request_that_takes_long_keeps_nobody_out() -> None:
    came = threading.Event()
    go = threading.Event()

    def long(request: HttpRequest) -> Response:
        came.set()
        assert go.wait(WAIT_S)
        return plain("done")

    with HttpServer({**SITE, "/long": long}, "127.0.0.1", 0) as server, ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, server.address, "/long")
        assert came.wait(WAIT_S)
        assert ask(server.address, "/").status == 200
        go.set()
        assert asked.result(WAIT_S).text == "done"


@settings(max_examples=200, deadline=None)
@given(
    sent=st.binary(max_size=300) | st.builds(lambda a, b: b"GET /" + a + b" HTTP/1.1\r\n" + b, st.binary(), st.binary())
)
def test_any_bytes_are_answered_or_hung_up_on(address: str, sent: bytes) -> None:
    got = raw(address, sent + b"\r\n\r\n")
    assert got == b"" or re.match(rb"HTTP/1.1 [2345]\d\d ", got)
    assert b" 500" not in got[:12], "a defect"


def test_stopping_hangs_up_on_whoever_is_there() -> None:
    server = HttpServer(SITE, "127.0.0.1", 0).start()
    with socket.create_connection(split_address(server.address), timeout=WAIT_S) as peer:
        peer.sendall(b"GET /")
        server.stop()
        server.stop()
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split_address(server.address), timeout=WAIT_S)


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with HttpServer(SITE, "127.0.0.1", 0) as server:
        port = split_address(server.address)[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            HttpServer(SITE, "127.0.0.1", port).start()


def test_it_answers_at_an_ipv6_address() -> None:
    with HttpServer(SITE, "::1", 0) as server:
        assert server.address.startswith("[::1]:")
        assert ask(server.address, "/").status == 200


def parameters(**query: str) -> Parameters:
    return Parameters(HttpRequest(path="/api/x", query=query), "name", "count")


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
