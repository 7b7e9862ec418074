"""The service as Ray actors: a named controller, and a storage unit on every node."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.config import DataPlaneConfig
from dataplane.control.controller import Controller
from dataplane.unit import StorageUnit
from workers.resolver import actor_address

log = logging.getLogger(__name__)

DEFAULT_NAME = "tq-controller"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


class ServiceStartError(RuntimeError):
    """A part of the service did not start; the message names it. Nothing of the service is left running."""


class ServiceConfig(DataPlaneConfig):
    """A `DataPlaneConfig` whose address is an actor's. A process that unpickles it imports `workers`, and so can find
    the actor, without its code having to import it."""


class _EndsWithItsPart:
    """An actor's process ends when what it runs did so by itself: Ray starts it again, or its users learn of it."""

    def __init__(self) -> None:
        self._stopping = False

    def _end_with(self, ended: threading.Event, what: str) -> None:
        def wait() -> None:
            ended.wait()
            if not self._stopping:
                log.error("%s cannot go on: its actor ends", what)
                os._exit(1)

        threading.Thread(target=wait, name="tq-end", daemon=True).start()


class ControllerActor(_EndsWithItsPart):
    """The controller in a process of its own. One that Ray started again goes on by itself."""

    def __init__(self, config: DataPlaneConfig) -> None:
        super().__init__()
        self._config = config
        self._controller: Controller | None = None
        if _started_again():
            self.start()

    def start(self) -> str:
        """Listen on this node's address; returns "host:port"."""
        self._controller = Controller(replace(self._config, host=ray.util.get_node_ip_address())).start()
        self._end_with(self._controller.ended, "the controller")
        return self._controller.address

    def address(self) -> str:
        assert self._controller is not None, "start comes first"
        return self._controller.address

    def http_url(self) -> str:
        assert self._controller is not None, "start comes first"
        return self._controller.http_url

    def stop(self) -> None:
        self._stopping = True
        if self._controller is not None:
            self._controller.stop()

    def __ray_shutdown__(self) -> None:
        self.stop()


class StorageUnitActor(_EndsWithItsPart):
    """A storage unit in a process of its own, on the node whose memory it serves. One that Ray started again goes on by
    itself."""

    def __init__(self, config: DataPlaneConfig, controller_address: str, name: str) -> None:
        super().__init__()
        self._config = config
        self._where = controller_address
        self._name = name
        self._unit: StorageUnit | None = None
        if _started_again():
            self.start()

    def start(self) -> None:
        """Make the arena, listen on this node's address, register with the controller."""
        here = replace(self._config, host=ray.util.get_node_ip_address(), port=0)
        self._unit = StorageUnit(here, self._where, name=self._name).start()
        self._end_with(self._unit.lost, f"storage unit {self._name}")

    def stop(self) -> None:
        self._stopping = True
        if self._unit is not None:
            self._unit.stop()

    def __ray_shutdown__(self) -> None:
        self.stop()


class LaunchedService:
    """A running service of Ray actors. Shut it down, or use it as a context manager; it ends with the driver, too.

    address: "actor:NAME@NAMESPACE", for any process of the Ray cluster that has imported `workers`. token: its secret.
    config: address and token in what `build_data_plane_client(config, bootstrap=False)`, `setup_data_plane` and
    `TQPolicy(dp_cfg=...)` take.
    """

    def __init__(self, config: DataPlaneConfig, controller: ActorHandle, units: list[ActorHandle]) -> None:
        assert config.address is not None
        assert config.token is not None
        self.config = config
        self.address = config.address
        self.token = config.token
        self._controller = controller
        self._units = units

    @property
    def http_url(self) -> str:
        """Where the controller answers browsers and Prometheus; "" without `http_port` in its config."""
        return str(ray.get(self._controller.http_url.remote()))

    def shutdown(self) -> None:
        """End the units, which gives their memory back, then the controller. Idempotent; takes seconds at most."""
        units, self._units = self._units, []
        _end([*units, self._controller])

    def __enter__(self) -> LaunchedService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def launch_service(
    config: DataPlaneConfig | Mapping[str, Any] | None = None,
    *,
    name: str = DEFAULT_NAME,
    timeout_s: float = START_TIMEOUT_S,
) -> LaunchedService:
    """Start a service in the Ray cluster that this process is connected to: a controller, the actor `name` of this
    driver's namespace, and `config.units` storage units on every node, pinned there. All take no CPU slot.

    config: settings of TLS are passed on as they are: their files have to be on every node, and certificates be for the
    nodes' addresses or for `tls_server_name`. With `http_port` the controller answers there, and the units of each node
    at the ports that follow. `capacity_bytes` is per unit; `host` is not looked at, each actor listens
    on its node's address; a token is made unless one is set. With `state_dir`, a path that is local on every node,
    actors that die are started again on their nodes (the controller on the driver's), and go on with what they held.
    Blocks until every part is ready, up to `timeout_s`. `ServiceStartError` naming what did not start in time, or why
    it could not; ValueError if a controller of that name runs already, or an address is set.
    """
    settings = DataPlaneConfig.of(config)
    if settings.address is not None:
        raise ValueError(f"config.address is {settings.address!r}: attach there, or leave it out to start a service")
    namespace = ray.get_runtime_context().namespace
    token = settings.secret() or secrets.token_urlsafe(32)
    told = replace(settings, token=token, token_file=None)
    end = time.monotonic() + timeout_s
    controller = _controller(name, namespace, told)
    where_to_look = actor_address(name, namespace)
    actors: list[ActorHandle] = []
    try:
        where = "the controller"
        _started({where: controller.start.remote()}, end, timeout_s)
        starting = {}
        for node in _nodes():
            for number in range(settings.units):
                label = f"unit-{node['NodeID'][:8]}-{number}"
                unit = _unit_on(node, told.of_unit(number), where_to_look, label)
                actors.append(unit)
                starting[f"storage unit {label} on node {node['NodeManagerAddress']}"] = unit.start.remote()
        _started(starting, end, timeout_s)
    except BaseException:
        _end([*actors, controller])
        raise
    reached = ServiceConfig(**{**vars(told), "address": where_to_look})
    return LaunchedService(reached, controller, actors)


def _started_again() -> bool:
    """Whether Ray made this actor anew after its process had ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, on the way there
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _lasting(config: DataPlaneConfig, node: str) -> dict[str, Any]:
    """Options of an actor that takes no CPU slot; if it has a state to go on with, Ray starts it again, and there."""
    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return {"num_cpus": 0, "max_restarts": 0 if config.state_dir is None else -1, "scheduling_strategy": there}


def _controller(name: str, namespace: str, config: DataPlaneConfig) -> ActorHandle:
    options = _lasting(config, ray.get_runtime_context().get_node_id())
    try:
        return ray.remote(ControllerActor).options(name=name, namespace=namespace, **options).remote(config)
    except ValueError as error:
        raise ValueError(
            f"an actor {name!r} is in namespace {namespace!r} already: attach to {actor_address(name, namespace)}, or "
            "shut it down first, or launch under another name"
        ) from error


def _unit_on(node: Mapping[str, Any], config: DataPlaneConfig, controller_address: str, name: str) -> ActorHandle:
    options = _lasting(config, node["NodeID"])
    return ray.remote(StorageUnitActor).options(**options).remote(config, controller_address, name)


def _started(starting: Mapping[str, Any], end: float, timeout_s: float) -> dict[str, Any]:
    """What each named start returned; `ServiceStartError` for the first that raised, or those late at `end`."""
    waiting = {future: name for name, future in starting.items()}
    results: dict[str, Any] = {}
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=max(end - time.monotonic(), 0.0))
        if not done:
            late = ", ".join(sorted(waiting.values()))
            raise ServiceStartError(f"not ready within {timeout_s:.0f} s: {late}")
        name = waiting.pop(done[0])
        try:
            results[name] = ray.get(done[0])
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            raise ServiceStartError(f"{name} did not start: {type(cause).__name__}: {cause}") from error
    return results


def _end(actors: list[ActorHandle]) -> None:
    """Stop each in turn, giving it a moment, then kill it, whatever it did. Nothing to do once Ray is gone."""
    if not ray.is_initialized():
        return
    for actor in actors:
        with suppress(RayError):
            ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
        ray.kill(actor)
