"""A driver on a cluster of two logical nodes; run by test_nodes.py in a process of its own. Prints what it found."""

from __future__ import annotations

import json
import sys

import ray
import torch
from ray.cluster_utils import Cluster

import dataplane
from workers import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, launch_service
from workers.cluster import node_of_bundle


def nodes_of_groups(unified: bool) -> list[int]:
    """How many nodes each placement group of a cluster of 2 + 1 bundles is on, and the ranks' environment."""
    with RayVirtualCluster([2, 1], use_gpus=False) as cluster:
        cluster._init_placement_groups(use_unified_pg=unified)
        groups = cluster.get_placement_groups()
        with RayWorkerGroup(cluster, RayWorkerBuilder("tests.ray.actors.Echo")) as workers:
            seen = ray.get(workers.run_all_workers_single_data("environment", "NODE_RANK", "LOCAL_RANK"))
        assert [(env["NODE_RANK"], env["LOCAL_RANK"]) for env in seen] == [("0", "0"), ("0", "1"), ("1", "0")]
        return [len({node_of_bundle(group, bundle) for bundle in range(group.bundle_count)}) for group in groups]


def main(directory: str) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "temp_dir": directory},
    )
    try:
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="nodes", log_to_driver=False)
        found = {"per node": nodes_of_groups(False), "unified": nodes_of_groups(True)}
        with (
            launch_service({"capacity_bytes": 16 << 20}) as service,
            dataplane.build_data_plane_client(service.config, bootstrap=False) as client,
        ):
            client.register_partition("p", ["x"], 1, ["t"])
            meta = client.put_samples(["a"], "p", {"x": torch.ones(1)})
            found["read"] = client.get_batch(meta, ["x"])["x"].tolist()
            found["units"] = len({unit.name for unit in client.stats().units})
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
