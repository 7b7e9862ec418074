"""A driver on a cluster of two logical nodes; run by test_nodes.py in a process of its own. Prints what it found."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

import dataplane
from tests.ray.slow_start import allow_slow_starts
from workers import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, ResourcesNotReadyError, launch_service
from workers.groups.virtual_cluster import node_of_bundle

STARTER = RayWorkerBuilder("tests.ray.actors.Starter")
TIED = RayWorkerBuilder("tests.ray.actors.Tied")
Places = list[tuple[int, int, int]]
"""(number of the Ray node in order of the first rank there, NODE_RANK, LOCAL_RANK) of each worker."""


def places_of(workers: RayWorkerGroup) -> Places:
    found = ray.get(workers.run_all_workers_single_data("where"))
    nodes = list(dict.fromkeys(node for node, _, _ in found))
    return [(nodes.index(node), node_rank, local_rank) for node, node_rank, local_rank in found]


def one_group_per_node() -> dict[str, Any]:
    """All CPUs of both nodes are in bundles and used by workers, and there is space for what starts them."""
    with RayVirtualCluster([2, 2], use_gpus=False) as cluster, RayWorkerGroup(cluster, STARTER) as workers:
        return {"places": places_of(workers)}


def small_groups_per_node() -> dict[str, Any]:
    """A node has space for both bundles."""
    with RayVirtualCluster([1, 1], use_gpus=False) as cluster:
        nodes = [node_of_bundle(group, 0) for group in cluster.get_placement_groups()]
        return {"nodes": len(set(nodes))}


def unified() -> dict[str, Any]:
    """Ray spreads bundles 0, 1, 2, 3 over the nodes in turn, yet the bundles of a node of the cluster are together."""
    with RayVirtualCluster([2, 2], use_gpus=False) as cluster:
        cluster._init_placement_groups(use_unified_pg=True)
        with RayWorkerGroup(cluster, TIED, bundle_indices_list=[(1, [0, 1]), (0, [0, 1])]) as workers:
            told = ray.get(workers.run_all_workers_single_data("what_it_was_told"))
            ports = {entry["port"] for entry in workers.worker_metadata}
            return {
                "groups": len(cluster.get_placement_groups()),
                "places": places_of(workers),
                "told": [worker["bundle_indices"] for worker in told],
                "ports": len(ports),
            }


def unified_with_a_node_over_both() -> dict[str, Any]:
    """No Ray node has space for the first node of the cluster."""
    with RayVirtualCluster([3, 1], use_gpus=False, placement_group_strategy="PACK") as cluster:
        cluster._init_placement_groups(use_unified_pg=True)
        with RayWorkerGroup(cluster, TIED, bundle_indices_list=[(0, [0, 1, 2, 3])]) as workers:
            return {"places": sorted(places_of(workers)), "dp_size": workers.dp_size}


def shared_gpus() -> dict[str, Any]:
    with ExitStack() as stack:
        cluster = stack.enter_context(RayVirtualCluster([1], max_colocated_worker_groups=2, num_gpus_per_node=1))
        groups = [stack.enter_context(RayWorkerGroup(cluster, STARTER)) for _ in range(2)]
        shares = [ray.get(group.run_single_worker_single_data("resources", 0)) for group in groups]
        (bundles,) = (group.bundle_specs for group in cluster.get_placement_groups())
        return {"bundles": bundles, "shares": [[share["CPU"], share["GPU"]] for share in shares]}


def too_many_gpus() -> dict[str, Any]:
    cluster = RayVirtualCluster([1, 1, 1])
    cluster.ready_timeout_s = 0.5
    try:
        cluster.get_placement_groups()
    except ResourcesNotReadyError as error:
        return {"error": str(error)}
    return {}


def service() -> dict[str, Any]:
    with (
        launch_service({"capacity_bytes": 16 << 20}) as service,
        dataplane.build_data_plane_client(service.config, bootstrap=False) as client,
    ):
        client.register_partition("p", ["x"], 1, ["t"])
        meta = client.put_samples(["a"], "p", {"x": torch.ones(1)})
        read = client.get_batch(meta, ["x"])["x"].tolist()
        return {"read": read, "units": len({unit.name for unit in client.stats().units})}


SCENES: list[Callable[[], dict[str, Any]]] = [
    one_group_per_node,
    small_groups_per_node,
    unified,
    unified_with_a_node_over_both,
    shared_gpus,
    too_many_gpus,
    service,
]


def wait_until_free(**wanted: float) -> None:
    """What the scene before gave back is free a moment later; until then Ray may put a node's bundles elsewhere."""
    end = time.monotonic() + 120
    while any(ray.available_resources().get(name, 0) < amount for name, amount in wanted.items()):
        if time.monotonic() > end:
            groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
            raise TimeoutError(f"{wanted} was to be free, {ray.available_resources()} is; left are {groups}")
        time.sleep(0.05)


def main(directory: str) -> None:
    allow_slow_starts()
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": 1, "include_dashboard": False, "temp_dir": directory},
    )
    try:
        nodes.add_node(num_cpus=2, num_gpus=1)
        nodes.wait_for_nodes()
        ray.init(address=nodes.address, namespace="nodes", log_to_driver=False)
        found = {}
        for scene in SCENES:
            wait_until_free(CPU=4, GPU=2)
            found[scene.__name__] = scene()
        left = RayVirtualCluster([1], use_gpus=False)
        endpoint = left.get_master_address_and_port()
        workers = RayWorkerGroup(left, STARTER)
    finally:
        ray.shutdown()
        nodes.shutdown()
    left.release_endpoints([endpoint])
    found["after ray"] = {"ended": [workers.shutdown(), left.shutdown(), left.shutdown()], "ray": ray.is_initialized()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
