"""The worker side of the data plane: policy workers on torch.distributed, worker groups and the service on Ray.

The import registers addresses "actor:NAME[@NAMESPACE]" with `dataplane`, and the Ray job with channels. It has no other
effects. Names are imported on first use, so that the controller's actor never imports torch, and only what starts
actors needs Ray: groups, and the service on Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dataplane.core.addresses import register_resolver
from workers.channels.discovery import register_job

if TYPE_CHECKING:
    from workers.channels import Channel as Channel
    from workers.directory.address import WorkerAddress as WorkerAddress
    from workers.groups.cluster import Cluster as Cluster
    from workers.groups.cluster import ClusterResource as ClusterResource
    from workers.groups.ray_worker_builder import RayWorkerBuilder as RayWorkerBuilder
    from workers.groups.ray_worker_group import RayWorkerGroup as RayWorkerGroup
    from workers.groups.started_group import MultiWorkerFuture as MultiWorkerFuture
    from workers.groups.started_group import WorkerStartError as WorkerStartError
    from workers.groups.virtual_cluster import RayVirtualCluster as RayVirtualCluster
    from workers.groups.virtual_cluster import ResourcesNotReadyError as ResourcesNotReadyError
    from workers.groups.worker import Worker as Worker
    from workers.groups.worker_group import WorkerGroup as WorkerGroup
    from workers.messages import AsyncWork as AsyncWork
    from workers.messages import CollectiveGroupOptions as CollectiveGroupOptions
    from workers.placement.sharding import REPLICATED_AXES as REPLICATED_AXES
    from workers.placement.sharding import NamedSharding as NamedSharding
    from workers.placement.strategies import FlexiblePlacementStrategy as FlexiblePlacementStrategy
    from workers.placement.strategies import NodePlacementStrategy as NodePlacementStrategy
    from workers.placement.strategies import PackedPlacementStrategy as PackedPlacementStrategy
    from workers.service import LaunchedService as LaunchedService
    from workers.service import ServiceNode as ServiceNode
    from workers.service import ServiceStartError as ServiceStartError
    from workers.service import ServiceUnit as ServiceUnit
    from workers.service import launch_service as launch_service
    from workers.training.mixin import PolicyWorker as PolicyWorker
    from workers.training.mixin import TQWorkerMixin as TQWorkerMixin
    from workers.training.policy import TQPolicy as TQPolicy
    from workers.training.replica_group import FetchPolicy as FetchPolicy
    from workers.training.replica_group import ReplicaGroupError as ReplicaGroupError
    from workers.training.replica_group import ReplicaLostError as ReplicaLostError

_HOME = {
    "AsyncWork": "workers.messages",
    "Channel": "workers.channels",
    "Cluster": "workers.groups.cluster",
    "ClusterResource": "workers.groups.cluster",
    "CollectiveGroupOptions": "workers.messages",
    "FetchPolicy": "workers.training.replica_group",
    "FlexiblePlacementStrategy": "workers.placement.strategies",
    "LaunchedService": "workers.service",
    "MultiWorkerFuture": "workers.groups.started_group",
    "NamedSharding": "workers.placement.sharding",
    "NodePlacementStrategy": "workers.placement.strategies",
    "PackedPlacementStrategy": "workers.placement.strategies",
    "PolicyWorker": "workers.training.mixin",
    "REPLICATED_AXES": "workers.placement.sharding",
    "RayVirtualCluster": "workers.groups.virtual_cluster",
    "RayWorkerBuilder": "workers.groups.ray_worker_builder",
    "RayWorkerGroup": "workers.groups.ray_worker_group",
    "ReplicaGroupError": "workers.training.replica_group",
    "ReplicaLostError": "workers.training.replica_group",
    "ResourcesNotReadyError": "workers.groups.virtual_cluster",
    "ServiceNode": "workers.service",
    "ServiceStartError": "workers.service",
    "ServiceUnit": "workers.service",
    "TQPolicy": "workers.training.policy",
    "TQWorkerMixin": "workers.training.mixin",
    "Worker": "workers.groups.worker",
    "WorkerAddress": "workers.directory.address",
    "WorkerGroup": "workers.groups.worker_group",
    "WorkerStartError": "workers.groups.started_group",
    "launch_service": "workers.service",
}

__all__ = sorted(_HOME)

register_resolver("actor", lambda name: str(importlib.import_module("workers.service.service").resolve_actor(name)))
register_job(lambda: str(importlib.import_module("workers.groups.cluster").job_directory()))


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, and keep it as an attribute of this module."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
