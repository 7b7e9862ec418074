"""Handle of a pending operation, for threads and for async code."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from dataplane.core.durations import as_timeout
from workers.errors import CallWaitTimeoutError, MessageTimeoutError
from workers.transport import waiting

T = TypeVar("T")
Settle = Callable[[], Future[Any] | None]


class AsyncWork(Generic[T]):
    """The outcome of an operation, which can be read repeatedly. Thread-safe.

    future: completed with the operation; what: names the operation in messages; finish: makes the result from the
    future's value, called once, by the first reader of the result; settle: called with that value, returns None or a
    function to call once before `finish`. If this function returns a future, `finish` waits for it. While a wait
    lasts, it logs every `waiting.LOG_EVERY_S` what it waits for. The operation has its own timeout
    (unless it began with `timeout_s=None`), so a wait without a timeout ends too.

    `_timeout_error`: what a wait raises after its timeout; `_settled`: the future of the settling, None before it
    began; `_results`: the result that `finish` made, empty before; `_error`: the error that `finish` raised.
    """

    _timeout_error: type[MessageTimeoutError | CallWaitTimeoutError] = MessageTimeoutError

    def __init__(
        self,
        future: Future[Any],
        what: str,
        finish: Callable[[Any], T] | None = None,
        settle: Callable[[Any], Settle | None] = lambda _: None,
    ) -> None:
        self._future = future
        self._settle = settle
        self._what = what
        self._finish = finish
        self._guard = threading.Lock()
        self._settled: Future[Any] | None = None
        self._results: list[T] = []
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether the operation has ended."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Return the result, or raise the operation's error. Blocks until it is done. Raises `MessageTimeoutError`
        after `timeout` seconds; the operation then continues (a receive: while this handle exists)."""
        begun = time.monotonic()
        if not waiting.done_within(self._future, self._what, as_timeout("timeout", timeout)):
            raise self._timeout_error(what=self._what, waited_s=time.monotonic() - begun)
        # No timeout: a caller that left before the broker's confirmation would lose the item.
        waiting.done_within(self._settled_future(), self._what, None)
        return self._result()

    async def async_wait(self, timeout: float | None = None) -> T:
        """Like `wait`, without blocking the event loop. Cancelling it cancels the wait, not the operation. It cannot
        be cancelled while the broker of a channel on another host confirms the receipt of an item: this returns the
        item, and the task is cancelled at its next await."""
        timeout = as_timeout("timeout", timeout)
        wait = waiting.LoggedWait(timeout)
        woken = _woken_by(self._future)
        while not self._future.done():
            await asyncio.wait([woken], timeout=wait.step_s())
            if not self._future.done() and wait.over(self._what):
                raise self._timeout_error(what=self._what, waited_s=wait.waited_s)
        await _wait_despite_cancellation(self._settled_future())
        return self._result()

    def then(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork[Any]:
        """Call `func(*args, **kwargs)` in a new thread once this operation is done. It may block. The result of the
        returned work is that of `func`, or if `func` returns work, the result of that.

        An error of this operation, such as a result that cannot be loaded, becomes the error of the returned work,
        and `func` is not called.
        """
        future: Future[Any] = Future()
        what = f"{self._what}, and its continuation"

        def call() -> None:
            try:
                self._result()  # raises the error of this operation
                result = func(*args, **kwargs)
                future.set_result(result.wait() if isinstance(result, AsyncWork) else result)
            except BaseException as error:
                future.set_exception(error)

        def start() -> None:
            threading.Thread(target=call, name="tq-then", daemon=True).start()

        self._call_when_settled(start)
        following: AsyncWork[Any] = AsyncWork(future, what)
        following._timeout_error = self._timeout_error
        return following

    def _call_when_settled(self, call: Callable[[], None]) -> None:
        """Call `call` once `_result` no longer blocks."""
        self._future.add_done_callback(lambda _: self._settled_future().add_done_callback(lambda _: call()))

    def _settled_future(self) -> Future[Any]:
        """Return a future for an operation that has ended: once it is done, `_result` does not block. The first call
        begins to settle the operation."""
        with self._guard:
            if self._settled is None:
                failed = self._future.exception() is not None
                settle = None if failed else self._settle(self._future.result())
                try:
                    confirmed = None if settle is None else settle()
                    # Without a confirmation to wait for, the future of the operation, which is done, stands for it.
                    self._settled = self._future if confirmed is None else confirmed
                except Exception as error:
                    self._settled = Future()
                    self._settled.set_exception(error)
            return self._settled

    def _result(self) -> T:
        """Return the result of an operation that has ended, or raise its error. The first call makes the result."""
        self._settled_future().result()
        value = self._future.result()
        if self._finish is None:
            result: T = value
            return result
        with self._guard:
            if self._error is not None:
                raise self._error
            if not self._results:
                try:
                    self._results.append(self._finish(value))
                except Exception as error:
                    self._error = error
                    raise
            return self._results[0]


def _woken_by(future: Future[Any]) -> asyncio.Future[None]:
    """Return a future of the running event loop that completes with `future`."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def wake_loop(_: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(wake_loop)  # called in the thread that completes `future`
    return woken


async def _wait_despite_cancellation(future: Future[Any]) -> None:
    """Wait until `future` is done, even if the task is cancelled. If it succeeds, a cancellation that came meanwhile
    is raised at the task's next await, so that the caller can still return the result. If it fails, there is no
    result, and the cancellation is raised here."""
    woken = _woken_by(future)
    cancellation: tuple[Any, ...] | None = None
    while not future.done():
        try:
            await asyncio.wait([woken])
        except asyncio.CancelledError as error:
            # Only the message: the error would keep the task's frames, and so handles, until a garbage collection.
            cancellation = error.args[:1]
    if cancellation is None:
        return
    task = asyncio.current_task()
    if future.exception() is not None or task is None:  # without a task, nothing could be cancelled later
        raise asyncio.CancelledError(*cancellation)
    asyncio.get_running_loop().call_soon(_cancel_again, task, cancellation)


def _cancel_again(task: asyncio.Task[Any], message: tuple[Any, ...]) -> None:
    """Cancel the task again, unless its canceller, such as a timeout, has already called `uncancel`."""
    if not task.done() and task.cancelling():
        task.uncancel()  # because `cancel` counts the same cancellation again
        task.cancel(*message)


def all_of(works: list[AsyncWork[Any]], what: str, result: T) -> AsyncWork[T]:
    """Return work that is done when all `works` are, with `result`, or the first error of `works` in their order."""
    future: Future[None] = Future()
    works_left = len(works)
    guard = threading.Lock()

    def count_down() -> None:
        """Note that one more work has ended. The last one completes `future`."""
        nonlocal works_left
        with guard:
            works_left -= 1
            if works_left:
                return
        future.set_result(None)

    def finish(_: None) -> T:
        for work in works:
            work._result()
        return result

    if not works:
        future.set_result(None)
    for work in works:
        work._call_when_settled(count_down)
    return AsyncWork(future, what, finish)
