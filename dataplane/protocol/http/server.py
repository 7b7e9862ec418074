"""The HTTP server: a thread that accepts, one for each request that is under way, and a bound on everything.

One request a connection, which has a place once it is there. Nothing of a request is kept, and what is not HTTP costs a
thread for `READ_S` at most.
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
"""Requests being answered, health apart; further ones are refused."""
HEALTH_PATH = "/healthz"
HEALTH_AT_ONCE = 16
"""Whoever looks after the service gets an answer whatever else is asked."""
UNREAD = 128
"""Connections whose request is not there yet, so that nobody knows who they are. When another comes, the one that has
been there longest goes, of the address that has the most: who says at once what he wants is always heard."""
BACKLOG = 128
MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 4 << 10
MAX_PARAMETERS = 16
READ_S = 10.0
"""How long a client may take to say what it wants, and to take the answer."""
COMPLAIN_S = 10.0
"""How often the log says that connections were not taken: whoever opens them could fill a disk with it."""
PART_BYTES = 256 << 10
STOP_S = 5.0

Site = Callable[[HttpRequest], Response]
"""Answers a request. Called in threads, several at once. An `HttpError` is the response that it says; any other
exception is a defect."""

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
    """Answers on `host`, at `port` (0: any free one) with what `site` says, over TLS with a `context`.

    `address` is "host:port" as others reach it. A context manager.
    """

    def __init__(self, site: Site, host: str, port: int, *, context: ssl.SSLContext | None = None) -> None:
        self._site = site
        self._host = host
        self._port = port
        self._context = context
        self._listener: socket.socket | None = None
        self._wake = -1
        self._slots = threading.Semaphore(AT_ONCE)
        self._health_slots = threading.Semaphore(HEALTH_AT_ONCE)
        self._guard = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._unread: dict[socket.socket, str] = {}
        self._thread: threading.Thread | None = None
        self._turned_away = 0
        self._complained = -math.inf
        self._pid = os.getpid()
        self.address = ""

    def start(self) -> Self:
        """Returns when it listens. OSError, naming host and port, where it cannot: `PortTakenError` says who does."""
        if self._port:
            require_free_port(self._host, self._port)
        address = resolve_host(self._host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, self._port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        port = self._listener.getsockname()[1]
        listens_at([port])
        self.address = join_address(reachable_host(self._host), port)
        self._thread = threading.Thread(target=self._run, name="tq-http", daemon=True)
        self._thread.start()
        return self

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"{'http' if self._context is None else 'https'}://{self.address}"

    def stop(self) -> None:
        """Answer nobody any more: who is being answered is hung up on. Idempotent; in a forked child it does
        nothing."""
        thread, self._thread = self._thread, None
        if thread is None or self._listener is None or self._pid != os.getpid():
            return
        listens_no_more_at([self._listener.getsockname()[1]])
        os.eventfd_write(self._wake, 1)
        thread.join()
        self._listener.close()
        os.close(self._wake)
        with self._guard:
            handlers = list(self._open.values())
            for peer in self._open:
                _hang_up(peer)
        end = time.monotonic() + STOP_S
        for handler in handlers:
            handler.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the thread that accepts

    def _run(self) -> None:
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
                except BlockingIOError:
                    continue
                except OSError as error:  # no file descriptors left, or the peer is gone again
                    log.warning("an HTTP connection was lost: %s", error)
                    time.sleep(0.1)  # the listener stays readable
                    continue
                self._begin(peer, host)

    def _begin(self, peer: socket.socket, host: str) -> None:
        thread = threading.Thread(target=self._serve, args=(peer,), name="tq-http-request", daemon=True)
        with self._guard:
            while len(self._unread) >= UNREAD:
                self._hang_up_on_one()
            self._open[peer] = thread
            self._unread[peer] = host
        try:
            thread.start()
        except RuntimeError:  # no more threads
            log.exception("an HTTP request was not taken")
            self._end(peer)

    def _complain(self) -> None:
        """One more was not taken."""
        self._turned_away += 1
        if time.monotonic() - self._complained >= COMPLAIN_S:
            self._complained = time.monotonic()
            log.warning("more than %d HTTP requests at once: %d not taken so far", AT_ONCE, self._turned_away)

    def _hang_up_on_one(self) -> None:
        """One whose request is not there yet; its thread ends by itself."""
        (most, _), *_ = Counter(self._unread.values()).most_common(1)
        oldest = next(peer for peer, host in self._unread.items() if host == most)
        del self._unread[oldest]
        _hang_up(oldest)

    @contextlib.contextmanager
    def _place(self, peer: socket.socket, request: HttpRequest) -> Iterator[None]:
        """For answering a request, now that it is there. `HttpError` where there is none."""
        with self._guard:
            self._unread.pop(peer, None)
        slots = self._health_slots if request.path == HEALTH_PATH else self._slots
        if not slots.acquire(blocking=False):
            self._complain()
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once; ask again", Retry_After="1")
        try:
            yield
        finally:
            slots.release()

    # --- a thread for each request

    def _serve(self, peer: socket.socket) -> None:
        try:
            self._answer(peer)
        except OSError as error:
            log.debug("an HTTP client is gone: %s", error)
        except Exception:
            log.exception("an HTTP request failed")
        finally:
            self._end(peer)

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(READ_S)
        place = functools.partial(self._place, peer)
        if self._context is None:
            _Exchange(peer, self._site, place)
            return
        # A copy of the descriptor: `peer` stays this server's to shut down.
        with self._context.wrap_socket(peer.dup(), server_side=True) as secured:
            _Exchange(secured, self._site, place)

    def _end(self, peer: socket.socket) -> None:
        with self._guard:
            del self._open[peer]
            self._unread.pop(peer, None)
            peer.close()


def _hang_up(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


class _Exchange(BaseHTTPRequestHandler):
    """One request on a connection and its response; the standard library reads the head once it is all there."""

    protocol_version = "HTTP/1.1"

    def __init__(
        self, peer: socket.socket, site: Site, place: Callable[[HttpRequest], contextlib.AbstractContextManager[None]]
    ) -> None:
        self.connection = peer
        self.close_connection = True
        self.requestline = self.command = ""
        self.request_version = "HTTP/1.0"
        self._site = site
        self._refused: HttpError | None = None
        self._deadline = time.monotonic() + READ_S
        try:
            self._exchange(place)
        except TimeoutError:
            log.debug("an HTTP client took too long")

    def _exchange(self, place: Callable[[HttpRequest], contextlib.AbstractContextManager[None]]) -> None:
        try:
            request = self._request()
            with place(request):
                self._send(self._response(request))
        except HttpError as error:
            self._send(error.response())

    def _response(self, request: HttpRequest) -> Response:
        try:
            return self._site(request)
        except HttpError as error:
            return error.response()
        except (OSError, ssl.SSLError):
            raise
        except Exception:
            log.exception("an HTTP request failed: %r", self.requestline[:200])
            return HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "a defect of the service; its log has more").response()

    def _request(self) -> HttpRequest:
        head, rest = self._read_head()
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.raw_requestline = self.rfile.readline()
        if not self.parse_request():
            raise self._refused or HttpError(HTTPStatus.BAD_REQUEST, "the request is no HTTP")
        try:
            parts = urlsplit(self.path)
            pairs = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
        except ValueError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the address asked for cannot be read: {error}") from None
        query = dict(pairs)
        if len(query) != len(pairs):
            raise HttpError(HTTPStatus.BAD_REQUEST, "a parameter is there twice")
        return HttpRequest(
            method=self.command,
            path=parts.path,
            query=query,
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self._read_body(rest) if self.command == "POST" else b"",
        )

    def _read_head(self) -> tuple[bytes, bytes]:
        """Everything up to the empty line, and what came after it."""
        got = bytearray()
        while (end := got.find(b"\r\n\r\n")) < 0:
            if len(got) > MAX_HEAD_BYTES:
                break
            part = self._receive()
            if not part:
                raise ConnectionError("it hung up before its request was whole")
            got += part
        if end < 0 or end > MAX_HEAD_BYTES:
            raise HttpError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"request line and headers take {MAX_HEAD_BYTES:,} at most"
            )
        return bytes(got[: end + 4]), bytes(got[end + 4 :])

    def _read_body(self, got: bytes) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdigit()):
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, "a body wants a Content-Length")
        if len(length) > 9 or int(length) > MAX_BODY_BYTES:
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body takes {MAX_BODY_BYTES:,} bytes at most")
        body = bytearray(got)
        while len(body) < int(length):
            part = self._receive()
            if not part:
                raise ConnectionError("it hung up before its request was whole")
            body += part
        return bytes(body[: int(length)])

    def _receive(self) -> bytes:
        rest_s = self._deadline - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError
        self.connection.settimeout(rest_s)
        part: bytes = self.connection.recv(4096)
        return part

    def _send(self, response: Response) -> None:
        head = self._head(response)
        whole = memoryview(head + (b"" if self.command == "HEAD" else response.body))
        deadline = time.monotonic() + READ_S
        for first in range(0, len(whole), PART_BYTES):
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            self.connection.sendall(whole[first : first + PART_BYTES])

    def _head(self, response: Response) -> bytes:
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

    # --- what the standard library says while it reads a head

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self._refused = HttpError(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def handle_expect_100(self) -> bool:
        self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
