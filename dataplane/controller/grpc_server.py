"""The gRPC server: every command for any language, health, reflection, and the links of storage units.

One thread with an event loop of its own. A parked command is an awaited future there: it holds no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from dataplane.config import TlsFiles
from dataplane.controller.event_loop import LedgerThread, Orders
from dataplane.controller.grpc_public import Health, PublicCalls, abort, check_version, is_public, keys_handler, unread
from dataplane.controller.grpc_reflection import Reflection
from dataplane.controller.grpc_standard import CONTROL, REFLECTIONS
from dataplane.controller.requests import Facts, heartbeat_reply, message_of
from dataplane.controller.tls_handshakes import Handshakes
from dataplane.core.limited_log import Complaints, OneLine
from dataplane.errors import (
    DataPlaneError,
    InternalError,
    InvalidRequestError,
    ServiceUnavailableError,
)
from dataplane.ledger import commands as c
from dataplane.protocol import codec, unit_stream
from dataplane.protocol.converters import message_type
from dataplane.protocol.fd_limits import share
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.server_keys import HANDSHAKE_S
from dataplane.protocol.tls import server_credentials
from dataplane.protocol.token import Secret
from dataplane.protocol.zmq_frames import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

GET_KEYS = f"/{CONTROL}/GetKeys"
START_S = 30.0
LIBRARYS_LOG = "grpc._cython.cygrpc"
GRACE_S = 0.5
"""How long calls under way may take once the server closes."""
MAX_CALLS = 16384
"""Calls at once, streams included; one more is refused with RESOURCE_EXHAUSTED."""
CONNECTIONS = 8192
"""At once, of clients in other languages, storage units and strangers; one more is hung up on. Clients of this package
have one for a moment, while they open a session."""
IDLE_S = 30
"""A connection without a call ends then. gRPC's clients make it again by themselves."""
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Strangers hold a connection, without a call, no longer than this.
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    # What gRPC reads ahead of a call's handler, which may refuse it unread.
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.http2.bdp_probe", 0),
)


class GrpcServer:
    """`bind` (until it works), `serve`, `stop`. With `tls` every peer shows a certificate, health probes too;
    ValueError for files that cannot be used."""

    def __init__(self, secret: Secret, tls: TlsFiles | None = None) -> None:
        self._secret = secret
        self._tls = tls
        if tls is not None:
            server_credentials(tls, self._connected)  # what is wrong with the files is told now
        self._handshakes: Handshakes | None = None
        self._ready = threading.Event()
        self._end_links: Callable[[], None] = lambda: None
        self._quiet = OneLine(Complaints())
        logging.getLogger(LIBRARYS_LOG).addFilter(self._quiet)
        self._thread = threading.Thread(target=self._loop_forever, name="tq-grpc", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_S) or not self._thread.is_alive():
            raise InternalError(what="the gRPC server could not be opened")

    def _connected(self) -> None:
        """A peer begins a handshake. Called in gRPC's threads."""
        if self._handshakes is not None:
            self._handshakes.began()

    def _loop_forever(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception:
            log.critical("the gRPC server failed: nobody can use it any more", exc_info=True)
        finally:
            logging.getLogger(LIBRARYS_LOG).removeFilter(self._quiet)
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        interceptors: list[grpc.aio.ServerInterceptor] = [_Guard(self._secret)]
        if self._tls is not None:
            self._handshakes = Handshakes(self._loop)
            interceptors.insert(0, self._handshakes)
        # Held by this frame: a child of a fork has the frame for ever, so it never destroys what only gRPC's threads
        # could take apart.
        most = share(4, CONNECTIONS)
        bounds = (("grpc.max_allowed_incoming_connections", most), ("grpc.max_connection_idle_ms", 1000 * IDLE_S))
        server = self._server = grpc.aio.server(
            interceptors=interceptors, options=OPTIONS + bounds, maximum_concurrent_rpcs=MAX_CALLS
        )
        self._ready.set()
        await self._ended.wait()
        self._end_links()
        await server.stop(GRACE_S)

    def bind(self, address: str) -> None:
        """Listen on `address`. OSError if it cannot be had."""
        try:
            self._run(self._bind(address))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error

    async def _bind(self, address: str) -> None:
        if self._tls is None:
            self._server.add_insecure_port(address)
        else:  # credentials for one port each: gRPC asks once for what they begin with
            self._server.add_secure_port(address, server_credentials(self._tls, self._connected))

    def serve(self, shell: LedgerThread, facts: Facts, why_not: Callable[[], str]) -> None:
        """Begin to answer. why_not: see `Health`."""
        self._run(self._serve(_Service(shell, facts, self._loop), Health(facts.address, why_not, self._ended)))

    async def _serve(self, service: _Service, health: Health) -> None:
        self._end_links = service.end_links
        self._server.add_generic_rpc_handlers((service.handler(), health.handler(), *map(_reflection, REFLECTIONS)))
        await self._server.start()

    def stop(self, timeout_s: float) -> None:
        """End all calls and the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.error("the gRPC server did not close within %.1f s", timeout_s)

    def _run(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(START_S)


class _Guard(grpc.aio.ServerInterceptor):
    """Checks the token of every call but those that are made without one. What is refused is not read."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._strangers = PublicCalls()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if is_public(details.method, GET_KEYS):
            handler = await continuation(details)
            return handler and self._strangers.counted(handler)
        shown = dict(details.invocation_metadata or ()).get("authorization", "")
        try:
            self._secret.check(str(shown).removeprefix("Bearer ").encode(), peer="the controller")
        except DataPlaneError as error:
            return unread(_refuser(error))
        return await continuation(details)


def _refuser(error: DataPlaneError) -> Callable[[Any, Context], AsyncIterator[Message]]:
    async def refuse(unread: Any, context: Context) -> AsyncIterator[Message]:
        await abort(context, error)
        yield pb.Done()  # never reached: it makes this a stream, which fits any kind of call

    return refuse


class _Service:
    """The methods, by the same table as the ZMQ server's."""

    def __init__(self, shell: LedgerThread, facts: Facts, loop: asyncio.AbstractEventLoop) -> None:
        self._shell = shell
        self._facts = facts
        self._loop = loop
        self._streams: Counter[int] = Counter()
        self._links: set[asyncio.Queue[c.Output | DataPlaneError | None]] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server takes."""
        unary: dict[str, tuple[type[Message], Callable[[Any], c.Input]]] = {
            name: (method.request, lambda wire, method=method: codec.call_from_pb(method, wire))  # type: ignore[misc]
            for name, method in codec.METHODS.items()
        }
        for report in (c.OpenSession, c.DropUnit):
            unary[report.__name__] = (
                message_type(report),
                lambda wire, report=report: codec.from_pb(report, wire),  # type: ignore[misc]
            )
        methods = {name: _unary(self._answer(parse), request_type) for name, (request_type, parse) in unary.items()}
        methods["Heartbeat"] = _unary(self._heartbeat, pb.HeartbeatRequest)
        methods["GetKeys"] = keys_handler(self._facts)
        methods["KeepSession"] = _stream(self._keep_session, pb.HeartbeatRequest)
        methods["AttachUnit"] = _stream(self._attach_unit, pb.UnitReport)
        return grpc.method_handlers_generic_handler(CONTROL, methods)

    def _answer(self, parse: Callable[[Any], c.Input]) -> Callable[[Any, Context], Awaitable[Message]]:
        async def answer(request: Any, context: Context) -> Message:
            return message_of(await self._ask(parse(request)), self._facts)

        return answer

    async def _ask(self, item: c.Input, orders: Orders | None = None) -> c.Output:
        """The output that answers `item`."""
        answered: asyncio.Future[c.Output] = self._loop.create_future()

        def settle(output: c.Output) -> None:
            if not answered.done():
                answered.set_result(output)
            elif orders is not None and isinstance(output, c.UnitAdded) and output.error is None:
                self._shell.detach(output.unit, orders)

        def reply(output: c.Output) -> None:
            self._loop.call_soon_threadsafe(settle, output)

        self._shell.submit(item, reply, orders=orders)
        try:
            return await answered
        except asyncio.CancelledError:
            if orders is None:
                with contextlib.suppress(ServiceUnavailableError):
                    self._shell.withdraw(item, reply)
            raise

    async def _heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> Message:
        self._shell.submit(codec.from_pb(c.Heartbeat, request))
        return heartbeat_reply(self._facts)

    async def _keep_session(
        self, requests: AsyncIterator[pb.HeartbeatRequest], context: Context
    ) -> AsyncIterator[Message]:
        session = None
        try:
            async for request in requests:
                beat: c.Heartbeat = codec.from_pb(c.Heartbeat, request)
                if session is None:
                    session = beat.session
                    self._streams[session] += 1
                    yield heartbeat_reply(self._facts)
                elif beat.session != session:
                    await abort(context, InvalidRequestError("a stream keeps one session alive, not several"))
                self._shell.submit(beat)
        finally:
            if session is not None:
                self._streams[session] -= 1
                if not self._streams[session]:
                    del self._streams[session]
                    with contextlib.suppress(ServiceUnavailableError):
                        self._shell.submit(c.SessionSilent(session=session))

    async def _attach_unit(self, requests: AsyncIterator[pb.UnitReport], context: Context) -> AsyncIterator[Message]:
        orders: asyncio.Queue[c.Output | DataPlaneError | None] = asyncio.Queue()

        def order(output: c.Output) -> None:
            self._loop.call_soon_threadsafe(orders.put_nowait, output)

        reading, unit = None, None
        self._links.add(orders)
        try:
            unit = await self._add_unit(requests, order)
            yield unit_stream.order_to_pb(unit)
            reading = asyncio.create_task(self._read_reports(requests, unit.unit, orders))
            while (item := await orders.get()) is not None:
                if isinstance(item, DataPlaneError):
                    raise item
                yield unit_stream.order_to_pb(item)
        except DataPlaneError as error:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
            await abort(context, error)
        finally:
            self._links.discard(orders)
            if reading is not None:
                reading.cancel()
            if unit is not None:
                with contextlib.suppress(ServiceUnavailableError):
                    self._shell.detach(unit.unit, order)

    def end_links(self) -> None:
        """Tell every storage unit that the service stops."""
        for orders in self._links:
            orders.put_nowait(ServiceUnavailableError(address=self._facts.address, why="the service is stopping"))

    async def _add_unit(self, requests: AsyncIterator[pb.UnitReport], order: Orders) -> c.UnitAdded:
        async for request in requests:
            add = unit_stream.report_from_pb(request)
            if not isinstance(add, c.AddUnit):
                raise InvalidRequestError("a storage unit says AddUnit first")
            check_version(request.add.protocol_version)
            if self._facts.fsynced and not add.fsynced:
                raise InvalidRequestError(
                    f"storage unit {add.name!r} was started without --durability machine, which this service promises"
                )
            output = await self._ask(add, order)
            assert isinstance(output, c.UnitAdded)
            if output.error is not None:
                raise output.error
            return output
        raise InvalidRequestError("the stream ended before AddUnit")

    async def _read_reports(
        self,
        requests: AsyncIterator[pb.UnitReport],
        unit: int,
        orders: asyncio.Queue[c.Output | DataPlaneError | None],
    ) -> None:
        """Until the stream ends; says so, or why it must, through `orders`."""
        try:
            async for request in requests:
                report = unit_stream.report_from_pb(request)
                if isinstance(report, c.AddUnit) or report.unit != unit:
                    raise InvalidRequestError(f"a stream speaks for one storage unit; this one is unit {unit}")
                self._shell.submit(report)
            orders.put_nowait(None)
        except DataPlaneError as error:
            orders.put_nowait(error)
        except DecodeError as error:
            orders.put_nowait(InvalidRequestError(f"a report that makes no sense ({error})"))
        except Exception as error:
            log.exception("failed on a report of storage unit %d", unit)
            orders.put_nowait(InternalError(what=repr(error)))


def _unary(
    behavior: Callable[[Any, Context], Awaitable[Message]], request_type: type[Message]
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(body: bytes, context: Context) -> Message:
        try:
            return await behavior(request_type.FromString(body), context)
        except Exception as error:
            await _refuse(context, request_type, error)
            raise

    # Bytes are taken as they are: gRPC would tell what it cannot read as a fault of the service.
    return grpc.unary_unary_rpc_method_handler(answer, response_serializer=_serialize)


def _stream(
    behavior: Callable[[Any, Context], AsyncIterator[Message]], request_type: type[Message]
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(requests: Any, context: Context) -> AsyncIterator[Message]:
        replies: Any = behavior(requests, context)
        async with contextlib.aclosing(replies):
            try:
                async for reply in replies:
                    yield reply
            except Exception as error:
                await _refuse(context, request_type, error)
                raise

    return grpc.stream_stream_rpc_method_handler(
        answer, request_deserializer=request_type.FromString, response_serializer=_serialize
    )


def _reflection(service: str) -> grpc.GenericRpcHandler:
    reflection = Reflection(service)
    info = _stream(reflection.info, reflection.request)
    return grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": info})


@functools.cache
def _failures(request: str) -> Complaints:
    """Of all calls of this process with such a request."""
    return Complaints()


async def _refuse(context: Context, request_type: type[Message], error: Exception) -> None:
    """End the call with `error`, unless it is ended already, or its caller is gone: gRPC's own errors. One that nobody
    expected is logged, and told as what it is; the server goes on."""
    if isinstance(error, grpc.aio.BaseError):
        return
    if isinstance(error, DecodeError):
        error = InvalidRequestError(f"the request is not a {request_type.DESCRIPTOR.name} message ({error})")
    if not isinstance(error, DataPlaneError):
        line = _failures(request_type.DESCRIPTOR.name).take(f"failed on a {request_type.DESCRIPTOR.name}")
        if line is not None:
            log.error("%s", line, exc_info=error)
        error = InternalError(what=f"{request_type.DESCRIPTOR.name}: {error!r}")
    await abort(context, error)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
