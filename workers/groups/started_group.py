"""`StartedGroup`: the Ray actors of a worker group, which start together and end together.

`start_workers` (on bundles of a `RayVirtualCluster`) and `launch` (on nodes of a `Cluster`) fill a `StartedGroup`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray import ObjectRef
from ray._private import worker
from ray.actor import ActorHandle

from workers.groups.futures import Called, GroupFuture, cause_of, with_note

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 1800.0


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
        self.actors, self.owners = [], []
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
