"""What the gRPC server answers to callers that have shown nothing: GetKeys and health.

Neither reads the body of a call, which a stranger could make as long as a message may be: gRPC keeps what it reads of
one until it is whole. What they want of a caller is in its headers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from dataplane.controller.grpc_standard import HEALTH, message_class
from dataplane.controller.requests import Facts
from dataplane.core.addresses import split_address
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    DataPlaneError,
    InvalidRequestError,
    LimitError,
    ProtocolVersionError,
    ServiceUnavailableError,
    to_wire,
)
from dataplane.protocol.grpc_status import to_status
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.proof import NONCE_BYTES, proof_of
from dataplane.protocol.server_keys import NONCE_KEY, VERSION_KEY

Context = grpc.aio.ServicerContext[Any, Any]

WATCHES = 256
WATCHES_PER_PEER = 16
"""Watchers of health at once, in all and from one address: each holds a call of the server for as long as it likes."""
LOOK_S = 2.0
"""How soon a watcher learns that the service does not serve any more, or does again."""
_STATUS: Any = message_class(HEALTH, "HealthCheckResponse")
CALLS = 2048
CALLS_PER_PEER = 512
"""Calls without the token under way at once, in all and from one address: few of the calls that the server has."""


def is_public(method: str, keys: str) -> bool:
    """Whether a call may be made without the token. keys: the full name of GetKeys."""
    return method == keys or method.startswith(f"/{HEALTH}/")


def unread(behavior: Callable[[Any, Context], AsyncIterator[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for any kind of call. gRPC reads a body as its handler asks for messages, which `behavior` must not."""
    return grpc.stream_stream_rpc_method_handler(behavior, response_serializer=lambda reply: reply.SerializeToString())


class PublicCalls:
    """Counts the calls without the token. One whose caller does not take the answer lasts as long as its connection."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()

    def counted(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """`handler`, made by `unread`, for as many calls as may be under way; others are a LimitError."""

        async def answer(unread: Any, context: Context) -> AsyncIterator[Message]:
            await self._enter(context)
            behavior: Any = handler.stream_stream
            async with contextlib.aclosing(behavior(unread, context)) as replies:
                async for reply in replies:
                    yield reply

        return unread(answer)

    async def _enter(self, context: Context) -> None:
        peer = context.peer().rpartition(":")[0]
        here, what = self._in_flight, "calls without the token under way"
        for which, got, most in ((f" from {peer}", here[peer], CALLS_PER_PEER), ("", here.total(), CALLS)):
            if got >= most:
                await abort(context, LimitError(what=what + which, got=got + 1, limit=most, hint="Try again."))
        here[peer] += 1
        leave: Any = partial(self._leave, peer)
        context.add_done_callback(leave)

    def _leave(self, peer: str, context: Context) -> None:
        self._in_flight[peer] -= 1
        if not self._in_flight[peer]:
            del self._in_flight[peer]


def keys_handler(facts: Facts) -> grpc.RpcMethodHandler[Any, Any]:
    """GetKeys: proves to the caller that this is the service. It tells errors in its answer (see `http2`)."""

    async def keys(unread: Any, context: Context) -> AsyncIterator[Message]:
        try:
            yield _keys(facts, {key: str(value) for key, value in context.invocation_metadata() or ()})
        except DataPlaneError as error:
            name, told = to_wire(error)
            yield pb.Keys(error=pb.Error(name=name, facts=told))

    return unread(keys)


def _keys(facts: Facts, shown: dict[str, str]) -> pb.Keys:
    check_version(int(version) if (version := shown.get(VERSION_KEY, "1")).isdecimal() else 0)
    try:
        nonce = bytes.fromhex(shown.get(NONCE_KEY, ""))
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise InvalidRequestError(f"GetKeys wants {NONCE_BYTES} random bytes, in hex, as metadata {NONCE_KEY!r}")
    answer = pb.Keys(curve_key=facts.curve_key, instance=facts.instance, service=facts.service)
    if facts.secret:
        answer.proof = proof_of(facts.secret, nonce, facts.instance, split_address(facts.address)[1])
    if facts.told:
        answer.secret = facts.secret
    return answer


def check_version(theirs: int) -> None:
    """`ProtocolVersionError` unless the caller speaks this version."""
    if theirs != PROTOCOL_VERSION:
        raise ProtocolVersionError(client_version=theirs, service_version=PROTOCOL_VERSION)


class Health:
    """The standard health service, for the whole process, whatever service a caller names. `why_not` says why the
    process does not serve, "" if it does, and may block for some seconds; `ended`: set when the server closes."""

    def __init__(self, address: str, why_not: Callable[[], str], ended: asyncio.Event) -> None:
        self._address = address
        self._why_not = why_not
        self._ended = ended
        self._looking: asyncio.Future[str] | None = None
        self._watching: Counter[str] = Counter()

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server takes."""
        methods = {"Check": unread(self._check), "Watch": unread(self._watch)}
        return grpc.method_handlers_generic_handler(HEALTH, methods)

    async def _check(self, unread: Any, context: Context) -> AsyncIterator[Message]:
        yield await self._status()

    async def _status(self) -> Message:
        """Of the process now. Callers share a look that is under way, so strangers start no threads."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._why_not))
        why = await asyncio.shield(self._looking)
        status: Message = _STATUS(status=_STATUS.NOT_SERVING if why else _STATUS.SERVING)
        return status

    async def _watch(self, unread: Any, context: Context) -> AsyncIterator[Message]:
        peer = context.peer().rpartition(":")[0]
        if self._watching[peer] >= WATCHES_PER_PEER or self._watching.total() >= WATCHES:
            why = (
                f"it is busy: {self._watching[peer]} callers at {peer} watch its health; at most {WATCHES_PER_PEER} may"
            )
            await abort(context, ServiceUnavailableError(address=self._address, why=why))
        self._watching[peer] += 1
        try:
            told = None
            while not self._ended.is_set():
                status = await self._status()
                if status != told:
                    yield status
                    told = status
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), LOOK_S)
        finally:
            self._watching[peer] -= 1
            if not self._watching[peer]:
                del self._watching[peer]


async def abort(context: Context, error: DataPlaneError) -> None:
    """End the call with `error`."""
    code, text, metadata = to_status(error)
    await context.abort(code, text, metadata)
