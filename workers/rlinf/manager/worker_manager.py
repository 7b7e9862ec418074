"""`rlinf.scheduler.manager.worker_manager`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workers.directory.address import WorkerAddress as WorkerAddress
from workers.rlinf.hardware import AcceleratorType


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """A worker's rank, node and accelerators. accelerator_rank: -1 without an accelerator. node_port: MASTER_PORT of
    its group. available_accelerators: those visible to it. hardware_infos: always empty, because descriptions of robots
    are not supported."""

    address: WorkerAddress
    rank: int
    group_world_size: int
    cluster_node_rank: int
    accelerator_type: AcceleratorType
    accelerator_model: str
    accelerator_rank: int
    node_ip: str
    node_port: int
    available_accelerators: list[int]
    hardware_infos: list[Any] = field(default_factory=list)
