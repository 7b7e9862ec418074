"""Which worker goes on which bundle, and what it is told of its place. Arithmetic only; no Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "AVAILABLE_ADDR_LIST",
    "AVAILABLE_PORT_LIST",
)
"""What `rank_environment` sets. Nobody else's settings override these."""
TiedBundles = tuple[int, list[int]]
"""(node, bundles on it) of one tied group: workers that process the same data."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """A worker's place in its group.

    rank: over the group; node: index of the bundle group it is in; bundle: index of its bundle within that node;
    local_rank: over the group's workers of that node, in rank order; tied_group: which tied group; tied_rank: place
    within it; bundle_indices: what the worker class is told of its bundles, None for a tied group's followers.
    """

    rank: int
    node: int
    bundle: int
    local_rank: int
    tied_group: int
    tied_rank: int
    bundle_indices: TiedBundles | None


def bundles_to_use(bundle_counts: Sequence[int], workers_per_node: int | Sequence[int] | None) -> list[TiedBundles]:
    """One tied group of one worker per bundle used: all of them, or the first `workers_per_node` of each node.

    bundle_counts: bundles of each node. ValueError for a count per node that is negative or above the node's bundles,
    or a list that is not one count per node.
    """
    if workers_per_node is None:
        wanted = list(bundle_counts)
    elif isinstance(workers_per_node, int):
        wanted = [workers_per_node] * len(bundle_counts)
    else:
        wanted = list(workers_per_node)
    if len(wanted) != len(bundle_counts):
        raise ValueError(f"workers_per_node has {len(wanted)} counts, the cluster has {len(bundle_counts)} nodes")
    for node, (count, bundles) in enumerate(zip(wanted, bundle_counts, strict=True)):
        if not 0 <= count <= bundles:
            raise ValueError(f"workers_per_node asks for {count} workers on node {node}, which has {bundles} bundles")
    return [(node, [bundle]) for node, count in enumerate(wanted) for bundle in range(count)]


def place_workers(bundle_counts: Sequence[int], groups: Sequence[TiedBundles]) -> list[WorkerPlace]:
    """A place for every bundle that `groups` name, ranks in their order.

    ValueError for no bundle at all, a node or bundle that the cluster does not have, and an empty tied group.
    """
    places: list[WorkerPlace] = []
    on_node = [0] * len(bundle_counts)
    for tied_group, (node, bundles) in enumerate(groups):
        if not 0 <= node < len(bundle_counts):
            raise ValueError(f"bundle_indices_list names node {node}; the cluster has {len(bundle_counts)} nodes")
        if not bundles:
            raise ValueError(f"tied group {tied_group} in bundle_indices_list has no bundles")
        for tied_rank, bundle in enumerate(bundles):
            if not 0 <= bundle < bundle_counts[node]:
                raise ValueError(f"bundle {bundle} of node {node} was named; it has {bundle_counts[node]} bundles")
            places.append(
                WorkerPlace(
                    rank=len(places),
                    node=node,
                    bundle=bundle,
                    local_rank=on_node[node],
                    tied_group=tied_group,
                    tied_rank=tied_rank,
                    bundle_indices=(node, list(bundles)) if tied_rank == 0 else None,
                )
            )
            on_node[node] += 1
    if not places:
        raise ValueError("a worker group has at least one worker; none was asked for")
    return places


def rank_environment(
    place: WorkerPlace, endpoints: Sequence[tuple[str, int]], master: tuple[str, int]
) -> dict[str, str]:
    """What torch.distributed and worker classes read. endpoints: a free (address, port) per rank."""
    values = (
        place.rank,
        place.local_rank,
        len(endpoints),
        place.node,
        *master,
        json.dumps([address for address, _ in endpoints]),
        json.dumps([port for _, port in endpoints]),
    )
    return {name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=True)}
