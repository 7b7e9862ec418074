"""An operation under way, to be waited for from threads or from async code."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from dataplane.core.durations import seconds_if_any
from workers.errors import MessageTimeoutError
from workers.transport import waiting
from workers.transport.poll_thread import refuse_waiting

T = TypeVar("T")
Settle = Callable[[], Future[Any] | None]


class AsyncWork(Generic[T]):
    """The outcome of an operation, as often as it is asked for. Thread-safe.

    future: done when the operation is; what: names it, for messages; finish: makes the result of the future's value,
    called once, by whoever first asks for the result; settle: of that value, what is to be called once before `finish`,
    which waits for the future that comes back; None for nothing. While a wait lasts, a line of the log every
    `waiting.LOG_EVERY_S` names what is awaited. The operation has its own bound, so a wait without a timeout ends too.
    """

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
        self._kept: list[T] = []
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether the operation has ended."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """The result, or the operation's error. Blocks until it is done; `MessageTimeoutError` after `timeout` seconds,
        which leaves the operation under way (a receive: while anybody has this). RuntimeError in a function given to
        `then`, where it would block."""
        timeout = seconds_if_any("timeout", timeout)
        self._wait_for(self._future, timeout)
        if self._settled is None and self._begin_to_settle() is not None:
            refuse_waiting(self._what)
        # What is being taken is lost by whoever leaves before it is certain.
        self._wait_for(self._settling(), None)
        return self._result()

    def _wait_for(self, future: Future[Any], timeout: float | None) -> None:
        if not future.done():
            refuse_waiting(self._what)
        begun = time.monotonic()
        if not waiting.done_within(future, self._what, timeout):
            raise MessageTimeoutError(what=self._what, waited_s=time.monotonic() - begun)

    async def async_wait(self, timeout: float | None = None) -> T:
        """The same without blocking the event loop: it is woken by the operation's end. Cancelling it cancels the wait,
        not the operation; while an item is being taken from the broker of a channel on another host, for as long as
        that broker takes to confirm it, it is too late: this returns the item, and the task is cancelled where it next
        awaits something."""
        timeout = seconds_if_any("timeout", timeout)
        wait = waiting.LoggedWait(timeout)
        woken = _woken_by(self._future)
        while not self._future.done():
            await asyncio.wait([woken], timeout=wait.step_s())
            if not self._future.done() and wait.over(self._what):
                raise MessageTimeoutError(what=self._what, waited_s=wait.waited_s)
        await _see_through(self._settling())
        return self._result()

    def then(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork[Any]:
        """Have `func(*args, **kwargs)` called once this is done; the work it returns has its result.

        An error here, such as a result that cannot be loaded, is that work's error, and `func` is not called. If `func`
        returns work, the result is that work's. The result is made, and `func` called, by the thread that ends the
        operation (now, if it is done): it must not block, and a wait in it is refused with a RuntimeError.
        """
        future: Future[Any] = Future()

        def call() -> None:
            try:
                self._result()
                made = func(*args, **kwargs)
            except Exception as error:
                future.set_exception(error)
                return
            if isinstance(made, AsyncWork):
                made._pass_on(future)
            else:
                future.set_result(made)

        self._once_settled(call)
        return AsyncWork(future, f"{self._what}, and what follows")

    def _pass_on(self, to: Future[Any]) -> None:
        def settle() -> None:
            try:
                to.set_result(self._result())
            except Exception as error:
                to.set_exception(error)

        self._once_settled(settle)

    def _once_settled(self, call: Callable[[], None]) -> None:
        """Have it called once `_result` waits for nothing."""
        self._future.add_done_callback(lambda _: self._settling().add_done_callback(lambda _: call()))

    def _begin_to_settle(self) -> Settle | None:
        """What is to be begun, of an operation that has ended."""
        return None if self._future.exception() is not None else self._settle(self._future.result())

    def _settling(self) -> Future[Any]:
        """Of an operation that has ended: once this is done, the result is there to be made, or the error."""
        with self._guard:
            if self._settled is None:
                begin = self._begin_to_settle()
                try:
                    self._settled = (None if begin is None else begin()) or self._future
                except Exception as error:
                    self._settled = Future()
                    self._settled.set_exception(error)
            return self._settled

    def _result(self) -> T:
        self._settling().result()
        value = self._future.result()
        if self._finish is None:
            result: T = value
            return result
        with self._guard:
            if self._error is not None:
                raise self._error
            if not self._kept:
                try:
                    self._kept.append(self._finish(value))
                except Exception as error:
                    self._error = error
                    raise
            return self._kept[0]


class TensorWork(AsyncWork[None]):
    """Of `recv_tensor`: whoever learns that it is done has received the message, whose values are in the tensor."""

    def done(self) -> bool:
        """Whether the operation has ended."""
        done = super().done()
        if done:
            with contextlib.suppress(Exception):
                self._result()
        return done


def _woken_by(future: Future[Any]) -> asyncio.Future[None]:
    """Of the running event loop: done once `future` is."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def done(_: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(done)
    return woken


async def _see_through(future: Future[Any]) -> None:
    """Wait until `future` is done, cancelled or not. If it succeeds, what came too late to cancel this cancels what the
    task awaits next; if it fails, there is nothing to be had, and it is cancelled here."""
    woken = _woken_by(future)
    late: tuple[Any, ...] | None = None
    while not future.done():
        try:
            await asyncio.wait([woken])
        except asyncio.CancelledError as error:
            # Not the error itself, which would keep the task's frames, and so handles, until a garbage collection.
            late = error.args[:1]
    if late is None:
        return
    task = asyncio.current_task()
    if future.exception() is not None or task is None:
        raise asyncio.CancelledError(*late)
    asyncio.get_running_loop().call_soon(_cancel_again, task, late)


def _cancel_again(task: asyncio.Task[Any], message: tuple[Any, ...]) -> None:
    """Unless whoever cancelled it, such as a timeout, has taken that back, as it found the task at its end."""
    if not task.done() and task.cancelling():
        task.uncancel()
        task.cancel(*message)


def all_of(works: list[AsyncWork[Any]], what: str, result: T) -> AsyncWork[T]:
    """Work that is done when all of `works` are: with `result`, or the first error of them in their order."""
    future: Future[T] = Future()
    left = [len(works)]
    guard = threading.Lock()

    def one_less() -> None:
        with guard:
            left[0] -= 1
            if left[0]:
                return
        try:
            for work in works:
                work._result()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    if not works:
        future.set_result(result)
    for work in works:
        work._once_settled(one_less)
    return AsyncWork(future, what)
