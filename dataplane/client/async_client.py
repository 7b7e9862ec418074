"""The asyncio client, for code such as rollout engines. It awaits the same operations."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self

from dataplane.client.async_calls import AsyncCalls
from dataplane.client.async_session import AsyncConnection
from dataplane.client.events import EventEmitter, OnEvent
from dataplane.client.operations.steps import Operation, T
from dataplane.client.rpc.async_channel import in_thread, until_done
from dataplane.client.session_state import SessionState
from dataplane.config import DataPlaneConfig
from dataplane.errors import ClientClosedError, InvalidRequestError

P = ParamSpec("P")


class AsyncDataPlaneClient(AsyncCalls):
    """`DataPlaneClient` with awaitable methods; contracts and errors are the same. The client is bound to the event
    loop of its first call that connects. Calls in any other loop raise `InvalidRequestError` (a
    ValueError) until that loop is closed, which ends the session. `close()` in another loop does
    not wait for copies; the client's own loop, if it still runs, ends the session.

    Thousands of claims may wait concurrently without a thread each. Copies run in the loop's executor. Cancelling a
    call detaches its copy, which finishes in the background before its space is released.

    Commands that coroutines send in one turn of the event loop share a message. Each of them
    succeeds or fails as if it had been alone.
    """

    def __init__(self, config: DataPlaneConfig, *, on_event: OnEvent | None = None) -> None:
        self._config = config
        self._emitter = EventEmitter(on_event)
        # Completed by the thread that opens the session.
        self._opening: Future[AsyncConnection] | None = None
        # The session that the last call has used.
        self._session: AsyncConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop and the process of `_opening`
        self._pid = os.getpid()
        self._closed = False

    @property
    def config(self) -> DataPlaneConfig:
        """The settings of this client."""
        return self._config

    @property
    def on_event(self) -> OnEvent | None:
        """See `DataPlaneClient.on_event`; the callback runs in the event loop."""
        return self._emitter.on_event

    @on_event.setter
    def on_event(self, on_event: OnEvent | None) -> None:
        self._emitter.on_event = on_event

    async def connect(self) -> Self:
        """Open the session now instead of at the first call."""
        await self._connection()
        return self

    async def close(self) -> None:
        """See `DataPlaneClient.close`."""
        self._closed = True
        self._session = None
        opening = self._opening
        if opening is not None and self._pid == os.getpid() and self._loop is asyncio.get_running_loop():
            await until_done(opening)  # a pending first call may still open the session
            if not _is_useless(opening):
                await opening.result().close()  # can be repeated if it is cancelled or fails
        # In another loop, the dropped connection's finalizer closes it in its own loop (not in a forked child).
        self._opening = None

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return AsyncDataPlaneClient, (self._config,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config.address!r})"

    async def _connection(self) -> AsyncConnection:
        """Return the open session. Concurrent first calls share one connection attempt; after a failure, after an
        interrupt that ended the session or in another loop after the session's loop was closed, the next call opens
        another one. Raise `ClientClosedError` after `close`, and `InvalidRequestError` in another
        event loop than the session's."""
        if self._closed:
            raise ClientClosedError()
        loop = asyncio.get_running_loop()
        if self._opening is None or self._pid != os.getpid() or self._loop_closed() or _is_useless(self._opening):
            self._pid = os.getpid()
            self._loop = loop
            open_session = functools.partial(AsyncConnection.open, self._config, loop)
            self._opening = in_thread(open_session, "tq-open")
        if self._loop is not loop:
            remedy = "create one client per event loop"
            raise InvalidRequestError(f"{self!r} is bound to another event loop: {remedy}")
        opening = self._opening
        await until_done(opening)
        self._session = opening.result()
        return self._session

    def _loop_closed(self) -> bool:
        return self._loop is not None and self._loop.is_closed()

    async def perform(
        self, operation: Callable[Concatenate[SessionState, P], Operation[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `DataPlaneClient.perform`."""
        connection = self._session
        in_its_loop = self._loop is asyncio.get_running_loop() and self._pid == os.getpid()
        if connection is None or not connection.usable or not in_its_loop:
            connection = await self._connection()
        steps = operation(connection.session_state, *args, **kwargs)
        if self._emitter.on_event is not None:
            steps = self._emitter.observed(steps, operation.__name__)
        return await connection.run(steps)


def _is_useless(opening: Future[AsyncConnection]) -> bool:
    """Whether the attempt to open a session failed, or the session has ended."""
    if not opening.done():
        return False
    return opening.exception() is not None or not opening.result().usable
