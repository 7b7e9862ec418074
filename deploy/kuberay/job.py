"""The program of the RayJob: a data plane as Ray actors, rows from an actor on every node, a driver that reads them.

Your own driver does the same: it calls `launch_service` first, then starts workers that attach with `service.config`.
"""

from __future__ import annotations

import os

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane import DataPlaneClient, DataPlaneConfig, build_data_plane_client
from workers import launch_service

ROWS = 16
START_S = 300.0
PARTITION = "train"


def attached(config: DataPlaneConfig) -> DataPlaneClient:
    return build_data_plane_client(config, bootstrap=False)


@ray.remote(num_cpus=0)
def roll_out(config: DataPlaneConfig, node: int) -> int:
    """Put rows into the storage unit of this actor's node. Return their number."""
    with attached(config) as client:
        ids = [f"{node}-{row}" for row in range(ROWS)]
        client.put_samples(ids, PARTITION, {"input_ids": [torch.arange(1 + row) for row in range(ROWS)]})
    return len(ids)


def main() -> None:
    ray.init()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    capacity = int(os.environ.get("TQ_CAPACITY_BYTES", 64 << 20))
    launched = launch_service(capacity_bytes=capacity, http_port=0, timeout_s=START_S)
    with launched as service, attached(service.config) as client:
        client.register_partition(PARTITION, ["input_ids"], num_samples=len(nodes) * ROWS, consumer_tasks=["policy"])
        places = [NodeAffinitySchedulingStrategy(node_id=node, soft=False) for node in nodes]
        put = [
            roll_out.options(scheduling_strategy=place).remote(service.config, number)
            for number, place in enumerate(places)
        ]
        taken = 0
        while taken < len(nodes) * ROWS:
            meta = client.claim_meta(PARTITION, "policy", ["input_ids"], batch_size=ROWS)
            batch = client.get_batch(meta, pad_value_dict={"input_ids": 0})
            taken += len(batch["input_ids"])
        print(f"{sum(ray.get(put))} rows put on {len(nodes)} nodes, {taken} taken")


if __name__ == "__main__":
    main()
