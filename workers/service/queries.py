"""What the supervisor, and whoever ends a service, asks of Ray and of the controller."""

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
    return [node_of(entry) for entry in ray.nodes() if entry["Alive"]]


def leaving_nodes() -> dict[str, float | None]:
    """The nodes that Ray has been told will leave (a spot instance's notice, an autoscaler, `ray drain-node`), and when
    (None: not said), in seconds since 1970. Ray has no public way to ask: none where it does not answer this one."""
    try:
        found = ray._private.state.state.get_draining_nodes()
    except AttributeError:
        return {}
    return {ident: deadline_ms / 1000 if deadline_ms else None for ident, deadline_ms in found.items()}


def forget_units(config: DataPlaneConfig, outdated: Mapping[str, int], who: str) -> None:
    """Have the controller forget every unit of such a name with a number below, and the rows that were there. Blocks;
    raises as a client does."""
    channel = ControllerChannel.open(replace(config, client_name=who))
    try:
        _, report = channel.call(c.Stats())
        assert isinstance(report, c.StatsReport)
        for unit in report.units:
            if unit.unit >= outdated.get(unit.name, 0):
                continue
            with suppress(InvalidRequestError):  # somebody else was faster
                channel.call(c.Forget(unit=unit.unit, force=True))
                log.warning(
                    "storage unit %d (%s) is dropped, and %d bytes of rows", unit.unit, unit.name, unit.live_bytes
                )
    finally:
        channel.close()


def living_actor(name: str, namespace: str) -> ActorHandle | None:
    """The actor of that name, if Ray has one that did not end for good."""
    try:
        actor: ActorHandle = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return actor


def unit_actors(service: str, namespace: str) -> list[ActorHandle]:
    """Those of the storage units of a service, which is in `namespace`, that Ray knows and did not give up."""
    there, prefix = units_namespace(namespace), unit_actor_name(service, "unit-")
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == there and actor["name"].startswith(prefix):
            with suppress(ValueError):  # it has ended meanwhile
                found.append(ray.get_actor(actor["name"], namespace=there))
    return found
