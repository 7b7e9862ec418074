"""`GroupCall`, the handle of a method call on the workers of a `WorkerGroup`, for threads and async code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from statistics import fmean
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError

from dataplane.core.durations import seconds_if_any
from workers.errors import CallWaitTimeoutError, WorkerLostError
from workers.groups.futures import Called, GroupFuture, cause_of, noted
from workers.transport.waiting import LoggedWait

REDUCTIONS: Mapping[str, Callable[[Iterable[float]], float]] = {"max": max, "min": min, "mean": fmean}
_COLOURS = re.compile(r"\x1b\[\d+m")

T = TypeVar("T")


class Handle(Generic[T]):
    """The handle of a pending operation. Threads and async code may wait for it any number of times. Thread-safe.

    what: name of the operation, for messages; future: done when the operation is.
    """

    def __init__(self, what: str, future: Future[T]) -> None:
        self._what = what
        self._done = future

    def _future(self) -> Future[T]:
        return self._done

    def wait(self, timeout: float | None = None) -> T:
        """Return the result or raise the error of the operation. Blocks until it is done, or for `timeout` seconds;
        then `CallWaitTimeoutError`, while the operation continues. A log line every `waiting.LOG_EVERY_S` names the
        operation."""
        future, wait = self._future(), LoggedWait(seconds_if_any("timeout", timeout))
        while not futures.wait([future], wait.step_s()).done:
            self._check(wait)
        return future.result()

    async def async_wait(self, timeout: float | None = None) -> T:
        """`wait` for async code. The event loop is woken when the operation is done."""
        future, wait = asyncio.wrap_future(self._future()), LoggedWait(seconds_if_any("timeout", timeout))
        while not (await asyncio.wait([future], timeout=wait.step_s()))[0]:
            self._check(wait)
        return future.result()

    def _check(self, wait: LoggedWait) -> None:
        if wait.over(self._what):
            raise CallWaitTimeoutError(what=self._what, waited_s=wait.timeout_s)

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._future().done()

    def then(self, func: Callable[..., Any]) -> Handle[Any]:
        """Call `func` after the operation is done, with the result if it takes an argument. Return the handle of its
        result.

        If the operation fails, that handle has the same error and `func` is not called. `func` runs in a new thread
        and may block.
        """
        what = f"{self._what}, followed by the function given to then"
        after: Future[Any] = _pending()

        def follow(result: T) -> None:
            try:
                after.set_result(func(result) if _takes_one(func) else func())
            except BaseException as error:
                after.set_exception(error)

        def settle(future: Future[T]) -> None:
            error = future.exception()
            if error is not None:
                after.set_exception(error)
            else:
                threading.Thread(target=follow, args=(future.result(),), name="tq-then", daemon=True).start()

        self._future().add_done_callback(settle)
        return Handle(what, after)


class GroupCall(GroupFuture, Handle[list[Any]]):
    """The results of a method on some workers, in the order of the called ranks.

    method: "Class.method"; keep: an object to keep referenced with this handle (the group, whose workers end with
    it). The first exception of a worker is raised at once, with its original type and a note of the worker and its
    traceback. `WorkerLostError` names a worker whose process ended.
    """

    _log_level = logging.WARNING

    def __init__(self, method: str, calls: Sequence[Called], keep: object) -> None:
        GroupFuture.__init__(self, f"{method} on ", calls)
        Handle.__init__(self, self._named(calls), _pending())
        self._method = method
        self._keep = keep
        self._guard = threading.Lock()
        self._parts: list[Future[Any]] = []

    def wait(self, timeout: float | None = None) -> list[Any]:
        return self.collect(timeout)

    def done(self) -> bool:
        references = [call.reference for call in self._calls]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        return len(ready) == len(references) or self._future().done()

    def consume_duration(self, reduction_type: str = "max") -> float:
        """Return the seconds that the method ran, reduced over the called workers ("max", "min" or "mean"). Waits
        for the call. Can be called once."""
        return self.consume_durations(reduction_type)[self._method.rpartition(".")[2]]

    def consume_durations(self, reduction_type: str = "max", return_per_rank: bool = False) -> dict[str, float] | Any:
        """Return the seconds by name, of the method and of its `worker_timer`s, each reduced over the called workers
        ("max", "min" or "mean"). Waits for the call. return_per_rank: also return the list of unreduced dicts, one
        per worker. Durations are returned once. A worker keeps those of its last `actor_class.DURATIONS_KEPT` calls;
        a later request returns nothing."""
        if reduction_type not in REDUCTIONS:
            raise ValueError(f"reduction_type must be one of {', '.join(REDUCTIONS)}, got {reduction_type!r}")
        self.wait()
        asked = [
            Called(call.name, call.actor._tq_durations.remote(call.reference.task_id().hex())) for call in self._calls
        ]
        each = GroupCall(f"{self._method} durations", asked, self._keep).wait()
        merged: dict[str, list[float]] = {}
        for durations in each:
            for name, seconds in durations.items():
                merged.setdefault(name, []).append(seconds)
        reduced = {name: float(REDUCTIONS[reduction_type](seconds)) for name, seconds in merged.items()}
        return (reduced, each) if return_per_rank else reduced

    def _future(self) -> Future[list[Any]]:
        """Return a future that is done when all workers are, or the first has failed. Ray's callbacks complete it."""
        with self._guard:
            if self._parts:
                return self._done
            self._parts = [call.reference.future() for call in self._calls]
        left = itertools.count(len(self._parts) - 1, -1)

        def one_ended(call: Called, future: Future[Any]) -> None:
            error, last = future.exception(), next(left) == 0
            with contextlib.suppress(futures.InvalidStateError):  # another call has failed before
                if error is not None:
                    self._done.set_exception(self._raised(call, error))
                elif last and all(part.exception() is None for part in self._parts):
                    self._done.set_result([part.result() for part in self._parts])

        for call, part in zip(self._calls, self._parts, strict=True):
            part.add_done_callback(functools.partial(one_ended, call))
        return self._done

    def _raised(self, call: Called, error: BaseException) -> BaseException:
        if isinstance(error, RayActorError | WorkerCrashedError) and not isinstance(error, RayTaskError):
            return WorkerLostError(worker=f"worker {call.name}", why=str(error))
        there = f":\n{_COLOURS.sub('', str(error))}" if cause_of(error) is not None else ""
        raised = noted(error, f"raised by worker {call.name} in {self._method}{there}")
        raised.__cause__ = None  # the note contains it
        return raised


def _pending() -> Future[Any]:
    """Return a future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _takes_one(func: Callable[..., Any]) -> bool:
    try:
        inspect.signature(func).bind(None)
    except ValueError:  # a builtin without a signature
        return True
    except TypeError:
        return False
    return True
