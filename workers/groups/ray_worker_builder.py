"""Making one Ray worker from a class's name, on a bundle of a placement group."""

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

from workers.groups.remote_errors import raise_portably
from workers.groups.started_group import results_of
from workers.placement.bundles import RANK_VARIABLES, TiedBundles
from workers.placement.environment import Layer, layered

logger = logging.getLogger(__name__)
MAKE_TIMEOUT_S = 300.0
NUM_GPUS_PER_NODE = 8


class RayWorkerBuilder:
    """Makes Ray actors of one class.

    ray_actor_class_fqn: "package.module.Class", a plain class or a `@ray.remote` one. args, kwargs: for its
    constructor. The class is imported by an initializer, an actor in the workers' own runtime environment, never here.
    What its methods and constructor raise arrives as what it is, though pickle cannot make it anew. It may define

    - `_default_options`, actor options, which those of `@ray.remote` come over;
    - a static `configure_worker(num_gpus, bundle_indices)`, optionally taking `num_gpus_per_node`, that returns
      (actor options, environment variables, constructor arguments) and optionally a fourth item, options of the
      runtime environment.

    Options, lowest first: one CPU, the class's, the caller's, those of `configure_worker`, then the bundle and the
    caller's rank variables, which nobody overrides. A log line says what `configure_worker` and the last override.
    """

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs
        self._initializers: WeakValueDictionary[tuple[str, str], ActorHandle] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_initializers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _initializers=WeakValueDictionary())

    class IsolatedWorkerInitializer:
        """Makes the workers where the class can be imported: as an actor of its own in the class's environment."""

        def __init__(self, ray_actor_class_fqn: str, *init_args: Any, **init_kwargs: Any) -> None:
            self.ray_actor_class_fqn = ray_actor_class_fqn
            self.init_args = init_args
            self.init_kwargs = init_kwargs

        @cached_property
        def _actor(self) -> ActorClass:
            found = actor_class(self.ray_actor_class_fqn)
            raise_portably(plain_class(found))
            return found

        def create_worker(
            self,
            placement_group: PlacementGroup,
            placement_group_bundle_index: int,
            num_gpus: float,
            bundle_indices: TiedBundles | None = None,
            **extra_options: Any,
        ) -> ActorHandle:
            """Start the worker on the bundle; returns at once, before its constructor has run.

            As `RayWorkerBuilder.__call__`, from this process. `num_gpus_per_node` in `extra_options` is for
            `configure_worker`.
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
            """`create_worker`, and what to log: a sentence for each kind of option that was overridden, and why."""
            cls = plain_class(self._actor)
            required, init_kwargs = _configured(cls, num_gpus, bundle_indices, num_gpus_per_node)
            asked, ranks = _without_ranks(extra_options)
            place = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle)
            on_bundle = {"scheduling_strategy": place, "runtime_env": {"env_vars": ranks}}
            options, overrides = layered(
                [
                    Layer("the default", {"num_cpus": None}, ""),
                    Layer(f"{cls.__name__}._default_options", getattr(cls, "_default_options", None) or {}, ""),
                    Layer("@ray.remote", _decorated(self._actor), "its arguments are what counts for the class"),
                    Layer("the call", {"num_gpus": num_gpus, **asked}, "the class's options are defaults"),
                    Layer(f"{cls.__name__}.configure_worker", required, "the class needs it so"),
                    Layer("the builder", on_bundle, "a worker has its place's bundle and ranks"),
                ]
            )
            if options["num_cpus"] is None:
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
        """As `__call__`, without waiting: (a future of the worker, the initializer actor that makes it).

        The initializer owns the worker: keep it for as long as the worker is wanted. While it is kept, it makes all
        workers on that placement group that have the same runtime environment. It takes no CPU.
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
        """A worker on the bundle, whose constructor may not have run yet. It lives while this handle to it does.

        num_gpus: what the worker takes of the bundle's GPUs. bundle_indices: (node, bundles of its tied group) for a
        tied group's first worker. extra_options: options of the Ray actor; the class's `configure_worker` may override
        them. Blocks until the class is imported and asked for its configuration, up to `MAKE_TIMEOUT_S`
        (`WorkerStartError`); what either raises, raises here.
        """
        made, initializer = self.begin(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        name = f"of {self.ray_actor_class_fqn}"
        worker, overrides = results_of({name: made}, "being made", timeout_s=MAKE_TIMEOUT_S)[name]
        log_overrides(overrides)
        worker._initializer = initializer
        return worker

    def for_group(self) -> RayWorkerBuilder:
        """A copy that shares no initializers."""
        return copy.copy(self)

    def begin(
        self,
        placement_group: PlacementGroup,
        bundle: int,
        num_gpus: float,
        bundle_indices: TiedBundles | None = None,
        **extra_options: Any,
    ) -> tuple[ObjectRef, ActorHandle]:
        """As `create_worker_async`, for who logs here: a future of (the worker, what to log), and the initializer."""
        initializer = self.initializer(placement_group, bundle, extra_options)
        made = initializer.make.remote(placement_group, bundle, num_gpus, bundle_indices, **extra_options)
        return made, initializer

    def initializer(self, placement_group: PlacementGroup, bundle: int, options: Mapping[str, Any]) -> ActorHandle:
        """The initializer for workers with such `options` on this placement group, a new one unless one is kept."""
        runtime_env, _ = _without_ranks({"runtime_env": options.get("runtime_env")})
        key = (placement_group.id.hex(), json.dumps(runtime_env, sort_keys=True, default=repr))
        found = self._initializers.get(key)
        if found is None:
            place = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle)
            maker = ray.remote(self.IsolatedWorkerInitializer)
            made = maker.options(num_cpus=0, scheduling_strategy=place, **runtime_env)
            found = self._initializers[key] = made.remote(self.ray_actor_class_fqn, *self.args, **self.kwargs)
        return found


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


def log_overrides(sentences: list[str]) -> None:
    """Say each once."""
    for sentence in dict.fromkeys(sentences):
        logger.warning("%s", sentence)


def _without_ranks(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of actor options without the rank variables, and these."""
    rest, _ = layered([Layer("", options, "")])
    variables = rest.get("runtime_env", {}).get("env_vars", {})
    return rest, {name: variables.pop(name) for name in RANK_VARIABLES if name in variables}


def _decorated(actor: ActorClass) -> dict[str, Any]:
    """What the class was given by `@ray.remote`, but for what only that can give."""
    return {name: value for name, value in actor._default_options.items() if name != "concurrency_groups"}


def _configured(
    cls: type, num_gpus: float, bundle_indices: TiedBundles | None, num_gpus_per_node: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(actor options, constructor arguments) that the class's `configure_worker` asks for. ValueError where it returns
    neither three items nor four."""
    configure = getattr(cls, "configure_worker", None)
    if configure is None:
        return {}, {}
    arguments: dict[str, Any] = {"num_gpus": num_gpus, "bundle_indices": bundle_indices}
    parameters = inspect.signature(configure).parameters
    if "num_gpus_per_node" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        arguments["num_gpus_per_node"] = num_gpus_per_node
    returned = configure(**arguments)
    if not isinstance(returned, tuple | list) or len(returned) not in (3, 4):
        raise ValueError(
            f"{cls.__name__}.configure_worker returned {returned!r:.200}; it returns (resources, env_vars, "
            "init_kwargs) and optionally runtime-environment options"
        )
    resources, env_vars, init_kwargs, *more = returned
    asked = [resources or {}, {"runtime_env": more[0] if more else {}}, {"runtime_env": {"env_vars": env_vars or {}}}]
    required, _ = layered([Layer("", options, "") for options in asked])
    return required, dict(init_kwargs or {})
