"""`rlinf.scheduler.worker.worker`."""

from __future__ import annotations

import os
from typing import Any

import torch

from workers.directory import DirectoryClient
from workers.directory.address import WorkerAddress as WorkerAddress
from workers.groups.worker import Worker as PlainWorker
from workers.rlinf.cluster import load_user_extension_module
from workers.rlinf.hardware import AcceleratorType
from workers.rlinf.manager.worker_manager import WorkerInfo


class _Kind:
    """A class attribute that is looked up when asked for: asking CUDA when the class is made would start it."""

    def __get__(self, instance: object, owner: type) -> AcceleratorType:
        return AcceleratorType.NV_GPU if torch.cuda.is_available() else AcceleratorType.NO_ACCEL


class Worker(PlainWorker):
    """`workers.Worker`, and beside it what RLinf's code uses. The module that RLINF_EXT_MODULE names is imported, and
    its `register()` called, in each worker's process."""

    accelerator_type: Any = _Kind()

    def __init__(
        self, parent_address: WorkerAddress | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        super().__init__(parent_address, world_size, rank)
        load_user_extension_module(self.logger)

    @property
    def has_accelerator(self) -> bool:
        """Whether it sees one."""
        kind: AcceleratorType = self.accelerator_type
        return kind is not AcceleratorType.NO_ACCEL

    @property
    def hardware_infos(self) -> list[Any]:
        """Always empty: there are no descriptions of robots."""
        return []

    @property
    def worker_info(self) -> WorkerInfo:
        """Its place."""
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.isdigit()]
        return WorkerInfo(
            address=self.worker_address,
            rank=self._rank,
            group_world_size=self._world_size,
            cluster_node_rank=self._cluster_node_rank,
            accelerator_type=self.accelerator_type,
            accelerator_model=torch.cuda.get_device_name() if self.has_accelerator else "",
            accelerator_rank=self._local_accelerator_rank,
            node_ip=os.environ["TQ_HOST"],
            node_port=int(os.environ["MASTER_PORT"]),
            available_accelerators=[int(name) for name in visible],
        )

    @property
    def manager_proxy(self) -> DirectoryClient:
        """The job's directory, for `get_group_world_size`."""
        return self._directory

    _manager_proxy = manager_proxy

    @property
    def _timer_metrics(self) -> dict[str, float]:
        """Seconds by tag of all `worker_timer`s so far; may be changed."""
        return self._timers

    def get_name(self) -> str:
        """Its address as text."""
        return self.worker_address.get_name()

    def get_parent_rank(self) -> int:
        """The rank of the worker that started this one; 0 for one that a group's launch started."""
        path = self.worker_address.rank_path
        return path[-2] if len(path) > 1 else 0

    def pop_execution_time(self, tag: str) -> float:
        """Seconds of `worker_timer`s of that tag since this was last asked; ValueError where there was none."""
        if tag not in self._timers:
            raise ValueError(f"no timer {tag!r} has ended in worker {self.get_name()} since it was last asked for")
        return self._timers.pop(tag)

    def start_profile(self, step_idx: int) -> None:
        """Log that there are no profiles here."""
        self._logger.warning("step %d is not profiled: profiles of RLinf's scheduler do not exist here", step_idx)

    def stop_profile(self) -> None:
        """Nothing."""
