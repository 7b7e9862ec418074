"""Which nodes of a Ray cluster get storage units, how many, and what these are called. No Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Storage = Literal["per_node", "driver_node"] | int
"""Where a service has storage units: on every node it takes, on the driver's alone, or so many in all."""


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node as Ray tells of it. ident: its id, in hex; host: its address; name: its host's name; labels, resources: as
    it was started with."""

    ident: str
    host: str
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"node {self.ident} ({self.host}), labels {dict(self.labels)}, resources {dict(self.resources)}"


Nodes = Collection[str] | Mapping[str, str | float] | Callable[[RayNode], bool]
"""Which nodes to take: ids; or labels with their values and resources with the least there must be; or a function."""


def node_of(entry: Mapping[str, Any]) -> RayNode:
    """One of `ray.nodes()`."""
    return RayNode(
        ident=entry["NodeID"],
        host=entry["NodeManagerAddress"],
        name=entry.get("NodeManagerHostname", ""),
        labels=dict(entry.get("Labels") or {}),
        resources=dict(entry.get("Resources") or {}),
    )


def taker(nodes: Nodes | None) -> Callable[[RayNode], bool]:
    """Whether a node is taken. TypeError for what says nothing about nodes."""
    if nodes is None:
        return lambda node: True
    if callable(nodes):
        return nodes
    if isinstance(nodes, Mapping):
        wanted = dict(nodes)
        for name, value in wanted.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, str | int | float):
                raise TypeError(
                    f"nodes={{{name!r}: {value!r}}}: expected a label and its value, a str, or a resource and the "
                    "least of it, a number"
                )
        return lambda node: all(_has(node, name, value) for name, value in wanted.items())
    if isinstance(nodes, str | bytes) or not all(isinstance(ident, str) for ident in nodes):
        raise TypeError(f"nodes={nodes!r}: expected ids of nodes, a mapping of labels and resources, or a function")
    idents = frozenset(nodes)
    return lambda node: node.ident in idents


def _has(node: RayNode, name: str, value: str | float) -> bool:
    if isinstance(value, str):
        return node.labels.get(name) == value
    return node.resources.get(name, 0.0) >= value


def check_storage(storage: Storage, units: int) -> None:
    """TypeError or ValueError for what says not where `units` (of each node) are to be."""
    if storage in ("per_node", "driver_node"):
        return
    if isinstance(storage, bool) or not isinstance(storage, int):
        raise TypeError(f'storage={storage!r}: expected "per_node", "driver_node" or a number of storage units')
    if storage < 1:
        raise ValueError(f"storage={storage}: a service has at least one storage unit")
    if units != 1:
        raise ValueError(
            f"storage={storage} is how many units there are, units={units} how many each node has: say one"
        )


def capacity_of_each(
    storage: Storage, capacity_per_node: int | None, capacity_bytes: int | None, units: int
) -> int | None:
    """The capacity of each unit where nodes have `capacity_per_node` together; as it was without. ValueError where the
    two contradict each other, or nodes do not have the same number of units."""
    if capacity_per_node is None:
        return capacity_bytes
    if capacity_bytes is not None:
        raise ValueError(
            f"capacity_per_node={capacity_per_node} is for the units of a node together, "
            f"capacity_bytes={capacity_bytes} for each: say one"
        )
    if storage not in ("per_node", "driver_node"):
        raise ValueError(f"storage={storage} counts units, not nodes: say capacity_bytes, which each unit has")
    return capacity_per_node // units


def missing(
    storage: Storage,
    nodes: Sequence[str],
    running: Mapping[str, int],
    *,
    each: int,
    driver: str,
    asked: Collection[str] = (),
) -> dict[str, int]:
    """How many units to start on which nodes.

    nodes: ids of those that may have some, in order of preference; running: how many they have. each: units of a node.
    asked: nodes that get theirs whatever `storage` says. A number of units in all is dealt to the nodes with the
    fewest; none is ever moved to even them out.
    """
    lacking: dict[str, int] = {}
    for ident in nodes:
        here = storage == "per_node" or (storage == "driver_node" and ident == driver) or ident in asked
        if here and each > running.get(ident, 0):
            lacking[ident] = each - running.get(ident, 0)
    if isinstance(storage, int) and nodes:
        counts = {ident: running.get(ident, 0) + lacking.get(ident, 0) for ident in nodes}
        for _ in range(storage - sum(counts.values())):
            fewest = min(nodes, key=counts.__getitem__)
            counts[fewest] += 1
            lacking[fewest] = lacking.get(fewest, 0) + 1
    return lacking


def next_unit(host: str, taken: Iterable[str]) -> tuple[str, int]:
    """The name of the next unit on a host, and its number there: the first of "unit-HOST-0", "unit-HOST-1", ... that is
    not taken.

    So a node that comes back, with another id, has units of the same names, which find their state.
    """
    names = set(taken)
    number = 0
    while f"unit-{host}-{number}" in names:
        number += 1
    return f"unit-{host}-{number}", number
