"""The selection of nodes for storage units, and the number and names of the units. No Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Storage = Literal["per_node", "driver_node"] | int
"""Where a service has storage units: on every selected node, on the driver's node only, or a total number."""


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node of the Ray cluster. ident: id in hex. host: address. name: host name. labels, resources: those that the
    node was started with."""

    ident: str
    host: str
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"node {self.ident} ({self.host}), labels {dict(self.labels)}, resources {dict(self.resources)}"


Nodes = Collection[str] | Mapping[str, str | float] | Callable[[RayNode], bool]
"""The nodes to use: ids; or labels with values and resources with minimum amounts; or a function."""


def node_of(entry: Mapping[str, Any]) -> RayNode:
    """Convert an entry of `ray.nodes()`."""
    return RayNode(
        ident=entry["NodeID"],
        host=entry["NodeManagerAddress"],
        name=entry.get("NodeManagerHostname", ""),
        labels=dict(entry.get("Labels") or {}),
        resources=dict(entry.get("Resources") or {}),
    )


def node_selector(nodes: Nodes | None) -> Callable[[RayNode], bool]:
    """Return a function that tells whether a node is one of `nodes` (None: every node is). TypeError for an invalid
    `nodes`."""
    if nodes is None:
        return lambda node: True
    if callable(nodes):
        return nodes
    if isinstance(nodes, Mapping):
        required = dict(nodes)
        for name, value in required.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, str | int | float):
                raise TypeError(
                    f"nodes={{{name!r}: {value!r}}}: expected a label and its value, a str, or a resource and its "
                    "minimum amount, a number"
                )
        return lambda node: all(_has_resource(node, name, value) for name, value in required.items())
    if isinstance(nodes, str | bytes) or not all(isinstance(ident, str) for ident in nodes):
        raise TypeError(
            f"nodes={nodes!r}: expected a list of node ids (str), a mapping of labels and resources, or a function"
        )
    idents = frozenset(nodes)
    return lambda node: node.ident in idents


def _has_resource(node: RayNode, name: str, value: str | float) -> bool:
    """Return whether the node has label `name` with a value that is a str, or at least that amount of a resource."""
    if isinstance(value, str):
        return node.labels.get(name) == value
    return node.resources.get(name, 0.0) >= value


def check_storage(storage: Storage, units: int) -> None:
    """Raise TypeError or ValueError for an invalid `storage`, or one that conflicts with `units` (per node)."""
    if storage in ("per_node", "driver_node"):
        return
    if isinstance(storage, bool) or not isinstance(storage, int):
        raise TypeError(f'storage={storage!r}: expected "per_node", "driver_node" or a number of storage units')
    if storage < 1:
        raise ValueError(f"storage={storage}: a service needs at least one storage unit")
    if units != 1:
        raise ValueError(
            f"storage={storage} is the total number of units, units={units} the number per node: set one of them"
        )


def capacity_of_each(
    storage: Storage, capacity_per_node: int | None, capacity_bytes: int | None, units: int
) -> int | None:
    """Return the capacity of each unit if the units of a node share `capacity_per_node`; without it, return
    `capacity_bytes`. ValueError if both are set, or if the number of units per node is not fixed."""
    if capacity_per_node is None:
        return capacity_bytes
    if capacity_bytes is not None:
        raise ValueError(
            f"capacity_per_node={capacity_per_node} is for all units of a node, "
            f"capacity_bytes={capacity_bytes} for each unit: set one of them"
        )
    if storage not in ("per_node", "driver_node"):
        raise ValueError(f"storage={storage} is a number of units: set capacity_bytes, the capacity of each unit")
    return capacity_per_node // units


def units_to_start(
    storage: Storage,
    nodes: Sequence[str],
    running: Mapping[str, int],
    *,
    units_per_node: int,
    driver: str,
    added: Collection[str] = (),
) -> dict[str, int]:
    """Return the number of units to start on each node that lacks some, by the node's id.

    nodes: ids of the usable nodes, in order of preference. running: their numbers of units. units_per_node: for
    the nodes that get units. added: nodes that get units for any `storage`. A total number of units is distributed to
    the nodes with the fewest units; running units are never moved for balance.
    """
    to_start: dict[str, int] = {}
    for ident in nodes:
        gets_units = storage == "per_node" or (storage == "driver_node" and ident == driver) or ident in added
        if gets_units and units_per_node > running.get(ident, 0):
            to_start[ident] = units_per_node - running.get(ident, 0)
    if isinstance(storage, int) and nodes:
        counts = {ident: running.get(ident, 0) + to_start.get(ident, 0) for ident in nodes}
        for _ in range(storage - sum(counts.values())):  # no turn if enough units run
            fewest = min(nodes, key=counts.__getitem__)
            counts[fewest] += 1
            to_start[fewest] = to_start.get(fewest, 0) + 1
    return to_start


def next_unit(host: str, taken: Iterable[str]) -> tuple[str, int]:
    """Return the name of the next unit on a host, and its number there: the first free name of "unit-HOST-0",
    "unit-HOST-1", ...

    So a node that rejoins with another id has units of the same names, which find their state.
    """
    names = set(taken)
    number = 0
    while f"unit-{host}-{number}" in names:
        number += 1
    return f"unit-{host}-{number}", number
