"""Start the service as Ray actors: a named controller, its supervisor, and storage units on the nodes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_args

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.config import DataPlaneConfig
from dataplane.core.durations import as_timeout
from workers.service.actors import RETRY_S, ControllerActor
from workers.service.service import LaunchedService, ServiceConfig, actor_address, end_service
from workers.service.supervisor import (
    SUPERVISOR_CALLS,
    ServicePlan,
    ServiceStartError,
    Storage,
    SupervisorActor,
    living_actor,
    supervisor_name,
)

DEFAULT_NAME = "tq-controller"
START_TIMEOUT_S = 180.0
"""On a busy machine, the imports of an actor can take a minute."""
LATE_S = 5.0
"""Additional wait for the supervisor, whose own timeout error names the units that are late."""


def launch_service(
    config: DataPlaneConfig | Mapping[str, Any] | None = None,
    *,
    name: str = DEFAULT_NAME,
    storage: Storage = "per_node",
    detached: bool = False,
    timeout_s: float | None = START_TIMEOUT_S,
    **settings: Any,
) -> LaunchedService:
    """Start a service in the Ray cluster that this process is connected to. Its controller is the actor `name` in this
    driver's namespace, on the driver's node. A supervisor on the same node starts the storage units. None of them takes
    a CPU slot.

    config, settings: settings of `DataPlaneConfig`, e.g. `launch_service(capacity_bytes=4 << 30)`; `settings` override
    `config`. storage: "per_node" starts `units` storage units (1) on every node of the cluster, including nodes that
    join later; "driver_node" on the driver's node only. `LaunchedService.add_node` adds others. `capacity_bytes` is the
    capacity of each unit. detached: the service keeps running after this driver's end, until it is shut down
    (`LaunchedService.find`).

    When Ray announces that a node will leave, it is drained: its rows move to other units. See `docs/ray.md`.

    TLS files must exist on every node, with certificates for the nodes' addresses or for `tls_server_name`. With
    `http_port`, the controller serves HTTP on that port, and the units of each node on the following ports. `host` is
    ignored: each actor listens on its node's address. A token is generated unless one is set. With `state_dir`, a local
    path on every node, actors that die are restarted on their nodes with their data.

    Blocks until all actors are ready, up to `timeout_s`. `ServiceStartError`, naming the actors that did not start in
    time or the reason. ValueError if a controller of that name is running, or an
    address is set. TypeError for unknown settings. The remaining actors of a service of that name whose controller has
    ended are ended first.
    """
    timeout_s = as_timeout("timeout_s", timeout_s)
    _check_name(name)
    merged = _merge_settings(config, settings)
    if storage not in get_args(Storage):
        raise ValueError(f'storage={storage!r}: expected "per_node" or "driver_node"')
    namespace = ray.get_runtime_context().namespace
    driver_node = ray.get_runtime_context().get_node_id()
    token = merged.secret() or secrets.token_urlsafe(32)
    merged = replace(merged, token=token, token_file=None)
    # For clients and units: the same settings, with the controller's address.
    service_config = ServiceConfig(**{**vars(merged), "address": actor_address(name, namespace)})
    plan = ServicePlan(
        name=name,
        namespace=namespace,
        config=service_config,
        storage=storage,
        driver=driver_node,
        detached=detached,
    )
    end = time.monotonic() + timeout_s
    # First: it raises if a service of this name is running, whose other actors must not be ended as leftovers.
    controller = _create_controller(plan, merged)
    supervisor = None
    try:
        _end_leftovers(plan, end)
        supervisor = _create_supervisor(plan)
        _await_start("the controller", controller.start.remote(), end, timeout_s)
        left_s = max(end - time.monotonic(), 0.0)
        _await_start("the supervisor", supervisor.start.remote(left_s), end + LATE_S, timeout_s)
    except BaseException:
        end_service(name, namespace, supervisor, controller)
        raise
    return LaunchedService(service_config, name, namespace, supervisor, controller)


def _merge_settings(config: DataPlaneConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> DataPlaneConfig:
    """Merge `settings` into `config`. TypeError for unknown settings, ValueError if an address is set."""
    known = {setting.name for setting in fields(DataPlaneConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(
            f"launch_service() has no setting {', '.join(unknown)}; settings are {', '.join(sorted(known))}"
        )
    merged = replace(DataPlaneConfig.of(config), **settings)
    if merged.address is not None:
        raise ValueError(
            f"config.address={merged.address!r} names an existing service: attach to it with a client, or omit the "
            "address to start a new service"
        )
    return merged


def _options(plan: ServicePlan, name: str, *, lasting: bool) -> dict[str, Any]:
    """Return the Ray options of an actor on the driver's node. lasting: Ray restarts it there if its process dies."""
    return {
        "name": name,
        "namespace": plan.namespace,
        "num_cpus": 0,
        "max_restarts": -1 if lasting else 0,  # -1: without a limit
        "lifetime": "detached" if plan.detached else None,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=plan.driver, soft=False),
    }


def _create_controller(plan: ServicePlan, config: DataPlaneConfig) -> ActorHandle:
    """Create the controller's actor. ValueError if its name is in use."""
    options = _options(plan, plan.name, lasting=config.state_dir is not None)
    try:
        return ray.remote(ControllerActor).options(**options).remote(config)
    except ValueError as error:
        raise ValueError(
            f"an actor {plan.name!r} is in namespace {plan.namespace!r} already: attach to {plan.config.address}, shut "
            "it down first, or launch with another name"
        ) from error


def _check_name(name: object) -> None:
    """Raise TypeError or ValueError for an invalid name of the controller's actor."""
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: expected the name of the controller's actor, a str")
    if not name or "@" in name:
        raise ValueError(f"name={name!r}: the name of the controller's actor must not be empty or contain '@'")


def _end_leftovers(plan: ServicePlan, end: float) -> None:
    """End the supervisor and the storage units of an earlier service of this name whose controller has ended. Repeat it
    until the supervisor's name is free: units end themselves without one. `ServiceStartError` if it is not free at the
    time `end`."""
    name = supervisor_name(plan.name)
    while (supervisor := living_actor(name, plan.namespace)) is not None:
        end_service(plan.name, plan.namespace, supervisor, controller=None)
        if time.monotonic() > end:
            raise ServiceStartError(f"supervisor {name!r} of an ended service did not end in time; kill that actor")
        time.sleep(RETRY_S)


def _create_supervisor(plan: ServicePlan) -> ActorHandle:
    """Create the supervisor's actor."""
    options = _options(plan, supervisor_name(plan.name), lasting=True)
    return ray.remote(SupervisorActor).options(max_concurrency=SUPERVISOR_CALLS, **options).remote(plan)


def _await_start(what: str, starting: ObjectRef, end: float, timeout_s: float) -> None:
    """Wait until `end` for the call `starting` of the actor `what`. `ServiceStartError` if it fails or times out.
    timeout_s: for the message only."""
    try:
        ray.get(starting, timeout=max(end - time.monotonic(), 0.0))
    except GetTimeoutError as error:
        raise ServiceStartError(
            f"{what} was not ready within {timeout_s:.0f} s; pass a larger timeout_s, or look for the cause in Ray's "
            "logs"
        ) from error
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, ServiceStartError):
            raise cause from error
        raise ServiceStartError(f"{what} did not start: {type(cause).__name__}: {cause}") from error
