"""The methods of the gRPC server that need no token: health.

They do not read the body of a call, because gRPC buffers a body until it is complete, and an unauthenticated peer could
send one of maximum size. All arguments are in the headers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc

from dataplane.errors import (
    DataPlaneError,
    LimitError,
)
from dataplane.protocol.grpc_status import to_status

Context = grpc.aio.ServicerContext[Any, Any]

HEALTH = "grpc.health.v1.Health"
HEALTHY = b"\x08\x01"
UNHEALTHY = b"\x08\x02"
"""The messages `HealthCheckResponse` with the status SERVING and NOT_SERVING."""
CALLS = 2048
CALLS_PER_PEER = 512
"""Maximum numbers of concurrent calls without a token, in total and per address: a small part of the server's calls."""


def unread(behavior: Callable[[Any, Context], Awaitable[bytes]]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler for a unary call that does not read the body. `behavior` returns the encoded reply. gRPC reads
    the body when the handler iterates over the requests, so `behavior` must not do that."""
    return grpc.stream_unary_rpc_method_handler(behavior)


class PublicCalls:
    """Limits the concurrent calls without a token. A call whose caller does not read the answer lasts as long as its
    connection."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()  # calls, by the address of the peer

    def counted(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap `handler`, created by `unread`, so that its calls are counted and those beyond the limits fail with
        LimitError."""

        async def answer(requests: Any, context: Context) -> bytes:
            await self._enter(context)
            behavior: Any = handler.stream_unary
            reply: bytes = await behavior(requests, context)
            return reply

        return unread(answer)

    async def _enter(self, context: Context) -> None:
        """Count the call until it ends. If its peer, or all peers, are at the limit, `abort` it with LimitError."""
        peer = context.peer().rpartition(":")[0]  # the address without the port
        calls = self._in_flight
        what = "concurrent calls without a token"
        for scope, count, limit in ((f" from {peer}", calls[peer], CALLS_PER_PEER), ("", calls.total(), CALLS)):
            if count >= limit:
                await abort(context, LimitError(what=what + scope, got=count + 1, limit=limit, hint="Retry later."))
        calls[peer] += 1
        leave: Any = partial(self._leave, peer)
        context.add_done_callback(leave)

    def _leave(self, peer: str, context: Context) -> None:
        self._in_flight[peer] -= 1
        if not self._in_flight[peer]:
            del self._in_flight[peer]


class Health:
    """The method `Check` of the standard health service. It reports on the whole process for any service name.
    `why_not` returns why the service is unhealthy, or "", and may block for some seconds."""

    def __init__(self, why_not: Callable[[], str]) -> None:
        self._why_not = why_not
        self._running_check: asyncio.Future[str] | None = None  # or the last check, which has ended

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to register with the server."""
        return grpc.method_handlers_generic_handler(HEALTH, {"Check": unread(self._check)})

    async def _check(self, requests: Any, context: Context) -> bytes:
        """Check the health. Concurrent callers share one check, so unauthenticated peers cannot start many threads."""
        if self._running_check is None or self._running_check.done():
            self._running_check = asyncio.ensure_future(asyncio.to_thread(self._why_not))
        why = await asyncio.shield(self._running_check)  # a cancelled caller does not cancel the check of others
        return UNHEALTHY if why else HEALTHY


async def abort(context: Context, error: DataPlaneError) -> NoReturn:
    """End the call with `error`. Always raises, an exception of gRPC."""
    code, text, metadata = to_status(error)
    await context.abort(code, text, metadata)
    raise AssertionError("`context.abort` returned")
