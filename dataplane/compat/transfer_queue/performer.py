"""Perform operations for callers, either in the calling thread or awaited from any event loop.

Each call of the interface is written once, as an operation (a generator of steps) whose first two
arguments are the client and the session. `twins` makes the two forms of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
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
    async callers. The latter runs on a separate event loop, so that it outlives the callers' loops.
    A forked child opens new sessions.

    client: the session for blocking callers. _background: the session for async callers, with its
    thread and loop."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self.client = DataPlaneClient(config)
        self._background = ForkLocal(lambda: _BackgroundClient(config))

    def do(self, operation: Callable[..., Operation[T]], *args: Any, **kwargs: Any) -> T:
        """Perform the operation in this thread."""
        with storage_key_errors():
            return self.client.perform(operation, *args, **kwargs)

    async def do_async(
        self,
        operation: Callable[..., Operation[T]],
        *args: Any,
        **kwargs: Any,
    ) -> T:
        """Perform the operation and await its result. `AsyncDataPlaneClient` documents the effect
        of a cancellation."""
        with storage_key_errors():
            return await asyncio.wrap_future(
                self._background.get().submit(operation, *args, **kwargs),
            )

    def close(self) -> None:
        """Close both sessions. Idempotent."""
        self._background.close()
        self.client.close()


class _BackgroundClient:
    """A background thread with an event loop that runs an async client."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._client = AsyncDataPlaneClient(config)
        self._loop = asyncio.new_event_loop()
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

    def submit(self, operation: Callable[..., Operation[T]], *args: Any, **kwargs: Any) -> Any:
        """Start the operation on the loop. Return its `concurrent.futures.Future`."""
        call = self._client.perform(operation, *args, **kwargs)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

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


@contextlib.contextmanager
def storage_key_errors() -> Iterator[None]:
    """Convert `NotFoundError` to `StorageKeyNotFoundError`, which callers of the original can
    catch."""
    try:
        yield
    except NotFoundError as error:
        raise StorageKeyNotFoundError(f"not found: {error}") from error


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
