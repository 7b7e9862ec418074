"""A driver with two logical nodes of two accelerators each; run by test_worker_group_nodes.py in a process of its own.
Prints what it found. The accelerators are Ray's count only: nothing here uses them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster as RayCluster

from tests.ray.actors import Talker
from tests.ray.slow_start import allow_slow_starts
from workers import Cluster

SEEN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "CUDA_VISIBLE_DEVICES")


def main(directory: str) -> None:
    allow_slow_starts()
    node = {"num_cpus": 2, "num_gpus": 2}
    nodes = RayCluster(initialize_head=True, head_node_args={**node, "include_dashboard": False, "temp_dir": directory})
    try:
        nodes.add_node(**node)
        ray.init(address=nodes.address, namespace="nodes", log_to_driver=False)
        with Cluster(num_nodes=2) as cluster:
            found: dict[str, object] = {"counts": [cluster.num_nodes, cluster.num_accelerators]}
            group = Talker.create_group().launch(cluster, name="talk", disable_distributed_log=True)
            found["places"] = [" ".join(str(env[name]) for name in SEEN) for env in group.place().wait()]
            found["attributes"] = [seen[3:6] for seen in group.attributes().wait()]
            group.execute_on(0).log("not for the driver").wait()
            first = group.execute_on(0).swap("a", 3)
            found["swapped"] = [*group.execute_on(3).swap("b", 0).wait(), *first.wait()]
            channel = cluster.create_channel("items", distributed=True)
            channel.put("here", key="a")
            found["got"] = group.execute_on(3).consume_key("items", "a").wait()
            logs = {log.resolve() for log in Path(directory).glob("session_*/logs/group-talk*.log")}
            lines = [line for log in logs for line in log.read_text().splitlines(keepends=True)]
            found["logs"] = [line[-19:] for line in lines if "not for the driver" in line]  # beside warnings, if any
            group.fail("nobody hears of it")
        print(json.dumps(found))
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
