"""Making one Ray worker from a class's name, on a bundle of a placement group."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.engine import actor_class, merged, plain_class
from workers.placement import RANK_VARIABLES

logger = logging.getLogger(__name__)


class RayWorkerBuilder:
    """Makes Ray actors of one class.

    ray_actor_class_fqn: "package.module.Class", a plain class or a `@ray.remote` one. args, kwargs: for its
    constructor. The class may define a static `configure_worker(num_gpus, bundle_indices)`, optionally taking
    `num_gpus_per_node`, that returns (resources, env_vars, init_kwargs) and optionally runtime-environment overrides.
    """

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs

    class IsolatedWorkerInitializer:
        """Makes the workers where the class can be imported: as an actor of its own in the class's environment."""

        def __init__(self, ray_actor_class_fqn: str, *init_args: Any, **init_kwargs: Any) -> None:
            self.ray_actor_class_fqn = ray_actor_class_fqn
            self.init_args = init_args
            self.init_kwargs = init_kwargs

        def create_worker(
            self,
            placement_group: PlacementGroup,
            placement_group_bundle_index: int,
            num_gpus: float,
            bundle_indices: tuple[int, list[int]] | None = None,
            num_gpus_per_node: int | None = None,
            **extra_options: Any,
        ) -> ActorHandle:
            """Start the worker on the bundle; returns at once, before its constructor has run.

            Options, lowest first: the class's `_default_options`, `extra_options`, what `configure_worker` asks for
            (a warning says what it overrides), the bundle and the rank variables.
            """
            actor = actor_class(self.ray_actor_class_fqn)
            cls = plain_class(actor)
            options = merged(getattr(cls, "_default_options", None) or {}, {"num_gpus": num_gpus, **extra_options})
            required, init_kwargs = _configured(cls, num_gpus, bundle_indices, num_gpus_per_node)
            _warn_of_overrides(cls.__name__, options, required)
            ranked = {name: value for name, value in _variables(options).items() if name in RANK_VARIABLES}
            options = merged(merged(options, required), {"runtime_env": {"env_vars": ranked}})
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placement_group, placement_group_bundle_index=placement_group_bundle_index
            )
            return actor.options(**options).remote(*self.init_args, **{**self.init_kwargs, **init_kwargs})

    def create_worker_async(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float | int,
        bundle_indices: tuple[int, list[int]] | None = None,
        **extra_options: Any,
    ) -> tuple[ray.ObjectRef[ActorHandle], ActorHandle]:
        """As `__call__`, through an initializer actor: (a future of the worker, the initializer).

        The initializer owns the worker: keep it for as long as the worker is wanted.
        """
        place = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": place}
        initializer = (
            ray.remote(self.IsolatedWorkerInitializer)
            .options(**options)
            .remote(self.ray_actor_class_fqn, *self.args, **self.kwargs)
        )
        future = initializer.create_worker.remote(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )
        return future, initializer

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float | int,
        bundle_indices: tuple[int, list[int]] | None = None,
        **extra_options: Any,
    ) -> ActorHandle:
        """Start a worker from this process; returns at once, before its constructor has run.

        num_gpus: what the worker takes of the bundle's GPUs. bundle_indices: (node, bundles of its tied group) for a
        tied group's first worker. extra_options: options of the Ray actor; the class's `configure_worker` may override
        them.
        """
        maker = self.IsolatedWorkerInitializer(self.ray_actor_class_fqn, *self.args, **self.kwargs)
        return maker.create_worker(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        )


def _configured(
    cls: type, num_gpus: float, bundle_indices: tuple[int, list[int]] | None, num_gpus_per_node: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(actor options, constructor arguments) that the class's `configure_worker` asks for."""
    configure = getattr(cls, "configure_worker", None)
    if configure is None:
        return {}, {}
    arguments: dict[str, Any] = {"num_gpus": num_gpus, "bundle_indices": bundle_indices}
    if num_gpus_per_node is not None and "num_gpus_per_node" in inspect.signature(configure).parameters:
        arguments["num_gpus_per_node"] = num_gpus_per_node
    resources, env_vars, init_kwargs, *more = configure(**arguments)
    runtime = dict(more[0]) if more and more[0] else {}
    required = merged(dict(resources or {}), {"runtime_env": {**runtime, "env_vars": dict(env_vars or {})}})
    return required, dict(init_kwargs or {})


def _variables(options: Mapping[str, Any]) -> dict[str, str]:
    return dict((options.get("runtime_env") or {}).get("env_vars") or {})


def _warn_of_overrides(name: str, options: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    for key, value in required.items():
        if key != "runtime_env" and key in options and options[key] != value:
            logger.warning(
                "%s.configure_worker sets %s=%r over %r, because the class needs it", name, key, value, options[key]
            )
