"""Requests over HTTP, to a server with the site of a guarded service."""

from __future__ import annotations

import base64
import socket
from contextlib import ExitStack
from unittest import mock

from dataplane.controller.http_server import api, health, page
from dataplane.controller.metrics.recorder import Recorder
from dataplane.core.addresses import split_address
from dataplane.errors import DataPlaneError, PartitionNotFoundError
from dataplane.ledger import commands as c
from dataplane.protocol import http as web_server
from dataplane.protocol.http import HttpServer
from tests.fuzz.target import FindingError, Standing, Target

WAIT_S = 60.0
TOKEN = "fuzzed-9c2e"
_KNOWN = (c.Stats, c.Units)


def _answer(command: c.Command) -> c.Result:
    if isinstance(command, _KNOWN):
        return c.StatsReport(epoch=1, now=0.0, units=(), partitions=(), sessions=(), waiting_allocations=0)
    raise PartitionNotFoundError(partition=str(getattr(command, "partition", "")))


def _begin(ends: ExitStack) -> HttpServer:
    ends.enter_context(mock.patch.object(web_server, "READ_S", WAIT_S))  # for a request that a busy machine delays
    handlers = {**page(), **api(_answer, Recorder())}
    public = {"/healthz": health(lambda: "")}
    return ends.enter_context(HttpServer(handlers, "127.0.0.1", 0, token=TOKEN, public=public))


_server = Standing(_begin)


def _exchange(server: HttpServer, data: bytes) -> bytes:
    with socket.create_connection(split_address(server.address), timeout=WAIT_S) as peer:
        got = bytearray()
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while part := peer.recv(1 << 16):
                got += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return bytes(got)


def http_requests(data: bytes) -> None:
    """Any bytes, and then a request that is answered."""
    server = _server()
    got = _exchange(server, data).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    if got and not got.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4", b"HTTP/1.1 501", b"HTTP/1.1 505")):
        raise FindingError(f"answered {got[:60]!r}")
    if not _exchange(server, b"GET /healthz HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200"):
        raise FindingError("the server does not answer")


def http_seeds() -> list[bytes]:
    bearer = f"Authorization: Bearer {TOKEN}\r\n".encode()
    asked = [
        b"/",
        b"/api/stats",
        b"/api/matrix?partition=train&columns=8",
        b"/api/memory?unit=1&cells=16",
        b"/api/why?partition=train&task=policy",
        b"/api/sample?partition=train&id=%C3%A4",
        b"/api/flow",
    ]
    gets = [b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1:1\r\n" + bearer + b"\r\n" for path in asked]
    password = base64.b64encode(f"me:{TOKEN}".encode())
    browser = b"GET / HTTP/1.0\r\nAuthorization: Basic " + password + b"\r\nAccept: */*\r\n\r\n"
    return [*gets, browser, b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx"]


TARGETS = [Target(name="http_requests", run=http_requests, seeds=http_seeds, allowed=(DataPlaneError,))]
