"""Starting the service as Ray actors: a named controller, its supervisor, and storage units on the nodes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.config import MIB, DataPlaneConfig
from dataplane.core.durations import seconds
from workers.service.actors import ASK_AGAIN_S, ControllerActor
from workers.service.nodes import Nodes, Storage, capacity_of_each, check_storage, taker
from workers.service.plan import ServicePlan, ServiceStartError, supervisor_name
from workers.service.queries import living_actor
from workers.service.resolver import actor_address
from workers.service.service import LaunchedService, ServiceConfig, end_service
from workers.service.supervisor import SUPERVISOR_CALLS, SupervisorActor

DEFAULT_NAME = "tq-controller"
START_TIMEOUT_S = 180.0
"""Actors of a busy machine may take a minute until they have imported what they need."""
LATE_S = 5.0
"""The supervisor, which knows what is late, is waited for a little longer."""


def launch_service(
    config: DataPlaneConfig | Mapping[str, Any] | None = None,
    *,
    name: str = DEFAULT_NAME,
    storage: Storage = "per_node",
    capacity_per_node: int | None = None,
    nodes: Nodes | None = None,
    detached: bool = False,
    timeout_s: float = START_TIMEOUT_S,
    **settings: Any,
) -> LaunchedService:
    """Start a service in the Ray cluster that this process is connected to: a controller, the actor `name` of this
    driver's namespace, on the driver's node; and storage units, which a supervisor beside it starts. All take no CPU
    slot.

    config, settings: those of `DataPlaneConfig`, `launch_service(capacity_bytes=4 << 30)`; `settings` go over `config`.
    storage: "per_node" has `units` storage units (1) on every node of the cluster, also on those that join later;
    "driver_node" on the driver's alone; a number is how many there are in all, dealt to the nodes in turn, and others
    are started for those whose node goes. `capacity_bytes` is each unit's; capacity_per_node what those of a node have
    together, instead. nodes: which nodes to take: their ids; or a mapping of labels to their values and resources to
    the least of them, all of which a node must have (`{"pool": "rollout", "GPU": 1}`); or a function of a `RayNode`
    that is sent to the supervisor. detached: it outlives this driver, until someone shuts it down
    (`LaunchedService.find`).

    Nodes that Ray says will leave are drained: their rows move to other units. See `docs/ray.md`.

    Files of TLS have to be on every node, and certificates be for the nodes' addresses or for `tls_server_name`. With
    `http_port` the controller answers there, and the units of each node at the ports that follow. `host` is not looked
    at, each actor listens on its node's address; a token is made unless one is set. With `state_dir`, a path that is
    local on every node, actors that die are started again on their nodes and go on with what they held.

    Blocks until every part is ready, up to `timeout_s`. `ServiceStartError` naming what did not start in time, or why
    it could not, such as `nodes` that take none of those there are; ValueError if a controller of that name runs
    already, or an address is set; TypeError for settings that there are not. What is left of a service of that name
    whose controller is gone is ended first.
    """
    timeout_s = seconds("timeout_s", timeout_s)
    _check_name(name)
    told = _settings(config, settings)
    check_storage(storage, told.units)
    capacity = capacity_of_each(storage, capacity_per_node, told.capacity_bytes, told.units)
    if capacity is not None and capacity < MIB:
        raise ValueError(f"capacity_per_node={capacity_per_node}: an arena has at least {MIB} bytes (1 MiB)")
    taker(nodes)
    namespace, here = ray.get_runtime_context().namespace, ray.get_runtime_context().get_node_id()
    token = told.secret() or secrets.token_urlsafe(32)
    told = replace(told, token=token, token_file=None, capacity_bytes=capacity)
    reached = ServiceConfig(**{**vars(told), "address": actor_address(name, namespace)})
    plan = ServicePlan(
        name=name, namespace=namespace, config=reached, storage=storage, nodes=nodes, driver=here, detached=detached
    )
    end = time.monotonic() + timeout_s
    controller = _controller(plan, told)
    supervisor = None
    try:
        _end_leftovers(plan, end)
        supervisor = _supervisor(plan)
        _started("the controller", controller.start.remote(), end, timeout_s)
        left_s = max(end - time.monotonic(), 0.0)
        _started("the supervisor", supervisor.start.remote(left_s), end + LATE_S, timeout_s)
    except BaseException:
        end_service(name, namespace, supervisor, controller)
        raise
    return LaunchedService(reached, name, namespace, supervisor, controller)


def _settings(config: DataPlaneConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> DataPlaneConfig:
    known = {setting.name for setting in fields(DataPlaneConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(
            f"launch_service() knows no {', '.join(unknown)}; settings of the service are {', '.join(sorted(known))}"
        )
    told = replace(DataPlaneConfig.of(config), **settings)
    if told.address is not None:
        raise ValueError(f"config.address is {told.address!r}: attach there, or leave it out to start a service")
    return told


def _options(plan: ServicePlan, name: str, *, lasting: bool) -> dict[str, Any]:
    """Of an actor beside the driver. lasting: Ray starts it again, there, when its process dies."""
    return {
        "name": name,
        "namespace": plan.namespace,
        "num_cpus": 0,
        "max_restarts": -1 if lasting else 0,
        "lifetime": "detached" if plan.detached else None,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=plan.driver, soft=False),
    }


def _controller(plan: ServicePlan, config: DataPlaneConfig) -> ActorHandle:
    options = _options(plan, plan.name, lasting=config.state_dir is not None)
    try:
        return ray.remote(ControllerActor).options(**options).remote(config)
    except ValueError as error:
        raise ValueError(
            f"an actor {plan.name!r} is in namespace {plan.namespace!r} already: attach to {plan.config.address}, or "
            "shut it down first, or launch under another name"
        ) from error


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: expected the name of the controller's actor, a str")
    if not name or "@" in name:
        raise ValueError(f"name={name!r}: the name of the controller's actor is not empty, and has no '@'")


def _end_leftovers(plan: ServicePlan, end: float) -> None:
    """End the supervisor and the storage units of a service whose controller had this one's name, and is gone."""
    name = supervisor_name(plan.name)
    while (left := living_actor(name, plan.namespace)) is not None:
        end_service(plan.name, plan.namespace, left, None)
        if time.monotonic() > end:
            raise ServiceStartError(f"{name!r} is left of a service whose controller is gone, and does not end")
        time.sleep(ASK_AGAIN_S)


def _supervisor(plan: ServicePlan) -> ActorHandle:
    options = _options(plan, supervisor_name(plan.name), lasting=True)
    return ray.remote(SupervisorActor).options(max_concurrency=SUPERVISOR_CALLS, **options).remote(plan)


def _started(what: str, starting: ObjectRef, end: float, timeout_s: float) -> None:
    """Wait for it up to `end`. `ServiceStartError` if it raised, or is late."""
    try:
        ray.get(starting, timeout=max(end - time.monotonic(), 0.0))
    except GetTimeoutError as error:
        raise ServiceStartError(f"not ready within {timeout_s:.0f} s: {what}") from error
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, ServiceStartError):
            raise cause from error
        raise ServiceStartError(f"{what} did not start: {type(cause).__name__}: {cause}") from error
