"""`GroupCall`, the handle of a method call on the workers of a `WorkerGroup`, for threads and async code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from statistics import fmean
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError

from workers.errors import CallWaitTimeoutError, WorkerLostError
from workers.groups.started_group import Called, GroupFuture, cause_of, with_note
from workers.messages import AsyncWork

REDUCTIONS: Mapping[str, Callable[[Iterable[float]], float]] = {"max": max, "min": min, "mean": fmean}
_COLOURS = re.compile(r"\x1b\[\d+m")


class GroupCall(GroupFuture, AsyncWork[list[Any]]):
    """The results of a method on some workers, in the order of the called ranks.

    method: "Class.method"; keep: an object to keep referenced with this handle (the group, whose workers end with
    it). The first exception of a worker is raised at once, with its original type and a note of the worker and its
    traceback. `WorkerLostError` names a worker whose process ended.

    `wait` and, at first, `done` read Ray's references. The other methods use the future, which `_connect` connects to
    the calls on first use.
    """

    _log_level = logging.WARNING
    _timeout_error = CallWaitTimeoutError

    def __init__(self, method: str, calls: Sequence[Called], keep: object) -> None:
        GroupFuture.__init__(self, f"{method} on ", calls)
        AsyncWork.__init__(self, Future(), self._describe(calls))
        self._method = method
        self._keep = keep
        self._futures: list[Future[Any]] = []  # one future per call, from the first call of `_connect` on

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Return the results, or raise the first error. Blocks until all workers are done. `CallWaitTimeoutError` after
        `timeout` seconds; the call then continues."""
        return self.collect(timeout)

    async def async_wait(self, timeout: float | None = None) -> list[Any]:
        """`wait` for async code. The event loop is woken when the call is done."""
        self._connect()
        return await super().async_wait(timeout)

    def then(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork[Any]:
        """See `AsyncWork.then`. If `func` takes one more argument, the results are the first one; so it is with what
        follows the returned work."""
        self._connect()
        return _follow(self, func, args, kwargs)

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        # If all calls have ended, `wait` returns or raises at once. Before, only a failed call makes it raise at once.
        references = [call.reference for call in self._calls]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        return len(ready) == len(references) or self._connect().done()

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

    def _connect(self) -> Future[list[Any]]:
        """Return the future, which is done when all workers are, or the first has failed. Ray's callbacks complete it.
        They are registered at the first call of this method, because `wait` does not need them."""
        with self._guard:
            if self._futures:
                return self._future
            self._futures = [call.reference.future() for call in self._calls]
        # Each call that ends takes the number of those that are left. `next` is atomic, so the counter needs no lock.
        calls_left = itertools.count(len(self._futures) - 1, -1)

        def on_call_end(call: Called, future: Future[Any]) -> None:
            """Complete the future with the first error, or after the last call with all results."""
            error = future.exception()
            is_last = next(calls_left) == 0
            with contextlib.suppress(futures.InvalidStateError):  # another call has failed before
                if error is not None:
                    self._future.set_exception(self._worker_error(call, error))
                # A call that failed in another thread may not have set its error yet, so check all.
                elif is_last and all(future.exception() is None for future in self._futures):
                    self._future.set_result([future.result() for future in self._futures])

        for call, future in zip(self._calls, self._futures, strict=True):
            future.add_done_callback(functools.partial(on_call_end, call))
        return self._future

    def _worker_error(self, call: Called, error: BaseException) -> BaseException:
        """As in `GroupFuture`, but `WorkerLostError` if the worker's process ended."""
        # A `RayTaskError` has the type of the method's own exception, too, which may be one of these.
        if isinstance(error, RayActorError | WorkerCrashedError) and not isinstance(error, RayTaskError):
            return WorkerLostError(worker=f"worker {call.name}", why=str(error))
        remote_traceback = f":\n{_COLOURS.sub('', str(error))}" if cause_of(error) is not None else ""
        raised = with_note(error, f"raised by worker {call.name} in {self._method}{remote_traceback}")
        raised.__cause__ = None  # the note contains it
        return raised


class _Following(AsyncWork[Any]):
    """What follows a group call."""

    def then(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork[Any]:
        """See `GroupCall.then`."""
        return _follow(self, func, args, kwargs)


def _follow(
    work: AsyncWork[Any], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> AsyncWork[Any]:
    """Return what `GroupCall.then` does."""

    def call() -> Any:
        more = (work._result(),) if _takes(func, (None, *args), kwargs) else ()
        return func(*more, *args, **kwargs)

    after = AsyncWork.then(work, call)
    following = _Following(after._future, after._what)
    following._timeout_error = after._timeout_error
    return following


def _takes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether `func` can be called with these arguments."""
    try:
        inspect.signature(func).bind(*args, **kwargs)
    except ValueError:  # a builtin without a signature
        return True
    except TypeError:
        return False
    return True
