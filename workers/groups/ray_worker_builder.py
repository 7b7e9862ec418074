"""`RayWorkerBuilder` creates Ray workers from a class name, on bundles of placement groups."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray import ObjectRef
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.groups.actor_class import raise_portably
from workers.groups.started_group import results_of
from workers.placement.bundles import RANK_VARIABLES, TiedBundles
from workers.placement.environment import Layer, layered

logger = logging.getLogger(__name__)
MAKE_TIMEOUT_S = 300.0
NUM_GPUS_PER_NODE = 8


class RayWorkerBuilder:
    """Creates Ray actors of one class.

    ray_actor_class_fqn: "package.module.Class", a plain class or a `@ray.remote` class. args, kwargs: passed to its
    constructor. The class is imported by an initializer, an actor in the workers' own runtime environment, and never
    in this process. Exceptions of its methods and constructor arrive with their type, even if pickle cannot
    reconstruct them. The class may define

    - `_default_options`: actor options, which options of `@ray.remote` override;
    - a static `configure_worker(num_gpus, bundle_indices)`, optionally with `num_gpus_per_node`, that returns (actor
      options, environment variables, constructor arguments) and optionally a fourth item, options of the runtime
      environment.

    Options in ascending precedence: one CPU; the class's options; the caller's; those of `configure_worker`; the
    bundle and the caller's rank variables, which cannot be overridden. Overrides are logged.
    """

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs
        # By (id of the placement group, runtime environment as JSON). An initializer ends with its last reference.
        self._initializers: WeakValueDictionary[tuple[str, str], ActorHandle] = WeakValueDictionary()

    # Initializers belong to this process and are not pickled. A WeakValueDictionary cannot be pickled, either.

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_initializers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _initializers=WeakValueDictionary())

    class IsolatedWorkerInitializer:
        """Creates the workers. It runs as an actor in the class's runtime environment, in which the class can be
        imported."""

        def __init__(self, ray_actor_class_fqn: str, *init_args: Any, **init_kwargs: Any) -> None:
            self.ray_actor_class_fqn = ray_actor_class_fqn
            self.init_args = init_args
            self.init_kwargs = init_kwargs

        @cached_property
        def _actor(self) -> ActorClass:
            """The actor class, whose methods raise exceptions that the caller can unpickle."""
            actor = actor_class(self.ray_actor_class_fqn)
            raise_portably(plain_class(actor))
            return actor

        def create_worker(
            self,
            placement_group: PlacementGroup,
            placement_group_bundle_index: int,
            num_gpus: float,
            bundle_indices: TiedBundles | None = None,
            **extra_options: Any,
        ) -> ActorHandle:
            """Start the worker on the bundle and return at once, before its constructor has run.

            As `RayWorkerBuilder.__call__`, but the worker belongs to this process. `num_gpus_per_node` in
            `extra_options` is passed to `configure_worker`.
            """
            worker, overrides = self.make(
                placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
            )
            log_overrides(overrides)
            return worker

        def make(
            self,
            placement_group: PlacementGroup,
            bundle: int,
            num_gpus: float,
            bundle_indices: TiedBundles | None = None,
            num_gpus_per_node: int = NUM_GPUS_PER_NODE,
            **extra_options: Any,
        ) -> tuple[ActorHandle, list[str]]:
            """As `create_worker`, but return the worker and the log messages: one for each kind of overridden option,
            with the reason."""
            cls = plain_class(self._actor)
            # required: actor options; init_kwargs: further arguments of the constructor
            required, init_kwargs = _configure_worker(cls, num_gpus, bundle_indices, num_gpus_per_node)
            caller_options, rank_variables = _split_off_ranks(extra_options)
            scheduling = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle)
            on_bundle = {"scheduling_strategy": scheduling, "runtime_env": {"env_vars": rank_variables}}
            # Later layers override earlier ones. The third argument is the reason, for the log.
            options, overrides = layered(
                [
                    Layer("the default", {"num_cpus": None}, ""),  # None: not logged when it is overridden
                    Layer(f"{cls.__name__}._default_options", getattr(cls, "_default_options", None) or {}, ""),
                    Layer(
                        "@ray.remote", _decorator_options(self._actor), "the decorator overrides the class's defaults"
                    ),
                    Layer("the call", {"num_gpus": num_gpus, **caller_options}, "the caller's options take precedence"),
                    Layer(f"{cls.__name__}.configure_worker", required, "the class requires it"),
                    Layer("the builder", on_bundle, "bundle and ranks are fixed"),
                ]
            )
            if options["num_cpus"] is None:  # no layer set it
                options["num_cpus"] = 1
            worker = self._actor.options(**options).remote(*self.init_args, **{**self.init_kwargs, **init_kwargs})
            return worker, overrides

    def create_worker_async(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float | int,
        bundle_indices: TiedBundles | None = None,
        **extra_options: Any,
    ) -> tuple[ObjectRef, ActorHandle]:
        """As `__call__`, without blocking. Return (future of the worker, initializer actor that creates it).

        The initializer owns the worker. Keep a reference to it for as long as you need the worker. While it exists,
        it creates all workers of that placement group that have the same runtime environment. It takes no CPU.
        """
        initializer = self.initializer(placement_group, placement_group_bundle_index, extra_options)
        future = initializer.create_worker.remote(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        return future, initializer

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float | int,
        bundle_indices: TiedBundles | None = None,
        **extra_options: Any,
    ) -> ActorHandle:
        """Create a worker on the bundle and return its handle. Its constructor may not have run yet. The worker ends
        with the last reference to the handle.

        num_gpus: the worker's share of the bundle's GPUs. bundle_indices: (node, bundles of its tied group), for the
        first worker of a tied group. extra_options: options of the Ray actor, which the class's `configure_worker`
        may override. Blocks up to `MAKE_TIMEOUT_S` (then `WorkerStartError`) until the class is imported and
        `configure_worker` has returned. Raises the exceptions of both.
        """
        future, initializer = self.begin(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        name = f"of {self.ray_actor_class_fqn}"
        worker, overrides = results_of({name: future}, "being made", timeout_s=MAKE_TIMEOUT_S)[name]
        log_overrides(overrides)
        worker._initializer = initializer  # keeps it: the worker would end with its initializer
        return worker

    def for_worker_group(self) -> RayWorkerBuilder:
        """Return a copy that shares no initializers with this object."""
        return copy.copy(self)

    def begin(
        self,
        placement_group: PlacementGroup,
        bundle: int,
        num_gpus: float,
        bundle_indices: TiedBundles | None = None,
        **extra_options: Any,
    ) -> tuple[ObjectRef, ActorHandle]:
        """As `create_worker_async`, for callers that log. Return (future of (worker, log messages), initializer)."""
        initializer = self.initializer(placement_group, bundle, extra_options)
        future = initializer.make.remote(placement_group, bundle, num_gpus, bundle_indices, **extra_options)
        return future, initializer

    def initializer(self, placement_group: PlacementGroup, bundle: int, options: Mapping[str, Any]) -> ActorHandle:
        """Return the initializer for workers with these actor `options` on this placement group. Create one, on
        `bundle`, if none exists for the same placement group and runtime environment (without the rank variables)."""
        # The option "runtime_env" alone, without the rank variables.
        env_options, _ = _split_off_ranks({"runtime_env": options.get("runtime_env")})
        key = (placement_group.id.hex(), json.dumps(env_options, sort_keys=True, default=repr))
        initializer = self._initializers.get(key)
        if initializer is None:
            on_bundle = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle)
            actor = ray.remote(self.IsolatedWorkerInitializer).options(
                num_cpus=0, scheduling_strategy=on_bundle, **env_options
            )
            initializer = self._initializers[key] = actor.remote(self.ray_actor_class_fqn, *self.args, **self.kwargs)
        return initializer


def actor_class(fqn: str) -> ActorClass:
    """Return the class named `fqn` ("package.module.Class") as a Ray actor class. ValueError if it cannot be
    imported."""
    module_name, _, name = fqn.rpartition(".")
    if not module_name:
        raise ValueError(f"{fqn!r} is not a full class name; expected the form package.module.Class")
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {fqn!r}: {error}") from error
    return cls if isinstance(cls, ActorClass) else ray.remote(cls)


def plain_class(actor: ActorClass) -> type:
    """Return the class from which an actor class was made."""
    cls: type = actor.__ray_metadata__.modified_class
    return cls


def log_overrides(messages: list[str]) -> None:
    """Log each message once: the workers of a group have the same overrides."""
    for message in dict.fromkeys(messages):
        logger.warning("%s", message)


def _split_off_ranks(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a copy of the actor options without the rank variables, and the rank variables."""
    # A copy, `runtime_env` included. Origin and reason are for the messages only, which are dropped.
    others, _ = layered([Layer(origin="", options=options, why="")])
    variables = others.get("runtime_env", {}).get("env_vars", {})
    return others, {name: variables.pop(name) for name in RANK_VARIABLES if name in variables}


def _decorator_options(actor: ActorClass) -> dict[str, Any]:
    """Return the options that `@ray.remote` gave to the class, without the one that only the decorator accepts."""
    return {name: value for name, value in actor._default_options.items() if name != "concurrency_groups"}


def _configure_worker(
    cls: type, num_gpus: float, bundle_indices: TiedBundles | None, num_gpus_per_node: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call the class's `configure_worker`, if it has one. Return the (actor options, constructor arguments) that it
    requests. ValueError unless it returns three or four items."""
    configure = getattr(cls, "configure_worker", None)
    if configure is None:
        return {}, {}
    arguments: dict[str, Any] = {"num_gpus": num_gpus, "bundle_indices": bundle_indices}
    parameters = inspect.signature(configure).parameters
    accepts_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "num_gpus_per_node" in parameters or accepts_any_keyword:
        arguments["num_gpus_per_node"] = num_gpus_per_node
    returned = configure(**arguments)
    if not isinstance(returned, tuple | list) or len(returned) not in (3, 4):
        raise ValueError(
            f"{cls.__name__}.configure_worker returned {returned!r:.200}; it must return (resources, env_vars, "
            "init_kwargs) and optionally runtime-environment options"
        )
    resources, env_vars, init_kwargs, *optional = returned
    runtime_env = optional[0] if optional else {}
    # Merged as layers, because a plain update would replace the whole "runtime_env".
    layers = [resources or {}, {"runtime_env": runtime_env}, {"runtime_env": {"env_vars": env_vars or {}}}]
    required, _ = layered([Layer(origin="", options=options, why="") for options in layers])
    return required, dict(init_kwargs or {})
