"""The Ray actors of a worker group, which start together and end together, and the results of calls on them.

`start_workers` (on bundles of a `RayVirtualCluster`) and `launch` (on nodes of a `Cluster`) fill a `StartedGroup`. All
interfaces of groups block in `GroupFuture.collect`. `MultiWorkerFuture` is the result type of `RayWorkerGroup` and
selects the workers whose results are returned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray._private import worker
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from dataplane.core.durations import as_timeout
from workers.errors import CallWaitTimeoutError
from workers.transport.waiting import LoggedWait

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 1800.0
STEP_S = 1.0
"""Longest single wait in Ray, which delays exceptions of signal handlers until the wait returns."""

Reference: TypeAlias = ObjectRef | ObjectRefGenerator
"""The pending result of a call: a generator's if the method is one."""


@dataclass(frozen=True)
class Called:
    """The call on one worker. name: the worker's; actor: None if it is not needed later."""

    name: str
    reference: Reference
    actor: Any = None


class GroupFuture:
    """The results of a call on some workers. what: text before the workers' names in messages ("Class.method on ").

    Subclasses override `_late_error` and `_worker_error`, the exceptions that `collect` raises, and `_log_level`, the
    level of the lines that name the pending workers.
    """

    _log_level = logging.INFO

    def __init__(self, what: str, calls: Sequence[Called]) -> None:
        self._call = what
        self._calls = calls

    def collect(self, timeout: float | None = None) -> list[Any]:
        """Return the results in the order of the calls: for a generator the list of its items.

        All calls are awaited at the same time. The items of a generator are read at its end. The first exception
        is raised at once with a note that names the worker. The other calls continue, and Ray may log their
        exceptions. An exception of a signal handler is raised within `STEP_S`. A log line every `waiting.LOG_EVERY_S`
        names the pending workers. `CallWaitTimeoutError`, which names them too, once `timeout` seconds have passed
        and no further result is ready.
        """
        wait = LoggedWait(as_timeout("timeout", timeout), self._log_level)
        results: list[Any] = [None] * len(self._calls)
        index_of: dict[ObjectRef, int] = {}  # by the reference that is ready at the end of the call
        for index, call in enumerate(self._calls):
            is_generator = isinstance(call.reference, ObjectRefGenerator)
            index_of[call.reference.completed() if is_generator else call.reference] = index
        waiting = list(index_of)
        while waiting:
            ready, waiting = _wait_for_some(waiting, wait.step_s(STEP_S))
            if not ready:
                pending = self._describe(self._calls[index_of[reference]] for reference in waiting)
                if wait.over(pending):  # which also logs `pending` when a line is due
                    raise self._late_error(pending, wait.timeout_s)
            for reference in ready:
                index = index_of[reference]
                call = self._calls[index]
                try:
                    results[index] = _read(call.reference)
                except Exception as error:
                    raised = self._worker_error(call, error)
                    raise raised from raised.__cause__  # keeps its cause, and hides the context
        return results

    def _describe(self, calls: Iterable[Called]) -> str:
        """Return the operation and the workers of these calls, for messages."""
        return self._call + ", ".join(call.name for call in calls)

    def _late_error(self, what: str, timeout_s: float) -> Exception:
        """Return the exception to raise for calls that are not done within `timeout_s`. what: see `_describe`."""
        return CallWaitTimeoutError(what=what, waited_s=timeout_s)

    def _worker_error(self, call: Called, error: BaseException) -> BaseException:
        """Return the exception to raise for an error that Ray raises: the exception of the worker itself, if there
        is one."""
        return with_note(error, f"raised by worker {call.name}")


def _wait_for_some(references: Sequence[Reference], timeout_s: float) -> tuple[list[Reference], list[Reference]]:
    """Wait up to `timeout_s` until a reference is ready. Return those that are ready then, and the others. A generator
    is ready when its next item is, or when it has ended."""
    first, others = ray.wait(list(references), num_returns=1, timeout=timeout_s)
    if not first or not others:
        return first, others
    # One more call returns everything that is ready, which is cheaper than one wait per result.
    also_ready, waiting = ray.wait(others, num_returns=len(others), timeout=0)
    return [*first, *also_ready], waiting


def cause_of(error: BaseException) -> BaseException | None:
    """Return the exception raised in the other process. None if there is none or if it cannot be sent here.

    Ray wraps an exception of a method in a `RayTaskError`, and one of a constructor also in an `ActorDiedError`.
    """
    inner = error.args[0] if error.args and isinstance(error.args[0], RayTaskError) else error
    cause = getattr(inner, "cause", None)
    return cause if isinstance(cause, BaseException) and not isinstance(cause, RayError) else None


def with_note(error: BaseException, note: str) -> BaseException:
    """Add a note to the exception raised in the other process (its cause becomes `error`), or to `error` if there is
    none. Return the exception that has the note."""
    remote = cause_of(error)
    if remote is None:
        error.add_note(note)
        return error
    remote.__cause__ = error
    remote.add_note(note)
    return remote


def _read(reference: Reference) -> Any:
    """Return the result of a call that has ended, or raise its error: for a generator the list of its items, of which
    the last one has the error."""
    if isinstance(reference, ObjectRefGenerator):
        return [ray.get(item) for item in reference]
    return ray.get(reference)


def wait_for_all(futures: Sequence[ObjectRef], *, timeout_s: float) -> list[ObjectRef]:
    """Wait until all futures are done or `timeout_s` has passed. Return those that are done. An exception of a signal
    handler is raised within `STEP_S`."""
    end = time.monotonic() + timeout_s
    while True:
        left_s = max(end - time.monotonic(), 0.0)
        done, _ = ray.wait(list(futures), num_returns=len(futures), timeout=min(left_s, STEP_S))
        is_last_step = left_s <= STEP_S
        if len(done) == len(futures) or is_last_step:
            return list(done)


class CalledGroup(Protocol):
    """The attributes of the called group that `MultiWorkerFuture` reads."""

    worker_to_tied_group_index: dict[int, int]

    @property
    def worker_metadata(self) -> list[dict[str, Any]]: ...


@dataclass
class MultiWorkerFuture:
    """The futures of one call on many workers.

    futures: one per called worker, in worker order; `ObjectRefGenerator`s if the method is a generator.
    return_from_workers: workers whose results `get_results` returns; None for one worker of each tied group.
    called_workers: the worker of each future; None if future n belongs to worker n.
    """

    futures: list[ObjectRef]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None

    def get_results(
        self,
        worker_group: CalledGroup,
        return_generators_as_proxies: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Return the results of `return_from_workers`, or else of the first worker of each tied group, in worker
        order.

        Blocks until every called worker has returned, including workers whose results are dropped, or until one
        raises. Raises the original exception at once, with a note that names the worker, while the others continue.
        `CallWaitTimeoutError`, which names the pending workers, after `timeout_s` (None: no limit). The items of a
        generator are inserted in place of its result and can be taken once. With `return_generators_as_proxies` the
        `ObjectRefGenerator` is returned instead and not awaited. ValueError if `called_workers` and `futures` differ
        in length, or if a called worker is in no tied group of `worker_group`.
        """
        # The worker of each future.
        called = self.called_workers if self.called_workers is not None else list(range(len(self.futures)))
        if len(called) != len(self.futures):
            raise ValueError(
                f"{len(self.futures)} futures for {len(called)} called workers; pass one future per worker"
            )
        # In the following, an index is one in `futures`.
        returned = self._indices_to_return(called, worker_group.worker_to_tied_group_index)
        # The futures of generators.
        streams = {index for index, future in enumerate(self.futures) if isinstance(future, ObjectRefGenerator)}
        calls = {
            index: Called(_worker_name(worker_group, called[index]), future)
            for index, future in enumerate(self.futures)
            if not (return_generators_as_proxies and index in streams)
        }
        timeout_s = as_timeout("timeout_s", timeout_s)
        collected = GroupFuture("a call on ", list(calls.values())).collect(timeout_s)
        values = dict(zip(calls, collected, strict=True))
        results: list[Any] = []
        for index in returned:
            if index not in values:
                results.append(self.futures[index])  # a generator, returned as a proxy
            elif index in streams:
                results.extend(values[index])
            else:
                results.append(values[index])
        return results

    def _indices_to_return(self, called: Sequence[int], tied_group_of: Mapping[int, int]) -> list[int]:
        """Return the indices in `futures` of the results to return, in worker order: those of `return_from_workers`,
        or else of the first called worker of each tied group (ValueError if a worker is in none). called: the worker of
        each future."""
        in_worker_order = sorted(range(len(called)), key=lambda index: called[index])
        if self.return_from_workers is not None:
            wanted = set(self.return_from_workers)
            return [index for index in in_worker_order if called[index] in wanted]
        first_of_group: dict[int, int] = {}
        for index in in_worker_order:
            worker = called[index]
            if worker not in tied_group_of:
                raise ValueError(
                    f"worker {worker} is in no tied group of this worker group, which may have been shut down"
                )
            first_of_group.setdefault(tied_group_of[worker], index)
        return list(first_of_group.values())


def _worker_name(worker_group: CalledGroup, worker: int) -> str:
    """Return the display name of a worker, or its number if the group has ended."""
    metadata = worker_group.worker_metadata
    return str(metadata[worker]["name"]) if worker < len(metadata) else str(worker)


# --- the actors


class WorkerStartError(RuntimeError):
    """A worker was not constructed in time, or died in its constructor without an exception. No part of the group
    remains."""


class StartedGroup:
    """Actors that start together and end together.

    actors: by rank; owners: actors that created them and whose end would end them; both are empty after the end.
    `before` and `after`: callbacks to run before and after the actors are killed; the starter of the actors adds
    them. constructed: whether the constructors of all actors have returned.
    """

    def __init__(self) -> None:
        self.actors: list[ActorHandle] = []
        self.owners: list[ActorHandle] = []
        self.before = ExitStack()
        self.after = ExitStack()
        self.constructed = False

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Return a context in which to create the actors. They are ended if it raises."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def await_constructed(self, names: Sequence[str], *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the constructors of all actors have returned. names: of the actors, for messages. Raises as
        `results_of`, with the note "in its constructor"."""
        ready = {name: actor.__ray_ready__.remote() for name, actor in zip(names, self.actors, strict=True)}
        results_of(ready, "in its constructor", timeout_s=timeout_s)
        self.constructed = True

    def end(self) -> bool:
        """Kill the actors and run the callbacks. Return whether all actors were killed. A no-op after the first
        call."""
        actors = [*self.actors, *self.owners]
        self.actors = []
        self.owners = []
        with self.after:  # runs its callbacks at the end of the block, also after an error
            try:
                self.before.close()
            finally:
                all_killed = kill(actors)
        return all_killed


class _Start(GroupFuture):
    """Results of workers that are starting. what: the step of the start, for messages ("in its constructor")."""

    def __init__(self, what: str, references: Mapping[str, ObjectRef]) -> None:
        super().__init__(f"{what}: ", [Called(name, reference) for name, reference in references.items()])
        self._what = what

    def _late_error(self, what: str, timeout_s: float) -> Exception:
        return WorkerStartError(
            f"after {timeout_s:g} s still {what}. Check that the cluster has free resources for them"
        )

    def _worker_error(self, call: Called, error: BaseException) -> BaseException:
        """As in `GroupFuture`, but `WorkerStartError` if the worker died without an exception."""
        if cause_of(error) is not None:  # the worker raised it
            return with_note(error, f"raised by worker {call.name} {self._what}")
        died = WorkerStartError(f"worker {call.name} died {self._what}: {error}")
        died.__cause__ = error
        return died


def results_of(references: Mapping[str, ObjectRef], what: str, *, timeout_s: float) -> dict[str, Any]:
    """Wait up to `timeout_s` for all references, which are given by worker name. Return their results by name.

    Raises the first exception at once, with its original type and a note of the worker and of `what`, the step of
    the start. `WorkerStartError` for a worker that died without an exception, and for a timeout.
    """
    return dict(zip(references, _Start(what, references).collect(timeout_s), strict=True))


def clean_up(actors: Mapping[str, ActorHandle], method: str, *, timeout_s: float | None) -> bool:
    """Call `method` on each named actor. Return whether it returned on all within `timeout_s` (None: no limit).

    Errors are logged, never raised.
    """
    if actors and not ray.is_initialized():
        logger.warning("Method %s was not called: the workers ended with their Ray cluster", method)
        return False
    name_of: dict[ObjectRef, str] = {}
    for name, actor in actors.items():
        try:
            name_of[getattr(actor, method).remote()] = name
        except Exception as error:
            logger.warning("Worker %s: cannot call %s: %s", name, method, error)
    # `ray.wait` rejects an empty list.
    done, late = ray.wait(list(name_of), num_returns=len(name_of), timeout=timeout_s) if name_of else ([], [])
    for future in late:
        logger.warning("Worker %s: %s did not return within %s s", name_of[future], method, timeout_s)
    failures = 0
    for future in done:
        try:
            ray.get(future)
        except Exception as error:
            logger.warning("Worker %s: %s failed: %s", name_of[future], method, error)
            failures += 1
    return len(done) == len(actors) and not failures


def kill(actors: Sequence[ActorHandle]) -> bool:
    """Kill every actor that is alive. Errors are only logged. Return whether there were none. After Ray has stopped,
    which has ended all actors, return at once."""
    succeeded = True
    for actor in actors:
        if not ray.is_initialized():
            return succeeded
        if isinstance(actor, ActorHandle) and actor._ray_cluster_and_job[0] != worker.global_worker.node.cluster_id:
            continue  # Ray 2.47 ends this process if it kills an actor of an earlier Ray cluster
        try:
            ray.kill(actor, no_restart=True)
        except Exception as error:
            logger.warning("Cannot kill %s: %s", actor, error)
            succeeded = False
    return succeeded
