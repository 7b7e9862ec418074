"""Ray actors of any class: found by name, waited for until they are constructed, killed."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray._private import worker
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import RayError, RayTaskError

logger = logging.getLogger(__name__)
LOG_EVERY_S = 30.0
STEP_S = 1.0
"""Ray holds back what a signal's handler raises for as long as it waits."""


class WorkerStartError(RuntimeError):
    """A worker did not come up in time, or died in its constructor without an exception. Its group has left nothing
    behind."""


def actor_class(fqn: str) -> ActorClass:
    """The class that `fqn` ("package.module.Class") names, as a Ray actor class. ValueError where there is none."""
    module_name, _, name = fqn.rpartition(".")
    if not module_name:
        raise ValueError(f"{fqn!r} is not a fully qualified class name (package.module.Class)")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {fqn!r}: {error}") from error
    return found if isinstance(found, ActorClass) else ray.remote(found)


def plain_class(actor: ActorClass) -> type:
    """The class that an actor class was made from."""
    found: type = actor.__ray_metadata__.modified_class
    return found


def wait(futures: Sequence[ObjectRef], *, num_returns: int, timeout_s: float) -> list[ObjectRef]:
    """Those of `futures` that are done once `num_returns` are, or `timeout_s` has passed. As `ray.wait`, but what a
    signal's handler raises is raised within `STEP_S`."""
    end = time.monotonic() + timeout_s
    while True:
        left_s = max(end - time.monotonic(), 0.0)
        done, _ = ray.wait(list(futures), num_returns=num_returns, timeout=min(left_s, STEP_S))
        if len(done) == num_returns or left_s <= STEP_S:
            return list(done)


def results_of(futures: Mapping[str, ObjectRef], what: str, *, timeout_s: float) -> dict[str, Any]:
    """What each named worker's future gives, waited for together, up to `timeout_s`.

    The first to raise raises here as the exception it is, at once, with a note of the worker and of `what` it was at
    ("in its constructor"). `WorkerStartError` for a worker that died without one, and for those that are late. A log
    line says every `LOG_EVERY_S` who is waited for.
    """
    name_of = {future: name for name, future in futures.items()}
    results: dict[str, Any] = {}
    end = time.monotonic() + timeout_s
    while len(results) < len(futures):
        waiting = [future for name, future in futures.items() if name not in results]
        left_s = max(end - time.monotonic(), 0.0)
        done = wait(waiting, num_returns=1, timeout_s=min(left_s, LOG_EVERY_S))
        if done:
            results[name_of[done[0]]] = _result(done[0], name_of[done[0]], what)
            continue
        late = ", ".join(name_of[future] for future in waiting)
        if left_s <= LOG_EVERY_S:
            raise WorkerStartError(f"after {timeout_s:g} s still {what}: {late}. Is there room for them?")
        logger.info("still %s, waited for another %.0f s at most: %s", what, left_s - LOG_EVERY_S, late)
    return results


def await_constructed(actors: Mapping[str, ActorHandle], *, timeout_s: float) -> None:
    """Wait until each named actor's constructor has returned; errors as `results_of`. Whoever calls ends the others."""
    results_of(
        {name: actor.__ray_ready__.remote() for name, actor in actors.items()},
        "in its constructor",
        timeout_s=timeout_s,
    )


def _result(future: ObjectRef, name: str, what: str) -> Any:
    try:
        return ray.get(future)
    except RayError as error:
        cause = cause_of(error)
        if cause is None:
            raise WorkerStartError(f"worker {name} died {what}: {error}") from error
        cause.add_note(f"raised by worker {name} {what}")
        raise cause from error


def cause_of(error: Exception) -> BaseException | None:
    """The exception raised in the other process, None where there was none or it cannot be brought here.

    Ray wraps what a method raises in a `RayTaskError`, and what a constructor raises in that and an `ActorDiedError`.
    """
    inner = error.args[0] if error.args and isinstance(error.args[0], RayTaskError) else error
    cause = getattr(inner, "cause", None)
    return cause if isinstance(cause, BaseException) and not isinstance(cause, RayError) else None


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
