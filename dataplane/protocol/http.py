"""HTTP of a service or a storage unit: a server with token check, its requests and responses, and
the metrics page.

`HttpServer` is the standard library's, with a bounded number of connections. Each has a thread and
one request.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import io
import ipaddress
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from dataplane.core.addresses import (
    join_address,
    reachable_host,
    resolve_host,
    split_address,
)
from dataplane.core.ports import listens_at, listens_no_more_at, require_free_port
from dataplane.errors import (
    AuthenticationError,
    BadRequestError,
    DataPlaneError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    WaitTimeoutError,
)

log = logging.getLogger(__name__)

CONNECTIONS = 64
"""Maximum number of connections. The next one closes the oldest, so that slow clients cannot keep
others out."""
BACKLOG = 128
MAX_HEAD_BYTES = 16 << 10
MAX_PARAMETERS = 16
READ_S = 10.0
"""Timeout for receiving a request, and for each part of the response that is sent."""
STOP_S = 5.0
POLL_S = 0.05  # between two looks whether the server must stop

REALM = 'realm="data plane: any user, password = token", charset="UTF-8"'
JSON = "application/json"
HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
_ALWAYS = {
    "Connection": "close",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
}


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """A GET request. `path` excludes the query, which has each parameter once."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = ""


@dataclass(frozen=True, kw_only=True)
class Response:
    """The response to a request."""

    body: bytes
    content_type: str = JSON
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[HttpRequest], Response]
"""Called concurrently, in threads. A `DataPlaneError` becomes its response; any other exception is
a defect."""


def as_json(value: Any) -> Response:
    """Return values of the ledger as JSON. Arrays become lists; numbers that JSON cannot represent
    become null."""
    return Response(body=msgspec.json.encode(value, enc_hook=_plain))


def plain(text: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return a plain-text response."""
    return Response(body=text.encode(), content_type=TEXT, status=status)


def metrics(registry: CollectorRegistry) -> Handler:
    """Return a handler that serves the metrics of `registry`, to which those of this process are
    added."""
    ProcessCollector(registry=registry)

    def serve(request: HttpRequest) -> Response:
        encode, content_type = choose_encoder(request.accept)
        return Response(body=encode(registry), content_type=content_type)

    return serve


class Parameters:
    """The parameters of one request. Raises `InvalidRequestError` for missing, malformed or unknown
    parameters."""

    def __init__(self, request: HttpRequest, *known: str) -> None:
        unknown = sorted(set(request.query) - set(known))
        if unknown:
            valid = f"valid parameters: {', '.join(known) or 'none'}"
            why = f"{request.path} has no parameter {unknown[0][:80]!r}; {valid}"
            raise InvalidRequestError(why)
        self._path = request.path
        self._query = request.query

    def text(self, name: str) -> str:
        """Return a required parameter."""
        if name not in self._query:
            raise InvalidRequestError(f"{self._path} requires the parameter {name!r}")
        return self._query[name]

    def number(self, name: str, default: int | None = None, *, most: float = math.inf) -> int:
        """Return a parameter as a whole number from 0 to `most`. It is required if `default` is
        None."""
        if default is not None and name not in self._query:
            return default
        text = self.text(name)
        # Fewer than 19 digits fit into 64 bits.
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) <= most):
            expected = f"expected a whole number, at most {most:,}"
            raise InvalidRequestError(f"{name}={text[:80]!r}: {expected}")
        return int(text)


class HttpServer(ThreadingHTTPServer):
    """Serves `handlers` by path on `host` and `port` (0: any free port), over TLS with a `context`.
    Paths in `public` require no authorization. token: the service's token, or None. A context
    manager.

    Without a token, requests for a foreign host name are rejected, which prevents DNS rebinding by
    a web page, unless clients' certificates protect a service beyond this machine.
    """

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        host: str,
        port: int,
        *,
        token: str | None = None,
        public: Mapping[str, Handler] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.handlers = handlers
        self.public = public or {}
        self._host = host
        self._port = port
        self._token = None if token is None else token.encode()
        self._context = context
        self._guard = threading.Lock()  # of the next
        self._open: dict[socket.socket, threading.Thread] = {}  # connections, oldest first
        self._thread: threading.Thread | None = None  # None: not started, or stopped
        self._pid = os.getpid()  # a forked child does not stop the server
        self.address = ""  # "host:port" by which other hosts reach the server; "" before `start`

    def start(self) -> Self:
        """Start the server and return when it listens. Raises OSError with host and port if it
        cannot listen; `PortTakenError` names the process that uses the port."""
        if self._port:
            require_free_port(self._host, self._port)
        address = resolve_host(self._host)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, self._port), _Exchange)  # binds
        port = self.socket.getsockname()[1]
        listens_at([port])  # forked children close the listener
        self.address = join_address(reachable_host(self._host), port)
        self._thread = threading.Thread(
            target=self.serve_forever,
            args=(POLL_S,),
            name="tq-http",
            daemon=True,
        )
        self._thread.start()
        return self

    def server_bind(self) -> None:
        """Bind without the standard library's look-up of the host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"{'http' if self._context is None else 'https'}://{self.address}"

    def stop(self) -> None:
        """Stop accepting requests and close open connections. Blocks for up to `STOP_S` until their
        threads end. Idempotent; no-op in a forked child."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        listens_no_more_at([self.socket.getsockname()[1]])
        self.shutdown()
        thread.join()
        self.socket.close()
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

    # --- called by the standard library

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError as error:  # no file descriptors are left, or the peer has disconnected
            log.warning("HTTP connection could not be accepted: %s", error)
            time.sleep(0.1)  # the listener stays readable, so the loop would spin
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a new connection, and close the oldest one above `CONNECTIONS`."""
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="tq-http-request",
            daemon=True,
        )
        with self._guard:
            if len(self._open) >= CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _shut_down(oldest)  # its thread then ends
            self._open[request] = thread
        thread.start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection, in its thread."""
        request.settimeout(READ_S)
        if self._context is None:
            _Exchange(request, client_address, self)
            return
        # TLS gets a duplicate descriptor, so that the server can still shut down `request`.
        with self._context.wrap_socket(request.dup(), server_side=True) as secured:
            _Exchange(secured, client_address, self)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection whose thread ends, or could not be started."""
        with self._guard:
            self._open.pop(request, None)
            _shut_down(request)
            request.close()  # under the guard, which threads hold to shut it down

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the exception of a thread, or that of its start."""
        log.debug("HTTP connection failed", exc_info=True)

    # --- authorization

    def refusal_of(self, host: str, authorization: str) -> Response | None:
        """Return the response to a request whose headers do not authorize it; None if they do."""
        if self._token is not None:
            if self._shows_token(authorization):
                return None
            return _error(
                HTTPStatus.UNAUTHORIZED,
                "this service requires its token: send 'Authorization: Bearer TOKEN' or log in",
                {"WWW-Authenticate": f"Basic {REALM}"},
            )
        # Only holders of a certificate have come so far.
        guarded = self._context is not None and self._context.verify_mode == ssl.CERT_REQUIRED
        if guarded or _names_this_machine(host):
            return None
        return _error(
            HTTPStatus.MISDIRECTED_REQUEST,
            "this service has no token, so the host of the URL must be localhost, this machine's "
            "own name or a numeric address",
        )

    def _shows_token(self, authorization: str) -> bool:
        """Whether the header has the token, or a browser's "user:password" with the token as
        password."""
        scheme, _, shown = authorization.partition(" ")
        secret = shown.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return self._token is not None and hmac.compare_digest(secret, self._token)


class _Head(io.RawIOBase):
    """The first `MAX_HEAD_BYTES` of a connection, which must arrive within `READ_S`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MAX_HEAD_BYTES
        self._deadline = time.monotonic() + READ_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise ConnectionError(f"the request exceeds {MAX_HEAD_BYTES:,} bytes")
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        read = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= read
        return read


class _Exchange(BaseHTTPRequestHandler):
    """One request on a connection and its response."""

    protocol_version = "HTTP/1.1"
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Head(self.connection))

    def handle_one_request(self) -> None:
        """Serve the request; a client that is late or disconnects ends the connection."""
        try:
            super().handle_one_request()
        except OSError as error:
            log.debug("HTTP client disconnected: %s", error)
        self.close_connection = True

    def do_GET(self) -> None:
        self._send(self._response())

    def _response(self) -> Response:
        """Return the response of the path's handler."""
        try:
            url = urlsplit(self.path)
            pairs = parse_qsl(
                url.query,
                keep_blank_values=True,
                max_num_fields=MAX_PARAMETERS,
                errors="strict",
            )
        except ValueError as error:
            return _error(HTTPStatus.BAD_REQUEST, f"malformed request URL: {error}")
        query = dict(pairs)
        if len(query) != len(pairs):
            why = f"the query {url.query[:80]!r} has a parameter twice"
            return _error(HTTPStatus.BAD_REQUEST, why)
        handler = self.server.public.get(url.path)
        if handler is None:
            host = self.headers.get("Host", "")
            refusal = self.server.refusal_of(host, self.headers.get("Authorization", ""))
            if refusal is not None:
                return refusal
            handler = self.server.handlers.get(url.path)
        if handler is None:
            return _error(HTTPStatus.NOT_FOUND, f"path {url.path[:80]!r} does not exist")
        request = HttpRequest(path=url.path, query=query, accept=self.headers.get("Accept", ""))
        try:
            return handler(request)
        except DataPlaneError as error:
            return _error(_status(error), str(error), name=type(error).__name__)
        except Exception:
            log.exception("HTTP request failed: %r", self.requestline[:200])
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the service's log")

    def _send(self, response: Response) -> None:
        """Send the response, of which each write may take `READ_S`. Its headers replace the
        server's."""
        self.connection.settimeout(READ_S)
        headers: Mapping[str, str] = {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "Cache-Control": "no-store",
            **_ALWAYS,
            **response.headers,
        }
        self.request_version = self.protocol_version  # HTTP/0.9 would get no headers
        self.send_response_only(response.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(response.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the error of a request that the standard library does not accept."""
        self._send(_error(HTTPStatus(code), message or HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _shut_down(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _error(
    status: HTTPStatus,
    message: str,
    headers: Mapping[str, str] | None = None,
    *,
    name: str = "",
) -> Response:
    """Return the response of an error. name: by default, the status in words."""
    body = {"error": name or status.phrase.replace(" ", ""), "message": message}
    return Response(body=msgspec.json.encode(body), status=status, headers=headers or {})


def _status(error: DataPlaneError) -> HTTPStatus:
    """Return the HTTP status for the class of an error."""
    match error:
        case NotFoundError():
            return HTTPStatus.NOT_FOUND
        case AuthenticationError():
            return HTTPStatus.UNAUTHORIZED
        case BadRequestError():
            return HTTPStatus.BAD_REQUEST
        case ServiceError() | WaitTimeoutError():
            return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _plain(value: Any) -> Any:
    """Convert a numpy value, which the JSON encoder does not support, to Python's lists and
    numbers."""
    match value:
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded as JSON")


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is a numeric address, localhost or this machine's own name, none of
    which a foreign web server can use."""
    own = {"localhost", socket.gethostname().lower()}
    if host.lower().rpartition(":")[0] in own or host.lower() in own:  # with or without a port
        return True
    has_port = ":" in host and not host.endswith("]")  # "[::1]" is an IPv6 address without a port
    try:
        name = split_address(host)[0] if has_port else host.strip("[]")
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
