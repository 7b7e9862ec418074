"""The HTTP server: one thread accepts connections, each request has a thread, and all resources are bounded.

Each connection serves one request, which takes a slot once it is received. The server keeps nothing of a request. A
peer that does not speak HTTP occupies a thread for at most `READ_S`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from dataplane.core.addresses import join_address, reachable_host, resolve_host
from dataplane.core.listeners import listens_at, listens_no_more_at
from dataplane.core.ports import require_free_port
from dataplane.protocol.http.messages import HttpError, HttpRequest, Response

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Maximum number of concurrent requests, without health checks; further requests are rejected."""
HEALTH_PATH = "/healthz"
HEALTH_AT_ONCE = 16
"""Separate slots for health checks, so that other requests cannot block them."""
UNREAD = 128
"""Maximum number of connections whose request has not arrived. Above it, the server closes the oldest connection of the
address with the most, so that a client which sends its request at once is always served."""
BACKLOG = 128
MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 4 << 10
MAX_PARAMETERS = 16
READ_S = 10.0
"""Timeout for receiving a request, and for sending the response."""
COMPLAIN_S = 10.0
"""Minimum interval between log lines about rejected requests; any client could otherwise fill a disk with them."""
PART_BYTES = 256 << 10  # of a response, sent at a time
STOP_S = 5.0

Site = Callable[[HttpRequest], Response]
"""Handles a request. Called concurrently, in threads. An `HttpError` becomes its response; any other exception is a
defect."""

_ALWAYS = {
    "Connection": "close",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
}


class HttpServer:
    """Serves the responses of `site` on `host` and `port` (0: any free port), over TLS with a `context`.

    `address` is the "host:port" by which other hosts reach the server. A context manager.

    `_open`: all connections, with their threads. `_unread`: those of them whose request has not arrived.
    """

    def __init__(self, site: Site, host: str, port: int, *, context: ssl.SSLContext | None = None) -> None:
        self._site = site
        self._host = host
        self._port = port
        self._context = context
        self._listener: socket.socket | None = None
        self._wake = -1  # an eventfd that ends `_run`
        self._slots = threading.Semaphore(AT_ONCE)
        self._health_slots = threading.Semaphore(HEALTH_AT_ONCE)
        self._guard = threading.Lock()  # of the next two
        self._open: dict[socket.socket, threading.Thread] = {}
        self._unread: dict[socket.socket, str] = {}  # with the client's address, oldest first
        self._thread: threading.Thread | None = None
        self._rejected = 0  # requests
        self._logged = -math.inf  # when a rejected request was logged last
        self._pid = os.getpid()  # a forked child does not stop the server
        self.address = ""

    def start(self) -> Self:
        """Start the server and return when it listens. Raises OSError with host and port if it cannot listen;
        `PortTakenError` names the process that uses the port."""
        if self._port:
            require_free_port(self._host, self._port)
        address = resolve_host(self._host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, self._port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        port = self._listener.getsockname()[1]
        listens_at([port])  # forked children close the listener
        self.address = join_address(reachable_host(self._host), port)
        self._thread = threading.Thread(target=self._run, name="tq-http", daemon=True)
        self._thread.start()
        return self

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"{'http' if self._context is None else 'https'}://{self.address}"

    def stop(self) -> None:
        """Stop accepting requests and close open connections. Blocks for up to `STOP_S` until their threads end.
        Idempotent; no-op in a forked child."""
        thread, self._thread = self._thread, None
        if thread is None or self._listener is None or self._pid != os.getpid():
            return
        listens_no_more_at([self._listener.getsockname()[1]])
        os.eventfd_write(self._wake, 1)
        thread.join()
        self._listener.close()
        os.close(self._wake)
        with self._guard:
            request_threads = list(self._open.values())
            for peer in self._open:
                _shut_down(peer)
        end = time.monotonic() + STOP_S
        for request_thread in request_threads:
            request_thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the thread that accepts

    def _run(self) -> None:
        """Accept connections until `stop`."""
        assert self._listener is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select()]
                if self._wake in ready:
                    return
                try:
                    peer, (host, *_) = self._listener.accept()
                except BlockingIOError:  # the peer has disconnected meanwhile
                    continue
                except OSError as error:  # no file descriptors are left, or the peer has already disconnected
                    log.warning("HTTP connection could not be accepted: %s", error)
                    time.sleep(0.1)  # the listener stays readable, so the loop would spin
                    continue
                self._start_thread(peer, host)

    def _start_thread(self, peer: socket.socket, host: str) -> None:
        """Start a thread for an accepted connection."""
        thread = threading.Thread(target=self._serve, args=(peer,), name="tq-http-request", daemon=True)
        with self._guard:
            while len(self._unread) >= UNREAD:
                self._close_oldest_unread()
            self._open[peer] = thread
            self._unread[peer] = host
        try:
            thread.start()
        except RuntimeError:  # no more threads
            log.exception("HTTP request rejected: cannot start a thread")
            self._forget_connection(peer)

    def _log_rejected(self, limit: int) -> None:
        """Count a rejected request, and log the count at most once in `COMPLAIN_S`."""
        self._rejected += 1
        if time.monotonic() - self._logged >= COMPLAIN_S:
            self._logged = time.monotonic()
            log.warning(
                "HTTP request rejected: more than %d concurrent requests (%d rejected so far)",
                limit,
                self._rejected,
            )

    def _close_oldest_unread(self) -> None:
        """Close one connection whose request has not arrived, of the host with the most; its thread then ends."""
        ((busiest_host, _),) = Counter(self._unread.values()).most_common(1)
        oldest = next(peer for peer, host in self._unread.items() if host == busiest_host)
        del self._unread[oldest]
        _shut_down(oldest)

    @contextlib.contextmanager
    def _slot(self, peer: socket.socket, request: HttpRequest) -> Iterator[None]:
        """Hold a slot while a received request is handled. Raises `HttpError` if no slot is free."""
        with self._guard:
            self._unread.pop(peer, None)  # its request has arrived
        is_health = request.path == HEALTH_PATH
        slots, limit = (self._health_slots, HEALTH_AT_ONCE) if is_health else (self._slots, AT_ONCE)
        if not slots.acquire(blocking=False):
            self._log_rejected(limit)
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "too many concurrent requests; retry", Retry_After="1")
        try:
            yield
        finally:
            slots.release()

    # --- a thread for each request

    def _serve(self, peer: socket.socket) -> None:
        """Handle one connection, and log its failures. This is the body of its thread."""
        try:
            self._handle_connection(peer)
        except OSError as error:
            log.debug("HTTP client disconnected: %s", error)
        except Exception:
            log.exception("HTTP request failed")
        finally:
            self._forget_connection(peer)

    def _handle_connection(self, peer: socket.socket) -> None:
        """Receive the request of a connection, over TLS if configured, and send the response."""
        peer.settimeout(READ_S)
        slot = functools.partial(self._slot, peer)
        if self._context is None:
            _Exchange(peer, self._site, slot)  # the constructor receives the request and sends the response
            return
        # The TLS socket gets a duplicate descriptor, so that the server can still shut down `peer`.
        with self._context.wrap_socket(peer.dup(), server_side=True) as secured:
            _Exchange(secured, self._site, slot)

    def _forget_connection(self, peer: socket.socket) -> None:
        """Close a connection and drop it from the tables."""
        with self._guard:
            del self._open[peer]
            self._unread.pop(peer, None)
            peer.close()  # under the guard, which threads hold to shut it down


def _shut_down(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


class _Exchange(BaseHTTPRequestHandler):
    """One request on a connection and its response. The standard library parses the head after it is complete.

    The constructor does everything, instead of the standard library's, which it does not call: the attributes without
    underscore are those that the library's methods use. slot: holds a slot of the server while the request is handled.
    `_refused`: the error that the parser reported.
    """

    protocol_version = "HTTP/1.1"

    def __init__(
        self, peer: socket.socket, site: Site, slot: Callable[[HttpRequest], contextlib.AbstractContextManager[None]]
    ) -> None:
        self.connection = peer
        self.close_connection = True
        self.requestline = self.command = ""
        self.request_version = "HTTP/1.0"
        self._site = site
        self._refused: HttpError | None = None
        self._deadline = time.monotonic() + READ_S
        try:
            self._serve_request(slot)
        except TimeoutError:
            log.debug("HTTP client timed out")

    def _serve_request(self, slot: Callable[[HttpRequest], contextlib.AbstractContextManager[None]]) -> None:
        """Receive the request, and send the response or the error."""
        try:
            request = self._receive_request()
            with slot(request):
                self._send(self._response_of(request))
        except HttpError as error:
            self._send(error.response())

    def _response_of(self, request: HttpRequest) -> Response:
        """Return the response of the site. Other errors than those of the connection become responses."""
        try:
            return self._site(request)
        except HttpError as error:
            return error.response()
        except (OSError, ssl.SSLError):  # of the connection, so no response can be sent
            raise
        except Exception:
            log.exception("HTTP request failed: %r", self.requestline[:200])
            return HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the service's log").response()

    def _receive_request(self) -> HttpRequest:
        """Receive and parse the request. Raises `HttpError` if it is malformed or too large."""
        head, rest = self._read_head()
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.raw_requestline = self.rfile.readline()
        # `parse_request` sets `command`, `path` and `headers`, or calls `send_error`, which sets `_refused`.
        if not self.parse_request():
            raise self._refused or HttpError(HTTPStatus.BAD_REQUEST, "malformed HTTP request")
        try:
            parts = urlsplit(self.path)
            pairs = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
        except ValueError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"malformed request URL: {error}") from None
        query = dict(pairs)
        if len(query) != len(pairs):
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the query {parts.query[:80]!r} has a parameter twice")
        return HttpRequest(
            method=self.command,
            path=parts.path,
            query=query,
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self._read_body(rest) if self.command == "POST" else b"",
        )

    def _read_head(self) -> tuple[bytes, bytes]:
        """Return the bytes up to and including the empty line, and the received bytes after it."""
        received = bytearray()
        while (end := received.find(b"\r\n\r\n")) < 0:
            if len(received) > MAX_HEAD_BYTES:  # rejected below
                break
            part = self._receive()
            if not part:
                raise ConnectionError("the client closed the connection before its request was complete")
            received += part
        if end < 0 or end > MAX_HEAD_BYTES:
            raise HttpError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"request line and headers exceed {MAX_HEAD_BYTES:,} bytes"
            )
        return bytes(received[: end + 4]), bytes(received[end + 4 :])

    def _read_body(self, received: bytes) -> bytes:
        """Return the body of the request, which begins with the bytes `received`. Raises `HttpError`."""
        length = self.headers.get("Content-Length", "0")
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdigit()):
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, "a request body requires Content-Length")
        if len(length) > 9 or int(length) > MAX_BODY_BYTES:  # `int` parses only short texts
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request body exceeds {MAX_BODY_BYTES:,} bytes")
        body = bytearray(received)
        while len(body) < int(length):
            part = self._receive()
            if not part:
                raise ConnectionError("the client closed the connection before its request was complete")
            body += part
        return bytes(body[: int(length)])

    def _receive(self) -> bytes:
        """Return the next bytes of the request; b"" at its end. Raises TimeoutError at the deadline of the request."""
        rest_s = self._deadline - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError
        self.connection.settimeout(rest_s)
        part: bytes = self.connection.recv(4096)
        return part

    def _send(self, response: Response) -> None:
        """Send the response within `READ_S`. Raises TimeoutError."""
        head = self._head(response)
        whole = memoryview(head + (b"" if self.command == "HEAD" else response.body))
        deadline = time.monotonic() + READ_S
        for first in range(0, len(whole), PART_BYTES):  # each part gets the time that is left as its timeout
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            self.connection.sendall(whole[first : first + PART_BYTES])

    def _head(self, response: Response) -> bytes:
        """Return the status line and the headers. Headers of the response replace the server's."""
        headers: Mapping[str, str] = {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "Cache-Control": "no-store",
            **_ALWAYS,
            **response.headers,
        }
        lines = [f"HTTP/1.1 {response.status.value} {response.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    # --- callbacks of the standard library's parser

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self._refused = HttpError(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def handle_expect_100(self) -> bool:
        self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
