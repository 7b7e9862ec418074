"""The worker side of the data plane: policy workers on torch.distributed, worker groups and the service on Ray.

Importing it makes addresses "actor:NAME[@NAMESPACE]" known to `dataplane`, the services that processes of a Ray job
start for each other to `dataplane.compat`, and the Ray job itself to channels; it changes nothing else. Names are
loaded when first used, so that the controller's actor never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dataplane.compat.rendezvous import register_rendezvous
from dataplane.control.resolve import register_resolver
from workers.channel.jobs import register_job
from workers.resolver import SCHEME, resolve_actor

if TYPE_CHECKING:
    from workers.actors import WorkerStartError as WorkerStartError
    from workers.address import WorkerAddress as WorkerAddress
    from workers.broadcast import FetchPolicy as FetchPolicy
    from workers.builder import RayWorkerBuilder as RayWorkerBuilder
    from workers.channel import Channel as Channel
    from workers.cluster import RayVirtualCluster as RayVirtualCluster
    from workers.cluster import ResourcesNotReadyError as ResourcesNotReadyError
    from workers.group import RayWorkerGroup as RayWorkerGroup
    from workers.messages import AsyncWork as AsyncWork
    from workers.messages import CollectiveGroupOptions as CollectiveGroupOptions
    from workers.mixin import PolicyWorker as PolicyWorker
    from workers.mixin import TQWorkerMixin as TQWorkerMixin
    from workers.policy import TQPolicy as TQPolicy
    from workers.ranks import REPLICATED_AXES as REPLICATED_AXES
    from workers.resources import Cluster as Cluster
    from workers.resources import ClusterResource as ClusterResource
    from workers.results import MultiWorkerFuture as MultiWorkerFuture
    from workers.service import LaunchedService as LaunchedService
    from workers.service import RayNode as RayNode
    from workers.service import ServiceNode as ServiceNode
    from workers.service import ServiceStartError as ServiceStartError
    from workers.service import ServiceUnit as ServiceUnit
    from workers.service import launch_service as launch_service
    from workers.sharding import NamedSharding as NamedSharding
    from workers.siblings import ReplicaGroupError as ReplicaGroupError
    from workers.siblings import ReplicaLostError as ReplicaLostError
    from workers.strategies import FlexiblePlacementStrategy as FlexiblePlacementStrategy
    from workers.strategies import NodePlacementStrategy as NodePlacementStrategy
    from workers.strategies import PackedPlacementStrategy as PackedPlacementStrategy
    from workers.worker import Worker as Worker
    from workers.worker_group import WorkerGroup as WorkerGroup

_HOME = {
    "AsyncWork": "workers.messages",
    "Channel": "workers.channel",
    "Cluster": "workers.resources",
    "ClusterResource": "workers.resources",
    "CollectiveGroupOptions": "workers.messages",
    "FetchPolicy": "workers.broadcast",
    "FlexiblePlacementStrategy": "workers.strategies",
    "LaunchedService": "workers.service",
    "MultiWorkerFuture": "workers.results",
    "NamedSharding": "workers.sharding",
    "NodePlacementStrategy": "workers.strategies",
    "PackedPlacementStrategy": "workers.strategies",
    "PolicyWorker": "workers.mixin",
    "REPLICATED_AXES": "workers.ranks",
    "RayNode": "workers.service",
    "RayVirtualCluster": "workers.cluster",
    "RayWorkerBuilder": "workers.builder",
    "RayWorkerGroup": "workers.group",
    "ReplicaGroupError": "workers.siblings",
    "ReplicaLostError": "workers.siblings",
    "ResourcesNotReadyError": "workers.cluster",
    "ServiceNode": "workers.service",
    "ServiceStartError": "workers.service",
    "ServiceUnit": "workers.service",
    "TQPolicy": "workers.policy",
    "TQWorkerMixin": "workers.mixin",
    "Worker": "workers.worker",
    "WorkerAddress": "workers.address",
    "WorkerGroup": "workers.worker_group",
    "WorkerStartError": "workers.actors",
    "launch_service": "workers.service",
}

__all__ = sorted(_HOME)

register_resolver(SCHEME, resolve_actor)
register_job(lambda: str(importlib.import_module("workers.resources").job_directory()))
register_rendezvous("ray", lambda: importlib.import_module("workers.rendezvous").RayRendezvous())


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
