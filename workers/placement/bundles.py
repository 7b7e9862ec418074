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
"""The variables that `rank_environment` sets, in the order of its values. No other setting overrides them."""
TiedBundles = tuple[int, list[int]]
"""(node, bundles on it) of one tied group: workers that process the same data."""


@dataclass(frozen=True, kw_only=True)
class WorkerLocation:
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
        counts = list(bundle_counts)
    elif isinstance(workers_per_node, int):
        counts = [workers_per_node] * len(bundle_counts)
    else:
        counts = list(workers_per_node)
    if len(counts) != len(bundle_counts):
        raise ValueError(
            f"workers_per_node has {len(counts)} numbers, but the cluster has {len(bundle_counts)} nodes; pass one each"
        )
    for node, (count, bundles) in enumerate(zip(counts, bundle_counts, strict=True)):
        if not 0 <= count <= bundles:
            raise ValueError(
                f"workers_per_node requests {count} workers on node {node}; expected 0 to {bundles}, its number of "
                "bundles"
            )
    return [(node, [bundle]) for node, count in enumerate(counts) for bundle in range(count)]


def place_workers(
    bundle_counts: Sequence[int], tied_groups: Sequence[TiedBundles], *, spanning: bool = False
) -> list[WorkerLocation]:
    """Return the location of a worker for every bundle of `tied_groups`, with ranks in their order.

    spanning: bundle numbers of a group may continue from its node into the next ones: with 2 bundles on each node,
    (0, [1, 2]) is the second bundle of node 0 and the first of node 1. ValueError if there is no bundle, for an
    unknown node or bundle, and for an empty tied group.
    """
    locations: list[WorkerLocation] = []
    workers_on_node = [0] * len(bundle_counts)
    for tied_group, (first_node, bundles) in enumerate(tied_groups):
        if not 0 <= first_node < len(bundle_counts):
            raise ValueError(
                f"bundle_indices_list names node {first_node}; the cluster has {len(bundle_counts)} nodes, counted "
                "from 0"
            )
        if not bundles:
            raise ValueError(f"entry {tied_group} of bundle_indices_list has no bundles; name at least one")
        for tied_rank, named_bundle in enumerate(bundles):
            node, bundle = _find_bundle(bundle_counts, first_node, named_bundle, spanning)
            locations.append(
                WorkerLocation(
                    rank=len(locations),
                    node=node,
                    bundle=bundle,
                    node_rank=node,
                    local_rank=workers_on_node[node],
                    tied_group=tied_group,
                    tied_rank=tied_rank,
                    bundle_indices=(first_node, list(bundles)) if tied_rank == 0 else None,
                )
            )
            workers_on_node[node] += 1
    if not locations:
        raise ValueError(
            "a worker group needs at least one worker, but workers_per_node or bundle_indices_list selects no bundle"
        )
    return locations


def _find_bundle(bundle_counts: Sequence[int], first_node: int, named_bundle: int, spanning: bool) -> tuple[int, int]:
    """Return (node, bundle on it) of bundle `named_bundle`, counted from the first bundle of node `first_node`.
    ValueError if it does not exist. spanning: see `place_workers`."""
    node = first_node
    bundle = named_bundle
    # The last node is not passed, so a number beyond all bundles is rejected below.
    while spanning and node < len(bundle_counts) - 1 and bundle >= bundle_counts[node]:
        bundle -= bundle_counts[node]
        node += 1
    if not 0 <= bundle < bundle_counts[node]:
        counted = "the node has"
        count = bundle_counts[first_node]
        if spanning and first_node < len(bundle_counts) - 1:
            counted = "this node and the next ones together have"
            count = sum(bundle_counts[first_node:])
        raise ValueError(
            f"bundle {named_bundle} of node {first_node} does not exist; {counted} {count}, counted from 0"
        )
    return node, bundle


def bundles_by_node(bundle_counts: Sequence[int], hosts: Sequence[str]) -> list[list[int]]:
    """Divide the bundles of one placement group among the nodes of a cluster. Return the bundles of each node,
    ascending.

    bundle_counts: number of bundles of each node; their sum is the number of bundles. hosts: the host of each bundle,
    which is the Ray node on which Ray reserved it. The bundles of a node are on one host if possible. Nodes are
    assigned in descending order of their bundle counts: each takes the host with the fewest free bundles that are
    enough, or else the hosts with the most free bundles.
    """
    free_bundles: dict[str, list[int]] = {}
    for bundle, host in enumerate(hosts):
        free_bundles.setdefault(host, []).append(bundle)
    bundles_of: list[list[int]] = [[] for _ in bundle_counts]  # by node
    for node, count in sorted(enumerate(bundle_counts), key=lambda node_and_count: -node_and_count[1]):
        while len(bundles_of[node]) < count:
            needed = count - len(bundles_of[node])
            sufficient_hosts = [host for host in free_bundles if len(free_bundles[host]) >= needed]
            if sufficient_hosts:
                host = min(sufficient_hosts, key=lambda name: len(free_bundles[name]))
            else:
                host = max(free_bundles, key=lambda name: len(free_bundles[name]))
            bundles_of[node] += free_bundles[host][:needed]
            free_bundles[host] = free_bundles[host][needed:]
    return [sorted(bundles) for bundles in bundles_of]


def counted_by_host(locations: Sequence[WorkerLocation], hosts: Sequence[str]) -> list[WorkerLocation]:
    """Return `locations`, with node ranks and local ranks counted by host if a node's workers are on several hosts.

    hosts: the Ray node of each place. Then hosts count as the nodes, in the order of their first rank. Otherwise the
    places are returned unchanged.
    """
    hosts_of_node: dict[int, set[str]] = {}
    for location, host in zip(locations, hosts, strict=True):
        hosts_of_node.setdefault(location.node, set()).add(host)
    if all(len(node_hosts) == 1 for node_hosts in hosts_of_node.values()):
        return list(locations)
    node_ranks = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    workers_on_host = dict.fromkeys(hosts, 0)
    recounted = []
    for location, host in zip(locations, hosts, strict=True):
        recounted.append(replace(location, node_rank=node_ranks[host], local_rank=workers_on_host[host]))
        workers_on_host[host] += 1
    return recounted


def rank_environment(
    location: WorkerLocation, endpoints: Sequence[tuple[str, int]], master: tuple[str, int]
) -> dict[str, str]:
    """Return the variables that torch.distributed and worker classes read. endpoints: a free (address, port) per
    rank; master: (address, port) of MASTER_ADDR and MASTER_PORT."""
    values = (  # in the order of `RANK_VARIABLES`
        location.rank,
        location.local_rank,
        len(endpoints),
        location.node_rank,
        *master,
        json.dumps([address for address, _ in endpoints]),
        json.dumps([port for _, port in endpoints]),
    )
    return {name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=True)}
