"""Connections to the gRPC port with TLS that come to no call are counted: gRPC's line for each stays out of the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

REPORT_S = 60.0
"""How often the log says how many there were. It is also the time that a connection has for its first call, which is
more than its handshake may take."""
PEERS = 4096
"""How many connections that have made a call are remembered. Beyond it, one may be counted twice."""


class Handshakes(grpc.aio.ServerInterceptor):
    """Counts connections that `began`, and takes off those that a call comes from. gRPC does not tell which handshakes
    fail, or why."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """loop: of the server."""
        self._loop = loop
        self._began = 0
        self._before = 0
        self._called = 0
        self._told = 0
        self._peers: dict[str, None] = {}
        self._reporting = False

    def began(self) -> None:
        """A peer has connected. Any thread."""
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._began += 1
        if not self._reporting:
            self._reporting = True
            self._loop.call_later(REPORT_S, self._report)

    def _report(self) -> None:
        """Those that began before the last report have had their time."""
        came_to_nothing = self._before - self._called
        if came_to_nothing > self._told:
            log.warning(
                "%d connections to the port of gRPC came to no call: those peers do not speak TLS, or have no "
                "certificate of the authority in tls_ca_file that is valid now",
                came_to_nothing - self._told,
            )
            self._told = came_to_nothing
        self._reporting = self._before < self._began
        self._before = self._began
        if self._reporting:
            self._loop.call_later(REPORT_S, self._report)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.unary_unary:

            async def one(request: Any, context: Context) -> Any:
                self._call(context)
                return await handler.unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(one, handler.request_deserializer, handler.response_serializer)

        async def many(requests: Any, context: Context) -> AsyncIterator[Any]:
            self._call(context)
            async with contextlib.aclosing(handler.stream_stream(requests, context)) as replies:
                async for reply in replies:
                    yield reply

        return grpc.stream_stream_rpc_method_handler(many, handler.request_deserializer, handler.response_serializer)

    def _call(self, context: Context) -> None:
        peer = context.peer()
        if peer not in self._peers:
            self._called += 1
        self._peers.pop(peer, None)
        self._peers[peer] = None
        if len(self._peers) > PEERS:
            del self._peers[next(iter(self._peers))]
