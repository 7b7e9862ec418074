"""A service of Ray actors, as who launched or found it holds it."""

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
from dataplane.core.durations import seconds
from dataplane.errors import ServiceUnavailableError
from workers.service.plan import STOP_TIMEOUT_S, ServiceNode, ServiceUnit, supervisor_name
from workers.service.queries import living_actor, unit_actors
from workers.service.resolver import ANSWER_TIMEOUT_S, actor_address

if TYPE_CHECKING:
    from dataplane import DataPlaneClient

ANSWER_S = 180.0
"""How long the supervisor may take beside what a call waits for: its first drain imports torch, on a busy machine."""


class ServiceConfig(DataPlaneConfig):
    """A `DataPlaneConfig` whose address is an actor's. A process that unpickles it imports `workers`, and so can find
    the actor, without its code having to import it."""


class LaunchedService:
    """A running service of Ray actors. Shut it down, or use it as a context manager; it ends with its driver, too,
    unless it was launched with `detached=True`.

    address: "actor:NAME@NAMESPACE", for any process of the Ray cluster that has imported `workers`. token: its secret.
    config: address and token in what `build_data_plane_client(config, bootstrap=False)`, `setup_data_plane` and
    `TQPolicy(dp_cfg=...)` take.
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
        """The service that some driver of this Ray cluster launched under that name, in that namespace (None: this
        driver's). `ServiceUnavailableError` where there is none, or its controller or supervisor is gone, or does not
        answer."""
        namespace = namespace or ray.get_runtime_context().namespace
        address = actor_address(name, namespace)
        try:
            supervisor = ray.get_actor(supervisor_name(name), namespace=namespace)
        except ValueError as error:
            why = "no service was launched under that name"
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
            why = f"its controller is gone, so it is over; launch_service(name={name!r}) starts another in its place"
            raise ServiceUnavailableError(address=address, why=why) from error
        except RayError as error:
            why = f"its controller does not answer ({error})"
            raise ServiceUnavailableError(address=address, why=why) from error
        return cls(config, name, namespace, supervisor, controller)

    def connect(self, **settings: Any) -> DataPlaneClient:
        """A client of this service, connected; settings: those of `DataPlaneConfig`. Raises as `dataplane.connect`."""
        return dataplane.build_data_plane_client(replace(self.config, **settings), bootstrap=False)

    @property
    def http_url(self) -> str:
        """Where the controller answers browsers and Prometheus; "" without `http_port` in its config."""
        return str(ray.get(self._controller.http_url.remote()))

    def units(self) -> list[ServiceUnit]:
        """The storage units there are, by name."""
        found: list[ServiceUnit] = self._ask("units")
        return found

    def nodes(self) -> list[ServiceNode]:
        """The nodes that have storage units, or had and were drained, by address."""
        found: list[ServiceNode] = self._ask("nodes")
        return found

    def add_node(self, node: str, *, timeout_s: float = 60.0) -> list[str]:
        """Give the node with this id its storage units, whatever `storage` and `nodes` say; the units' names, once they
        serve. ValueError for a node that is not there, `ServiceStartError` where a unit does not start in time."""
        timeout_s = seconds("timeout_s", timeout_s)
        names: list[str] = self._ask("add_node", node, timeout_s, within_s=timeout_s)
        return names

    def drain_node(self, node: str, *, timeout_s: float = 300.0) -> None:
        """Move every row from the storage units of this node to others, then end them; the node gets none again until
        `add_node`. Clients notice nothing but that their bytes are elsewhere.

        Blocks up to about `timeout_s`. Where rows cannot be moved in time, because others have no space or somebody
        holds on to them, all is as before and the error says why. ValueError for a node without storage units.
        """
        timeout_s = seconds("timeout_s", timeout_s)
        self._ask("drain_node", node, timeout_s, within_s=timeout_s)

    def drop_unit(self, unit: str) -> None:
        """Give up a storage unit whose node is gone for good: its rows are lost. Only a service with a state directory
        waits for such units by itself. ValueError for a unit that lives."""
        self._ask("drop_unit", unit)

    def shutdown(self) -> None:
        """End the units, which gives their memory back, then the controller. Idempotent; takes seconds at most."""
        if self._over or not ray.is_initialized():
            return
        self._over = True
        if living_actor(self.name, self.namespace) not in (None, self._controller):
            return  # this one was over before, and another has its name
        end_service(self.name, self.namespace, self._supervisor, self._controller)

    def _ask(self, method: str, *arguments: Any, within_s: float = 0.0) -> Any:
        """What the supervisor answers. Raises what it raises."""
        try:
            return ray.get(getattr(self._supervisor, method).remote(*arguments), timeout=within_s + ANSWER_S)
        except RayTaskError as error:
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
    """Stop supervisor, units and controller, those that there are, giving each a moment, then kill them, whatever they
    did."""
    if supervisor is not None:
        with suppress(RayError):
            ray.get(supervisor.stop.remote(), timeout=2 * STOP_TIMEOUT_S)
        with suppress(Exception):
            ray.kill(supervisor)
    for unit in unit_actors(name, namespace):
        with suppress(Exception):
            ray.kill(unit)
    if controller is None:
        return
    with suppress(RayError):
        ray.get(controller.stop.remote(), timeout=STOP_TIMEOUT_S)
    with suppress(Exception):
        ray.kill(controller)
