"""The Ray actors of a worker group, under both interfaces: started together, ended together.

`start_workers` (on the bundles of a `RayVirtualCluster`) and `launch` (on the nodes of a `Cluster`) fill a
`StartedGroup`.
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

from workers.groups.futures import Called, GroupFuture, cause_of, noted

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 1800.0


class WorkerStartError(RuntimeError):
    """A worker did not come up in time, or died in its constructor without an exception. Its group has left nothing
    behind."""


class StartedGroup:
    """Actors that start together and end together.

    actors: by rank; owners: actors that made them, and without which they would end. Whoever starts them adds to
    `before` and `after` what is to be called when they end: before they are killed, and after that.
    """

    def __init__(self) -> None:
        self.actors: list[ActorHandle] = []
        self.owners: list[ActorHandle] = []
        self.before = ExitStack()
        self.after = ExitStack()
        self.constructed = False

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A context in which the actors are made: if it raises, they end."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def await_constructed(self, names: Sequence[str], *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the constructors of all actors, named in messages as given, have returned. Raises as `results_of`
        what one of them raised, with a note "in its constructor"."""
        ready = {name: actor.__ray_ready__.remote() for name, actor in zip(names, self.actors, strict=True)}
        results_of(ready, "in its constructor", timeout_s=timeout_s)
        self.constructed = True

    def end(self) -> bool:
        """Kill the actors, and whatever else goes with them. Whether all were killed; a no-op once done."""
        actors = [*self.actors, *self.owners]
        self.actors, self.owners = [], []
        with self.after:
            try:
                self.before.close()
            finally:
                well = kill(actors)
        return well


class _Start(GroupFuture):
    """What workers that start have to show. what: that they are at ("in its constructor")."""

    def __init__(self, what: str, references: Mapping[str, ObjectRef]) -> None:
        super().__init__(f"{what}: ", [Called(name, reference) for name, reference in references.items()])
        self._what = what

    def _late(self, what: str, timeout_s: float) -> Exception:
        return WorkerStartError(f"after {timeout_s:g} s still {what}. Is there space for them?")

    def _raised(self, call: Called, error: BaseException) -> BaseException:
        if cause_of(error) is not None:
            return noted(error, f"raised by worker {call.name} {self._what}")
        died = WorkerStartError(f"worker {call.name} died {self._what}: {error}")
        died.__cause__ = error
        return died


def results_of(references: Mapping[str, ObjectRef], what: str, *, timeout_s: float) -> dict[str, Any]:
    """What each named worker's reference gives, waited for together, up to `timeout_s`.

    The first to raise raises here as the exception it is, at once, with a note of the worker and of `what` it was at.
    `WorkerStartError` for a worker that died without one, and for those that are late.
    """
    return dict(zip(references, _Start(what, references).collect(timeout_s), strict=True))


def clean_up(actors: Mapping[str, ActorHandle], method: str, *, timeout_s: float | None) -> bool:
    """Call `method` on each named actor; whether it returned on all within `timeout_s` (None: however long it takes).

    What goes wrong is logged, never raised.
    """
    if actors and not ray.is_initialized():
        logger.warning("%s was not called: the workers ended with their Ray cluster", method)
        return False
    futures: dict[ObjectRef, str] = {}
    for name, actor in actors.items():
        try:
            futures[getattr(actor, method).remote()] = name
        except Exception as error:
            logger.warning("worker %s: cannot call %s: %s", name, method, error)
    done, late = ray.wait(list(futures), num_returns=len(futures), timeout=timeout_s) if futures else ([], [])
    for future in late:
        logger.warning("worker %s: %s did not return within %s s", futures[future], method, timeout_s)
    failed = 0
    for future in done:
        try:
            ray.get(future)
        except Exception as error:
            logger.warning("worker %s: %s failed: %s", futures[future], method, error)
            failed += 1
    return len(done) == len(actors) and not failed


def kill(actors: Sequence[ActorHandle]) -> bool:
    """Kill every actor that still lives, whatever goes wrong with one. Whether nothing did; True after Ray is gone."""
    well = True
    for actor in actors:
        if not ray.is_initialized():
            return well
        if isinstance(actor, ActorHandle) and actor._ray_cluster_and_job[0] != worker.global_worker.node.cluster_id:
            continue  # of a Ray cluster that has ended: Ray 2.47 ends the process that kills it from another cluster
        try:
            ray.kill(actor, no_restart=True)
        except Exception as error:
            logger.warning("cannot kill %s: %s", actor, error)
            well = False
    return well
