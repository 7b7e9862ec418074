"""The handle of a service of Ray actors, for the process that launched or found it, and addresses
"actor:NAME[@NAMESPACE]", which name the actor of its controller."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError, RayTaskError

import dataplane
from dataplane.config import DataPlaneConfig
from dataplane.core.durations import as_timeout
from dataplane.errors import ServiceUnavailableError
from workers.service.supervisor import (
    STOP_TIMEOUT_S,
    ServiceNode,
    ServiceUnit,
    living_actor,
    supervisor_name,
    unit_actors,
)

if TYPE_CHECKING:
    from dataplane import DataPlaneClient

SCHEME = "actor"
ANSWER_TIMEOUT_S = 30.0
"""On a busy machine, the controller can be paused for longer than ten seconds."""
ANSWER_S = 180.0
"""Timeout of the supervisor in addition to a call's own wait: its first drain imports torch, on a busy machine."""


class ServiceConfig(DataPlaneConfig):
    """A `DataPlaneConfig` with the address of an actor. Unpickling it imports `workers`, which registers the resolver
    of actor addresses, so that the process can find the actor."""


class LaunchedService:
    """A running service of Ray actors. Call `shutdown`, or use it as a context manager. Unless it was launched with
    `detached=True`, it also ends with its driver.

    address: "actor:NAME@NAMESPACE", for any process of the Ray cluster that has imported `workers`. token: its secret.
    config: address and token, as an argument of `build_data_plane_client(config, bootstrap=False)`, `setup_data_plane`
    and `TQPolicy(dp_cfg=...)`. `_over`: whether this object has ended the service.
    """

    def __init__(
        self, config: DataPlaneConfig, name: str, namespace: str, supervisor: ActorHandle, controller: ActorHandle
    ) -> None:
        """Use `launch_service` or `find`."""
        assert config.address is not None
        assert config.token is not None
        self.config = config
        self.address = config.address
        self.token = config.token
        self.name = name
        self.namespace = namespace
        self._supervisor = supervisor
        self._controller = controller
        self._over = False

    @classmethod
    def find(cls, name: str = "tq-controller", namespace: str | None = None) -> LaunchedService:
        """Return the service that any driver of this Ray cluster launched with that name, in that namespace (None: this
        driver's). `ServiceUnavailableError` without such a service, or if its controller or supervisor has ended,
        the controller does not respond within `ANSWER_TIMEOUT_S`, or the supervisor within `ANSWER_S`."""
        namespace = namespace or ray.get_runtime_context().namespace
        address = actor_address(name, namespace)
        try:
            supervisor = ray.get_actor(supervisor_name(name), namespace=namespace)
        except ValueError as error:
            why = "no service of that name runs in that namespace; check both, or start one with launch_service"
            raise ServiceUnavailableError(address=address, why=why) from error
        try:
            config = ray.get(supervisor.config.remote(), timeout=ANSWER_S)
        except RayError as error:
            why = f"its supervisor does not answer ({error})"
            raise ServiceUnavailableError(address=address, why=why) from error
        try:
            controller = ray.get_actor(name, namespace=namespace)
            ray.get(controller.address.remote(), timeout=ANSWER_TIMEOUT_S)
        except (ValueError, ActorDiedError) as error:
            why = f"its controller has ended; start another service with launch_service(name={name!r})"
            raise ServiceUnavailableError(address=address, why=why) from error
        except RayError as error:
            why = f"its controller does not answer ({error})"
            raise ServiceUnavailableError(address=address, why=why) from error
        return cls(config, name, namespace, supervisor, controller)

    def connect(self, **settings: Any) -> DataPlaneClient:
        """Return a connected client of this service. settings: those of `DataPlaneConfig`. Raises the errors of
        `dataplane.connect`."""
        return dataplane.build_data_plane_client(replace(self.config, **settings), bootstrap=False)

    @property
    def http_url(self) -> str:
        """The controller's URL for browsers and Prometheus; "" without `http_port` in its config."""
        return str(ray.get(self._controller.http_url.remote()))

    def units(self) -> list[ServiceUnit]:
        """Return the storage units, sorted by name."""
        found: list[ServiceUnit] = self._ask("units")
        return found

    def nodes(self) -> list[ServiceNode]:
        """Return the nodes with storage units and the drained nodes, sorted by address."""
        found: list[ServiceNode] = self._ask("nodes")
        return found

    def add_node(self, node: str, *, timeout_s: float | None = 60.0) -> list[str]:
        """Start the storage units of the node with this id, even if `storage` excludes it. Return the names
        of the units once they serve. ValueError for an unknown node, `ServiceStartError` if a unit does not start in
        time."""
        timeout_s = as_timeout("timeout_s", timeout_s)
        names: list[str] = self._ask("add_node", node, timeout_s, within_s=timeout_s)
        return names

    def drain_node(self, node: str, *, timeout_s: float | None = 300.0) -> None:
        """Move every row from the storage units of this node to other units, then end these units. The node gets no
        units until `add_node`. Clients keep running; only the location of the bytes changes.

        Blocks up to about `timeout_s`. If rows cannot be moved in time, because other units have no space or a client
        still uses the rows, the units stay in service and the error names the reason. ValueError for a node without
        storage units.
        """
        timeout_s = as_timeout("timeout_s", timeout_s)
        self._ask("drain_node", node, timeout_s, within_s=timeout_s)

    def drop_unit(self, unit: str) -> None:
        """Drop a storage unit whose node will not return: its rows are lost. Only a service with a state directory
        keeps waiting for such units. ValueError for a running unit."""
        self._ask("drop_unit", unit)

    def shutdown(self) -> None:
        """End the units, which frees their memory, then the controller. Idempotent; takes seconds at most."""
        if self._over or not ray.is_initialized():
            return
        self._over = True
        if living_actor(self.name, self.namespace) not in (None, self._controller):
            return  # this service has ended already, and a later one has its name
        end_service(self.name, self.namespace, self._supervisor, self._controller)

    def _ask(self, method: str, *arguments: Any, within_s: float = 0.0) -> Any:
        """Call a method of the supervisor and wait for it, up to `ANSWER_S` longer than `within_s`, the method's own
        timeout. Return its result or raise its error, or Ray's error after that time."""
        try:
            return ray.get(getattr(self._supervisor, method).remote(*arguments), timeout=within_s + ANSWER_S)
        except RayTaskError as error:
            # An error that the supervisor raised is raised as it is; errors of Ray stay wrapped.
            if isinstance(error.cause, Exception) and not isinstance(error.cause, RayError):
                raise error.cause from error
            raise

    def __enter__(self) -> LaunchedService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def end_service(name: str, namespace: str, supervisor: ActorHandle | None, controller: ActorHandle | None) -> None:
    """Stop the supervisor, which stops the units, and the controller, if they exist, with a timeout for each; then kill
    all of them in any case."""
    if supervisor is not None:
        with suppress(RayError):
            # It waits up to `STOP_TIMEOUT_S` for the units.
            ray.get(supervisor.stop.remote(), timeout=2 * STOP_TIMEOUT_S)
        with suppress(Exception):
            ray.kill(supervisor)
    for unit in unit_actors(name, namespace):  # units that the supervisor did not end
        with suppress(Exception):
            ray.kill(unit)
    if controller is None:
        return
    with suppress(RayError):
        ray.get(controller.stop.remote(), timeout=STOP_TIMEOUT_S)
    with suppress(Exception):
        ray.kill(controller)


def actor_address(name: str, namespace: str) -> str:
    """Return the address of the controller that runs as the Ray actor `name`."""
    return f"{SCHEME}:{name}@{namespace}"


def resolve_actor(name_and_namespace: str) -> str:
    """Request the "host:port" of the controller actor "NAME[@NAMESPACE]". Blocks up to `ANSWER_TIMEOUT_S`.

    `ServiceUnavailableError` if this process is not in a Ray cluster, or if the actor does not run or respond.
    """
    address = f"{SCHEME}:{name_and_namespace}"
    name, _, namespace = name_and_namespace.partition("@")
    if not ray.is_initialized():
        raise ServiceUnavailableError(address=address, why="this process is in no Ray cluster; call ray.init() first")
    try:
        controller = ray.get_actor(name, namespace=namespace or None)
        host_and_port: str = ray.get(controller.address.remote(), timeout=ANSWER_TIMEOUT_S)
    except ValueError as error:
        why = "no controller actor of that name is running; start it with workers.launch_service"
        raise ServiceUnavailableError(address=address, why=why) from error
    except RayError as error:
        raise ServiceUnavailableError(address=address, why=f"its controller actor does not answer ({error})") from error
    return host_and_port
