"""Assignment of workers to bundles, and the environment variables of their places. Arithmetic only; no Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
"""The variables that `rank_environment` sets. No other setting overrides them."""
TiedBundles = tuple[int, list[int]]
"""(node, bundles on it) of one tied group: workers that process the same data."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """The place of a worker in its group.

    rank: in the group; node, bundle: the worker uses bundle `bundle` of the cluster's node `node`; node_rank: the
    worker's NODE_RANK (see `counted_by_host`); local_rank: index among the group's workers of that node, in rank
    order; tied_group: index of the tied group; tied_rank: index within it; bundle_indices: the bundles passed to the
    worker class, None except for the first worker of a tied group.
    """

    rank: int
    node: int
    bundle: int
    node_rank: int
    local_rank: int
    tied_group: int
    tied_rank: int
    bundle_indices: TiedBundles | None


def bundles_to_use(bundle_counts: Sequence[int], workers_per_node: int | Sequence[int] | None) -> list[TiedBundles]:
    """Return a tied group of one worker for each bundle, or for the first `workers_per_node` bundles of each node.

    bundle_counts: number of bundles of each node. ValueError for a count that is negative or above the node's
    bundles, and for a list without exactly one count per node.
    """
    if workers_per_node is None:
        wanted = list(bundle_counts)
    elif isinstance(workers_per_node, int):
        wanted = [workers_per_node] * len(bundle_counts)
    else:
        wanted = list(workers_per_node)
    if len(wanted) != len(bundle_counts):
        raise ValueError(f"workers_per_node has {len(wanted)} counts, but the cluster has {len(bundle_counts)} nodes")
    for node, (count, bundles) in enumerate(zip(wanted, bundle_counts, strict=True)):
        if not 0 <= count <= bundles:
            raise ValueError(f"workers_per_node requests {count} workers on node {node}, which has {bundles} bundles")
    return [(node, [bundle]) for node, count in enumerate(wanted) for bundle in range(count)]


def place_workers(
    bundle_counts: Sequence[int], groups: Sequence[TiedBundles], *, spanning: bool = False
) -> list[WorkerPlace]:
    """Return a place for every bundle of `groups`, with ranks in their order.

    spanning: bundle numbers of a group may continue from its node into the next ones: with 2 bundles on each node,
    (0, [1, 2]) is the second bundle of node 0 and the first of node 1. ValueError if there is no bundle, for an
    unknown node or bundle, and for an empty tied group.
    """
    places: list[WorkerPlace] = []
    on_node = [0] * len(bundle_counts)
    for tied_group, (first, bundles) in enumerate(groups):
        if not 0 <= first < len(bundle_counts):
            raise ValueError(f"bundle_indices_list names node {first}; the cluster has {len(bundle_counts)} nodes")
        if not bundles:
            raise ValueError(f"tied group {tied_group} in bundle_indices_list has no bundles")
        for tied_rank, named in enumerate(bundles):
            node, bundle = _resolve(bundle_counts, first, named, spanning)
            places.append(
                WorkerPlace(
                    rank=len(places),
                    node=node,
                    bundle=bundle,
                    node_rank=node,
                    local_rank=on_node[node],
                    tied_group=tied_group,
                    tied_rank=tied_rank,
                    bundle_indices=(first, list(bundles)) if tied_rank == 0 else None,
                )
            )
            on_node[node] += 1
    if not places:
        raise ValueError("a worker group needs at least one worker, but no bundle is used")
    return places


def _resolve(bundle_counts: Sequence[int], first: int, named: int, spanning: bool) -> tuple[int, int]:
    """Return (node, bundle on it) of bundle `named`, counted from the first bundle of node `first`."""
    node, bundle = first, named
    while spanning and node < len(bundle_counts) - 1 and bundle >= bundle_counts[node]:
        bundle -= bundle_counts[node]
        node += 1
    if not 0 <= bundle < bundle_counts[node]:
        raise ValueError(f"bundle {named} of node {first} does not exist; the node has {bundle_counts[first]} bundles")
    return node, bundle


def bundles_by_node(bundle_counts: Sequence[int], hosts: Sequence[str]) -> list[list[int]]:
    """Return the bundles of each node, for one placement group over all nodes.

    hosts: the Ray node of each bundle. The bundles of a node are on one host if possible. Nodes are assigned in
    descending order of their bundle counts: each takes the host with the fewest free bundles that are enough, or
    else the hosts with the most free bundles.
    """
    left: dict[str, list[int]] = {}
    for bundle, host in enumerate(hosts):
        left.setdefault(host, []).append(bundle)
    nodes: list[list[int]] = [[] for _ in bundle_counts]
    for node, count in sorted(enumerate(bundle_counts), key=lambda one: -one[1]):
        while len(nodes[node]) < count:
            needed = count - len(nodes[node])
            enough = [host for host in left if len(left[host]) >= needed]
            host = min(enough, key=lambda one: len(left[one])) if enough else max(left, key=lambda one: len(left[one]))
            nodes[node] += left[host][:needed]
            left[host] = left[host][needed:]
    return [sorted(bundles) for bundles in nodes]


def counted_by_host(places: Sequence[WorkerPlace], hosts: Sequence[str]) -> list[WorkerPlace]:
    """Return `places` with node ranks and local ranks that match the hosts of the workers.

    hosts: of each place. If the workers of every node are on one host, the node ranks stay. Otherwise hosts count as
    the nodes, in the order of their first rank.
    """
    of_node: dict[int, set[str]] = {}
    for place, host in zip(places, hosts, strict=True):
        of_node.setdefault(place.node, set()).add(host)
    if all(len(there) == 1 for there in of_node.values()):
        return list(places)
    ranks = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    on_host = dict.fromkeys(hosts, 0)
    counted = []
    for place, host in zip(places, hosts, strict=True):
        counted.append(replace(place, node_rank=ranks[host], local_rank=on_host[host]))
        on_host[host] += 1
    return counted


def rank_environment(
    place: WorkerPlace, endpoints: Sequence[tuple[str, int]], master: tuple[str, int]
) -> dict[str, str]:
    """Return the variables that torch.distributed and worker classes read. endpoints: a free (address, port) per
    rank."""
    values = (
        place.rank,
        place.local_rank,
        len(endpoints),
        place.node_rank,
        *master,
        json.dumps([address for address, _ in endpoints]),
        json.dumps([port for _, port in endpoints]),
    )
    return {name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=True)}
