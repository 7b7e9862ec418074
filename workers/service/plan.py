"""What a service is to be, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dataplane.config import DataPlaneConfig
from workers.service.nodes import Nodes, Storage

STOP_TIMEOUT_S = 30.0
"""How long a part of a service may take to stop. One that is killed leaves its memory behind, so that a busy machine's
has the time."""

State = Literal["starting", "serving", "draining"]


class ServiceStartError(RuntimeError):
    """A part of the service did not start; the message names it. Nothing of the service is left running."""


@dataclass(frozen=True, kw_only=True)
class ServiceUnit:
    """A storage unit as its service sees it. name: also in `client.stats()`; node: Ray's id of its node; host: that
    node's address; state: "starting", "serving" or "draining"."""

    name: str
    node: str
    host: str
    state: State


@dataclass(frozen=True, kw_only=True)
class ServiceNode:
    """A node of a service. units: names. state: "serving"; "draining" while its rows move to others; "drained", without
    units until `add_node`."""

    ident: str
    host: str
    state: Literal["serving", "draining", "drained"]
    units: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ServicePlan:
    """What a service is to be. name, namespace: of its controller. driver: the id of the node with the controller.
    config: with address and token. detached: it outlives its driver. drain_s: how long draining may take where nobody
    says."""

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
    """Where the actors of storage units have their names: beside the service's own namespace, because Ray warns of
    detached actors in one that has no name."""
    return f"{service_namespace}.units"
