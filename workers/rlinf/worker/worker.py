"""`rlinf.scheduler.worker.worker`."""

from __future__ import annotations

import os
from typing import Any

from dataplane.core import devices
from workers.directory import DirectoryClient
from workers.directory.address import WorkerAddress as WorkerAddress
from workers.groups.worker import Worker as PlainWorker
from workers.rlinf.cluster import load_user_extension_module
from workers.rlinf.hardware import BY_DEVICE_TYPE, AcceleratorType
from workers.rlinf.manager.worker_manager import WorkerInfo


class _AcceleratorTypeAttribute:
    """`Worker.accelerator_type`, a class attribute that is computed on access: at class creation it could initialize
    the accelerator."""

    def __get__(self, instance: object, owner: type) -> AcceleratorType:
        return BY_DEVICE_TYPE.get(devices.device_type() or "", AcceleratorType.NO_ACCEL)


class Worker(PlainWorker):
    """`workers.Worker` with additional members that RLinf's code uses. Each worker process imports the module that
    RLINF_EXT_MODULE names, and calls its `register()`."""

    accelerator_type: Any = _AcceleratorTypeAttribute()

    def __init__(
        self, parent_address: WorkerAddress | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        super().__init__(parent_address, world_size, rank)
        load_user_extension_module(self.logger)

    @property
    def has_accelerator(self) -> bool:
        """Whether the worker's process sees an accelerator."""
        kind: AcceleratorType = self.accelerator_type
        return kind is not AcceleratorType.NO_ACCEL

    @property
    def hardware_infos(self) -> list[Any]:
        """Always empty, because descriptions of robots are not supported."""
        return []

    @property
    def worker_info(self) -> WorkerInfo:
        """The worker's rank, node and accelerators."""
        # The variable can name a device by its UUID instead of its index; such a device is left out.
        visible = [name for name in devices.visible_devices() if name.isdigit()]
        return WorkerInfo(
            address=self.worker_address,
            rank=self._rank,
            group_world_size=self._world_size,
            cluster_node_rank=self._cluster_node_rank,
            accelerator_type=self.accelerator_type,
            accelerator_model=devices.platform().get_device_name() if self.has_accelerator else "",
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
        """The accumulated seconds of all `worker_timer`s, by tag. Callers may modify the dict."""
        return self._timers

    def get_name(self) -> str:
        """Return the worker's address as text."""
        return self.worker_address.get_name()

    def get_parent_rank(self) -> int:
        """Return the rank of the worker that started this one, or 0 if a group's launch started it."""
        path = self.worker_address.rank_path
        return path[-2] if len(path) > 1 else 0

    def pop_execution_time(self, tag: str) -> float:
        """Return the seconds of `worker_timer`s with that tag since the last call. ValueError if none ended since."""
        if tag not in self._timers:
            raise ValueError(f"no timer {tag!r} has ended in worker {self.get_name()} since the last call")
        return self._timers.pop(tag)

    def start_profile(self, step_idx: int) -> None:
        """Log that profiling is not supported."""
        self._logger.warning("step %d is not profiled: profiling of RLinf's scheduler is not supported", step_idx)

    def stop_profile(self) -> None:
        """Do nothing."""
