"""Requests to Ray and to the controller, for the supervisor and for ending a service."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import ray
from ray.actor import ActorHandle

from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import DataPlaneConfig
from dataplane.errors import InvalidRequestError
from dataplane.ledger import commands as c
from workers.service.nodes import RayNode, node_of
from workers.service.plan import unit_actor_name, units_namespace

log = logging.getLogger(__name__)


def living_nodes() -> list[RayNode]:
    """Return the nodes of the Ray cluster that are alive."""
    return [node_of(entry) for entry in ray.nodes() if entry["Alive"]]


def leaving_nodes() -> dict[str, float | None]:
    """Return the ids of the nodes that will leave the cluster according to Ray (a spot instance's notice, an
    autoscaler, `ray drain-node`), each with the time by which it leaves, in seconds since 1970 (None: unknown). Empty
    if this private Ray function is missing."""
    try:
        deadlines = ray._private.state.state.get_draining_nodes()
    except AttributeError:
        return {}
    return {ident: deadline_ms / 1000 if deadline_ms else None for ident, deadline_ms in deadlines.items()}


def forget_units(config: DataPlaneConfig, outdated: Mapping[str, int], client_name: str) -> None:
    """Make the controller drop every unit, with its rows, whose number is below that of its name in `outdated`.
    Blocks; raises the errors of a client. client_name: of this request's client."""
    channel = ControllerChannel.open(replace(config, client_name=client_name))
    try:
        _, report = channel.call(c.Stats())
        assert isinstance(report, c.StatsReport)
        for unit in report.units:
            if unit.unit >= outdated.get(unit.name, 0):  # up to date, or its name is not in `outdated`
                continue
            with suppress(InvalidRequestError):  # another client dropped it first
                channel.call(c.Forget(unit=unit.unit, force=True))
                log.warning(
                    "Storage unit %d (%s) dropped, with %d bytes of rows", unit.unit, unit.name, unit.live_bytes
                )
    finally:
        channel.close()


def living_actor(name: str, namespace: str) -> ActorHandle | None:
    """Return the actor of that name if it is running or restarting, otherwise None."""
    try:
        actor: ActorHandle = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return actor


def unit_actors(service: str, namespace: str) -> list[ActorHandle]:
    """Return the running or restarting storage unit actors of the service in `namespace`."""
    actor_namespace, prefix = units_namespace(namespace), unit_actor_name(service, "unit-")
    actors = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == actor_namespace and entry["name"].startswith(prefix):
            with suppress(ValueError):  # the actor ended after the listing
                actors.append(ray.get_actor(entry["name"], namespace=actor_namespace))
    return actors
