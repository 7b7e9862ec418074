"""The gRPC gateway: all commands for clients in any language, and health.

It runs in one thread with its own event loop. A pending command is a future in that loop and does not block a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from dataplane.config import TlsFiles
from dataplane.controller.event_loop import LedgerThread
from dataplane.controller.grpc_public import HEALTH, Health, PublicCalls, abort, unread
from dataplane.controller.requests import Facts, heartbeat_message, message_of
from dataplane.core.addresses import join_address, reachable_host, resolve_host
from dataplane.core.limited_log import LimitedLog, OneLine
from dataplane.core.ports import require_free_port
from dataplane.errors import (
    DataPlaneError,
    InternalError,
    InvalidRequestError,
    ServiceUnavailableError,
)
from dataplane.ledger import commands as c
from dataplane.protocol import codec
from dataplane.protocol.auth import check_token
from dataplane.protocol.fd_limits import share
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.tls import server_credentials
from dataplane.protocol.zmq_frames import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

CONTROL = pb.DESCRIPTOR.services_by_name["Control"].full_name
PUBLIC = f"/{HEALTH}/Check"
"""The method that needs no token."""
START_S = 30.0  # timeout of the start of the thread, and of `serve`
LIBRARYS_LOG = "grpc._cython.cygrpc"
GRACE_S = 0.5
"""Time in seconds that pending calls may take once the server closes."""
MAX_CALLS = 16384
"""Maximum number of concurrent calls. Further calls fail with RESOURCE_EXHAUSTED."""
CONNECTIONS = 8192
"""Maximum number of concurrent connections. Further connections are closed."""
IDLE_S = 30
"""A connection without a call is closed after this time in seconds. gRPC clients reconnect automatically."""
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Time limit of the TLS and HTTP/2 handshakes of a connection.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Limits how much gRPC reads before the handler of a call, which may reject the call unread.
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.http2.bdp_probe", 0),
)


class GrpcServer:
    """The gRPC server at `host`:`port` (0: any free port). Call `serve`, then `stop`. Raises ValueError for unusable
    files of `tls`, OSError if it cannot listen.

    The calls run in the event loop of its thread, which sets `_loop`, `_ended` (an event: `stop` was called) and
    `_server` before `_ready`.
    """

    def __init__(self, host: str, port: int, token: str | None, tls: TlsFiles | None = None) -> None:
        self._token = token
        credentials = None if tls is None else server_credentials(tls)  # raises early if the files are unusable
        if port:
            require_free_port(host, port)  # gRPC would also print an error for a taken port
        self._ready = threading.Event()  # the server exists, or its thread has failed
        self._quiet = OneLine(LimitedLog(log))  # limits the log lines of the gRPC library
        logging.getLogger(LIBRARYS_LOG).addFilter(self._quiet)
        self._thread = threading.Thread(target=self._loop_forever, name="tq-grpc", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_S) or not self._thread.is_alive():
            raise InternalError(what="the gRPC server did not start")
        address = join_address(resolve_host(host), port)
        try:
            bound = self._run(self._bind(address, credentials))
        except RuntimeError as error:
            self.stop(START_S)
            raise OSError(f"cannot listen on {address}: {error}") from error
        self.address = join_address(reachable_host(host), bound)

    def _loop_forever(self) -> None:
        """Run the event loop of the server. This is the body of its thread."""
        try:
            asyncio.run(self._main())
        except Exception:
            log.critical("gRPC server failed and no longer accepts calls", exc_info=True)
        finally:
            logging.getLogger(LIBRARYS_LOG).removeFilter(self._quiet)
            self._ready.set()

    async def _main(self) -> None:
        """Create the server, then wait until `stop` and end it."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        connections = share(4, CONNECTIONS)  # at most a quarter of the files that this process may open
        bounds = (
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.max_connection_idle_ms", 1000 * IDLE_S),
        )
        # A local variable of this frame keeps the server alive in a forked child, which must not destroy it, because
        # the destructor needs gRPC's threads.
        server = self._server = grpc.aio.server(
            interceptors=[_TokenCheck(self._token)], options=OPTIONS + bounds, maximum_concurrent_rpcs=MAX_CALLS
        )
        self._ready.set()
        await self._ended.wait()
        await server.stop(GRACE_S)

    async def _bind(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Listen on `address`, with TLS if there are credentials. Return the port. Raises RuntimeError, gRPC's
        error."""
        if credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, credentials)

    def serve(self, ledger_thread: LedgerThread, facts: Facts, why_not: Callable[[], str]) -> None:
        """Start to accept calls. why_not: see `Health`."""
        self._run(self._serve(_Service(ledger_thread, facts, self._loop), Health(why_not)))

    async def _serve(self, service: _Service, health: Health) -> None:
        """Register the handlers and start to accept calls."""
        self._server.add_generic_rpc_handlers((service.handler(), health.handler()))
        await self._server.start()

    def stop(self, timeout_s: float) -> None:
        """Stop all calls and the thread. Blocks for up to `timeout_s`, then logs an error. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.error("gRPC server did not close within %.1f s", timeout_s)

    def _run(self, job: Coroutine[Any, Any, T]) -> T:  # in the server's loop
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(START_S)


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Checks the token of every call that requires one. The body of a rejected call is not read."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._public_calls = PublicCalls()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Return the handler of a call, None for an unknown method. If the method needs a token and the call has no
        valid one, the handler ends the call with AuthenticationError."""
        if details.method == PUBLIC:
            handler = await continuation(details)
            return None if handler is None else self._public_calls.counted(handler)
        header = dict(details.invocation_metadata or ()).get("authorization", "")
        try:
            check_token(self._token, str(header).removeprefix("Bearer ").encode(), peer="the controller")
        except DataPlaneError as error:
            return unread(_rejection(error))
        return await continuation(details)


def _rejection(error: DataPlaneError) -> Callable[[Any, Context], Awaitable[bytes]]:
    """Return the behavior of a handler that ends the call with `error`."""

    async def refuse(requests: Any, context: Context) -> bytes:
        await abort(context, error)

    return refuse


class _Service:
    """The methods of the service: those of `control.proto`."""

    def __init__(self, ledger_thread: LedgerThread, facts: Facts, loop: asyncio.AbstractEventLoop) -> None:
        self._ledger_thread = ledger_thread
        self._facts = facts
        self._loop = loop

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to register with the server."""
        methods = {
            method.name: _unary_handler(self._answer, getattr(pb, method.input_type.name))
            for method in pb.DESCRIPTOR.services_by_name["Control"].methods
        }
        methods["Heartbeat"] = _unary_handler(self._heartbeat, pb.HeartbeatRequest)
        return grpc.method_handlers_generic_handler(CONTROL, methods)

    async def _answer(self, request: Message, context: Context) -> Message:
        """Answer a request that is an input of the ledger."""
        return message_of(await self._submit(codec.from_pb(request)), self._facts)

    async def _submit(self, item: c.Input) -> c.Output:
        """Submit `item` and return the output that answers it."""
        answered: asyncio.Future[c.Output] = self._loop.create_future()

        def settle(output: c.Output) -> None:  # in the loop; `reply` is called in the ledger thread
            if not answered.done():  # done: the call was cancelled
                answered.set_result(output)

        def reply(output: c.Output) -> None:
            self._loop.call_soon_threadsafe(settle, output)

        self._ledger_thread.submit(item, reply)
        try:
            return await answered
        except asyncio.CancelledError:
            with contextlib.suppress(ServiceUnavailableError):
                self._ledger_thread.withdraw(item, reply)
            raise

    async def _heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> Message:
        self._ledger_thread.submit(codec.from_pb(request))
        return heartbeat_message(self._facts, self._ledger_thread.min_heartbeat_s)


def _unary_handler(
    behavior: Callable[[Any, Context], Awaitable[Message]], request_type: type[Message]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that parses the request itself and sends errors as gRPC statuses."""

    async def answer(body: bytes, context: Context) -> Message:
        try:
            return await behavior(request_type.FromString(body), context)
        except Exception as error:
            await _abort_with(context, request_type, error)
            raise  # an error of gRPC; `_abort_with` raises for all others

    # Takes raw bytes, because gRPC would report a malformed request as an internal error of the service.
    return grpc.unary_unary_rpc_method_handler(answer, response_serializer=_serialize)


@functools.cache
def _failure_log(request: str) -> LimitedLog:
    """Return the log for failures of calls with this request type, shared by the process."""
    return LimitedLog(log)


async def _abort_with(context: Context, request_type: type[Message], error: Exception) -> None:
    """End the call with `error`. gRPC's own errors mean that the call has already ended or its caller disconnected, so
    they are ignored. Unexpected errors are logged and sent as `InternalError`."""
    if isinstance(error, grpc.aio.BaseError):
        return
    if isinstance(error, DecodeError):
        error = InvalidRequestError(f"the request is not a {request_type.DESCRIPTOR.name} message ({error})")
    if not isinstance(error, DataPlaneError):
        name = request_type.DESCRIPTOR.name
        _failure_log(name).write(logging.ERROR, f"Failed on a {name}", error)
        error = InternalError(what=f"{name}: {error!r}")
    await abort(context, error)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
