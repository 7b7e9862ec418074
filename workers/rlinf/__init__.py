"""RLinf's `rlinf.scheduler`, implemented on `workers`: the names that RLinf's code imports from it.

`Worker` and `Cluster` extend those of `workers` by members that only RLinf's code uses. The switch replaces
`rlinf.scheduler` by this package (docs/compat.md, docs/rlinf.md). It can also be imported as `workers.rlinf`.
"""

from __future__ import annotations

import sys
from typing import Any

from workers.rlinf import cluster, routing, worker
from workers.rlinf.cluster import Cluster as Cluster
from workers.rlinf.placement import ComponentPlacement as ComponentPlacement
from workers.rlinf.placement import FlexiblePlacementStrategy as FlexiblePlacementStrategy
from workers.rlinf.placement import NodePlacementStrategy as NodePlacementStrategy
from workers.rlinf.placement import PackedPlacementStrategy as PackedPlacementStrategy
from workers.rlinf.placement import PlacementStrategy as PlacementStrategy
from workers.rlinf.routing import Channel as Channel
from workers.rlinf.routing import CollectiveGroupOptions as CollectiveGroupOptions
from workers.rlinf.routing import CommMapper as CommMapper
from workers.rlinf.routing import build_recv_plan as build_recv_plan
from workers.rlinf.routing import build_route_channel_key as build_route_channel_key
from workers.rlinf.routing import build_send_key as build_send_key
from workers.rlinf.routing import build_send_plan as build_send_plan
from workers.rlinf.routing import decoupled_build_recv_plan as decoupled_build_recv_plan
from workers.rlinf.routing import get_batch_size as get_batch_size
from workers.rlinf.routing import get_group_world_size as get_group_world_size
from workers.rlinf.routing import infer_batch_size as infer_batch_size
from workers.rlinf.routing import merge_batches as merge_batches
from workers.rlinf.routing import split_batch as split_batch
from workers.rlinf.routing import split_channel_message as split_channel_message
from workers.rlinf.worker import AcceleratorType as AcceleratorType
from workers.rlinf.worker import Tracer as Tracer
from workers.rlinf.worker import Worker as Worker
from workers.rlinf.worker import WorkerAddress as WorkerAddress
from workers.rlinf.worker import WorkerGroupFuncResult as WorkerGroupFuncResult
from workers.rlinf.worker import WorkerInfo as WorkerInfo

_MODULES = {
    "channel": routing,
    "collective": routing,
    "dynamic_scheduler": cluster,
    "dynamic_scheduler.manager": cluster,
    "dynamic_scheduler.scheduler_worker": cluster,
    "dynamic_scheduler.utils": cluster,
    "hardware": worker,
    "manager": worker,
    "manager.worker_manager": worker,
    "worker.routing": routing,
    "worker.worker": worker,
    "worker.worker_group": worker,
}
"""Other submodules of `rlinf.scheduler` that RLinf's code imports, with the module that has their names."""

for _path, _module in _MODULES.items():
    _parent, _, _name = f"{__name__}.{_path}".rpartition(".")
    sys.modules[f"{_parent}.{_name}"] = _module
    setattr(sys.modules[_parent], _name, _module)
    vars(_module)["__path__"] = []  # so that Python imports the submodules of these modules

_ROBOTS = "descriptions of robots in `cluster.node_groups` are not supported"
_DEVICES = "the accelerator is the one that torch names: use `Worker.torch_platform` and `Worker.torch_device_type`"
_QUEUES = "channels are not implemented by workers here: use `Channel`"

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
"""Names that `rlinf.scheduler` exports and this package does not, with the alternative."""

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
    """Raise ImportError for a name of `rlinf.scheduler` that this package lacks, AttributeError for other names."""
    if name in MISSING:
        raise ImportError(
            f"cannot import {name!r} from rlinf.scheduler, which {__name__} replaces: {MISSING[name]}. "
            "To use it, run on RLinf's own scheduler, without TQ_REPLACE."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
