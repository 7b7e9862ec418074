"""Starting and ending Ray actors, for every kind of worker group."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import RayError

START_TIMEOUT_S = 300.0
_NOT_PASSED_ON = ("RAY_", "CUDA_VISIBLE_DEVICES", "PYTEST_CURRENT_TEST")


class WorkerStartError(RuntimeError):
    """A worker's constructor raised, or the worker did not come up in time. Its group has left nothing behind."""


def driver_environment() -> dict[str, str]:
    """This process's environment without what Ray and its workers set for themselves."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}


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


def await_started(actors: Mapping[str, ActorHandle], *, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait until each named actor's constructor has returned.

    WorkerStartError naming the first that did not: with its exception's traceback, or with what was still missing at
    the timeout. Whoever calls ends the others.
    """
    waiting = {actor.__ray_ready__.remote(): name for name, actor in actors.items()}
    end = time.monotonic() + timeout_s
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=max(end - time.monotonic(), 0.0))
        if not done:
            names = ", ".join(sorted(waiting.values()))
            raise WorkerStartError(
                f"not started within {timeout_s:.0f} s: {names}. Does the cluster have room for them?"
            )
        name = waiting.pop(done[0])
        try:
            ray.get(done[0])
        except RayError as error:
            raise WorkerStartError(f"worker {name} did not start: {error}") from error


def end_actors(actors: Sequence[ActorHandle]) -> None:
    """Kill every actor that still lives. Idempotent; also after Ray is gone."""
    if not ray.is_initialized():
        return
    for actor in actors:
        ray.kill(actor, no_restart=True)


def results_in_order(futures: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """What `futures` give, in their order. The first that fails, whichever it is, raises its own exception at once,
    with a note that names the worker; the others go on."""
    place = {future: number for number, future in enumerate(futures)}
    waiting = list(futures)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        try:
            ray.get(done[0])
        except Exception as error:
            error.add_note(f"raised by worker {names[place[done[0]]]}")
            raise
    return list(ray.get(list(futures)))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top; `runtime_env` and its `env_vars` are merged key by key. Neither is changed."""
    result = {**base, **over}
    runtime = {**(base.get("runtime_env") or {}), **(over.get("runtime_env") or {})}
    variables = {
        **((base.get("runtime_env") or {}).get("env_vars") or {}),
        **((over.get("runtime_env") or {}).get("env_vars") or {}),
    }
    if variables:
        runtime["env_vars"] = variables
    if runtime:
        result["runtime_env"] = runtime
    return result
