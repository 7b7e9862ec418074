"""RLinf's `rlinf.scheduler` over `workers`: what RLinf's own workers, channels and collectives import from it.

`Worker` and `Cluster` are those of `workers`, and have beside them what only RLinf's code uses. The switch puts this
package in the place of `rlinf.scheduler` (docs/compat.md); it can be imported by its own name, too.
"""

from __future__ import annotations

from typing import Any

from workers.rlinf.channel import Channel as Channel
from workers.rlinf.cluster import Cluster as Cluster
from workers.rlinf.collective import CollectiveGroupOptions as CollectiveGroupOptions
from workers.rlinf.hardware import AcceleratorType as AcceleratorType
from workers.rlinf.manager import Tracer as Tracer
from workers.rlinf.manager import WorkerInfo as WorkerInfo
from workers.rlinf.placement import ComponentPlacement as ComponentPlacement
from workers.rlinf.placement import FlexiblePlacementStrategy as FlexiblePlacementStrategy
from workers.rlinf.placement import NodePlacementStrategy as NodePlacementStrategy
from workers.rlinf.placement import PackedPlacementStrategy as PackedPlacementStrategy
from workers.rlinf.placement import PlacementStrategy as PlacementStrategy
from workers.rlinf.worker import Worker as Worker
from workers.rlinf.worker import WorkerAddress as WorkerAddress
from workers.rlinf.worker import WorkerGroupFuncResult as WorkerGroupFuncResult
from workers.rlinf.worker.routing import CommMapper as CommMapper
from workers.rlinf.worker.routing import build_recv_plan as build_recv_plan
from workers.rlinf.worker.routing import build_route_channel_key as build_route_channel_key
from workers.rlinf.worker.routing import build_send_key as build_send_key
from workers.rlinf.worker.routing import build_send_plan as build_send_plan
from workers.rlinf.worker.routing import decoupled_build_recv_plan as decoupled_build_recv_plan
from workers.rlinf.worker.routing import get_batch_size as get_batch_size
from workers.rlinf.worker.routing import get_group_world_size as get_group_world_size
from workers.rlinf.worker.routing import infer_batch_size as infer_batch_size
from workers.rlinf.worker.routing import merge_batches as merge_batches
from workers.rlinf.worker.routing import split_batch as split_batch
from workers.rlinf.worker.routing import split_channel_message as split_channel_message

_ROBOTS = "descriptions of robots in `cluster.node_groups` do not exist here"
_DEVICES = "accelerators are those that torch.cuda sees: use `Worker.torch_platform` and `Worker.torch_device_type`"
_QUEUES = "channels are not workers here: use `Channel`"

MISSING = {
    "AcceleratorUtil": _DEVICES,
    "HardwareInfo": _ROBOTS,
    "DOSW1HWInfo": _ROBOTS,
    "DualFrankaHWInfo": _ROBOTS,
    "FrankaHWInfo": _ROBOTS,
    "GimArmHWInfo": _ROBOTS,
    "Turtle2HWInfo": _ROBOTS,
    "ChannelWorker": _QUEUES,
    "WeightedItem": _QUEUES,
    "ClusterConfig": "pass the configuration to `Cluster(cluster_cfg=...)`",
}
"""What `rlinf.scheduler` exports and this package lacks, and what to do."""

__all__ = [
    "AcceleratorType",
    "Channel",
    "Cluster",
    "CollectiveGroupOptions",
    "CommMapper",
    "ComponentPlacement",
    "FlexiblePlacementStrategy",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "PlacementStrategy",
    "Tracer",
    "Worker",
    "WorkerAddress",
    "WorkerGroupFuncResult",
    "WorkerInfo",
    "build_recv_plan",
    "build_route_channel_key",
    "build_send_key",
    "build_send_plan",
    "decoupled_build_recv_plan",
    "get_batch_size",
    "get_group_world_size",
    "infer_batch_size",
    "merge_batches",
    "split_batch",
    "split_channel_message",
]


def __getattr__(name: str) -> Any:
    """ImportError for what is missing, AttributeError for what is unknown."""
    if name in MISSING:
        raise ImportError(
            f"cannot import {name!r} from rlinf.scheduler, which {__name__} replaces: {MISSING[name]}. "
            "Code that needs it runs on RLinf's own scheduler, without TQ_REPLACE."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
