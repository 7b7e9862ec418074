"""Counts TLS connections to the gRPC port that never make a call, instead of gRPC's log line for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc

from dataplane.core.bounded import Bounded

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

REPORT_S = 60.0
"""Interval in seconds of the log line. It is also the time limit for the first call of a connection, which exceeds the
time limit of the handshake."""
PEERS = 4096
"""Maximum number of remembered connections that made a call. With more, one may be counted twice."""


class Handshakes(grpc.aio.ServerInterceptor):
    """Counts connections that `began` and subtracts those that make a call. gRPC does not report which handshakes fail,
    or why.

    All counts are since the start: `_began` connections, of which `_began_before` the last report; `_calling` made a
    call; `_reported` are in the log. `_peers`: the addresses of connections that made a call, as an ordered set, the
    oldest call first. `_reporting`: a report is scheduled.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """loop: the server's event loop, in which all methods except `began` run."""
        self._loop = loop
        self._began = 0
        self._began_before = 0
        self._calling = 0
        self._reported = 0
        self._peers: Bounded[str, None] = Bounded(PEERS)
        self._reporting = False

    def began(self) -> None:
        """Count a new connection. Any thread."""
        with contextlib.suppress(RuntimeError):  # the server's loop is closed
            self._loop.call_soon_threadsafe(self._count_connection)

    def _count_connection(self) -> None:
        """Count a new connection, and schedule a report unless one is scheduled."""
        self._began += 1
        if not self._reporting:
            self._reporting = True
            self._loop.call_later(REPORT_S, self._report)

    def _report(self) -> None:
        """Log how many of the connections that began before the last report, whose time limit has passed, made no call
        and are not in the log. Schedule the next report if connections began since."""
        without_call = self._began_before - self._calling
        if without_call > self._reported:
            log.warning(
                "%d connections to the gRPC port made no call: these peers do not use TLS, or lack a currently valid "
                "certificate of the authority in tls_ca_file",
                without_call - self._reported,
            )
            self._reported = without_call
        self._reporting = self._began_before < self._began
        self._began_before = self._began
        if self._reporting:
            self._loop.call_later(REPORT_S, self._report)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Return the handler of a call, wrapped so that it first counts the caller's connection."""
        handler = await continuation(details)
        if handler is None:  # an unknown method
            return None
        if handler.unary_unary:

            async def unary(request: Any, context: Context) -> Any:
                self._count_call(context)
                return await handler.unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)

        async def unread(requests: Any, context: Context) -> Any:  # see `grpc_public.unread`
            self._count_call(context)
            return await handler.stream_unary(requests, context)

        return grpc.stream_unary_rpc_method_handler(unread)

    def _count_call(self, context: Context) -> None:
        """Count the connection of a call, unless it made an earlier one."""
        peer = context.peer()
        if peer not in self._peers:
            self._calling += 1
        self._peers.store(peer, None)
