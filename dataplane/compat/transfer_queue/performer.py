"""Perform operations for callers, either in the calling thread or awaited from any event loop.

Each call of the interface is written once, as an operation (a generator of steps) whose first two
arguments are the client and the session. `twins` makes the two forms of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from dataplane.client.async_client import AsyncDataPlaneClient
from dataplane.client.client import DataPlaneClient
from dataplane.client.operations.steps import Operation
from dataplane.client.session import ForkLocal
from dataplane.client.session_state import SessionState
from dataplane.compat.transfer_queue.errors import StorageKeyNotFoundError
from dataplane.config import DataPlaneConfig
from dataplane.errors import NotFoundError

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="HasPerformer")
F = TypeVar("F", bound=Any)

CLOSE_TIMEOUT_S = 30.0


class Performer:
    """Two sessions of one service, each opened on first use: one for blocking callers and one for
    async callers. The latter runs on a separate event loop, so that it outlives the callers' loops:
    unconfirmed claims return to their task when their session ends.
    A forked child opens new sessions.

    client: the session for blocking callers. _background: the session for async callers, with its
    thread and loop."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self.client = DataPlaneClient(config)
        self._background = ForkLocal(lambda: _BackgroundClient(config))

    def do(self, operation: Callable[..., Operation[T]], *args: Any, **kwargs: Any) -> T:
        """Perform the operation in this thread."""
        try:
            return self.client.perform(operation, *args, **kwargs)
        except NotFoundError as error:
            raise _storage_key_error(error) from error

    async def do_async(
        self,
        operation: Callable[..., Operation[T]],
        *args: Any,
        **kwargs: Any,
    ) -> T:
        """Perform the operation and await its result. `AsyncDataPlaneClient` documents the effect
        of a cancellation."""
        try:
            return await self._background.get().perform(operation, *args, **kwargs)
        except NotFoundError as error:
            raise _storage_key_error(error) from error

    def close(self) -> None:
        """Close both sessions. Idempotent."""
        self._background.close()
        self.client.close()


class _BackgroundClient:
    """A background thread with an event loop that runs an async client. Calls that are submitted
    before the loop gets to them share a wake-up, and so do results for the same loop."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._client = AsyncDataPlaneClient(config)
        self._loop = asyncio.new_event_loop()
        # Calls to start, and whether the loop is about to start them. Callers set `_starting` after
        # they have added their call, and the loop clears it before it takes the calls.
        self._submitted: deque[_Call] = deque()
        self._starting = False
        # Calls that have ended and whose callers do not know yet. Only for the loop's thread.
        self._ended: list[_Call] = []
        self._thread = threading.Thread(
            target=self._loop.run_forever,
            name="tq-compat-loop",
            daemon=True,
        )
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether calls may be submitted; the async client replaces its own session."""
        return True

    async def perform(self, operation: Callable[..., Operation[T]], *args: Any, **kwargs: Any) -> T:
        """Perform the operation on the background loop, and await its result in the caller's loop.
        If the caller is cancelled, so is the operation."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        work = functools.partial(self._client.perform, operation, *args, **kwargs)
        call = _Call(work, outcome, self._end)
        self._submitted.append(call)
        if not self._starting:
            self._starting = True
            self._loop.call_soon_threadsafe(self._start)
        try:
            return await outcome
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # the background loop is closed
                self._loop.call_soon_threadsafe(call.cancel)
            raise

    def _start(self) -> None:
        """Start the submitted calls."""
        self._starting = False
        while self._submitted:
            self._submitted.popleft().start(self._loop)

    def _end(self, call: _Call) -> None:
        """Pass the result of a call to its caller, together with those that end now."""
        self._ended.append(call)
        if len(self._ended) == 1:
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        calls_by_loop: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
        for call in self._ended:
            calls_by_loop.setdefault(call.outcome.get_loop(), []).append(call)
        self._ended.clear()
        for loop, calls in calls_by_loop.items():
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(_complete, calls)

    def close(self) -> None:
        """Close the client, then stop the loop and the thread. Can be repeated. TimeoutError if the
        client does not close within `CLOSE_TIMEOUT_S`: it continues, so the loop keeps running."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(
                self._client.close(),
                self._loop,
            ).result(CLOSE_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # a running loop cannot be closed
            self._loop.close()  # idempotent


class _Call:
    """A call of the background loop. Its methods run in that loop, `complete` in the caller's."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, Any]],
        outcome: asyncio.Future[Any],
        end: Callable[[_Call], None],
    ) -> None:
        self._work = work
        # A future of the caller's loop.
        self.outcome = outcome
        self._end = end
        self._task: asyncio.Task[Any] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self.outcome.cancelled():
            self._task = loop.create_task(self._work())
            self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # else asyncio logs it if the caller is gone
        self._end(self)

    def complete(self) -> None:
        """Complete the caller's future, unless the caller was cancelled."""
        task = self._task
        self._task = None  # an error refers to the caller's frame, which refers to this object
        if task is None or self.outcome.done():
            return
        if task.cancelled():
            self.outcome.cancel()
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


def _complete(calls: list[_Call]) -> None:
    """Complete the futures of these calls, in their callers' loop."""
    for call in calls:
        call.complete()


def _storage_key_error(error: NotFoundError) -> StorageKeyNotFoundError:
    """Return the error for callers of the original, which can catch it."""
    return StorageKeyNotFoundError(f"not found: {error}")


# --- both forms of a call


class HasPerformer(Protocol):
    """A client."""

    _performer: Performer


def twins(
    operation: Callable[Concatenate[C, SessionState, P], Operation[T]],
) -> tuple[Callable[Concatenate[C, P], T], Callable[Concatenate[C, P], Coroutine[Any, Any, T]]]:
    """Return the blocking and the async method that perform the operation."""

    def call(client: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._performer.do(functools.partial(operation, client), *args, **kwargs)

    async def call_async(client: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound = functools.partial(operation, client)
        return await client._performer.do_async(bound, *args, **kwargs)

    return describe(call, operation), describe(call_async, operation, prefix="async_")


def describe(call: F, operation: Callable[..., Any], *, prefix: str = "", client: bool = True) -> F:
    """Give `call` the name (after `prefix`), the docstring and the signature of the operation,
    without its session, and without its client if `client` is False. Return `call`."""
    signature = inspect.signature(operation)
    first, _, *others = signature.parameters.values()
    call.__name__ = prefix + operation.__name__.removeprefix("_")
    call.__qualname__ = call.__name__
    call.__module__ = operation.__module__
    call.__doc__ = operation.__doc__
    call.__signature__ = signature.replace(parameters=[first, *others] if client else others)
    return call
