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

from dataplane.core.durations import as_timeout
from workers.errors import CallWaitTimeoutError, WorkerLostError
from workers.groups.futures import Called, GroupFuture, cause_of, with_note
from workers.transport.waiting import LoggedWait

REDUCTIONS: Mapping[str, Callable[[Iterable[float]], float]] = {"max": max, "min": min, "mean": fmean}
_COLOURS = re.compile(r"\x1b\[\d+m")

T = TypeVar("T")


class Handle(Generic[T]):
    """The handle of a pending operation. Threads and async code may wait for it any number of times. Thread-safe.

    what: name of the operation, for messages; future: done when the operation is, kept in `_done`. Subclasses can
    override `_future` to start work on the first use of the handle.
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
        future = self._future()
        wait = LoggedWait(as_timeout("timeout", timeout))
        while not futures.wait([future], wait.step_s()).done:
            self._raise_if_over(wait)
        return future.result()

    async def async_wait(self, timeout: float | None = None) -> T:
        """`wait` for async code. The event loop is woken when the operation is done."""
        future = asyncio.wrap_future(self._future())
        wait = LoggedWait(as_timeout("timeout", timeout))
        done, _ = await asyncio.wait([future], timeout=wait.step_s())
        while not done:
            self._raise_if_over(wait)
            done, _ = await asyncio.wait([future], timeout=wait.step_s())
        return future.result()

    def _raise_if_over(self, wait: LoggedWait) -> None:
        """`CallWaitTimeoutError` if the timeout of `wait` has passed. Otherwise log the wait when a message is due."""
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
        func_result: Future[Any] = _uncancellable_future()

        def run_func(result: T) -> None:
            try:
                func_result.set_result(func(result) if _takes_argument(func) else func())
            except BaseException as error:
                func_result.set_exception(error)

        def start_func(future: Future[T]) -> None:
            """Runs in the thread that completes `future`, which must not block."""
            error = future.exception()
            if error is not None:
                func_result.set_exception(error)
            else:
                threading.Thread(target=run_func, args=(future.result(),), name="tq-then", daemon=True).start()

        self._future().add_done_callback(start_func)
        return Handle(what, func_result)


class GroupCall(GroupFuture, Handle[list[Any]]):
    """The results of a method on some workers, in the order of the called ranks.

    method: "Class.method"; keep: an object to keep referenced with this handle (the group, whose workers end with
    it). The first exception of a worker is raised at once, with its original type and a note of the worker and its
    traceback. `WorkerLostError` names a worker whose process ended.

    `wait` and, at first, `done` read Ray's references. The other methods use the future `_done`, which `_future`
    connects to the calls on first use.
    """

    _log_level = logging.WARNING

    def __init__(self, method: str, calls: Sequence[Called], keep: object) -> None:
        GroupFuture.__init__(self, f"{method} on ", calls)
        Handle.__init__(self, self._describe(calls), _uncancellable_future())
        self._method = method
        self._keep = keep
        self._guard = threading.Lock()  # so that one thread fills `_parts`
        self._parts: list[Future[Any]] = []  # one future per call, from the first use of `_future` on

    def wait(self, timeout: float | None = None) -> list[Any]:
        return self.collect(timeout)

    def done(self) -> bool:
        # If all calls have ended, `wait` returns or raises at once. Before, only a failed call makes it raise at once.
        references = [call.reference for call in self._calls]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        return len(ready) == len(references) or self._future().done()

    def consume_duration(self, reduction_type: str = "max") -> float:
        """Return the seconds that the method ran, reduced over the called workers ("max", "min" or "mean"). Waits
        for the call. Can be called once: KeyError after that, and after `consume_durations`."""
        method_name = self._method.rpartition(".")[2]  # without the class
        return self.consume_durations(reduction_type)[method_name]

    def consume_durations(self, reduction_type: str = "max", return_per_rank: bool = False) -> dict[str, float] | Any:
        """Return the seconds by name, of the method and of its `worker_timer`s, each reduced over the called workers
        ("max", "min" or "mean"). Waits for the call. return_per_rank: return a pair of these and the list of unreduced
        dicts, one per worker. The durations of a call are returned once; after that, and once the worker has served
        `actor_class.DURATIONS_KEPT` later calls, the dicts are empty."""
        if reduction_type not in REDUCTIONS:
            raise ValueError(f"reduction_type must be one of {', '.join(REDUCTIONS)}, got {reduction_type!r}")
        self.wait()
        requests = [
            Called(call.name, call.actor._tq_durations.remote(call.reference.task_id().hex())) for call in self._calls
        ]
        per_worker = GroupCall(f"{self._method} durations", requests, self._keep).wait()
        by_name: dict[str, list[float]] = {}
        for durations in per_worker:
            for name, seconds in durations.items():
                by_name.setdefault(name, []).append(seconds)
        reduced = {name: float(REDUCTIONS[reduction_type](seconds)) for name, seconds in by_name.items()}
        return (reduced, per_worker) if return_per_rank else reduced

    def _future(self) -> Future[list[Any]]:
        """Return a future that is done when all workers are, or the first has failed. Ray's callbacks complete it. They
        are registered at the first call of this method, because `wait` does not need them."""
        with self._guard:
            if self._parts:
                return self._done
            self._parts = [call.reference.future() for call in self._calls]
        # Each call that ends takes the number of those that are left. `next` is atomic, so the counter needs no lock.
        calls_left = itertools.count(len(self._parts) - 1, -1)

        def on_call_end(call: Called, future: Future[Any]) -> None:
            """Complete `_done` with the first error, or after the last call with all results."""
            error, is_last = future.exception(), next(calls_left) == 0
            with contextlib.suppress(futures.InvalidStateError):  # another call has failed before
                if error is not None:
                    self._done.set_exception(self._worker_error(call, error))
                # A call that failed in another thread may not have set its error yet, so check all.
                elif is_last and all(part.exception() is None for part in self._parts):
                    self._done.set_result([part.result() for part in self._parts])

        for call, part in zip(self._calls, self._parts, strict=True):
            part.add_done_callback(functools.partial(on_call_end, call))
        return self._done

    def _worker_error(self, call: Called, error: BaseException) -> BaseException:
        """As in `GroupFuture`, but `WorkerLostError` if the worker's process ended."""
        # A `RayTaskError` has the type of the method's own exception, too, which may be one of these.
        if isinstance(error, RayActorError | WorkerCrashedError) and not isinstance(error, RayTaskError):
            return WorkerLostError(worker=f"worker {call.name}", why=str(error))
        remote_traceback = f":\n{_COLOURS.sub('', str(error))}" if cause_of(error) is not None else ""
        raised = with_note(error, f"raised by worker {call.name} in {self._method}{remote_traceback}")
        raised.__cause__ = None  # the note contains it
        return raised


def _uncancellable_future() -> Future[Any]:
    """Return a future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _takes_argument(func: Callable[..., Any]) -> bool:
    """Return whether `func` can be called with one positional argument."""
    try:
        inspect.signature(func).bind(None)
    except ValueError:  # a builtin without a signature
        return True
    except TypeError:
        return False
    return True
