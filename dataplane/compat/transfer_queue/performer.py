"""Operations performed for callers: in their own thread, or awaited from whatever event loop they run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dataplane.client.async_client import AsyncDataPlaneClient
from dataplane.client.client import DataPlaneClient
from dataplane.client.operations.steps import Operation
from dataplane.client.session import ForkLocal
from dataplane.compat.transfer_queue.errors import StorageKeyNotFoundError
from dataplane.config import DataPlaneConfig
from dataplane.errors import NotFoundError

T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0


class Performer:
    """Two sessions of one service, each opened when first used: one for callers that block, and one for those that
    await, which lives on an event loop of its own, so that theirs may come and go. In a forked child both are new."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self.client = DataPlaneClient(config)
        self._awaited = ForkLocal(lambda: _Background(config))

    def do(self, operation: Callable[..., Operation[T]], *args: Any) -> T:
        """Perform it in this thread."""
        with translated():
            return self.client.perform(operation, *args)

    async def later(self, operation: Callable[..., Operation[T]], *args: Any) -> T:
        """Perform it and await the outcome. Cancelling detaches as `AsyncDataPlaneClient` says."""
        with translated():
            return await asyncio.wrap_future(self._awaited.get().submit(operation, *args))

    def close(self) -> None:
        """End both. Idempotent."""
        self._awaited.close()
        self.client.close()


class _Background:
    """A thread with an event loop, and an async client on it."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._client = AsyncDataPlaneClient(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tq-compat-loop", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[..., Operation[T]], *args: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self._client.perform(operation, *args), self._loop)

    def close(self) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(CLOSE_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """What is not there is the error that callers of the original know."""
    try:
        yield
    except NotFoundError as error:
        raise StorageKeyNotFoundError(f"not found: {error}") from error
