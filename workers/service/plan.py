"""The specification of a service, and the descriptions of its nodes and units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dataplane.config import DataPlaneConfig
from workers.service.nodes import Nodes, Storage

STOP_TIMEOUT_S = 30.0
"""Timeout for an actor of a service to stop. It is long enough for busy machines, because an actor that is killed does
not free its memory."""

State = Literal["starting", "serving", "draining"]


class ServiceStartError(RuntimeError):
    """An actor of the service did not start; the message names it. All actors of the service were ended."""


@dataclass(frozen=True, kw_only=True)
class ServiceUnit:
    """A storage unit of a service. name: also in `client.stats()`. node: Ray's id of its node. host: address of that
    node. state: "starting", "serving" or "draining"."""

    name: str
    node: str
    host: str
    state: State


@dataclass(frozen=True, kw_only=True)
class ServiceNode:
    """A node of a service. units: names of its units. state: "serving"; "draining" while its rows move to other nodes;
    "drained", without units until `add_node`."""

    ident: str
    host: str
    state: Literal["serving", "draining", "drained"]
    units: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ServicePlan:
    """The specification of a service. name, namespace: of its controller. driver: the id of the node with the
    controller. config: includes address and token. detached: the service outlives its driver. drain_s: timeout of a
    drain without a deadline."""

    name: str
    namespace: str
    config: DataPlaneConfig
    storage: Storage
    nodes: Nodes | None
    driver: str
    detached: bool = False
    drain_s: float = 300.0


def supervisor_name(service: str) -> str:
    return f"{service}.supervisor"


def unit_actor_name(service: str, unit: str) -> str:
    return f"{service}.{unit}"


def units_namespace(service_namespace: str) -> str:
    """Return the namespace of the actors of storage units. It differs from the service's namespace, because Ray warns
    about detached actors in an anonymous namespace."""
    return f"{service_namespace}.units"
