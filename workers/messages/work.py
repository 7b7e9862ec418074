"""An operation under way, to be waited for from threads or from async code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

from dataplane.durations import seconds_if_any
from workers.errors import MessageTimeoutError

LOG_EVERY_S = 30.0

T = TypeVar("T")
_log = logging.getLogger(__name__)
_here = threading.local()


def forbid_waiting() -> None:
    """From now on this thread may not wait for work: others' work is done by it."""
    _here.serves = True


class AsyncWork(Generic[T]):
    """The outcome of an operation, as often as it is asked for. Thread-safe.

    future: done when the operation is; what: names it, for messages; finish: makes the result of the future's value,
    called once, by whoever first asks for the result; slow: of that value, whether `finish` waits for another host, so
    that event loops and the threads that end operations are spared it. While a wait lasts, a line every `LOG_EVERY_S`
    names what is awaited. The operation has its own bound, so a wait without a timeout ends too.
    """

    def __init__(
        self,
        future: Future[Any],
        what: str,
        finish: Callable[[Any], T] | None = None,
        slow: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self._future = future
        self._slow = slow
        self._what = what
        self._finish = finish
        self._guard = threading.Lock()
        self._kept: list[T] = []
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether the operation has ended."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """The result, or the operation's error. Blocks until it is done; `MessageTimeoutError` after `timeout` seconds,
        which leaves the operation under way."""
        if getattr(_here, "serves", False) and not self._future.done():
            raise RuntimeError(f"{self._what}: a function given to `then` must not wait for other work")
        timeout = seconds_if_any("timeout", timeout)
        begun = time.monotonic()
        while True:
            waited_s = time.monotonic() - begun
            left_s = LOG_EVERY_S if timeout is None else min(LOG_EVERY_S, timeout - waited_s)
            with contextlib.suppress(FutureTimeout):
                self._future.exception(max(left_s, 0))
            if self._future.done():
                return self._result(self._future.result())
            waited_s = time.monotonic() - begun
            if timeout is not None and waited_s >= timeout:
                raise MessageTimeoutError(what=self._what, waited_s=waited_s)
            _log.warning("%s: waiting for %.0f s so far", self._what, waited_s)

    async def async_wait(self, timeout: float | None = None) -> T:
        """The same without blocking the event loop: it is woken by the operation's end. Cancelling it cancels the wait,
        not the operation."""
        timeout = seconds_if_any("timeout", timeout)
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def done(_: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        begun = time.monotonic()
        self._future.add_done_callback(done)
        while not self._future.done():
            waited_s = time.monotonic() - begun
            left_s = LOG_EVERY_S if timeout is None else min(LOG_EVERY_S, timeout - waited_s)
            await asyncio.wait([woken], timeout=max(left_s, 0))
            waited_s = time.monotonic() - begun
            if self._future.done():
                break
            if timeout is not None and waited_s >= timeout:
                raise MessageTimeoutError(what=self._what, waited_s=waited_s)
            _log.warning("%s: waiting for %.0f s so far", self._what, waited_s)
        value = self._future.result()
        return await asyncio.to_thread(self._result, value) if self._slow(value) else self._result(value)

    def then(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork[Any]:
        """Have `func(*args, **kwargs)` called once this is done; the work it returns has its result.

        An error here, such as a result that cannot be loaded, is that work's error, and `func` is not called. If `func`
        returns work, the result is that work's. The result is made, and `func` called, by the thread that ends the
        operation (now, if it is done): it must not block. By a thread of its own where the result comes from the broker
        of a channel on another host.
        """
        future: Future[Any] = Future()

        def call(_: Future[Any]) -> None:
            try:
                self._result(self._future.result())
                made = func(*args, **kwargs)
            except Exception as error:
                future.set_exception(error)
                return
            if isinstance(made, AsyncWork):
                made._pass_on(future)
            else:
                future.set_result(made)

        self._once_done(call)
        return AsyncWork(future, f"{self._what}, and what follows")

    def _pass_on(self, to: Future[Any]) -> None:
        def settle(future: Future[Any]) -> None:
            try:
                to.set_result(self._result(future.result()))
            except Exception as error:
                to.set_exception(error)

        self._once_done(settle)

    def _once_done(self, call: Callable[[Future[Any]], None]) -> None:
        def begin(future: Future[Any]) -> None:
            if future.exception() is None and self._slow(future.result()):
                threading.Thread(target=call, args=(future,), name="tq-then", daemon=True).start()
            else:
                call(future)

        self._future.add_done_callback(begin)

    def _result(self, value: Any) -> T:
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


def all_of(works: list[AsyncWork[Any]], what: str, result: T) -> AsyncWork[T]:
    """Work that is done when all of `works` are: with `result`, or the first error of them in their order."""
    future: Future[T] = Future()
    left = [len(works)]
    guard = threading.Lock()

    def one_less(_: Future[Any]) -> None:
        with guard:
            left[0] -= 1
            if left[0]:
                return
        try:
            for work in works:
                work._result(work._future.result())
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    if not works:
        future.set_result(result)
    for work in works:
        work._future.add_done_callback(one_less)
    return AsyncWork(future, what)
